//! What is measured: set up together, each on its own image on the same backing, and taken down together.

use std::error::Error;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use gpunvme_blockdev::{BlockDevice, OpenMode};
use gpunvme_tests::mounted::{Image, Mounted, is_mounted, text};
use tempfile::TempDir;

/// Room for metadata, journals and the files of the names section, beside the data.
const SPARE: u64 = 1 << 30;

/// Whatever a column of a table stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Subject {
    Gpunvme,
    Ioctl,
    Ext4,
    FuseCeiling,
    DeviceCeiling,
}

impl Subject {
    pub const ALL: [Subject; 5] = [Subject::Gpunvme, Subject::Ioctl, Subject::Ext4, Subject::FuseCeiling, Subject::DeviceCeiling];
    /// Those that are mounted and have files with names.
    pub const MOUNTED: [Subject; 3] = [Subject::Gpunvme, Subject::Ext4, Subject::FuseCeiling];

    /// The head of its column.
    pub fn name(self) -> &'static str {
        match self {
            Subject::Gpunvme => "gpunvme",
            Subject::Ioctl => "ioctl",
            Subject::Ext4 => "ext4",
            Subject::FuseCeiling => "FUSE ceiling",
            Subject::DeviceCeiling => "device ceiling",
        }
    }
}

/// All subjects, ready. Dropping it unmounts and removes everything.
pub struct Subjects {
    gpunvme: Mounted,
    ext4: Ext4,
    memfs: MemFs,
    device: Arc<dyn BlockDevice>,
    scratch: TempDir,
}

impl Subjects {
    /// Makes the images and mounts them. Each has room for `len` bytes of data.
    pub fn set_up(len: u64) -> Result<Self, Box<dyn Error>> {
        let image = Image::blank(len + SPARE);
        write_out(&image.path(), len + SPARE)?;
        let output = image.mkfs(&[]);
        if !output.status.success() {
            return Err(text(&output).into());
        }
        let scratch = gpunvme_tests::scratch_dir();
        let bare = scratch.path().join("bare");
        write_out(&bare, len)?;
        let device = gpunvme_blockdev::open(bare.to_str().ok_or("a scratch path that is not UTF-8")?, OpenMode::ReadWrite)?;
        Ok(Self {
            gpunvme: image.mount(),
            ext4: Ext4::set_up(scratch.path(), len + SPARE)?,
            memfs: MemFs::set_up(scratch.path())?,
            device,
            scratch,
        })
    }

    /// The folder that holds the images.
    pub fn scratch(&self) -> &Path {
        self.scratch.path()
    }

    /// Where a subject that has files is mounted.
    pub fn root(&self, subject: Subject) -> PathBuf {
        match subject {
            Subject::Gpunvme | Subject::Ioctl => self.gpunvme.root(),
            Subject::Ext4 => self.ext4.root.clone(),
            Subject::FuseCeiling => self.memfs.root.clone(),
            Subject::DeviceCeiling => unreachable!("the bare backing has no files"),
        }
    }

    /// The bare backing.
    pub fn device(&self) -> &Arc<dyn BlockDevice> {
        &self.device
    }
}

/// Makes a file whose blocks are all allocated and written, so that no subject pays for that.
fn write_out(path: &Path, len: u64) -> std::io::Result<()> {
    let mut file = File::create(path)?;
    let zeros = vec![0; 4 << 20];
    let mut left = len;
    while left > 0 {
        let step = left.min(zeros.len() as u64);
        file.write_all(&zeros[..step as usize])?;
        left -= step;
    }
    file.sync_all()
}

/// ext4 on a loop device that bypasses the page cache below it.
struct Ext4 {
    root: PathBuf,
    device: String,
}

impl Ext4 {
    fn set_up(scratch: &Path, len: u64) -> Result<Self, Box<dyn Error>> {
        let image = scratch.join("ext4");
        write_out(&image, len)?;
        let device = run(Command::new("losetup").args(["--find", "--show", "--direct-io=on"]).arg(&image))?.trim().to_owned();
        let ext4 = Self { root: scratch.join("ext4.mnt"), device };
        // Nothing is put off to after the mount, and the blocks under it stay allocated.
        let now = "lazy_itable_init=0,lazy_journal_init=0,nodiscard";
        run(Command::new("mkfs.ext4").args(["-q", "-E", now, &ext4.device]))?;
        fs::create_dir(&ext4.root)?;
        run(Command::new("mount").arg(&ext4.device).arg(&ext4.root))?;
        Ok(ext4)
    }
}

impl Drop for Ext4 {
    fn drop(&mut self) {
        if is_mounted(&self.root) {
            let _ = Command::new("umount").arg(&self.root).status();
        }
        let _ = Command::new("losetup").args(["--detach", &self.device]).status();
    }
}

/// The filesystem in memory.
struct MemFs {
    root: PathBuf,
    process: Child,
}

impl MemFs {
    fn set_up(scratch: &Path) -> Result<Self, Box<dyn Error>> {
        let root = scratch.join("memfs");
        fs::create_dir(&root)?;
        let program = std::env::current_exe()?.with_file_name("memfs");
        let process = Command::new(program).arg(&root).stdin(Stdio::null()).spawn()?;
        let memfs = Self { root, process };
        let start = Instant::now();
        while !is_mounted(&memfs.root) {
            if start.elapsed() > Duration::from_secs(10) {
                return Err("memfs does not mount".into());
            }
            std::thread::sleep(Duration::from_millis(5));
        }
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

fn run(command: &mut Command) -> Result<String, Box<dyn Error>> {
    let output = command.output()?;
    if output.status.success() {
        Ok(String::from_utf8(output.stdout)?)
    } else {
        Err(format!("{}: {}", command.get_program().to_string_lossy(), text(&output)).into())
    }
}
