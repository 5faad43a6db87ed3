//! Mounts of a block device (`fuseblk`): the mount claims the device, sync(2) and syncfs(2) reach
//! the daemon, and umount(2) returns when the volume is clean. The device is a loop device.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use gpunvme_tests::mounted::{Image, Mounted, is_mounted, text};
use gpunvme_tests::sys::Mapping;
use gpunvme_tests::{needs_mount, programs, scratch_dir, tree};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::mount::UnmountFlags;
use rustix::process::{Signal, kill_process};

use super::transport::Parameter;

const LEN: u64 = 128 << 20;
/// What must not hang ends within this.
const LIMIT: Duration = Duration::from_secs(30);
/// Nothing becomes durable by itself within a test.
const LATE: &str = "commit=300";

/// The image, or a return from the calling test.
macro_rules! on_block_device {
    ($test:literal) => {{
        needs_mount!();
        match Image::on_block_device($test, LEN) {
            Some(image) => image,
            None => return,
        }
    }};
}

/// The type, source and options of the mount on `dir`.
fn listed(dir: &Path) -> String {
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap();
    mounts.lines().find(|line| line.split(' ').nth(1) == dir.to_str()).unwrap_or_default().to_owned()
}

/// Claims a device, as programs do that format it.
fn claim(device: &Path) -> io::Result<File> {
    File::options().read(true).write(true).custom_flags(libc::O_EXCL).open(device)
}

/// umount(2) by itself: umount(8) has a helper, which could wait. A child that another test has
/// just forked holds the open files of this program until it runs its own.
fn unmount(dir: &Path) -> rustix::io::Result<()> {
    let until = Instant::now() + LIMIT;
    loop {
        match rustix::mount::unmount(dir, UnmountFlags::empty()) {
            Err(Errno::BUSY) if Instant::now() < until => thread::sleep(Duration::from_millis(1)),
            done => return done,
        }
    }
}

fn run(program: &str, arguments: &[&str], device: &Path) -> Output {
    programs::command(program).args(arguments).arg(device).output().unwrap()
}

/// What the device would hold if the power failed now: a copy of the image below it, if nothing
/// was written while it was copied.
fn after_power_cut(volume: &Mounted, into: &Path) -> Vec<(PathBuf, Vec<u8>)> {
    let copy = into.join("copy");
    let copied = Command::new("cp").arg("--sparse=always").arg(volume.image().path()).arg(&copy).status().unwrap();
    assert!(copied.success());
    let dir = into.join("mnt");
    fs::create_dir_all(&dir).unwrap();
    let mounted = programs::command("mount.gpunvme").arg(&copy).arg(&dir).stdin(Stdio::null()).output().unwrap();
    assert!(mounted.status.success(), "{}", text(&mounted));
    let mut files: Vec<_> = fs::read_dir(&dir).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    let files = files.into_iter().map(|path| (path.file_name().unwrap().into(), fs::read(&path).unwrap())).collect();
    assert!(Command::new("umount").arg(&dir).status().unwrap().success());
    files
}

/// As [`after_power_cut`], of files with these names. Another program may call sync(2) while the
/// image is copied, and the copy is of no one moment then: it is made again.
fn survives_power_cut(volume: &Mounted, into: &Path, names: &[&str]) -> Vec<Vec<u8>> {
    let has_names = |found: &[(PathBuf, Vec<u8>)]| found.iter().map(|(name, _)| name.to_str().unwrap()).eq(names.iter().copied());
    let found = (0..10).map(|_| after_power_cut(volume, into)).find(|found| has_names(found));
    let Some(found) = found else { panic!("a power cut leaves other files than {names:?}") };
    found.into_iter().map(|(_, bytes)| bytes).collect()
}

#[test]
fn a_mounted_block_device_is_claimed() {
    let volume = on_block_device!("a_mounted_block_device_is_claimed").mount();
    let device = volume.image().device();
    let line = listed(&volume.root());
    let source = device.to_str().unwrap();
    assert!(
        line.starts_with(&format!("{source} ")) && line.contains(" fuseblk.gpunvme ") && line.contains("blksize=4096"),
        "{line}"
    );
    assert_eq!(claim(&device).unwrap_err().raw_os_error(), Some(libc::EBUSY));
    let elsewhere = volume.image().path().with_file_name("elsewhere");
    fs::create_dir(&elsewhere).unwrap();
    let mount = programs::command("mount.gpunvme").arg(&device).arg(&elsewhere).output().unwrap();
    let others = [
        mount,
        run("mkfs.gpunvme", &["--force"], &device),
        run("fsck.gpunvme", &["-n"], &device),
        run("gpunvme", &["tune", "-L", "other"], &device),
    ];
    for refused in others {
        assert!(!refused.status.success() && text(&refused).contains("already mounted on"), "{}", text(&refused));
    }
    assert!(!is_mounted(&elsewhere));
    fs::write(volume.path("file"), "goes on").unwrap();
}

#[test]
fn images_and_volumes_of_several_devices_stay_fuse() {
    needs_mount!();
    let image = Image::formatted_with(LEN).mount();
    assert!(listed(&image.root()).contains(" fuse.gpunvme "));
    let files = Image::blank_members_in(&gpunvme_tests::scratch_root(), 2, LEN);
    let test = "images_and_volumes_of_several_devices_stay_fuse";
    let over = |file: &PathBuf| gpunvme_tests::loop_device::LoopDevice::over(test, file);
    let Some(devices) = files.members().iter().map(over).collect::<Option<Vec<_>>>() else { return };
    let made = programs::command("mkfs.gpunvme").args(devices.iter().map(|device| device.path())).output().unwrap();
    assert!(made.status.success(), "{}", text(&made));
    let dir = files.mount_point();
    fs::create_dir(&dir).unwrap();
    let mut mount = programs::command("mount.gpunvme");
    mount.arg(devices[0].path()).args(["-o", &format!("device={}", devices[1].path().display())]);
    let mounted = mount.arg(&dir).stdin(Stdio::null()).output().unwrap();
    assert!(mounted.status.success(), "{}", text(&mounted));
    assert!(listed(&dir).contains(" fuse.gpunvme "));
    assert_eq!(claim(devices[1].path()).unwrap_err().raw_os_error(), Some(libc::EBUSY));
    assert!(Command::new("umount").arg(&dir).status().unwrap().success());
    let gone = Instant::now() + LIMIT;
    while claim(devices[0].path()).is_err() && Instant::now() < gone {
        thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn what_was_written_before_sync_and_syncfs_survives_a_power_cut() {
    let image = on_block_device!("what_was_written_before_sync_and_syncfs_survives_a_power_cut");
    let volume = image.mount_with(LATE);
    let scratch = scratch_dir();
    let (large, small) = (tree::pattern(1, 5 << 20), tree::pattern(2, 700));
    fs::write(volume.path("large"), &large).unwrap();
    fs::write(volume.path("small"), &small).unwrap();
    // Dirty in the kernel alone, until it writes the page back.
    let mapped = File::options().read(true).write(true).create_new(true).open(volume.path("mapped")).unwrap();
    mapped.set_len(1 << 16).unwrap();
    let memory = Mapping::shared(&mapped, 1 << 16).unwrap();
    memory.write(4096, &small);
    // This test would not fail if all came to the device by itself. Another program may call
    // sync(2) at any moment, which is for all filesystems.
    let is_lost = (0..20).any(|attempt| {
        let name = format!("lost-{attempt}");
        fs::write(volume.path(&name), &small).unwrap();
        let survives = after_power_cut(&volume, scratch.path()).iter().any(|(found, _)| *found == Path::new(&name));
        fs::remove_file(volume.path(&name)).unwrap();
        !survives
    });
    assert!(is_lost, "what was not synced survives, too");

    rustix::fs::sync();
    let mut page = vec![0; 1 << 16];
    page[4096..][..700].copy_from_slice(&small);
    let found = survives_power_cut(&volume, scratch.path(), &["large", "mapped", "small"]);
    assert!(found == [large, page, small.clone()]);

    fs::write(volume.path("later"), &small).unwrap();
    fs::rename(volume.path("small"), volume.path("renamed")).unwrap();
    let root = rustix::fs::open(volume.root(), OFlags::RDONLY | OFlags::DIRECTORY, Mode::empty()).unwrap();
    rustix::fs::syncfs(&root).unwrap();
    let found = survives_power_cut(&volume, scratch.path(), &["large", "later", "mapped", "renamed"]);
    assert!(found[1] == small && found[3] == small);
}

/// Unmounts again and again with dirty data; what umount(2) leaves is clean, and free, at once.
fn umount_returns_when_it_is_clean(image: Image, options: &str) {
    let (device, dir) = (image.device(), image.mount_point());
    for round in 0..4 {
        let mounted = image.try_mount(options);
        assert!(mounted.status.success(), "round {round}: {}", text(&mounted));
        fs::write(dir.join(format!("file {round}")), tree::pattern(round, 3 << 20)).unwrap();
        unmount(&dir).unwrap();
        drop(claim(&device).expect("free at once"));
        let left = fs::read(image.path()).unwrap();
        let checked = run("fsck.gpunvme", &["-n"], &device);
        assert!(checked.status.success() && text(&checked).contains("clean"), "round {round}: {}", text(&checked));
        assert!(fs::read(image.path()).unwrap() == left, "nothing was written after umount(2)");
    }
}

#[test]
fn umount_of_a_block_device_returns_when_it_is_clean() {
    let image = on_block_device!("umount_of_a_block_device_returns_when_it_is_clean");
    umount_returns_when_it_is_clean(image, LATE);
}

#[test]
fn umount_of_a_block_device_returns_when_it_is_clean_by_io_uring() {
    let test = "umount_of_a_block_device_returns_when_it_is_clean_by_io_uring";
    let image = on_block_device!("umount_of_a_block_device_returns_when_it_is_clean_by_io_uring");
    let Some(_offered) = Parameter::set(test, "Y") else { return };
    umount_returns_when_it_is_clean(image, "commit=300,transport=io_uring");
}

#[test]
fn umount_goes_on_when_the_daemon_dies_under_it() {
    let volume = on_block_device!("umount_goes_on_when_the_daemon_dies_under_it").mount();
    fs::write(volume.path("file"), tree::pattern(1, 1 << 20)).unwrap();
    File::open(volume.root()).unwrap().sync_all().unwrap();
    let (dir, device, daemon) = (volume.root(), volume.image().device(), volume.daemon());
    kill_process(daemon, Signal::STOP).unwrap();
    let umount = thread::spawn({
        let dir = dir.clone();
        move || unmount(&dir)
    });
    thread::sleep(Duration::from_millis(300));
    assert!(!umount.is_finished(), "it waits for the daemon");
    assert_eq!(claim(&device).unwrap_err().raw_os_error(), Some(libc::EBUSY));
    let (_, image) = volume.signal(Signal::KILL);
    umount.join().unwrap().unwrap();
    assert!(!is_mounted(&dir));
    let volume = image.mount();
    assert!(volume.path("file").exists());
}

#[test]
fn a_block_device_that_a_killed_daemon_left_mounted_can_be_mounted_again() {
    let volume = on_block_device!("a_block_device_that_a_killed_daemon_left_mounted_can_be_mounted_again").mount();
    fs::write(volume.path("file"), "synced").unwrap();
    File::open(volume.path("file")).unwrap().sync_all().unwrap();
    let used = File::open(volume.path("file")).unwrap();
    let (dir, device) = (volume.root(), volume.image().device());
    kill_process(volume.daemon(), Signal::KILL).unwrap();
    let dead = |output: &Output| text(output).contains("by a daemon that was killed");
    let checked = run("fsck.gpunvme", &["-n"], &device);
    assert!(!checked.status.success() && dead(&checked) && text(&checked).contains("umount"), "{}", text(&checked));
    // Not while a process has files of the old one: the kernel holds the device for them.
    let refused = volume.image().try_mount("");
    assert!(!refused.status.success() && text(&refused).contains("open files of a mount"), "{}", text(&refused));
    drop(used);
    let (_, image) = volume.signal(Signal::KILL);
    let volume = image.mount();
    assert_eq!(fs::read_to_string(volume.path("file")).unwrap(), "synced");
    // And of one that nothing holds, mount(8) takes the dead mount away by itself.
    kill_process(volume.daemon(), Signal::KILL).unwrap();
    let again = volume.image().try_mount("");
    assert!(again.status.success(), "{}", text(&again));
    let lines = fs::read_to_string("/proc/self/mounts").unwrap();
    assert_eq!(lines.lines().filter(|line| line.split(' ').nth(1) == dir.to_str()).count(), 1);
    unmount(&dir).unwrap();
    volume.abandon();
}

#[test]
fn of_two_mounts_of_a_block_device_at_once_one_comes_about() {
    let image = on_block_device!("of_two_mounts_of_a_block_device_at_once_one_comes_about");
    let dirs = [1, 2].map(|number| image.path().with_file_name(format!("at-{number}")));
    dirs.iter().for_each(|dir| fs::create_dir(dir).unwrap());
    let both = dirs.each_ref().map(|dir| {
        let mut mount = programs::command("mount.gpunvme");
        mount.arg(image.device()).arg(dir).stdin(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap()
    });
    let ends = both.map(|one| one.wait_with_output().unwrap());
    let won: Vec<_> = dirs.iter().filter(|dir| is_mounted(dir)).collect();
    assert_eq!(won.len(), 1, "{:?}", ends.each_ref().map(text));
    assert_eq!(ends.iter().filter(|end| end.status.success()).count(), 1);
    fs::write(won[0].join("file"), "served").unwrap();
    unmount(won[0]).unwrap();
    image.check();
}

#[test]
fn a_block_device_is_in_use_until_the_last_of_its_mounts_and_files() {
    let volume = on_block_device!("a_block_device_is_in_use_until_the_last_of_its_mounts_and_files").mount();
    let (dir, device) = (volume.root(), volume.image().device());
    let bound = volume.image().path().with_file_name("bound");
    fs::create_dir(&bound).unwrap();
    rustix::mount::mount_bind(&dir, &bound).unwrap();
    unmount(&dir).unwrap();
    fs::write(bound.join("file"), "by the other").unwrap();
    assert!(claim(&device).is_err());
    let open = File::open(bound.join("file")).unwrap();
    assert_eq!(rustix::mount::unmount(&bound, UnmountFlags::empty()), Err(Errno::BUSY));
    rustix::mount::unmount(&bound, UnmountFlags::DETACH).unwrap();
    assert!(claim(&device).is_err(), "a file is open");
    drop(open);
    // close(2) of the last file ends it, and is done before the daemon is.
    let until = Instant::now() + LIMIT;
    while claim(&device).is_err() && Instant::now() < until {
        thread::sleep(Duration::from_millis(10));
    }
    drop(claim(&device).expect("nothing has it any more"));
    assert_eq!(fs::read_to_string(volume.unmount().mount().path("file")).unwrap(), "by the other");
}

#[test]
fn a_mounted_block_device_becomes_read_only_and_writable_again() {
    let volume = on_block_device!("a_mounted_block_device_becomes_read_only_and_writable_again").mount();
    // As mount(8) calls it: the options are those of the mount table.
    let line = listed(&volume.root());
    let options = line.split(' ').nth(3).unwrap();
    let remount = |flag: &str| {
        let options = format!("{options},remount,{flag}");
        let mut mount = programs::command("mount.gpunvme");
        mount.arg(volume.image().device()).arg(volume.root()).args(["-t", "fuseblk.gpunvme", "-o", &options]);
        let output = mount.output().unwrap();
        assert!(output.status.success(), "{}", text(&output));
    };
    fs::write(volume.path("file"), "one").unwrap();
    remount("ro");
    assert_eq!(fs::write(volume.path("file"), "two").unwrap_err().raw_os_error(), Some(libc::EROFS));
    remount("rw");
    fs::write(volume.path("file"), "three").unwrap();
}

#[test]
fn a_block_device_whose_mount_is_cut_off_loses_nothing() {
    let volume = on_block_device!("a_block_device_whose_mount_is_cut_off_loses_nothing").mount_with(LATE);
    let content = tree::pattern(1, 3 << 20);
    fs::write(volume.path("file"), &content).unwrap();
    let held = File::open(volume.path("file")).unwrap();
    let device = volume.image().device();
    // umount -f: the connection ends, and the mount, which is in use, stays.
    let _ = rustix::mount::unmount(volume.root(), UnmountFlags::FORCE);
    let (status, image) = volume.signal(Signal::TERM);
    assert_eq!(status.exit_status(), Some(0));
    assert!(claim(&device).is_err(), "the kernel holds the device for the file");
    drop(held);
    let volume = image.mount();
    assert!(fs::read(volume.path("file")).unwrap() == content);
}

/// Mounts and checks what `name` means, and returns the device that it was.
fn device_of(name: &str, dir: &Path) -> Result<String, String> {
    let mounted = programs::command("mount.gpunvme").arg(name).arg(dir).stdin(Stdio::null()).output().unwrap();
    if !mounted.status.success() {
        assert_eq!(mounted.status.code(), Some(32), "{}", text(&mounted));
        return Err(text(&mounted));
    }
    let line = listed(dir);
    assert!(Command::new("umount").arg(dir).status().unwrap().success());
    let checked = programs::command("fsck.gpunvme").arg("-n").arg(name).output().unwrap();
    assert!(checked.status.success(), "{}", text(&checked));
    Ok(line.split(' ').next().unwrap().to_owned())
}

#[test]
fn a_label_or_uuid_names_a_volume_on_block_devices() {
    let test = "a_label_or_uuid_names_a_volume_on_block_devices";
    let (one, other) = (on_block_device!("a_label_or_uuid_names_a_volume_on_block_devices"), Image::on_block_device(test, LEN));
    let Some(other) = other else { return };
    let scratch = scratch_dir();
    let dir = scratch.path().join("mnt");
    fs::create_dir(&dir).unwrap();
    // No other volume of the machine has it.
    let label = format!("a label={}", std::process::id());
    let tune = |image: &Image, arguments: &[&str]| {
        let tuned = run("gpunvme", &[&["tune"], arguments].concat(), &image.device());
        assert!(tuned.status.success(), "{}", text(&tuned));
    };
    let by_label = format!("LABEL={label}");
    let why = device_of(&by_label, &dir).unwrap_err();
    assert!(why.contains(&by_label) && why.contains("no block device"), "{why}");
    tune(&one, &["-L", &label]);
    let device = one.device().to_str().unwrap().to_owned();
    assert_eq!(device_of(&by_label, &dir), Ok(device.clone()));
    // Its label is there while it is mounted, and says which device is in use.
    let volume = one.mount();
    let why = device_of(&by_label, &dir).unwrap_err();
    assert!(why.contains(&device), "{why}");
    let one = volume.unmount();
    tune(&other, &["-L", &label]);
    let why = device_of(&by_label, &dir).unwrap_err();
    assert!([&one, &other].iter().all(|image| why.contains(image.device().to_str().unwrap())), "{why}");
    let uuid = "0e7aa39c-91d5-4c38-a4f1-6b5f8a6f0c5d";
    tune(&other, &["-U", uuid]);
    let device = other.device().to_str().unwrap().to_owned();
    assert_eq!(device_of(&format!("UUID={}", uuid.to_uppercase()), &dir), Ok(device));
    assert!(device_of("UUID=data", &dir).unwrap_err().contains("UUID=data"));
    // A volume on several devices has one label.
    let others: Vec<Image> = [LEN, LEN].into_iter().filter_map(|len| Image::on_block_device(test, len)).collect();
    let devices: Vec<PathBuf> = others.iter().map(Image::device).collect();
    let striped = format!("{label} striped");
    let made = programs::command("mkfs.gpunvme").args(["-f", "-L", &striped]).args(&devices).output().unwrap();
    assert!(made.status.success(), "{}", text(&made));
    let source = device_of(&format!("LABEL={striped}"), &dir).unwrap();
    assert!(devices.iter().any(|device| source.starts_with(device.to_str().unwrap())), "{source}");
}
