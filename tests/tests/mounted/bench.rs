//! `gpunvme bench`: it measures what it says, keeps and compares runs, and leaves nothing behind.

use std::fs;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Output, Stdio};
use std::time::{Duration, Instant};

use gpunvme_tests::mounted::{Mounted, text};
use gpunvme_tests::{needs_mount, programs, scratch_dir};
use serde_json::Value;

const SHORT: [&str; 8] = ["--length", "8M", "--sizes", "4K,1M", "--threads", "1,3", "--time", "0.01"];

fn bench(arguments: &[&str], dir: &Path) -> Output {
    programs::command("gpunvme").arg("bench").args(arguments).arg(dir).output().unwrap()
}

/// Waits until nothing of a measurement is left: the kernel tells the daemon of a file's end later.
fn is_as_before(volume: &Mounted, free: u64) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while rustix::fs::statvfs(volume.root()).unwrap().f_bfree < free {
        assert!(Instant::now() < deadline, "the file's blocks are not free again");
        std::thread::sleep(Duration::from_millis(20));
    }
    assert_eq!(fs::read_dir(volume.root()).unwrap().count(), 0, "a name is left");
}

#[test]
fn a_bench_measures_keeps_compares_and_leaves_nothing() {
    needs_mount!();
    let volume = Mounted::new();
    let outside = scratch_dir();
    let (kept, plot) = (outside.path().join("kept.json"), outside.path().join("plot.svg"));
    let free = rustix::fs::statvfs(volume.root()).unwrap().f_bfree;
    let keep = [&SHORT[..], &["--save", kept.to_str().unwrap(), "--plot", plot.to_str().unwrap()]].concat();

    let told = bench(&keep, &volume.root());
    assert!(told.status.success() && told.stderr.is_empty(), "{}", text(&told));
    let run: Value = serde_json::from_slice(&fs::read(&kept).unwrap()).unwrap();
    let rows = run["results"].as_array().unwrap();
    let measured: Vec<_> = rows.iter().map(|row| (row["operation"].as_str().unwrap(), &row["size"], &row["threads"])).collect();
    assert_eq!(measured.len(), 8);
    for operation in ["read", "write"] {
        for (size, threads) in [(4096, 1), (4096, 3), (1 << 20, 1), (1 << 20, 3)] {
            assert!(measured.iter().any(|row| row.0 == operation && row.1 == size && row.2 == threads), "{measured:?}");
        }
    }
    let mut written = 8 << 20;
    for row in rows {
        let (requests, size) = (row["requests"].as_u64().unwrap(), row["size"].as_u64().unwrap());
        assert!(requests >= row["threads"].as_u64().unwrap(), "{row}");
        assert_eq!((&row["route"], &row["bytes_by_route"]["host"]), (&"host".into(), &(requests * size).into()));
        let latency: Vec<f64> =
            ["p50", "p90", "p99", "p999", "max"].iter().map(|part| row["latency"][part].as_f64().unwrap()).collect();
        assert!(latency[0] > 0.0 && latency.is_sorted() && latency[4] <= row["seconds"].as_f64().unwrap() * 1.01, "{row}");
        if row["operation"] == "write" {
            // Each thread's first write is made, and not measured.
            written += (requests + row["threads"].as_u64().unwrap()) * size;
        }
    }
    assert_eq!(run["written"], written, "what it did to the volume");
    let svg = fs::read_to_string(&plot).unwrap();
    assert!(svg.starts_with("<svg") && svg.contains("3 threads") && svg.ends_with("</svg>\n"), "{svg}");
    is_as_before(&volume, free);

    let compare = [&SHORT[..], &["--compare", kept.to_str().unwrap()]].concat();
    let compared = text(&bench(&compare, &volume.root()));
    assert!(compared.contains("GB/s before") && compared.matches(" %\n").count() == 8, "{compared}");
    let other = ["--compare", kept.to_str().unwrap(), "--length", "8M", "--sizes", "8K", "--threads", "1", "--time", "0.01"];
    let json = bench(&[&["--json"], &other[..]].concat(), &volume.root());
    let json: Value = serde_json::from_slice(&json.stdout).unwrap();
    assert_eq!((json["compared"].as_array().unwrap().len(), json["results"].as_array().unwrap().len()), (0, 2));
}

#[test]
fn a_bench_that_cannot_be_says_so_and_changes_nothing() {
    needs_mount!();
    let volume = Mounted::new();
    let outside = scratch_dir();
    let free = rustix::fs::statvfs(volume.root()).unwrap();
    let too_long = (free.f_bfree * free.f_frsize / 2 + (1 << 20)).to_string();
    let garbage = outside.path().join("garbage");
    fs::write(&garbage, "{\"version\": 1}").unwrap();
    let garbage = garbage.to_str().unwrap();
    for (arguments, dir, words, code) in [
        (&["--length", &too_long][..], &volume.root(), "--length makes it shorter", 1),
        (&["--length", "1M", "--sizes", "2M"], &volume.root(), "does not fit", 1),
        (&["--compare", garbage], &volume.root(), "garbage: does not hold the figures", 1),
        (&["--length", "1M", "--sizes", "4K", "--save", "/nowhere/at/all"], &volume.root(), "/nowhere/at/all", 1),
        (&["--length", "1M"], &outside.path().to_path_buf(), "not on a gpunvme mount", 1),
        (&["--threads", "0"], &volume.root(), "--threads", 2),
        (&["--memory", "pci:0000:02:00.0/2"], &volume.root(), "--memory", 2),
    ] {
        let refused = bench(arguments, dir);
        assert_eq!((refused.status.code(), refused.stdout.len()), (Some(code), 0), "{}", text(&refused));
        assert!(text(&refused).contains(words), "{}", text(&refused));
    }
    // A user who may not write there.
    let user = programs::command("gpunvme").arg("bench").args(SHORT).arg(volume.root()).uid(65534).gid(65534).output().unwrap();
    assert_eq!(user.status.code(), Some(1), "{}", text(&user));
    assert!(text(&user).contains("Permission denied"), "{}", text(&user));
    is_as_before(&volume, free.f_bfree);
    assert!(bench(&SHORT, &volume.unmount().mount_with("ro").root()).status.code() == Some(1));
}

#[test]
fn a_bench_that_is_killed_leaves_nothing() {
    needs_mount!();
    let volume = Mounted::new();
    let free = rustix::fs::statvfs(volume.root()).unwrap().f_bfree;
    let mut running = programs::command("gpunvme")
        .args(["bench", "--length", "8M", "--sizes", "4K", "--threads", "4", "--time", "600"])
        .arg(volume.root())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let deadline = Instant::now() + Duration::from_secs(60);
    while rustix::fs::statvfs(volume.root()).unwrap().f_bfree + (8 << 20) / 4096 > free {
        assert!(Instant::now() < deadline && running.try_wait().unwrap().is_none(), "it does not write its file");
        std::thread::sleep(Duration::from_millis(5));
    }
    running.kill().unwrap();
    running.wait().unwrap();
    is_as_before(&volume, free);
    volume.unmount();
}
