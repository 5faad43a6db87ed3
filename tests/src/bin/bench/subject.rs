//! The subjects that are measured: set up together, each on its own image on the same backing, and
//! taken down together.

use std::error::Error;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use gpunvme_blockdev::{BlockDevice, OpenMode};
use gpunvme_tests::mounted::{Image, Mounted, text};
use gpunvme_tests::peers::{Kind, LoopMounted, MemFs, write_whole};
use tempfile::TempDir;

use crate::Scale;

/// Whatever a column of a table stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Subject {
    Gpunvme,
    Ioctl,
    Ring,
    Ext4,
    FuseCeiling,
    DeviceCeiling,
    FuseAndDevice,
}

impl Subject {
    pub const ALL: [Subject; 7] = [
        Subject::Gpunvme,
        Subject::Ioctl,
        Subject::Ring,
        Subject::Ext4,
        Subject::FuseCeiling,
        Subject::DeviceCeiling,
        Subject::FuseAndDevice,
    ];
    /// Those whose names and trees are worth measuring.
    pub const MOUNTED: [Subject; 3] = [Subject::Gpunvme, Subject::Ext4, Subject::FuseCeiling];

    /// Whether its files are read and written through the page cache, where that is not asked to
    /// keep out.
    pub fn is_cached(self) -> bool {
        self == Subject::FuseAndDevice || Subject::MOUNTED.contains(&self)
    }

    /// The head of its column.
    pub fn name(self) -> &'static str {
        match self {
            Subject::Gpunvme => "gpunvme",
            Subject::Ioctl => "ioctl",
            Subject::Ring => "ring",
            Subject::Ext4 => "ext4",
            Subject::FuseCeiling => "FUSE",
            Subject::DeviceCeiling => "device",
            Subject::FuseAndDevice => "both",
        }
    }
}

/// All subjects, ready. Dropping it unmounts and removes everything.
pub struct Subjects {
    gpunvme: Mounted,
    ext4: LoopMounted,
    memfs: MemFs,
    memfs_on_device: MemFs,
    device: Arc<dyn BlockDevice>,
    scratch: TempDir,
}

impl Subjects {
    /// Makes the images and mounts them. Each has room for the files that data is read from and
    /// written to.
    pub fn set_up(scale: &Scale) -> Result<Self, Box<dyn Error>> {
        let files = *scale.threads.last().ok_or("no thread counts")?;
        let (len, spare) = (files as u64 * scale.file_len, scale.spare);
        let image = Image::blank(len + spare);
        write_whole(&image.path(), len + spare)?;
        let output = image.mkfs(&[]);
        if !output.status.success() {
            return Err(text(&output).into());
        }
        let scratch = gpunvme_tests::scratch_dir();
        let bare = scratch.path().join("bare");
        write_whole(&bare, len)?;
        let on_device = scratch.path().join("memfs-device");
        write_whole(&on_device, len)?;
        let ext4 = scratch.path().join("ext4");
        write_whole(&ext4, len + spare)?;
        let device = gpunvme_blockdev::open(bare.to_str().ok_or("a scratch path that is not UTF-8")?, OpenMode::ReadWrite)?;
        Ok(Self {
            gpunvme: image.mount(),
            ext4: LoopMounted::set_up(&ext4, Kind::Ext4)?,
            memfs: MemFs::set_up(scratch.path())?,
            memfs_on_device: MemFs::on_device(&on_device, scale.file_len)?,
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
            Subject::Gpunvme | Subject::Ioctl | Subject::Ring => self.gpunvme.root(),
            Subject::Ext4 => self.ext4.root.clone(),
            Subject::FuseCeiling => self.memfs.root.clone(),
            Subject::FuseAndDevice => self.memfs_on_device.root.clone(),
            Subject::DeviceCeiling => unreachable!("the bare backing has no files"),
        }
    }

    /// The bare backing.
    pub fn device(&self) -> &Arc<dyn BlockDevice> {
        &self.device
    }
}
