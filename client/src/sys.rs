//! The only system calls here that need `unsafe`: the ioctl, the mapping of a buffer and its NUMA
//! node, and the process that serves a socket.
//!
//! It guards the kernel's view of our memory: what a call may write to is always owned, exactly as
//! long as the kernel thinks.

use rustix::fs::FallocateFlags;
use rustix::io::{Errno, retry_on_intr};
use rustix::mm::{MapFlags, MremapFlags, ProtFlags};
use std::ops::Range;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
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
        // SAFETY: a FUSE server's ioctl reads and writes `_IOC_SIZE(request)` bytes
        // (fs/fuse/ioctl.c), which is the slice's length; other filesystems know no number of
        // ours, and refuse it without touching the argument.
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

/// Has all pages of a memfd come into being. A signal has the kernel take back what a call brought
/// about, so that one call for all of it might never end.
pub(crate) fn allocate(file: BorrowedFd<'_>, len: u64) -> Result<(), Errno> {
    const AT_ONCE: u64 = 16 << 20;
    for at in (0..len).step_by(AT_ONCE as usize) {
        retry_on_intr(|| rustix::fs::fallocate(file, FallocateFlags::empty(), at, AT_ONCE.min(len - at)))?;
    }
    Ok(())
}

/// Bytes of memory that the machine has.
pub(crate) fn memory() -> u64 {
    let info = rustix::system::sysinfo();
    info.totalram.saturating_mul(info.mem_unit.into())
}

/// Has the kernel write back its dirty pages of a range of a file, and waits for it; to the end of
/// the file where `len` is 0. Where there are none it costs a tenth of a microsecond.
pub(crate) fn write_back(file: BorrowedFd<'_>, offset: u64, len: u64) -> Result<(), Errno> {
    const ALL: libc::c_uint = libc::SYNC_FILE_RANGE_WAIT_BEFORE | libc::SYNC_FILE_RANGE_WRITE | libc::SYNC_FILE_RANGE_WAIT_AFTER;
    let (Ok(offset), Ok(len)) = (i64::try_from(offset), i64::try_from(len)) else { return Err(Errno::INVAL) };
    // SAFETY: it takes numbers only.
    let result = unsafe { libc::sync_file_range(file.as_raw_fd(), offset, len, ALL) };
    if result == 0 { Ok(()) } else { Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::INVAL)) }
}

/// How many bytes of a range of a file the page cache has, in whole pages. A process that neither
/// owns the file nor may write to it is told that it has all (mm/mincore.c, can_do_mincore).
pub(crate) fn resident(file: BorrowedFd<'_>, offset: u64, len: u64) -> Result<u64, Errno> {
    const AT_ONCE: u64 = 256 << 20;
    let page = rustix::param::page_size() as u64;
    let (mut at, end) = (offset / page * page, offset.saturating_add(len).next_multiple_of(page));
    let mut count = 0;
    while at < end {
        let part = AT_ONCE.min(end - at) as usize;
        let mut pages = vec![0u8; part / page as usize];
        // SAFETY: the kernel finds addresses that nothing uses, and no page is touched before they
        // are unmapped; there is a byte for each page.
        let result = unsafe {
            let base = rustix::mm::mmap(ptr::null_mut(), part, ProtFlags::READ, MapFlags::SHARED, file, at)?;
            let result = libc::mincore(base, part, pages.as_mut_ptr());
            let error = std::io::Error::last_os_error();
            rustix::mm::munmap(base, part)?;
            if result < 0 { Err(error) } else { Ok(()) }
        };
        result.map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::INVAL))?;
        count += pages.iter().filter(|page| **page & 1 != 0).count() as u64;
        at += part as u64;
    }
    Ok(count * page)
}

/// A pidfd of the process that listened for this connected Unix socket.
///
/// # Errors
/// `ENOPROTOOPT` before Linux 6.5.
pub(crate) fn listener(socket: BorrowedFd<'_>) -> Result<OwnedFd, Errno> {
    let mut number: libc::c_int = -1;
    let mut len = size_of::<libc::c_int>() as libc::socklen_t;
    let value = ptr::from_mut(&mut number).cast();
    // SAFETY: the kernel writes at most `len` bytes to the integer, which is that long.
    let result = unsafe { libc::getsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, libc::SO_PEERPIDFD, value, &mut len) };
    if result < 0 {
        return Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::INVAL));
    }
    // SAFETY: the kernel installed this descriptor for us just now (net/core/sock.c), and no other
    // code knows its number.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}

const HUGE_PAGE: usize = 2 << 20;

/// A shared, writable mapping of a file, until it is dropped.
#[derive(Debug)]
pub(crate) struct Mapping {
    base: NonNull<u8>,
    len: usize,
    /// Bytes that are mapped: `len`, or more.
    mapped: usize,
}

// SAFETY: a mapping is an address range that belongs to the whole process; nothing in it is tied
// to a thread.
unsafe impl Send for Mapping {}
// SAFETY: through `&Mapping` bytes are read, or copied in where no slice borrows them.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps the first `len` bytes of a memfd that is at least as long, and cannot become shorter,
    /// or of a device's memory. From 2 MiB on it is aligned to that, as huge pages have to be.
    pub fn new(memory: BorrowedFd<'_>, len: usize) -> Result<Mapping, Errno> {
        let access = ProtFlags::READ | ProtFlags::WRITE;
        let slack = if len < HUGE_PAGE { 0 } else { HUGE_PAGE };
        let reserved = len.checked_next_multiple_of(rustix::param::page_size()).and_then(|len| len.checked_add(slack));
        let reserved = reserved.filter(|reserved| *reserved > 0).ok_or(Errno::INVAL)?;
        // SAFETY: the address range is taken by a new mapping that overlaps nothing. The memory is
        // mapped over a part of it; the pages before and behind that part go, and nothing points
        // at any of them yet.
        let base = unsafe {
            let start =
                rustix::mm::mmap_anonymous(ptr::null_mut(), reserved, ProtFlags::empty(), MapFlags::PRIVATE)?.cast::<u8>();
            let lead = if slack > 0 { start.align_offset(HUGE_PAGE) } else { 0 };
            let mapped = rustix::mm::mmap(start.add(lead).cast(), len, access, MapFlags::SHARED | MapFlags::FIXED, memory, 0);
            if mapped.is_err() {
                rustix::mm::munmap(start.cast(), reserved)?;
            }
            let base = mapped?;
            if lead > 0 {
                rustix::mm::munmap(start.cast(), lead)?;
            }
            if slack > lead {
                rustix::mm::munmap(start.add(reserved - slack + lead).cast(), slack - lead)?;
            }
            base
        };
        Ok(Mapping { base: NonNull::new(base.cast()).ok_or(Errno::NOMEM)?, len, mapped: len })
    }

    /// How much memory is best had for `len` bytes: whole huge pages, of each of which at least
    /// half is used, and small ones for a rest of less.
    pub fn in_huge_pages(len: usize) -> usize {
        let whole = len.checked_next_multiple_of(HUGE_PAGE);
        whole.filter(|whole| whole - len <= HUGE_PAGE / 2).unwrap_or(len)
    }

    /// Only the first `len` bytes of it. The others stay mapped, for the sake of their page.
    pub fn shortened(mut self, len: usize) -> Mapping {
        assert!(len <= self.len, "{len} bytes of {}", self.len);
        self.len = len;
        self
    }

    /// Puts memory of a memfd that is not in use yet into huge pages where the system has them: a
    /// device's command then names few pieces of memory for many bytes, of which kernel and device
    /// take a limited number. All of the memory comes into being, but for what is left behind the
    /// last whole page.
    pub fn use_huge_pages(&self) {
        let whole = self.len - self.len % HUGE_PAGE;
        for at in (0..whole).step_by(HUGE_PAGE) {
            // SAFETY: the byte lies in the mapping, and is zero before and after. Of a range
            // without any page the kernel makes no huge one.
            unsafe { self.as_ptr().add(at).write_volatile(0) };
        }
        // The kernel passes over pages that are held for a moment, such as those in a processor's
        // list of new pages.
        for _ in 0..3 {
            // SAFETY: only where the bytes lie is changed, not what they are. Before Linux 6.1, or
            // where there is no memory in such pieces, small pages stay.
            let collapsed = whole == 0 || unsafe { libc::madvise(self.as_ptr().cast(), whole, libc::MADV_COLLAPSE) } == 0;
            if collapsed || std::io::Error::last_os_error().raw_os_error() != Some(libc::EAGAIN) {
                return;
            }
        }
    }

    /// Its length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Where it begins; a multiple of the page size.
    pub fn as_ptr(&self) -> *mut u8 {
        self.base.as_ptr()
    }

    /// Puts other memory with the same bytes in the place of the pages that a range touches: what
    /// still writes to the old ones reaches nothing that is seen here. What other threads store
    /// into them meanwhile may be lost.
    ///
    /// # Errors
    /// `ENOMEM`; then nothing was changed.
    ///
    /// # Panics
    /// Where the range is not in the mapping.
    pub fn replace(&self, range: Range<usize>) -> Result<(), Errno> {
        assert!(range.start <= range.end && range.end <= self.len, "{range:?} of {} bytes", self.len);
        let page = rustix::param::page_size();
        let start = range.start / page * page;
        let len = range.end.next_multiple_of(page) - start;
        if range.is_empty() {
            return Ok(());
        }
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: the pages lie in the mapping, and in the file: its last page exists as a whole.
        // They are copied to a mapping of as many that nothing else knows, which then takes their
        // place; callers see to it that no slice of them exists. Whatever writes to them while they
        // are copied, their bytes make u8s.
        unsafe {
            let old = self.base.as_ptr().add(start);
            let fresh = rustix::mm::mmap_anonymous(ptr::null_mut(), len, access, MapFlags::SHARED)?;
            ptr::copy_nonoverlapping(old, fresh.cast(), len);
            let placed = rustix::mm::mremap_fixed(fresh, len, len, MremapFlags::MAYMOVE, old.cast());
            if placed.is_err() {
                rustix::mm::munmap(fresh, len)?;
            }
            placed.map(drop)
        }
    }

    /// Copies bytes out of memory that is not ours alone; `None` where they do not lie in it.
    pub fn copy_out(&self, offset: usize, out: &mut [u8]) -> Option<()> {
        let from = self.at(offset, out.len())?;
        // SAFETY: the source lies in the mapping, and `out` is ours alone. Whatever others do to
        // the source meanwhile, its bytes make u8s.
        unsafe { std::ptr::copy_nonoverlapping(from, out.as_mut_ptr(), out.len()) }
        Some(())
    }

    /// Copies bytes into memory that is not ours alone; `None` where they do not fit.
    pub fn copy_in(&self, offset: usize, data: &[u8]) -> Option<()> {
        let to = self.at(offset, data.len())?;
        // SAFETY: the target lies in the mapping, of which no code holds a slice
        // (`crate::device_memory`, `crate::Shared`).
        unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), to, data.len()) }
        Some(())
    }

    /// Reads a range of a file into memory that is not ours alone, as pread(2) does, and returns
    /// how many bytes the file had.
    ///
    /// # Errors
    /// Those of pread(2); `EFAULT` where the bytes would not lie in it.
    pub fn read_file(&self, file: BorrowedFd<'_>, file_offset: u64, offset: usize, len: usize) -> Result<usize, Errno> {
        let to = self.at(offset, len).ok_or(Errno::FAULT)?;
        let mut done = 0;
        while done < len {
            let at = (file_offset + done as u64) as libc::off_t;
            // SAFETY: the kernel alone writes, to what lies in the mapping. The caller sees to
            // it that no other code uses that part of it meanwhile, as with the daemon's transfers.
            match unsafe { libc::pread(file.as_raw_fd(), to.add(done).cast(), len - done, at) } {
                0 => break,
                more @ 1.. => done += more as usize,
                _ => match Errno::from_io_error(&std::io::Error::last_os_error()) {
                    Some(Errno::INTR) => {}
                    error => return Err(error.unwrap_or(Errno::IO)),
                },
            }
        }
        Ok(done)
    }

    /// A word that the daemon or a GPU may change too, in memory that no code borrows as bytes.
    ///
    /// # Panics
    /// Where it is not aligned, or not in the mapping.
    pub fn word(&self, offset: usize) -> &AtomicU32 {
        assert!(offset.is_multiple_of(4) && offset + 4 <= self.len, "no word at {offset}");
        // SAFETY: it lies in the mapping, aligned, and lives as long; all who share it access it 32
        // bits at a time.
        unsafe { AtomicU32::from_ptr(self.base.as_ptr().add(offset).cast()) }
    }

    /// Has pages that do not exist yet come from a NUMA node, as long as it has any. Without NUMA,
    /// or where that is not allowed, nothing changes.
    pub fn prefer_node(&self, node: u32) {
        let Some(mask) = 1u64.checked_shl(node) else { return };
        let bits = u64::BITS as usize + 1; // the kernel takes one off (mm/mempolicy.c, get_nodes)
        // SAFETY: the range is ours, and its contents stay as they are; the kernel reads one word
        // of the mask.
        unsafe { libc::syscall(libc::SYS_mbind, self.base.as_ptr(), self.len, libc::MPOL_PREFERRED, &mask, bits, 0) };
    }

    fn at(&self, offset: usize, len: usize) -> Option<*mut u8> {
        let inside = offset.checked_add(len).is_some_and(|end| end <= self.len);
        inside.then(|| self.base.as_ptr().wrapping_add(offset))
    }

    /// Its bytes, if it is a memfd's.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: the range is mapped, and its pages exist, because the memfd is sealed against
        // shrinking. The memfd is known to this object and to the daemon only, and the daemon
        // writes to it only while a READ is waited for, for which the buffer is borrowed mutably.
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
        let unmapped = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.mapped) };
        debug_assert!(unmapped.is_ok(), "a mapping of ours was already unmapped");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::interrupted::interrupted;

    #[test]
    fn signals_do_not_keep_memory_from_being_allocated() {
        let len = 100 << 20;
        let file = rustix::fs::memfd_create("allocated", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, len + 5).unwrap();
        interrupted(|| allocate(std::os::fd::AsFd::as_fd(&file), len + 5)).unwrap();
        assert!(rustix::fs::fstat(&file).unwrap().st_blocks as u64 * 512 > len);
    }

    #[test]
    fn memory_that_is_replaced_has_the_same_bytes_and_is_other_memory() {
        let page = rustix::param::page_size();
        let len = 8 * page - 100;
        let file = rustix::fs::memfd_create("replaced", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, len as u64).unwrap();
        let mut mapping = Mapping::new(std::os::fd::AsFd::as_fd(&file), len).unwrap();
        let bytes: Vec<u8> = (0..len).map(|at| (at / 7) as u8).collect();
        mapping.bytes_mut().copy_from_slice(&bytes);
        for range in [page + 5..page + 6, 3 * page - 1..3 * page + 1, 5 * page..5 * page, 7 * page..len] {
            mapping.replace(range).unwrap();
        }
        assert!(mapping.bytes() == bytes);
        rustix::io::pwrite(&file, &vec![0xEE; len], 0).unwrap();
        let is_late = |n: usize| mapping.bytes()[n * page..].iter().take(page).all(|byte| *byte == 0xEE);
        assert_eq!((0..8).map(is_late).collect::<Vec<_>>(), [true, false, false, false, true, true, true, false]);
        assert!(mapping.bytes()[page..4 * page] == bytes[page..4 * page]);
    }

    #[test]
    fn memory_is_had_in_huge_pages_of_which_half_is_used() {
        let half = HUGE_PAGE / 2;
        for (len, room) in [(4096, 4096), (half - 1, half - 1), (half, HUGE_PAGE), (HUGE_PAGE, HUGE_PAGE)] {
            assert_eq!(Mapping::in_huge_pages(len), room);
            assert_eq!(Mapping::in_huge_pages(8 * HUGE_PAGE + len), 8 * HUGE_PAGE + room);
        }
        assert_eq!(Mapping::in_huge_pages(usize::MAX), usize::MAX, "too much is refused by who is asked for it");
        assert_eq!(Mapping::in_huge_pages(0), 0);
    }
}
