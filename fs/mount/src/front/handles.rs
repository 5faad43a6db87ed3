//! Handles of open files. A handle is a number that the kernel keeps and sends with every request
//! on the file: the access that the file was opened for, and the number of the open. It names
//! nothing in the daemon's memory, so no value of it can do harm, and none has to be looked up.

use gpunvme_engine::data::Open;
use gpunvme_engine::error::FsError;

const READ: u64 = 1;
const WRITE: u64 = 2;
const SYNC: u64 = 4;
/// Bits below the number of the open.
const BITS: u32 = 3;

/// Handle of an open file: its access mode and the number of the open.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Handle(pub u64);

impl Handle {
    /// For a file opened with these flags of open(2). Which of its opens it is, [`Handle::of`]
    /// adds.
    pub fn new(flags: i32) -> Handle {
        let access = match flags & libc::O_ACCMODE {
            libc::O_WRONLY => WRITE,
            libc::O_RDWR => READ | WRITE,
            libc::O_RDONLY => READ,
            // Both bits: for ioctls, which may neither read nor write (open(2)).
            _ => 0,
        };
        // O_SYNC has the bit of O_DSYNC and one more.
        Handle(if flags & libc::O_DSYNC != 0 { access | SYNC } else { access })
    }

    /// The same for another open of the file.
    pub fn of(self, open: Open) -> Handle {
        Handle(self.0 & ((1 << BITS) - 1) | open.0 << BITS)
    }

    /// Which of the file's opens it is.
    pub fn open(self) -> Open {
        Open(self.0 >> BITS)
    }

    /// Fails unless the file is open for reading.
    pub fn readable(self) -> Result<(), FsError> {
        if self.0 & READ != 0 { Ok(()) } else { Err(FsError::BadAccess) }
    }

    /// Fails unless the file is open for writing.
    pub fn writable(self) -> Result<(), FsError> {
        if self.0 & WRITE != 0 { Ok(()) } else { Err(FsError::BadAccess) }
    }

    /// Whether what is written is durable before the answer (`O_DSYNC`, `O_SYNC`).
    pub fn is_sync(self) -> bool {
        self.0 & SYNC != 0
    }

    /// Whether it can be mapped shared and writable.
    pub fn is_mappable(self) -> bool {
        self.0 & (READ | WRITE) == READ | WRITE
    }
}
