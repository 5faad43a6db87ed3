//! Tests mount.gpunvme as mount(8) and its users run it: what it leaves behind in the system, and
//! how it ends. The end-to-end tests in `tests/` cover what a mounted volume does.

mod sockets;

use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use gpunvme_blockdev::{OpenMode, open};
use gpunvme_engine::FormatOptions;
use gpunvme_engine::Timestamp;
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

/// A formatted image and a directory to mount it on. Dropping it takes down whatever a test left.
struct Volume {
    dir: TempDir,
}

impl Volume {
    /// `None`, said aloud, where nothing can be mounted.
    fn new() -> Option<Self> {
        if !rustix::process::geteuid().is_root() || !Path::new("/dev/fuse").exists() {
            let test = std::thread::current().name().unwrap_or_default().to_owned();
            // Printing macros are captured for tests that pass; a direct write is not.
            let _ = writeln!(std::io::stderr(), "SKIPPED {test}: needs root and /dev/fuse");
            return None;
        }
        // Not in /tmp, which may be in memory and refuse direct I/O.
        let volume = Self { dir: tempfile::Builder::new().prefix("gpunvme-mount.").tempdir_in("/var/tmp").unwrap() };
        File::create(volume.image()).unwrap().set_len(64 << 20).unwrap();
        fs::create_dir(volume.mnt()).unwrap();
        let device = open(volume.image().to_str().unwrap(), OpenMode::ReadWrite).unwrap();
        let now = Timestamp { seconds: 1, nanoseconds: 0 };
        let options = FormatOptions { label: "test".into(), uuid: [7; 16], hash_key: [8; 16], now, owner: (0, 0) };
        gpunvme_engine::format(&device, &options).unwrap();
        Some(volume)
    }

    fn image(&self) -> PathBuf {
        self.dir.path().join("image")
    }

    fn mnt(&self) -> PathBuf {
        self.dir.path().join("mnt")
    }

    fn mount(&self, args: &[&str]) -> Output {
        mount(&self.image(), &self.mnt(), args)
    }

    fn mounted(self, args: &[&str]) -> Self {
        let output = self.mount(args);
        assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
        assert!(self.is_mounted(), "mount.gpunvme returned before the mount was live");
        self
    }

    /// The mount's line in the mount table.
    fn line(&self) -> Option<String> {
        let table = fs::read_to_string("/proc/self/mountinfo").unwrap();
        let field = format!(" {} ", self.mnt().display());
        table.lines().find(|line| line.contains(&field)).map(str::to_owned)
    }

    fn is_mounted(&self) -> bool {
        self.line().is_some()
    }

    fn daemon(&self) -> Option<Pid> {
        fs::read_dir("/proc").unwrap().flatten().find_map(|entry| {
            let command = fs::read(entry.path().join("cmdline")).ok()?;
            let mut words = command.split(|byte| *byte == 0);
            let ours = words.next()?.ends_with(b"mount-gpunvme")
                && words.any(|word| word == self.image().as_os_str().as_encoded_bytes());
            if ours { Pid::from_raw(entry.file_name().to_str()?.parse().ok()?) } else { None }
        })
    }

    fn signal(&self, signal: Signal) {
        kill_process(self.daemon().expect("a daemon"), signal).unwrap();
    }

    /// Waits until no daemon has the image.
    fn wait_for_daemon(&self) {
        let start = Instant::now();
        while self.daemon().is_some() {
            assert!(start.elapsed() < Duration::from_secs(30), "the daemon does not end");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn umount(&self) {
        assert!(Command::new("umount").arg(self.mnt()).status().unwrap().success());
    }
}

impl Drop for Volume {
    fn drop(&mut self) {
        if let Some(daemon) = self.daemon() {
            let _ = kill_process(daemon, Signal::KILL);
        }
        while self.is_mounted() {
            let _ = Command::new("umount").arg("-l").arg(self.mnt()).status();
        }
    }
}

fn command(device: &Path, dir: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_mount-gpunvme"));
    command.arg(device).arg(dir).args(args).stdin(Stdio::null());
    command
}

/// Reads stdout and stderr to their ends: a daemon that kept them open would show as a hang.
fn mount(device: &Path, dir: &Path, args: &[&str]) -> Output {
    command(device, dir, args).output().unwrap()
}

/// The exit code of a refusal, and its message without the names of the program and the device.
fn refusal(output: &Output, device: &Path) -> (i32, String) {
    let text = String::from_utf8(output.stderr.clone()).unwrap();
    let prefix = format!("mount.gpunvme: {}: ", device.display());
    let reason = text.strip_prefix(&prefix).unwrap_or_else(|| panic!("{text}"));
    assert!(output.stdout.is_empty());
    (output.status.code().unwrap(), reason.trim_end().to_owned())
}

fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < Duration::from_secs(30), "{what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn the_kernel_lists_the_device_the_type_and_the_flags() {
    let Some(volume) = Volume::new() else { return };
    let volume = volume.mounted(&["-o", "nodev,noexec"]);
    let line = volume.line().unwrap();
    assert!(line.contains(&format!(" - fuse.gpunvme {} ", volume.image().display())), "{line}");
    assert!(line.contains("nodev") && line.contains("noexec") && !line.contains("nosuid"), "{line}");
    assert!(line.contains("allow_other") && line.contains("default_permissions"), "{line}");
    volume.umount();
}

#[test]
fn read_ahead_is_raised() {
    let Some(volume) = Volume::new() else { return };
    let volume = volume.mounted(&[]);
    let line = volume.line().unwrap();
    let number = line.split(' ').nth(2).unwrap();
    let setting = fs::read_to_string(format!("/sys/class/bdi/{number}/read_ahead_kb")).unwrap();
    assert_eq!(setting.trim(), "4096");
    volume.umount();
}

#[test]
fn what_was_written_is_there_after_umount_and_mount() {
    let Some(volume) = Volume::new() else { return };
    let volume = volume.mounted(&[]);
    fs::write(volume.mnt().join("file"), "first").unwrap();
    volume.umount();
    // At once: the daemon may still be writing, and mount.gpunvme waits for it.
    let volume = volume.mounted(&[]);
    assert_eq!(fs::read_to_string(volume.mnt().join("file")).unwrap(), "first");
    volume.umount();
}

#[test]
fn sigterm_ends_a_mount_in_use_and_keeps_what_was_written() {
    let Some(volume) = Volume::new() else { return };
    let volume = volume.mounted(&[]);
    let mut file = File::create(volume.mnt().join("file")).unwrap();
    file.write_all(b"kept").unwrap();
    volume.signal(Signal::TERM);
    eventually("the mount is detached", || !volume.is_mounted());
    volume.wait_for_daemon();
    assert!(file.write_all(b"too late").is_err());
    drop(file);
    let volume = volume.mounted(&[]);
    assert_eq!(fs::read_to_string(volume.mnt().join("file")).unwrap(), "kept");
    volume.umount();
}

#[test]
fn the_foreground_logs_to_stderr_and_ends_with_the_mount() {
    let Some(volume) = Volume::new() else { return };
    let mut child: Child = command(&volume.image(), &volume.mnt(), &["--foreground"]).stderr(Stdio::piped()).spawn().unwrap();
    eventually("the mount is live", || volume.is_mounted());
    fs::write(volume.mnt().join("file"), "kept").unwrap();
    kill_process(Pid::from_child(&child), Signal::INT).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(0));
    assert!(!volume.is_mounted());
    let mut log = String::new();
    child.stderr.take().unwrap().read_to_string(&mut log).unwrap();
    assert!(log.contains("mounted on") && log.contains("SIGINT"), "{log}");
}

#[test]
fn the_daemon_keeps_nothing_of_its_caller() {
    let Some(volume) = Volume::new() else { return };
    let volume = volume.mounted(&[]);
    let process = PathBuf::from(format!("/proc/{}", volume.daemon().unwrap().as_raw_nonzero()));
    assert_eq!(fs::read_link(process.join("cwd")).unwrap(), Path::new("/"));
    for number in 0..3 {
        assert_eq!(fs::read_link(process.join(format!("fd/{number}"))).unwrap(), Path::new("/dev/null"));
    }
    volume.umount();
}

#[test]
fn a_fake_mount_checks_and_mounts_nothing() {
    let Some(volume) = Volume::new() else { return };
    let output = volume.mount(&["-f"]);
    assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
    assert!(!volume.is_mounted());
}

#[test]
fn a_wrong_directory_or_option_is_refused() {
    let Some(volume) = Volume::new() else { return };
    let image = volume.image();
    let (code, reason) = refusal(&mount(&image, &image, &[]), &image);
    assert_eq!(code, 32);
    assert!(reason.ends_with("not a directory"), "{reason}");
    let (code, reason) = refusal(&volume.mount(&["-o", "ro,jurnal=off"]), &image);
    assert_eq!(code, 1);
    assert!(reason.starts_with("unknown option \"jurnal\""), "{reason}");
    let config = volume.dir.path().join("gpunvme.toml");
    fs::write(&config, "threads = 2\nthread = 3\n").unwrap();
    let (code, reason) = refusal(&volume.mount(&["-o", &format!("config={}", config.display())]), &image);
    assert_eq!(code, 1);
    assert!(reason.contains("gpunvme.toml:2: unknown field `thread`"), "{reason}");
    assert!(!volume.is_mounted());
}

/// A filesystem with a file that tells it apart from every other.
fn put_tmpfs_on(dir: &Path, mark: &str) {
    let mounted = Command::new("mount").args(["-t", "tmpfs", "none"]).arg(dir).status().unwrap();
    assert!(mounted.success());
    fs::write(dir.join(mark), "").unwrap();
}

#[test]
fn after_an_external_umount_the_daemon_unmounts_nothing_more() {
    let Some(volume) = Volume::new() else { return };
    put_tmpfs_on(&volume.mnt(), "below");
    let volume = volume.mounted(&[]);
    volume.umount();
    volume.wait_for_daemon();
    assert!(volume.mnt().join("below").exists(), "what lay below the mount point has gone with the mount");
    volume.umount();
}

#[test]
fn sigterm_leaves_what_covers_the_mount_where_it_is() {
    let Some(volume) = Volume::new() else { return };
    let volume = volume.mounted(&[]);
    fs::write(volume.mnt().join("file"), "kept").unwrap();
    put_tmpfs_on(&volume.mnt(), "above");
    volume.signal(Signal::TERM);
    volume.wait_for_daemon();
    assert!(volume.mnt().join("above").exists(), "what was mounted over the mount has gone with it");
    volume.umount();
    // A dead mount is left below; the next mount of the device releases it.
    let volume = volume.mounted(&[]);
    assert_eq!(fs::read_to_string(volume.mnt().join("file")).unwrap(), "kept");
    volume.umount();
    assert!(!volume.is_mounted());
}

#[test]
fn an_aborted_connection_takes_its_own_mount_along_and_no_other() {
    let Some(volume) = Volume::new() else { return };
    put_tmpfs_on(&volume.mnt(), "below");
    let volume = volume.mounted(&[]);
    let number = rustix::fs::minor(fs::metadata(volume.mnt()).unwrap().dev());
    let control = volume.dir.path().join("control");
    fs::create_dir(&control).unwrap();
    assert!(Command::new("mount").args(["-t", "fusectl", "none"]).arg(&control).status().unwrap().success());
    let aborted = fs::write(control.join(format!("{number}/abort")), "1");
    assert!(Command::new("umount").arg(&control).status().unwrap().success());
    aborted.unwrap();
    volume.wait_for_daemon();
    assert!(volume.mnt().join("below").exists());
    volume.umount();
    assert!(!volume.is_mounted());
}

#[test]
fn a_full_or_closed_output_ends_no_mount() {
    let Some(volume) = Volume::new() else { return };
    let full = || File::options().write(true).open("/dev/full").unwrap();
    let status = command(&volume.image(), &volume.mnt(), &["-v"]).stdout(full()).stderr(full()).status().unwrap();
    assert_eq!(status.code(), Some(0), "the mount is live, and only that could not be said");
    volume.umount();
    for arguments in [&["--help"][..], &["-V"]] {
        let mut command = command(&volume.image(), &volume.mnt(), arguments);
        assert_eq!(command.stdout(full()).stderr(Stdio::null()).status().unwrap().code(), Some(2));
    }
    let refused = command(&volume.image(), &volume.image(), &[]).stderr(full()).status().unwrap();
    assert_eq!(refused.code(), Some(32));
    // The reader of the log ends at once.
    let mut child =
        command(&volume.image(), &volume.mnt(), &["--foreground", "-o", "log=trace"]).stderr(Stdio::piped()).spawn().unwrap();
    drop(child.stderr.take());
    eventually("the mount is live", || volume.is_mounted() || child.try_wait().unwrap().is_some());
    fs::write(volume.mnt().join("file"), "written").unwrap();
    volume.umount();
    assert_eq!(child.wait().unwrap().code(), Some(0));
}

#[test]
fn a_stopped_daemon_holds_up_nobody_who_wants_its_device() {
    let Some(volume) = Volume::new() else { return };
    let volume = volume.mounted(&[]);
    let elsewhere = volume.dir.path().join("elsewhere");
    fs::create_dir(&elsewhere).unwrap();
    volume.signal(Signal::STOP);
    for options in [&[][..], &["-o", "ro"], &["-f"]] {
        let mut child = command(&volume.image(), &elsewhere, options).stderr(Stdio::piped()).spawn().unwrap();
        let start = Instant::now();
        while child.try_wait().unwrap().is_none() && start.elapsed() < Duration::from_secs(30) {
            std::thread::sleep(Duration::from_millis(5));
        }
        let ended = child.try_wait().unwrap();
        if ended.is_none() {
            volume.signal(Signal::CONT);
        }
        let output = child.wait_with_output().unwrap();
        assert!(ended.is_some(), "{options:?} waited for the daemon: {output:?}");
        assert!(refusal(&output, &volume.image()).1.starts_with("already mounted on"), "{output:?}");
    }
    volume.signal(Signal::CONT);
    volume.umount();
}

/// Whether this process has `CAP_SYS_RESOURCE`, which root lacks in most containers.
fn may_raise_limits() -> bool {
    rustix::thread::capabilities(None).unwrap().effective.contains(rustix::thread::CapabilitySet::SYS_RESOURCE)
}

/// Runs mount.gpunvme under another limit of open files, with or without the privilege to raise it.
fn mount_with_descriptors(volume: &Volume, files: u32, privileged: bool) -> Output {
    let mut command = Command::new("setpriv");
    if !privileged {
        command.args(["--bounding-set", "-sys_resource", "--inh-caps", "-sys_resource"]);
    }
    command.args(["prlimit", &format!("--nofile={files}:{files}"), env!("CARGO_BIN_EXE_mount-gpunvme")]);
    command.arg(volume.image()).arg(volume.mnt()).stdin(Stdio::null()).output().unwrap()
}

#[test]
fn too_few_descriptors_are_raised_or_refused() {
    let Some(volume) = Volume::new() else { return };
    let (code, reason) = refusal(&mount_with_descriptors(&volume, 16, false), &volume.image());
    assert_eq!(code, 2);
    assert!(reason.starts_with("at most 16 files may be open (RLIMIT_NOFILE)"), "{reason}");
    assert!(!volume.is_mounted());
    if !may_raise_limits() {
        return;
    }
    let output = mount_with_descriptors(&volume, 16, true);
    assert!(output.status.success(), "{output:?}");
    for number in 0..50 {
        fs::write(volume.mnt().join(number.to_string()), "there").unwrap();
    }
    volume.umount();
}

#[test]
fn a_configuration_file_without_end_is_refused() {
    let Some(volume) = Volume::new() else { return };
    let (code, reason) = refusal(&volume.mount(&["-o", "config=/dev/zero"]), &volume.image());
    assert_eq!(code, 1);
    assert!(reason.starts_with("/dev/zero: longer than"), "{reason}");
}

#[test]
fn the_daemon_has_given_up_what_it_does_not_need() {
    let Some(volume) = Volume::new() else { return };
    let volume = volume.mounted(&[]);
    let process = PathBuf::from(format!("/proc/{}", volume.daemon().unwrap().as_raw_nonzero()));
    // SYS_ADMIN, SYS_PTRACE, IPC_LOCK, DAC_OVERRIDE and DAC_READ_SEARCH.
    let needed = 1_u64 << 21 | 1 << 19 | 1 << 14 | 1 << 1 | 1 << 2;
    let threads: Vec<_> = fs::read_dir(process.join("task")).unwrap().flatten().collect();
    assert!(threads.len() > 10);
    for thread in threads {
        // One that has ended meanwhile has nothing.
        let Ok(status) = fs::read_to_string(thread.path().join("status")) else { continue };
        let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(":\t")).unwrap();
        let set = |name: &str| u64::from_str_radix(field(name), 16).unwrap();
        assert_eq!((field("NoNewPrivs"), field("Seccomp")), ("1", "2"), "{status}");
        assert_eq!((set("CapBnd"), set("CapAmb"), set("CapInh")), (0, 0, 0), "{status}");
        assert_eq!((set("CapPrm") & !needed, set("CapEff") & !needed), (0, 0), "{status}");
    }
    let expected = if may_raise_limits() { "-900" } else { "0" };
    assert_eq!(fs::read_to_string(process.join("oom_score_adj")).unwrap().trim(), expected);
    volume.umount();
}

#[test]
fn an_oom_score_that_was_set_stays() {
    let Some(volume) = Volume::new() else { return };
    let mut command = Command::new("choom");
    command.args(["-n", "300", "--", env!("CARGO_BIN_EXE_mount-gpunvme")]).arg(volume.image()).arg(volume.mnt());
    assert!(command.stdin(Stdio::null()).status().unwrap().success());
    let daemon = volume.daemon().unwrap().as_raw_nonzero();
    assert_eq!(fs::read_to_string(format!("/proc/{daemon}/oom_score_adj")).unwrap().trim(), "300");
    volume.umount();
}

#[test]
fn a_mount_whose_source_has_become_another_file_stays() {
    let Some(volume) = Volume::new() else { return };
    let other = volume.dir.path().join("other");
    fs::copy(volume.image(), &other).unwrap();
    let volume = volume.mounted(&[]);
    let first = volume.daemon().unwrap();
    let mut file = File::create(volume.mnt().join("file")).unwrap();
    // By the name of the source there is another volume now.
    fs::rename(volume.image(), volume.dir.path().join("moved")).unwrap();
    fs::rename(&other, volume.image()).unwrap();
    let dir = volume.dir.path().join("second");
    fs::create_dir(&dir).unwrap();
    let output = mount(&volume.image(), &dir, &[]);
    assert!(output.status.success(), "{output:?}");
    let is_there = volume.is_mounted();
    let written = file.write_all(b"kept").and_then(|()| file.sync_all());
    drop(file);
    let read = fs::read(volume.mnt().join("file"));
    // Both go, whatever was found.
    let detached = [volume.mnt(), dir].map(|dir| Command::new("umount").arg(dir).status().unwrap().success());
    if !detached[0] {
        kill_process(first, Signal::KILL).unwrap();
    }
    volume.wait_for_daemon();
    written.unwrap();
    assert!(is_there, "a mount that lives was detached");
    assert_eq!((read.unwrap().as_slice(), detached), (&b"kept"[..], [true, true]));
}

/// Root may not enter the mount, as with one that fusermount3 made.
#[test]
fn root_releases_another_user_s_mount_when_it_is_dead() {
    let Some(volume) = Volume::new() else { return };
    chown(volume.image(), Some(4711), Some(4711)).unwrap();
    // Which root's daemon may pass by a capability alone.
    chown(volume.dir.path(), Some(4711), Some(4711)).unwrap();
    fs::set_permissions(volume.dir.path(), fs::Permissions::from_mode(0o700)).unwrap();
    let output = Command::new("setpriv")
        .args(["--reuid=4711", "--regid=4711", "--clear-groups"])
        .args(["--inh-caps", "--ambient-caps"].map(|set| format!("{set}=+sys_admin,+dac_override")))
        .args([env!("CARGO_BIN_EXE_mount-gpunvme").as_ref(), volume.image().as_os_str(), volume.mnt().as_os_str()])
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
    let daemon = volume.daemon().unwrap();
    let line = volume.line().unwrap();
    assert!(line.contains("user_id=4711") && !line.contains("allow_other"), "{line}");
    // Its source has become another file, and it lives.
    let (moved, second) = (volume.dir.path().join("moved"), volume.dir.path().join("second"));
    fs::create_dir(&second).unwrap();
    fs::rename(volume.image(), &moved).unwrap();
    fs::copy(&moved, volume.image()).unwrap();
    // Of a file that is not that user's the mount would be no business of root's.
    chown(volume.image(), Some(4711), Some(4711)).unwrap();
    let output = mount(&volume.image(), &second, &[]);
    assert!(output.status.success(), "{output:?}");
    assert!(Command::new("umount").arg(&second).status().unwrap().success());
    assert_eq!(volume.line(), Some(line), "a mount that lives was detached");
    kill_process(daemon, Signal::KILL).unwrap();
    volume.wait_for_daemon();
    let volume = volume.mounted(&[]);
    assert!(volume.line().unwrap().contains("user_id=0"));
    volume.umount();
    assert!(!volume.is_mounted(), "it lay over the dead one");
}

/// Mounts after a command of the shell, in a mount namespace of its own, without fusermount3.
fn mount_after(volume: &Volume, preparation: &str, wrapper: &str) -> (i32, String) {
    let script = format!("{preparation} PATH=/nonexistent exec {wrapper} \"$@\"");
    let output = Command::new("unshare")
        .args(["--mount", "sh", "-e", "-c", &script, "sh", env!("CARGO_BIN_EXE_mount-gpunvme")])
        .args([volume.image(), volume.mnt()])
        .stdin(Stdio::null())
        .output()
        .unwrap();
    refusal(&output, &volume.image())
}

#[test]
fn what_a_container_lacks_is_named() {
    let Some(volume) = Volume::new() else { return };
    let folder = volume.dir.path().display();
    let mount_point = format!("mount point {}: ", volume.mnt().display());
    let (without, file) = ("/usr/bin/setpriv --bounding-set=-sys_admin --inh-caps=-sys_admin", format!("{folder}/file"));
    for (preparation, wrapper, message) in [
        (
            String::new(),
            without,
            "mounting needs the capability SYS_ADMIN (root has it, a container with `--cap-add SYS_ADMIN`), or else the program \
             fusermount3, of the package fuse3, which is not installed",
        ),
        (
            format!("> {file}; mount --bind {file} /dev/fuse;"),
            "",
            "/dev/fuse is not the device of FUSE; `rm /dev/fuse` and `mknod -m 666 /dev/fuse c 10 229` make it so",
        ),
        (
            "mount --bind /dev/null /dev/fuse;".to_owned(),
            "",
            "/dev/fuse is not the device of FUSE; `rm /dev/fuse` and `mknod -m 666 /dev/fuse c 10 229` make it so",
        ),
        (
            "mount -t tmpfs none /dev;".to_owned(),
            "",
            "/dev/fuse is missing: load the kernel module with `modprobe fuse`; a container needs `--device /dev/fuse`",
        ),
    ] {
        assert_eq!(mount_after(&volume, &preparation, wrapper), (32, format!("{mount_point}{message}")), "{preparation}");
    }
}

/// As a device cgroup answers root too.
#[test]
fn root_is_not_told_to_be_root() {
    let Some(volume) = Volume::new() else { return };
    let image = volume.image();
    let change = |flag: &str| Command::new("chattr").arg(flag).arg(&image).status().is_ok_and(|status| status.success());
    if !change("+i") {
        let _ = writeln!(std::io::stderr(), "SKIPPED root_is_not_told_to_be_root: no immutable files here");
        return;
    }
    let output = volume.mount(&[]);
    assert!(change("-i"));
    let (code, message) = refusal(&output, &image);
    assert_eq!(code, 32);
    assert!(message.starts_with("the kernel refuses it to this process, also as root: a container"), "{message}");
}
