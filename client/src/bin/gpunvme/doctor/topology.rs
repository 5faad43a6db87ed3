//! The path between an SSD and a GPU: where it turns around, over which links it goes, and what
//! the ports on it do.
//!
//! Behind an enforcing IOMMU the SSD sends addresses that only the IOMMU understands. So its
//! packets go up to the root complex even if a switch stands nearer, and come down again to the
//! GPU: every link from the SSD to the root and from the root to the GPU bears them. That wants
//! ports with redirection (ACS), because a port without it compares the untranslated address with
//! its neighbours' BARs, and passes on what happens to match.

use super::machine::Machine;
use super::pci::{Acs, Function, Kind, Link};
use super::sysfs::Tree;

/// The nearest component that both sides have in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Relation {
    SameSwitch,
    SameRootPort,
    SameHostBridge,
    /// Different host bridges of one socket, or of sockets that the kernel does not report.
    OtherHostBridge,
    AcrossSockets,
}

impl Relation {
    pub fn name(self) -> &'static str {
        match self {
            Relation::SameSwitch => "same-switch",
            Relation::SameRootPort => "same-root-port",
            Relation::SameHostBridge => "same-host-bridge",
            Relation::OtherHostBridge => "other-host-bridge",
            Relation::AcrossSockets => "across-sockets",
        }
    }

    pub fn words(self) -> &'static str {
        match self {
            Relation::SameSwitch => "same switch",
            Relation::SameRootPort => "same root port",
            Relation::SameHostBridge => "same host bridge",
            Relation::OtherHostBridge => "different host bridges",
            Relation::AcrossSockets => "across sockets",
        }
    }
}

/// One link: the function below, and the two ends' abilities and state.
#[derive(Clone, Debug)]
pub struct Hop {
    pub below: String,
    pub now: f64,
    /// What both ends could do.
    pub best: f64,
    pub link: Link,
    /// Lanes that both ends have.
    pub lanes: u32,
}

pub struct Port {
    pub address: String,
    pub kind: Kind,
    pub acs: Acs,
}

/// Whether the root complex is known to pass on what one device sends to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Forwards {
    Known,
    Unknown,
    /// Known for devices of one host bridge, and these are of two.
    SameBridgeOnly,
}

pub struct Path {
    pub relation: Relation,
    /// The bridge that both are under.
    pub common: Option<String>,
    /// Up from the SSD, down to the GPU; a link that both need appears once.
    pub hops: Vec<Hop>,
    /// The ports that face devices, on both sides.
    pub ports: Vec<Port>,
    pub forwards: Forwards,
    /// NUMA nodes.
    pub nodes: [Option<u32>; 2],
}

impl Path {
    /// Bytes a second that the narrowest link allows now, with that link.
    pub fn narrowest(&self) -> Option<&Hop> {
        self.hops.iter().min_by(|a, b| a.now.total_cmp(&b.now))
    }

    /// Bytes a second when all links are at their best, as those of an idle GPU are not.
    pub fn best(&self) -> Option<f64> {
        self.hops.iter().map(|hop| hop.best).min_by(f64::total_cmp)
    }
}

/// The links from a function up to the root.
pub fn hops(function: &Function, bridges: &[Function]) -> Vec<Hop> {
    let mut hops: Vec<Hop> = Vec::new();
    let chain: Vec<&Function> = bridges.iter().chain([function]).collect();
    for (at, below) in chain.iter().enumerate().rev() {
        // Each end shows the same state; a conventional function below shows none, and neither
        // does an integrated one. What is passed through to a virtual machine has its link, and no
        // port above it.
        let port = at.checked_sub(1).map(|above| chain[above]);
        let (link, other) = match port {
            Some(port) if matches!(port.kind, Kind::RootPort | Kind::Downstream) => (below.link.or(port.link), port.link),
            None if below.kind == Kind::Endpoint => (below.link, None),
            _ => continue,
        };
        let Some(link) = link else { continue };
        let other = other.unwrap_or(link);
        let lanes = link.max_width.min(other.max_width);
        hops.push(Hop {
            below: below.address.clone(),
            now: Link::rate(link.speed, link.width),
            best: Link::rate(link.max_speed.min(other.max_speed), lanes),
            link,
            lanes,
        });
    }
    hops
}

/// The bridges above a function, from the root down.
pub fn bridges(tree: &Tree, function: &Function) -> Vec<Function> {
    function.bridges.iter().filter_map(|address| Function::read(tree, address)).collect()
}

pub fn path(tree: &Tree, machine: &Machine, ssd: &Function, gpu: &Function) -> Path {
    let (above_ssd, above_gpu) = (bridges(tree, ssd), bridges(tree, gpu));
    let shared = above_ssd.iter().zip(&above_gpu).take_while(|(a, b)| a.address == b.address).count();
    let common = shared.checked_sub(1).map(|last| &above_ssd[last]);
    let relation = match common {
        Some(bridge) if bridge.kind == Kind::Upstream => Relation::SameSwitch,
        Some(_) => Relation::SameRootPort,
        None if ssd.host_bridge == gpu.host_bridge => Relation::SameHostBridge,
        None => match (socket(tree, ssd), socket(tree, gpu)) {
            (Some(a), Some(b)) if a != b => Relation::AcrossSockets,
            _ => Relation::OtherHostBridge,
        },
    };
    let mut all = hops(ssd, &above_ssd);
    for hop in hops(gpu, &above_gpu) {
        if !all.iter().any(|known| known.below == hop.below) {
            all.push(hop);
        }
    }
    let faces_devices = |port: &&Function| matches!(port.kind, Kind::RootPort | Kind::Downstream);
    let mut ports: Vec<Port> = Vec::new();
    for port in above_ssd.iter().rev().chain(&above_gpu).filter(faces_devices) {
        if !ports.iter().any(|known| known.address == port.address) {
            ports.push(Port { address: port.address.clone(), kind: port.kind, acs: port.acs });
        }
    }
    Path {
        relation,
        common: common.map(|bridge| bridge.address.clone()),
        hops: all,
        ports,
        forwards: forwards(tree, machine, [ssd, gpu]),
        nodes: [ssd.node, gpu.node],
    }
}

/// The socket that a function hangs on.
fn socket(tree: &Tree, function: &Function) -> Option<u64> {
    let package = |cpu: &str| tree.number(&format!("sys/devices/system/cpu/cpu{cpu}/topology/physical_package_id"));
    let near = function.node.and_then(|node| {
        let list = tree.text(&format!("sys/devices/system/node/node{node}/cpulist"))?;
        package(list.split(['-', ',']).next()?)
    });
    // A node without CPUs, or none at all: the CPUs that the function says are near. A node stands
    // for a socket where nothing else does.
    near.or_else(|| function.node.and(function.cpu).and_then(|cpu| package(&cpu.to_string()))).or(function.node.map(u64::from))
}

/// What the kernel's list says (`pci_p2pdma_whitelist` and `cpu_supports_p2pdma` in
/// drivers/pci/p2pdma.c).
fn forwards(tree: &Tree, machine: &Machine, ends: [&Function; 2]) -> Forwards {
    const INTEL: u16 = 0x8086;
    const ANY_BRIDGE: [u16; 8] = [0x2030, 0x2031, 0x2032, 0x2033, 0x2020, 0x09a2, 0x0b25, 0x0cfe];
    const SAME_BRIDGE: [u16; 4] = [0x3c00, 0x3c01, 0x2f00, 0x2f01];
    if machine.cpu.is_zen() {
        return Forwards::Known;
    }
    let first = |end: &Function| {
        // `pci0000:00`, whose first device stands for it.
        let bus = end.host_bridge.trim_start_matches("pci").to_owned();
        let mut names = tree.names(&format!("sys/devices/{}", end.host_bridge));
        names.retain(|name| name.starts_with(&format!("{bus}:")));
        names.into_iter().next().and_then(|address| Function::read(tree, &address))
    };
    let known = ends.map(|end| first(end).map(|bridge| (bridge.vendor, bridge.device)));
    let same = ends[0].host_bridge == ends[1].host_bridge;
    let listed =
        |list: &[u16]| known.iter().all(|id| id.is_some_and(|(vendor, device)| vendor == INTEL && list.contains(&device)));
    if listed(&ANY_BRIDGE) || same && listed(&SAME_BRIDGE) {
        Forwards::Known
    } else if listed(&SAME_BRIDGE) {
        Forwards::SameBridgeOnly
    } else {
        Forwards::Unknown
    }
}
