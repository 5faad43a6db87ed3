//! The trait that every backend implements, and [`open`], the one place where the DEVICE a user named becomes a backend.
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use crate::file::FileDevice;
use crate::{Completion, Region, Request, Result};

/// What a device can do, fixed while it is open.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Geometry {
    /// Bytes on the namespace, a multiple of `logical_block`.
    pub len: u64,
    /// Every offset and length on the namespace is a multiple of this. 512 to 4096, a power of two.
    pub logical_block: u32,
    /// The start and length of each span are multiples of this. At most 4096, a power of two.
    pub memory_alignment: u32,
    /// The most bytes that one command to the device carries. Requests may be larger: the backend splits them and keeps the
    /// parts in flight together.
    pub max_transfer: u32,
    /// Commands in flight in one queue. Requests beyond it wait inside the queue.
    pub queue_depth: u32,
    /// The most queues that can be open at once.
    pub max_queues: u32,
    /// Whether completed writes can be lost in a power cut until a flush.
    pub volatile_cache: bool,
    /// Whether [`Request::discard`] works.
    pub discard: bool,
    /// Whether [`Request::write_zeroes`] works.
    pub write_zeroes: bool,
    /// Whether everything but reads and flushes is refused.
    pub read_only: bool,
}

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

/// Opens DEVICE: an NVMe controller's namespace as `vfio:0000:01:00.0`, with options after commas; or the path of a block
/// device or of an image file. It is locked against other users for as long as the device or one of its queues lives: a
/// controller and a block device exclusively whatever the mode, an image file exclusively for [`OpenMode::ReadWrite`] and
/// shared for [`OpenMode::ReadOnly`]. [`Error::Busy`] when somebody else has it.
pub fn open(device: &str, mode: OpenMode) -> Result<Arc<dyn BlockDevice>> {
    if let Some(opened) = crate::nvme::open(device, mode) {
        return Ok(Arc::new(opened?));
    }
    Ok(Arc::new(FileDevice::open(device, mode)?))
}

/// A DEVICE string without what it says about how to use the device: `vfio:0000:01:00.0` for `vfio:0000:01:00.0,ns=2`. Two
/// that agree in this name one device, or namespaces that only one process can have. A path is as it is.
pub fn without_options(device: &str) -> &str {
    let is_controller = ["vfio:", "sim:"].iter().any(|backend| device.starts_with(backend));
    if is_controller { device.split(',').next().unwrap_or(device) } else { device }
}

/// The file or block device under a DEVICE string; `None` where none is.
pub fn path_of(device: &str) -> Option<&Path> {
    let device = without_options(device);
    match device.strip_prefix("sim:") {
        Some(path) => Some(Path::new(path)),
        None if device.starts_with("vfio:") => None,
        None => Some(Path::new(device)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_devices_are_told_from_their_options() {
        let cases = [
            ("/dev/nvme0n1", "/dev/nvme0n1", Some("/dev/nvme0n1")),
            ("a,b", "a,b", Some("a,b")),
            ("vfio:0000:01:00.0,ns=2", "vfio:0000:01:00.0", None),
            ("sim:/tmp/x,ns=2,vwc=on", "sim:/tmp/x", Some("/tmp/x")),
        ];
        for (device, name, path) in cases {
            assert_eq!((without_options(device), path_of(device)), (name, path.map(Path::new)));
        }
    }
}
