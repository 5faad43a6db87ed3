//! GPU memory that the mount's SSD reaches itself: an allocation is exported and registered when
//! it is first used, and stays so ([`super::cache`] says how long).
//!
//! It guards the order of things on the GPU. CUDA's synchronous copies to registered memory are
//! complete when they return (SYNC_MEMOPS), so that the SSD reads what was copied. What an SSD
//! wrote is in place before the request is answered.
//!
//! Here the library decides between p2p and bounce: [`Registrations::get`] gives a lease for p2p,
//! or the reason why the bytes have to go through a staging pool.

use super::cache::{self, Cache, Export, Refusal, Registrar};
use crate::buffer::Shared;
use crate::device_memory::DeviceMemory;
use crate::error::Error;
use crate::mount::Mount;
use gpunvme_abi::{Reason, Route};
use gpunvme_cuda::{self as cuda, Cuda, CudaError, Gpu, Place};
use rustix::io::Errno;
use std::sync::Arc;
use std::time::Instant;

/// The registered memory of all GPUs.
pub struct Registrations {
    /// Why the mount takes no GPU memory; [`Reason::None`] where it does.
    refused: Reason,
    /// The caches, by the GPU's index; none where the mount takes no GPU memory.
    caches: Vec<Cache<Exporter>>,
}

/// Memory that is registered. While a transfer uses it, it holds this.
pub type Lease = cache::Lease<Registration>;

/// A part of an allocation, exported and registered.
#[derive(Debug)]
pub struct Registration {
    pub buffer: Arc<Shared<DeviceMemory>>,
    gpu: Gpu,
}

impl Registration {
    /// Whether what devices write to it needs a flush before the GPU sees it.
    pub fn flushes(&self) -> bool {
        self.gpu.needs_flush()
    }

    /// Whether a stream of a GPU sees it, by that flush or without.
    pub fn is_for_streams_of(&self, gpu: &Gpu) -> bool {
        self.gpu.orders_writes_for_streams_of(gpu)
    }

    /// Makes what devices wrote to it visible to work that the GPU is given from now on.
    pub fn settle(&self) -> Result<(), (Gpu, CudaError)> {
        self.gpu.flush_remote_writes().map_err(|error| (self.gpu, error))
    }
}

impl Registrations {
    /// Makes an empty set of registrations. `refused` is what the mount says of peer to peer;
    /// `budget` is the most bytes of one GPU, as much as its BAR shows if there is none.
    pub fn new(cuda: &'static Cuda, mount: &Mount, refused: Reason, budget: Option<u64>) -> Registrations {
        let cache = |gpu: Gpu| {
            let budget = budget.or_else(|| aperture(&gpu)).unwrap_or(u64::MAX);
            Cache::new(Exporter { cuda, gpu, mount: mount.clone() }, budget)
        };
        let gpus = cuda.gpus().filter(|_| refused == Reason::None);
        Registrations { refused, caches: gpus.map(cache).collect() }
    }

    /// The registration in which an address lies, a byte of the memory that was found there; or
    /// why there can be none.
    pub fn get(&self, found: &cuda::Allocation, address: u64) -> Result<Lease, Reason> {
        if self.refused != Reason::None {
            return Err(self.refused);
        }
        let gpu = match found.place {
            Place::Device(gpu) if found.primary => gpu,
            Place::Device(_) | Place::Managed => return Err(Reason::ExportRefused),
            Place::Host => return Err(Reason::NotGpuMemory),
        };
        let allocation = cache::Allocation { buffer_id: found.buffer_id, base: found.base, len: found.len };
        self.caches[gpu.index() as usize].get(&allocation, address, Instant::now())
    }

    /// Gives up what is registered of a range.
    pub fn forget(&self, address: u64, len: u64) {
        self.caches.iter().for_each(|cache| cache.forget(address, len));
    }
}

/// How much of its memory a GPU shows to other devices, in bytes: the largest of its BARs,
/// NVIDIA's BAR 1, which lies at another number from generation to generation.
fn aperture(gpu: &Gpu) -> Option<u64> {
    let resource = |number| format!("/sys/bus/pci/devices/{}/resource{number}", gpu.pci_address());
    (0..6).filter_map(|number| std::fs::metadata(resource(number)).ok()).map(|bar| bar.len()).max()
}

struct Exporter {
    cuda: &'static Cuda,
    gpu: Gpu,
    mount: Mount,
}

impl Registrar for Exporter {
    type Registration = Registration;

    fn register(&self, export: Export) -> Result<Registration, Refusal> {
        if !self.gpu.dma_buf_supported() {
            return Err(Refusal::Gpu(Reason::ExportRefused));
        }
        let refused = |error: CudaError| {
            tracing::debug!(%error, address = export.address, len = export.len, "GPU memory is not exported");
            match error.code {
                CudaError::OUT_OF_MEMORY => Refusal::NoRoom(Reason::NoRoom),
                // CUDA has no word for what this process is short of.
                _ if cuda::is_short_of_descriptors() => Refusal::NoRoom(Reason::FdNotReachable),
                _ => Refusal::Allocation(Reason::ExportRefused),
            }
        };
        // Memory that was mapped by hand (cuMemMap) does not have the setting: a synchronous copy
        // to it returns before the bytes are there, and the SSD would get what was there before.
        self.gpu.sync_memops(export.allocation.base).map_err(refused)?;
        let len = export.len as usize;
        let memory = DeviceMemory::dma_buf(self.gpu.export_dma_buf(export.address, len).map_err(refused)?, len);
        match self.mount.register(memory) {
            Ok(registered) if registered.route() == Route::P2p => Ok(Registration { buffer: registered.share(), gpu: self.gpu }),
            // What poses as a GPU's memory is host memory.
            Ok(registered) => Err(Refusal::Gpu(registered.reason())),
            Err(error) => {
                tracing::debug!(%error, "GPU memory is not registered");
                Err(of_mount(&error))
            }
        }
    }

    fn exists(&self, allocation: &cache::Allocation) -> bool {
        self.cuda.buffer_id(allocation.base).is_ok_and(|id| id == Some(allocation.buffer_id))
    }
}

/// For what it holds that the mount did not register memory.
fn of_mount(error: &Error) -> Refusal {
    match *error {
        Error::Refused { reason: reason @ (Reason::ProcessLimit | Reason::UserLimit | Reason::TotalLimit), .. } => {
            Refusal::NoRoom(reason)
        }
        // The daemon is short of something else than what the GPU gives.
        Error::Refused { reason, errno: Errno::MFILE | Errno::NFILE | Errno::NOMEM | Errno::AGAIN } if reason != Reason::None => {
            Refusal::NoRoom(reason)
        }
        Error::Refused { reason, .. } if reason != Reason::None => Refusal::Gpu(reason),
        // It says nothing of the GPU: descriptors may be short, or the daemon out of reach, for a
        // while.
        _ => Refusal::NoRoom(Reason::FdNotReachable),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_daemon_is_short_of_is_not_the_gpus_word() {
        let refused = |reason, errno| of_mount(&Error::Refused { reason, errno });
        assert_eq!(refused(Reason::MmapRefused, Errno::OPNOTSUPP), Refusal::Gpu(Reason::MmapRefused));
        assert_eq!(refused(Reason::FdNotReachable, Errno::BADF), Refusal::Gpu(Reason::FdNotReachable));
        for errno in [Errno::MFILE, Errno::NFILE, Errno::NOMEM, Errno::AGAIN] {
            assert_eq!(refused(Reason::FdNotReachable, errno), Refusal::NoRoom(Reason::FdNotReachable));
            assert_eq!(refused(Reason::None, errno), Refusal::NoRoom(Reason::FdNotReachable));
        }
        assert_eq!(refused(Reason::UserLimit, Errno::NOSPC), Refusal::NoRoom(Reason::UserLimit));
    }
}
