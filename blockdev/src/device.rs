//! The traits that every backend implements: [`BlockDevice`] and its [`Queue`]s.
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::{Completion, Geometry, Region, Request, Result, StripeMap};

/// A namespace that is open. It is used from any number of threads at once.
pub trait BlockDevice: Send + Sync {
    /// The DEVICE string that the user gave.
    fn name(&self) -> &str;

    /// What the device can do.
    fn geometry(&self) -> &Geometry;

    /// Opens a new queue pair, which keeps the device open as long as it lives. Dropping it waits
    /// for the commands in flight, whose completions are then lost.
    ///
    /// # Errors
    /// [`crate::Error::Unsupported`] when [`Geometry::max_queues`] are open, or the kernel has no
    /// io_uring for this process; [`crate::Error::System`] or [`crate::Error::Admin`] when the
    /// kernel or the controller refuses a queue, [`crate::Error::Gone`] or
    /// [`crate::Error::Controller`] when the device is unusable.
    fn open_queue(&self) -> Result<Box<dyn Queue>>;

    /// As [`BlockDevice::open_queue`], for a thread that does little else than to submit and to
    /// collect. Where that helps the backend, and there are processors enough, the kernel has a
    /// thread of its own that submits for this queue while it is in use (io_uring_setup(2),
    /// `IORING_SETUP_SQPOLL`); for one that `beside` is given, the thread of that queue, which the
    /// same thread submits to.
    ///
    /// # Errors
    /// Those of [`BlockDevice::open_queue`].
    fn open_busy_queue(&self, _beside: Option<&dyn Queue>) -> Result<Box<dyn Queue>> {
        self.open_queue()
    }

    /// Makes a region reachable for the device's DMA ahead of I/O, and pins it where
    /// [`BlockDevice::pins`]. Requests on other regions work too, through a bounce buffer where
    /// the backend needs one. The device does not keep the region alive: unmap it before its last
    /// owner drops it. Mapping a region again changes nothing.
    ///
    /// It may take milliseconds for each 64 MiB. No lock is held meanwhile that I/O needs.
    ///
    /// # Errors
    /// [`crate::Error::LockedMemory`] beyond RLIMIT_MEMLOCK, [`crate::Error::RegionSparse`] or
    /// [`crate::Error::RegionShrunk`] where pages are missing, [`crate::Error::Memory`] without
    /// IOVAs left, [`crate::Error::Unsupported`] for a region that is mapped for 16 devices
    /// already, [`crate::Error::System`] with what the kernel says (`VFIO_IOMMU_MAP_DMA`,
    /// linux/vfio.h), [`crate::Error::Gone`] after the device was given up. Nothing of the region
    /// is mapped then.
    fn map(&self, region: &Arc<Region>) -> Result<()>;

    /// Undoes [`BlockDevice::map`]. No request on the region may be in flight. A failure is
    /// logged: the memory then stays mapped until the device is closed.
    fn unmap(&self, region: &Region);

    /// Whether [`BlockDevice::map`] can take regions of other devices' memory
    /// ([`Region::of_device`]). That it can in general does not say that the IOMMU takes a given
    /// one.
    ///
    /// # Errors
    /// Why the device cannot.
    fn peer_to_peer(&self) -> std::result::Result<(), NoPeerToPeer> {
        Err(NoPeerToPeer::KernelDriver)
    }

    /// Whether [`BlockDevice::map`] pins all of a region's host memory, and allocates those of its
    /// pages that do not exist yet.
    fn pins(&self) -> bool {
        false
    }

    /// The DEVICE strings of the members, in their order; of what is no stripe, its own.
    fn member_names(&self) -> Vec<&str> {
        vec![self.name()]
    }

    /// The DEVICE string of what has no discard ([`Geometry::discard`]): the device, or the first
    /// of its members that has none.
    fn without_discard(&self) -> Option<&str> {
        (!self.geometry().discard).then(|| self.name())
    }

    /// Looks how long the device is now, and takes requests up to there from now on. One that
    /// became shorter is taken for as long as it was. Returns the bytes that it has.
    ///
    /// # Errors
    /// [`crate::Error::System`], [`crate::Error::Admin`] or [`crate::Error::Gone`] where it does
    /// not say.
    fn look_again(&self) -> Result<u64> {
        Ok(self.geometry().len.get())
    }

    /// Of a stripe whose members' data became longer: takes requests up to `len` bytes from now on.
    ///
    /// # Errors
    /// [`crate::Error::Unsupported`] for what is no stripe, or a member that is too short.
    fn lengthen(&self, _len: u64) -> Result<()> {
        let reason = "is no stripe, and is as long as it says".into();
        Err(crate::Error::Unsupported { device: self.name().into(), reason })
    }

    /// Whether [`BlockDevice::add_set`] can be done with these.
    ///
    /// # Errors
    /// [`crate::Error::Unsupported`], as there.
    fn may_add_set(&self, _members: &[Arc<dyn BlockDevice>], _map: &StripeMap, _len: u64) -> Result<()> {
        let reason = "is no stripe, and has no members".into();
        Err(crate::Error::Unsupported { device: self.name().into(), reason })
    }

    /// Of a stripe in use: gives it the members of a further set, so that it lies as `map` says and
    /// has `len` bytes. It does when all is ready and `begin` has returned; with an error, nothing
    /// has changed.
    ///
    /// # Errors
    /// [`crate::Error::Unsupported`] for what is no stripe, and for members that do less than the
    /// others, are too small or too many; those of the members' queues and mappings, and of
    /// `begin`.
    fn add_set(
        &self,
        members: &[Arc<dyn BlockDevice>],
        map: StripeMap,
        len: u64,
        _begin: &mut dyn FnMut() -> Result<()>,
    ) -> Result<()> {
        self.may_add_set(members, &map, len)
    }

    /// The members, where it is a stripe.
    fn members(&self) -> Vec<Arc<dyn BlockDevice>> {
        Vec::new()
    }

    /// How the device lies on its members, where it is a stripe.
    fn stripe(&self) -> Option<&StripeMap> {
        None
    }
}

/// Why a device cannot reach the memory of other devices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NoPeerToPeer {
    /// A driver of the kernel runs it, and takes only memory that the kernel can pin.
    KernelDriver,
    /// Its IOMMU is set up through iommufd's imitation of the type1 container, which takes no
    /// device memory.
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

/// One submission and completion queue pair. One thread may submit while another completes: each
/// side has a lock of its own, and neither is held while the other side waits for the device.
pub trait Queue: Send + Sync {
    /// The io_uring whose submissions a thread of the kernel makes, where one does.
    fn kernel_thread(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// Takes all requests and leaves the vector empty. It never waits for the device: requests
    /// beyond [`Geometry::queue_depth`] wait inside, and go out as completions come in. A request
    /// that the device cannot take completes with the error of [`Request::check`].
    fn submit(&self, requests: &mut Vec<Request>);

    /// Appends completions to `out` and returns how many. Every request completes exactly once,
    /// and its spans are dropped before its completion is handed out. Returns 0 after the timeout,
    /// when woken, and sometimes for no reason.
    ///
    /// # Errors
    /// [`crate::Error::System`] when the queue is broken for good; what is in flight on it may
    /// stay so for ever. The failure of a request is in its [`Completion`] instead.
    fn complete(&self, wait: Wait, out: &mut Vec<Completion>) -> Result<usize>;

    /// Makes the call of [`Queue::complete`] that waits, or the next one that would, return.
    fn wake(&self);

    /// Flushes by a system call of this thread, which waits for it. None where a flush is a request
    /// like any other.
    fn flush_here(&self) -> Option<Result<()>> {
        None
    }

    /// For a thread that waits for several queues, and collects with [`Wait::No`]: what it can
    /// sleep on. The descriptor can be read when there may be something to collect. None where the
    /// thread has to look again at once: something is there by now, or the queue is polled, or is
    /// worth it because the thread has waited only since `since`. One thread at a time calls this
    /// and [`Queue::complete`]. A queue without such a descriptor always has to be looked at.
    ///
    /// # Errors
    /// Those of [`Queue::complete`].
    fn sleep_on(&self, since: Instant) -> Result<Option<BorrowedFd<'_>>> {
        let _ = since;
        Ok(None)
    }
}

/// What a device is opened for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OpenMode {
    /// Reads and flushes only.
    ReadOnly,
    /// Everything.
    ReadWrite,
}
