//! The addresses of device memory, and the memory behind them.
//!
//! Device memory lies in an arena of addresses that nothing is mapped at, so that a CPU that
//! touches it dies of it as it does beside a real GPU. Its bytes are in memfds, mapped a second
//! time where only this driver looks. Addresses are used again when they are free.

use crate::Code;
use crate::pinned::PinnedPages;
use cudarc::driver::sys::cudaError_enum::{CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_OUT_OF_MEMORY};
use rustix::fs::{MemfdFlags, Mode, OFlags};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};
use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

/// How memory and addresses are handed out; a real driver's small allocations share blocks, and are
/// aligned to less.
pub const PAGE: u64 = 64 << 10;
/// The unit of memory that is mapped by hand.
pub const GRANULARITY: u64 = 2 << 20;
const ARENA: u64 = 1 << 40;

/// Bytes of a GPU.
pub struct Backing {
    memory: OwnedFd,
    base: NonNull<u8>,
    len: usize,
    /// The GPU that the bytes belong to.
    pub gpu: usize,
    /// How many more that GPU has.
    left: Arc<AtomicU64>,
    /// The file that it lies in, and where that goes afterwards.
    bar: Option<(PathBuf, Bars)>,
}

/// Files for device memory that nothing lies in.
pub type Bars = Arc<Mutex<Vec<PathBuf>>>;

// SAFETY: a mapping belongs to the whole process. What is in it is the application's business, as
// on a GPU.
unsafe impl Send for Backing {}
// SAFETY: as above.
unsafe impl Sync for Backing {}

impl Backing {
    /// `len` bytes, taken from what the GPU has left; in one of `bars`, if there are to be any, and
    /// else zeroed.
    pub fn new(gpu: usize, len: u64, left: &Arc<AtomicU64>, bars: Option<&Bars>) -> Result<Backing, Code> {
        let len = len.next_multiple_of(PAGE);
        left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(len))
            .map_err(|_| CUDA_ERROR_OUT_OF_MEMORY)?;
        Backing::mapped(gpu, len, left, bars).map_err(|_| {
            left.fetch_add(len, Ordering::Relaxed);
            CUDA_ERROR_OUT_OF_MEMORY
        })
    }

    fn mapped(gpu: usize, len: u64, left: &Arc<AtomicU64>, bars: Option<&Bars>) -> Result<Backing, Errno> {
        let (memory, bar) = match bars {
            None => {
                let memory = rustix::fs::memfd_create("software-cuda", MemfdFlags::CLOEXEC)?;
                rustix::fs::ftruncate(&memory, len)?;
                (memory, None)
            }
            Some(bars) => {
                let mut free = bars.lock().unwrap();
                let fits = |path: &PathBuf| std::fs::metadata(path).is_ok_and(|file| file.len() >= len);
                let at = free.iter().position(fits).ok_or(Errno::NOMEM)?;
                let memory = rustix::fs::open(&free[at], OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
                (memory, Some((free.remove(at), Arc::clone(bars))))
            }
        };
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address that the kernel chooses overlaps nothing.
        let base = unsafe { rustix::mm::mmap(ptr::null_mut(), len as usize, access, MapFlags::SHARED, &memory, 0) }?;
        Ok(Backing {
            memory,
            base: NonNull::new(base.cast()).ok_or(Errno::NOMEM)?,
            len: len as usize,
            gpu,
            left: Arc::clone(left),
            bar,
        })
    }

    /// Its length in bytes.
    pub fn len(&self) -> u64 {
        self.len as u64
    }

    /// The descriptor that stands for it.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.memory.as_fd()
    }
}

impl Drop for Backing {
    fn drop(&mut self) {
        // SAFETY: this is the range that was mapped; every user of it holds the backing.
        let unmapped = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.len) };
        debug_assert!(unmapped.is_ok(), "a mapping of ours was already unmapped");
        self.left.fetch_add(self.len(), Ordering::Relaxed);
        if let Some((path, bars)) = self.bar.take() {
            bars.lock().unwrap().push(path);
        }
    }
}

/// What memory is.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// `cuMemAlloc`, in the context of this handle.
    Device(usize),
    /// `cuMemAllocAsync`.
    Pool,
    /// `cuMemMap`, into what was reserved from here on, of this length.
    Mapped(u64, u64),
    /// `cuMemAllocManaged`, of a GPU.
    Managed(usize),
    /// `cuMemHostAlloc` or `cuMemHostRegister`, in the context of this handle.
    Host(usize),
}

/// A range of addresses with memory behind it.
pub struct Allocation {
    /// How long it is.
    pub len: u64,
    /// What it is.
    pub kind: Kind,
    /// `CU_POINTER_ATTRIBUTE_BUFFER_ID`.
    pub buffer_id: u64,
    /// Its bytes, from an offset on. Memory that the CPU reaches too has them at its own addresses.
    pub backing: Option<(Arc<Backing>, u64)>,
    /// Whether it may be used: what was mapped may only after `cuMemSetAccess`.
    pub accessible: bool,
    /// The pages themselves, of what was registered read-only.
    pub pinned: Option<Arc<PinnedPages>>,
}

/// A piece of memory as the CPU sees it.
pub struct HostSpan {
    /// Its first byte.
    pub at: *mut u8,
    /// Its length in bytes.
    pub len: usize,
    /// Whether CUDA knows it.
    pub known: bool,
    /// The pages that it is read from instead, and where in them it begins.
    pub pinned: Option<(Arc<PinnedPages>, usize)>,
    _held: Option<Arc<Backing>>,
}

// SAFETY: a piece is a name for bytes, which its backing, or else the application, keeps where they
// are.
unsafe impl Send for HostSpan {}

impl HostSpan {
    /// Memory that no allocation is behind.
    pub fn plain(at: *mut u8, len: usize) -> HostSpan {
        HostSpan { at, len, known: false, pinned: None, _held: None }
    }
}

/// All addresses that CUDA knows.
pub struct Addresses {
    arena: u64,
    allocations: BTreeMap<u64, Allocation>,
    /// Reserved by hand (`cuMemAddressReserve`), with their lengths.
    reserved: BTreeMap<u64, u64>,
    last_buffer_id: u64,
}

impl Addresses {
    /// None yet.
    pub fn new() -> Addresses {
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: a new mapping at an address that the kernel chooses overlaps nothing.
        let arena = unsafe { rustix::mm::mmap_anonymous(ptr::null_mut(), ARENA as usize, ProtFlags::empty(), flags) };
        let arena = (arena.expect("a TiB of addresses") as u64).next_multiple_of(GRANULARITY);
        Addresses { arena, allocations: BTreeMap::new(), reserved: BTreeMap::new(), last_buffer_id: 0 }
    }

    fn in_arena(&self, address: u64) -> bool {
        (self.arena..self.arena + ARENA - GRANULARITY).contains(&address)
    }

    /// The first free addresses of the arena that are aligned to `align`.
    fn free(&self, len: u64, align: u64) -> Result<u64, Code> {
        let mut taken: Vec<(u64, u64)> = self.reserved.iter().map(|(base, len)| (*base, *len)).collect();
        taken.extend(
            self.allocations.iter().filter(|(base, _)| self.in_arena(**base)).map(|(base, allocation)| (*base, allocation.len)),
        );
        taken.sort_unstable();
        let mut at = self.arena;
        for (base, taken_len) in taken {
            if at + len <= base {
                break;
            }
            at = at.max((base + taken_len).next_multiple_of(align));
        }
        if self.in_arena(at + len) { Ok(at) } else { Err(CUDA_ERROR_OUT_OF_MEMORY) }
    }

    /// Puts memory of a GPU at free addresses.
    pub fn place(&mut self, kind: Kind, len: u64, backing: Arc<Backing>) -> Result<u64, Code> {
        let base = self.free(len, PAGE)?;
        self.insert(base, len, kind, Some((backing, 0)), true);
        Ok(base)
    }

    /// Makes CUDA know of memory.
    pub fn insert(&mut self, base: u64, len: u64, kind: Kind, backing: Option<(Arc<Backing>, u64)>, accessible: bool) {
        self.last_buffer_id += 1;
        self.allocations
            .insert(base, Allocation { len, kind, buffer_id: self.last_buffer_id, backing, accessible, pinned: None });
    }

    /// Makes CUDA know of host memory that it only reads: of the pages that are there now.
    pub fn insert_pinned(&mut self, base: u64, len: u64, kind: Kind, pinned: PinnedPages) {
        self.insert(base, len, kind, None, true);
        self.allocations.get_mut(&base).expect("what was inserted").pinned = Some(Arc::new(pinned));
    }

    /// The allocation that an address lies in, and its first byte.
    pub fn find(&self, address: u64) -> Option<(u64, &Allocation)> {
        let (base, allocation) = self.allocations.range(..=address).next_back()?;
        (address - base < allocation.len).then_some((*base, allocation))
    }

    /// The allocation that begins at an address.
    pub fn beginning_at(&self, base: u64) -> Option<&Allocation> {
        self.allocations.get(&base)
    }

    /// Whether CUDA knows anything of a range.
    pub fn overlaps(&self, base: u64, len: u64) -> bool {
        self.allocations.range(..base + len).next_back().is_some_and(|(at, allocation)| at + allocation.len > base)
    }

    /// Forgets it.
    pub fn remove(&mut self, base: u64) -> Option<Allocation> {
        self.allocations.remove(&base)
    }

    /// Reserves addresses.
    pub fn reserve(&mut self, len: u64) -> Result<u64, Code> {
        let base = self.free(len, GRANULARITY)?;
        self.reserved.insert(base, len);
        Ok(base)
    }

    /// Gives reserved addresses back.
    pub fn unreserve(&mut self, base: u64, len: u64) -> Result<(), Code> {
        if self.reserved.get(&base) != Some(&len) || self.overlaps(base, len) {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        self.reserved.remove(&base);
        Ok(())
    }

    /// Maps memory at reserved addresses.
    pub fn map(&mut self, base: u64, len: u64, backing: Arc<Backing>, offset: u64) -> Result<(), Code> {
        let reserved = self.reserved.range(..=base).next_back().map(|(at, reserved)| (*at, *reserved));
        let (from, reserved) =
            reserved.filter(|(from, reserved)| base + len <= from + reserved).ok_or(CUDA_ERROR_INVALID_VALUE)?;
        if self.overlaps(base, len)
            || offset + len > backing.len()
            || !base.is_multiple_of(GRANULARITY)
            || !len.is_multiple_of(GRANULARITY)
        {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        self.insert(base, len, Kind::Mapped(from, reserved), Some((backing, offset)), false);
        Ok(())
    }

    /// The mappings that a range is made of, whole ones.
    pub fn mappings(&self, base: u64, len: u64) -> Result<Vec<u64>, Code> {
        let found: Vec<u64> = self.allocations.range(base..base + len).map(|(at, _)| *at).collect();
        let covered: u64 = found.iter().map(|at| self.allocations[at].len).sum();
        let mapped = found.iter().all(|at| matches!(self.allocations[at].kind, Kind::Mapped(..)));
        if covered == len && mapped { Ok(found) } else { Err(CUDA_ERROR_INVALID_VALUE) }
    }

    /// Lets mapped memory be used, or not.
    pub fn set_access(&mut self, base: u64, len: u64, accessible: bool) -> Result<(), Code> {
        for at in self.mappings(base, len)? {
            self.allocations.get_mut(&at).expect("a mapping that was found").accessible = accessible;
        }
        Ok(())
    }

    /// The pieces of memory that a copy touches: of one allocation, of mappings that follow each
    /// other, or all of it unknown to CUDA.
    pub fn pieces(&self, address: u64, len: u64) -> Result<Vec<HostSpan>, Code> {
        let mut pieces: Vec<HostSpan> = Vec::new();
        let (mut at, end) = (address, address.checked_add(len).ok_or(CUDA_ERROR_INVALID_VALUE)?);
        while at < end {
            let Some((base, allocation)) = self.find(at) else {
                if !pieces.is_empty() || self.in_arena(at) || self.overlaps(at, end - at) {
                    return Err(CUDA_ERROR_INVALID_VALUE);
                }
                return Ok(vec![HostSpan::plain(ptr::with_exposed_provenance_mut(at as usize), len as usize)]);
            };
            if !allocation.accessible || (!pieces.is_empty() && !matches!(allocation.kind, Kind::Mapped(..))) {
                return Err(CUDA_ERROR_INVALID_VALUE);
            }
            let piece = (base + allocation.len).min(end) - at;
            pieces.push(HostSpan {
                at: cpu_address(allocation, at, at - base),
                len: piece as usize,
                known: true,
                pinned: allocation.pinned.clone().map(|pages| (pages, (at - base) as usize)),
                _held: held(allocation),
            });
            at += piece;
        }
        Ok(pieces)
    }
}

fn held(allocation: &Allocation) -> Option<Arc<Backing>> {
    allocation.backing.as_ref().map(|(backing, _)| Arc::clone(backing))
}

fn cpu_address(allocation: &Allocation, address: u64, into: u64) -> *mut u8 {
    match &allocation.backing {
        // SAFETY: allocations lie inside what backs them.
        Some((backing, offset)) => unsafe { backing.base.as_ptr().add((offset + into) as usize) },
        None => ptr::with_exposed_provenance_mut(address as usize),
    }
}

/// `len` zeroed bytes that the CPU reaches, for host memory that CUDA allocates.
pub fn host_memory(len: usize) -> Result<u64, Code> {
    let access = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new mapping at an address that the kernel chooses overlaps nothing.
    let base = unsafe { rustix::mm::mmap_anonymous(ptr::null_mut(), len, access, MapFlags::PRIVATE) };
    base.map(|base| base as u64).map_err(|_| CUDA_ERROR_OUT_OF_MEMORY)
}

/// Unmaps it.
///
/// # Safety
/// It was mapped by [`host_memory`], and nothing uses it any more.
pub unsafe fn free_host_memory(base: u64, len: u64) {
    // SAFETY: the caller vouches for it.
    let unmapped = unsafe { rustix::mm::munmap(ptr::with_exposed_provenance_mut(base as usize), len as usize) };
    debug_assert!(unmapped.is_ok(), "a mapping of ours was already unmapped");
}
