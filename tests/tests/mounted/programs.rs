//! Tests of what users write and type: a C program on libgpunvme, and the command `gpunvme`.

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
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

/// Compiles a C program of ours with the library, and has it say that all is fine.
fn c_program(volume: &Mounted, name: &str, arguments: &[PathBuf]) {
    let program = volume.image().path().with_file_name(name);
    let source = format!("{}/tests/c/{name}.c", env!("CARGO_MANIFEST_DIR"));
    let include = concat!(env!("CARGO_MANIFEST_DIR"), "/../client/include");
    let library = programs::folder();
    let output = Command::new("cc")
        .args(["-std=c11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", "-O1", &source, "-I", include])
        .arg("-L")
        .arg(library)
        .args(["-lgpunvme", "-o"])
        .arg(&program)
        .output()
        .expect("cc runs");
    assert!(output.status.success(), "{}", text(&output));
    let output = Command::new(&program).args(arguments).env("LD_LIBRARY_PATH", library).output().unwrap();
    assert!(output.status.success() && output.stdout == b"fine\n", "{}", text(&output));
}

fn is_written(data: &[u8]) -> bool {
    data.iter().enumerate().all(|(at, &byte)| byte == (at * 31 + at / 4096) as u8)
}

#[test]
fn a_c_program_writes_and_reads_through_the_library() {
    needs_mount!();
    let volume = Mounted::new();
    c_program(&volume, "roundtrip", &[volume.root(), volume.path("file"), "/proc".into()]);
    assert!(is_written(&fs::read(volume.path("file")).unwrap()));
}

#[test]
fn a_c_program_uses_memory_of_its_own_and_rings() {
    needs_mount!();
    let volume = Mounted::new();
    c_program(&volume, "memory", &[volume.root(), volume.path("file")]);
    let mut written = fs::read(volume.path("file")).unwrap();
    written[100..][..3 << 20].iter_mut().for_each(|byte| *byte = !*byte);
    assert!(written.len() == 9 << 20 && is_written(&written));
}

#[test]
fn a_c_program_s_calls_may_fail_while_a_thread_ends() {
    needs_mount!();
    c_program(&Mounted::new(), "threads", &[]);
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

fn refused(arguments: &[&str], path: &Path, word: &str) {
    let output = gpunvme(arguments, path);
    assert!(!output.status.success() && text(&output).contains(word), "{arguments:?}: {}", text(&output));
}

#[test]
fn a_file_is_not_copied_to_itself() {
    needs_mount!();
    let volume = Mounted::new();
    let data = tree::pattern(34, 300_000);
    let path = volume.path("file");
    fs::write(&path, &data).unwrap();
    fs::hard_link(&path, volume.path("name")).unwrap();
    std::os::unix::fs::symlink("file", volume.path("link")).unwrap();
    for name in ["file", "name", "link"] {
        let other = volume.path(name);
        refused(&["read", "--output", other.to_str().unwrap()], &path, "is the file that is read");
        refused(&["write", "--input", other.to_str().unwrap()], &path, "is the file that is written");
    }
    let mut stdin = programs::command("gpunvme");
    stdin.arg("write").arg(&path).stdin(File::open(volume.path("name")).unwrap());
    assert!(!stdin.status().unwrap().success());
    let mut stdout = programs::command("gpunvme");
    stdout.arg("read").arg(&path).args(["--output", "-"]).stdout(File::options().append(true).open(&path).unwrap());
    assert!(!stdout.status().unwrap().success());
    assert!(fs::read(&path).unwrap() == data);
}

#[test]
fn what_cannot_be_done_costs_no_file_its_content() {
    needs_mount!();
    let volume = Mounted::new();
    let data = tree::pattern(35, 300_000);
    let path = volume.path("file");
    fs::write(&path, &data).unwrap();
    refused(&["write", "--input", "/etc"], &path, "directory");
    refused(&["write", "--input", "/etc", "--from", "host"], &volume.path("new"), "directory");
    refused(&["write", "--require", "p2p", "--input", "/etc/hostname"], &path, "nothing was written");
    refused(&["write", "--require", "p2p", "--input", "/etc/hostname"], &volume.path("new"), "nothing was written");
    assert!(fs::read(&path).unwrap() == data && !volume.path("new").exists());
    let folder = volume.image().path().with_file_name("outputs");
    fs::create_dir(&folder).unwrap();
    let old = folder.join("old");
    fs::write(&old, "content").unwrap();
    fs::write(folder.join("twice"), "content").unwrap();
    fs::hard_link(folder.join("twice"), folder.join("named")).unwrap();
    for name in ["old", "named", "new"] {
        refused(&["read", "--require", "p2p", "--output", folder.join(name).to_str().unwrap()], &path, "route");
    }
    assert_eq!((fs::read(&old).unwrap(), fs::read(folder.join("twice")).unwrap()), (b"content".to_vec(), b"content".to_vec()));
    let mut left: Vec<_> = fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    left.sort();
    assert_eq!(left, ["named", "old", "twice"]);
}

#[test]
fn an_output_that_is_replaced_stays_what_it_was_but_for_its_content() {
    needs_mount!();
    let volume = Mounted::new();
    let data = tree::pattern(36, 300_000);
    let path = volume.path("file");
    fs::write(&path, &data).unwrap();
    let folder = volume.image().path().with_file_name("outputs");
    fs::create_dir(&folder).unwrap();
    let at = |name: &str| folder.join(name);
    let read = |name: &str| {
        let output = gpunvme(&["read", "--output", at(name).to_str().unwrap()], &path);
        assert!(output.status.success(), "{name}: {}", text(&output));
        assert!(fs::read(at(name)).unwrap() == data, "{name}");
    };
    let longer = tree::pattern(37, 400_000);
    fs::write(at("private"), &longer).unwrap();
    fs::set_permissions(at("private"), std::os::unix::fs::PermissionsExt::from_mode(0o640)).unwrap();
    std::os::unix::fs::chown(at("private"), None, Some(7)).unwrap();
    fs::write(at("foreign"), &longer).unwrap();
    std::os::unix::fs::chown(at("foreign"), Some(1234), Some(1234)).unwrap();
    fs::write(at("twice"), &longer).unwrap();
    fs::hard_link(at("twice"), at("named")).unwrap();
    fs::write(at("target"), &longer).unwrap();
    std::os::unix::fs::symlink("target", at("link")).unwrap();
    std::os::unix::fs::symlink("dangling", at("nowhere")).unwrap();
    for name in ["private", "foreign", "named", "link", "nowhere", "new"] {
        read(name);
    }
    let private = fs::metadata(at("private")).unwrap();
    assert_eq!((private.mode() & 0o7777, private.gid()), (0o640, 7));
    assert_eq!(fs::metadata(at("foreign")).unwrap().uid(), 1234);
    assert!(fs::read(at("twice")).unwrap() == data && fs::read(at("target")).unwrap() == data);
    assert!(fs::symlink_metadata(at("link")).unwrap().is_symlink() && at("dangling").is_file());
    assert_eq!(fs::metadata(at("new")).unwrap().mode() & 0o600, 0o600);
    // The shell's file goes on where it is.
    let mut stdout = File::create(at("stdout")).unwrap();
    stdout.write_all(b"before").unwrap();
    let mut command = programs::command("gpunvme");
    command.arg("read").arg(&path).args(["--output", "/dev/stdout"]).stdout(stdout);
    assert!(command.status().unwrap().success());
    assert!(fs::read(at("stdout")).unwrap() == [&b"before"[..], &data].concat());
    refused(&["read", "--output", "/dev/full"], &path, "No space left");
    assert!(gpunvme(&["read", "--output", "/dev/null"], &path).status.success());
}
