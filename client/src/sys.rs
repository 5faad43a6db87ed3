//! The only system calls here that need `unsafe`: the ioctl, and the mapping of a buffer and its place.
//!
//! It guards the kernel's view of our memory: what a call may write to is always owned, exactly as long as the kernel thinks.

use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::{self, NonNull};
use std::sync::atomic::AtomicU32;

/// An ioctl of ours. Its number says how many bytes the kernel copies in and out.
///
/// Only for regular files and directories: on a device the number may mean anything.
///
/// # Panics
/// When `argument` has another length than `request` says.
pub(crate) fn ioctl(file: BorrowedFd<'_>, request: u32, argument: &mut [u8]) -> Result<(), Errno> {
    assert_eq!(argument.len(), (request >> 16) as usize & 0x3fff, "the request number carries the size of the argument");
    loop {
        // SAFETY: a FUSE server's ioctl reads and writes `_IOC_SIZE(request)` bytes (fs/fuse/ioctl.c), which is the slice's length; other filesystems
        // know no number of ours, and refuse it without touching the argument.
        let result = unsafe { libc::ioctl(file.as_raw_fd(), request.into(), argument.as_mut_ptr()) };
        if result >= 0 {
            return Ok(());
        }
        match Errno::from_io_error(&std::io::Error::last_os_error()) {
            Some(Errno::INTR) => {}
            errno => return Err(errno.unwrap_or(Errno::INVAL)),
        }
    }
}

/// A shared, writable mapping of a file, until it is dropped.
#[derive(Debug)]
pub(crate) struct Mapping {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: a mapping is an address range that belongs to the whole process; nothing in it is tied to a thread.
unsafe impl Send for Mapping {}
// SAFETY: through `&Mapping` bytes are read, or copied in where nobody borrows them.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps the first `len` bytes of a memfd that is at least as long, and cannot become shorter, or of a device's memory.
    pub fn new(memory: BorrowedFd<'_>, len: usize) -> Result<Mapping, Errno> {
        // SAFETY: a new mapping at an address that the kernel chooses overlaps nothing.
        let base =
            unsafe { rustix::mm::mmap(ptr::null_mut(), len, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED, memory, 0) }?;
        Ok(Mapping { base: NonNull::new(base.cast()).ok_or(Errno::NOMEM)?, len })
    }

    /// Its length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Where it begins; a multiple of the page size.
    pub fn as_ptr(&self) -> *mut u8 {
        self.base.as_ptr()
    }

    /// Copies bytes out of memory that is not ours alone; `None` where they do not lie in it.
    pub fn copy_out(&self, offset: usize, out: &mut [u8]) -> Option<()> {
        let from = self.at(offset, out.len())?;
        // SAFETY: the source lies in the mapping, and `out` is ours alone. Whatever others do to the source meanwhile, its bytes make u8s.
        unsafe { std::ptr::copy_nonoverlapping(from, out.as_mut_ptr(), out.len()) }
        Some(())
    }

    /// Copies bytes into memory that is not ours alone; `None` where they do not fit.
    pub fn copy_in(&self, offset: usize, data: &[u8]) -> Option<()> {
        let to = self.at(offset, data.len())?;
        // SAFETY: the target lies in the mapping, of which nobody holds a slice (`crate::device_memory`, `crate::Shared`).
        unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), to, data.len()) }
        Some(())
    }

    /// A word that others change too, of memory that nobody borrows as bytes.
    ///
    /// # Panics
    /// Where it is not aligned, or not in the mapping.
    pub fn word(&self, offset: usize) -> &AtomicU32 {
        assert!(offset.is_multiple_of(4) && offset + 4 <= self.len, "no word at {offset}");
        // SAFETY: it lies in the mapping, aligned, and lives as long; whoever shares it accesses it 32 bits at a time.
        unsafe { AtomicU32::from_ptr(self.base.as_ptr().add(offset).cast()) }
    }

    /// Has pages that do not exist yet come from a NUMA node, as long as it has any. Without NUMA, or where that is not allowed, nothing changes.
    pub fn prefer_node(&self, node: u32) {
        let Some(mask) = 1u64.checked_shl(node) else { return };
        let bits = u64::BITS as usize + 1; // the kernel takes one off (mm/mempolicy.c, get_nodes)
        // SAFETY: the range is ours, and its contents stay as they are; the kernel reads one word of the mask.
        unsafe { libc::syscall(libc::SYS_mbind, self.base.as_ptr(), self.len, libc::MPOL_PREFERRED, &mask, bits, 0) };
    }

    fn at(&self, offset: usize, len: usize) -> Option<*mut u8> {
        let inside = offset.checked_add(len).is_some_and(|end| end <= self.len);
        inside.then(|| self.base.as_ptr().wrapping_add(offset))
    }

    /// Its bytes, if it is a memfd's.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: the range is mapped, and its pages exist, because the memfd is sealed against shrinking. The memfd is known to this object and to the daemon
        // only, and the daemon writes to it only while a READ is waited for, for which the buffer is borrowed mutably.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr(), self.len) }
    }

    /// Its bytes, to be changed.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `bytes`; and `&mut self` excludes every other slice of it.
        unsafe { std::slice::from_raw_parts_mut(self.base.as_ptr(), self.len) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: this is the range that was mapped, and no slice of it can outlive the object.
        let unmapped = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.len) };
        debug_assert!(unmapped.is_ok(), "a mapping of ours was unmapped by somebody else");
    }
}
