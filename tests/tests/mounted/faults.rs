//! A device that fails under a mounted volume: the operation that met the failure gets an error,
//! nothing else is lost, and the daemon lives on.

use std::fs::{self, File, OpenOptions};
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use gpunvme::{Mount, Operation, Ring};
use gpunvme_tests::direct::{Buffer, extents, info};
use gpunvme_tests::loop_device::LoopDevice;
use gpunvme_tests::mounted::{Image, Mounted, is_mounted, text};
use gpunvme_tests::rings::{bytes_of, shared, wait_for};
use gpunvme_tests::{needs_mount, programs, tree};
use rustix::process::{Signal, WaitOptions};

#[test]
fn a_device_that_cannot_read_gives_eio_and_recovers() {
    needs_mount!();
    let volume = Mounted::new();
    let data = tree::pattern(41, 8 << 20);
    fs::write(volume.path("file"), &data).unwrap();
    let volume = volume.remount();
    // Mounted again, so that nothing of the file is cached. Then the device ends before it.
    let file = File::open(volume.path("file")).unwrap();
    let lost = extents(&file).iter().map(|extent| extent.device_offset).min().unwrap();
    let image = volume.image().path();
    let whole = image.with_file_name("whole");
    let status = Command::new("cp").args(["--sparse=always"]).args([&image, &whole]).status().unwrap();
    assert!(status.success());
    let len = fs::metadata(&image).unwrap().len();
    let device = OpenOptions::new().write(true).open(&image).unwrap();
    device.set_len(lost).unwrap();

    let mount = Mount::open(volume.root()).unwrap();
    let (memory, mut ring) = (shared(&mount, 4096), Ring::new(&mount, 8).unwrap());
    let attached = ring.attach(&gpunvme::File::open(volume.path("file")).unwrap()).unwrap();
    let mut read_by_ring = || {
        ring.push(&Operation::read(&attached, 1 << 20, &memory, 0, 4096)).unwrap();
        wait_for(&mut ring, 1).remove(0).result
    };
    // The ring does not yet know where the file lies, and then does.
    for _ in 0..40 {
        let error = read_by_ring().unwrap_err();
        assert_eq!(error.errno().raw_os_error(), libc::EIO, "a read that the device fails is told as any other");
    }
    let buffer = Buffer::new(&file, 8 << 20);
    let error = fs::read(volume.path("file")).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::EIO));
    match buffer.read(&file, 0, 8 << 20) {
        Ok(done) => assert_eq!((done.bytes < 8 << 20, done.status), (true, libc::EIO)),
        Err(error) => assert_eq!(error.raw_os_error(), Some(libc::EIO)),
    }
    info(&file);

    // The device is whole again: so is the file.
    device.set_len(len).unwrap();
    let status = Command::new("cp").args(["--no-target-directory"]).args([&whole, &image]).status().unwrap();
    assert!(status.success());
    assert!(fs::read(volume.path("file")).unwrap() == data);
    assert_eq!(buffer.read(&file, 0, 8 << 20).unwrap().bytes, 8 << 20);
    assert!(buffer.get(0, 8 << 20) == data);
    assert_eq!(read_by_ring().unwrap().bytes(), 4096);
    assert!(bytes_of(&memory, 0, 4096) == data[1 << 20..(1 << 20) + 4096]);
}

/// A small tmpfs. A sparse image on it is a device that says that it is larger than what can be
/// written to it.
struct Small(tempfile::TempDir);

impl Small {
    fn new(options: &str) -> Small {
        let small = Small(gpunvme_tests::scratch_dir());
        small.mount(options);
        small
    }

    fn mount(&self, options: &str) {
        let mut mount = Command::new("mount");
        assert!(mount.args(["-t", "tmpfs", "-o", options, "tmpfs"]).arg(self.0.path()).status().unwrap().success());
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(self.0.path()).status();
    }
}

/// umount(8)'s helper, as it is called where it is installed.
fn unmount_by_helper(image: &Image) -> Output {
    unmount_at(&image.mount_point())
}

fn unmount_at(mount_point: &Path) -> Output {
    unmount_with(&[], mount_point)
}

fn unmount_with(options: &[&str], mount_point: &Path) -> Output {
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
fn last_word_of(volume: &Mounted) -> PathBuf {
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

/// A server of a mount that an ordinary user may have made: it agrees on the protocol, and answers
/// nothing after that, until it is dropped.
struct Silent {
    dir: tempfile::TempDir,
    _connection: File,
}

impl Silent {
    fn mount(source: &Path) -> Silent {
        Silent::mount_with(source, "")
    }

    fn mount_with(source: &Path, options: &str) -> Silent {
        let dir = gpunvme_tests::scratch_dir();
        let mut connection = File::options().read(true).write(true).open("/dev/fuse").unwrap();
        let fd = connection.as_raw_fd();
        let options = format!("fd={fd},rootmode=40000,user_id=4711,group_id=4711,subtype=gpunvme{options}");
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
    let outer = Silent::mount_with(Path::new("none"), ",allow_other");
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
fn a_device_that_cannot_write_costs_nothing_that_was_synced() {
    needs_mount!();
    let outer = Small::new("size=128m");
    let image = Image::blank_in(outer.0.path(), 1 << 30);
    assert!(image.mkfs(&[]).status.success());
    let volume = image.mount();
    let kept = tree::pattern(42, 10 << 20);
    fs::write(volume.path("kept"), &kept).unwrap();
    File::open(volume.path("kept")).unwrap().sync_all().unwrap();
    File::open(volume.root()).unwrap().sync_all().unwrap();

    let mut file = File::create(volume.path("too much")).unwrap();
    let chunk = tree::pattern(43, 1 << 20);
    let result = (0..300).try_for_each(|_| file.write_all(&chunk)).and_then(|()| file.sync_all());
    let error = result.expect_err("300 MiB do not fit 128");
    assert!([libc::EIO, libc::ENOSPC].contains(&error.raw_os_error().unwrap()), "{error}");
    assert!(fs::read(volume.path("kept")).unwrap() == kept);
    assert!(is_mounted(&volume.root()));
    drop(file);

    let (_, image) = volume.signal(Signal::TERM);
    outer.mount("remount,size=2g");
    let volume = image.mount();
    assert!(fs::read(volume.path("kept")).unwrap() == kept);
    fs::write(volume.path("new"), &kept).unwrap();
    assert!(fs::read(volume.path("new")).unwrap() == kept);
    drop(volume.unmount());
}
