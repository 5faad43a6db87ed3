//! The IOMMU address space of one controller. It guards that memory is mapped before a command
//! names it, that a mapping goes before the memory behind it does, and that memory that could not
//! be unmapped is never given back.
//!
//! Looking up a region's IOVA takes no lock ([`crate::mappings`]). `state` is locked for moments,
//! never across a system call: pinning memory takes milliseconds for each 64 MiB, and the driver's
//! own small mappings must not wait for a client's large one. A region whose mapping changes is in
//! `AddressSpace::changing` meanwhile; other threads that want to change it wait. The kernel has
//! one lock for all mappings of a container, so a large region is mapped in steps.
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, HashSet};
use std::mem::ManuallyDrop;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use parking_lot::{Condvar, Mutex, MutexGuard};
use zerocopy::{FromBytes, Immutable, IntoBytes};

use super::iova::IovaAllocator;
use crate::mappings::Domain;
use crate::transport::Transport;
use crate::{Error, Region, Result};

/// Mappings of this size and more are aligned to it, so that the IOMMU can use its large pages.
const LARGE_PAGES: [u64; 2] = [1 << 30, 2 << 20];
/// Bytes of host memory that one system call pins.
const HOST_STEP: u64 = 64 << 20;
/// Bytes of a device's memory that one system call maps. Nothing is pinned, and the IOMMU's
/// largest pages stay usable.
const DEVICE_STEP: u64 = 1 << 30;

/// The IOMMU address space of one controller.
pub(crate) struct Dma {
    transport: Arc<dyn Transport>,
    domain: Domain,
    /// Granularity of IOVAs in bytes: the larger of the controller's page and the host's.
    page: u64,
    /// Granularity of what is mapped: a page of the host. Behind the last of a region there is
    /// memory of others, or none.
    host_page: u64,
    /// Whether the controller was shut off from all memory, for good. Set under `state`.
    fenced: AtomicBool,
    state: Mutex<AddressSpace>,
    /// Signalled when a region leaves `AddressSpace::changing`.
    settled: Condvar,
}

struct AddressSpace {
    iovas: IovaAllocator,
    /// What is mapped, by its first IOVA.
    live: BTreeMap<u64, Mapping>,
    /// The regions, by their addresses, that a thread is mapping or unmapping now.
    changing: HashSet<usize>,
}

/// IOVAs that one region has.
#[derive(Clone)]
struct Mapping {
    /// Bytes that are mapped.
    len: u64,
    /// Bytes of IOVAs.
    reserved: u64,
    /// Bytes that one system call mapped; the last step may be shorter.
    step: u64,
    /// Memory of another device, which that could give to another program when the last handle
    /// goes. Host memory is pinned by the mapping itself.
    device_memory: Option<Arc<Region>>,
}

impl Mapping {
    /// The steps of the mapping that begins at `iova`, as offsets from there.
    fn steps(&self) -> impl Iterator<Item = Range<u64>> + use<> {
        let (len, step) = (self.len, self.step);
        (0..len.div_ceil(step)).map(move |number| number * step..len.min((number + 1) * step))
    }
}

impl Dma {
    /// An empty address space. `page` is the controller's memory page.
    pub(crate) fn new(transport: Arc<dyn Transport>, page: u64) -> Arc<Self> {
        let host_page = rustix::param::page_size() as u64;
        let page = page.max(host_page);
        let iovas = IovaAllocator::new(&transport.iova_ranges(), page);
        Arc::new(Self {
            transport,
            domain: Domain::new(),
            page,
            host_page,
            fenced: AtomicBool::new(false),
            state: Mutex::new(AddressSpace { iovas, live: BTreeMap::new(), changing: HashSet::new() }),
            settled: Condvar::new(),
        })
    }

    /// The IOVA of a region's first byte, if it is mapped.
    #[inline]
    pub(crate) fn address(&self, region: &Region) -> Option<u64> {
        region.mappings().get(self.domain)
    }

    /// Maps a region, if it is not. The caller keeps it alive until [`Dma::unmap`].
    ///
    /// # Errors
    /// What the transport says of the memory; [`Error::Gone`] after [`Dma::fence`]. Nothing of the
    /// region is then mapped.
    pub(crate) fn map(&self, region: &Arc<Region>) -> Result<()> {
        let mut state = self.change(region);
        if self.address(region).is_some() {
            self.settle(state, region);
            return Ok(());
        }
        let len = (region.len() as u64).next_multiple_of(self.host_page);
        let reserved = len.next_multiple_of(self.page);
        let align = LARGE_PAGES.into_iter().find(|large| len >= *large).unwrap_or(self.page).max(self.page);
        let Some(iova) = state.iovas.allocate(reserved, align) else {
            self.settle(state, region);
            return Err(Error::Memory { action: "mapping for DMA", len: len as usize, errno: libc::ENOSPC });
        };
        drop(state);

        let device_memory = region.is_device_memory().then(|| region.clone());
        let step = if device_memory.is_some() { DEVICE_STEP } else { HOST_STEP };
        let mapping = Mapping { len, reserved, step, device_memory };
        let mut mapped = 0;
        let mut result = Ok(());
        for step in mapping.steps() {
            result = self.map_step(region, iova, &step);
            if result.is_err() {
                break;
            }
            mapped = step.end;
        }
        if result.is_ok() && !region.mappings().insert(self.domain, iova) {
            result = Err(Error::Unsupported {
                device: self.transport.name().into(),
                reason: "the memory is mapped for too many devices at once; unregister it from one of them".into(),
            });
        }
        let left = if result.is_err() { self.unmap_steps(iova, &Mapping { len: mapped, ..mapping.clone() }) } else { Ok(()) };

        let mut state = self.state.lock();
        if result.is_ok() || left.is_err() {
            state.live.insert(iova, mapping);
        } else {
            state.iovas.free(iova, reserved);
        }
        self.settle(state, region);
        if let Err(error) = left {
            tracing::error!(%error, "memory that was not to be mapped stays mapped for DMA until the device is closed");
        }
        result
    }

    fn map_step(&self, region: &Region, iova: u64, step: &Range<u64>) -> Result<()> {
        if self.fenced.load(Ordering::Acquire) {
            return Err(Error::Gone { device: self.transport.name().into() });
        }
        let address = region.as_ptr().wrapping_add(step.start as usize);
        let len = (step.end - step.start) as usize;
        // SAFETY: a region is mapped to the end of its last page as long as it lives, the caller
        // keeps it alive, and Rust code holds no reference into it while a request is in flight
        // (the region's module guards that).
        unsafe { self.transport.map(address, len, iova + step.start, region.writable()) }
    }

    /// Undoes [`Dma::map`]. No command may name the region any more. After an error the memory
    /// must never be given back.
    ///
    /// # Errors
    /// What the transport says; then the controller may still reach a part of the region.
    pub(crate) fn unmap(&self, region: &Region) -> Result<()> {
        let mut state = self.change(region);
        // Not in `live` after a fence.
        let mapping = region.mappings().remove(self.domain).and_then(|iova| Some((iova, state.live.remove(&iova)?)));
        let Some((iova, mapping)) = mapping else {
            self.settle(state, region);
            return Ok(());
        };
        drop(state);
        let unmapped = self.unmap_steps(iova, &mapping);
        let mut state = self.state.lock();
        match unmapped {
            Ok(()) => state.iovas.free(iova, mapping.reserved),
            // Its IOVAs are never given out again.
            Err(_) => drop(state.live.insert(iova, mapping)),
        }
        self.settle(state, region);
        unmapped
    }

    /// Unmaps everything, for good: the IOMMU then keeps a controller that cannot be stopped from
    /// all memory. Waits for a mapping in flight, one step of it at the most.
    ///
    /// # Errors
    /// The transport's first; what else can be unmapped is.
    pub(crate) fn fence(&self) -> Result<()> {
        let mut state = self.state.lock();
        self.fenced.store(true, Ordering::Release);
        while !state.changing.is_empty() {
            self.settled.wait(&mut state);
        }
        let mut fenced = Ok(());
        for (iova, mapping) in std::mem::take(&mut state.live) {
            match self.unmap_steps(iova, &mapping) {
                Ok(()) => state.iovas.free(iova, mapping.reserved),
                Err(error) => {
                    state.live.insert(iova, mapping);
                    fenced = fenced.and(Err(error));
                }
            }
        }
        fenced
    }

    /// Unmaps what of a mapping is mapped; all that can be. What stays mapped is never given back.
    fn unmap_steps(&self, iova: u64, mapping: &Mapping) -> Result<()> {
        let mut result = Ok(());
        for step in mapping.steps() {
            let unmapped = self.transport.unmap(iova + step.start, (step.end - step.start) as usize);
            result = result.and(unmapped);
        }
        if result.is_err() {
            std::mem::forget(mapping.device_memory.clone());
        }
        result
    }

    /// Makes this thread the only one that changes a region's mapping, until [`Dma::settle`].
    fn change(&self, region: &Region) -> MutexGuard<'_, AddressSpace> {
        let mut state = self.state.lock();
        while !state.changing.insert(key(region)) {
            self.settled.wait(&mut state);
        }
        state
    }

    fn settle(&self, mut state: MutexGuard<'_, AddressSpace>, region: &Region) {
        state.changing.remove(&key(region));
        drop(state);
        self.settled.notify_all();
    }

    /// New zeroed memory of the driver's own, mapped.
    pub(crate) fn allocate(self: &Arc<Self>, len: usize) -> Result<DmaMemory> {
        let region = Region::allocate(len)?;
        self.map(&region)?;
        let iova = self.address(&region).expect("it was mapped above");
        Ok(DmaMemory { dma: self.clone(), region: ManuallyDrop::new(region), iova })
    }
}

/// What tells a region from all others that live.
fn key(region: &Region) -> usize {
    region.as_ptr().addr()
}

/// Memory of the driver's own: queues, lists, bounce buffers. Unmapped and given back when
/// dropped.
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
