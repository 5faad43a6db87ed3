//! Which route an SSD and a GPU can take together, what keeps them from a faster one, and what to
//! do first about it.
//!
//! Each obstacle is a finding with a stable code. Some block peer to peer; some make it slower;
//! some are doubts, because sysfs cannot prove that packets arrive. The verdict is the route with
//! the reason that the ABI would give for it, and the one change to make first: what cannot be
//! changed comes first (then nothing else is worth doing), then the machine, then the GPU's
//! driver, then the SSD's, which takes the disk away from the kernel and is worth it only when the
//! rest is done.

use super::container::Container;
use super::device::Disk;
use super::machine::{Machine, Nvidia};
use super::pci::{self, Acs, Function};
use super::sysfs::Tree;
use super::topology::{Forwards, Path, Relation};
use gpunvme::{Reason, Route};

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Effect {
    /// Peer to peer does not work before this is changed.
    Blocks,
    /// It works, for fewer bytes a second than it could.
    Slows,
    /// It may not work, or may not be as isolated as it looks.
    Doubt,
}

impl Effect {
    pub fn name(self) -> &'static str {
        match self {
            Effect::Blocks => "blocks",
            Effect::Slows => "slows",
            Effect::Doubt => "doubt",
        }
    }
}

#[derive(Clone, Debug)]
pub struct Finding {
    pub code: &'static str,
    pub effect: Effect,
    /// Of the ABI's reasons the one that a transfer would report.
    pub reason: Reason,
    pub text: String,
    pub change: Option<Change>,
}

/// What to do, and the command for it where one command does it.
#[derive(Clone, Debug)]
pub struct Change {
    pub text: String,
    pub command: Option<String>,
}

impl Change {
    fn to(text: impl Into<String>) -> Option<Change> {
        Some(Change { text: text.into(), command: None })
    }

    fn by(text: impl Into<String>, command: impl Into<String>) -> Option<Change> {
        Some(Change { text: text.into(), command: Some(command.into()) })
    }
}

pub struct Verdict {
    pub route: Route,
    pub reason: Reason,
    /// What blocks comes first, in the order in which it is to be changed.
    pub findings: Vec<Finding>,
}

impl Verdict {
    /// The finding whose change comes first. None where nothing can be made faster, or what is
    /// missing cannot be had by a change.
    pub fn first(&self) -> Option<&Finding> {
        let first = self.findings.first()?;
        first.change.is_some().then_some(first).filter(|first| first.effect != Effect::Doubt)
    }

    fn of(mut findings: Vec<Finding>, otherwise: Route) -> Verdict {
        findings.sort_by_key(|finding| finding.effect);
        let (route, reason) = match findings.first() {
            Some(first) if first.effect == Effect::Blocks => (otherwise, first.reason),
            _ => (Route::P2p, Reason::None),
        };
        Verdict { route, reason, findings }
    }
}

/// What stands at the other end of the path.
pub struct Target<'a> {
    pub function: &'a Function,
    /// Not a GPU, but a function whose BAR is to be reached all the same.
    pub stand_in: bool,
}

/// Where there is no NVMe controller on PCI; `text` says what there is.
pub fn not_nvme(machine: &Machine, gpus: &[Function], displays: &[Function], text: &str) -> Verdict {
    let text = format!("{text}; peer to peer needs an NVMe controller on PCI");
    let mut findings = vec![blocks("not-nvme", Reason::NoVfio, text, None)];
    if gpus.is_empty() {
        findings.insert(0, no_gpu(displays));
    }
    Verdict::of(findings, fallback(machine, gpus.iter().find(|gpu| gpu.vendor == pci::NVIDIA)))
}

/// For an NVMe controller in a machine without a GPU.
pub fn without_gpu(displays: &[Function]) -> Verdict {
    Verdict::of(vec![no_gpu(displays)], Route::Host)
}

fn no_gpu(displays: &[Function]) -> Finding {
    let text = match displays {
        [] => "this machine shows no GPU on PCI".to_owned(),
        [other, ..] => format!("this machine shows no NVIDIA GPU on PCI ({} is {})", other.address, other.id()),
    };
    blocks("no-gpu", Reason::NotGpuMemory, text, None)
}

/// What keeps all GPUs of the machine from peer to peer, whatever the SSD, and the route that is
/// left.
pub fn of_gpus(machine: &Machine, gpus: &[Function], displays: &[Function]) -> Option<Verdict> {
    let unusable = |gpu| gpu_unusable(machine, gpu);
    let (finding, left) = match gpus.iter().find(|gpu| unusable(gpu).is_none()) {
        Some(_) => (gpu_driver(machine)?, Route::Bounce),
        None => (gpus.first().and_then(unusable).unwrap_or_else(|| no_gpu(displays)), Route::Host),
    };
    Some(Verdict::of(vec![finding], left))
}

/// For an NVMe controller and a GPU, or what stands in for one.
pub fn verdict(tree: &Tree, machine: &Machine, ssd: &Function, disks: &[Disk], target: &Target, path: &Path) -> Verdict {
    let mut findings = Vec::new();
    if !target.stand_in {
        findings.extend(gpu_unusable(machine, target.function));
    }
    findings.extend(iommu(machine, ssd));
    findings.extend(vfio(machine));
    findings.extend(shared_group(tree, ssd, target.function));
    if !target.stand_in {
        findings.extend(gpu_driver(machine));
    }
    findings.extend(egress(path));
    findings.extend(binding(machine, ssd, disks));
    findings.extend(access(tree, machine, ssd));
    findings.extend(placement(path));
    findings.extend(links(ssd, path));
    findings.extend(bar(target));
    findings.extend(memlock(machine));
    findings.extend(doubts(machine, path));
    Verdict::of(findings, if target.stand_in { Route::Host } else { fallback(machine, Some(target.function)) })
}

/// The route without peer to peer.
fn fallback(machine: &Machine, gpu: Option<&Function>) -> Route {
    match gpu {
        Some(gpu) if gpu_unusable(machine, gpu).is_none() => Route::Bounce,
        _ => Route::Host,
    }
}

fn blocks(code: &'static str, reason: Reason, text: impl Into<String>, change: Option<Change>) -> Finding {
    Finding { code, effect: Effect::Blocks, reason, text: text.into(), change }
}

fn slows(code: &'static str, text: impl Into<String>, change: Option<Change>) -> Finding {
    Finding { code, effect: Effect::Slows, reason: Reason::None, text: text.into(), change }
}

fn doubt(code: &'static str, text: impl Into<String>) -> Finding {
    Finding { code, effect: Effect::Doubt, reason: Reason::None, text: text.into(), change: None }
}

fn gpu_unusable(machine: &Machine, gpu: &Function) -> Option<Finding> {
    if gpu.driver.as_deref() != Some("nvidia") || machine.nvidia.is_none() {
        let driver = gpu.driver.as_deref().unwrap_or("none");
        let text = format!("the GPU's driver is {driver}; CUDA needs NVIDIA's");
        return Some(blocks(
            "gpu-driver",
            Reason::NotGpuMemory,
            text,
            Change::to("install NVIDIA's driver, with the open kernel modules"),
        ));
    }
    if machine.libcuda.is_none() {
        let text = "libcuda.so.1 is nowhere that the dynamic linker looks";
        let change =
            Change::to("install the user-space part of NVIDIA's driver (Debian and Ubuntu: libcuda1 or libnvidia-compute)");
        return Some(blocks("no-libcuda", Reason::NotGpuMemory, text, change));
    }
    None
}

fn iommu(machine: &Machine, ssd: &Function) -> Option<Finding> {
    if ssd.group.is_some() && !machine.iommu.units.is_empty() {
        return None;
    }
    let cpu_option = if machine.cpu.is_intel() { "VT-d" } else { "the IOMMU (AMD-Vi, SMMU)" };
    let (text, change) = match (&machine.iommu.turned_off, machine.iommu.in_firmware) {
        (Some(parameter), _) => (
            format!("the kernel parameter {parameter} turns the IOMMU off"),
            Change::to(format!("remove {parameter} from the kernel's parameters, and restart")),
        ),
        // Kernels without CONFIG_INTEL_IOMMU_DEFAULT_ON want to be asked.
        (None, Some("DMAR")) => (
            "the machine has an IOMMU (VT-d), and the kernel does not use it".to_owned(),
            Change::by(
                "add the kernel parameter intel_iommu=on, and restart",
                "sed -i 's/^GRUB_CMDLINE_LINUX=\"/&intel_iommu=on /' /etc/default/grub && update-grub && reboot",
            ),
        ),
        (None, Some(table)) => (
            format!("the firmware describes an IOMMU (table {table}), and this device is not behind it"),
            Change::to(format!("turn on {cpu_option} in the firmware's set-up for this slot, and look into dmesg for IOMMU")),
        ),
        (None, None) if machine.is_virtual => (
            "this virtual machine has no IOMMU".to_owned(),
            Change::to("give the virtual machine a virtual IOMMU, and pass SSD and GPU through to it"),
        ),
        (None, None) => {
            ("the firmware describes no IOMMU".to_owned(), Change::to(format!("turn on {cpu_option} in the firmware's set-up")))
        }
    };
    Some(blocks("no-iommu", Reason::NoVfio, text, change))
}

fn vfio(machine: &Machine) -> Option<Finding> {
    let kernel = &machine.kernel;
    if !machine.vfio.available && !machine.vfio.modules_here {
        let text = format!("vfio-pci is not loaded, and there are no modules for the kernel {kernel} here");
        return Some(blocks(
            "no-vfio-module",
            Reason::NoVfio,
            text,
            Change::to("load vfio-pci, in a container on its host; or boot a kernel that has it"),
        ));
    }
    if !machine.vfio.available {
        let change = Change::by(
            "install the rest of the kernel's modules (on Ubuntu a package of its own)",
            format!("apt install linux-modules-extra-{kernel}"),
        );
        return Some(blocks("no-vfio-module", Reason::NoVfio, format!("the kernel {kernel} has no module vfio-pci"), change));
    }
    if machine.vfio.loaded && machine.vfio.container == Container::Absent {
        let text = "vfio-pci is loaded, and there is no /dev/vfio/vfio";
        let change =
            Change::to("give the container the devices of /dev/vfio; or boot a kernel built with CONFIG_VFIO_CONTAINER=y");
        return Some(blocks("no-container", Reason::NoVfio, text, change));
    }
    let predicted = machine.vfio.container == Container::Absent && machine.vfio.built_compat;
    if machine.vfio.container == Container::IommufdCompat || predicted {
        let text = "/dev/vfio/vfio is iommufd's imitation, which does not map device memory";
        let change = Change::to(
            "boot a kernel built with CONFIG_VFIO_CONTAINER=y and without CONFIG_IOMMUFD_VFIO_CONTAINER, as the distributions' are",
        );
        return Some(blocks("iommufd-compat", Reason::IommufdCompat, text, change));
    }
    if machine.vfio.container == Container::NoType1 {
        let text = "VFIO has no driver for the IOMMU";
        return Some(blocks("no-type1", Reason::NoVfio, text, Change::by("load it", "modprobe vfio_iommu_type1")));
    }
    None
}

/// VFIO hands out a group only if each function in it is with a driver that leaves DMA to others
/// (`driver_managed_dma`), or with none.
fn shared_group(tree: &Tree, ssd: &Function, gpu: &Function) -> Option<Finding> {
    let others = intruders(tree, ssd);
    if others.is_empty() {
        return None;
    }
    let group = ssd.group?;
    let list: Vec<String> = others
        .iter()
        .map(|other| format!("{} ({}, driver {})", other.address, other.id(), other.driver.as_deref().unwrap_or("none")))
        .collect();
    let text = format!("IOMMU group {group} is handed out as a whole, and holds {}", list.join(", "));
    let change = if others.iter().any(|other| other.address == gpu.address) {
        Change::to("separate SSD and GPU: turn on ACS in the firmware's set-up, or put the SSD into a slot of another root port")
    } else if others.iter().all(Function::is_nvme) {
        let all: Vec<&str> =
            [ssd.address.as_str()].into_iter().chain(others.iter().map(|other| other.address.as_str())).collect();
        Change::by("bind them all, if they can be spared", format!("gpunvme-vfio bind {}", all.join(" ")))
    } else {
        Change::to(
            "turn on ACS in the firmware's set-up, or put the SSD into a slot of a root port that has ACS, best one on the CPU",
        )
    };
    Some(blocks("group-shared", Reason::NoVfio, text, change))
}

/// The functions that share a group, except bridges.
pub fn sharers(tree: &Tree, function: &Function) -> Vec<Function> {
    let others = tree.names(&format!("{}/iommu_group/devices", function.place));
    let others = others.iter().filter(|&other| *other != function.address).filter_map(|other| Function::read(tree, other));
    others.filter(|other| !other.is_bridge()).collect()
}

fn intruders(tree: &Tree, ssd: &Function) -> Vec<Function> {
    let is_foreign = |driver: &str| driver != "pci-stub" && driver != "vfio-pci" && !driver.ends_with("-vfio-pci");
    sharers(tree, ssd).into_iter().filter(|other| other.driver.as_deref().is_some_and(is_foreign)).collect()
}

fn gpu_driver(machine: &Machine) -> Option<Finding> {
    let nvidia = machine.nvidia.as_ref()?;
    let upgrade = format!("upgrade NVIDIA's driver to branch {} or newer, with the open kernel modules", Nvidia::MAPS_DMA_BUFS);
    if nvidia.branch() < Nvidia::MAPS_DMA_BUFS {
        let text = format!("driver {} does not let GPU memory be mapped as a dma-buf; that came with CUDA 13.3", nvidia.version);
        return Some(blocks("cuda-too-old", Reason::MmapRefused, text, Change::to(upgrade)));
    }
    if !nvidia.open {
        let text = "the driver's kernel modules are the closed ones, which export no dma-buf";
        return Some(blocks(
            "cuda-closed",
            Reason::MmapRefused,
            text,
            Change::to("install the driver with the open kernel modules"),
        ));
    }
    None
}

fn egress(path: &Path) -> Option<Finding> {
    let port = path.ports.iter().find(|port| port.acs.blocks())?;
    let text = format!("the port {} may refuse packets for other devices (ACS egress control)", port.address);
    let change =
        Change::by("let the port redirect them to the root instead", format!("setpci -s {} ECAP_ACS+6.w=1d", port.address));
    Some(blocks("acs-egress", Reason::MapDmaRefused, text, change))
}

fn binding(machine: &Machine, ssd: &Function, disks: &[Disk]) -> Option<Finding> {
    let driver = match ssd.driver.as_deref() {
        Some("vfio-pci") => return None,
        Some(driver) => driver,
        None => "none",
    };
    let bind = format!("gpunvme-vfio bind {}", ssd.address);
    let mut used = disks.iter().filter_map(|disk| Some((disk, disk.uses.first()?)));
    let text = format!("the SSD's driver is {driver}");
    let change = match used.next() {
        Some((disk, usage)) if disks.iter().any(Disk::is_of_the_system) => {
            let text = format!("{text}, and the system runs from it (/dev/{} {usage})", disk.name);
            return Some(blocks("system-disk", Reason::NoVfio, text, Change::to("use another SSD")));
        }
        Some((disk, usage)) => Change::by(format!("free it (/dev/{} is {usage}), then bind it to vfio-pci", disk.name), bind),
        None => Change::by("bind it to vfio-pci", if machine.root { bind } else { format!("sudo {bind}") }),
    };
    Some(blocks("bound-to-kernel", Reason::NoVfio, text, change))
}

fn access(tree: &Tree, machine: &Machine, ssd: &Function) -> Option<Finding> {
    let node = format!("dev/vfio/{}", ssd.group?);
    if ssd.driver.as_deref() != Some("vfio-pci") {
        return None;
    }
    if !tree.has(&node) {
        let change = Change::to("give the container the devices of /dev/vfio");
        return Some(blocks("no-access", Reason::NoVfio, format!("there is no /{node}, as in a container"), change));
    }
    if machine.root || tree.writable(&node) {
        return None;
    }
    let change = Change::by("give it to this user", format!("sudo gpunvme-vfio bind --user \"$USER\" {}", ssd.address));
    Some(blocks("no-access", Reason::NoVfio, format!("this user may not open /{node}"), change))
}

fn placement(path: &Path) -> Vec<Finding> {
    let mut found = Vec::new();
    match path.relation {
        Relation::AcrossSockets => found.push(slows(
            "across-sockets",
            "SSD and GPU hang on different sockets; what crosses between sockets is far slower, and reads of GPU memory suffer most",
            Change::to("move the SSD to a slot of the GPU's socket, or use a GPU of the SSD's"),
        )),
        Relation::OtherHostBridge if path.forwards == Forwards::SameBridgeOnly => found.push(slows(
            "other-host-bridge",
            "this CPU passes packets well only between devices of one host bridge, and these are of two",
            Change::to("move the SSD to a slot of the GPU's host bridge"),
        )),
        _ => {}
    }
    found
}

fn links(ssd: &Function, path: &Path) -> Vec<Finding> {
    let mut found = Vec::new();
    let own = path.hops.iter().find(|hop| hop.below == ssd.address);
    if let Some(hop) = own.filter(|hop| hop.now < hop.best) {
        let text = format!(
            "the SSD's link runs at {} GT/s x{}, and both ends could do better: {:.1} GB/s instead of {:.1}",
            hop.link.speed,
            hop.link.width,
            hop.best / 1e9,
            hop.now / 1e9
        );
        found.push(slows(
            "link-degraded",
            text,
            Change::to("reseat the SSD or its cable, and look for PCIe errors (dmesg | grep AER)"),
        ));
    } else if let Some(hop) = own.filter(|hop| hop.link.max_width > hop.lanes) {
        let text = format!("the SSD has {} lanes, and its slot gives it {}", hop.link.max_width, hop.lanes);
        found.push(slows("slot-narrow", text, Change::to("move the SSD to a wider slot")));
    }
    if let (Some(own), Some(other)) =
        (own, path.hops.iter().filter(|hop| hop.below != ssd.address).min_by(|a, b| a.best.total_cmp(&b.best)))
        && other.best < own.best
    {
        let text = format!(
            "the link above {} carries {:.1} GB/s, less than the SSD's {:.1}",
            other.below,
            other.best / 1e9,
            own.best / 1e9
        );
        found.push(slows("uplink-narrow", text, Change::to("move the SSD to a slot with a wider way to the root")));
    }
    found
}

/// GPUs whose BAR shows only a window of their memory have 256 MiB of it.
const SMALL_BAR: u64 = 256 << 20;

fn bar(target: &Target) -> Option<Finding> {
    let bar = target.function.memory_bar();
    if target.stand_in {
        return match (&target.function.driver, bar) {
            (_, None) => Some(blocks("no-bar", Reason::NotABuffer, "the peer has no memory BAR to be reached", None)),
            (Some(driver), _) => {
                let text =
                    format!("the peer's driver is {driver}; the memory of a device is registered only while nothing drives it");
                let unbind = format!("echo {0} > /sys/bus/pci/devices/{0}/driver/unbind", target.function.address);
                Some(blocks("peer-driven", Reason::NotABuffer, text, Change::by("take it from its driver", unbind)))
            }
            (None, Some(_)) => None,
        };
    }
    let size = bar.map_or(0, |bar| bar.size);
    (size <= SMALL_BAR).then(|| {
        let text = format!("the GPU shows {} MiB of its memory (BAR1): all registered buffers together must fit", size >> 20);
        slows("bar-small", text, Change::to("turn on Resizable BAR and Above 4G Decoding in the firmware's set-up"))
    })
}

/// What queues and a modest staging pool need.
const ENOUGH_LOCKED: u64 = 256 << 20;

fn memlock(machine: &Machine) -> Option<Finding> {
    let limit = machine.memlock.filter(|&limit| limit < ENOUGH_LOCKED)?;
    let text = format!("this user may lock {} KiB of memory, and what the SSD reaches in host memory is locked", limit >> 10);
    let change =
        Change::by("raise the limit (LimitMEMLOCK= in a service, memlock in /etc/security/limits.conf)", "ulimit -l unlimited");
    Some(slows("memlock", text, change))
}

fn doubts(machine: &Machine, path: &Path) -> Vec<Finding> {
    let mut found = Vec::new();
    let ports = |wanted: fn(Acs) -> bool| {
        path.ports.iter().filter(|port| wanted(port.acs)).map(|port| port.address.as_str()).collect::<Vec<_>>().join(", ")
    };
    let without = ports(|acs| acs == Acs::Absent);
    if !without.is_empty() {
        let text = format!(
            "no ACS at {without}: what the SSD sends to an address that is also a neighbour's reaches the neighbour, and the IOMMU never sees it, \
             whatever the groups say"
        );
        found.push(doubt("acs-absent", text));
    }
    let off = ports(|acs| matches!(acs, Acs::Control(_)) && !acs.redirects() && !acs.blocks());
    if !off.is_empty() {
        let text = format!(
            "ACS does not redirect at {off}: neighbours can reach each other past the IOMMU (see pci=disable_acs_redir in /proc/cmdline)"
        );
        found.push(doubt("acs-off", text));
    }
    let unread = ports(|acs| acs == Acs::Unread);
    if !unread.is_empty() {
        found.push(doubt(
            "acs-unread",
            format!("the ACS of {unread} could not be read; root sees more than the first 64 bytes of configuration space"),
        ));
    }
    if machine.is_virtual {
        found.push(doubt(
            "virtual-machine",
            "this is a virtual machine: the path is what the hypervisor shows, and may be another in truth",
        ));
    }
    if path.forwards == Forwards::Unknown && !machine.is_virtual {
        found.push(doubt(
            "root-complex",
            "the kernel does not know whether this CPU passes packets between its ports; a transfer will tell",
        ));
    }
    if let Container::Unknown(why) = &machine.vfio.container {
        found.push(doubt("vfio-unread", format!("/dev/vfio/vfio could not be asked: {why}")));
    }
    found
}
