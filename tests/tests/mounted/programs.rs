//! What users write and type: a C program on libgpunvme, and the command `gpunvme`.

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use gpunvme_tests::mounted::{Mounted, text};
use gpunvme_tests::{needs_mount, programs, tree};
use serde_json::Value;
use sha2::{Digest, Sha256};

fn gpunvme(arguments: &[&str], path: &Path) -> Output {
    let (command, options) = arguments.split_first().unwrap();
    programs::command("gpunvme").arg(command).arg(path).args(options).output().expect("gpunvme runs")
}

fn json(arguments: &[&str], path: &Path) -> Value {
    let output = gpunvme(&[arguments, &["--json"]].concat(), path);
    assert!(output.status.success(), "{}", text(&output));
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {}", text(&output)))
}

fn hex(data: &[u8]) -> String {
    Sha256::digest(data).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Whether a value is somewhere in a JSON document.
fn contains(document: &Value, wanted: &Value) -> bool {
    document == wanted
        || match document {
            Value::Array(items) => items.iter().any(|item| contains(item, wanted)),
            Value::Object(fields) => fields.values().any(|field| contains(field, wanted)),
            _ => false,
        }
}

#[test]
fn a_c_program_writes_and_reads_through_the_library() {
    needs_mount!();
    let volume = Mounted::new();
    let program = volume.image().path().with_file_name("roundtrip");
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/c/roundtrip.c");
    let include = concat!(env!("CARGO_MANIFEST_DIR"), "/../client/include");
    let library = programs::folder();
    let output = Command::new("cc")
        .args(["-std=c11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", "-O1", source, "-I", include])
        .arg("-L")
        .arg(library)
        .args(["-lgpunvme", "-o"])
        .arg(&program)
        .output()
        .expect("cc runs");
    assert!(output.status.success(), "{}", text(&output));
    let output = Command::new(&program)
        .args([volume.root(), volume.path("file")])
        .arg("/proc")
        .env("LD_LIBRARY_PATH", library)
        .output()
        .unwrap();
    assert!(output.status.success() && output.stdout == b"fine\n", "{}", text(&output));
    let written = fs::read(volume.path("file")).unwrap();
    assert!(written.iter().enumerate().all(|(i, &byte)| byte == (i * 31 + i / 4096) as u8));
}

#[test]
fn read_reports_checksum_and_route_of_any_part() {
    needs_mount!();
    let volume = Mounted::new();
    let data = tree::pattern(31, 5_000_000);
    let path = volume.path("file");
    fs::write(&path, &data).unwrap();
    let whole = json(&["read", "--to", "host", "--checksum"], &path);
    assert!(contains(&whole, &hex(&data).into()), "{whole}");
    assert!(contains(&whole, &5_000_000.into()), "{whole}");
    let part = json(&["read", "--to", "host", "--offset", "4097", "--length", "100001", "--checksum"], &path);
    assert!(contains(&part, &hex(&data[4097..104_098]).into()), "{part}");
    let output = gpunvme(&["read", "--to", "host", "--checksum"], &path);
    assert!(text(&output).contains(&hex(&data)) && text(&output).contains("host"), "{}", text(&output));
    let copy = volume.image().path().with_file_name("copy");
    let output = gpunvme(&["read", "--output", copy.to_str().unwrap()], &path);
    assert!(output.status.success(), "{}", text(&output));
    assert!(fs::read(copy).unwrap() == data);
}

#[test]
fn write_replaces_a_file_or_a_part_of_it() {
    needs_mount!();
    let volume = Mounted::new();
    let mut data = tree::pattern(32, 3_000_001);
    let path = volume.path("file");
    let write = |options: &[&str], data: &[u8]| {
        let mut child = programs::command("gpunvme")
            .arg("write")
            .arg(&path)
            .args(["--from", "host", "--json", "--checksum"])
            .args(options)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        child.stdin.take().unwrap().write_all(data).unwrap();
        let output = child.wait_with_output().unwrap();
        assert!(output.status.success(), "{}", text(&output));
        let report: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert!(contains(&report, &hex(data).into()), "{report}");
    };
    fs::write(&path, tree::pattern(33, 4_000_000)).unwrap();
    write(&[], &data);
    assert!(fs::read(&path).unwrap() == data);
    let part = tree::pattern(34, 12_345);
    write(&["--offset", "5001"], &part);
    data[5001..5001 + part.len()].copy_from_slice(&part);
    assert!(fs::read(&path).unwrap() == data);
}

#[test]
fn map_agrees_with_the_image() {
    needs_mount!();
    let volume = Mounted::new();
    let data = tree::pattern(35, 1 << 20);
    let path = volume.path("file");
    fs::write(&path, &data).unwrap();
    File::open(&path).unwrap().sync_all().unwrap();
    let map = json(&["map"], &path);
    let extents = map["extents"].as_array().unwrap_or_else(|| panic!("{map}"));
    let first = &extents[0];
    let device_offset = first["device_offset"].as_u64().unwrap_or_else(|| panic!("{map}"));
    let image = volume.unmount();
    let mut block = vec![0; 4096];
    File::open(image.path()).unwrap().read_exact_at(&mut block, device_offset).unwrap();
    assert!(block == data[..4096]);
}

#[test]
fn info_and_stats_answer_for_people_and_programs() {
    needs_mount!();
    let volume = Mounted::new();
    let info = json(&["info"], &volume.root());
    assert!(contains(&info, &volume.image().path().to_str().unwrap().into()), "{info}");
    assert!(gpunvme(&["info"], &volume.root()).status.success());
    fs::write(volume.path("file"), tree::pattern(36, 1 << 20)).unwrap();
    json(&["read"], &volume.path("file"));
    let stats = json(&["stats"], &volume.root());
    assert!(contains(&stats, &(1 << 20).into()), "{stats}");
    assert!(gpunvme(&["stats"], &volume.root()).status.success());
}

#[test]
fn errors_are_one_line_that_names_the_file() {
    needs_mount!();
    let volume = Mounted::new();
    let elsewhere = volume.image().path();
    for (command, path) in [
        ("info", Path::new("/proc")),
        ("map", elsewhere.as_path()),
        ("read", elsewhere.as_path()),
        ("read", &volume.path("missing")),
        ("map", &volume.root()),
    ] {
        let output = gpunvme(&[command], path);
        assert!(!output.status.success(), "{command} {}: {}", path.display(), text(&output));
        let message = String::from_utf8_lossy(&output.stderr);
        assert!(message.trim_end().lines().count() == 1 && message.contains(path.to_str().unwrap()), "{message}");
    }
}
