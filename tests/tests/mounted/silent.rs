//! Mounts whose servers do not answer, and what they hold up: no other mount, and no unmount.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use gpunvme_blockdev::OpenMode;
use gpunvme_tests::mounted::{Image, Mounted, is_mounted, text};
use gpunvme_tests::{needs_mount, programs};
use rustix::process::{Signal, WaitOptions};

use crate::unmounts::{last_word_of, unmount_at, unmount_by_helper, unmount_with};

/// A server of a mount that an ordinary user may have made: it agrees on the protocol, and answers
/// nothing after that, until it is dropped.
struct Silent {
    dir: tempfile::TempDir,
    _connection: File,
}

impl Silent {
    fn mount(source: &Path) -> Silent {
        Silent::mount_with(source, "user_id=4711,group_id=4711")
    }

    fn mount_with(source: &Path, options: &str) -> Silent {
        let dir = gpunvme_tests::scratch_dir();
        let mut connection = File::options().read(true).write(true).open("/dev/fuse").unwrap();
        let fd = connection.as_raw_fd();
        let options = format!("fd={fd},rootmode=40000,subtype=gpunvme,{options}");
        let options = std::ffi::CString::new(options).unwrap();
        rustix::mount::mount(source, dir.path(), "fuse", rustix::mount::MountFlags::empty(), options.as_c_str()).unwrap();
        let mut request = vec![0; 1 << 20];
        let len = connection.read(&mut request).unwrap();
        assert!(len >= 40, "INIT is the first");
        // The header of a reply to it, and `struct fuse_init_out` of version 7.31.
        let mut reply = vec![0; 16 + 64];
        reply[..4].copy_from_slice(&80_u32.to_ne_bytes());
        reply[8..16].copy_from_slice(&request[8..16]);
        reply[16..20].copy_from_slice(&7_u32.to_ne_bytes());
        reply[20..24].copy_from_slice(&31_u32.to_ne_bytes());
        reply[36..40].copy_from_slice(&4096_u32.to_ne_bytes());
        connection.write_all(&reply).unwrap();
        // A caller cannot take back a request that was read and is not answered.
        let mut reader = connection.try_clone().unwrap();
        std::thread::spawn(move || while reader.read(&mut request).is_ok_and(|len| len > 0) {});
        Silent { dir, _connection: connection }
    }
}

/// Options of a mount that root may enter.
const OPEN: &str = "user_id=4711,group_id=4711,allow_other";

impl Drop for Silent {
    fn drop(&mut self) {
        let dev = is_mounted(self.dir.path()).then(|| {
            let table = fs::read_to_string("/proc/self/mountinfo").unwrap();
            let name = self.dir.path().to_str().unwrap().to_owned();
            let line = table.lines().find(|line| line.split(' ').nth(4) == Some(&name)).unwrap().to_owned();
            line.split(' ').nth(2).unwrap().split(':').nth(1).unwrap().to_owned()
        });
        if let Some(dev) = dev {
            let _ = Command::new("mount").args(["-t", "fusectl", "none", "/sys/fs/fuse/connections"]).output();
            let _ = fs::write(format!("/sys/fs/fuse/connections/{dev}/abort"), "1");
            let _ = Command::new("umount").args(["-i", "-l"]).arg(self.dir.path()).output();
        }
    }
}

#[test]
fn a_mount_whose_server_never_answers_holds_up_neither_its_unmount_nor_a_daemon_s_end() {
    needs_mount!();
    let folder = gpunvme_tests::scratch_dir();
    let silent = Silent::mount(&folder.path().join("there is none"));
    let begun = Instant::now();
    let said = unmount_at(silent.dir.path());
    assert!(begun.elapsed() < Duration::from_secs(20), "{:?}: {}", begun.elapsed(), text(&said));
    assert!(!is_mounted(silent.dir.path()), "{}", text(&said));
    drop(silent);

    // It names a device that root mounts.
    let image = Image::formatted();
    let silent = Silent::mount(&image.path());
    let volume = image.mount();
    rustix::process::kill_process(volume.daemon(), Signal::KILL).unwrap();
    let until = Instant::now() + Duration::from_secs(20);
    while rustix::process::waitpid(Some(volume.daemon()), WaitOptions::NOHANG).unwrap().is_none() {
        assert!(Instant::now() < until, "a daemon that was killed does not end");
        std::thread::sleep(Duration::from_millis(10));
    }
    // Its connection is closed only when all of its threads are gone.
    let error = fs::metadata(volume.path("file")).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::ENOTCONN), "{error}");
    drop(silent);
    volume.abandon();
}

/// How a program ends; `None` where it has not after half a minute, and cannot be waited for.
fn ended(command: &mut Command) -> Option<Output> {
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let until = Instant::now() + Duration::from_secs(30);
    while child.try_wait().unwrap().is_none() {
        if Instant::now() > until {
            let _ = child.kill();
            return None;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    Some(child.wait_with_output().unwrap())
}

#[test]
fn a_mount_is_not_held_up_by_another_whose_source_does_not_answer() {
    needs_mount!();
    let image = Image::formatted();
    fs::create_dir(image.mount_point()).unwrap();
    // Root may enter it, and then waits.
    let outer = Silent::mount_with(Path::new("none"), OPEN);
    let inner = Silent::mount(&outer.dir.path().join("folder/image"));
    let mounted = ended(programs::command("mount.gpunvme").arg(image.path()).arg(image.mount_point()));
    let checked = ended(programs::command("fsck.gpunvme").arg("-n").arg(image.path()));
    drop((inner, outer));
    let mounted = mounted.map(|output| text(&output));
    let unmounted = unmount_by_helper(&image);
    assert_eq!(mounted.as_deref(), Some("exit status: 0: "));
    let checked = checked.map(|output| text(&output)).unwrap_or_default();
    assert!(checked.contains(&format!("already mounted on {}", image.mount_point().display())), "{checked}");
    assert_eq!(text(&unmounted), "exit status: 0: ");
}

#[test]
fn a_lazy_unmount_asks_nothing_of_a_filesystem_that_does_not_answer() {
    needs_mount!();
    let outer = Mounted::new();
    let image = outer.path("image");
    File::create(&image).unwrap().set_len(64 << 20).unwrap();
    assert!(programs::command("mkfs.gpunvme").arg(&image).status().unwrap().success());
    let folder = gpunvme_tests::scratch_dir();
    let output = programs::command("mount.gpunvme").arg(&image).arg(folder.path()).output().unwrap();
    assert_eq!(text(&output), "exit status: 0: ");
    rustix::process::kill_process(outer.daemon(), Signal::STOP).unwrap();
    let begun = Instant::now();
    let said = unmount_with(&["-l"], folder.path());
    let took = begun.elapsed();
    rustix::process::kill_process(outer.daemon(), Signal::CONT).unwrap();
    assert_eq!(text(&said), "exit status: 0: ");
    assert!(took < Duration::from_secs(10), "{took:?}");
    outer.unmount();
}

/// How the helper ends, with these options.
fn unmount_in_time(options: &[&str], mount_point: &Path) -> String {
    let begun = Instant::now();
    let said = unmount_with(options, mount_point);
    assert!(begun.elapsed() < Duration::from_secs(30), "{:?}: {}", begun.elapsed(), text(&said));
    text(&said)
}

#[test]
fn an_unmount_opens_no_device_by_the_word_of_a_user() {
    needs_mount!();
    let image = Image::formatted();
    fs::set_permissions(image.path(), fs::Permissions::from_mode(0o600)).unwrap();
    let silent = Silent::mount(&image.path());
    let said = unmount_in_time(&[], silent.dir.path());
    assert!(said.starts_with("exit status: 64: ") && said.contains("permission denied"), "{said}");
    // Opening a controller takes it away from whoever has it.
    let silent = Silent::mount(Path::new("vfio:0000:00:01.0"));
    let said = unmount_in_time(&[], silent.dir.path());
    assert!(said.starts_with("exit status: 64: "), "{said}");
    assert!(said.contains("vfio:0000:00:01.0 is opened for its own user alone"), "{said}");
}

#[test]
fn an_unmount_asks_a_daemon_nothing_that_its_device_tells() {
    needs_mount!();
    let volume = Mounted::new();
    fs::remove_file(last_word_of(&volume)).unwrap();
    rustix::process::kill_process(volume.daemon(), Signal::STOP).unwrap();
    let said = unmount_in_time(&[], &volume.root());
    let is_gone = !is_mounted(&volume.root());
    rustix::process::kill_process(volume.daemon(), Signal::CONT).unwrap();
    assert!(is_gone && said.starts_with("exit status: 64: ") && said.contains("the daemon still has the device"), "{said}");
    volume.unmount();
}

#[test]
fn an_unmount_says_that_a_daemon_does_not_answer() {
    needs_mount!();
    let outer = Silent::mount_with(Path::new("none"), OPEN);
    let inner = Silent::mount_with(&outer.dir.path().join("image"), "user_id=0,group_id=0");
    let said = unmount_in_time(&[], inner.dir.path());
    assert!(said.starts_with("exit status: 32: ") && said.contains("its daemon does not answer; `umount -f`"), "{said}");
    unmount_in_time(&["-l"], inner.dir.path());
    assert!(!is_mounted(inner.dir.path()));

    let test = "an_unmount_says_that_a_daemon_does_not_answer";
    let Some(image) = Image::on_block_device(test, 256 << 20) else { return };
    let mut image = image;
    for (options, code) in [("-n", 32), ("-l", 0), ("-f", 64)] {
        let volume = image.mount();
        rustix::process::kill_process(volume.daemon(), Signal::STOP).unwrap();
        let said = unmount_in_time(&[options], &volume.root());
        let stays = is_mounted(&volume.root());
        rustix::process::kill_process(volume.daemon(), Signal::CONT).unwrap();
        assert!(said.starts_with(&format!("exit status: {code}: ")), "{options}: {said}");
        assert_eq!(stays, code == 32, "{options}: {said}");
        assert_eq!(said.contains("its daemon does not answer; `umount -f`"), code == 32, "{said}");
        image = volume.unmount();
    }
}

/// Has a device in use for a while, as a daemon that is slow to end.
fn held_for(device: &Path, time: Duration) -> std::thread::JoinHandle<()> {
    let held = gpunvme_blockdev::open(device.to_str().unwrap(), OpenMode::ReadWrite).unwrap();
    std::thread::spawn(move || {
        std::thread::sleep(time);
        drop(held);
    })
}

#[test]
fn a_mount_that_another_user_names_after_a_device_is_neither_believed_nor_taken_away() {
    needs_mount!();
    let image = Image::formatted();
    let dir = gpunvme_tests::scratch_dir();
    let connection = File::options().read(true).write(true).open("/dev/fuse").unwrap();
    let options = format!("fd={},rootmode=40000,subtype=gpunvme,user_id=4711,group_id=4711", connection.as_raw_fd());
    let options = std::ffi::CString::new(options).unwrap();
    rustix::mount::mount(image.path(), dir.path(), "fuse", rustix::mount::MountFlags::empty(), options.as_c_str()).unwrap();
    drop(connection);
    let holder = held_for(&image.path(), Duration::from_secs(4));
    let said = text(&image.try_mount("rw"));
    let stays = is_mounted(dir.path());
    rustix::mount::unmount(dir.path(), rustix::mount::UnmountFlags::DETACH).unwrap();
    holder.join().unwrap();
    unmount_by_helper(&image);
    assert!(said.starts_with("exit status: 0"), "{said}");
    assert!(stays, "it was another user's");
}

#[test]
fn a_caller_that_was_killed_gets_no_mount() {
    needs_mount!();
    let image = Image::formatted();
    fs::create_dir(image.mount_point()).unwrap();
    let holder = held_for(&image.path(), Duration::from_secs(2));
    let mut caller = programs::command("mount.gpunvme").arg(image.path()).arg(image.mount_point()).spawn().unwrap();
    std::thread::sleep(Duration::from_millis(500));
    caller.kill().unwrap();
    caller.wait().unwrap();
    holder.join().unwrap();
    let until = Instant::now() + Duration::from_secs(3);
    while Instant::now() < until {
        assert!(!is_mounted(&image.mount_point()), "it is mounted");
        std::thread::sleep(Duration::from_micros(200));
    }
    image.check();
}
