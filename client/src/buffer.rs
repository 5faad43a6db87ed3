//! Memory that files are read into and written from.
//!
//! It guards the rule that makes plain slices of host memory sound: while the daemon may write to
//! a buffer it is borrowed mutably, and while it is registered it cannot be unmapped. Where the
//! daemon dies during a read the device may still write, though no call waits for it: the pages are
//! never handed back then.

use crate::connection::Connection;
use crate::error::{Error, Result};
use crate::sys::{self, Mapping};
use gpunvme_abi::{Reason, RegisterFlags, Route, Segment};
use rustix::fs::{MemfdFlags, Mode, OFlags, SealFlags};
use rustix::io::Errno;
use std::alloc::{Layout, handle_alloc_error};
use std::any::Any;
use std::fmt::Debug;
use std::ops::{Deref, DerefMut};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// What can be registered with a mount: [`Buffer`] or [`crate::DeviceMemory`].
pub trait Memory: sealed::Memory + Debug + Send + Sync + 'static {}

pub(crate) mod sealed {
    use super::{Any, Arc, BorrowedFd, Errno, RegisterFlags, Segment};

    /// What the daemon is told of memory.
    pub trait Memory {
        /// Whether it is host memory that is mapped here.
        const IS_MAPPED: bool = false;
        /// The descriptor that stands for it.
        fn descriptor(&self) -> BorrowedFd<'_>;
        /// Its length in bytes.
        fn length(&self) -> usize;
        /// If it is mapped: reads a range of a file to an offset in it, as pread(2) does, and
        /// returns how many bytes the file had. The caller sees to it that no other code uses that
        /// part of it meanwhile.
        fn read_file(&self, _: BorrowedFd<'_>, _file_offset: u64, _offset: usize, _len: usize) -> Result<usize, Errno> {
            Err(Errno::FAULT)
        }
        /// If it is mapped: puts other memory with the same bytes in the place of segments that
        /// the device may write to at any time from now on. No slice of it exists meanwhile.
        fn replace(&self, _: &[Segment]) {}
        /// What it is for.
        fn flags(&self) -> RegisterFlags {
            RegisterFlags::empty()
        }
    }

    /// Shared memory of any kind, as an operation of a ring names it.
    pub trait Target: std::fmt::Debug {
        /// Its name in the ioctls.
        fn id(&self) -> u64;
        /// Its length in bytes.
        fn length(&self) -> u64;
        /// The handle that keeps the memory registered.
        fn hold(&self) -> Arc<dyn Any + Send + Sync>;
    }
}

/// Host memory that can be registered: a memfd, sealed against shrinking and mapped here. It
/// dereferences to its bytes.
#[derive(Debug)]
pub struct Buffer {
    memory: OwnedFd,
    mapping: Mapping,
    /// Whether parts of the mapping are no longer those of the memfd.
    is_replaced: AtomicBool,
}

impl Buffer {
    /// Zeroed memory of `len` bytes, page aligned. It lies in huge pages of 2 MiB where the system
    /// has them, but for a rest of less than half of one; they come into being at once, each as a
    /// whole. Small ones do when they are touched, or when they are registered, which needs all of
    /// them.
    ///
    /// # Errors
    /// [`Error::Memory`] where there is not as much, or no descriptor for it; also for a `len` of
    /// 0.
    pub fn memfd(len: usize) -> Result<Buffer> {
        let make = || {
            if len as u64 > sys::memory() {
                return Err(Errno::NOMEM);
            }
            let memory = rustix::fs::memfd_create("gpunvme", MemfdFlags::ALLOW_SEALING | MemfdFlags::CLOEXEC)?;
            let room = Mapping::in_huge_pages(len);
            rustix::fs::ftruncate(&memory, room as u64)?;
            rustix::fs::fcntl_add_seals(&memory, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
            let mapping = Mapping::new(memory.as_fd(), room)?;
            mapping.use_huge_pages();
            Ok(Buffer { memory, mapping: mapping.shortened(len), is_replaced: AtomicBool::new(false) })
        };
        make().map_err(|errno| Error::Memory { len, errno })
    }

    /// A descriptor by which another process maps the same memory, to read it. What it reads
    /// changes under it when this process, or the daemon, writes to the buffer.
    ///
    /// No write is possible by it, and a process of another user than root and this one's cannot
    /// open the memory for writing through it: bytes that are borrowed here do not change.
    ///
    /// # Errors
    /// [`Error::Memory`] where there is no more descriptor, or no `/proc` to open the memory again;
    /// with `ESTALE` after [`Error::LostBuffer`].
    pub fn to_read(&self) -> Result<OwnedFd> {
        let open = || {
            if self.is_replaced.load(Ordering::Acquire) {
                return Err(Errno::STALE);
            }
            // A memfd is open to all users until its mode says otherwise.
            rustix::fs::fchmod(&self.memory, Mode::RUSR)?;
            let path = format!("/proc/self/fd/{}", self.memory.as_raw_fd());
            rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())
        };
        open().map_err(|errno| Error::Memory { len: self.mapping.len(), errno })
    }
}

impl Memory for Buffer {}

impl sealed::Memory for Buffer {
    const IS_MAPPED: bool = true;

    fn descriptor(&self) -> BorrowedFd<'_> {
        self.memory.as_fd()
    }

    fn length(&self) -> usize {
        self.mapping.len()
    }

    fn read_file(&self, file: BorrowedFd<'_>, file_offset: u64, offset: usize, len: usize) -> std::result::Result<usize, Errno> {
        self.mapping.read_file(file, file_offset, offset, len)
    }

    fn replace(&self, segments: &[Segment]) {
        self.is_replaced.store(true, Ordering::Release);
        for segment in segments {
            let start = segment.buffer_offset as usize;
            if self.mapping.replace(start..start + segment.len as usize).is_err() {
                // It can neither be handed back nor kept.
                handle_alloc_error(Layout::array::<u8>(segment.len as usize).unwrap_or(Layout::new::<u8>()));
            }
        }
    }
}

impl Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.mapping.bytes()
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        self.mapping.bytes_mut()
    }
}

/// How a buffer reached the daemon.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RegisteredBy {
    /// The daemon fetched it from this process (`pidfd_getfd`).
    Ioctl,
    /// It was sent over the registration socket, because the daemon may not fetch it.
    Socket,
}

/// Memory that a mount knows. Host memory it dereferences to its bytes. Dropping it unregisters
/// it.
#[derive(Debug)]
pub struct Registered<M = Buffer> {
    pub(crate) memory: M,
    pub(crate) id: u64,
    pub(crate) connection: Arc<Connection>,
    pub(crate) route: Route,
    pub(crate) reason: Reason,
    pub(crate) by: RegisteredBy,
    /// Whether the daemon died while it was read into.
    pub(crate) lost: AtomicBool,
}

impl<M> Registered<M> {
    /// The memory itself.
    pub fn memory(&self) -> &M {
        &self.memory
    }

    /// The route that transfers to and from it take.
    pub fn route(&self) -> Route {
        self.route
    }

    /// Why that is not `p2p`.
    pub fn reason(&self) -> Reason {
        self.reason
    }

    /// How it reached the daemon.
    pub fn registered_by(&self) -> RegisteredBy {
        self.by
    }

    /// Its name in the ioctls.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// The same memory for transfers that go on while it is used ([`crate::Ring`]): copied from
    /// and to, and no longer borrowed.
    pub fn share(self) -> Arc<Shared<M>> {
        Arc::new(Shared(self))
    }
}

impl<M: Memory> Registered<M> {
    /// The daemon died while it read to these segments: nothing uses this memory as registered any
    /// more, and what is mapped of it is replaced.
    pub(crate) fn lose(&self, segments: &[Segment]) {
        self.lost.store(true, Ordering::Release);
        self.memory.replace(segments);
    }

    /// Whether it can be used, and segments lie within it. It is asked of the mapping, because a
    /// slice of bytes that the device may be changing must not even exist.
    pub(crate) fn holds(&self, segments: &[Segment]) -> Result<()> {
        let len = self.memory.length();
        if self.lost.load(Ordering::Acquire) {
            return Err(Error::LostBuffer { len });
        }
        for (index, segment) in segments.iter().enumerate() {
            let end = segment.buffer_offset.saturating_add(segment.len);
            if end > len as u64 {
                return Err(Error::OutsideBuffer { segment: index as u32, end, len });
            }
        }
        Ok(())
    }
}

impl Registered {
    pub(crate) fn mapping(&self) -> &Mapping {
        &self.memory.mapping
    }
}

/// Registered memory that a transfer may be changing at any time. Bytes that are copied while it
/// does are old or new, in any mixture; keeping the two apart is the caller's business, as it is
/// with a file. Unregistered when its last handle is gone, those of transfers in flight included.
#[derive(Debug)]
pub struct Shared<M = Buffer>(Registered<M>);

impl<M: Memory> Shared<M> {
    /// The registered memory, for calls that use parts of it that no other call uses.
    pub(crate) fn registered(&self) -> &Registered<M> {
        &self.0
    }

    /// Its length in bytes.
    #[allow(clippy::len_without_is_empty)] // memory is never empty
    pub fn len(&self) -> usize {
        self.0.memory.length()
    }

    /// The route that transfers to and from it take.
    pub fn route(&self) -> Route {
        self.0.route
    }

    /// Its name in the ioctls.
    pub fn id(&self) -> u64 {
        self.0.id
    }

    pub(crate) fn memory(&self) -> &M {
        &self.0.memory
    }
}

impl Shared {
    /// Copies the bytes from `offset` on into `out`.
    ///
    /// # Panics
    /// Where they reach past the end.
    pub fn copy_out(&self, offset: usize, out: &mut [u8]) {
        self.0.mapping().copy_out(offset, out).expect("a copy reaches past the end of a buffer");
    }

    /// Copies `bytes` in, to `offset`.
    ///
    /// # Panics
    /// Where they reach past the end.
    pub fn copy_in(&self, offset: usize, bytes: &[u8]) {
        self.0.mapping().copy_in(offset, bytes).expect("a copy reaches past the end of a buffer");
    }
}

impl<M: Memory> sealed::Target for Arc<Shared<M>> {
    fn id(&self) -> u64 {
        self.0.id
    }

    fn length(&self) -> u64 {
        self.len() as u64
    }

    fn hold(&self) -> Arc<dyn Any + Send + Sync> {
        self.clone()
    }
}

impl Deref for Registered {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.memory
    }
}

impl DerefMut for Registered {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.memory
    }
}

impl<M> Drop for Registered<M> {
    fn drop(&mut self) {
        self.connection.unregister(self.id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each page that is touched first would cost the machine one that it needs.
    #[test]
    fn more_memory_than_there_is_is_refused_at_once() {
        let refused = Buffer::memfd(64 << 40).unwrap_err();
        assert!(matches!(refused, Error::Memory { len, errno: Errno::NOMEM } if len == 64 << 40), "{refused}");
    }
}
