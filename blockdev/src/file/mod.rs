//! A device on an image file or a kernel block device: direct I/O through io_uring.
//!
//! `claim` opens and locks it, `geometry` finds out what it can do, `uring` runs its requests.
mod claim;
#[allow(unsafe_code)]
mod command;
mod geometry;
#[allow(unsafe_code)]
mod lock;
mod target;
#[allow(unsafe_code)]
mod uring;

use std::num::NonZero;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::sync::Arc;

use rustix::fs::OFlags;

pub(crate) use claim::{Claim, open_exclusively};

use target::Target;
use uring::{Submission, UringQueue};

use crate::{BlockDevice, Geometry, OpenMode, Queue, Region, Result};

/// On a machine with fewer a thread of the kernel that looks for commands takes more from others
/// than it gives.
const PROCESSORS_TO_SPARE_ONE: usize = 8;

/// An open image file or block device. The lock goes with the open file.
pub(crate) struct FileDevice {
    target: Arc<Target>,
}

impl FileDevice {
    pub(crate) fn open(device: &str, mode: OpenMode, claim: Claim) -> Result<Self> {
        let name: Arc<str> = device.into();
        let (file, kind) = open_exclusively(&name, Path::new(device), mode, claim, OFlags::DIRECT)?;
        let geometry = geometry::probe(&name, &file, kind, mode)?;
        tracing::debug!(device, ?kind, ?geometry, "opened");
        Ok(Self { target: Arc::new(Target { name, geometry, file, kind }) })
    }

    fn queue(&self, submission: Submission) -> Result<UringQueue> {
        UringQueue::new(self.target.clone(), submission)
    }
}

impl BlockDevice for FileDevice {
    fn name(&self) -> &str {
        &self.target.name
    }

    fn geometry(&self) -> &Geometry {
        &self.target.geometry
    }

    fn open_queue(&self) -> Result<Box<dyn Queue>> {
        Ok(Box::new(self.queue(Submission::BySystemCall)?))
    }

    fn open_busy_queue(&self, beside: Option<&dyn Queue>) -> Result<Box<dyn Queue>> {
        let processors = std::thread::available_parallelism().map_or(1, NonZero::get);
        if processors < PROCESSORS_TO_SPARE_ONE {
            return self.open_queue();
        }
        let of = beside.and_then(|queue| queue.kernel_thread()).map(|ring| ring.as_raw_fd());
        Ok(Box::new(self.queue(Submission::ByKernelThread { of })?))
    }

    /// The kernel pins the pages of each request by itself.
    fn map(&self, _region: &Arc<Region>) -> Result<()> {
        Ok(())
    }

    fn unmap(&self, _region: &Region) {}

    fn look_again(&self) -> Result<u64> {
        let Target { name, geometry, file, .. } = &*self.target;
        let len = geometry::length(name, file, geometry.logical_block)?;
        geometry.len.grow(len);
        Ok(len)
    }
}
