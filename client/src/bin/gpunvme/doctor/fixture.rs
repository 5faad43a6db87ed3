//! Builds trees of sysfs and procfs from a text (client/tests/trees/README.md), in a folder that is
//! removed with them.

use super::container::Container;
use super::pci;
use super::sysfs::Tree;
use std::fs;
use std::path::Path;
use tempfile::TempDir;

pub struct Expanded {
    pub tree: Tree,
    pub container: Container,
    _folder: TempDir,
}

/// # Panics
/// On a line that it does not understand.
pub fn expand(text: &str) -> Expanded {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    let (mut section, mut container) = (String::new(), Container::Absent);
    for line in text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#')) {
        // A path with a slash in front is the root's, another the section's.
        let place = |name: &str| name.strip_prefix('/').map_or_else(|| root.join(&section).join(name), |name| root.join(name));
        if let Some(name) = line.strip_prefix('[').and_then(|line| line.strip_suffix(']')) {
            section = name.to_owned();
            announce(root, name);
            continue;
        }
        let mut words = line.splitn(3, ' ');
        let (name, operator, value) = (words.next().unwrap(), words.next().unwrap_or_default(), words.next().unwrap_or_default());
        match operator {
            "->" => {
                link(root, &place(name), value);
                if name == "iommu_group" {
                    let address = section.rsplit('/').next().unwrap();
                    link(root, &root.join(value).join("devices").join(address), &section);
                }
            }
            ":" => binary(&place(name), value),
            "=" if name == "container" => container = named(value),
            "=" if name.ends_with('/') => fs::create_dir_all(place(name)).unwrap(),
            "=" => write(&place(name), format!("{}\n", value.trim().replace("\\n", "\n").replace("\\t", "\t")).as_bytes()),
            _ => panic!("not understood: {line}"),
        }
    }
    Expanded { tree: Tree::new(root), container, _folder: folder }
}

fn named(container: &str) -> Container {
    match container {
        "type1" => Container::Type1,
        "iommufd-compat" => Container::IommufdCompat,
        "no-type1" => Container::NoType1,
        "absent" => Container::Absent,
        other => panic!("no container is called {other}"),
    }
}

/// The links that the kernel makes for a device of a bus or class.
fn announce(root: &Path, section: &str) {
    let name = section.rsplit('/').next().unwrap();
    if pci::is_address(name) {
        link(root, &root.join("sys/bus/pci/devices").join(name), section);
    } else if section.contains("/block/") || section.contains("/nvme/nvme") {
        link(root, &root.join("sys/class/block").join(name), section);
        write(&root.join("dev").join(name), b"");
    }
}

fn write(path: &Path, content: &[u8]) {
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, content).unwrap();
}

fn link(root: &Path, from: &Path, target: &str) {
    let target = root.join(target);
    fs::create_dir_all(&target).unwrap();
    fs::create_dir_all(from.parent().unwrap()).unwrap();
    let _ = fs::remove_file(from);
    std::os::unix::fs::symlink(target, from).unwrap();
}

/// `LENGTH` makes a file of zeros, `OFFSET BYTES...` fills it, and `port KIND acs CONTROL` makes a
/// configuration space with those capabilities.
fn binary(path: &Path, value: &str) {
    let words: Vec<&str> = value.split_whitespace().collect();
    let content = match words[..] {
        [length] => vec![0; length.parse().unwrap()],
        ["port", kind, "acs", control] => configuration(kind, control),
        [offset, ref bytes @ ..] => {
            let mut content = fs::read(path).unwrap();
            let offset = usize::from_str_radix(offset, 16).unwrap();
            for (at, byte) in bytes.iter().enumerate() {
                content[offset + at] = u8::from_str_radix(byte, 16).unwrap();
            }
            content
        }
        [] => panic!("{} has no value", path.display()),
    };
    write(path, &content);
}

fn configuration(kind: &str, control: &str) -> Vec<u8> {
    let mut config = vec![0; 4096];
    config[0x06] = 0x10; // there are capabilities,
    config[0x34] = 0x40; // first of them PCI Express,
    let kind = match kind {
        "endpoint" => 0x00,
        "root" => 0x40,
        "upstream" => 0x50,
        "downstream" => 0x60,
        other => panic!("no port is called {other}"),
    };
    config[0x40..0x43].copy_from_slice(&[0x10, 0x00, kind | 0x02]);
    // in the extended space error reporting,
    config[0x100..0x104].copy_from_slice(&[0x01, 0x00, 0x02, 0x00]);
    if control != "none" {
        // and ACS.
        config[0x102..0x104].copy_from_slice(&[0x02, 0x14]);
        config[0x140..0x148].copy_from_slice(&[0x0d, 0x00, 0x01, 0x00, 0x7f, 0x00, 0x00, 0x00]);
        config[0x146..0x148].copy_from_slice(&u16::from_str_radix(control, 16).unwrap().to_le_bytes());
    }
    config
}
