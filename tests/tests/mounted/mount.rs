//! The life of a mount: live when the program returns, one at a time, clean after umount and
//! SIGTERM, usable after SIGKILL, and refused in words where the device does not hold a volume that
//! this program can serve.

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::process::{Command, Output};

use gpunvme_layout::{BLOCK_SIZE, Block, Geometry, Superblock};
use gpunvme_tests::mounted::{IMAGE_LEN, Image, Mounted, is_mounted, text, unmount_unless_busy};
use gpunvme_tests::{needs_mount, tree};
use rustix::process::Signal;

/// mount(8)'s code for "mount failure".
const MOUNT_FAILURE: Option<i32> = Some(32);
/// mount(8)'s code for "incorrect invocation".
const USAGE: Option<i32> = Some(1);

fn assert_refused(output: &Output, code: Option<i32>, words: &[&str]) {
    assert_eq!(output.status.code(), code, "{}", text(output));
    let message = String::from_utf8_lossy(&output.stderr);
    for word in words {
        assert!(message.contains(word), "{word:?} is not in {message:?}");
    }
    assert_eq!(message.trim_end().lines().count(), 1, "one line says it: {message:?}");
}

/// Changes every copy of the superblock, and seals it again.
fn change_superblocks(image: &Image, change: impl Fn(&mut [u8; BLOCK_SIZE])) {
    let file = OpenOptions::new().read(true).write(true).open(image.path()).unwrap();
    let mut bytes = [0; BLOCK_SIZE];
    file.read_exact_at(&mut bytes, 0).unwrap();
    let superblock = Superblock::decode(&Block::from_bytes(&bytes), 0, u64::MAX).unwrap();
    for address in superblock.geometry().superblocks() {
        file.read_exact_at(&mut bytes, Geometry::byte(address)).unwrap();
        let mut block = Block::from_bytes(&bytes);
        change(block.bytes_mut());
        let sequence = block.sequence();
        block.seal(sequence);
        file.write_all_at(block.bytes(), Geometry::byte(address)).unwrap();
    }
}

#[test]
fn a_mount_shows_its_device_and_type() {
    needs_mount!();
    let volume = Mounted::new();
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap();
    let line = mounts.lines().find(|line| line.contains(volume.root().to_str().unwrap())).unwrap();
    assert!(line.starts_with(volume.image().path().to_str().unwrap()), "{line}");
    assert!(line.contains(" fuse.gpunvme "), "{line}");
}

#[test]
fn statfs_counts_what_is_used() {
    needs_mount!();
    let volume = Mounted::new();
    let statfs = || rustix::fs::statvfs(volume.root()).unwrap();
    let before = statfs();
    let total = before.f_blocks * before.f_frsize;
    assert!(total <= IMAGE_LEN && total > IMAGE_LEN * 9 / 10, "{total} bytes");
    assert!(before.f_bavail <= before.f_bfree && before.f_namemax == 255);
    let mut file = File::create(volume.path("file")).unwrap();
    file.write_all(&tree::pattern(1, 100 << 20)).unwrap();
    file.sync_all().unwrap();
    let used = (before.f_bfree - statfs().f_bfree) * before.f_frsize;
    assert!((100 << 20..104 << 20).contains(&used), "{used} bytes for 100 MiB");
}

#[test]
fn a_second_mount_is_refused_and_the_first_goes_on() {
    needs_mount!();
    let volume = Mounted::new();
    fs::write(volume.path("file"), "one").unwrap();
    let elsewhere = volume.image().path().with_file_name("elsewhere");
    fs::create_dir(&elsewhere).unwrap();
    for options in ["", "ro"] {
        let mut command = gpunvme_tests::programs::command("mount.gpunvme");
        command.arg(volume.image().path()).arg(&elsewhere);
        if !options.is_empty() {
            command.args(["-o", options]);
        }
        assert_refused(&command.output().unwrap(), MOUNT_FAILURE, &["mount.gpunvme", "mounted"]);
        assert!(!is_mounted(&elsewhere));
    }
    assert_eq!(fs::read_to_string(volume.path("file")).unwrap(), "one");
    fs::write(volume.path("file"), "two").unwrap();
}

#[test]
fn read_only_means_that_nothing_on_the_device_changes() {
    needs_mount!();
    let volume = Mounted::new();
    tree::make(&volume.path("tree"), 3, 50).unwrap();
    let expected = tree::read(&volume.path("tree")).unwrap();
    let image = volume.unmount();
    let before = tree::digest(File::open(image.path()).unwrap()).unwrap();
    let volume = image.mount_with("ro");
    tree::assert_same(&expected, &tree::read(&volume.path("tree")).unwrap());
    let refused = |result: std::io::Result<()>| assert_eq!(result.unwrap_err().raw_os_error(), Some(libc::EROFS));
    refused(fs::write(volume.path("new"), ""));
    refused(fs::create_dir(volume.path("new")));
    refused(fs::remove_dir_all(volume.path("tree")));
    refused(fs::rename(volume.path("tree"), volume.path("new")));
    let image = volume.unmount();
    assert!(tree::digest(File::open(image.path()).unwrap()).unwrap() == before);
}

#[test]
fn sigterm_unmounts_and_leaves_a_clean_volume() {
    needs_mount!();
    let volume = Mounted::new();
    tree::make(&volume.path("tree"), 4, 50).unwrap();
    let expected = tree::read(&volume.path("tree")).unwrap();
    let mount_point = volume.root();
    let (status, image) = volume.signal(Signal::TERM);
    assert_eq!(status.exit_status(), Some(0));
    assert!(!is_mounted(&mount_point));
    let volume = image.mount();
    tree::assert_same(&expected, &tree::read(&volume.path("tree")).unwrap());
}

#[test]
fn after_sigkill_the_next_mount_has_all_that_was_synced() {
    needs_mount!();
    let mut image = Image::formatted();
    for round in 0..4_u64 {
        let volume = image.mount();
        for earlier in 0..round {
            let path = volume.path(format!("synced {earlier}"));
            assert!(fs::read(path).unwrap() == tree::pattern(earlier, 3 << 20), "round {round}");
        }
        let mut file = File::create(volume.path("temporary")).unwrap();
        file.write_all(&tree::pattern(round, 3 << 20)).unwrap();
        file.sync_all().unwrap();
        fs::rename(volume.path("temporary"), volume.path(format!("synced {round}"))).unwrap();
        File::open(volume.root()).unwrap().sync_all().unwrap();
        // And work that was not synced, in flight when the daemon dies.
        let root = volume.root();
        let writer = std::thread::spawn(move || {
            let _ = tree::make(&root.join(format!("lost {round}")), round, 100_000);
        });
        std::thread::sleep(std::time::Duration::from_millis(150));
        let (status, dead) = volume.signal(Signal::KILL);
        assert_eq!(status.terminating_signal(), Some(libc::SIGKILL));
        writer.join().unwrap();
        // What the journal recovers is as sound as what an unmount leaves.
        dead.check();
        image = dead;
    }
    let volume = image.mount();
    // What was lost may be there in part, and whatever is there can be listed, read and removed.
    tree::read(&volume.root()).unwrap();
    for entry in fs::read_dir(volume.root()).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            fs::remove_dir_all(path).unwrap();
        }
    }
}

#[test]
fn a_dead_daemons_mount_does_not_stand_in_the_way() {
    needs_mount!();
    let volume = Mounted::new();
    fs::write(volume.path("file"), "kept").unwrap();
    File::open(volume.path("file")).unwrap().sync_all().unwrap();
    rustix::process::kill_process(volume.daemon(), Signal::KILL).unwrap();
    let image_path = volume.image().path();
    // Straight away, and on the same directory, without an umount before.
    let output = volume.image().try_mount("");
    assert!(output.status.success(), "{}", text(&output));
    assert_eq!(fs::read_to_string(volume.path("file")).unwrap(), "kept");
    assert!(unmount_unless_busy(&volume.root()).status.success());
    let (_, image) = volume.signal(Signal::KILL);
    assert_eq!(image.path(), image_path);
}

#[test]
fn wrong_invocations_say_what_is_wrong() {
    needs_mount!();
    let image = Image::formatted();
    assert_refused(&image.try_mount("nonsense"), USAGE, &["nonsense"]);
    assert_refused(&image.try_mount("cache=lots"), USAGE, &["cache", "lots"]);
    let run = |device: &std::path::Path, dir: &std::path::Path| {
        gpunvme_tests::programs::command("mount.gpunvme").arg(device).arg(dir).output().unwrap()
    };
    let nowhere = image.path().with_file_name("nowhere");
    assert_refused(&run(&image.path(), &nowhere), MOUNT_FAILURE, &["nowhere"]);
    assert_refused(&run(&nowhere, &image.mount_point()), MOUNT_FAILURE, &["nowhere"]);
    assert!(!is_mounted(&image.mount_point()));
}

#[test]
fn what_is_no_volume_or_a_newer_one_is_refused_by_name() {
    needs_mount!();
    let blank = Image::blank(64 << 20);
    assert_refused(&blank.try_mount(""), MOUNT_FAILURE, &["mkfs.gpunvme"]);

    let ext4 = Image::blank(64 << 20);
    assert!(Command::new("mkfs.ext4").arg("-qF").arg(ext4.path()).status().unwrap().success());
    assert_refused(&ext4.try_mount(""), MOUNT_FAILURE, &["no gpunvme"]);

    let newer = Image::formatted_with(64 << 20);
    change_superblocks(&newer, |bytes| bytes[80] = 9);
    assert_refused(&newer.try_mount(""), MOUNT_FAILURE, &["version 9"]);

    let featured = Image::formatted_with(64 << 20);
    change_superblocks(&featured, |bytes| bytes[104] = 0b10);
    assert_refused(&featured.try_mount(""), MOUNT_FAILURE, &["shared extents"]);

    let readable = Image::formatted_with(64 << 20);
    change_superblocks(&readable, |bytes| bytes[96] = 1);
    assert_refused(&readable.try_mount(""), MOUNT_FAILURE, &["-o ro"]);
    let volume = readable.mount_with("ro");
    assert_eq!(fs::read_dir(volume.root()).unwrap().count(), 0);
    // fsck.gpunvme cannot check what it does not know.
    volume.signal(Signal::TERM);
}

#[test]
fn a_truncated_image_is_refused_and_works_again_when_it_is_whole() {
    needs_mount!();
    let volume = Image::formatted_with(128 << 20).mount();
    fs::write(volume.path("file"), "kept").unwrap();
    let image = volume.unmount();
    let whole = image.path().with_file_name("whole");
    fs::copy(image.path(), &whole).unwrap();
    for len in [127 << 20, 64 << 20, 5000, 4096, 100, 0] {
        OpenOptions::new().write(true).open(image.path()).unwrap().set_len(len).unwrap();
        let output = image.try_mount("");
        assert_eq!(output.status.code(), MOUNT_FAILURE, "{len} bytes: {}", text(&output));
        assert!(!output.stderr.is_empty() && output.stderr.len() < 1000, "{}", text(&output));
    }
    fs::rename(&whole, image.path()).unwrap();
    let volume = image.mount();
    assert_eq!(fs::read_to_string(volume.path("file")).unwrap(), "kept");
}

#[test]
fn a_damaged_first_superblock_is_replaced_by_a_copy() {
    needs_mount!();
    let volume = Image::formatted_with(128 << 20).mount();
    fs::write(volume.path("file"), "kept").unwrap();
    let image = volume.unmount();
    let file = OpenOptions::new().write(true).open(image.path()).unwrap();
    file.write_all_at(&[0; 4096], 0).unwrap();
    drop(file);
    let volume = image.mount();
    assert_eq!(fs::read_to_string(volume.path("file")).unwrap(), "kept");
    let (_, image) = volume.signal(Signal::TERM);
    let mended = gpunvme_tests::programs::command("fsck.gpunvme").arg("-p").arg(image.path()).output().unwrap();
    assert_eq!(mended.status.code(), Some(1), "{}", text(&mended));
    image.check();
}

#[test]
fn what_may_be_another_filesystem_made_since_is_neither_mounted_nor_mended_unasked() {
    needs_mount!();
    let volume = Image::formatted_with(128 << 20).mount();
    fs::write(volume.path("file"), "kept").unwrap();
    let image = volume.unmount();
    let file = OpenOptions::new().write(true).open(image.path()).unwrap();
    file.write_all_at(&[0x58; 4096], 0).unwrap();
    drop(file);
    let bytes = fs::read(image.path()).unwrap();
    assert_refused(&image.try_mount(""), MOUNT_FAILURE, &["something else lies where the superblock was"]);
    let fsck = |option: &str| {
        let output = gpunvme_tests::programs::command("fsck.gpunvme").arg(option).arg(image.path()).output().unwrap();
        (output.status.code(), text(&output))
    };
    let (code, said) = fsck("-p");
    assert!(code == Some(4) && said.contains("fsck.gpunvme -y"), "{said}");
    assert!(fs::read(image.path()).unwrap() == bytes, "nothing was written");
    let (code, said) = fsck("-y");
    assert_eq!(code, Some(1), "{said}");
    let volume = image.mount();
    assert_eq!(fs::read_to_string(volume.path("file")).unwrap(), "kept");
}

#[test]
fn a_mount_of_a_huge_sparse_image_is_quick() {
    needs_mount!();
    let image = Image::formatted_with(2 << 40);
    let used = fs::metadata(image.path()).unwrap().blocks() * 512;
    assert!(used < 128 << 20, "formatting 2 TiB wrote {used} bytes");
    let volume = image.mount();
    fs::write(volume.path("file"), tree::pattern(5, 1 << 20)).unwrap();
    let volume = volume.remount();
    assert!(fs::read(volume.path("file")).unwrap() == tree::pattern(5, 1 << 20));
}

#[test]
fn mount_8_finds_the_helper_and_fstab_works() {
    needs_mount!();
    // /sbin/mount.gpunvme has to exist for this: in a namespace of its own, over the real
    // /usr/sbin, so that nothing stays.
    let image = Image::formatted();
    fs::create_dir_all(image.mount_point()).unwrap();
    let sbin = image.path().with_file_name("sbin");
    fs::create_dir(&sbin).unwrap();
    for helper in ["mount.gpunvme", "mount.fuse.gpunvme"] {
        std::os::unix::fs::symlink(gpunvme_tests::programs::path("mount.gpunvme"), sbin.join(helper)).unwrap();
    }
    let script = r#"
        set -eu
        mount -t overlay overlay -o "lowerdir=$SBIN:/usr/sbin" /usr/sbin
        mount -t gpunvme -o nodev,threads=2 "$IMAGE" "$DIR"
        echo through mount > "$DIR/file"
        grep -q "$DIR fuse.gpunvme .*nodev" /proc/self/mounts
        mount -o remount,ro "$DIR"
        ! touch "$DIR/file" 2>/dev/null
        test "$(cat "$DIR/file")" = "through mount"
        grep -q "$DIR fuse.gpunvme ro,.*nodev" /proc/self/mounts
        mount -o remount,rw "$DIR" && touch "$DIR/file"
        mount -o remount,threads=2,nodiscard "$DIR" 2>"$SBIN/kept"
        test ! -s "$SBIN/kept"
        mount -o remount,threads=3,commit=9,cache=128M,discard "$DIR" 2>"$SBIN/kept"
        grep -q "$DIR: still cache=256M, threads=2, commit=5, nodiscard: unmount it" "$SBIN/kept"
        umount "$DIR"
        echo "$IMAGE $DIR gpunvme ro,noauto 0 0" > "$SBIN/fstab"
        mount -T "$SBIN/fstab" "$DIR"
        test "$(cat "$DIR/file")" = "through mount"
        mount -o remount,rw "$DIR" 2>"$SBIN/refused" && exit 1
        grep -q "is read-only: it was mounted so" "$SBIN/refused"
        grep -q "$DIR fuse.gpunvme ro" /proc/self/mounts
        umount "$DIR"
    "#;
    let output = Command::new("unshare")
        .args(["--mount", "sh", "-c", script])
        .env("SBIN", &sbin)
        .env("IMAGE", image.path())
        .env("DIR", image.mount_point())
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", text(&output));
}

/// A loop device, detached when it is dropped.
struct Loop(std::path::PathBuf);

impl Loop {
    fn over(file: &std::path::Path, options: &[&str]) -> Loop {
        let output = Command::new("losetup").args(options).args(["--find", "--show"]).arg(file).output().unwrap();
        assert!(output.status.success(), "{}", text(&output));
        Loop(String::from_utf8(output.stdout).unwrap().trim().into())
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = Command::new("losetup").arg("--detach").arg(&self.0).status();
    }
}

#[test]
fn two_loop_devices_over_one_image_are_one_device() {
    needs_mount!();
    let image = Image::formatted_with(64 << 20);
    let folder = image.path().parent().unwrap().to_owned();
    let (dir, elsewhere) = (folder.join("mnt"), folder.join("elsewhere"));
    for dir in [&dir, &elsewhere] {
        fs::create_dir_all(dir).unwrap();
    }
    let (first, second) = (Loop::over(&image.path(), &[]), Loop::over(&image.path(), &[]));
    let run = |program: &str, arguments: &[&std::ffi::OsStr]| {
        gpunvme_tests::programs::command(program).args(arguments).output().unwrap()
    };
    let mounted = run("mount.gpunvme", &[first.0.as_ref(), dir.as_ref()]);
    assert!(mounted.status.success(), "{}", text(&mounted));
    fs::write(dir.join("file"), "kept").unwrap();
    File::open(dir.join("file")).unwrap().sync_all().unwrap();
    let mount = run("mount.gpunvme", &[second.0.as_ref(), elsewhere.as_ref()]);
    let mkfs = run("mkfs.gpunvme", &["--force".as_ref(), second.0.as_ref()]);
    let fsck = run("fsck.gpunvme", &["-n".as_ref(), second.0.as_ref()]);
    let itself = run("mkfs.gpunvme", &["--force".as_ref(), image.path().as_ref()]);
    let umount = unmount_unless_busy(&dir);
    assert!(umount.status.success(), "{}", text(&umount));
    for (output, code, word) in
        [(mount, 32, "mounted on"), (mkfs, 1, "mounted on"), (fsck, 8, "mounted on"), (itself, 1, "attached to")]
    {
        assert!(output.status.code() == Some(code) && text(&output).contains(word), "{}", text(&output));
    }
    // Now either will do, and what was written is there by both names.
    let mounted = run("mount.gpunvme", &[second.0.as_ref(), elsewhere.as_ref()]);
    assert!(mounted.status.success(), "{}", text(&mounted));
    let kept = fs::read(elsewhere.join("file"));
    let umount = unmount_unless_busy(&elsewhere);
    assert!(umount.status.success(), "{}", text(&umount));
    assert_eq!(kept.unwrap(), b"kept");
    // What a kernel filesystem has by one name is in use by the other. Two that do not overlap have
    // nothing to do with each other.
    drop((first, second));
    let lower = Loop::over(&image.path(), &["--sizelimit", "33554432"]);
    let (upper, whole) = (Loop::over(&image.path(), &["--offset", "33554432"]), Loop::over(&image.path(), &[]));
    let ext4 = Command::new("mkfs.ext4").args(["-q", "-F"]).arg(&lower.0).output().unwrap();
    assert!(ext4.status.success(), "{}", text(&ext4));
    assert!(Command::new("mount").arg(&lower.0).arg(&dir).status().unwrap().success());
    let (apart, over) = (
        run("mkfs.gpunvme", &["--force".as_ref(), upper.0.as_ref()]),
        run("mkfs.gpunvme", &["--force".as_ref(), whole.0.as_ref()]),
    );
    assert!(Command::new("umount").arg(&dir).status().unwrap().success());
    assert!(apart.status.success(), "{}", text(&apart));
    assert!(over.status.code() == Some(1) && text(&over).contains("mounted on"), "{}", text(&over));
}
