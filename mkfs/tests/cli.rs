//! mkfs.gpunvme as its users run it, on image files.

use std::fs::{self, File, OpenOptions};
use std::io::{PipeReader, Write};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::Arc;
use std::time::Duration;

use gpunvme_blockdev::{Io, OpenMode, open};
use gpunvme_engine::data::{Filesystem, Inline, Options};
use gpunvme_engine::volume::{Context, NewNode, VolumeOptions};
use gpunvme_layout::{Geometry, Timestamp};
use rustix::process::Signal;
use tempfile::TempDir;

const MIB: u64 = 1 << 20;

struct Image {
    _dir: TempDir,
    path: PathBuf,
}

impl Image {
    fn new(len: u64) -> Self {
        // Not in /tmp, which may be in memory and refuse direct I/O.
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        let path = dir.path().join("image");
        File::create(&path).unwrap().set_len(len).unwrap();
        Self { _dir: dir, path }
    }

    fn mkfs(&self, args: &[&str]) -> Output {
        mkfs(&self.path, args)
    }

    fn superblock(&self) -> Option<gpunvme_layout::Superblock> {
        let device = open(self.path.to_str().unwrap(), OpenMode::ReadOnly).unwrap();
        gpunvme_engine::probe(&device).unwrap()
    }
}

fn mkfs(path: &Path, args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_mkfs-gpunvme")).args(args).arg(path).output().unwrap()
}

fn stdout(output: &Output) -> String {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(String::from_utf8_lossy(&output.stderr), "");
    String::from_utf8(output.stdout.clone()).unwrap()
}

/// The reason that is given for a refusal, after the program's and the device's names.
fn refusal(output: &Output, path: &Path) -> String {
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(String::from_utf8_lossy(&output.stdout), "");
    let text = String::from_utf8(output.stderr.clone()).unwrap();
    let prefix = format!("mkfs.gpunvme: {}: ", path.display());
    text.strip_prefix(&prefix).unwrap_or_else(|| panic!("{text}")).trim_end().to_owned()
}

#[test]
fn what_was_asked_for_is_what_was_made() {
    let image = Image::new(64 * MIB);
    let uuid = "6bf5c1f4-27b3-46a8-9d5a-1c5f5c8b7a10";
    let text = stdout(&image.mkfs(&["-L", "my data", "-U", uuid]));
    assert!(text.contains("my data") && text.contains(uuid) && text.contains("64 MiB"), "{text}");
    let superblock = image.superblock().unwrap();
    assert_eq!(superblock.names.label, "my data");
    assert_eq!(uuid::Uuid::from_bytes(superblock.uuid).to_string(), uuid);
    assert_eq!(superblock.total_blocks, 64 * MIB / 4096);
}

#[test]
fn json_is_for_programs_and_quiet_for_scripts() {
    let image = Image::new(64 * MIB);
    let report: serde_json::Value = serde_json::from_str(&stdout(&image.mkfs(&["--json", "-L", "data"]))).unwrap();
    assert_eq!(report["label"], "data");
    assert_eq!(report["size_bytes"], 64 * MIB);
    let uuid = uuid::Uuid::from_bytes(image.superblock().unwrap().uuid).to_string();
    assert_eq!(report["uuid"], uuid);
    assert_eq!(stdout(&image.mkfs(&["--force", "--quiet"])), "");
    assert_ne!(uuid::Uuid::from_bytes(image.superblock().unwrap().uuid).to_string(), uuid, "a second volume has its own UUID");
}

#[test]
fn a_volume_is_not_formatted_twice_by_accident() {
    let image = Image::new(64 * MIB);
    stdout(&image.mkfs(&["-L", "precious"]));
    let before = image.superblock();
    let why = refusal(&image.mkfs(&[]), &image.path);
    assert!(why.starts_with("carries a gpunvme volume (\"precious\", UUID "), "{why}");
    assert!(why.contains("--force"), "{why}");
    assert_eq!(image.superblock(), before);
    stdout(&image.mkfs(&["--force", "-L", "new"]));
    assert_eq!(image.superblock().unwrap().names.label, "new");
}

/// What a tool that clears both ends of a device leaves: all files are there.
#[test]
fn a_volume_that_lost_both_ends_is_refused_and_mended() {
    let image = Image::new(64 * MIB);
    stdout(&image.mkfs(&["-L", "precious"]));
    let file = OpenOptions::new().write(true).open(&image.path).unwrap();
    for offset in [0, 64 * MIB - 4096] {
        file.write_all_at(&[0; 4096], offset).unwrap();
    }
    let why = refusal(&image.mkfs(&[]), &image.path);
    assert!(why.starts_with("carries a gpunvme volume (\"precious\", UUID "), "{why}");
    let device = open(image.path.to_str().unwrap(), OpenMode::ReadOnly).unwrap();
    let why = gpunvme_engine::is_clean(&device).unwrap_err().to_string();
    assert!(why.contains("fsck.gpunvme -p"), "{why}");
    drop(device);
    assert_eq!(fsck(&image.path, &["-p"]).status.code(), Some(1));
    assert_eq!(image.superblock().unwrap().names.label, "precious");
}

/// To mend it would take the other filesystem away.
#[test]
fn what_is_left_below_another_filesystem_is_no_volume() {
    let image = Image::new(64 * MIB);
    stdout(&image.mkfs(&[]));
    let file = OpenOptions::new().write(true).open(&image.path).unwrap();
    file.write_all_at(&[0; 4096], 64 * MIB - 4096).unwrap();
    let path = format!("{}:/usr/sbin:/sbin", std::env::var("PATH").unwrap());
    let made = Command::new("mkswap").env("PATH", &path).args(["-f", "-L", "my swap"]).arg(&image.path).output().unwrap();
    assert!(made.status.success(), "{made:?}");
    let why = refusal(&image.mkfs(&[]), &image.path);
    assert!(why.starts_with("carries a filesystem or volume of type swap"), "{why}");
    let device = open(image.path.to_str().unwrap(), OpenMode::ReadOnly).unwrap();
    let why = gpunvme_engine::is_clean(&device).unwrap_err().to_string();
    assert!(!why.contains("fsck.gpunvme -p"), "{why}");
}

#[test]
fn fsck_says_of_a_volume_whether_it_was_unmounted() {
    let image = Image::new(64 * MIB);
    stdout(&image.mkfs(&[]));
    let report = |args: &[&str]| -> serde_json::Value { serde_json::from_slice(&fsck(&image.path, args).stdout).unwrap() };
    assert_eq!(report(&["-n", "--json"])["unmounted"], true);
    let device = open(image.path.to_str().unwrap(), OpenMode::ReadWrite).unwrap();
    let volume = VolumeOptions { read_only: false, cache: 1 << 20, discard: false };
    let options = Options { volume, write_buffer: 4 << 20 };
    let fs = Filesystem::open(Io::inline(device).unwrap(), options, Arc::new(Inline)).unwrap();
    let who = Context { uid: 0, gid: 0, now: Timestamp { seconds: 1, nanoseconds: 0 } };
    let new = NewNode { mode: 0o100644, umask: 0, rdev: 0, target: &[] };
    fs.wait(|| fs.create(&who, 1, b"file", &new)).unwrap();
    fs.commit().unwrap();
    drop(fs);
    assert_eq!(report(&["-n", "--json"])["unmounted"], false);
    let output = fsck(&image.path, &["-n"]);
    let said = stdout(&output);
    assert!(said.contains("was not unmounted") && said.contains("the next mount"), "{said}");
    let said = String::from_utf8(fsck(&image.path, &["-p"]).stdout).unwrap();
    assert!(said.contains("was not unmounted, the journal was replayed"), "{said}");
    assert!(!stdout(&fsck(&image.path, &["-n"])).contains("unmounted"));
}

#[test]
fn a_damaged_volume_is_recognised() {
    let image = Image::new(64 * MIB);
    stdout(&image.mkfs(&[]));
    // One byte changed, and the checksum no longer matches.
    let file = OpenOptions::new().read(true).write(true).open(&image.path).unwrap();
    let middle = Geometry::middle_superblock(64 * MIB / 4096).unwrap() * 4096;
    for offset in [0, middle, 64 * MIB - 4096] {
        let mut block = [0; 4096];
        file.read_exact_at(&mut block, offset).unwrap();
        block[4000] ^= 1;
        file.write_all_at(&block, offset).unwrap();
    }
    let why = refusal(&image.mkfs(&[]), &image.path);
    assert!(why.starts_with("carries a gpunvme volume that is damaged or newer"), "{why}");
}

#[test]
fn a_foreign_filesystem_is_kept_and_with_force_leaves_no_trace() {
    let image = Image::new(64 * MIB);
    let path = format!("{}:/usr/sbin:/sbin", std::env::var("PATH").unwrap());
    let made = Command::new("mkswap").env("PATH", &path).args(["-L", "my swap"]).arg(&image.path).output().unwrap();
    assert!(made.status.success());
    let before = fs::read(&image.path).unwrap();
    let why = refusal(&image.mkfs(&[]), &image.path);
    assert!(why.starts_with("carries a filesystem or volume of type swap (\"my swap\", UUID "), "{why}");
    assert!(fs::read(&image.path).unwrap() == before, "a refused device was written to");
    stdout(&image.mkfs(&["-f"]));
    let blkid = Command::new("blkid").env("PATH", &path).arg("-p").arg(&image.path).output().unwrap();
    assert_eq!(blkid.status.code(), Some(2), "blkid still sees {}", String::from_utf8_lossy(&blkid.stdout));
    assert!(image.superblock().is_some());
}

#[test]
fn a_dry_run_says_the_same_and_writes_nothing() {
    let image = Image::new(64 * MIB);
    let text = stdout(&image.mkfs(&["-n", "-L", "data"]));
    assert!(text.contains("dry run") && text.contains("data"), "{text}");
    assert_eq!(fs::metadata(&image.path).unwrap().blocks(), 0);
    assert!(image.superblock().is_none());
}

#[test]
fn a_device_in_use_is_refused_even_with_force() {
    let image = Image::new(64 * MIB);
    let device = open(image.path.to_str().unwrap(), OpenMode::ReadWrite).unwrap();
    let held = Arc::clone(&device);
    let waiting = std::thread::spawn(move || {
        std::thread::sleep(std::time::Duration::from_millis(300));
        drop(held);
    });
    drop(device);
    // A daemon that is letting go is waited for.
    stdout(&image.mkfs(&["-f"]));
    waiting.join().unwrap();

    let _device = open(image.path.to_str().unwrap(), OpenMode::ReadWrite).unwrap();
    let why = refusal(&image.mkfs(&["-f"]), &image.path);
    let this = format!("(process {})", std::process::id());
    assert!(why.starts_with("in use by another program: ") && why.contains(&this), "{why}");
}

#[test]
fn a_unit_of_a_volume_that_has_none_is_refused() {
    let image = Image::new(64 * MIB);
    assert!(refusal(&image.mkfs(&["--unit", "256K"]), &image.path).contains("--growable"));
    assert!(image.superblock().is_none());
    stdout(&image.mkfs(&["--unit", "256K", "--growable"]));
}

#[test]
fn what_cannot_be_formatted_is_refused_with_the_way_out() {
    let image = Image::new(MIB);
    assert_eq!(refusal(&image.mkfs(&[]), &image.path), "too small: a volume needs 16 MiB at the least, and this has 1 MiB");
    let missing = image.path.with_file_name("missing");
    assert!(refusal(&mkfs(&missing, &[]), &missing).contains("truncate -s 10G"));
    let folder = image.path.parent().unwrap();
    assert!(refusal(&mkfs(folder, &[]), folder).contains("neither a block device nor a regular file"));
    let usage = Command::new(env!("CARGO_BIN_EXE_mkfs-gpunvme")).arg("--colour").output().unwrap();
    assert_eq!(usage.status.code(), Some(2));
}

fn fsck(path: &Path, args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_fsck-gpunvme")).args(args).arg(path).output().unwrap()
}

#[test]
fn fsck_finds_nothing_on_a_new_volume_and_names_what_is_damaged() {
    let image = Image::new(64 * MIB);
    assert!(image.mkfs(&["-q"]).status.success());
    let clean = fsck(&image.path, &["-n"]);
    assert_eq!(clean.status.code(), Some(0), "{clean:?}");
    assert!(String::from_utf8_lossy(&clean.stdout).contains("clean, 1 inode,"), "{clean:?}");

    assert!(fsck(&image.path, &["-n", "-q"]).stdout.is_empty());

    // One inode too many is counted: the state block, with a checksum that fits.
    let file = OpenOptions::new().read(true).write(true).open(&image.path).unwrap();
    let mut bytes = [0; 4096];
    file.read_exact_at(&mut bytes, 3 * 4096).unwrap();
    let mut block = gpunvme_layout::Block::from_bytes(&bytes);
    block.bytes_mut()[72] = 9;
    block.bytes_mut()[80] = 2;
    block.seal(0);
    file.write_all_at(block.bytes(), 3 * 4096).unwrap();
    let damaged = fsck(&image.path, &["--json", "-n"]);
    assert_eq!(damaged.status.code(), Some(4), "{damaged:?}");
    let report: serde_json::Value = serde_json::from_slice(&damaged.stdout).unwrap();
    assert_eq!(report["findings"][0]["what"], "counts 2 inodes, there are 1");
    assert_eq!(report["findings"][0]["kind"], "counter");

    let before = fs::read(&image.path).unwrap();
    assert_eq!(fsck(&image.path, &[]).status.code(), Some(4), "without a terminal nothing is repaired");
    assert!(fs::read(&image.path).unwrap() == before, "a check wrote to the image");

    // What has one right answer is mended without asking; then there is nothing to find.
    let mended = fsck(&image.path, &["-p", "-q"]);
    assert_eq!(mended.status.code(), Some(1), "{mended:?}");
    let text = String::from_utf8_lossy(&mended.stdout);
    assert!(text.contains("state: counts 2 inodes, there are 1 (mended)"), "{text}");
    let clean = fsck(&image.path, &["-a"]);
    assert_eq!(clean.status.code(), Some(0), "{clean:?}");

    let missing = fsck(Path::new("/var/tmp/no such image"), &[]);
    assert_eq!(missing.status.code(), Some(8), "{missing:?}");
    let usage = fsck(&image.path, &["-n", "-y"]);
    assert_eq!(usage.status.code(), Some(16), "{usage:?}");
}

#[test]
fn fsck_leaves_to_y_what_loses_something() {
    let image = Image::new(64 * MIB);
    assert!(image.mkfs(&["-q"]).status.success());
    let superblock = image.superblock().unwrap();
    // The only leaf of the tree: the root directory goes with it.
    let file = OpenOptions::new().read(true).write(true).open(&image.path).unwrap();
    file.write_all_at(b"ruined", superblock.geometry().data * 4096 + 200).unwrap();
    for option in ["-n", "-p"] {
        let found = fsck(&image.path, &["--json", option]);
        assert_eq!(found.status.code(), Some(4), "{found:?}");
        let report: serde_json::Value = serde_json::from_slice(&found.stdout).unwrap();
        assert_eq!((&report["findings"][0]["kind"], &report["findings"][0]["fixed"]), (&"node".into(), &false.into()));
    }
    let mended = fsck(&image.path, &["-y"]);
    assert_eq!(mended.status.code(), Some(1), "{mended:?}");
    assert_eq!(fsck(&image.path, &["-y"]).status.code(), Some(0));
}

/// Runs a program whose output goes to a full device, and to a pipe without a reader: exit codes,
/// and what stderr says.
fn with_bad_outputs(program: &str, args: &[&str], path: &Path) -> [(Option<i32>, String); 3] {
    let run = |stdout: Stdio, stderr: Stdio| {
        let child = Command::new(program).args(args).arg(path).stdout(stdout).stderr(stderr).spawn().unwrap();
        let output = child.wait_with_output().unwrap();
        (output.status.code(), String::from_utf8(output.stderr).unwrap())
    };
    let full = || Stdio::from(OpenOptions::new().write(true).open("/dev/full").unwrap());
    let (reader, closed) = std::io::pipe().unwrap();
    drop(reader);
    [run(full(), Stdio::piped()), run(closed.into(), Stdio::piped()), run(full(), full())]
}

#[test]
fn a_full_or_closed_output_changes_no_verdict() {
    let image = Image::new(64 * MIB);
    let [full, closed, silent] = with_bad_outputs(env!("CARGO_BIN_EXE_mkfs-gpunvme"), &["--force"], &image.path);
    assert_eq!((full.0, closed.0, silent.0), (Some(1), Some(0), Some(1)));
    assert!(full.1.contains("formatted, but the report could not be written") && closed.1.is_empty(), "{full:?} {closed:?}");
    assert!(image.superblock().is_some());
    let fsck = env!("CARGO_BIN_EXE_fsck-gpunvme");
    for json in [&[][..], &["--json"]] {
        let [full, closed, silent] = with_bad_outputs(fsck, json, &image.path);
        assert_eq!((full.0, closed.0, silent.0), (Some(8), Some(0), Some(8)), "clean, and a failure to say so");
        assert!(full.1.contains("the report could not be written") && closed.1.is_empty(), "{full:?} {closed:?}");
    }
    let [_, refused, silent] = with_bad_outputs(fsck, &[], Path::new("/nonexistent"));
    assert_eq!((refused.0, silent.0), (Some(8), Some(8)));
}

/// As fsck(8) hands it on: lines of pass, done, of and device.
#[test]
fn progress_goes_to_the_descriptor_that_fsck_names() {
    let image = Image::new(64 * MIB);
    stdout(&image.mkfs(&[]));
    let lines = image.path.with_file_name("progress");
    let script = "exec \"$@\" 7>>\"$0\"";
    let output = Command::new("sh")
        .args(["-c", script])
        .arg(&lines)
        .arg(env!("CARGO_BIN_EXE_fsck-gpunvme"))
        .args(["-n", "-C", "7"])
        .arg(&image.path)
        .output()
        .unwrap();
    assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
    let progress = fs::read_to_string(lines).unwrap();
    assert!(progress.lines().any(|line| line == format!("5 1 1 {}", image.path.display())), "{progress}");
    // Into a pipe goes the report alone; a descriptor that is not open is a wrong command line.
    let quiet = fsck(&image.path, &["-n", "-C", "0"]);
    assert!(quiet.status.success() && quiet.stderr.is_empty(), "{quiet:?}");
    let wrong = fsck(&image.path, &["-n", "-C", "77"]);
    assert_eq!(wrong.status.code(), Some(16), "{wrong:?}");
}

/// A repair that waits at a pipe for its progress, which is full: the program, and the end to read
/// the pipe at.
fn waiting_repair(image: &Image) -> (Child, PipeReader) {
    let (reader, mut writer) = std::io::pipe().unwrap();
    // The first word of a line fits.
    let filled = rustix::pipe::fcntl_getpipe_size(&writer).unwrap() - 4;
    writer.write_all(&vec![b'.'; filled]).unwrap();
    let mut fsck = Command::new("sh")
        .args(["-c", "exec \"$@\" 7>&1 >/dev/null", "sh", env!("CARGO_BIN_EXE_fsck-gpunvme"), "-y", "-C", "7"])
        .arg(&image.path)
        .stdout(writer)
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    while rustix::io::ioctl_fionread(&reader).unwrap() == filled as u64 {
        assert!(fsck.try_wait().unwrap().is_none(), "it waits at the pipe");
        std::thread::sleep(Duration::from_millis(5));
    }
    (fsck, reader)
}

/// An image of a volume whose tree is ruined.
fn ruined_image() -> Image {
    let image = Image::new(64 * MIB);
    stdout(&image.mkfs(&[]));
    // The only leaf of the tree.
    let leaf = image.superblock().unwrap().geometry().data * 4096;
    OpenOptions::new().write(true).open(&image.path).unwrap().write_all_at(b"ruined", leaf + 200).unwrap();
    image
}

fn send(program: &Child, signal: Signal) {
    rustix::process::kill_process(rustix::process::Pid::from_child(program), signal).unwrap();
}

#[test]
fn a_signal_ends_a_repair_with_a_code_of_its_own_and_the_next_one_goes_on() {
    let image = ruined_image();
    for signal in [Signal::INT, Signal::TERM] {
        let (fsck, mut reader) = waiting_repair(&image);
        send(&fsck, signal);
        std::io::copy(&mut reader, &mut std::io::sink()).unwrap();
        let output = fsck.wait_with_output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(32), "{said}");
        assert!(said.ends_with(": interrupted; what was mended until then stays so\n"), "{said}");
    }
    assert_eq!(fsck(&image.path, &["-y"]).status.code(), Some(1));
    assert_eq!(fsck(&image.path, &["-n"]).status.code(), Some(0));
}

#[test]
fn another_signal_ends_a_repair_that_hangs() {
    let image = ruined_image();
    // The pipe has no reader.
    let (mut program, _reader) = waiting_repair(&image);
    send(&program, Signal::INT);
    // fsck(8) passes on what it got itself: the same wish.
    std::thread::sleep(Duration::from_millis(200));
    send(&program, Signal::TERM);
    std::thread::sleep(Duration::from_millis(1200));
    assert!(program.try_wait().unwrap().is_none(), "it goes on to wait");
    send(&program, Signal::TERM);
    assert_eq!(program.wait().unwrap().code(), Some(32));
    assert_eq!(fsck(&image.path, &["-y"]).status.code(), Some(1));
}

#[test]
fn a_truncated_image_is_told_how_to_save_what_is_left() {
    let image = Image::new(64 * MIB);
    stdout(&image.mkfs(&[]));
    OpenOptions::new().write(true).open(&image.path).unwrap().set_len(40 * MIB).unwrap();
    let output = fsck(&image.path, &["-n"]);
    assert_eq!(output.status.code(), Some(8));
    let message = String::from_utf8(output.stderr).unwrap();
    let expected = "the volume has 67108864 bytes, the device only 41943040: it was truncated, or copied in part; copy all of it \
                    again, or, of an image, save what is left: `truncate -s 67108864` it, then fsck.gpunvme -y\n";
    assert_eq!(message, format!("fsck.gpunvme: {}: {expected}", image.path.display()));
    OpenOptions::new().write(true).open(&image.path).unwrap().set_len(64 * MIB).unwrap();
    assert_eq!(fsck(&image.path, &["-y"]).status.code(), Some(1));
}
