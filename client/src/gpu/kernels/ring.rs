//! A ring for kernels, and the order in which its memory ends: the kernels are told first, then
//! what is theirs goes, then the daemon lets go of the rest, then CUDA.

use super::layout::{self, KernelRing};
use super::memory::Own;
use super::proxy::Proxy;
use crate::buffer::{Buffer, Registered};
use crate::error::{Error, Result};
use crate::file::File;
use crate::gpu::memory::staging::Staging;
use crate::mount::Mount;
use crate::ring::{Attached, Ring};
use gpunvme_abi::ring::ring_bytes;
use gpunvme_cuda::{Cuda, Gpu, HostRegistration, Which};
use parking_lot::Mutex;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// What slots are a multiple of: blocks of files lie on blocks of slots.
pub const BLOCK: usize = 4096;
/// The fewest entries: the ring is whole pages then, as CUDA needs it.
const FEWEST: u32 = 32;

/// How large a [`GpuRing`] is, and how long its kernels wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GpuRingSettings {
    /// Requests in flight at the most: a power of two from 32 to 4096. 1024 unless told.
    pub entries: u32,
    /// Bytes that one request has room for at least, a multiple of 4096; longer reads and writes
    /// are several requests. 64 KiB unless told. Each entry has as much pinned host memory, or a
    /// page more.
    pub slot: usize,
    /// How long a kernel waits for one answer, or for a slot. 30 s unless told.
    pub patience: Duration,
}

impl Default for GpuRingSettings {
    fn default() -> Self {
        GpuRingSettings { entries: 1024, slot: 64 << 10, patience: Duration::from_secs(30) }
    }
}

/// A ring that kernels submit to and complete from: they read and write attached files by calls of
/// `gpunvme_device.h`, and no thread of the process takes part.
///
/// ```no_run
/// use gpunvme::gpu::{GpuRing, GpuRingSettings};
/// use gpunvme::{File, Mount};
///
/// let ring = GpuRing::on_gpu(&Mount::open("/data")?, 0, GpuRingSettings::default())?;
/// let file = ring.attach(&File::open("/data/model.bin")?)?;
/// // The first parameters of a kernel: gpunvme::ring and gpunvme::file.
/// let parameters = (ring.for_kernels(), file.name());
/// # let _ = parameters;
/// # Ok::<(), gpunvme::Error>(())
/// ```
///
/// Dropping it ends the waits of kernels that still use it, with the status `closed`, and waits
/// for those kernels.
#[derive(Debug)]
pub struct GpuRing {
    // In the order in which they have to end.
    _proxy: Proxy,
    _state: Own,
    given_up: GivenUp,
    _registration: Option<HostRegistration>,
    ring: Arc<Ring>,
    _staging: Pool,
    gpu: Option<Gpu>,
    for_kernels: KernelRing,
}

/// States of arrays that were dropped before a write of theirs has ended that a kernel gave up:
/// whoever takes its completion changes them.
pub(super) type GivenUp = Arc<Mutex<Vec<Arc<Own>>>>;

/// The slots.
#[derive(Debug)]
enum Pool {
    Gpu { _memory: Registered<Staging> },
    Cpu { _memory: Registered<Buffer> },
}

impl GpuRing {
    /// For the kernels of a GPU, by its number among those that the process may use.
    ///
    /// # Errors
    /// [`Error::NoCuda`], [`Error::NoSuchGpu`] and [`Error::Cuda`]; [`Error::Memory`] and
    /// [`Error::Refused`] where there is not as much memory; what [`Ring::new`] says.
    pub fn on_gpu(mount: &Mount, gpu: u32, settings: GpuRingSettings) -> Result<GpuRing> {
        let gpu = Cuda::load()?.gpu(Which::Index(gpu))?;
        let (ring, slot) = begin(mount, settings)?;
        let failed = |error| Error::on_gpu(ring.path(), "make a ring for the kernels of", &gpu, error);
        let staging = mount.register(Staging::new(ring.path(), &gpu, slot * ring.entries() as usize, 0)?)?;
        let memory = ring.memory();
        // SAFETY: the mapping lives as long as the ring, which is dropped after the registration.
        let registration = unsafe { HostRegistration::new(&gpu, memory.address(), ring_bytes(memory.entries())) };
        let registration = registration.map_err(failed)?;
        let state = filled(ring.path(), Some(gpu), &layout::state(memory.entries()))?;
        let for_kernels = KernelRing {
            memory: registration.device_address(&gpu).map_err(failed)?,
            staging: staging.memory().device_address,
            state: state.address(),
            ..of(&settings, &ring, slot, staging.id())
        };
        Ok(GpuRing {
            _proxy: Proxy::new(ring.clone())?,
            _state: state,
            given_up: GivenUp::default(),
            _registration: Some(registration),
            ring,
            _staging: Pool::Gpu { _memory: staging },
            gpu: Some(gpu),
            for_kernels,
        })
    }

    /// For kernels that were compiled for the CPU, and run as functions of threads of this
    /// process: to try and to debug them where there is no GPU. They must have ended before the
    /// ring is dropped.
    ///
    /// # Errors
    /// [`Error::Memory`] and [`Error::Refused`] where there is not as much memory; what
    /// [`Ring::new`] says.
    pub fn on_cpu(mount: &Mount, settings: GpuRingSettings) -> Result<GpuRing> {
        let (ring, slot) = begin(mount, settings)?;
        let mut staging = mount.register(Buffer::memfd(slot * ring.entries() as usize)?)?;
        let state = filled(ring.path(), None, &layout::state(ring.entries()))?;
        let for_kernels = KernelRing {
            memory: ring.memory().address().as_ptr() as u64,
            staging: staging.as_mut_ptr() as u64,
            state: state.address(),
            ..of(&settings, &ring, slot, staging.id())
        };
        Ok(GpuRing {
            _proxy: Proxy::new(ring.clone())?,
            _state: state,
            given_up: GivenUp::default(),
            _registration: None,
            ring,
            _staging: Pool::Cpu { _memory: staging },
            gpu: None,
            for_kernels,
        })
    }

    /// Makes an open file known to the ring, as [`Ring::attach`]. A kernel names it by
    /// [`Attached::name`]; one that names it after it was detached gets `EBADF`.
    ///
    /// # Errors
    /// As [`Ring::attach`].
    pub fn attach(&self, file: &File) -> Result<Attached> {
        self.ring.attach(file)
    }

    /// The GPU whose kernels use it.
    pub(super) fn gpu(&self) -> Option<Gpu> {
        self.gpu
    }

    /// What its arrays leave to it.
    pub(super) fn given_up(&self) -> GivenUp {
        self.given_up.clone()
    }

    /// Bytes of a slot.
    pub(super) fn slot(&self) -> usize {
        self.for_kernels.slot_bytes as usize
    }

    /// What kernels get as their `gpunvme::ring`. It is valid as long as this.
    pub fn for_kernels(&self) -> KernelRing {
        self.for_kernels
    }
}

/// The queues, and the bytes of a slot: an odd number of blocks, since the processor's caches keep
/// few pages whose addresses differ by a large power of two.
fn begin(mount: &Mount, settings: GpuRingSettings) -> Result<(Arc<Ring>, usize)> {
    const MOST: usize = Ring::MAX_TRANSFER as usize / BLOCK - 1;
    let blocks = settings.slot.div_ceil(BLOCK).clamp(1, MOST) | 1;
    Ok((Arc::new(Ring::new(mount, settings.entries.max(FEWEST))?), blocks * BLOCK))
}

/// What kernels have to know, without addresses.
fn of(settings: &GpuRingSettings, ring: &Ring, slot: usize, buffer: u64) -> KernelRing {
    KernelRing {
        memory: 0,
        staging: 0,
        state: 0,
        buffer,
        patience: settings.patience.as_nanos().try_into().unwrap_or(u64::MAX),
        entries: ring.entries(),
        slot_bytes: slot as u32,
        unused: [0; 2],
    }
}

/// Memory of submitters with these bytes.
fn filled(path: &Path, gpu: Option<Gpu>, bytes: &[u8]) -> Result<Own> {
    let mut memory = Own::new(path, gpu, bytes.len())?;
    memory.put(path, 0, bytes)?;
    Ok(memory)
}
