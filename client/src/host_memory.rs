//! Host memory that the application has already: a memfd of its own, as it shares it with other
//! processes or maps it itself.
//!
//! It guards the difference to [`crate::Buffer`]: nothing of it is ever borrowed as bytes here,
//! because others that have it mapped change it at any time.

use crate::buffer::{Memory, sealed};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// The application's own memory, by the memfd behind it.
///
/// Where the daemon dies during a read, the device may write to the segments for as long as it
/// takes, also after the call: nothing here can keep it from that.
///
/// ```no_run
/// use gpunvme::{File, HostMemory, Mount, Segment};
/// use rustix::fs::{MemfdFlags, SealFlags};
///
/// let memory = rustix::fs::memfd_create("frames", MemfdFlags::ALLOW_SEALING | MemfdFlags::CLOEXEC)?;
/// rustix::fs::ftruncate(&memory, 64 << 20)?;
/// rustix::fs::fcntl_add_seals(&memory, SealFlags::SHRINK)?; // it cannot vanish under a transfer
/// let mut buffer = Mount::open("/data")?.register(HostMemory::memfd(memory.try_clone()?, 64 << 20))?;
/// File::open("/data/frames")?.read(&mut buffer, &[Segment { file_offset: 0, buffer_offset: 0, len: 64 << 20 }])?;
/// // The bytes are in the memfd, and in each mapping of it.
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct HostMemory {
    memory: OwnedFd,
    len: usize,
}

impl HostMemory {
    /// The first `len` bytes of a memfd of ordinary pages, open for reading and writing, with
    /// `F_SEAL_SHRINK`. Nothing is checked before [`crate::Mount::register`], which also brings
    /// pages into existence that do not exist yet.
    pub fn memfd(memory: OwnedFd, len: usize) -> HostMemory {
        HostMemory { memory, len }
    }
}

impl Memory for HostMemory {}

impl sealed::Memory for HostMemory {
    fn descriptor(&self) -> BorrowedFd<'_> {
        self.memory.as_fd()
    }

    fn length(&self) -> usize {
        self.len
    }
}
