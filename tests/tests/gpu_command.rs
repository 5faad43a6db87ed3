//! Tests of the command `gpunvme` with a GPU, whose part the software CUDA driver plays, and
//! without a GPU.

use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::{Output, Stdio};

use gpunvme_tests::mounted::{Mounted, text};
use gpunvme_tests::{needs_mount, programs, scratch_dir, software_cuda, tree};
use serde_json::Value;
use sha2::{Digest, Sha256};

/// More than one part of a transfer, and not whole blocks.
const LEN: u64 = (17 << 20) + 4321;

fn gpunvme(settings: &str, arguments: &[&str], path: &Path, input: &[u8]) -> Output {
    let (command, options) = arguments.split_first().unwrap();
    let mut child = programs::command("gpunvme")
        .args([command, "--json"])
        .arg(path)
        .args(options)
        .env("LD_LIBRARY_PATH", software_cuda::folder())
        .env("SOFTWARE_CUDA", settings)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("gpunvme runs");
    let _ = child.stdin.take().unwrap().write_all(input); // a command that fails at once reads nothing
    child.wait_with_output().unwrap()
}

fn json(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {}", text(output)))
}

fn hex(data: &[u8]) -> String {
    Sha256::digest(data).iter().map(|byte| format!("{byte:02x}")).collect()
}

#[test]
fn files_go_to_gpu_memory_and_back() {
    needs_mount!();
    let volume = Mounted::new();
    let (data, file, copy) = (tree::pattern(4, LEN as usize), volume.path("file"), volume.path("copy"));
    fs::write(&file, &data).unwrap();
    let outside = scratch_dir();
    let output = outside.path().join("output");

    let read = json(&gpunvme("", &["read", "--to", "gpu:0", "--checksum", "--output", output.to_str().unwrap()], &file, b""));
    assert_eq!(
        (read["route"].as_str(), read["bytes"].as_u64(), read["sha256"].as_str()),
        (Some("bounce"), Some(LEN), Some(&*hex(&data)))
    );
    assert!(read["gpu"].as_str().unwrap().contains("Software GPU"), "{read}");
    assert!(fs::read(&output).unwrap() == data);
    let part = ["read", "--to", "gpu:1", "--offset", "5000", "--length", "70001", "--checksum"];
    assert_eq!(json(&gpunvme("gpus=2", &part, &file, b""))["sha256"], *hex(&data[5000..75001]));

    // By UUID, from a pipe, whose length is unknown.
    let uuid = read["gpu"].as_str().unwrap().split(['(', ',']).nth(1).unwrap();
    let written = json(&gpunvme("", &["write", "--from", &format!("gpu:{uuid}"), "--checksum"], &copy, &data));
    assert_eq!((written["bytes"].as_u64(), written["sha256"].as_str()), (Some(LEN), Some(&*hex(&data))));
    assert!(fs::read(&copy).unwrap() == data);
    assert_eq!(json(&gpunvme("", &["write", "--from", "gpu:0", "--offset", "3"], &copy, b"abc"))["bytes"], 3);
    assert!(fs::read(&copy).unwrap()[..8] == [&data[..3], b"abc", &data[6..8]].concat());
}

#[test]
fn what_cannot_be_is_said_before_anything_changes() {
    needs_mount!();
    let volume = Mounted::new();
    let file = volume.path("file");
    fs::write(&file, "precious").unwrap();
    let nowhere = volume.path("."); // has no libcuda
    for (settings, options, reason) in [
        ("", ["--from", "gpu:0", "--require", "p2p"], "bounce, and p2p is required"),
        ("", ["--from", "gpu:0", "--require", "host"], "bounce, and host is required"),
        ("", ["--from", "gpu:2", "--require", "bounce"], "there is no GPU 2"),
        ("gpus=0", ["--from", "gpu:0", "--require", "bounce"], "CUDA sees no GPU"),
        ("version=11000", ["--from", "gpu:0", "--require", "bounce"], "offers CUDA 11.0"),
    ] {
        let output = gpunvme(settings, &[&["write"][..], &options].concat(), &file, b"other");
        assert_eq!((output.status.code(), output.stdout.len()), (Some(1), 0), "{}", text(&output));
        assert!(text(&output).contains(reason), "{}", text(&output));
        assert_eq!(fs::read(&file).unwrap(), b"precious");
    }
    let refused = gpunvme("", &["read", "--to", "gpu:0", "--require", "p2p"], &file, b"");
    assert!(refused.status.code() == Some(1) && text(&refused).contains("bound to vfio-pci"), "{}", text(&refused));
    let without =
        programs::command("gpunvme").arg("read").arg(&file).args(["--to", "gpu:0"]).env("LD_LIBRARY_PATH", nowhere).output();
    let without = without.unwrap();
    if without.status.code() != Some(0) {
        assert!(text(&without).contains("gpunvme: no GPU can be used: "), "{}", text(&without));
    }
}

#[test]
fn bench_measures_gpu_memory() {
    needs_mount!();
    let volume = Mounted::new();
    let short = ["bench", "--memory", "gpu:0", "--length", "4M", "--sizes", "4K,1M", "--threads", "1,2", "--time", "0.01"];
    let output = gpunvme("", &short, volume.root().as_path(), b"");
    let run = json(&output);
    assert!(output.status.success() && run["memory"].as_str().unwrap().contains("Software GPU"), "{run}");
    let rows = run["results"].as_array().unwrap();
    assert!(rows.len() == 8 && rows.iter().all(|row| row["route"] == "bounce" && row["gb_per_s"].as_f64() > Some(0.0)), "{run}");
    let refused = gpunvme("gpus=0", &short, volume.root().as_path(), b"");
    assert!(refused.status.code() == Some(1) && text(&refused).contains("CUDA sees no GPU"), "{}", text(&refused));
    assert_eq!(fs::read_dir(volume.root()).unwrap().count(), 0);
}

#[test]
fn doctor_proves_what_it_says() {
    needs_mount!();
    let volume = Mounted::new();
    let output = gpunvme("", &["doctor", "--gpu", "0"], volume.root().as_path(), b"");
    let proved = json(&output);
    assert_eq!(output.status.code(), Some(3), "{proved}");
    assert_eq!((proved["route"].as_str(), proved["reason"].as_str()), (Some("bounce"), Some("no-vfio")));
    assert_eq!(
        (&proved["routes"]["p2p"]["proved"], &proved["routes"]["bounce"]["proved"]),
        (&Value::Bool(false), &Value::Bool(true))
    );
    assert!(proved["routes"]["bounce"]["read_gb_per_s"].as_f64().unwrap() > 0.0);
    let cache = &proved["routes"]["cache"];
    assert!(
        cache["proved"] == true && cache["read_gb_per_s"].as_f64() > Some(0.0) && cache["write_gb_per_s"].is_null(),
        "{cache}"
    );
    // Where its pages lie, of a kernel with NUMA.
    let nodes = cache["nodes"].as_array().unwrap();
    assert_eq!(nodes.is_empty(), !Path::new("/proc/self/numa_maps").exists(), "{cache}");
    let bytes: u64 = nodes.iter().map(|on| on["bytes"].as_u64().unwrap()).sum();
    assert!(nodes.is_empty() || (1..=cache["bytes"].as_u64().unwrap()).contains(&bytes), "{cache}");
    assert!(nodes.is_empty() || nodes.iter().any(|on| on["read_gb_per_s"].as_f64() > Some(0.0)), "{cache}");
    assert_eq!((&proved["dma_buf"]["exported"], &proved["dma_buf"]["mapped"]), (&Value::Bool(true), &Value::Bool(true)));
    assert_eq!(fs::read_dir(volume.root()).unwrap().count(), 0, "its file is gone");

    // A copy that fails is a failure, not a route.
    let broken = gpunvme("copy-fails=9", &["doctor", "--gpu", "0"], volume.root().as_path(), b"");
    assert!(broken.status.code() == Some(1) && text(&broken).contains("CUDA_ERROR_ECC_UNCORRECTABLE"), "{}", text(&broken));
    let copied = json(&gpunvme("copies-by-processor=1000000000", &["doctor", "--gpu", "0"], volume.root().as_path(), b""));
    assert_eq!((&copied["routes"]["cache"]["proved"], &copied["route"]), (&Value::Bool(false), &Value::from("bounce")));
    let refused = json(&gpunvme("dma-buf=0", &["doctor", "--gpu", "0"], volume.root().as_path(), b""));
    assert_eq!((&refused["dma_buf"]["supported"], &refused["route"]), (&Value::Bool(false), &Value::from("bounce")));
}
