//! A formatted image and a mounted volume, made with the programs that users run, and taken down
//! again however a test ends: no mount, daemon or image survives its test.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, WaitOptions, WaitStatus};
use tempfile::TempDir;

use crate::loop_device::LoopDevice;
use crate::{programs, scratch_dir_in, scratch_root};

/// Bytes in a test image that did not ask for a size. The file is sparse.
pub const IMAGE_LEN: u64 = 1 << 30;

/// How long a daemon may take to end after umount(8) or a signal.
const DAEMON_EXIT_LIMIT: Duration = Duration::from_secs(180);

/// A volume in an image file, not mounted, in a scratch directory of its own.
#[derive(Debug)]
pub struct Image {
    scratch: TempDir,
    /// Further members, where it is the first of several.
    others: usize,
    /// The block devices that the programs get instead of the files, if any.
    devices: Vec<LoopDevice>,
}

impl Image {
    /// A freshly formatted image of [`IMAGE_LEN`] bytes.
    pub fn formatted() -> Self {
        Self::formatted_with(IMAGE_LEN)
    }

    /// A freshly formatted image of `len` bytes.
    pub fn formatted_with(len: u64) -> Self {
        let image = Self::blank(len);
        let output = image.mkfs(&[]);
        assert!(output.status.success(), "mkfs.gpunvme: {}", text(&output));
        image
    }

    /// A sparse file of `len` bytes that holds nothing.
    pub fn blank(len: u64) -> Self {
        Self::blank_in(&scratch_root(), len)
    }

    /// As [`Image::blank`], in a folder of one's choice.
    pub fn blank_in(folder: &Path, len: u64) -> Self {
        Self::blank_members_in(folder, 1, len)
    }

    /// Files that one volume is to be made of, with `len` bytes each, which hold nothing.
    pub fn blank_members_in(folder: &Path, members: usize, len: u64) -> Self {
        let image = Self { scratch: scratch_dir_in(folder), others: members - 1, devices: Vec::new() };
        for path in image.members() {
            let file = File::create(path).expect("an image file");
            file.set_len(len).expect("a sparse image file");
        }
        image
    }

    /// A freshly formatted volume on several image files of `len` bytes each.
    pub fn striped(members: usize, len: u64) -> Self {
        let image = Self::blank_members_in(&scratch_root(), members, len);
        let output = image.mkfs(&["-L", "several"]);
        assert!(output.status.success(), "mkfs.gpunvme: {}", text(&output));
        image
    }

    /// A freshly formatted volume on a loop device over an image of `len` bytes. None, said aloud
    /// for `test`, where there is no loop device.
    pub fn on_block_device(test: &str, len: u64) -> Option<Self> {
        Self::on_block_devices(test, 1, len)
    }

    /// The same on several loop devices, each over an image of `len` bytes.
    pub fn on_block_devices(test: &str, count: usize, len: u64) -> Option<Self> {
        let image = Self::blank_members_in(&scratch_root(), count, len);
        let devices = image.members().iter().map(|member| LoopDevice::over(test, member)).collect::<Option<_>>()?;
        let image = Self { devices, ..image };
        let output = image.mkfs(&[]);
        assert!(output.status.success(), "mkfs.gpunvme: {}", text(&output));
        Some(image)
    }

    /// What the programs get: the first block device where there is one, else the image file.
    pub fn device(&self) -> PathBuf {
        self.devices.first().map_or_else(|| self.path(), |device| device.path().to_owned())
    }

    /// The image files that the volume lies on: [`Image::path`] first.
    pub fn members(&self) -> Vec<PathBuf> {
        let others = (1..=self.others).map(|number| self.scratch.path().join(format!("image.{number}")));
        std::iter::once(self.path()).chain(others).collect()
    }

    /// The image file, also where it is below a block device.
    pub fn path(&self) -> PathBuf {
        self.scratch.path().join("image")
    }

    /// Where this image is mounted when it is. Tests may put further files beside it, in its
    /// parent.
    pub fn mount_point(&self) -> PathBuf {
        self.scratch.path().join("mnt")
    }

    /// Runs `mkfs.gpunvme` on the image.
    pub fn mkfs(&self, options: &[&str]) -> Output {
        let devices = match self.devices.as_slice() {
            [] => self.members(),
            devices => devices.iter().map(|device| device.path().to_owned()).collect(),
        };
        programs::command("mkfs.gpunvme").args(options).args(devices).output().expect("mkfs.gpunvme runs")
    }

    /// Insists that `fsck.gpunvme` finds nothing.
    pub fn check(&self) {
        let output = programs::command("fsck.gpunvme").arg("-n").arg(self.device()).output().expect("fsck.gpunvme runs");
        assert!(output.status.success(), "fsck.gpunvme: {}", text(&output));
    }

    /// Runs `mount.gpunvme` on the image and returns how that ended, for tests of refusals.
    pub fn try_mount(&self, options: &str) -> Output {
        self.try_mount_by(&[], options)
    }

    /// As [`Image::try_mount`], with a program and its arguments before `mount.gpunvme`.
    fn try_mount_by(&self, prefix: &[&str], options: &str) -> Output {
        // A dead mount on it cannot be looked at, and need not be made.
        if !is_mounted(&self.mount_point()) {
            std::fs::create_dir_all(self.mount_point()).expect("a mount point");
        }
        // The daemon becomes this process's child when mount.gpunvme goes to the background: its
        // exit status is then ours to check.
        rustix::process::set_child_subreaper(Some(rustix::process::getpid())).expect("to be a subreaper");
        let mount = programs::command("mount.gpunvme");
        let mut command = match prefix.split_first() {
            Some((program, arguments)) => {
                let mut command = Command::new(program);
                command.args(arguments).arg(mount.get_program());
                command
            }
            None => mount,
        };
        command.arg(self.device()).arg(self.mount_point()).stdin(Stdio::null());
        if !options.is_empty() {
            command.args(["-o", options]);
        }
        // Reads both pipes to their ends, so a daemon that kept them open would be seen as a hang
        // here.
        command.output().expect("mount.gpunvme runs")
    }

    /// Mounts the image with the default options.
    pub fn mount(self) -> Mounted {
        self.mount_with("")
    }

    /// Mounts the image with `options`, as in `mount -o`.
    pub fn mount_with(self, options: &str) -> Mounted {
        let output = self.try_mount(options);
        self.mounted(&output)
    }

    /// Mounts the image by this program and its arguments before `mount.gpunvme`.
    pub fn mount_by(self, prefix: &[&str]) -> Mounted {
        let output = self.try_mount_by(prefix, "");
        self.mounted(&output)
    }

    fn mounted(self, output: &Output) -> Mounted {
        assert!(output.status.success(), "mount.gpunvme: {}", text(output));
        assert!(is_mounted(&self.mount_point()), "mount.gpunvme returned before the mount was live");
        let Some(daemon) = find_daemon(&self.device()) else {
            release(&self.mount_point());
            panic!("no daemon behind the mount");
        };
        Mounted { image: Some(self), daemon }
    }
}

/// A mounted volume. Dropping it unmounts, and insists that the daemon ended well and left a volume
/// without faults.
#[derive(Debug)]
pub struct Mounted {
    image: Option<Image>,
    daemon: Pid,
}

impl Mounted {
    /// A fresh volume of [`IMAGE_LEN`] bytes, mounted with the default options.
    #[allow(clippy::new_without_default)]
    pub fn new() -> Self {
        Image::formatted().mount()
    }

    /// The root of the mounted volume.
    pub fn root(&self) -> PathBuf {
        self.image().mount_point()
    }

    /// A path inside the mounted volume.
    pub fn path(&self, relative: impl AsRef<Path>) -> PathBuf {
        self.root().join(relative)
    }

    /// The image below the mount.
    pub fn image(&self) -> &Image {
        self.image.as_ref().expect("an image until the volume is unmounted")
    }

    /// The process behind the mount.
    pub fn daemon(&self) -> Pid {
        self.daemon
    }

    /// The most memory that the daemon has had so far, in bytes (`VmHWM`).
    pub fn peak_memory(&self) -> u64 {
        peak_memory(self.daemon).expect("a living daemon")
    }

    /// Unmounts with umount(8), and returns the image once the daemon has ended with exit code 0
    /// and fsck has found nothing.
    pub fn unmount(mut self) -> Image {
        self.take_down()
    }

    /// As [`Mounted::unmount`], without fsck: for measurements.
    pub fn unmount_unchecked(mut self) -> Image {
        self.release()
    }

    /// Unmounts and mounts again with the default options.
    pub fn remount(self) -> Self {
        self.unmount().mount()
    }

    /// Sends `signal` to the daemon, waits for its end, and returns how it ended and the image. The
    /// mount is released as an administrator would, with `umount -l`, if the daemon left it.
    pub fn signal(mut self, signal: Signal) -> (WaitStatus, Image) {
        rustix::process::kill_process(self.daemon, signal).expect("a living daemon");
        let status = wait_for_exit(self.daemon).expect("the daemon ends");
        let image = self.image.take().expect("an image");
        release(&image.mount_point());
        (status, image)
    }

    /// Takes down a mount whose daemon may be dead, and says nothing about how.
    pub fn abandon(mut self) {
        if let Some(image) = self.image.take() {
            abandon(self.daemon, &image.mount_point());
        }
    }

    fn take_down(&mut self) -> Image {
        let image = self.release();
        image.check();
        image
    }

    fn release(&mut self) -> Image {
        let image = self.image.take().expect("an image");
        // A test may have unmounted it, and looked at something before the daemon's end.
        if is_mounted(&image.mount_point()) {
            let output = unmount_unless_busy(&image.mount_point());
            if !output.status.success() {
                abandon(self.daemon, &image.mount_point());
                panic!("umount: {}", text(&output));
            }
        }
        match wait_for_exit(self.daemon) {
            Ok(status) => {
                assert_eq!(status.exit_status(), Some(0), "the daemon ended with {status:?} after umount");
            }
            Err(error) => {
                abandon(self.daemon, &image.mount_point());
                panic!("after umount: {error}");
            }
        }
        image
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        match &self.image {
            Some(image) if std::thread::panicking() => abandon(self.daemon, &image.mount_point()),
            Some(_) => drop(self.take_down()),
            None => {}
        }
    }
}

/// The most memory that a process has had so far, in bytes; `None` when it is gone, or is not
/// executed yet: until then it has the memory of this process.
pub fn peak_memory(process: Pid) -> Option<u64> {
    let program = std::fs::read_link(format!("/proc/{}/exe", process.as_raw_nonzero())).ok()?;
    if program == std::env::current_exe().ok()? {
        return None;
    }
    let status = std::fs::read_to_string(format!("/proc/{}/status", process.as_raw_nonzero())).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    Some(line.split_whitespace().next()?.parse::<u64>().ok()? << 10)
}

/// Whether something is mounted at `dir`, without asking what is mounted there.
pub fn is_mounted(dir: &Path) -> bool {
    let mounts = std::fs::read_to_string("/proc/self/mounts").expect("/proc");
    mounts.lines().any(|line| line.split(' ').nth(1) == dir.to_str())
}

/// Both output streams of a program that ran, for a message.
pub fn text(output: &Output) -> String {
    format!("{}: {}{}", output.status, String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

/// umount(8). A program that another test starts at this moment has all of this process's files
/// open until it is executed, so a mount that is busy gets another chance.
pub fn unmount_unless_busy(mount_point: &Path) -> Output {
    let start = Instant::now();
    loop {
        let output = Command::new("umount").arg(mount_point).output().expect("umount runs");
        let busy = String::from_utf8_lossy(&output.stderr).contains("busy");
        if !busy || start.elapsed() > Duration::from_secs(5) {
            return output;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// The daemon of a mount of an image, if one runs.
pub fn find_daemon(image: &Path) -> Option<Pid> {
    std::fs::read_dir("/proc").expect("/proc").flatten().find_map(|entry| {
        let pid: i32 = entry.file_name().to_str()?.parse().ok()?;
        let command = std::fs::read(entry.path().join("cmdline")).ok()?;
        let mut words = command.split(|&byte| byte == 0);
        let ours = words.next()?.ends_with(b"mount.gpunvme") && words.any(|word| word == image.as_os_str().as_encoded_bytes());
        if ours { Pid::from_raw(pid) } else { None }
    })
}

fn wait_for_exit(daemon: Pid) -> io::Result<WaitStatus> {
    let start = Instant::now();
    loop {
        if let Some((_, status)) = rustix::process::waitpid(Some(daemon), WaitOptions::NOHANG)? {
            return Ok(status);
        }
        if start.elapsed() > DAEMON_EXIT_LIMIT {
            return Err(io::Error::other(format!("the daemon is alive after {DAEMON_EXIT_LIMIT:?}")));
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

fn release(mount_point: &Path) {
    if is_mounted(mount_point) {
        let output = Command::new("umount").arg("-l").arg(mount_point).output().expect("umount runs");
        assert!(output.status.success(), "umount -l: {}", text(&output));
    }
}

/// For a test that failed already: the mount and the daemon go, and nothing is said about how.
fn abandon(daemon: Pid, mount_point: &Path) {
    let _ = rustix::process::kill_process(daemon, Signal::KILL);
    let _ = wait_for_exit(daemon);
    if is_mounted(mount_point) {
        let _ = Command::new("umount").arg("-l").arg(mount_point).status();
    }
}
