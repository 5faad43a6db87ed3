//! The ways from an SSD to the memory of a GPU without host memory between, ours and those of
//! others: which of them this machine allows, and what the others lack. It answers whether an SSD
//! has to be given to vfio-pci, and whether NVIDIA's cuFile would do better here.

use super::machine::{Machine, Nvidia};
use super::pci::Function;
use super::route::Verdict;
use super::sysfs::Tree;
use super::topology::{Forwards, Path, Relation};
use gpunvme::Route;

pub struct Way {
    pub name: &'static str,
    /// Whose it is.
    pub of: &'static str,
    /// None where something cannot be seen that decides.
    pub possible: Option<bool>,
    /// The first thing that is missing or cannot be seen.
    pub lacks: Option<String>,
}

/// Something that a way lacks.
struct Lack {
    text: String,
    /// It is missing; otherwise the machine does not show whether it is there.
    is_certain: bool,
}

/// Registry keys of NVIDIA's driver for memory that the kernel's P2PDMA can use.
const STATIC_BAR1: [&str; 2] = ["RMForceStaticBar1=1", "RMForceDisableIomapWC=1"];
/// The kernel whose counting of page references older drivers do not know, and the first driver
/// that does.
const COUNTS_REFERENCES: ((u32, u32), [u32; 3]) = ((6, 15), [595, 71, 5]);

/// The ways of an SSD and a GPU; the verdict is about ours.
pub fn ways(tree: &Tree, machine: &Machine, ssd: &Function, gpu: &Function, path: &Path, verdict: &Verdict) -> Vec<Way> {
    let kernel = &machine.kernel_facts;
    let io_uring = match kernel.io_uring_disabled {
        Some(0) => None,
        Some(value) => missing(format!("io_uring is disabled (kernel.io_uring_disabled is {value})")),
        None => missing("the kernel has no io_uring, or is older than the sysctl kernel.io_uring_disabled (6.6)"),
    };
    let nvidia_fs = if kernel.nvidia_fs { None } else { missing("the module nvidia_fs is not loaded") };
    let ours = verdict.findings.first().filter(|_| verdict.route != Route::P2p);
    vec![
        way("vfio", "gpunvme's", [ours.and_then(|finding| missing(&finding.text))]),
        way(
            "io-uring-dmabuf",
            "the kernel's, not used by gpunvme",
            [
                kernel_driver(ssd),
                option(machine, "CONFIG_DMABUF_TOKEN"),
                option(machine, "CONFIG_PCI_P2PDMA"),
                io_uring,
                open_modules(machine),
            ],
        ),
        way(
            "cufile-p2pdma",
            "NVIDIA's cuFile, on a filesystem of the kernel",
            [
                kernel_driver(ssd),
                if kernel.version < (6, 2) { missing("it takes a kernel of 6.2 or newer") } else { None },
                option(machine, "CONFIG_PCI_P2PDMA"),
                open_modules(machine),
                references(machine),
                static_bar(tree, machine, gpu),
                translated(tree, machine, ssd),
                forwarded(path),
                multipath(tree, ssd),
            ],
        ),
        way("nvidia-fs", "NVIDIA's cuFile, with its module", [kernel_driver(ssd), nvidia_fs]),
    ]
}

fn way<const N: usize>(name: &'static str, of: &'static str, lacks: [Option<Lack>; N]) -> Way {
    let mut lacks: Vec<Lack> = lacks.into_iter().flatten().collect();
    // What is certainly missing decides, whatever cannot be seen.
    lacks.sort_by_key(|lack| !lack.is_certain);
    let first = lacks.into_iter().next();
    let possible = match &first {
        None => Some(true),
        Some(lack) => lack.is_certain.then_some(false),
    };
    Way { name, of, possible, lacks: first.map(|lack| lack.text) }
}

fn missing(text: impl Into<String>) -> Option<Lack> {
    Some(Lack { text: text.into(), is_certain: true })
}

fn unseen(text: impl Into<String>) -> Option<Lack> {
    Some(Lack { text: text.into(), is_certain: false })
}

fn kernel_driver(ssd: &Function) -> Option<Lack> {
    let driver = ssd.driver.as_deref().unwrap_or("none");
    if driver == "nvme" { None } else { missing(format!("the SSD's driver is {driver}, and not the kernel's nvme")) }
}

fn option(machine: &Machine, name: &str) -> Option<Lack> {
    match machine.kernel_facts.has(name) {
        Some(true) => None,
        Some(false) => missing(format!("the kernel is built without {name}")),
        None => {
            let places = format!("/proc/config.gz, /boot/config-{}", machine.kernel);
            unseen(format!("whether the kernel is built with {name} is not shown ({places})"))
        }
    }
}

fn open_modules(machine: &Machine) -> Option<Lack> {
    match &machine.nvidia {
        None => missing("NVIDIA's driver is not loaded"),
        Some(Nvidia { open: false, .. }) => missing("NVIDIA's kernel modules are the closed ones"),
        Some(_) => None,
    }
}

fn references(machine: &Machine) -> Option<Lack> {
    let (since, first) = COUNTS_REFERENCES;
    let version = &machine.nvidia.as_ref()?.version;
    let numbers: Vec<u32> = version.split('.').filter_map(|number| number.parse().ok()).collect();
    let is_old = machine.kernel_facts.version >= since && numbers[..] < first[..];
    if !is_old {
        return None;
    }
    missing(format!("from kernel {}.{} on it takes NVIDIA's driver 595.71.05 or newer, and this is {version}", since.0, since.1))
}

/// The driver gives BAR1 to the kernel as memory for peers where it was told so when it was loaded.
fn static_bar(tree: &Tree, machine: &Machine, gpu: &Function) -> Option<Lack> {
    let given = tree.number(&format!("{}/p2pmem/size", gpu.place));
    if given.is_some() && given == gpu.memory_bar().map(|bar| bar.size) {
        return None;
    }
    let Some(keys) = &machine.kernel_facts.nvidia_registry else {
        return unseen("the registry keys of NVIDIA's driver are not shown (/proc/driver/nvidia/params)");
    };
    let absent: Vec<&str> = STATIC_BAR1.into_iter().filter(|key| !keys.split(';').any(|set| set.trim() == *key)).collect();
    if absent.is_empty() {
        return missing("NVIDIA's driver has not given all of BAR1 to the kernel (p2pmem)");
    }
    missing(format!("NVIDIA's driver was loaded without NVreg_RegistryDwords=\"{}\"", absent.join(";")))
}

fn translated(tree: &Tree, machine: &Machine, ssd: &Function) -> Option<Lack> {
    if machine.iommu.units.is_empty() || ssd.group.is_none() {
        return None;
    }
    match tree.text(&format!("{}/iommu_group/type", ssd.place)).as_deref() {
        Some("identity") => None,
        Some(domain) => missing(format!("the IOMMU translates for the SSD ({domain}); it has to be off, or iommu=pt")),
        None => unseen("whether the IOMMU translates for the SSD is not shown"),
    }
}

fn forwarded(path: &Path) -> Option<Lack> {
    let by_root = !matches!(path.relation, Relation::SameSwitch | Relation::SameRootPort);
    if !by_root || path.forwards == Forwards::Known {
        return None;
    }
    missing("the kernel's P2PDMA does not know that this CPU passes packets between SSD and GPU")
}

/// A disk with several paths has one device for each path (`nvme0c0n1`) besides its own.
fn multipath(tree: &Tree, ssd: &Function) -> Option<Lack> {
    let controllers = format!("{}/nvme", ssd.place);
    let is_path = |name: &String| name.strip_prefix("nvme").is_some_and(|rest| rest.contains('c') && rest.contains('n'));
    let has_paths = |controller: &String| tree.names(&format!("{controllers}/{controller}")).iter().any(is_path);
    if !tree.names(&controllers).iter().any(has_paths) {
        return None;
    }
    missing("the disk is one of nvme_core's multipath, which P2PDMA refuses (nvme_core.multipath=N)")
}
