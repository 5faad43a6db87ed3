//! Memory that devices read and write behind the compiler's back. Two rules make that sound, and
//! this module guards both: the mapping lives until the last request on it is over (regions are
//! only handed out in an `Arc`), and Rust code holds no reference into memory that a device or
//! another process may be changing, but copies in and out. Memory of other processes and devices
//! may also vanish; the kernel does those copies, so that it is an error and no signal.
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::sync::atomic::AtomicU32;

use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags};

use crate::mappings::Mappings;
use crate::{Error, Result, uaccess};

/// Regions of this size and more are aligned to it and ask for transparent huge pages.
pub(crate) const HUGE_PAGE: usize = 2 << 20;

/// Memory that devices may read or write. It is always owned through an `Arc`, so that a request
/// in flight keeps it alive.
///
/// It begins on a page boundary: an offset into it is aligned exactly as the address is. Copies
/// made with [`Region::read_at`] and the like while a device writes to the same bytes see old and
/// new bytes in any mixture; keeping them apart is the caller's business, as with a file. There is
/// no lock.
#[derive(Debug)]
pub struct Region {
    base: NonNull<u8>,
    len: usize,
    backing: Backing,
    mappings: Mappings,
}

#[derive(Debug)]
enum Backing {
    /// Private to this process; perhaps a part of another region, which owns the mapping.
    Anonymous { whole: Option<Arc<Region>> },
    /// Shared with the process that sent the descriptor, which may truncate it at any time.
    Shared { fd: OwnedFd, writable: bool },
    /// Memory of another device, such as a GPU. The descriptor keeps the device's driver from
    /// giving that memory to another program.
    Device { _fd: OwnedFd },
}

/// A byte range of a region.
#[derive(Debug, Clone)]
pub struct Span {
    /// The memory.
    pub region: Arc<Region>,
    /// First byte in it.
    pub offset: usize,
    /// Length in bytes.
    pub len: usize,
}

// SAFETY: a region is an address range that stays mapped until it is dropped; no thread-bound
// state goes with it.
unsafe impl Send for Region {}
// SAFETY: through a shared reference the memory is only copied from and to through raw pointers,
// never borrowed (`bytes` is unsafe and makes its caller rule out every other access), so that no
// reference can be invalidated by another thread.
unsafe impl Sync for Region {}

impl Region {
    /// Allocates anonymous memory of `len` bytes, page aligned and zeroed. From 2 MiB on it is
    /// aligned to 2 MiB and asks for huge pages (madvise(2), `MADV_HUGEPAGE`), so that pinning and
    /// mapping it for DMA takes few entries. `len` must not be 0.
    ///
    /// # Errors
    /// [`Error::Memory`] with the errno of mmap(2).
    pub fn allocate(len: usize) -> Result<Arc<Region>> {
        let failed = |errno: Errno| Error::Memory { action: "allocation", len, errno: errno.raw_os_error() };
        let mapped = len.checked_next_multiple_of(page_size()).ok_or_else(|| failed(Errno::NOMEM))?;
        let slack = if len >= HUGE_PAGE { HUGE_PAGE } else { 0 };
        let reserved = mapped.checked_add(slack).ok_or_else(|| failed(Errno::NOMEM))?;
        // SAFETY: a new anonymous mapping at an address of the kernel's choice overlaps nothing.
        let start = unsafe {
            rustix::mm::mmap_anonymous(ptr::null_mut(), reserved, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE)
        }
        .map_err(failed)?
        .cast::<u8>();
        let lead = if slack > 0 { start.align_offset(HUGE_PAGE) } else { 0 };
        // SAFETY: the pages unmapped lie in the mapping made above, before and behind the part
        // that is kept, and nothing points at them yet. `lead` and `mapped` are multiples of the
        // page size.
        let base = unsafe {
            if lead > 0 {
                rustix::mm::munmap(start.cast(), lead).map_err(failed)?;
            }
            let base = start.add(lead);
            if slack > lead {
                rustix::mm::munmap(base.add(mapped).cast(), slack - lead).map_err(failed)?;
            }
            if slack > 0 {
                // Only advice: a kernel without transparent huge pages refuses it, and loses
                // nothing but speed.
                let _ = rustix::mm::madvise(base.cast(), mapped, Advice::LinuxHugepage);
            }
            base
        };
        let base = NonNull::new(base).ok_or_else(|| failed(Errno::NOMEM))?;
        Ok(Arc::new(Region { base, len, backing: Backing::Anonymous { whole: None }, mappings: Mappings::default() }))
    }

    /// As [`Region::allocate`], but cut into regions of `part` bytes each, which share the huge
    /// pages that each would be too small for. The memory is given back when all of them are
    /// dropped.
    ///
    /// # Errors
    /// Those of [`Region::allocate`].
    ///
    /// # Panics
    /// Unless `part` is a multiple of the page size, and `len` one of `part`.
    pub fn allocate_parts(len: usize, part: usize) -> Result<Vec<Arc<Region>>> {
        assert!(part > 0 && part.is_multiple_of(page_size()) && len.is_multiple_of(part), "{len} bytes in parts of {part}");
        let whole = Region::allocate(len)?;
        let cut = |offset| Region {
            // SAFETY: the offset lies in the mapping, which the part keeps alive. No two parts
            // overlap, and the whole is not used by itself.
            base: unsafe { whole.base.add(offset) },
            len: part,
            backing: Backing::Anonymous { whole: Some(whole.clone()) },
            mappings: Mappings::default(),
        };
        Ok((0..len).step_by(part).map(cut).map(Arc::new).collect())
    }

    /// Maps `len` bytes, from the first, of a memfd or another file that can be mapped shared.
    /// Without `writable` devices may only read from it. `len` must not be 0.
    ///
    /// # Errors
    /// [`Error::RegionRange`] when the file is shorter, [`Error::Memory`] with the errno of
    /// mmap(2).
    pub fn from_fd(fd: OwnedFd, len: usize, writable: bool) -> Result<Arc<Region>> {
        let failed = |errno: Errno| Error::Memory { action: "mapping", len, errno: errno.raw_os_error() };
        let size = rustix::fs::fstat(&fd).map_err(failed)?.st_size;
        if u64::try_from(size).unwrap_or(0) < len as u64 {
            return Err(Error::RegionRange { offset: 0, len, region: usize::try_from(size).unwrap_or(0) });
        }
        let access = if writable { ProtFlags::READ | ProtFlags::WRITE } else { ProtFlags::READ };
        // SAFETY: a new mapping at an address of the kernel's choice overlaps nothing. That its
        // owner may change or truncate the file under us is why no code in this process ever
        // touches the mapping: the kernel does the copying.
        let base = unsafe { rustix::mm::mmap(ptr::null_mut(), len, access, MapFlags::SHARED, &fd, 0) }.map_err(failed)?;
        let base = NonNull::new(base.cast()).ok_or_else(|| failed(Errno::NOMEM))?;
        Ok(Arc::new(Region { base, len, backing: Backing::Shared { fd, writable }, mappings: Mappings::default() }))
    }

    /// Maps the first `len` bytes of another device's memory, which the descriptor stands for: a
    /// dma-buf (the kernel's Documentation/driver-api/dma-buf.rst), or a PCI device's resource
    /// file. Only a device for which [`crate::BlockDevice::peer_to_peer`] succeeds can be made to
    /// reach it. `len` must not be 0.
    ///
    /// # Errors
    /// [`Error::Memory`] with what the memory's driver said.
    pub fn of_device(fd: OwnedFd, len: usize) -> Result<Arc<Region>> {
        let failed = |errno: Errno| Error::Memory { action: "mapping", len, errno: errno.raw_os_error() };
        // SAFETY: a new mapping at an address of the kernel's choice overlaps nothing; no code in
        // this process ever touches it.
        let base =
            unsafe { rustix::mm::mmap(ptr::null_mut(), len, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED, &fd, 0) }
                .map_err(failed)?;
        let base = NonNull::new(base.cast()).ok_or_else(|| failed(Errno::NOMEM))?;
        Ok(Arc::new(Region { base, len, backing: Backing::Device { _fd: fd }, mappings: Mappings::default() }))
    }

    /// Whether a region of [`Region::of_device`] turns out to be host memory: pages that the
    /// kernel can pin. A mapping of a device's own memory has none (VM_PFNMAP, VM_IO), and nothing
    /// can be populated there (madvise(2), `MADV_POPULATE_READ`).
    pub fn is_host_memory(&self) -> bool {
        // SAFETY: populating a page changes nothing that it holds, and the page lies in the
        // mapping.
        let populated = unsafe { rustix::mm::madvise(self.base.as_ptr().cast(), page_size(), Advice::LinuxPopulateRead) };
        populated != Err(Errno::INVAL)
    }

    /// Whether as many pages exist as a shared region has, so that its owner has paid for them.
    /// Holes can be punched at any time: this is a matter of fairness, not of safety.
    pub fn is_allocated(&self) -> bool {
        let Backing::Shared { fd, .. } = &self.backing else { return true };
        let blocks = rustix::fs::fstat(fd).map(|stat| u64::try_from(stat.st_blocks).unwrap_or(0));
        blocks.is_ok_and(|blocks| blocks.saturating_mul(512) >= self.len as u64)
    }

    /// Length in bytes.
    #[allow(clippy::len_without_is_empty)] // a region is never empty
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether devices and [`Region::write_at`] may change it.
    pub fn writable(&self) -> bool {
        !matches!(self.backing, Backing::Shared { writable: false, .. })
    }

    /// The span of these bytes. Whether it lies inside is checked when it is used.
    pub fn span(self: &Arc<Self>, range: Range<usize>) -> Span {
        Span { region: self.clone(), offset: range.start, len: range.end.saturating_sub(range.start) }
    }

    /// Copies bytes out, from `offset` on. Bytes of a shared region are read with pread(2), so
    /// that a region that its owner truncated gives an error instead of SIGBUS; the kernel copies
    /// a device's bytes for the same reason.
    ///
    /// # Errors
    /// [`Error::RegionRange`] beyond the end, [`Error::RegionShrunk`] where the file behind a
    /// shared region ends earlier, [`Error::Memory`] with EFAULT where a device's memory does not
    /// answer.
    pub fn read_at(&self, offset: usize, out: &mut [u8]) -> Result<()> {
        self.check(offset, out.len())?;
        match &self.backing {
            Backing::Anonymous { .. } => {
                // SAFETY: the source lies inside the mapping (checked above), and `out` is
                // exclusively ours. A device that writes the same bytes meanwhile can make the
                // copy a mixture, never invalid: any byte value is a u8.
                unsafe { ptr::copy_nonoverlapping(self.base.as_ptr().add(offset), out.as_mut_ptr(), out.len()) }
                Ok(())
            }
            Backing::Shared { fd, .. } => {
                let len = out.len();
                each_part(len, |done| rustix::io::pread(fd, &mut out[done..], (offset + done) as u64), "reading")
            }
            Backing::Device { .. } => {
                let len = out.len();
                uaccess::copy_out(self.base.as_ptr().wrapping_add(offset), out)
                    .map_err(|errno| device_memory("reading", len, errno))
            }
        }
    }

    /// Copies bytes in, from `offset` on. To a shared region the kernel copies through the
    /// mapping, for the reason given at [`Region::read_at`]: pwrite(2) would wait for the file's
    /// lock, which another writer of the file can hold for ever.
    ///
    /// # Errors
    /// Those of [`Region::read_at`], and [`Error::RegionReadOnly`].
    pub fn write_at(&self, offset: usize, data: &[u8]) -> Result<()> {
        self.check(offset, data.len())?;
        match &self.backing {
            Backing::Anonymous { .. } => {
                // SAFETY: the target lies inside the mapping (checked above); no reference
                // into it exists (module rule).
                unsafe { ptr::copy_nonoverlapping(data.as_ptr(), self.base.as_ptr().add(offset), data.len()) }
                Ok(())
            }
            Backing::Shared { writable: false, .. } => Err(Error::RegionReadOnly),
            Backing::Shared { fd, .. } => {
                has_not_shrunk(fd, offset + data.len())?;
                // SAFETY: the target lies inside the mapping (checked above); no reference
                // into it exists (module rule).
                let copied = unsafe { uaccess::copy_in(data, self.base.as_ptr().wrapping_add(offset)) };
                copied.map_err(|errno| shared_memory(data.len(), errno))
            }
            Backing::Device { .. } => {
                // SAFETY: the target lies inside the mapping (checked above); no reference
                // into it exists (module rule).
                unsafe { uaccess::copy_in(data, self.base.as_ptr().wrapping_add(offset)) }
                    .map_err(|errno| device_memory("writing", data.len(), errno))
            }
        }
    }

    /// Fills `len` bytes with zeroes, from `offset` on.
    ///
    /// # Errors
    /// Those of [`Region::write_at`].
    pub fn zero_at(&self, offset: usize, len: usize) -> Result<()> {
        self.check(offset, len)?;
        // SAFETY: the target lies inside the mapping (checked above); no reference
        // into it exists (module rule).
        let zero = |range: Range<usize>| unsafe { uaccess::zero(self.base.as_ptr().wrapping_add(range.start), range.len()) };
        match &self.backing {
            Backing::Anonymous { .. } => {
                // SAFETY: the target lies inside the mapping (checked above); no reference
                // into it exists (module rule).
                unsafe { ptr::write_bytes(self.base.as_ptr().add(offset), 0, len) }
                Ok(())
            }
            Backing::Shared { writable: false, .. } => Err(Error::RegionReadOnly),
            Backing::Shared { fd, .. } => {
                has_not_shrunk(fd, offset + len)?;
                zero(offset..offset + len).map_err(|errno| shared_memory(len, errno))
            }
            Backing::Device { .. } => zero(offset..offset + len).map_err(|errno| device_memory("writing", len, errno)),
        }
    }

    /// Whether the range lies inside.
    pub(crate) fn check(&self, offset: usize, len: usize) -> Result<()> {
        match offset.checked_add(len) {
            Some(end) if end <= self.len => Ok(()),
            _ => Err(Error::RegionRange { offset, len, region: self.len }),
        }
    }

    /// Where it lies, for commands to a device. Reading or writing through it is bound by the
    /// module's rules.
    pub(crate) fn as_ptr(&self) -> *mut u8 {
        self.base.as_ptr()
    }

    /// Whether it is another device's memory ([`Region::of_device`]).
    pub(crate) fn is_device_memory(&self) -> bool {
        matches!(self.backing, Backing::Device { .. })
    }

    /// Whether it is this process's own: neither another one's nor a device's.
    pub(crate) fn is_private(&self) -> bool {
        matches!(self.backing, Backing::Anonymous { .. })
    }

    /// For which devices' DMA it is mapped, and where.
    pub(crate) fn mappings(&self) -> &Mappings {
        &self.mappings
    }

    /// Four bytes of an anonymous region that a device changes while we look: a completion
    /// queue's, say.
    ///
    /// # Panics
    ///
    /// If `offset` is not a multiple of 4 or reaches beyond the end.
    pub(crate) fn atomic(&self, offset: usize) -> &AtomicU32 {
        assert!(matches!(self.backing, Backing::Anonymous { .. }), "shared regions are never borrowed");
        assert!(offset.is_multiple_of(4) && offset + 4 <= self.len, "4 bytes at {offset} of a region of {}", self.len);
        // SAFETY: the bytes lie inside the mapping and are aligned (checked above; the base is
        // page aligned), and live as long as `self`. Atomic access never makes a data race with a
        // device; copies of the same bytes are the module's rule.
        unsafe { AtomicU32::from_ptr(self.base.as_ptr().add(offset).cast()) }
    }

    /// The memory of an anonymous region to which there is no other handle: the exclusive borrow
    /// is the proof.
    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        assert!(matches!(self.backing, Backing::Anonymous { .. }), "shared regions are never borrowed");
        // SAFETY: the mapping is `len` bytes of initialised memory that only this process maps;
        // requests and other threads reach it through an `Arc` only, and `&mut self` means there
        // is none but ours.
        unsafe { std::slice::from_raw_parts_mut(self.base.as_ptr(), self.len) }
    }

    /// The memory of an anonymous region.
    ///
    /// # Safety
    /// While the slice lives nothing may write to the region: no request that reads into it may be
    /// in flight, and no thread may call [`Region::write_at`] or [`Region::zero_at`].
    pub(crate) unsafe fn bytes(&self) -> &[u8] {
        assert!(matches!(self.backing, Backing::Anonymous { .. }), "shared regions are never borrowed");
        // SAFETY: the mapping is `len` bytes of initialised memory; the caller rules out writers.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr(), self.len) }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        if let Backing::Anonymous { whole: Some(_) } = self.backing {
            return;
        }
        // SAFETY: base and length are those of a mapping that this region owns; the last `Arc` is
        // gone, and with it every request and span that could name the memory.
        let unmapped = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.len) };
        if let Err(error) = unmapped {
            tracing::error!(len = self.len, %error, "cannot unmap a region; its memory is lost until the process ends");
        }
    }
}

fn page_size() -> usize {
    rustix::param::page_size()
}

/// Whether a file still reaches that far. What lies between its end and its page's would be
/// written, and lost.
fn has_not_shrunk(file: &OwnedFd, end: usize) -> Result<()> {
    let size = rustix::fs::fstat(file).map_or(0, |stat| u64::try_from(stat.st_size).unwrap_or(0));
    if size < end as u64 { Err(Error::RegionShrunk) } else { Ok(()) }
}

fn shared_memory(len: usize, errno: Errno) -> Error {
    match errno {
        Errno::FAULT => Error::RegionShrunk,
        errno => Error::Memory { action: "writing", len, errno: errno.raw_os_error() },
    }
}

fn device_memory(action: &'static str, len: usize, errno: Errno) -> Error {
    Error::Memory { action, len, errno: errno.raw_os_error() }
}

/// Repeats a positioned read until `len` bytes are done.
fn each_part(len: usize, mut part: impl FnMut(usize) -> rustix::io::Result<usize>, action: &'static str) -> Result<()> {
    let mut done = 0;
    while done < len {
        match part(done) {
            Ok(0) => return Err(Error::RegionShrunk),
            Ok(n) => done += n,
            Err(Errno::INTR) => {}
            Err(errno) => return Err(Error::Memory { action, len, errno: errno.raw_os_error() }),
        }
    }
    Ok(())
}
