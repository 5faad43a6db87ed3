//! A cached range: a range of a file whose pages are registered with CUDA.
//!
//! It guards the order in which they come into being. The sentinel has all pages before CUDA looks
//! them up, and still has them afterwards: in between the page cache had no others, so that those
//! which CUDA registered are the file's.

use super::gpu_reads;
use super::view::View;
use gpunvme_cuda::{Cuda, CudaError, Gpu, HostRegistration};
use rustix::fs::{AtFlags, StatxFlags};
use rustix::io::Errno;
use std::fmt;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes of a cached range, but for the last of a file; where cached ranges begin is a multiple of
/// it. CUDA takes time for each registration, and the whole cached range has to be in the page
/// cache.
pub const RANGE_LEN: u64 = 16 << 20;

/// Whether a page that is not in the page cache is read in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Missing {
    /// There is no cached range then.
    Refuse,
    /// By the kernel.
    ReadIn,
}

/// Why there is no cached range.
#[derive(Debug, thiserror::Error)]
pub enum NoRange {
    /// Some of its pages are not in the page cache, or left it meanwhile.
    #[error("not all of it is in the page cache")]
    NotResident,
    /// The kernel does not tell this user which of the file's pages it has.
    #[error("the kernel tells only a file's owner, or who may write to it, what is in the page cache")]
    Hidden,
    /// As much is registered as may be, or memory is short.
    #[error("no room for more of the page cache")]
    NoRoom,
    /// The kernel does not map the file.
    #[error("mapping it: {0}")]
    Map(Errno),
    /// CUDA does not register it.
    #[error("registering it with CUDA: {0}")]
    Cuda(CudaError),
    /// This driver would read it by the processor, which ends a process whose file has become
    /// shorter, or its kernels do not find it at its address.
    #[error("this GPU's driver does not leave it to the GPU to read host memory that is registered")]
    ByProcessor,
}

/// Counts bytes of cached ranges.
#[derive(Clone, Debug, Default)]
pub struct Registered(Arc<AtomicU64>);

/// Bytes that count while this lives.
#[derive(Debug)]
pub struct Counted {
    registered: Registered,
    len: u64,
}

impl Registered {
    /// How many there are.
    pub fn bytes(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    /// So many more, as long as what is returned lives.
    pub fn with(&self, len: u64) -> Counted {
        self.0.fetch_add(len, Ordering::Relaxed);
        Counted { registered: self.clone(), len }
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.registered.0.fetch_sub(self.len, Ordering::Relaxed);
    }
}

/// A cached range. Unregistered and unmapped when it is dropped.
pub struct CachedRange {
    /// Before the mapping, so that it ends first. `None` only while it is dropped.
    registration: Option<HostRegistration>,
    registered: View,
    /// Nothing touches it once it was populated.
    sentinel: View,
    file: Arc<OwnedFd>,
    /// Where in the file it begins.
    offset: u64,
    is_near: bool,
    cuda: &'static Cuda,
    _counted: Counted,
}

impl CachedRange {
    /// The cached range of an open file that begins at `offset`, with `len` bytes, for any GPU, but
    /// most likely for `gpu`. It takes about a millisecond for 16 MiB, and longer where they are
    /// read in.
    ///
    /// # Errors
    /// Why there can be none now.
    pub fn new(
        cuda: &'static Cuda,
        gpu: &Gpu,
        file: &Arc<OwnedFd>,
        (offset, len): (u64, u64),
        missing: Missing,
        counted: Counted,
    ) -> Result<CachedRange, NoRange> {
        let view = || View::new(file.as_fd(), offset, len as usize).map_err(NoRange::Map);
        let sentinel = view()?;
        if missing == Missing::Refuse && !sentinel.is_resident().map_err(NoRange::Map)? {
            return Err(NoRange::NotResident);
        }
        match sentinel.populate() {
            // The file has become shorter.
            Err(Errno::FAULT) => return Err(NoRange::NotResident),
            populated => populated.map_err(NoRange::Map)?,
        }
        let registered = view()?;
        let has_all = || if sentinel.has_all(0, len as usize) { Ok(()) } else { Err(NoRange::NotResident) };
        has_all()?;
        if !gpu_reads::reads_registered_memory(gpu) {
            return Err(NoRange::ByProcessor);
        }
        // SAFETY: the mapping is dropped after the registration.
        let registration = match unsafe { HostRegistration::read_only(gpu, registered.base(), len as usize) } {
            Ok(registration) => registration,
            // CUDA may have met a page behind the end of a file that becomes shorter: its size is
            // less before its pages go (mm/truncate.c, truncate_setsize).
            Err(_) if size(file).is_ok_and(|size| size < offset + len) => return Err(NoRange::NotResident),
            Err(error) => return has_all().and(Err(NoRange::Cuda(error))),
        };
        let is_near = gpu.numa_node().is_none_or(|of_gpu| registered.node().is_none_or(|of_pages| of_pages == of_gpu));
        let cached_range = CachedRange {
            registration: Some(registration),
            registered,
            sentinel,
            file: file.clone(),
            offset,
            is_near,
            cuda,
            _counted: counted,
        };
        if cached_range.is_true(offset, len) { Ok(cached_range) } else { Err(NoRange::NotResident) }
    }

    /// Its length in bytes.
    pub fn len(&self) -> u64 {
        self.registered.len() as u64
    }

    /// Whether its pages lie on the NUMA node of the GPU for which it was made, as far as is known:
    /// copies from another node have to share the link between processors.
    pub fn is_near(&self) -> bool {
        self.is_near
    }

    /// Where GPUs find the byte at an offset of the file: their copy engines, and their kernels.
    pub fn address(&self, offset: u64) -> u64 {
        debug_assert!((self.offset..self.offset + self.len()).contains(&offset));
        self.registered.base().as_ptr() as u64 + (offset - self.offset)
    }

    /// Whether a copy of this range of the file, which has ended, is of the file's bytes: its pages
    /// never left the page cache, and the file did not end before it.
    pub fn is_true(&self, offset: u64, len: u64) -> bool {
        let has_all = || self.sentinel.has_all((offset - self.offset) as usize, len as usize);
        counts(has_all, || size(&self.file).ok(), offset + len)
    }
}

/// Whether a copy of bytes up to `end`, which has ended, counts. The model judges by it too.
pub(super) fn counts(sentinel_has_all: impl FnOnce() -> bool, size: impl FnOnce() -> Option<u64>, end: u64) -> bool {
    // A page in which the file ends stays where it is when the file becomes shorter within it.
    sentinel_has_all() && size().is_some_and(|size| size >= end)
}

/// A file's size, as the kernel knows it: the daemon is not asked.
fn size(file: &OwnedFd) -> Result<u64, Errno> {
    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
    rustix::fs::statx(file, c"", flags, StatxFlags::SIZE).map(|found| found.stx_size)
}

impl fmt::Debug for CachedRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CachedRange({} bytes at {})", self.len(), self.offset)
    }
}

impl Drop for CachedRange {
    fn drop(&mut self) {
        // It may end on any thread, also on one whose stream is captured.
        let _alone = self.cuda.leave_captures_alone();
        drop(self.registration.take());
    }
}
