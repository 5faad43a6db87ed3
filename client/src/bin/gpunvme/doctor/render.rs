//! The diagnosis, for people and for programs. The JSON is documented in docs/reference/doctor.md;
//! its names stay.

use super::machine::Machine;
use super::pci::{Acs, Function, Kind};
use super::route::{Effect, Finding, Verdict};
use super::topology::{Forwards, Hop, Path};
use super::{Container, Diagnosis, Disk, Pair, Ssd, summary};
use crate::report::{self, Report};
use gpunvme::{Reason, Route};
use serde_json::{Value, json};

/// The advice where there is none.
pub(super) const NO_CHANGE: &str = "nothing that this program knows would make it faster";

/// The answer; then the table of all SSDs, or, of a device that was named and with `verbose`, the
/// details.
pub fn render(diagnosis: &Diagnosis, verbose: bool) -> Report {
    let machine = &diagnosis.machine;
    let (best, named) = (diagnosis.verdict(), diagnosis.named.as_ref());
    let mut report = Report::new(json!({
        "device": named.map(|named| &named.device),
        "members": named.map(|named| &named.members),
        "members_missing": named.and_then(|named| named.missing.as_ref()),
        "route": best.map_or(Route::Host, |verdict| verdict.route).name(),
        "reason": best.map_or(Reason::NoVfio, |verdict| verdict.reason).name(),
        "change": best.and_then(Verdict::first).map(change),
        "ssds": diagnosis.ssds.iter().map(ssd_json).collect::<Vec<_>>(),
        "gpus": diagnosis.gpus.iter().map(function_json).collect::<Vec<_>>(),
        "machine": machine_json(machine),
        "unreadable": diagnosis.refused,
    }));
    summary::answer(&mut report, diagnosis);
    let has_table = named.is_none_or(|named| named.members.len() > 1) && diagnosis.ssds.iter().any(|ssd| !ssd.pairs.is_empty());
    if has_table {
        summary::matrix(&mut report, diagnosis);
    }
    if has_table && !verbose {
        return report;
    }
    for ssd in diagnosis.ranked() {
        report.text.push('\n');
        about_ssd(&mut report, ssd);
        if let Some(pair) = ssd.pairs.first() {
            about_pair(&mut report, machine, pair, diagnosis.stand_in);
            for other in &ssd.pairs[1..] {
                report.line("other gpu", short(other));
            }
        } else {
            for gpu in &diagnosis.gpus {
                about_gpu(&mut report, machine, gpu, diagnosis.stand_in);
            }
        }
        if let Some(verdict) = ssd.best() {
            if diagnosis.ssds.len() > 1 {
                about_verdict(&mut report, verdict);
            } else {
                about_findings(&mut report, verdict);
            }
        }
    }
    report.text.push('\n');
    about_machine(&mut report, machine);
    if !diagnosis.refused.is_empty() {
        report.line("not seen", format!("{} (only root may)", diagnosis.refused.join(", ")));
    }
    report
}

/// Breaks lines of more than so many columns between words, and goes on under the values.
pub fn fold(text: &str, columns: usize) -> String {
    const INDENT: &str = "            ";
    let mut folded = String::new();
    for line in text.lines() {
        let (name, value) = line.split_at_checked(INDENT.len()).unwrap_or((line, ""));
        folded += name;
        let mut column = name.len();
        for (at, word) in value.split(' ').enumerate() {
            if column + 1 + word.chars().count() > columns && column > INDENT.len() {
                folded = folded.trim_end().to_owned() + "\n" + INDENT;
                column = INDENT.len();
            } else if at > 0 {
                folded.push(' ');
                column += 1;
            }
            folded += word;
            column += word.chars().count();
        }
        folded.push('\n');
    }
    folded
}

fn about_ssd(report: &mut Report, ssd: &Ssd) {
    let model = ssd.model.as_deref();
    let Some(function) = &ssd.function else { return report.line("ssd", model.unwrap_or_default()) };
    let driver = function.driver.as_deref().unwrap_or("none");
    let what = model.map_or(function.id(), |model| format!("{model} ({})", function.id()));
    report.line("ssd", format!("{}  {what}, driver {driver}{}", function.address, node(function)));
    for disk in &ssd.disks {
        report.line("", format!("/dev/{}, {}, {}", disk.name, report::size(disk.bytes), usage(disk, &ssd.disks)));
    }
    if let Some(mount) = &ssd.mounted {
        report.line("", format!("mounted on {mount} as vfio:{}", function.address));
    }
    if let Some(hop) = ssd.hops.first() {
        report.line("link", link(hop));
    }
    let group = match function.group {
        None => "none: no IOMMU stands before it".to_owned(),
        Some(group) => {
            let domain = ssd.domain.as_ref().map(|domain| format!(" ({domain} while the kernel drives it)")).unwrap_or_default();
            format!("{group}{domain}, {}", together(&ssd.sharers))
        }
    };
    report.line("group", group);
}

/// What uses a disk, or one of its partitions, which are among `all`.
pub(super) fn usage(disk: &Disk, all: &[Disk]) -> String {
    // nvme0n1p2 of nvme0n1, and vda2 of vda; nvme0n10 is another.
    let is_part = |other: &&Disk| {
        let ends_in_a_digit = disk.name.ends_with(|last: char| last.is_ascii_digit());
        let rest = other.name.strip_prefix(&disk.name);
        let rest = rest.and_then(|rest| if ends_in_a_digit { rest.strip_prefix('p') } else { Some(rest) });
        rest.is_some_and(|rest| !rest.is_empty() && rest.bytes().all(|byte| byte.is_ascii_digit()))
    };
    if !disk.uses.is_empty() {
        disk.uses.join(", ")
    } else if all.iter().filter(is_part).any(|part| !part.uses.is_empty()) {
        "its partitions are in use".to_owned()
    } else {
        "not in use".to_owned()
    }
}

fn together(sharers: &[Function]) -> String {
    let list: Vec<String> = sharers
        .iter()
        .map(|other| format!("{} ({}, driver {})", other.address, other.id(), other.driver.as_deref().unwrap_or("none")))
        .collect();
    if list.is_empty() { "shared with nothing".to_owned() } else { format!("shared with {}", list.join(", ")) }
}

fn about_pair(report: &mut Report, machine: &Machine, pair: &Pair, stand_in: bool) {
    let path = &pair.path;
    about_gpu(report, machine, &pair.gpu, stand_in);
    let common = path.common.as_ref().map(|bridge| format!(" ({bridge})")).unwrap_or_default();
    report.line("path", format!("{}{common}{}", path.relation.words(), nodes(path)));
    for hop in &path.hops {
        report.line("", format!("above {}  {}", hop.below, link(hop)));
    }
    for port in &path.ports {
        report.line("acs", format!("{} ({}): {}", port.address, kind(port.kind), acs(port.acs)));
    }
    match (path.narrowest(), path.best()) {
        (Some(hop), Some(best)) => {
            let later =
                if best > hop.now { format!(", {:.1} when all links are at their best", best / 1e9) } else { String::new() };
            report.line("bandwidth", format!("{:.1} GB/s, by the link above {}{later}", hop.now / 1e9, hop.below));
        }
        _ => report.line("bandwidth", "not known: no link on the path shows its speed"),
    }
    for (at, way) in pair.ways.iter().enumerate() {
        let answer = match way.possible {
            Some(true) => "yes",
            Some(false) => "no",
            None => "not known",
        };
        let lacks = way.lacks.as_ref().map(|lacks| format!(": {lacks}")).unwrap_or_default();
        report.line(if at == 0 { "ways" } else { "" }, format!("{} ({}): {answer}{lacks}", way.name, way.of));
    }
}

fn about_gpu(report: &mut Report, machine: &Machine, gpu: &Function, stand_in: bool) {
    report.line(if stand_in { "peer" } else { "gpu" }, gpu_line(machine, gpu));
    if let Some(bar) = gpu.memory_bar() {
        let name = if stand_in { format!("resource {}", bar.index) } else { "BAR1".to_owned() };
        report.line("", format!("{name}: {}", report::size(bar.size)));
    }
}

fn nodes(path: &Path) -> String {
    match path.nodes {
        [Some(a), Some(b)] if a == b => format!(", both at NUMA node {a}"),
        [Some(a), Some(b)] => format!(", NUMA nodes {a} and {b}"),
        _ => String::new(),
    }
}

fn gpu_line(machine: &Machine, gpu: &Function) -> String {
    let driver = match (gpu.driver.as_deref(), &machine.nvidia) {
        (Some("nvidia"), Some(nvidia)) => {
            let cuda = nvidia.cuda().map(|cuda| format!(", CUDA {cuda}")).unwrap_or_default();
            format!("nvidia {}{cuda}", nvidia.version)
        }
        (driver, _) => driver.unwrap_or("none").to_owned(),
    };
    let model = gpu.model.as_ref().map_or(gpu.id(), |model| format!("{model} ({})", gpu.id()));
    format!("{}  {model}, driver {driver}{}", gpu.address, node(gpu))
}

fn node(function: &Function) -> String {
    function.node.map(|node| format!(", NUMA node {node}")).unwrap_or_default()
}

fn short(pair: &Pair) -> String {
    let speed = pair.path.narrowest().map(|hop| format!(", {:.1} GB/s", hop.now / 1e9)).unwrap_or_default();
    format!("{}  {}{speed}: {}", pair.gpu.address, pair.path.relation.words(), pair.verdict.route)
}

fn link(hop: &Hop) -> String {
    let now = format!("{} GT/s x{}, {:.1} GB/s", hop.link.speed, hop.link.width, hop.now / 1e9);
    if hop.now < hop.best { format!("{now} (could be {:.1})", hop.best / 1e9) } else { now }
}

fn kind(kind: Kind) -> &'static str {
    match kind {
        Kind::Endpoint => "endpoint",
        Kind::RootPort => "root port",
        Kind::Upstream => "switch, upstream",
        Kind::Downstream => "switch, downstream",
        Kind::Bridge => "bridge",
    }
}

fn acs(acs: Acs) -> String {
    match acs {
        Acs::Unread => "not readable".to_owned(),
        Acs::Absent => "none".to_owned(),
        Acs::Control(0) => "all off".to_owned(),
        Acs::Control(_) => acs.services().join(" "),
    }
}

fn about_verdict(report: &mut Report, verdict: &Verdict) {
    report.line("route", verdict.route);
    report.line("reason", if verdict.reason == Reason::None { "none".to_owned() } else { verdict.reason.name().to_owned() });
    about_findings(report, verdict);
    match verdict.first() {
        None => report.line("change", NO_CHANGE),
        Some(finding) => {
            if let Some(change) = &finding.change {
                report.line("change", &change.text);
                if let Some(command) = &change.command {
                    report.line("", command);
                }
            }
        }
    }
    let more = verdict.findings.iter().skip(1).filter(|finding| finding.effect == Effect::Blocks).count();
    if more > 0 && verdict.first().is_some() {
        report.line("", format!("and then {more} more: ask again"));
    }
}

fn about_findings(report: &mut Report, verdict: &Verdict) {
    for finding in &verdict.findings {
        report.line(finding.effect.name(), format!("{}: {}", finding.code, finding.text));
    }
}

fn about_machine(report: &mut Report, machine: &Machine) {
    let iommu = match (&machine.iommu.units[..], &machine.iommu.turned_off) {
        ([], None) => "off".to_owned(),
        ([], Some(parameter)) => format!("off, by {parameter}"),
        (units, _) => format!("on ({})", units.join(" ")),
    };
    report.line("iommu", iommu);
    let module = match (machine.vfio.loaded, machine.vfio.available) {
        (true, _) => "vfio-pci is loaded",
        (false, true) => "vfio-pci is a module",
        (false, false) => "no vfio-pci",
    };
    let container = match &machine.vfio.container {
        Container::Type1 => "/dev/vfio/vfio is type1".to_owned(),
        Container::IommufdCompat => "/dev/vfio/vfio is iommufd's imitation".to_owned(),
        Container::NoType1 => "/dev/vfio/vfio has no type1".to_owned(),
        Container::Absent if machine.vfio.built_compat => "no /dev/vfio/vfio; it would be iommufd's imitation".to_owned(),
        Container::Absent => "no /dev/vfio/vfio".to_owned(),
        Container::Unknown(why) => format!("/dev/vfio/vfio: {why}"),
    };
    report.line("vfio", format!("{module}, {container}"));
    let cuda = match (&machine.nvidia, &machine.libcuda) {
        (None, None) => "none".to_owned(),
        (None, Some(library)) => format!("{library}, and no driver"),
        (Some(nvidia), library) => {
            let kind = if nvidia.open { "open" } else { "closed" };
            let library = library.as_ref().map_or("no libcuda.so.1".to_owned(), |library| format!("library {library}"));
            format!("up to {}, driver {} ({kind}), {library}", nvidia.cuda().unwrap_or("?"), nvidia.version)
        }
    };
    report.line("cuda", cuda);
    report.line("memlock", machine.memlock.map_or("unlimited".to_owned(), report::size));
    let pages: Vec<String> = machine
        .huge_pages
        .iter()
        .filter(|pages| pages.total > 0)
        .map(|pages| format!("{} of {} pages of {} free", pages.free, pages.total, report::size(pages.size)))
        .collect();
    report.line("hugepages", if pages.is_empty() { "none".to_owned() } else { pages.join(", ") });
    let virtual_machine = if machine.is_virtual { ", in a virtual machine" } else { "" };
    report.line("kernel", format!("{}{virtual_machine}", machine.kernel));
}

fn ssd_json(ssd: &Ssd) -> Value {
    let verdict = ssd.best();
    let disks: Vec<Value> = ssd
        .disks
        .iter()
        .map(|disk| json!({"name": format!("/dev/{}", disk.name), "bytes": disk.bytes, "uses": disk.uses}))
        .collect();
    json!({
        "address": ssd.function.as_ref().map(|function| &function.address),
        "function": ssd.function.as_ref().map(function_json),
        "model": ssd.model,
        "disks": disks,
        "mounted": ssd.mounted,
        "group_domain": ssd.domain,
        "group_shared_with": ssd.sharers.iter().map(|other| &other.address).collect::<Vec<_>>(),
        "links": ssd.hops.iter().map(hop_json).collect::<Vec<_>>(),
        "route": verdict.map(|verdict| verdict.route.name()),
        "reason": verdict.map(|verdict| verdict.reason.name()),
        "change": verdict.and_then(Verdict::first).map(change),
        "findings": verdict.map(findings).unwrap_or_default(),
        "pairs": ssd.pairs.iter().map(pair_json).collect::<Vec<_>>(),
    })
}

fn pair_json(pair: &Pair) -> Value {
    let path = &pair.path;
    let ports: Vec<Value> = path
        .ports
        .iter()
        .map(|port| {
            let services = match port.acs {
                Acs::Unread => Value::Null,
                acs => json!(acs.services()),
            };
            json!({"address": port.address, "kind": kind(port.kind), "acs": services, "acs_present": match port.acs {
                Acs::Unread => Value::Null,
                acs => json!(acs != Acs::Absent),
            }})
        })
        .collect();
    json!({
        "gpu": pair.gpu.address,
        "relation": path.relation.name(),
        "common_bridge": path.common,
        "links": path.hops.iter().map(hop_json).collect::<Vec<_>>(),
        "ports": ports,
        "bytes_per_second": path.narrowest().map(|hop| hop.now.round()),
        "bytes_per_second_at_best": path.best().map(f64::round),
        "root_complex": match path.forwards {
            Forwards::Known => "known",
            Forwards::Unknown => "unknown",
            Forwards::SameBridgeOnly => "same-bridge-only",
        },
        "route": pair.verdict.route.name(),
        "reason": pair.verdict.reason.name(),
        "change": pair.verdict.first().map(change),
        "findings": findings(&pair.verdict),
        "ways": pair.ways.iter().map(|way| json!({"name": way.name, "possible": way.possible, "lacks": way.lacks})).collect::<Vec<_>>(),
    })
}

fn findings(verdict: &Verdict) -> Vec<Value> {
    let finding = |finding: &Finding| json!({"code": finding.code, "effect": finding.effect.name(), "text": finding.text, "change": finding.change.as_ref().map(|_| change(finding))});
    verdict.findings.iter().map(finding).collect()
}

fn change(finding: &Finding) -> Value {
    match &finding.change {
        None => Value::Null,
        Some(change) => json!({"for": finding.code, "text": change.text, "command": change.command}),
    }
}

fn hop_json(hop: &Hop) -> Value {
    json!({
        "above": hop.below,
        "gigatransfers": hop.link.speed,
        "lanes": hop.link.width,
        "bytes_per_second": hop.now.round(),
        "bytes_per_second_at_best": hop.best.round(),
    })
}

fn function_json(function: &Function) -> Value {
    json!({
        "address": function.address,
        "id": function.id(),
        "model": function.model,
        "driver": function.driver,
        "iommu_group": function.group,
        "numa_node": function.node,
        "bars": function.bars.iter().map(|bar| json!({"resource": bar.index, "bytes": bar.size, "prefetchable": bar.prefetchable})).collect::<Vec<_>>(),
    })
}

fn machine_json(machine: &Machine) -> Value {
    let kernel = &machine.kernel_facts;
    json!({
        "kernel": machine.kernel,
        "virtual": machine.is_virtual,
        "root": machine.root,
        "iommu": {"on": !machine.iommu.units.is_empty(), "units": machine.iommu.units, "firmware_table": machine.iommu.in_firmware},
        "vfio": {"loaded": machine.vfio.loaded, "available": machine.vfio.available, "container": machine.vfio.container.name()},
        "memlock": machine.memlock,
        "hugepages": machine.huge_pages.iter().map(|pages| json!({"bytes": pages.size, "total": pages.total, "free": pages.free})).collect::<Vec<_>>(),
        "nvidia_driver": machine.nvidia.as_ref().map(|nvidia| &nvidia.version),
        "nvidia_open": machine.nvidia.as_ref().map(|nvidia| nvidia.open),
        "cuda": machine.nvidia.as_ref().and_then(|nvidia| nvidia.cuda()),
        "libcuda": machine.libcuda,
        "kernel_options": {"CONFIG_PCI_P2PDMA": kernel.has("CONFIG_PCI_P2PDMA"), "CONFIG_DMABUF_TOKEN": kernel.has("CONFIG_DMABUF_TOKEN")},
        "io_uring_disabled": kernel.io_uring_disabled,
        "nvme_multipath": kernel.multipath,
        "nvidia_fs": kernel.nvidia_fs,
        "nvidia_registry": kernel.nvidia_registry,
        "udmabuf": kernel.udmabuf,
    })
}

#[cfg(test)]
mod tests {
    use super::fold;

    #[test]
    fn long_lines_go_on_under_their_values() {
        let text = "ssd         0000:01:00.0  a disk\n\ndoubt       acs: one two three four five\nlongest     aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa b\n";
        let folded = "ssd         0000:01:00.0\n            a disk\n\ndoubt       acs: one two\n            three four\n            five\n\
            longest     aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa\n            b\n";
        assert_eq!(fold(text, 25), folded);
        assert_eq!(fold(text, 120), text);
    }
}
