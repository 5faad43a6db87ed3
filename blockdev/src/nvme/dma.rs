//! Memory that the controller reaches. It guards the order of things: memory is mapped before a command names it, a mapping
//! goes before the memory behind it does, and memory that could not be unmapped is never given back.
//!
//! Looking up a region's IOVA takes no lock ([`crate::mappings`]); `state` is locked to map and to unmap, also across the
//! system call, so that two mappings of one region cannot race.
use std::collections::BTreeMap;
use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::sync::atomic::AtomicU32;

use parking_lot::Mutex;
use zerocopy::{FromBytes, Immutable, IntoBytes};

use super::iova::IovaAllocator;
use super::transport::Transport;
use crate::mappings::Domain;
use crate::{Error, Region, Result};

/// Mappings of this size and more are aligned to it, so that the IOMMU can use its large pages.
const LARGE_PAGES: [u64; 2] = [1 << 30, 2 << 20];

/// The IOMMU address space of one controller.
pub(crate) struct Dma {
    transport: Arc<dyn Transport>,
    domain: Domain,
    /// Granularity of mappings in bytes: a page of the host, at least.
    page: u64,
    state: Mutex<State>,
}

struct State {
    iovas: IovaAllocator,
    /// What is mapped: bytes by IOVA.
    live: BTreeMap<u64, u64>,
    /// Whether the controller was shut off from all memory, for good.
    fenced: bool,
}

impl Dma {
    /// An empty address space. `page` is the controller's memory page.
    pub(crate) fn new(transport: Arc<dyn Transport>, page: u64) -> Arc<Self> {
        let page = page.max(rustix::param::page_size() as u64);
        let iovas = IovaAllocator::new(&transport.iova_ranges(), page);
        Arc::new(Self {
            transport,
            domain: Domain::new(),
            page,
            state: Mutex::new(State { iovas, live: BTreeMap::new(), fenced: false }),
        })
    }

    /// The IOVA of a region's first byte, if it is mapped.
    #[inline]
    pub(crate) fn address(&self, region: &Region) -> Option<u64> {
        region.mappings().get(self.domain)
    }

    /// Maps a region, if it is not. The caller keeps it alive until [`Dma::unmap`].
    pub(crate) fn map(&self, region: &Region) -> Result<()> {
        let mut state = self.state.lock();
        if self.address(region).is_some() {
            return Ok(());
        }
        if state.fenced {
            return Err(Error::Gone { device: self.transport.name().into() });
        }
        let len = (region.len() as u64).next_multiple_of(self.page);
        let align = LARGE_PAGES.into_iter().find(|large| len >= *large).unwrap_or(self.page).max(self.page);
        let failed = |errno| Error::Memory { action: "mapping for DMA", len: len as usize, errno };
        let iova = state.iovas.allocate(len, align).ok_or_else(|| failed(libc::ENOSPC))?;
        // SAFETY: a region is mapped to the end of its last page as long as it lives, the caller keeps it alive, and Rust code
        // holds no reference into it while a request is in flight (the region's module guards that).
        if let Err(error) = unsafe { self.transport.map(region.as_ptr(), len as usize, iova, region.writable()) } {
            state.iovas.free(iova, len);
            return Err(error);
        }
        state.live.insert(iova, len);
        if region.mappings().insert(self.domain, iova) {
            return Ok(());
        }
        self.remove(&mut state, iova)?;
        Err(Error::Unsupported {
            device: self.transport.name().into(),
            reason: "the memory is mapped for too many devices at once; unregister it from one of them".into(),
        })
    }

    /// Undoes [`Dma::map`]. No command may name the region any more. After an error the memory must never be given back.
    pub(crate) fn unmap(&self, region: &Region) -> Result<()> {
        let mut state = self.state.lock();
        match region.mappings().remove(self.domain) {
            Some(iova) => self.remove(&mut state, iova),
            None => Ok(()),
        }
    }

    /// Unmaps everything at once, for good: the IOMMU then keeps a controller that cannot be stopped from all memory.
    pub(crate) fn fence(&self) -> Result<()> {
        let mut state = self.state.lock();
        state.fenced = true;
        let all: Vec<u64> = state.live.keys().copied().collect();
        // What can be removed is, whatever becomes of the rest.
        let mut fenced = Ok(());
        for iova in all {
            fenced = fenced.and(self.remove(&mut state, iova));
        }
        fenced
    }

    fn remove(&self, state: &mut State, iova: u64) -> Result<()> {
        // Not there after a fence.
        let Some(len) = state.live.get(&iova).copied() else { return Ok(()) };
        self.transport.unmap(iova, len as usize)?;
        state.live.remove(&iova);
        state.iovas.free(iova, len);
        Ok(())
    }

    /// New zeroed memory of the driver's own, mapped.
    pub(crate) fn allocate(self: &Arc<Self>, len: usize) -> Result<DmaMemory> {
        let region = Region::allocate(len)?;
        self.map(&region)?;
        let iova = self.address(&region).expect("it was mapped above");
        Ok(DmaMemory { dma: self.clone(), region: ManuallyDrop::new(region), iova })
    }
}

/// Memory of the driver's own: queues, lists, bounce buffers. Unmapped and given back when dropped.
pub(crate) struct DmaMemory {
    dma: Arc<Dma>,
    region: ManuallyDrop<Arc<Region>>,
    iova: u64,
}

/// Why copies cannot fail.
const INSIDE: &str = "the driver stays inside its own memory";

impl DmaMemory {
    /// The IOVA of a byte of it.
    pub(crate) fn iova(&self, offset: usize) -> u64 {
        self.iova + offset as u64
    }

    /// Stores a structure.
    #[inline]
    pub(crate) fn write<T: IntoBytes + Immutable + ?Sized>(&self, offset: usize, value: &T) {
        self.region.write_at(offset, value.as_bytes()).expect(INSIDE);
    }

    /// Loads a structure.
    #[inline]
    pub(crate) fn read<T: FromBytes + IntoBytes>(&self, offset: usize) -> T {
        let mut value = T::new_zeroed();
        self.region.read_at(offset, value.as_mut_bytes()).expect(INSIDE);
        value
    }

    /// Copies bytes out.
    pub(crate) fn read_bytes(&self, offset: usize, out: &mut [u8]) {
        self.region.read_at(offset, out).expect(INSIDE);
    }

    /// Four bytes that the controller may be changing.
    #[inline]
    pub(crate) fn atomic(&self, offset: usize) -> &AtomicU32 {
        self.region.atomic(offset)
    }

    /// Makes it zero.
    pub(crate) fn clear(&self) {
        self.region.zero_at(0, self.region.len()).expect(INSIDE);
    }
}

impl Drop for DmaMemory {
    fn drop(&mut self) {
        match self.dma.unmap(&self.region) {
            // SAFETY: dropped here and nowhere else, and not used afterwards.
            Ok(()) => unsafe { ManuallyDrop::drop(&mut self.region) },
            Err(error) => {
                tracing::error!(%error, bytes = self.region.len(), "memory stays mapped for DMA; it is kept until the process ends");
            }
        }
    }
}
