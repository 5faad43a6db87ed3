//! The traits that every backend implements: [`BlockDevice`] and its [`Queue`]s.
use std::sync::Arc;
use std::time::Duration;

use crate::{Completion, Geometry, Region, Request, Result};

/// A namespace.
pub trait BlockDevice: Send + Sync {
    /// The DEVICE string that the user gave.
    fn name(&self) -> &str;

    /// What the device can do.
    fn geometry(&self) -> &Geometry;

    /// A new queue pair. It keeps the device open as long as it lives. Dropping it waits for the commands in flight, whose
    /// completions are then lost.
    fn open_queue(&self) -> Result<Box<dyn Queue>>;

    /// As [`BlockDevice::open_queue`], for a thread that does little else than to submit and to collect: where that helps it, and there are processors
    /// enough, one of them works for this queue alone while it is in use.
    fn open_busy_queue(&self) -> Result<Box<dyn Queue>> {
        self.open_queue()
    }

    /// Makes a region reachable for the device's DMA ahead of I/O. Requests on other regions work too, through a bounce
    /// buffer where the backend needs one. The device does not keep the region alive: unmap it before its last owner drops it.
    fn map(&self, region: &Arc<Region>) -> Result<()>;

    /// Undoes [`BlockDevice::map`]. No request on the region may be in flight.
    fn unmap(&self, region: &Region);

    /// Whether [`BlockDevice::map`] can take regions of other devices' memory ([`Region::of_device`]), and if not, why. That
    /// it can in general does not say that the IOMMU takes a given one.
    fn peer_to_peer(&self) -> std::result::Result<(), NoPeerToPeer> {
        Err(NoPeerToPeer::KernelDriver)
    }

    /// Whether [`BlockDevice::map`] pins all of a region's host memory, and brings into being what of it was never touched.
    fn pins(&self) -> bool {
        false
    }
}

/// Why a device cannot reach the memory of other devices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NoPeerToPeer {
    /// A driver of the kernel runs it, and takes only memory that the kernel can pin.
    KernelDriver,
    /// Its IOMMU is set up through iommufd's imitation of the type1 container, which takes no device memory.
    IommufdCompat,
}

/// How long [`Queue::complete`] waits for the first completion.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wait {
    /// Not at all.
    No,
    /// At most this long.
    Timeout(Duration),
    /// Until there is one, or [`Queue::wake`] is called.
    Forever,
}

/// One submission and completion queue pair. Submitting and completing may be done from different threads at once: each side
/// is locked inside, and neither lock is held while the device is waited for by the other side.
pub trait Queue: Send + Sync {
    /// Takes all requests and leaves the vector empty. Never blocks: what exceeds the depth waits inside and goes out as
    /// completions come in. A request that the device cannot take completes with the error.
    fn submit(&self, requests: &mut Vec<Request>);

    /// Appends completions to `out` and returns how many: every request completes exactly once. The spans of a request are
    /// dropped before its completion is handed out. Returns 0 after the timeout, when woken, and sometimes for no reason.
    /// An error means that the queue is broken for good.
    fn complete(&self, wait: Wait, out: &mut Vec<Completion>) -> Result<usize>;

    /// Makes a waiting [`Queue::complete`], or the next one that would wait, return.
    fn wake(&self);
}

/// What a device is opened for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OpenMode {
    /// Reads and flushes only.
    ReadOnly,
    /// Everything.
    ReadWrite,
}
