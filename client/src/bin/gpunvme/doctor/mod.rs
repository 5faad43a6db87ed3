//! `gpunvme doctor`: which route this machine can take between an SSD and a GPU, and the one
//! change that would make it faster.
//!
//! It only looks: sysfs, procfs, and one question to /dev/vfio/vfio. CUDA is not loaded. What
//! needs root and was not seen is said. Only `--gpu` tries things.

#[allow(unsafe_code)]
mod container;
mod device;
#[cfg(test)]
mod fixture;
mod gpu;
mod kernel;
mod machine;
mod numa;
mod pci;
#[allow(unsafe_code)]
mod proof;
mod render;
mod route;
mod summary;
mod sysfs;
#[cfg(test)]
mod tests;
mod topology;
mod ways;

use crate::args::Doctor;
use crate::report::{Failure, Report};
use container::Container;
use device::{Device, Disk};
use gpunvme::{Reason, Route};
use gpunvme_blockdev::split_names;
use gpunvme_programs::members;
use machine::Machine;
use pci::Function;
use route::{Target, Verdict};
use sysfs::Tree;
use topology::{Hop, Path};
use ways::Way;

pub fn run(args: &Doctor) -> Result<Report, Failure> {
    let mut report = match args.gpu {
        Some(which) => gpu::run(which, args.device.as_deref().map(std::path::Path::new))?,
        None => look(args)?,
    };
    // Only for people: what is piped keeps its lines.
    if let Ok(size) = rustix::termios::tcgetwinsize(std::io::stdout())
        && size.ws_col > 40
    {
        report.text = render::fold(&report.text, size.ws_col.into());
    }
    Ok(report)
}

fn look(args: &Doctor) -> Result<Report, Failure> {
    let (tree, container) = match &args.tree {
        None => (Tree::new("/"), Container::probe()),
        Some(folder) if !folder.join("sys").is_dir() => {
            return Err(Failure(format!("{}: is no copy of a machine's files: it has no folder sys", folder.display())));
        }
        Some(folder) => (Tree::new(folder), Container::of_another_machine(folder)),
    };
    let here = args.tree.is_none();
    let named = args.device.as_deref().map(|device| if here { Named::look(device) } else { Named::new(device) });
    let diagnosis = diagnose(&tree, container, named, args.peer.as_deref()).map_err(Failure)?;
    let mut report = render::render(&diagnosis, args.verbose);
    // The route is the exit status too, for scripts.
    report.code = match diagnosis.verdict().map(|verdict| verdict.route) {
        Some(Route::P2p) => 0,
        Some(Route::Bounce) => 3,
        _ => 4,
    };
    Ok(report)
}

/// What keeps the GPUs of this machine from peer to peer, whatever the device of a mount: the route
/// that is left, the reason, and its words.
pub fn without_peer_to_peer() -> Option<(Route, Reason, String)> {
    // VFIO concerns the device.
    limit(&Tree::new("/"), &Machine::read(&Tree::new("/"), Container::Absent))
}

fn limit(tree: &Tree, machine: &Machine) -> Option<(Route, Reason, String)> {
    let functions = functions(tree);
    let verdict = route::of_gpus(machine, &gpus(&functions), &displays(&functions))?;
    let text = verdict.findings.first()?.text.clone();
    Some((verdict.route, verdict.reason, text))
}

fn functions(tree: &Tree) -> Vec<Function> {
    tree.names("sys/bus/pci/devices").iter().filter_map(|address| Function::read(tree, address)).collect()
}

fn displays(functions: &[Function]) -> Vec<Function> {
    functions.iter().filter(|function| function.is_display()).cloned().collect()
}

fn gpus(functions: &[Function]) -> Vec<Function> {
    displays(functions).into_iter().filter(|function| function.vendor == pci::NVIDIA).collect()
}

/// All that the report tells.
struct Diagnosis {
    /// What the user named; otherwise all SSDs are looked at.
    named: Option<Named>,
    machine: Machine,
    ssds: Vec<Ssd>,
    gpus: Vec<Function>,
    /// The GPU is another function, that the user named.
    stand_in: bool,
    /// Files that this user may not read.
    refused: Vec<String>,
}

struct Ssd {
    /// None for what is not on PCI.
    function: Option<Function>,
    model: Option<String>,
    disks: Vec<Disk>,
    /// Where it is mounted by its address.
    mounted: Option<String>,
    /// The functions of its group that are no bridges.
    sharers: Vec<Function>,
    /// `DMA-FQ` and the like where the kernel translates, `identity` where it passes addresses
    /// through.
    domain: Option<String>,
    /// The links up to the root.
    hops: Vec<Hop>,
    /// One for each GPU, the best first.
    pairs: Vec<Pair>,
    /// Where there is no pair.
    alone: Option<Verdict>,
}

struct Pair {
    gpu: Function,
    path: Path,
    verdict: Verdict,
    /// Ours and others, where it is a GPU.
    ways: Vec<Way>,
}

impl Ssd {
    fn best(&self) -> Option<&Verdict> {
        self.pairs.first().map(|pair| &pair.verdict).or(self.alone.as_ref())
    }

    fn is_system_disk(&self) -> bool {
        self.disks.iter().any(Disk::is_of_the_system)
    }
}

impl Diagnosis {
    /// The SSDs, the best first: p2p before bounce before host, near before far, fast before slow,
    /// and the disk that the system runs from last.
    fn ranked(&self) -> Vec<&Ssd> {
        let rank = |ssd: &Ssd| {
            let (route, pair) = (ssd.best().map_or(u32::MAX, |verdict| verdict.route.code()), ssd.pairs.first());
            let speed = pair.and_then(|pair| pair.path.best()).unwrap_or(0.0) as u64;
            (route, ssd.is_system_disk(), pair.map(|pair| pair.path.relation), std::cmp::Reverse(speed))
        };
        let mut ssds: Vec<&Ssd> = self.ssds.iter().collect();
        ssds.sort_by_key(|ssd| rank(ssd));
        ssds
    }

    /// The SSD whose route the answer is: of a machine the best one; of the members of a volume,
    /// all of which it needs, the worst. There is always one.
    fn decisive(&self) -> Option<&Ssd> {
        let ranked = self.ranked();
        if self.named.is_none() { ranked.first().copied() } else { ranked.last().copied() }
    }

    fn verdict(&self) -> Option<&Verdict> {
        self.decisive().and_then(Ssd::best)
    }
}

/// A DEVICE of the command line.
struct Named {
    /// As it was given.
    device: String,
    /// The devices that it names: several of a volume, or one.
    members: Vec<String>,
    /// Why not all members of the volume are among them.
    missing: Option<String>,
}

impl Named {
    /// Several controllers, several paths in the form in which INFO joins the members of a mounted
    /// volume, or one device.
    fn new(device: &str) -> Named {
        let is_path = device.starts_with('/') && !std::path::Path::new(device).exists();
        let members = if is_path {
            let parts = device.split("+/").enumerate();
            parts.map(|(at, part)| if at == 0 { part.to_owned() } else { format!("/{part}") }).collect()
        } else {
            split_names(device).into_iter().map(str::to_owned).collect()
        };
        Named { device: device.to_owned(), members, missing: None }
    }

    /// Of one device of a volume, those of the others that this machine has as well.
    fn look(device: &str) -> Named {
        let named = Named::new(device);
        let [one] = &named.members[..] else { return named };
        match members::look(one) {
            Ok(members) => Named { members, ..named },
            Err(why) => Named { missing: Some(why), ..named },
        }
    }
}

/// Looks at all SSDs, or at the devices that are named.
fn diagnose(tree: &Tree, container: Container, named: Option<Named>, peer: Option<&str>) -> Result<Diagnosis, String> {
    let machine = Machine::read(tree, container);
    let functions = functions(tree);
    let gpus = match peer {
        Some(peer) => vec![function(tree, peer)?],
        None => gpus(&functions),
    };
    let stand_in = gpus.iter().any(|gpu| !(gpu.is_display() && gpu.vendor == pci::NVIDIA));
    let displays = displays(&functions);
    let examine = |function: &Function| ssd(tree, &machine, function, &gpus, stand_in, &displays);
    // What is no NVMe controller, or none at all.
    let other = |what: &str, text: &str| Ssd {
        function: None,
        model: Some(what.to_owned()),
        disks: Vec::new(),
        mounted: None,
        sharers: Vec::new(),
        domain: None,
        hops: Vec::new(),
        pairs: Vec::new(),
        alone: Some(route::not_nvme(&machine, &gpus, &displays, text)),
    };
    let one = |name: &String| match device::find(tree, name)? {
        Device::Function(address) => {
            let function = Function::read(tree, &address).ok_or(format!("{address} cannot be read in sysfs"))?;
            Ok(examine(&function))
        }
        Device::Other(what) => {
            let text = format!("this is {what}");
            let is_one_of_several = named.as_ref().is_some_and(|named| named.members.len() > 1);
            Ok(other(&if is_one_of_several { format!("{what}, {name}") } else { what }, &text))
        }
    };
    let ssds = match &named {
        None if !functions.iter().any(Function::is_nvme) => vec![other("none", "this machine shows none on PCI")],
        None => functions.iter().filter(|function| function.is_nvme()).map(examine).collect(),
        Some(named) => named.members.iter().map(one).collect::<Result<_, String>>()?,
    };
    Ok(Diagnosis { named, machine, ssds, gpus, stand_in, refused: tree.refused() })
}

fn function(tree: &Tree, name: &str) -> Result<Function, String> {
    match device::find(tree, name)? {
        Device::Function(address) => Function::read(tree, &address).ok_or(format!("{address} cannot be read in sysfs")),
        Device::Other(what) => Err(format!("{name} is {what}; a peer is a PCI function")),
    }
}

fn ssd(tree: &Tree, machine: &Machine, function: &Function, gpus: &[Function], stand_in: bool, displays: &[Function]) -> Ssd {
    let disks = device::disks(tree, function);
    let mut pairs: Vec<Pair> = Vec::new();
    let alone = if !function.is_nvme() {
        let what = format!(
            "{}, {}",
            function.id(),
            function.driver.as_deref().map_or("without a driver".to_owned(), |driver| format!("driver {driver}"))
        );
        Some(route::not_nvme(machine, gpus, displays, &format!("this is {what}")))
    } else if gpus.is_empty() {
        Some(route::without_gpu(displays))
    } else {
        pairs = gpus.iter().map(|gpu| pair(tree, machine, function, &disks, gpu, stand_in)).collect();
        pairs.sort_by(|a, b| {
            let rank = |pair: &Pair| (pair.verdict.route.code(), pair.path.relation);
            rank(a).cmp(&rank(b)).then_with(|| b.path.best().partial_cmp(&a.path.best()).unwrap_or(std::cmp::Ordering::Equal))
        });
        None
    };
    let controllers = format!("{}/nvme", function.place);
    let model = tree.names(&controllers).first().and_then(|name| tree.text(&format!("{controllers}/{name}/model")));
    Ssd {
        model,
        disks,
        mounted: device::mounted_by_address(tree, &function.address),
        sharers: route::sharers(tree, function),
        domain: tree.text(&format!("{}/iommu_group/type", function.place)),
        hops: topology::hops(function, &topology::bridges(tree, function)),
        pairs,
        alone,
        function: Some(function.clone()),
    }
}

fn pair(tree: &Tree, machine: &Machine, ssd: &Function, disks: &[Disk], gpu: &Function, stand_in: bool) -> Pair {
    let path = topology::path(tree, machine, ssd, gpu);
    let verdict = route::verdict(tree, machine, ssd, disks, &Target { function: gpu, stand_in }, &path);
    let ways = if stand_in { Vec::new() } else { ways::ways(tree, machine, ssd, gpu, &path, &verdict) };
    Pair { gpu: gpu.clone(), path, verdict, ways }
}
