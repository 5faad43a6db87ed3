//! The filesystems that gpunvme is measured beside: filesystems of the kernel on loop devices, and
//! the filesystem in memory. Dropping one unmounts it.

use std::error::Error;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::loop_device::LoopDevice;
use crate::mounted::{is_mounted, text, unmount_unless_busy};

/// Makes a file whose blocks are all allocated and written, so that no filesystem on it pays for
/// that.
///
/// # Errors
/// Those of the system, with the file's name.
pub fn write_whole(path: &Path, len: u64) -> std::io::Result<()> {
    let zeros = vec![0; 4 << 20];
    let write = || {
        let mut file = File::create(path)?;
        let mut left = len;
        while left > 0 {
            let step = left.min(zeros.len() as u64);
            file.write_all(&zeros[..step as usize])?;
            left -= step;
        }
        file.sync_all()
    };
    write().map_err(|error| {
        let help = if error.kind() == ErrorKind::StorageFull { ": let TMPDIR name a folder with more room" } else { "" };
        std::io::Error::new(error.kind(), format!("{}, of {len} bytes: {error}{help}", path.display()))
    })
}

/// A filesystem of the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// ext4.
    Ext4,
    /// XFS.
    Xfs,
}

impl Kind {
    /// As mount(8) calls it.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Ext4 => "ext4",
            Kind::Xfs => "xfs",
        }
    }

    /// Options of its mkfs: nothing is put off to after the mount, and the blocks under it stay
    /// allocated.
    fn options(self) -> &'static [&'static str] {
        match self {
            Kind::Ext4 => &["-q", "-E", "lazy_itable_init=0,lazy_journal_init=0,nodiscard"],
            Kind::Xfs => &["-q", "-K"],
        }
    }
}

/// A filesystem of the kernel, mounted on a loop device that bypasses the page cache below it.
#[derive(Debug)]
pub struct LoopMounted {
    /// Where it is mounted.
    pub root: PathBuf,
    device: String,
}

impl LoopMounted {
    /// Formats and mounts an image file, which has to be there. It is mounted beside the image.
    ///
    /// # Errors
    /// What the program that failed says.
    pub fn set_up(image: &Path, kind: Kind) -> Result<Self, Box<dyn Error>> {
        let device = run(Command::new("losetup").args(["--find", "--show", "--direct-io=on"]).arg(image))?.trim().to_owned();
        let mounted = Self { root: image.with_extension("mnt"), device };
        run(Command::new(format!("mkfs.{}", kind.name())).args(kind.options()).arg(&mounted.device))?;
        fs::create_dir(&mounted.root)?;
        run(Command::new("mount").args(["-t", kind.name(), &mounted.device]).arg(&mounted.root))?;
        Ok(mounted)
    }
}

impl Drop for LoopMounted {
    fn drop(&mut self) {
        if is_mounted(&self.root) {
            let _ = unmount_unless_busy(&self.root);
        }
        let _ = Command::new("losetup").args(["--detach", &self.device]).status();
    }
}

/// A filesystem whose files lie on several loop devices in turns: btrfs, since not every kernel
/// stripes block devices. It sums nothing, and writes go where the bytes lay.
#[derive(Debug)]
pub struct Striped {
    /// The folder.
    pub root: PathBuf,
    /// Detached after the unmount.
    _devices: Vec<LoopDevice>,
}

impl Striped {
    /// Formats and mounts btrfs over as many image files, of `len` bytes each, which it makes in a
    /// folder.
    ///
    /// # Errors
    /// What the program that failed says.
    pub fn set_up(folder: &Path, count: usize, len: u64) -> Result<Self, Box<dyn Error>> {
        let mut devices = Vec::new();
        for number in 0..count {
            let image = folder.join(format!("striped.{number}"));
            write_whole(&image, len)?;
            devices.push(LoopDevice::over("striped", &image).ok_or("no loop device can be had")?);
        }
        let names: Vec<_> = devices.iter().map(LoopDevice::path).collect();
        run(Command::new("mkfs.btrfs").args(["--quiet", "--force", "--data", "raid0"]).args(&names))?;
        let root = folder.join("striped");
        fs::create_dir(&root)?;
        let others: String = names.iter().map(|name| format!(",device={}", name.display())).collect();
        run(Command::new("mount").arg("-o").arg(format!("nodatacow{others}")).arg(names[0]).arg(&root))?;
        Ok(Self { root, _devices: devices })
    }
}

impl Drop for Striped {
    fn drop(&mut self) {
        if is_mounted(&self.root) {
            let _ = unmount_unless_busy(&self.root);
        }
    }
}

/// The filesystem in memory.
#[derive(Debug)]
pub struct MemFs {
    /// Where it is mounted.
    pub root: PathBuf,
    process: Child,
}

impl MemFs {
    /// Mounts it in a folder, with the program that lies beside this one.
    ///
    /// # Errors
    /// It does not mount.
    pub fn set_up(scratch: &Path) -> Result<Self, Box<dyn Error>> {
        Self::start(scratch.join("memfs"), &[])
    }

    /// As [`MemFs::set_up`], with what files hold on an image, beside which it is mounted:
    /// `file_len` bytes a file at the most.
    ///
    /// # Errors
    /// It does not mount.
    pub fn on_device(image: &Path, file_len: u64) -> Result<Self, Box<dyn Error>> {
        Self::start(
            image.with_extension("mnt"),
            &["--device".as_ref(), image.as_os_str(), format!("--file-len={file_len}").as_ref()],
        )
    }

    fn start(root: PathBuf, arguments: &[&OsStr]) -> Result<Self, Box<dyn Error>> {
        fs::create_dir(&root)?;
        let program = std::env::current_exe()?.with_file_name("memfs");
        let process = Command::new(program).arg(&root).args(arguments).stdin(Stdio::null()).spawn()?;
        let memfs = Self { root, process };
        let start = Instant::now();
        while !is_mounted(&memfs.root) {
            if start.elapsed() > Duration::from_secs(10) {
                return Err("memfs does not mount".into());
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        // As the daemon does for its own.
        let device = rustix::fs::stat(&memfs.root)?.st_dev;
        let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
        fs::write(format!("/sys/class/bdi/{major}:{minor}/read_ahead_kb"), "4096")?;
        Ok(memfs)
    }
}

impl Drop for MemFs {
    fn drop(&mut self) {
        if is_mounted(&self.root) {
            let _ = Command::new("umount").arg(&self.root).status();
        } else {
            let _ = self.process.kill();
        }
        let _ = self.process.wait();
    }
}

/// What a program prints.
///
/// # Errors
/// What it says when it fails.
pub fn run(command: &mut Command) -> Result<String, Box<dyn Error>> {
    let output = command.output()?;
    if output.status.success() {
        Ok(String::from_utf8(output.stdout)?)
    } else {
        Err(format!("{}: {}", command.get_program().to_string_lossy(), text(&output)).into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{needs_mount, report_skipped, scratch_dir};

    #[test]
    fn a_striped_peer_holds_files_and_leaves_nothing() {
        needs_mount!();
        let scratch = scratch_dir();
        let peer = match Striped::set_up(scratch.path(), 2, 256 << 20) {
            Ok(peer) => peer,
            Err(error) => return report_skipped("a_striped_peer_holds_files_and_leaves_nothing", &error.to_string()),
        };
        let (root, bytes) = (peer.root.clone(), crate::tree::pattern(3, 3 << 20));
        fs::write(root.join("file"), &bytes).expect("it has room");
        assert!(is_mounted(&root) && fs::read(root.join("file")).expect("it is there") == bytes);
        drop(peer);
        assert!(!is_mounted(&root) && !root.join("file").exists());
    }
}
