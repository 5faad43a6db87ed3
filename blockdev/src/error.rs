//! The error type of all backends. A message names the device and what to do about it;
//! [`Error::errno`] is the errno that a filesystem answers its caller with.
use std::sync::Arc;

use crate::Op;
use crate::spec::Status;

/// What the operations of this crate return.
pub type Result<T> = std::result::Result<T, Error>;

/// Why an operation on a device or a region failed. Cheap to clone: one failure may be told to
/// many waiters.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Another process, or another mount, holds the device.
    #[error("{device}: in use by another gpunvme process, or mounted; unmount it or stop that process first")]
    Busy {
        /// The DEVICE string.
        device: Arc<str>,
    },
    /// There is no such device.
    #[error("{device}: no such file or device")]
    NotFound {
        /// The DEVICE string.
        device: Arc<str>,
    },
    /// The caller may not open the device.
    #[error("{device}: permission denied; run as root, or as a user who may open it for the access asked for")]
    Permission {
        /// The DEVICE string.
        device: Arc<str>,
    },
    /// The kernel refuses the device to every user of this process's surroundings.
    #[error(
        "{device}: the kernel refuses it to this process, also as root: a container may use the devices only that it was \
         started with (`--device {device}`), and nobody may write an immutable file (`lsattr`)"
    )]
    Forbidden {
        /// The DEVICE string.
        device: Arc<str>,
    },
    /// The caller may not open the device's VFIO group.
    #[error(
        "{device}: permission denied on /dev/vfio/{group}; run as root, give it to a user with `gpunvme-vfio bind --user`, or to a \
         container with `--device /dev/vfio/{group}`"
    )]
    VfioPermission {
        /// The DEVICE string.
        device: Arc<str>,
        /// The IOMMU group's number.
        group: String,
    },
    /// More memory than the process may lock was to be mapped for DMA.
    #[error(
        "{device}: cannot lock {len} bytes of memory for DMA: the process may lock {limit} bytes in all; raise it with ulimit -l, \
         or LimitMEMLOCK= of its systemd unit"
    )]
    LockedMemory {
        /// The DEVICE string.
        device: Arc<str>,
        /// The bytes concerned.
        len: usize,
        /// RLIMIT_MEMLOCK in bytes.
        limit: u64,
    },
    /// The device, or the way it was opened, allows no writing.
    #[error(
        "{device}: is read-only; clear its write protection, or remount the filesystem writable that it lies on (a mount with -o ro needs neither)"
    )]
    ReadOnly {
        /// The DEVICE string.
        device: Arc<str>,
    },
    /// The path is neither a block device nor a regular file.
    #[error("{device}: is neither a block device nor a regular file; name a namespace such as /dev/nvme1n1, or an image file")]
    NotABlockDevice {
        /// The DEVICE string.
        device: Arc<str>,
    },
    /// This device, kernel or build cannot do what was asked for.
    #[error("{device}: {reason}")]
    Unsupported {
        /// The DEVICE string.
        device: Arc<str>,
        /// What is missing, and what to do instead.
        reason: String,
    },
    /// A member of a stripe failed a part of a request.
    #[error("{error}")]
    Member {
        /// Where the part lies on the stripe, in bytes.
        offset: u64,
        /// The member's error, which names it.
        error: Arc<Error>,
    },
    /// The device went away while it was in use.
    #[error("{device}: the device is gone; check its connection and the kernel log, then mount again")]
    Gone {
        /// The DEVICE string.
        device: Arc<str>,
    },
    /// A request breaks the alignment that [`crate::Geometry`] states.
    #[error("{device}: {op} of {len} bytes at {offset}: {what} must be multiples of {required} bytes")]
    Alignment {
        /// The DEVICE string.
        device: Arc<str>,
        /// The operation.
        op: Op,
        /// Its first byte.
        offset: u64,
        /// Its length in bytes.
        len: u64,
        /// Which numbers are misaligned.
        what: &'static str,
        /// The alignment in bytes.
        required: u32,
    },
    /// A request reaches beyond the device's end.
    #[error("{device}: {op} of {len} bytes at {offset} reaches beyond the end at {size}")]
    OutOfRange {
        /// The DEVICE string.
        device: Arc<str>,
        /// The operation.
        op: Op,
        /// Its first byte.
        offset: u64,
        /// Its length in bytes.
        len: u64,
        /// The device's length in bytes.
        size: u64,
    },
    /// A request whose spans do not add up to its length.
    #[error("{device}: {op} of {len} bytes at {offset} came with {spanned} bytes of memory")]
    SpanLength {
        /// The DEVICE string.
        device: Arc<str>,
        /// The operation.
        op: Op,
        /// Its first byte.
        offset: u64,
        /// Its length in bytes.
        len: u64,
        /// What its spans add up to.
        spanned: u64,
    },
    /// The device, or the kernel below it, failed a command.
    #[error("{device}: {op} of {len} bytes at {offset}: {}", std::io::Error::from_raw_os_error(*errno))]
    Io {
        /// The DEVICE string.
        device: Arc<str>,
        /// The operation.
        op: Op,
        /// Its first byte.
        offset: u64,
        /// Its length in bytes.
        len: u64,
        /// The kernel's error number.
        errno: i32,
    },
    /// The NVMe controller failed a command of a request.
    #[error("{device}: {op} of {len} bytes at {offset} (opcode {opcode:02x}h, LBA {lba}): {status}")]
    Command {
        /// The DEVICE string.
        device: Arc<str>,
        /// The operation.
        op: Op,
        /// First byte of the command, which may be a part of the request.
        offset: u64,
        /// The command's length in bytes.
        len: u64,
        /// The command's opcode in the NVM command set.
        opcode: u8,
        /// The command's first logical block.
        lba: u64,
        /// What the controller said.
        status: Status,
    },
    /// An NVMe command did not come back, nor did it after the controller had been reset.
    #[error("{device}: {op} of {len} bytes at {offset} did not complete, also not after the controller was reset")]
    TimedOut {
        /// The DEVICE string.
        device: Arc<str>,
        /// The operation.
        op: Op,
        /// First byte of the command.
        offset: u64,
        /// The command's length in bytes.
        len: u64,
    },
    /// The NVMe controller failed an admin command.
    #[error("{device}: {command}: {status}")]
    Admin {
        /// The DEVICE string.
        device: Arc<str>,
        /// The command.
        command: &'static str,
        /// What the controller said.
        status: Status,
    },
    /// The NVMe controller is unusable.
    #[error("{device}: the controller {what}; reset it with `gpunvme nvme {device} reset`, or power-cycle it")]
    Controller {
        /// The DEVICE string.
        device: Arc<str>,
        /// What it does or does not do.
        what: &'static str,
    },
    /// A system call that sets up or runs a device failed.
    #[error("{device}: {action}: {}", std::io::Error::from_raw_os_error(*errno))]
    System {
        /// The DEVICE string.
        device: Arc<str>,
        /// What was tried.
        action: &'static str,
        /// The kernel's error number.
        errno: i32,
    },
    /// Memory could not be had, mapped or copied.
    #[error("{action} of {len} bytes of memory: {}", std::io::Error::from_raw_os_error(*errno))]
    Memory {
        /// What was tried.
        action: &'static str,
        /// The bytes concerned.
        len: usize,
        /// The kernel's error number.
        errno: i32,
    },
    /// A range beyond the end of its region.
    #[error("{len} bytes at {offset} reach beyond the end of a region of {region} bytes")]
    RegionRange {
        /// First byte.
        offset: usize,
        /// Length in bytes.
        len: usize,
        /// The region's length in bytes.
        region: usize,
    },
    /// A write into a region that was registered for reading only.
    #[error("the region was mapped for reading only; register its file descriptor as writable")]
    RegionReadOnly,
    /// The file behind a region was cut shorter than the region.
    #[error("the memory behind the region was truncated by its owner; seal it with F_SEAL_SHRINK before registering it")]
    RegionShrunk,
    /// Pages of the file behind a region do not exist.
    #[error(
        "the memory behind the region has pages that do not exist; fallocate(2) it before registering it, and punch no holes"
    )]
    RegionSparse,
}

impl Error {
    /// The place that an error of a request is about, in bytes of the device that it was submitted
    /// to.
    pub fn offset(&self) -> Option<u64> {
        match self {
            Error::Io { offset, .. }
            | Error::Command { offset, .. }
            | Error::TimedOut { offset, .. }
            | Error::Member { offset, .. } => Some(*offset),
            _ => None,
        }
    }

    /// The errno that the caller of a filesystem operation gets for this error (errno(3)).
    pub fn errno(&self) -> i32 {
        match self {
            Error::Member { error, .. } => error.errno(),
            Error::Busy { .. } => libc::EBUSY,
            Error::NotFound { .. } => libc::ENOENT,
            Error::Permission { .. } | Error::VfioPermission { .. } => libc::EACCES,
            Error::Forbidden { .. } => libc::EPERM,
            Error::ReadOnly { .. } => libc::EROFS,
            Error::NotABlockDevice { .. } => libc::ENOTBLK,
            Error::Unsupported { .. } => libc::EOPNOTSUPP,
            Error::Gone { .. } => libc::ENODEV,
            Error::LockedMemory { .. } => libc::ENOMEM,
            Error::Alignment { .. } | Error::SpanLength { .. } | Error::RegionRange { .. } => libc::EINVAL,
            Error::OutOfRange { .. } => libc::ENXIO,
            Error::Command { status, .. } | Error::Admin { status, .. } => status.errno(),
            Error::TimedOut { .. } | Error::Controller { .. } => libc::EIO,
            Error::Io { errno, .. } | Error::System { errno, .. } | Error::Memory { errno, .. } => *errno,
            Error::RegionReadOnly | Error::RegionShrunk | Error::RegionSparse => libc::EFAULT,
        }
    }
}
