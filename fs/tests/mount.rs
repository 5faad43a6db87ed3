//! mount.gpunvme as mount(8) and its users run it: what it leaves behind in the system, and how it ends. What a mounted volume
//! does is the matter of the end-to-end tests, in `tests/`.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use gpunvme_blockdev::{OpenMode, open};
use gpunvme_fs::FormatOptions;
use gpunvme_layout::Timestamp;
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
        gpunvme_fs::format(&device, &options).unwrap();
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

/// What is said of a refusal, after the program's and the device's names, and the exit code.
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
