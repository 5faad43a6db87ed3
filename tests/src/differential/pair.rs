//! The two filesystems side by side, each on an image of its own.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;

use super::process::Side;
use crate::mounted::{self, Image, Mounted, unmount_unless_busy};
use crate::scratch_dir;

/// Bytes in each image.
const LEN: u64 = 2 << 30;
/// How both are mounted: sequences make device nodes of any number, also that of a loop device in
/// use, and write to them as root.
const NO_DEVICES: &str = "nodev";

/// A freshly made ext4, mounted.
#[derive(Debug)]
struct Ext4 {
    scratch: TempDir,
}

impl Ext4 {
    /// # Errors
    /// What mkfs.ext4 or mount said.
    fn new() -> Result<Self, String> {
        let new = Self { scratch: scratch_dir() };
        fs::create_dir(new.root()).expect("a mount point");
        File::create(new.image()).and_then(|file| file.set_len(LEN)).expect("an image");
        // Values of attributes may be as long as the kernel allows, and nothing is written behind
        // our back.
        let options = ["-q", "-F", "-O", "ea_inode", "-E", "lazy_itable_init=0,lazy_journal_init=0"];
        said(Command::new("mkfs.ext4").args(options).arg(new.image()))?;
        new.mount()?;
        Ok(new)
    }

    fn image(&self) -> PathBuf {
        self.scratch.path().join("image")
    }

    fn root(&self) -> PathBuf {
        self.scratch.path().join("mnt")
    }

    fn mount(&self) -> Result<(), String> {
        // Access times change only when they are set: `access-times`.
        let options = format!("loop,noatime,{NO_DEVICES}");
        said(Command::new("mount").args(["-t", "ext4", "-o", &options]).arg(self.image()).arg(self.root()))?;
        // Never zeros where blocks were only allocated: they would be data for SEEK_DATA.
        let mounts = fs::read_to_string("/proc/self/mounts").expect("/proc");
        let device =
            mounts.lines().find(|line| line.split(' ').nth(1) == self.root().to_str()).and_then(|line| line.split(' ').next());
        let name = device.and_then(|device| device.rsplit('/').next()).ok_or("no device below the mount")?;
        fs::write(format!("/sys/fs/ext4/{name}/extent_max_zeroout_kb"), "0").map_err(|error| error.to_string())
    }

    fn unmount(&self) {
        let output = unmount_unless_busy(&self.root());
        assert!(output.status.success(), "umount: {}", mounted::text(&output));
    }
}

impl Drop for Ext4 {
    fn drop(&mut self) {
        if mounted::is_mounted(&self.root()) {
            let _ = Command::new("umount").arg("-l").arg(self.root()).status();
        }
    }
}

fn said(command: &mut Command) -> Result<(), String> {
    let output = command.output().map_err(|error| format!("{}: {error}", command.get_program().display()))?;
    if output.status.success() { Ok(()) } else { Err(mounted::text(&output)) }
}

/// Both, mounted.
#[derive(Debug)]
pub struct Pair {
    ext4: Ext4,
    gpunvme: Option<Mounted>,
    folders: u64,
}

impl Pair {
    /// Two fresh ones.
    ///
    /// # Errors
    /// Why ext4 cannot be had here.
    pub fn new() -> Result<Self, String> {
        Ok(Self { ext4: Ext4::new()?, gpunvme: Some(Image::formatted_with(LEN).mount_with(NO_DEVICES)), folders: 0 })
    }

    fn root(&self, side: Side) -> PathBuf {
        match side {
            Side::Ext4 => self.ext4.root(),
            Side::Gpunvme => self.gpunvme().root(),
        }
    }

    fn gpunvme(&self) -> &Mounted {
        self.gpunvme.as_ref().expect("mounted but while it is remounted")
    }

    /// The folder in use.
    pub fn folder(&self, side: Side) -> PathBuf {
        self.root(side).join(self.folders.to_string())
    }

    /// An empty folder on both, in place of the one before.
    pub fn start_afresh(&mut self) {
        if !self.lives() {
            *self = Self::new().expect("it was to be had before");
        }
        for side in [Side::Ext4, Side::Gpunvme] {
            // What it leaves behind does no harm.
            let _ = fs::remove_dir_all(self.folder(side));
        }
        self.folders += 1;
        if fs::create_dir(self.folder(Side::Ext4)).is_err() {
            // An ext4 that found itself damaged takes nothing more.
            *self = Self::new().expect("it was to be had before");
            fs::create_dir(self.folder(Side::Ext4)).expect("a folder");
        }
        fs::create_dir(self.folder(Side::Gpunvme)).expect("a folder");
    }

    /// Whether gpunvme answers.
    fn lives(&self) -> bool {
        self.gpunvme.is_some() && fs::symlink_metadata(self.gpunvme().root()).is_ok()
    }

    /// Unmounts both and mounts them again; gpunvme's is checked in between.
    ///
    /// # Errors
    /// What the daemon or fsck.gpunvme had to say.
    pub fn remount(&mut self) -> Result<(), String> {
        let mounted = self.gpunvme.take().expect("mounted");
        let again = std::panic::catch_unwind(move || mounted.unmount().mount_with(NO_DEVICES));
        self.ext4.unmount();
        self.ext4.mount()?;
        match again {
            Ok(mounted) => self.gpunvme = Some(mounted),
            Err(panic) => {
                let text = panic.downcast_ref::<String>().cloned();
                return Err(text.unwrap_or_else(|| "gpunvme did not come back".to_owned()));
            }
        }
        Ok(())
    }
}

impl Drop for Pair {
    fn drop(&mut self) {
        if let Some(mounted) = self.gpunvme.take() {
            if fs::symlink_metadata(mounted.root()).is_ok() {
                drop(mounted);
            } else {
                mounted.abandon();
            }
        }
    }
}

/// Says something on stderr, past the test harness's capture.
pub fn say(text: &str) {
    let _ = writeln!(std::io::stderr(), "{text}");
}

/// The lines of a file of the project.
pub fn read_docs(path: impl AsRef<Path>) -> String {
    fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(path)).expect("a file of the project")
}
