//! Opens image files and kernel block devices and locks them, so that two users never share one.
use std::fs::File;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::fs::{FileType, Mode, OFlags, fcntl_getfl, fcntl_setfl};
use rustix::io::Errno;

use super::lock::lock_file;
use super::target::Kind;
use crate::{Error, OpenMode, Result};

/// How long a device that is in use may take to become free. The kernel lets go of the files of an
/// io_uring a moment after its process closed it or ended, so that mounting right after unmounting
/// would otherwise fail now and then.
const PATIENCE: Duration = Duration::from_millis(300);

/// Who claims a block device from other programs (`O_EXCL`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Claim {
    /// The open file.
    Ours,
    /// Something of the caller's that the kernel takes for its user: the superblock of a mount.
    Callers,
}

/// Opens an image file or a block device, with further flags, and locks it.
pub(crate) fn open_exclusively(
    name: &Arc<str>,
    path: &Path,
    mode: OpenMode,
    claim: Claim,
    flags: OFlags,
) -> Result<(File, Kind)> {
    let file_type = std::fs::metadata(path).map_err(|error| explain(name, mode, error.into_errno()))?.file_type();
    let kind = match file_type {
        file_type if file_type.is_block_device() => Kind::Block,
        file_type if file_type.is_file() => Kind::File,
        _ => return Err(Error::NotABlockDevice { device: name.clone() }),
    };
    let access = match mode {
        OpenMode::ReadOnly => OFlags::RDONLY,
        OpenMode::ReadWrite => OFlags::RDWR,
    };
    let exclusive = match (kind, claim) {
        (Kind::Block, Claim::Ours) => OFlags::EXCL,
        _ => OFlags::empty(),
    };
    // It may be another file by the time that it is opened: a FIFO would wait for its other end.
    let flags = access | exclusive | flags | OFlags::CLOEXEC | OFlags::NONBLOCK;
    let deadline = Instant::now() + PATIENCE;
    loop {
        let attempt = rustix::fs::open(path, flags, Mode::empty()).map(File::from).and_then(|file| {
            // Of a block device as well: a claim that is a superblock's ends with that, and its
            // daemon may be writing still.
            lock_file(&file, mode)?;
            Ok(file)
        });
        match attempt {
            Ok(file) => {
                let opened = rustix::fs::fstat(&file).map_err(|errno| explain(name, mode, errno))?;
                let expected = if kind == Kind::Block { FileType::BlockDevice } else { FileType::RegularFile };
                if FileType::from_raw_mode(opened.st_mode) != expected {
                    return Err(Error::NotABlockDevice { device: name.clone() });
                }
                // io_uring would take it for a file whose requests are not to wait.
                let flags = fcntl_getfl(&file).map_err(|errno| explain(name, mode, errno))?;
                fcntl_setfl(&file, flags - OFlags::NONBLOCK).map_err(|errno| explain(name, mode, errno))?;
                return Ok((file, kind));
            }
            // The lock answers AGAIN, the claim of a block device BUSY.
            Err(Errno::BUSY | Errno::AGAIN) if Instant::now() < deadline => std::thread::sleep(PATIENCE / 30),
            Err(errno) => return Err(explain(name, mode, errno)),
        }
    }
}

/// Says why a device could not be opened.
pub(super) fn explain(name: &Arc<str>, mode: OpenMode, errno: Errno) -> Error {
    let device = name.clone();
    match errno {
        Errno::NOENT | Errno::NOTDIR => Error::NotFound { device },
        Errno::BUSY | Errno::AGAIN => Error::Busy { device },
        Errno::ACCESS => Error::Permission { device },
        // A device cgroup's, or that of an immutable file.
        Errno::PERM => Error::Forbidden { device },
        Errno::ROFS if mode == OpenMode::ReadWrite => Error::ReadOnly { device },
        Errno::NODEV | Errno::NXIO | Errno::NOMEDIUM => Error::Gone { device },
        Errno::INVAL => no_direct_io(name),
        errno => Error::System { device, action: "opening it", errno: errno.raw_os_error() },
    }
}

pub(super) fn no_direct_io(name: &Arc<str>) -> Error {
    Error::Unsupported {
        device: name.clone(),
        reason: "its filesystem has no direct I/O (O_DIRECT); move the image to ext4, XFS, btrfs or a tmpfs of Linux 6.6 or \
                 newer, or attach it with `losetup --find --show` and name the loop device"
            .into(),
    }
}

/// The errno of an I/O error.
pub(super) trait IntoErrno {
    fn into_errno(self) -> Errno;
}

impl IntoErrno for std::io::Error {
    fn into_errno(self) -> Errno {
        Errno::from_io_error(&self).unwrap_or(Errno::IO)
    }
}
