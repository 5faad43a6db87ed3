//! One PCI function as sysfs shows it: what it is, its driver, its place, its link, its BARs, and
//! what its configuration space says of ports and ACS.
//!
//! Users other than root see only the first 64 bytes of configuration space, which end before the
//! capabilities. Then a port's kind follows from its place, and its ACS stays unknown.

use super::sysfs::{self, Tree};
use std::ops::Range;

/// A mass storage controller, non-volatile memory, NVM Express (PCI Code and ID Assignment
/// Specification, 1.9).
pub const CLASS_NVME: u32 = 0x01_08_02;
pub const NVIDIA: u16 = 0x10de;

#[derive(Clone, Debug)]
pub struct Function {
    pub address: String,
    pub vendor: u16,
    pub device: u16,
    pub class: u32,
    /// What its driver calls it.
    pub model: Option<String>,
    pub driver: Option<String>,
    pub group: Option<u32>,
    pub node: Option<u32>,
    /// The first CPU that is near, if the kernel says which are.
    pub cpu: Option<u32>,
    pub link: Option<Link>,
    pub bars: Vec<Bar>,
    pub kind: Kind,
    pub acs: Acs,
    /// The root bus, such as `pci0000:00`.
    pub host_bridge: String,
    /// The bridges between the root bus and the function, from the root down.
    pub bridges: Vec<String>,
    /// Where it is in sysfs.
    pub place: String,
}

/// What a function is on PCI Express (PCIe Base Specification, 7.5.3.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Endpoint,
    RootPort,
    /// A switch's port towards the root.
    Upstream,
    /// A switch's port towards devices.
    Downstream,
    /// To or from conventional PCI.
    Bridge,
}

/// The link above a function: GT/s and lanes, now and at most.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Link {
    pub speed: f64,
    pub width: u32,
    pub max_speed: f64,
    pub max_width: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bar {
    /// Of the resource in sysfs; a 64-bit BAR takes two numbers.
    pub index: usize,
    pub size: u64,
    pub prefetchable: bool,
}

/// Access Control Services of a port (PCIe Base Specification, 7.7.12).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Acs {
    /// The capability is out of this user's sight.
    Unread,
    Absent,
    /// The control register.
    Control(u16),
}

impl Acs {
    const REQUEST_REDIRECT: u16 = 1 << 2;
    const COMPLETION_REDIRECT: u16 = 1 << 3;
    const EGRESS_CONTROL: u16 = 1 << 5;
    const NAMES: [&str; 7] = [
        "SourceValidation",
        "TranslationBlocking",
        "RequestRedirect",
        "CompletionRedirect",
        "UpstreamForwarding",
        "EgressControl",
        "DirectTranslated",
    ];

    /// The port sends what comes from below to the root, and does not pass it on to its
    /// neighbours.
    pub fn redirects(self) -> bool {
        matches!(self, Acs::Control(control) if control & (Self::REQUEST_REDIRECT | Self::COMPLETION_REDIRECT) != 0)
    }

    /// The port may refuse what goes to certain neighbours.
    pub fn blocks(self) -> bool {
        matches!(self, Acs::Control(control) if control & Self::EGRESS_CONTROL != 0 && control & Self::REQUEST_REDIRECT == 0)
    }

    /// The services that are on.
    pub fn services(self) -> Vec<&'static str> {
        let Acs::Control(control) = self else { return Vec::new() };
        Self::NAMES.iter().enumerate().filter(|(bit, _)| control & 1 << bit != 0).map(|(_, name)| *name).collect()
    }
}

impl Link {
    /// Bytes a second in one direction, after the encoding of the line and before packet headers.
    pub fn rate(speed: f64, width: u32) -> f64 {
        let encoding = match speed {
            ..=5.0 => 8.0 / 10.0,
            ..=32.0 => 128.0 / 130.0,
            // Flits of 256 bytes carry 242 (PCIe 6.0).
            _ => 242.0 / 256.0,
        };
        speed * 1e9 * encoding / 8.0 * f64::from(width)
    }

    fn read(tree: &Tree, place: &str) -> Option<Link> {
        // "16.0 GT/s PCIe", or "Unknown" where there is no link.
        let speed = |name: &str| tree.text(&format!("{place}/{name}"))?.split(' ').next()?.parse::<f64>().ok();
        let width =
            |name: &str| tree.text(&format!("{place}/{name}"))?.parse::<u32>().ok().filter(|&lanes| lanes > 0 && lanes <= 32);
        Some(Link {
            speed: speed("current_link_speed")?,
            width: width("current_link_width")?,
            max_speed: speed("max_link_speed")?,
            max_width: width("max_link_width")?,
        })
    }
}

impl Function {
    pub fn is_nvme(&self) -> bool {
        self.class == CLASS_NVME
    }

    /// 3D and VGA controllers.
    pub fn is_display(&self) -> bool {
        self.class >> 16 == 0x03
    }

    pub fn is_bridge(&self) -> bool {
        self.class >> 16 == 0x06
    }

    /// The BAR through which the memory of a device is reached: the largest one. NVIDIA's BAR1 is
    /// resource 1 or 2.
    pub fn memory_bar(&self) -> Option<Bar> {
        self.bars.iter().copied().max_by_key(|bar| (bar.prefetchable, bar.size))
    }

    pub fn id(&self) -> String {
        format!("{:04x}:{:04x}", self.vendor, self.device)
    }

    pub fn read(tree: &Tree, address: &str) -> Option<Function> {
        let place = tree.resolve(&format!("sys/bus/pci/devices/{address}"))?;
        let at = |name: &str| format!("{place}/{name}");
        let class = tree.number(&at("class"))? as u32;
        let parts: Vec<&str> = place.split('/').collect();
        let root = parts.iter().rposition(|part| part.starts_with("pci") && part.contains(':'))?;
        let bridges: Vec<String> = parts[root + 1..parts.len() - 1].iter().map(|&part| part.to_owned()).collect();
        let config = tree.bytes(&at("config")).unwrap_or_default();
        let is_bridge = class >> 8 == 0x0604;
        let kind = port_kind(&config).unwrap_or(match (is_bridge, bridges.len()) {
            (false, _) => Kind::Endpoint,
            (true, 0) => Kind::RootPort,
            (true, depth) if depth % 2 == 1 => Kind::Upstream,
            (true, _) => Kind::Downstream,
        });
        Some(Function {
            address: address.to_owned(),
            vendor: tree.number(&at("vendor"))? as u16,
            device: tree.number(&at("device"))? as u16,
            class,
            model: tree
                .text(&format!("proc/driver/nvidia/gpus/{address}/information"))
                .and_then(|text| Some(text.lines().find_map(|line| line.strip_prefix("Model:"))?.trim().to_owned())),
            driver: tree.link(&at("driver")),
            group: tree.link(&at("iommu_group")).and_then(|number| number.parse().ok()),
            node: tree.number(&at("numa_node")).and_then(|node| node.try_into().ok()),
            cpu: tree.text(&at("local_cpulist")).and_then(|list| list.split(['-', ',']).next()?.parse().ok()),
            link: Link::read(tree, &place),
            bars: tree.text(&at("resource")).map(|text| bars(&text)).unwrap_or_default(),
            kind,
            acs: acs(&config),
            host_bridge: parts[root].to_owned(),
            bridges,
            place,
        })
    }
}

/// Whether a text is an address as sysfs writes it: `0000:01:00.0`.
pub fn is_address(text: &str) -> bool {
    let parts: Vec<&str> = text.split([':', '.']).collect();
    let hex =
        |part: &str, digits: Range<usize>| digits.contains(&part.len()) && part.bytes().all(|byte| byte.is_ascii_hexdigit());
    matches!(parts[..], [domain, bus, device, function]
        if hex(domain, 4..9) && hex(bus, 2..3) && hex(device, 2..3) && hex(function, 1..2))
        && text.matches(':').count() == 2
}

/// Lines of `start end flags`, six BARs first (IORESOURCE_MEM and IORESOURCE_PREFETCH of
/// linux/ioport.h).
fn bars(text: &str) -> Vec<Bar> {
    let mut bars = Vec::new();
    for (index, line) in text.lines().take(6).enumerate() {
        let fields: Vec<u64> = line.split_whitespace().filter_map(sysfs::number).collect();
        if let [start, end, flags] = fields[..]
            && end > start
            && flags & 0x200 != 0
        {
            bars.push(Bar { index, size: end - start + 1, prefetchable: flags & 0x2000 != 0 });
        }
    }
    bars
}

fn word(config: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_le_bytes(config.get(at..at + 2)?.try_into().ok()?))
}

/// Where the PCI Express capability is; `None` for conventional PCI, and where only the header can
/// be read.
fn express(config: &[u8]) -> Option<usize> {
    const STATUS_HAS_CAPABILITIES: u16 = 1 << 4;
    if word(config, 0x06)? & STATUS_HAS_CAPABILITIES == 0 {
        return None;
    }
    let mut at = usize::from(*config.get(0x34)? & !3);
    // A list of at most 48 fits between header and end: a loop ends there.
    for _ in 0..48 {
        match *config.get(at..at + 2)? {
            _ if at < 0x40 => return None,
            [0x10, _] => return Some(at),
            [_, next] => at = usize::from(next & !3),
            _ => return None,
        }
    }
    None
}

fn port_kind(config: &[u8]) -> Option<Kind> {
    Some(match word(config, express(config)? + 2)? >> 4 & 0xf {
        4 => Kind::RootPort,
        5 => Kind::Upstream,
        6 => Kind::Downstream,
        7 | 8 => Kind::Bridge,
        _ => Kind::Endpoint,
    })
}

fn acs(config: &[u8]) -> Acs {
    match config.len() {
        0..=64 => return Acs::Unread,
        // Without PCI Express there is no extended space; with it, the machine does not let us see
        // it.
        65..4096 => return if express(config).is_some() { Acs::Unread } else { Acs::Absent },
        _ => {}
    }
    let mut at = 0x100;
    for _ in 0..960 {
        let (Some(id), Some(high)) = (word(config, at), word(config, at + 2)) else { return Acs::Absent };
        if id == 0x000d {
            return word(config, at + 6).map_or(Acs::Absent, Acs::Control);
        }
        at = usize::from(high >> 4);
        if at < 0x100 {
            return Acs::Absent;
        }
    }
    Acs::Absent
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_carry_what_the_encoding_leaves() {
        let gigabytes = |speed, width| (Link::rate(speed, width) / 1e7).round() / 100.0;
        // The figures that PCI-SIG gives, per direction.
        assert_eq!([gigabytes(2.5, 1), gigabytes(5.0, 4), gigabytes(8.0, 4)], [0.25, 2.0, 3.94]);
        assert_eq!([gigabytes(16.0, 4), gigabytes(32.0, 16), gigabytes(64.0, 4)], [7.88, 63.02, 30.25]);
    }

    #[test]
    fn addresses_are_recognised() {
        assert!(["0000:01:00.0", "10000:e1:1f.7"].into_iter().all(is_address));
        assert!(!["01:00.0", "0000:01:00", "0000.01.00:0", "0000:01:00.0x", "pci0000:00", ""].into_iter().any(is_address));
    }

    /// Capability lists that run in circles or out of the space end the search.
    #[test]
    fn broken_configuration_space_is_harmless() {
        let mut circle = vec![0u8; 4096];
        circle[0x06] = 0x10;
        circle[0x34] = 0x40;
        circle[0x40..0x42].copy_from_slice(&[0x01, 0x40]);
        circle[0x100..0x104].copy_from_slice(&[0x01, 0x00, 0x01, 0x10]);
        assert_eq!((express(&circle), acs(&circle)), (None, Acs::Absent));
        let mut outside = circle.clone();
        outside[0x41] = 0xfc;
        outside[0xfc] = 0x02;
        outside[0x102..0x104].copy_from_slice(&[0xf1, 0xff]);
        assert_eq!((express(&outside), acs(&outside)), (None, Acs::Absent));
        assert_eq!((acs(&circle[..64]), acs(&circle[..256])), (Acs::Unread, Acs::Absent));
    }
}
