//! Errors of the filesystem, and the one place where they become errno values for the kernel.

use std::path::PathBuf;

use gpunvme_blockdev as blockdev;
use gpunvme_layout::Corrupt;

/// Why an operation on the filesystem failed.
#[derive(Debug, Clone, thiserror::Error)]
pub enum FsError {
    /// No such file, directory or attribute holder.
    #[error("no such file or directory")]
    NotFound,
    /// The name is taken.
    #[error("file exists")]
    Exists,
    /// A directory was needed.
    #[error("not a directory")]
    NotDirectory,
    /// Anything but a directory was needed.
    #[error("is a directory")]
    IsDirectory,
    /// The directory still has entries.
    #[error("directory not empty")]
    NotEmpty,
    /// No space is left; deleting makes room.
    #[error("no space left on the volume")]
    NoSpace,
    /// The name has more than 255 bytes.
    #[error("file name too long")]
    NameTooLong,
    /// An argument is impossible.
    #[error("invalid argument: {0}")]
    Invalid(&'static str),
    /// The operation is not allowed on such a file.
    #[error("operation not permitted: {0}")]
    NotPermitted(&'static str),
    /// The open file's access mode does not allow it.
    #[error("file is not open for that access")]
    BadAccess,
    /// The volume is mounted read-only.
    #[error("volume is read-only")]
    ReadOnly,
    /// The inode has as many names as it can have.
    #[error("too many links")]
    TooManyLinks,
    /// No such extended attribute, or no data or hole behind the offset.
    #[error("no data available")]
    NoData,
    /// The offset lies beyond the end of the file.
    #[error("offset is beyond the end of the file")]
    BeyondEnd,
    /// The buffer is too small for the value.
    #[error("value does not fit the buffer")]
    Range,
    /// The value is larger than the filesystem stores.
    #[error("value is too large")]
    TooBig,
    /// The file would be larger than the filesystem allows.
    #[error("file too large")]
    FileTooLarge,
    /// A device has no command to be told of free blocks.
    #[error("{device} has no discard: it cannot be told which blocks are free")]
    NoDiscard {
        /// The device.
        device: String,
    },
    /// The volume cannot become larger.
    #[error("{device}: {why}")]
    CannotGrow {
        /// The device.
        device: String,
        /// What stands in the way, and the way out.
        why: String,
    },
    /// The filesystem does not do that.
    #[error("operation not supported")]
    NotSupported,
    /// The image is damaged.
    #[error("damaged volume: {0}; unmount it and run fsck.gpunvme")]
    Corrupt(#[from] Corrupt),
    /// The operation would change more blocks of metadata than one may. It has changed nothing.
    #[error("the operation would change too many blocks of metadata at once")]
    TooManyBlocks,
    /// What a check cannot keep in memory cannot be kept in temporary files either.
    #[error(
        "{}: a temporary file could not be {action}: {}; {}, or give fsck.gpunvme more --memory",
        directory.display(),
        std::io::Error::from_raw_os_error(*errno),
        way_out(*errno)
    )]
    Temporary {
        /// Where temporary files go.
        directory: PathBuf,
        /// What was tried.
        action: &'static str,
        /// The kernel's error number.
        errno: i32,
    },
    /// The caller cancelled the operation.
    #[error("cancelled")]
    Cancelled,
    /// The device failed.
    #[error(transparent)]
    Device(#[from] blockdev::Error),
    /// Data was lost on its way to the device, and no caller asked in time to be told.
    #[error("data of {files} files could not be written back and is lost; the log names them")]
    Lost {
        /// How many files.
        files: usize,
    },
    /// An earlier failure of the device stopped all writing.
    #[error("volume went read-only after a failed write of its metadata: {0}; unmount it, repair the device, mount it again")]
    Failed(String),
    /// The superblock or an anchor on the device is not the one that this mount read or wrote.
    #[error(
        "{device} was formatted, mounted or repaired elsewhere while it was mounted here: nothing more is written; unmount both, see \
         with fsck.gpunvme -n what the device holds, and mount it once"
    )]
    Taken {
        /// The device.
        device: String,
    },
}

/// What helps where a temporary file could not be had.
fn way_out(errno: i32) -> &'static str {
    match errno {
        libc::ENOSPC | libc::EDQUOT | libc::EFBIG => "name a directory with more room in TMPDIR",
        libc::EMFILE | libc::ENFILE => "let more files be open",
        _ => "name another directory in TMPDIR",
    }
}

impl FsError {
    /// The errno value that the kernel gets.
    pub fn errno(&self) -> i32 {
        match self {
            FsError::NotFound => libc::ENOENT,
            FsError::Exists => libc::EEXIST,
            FsError::NotDirectory => libc::ENOTDIR,
            FsError::IsDirectory => libc::EISDIR,
            FsError::NotEmpty => libc::ENOTEMPTY,
            FsError::NoSpace => libc::ENOSPC,
            FsError::NameTooLong => libc::ENAMETOOLONG,
            FsError::Invalid(_) | FsError::CannotGrow { .. } => libc::EINVAL,
            FsError::NotPermitted(_) => libc::EPERM,
            FsError::BadAccess => libc::EBADF,
            FsError::ReadOnly => libc::EROFS,
            FsError::TooManyLinks => libc::EMLINK,
            FsError::NoData => libc::ENODATA,
            FsError::BeyondEnd => libc::ENXIO,
            FsError::Range => libc::ERANGE,
            FsError::TooBig => libc::E2BIG,
            FsError::FileTooLarge => libc::EFBIG,
            FsError::NotSupported | FsError::NoDiscard { .. } => libc::EOPNOTSUPP,
            FsError::Corrupt(_) => libc::EUCLEAN,
            FsError::Cancelled => libc::EINTR,
            FsError::Temporary { errno, .. } => *errno,
            FsError::Device(_) | FsError::Lost { .. } | FsError::TooManyBlocks => libc::EIO,
            FsError::Failed(_) | FsError::Taken { .. } => libc::EROFS,
        }
    }
}

/// Condition that an operation has to wait for before it can go on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stall {
    /// A metadata block that is not in memory.
    Load {
        /// Its address.
        address: u64,
    },
    /// Room in the running transaction: the journal has to be written first.
    Commit,
    /// Blocks that were freed, but may not be reused yet.
    Reuse,
    /// Chunks of metadata that emptied: a checkpoint gives them back to all uses.
    Checkpoint,
    /// What earlier mounts left to be freed.
    Orphans,
    /// Room in the write buffer.
    Memory,
    /// Nodes of the tree that are promised to writes which are not over.
    Nodes,
    /// Content of a block of a file, of which only a part is written.
    Page {
        /// The file.
        ino: u64,
        /// The block of the file.
        block: u64,
    },
    /// The file's data on its way to the device.
    File {
        /// The file.
        ino: u64,
    },
    /// The end of the writes of the file that are in flight. The file is quiesced meanwhile, and
    /// until the operation is over: further direct writes might begin for ever.
    InFlight {
        /// The file.
        ino: u64,
    },
    /// The end of an operation that quiesces the file.
    Quiesced {
        /// The file.
        ino: u64,
    },
}

/// Why an attempt of an operation ended: it failed, or it has to wait. An attempt that ends so has
/// changed nothing.
#[derive(Debug, Clone, thiserror::Error)]
pub enum Fail {
    /// It has to wait; the caller resolves the stall and tries again.
    #[error("has to wait: {0:?}")]
    Stall(Stall),
    /// It failed.
    #[error(transparent)]
    Error(#[from] FsError),
}

impl From<Corrupt> for Fail {
    fn from(error: Corrupt) -> Fail {
        Fail::Error(error.into())
    }
}

/// Result of an attempt.
pub type Attempt<T> = Result<T, Fail>;
