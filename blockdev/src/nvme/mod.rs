//! The userspace NVMe driver: a [`BlockDevice`] on a controller that a `Transport` reaches.
//!
//! From the top: `NvmeDevice` is a namespace; `io_queue` runs its requests; `encoder` makes
//! commands of them, and `scatter` describes their memory; `queue` is the pair of rings, for
//! `admin` as well; `dma` maps memory; `controller` brings everything up and down, and `recovery`
//! watches over it while it runs.
//!
//! A controller has one owner: the device and its queues share it, and the last of them shuts it
//! down.
mod admin;
mod bounce;
mod command_ids;
mod controller;
#[allow(unsafe_code)]
mod dma;
mod encoder;
mod io_queue;
mod iova;
mod maintenance;
mod namespace;
mod options;
mod queue;
mod queue_setup;
mod recovery;
mod scatter;

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Instant;

pub use maintenance::{BlockFormat, Controller, ControllerInfo, Erase, ErrorEntry, NamespaceInfo, Register, Smart};

use controller::Core;
use io_queue::IoQueue;
use namespace::Namespace;
pub(crate) use options::Options;
use queue_setup::QueueSetup;
use scatter::Limits;

pub use crate::spec::Status;
use crate::spec::cns;
use crate::spec::identify::{IdentifyNamespace, oncs};
use crate::transport::Transport;
use crate::{BlockDevice, Completion, Error, Geometry, Length, NoPeerToPeer, OpenMode, Queue, Region, Request, Result, Wait};

/// Bytes of a chunk of a queue's bounce buffer.
const BOUNCE: u64 = 128 << 10;
/// The most bytes of a discard command, so that none takes for ever.
const MAX_DISCARD: u64 = 1 << 30;
/// PRPs and many SGLs take addresses that are multiples of this (Base 4.1.1).
const MEMORY_ALIGNMENT: u32 = 4;

/// A controller that is up, and the thread that looks after it.
struct Running {
    core: Arc<Core>,
    /// Ends this supervisor. The controller may be brought up again, with another.
    stopping: Arc<AtomicBool>,
    supervisor: Option<JoinHandle<()>>,
}

impl Running {
    /// Brings a controller up.
    fn start(core: Arc<Core>) -> Result<Arc<Self>> {
        let mut running = Self { core, stopping: Arc::default(), supervisor: None };
        let core = &running.core;
        {
            let mut lifecycle = core.lifecycle();
            core.disable()?;
            core.take_subsystem_reset()?;
            core.enable(&mut lifecycle)?;
            core.note_power(&mut lifecycle)?;
        }
        let (core, stopping) = (core.clone(), running.stopping.clone());
        let name = core.name.clone();
        let spawned = std::thread::Builder::new().name("nvme".into()).spawn(move || recovery::supervise(&core, &stopping));
        running.supervisor = Some(spawned.map_err(|error| Error::System {
            device: name,
            action: "starting the supervisor thread of the controller",
            errno: error.raw_os_error().unwrap_or(libc::EAGAIN),
        })?);
        Ok(Arc::new(running))
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.stopping.store(true, Ordering::Release);
        self.core.event.signal();
        if let Some(supervisor) = self.supervisor.take()
            && supervisor.join().is_err()
        {
            tracing::error!(device = %self.core.name, "the supervisor thread of the controller panicked");
        }
        self.core.shut_down();
    }
}

/// A namespace of a controller.
pub(crate) struct NvmeDevice {
    running: Arc<Running>,
    setup: Arc<QueueSetup>,
}

impl NvmeDevice {
    /// Brings up the controller that the transport reaches, and opens the namespace that the
    /// options name.
    pub(crate) fn open(name: Arc<str>, transport: Arc<dyn Transport>, options: Options, mode: OpenMode) -> Result<Self> {
        let running = Running::start(Arc::new(Core::new(name.clone(), transport, options)?))?;
        let core = &running.core;
        let namespace = core.options.namespace;
        let timeout = core.setup_timeout();
        let active = core.admin.namespaces(timeout)?;
        let unsupported = |reason: String| Error::Unsupported { device: name.clone(), reason };
        if !active.contains(&namespace) {
            return Err(unsupported(format!("has no namespace {namespace}; it has {active:?}, to be named as ns=N")));
        }
        let identity: IdentifyNamespace = core.admin.identify(cns::NAMESPACE, namespace, timeout)?;
        let Namespace { len, logical_block } = Namespace::judge(&name, namespace, &identity)?;
        let controller = core.identity();
        let sgl = core.options.sgl && core.has_sgl();
        let limits = Limits::new(logical_block.into(), core.page, core.max_transfer(), sgl, BOUNCE);
        let supports = |bit: u16| controller.oncs.get() & bit != 0;
        let geometry = Geometry {
            len: Length::new(len),
            logical_block,
            memory_alignment: MEMORY_ALIGNMENT,
            max_transfer: limits.max_transfer as u32,
            queue_depth: core.depth(),
            max_queues: core.max_queues(),
            volatile_cache: core.has_volatile_cache(),
            discard: supports(oncs::DATASET_MANAGEMENT),
            write_zeroes: supports(oncs::WRITE_ZEROES),
            read_only: mode == OpenMode::ReadOnly || identity.nsattr & 1 != 0,
        };
        let most_blocks = if geometry.discard { core.max_discard_blocks()? } else { None };
        let max_discard = most_blocks.map_or(MAX_DISCARD, |blocks| MAX_DISCARD.min(blocks.saturating_mul(logical_block.into())));
        tracing::debug!(device = %name, ?geometry, ?limits, max_discard, "opened");
        let (completion, timeout) = (core.completion(), core.options.timeout);
        let setup = QueueSetup { name, geometry, namespace, limits, max_discard, completion, timeout };
        Ok(Self { running, setup: Arc::new(setup) })
    }
}

impl BlockDevice for NvmeDevice {
    fn name(&self) -> &str {
        &self.setup.name
    }

    fn geometry(&self) -> &Geometry {
        &self.setup.geometry
    }

    fn open_queue(&self) -> Result<Box<dyn Queue>> {
        let queue = self.running.core.open_queue(self.setup.clone())?;
        Ok(Box::new(NvmeQueue { queue, running: self.running.clone() }))
    }

    /// Pins the memory, and gives the controller a way to it. A region that is mapped already
    /// stays mapped once.
    fn map(&self, region: &Arc<Region>) -> Result<()> {
        self.running.core.dma.map(region)
    }

    fn unmap(&self, region: &Region) {
        if let Err(error) = self.running.core.dma.unmap(region) {
            tracing::error!(%error, "memory stays mapped for the device's DMA until it is closed");
        }
    }

    fn peer_to_peer(&self) -> std::result::Result<(), NoPeerToPeer> {
        self.running.core.transport.peer_to_peer()
    }

    fn pins(&self) -> bool {
        true
    }

    fn look_again(&self) -> Result<u64> {
        let (core, QueueSetup { namespace, geometry, .. }) = (&self.running.core, &*self.setup);
        let identity: IdentifyNamespace = core.admin.identify(cns::NAMESPACE, *namespace, core.setup_timeout())?;
        let Namespace { len, logical_block } = Namespace::judge(&self.setup.name, *namespace, &identity)?;
        if logical_block != geometry.logical_block {
            let was = geometry.logical_block;
            let reason =
                format!("namespace {namespace} was formatted from blocks of {was} to {logical_block} bytes while it was open");
            return Err(Error::Unsupported { device: self.setup.name.clone(), reason });
        }
        geometry.len.grow(len);
        Ok(len)
    }
}

/// A queue as its user holds it.
struct NvmeQueue {
    queue: Arc<IoQueue>,
    running: Arc<Running>,
}

impl Queue for NvmeQueue {
    fn submit(&self, requests: &mut Vec<Request>) {
        self.queue.submit(requests);
    }

    fn complete(&self, wait: Wait, out: &mut Vec<Completion>) -> Result<usize> {
        self.queue.complete(wait, out)
    }

    fn wake(&self) {
        self.queue.wake();
    }

    fn sleep_on(&self, since: Instant) -> Result<Option<BorrowedFd<'_>>> {
        Ok(self.queue.sleep_on(since))
    }
}

impl Drop for NvmeQueue {
    fn drop(&mut self) {
        self.queue.drain();
        self.running.core.close_queue(&self.queue);
    }
}

#[cfg(test)]
mod tests {
    use zerocopy::little_endian::U32;

    use super::*;
    use crate::device_name::DeviceName;
    use crate::sim::SimController;
    use crate::spec::{Sqe, admin};

    #[test]
    fn a_namespace_that_was_formatted_anew_is_not_looked_at_as_what_it_was() {
        let sim = SimController::new("sim:test,memory=1M", OpenMode::ReadWrite).expect("a controller");
        let mut name = DeviceName::parse("sim:test").expect("a backend");
        let options = Options::take(&mut name).expect("options");
        let device = NvmeDevice::open(name.device(), sim, options, OpenMode::ReadWrite).expect("it opens");
        assert_eq!(device.look_again(), Ok(1 << 20));
        // Format 1 has blocks of 4096 bytes.
        let format = Sqe { opcode: admin::FORMAT_NVM, nsid: U32::new(1), cdw10: U32::new(1), ..Sqe::default() };
        let core = &device.running.core;
        core.admin.run(format, "Format NVM", core.setup_timeout()).expect("formatted");
        let error = device.look_again().expect_err("its blocks are others").to_string();
        assert!(error.contains("4096") && error.contains("512"), "{error}");
        assert_eq!(device.geometry().len.get(), 1 << 20);
    }
}
