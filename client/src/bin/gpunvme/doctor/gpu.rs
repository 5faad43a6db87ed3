//! `gpunvme doctor --gpu`: what one GPU can do here, proved by doing it. Unlike the rest of doctor
//! it loads CUDA, and uses the GPU.

use super::container::Container;
use super::machine::Nvidia;
use super::pci::Function;
use super::proof::{Ground, OnNode, Outcome, Proof};
use super::route::{Change, Verdict};
use super::sysfs::Tree;
use crate::gpu::{Memory, find};
use crate::report::{self, Failure, Report};
use gpunvme::{DeviceMemory, Info, Mount, Reason, Route};
use gpunvme_cuda::Which;
use gpunvme_cuda::{Cuda, CudaError, Gpu, WritesOrdering};
use serde_json::{Value, json};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

/// Bytes of memory that are exported.
const EXPORT: usize = 2 << 20;

pub fn run(which: Which, directory: Option<&Path>) -> Result<Report, Failure> {
    let gpu = find(which)?;
    let tree = Tree::new("/");
    let mut report = Report::new(json!({}));
    about_gpu(&mut report, &tree, &gpu)?;
    about_export(&mut report, &gpu, &export(&gpu)?);
    let Some(directory) = directory else {
        report.line("routes", "not tried: name a directory of a mount");
        return Ok(report);
    };
    let info = Mount::open(directory)?.info()?;
    report.line("mount", format!("{}: {}, gpu route {}", directory.display(), info.device, info.route));
    report.json["mount"] = json!({
        "path": directory.to_string_lossy(),
        "device": info.device,
        "gpu_route": info.route.name(),
        "gpu_reason": info.reason.name(),
    });
    let ground = Ground::new(&gpu, directory)?;
    let [p2p, bounce, cache] = [ground.prove(Route::P2p)?, ground.prove(Route::Bounce)?, ground.prove_cache()?];
    report.json["routes"] = json!({"p2p": outcome_json(&p2p), "bounce": outcome_json(&bounce), "cache": outcome_json(&cache)});
    report.line("p2p", outcome(&p2p));
    if let Outcome::Proved(proof) = &p2p {
        report.line("", format!("the memory was exported and registered in {:.1?}", proof.first_use));
    }
    report.line("bounce", outcome(&bounce));
    report.line("cache", outcome(&cache));
    if let Outcome::Proved(proof) = &cache {
        let rate = gigabytes(proof, proof.first_use);
        report.line("", format!("what is read again; its pages were registered at {rate:.2} GB/s"));
        for on in &proof.nodes {
            let rate = speed(on).map(|rate| format!(", read at {rate:.2} GB/s")).unwrap_or_default();
            report.line("", format!("{} of its pages lie on NUMA node {}{rate}", report::size(on.bytes), on.node));
        }
    }
    let (route, reason) = match (&p2p, &bounce, &cache) {
        (Outcome::Wrong(_), ..) | (_, Outcome::Wrong(_), _) | (.., Outcome::Wrong(_)) => (Route::None, Reason::None),
        (Outcome::Proved(_), ..) => (Route::P2p, Reason::None),
        (Outcome::NotTaken(reason), Outcome::Proved(_), _) => (Route::Bounce, *reason),
        (Outcome::NotTaken(reason), Outcome::NotTaken(_), _) => (Route::Host, *reason),
    };
    about_route(&mut report, route, reason, change(&tree, &info, &gpu));
    report.code = match route {
        Route::P2p => 0,
        Route::Bounce => 3,
        Route::Host | Route::Cache => 4,
        Route::None => 1,
    };
    Ok(report)
}

fn about_gpu(report: &mut Report, tree: &Tree, gpu: &Gpu) -> Result<(), Failure> {
    let cuda = Cuda::load().map_err(gpunvme::Error::NoCuda)?.driver_version();
    let driver = Nvidia::read(tree);
    let bar = Function::read(tree, gpu.pci_address()).and_then(|function| function.memory_bar());
    let used = bar_in_use(gpu);
    report.line("gpu", gpu);
    let node = gpu.numa_node().map(|node| format!(", NUMA node {node}")).unwrap_or_default();
    report.line("", format!("{}{node}, {} of memory", gpu.pci_address(), report::size(gpu.memory())));
    let kind = |nvidia: &Nvidia| format!(", driver {} ({})", nvidia.version, if nvidia.open { "open" } else { "closed" });
    report.line("cuda", format!("{cuda}{}", driver.as_ref().map(kind).unwrap_or_default()));
    if let Some(bar) = bar {
        let used =
            used.map_or("use not known: nvidia-smi does not tell".into(), |used| format!("{} of it in use", report::size(used)));
        report.line("BAR1", format!("{}, {used}", report::size(bar.size)));
    }
    let order = match gpu.writes_ordering() {
        WritesOrdering::None => "not put in order by the GPU: the library flushes them",
        WritesOrdering::Owner => "in order for the GPU itself",
        WritesOrdering::AllDevices => "in order for all GPUs",
    };
    report.line("writes", format!("of other devices are {order}"));
    report.json["gpu"] = json!({
        "index": gpu.index(),
        "uuid": format!("GPU-{}", gpu.uuid()),
        "name": gpu.name(),
        "address": gpu.pci_address(),
        "numa_node": gpu.numa_node(),
        "memory": gpu.memory(),
        "bar1": bar.map(|bar| bar.size),
        "bar1_used": used,
        "orders_writes": gpu.writes_ordering() != WritesOrdering::None,
    });
    report.json["cuda"] = json!(cuda.to_string());
    report.json["driver"] = json!(driver.map(|nvidia| nvidia.version));
    Ok(())
}

/// Bytes of BAR1 that are in use, as nvidia-smi knows them.
fn bar_in_use(gpu: &Gpu) -> Option<u64> {
    let output = Command::new("nvidia-smi").args(["-q", "-d", "MEMORY", "-i", gpu.pci_address()]).output().ok()?;
    bar_used(&String::from_utf8_lossy(&output.stdout))
}

fn bar_used(text: &str) -> Option<u64> {
    let lines = text.lines().map(str::trim).skip_while(|line| !line.starts_with("BAR1 Memory Usage"));
    let used = lines.take(4).find_map(|line| line.strip_prefix("Used")?.split(':').nth(1))?;
    let mebibytes: u64 = used.trim().strip_suffix("MiB")?.trim().parse().ok()?;
    Some(mebibytes << 20)
}

/// What becomes of memory that is handed to another process.
enum Export {
    Unsupported,
    Refused(CudaError),
    /// The dma-buf, and how long that took; whether what the CPU maps of it is the GPU's memory,
    /// or why it cannot.
    Exported(Duration, Result<bool, gpunvme::Error>),
}

fn export(gpu: &Gpu) -> Result<Export, Failure> {
    if !gpu.dma_buf_supported() {
        return Ok(Export::Unsupported);
    }
    let memory = Memory::new(gpu, EXPORT)?;
    let start = Instant::now();
    let exported = match gpu.export_dma_buf(memory.address(), EXPORT) {
        Ok(exported) => exported,
        Err(error) => return Ok(Export::Refused(error)),
    };
    let took = start.elapsed();
    let mapping = match DeviceMemory::dma_buf(exported, EXPORT).map() {
        Ok(mapping) => mapping,
        Err(error) => return Ok(Export::Exported(took, Err(error))),
    };
    let [ours, theirs] = [0x5a, 0xa5].map(|byte| vec![byte; EXPORT]);
    let mut found = vec![0; EXPORT];
    mapping.write_at(0, &ours)?;
    memory.get(0, &mut found)?;
    let mut is_right = found == ours;
    memory.put(0, &theirs)?;
    mapping.read_at(0, &mut found)?;
    is_right &= found == theirs;
    Ok(Export::Exported(took, Ok(is_right)))
}

/// By number: the kernel's drivers say numbers that the C library has no words for.
fn refused(error: &gpunvme::Error) -> String {
    format!("mapping it is refused (errno {})", error.errno().raw_os_error())
}

fn about_export(report: &mut Report, gpu: &Gpu, export: &Export) {
    let text = match export {
        Export::Unsupported => "CUDA exports none of this GPU's memory".to_owned(),
        Export::Refused(error) => format!("not exported: {error}"),
        Export::Exported(took, mapped) => format!(
            "exported in {took:.1?}; {}",
            match mapped {
                Ok(true) => "mapped, and what the CPU sees there is what CUDA sees".to_owned(),
                Ok(false) => "mapped, and what the CPU sees there is NOT what CUDA sees".to_owned(),
                Err(error) => refused(error),
            }
        ),
    };
    report.line("dma-buf", text);
    let (exported, mapped, error) = match export {
        Export::Unsupported => (false, false, Value::Null),
        Export::Refused(error) => (false, false, json!(error.to_string())),
        Export::Exported(_, Ok(is_right)) => (true, *is_right, Value::Null),
        Export::Exported(_, Err(error)) => (true, false, json!(refused(error))),
    };
    report.json["dma_buf"] =
        json!({"supported": gpu.dma_buf_supported(), "exported": exported, "mapped": mapped, "error": error});
}

fn outcome(outcome: &Outcome) -> String {
    match outcome {
        Outcome::NotTaken(reason) => format!("not to be had ({reason})"),
        Outcome::Wrong(what) => format!("WRONG: {what}"),
        Outcome::Proved(proof) => {
            let (size, read) = (report::size(proof.bytes), gigabytes(proof, proof.read));
            let write = proof.write.map(|took| format!("written at {:.2} GB/s and ", gigabytes(proof, took)));
            let write = write.unwrap_or_default();
            format!("proved: {size} {write}read at {read:.2} GB/s, sha256 {}", &proof.sha256[..16])
        }
    }
}

fn outcome_json(outcome: &Outcome) -> Value {
    match outcome {
        Outcome::NotTaken(reason) => json!({"proved": false, "reason": reason.name()}),
        Outcome::Wrong(what) => json!({"proved": false, "wrong": what}),
        Outcome::Proved(proof) => json!({
            "proved": true,
            "bytes": proof.bytes,
            "first_use_seconds": proof.first_use.as_secs_f64(),
            "write_gb_per_s": proof.write.map(|took| gigabytes(proof, took)),
            "read_gb_per_s": gigabytes(proof, proof.read),
            "sha256": proof.sha256,
            "nodes": proof.nodes.iter().map(node_json).collect::<Vec<_>>(),
        }),
    }
}

fn node_json(on: &OnNode) -> Value {
    json!({"node": on.node, "bytes": on.bytes, "read_gb_per_s": speed(on)})
}

/// At what speed pages of a node are read, if ranges lie mostly there.
fn speed(on: &OnNode) -> Option<f64> {
    (on.read_bytes > 0).then(|| on.read_bytes as f64 / on.read.as_secs_f64() / 1e9)
}

fn gigabytes(proof: &Proof, took: Duration) -> f64 {
    proof.bytes as f64 / took.as_secs_f64() / 1e9
}

/// What the machine itself shows to be in the way between this mount's device and the GPU.
fn change(tree: &Tree, info: &Info, gpu: &Gpu) -> Option<Change> {
    let named = Some(super::Named::new(&info.device));
    let diagnosis = super::diagnose(tree, Container::probe(), named, Some(gpu.pci_address())).ok()?;
    diagnosis.verdict().and_then(Verdict::first).and_then(|finding| finding.change.clone())
}

fn about_route(report: &mut Report, route: Route, reason: Reason, change: Option<Change>) {
    report.line("route", if route == Route::None { "none that can be trusted" } else { route.name() });
    report.json["route"] = json!(route.name());
    report.json["reason"] = json!(reason.name());
    report.json["change"] = Value::Null;
    if route == Route::P2p || route == Route::None {
        return;
    }
    report.line("reason", report::reason(reason));
    if let Some(change) = change {
        report.line("change", &change.text);
        if let Some(command) = &change.command {
            report.line("", command);
        }
        report.json["change"] = json!({"text": change.text, "command": change.command});
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nvidia_smi_tells_the_use_of_bar1() {
        let text = "    FB Memory Usage\n        Total                             : 143771 MiB\n        Used                              : 600 MiB\n\
                    BAR1 Memory Usage\n        Total                             : 262144 MiB\n        Used                              : 17 MiB\n        Free : 262127 MiB\n";
        assert_eq!(bar_used(text), Some(17 << 20));
        assert_eq!(bar_used("BAR1 Memory Usage\n Total : N/A\n Used : N/A\n"), None);
        assert_eq!(bar_used("No devices were found"), None);
    }
}
