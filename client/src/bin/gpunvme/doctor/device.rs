//! Finds out what a DEVICE of the command line is, and what uses it.

use super::pci::{self, Function};
use super::sysfs::Tree;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;

/// What a DEVICE turned out to be.
#[derive(Debug, PartialEq, Eq)]
pub enum Device {
    /// A PCI function, by its address.
    Function(String),
    /// Something that no PCI function stands for, in words.
    Other(String),
}

/// Finds what stands behind a DEVICE.
///
/// # Errors
/// There is nothing of that name, or it is not one device; in words.
pub fn find(tree: &Tree, name: &str) -> Result<Device, String> {
    if name.starts_with("sim:") {
        return Ok(Device::Other("a software controller in the process".to_owned()));
    }
    let first = name.split(',').next().unwrap_or_default();
    let address = first.strip_prefix("vfio:").unwrap_or(first).to_ascii_lowercase();
    for address in [address.clone(), format!("0000:{address}")] {
        if pci::is_address(&address) {
            return match tree.has(&format!("sys/bus/pci/devices/{address}")) {
                true => Ok(Device::Function(address)),
                false => Err(format!("there is no PCI device {address}; lspci -D lists them")),
            };
        }
    }
    if first.starts_with("vfio:") {
        return Err(format!("{first}: must be vfio: and a PCI address, such as vfio:0000:01:00.0"));
    }
    let place = tree.path(Path::new(name)).canonicalize().map_err(|error| format!("{name}: {error}"))?;
    let kind = place.metadata().map_err(|error| format!("{name}: {error}"))?.file_type();
    let node = place.file_name().unwrap_or_default().to_string_lossy().into_owned();
    if kind.is_dir() {
        return Err(format!("{name} is a folder; gpunvme info tells of what is mounted there"));
    }
    for class in ["block", "nvme", "nvme-generic"] {
        if let Some(place) = tree.resolve(&format!("sys/class/{class}/{node}")) {
            return behind(tree, name, &place);
        }
    }
    if kind.is_block_device() || kind.is_char_device() {
        return Err(format!("{name} is no disk that sysfs knows; `lsblk` lists those there are"));
    }
    if !kind.is_file() {
        return Err(format!("{name} is neither a disk nor an image file"));
    }
    Ok(Device::Other("an image file".to_owned()))
}

/// What stands behind a place in sysfs.
fn behind(tree: &Tree, name: &str, place: &str) -> Result<Device, String> {
    if let Some(address) = place.split('/').rfind(|part| pci::is_address(part)) {
        return Ok(Device::Function(address.to_owned()));
    }
    // A namespace of a subsystem that several controllers may share (multipath); a partition is
    // one level lower.
    for folder in [format!("{place}/.."), format!("{place}/../..")] {
        let mut controllers: Vec<String> = Vec::new();
        for link in tree.names(&folder).iter().filter(|link| tree.has(&format!("{folder}/{link}/cntlid"))) {
            let place = tree.resolve(&format!("{folder}/{link}")).unwrap_or_default();
            controllers.extend(place.split('/').rfind(|part| pci::is_address(part)).map(str::to_owned));
        }
        match &controllers[..] {
            [] => {}
            [address] => return Ok(Device::Function(address.clone())),
            several => return Err(format!("{name} is reached by several controllers ({}): name one", several.join(", "))),
        }
    }
    let kind = match place.rsplit('/').next().unwrap_or_default() {
        node if node.starts_with("loop") => "a loop device",
        node if node.starts_with("dm-") || node.starts_with("md") => "a device made of others (device mapper or RAID)",
        _ => "a device that is not on PCI",
    };
    Ok(Device::Other(kind.to_owned()))
}

/// A use in words.
const ROOT: &str = "holds the root filesystem";

/// A disk or partition of a function.
pub struct Disk {
    /// Its name in /dev.
    pub name: String,
    pub bytes: u64,
    /// What uses it, in words: `mounted on /data`.
    pub uses: Vec<String>,
}

impl Disk {
    /// The system runs from it.
    pub fn is_of_the_system(&self) -> bool {
        self.uses.iter().any(|usage| usage.contains(ROOT))
    }
}

/// The disks of a function and their partitions, with what uses them.
pub fn disks(tree: &Tree, function: &Function) -> Vec<Disk> {
    let mut names: Vec<String> = Vec::new();
    let controllers = format!("{}/nvme", function.place);
    for controller in tree.names(&controllers) {
        for name in tree.names(&format!("{controllers}/{controller}")) {
            names.extend(namespace(&name));
        }
    }
    // Other controllers, such as virtio's: PLACE/virtio1/block/vda.
    for child in tree.names(&function.place) {
        names.extend(tree.names(&format!("{}/{child}/block", function.place)));
    }
    let parts = |name: &String| {
        let inner = tree.names(&format!("sys/class/block/{name}"));
        inner.into_iter().filter(|part| tree.has(&format!("sys/class/block/{name}/{part}/partition"))).collect::<Vec<_>>()
    };
    let mut all: Vec<String> = names.iter().flat_map(|name| [vec![name.clone()], parts(name)].concat()).collect();
    all.sort();
    all.dedup();
    all.into_iter()
        .map(|name| Disk {
            bytes: tree.number(&format!("sys/class/block/{name}/size")).unwrap_or(0) * 512,
            uses: uses(tree, &name),
            name,
        })
        .collect()
}

/// The disk that a name below a controller stands for: `nvme0n1` itself, and `nvme0n1` for the
/// path `nvme0c1n1` to it.
fn namespace(name: &str) -> Option<String> {
    let digits = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let (controller, namespace) = name.strip_prefix("nvme")?.split_once('n')?;
    let subsystem = controller.split('c').next()?;
    (digits(subsystem) && digits(namespace)).then(|| format!("nvme{subsystem}n{namespace}"))
}

/// Block devices made of block devices (LVM on LUKS on RAID) that are looked through.
const LAYERS: u32 = 8;

fn uses(tree: &Tree, name: &str) -> Vec<String> {
    uses_through(tree, name, LAYERS)
}

/// What uses a block device, also by what is made of it, through so many layers.
fn uses_through(tree: &Tree, name: &str, layers: u32) -> Vec<String> {
    let node = format!("/dev/{name}");
    let number = tree.text(&format!("sys/class/block/{name}/dev")).unwrap_or_default();
    let mut uses: Vec<String> = mounts(tree)
        .into_iter()
        .filter(|mount| mount.number == number || mount.source == node)
        .map(|mount| if mount.on == "/" { ROOT.to_owned() } else { format!("mounted on {}", mount.on) })
        .collect();
    let swaps = tree.text("proc/swaps").unwrap_or_default();
    if swaps.lines().any(|line| line.split_whitespace().next() == Some(&node)) {
        uses.push("used as swap".to_owned());
    }
    for holder in tree.names(&format!("sys/class/block/{name}/holders")) {
        let label = tree.text(&format!("sys/class/block/{holder}/dm/name")).map(|label| format!(" ({label})"));
        let above = if layers > 0 { uses_through(tree, &holder, layers - 1) } else { Vec::new() };
        let root = if above.iter().any(|usage| usage.contains(ROOT)) { format!(", which {ROOT}") } else { String::new() };
        uses.push(format!("part of {holder}{}{root}", label.unwrap_or_default()));
    }
    uses.sort();
    uses.dedup();
    uses
}

/// Where a function is mounted as `vfio:ADDRESS`.
pub fn mounted_by_address(tree: &Tree, address: &str) -> Option<String> {
    let source = format!("vfio:{address}");
    mounts(tree).into_iter().find(|mount| mount.source.split(',').next() == Some(&source)).map(|mount| mount.on)
}

struct Mount {
    number: String,
    on: String,
    source: String,
}

/// Lines of `36 35 98:0 /root /on options optional... - type source options`
/// (proc_pid_mountinfo(5)).
fn mounts(tree: &Tree) -> Vec<Mount> {
    let text = tree.text("proc/self/mountinfo").unwrap_or_default();
    let fields = text.lines().map(|line| line.split(' ').collect::<Vec<_>>());
    fields
        .filter_map(|fields| {
            let dash = fields.iter().position(|field| *field == "-")?;
            let word = |at: usize| fields.get(at).map(|text| text.replace("\\040", " "));
            Some(Mount { number: word(2)?, on: word(4)?, source: word(dash + 2)? })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn namespaces_have_one_name_whatever_the_path() {
        let names = ["nvme0n1", "nvme12c3n2", "nvme0", "nvme0c1", "ng0n1", "hwmon1", "nvme0n1p1", "nvmecn1"];
        let found = names.map(namespace);
        assert_eq!(found[..2], [Some("nvme0n1".to_owned()), Some("nvme12n2".to_owned())]);
        assert!(found[2..].iter().all(Option::is_none), "{found:?}");
    }
}
