//! umount(8)'s helper: it waits for the daemon, and tells of what was lost.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use gpunvme_tests::loop_device::LoopDevice;
use gpunvme_tests::mounted::{Image, Mounted, find_daemon, is_mounted, text};
use gpunvme_tests::sys::Mapping;
use gpunvme_tests::{needs_mount, programs, tree};
use rustix::process::{Signal, WaitOptions};

use crate::faults::Small;

/// umount(8)'s helper, as it is called where it is installed.
pub fn unmount_by_helper(image: &Image) -> Output {
    unmount_at(&image.mount_point())
}

pub fn unmount_at(mount_point: &Path) -> Output {
    unmount_with(&[], mount_point)
}

pub fn unmount_with(options: &[&str], mount_point: &Path) -> Output {
    let folder = gpunvme_tests::scratch_dir();
    let helper = folder.path().join("umount.fuse.gpunvme");
    symlink(programs::path("mount.gpunvme"), &helper).unwrap();
    let mut timeout = Command::new("timeout");
    timeout.args(["-s", "KILL", "120"]).arg(helper).args(options).arg(mount_point).output().unwrap()
}

#[test]
fn an_unmount_that_could_not_write_the_volume_down_says_so() {
    needs_mount!();
    let outer = Small::new("size=20m");
    let image = Image::blank_in(outer.0.path(), 100 << 20);
    assert!(image.mkfs(&[]).status.success());
    assert_eq!(text(&image.try_mount("")), "exit status: 0: ");
    let said = unmount_by_helper(&image);
    assert_eq!(text(&said), "exit status: 0: ", "nothing is lost");
    assert_eq!(text(&image.try_mount("")), "exit status: 0: ");
    let filled = outer.0.path().join("filled");
    let mut filler = File::create(&filled).unwrap();
    let _ = (0..20).try_for_each(|_| filler.write_all(&[1; 1 << 20]));
    for number in 0..50 {
        fs::write(image.mount_point().join(number.to_string()), tree::pattern(number, 300_000)).unwrap();
    }
    let said = unmount_by_helper(&image);
    assert!(!is_mounted(&image.mount_point()));
    assert_eq!(said.status.code(), Some(32), "{}", text(&said));
    assert!(text(&said).contains("the volume could not be written down: what was not synced before is lost"), "{}", text(&said));
    fs::remove_file(filled).unwrap();
    // Nothing is left in memory of a daemon that was killed, nor can be lost by this.
    let volume = image.mount();
    let last_word = last_word_of(&volume);
    assert!(last_word.exists());
    rustix::process::kill_process(volume.daemon(), Signal::KILL).unwrap();
    rustix::process::waitpid(Some(volume.daemon()), WaitOptions::empty()).unwrap();
    let said = unmount_by_helper(volume.image());
    assert_eq!(text(&said), "exit status: 0: ");
    assert!(last_word.exists(), "a daemon that was killed removes nothing");
    volume.abandon();
}

/// The file for the last word of a mount's daemon.
pub fn last_word_of(volume: &Mounted) -> PathBuf {
    let dev = fs::metadata(volume.root()).unwrap().dev();
    PathBuf::from(format!("/run/gpunvme/{}:{}.last-word", rustix::fs::major(dev), rustix::fs::minor(dev)))
}

/// A volume that is full of what its device does not take, mounted with these devices; how its
/// unmounting ends after `before`.
fn unmount_of_lost(folder: &Path, mut mount: Command, mount_point: &Path, before: impl FnOnce()) -> Output {
    fs::create_dir_all(mount_point).unwrap();
    let output = mount.output().unwrap();
    assert_eq!(text(&output), "exit status: 0: ");
    let mut filler = File::create(folder.join("filled")).unwrap();
    let _ = (0..40).try_for_each(|_| filler.write_all(&[1; 1 << 20]));
    for number in 0..50 {
        fs::write(mount_point.join(number.to_string()), tree::pattern(number, 300_000)).unwrap();
    }
    before();
    let said = unmount_at(mount_point);
    assert!(!is_mounted(mount_point));
    fs::remove_file(folder.join("filled")).unwrap();
    said
}

#[test]
fn an_unmount_tells_of_what_was_lost_on_members_in_different_folders() {
    needs_mount!();
    let outer = Small::new("size=40m");
    let members = ["x", "y"].map(|folder| outer.0.path().join(folder).join("member"));
    for member in &members {
        fs::create_dir(member.parent().unwrap()).unwrap();
        File::create(member).unwrap().set_len(100 << 20).unwrap();
    }
    let output = programs::command("mkfs.gpunvme").args(&members).output().unwrap();
    assert!(output.status.success(), "{}", text(&output));
    let mount_point = outer.0.path().join("mnt");
    let mut mount = programs::command("mount.gpunvme");
    mount.arg(&members[0]).arg(&mount_point).arg("-o").arg(format!("device={}", members[1].display()));
    let said = unmount_of_lost(outer.0.path(), mount, &mount_point, || ());
    assert_eq!(said.status.code(), Some(32), "{}", text(&said));
}

#[test]
fn an_unmount_tells_of_what_was_lost_before_the_mount_became_read_only() {
    needs_mount!();
    let outer = Small::new("size=20m");
    let image = Image::blank_in(outer.0.path(), 100 << 20);
    assert!(image.mkfs(&[]).status.success());
    let mut mount = programs::command("mount.gpunvme");
    mount.arg(image.path()).arg(image.mount_point());
    let mount_point = image.mount_point();
    let said = unmount_of_lost(outer.0.path(), mount, &mount_point, || {
        let output = image.try_mount("remount,ro");
        assert_eq!(output.status.code(), Some(32), "{}", text(&output));
    });
    assert_eq!(said.status.code(), Some(32), "{}", text(&said));
}

#[test]
fn an_unmount_tells_of_names_that_were_lost_with_a_commit_before_it() {
    needs_mount!();
    let outer = Small::new("size=20m");
    let image = Image::blank_in(outer.0.path(), 100 << 20);
    assert!(image.mkfs(&[]).status.success());
    assert_eq!(text(&image.try_mount("")), "exit status: 0: ");
    let mut filler = File::create(outer.0.path().join("filled")).unwrap();
    let _ = (0..20).try_for_each(|_| filler.write_all(&[1; 1 << 20]));
    for number in 0..200 {
        fs::create_dir(image.mount_point().join(format!("folder {number}"))).unwrap();
    }
    let synced = File::open(image.mount_point()).unwrap().sync_all();
    assert!(synced.is_err(), "the journal has no room on its device");
    let said = unmount_by_helper(&image);
    assert_eq!(said.status.code(), Some(32), "{}", text(&said));
}

#[test]
fn an_unmount_of_a_block_device_tells_of_what_was_lost() {
    needs_mount!();
    let outer = Small::new("size=20m");
    let image = outer.0.path().join("image");
    File::create(&image).unwrap().set_len(100 << 20).unwrap();
    let Some(device) = LoopDevice::over("an_unmount_of_a_block_device_tells_of_what_was_lost", &image) else { return };
    assert!(programs::command("mkfs.gpunvme").arg("-f").arg(device.path()).output().unwrap().status.success());
    let mount_point = outer.0.path().join("mnt");
    let mut mount = programs::command("mount.gpunvme");
    mount.arg(device.path()).arg(&mount_point);
    let mut table = String::new();
    let said = unmount_of_lost(outer.0.path(), mount, &mount_point, || {
        table = fs::read_to_string("/proc/self/mountinfo").unwrap();
    });
    assert_eq!(said.status.code(), Some(32), "{}", text(&said));
    let line = table.lines().find(|line| line.contains(mount_point.to_str().unwrap()));
    assert!(line.is_some_and(|line| line.contains("fuseblk.gpunvme")), "{line:?}");
}

/// A mount that was moved over another is older than that.
#[test]
fn an_unmount_takes_the_uppermost_mount_and_hears_its_daemon() {
    needs_mount!();
    let (below, above) = (Mounted::new(), Image::formatted());
    let aside = gpunvme_tests::scratch_dir();
    let private = |dir: &Path| {
        assert!(Command::new("mount").arg("--bind").args([dir, dir]).status().unwrap().success());
        assert!(Command::new("mount").arg("--make-private").arg(dir).status().unwrap().success());
    };
    private(aside.path());
    let dir = aside.path().join("dir");
    fs::create_dir(&dir).unwrap();
    let moving = programs::command("mount.gpunvme").arg(above.path()).arg(&dir).output().unwrap();
    assert_eq!(text(&moving), "exit status: 0: ");
    let table = || fs::read_to_string("/proc/self/mountinfo").unwrap();
    let root = below.root();
    let second = Image::formatted();
    let newer = programs::command("mount.gpunvme").arg(second.path()).arg(&root).output().unwrap();
    assert_eq!(text(&newer), "exit status: 0: ");
    assert!(Command::new("mount").arg("--move").args([&dir, &root]).status().unwrap().success());
    let found = Command::new("pgrep").args(["-n", "-f"]).arg(above.path()).output().unwrap();
    let daemon = rustix::process::Pid::from_raw(String::from_utf8(found.stdout).unwrap().trim().parse().unwrap()).unwrap();
    // The kernel need not ask for them again.
    fs::symlink_metadata(&root).unwrap();
    rustix::process::kill_process(daemon, Signal::STOP).unwrap();
    let begun = Instant::now();
    let (said, took) = std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_secs(1));
            rustix::process::kill_process(daemon, Signal::CONT).unwrap();
        });
        (unmount_at(&root), begun.elapsed())
    });
    assert_eq!(text(&said), "exit status: 0: ");
    assert!(took > Duration::from_millis(900), "it waited for another daemon");
    let table = table();
    let is_listed = |image: &Image| table.contains(&image.path().display().to_string());
    assert!(!is_listed(&above) && is_listed(&second), "the one that was moved is the uppermost");
    assert_eq!(text(&unmount_at(&root)), "exit status: 0: ");
    assert!(Command::new("umount").arg(aside.path()).status().unwrap().success());
    below.unmount();
}

#[test]
fn an_unmount_that_cannot_tell_says_so() {
    needs_mount!();
    let volume = Mounted::new();
    let image = volume.image().path();
    let moved = image.with_extension("moved");
    fs::rename(&image, &moved).unwrap();
    // As for a mount whose daemon has no place for it.
    fs::remove_file(last_word_of(&volume)).unwrap();
    let said = unmount_by_helper(volume.image());
    fs::rename(&moved, &image).unwrap();
    assert_eq!(said.status.code(), Some(64), "{}", text(&said));
    let why = format!("unmounted, but whether the volume was written down cannot be told: {}: no such file", image.display());
    assert!(text(&said).contains(&why), "{}", text(&said));
    volume.unmount();
}

#[test]
fn an_unmount_hears_from_the_daemon_whatever_has_the_name_of_its_device_by_then() {
    needs_mount!();
    let volume = Mounted::new();
    fs::write(volume.path("file"), tree::pattern(1, 300_000)).unwrap();
    let image = volume.image().path();
    let moved = image.with_extension("moved");
    fs::rename(&image, &moved).unwrap();
    // A volume that was not written down.
    fs::copy(&moved, &image).unwrap();
    let said = unmount_by_helper(volume.image());
    fs::rename(&moved, &image).unwrap();
    assert_eq!(text(&said), "exit status: 0: ");
    volume.unmount();
}

#[test]
fn an_unmount_says_that_another_namespace_keeps_the_daemon() {
    needs_mount!();
    let volume = Mounted::new();
    let mut namespace = Command::new("unshare")
        .args(["--mount", "--propagation", "private", "sh", "-c", "echo ready; exec cat"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    // It has its copy of the mount then.
    namespace.stdout.as_mut().unwrap().read_exact(&mut [0; 6]).unwrap();
    let said = unmount_by_helper(volume.image());
    drop(namespace.stdin.take());
    assert!(namespace.wait().unwrap().success());
    assert_eq!(said.status.code(), Some(64), "{}", text(&said));
    assert!(text(&said).contains("the daemon still has the device: mounted in another namespace too"), "{}", text(&said));
    volume.unmount();
}

#[test]
fn an_unmount_of_one_bind_of_several_waits_for_nothing() {
    needs_mount!();
    let volume = Mounted::new();
    let bind = volume.image().path().with_file_name("bind");
    fs::create_dir(&bind).unwrap();
    assert!(Command::new("mount").arg("--bind").args([&volume.root(), &bind]).status().unwrap().success());
    let begun = Instant::now();
    let said = unmount_at(&bind);
    let took = begun.elapsed();
    assert_eq!(text(&said), "exit status: 0: ");
    assert!(took < Duration::from_secs(2), "{took:?}");
    volume.unmount();
}

#[test]
fn an_unmount_takes_no_longer_than_its_daemon() {
    needs_mount!();
    let image = Image::formatted();
    let unmounted_soon = || {
        assert_eq!(text(&image.try_mount("")), "exit status: 0: ");
        let begun = Instant::now();
        assert_eq!(text(&unmount_by_helper(&image)), "exit status: 0: ");
        begun.elapsed() < Duration::from_millis(250)
    };
    // The machine may have other things to do.
    assert!((0..10).any(|_| unmounted_soon()));
}

#[test]
fn an_unmount_of_what_is_in_use_says_that_its_daemon_is_dead() {
    needs_mount!();
    let volume = Mounted::new();
    let user = File::open(volume.root()).unwrap();
    let busy = |said: Output| (said.status.code(), text(&said));
    let (code, alive) = busy(unmount_by_helper(volume.image()));
    assert!(code == Some(32) && !alive.contains("dead"), "{alive}");
    rustix::process::kill_process(volume.daemon(), Signal::KILL).unwrap();
    rustix::process::waitpid(Some(volume.daemon()), WaitOptions::empty()).unwrap();
    let (code, dead) = busy(unmount_by_helper(volume.image()));
    assert!(code == Some(32) && dead.contains("its daemon is dead") && dead.contains("umount -l"), "{dead}");
    drop(user);
    let said = unmount_by_helper(volume.image());
    assert_eq!(text(&said), "exit status: 0: ");
    volume.abandon();
}

#[test]
fn an_unmount_of_a_block_device_that_a_killed_daemon_left_is_none_of_lost_data() {
    needs_mount!();
    let test = "an_unmount_of_a_block_device_that_a_killed_daemon_left_is_none_of_lost_data";
    let Some(image) = Image::on_block_device(test, 256 << 20) else { return };
    let volume = image.mount();
    fs::write(volume.path("file"), b"never synced").unwrap();
    rustix::process::kill_process(volume.daemon(), Signal::KILL).unwrap();
    rustix::process::waitpid(Some(volume.daemon()), WaitOptions::empty()).unwrap();
    let said = unmount_by_helper(volume.image());
    assert_eq!(text(&said), "exit status: 0: ");
    volume.abandon();
}

#[test]
fn an_unmount_of_a_block_device_whose_daemon_dies_meanwhile_tells_of_what_was_lost() {
    needs_mount!();
    let test = "an_unmount_of_a_block_device_whose_daemon_dies_meanwhile_tells_of_what_was_lost";
    let Some(image) = Image::on_block_device(test, 256 << 20) else { return };
    let volume = image.mount();
    fs::write(volume.path("file"), b"never synced").unwrap();
    rustix::process::kill_process(volume.daemon(), Signal::STOP).unwrap();
    let said = std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_secs(1));
            rustix::process::kill_process(volume.daemon(), Signal::KILL).unwrap();
            rustix::process::waitpid(Some(volume.daemon()), WaitOptions::empty()).unwrap();
        });
        unmount_by_helper(volume.image())
    });
    assert_eq!(said.status.code(), Some(32), "{}", text(&said));
    assert!(text(&said).contains("the volume could not be written down: what was not synced before is lost"), "{}", text(&said));
    volume.abandon();
}

#[test]
fn an_unmount_that_cuts_off_a_block_device_is_told_as_it_ended() {
    needs_mount!();
    let test = "an_unmount_that_cuts_off_a_block_device_is_told_as_it_ended";
    let Some(mut image) = Image::on_block_device(test, 256 << 20) else { return };
    // Who takes the mount away, the daemon or umount(2), differs from time to time.
    for _ in 0..8 {
        let volume = image.mount();
        let file = File::create(volume.path("file")).unwrap();
        let mut user = Command::new("sleep").arg("1000").stdin(file).spawn().unwrap();
        let begun = Instant::now();
        let said = text(&unmount_with(&["-f"], &volume.root()));
        let (took, stays) = (begun.elapsed(), is_mounted(&volume.root()));
        user.kill().unwrap();
        user.wait().unwrap();
        assert_eq!(said, "exit status: 0: ");
        assert!(!stays && took < Duration::from_secs(8), "{took:?}");
        image = volume.unmount();
    }
}

#[test]
fn an_unmount_that_cuts_off_says_where_it_does_no_more() {
    needs_mount!();
    let mut volume = Mounted::new();
    for is_frozen in [false, true] {
        // In a process of its own: what other tests start has the files of this one.
        let file = File::create(volume.path("file")).unwrap();
        let mut user = Command::new("sleep").arg("1000").stdin(file).spawn().unwrap();
        if is_frozen {
            rustix::process::kill_process(volume.daemon(), Signal::STOP).unwrap();
        }
        let said = text(&unmount_with(&["-f"], &volume.root()));
        let stays = is_mounted(&volume.root());
        rustix::process::kill_process(volume.daemon(), Signal::CONT).unwrap();
        user.kill().unwrap();
        user.wait().unwrap();
        assert_eq!(stays, is_frozen, "a daemon takes its mount away: {said}");
        match is_frozen {
            false => assert_eq!(said, "exit status: 0: "),
            true => assert!(said.contains("cut off, and still mounted, since files are open there; `umount -l`"), "{said}"),
        }
        let until = Instant::now() + Duration::from_secs(20);
        while is_mounted(&volume.root()) && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(5));
        }
        volume = volume.remount();
    }
    volume.unmount();
}

/// A user's mount is unmounted by fusermount3, for which there is a stand-in here.
#[test]
fn a_user_s_unmount_is_told_as_it_ended() {
    needs_mount!();
    let image = Image::formatted_with(64 << 20);
    let folder = image.path().parent().unwrap().to_owned();
    for path in [&folder, &image.path()] {
        std::os::unix::fs::chown(path, Some(4711), Some(4711)).unwrap();
    }
    let user = ["setpriv", "--reuid=4711", "--regid=4711", "--clear-groups"];
    // Without fuse3 the device may be root's alone.
    let rights = ["--inh-caps=+sys_admin,+dac_override", "--ambient-caps=+sys_admin,+dac_override"];
    let volume = image.mount_by(&[&user[..], &rights].concat());
    let helper = folder.join("umount.fuse.gpunvme");
    symlink(programs::path("mount.gpunvme"), &helper).unwrap();
    let unmount = || {
        let mut command = Command::new(user[0]);
        command.args(&user[1..]).args(["env", "--ignore-signal=CHLD"]).arg(&helper).arg(volume.root());
        // Without PATH it would be that of the system.
        text(&command.env("PATH", format!("{}:/usr/bin:/bin", folder.display())).output().unwrap())
    };
    if !Command::new("which").arg("fusermount3").output().unwrap().status.success() {
        let said = unmount();
        let why = "takes fusermount3, of the package fuse3, which could not be started: No such file or directory";
        assert!(said.starts_with("exit status: 32: ") && said.contains(why), "{said}");
    }
    let umount = folder.join("umount");
    fs::copy("/usr/bin/umount", &umount).unwrap();
    fs::set_permissions(&umount, fs::Permissions::from_mode(0o4755)).unwrap();
    fs::write(folder.join("fusermount3"), format!("#!/bin/sh\nexec {} -i \"$4\"\n", umount.display())).unwrap();
    fs::set_permissions(folder.join("fusermount3"), fs::Permissions::from_mode(0o755)).unwrap();
    assert_eq!(unmount(), "exit status: 0: ");
    volume.unmount();
}

/// A signal to the daemon finds a mount wherever it is now.
#[test]
fn a_mount_whose_directory_was_renamed_is_written_down_and_taken_away() {
    needs_mount!();
    let image = Image::formatted();
    let (dir, moved) = (image.path().with_file_name("before/mnt"), image.path().with_file_name("after/mnt"));
    fs::create_dir_all(&dir).unwrap();
    let mounted = programs::command("mount.gpunvme").arg(image.path()).arg(&dir).output().unwrap();
    assert!(mounted.status.success(), "{}", text(&mounted));
    let daemon = find_daemon(&image.path()).unwrap();
    fs::rename(dir.parent().unwrap(), moved.parent().unwrap()).unwrap();
    let file = File::options().read(true).write(true).create_new(true).open(moved.join("file")).unwrap();
    file.set_len(4 << 20).unwrap();
    let mapping = Mapping::shared(&file, 4 << 20).unwrap();
    let data = tree::pattern(6, 4 << 20);
    mapping.write(0, &data);
    rustix::process::kill_process(daemon, Signal::TERM).unwrap();
    let until = Instant::now() + Duration::from_secs(60);
    while is_mounted(&moved) || find_daemon(&image.path()).is_some() {
        assert!(Instant::now() < until, "it is there still");
        std::thread::sleep(Duration::from_millis(50));
    }
    drop((mapping, file));
    let volume = image.mount();
    assert!(fs::read(volume.path("file")).unwrap() == data);
}
