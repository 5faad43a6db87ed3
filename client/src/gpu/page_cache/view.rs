//! Read-only, shared mappings of a file, and which of their pages are mapped.
//!
//! It guards that a page becomes mapped only where [`View::populate`], or a copy by CUDA, asks for
//! it: the kernel maps pages around one that is asked for, within a table of 2 MiB of addresses, so
//! views share no such table with each other or with anything else.

use gpunvme_abi::Reason;
use rustix::fs::{Access, AtFlags};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::fs::FileExt;
use std::ptr::{self, NonNull};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

/// Addresses that one page table has, and so what views are aligned to, in bytes.
const TABLE: usize = 2 << 20;
/// Bytes of a page.
pub const PAGE: usize = 4096;

/// A range of a file, mapped.
#[derive(Debug)]
pub struct View {
    base: NonNull<u8>,
    len: usize,
    /// Addresses that are taken from `base` on: whole tables.
    reserved: usize,
}

// SAFETY: a mapping is an address range that belongs to the whole process; nothing in it is tied
// to a thread.
unsafe impl Send for View {}
// SAFETY: through `&View` only addresses are had; nothing reads or writes the bytes.
unsafe impl Sync for View {}

impl View {
    /// Maps `len` bytes of a file, from a page on; none of its pages is mapped yet. A child process
    /// does not get it.
    pub fn new(file: BorrowedFd<'_>, offset: u64, len: usize) -> Result<View, Errno> {
        let reserved = len.checked_next_multiple_of(TABLE).filter(|reserved| *reserved > 0).ok_or(Errno::INVAL)?;
        let nothing = ProtFlags::empty();
        // SAFETY: the addresses are taken by a new mapping that overlaps nothing. What lies before
        // and behind the aligned part goes, and nothing points at it; the file is mapped over the
        // rest, which is ours.
        unsafe {
            let start = rustix::mm::mmap_anonymous(ptr::null_mut(), reserved + TABLE, nothing, MapFlags::PRIVATE)?.cast::<u8>();
            let lead = start.align_offset(TABLE);
            let base = start.add(lead);
            if lead > 0 {
                rustix::mm::munmap(start.cast(), lead)?;
            }
            if lead < TABLE {
                rustix::mm::munmap(base.add(reserved).cast(), TABLE - lead)?;
            }
            let view = View { base: NonNull::new(base).ok_or(Errno::NOMEM)?, len, reserved };
            rustix::mm::mmap(base.cast(), len, ProtFlags::READ, MapFlags::SHARED | MapFlags::FIXED, file, offset)?;
            rustix::mm::madvise(base.cast(), len, rustix::mm::Advice::LinuxDontFork)?;
            Ok(view)
        }
    }

    /// Where it begins; a multiple of the page size.
    pub fn base(&self) -> NonNull<u8> {
        self.base
    }

    /// Its length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Has all pages mapped; those that are not in the page cache are read in. Of a file that has
    /// become shorter it fails.
    ///
    /// # Errors
    /// Those of madvise(2), `MADV_POPULATE_READ`, from Linux 5.14 on.
    pub fn populate(&self) -> Result<(), Errno> {
        // SAFETY: what lies in the pages is not changed; the range is this mapping.
        unsafe { rustix::mm::madvise(self.base.as_ptr().cast(), self.len, rustix::mm::Advice::LinuxPopulateRead) }
    }

    /// Has none of its pages mapped. What holds them still does.
    ///
    /// # Errors
    /// Those of madvise(2).
    pub fn unmap_pages(&self) -> Result<(), Errno> {
        // SAFETY: the pages of a shared mapping stay what they are; the range is this mapping.
        unsafe { rustix::mm::madvise(self.base.as_ptr().cast(), self.len, rustix::mm::Advice::LinuxDontNeed) }
    }

    /// Whether the page cache has all its pages. Where the kernel does not tell
    /// ([`shows_residency`]), it says so of every file.
    ///
    /// # Errors
    /// Those of mincore(2).
    pub fn is_resident(&self) -> Result<bool, Errno> {
        let mut pages = vec![0u8; self.len.div_ceil(PAGE)];
        // SAFETY: the range is this mapping, and there is a byte for each of its pages.
        let result = unsafe { libc::mincore(self.base.as_ptr().cast(), self.len, pages.as_mut_ptr()) };
        if result < 0 { Err(last_error()) } else { Ok(pages.iter().all(|page| page & 1 != 0)) }
    }

    /// Whether each page of a range of it is mapped. False also where the kernel does not say.
    pub fn has_all(&self, offset: usize, len: usize) -> bool {
        let (from, to) = (offset / PAGE * PAGE, (offset + len).next_multiple_of(PAGE));
        debug_assert!(to <= self.len.next_multiple_of(PAGE), "{offset} and {len} of {}", self.len);
        let address = self.base.as_ptr() as u64;
        let pagemap = Pagemap::get();
        pagemap.is_some_and(|pagemap| pagemap.has_all(address + from as u64, address + to as u64).unwrap_or(false))
    }

    /// The NUMA node on which most of its pages lie, by some of them: none is brought in for that.
    /// `None` where the kernel does not tell.
    pub fn node(&self) -> Option<u32> {
        /// How far apart those are that are looked at: a range of 16 MiB is judged by 16 of them.
        const STEP: usize = 1 << 20;
        let pages: Vec<*const u8> =
            (0..self.len).step_by(STEP).map(|at| self.base.as_ptr().wrapping_add(at).cast_const()).collect();
        let mut nodes = vec![-libc::ENOENT; pages.len()];
        let nowhere = ptr::null::<libc::c_int>();
        // SAFETY: the kernel reads as many addresses as it writes nodes, and moves nothing where it
        // is not told to which node.
        let result =
            unsafe { libc::syscall(libc::SYS_move_pages, 0, pages.len(), pages.as_ptr(), nowhere, nodes.as_mut_ptr(), 0) };
        if result < 0 {
            return None;
        }
        // Where a page is not mapped it says so by a negative number.
        let mut known: Vec<u32> = nodes.into_iter().filter_map(|node| node.try_into().ok()).collect();
        known.sort_unstable();
        known.chunk_by(|node, other| node == other).max_by_key(|same| same.len()).map(|same| same[0])
    }
}

impl Drop for View {
    fn drop(&mut self) {
        // SAFETY: these are the addresses that it took, and nothing points at them any more.
        let unmapped = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.reserved) };
        debug_assert!(unmapped.is_ok(), "a mapping of ours was already unmapped");
    }
}

/// Whether the kernel tells this process which pages of a file are in the page cache: it tells its
/// owner, and who may write to it (mm/mincore.c, can_do_mincore).
pub fn shows_residency(file: BorrowedFd<'_>) -> bool {
    let user = rustix::process::geteuid();
    let is_owner = || rustix::fs::fstat(file).is_ok_and(|found| found.st_uid == user.as_raw());
    let flags = AtFlags::EMPTY_PATH | AtFlags::EACCESS;
    user.is_root() || is_owner() || rustix::fs::accessat(file, c"", Access::WRITE_OK, flags).is_ok()
}

/// Finds out whether the page cache has all of a range of a file, as far as the kernel tells: from
/// Linux 6.5 on, and as [`shows_residency`].
///
/// # Errors
/// Why it is not to be read from there.
pub fn residency(file: BorrowedFd<'_>, offset: u64, len: u64) -> Result<(), Reason> {
    /// `struct cachestat_range` and `struct cachestat` (linux/mman.h).
    #[repr(C)]
    struct Range {
        offset: u64,
        len: u64,
    }
    #[repr(C)]
    #[derive(Default)]
    struct Found {
        cached: u64,
        dirty: u64,
        written_back: u64,
        evicted: u64,
        recently_evicted: u64,
    }
    const CACHESTAT: libc::c_long = 451;
    let first = offset / PAGE as u64;
    let pages = (offset + len).div_ceil(PAGE as u64) - first;
    let range = Range { offset: first * PAGE as u64, len: pages * PAGE as u64 };
    let mut found = Found::default();
    // SAFETY: the kernel reads the one structure, and writes the other.
    let result = unsafe { libc::syscall(CACHESTAT, file.as_raw_fd(), &raw const range, &raw mut found, 0) };
    match result {
        0 if found.cached >= pages => Ok(()),
        0 => Err(Reason::NotResident),
        _ => Err(match last_error() {
            Errno::NOSYS => Reason::OldKernel,
            Errno::PERM | Errno::ACCESS => Reason::ResidencyHidden,
            _ => Reason::NotResident,
        }),
    }
}

/// What the kernel tells a process of its own page tables (`/proc/self/pagemap`).
struct Pagemap {
    file: File,
    /// Whether there is no `PAGEMAP_SCAN`, before Linux 6.7.
    is_old: AtomicBool,
}

/// `struct pm_scan_arg` (linux/fs.h).
#[repr(C)]
struct Scan {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    vec: u64,
    vec_len: u64,
    max_pages: u64,
    category_inverted: u64,
    category_mask: u64,
    category_anyof_mask: u64,
    return_mask: u64,
}

/// `struct page_region` (linux/fs.h).
#[repr(C)]
#[derive(Default)]
struct Region {
    start: u64,
    end: u64,
    categories: u64,
}

/// `PAGEMAP_SCAN`, `_IOWR('f', 16, struct pm_scan_arg)`.
const PAGEMAP_SCAN: libc::c_ulong = 3 << 30 | (size_of::<Scan>() as libc::c_ulong) << 16 | (b'f' as libc::c_ulong) << 8 | 16;
/// `PAGE_IS_PRESENT`.
const PRESENT: u64 = 1 << 3;
/// Bit 63 of an entry of the pagemap: the page is mapped.
const MAPPED: u64 = 1 << 63;

impl Pagemap {
    /// That of this process; none where /proc does not show it.
    fn get() -> Option<&'static Pagemap> {
        static PAGEMAP: OnceLock<Option<Pagemap>> = OnceLock::new();
        let open = || {
            let opened = File::open("/proc/self/pagemap");
            let opened = opened.inspect_err(|error| tracing::debug!(%error, "no page cache for GPUs: /proc/self/pagemap"));
            opened.ok().map(|file| Pagemap { file, is_old: AtomicBool::new(false) })
        };
        PAGEMAP.get_or_init(open).as_ref()
    }

    /// Whether each page from one address to another is mapped.
    fn has_all(&self, start: u64, end: u64) -> io::Result<bool> {
        if !self.is_old.load(Ordering::Relaxed) {
            match self.scan(start, end) {
                Err(error) if error.raw_os_error() == Some(libc::ENOTTY) => self.is_old.store(true, Ordering::Relaxed),
                found => return found,
            }
        }
        let mut entries = vec![0u8; (end - start) as usize / PAGE * size_of::<u64>()];
        self.file.read_exact_at(&mut entries, start / PAGE as u64 * size_of::<u64>() as u64)?;
        let is_mapped = |entry: &[u8; 8]| u64::from_ne_bytes(*entry) & MAPPED != 0;
        Ok(entries.as_chunks().0.iter().all(is_mapped))
    }

    fn scan(&self, start: u64, end: u64) -> io::Result<bool> {
        let mut region = Region::default();
        let mut scan = Scan {
            size: size_of::<Scan>() as u64,
            flags: 0,
            start,
            end,
            walk_end: 0,
            vec: ptr::from_mut(&mut region) as u64,
            vec_len: 1,
            max_pages: 0,
            category_inverted: 0,
            category_mask: PRESENT,
            category_anyof_mask: 0,
            return_mask: PRESENT,
        };
        // SAFETY: the kernel reads and writes the structure, and at most one region.
        let found = unsafe { libc::ioctl(self.file.as_raw_fd(), PAGEMAP_SCAN, &mut scan) };
        if found < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(found == 1 && (region.start, region.end) == (start, end))
    }
}

fn last_error() -> Errno {
    Errno::from_io_error(&io::Error::last_os_error()).unwrap_or(Errno::INVAL)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;

    #[test]
    fn pages_lie_on_the_node_of_which_the_kernel_tells() {
        const LEN: usize = 3 << 20;
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(&vec![1; LEN], 0).unwrap();
        let view = View::new(file.as_fd(), 0, LEN).unwrap();
        assert_eq!(view.node(), None, "no page is mapped");
        assert!(!view.has_all(0, 1), "none was brought in");
        view.populate().unwrap();
        // Where the kernel has no NUMA, or this process may not ask, nothing is known.
        let has_node = |node: u32| std::path::Path::new(&format!("/sys/devices/system/node/node{node}")).exists();
        assert!(view.node().is_none_or(has_node), "{:?}", view.node());
        println!("on node {:?}", view.node());
    }
}
