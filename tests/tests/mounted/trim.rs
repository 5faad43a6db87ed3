//! `gpunvme trim`, fstrim(8) and the mount option `discard`: what files gave up is given back to
//! the device, and nothing else.

use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use gpunvme_tests::mounted::{Image, Mounted, text, unmount_unless_busy};
use gpunvme_tests::{needs_mount, programs, scratch_dir, tree};

const MIB: u64 = 1 << 20;

fn trim(dir: &Path, options: &[&str]) -> Output {
    programs::command("gpunvme").args(["--json", "trim"]).args(options).arg(dir).output().unwrap()
}

/// Bytes that it says the devices were told of.
#[track_caller]
fn trimmed(dir: &Path, options: &[&str]) -> u64 {
    let output = trim(dir, options);
    assert!(output.status.success(), "{}", text(&output));
    let answer: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    answer["trimmed"].as_u64().unwrap()
}

fn sync(dir: &Path) {
    let output = programs::command("gpunvme").arg("sync").arg(dir).output().unwrap();
    assert!(output.status.success(), "{}", text(&output));
}

/// Bytes that the image files take in the filesystem that they lie on.
fn taken(image: &Image) -> u64 {
    image.members().iter().map(|path| path.metadata().unwrap().blocks() * 512).sum()
}

/// Writes two trees, and removes one of them.
fn fill_and_remove(volume: &Mounted) {
    for name in ["kept", "gone"] {
        fs::create_dir(volume.path(name)).unwrap();
        tree::make(&volume.path(name), 5, 40).unwrap();
        fs::write(volume.path(name).join("large"), tree::pattern(6, 48 << 20)).unwrap();
    }
    sync(&volume.root());
    fs::remove_dir_all(volume.path("gone")).unwrap();
}

#[test]
fn a_trim_gives_back_what_files_gave_up_on_one_device_and_on_several() {
    needs_mount!();
    for image in [Image::formatted_with(512 * MIB), Image::striped(4, 128 * MIB)] {
        let volume = image.mount();
        fill_and_remove(&volume);
        let kept = tree::read(&volume.path("kept")).unwrap();
        let before = taken(volume.image());
        assert_eq!(trimmed(&volume.root(), &["--offset", "1T"]), 0);
        assert_eq!(trimmed(&volume.root(), &["--minimum", "1T"]), 0);
        let part = trimmed(&volume.root(), &["--length", "300M"]);
        let all = trimmed(&volume.path("kept"), &[]);
        assert!(part > 100 * MIB && part < all && all > 300 * MIB, "{part} of {all}");
        let after = taken(volume.image());
        assert!(after + 40 * MIB < before, "{before} bytes before, {after} after");
        let volume = volume.remount();
        tree::assert_same(&kept, &tree::read(&volume.path("kept")).unwrap());
        fs::write(volume.path("new"), tree::pattern(7, 60 << 20)).unwrap();
        assert!(fs::read(volume.path("new")).unwrap() == tree::pattern(7, 60 << 20));
    }
}

#[test]
fn fstrim_works_as_on_other_filesystems() {
    needs_mount!();
    let volume = Image::formatted_with(512 * MIB).mount();
    fill_and_remove(&volume);
    let kept = tree::read(&volume.path("kept")).unwrap();
    let before = taken(volume.image());
    let fstrim = |options: &[&str]| Command::new("fstrim").args(["-v"]).args(options).arg(volume.root()).output().unwrap();
    // It prints "DIR: 447.1 MiB (468815872 bytes) trimmed".
    let bytes = |options: &[&str]| {
        let output = fstrim(options);
        assert!(output.status.success(), "{}", text(&output));
        let said = text(&output);
        let number = said.split_once('(').and_then(|(_, rest)| rest.split_once(" bytes)"));
        number.unwrap_or_else(|| panic!("{said}")).0.parse::<u64>().unwrap()
    };
    assert_eq!(bytes(&["--offset", "1T"]), 0);
    assert_eq!(bytes(&["--minimum", "1T"]), 0);
    let part = bytes(&["--length", "300000001"]);
    let all = bytes(&[]);
    assert!(part > 100 * MIB && part < all && all > 300 * MIB, "{part} of {all}");
    assert!(taken(volume.image()) + 40 * MIB < before);
    let user = Command::new("fstrim").arg(volume.root()).uid(65534).gid(65534).output().unwrap();
    assert!(!user.status.success() && text(&user).contains("Operation not permitted"), "{}", text(&user));
    let volume = volume.remount();
    tree::assert_same(&kept, &tree::read(&volume.path("kept")).unwrap());
    let volume = volume.unmount().mount_with("ro");
    let refused = Command::new("fstrim").arg(volume.root()).output().unwrap();
    assert!(!refused.status.success() && text(&refused).contains("Read-only"), "{}", text(&refused));
}

#[test]
fn with_discard_files_give_up_their_blocks_without_a_trim() {
    needs_mount!();
    let volume = Image::formatted_with(512 * MIB).mount_with("discard,commit=1");
    fill_and_remove(&volume);
    let kept = tree::read(&volume.path("kept")).unwrap();
    let deadline = Instant::now() + Duration::from_secs(60);
    while taken(volume.image()) > 75 * MIB {
        assert!(Instant::now() < deadline, "{} bytes are taken", taken(volume.image()));
        std::thread::sleep(Duration::from_millis(50));
    }
    // What is freed last is told at the end.
    fs::write(volume.path("last"), tree::pattern(8, 48 << 20)).unwrap();
    sync(&volume.root());
    fs::remove_file(volume.path("last")).unwrap();
    let image = volume.unmount();
    assert!(taken(&image) < 75 * MIB, "{} bytes are taken", taken(&image));
    let volume = image.mount();
    tree::assert_same(&kept, &tree::read(&volume.path("kept")).unwrap());
}

#[test]
fn a_trim_is_for_administrators_and_for_volumes_that_can_be_written() {
    needs_mount!();
    let volume = Image::formatted_with(64 * MIB).mount();
    let user = programs::command("gpunvme").arg("trim").arg(volume.root()).uid(65534).gid(65534).output().unwrap();
    assert!(!user.status.success() && text(&user).contains("only those who may mount the volume"), "{}", text(&user));
    let volume = volume.unmount().mount_with("ro");
    let refused = trim(&volume.root(), &[]);
    assert!(!refused.status.success() && text(&refused).contains("the volume is read-only"), "{}", text(&refused));
}

#[test]
fn a_trim_reaches_a_controller_that_the_daemon_drives_itself() {
    needs_mount!();
    let scratch = scratch_dir();
    let (file, dir) = (scratch.path().join("image"), scratch.path().join("mnt"));
    File::create(&file).unwrap().set_len(256 * MIB).unwrap();
    fs::create_dir(&dir).unwrap();
    let device = format!("sim:{}", file.display());
    let run = |program: &str, arguments: &[&str]| {
        let output = programs::command(program).args(arguments).output().unwrap();
        assert!(output.status.success(), "{}", text(&output));
    };
    run("mkfs.gpunvme", &[&device]);
    run("mount.gpunvme", &[&device, dir.to_str().unwrap(), "-o", "discard"]);
    let content = tree::pattern(9, 20 << 20);
    for name in ["kept", "gone"] {
        fs::write(dir.join(name), &content).unwrap();
    }
    sync(&dir);
    fs::remove_file(dir.join("gone")).unwrap();
    // What the files have reserved ahead is theirs for a while.
    assert!(trimmed(&dir, &[]) > 150 * MIB);
    assert!(unmount_unless_busy(&dir).status.success());
    run("mount.gpunvme", &[&device, dir.to_str().unwrap()]);
    let is_same = fs::read(dir.join("kept")).unwrap() == content;
    let unmounted = Command::new("umount").arg(&dir).status().unwrap();
    assert!(is_same && unmounted.success());
    run("fsck.gpunvme", &["-n", &device]);
}
