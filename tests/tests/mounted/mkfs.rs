//! mkfs.gpunvme: what it makes, and what it will not destroy.

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use gpunvme_tests::direct::info;
use gpunvme_tests::mounted::{Image, Mounted, text};
use gpunvme_tests::{needs_mount, tree};

fn assert_refused(output: &Output, words: &[&str]) {
    assert!(!output.status.success(), "{}", text(output));
    let message = String::from_utf8_lossy(&output.stderr);
    for word in words {
        assert!(message.contains(word), "{word:?} is not in {message:?}");
    }
}

#[test]
fn label_and_uuid_are_kept_and_reported_as_json() {
    needs_mount!();
    let image = Image::blank(256 << 20);
    let uuid = "6bf5c1f4-27b3-46a8-9d5a-1c5f5c8b7a10";
    let output = image.mkfs(&["-L", "weights é", "-U", uuid, "--json"]);
    assert!(output.status.success(), "{}", text(&output));
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&report["label"], &report["uuid"]), (&"weights é".into(), &uuid.into()));
    assert_eq!(report["size_bytes"], 256 << 20);
    let volume = image.mount();
    let info = info(File::open(volume.root()).unwrap());
    assert_eq!(gpunvme_abi::get_text(&info.label), "weights é");
    assert_eq!(info.uuid[..4], [0x6b, 0xf5, 0xc1, 0xf4]);
}

/// `gpunvme probe`, by which udev knows a volume: also where its beginning was wiped, and not where
/// another filesystem took its place.
#[test]
fn probe_knows_a_volume_while_it_is_mounted_too() {
    needs_mount!();
    let image = Image::blank(256 << 20);
    let uuid = "6bf5c1f4-27b3-46a8-9d5a-1c5f5c8b7a11";
    assert!(image.mkfs(&["-L", "my data", "-U", uuid]).status.success());
    let path = image.path().to_owned();
    let probe = || gpunvme_tests::programs::command("gpunvme").arg("probe").arg(&path).output().unwrap();
    let known = format!(
        "ID_FS_TYPE=gpunvme\nID_FS_USAGE=filesystem\nID_FS_VERSION=1\nID_FS_UUID={uuid}\nID_FS_UUID_ENC={uuid}\n\
         ID_FS_LABEL=my_data\nID_FS_LABEL_ENC=my\\x20data\n"
    );
    assert_eq!(String::from_utf8(probe().stdout).unwrap(), known);
    let volume = image.mount();
    assert_eq!(String::from_utf8(probe().stdout).unwrap(), known);
    let image = volume.unmount();
    let file = OpenOptions::new().write(true).open(image.path()).unwrap();
    file.write_all_at(&[0; 4096], 0).unwrap();
    assert_eq!(String::from_utf8(probe().stdout).unwrap(), known, "by the copy in the last block");
    file.write_all_at(b"another filesystem", 0).unwrap();
    assert_refused(&probe(), &["no gpunvme volume is here"]);
    file.set_len(100).unwrap();
    assert_refused(&probe(), &["no gpunvme volume is here"]);
}

#[test]
fn a_tebibyte_is_formatted_in_a_second_and_writes_little() {
    let image = Image::blank(1 << 40);
    let start = Instant::now();
    let output = image.mkfs(&[]);
    assert!(output.status.success(), "{}", text(&output));
    // Not a benchmark: what would be wrong, work in proportion to the size, takes minutes.
    assert!(start.elapsed() < Duration::from_secs(20), "{:?}", start.elapsed());
    let used = fs::metadata(image.path()).unwrap().blocks() * 512;
    assert!(used < 64 << 20, "{used} bytes written");
}

#[test]
fn another_filesystem_or_partition_table_survives_unless_forced() {
    needs_mount!();
    let ext4 = Image::blank(256 << 20);
    assert!(Command::new("mkfs.ext4").arg("-qF").arg(ext4.path()).status().unwrap().success());
    let partitioned = Image::blank(256 << 20);
    let mut sfdisk = Command::new("sfdisk")
        .arg("--quiet")
        .arg(partitioned.path())
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()
        .expect("sfdisk runs");
    sfdisk.stdin.take().unwrap().write_all(b"label: gpt\n,100M\n,,\n").unwrap();
    assert!(sfdisk.wait().unwrap().success());
    let own = Image::formatted_with(256 << 20);
    for (image, what) in [(ext4, "ext4"), (partitioned, "gpt"), (own, "gpunvme")] {
        let before = tree::digest(File::open(image.path()).unwrap()).unwrap();
        let output = image.mkfs(&[]);
        assert_refused(&output, &["--force"]);
        let message = String::from_utf8_lossy(&output.stderr).to_lowercase();
        assert!(message.contains(what), "{message}");
        assert!(tree::digest(File::open(image.path()).unwrap()).unwrap() == before, "{what} was touched");
        let output = image.mkfs(&["--force"]);
        assert!(output.status.success(), "{}", text(&output));
        // Nothing of what was there before is recognised afterwards, by blkid or by us.
        let blkid = Command::new("/usr/sbin/blkid").arg("-p").arg(image.path()).output().unwrap();
        let seen = String::from_utf8_lossy(&blkid.stdout).to_lowercase();
        assert!(!seen.contains("ext4") && !seen.contains("gpt"), "{seen}");
        let volume = image.mount();
        fs::write(volume.path("file"), "works").unwrap();
    }
}

#[test]
fn a_mounted_volume_is_not_formatted_even_by_force() {
    needs_mount!();
    let volume = Mounted::new();
    fs::write(volume.path("file"), "kept").unwrap();
    assert_refused(&volume.image().mkfs(&["--force"]), &["mounted"]);
    let volume = volume.remount();
    assert_eq!(fs::read_to_string(volume.path("file")).unwrap(), "kept");
}

#[test]
fn a_loop_device_is_formatted_and_mounted_like_a_disk() {
    needs_mount!();
    let image = Image::blank(256 << 20);
    let output = Command::new("losetup").args(["--find", "--show"]).arg(image.path()).output().unwrap();
    if !output.status.success() {
        gpunvme_tests::report_skipped("a_loop_device_is_formatted_and_mounted_like_a_disk", "no loop device");
        return;
    }
    let device = String::from_utf8(output.stdout).unwrap().trim().to_owned();
    let script = format!(
        "set -eu; mkfs.gpunvme {device}; mount.gpunvme {device} $DIR; echo x > $DIR/file; umount $DIR; \
         mount.gpunvme {device} $DIR; test $(cat $DIR/file) = x; mkfs.gpunvme -f {device} && exit 9; umount $DIR"
    );
    fs::create_dir_all(image.mount_point()).unwrap();
    let path = std::env::join_paths(
        std::iter::once(gpunvme_tests::programs::folder().clone())
            .chain(std::env::split_paths(&std::env::var_os("PATH").unwrap())),
    );
    let result =
        Command::new("sh").args(["-c", &script]).env("PATH", path.unwrap()).env("DIR", image.mount_point()).output().unwrap();
    // The daemon may still be writing down when umount returns: the device is free when it has
    // ended.
    let start = Instant::now();
    while !Command::new("losetup").args(["--detach", &device]).status().unwrap().success() {
        assert!(start.elapsed() < Duration::from_secs(20), "{device} stays in use");
        std::thread::sleep(Duration::from_millis(50));
    }
    assert!(result.status.success(), "{}", text(&result));
}

#[test]
fn what_cannot_be_formatted_is_refused_in_words() {
    let small = Image::blank(4 << 20);
    assert_refused(&small.mkfs(&[]), &["too small"]);
    assert_refused(&Image::blank(0).mkfs(&[]), &["too small"]);
    let missing = Image::blank(0);
    fs::remove_file(missing.path()).unwrap();
    assert_refused(&missing.mkfs(&[]), &["image"]);
    fs::create_dir(missing.path()).unwrap();
    assert_refused(&missing.mkfs(&[]), &["image"]);
    let image = Image::blank(256 << 20);
    assert_refused(&image.mkfs(&["-L", &"x".repeat(65)]), &["64"]);
    assert_refused(&image.mkfs(&["-U", "nonsense"]), &["nonsense"]);
    assert_eq!(fs::metadata(image.path()).unwrap().blocks(), 0, "nothing was written");
}

#[test]
fn a_dry_run_writes_nothing() {
    let image = Image::blank(256 << 20);
    let output = image.mkfs(&["--dry-run"]);
    assert!(output.status.success(), "{}", text(&output));
    assert_eq!(fs::metadata(image.path()).unwrap().blocks(), 0);
}

#[test]
fn an_odd_number_of_bytes_is_no_obstacle() {
    needs_mount!();
    let image = Image::blank((300 << 20) + 12_345);
    let output = image.mkfs(&[]);
    assert!(output.status.success(), "{}", text(&output));
    let volume = image.mount();
    fs::write(volume.path("file"), "works").unwrap();
    let file = OpenOptions::new().read(true).open(volume.path("file")).unwrap();
    file.read_exact_at(&mut [0; 5], 0).unwrap();
}
