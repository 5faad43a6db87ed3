//! One error type for every backend. A message names the device and the way out; [`Error::errno`] is what a filesystem
//! answers its caller with.
use std::sync::Arc;

use crate::Op;

/// What the operations of this crate return.
pub type Result<T> = std::result::Result<T, Error>;

/// Why an operation on a device or a region failed. Cheap to clone: one failure may be told to many waiters.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Somebody else holds the device.
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
    /// The device, or the way it was opened, allows no writing.
    #[error("{device}: is read-only; clear its write protection or remount its filesystem writable, and open it for writing")]
    ReadOnly {
        /// The DEVICE string.
        device: Arc<str>,
    },
    /// The path is neither a block device nor a regular file.
    #[error("{device}: is neither a block device nor a regular file; name a namespace such as /dev/nvme0n1, or an image file")]
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
}

impl Error {
    /// The errno that a caller of a filesystem operation gets for this error.
    pub fn errno(&self) -> i32 {
        match self {
            Error::Busy { .. } => libc::EBUSY,
            Error::NotFound { .. } => libc::ENOENT,
            Error::Permission { .. } => libc::EACCES,
            Error::ReadOnly { .. } => libc::EROFS,
            Error::NotABlockDevice { .. } => libc::ENOTBLK,
            Error::Unsupported { .. } => libc::EOPNOTSUPP,
            Error::Gone { .. } => libc::ENODEV,
            Error::Alignment { .. } | Error::SpanLength { .. } | Error::RegionRange { .. } => libc::EINVAL,
            Error::OutOfRange { .. } => libc::ENXIO,
            Error::Io { errno, .. } | Error::System { errno, .. } | Error::Memory { errno, .. } => *errno,
            Error::RegionReadOnly | Error::RegionShrunk => libc::EFAULT,
        }
    }
}
