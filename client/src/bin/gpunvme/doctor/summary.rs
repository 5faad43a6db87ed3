//! What the report begins with: the answer in three lines; and the table of SSDs by GPUs, in the
//! form and with the abbreviations of `nvidia-smi topo -m`.

use super::render;
use super::route::Verdict;
use super::topology::Relation;
use super::{Diagnosis, Named, Ssd};
use crate::report::Report;
use gpunvme::Reason;
use std::fmt::Write;

/// The best route, why it is no better one, and what to do first.
pub fn answer(report: &mut Report, diagnosis: &Diagnosis) {
    let Some((ssd, verdict)) = diagnosis.decisive().and_then(|ssd| Some((ssd, ssd.best()?))) else { return };
    report.line("route", format!("{}{}", verdict.route, between(ssd)));
    report.line("reason", reason(verdict));
    if let Some(Named { members, missing, .. }) = &diagnosis.named {
        if members.len() > 1 {
            report.line("volume", format!("on {} devices; this is the slowest route of them", members.len()));
        }
        if let Some(why) = missing {
            report.line("volume", format!("{why}; only this device was looked at"));
        }
    }
    match (several(diagnosis), verdict.first().and_then(|first| first.change.as_ref())) {
        (Some(bind), _) => report.line("change", format!("bind all that can be spared to vfio-pci: {bind}")),
        (None, Some(change)) => match &change.command {
            Some(command) => report.line("change", format!("{}: {command}", change.text)),
            None => report.line("change", &change.text),
        },
        (None, None) => report.line("change", render::NO_CHANGE),
    }
}

fn between(ssd: &Ssd) -> String {
    let Some(function) = &ssd.function else { return String::new() };
    let disk = ssd.disks.first().map(|disk| format!(" (/dev/{})", disk.name)).unwrap_or_default();
    let pair = ssd.pairs.first().map(|pair| {
        let speed = pair.path.narrowest().map(|hop| format!(", {:.1} GB/s", hop.now / 1e9)).unwrap_or_default();
        format!(" with {}: {}{speed}", pair.gpu.address, pair.path.relation.words())
    });
    format!(", {}{disk}{}", function.address, pair.unwrap_or_default())
}

fn reason(verdict: &Verdict) -> String {
    match (verdict.reason, verdict.findings.first()) {
        (Reason::None, _) | (_, None) => "none".to_owned(),
        (reason, Some(finding)) => format!("{}: {}", reason.name(), finding.text),
    }
}

/// One command for all SSDs that only want to be bound and that nothing uses, where the one that
/// decides is one of several such.
fn several(diagnosis: &Diagnosis) -> Option<String> {
    let wants = |ssd: &Ssd| {
        let first = ssd.best().and_then(Verdict::first);
        first.is_some_and(|first| first.code == "bound-to-kernel") && ssd.disks.iter().all(|disk| disk.uses.is_empty())
    };
    if !diagnosis.decisive().is_some_and(wants) {
        return None;
    }
    let functions = diagnosis.ranked().into_iter().filter(|ssd| wants(ssd)).filter_map(|ssd| ssd.function.as_ref());
    let addresses: Vec<&str> = functions.map(|function| function.address.as_str()).collect();
    let sudo = if diagnosis.machine.root { "" } else { "sudo " };
    (addresses.len() > 1).then(|| format!("{sudo}gpunvme-vfio bind {}", addresses.join(" ")))
}

/// A row for each SSD, the best first, and a column for each GPU.
pub fn matrix(report: &mut Report, diagnosis: &Diagnosis) {
    let name = if diagnosis.stand_in { "PEER" } else { "GPU" };
    let heads: String = (0..diagnosis.gpus.len()).map(|number| format!("{:<6}", format!("{name}{number}"))).collect();
    // Writing to a String cannot fail.
    let _ = writeln!(report.text, "\n{:<14}{heads}{:<6}{:<8}", "", "GB/s", "route");
    for ssd in diagnosis.ranked() {
        let (Some(function), Some(verdict)) = (&ssd.function, ssd.best()) else { continue };
        let _ = write!(report.text, "{:<14}", function.address);
        for gpu in &diagnosis.gpus {
            let pair = ssd.pairs.iter().find(|pair| pair.gpu.address == gpu.address);
            let _ = write!(report.text, "{:<6}", pair.map_or("", |pair| abbreviation(pair.path.relation)));
        }
        let speed = ssd.pairs.first().and_then(|pair| pair.path.narrowest());
        let speed = speed.map_or("?".to_owned(), |hop| format!("{:.1}", hop.now / 1e9));
        let _ = writeln!(report.text, "{speed:<6}{:<8}{}", verdict.route.name(), usage(ssd));
    }
    report.text.push('\n');
    for (number, gpu) in diagnosis.gpus.iter().enumerate() {
        let model = gpu.model.clone().unwrap_or_else(|| gpu.id());
        let _ = writeln!(report.text, "{:<14}{}  {model}", format!("{name}{number}"), gpu.address);
    }
    report.text += "PIX: one switch; PXB: one root port; PHB: one host bridge; NODE: one socket; SYS: across sockets.\n\
                    GB/s and route are those of the nearest GPU; `gpunvme doctor -v` has the details.\n";
}

fn usage(ssd: &Ssd) -> String {
    if ssd.is_system_disk() {
        return "system disk".to_owned();
    }
    if let Some(mount) = &ssd.mounted {
        return format!("mounted on {mount}");
    }
    let disks: Vec<String> = ssd.disks.iter().map(|disk| format!("{}: {}", disk.name, render::usage(disk, &ssd.disks))).collect();
    disks.join(", ")
}

fn abbreviation(relation: Relation) -> &'static str {
    match relation {
        Relation::SameSwitch => "PIX",
        Relation::SameRootPort => "PXB",
        Relation::SameHostBridge => "PHB",
        Relation::OtherHostBridge => "NODE",
        Relation::AcrossSockets => "SYS",
    }
}

#[cfg(test)]
mod tests {
    use super::super::fixture::expand;
    use super::super::{Named, diagnose};

    const HGX: &str = include_str!("../../../../tests/trees/hgx.tree");

    fn told(text: &str) -> String {
        let expanded = expand(text);
        let diagnosis = diagnose(&expanded.tree, expanded.container.clone(), None, None).unwrap();
        super::render::render(&diagnosis, false).text
    }

    /// The tree with what hangs at 0000:15 (a GPU and an SSD under one switch) eight times, on two
    /// sockets.
    fn eight() -> String {
        let start = HGX.find("[sys/devices/pci0000:15/").unwrap();
        let end = HGX.find("[sys/devices/pci0000:37/").unwrap();
        let mut text = HGX[..start].to_owned();
        for number in 0..8 {
            let mut part = HGX[start..end].to_owned();
            for bus in 0x15..=0x19 {
                part = part.replace(&format!("0000:{bus:x}"), &format!("0000_{:x}", 0x20 + number * 16 + bus - 0x15));
            }
            part = part.replace("0000_", "0000:").replace("nvme1", &format!("nvme{}", number + 1));
            part = part.replace("259:10", &format!("259:{}", 10 + number));
            part = part.replace("iommu_groups/", &format!("iommu_groups/{}", number + 1));
            text += &part.replace("numa_node = 0", &format!("numa_node = {}", number / 4));
        }
        text
    }

    #[test]
    fn a_machine_of_eight_gpus_and_eight_ssds_fits_a_screen() {
        let text = told(&eight());
        let lines: Vec<&str> = text.lines().collect();
        assert!(lines.len() <= 26, "{text}");
        assert!(lines[3..].iter().all(|line| line.len() <= 100), "{text}");
        assert_eq!(lines[0], "route       bounce, 0000:24:00.0 (/dev/nvme1n1) with 0000:23:00.0: same switch, 7.9 GB/s");
        assert_eq!(lines[1], "reason      no-vfio: the SSD's driver is nvme");
        let all = (0..8).map(|number| format!(" 0000:{:x}4:00.0", 2 + number)).collect::<String>();
        assert_eq!(lines[2], format!("change      bind all that can be spared to vfio-pci: gpunvme-vfio bind{all}"));
        assert_eq!(
            lines[5..7],
            [
                "0000:24:00.0  PIX   NODE  NODE  NODE  SYS   SYS   SYS   SYS   7.9   bounce  nvme1n1: not in use",
                "0000:34:00.0  NODE  PIX   NODE  NODE  SYS   SYS   SYS   SYS   7.9   bounce  nvme2n1: not in use",
            ]
        );
        assert!(lines[13].starts_with("0000:01:00.0  ") && lines[13].ends_with("  system disk"), "{text}");
    }

    #[test]
    fn the_best_pair_comes_first_and_the_system_disk_last() {
        assert_eq!(
            told(HGX),
            "\
route       bounce, 0000:19:00.0 (/dev/nvme1n1) with 0000:18:00.0: same switch, 7.9 GB/s
reason      no-vfio: the SSD's driver is nvme
change      bind all that can be spared to vfio-pci: gpunvme-vfio bind 0000:19:00.0 0000:9b:00.0 0000:3a:00.0

              GPU0  GPU1  GB/s  route   \n\
0000:19:00.0  PIX   SYS   7.9   bounce  nvme1n1: not in use
0000:9b:00.0  SYS   PIX   7.9   bounce  nvme3n1: not in use
0000:3a:00.0  NODE  SYS   7.9   bounce  nvme2n1: not in use
0000:01:00.0  NODE  SYS   3.9   bounce  system disk

GPU0          0000:18:00.0  NVIDIA H100 80GB HBM3
GPU1          0000:9a:00.0  NVIDIA H100 80GB HBM3
PIX: one switch; PXB: one root port; PHB: one host bridge; NODE: one socket; SYS: across sockets.
GB/s and route are those of the nearest GPU; `gpunvme doctor -v` has the details.
"
        );
    }

    #[test]
    fn a_machine_without_a_gpu_is_told_so_first() {
        let without = HGX.replace("class = 0x030200", "class = 0x020000");
        let text = told(&without);
        assert!(text.contains("reason      not-gpu-memory: this machine shows no GPU on PCI\n"), "{text}");
        let expanded = expand(&without);
        let diagnosis = diagnose(&expanded.tree, expanded.container.clone(), Some(Named::new("sim:/tmp/image")), None).unwrap();
        let text = super::render::render(&diagnosis, false).text;
        assert!(text.starts_with("route       host\nreason      not-gpu-memory: this machine shows no GPU on PCI\n"), "{text}");
    }
}
