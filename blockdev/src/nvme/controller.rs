//! The controller's life: bringing it up (Base 3.5), making and removing its queues, and shutting
//! it down (Base 3.6). It guards the order of these steps, and that one thread at a time takes
//! them.
//!
//! Locks: `lifecycle`, held while the controller is brought up, reset or shut down and while
//! queues are made or removed; it is taken before any lock of a queue, and never by a thread that
//! submits or completes requests.
use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard};
use zerocopy::little_endian::{U32, U64};

use super::admin::{Admin, DATA};
use super::dma::Dma;
use super::io_queue::IoQueue;
use super::options::{CompletionMode, Options};
use super::queue::Shadow;
use super::queue_setup::QueueSetup;
use crate::spec::identify::{IdentifyController, IdentifyNvmController, oacs, sgls};
use crate::spec::{Cap, Sqe, admin, async_event, cc, cns, csts, feature, reg};
use crate::transport::Transport;
use crate::transport::event::Event;
use crate::{Error, Result};

/// What a register reads as when there is no controller any more.
pub(super) const ALL_ONES: u32 = u32::MAX;
/// Commands that set the controller up may take at least this long.
const SETUP_TIMEOUT: Duration = Duration::from_secs(5);
/// A shutdown may take this long, at the least and at the most, whatever the controller says: its
/// word goes up to 71 minutes. The most is also so many times the command timeout.
const SHUTDOWN_TIMEOUT: [Duration; 2] = [Duration::from_secs(5), Duration::from_secs(60)];
const SHUTDOWN_PATIENCE: u32 = 100;
/// The first version in which a controller may tell the limits of its NVM commands: 1.4.
const LIMITS_SINCE: u32 = 0x0001_0400;
/// The largest memory page. A PRP list names whole pages, and staging memory is handed out in
/// them.
const MAX_PAGE: u64 = 64 << 10;

/// A controller, its transport and its queues.
pub(super) struct Core {
    pub(super) name: Arc<str>,
    pub(super) transport: Arc<dyn Transport>,
    pub(super) dma: Arc<Dma>,
    pub(super) options: Options,
    pub(super) cap: Cap,
    /// The controller's memory page in bytes.
    pub(super) page: u64,
    pub(super) admin: Admin,
    /// Wakes the supervisor. Interrupt vector 0.
    pub(super) event: Event,
    /// The events of I/O queues, by queue number less one. Interrupt vectors from 1 on.
    queue_events: OnceLock<Vec<Arc<Event>>>,
    identity: OnceLock<Box<IdentifyController>>,
    lifecycle: Mutex<Lifecycle>,
    broken: OnceLock<Error>,
}

/// What changes with every reset.
#[derive(Default)]
pub(super) struct Lifecycle {
    pub(super) queues: BTreeMap<u16, Arc<IoQueue>>,
    shadow: Option<Arc<Shadow>>,
    /// I/O queue pairs that the controller granted.
    granted: u32,
    /// How often it was switched on until its first bring-up, where a volatile cache makes it
    /// matter and the controller tells.
    pub(super) power: Option<u128>,
}

impl Core {
    /// Takes hold of a controller without touching it yet.
    pub(super) fn new(name: Arc<str>, transport: Arc<dyn Transport>, options: Options) -> Result<Self> {
        if transport.read32(reg::CSTS) == ALL_ONES {
            return Err(Error::Gone { device: name });
        }
        let cap = Cap(transport.read64(reg::CAP));
        let unsupported = |reason: &str| Error::Unsupported { device: name.clone(), reason: reason.into() };
        if !cap.nvm_command_set() {
            return Err(unsupported("its controller has no NVM command set"));
        }
        if cap.max_queue_entries() < 2 {
            return Err(unsupported("it allows no queue of two entries (CAP.MQES is 0), which none is smaller than"));
        }
        let stride = cap.doorbell_stride();
        // The admin queue's, and those of one I/O queue.
        if transport.registers_len() < reg::DOORBELLS + 4 * stride {
            return Err(unsupported(&format!("its doorbells, {stride} bytes apart (CAP.DSTRD), reach beyond its registers")));
        }
        let page = cap.min_page();
        if page > MAX_PAGE {
            return Err(unsupported(&format!("its memory pages have {page} bytes at least (CAP.MPSMIN), more than {MAX_PAGE}")));
        }
        let dma = Dma::new(transport.clone(), page);
        let event = Event::new().map_err(|errno| Error::System {
            device: name.clone(),
            action: "making an eventfd",
            errno: errno.raw_os_error(),
        })?;
        Ok(Self {
            admin: Admin::new(name.clone(), transport.clone(), dma.clone(), stride)?,
            name,
            transport,
            dma,
            options,
            cap,
            page,
            event,
            queue_events: OnceLock::new(),
            identity: OnceLock::new(),
            lifecycle: Mutex::default(),
            broken: OnceLock::new(),
        })
    }

    pub(super) fn lifecycle(&self) -> MutexGuard<'_, Lifecycle> {
        self.lifecycle.lock()
    }

    /// What the controller said of itself when it was brought up first.
    pub(super) fn identity(&self) -> &IdentifyController {
        self.identity.get().expect("the controller was brought up before its identity is used")
    }

    /// The most bytes that a command carries; `None`: any number.
    pub(super) fn max_transfer(&self) -> Option<u64> {
        let mdts = u32::from(self.identity().mdts);
        (mdts > 0).then(|| 1u64.checked_shl(self.cap.min_page().ilog2() + mdts)).flatten()
    }

    /// The most logical blocks that a discard of one range covers; `None`: it tells of no limit.
    pub(super) fn max_discard_blocks(&self) -> Result<Option<u64>> {
        // Before, all would refuse the question, and many keep what they refused in their error
        // log.
        if self.identity().ver.get() < LIMITS_SINCE {
            return Ok(None);
        }
        match self.admin.identify::<IdentifyNvmController>(cns::COMMAND_SET_CONTROLLER, 0, self.setup_timeout()) {
            Ok(limits) => Ok([limits.dmrsl.get().into(), limits.dmsl.get()].into_iter().filter(|blocks| *blocks > 0).min()),
            Err(Error::Admin { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Whether it takes SGLs that this driver can make: it aligns memory to four bytes anyway.
    pub(super) fn has_sgl(&self) -> bool {
        matches!(self.identity().sgls.get() & sgls::SUPPORT_MASK, sgls::BYTES | sgls::DWORDS)
    }

    /// Whether writes that completed are lost with power unless they are flushed.
    pub(super) fn has_volatile_cache(&self) -> bool {
        self.identity().vwc & 1 != 0
    }

    /// I/O queues that can be open at once.
    pub(super) fn max_queues(&self) -> u32 {
        self.queue_events.get().map_or(0, |events| events.len() as u32)
    }

    /// Commands in flight in a queue.
    pub(super) fn depth(&self) -> u32 {
        self.options.depth.min(self.cap.max_queue_entries() - 1)
    }

    /// How queues wait for completions: without interrupts, they poll.
    pub(super) fn completion(&self) -> CompletionMode {
        if self.transport.max_interrupts() == 0 { CompletionMode::Poll } else { self.options.completion }
    }

    /// Why everything fails, once it does.
    pub(super) fn broken(&self) -> Option<&Error> {
        self.broken.get()
    }

    /// Notes that the controller is unusable for good.
    pub(super) fn set_broken(&self, error: Error) {
        let _ = self.broken.set(error); // the first reason is the one to tell
    }

    /// How long admin commands that set things up may take.
    pub(super) fn setup_timeout(&self) -> Duration {
        self.options.timeout.max(SETUP_TIMEOUT).min(self.options.timeout * 20)
    }

    /// Reads CSTS.
    pub(super) fn status(&self) -> Result<u32> {
        match self.transport.read32(reg::CSTS) {
            ALL_ONES => Err(Error::Gone { device: self.name.clone() }),
            status => Ok(status),
        }
    }

    /// Waits until bits of CSTS have a value.
    fn wait_status(&self, mask: u32, value: u32, timeout: Duration, otherwise: &'static str) -> Result<()> {
        let failed = |what| Error::Controller { device: self.name.clone(), what };
        let started = Instant::now();
        loop {
            let status = self.status()?;
            if status & mask == value {
                return Ok(());
            }
            // A controller that fails on its way up never gets ready; on its way down it does all
            // the same.
            if status & csts::CFS != 0 && value == csts::RDY {
                return Err(failed("reports a fatal status while it is enabled (CSTS.CFS)"));
            }
            if started.elapsed() > timeout {
                return Err(failed(otherwise));
            }
            std::thread::sleep(Duration::from_micros(200));
        }
    }

    /// What CAP.TO gives the controller to become ready, or to stop.
    fn ready_timeout(&self) -> Duration {
        Duration::from_millis(self.cap.timeout_ms().max(500))
    }

    /// Whether the subsystem was reset since the controller was brought up. Forgets it.
    pub(super) fn take_subsystem_reset(&self) -> Result<bool> {
        let was_reset = self.status()? & csts::NSSRO != 0;
        if was_reset {
            self.transport.write32(reg::CSTS, csts::NSSRO);
        }
        Ok(was_reset)
    }

    /// Stops the controller (CC.EN = 0). It has no queues and no commands afterwards, and does no
    /// DMA.
    pub(super) fn disable(&self) -> Result<()> {
        let config = self.transport.read32(reg::CC);
        if config & cc::EN != 0 {
            // EN may only be cleared once the controller got ready, or failed (Base 3.1.3.5).
            if self.status()? & (csts::RDY | csts::CFS) == 0 {
                let _ = self.wait_status(csts::RDY, csts::RDY, self.ready_timeout(), "does not become ready");
            }
            self.transport.write32(reg::CC, config & !(cc::EN | cc::SHN_MASK));
        }
        self.wait_status(csts::RDY, 0, self.ready_timeout(), "does not stop (CSTS.RDY stays set)")
    }

    /// Brings a stopped controller up to the point where I/O queues can be made.
    pub(super) fn enable(&self, lifecycle: &mut Lifecycle) -> Result<()> {
        self.admin.restart();
        let (entries, sq, cq) = self.admin.memory();
        self.transport.write32(reg::AQA, (entries - 1) << 16 | (entries - 1));
        self.transport.write64(reg::ASQ, sq);
        self.transport.write64(reg::ACQ, cq);
        let page_size = self.page.ilog2() - 12;
        let config = cc::EN | page_size << cc::MPS_SHIFT | cc::IOSQES_64 | cc::IOCQES_16;
        self.transport.write32(reg::CC, config);
        self.wait_status(csts::RDY, csts::RDY, self.ready_timeout(), "does not become ready (CSTS.RDY stays clear)")?;
        self.admin.enabled();

        let timeout = self.setup_timeout();
        let identity: Box<IdentifyController> = Box::new(self.admin.identify(cns::CONTROLLER, 0, timeout)?);
        let identity = self.identity.get_or_init(|| identity);
        let asked = self.options.queues.min(0xffff) - 1;
        let granted = self.admin.set_feature(feature::NUMBER_OF_QUEUES, asked << 16 | asked, timeout)?;
        lifecycle.granted = (granted & 0xffff).min(granted >> 16) + 1;
        self.set_up_shadow(lifecycle, timeout)?;
        self.set_up_interrupts(lifecycle.granted)?;
        let wanted = async_event::SMART_WARNINGS | identity.oaes.get() & async_event::NAMESPACE_CHANGED;
        if let Err(error) = self.admin.set_feature(feature::ASYNC_EVENT_CONFIG, wanted, timeout) {
            tracing::warn!(%error, "the controller refused the asynchronous events asked for; its own selection applies");
        }
        self.admin.request_events(identity.aerl.saturating_add(1));
        Ok(())
    }

    /// Offers shadow doorbells (Base 5.8) where the controller has them. They are worth nothing to
    /// a controller without: the registers serve as well.
    fn set_up_shadow(&self, lifecycle: &mut Lifecycle, timeout: Duration) -> Result<()> {
        lifecycle.shadow = None;
        let queues = lifecycle.granted.min(self.options.queues);
        let doorbells = 2 * (queues as usize + 1) * self.cap.doorbell_stride();
        if self.identity().oacs.get() & oacs::DOORBELL_BUFFER == 0 || doorbells > DATA {
            return Ok(());
        }
        let memory = || self.dma.allocate(self.page as usize);
        let (Ok(values), Ok(event_indexes)) = (memory(), memory()) else { return Ok(()) };
        let shadow = Arc::new(Shadow { values, event_indexes });
        let command = Sqe {
            opcode: admin::DOORBELL_BUFFER_CONFIG,
            dptr: [U64::new(shadow.values.iova(0)), U64::new(shadow.event_indexes.iova(0))],
            ..Sqe::default()
        };
        // Set before, so that the buffer holds the admin queue's values when the controller first
        // looks.
        self.admin.set_shadow(Some(shadow.clone()));
        // It may still carry the command out where it has not answered: the memory stays until it
        // has stopped.
        lifecycle.shadow = Some(shadow);
        match self.admin.run(command, "Doorbell Buffer Config", timeout) {
            Ok(_) => Ok(()),
            Err(error @ Error::Admin { .. }) => {
                tracing::warn!(%error, "no shadow doorbells: the controller failed to set them up");
                self.admin.set_shadow(None);
                lifecycle.shadow = None;
                Ok(())
            }
            Err(error) => Err(error),
        }
    }

    /// Connects the interrupt vectors: at first, and again after a function-level reset.
    fn set_up_interrupts(&self, granted: u32) -> Result<()> {
        let vectors = self.transport.max_interrupts();
        let events = match self.queue_events.get() {
            Some(events) => events,
            None => {
                // Each has two doorbells, and the admin queue has two.
                let doorbells = (self.transport.registers_len() - reg::DOORBELLS) / self.cap.doorbell_stride();
                let mut queues = granted.min(self.options.queues).min((doorbells / 2).saturating_sub(1) as u32);
                if self.completion() != CompletionMode::Poll {
                    queues = queues.min(vectors.saturating_sub(1).max(1));
                }
                let event = || {
                    Event::new().map(Arc::new).map_err(|errno| Error::System {
                        device: self.name.clone(),
                        action: "making an eventfd",
                        errno: errno.raw_os_error(),
                    })
                };
                let events = (0..queues).map(|_| event()).collect::<Result<Vec<_>>>()?;
                self.queue_events.get_or_init(|| events)
            }
        };
        if vectors == 0 {
            return if self.options.completion == CompletionMode::Interrupt {
                let reason = "it has no MSI-X interrupts; use completion=poll".into();
                Err(Error::Unsupported { device: self.name.clone(), reason })
            } else {
                Ok(())
            };
        }
        let queues = events.iter().map(|event| event.as_fd());
        let all: Vec<BorrowedFd<'_>> = match self.completion() {
            CompletionMode::Poll => vec![self.event.as_fd()],
            // The only one goes to the only queue; the supervisor then looks when its tick comes.
            _ if vectors == 1 => queues.take(1).collect(),
            _ => std::iter::once(self.event.as_fd()).chain(queues).collect(),
        };
        self.transport.set_interrupts(&all)
    }

    /// Makes a new I/O queue pair.
    pub(super) fn open_queue(&self, setup: Arc<QueueSetup>) -> Result<Arc<IoQueue>> {
        let mut lifecycle = self.lifecycle.lock();
        if let Some(error) = self.broken() {
            return Err(error.clone());
        }
        let events = self.queue_events.get().expect("the controller was brought up before");
        let free = (1..=events.len() as u16).find(|id| !lifecycle.queues.contains_key(id));
        let id = free.ok_or_else(|| Error::Unsupported {
            device: self.name.clone(),
            reason: format!("all of its {} queues are open; give a larger queues=N", events.len()),
        })?;
        let event = events[usize::from(id) - 1].clone();
        let stride = self.cap.doorbell_stride();
        let queue = Arc::new(IoQueue::new(setup, self.transport.clone(), &self.dma, event, id, stride)?);
        self.create(&queue, &lifecycle)?;
        queue.resume();
        lifecycle.queues.insert(id, queue.clone());
        Ok(queue)
    }

    /// Tells the controller of a queue pair (Base 5.4 and 5.5): the completion queue first.
    pub(super) fn create(&self, queue: &IoQueue, lifecycle: &Lifecycle) -> Result<()> {
        queue.set_shadow(lifecycle.shadow.clone());
        let (entries, sq, cq) = queue.memory();
        let id = u32::from(queue.id());
        let command = |opcode, address, cdw11| Sqe {
            opcode,
            dptr: [U64::new(address), U64::new(0)],
            cdw10: U32::new((entries - 1) << 16 | id),
            cdw11: U32::new(cdw11),
            ..Sqe::default()
        };
        const CONTIGUOUS: u32 = 1;
        const INTERRUPTS: u32 = 1 << 1;
        let interrupts = if self.completion() == CompletionMode::Poll {
            0
        } else {
            INTERRUPTS | id.min(self.transport.max_interrupts() - 1) << 16
        };
        let timeout = self.setup_timeout();
        self.admin.run(command(admin::CREATE_CQ, cq, CONTIGUOUS | interrupts), "Create I/O Completion Queue", timeout)?;
        let created =
            self.admin.run(command(admin::CREATE_SQ, sq, CONTIGUOUS | id << 16), "Create I/O Submission Queue", timeout);
        // Refused, and not lost: the controller would write to a completion queue without a user,
        // and its number would stay taken.
        if let Err(Error::Admin { .. }) = created {
            let delete = Sqe { opcode: admin::DELETE_CQ, cdw10: U32::new(id), ..Sqe::default() };
            if let Err(error) = self.admin.run(delete, "Delete I/O Completion Queue", timeout) {
                tracing::warn!(%error, queue = id, "a queue could not be deleted; it stays until the controller is reset");
            }
        }
        created.map(drop)
    }

    /// Removes a queue pair on which nothing is in flight: the submission queue first. What cannot
    /// be removed goes with the next reset; its memory is kept until then.
    pub(super) fn close_queue(&self, queue: &Arc<IoQueue>) {
        let mut lifecycle = self.lifecycle.lock();
        let removed = lifecycle.queues.remove(&queue.id());
        if self.broken().is_some() {
            return;
        }
        let command = |opcode| Sqe { opcode, cdw10: U32::new(queue.id().into()), ..Sqe::default() };
        let timeout = self.setup_timeout();
        let deleted = self
            .admin
            .run(command(admin::DELETE_SQ), "Delete I/O Submission Queue", timeout)
            .and_then(|_| self.admin.run(command(admin::DELETE_CQ), "Delete I/O Completion Queue", timeout));
        if let Err(error) = deleted {
            tracing::warn!(%error, queue = queue.id(), "a queue could not be deleted; it stays until the controller is reset");
            queue.abandon();
            lifecycle.queues.extend(removed.map(|queue| (queue.id(), queue)));
        }
    }

    /// Orderly shutdown: everything is on the media afterwards, and the controller does no DMA.
    pub(super) fn shut_down(&self) {
        let mut lifecycle = self.lifecycle.lock();
        if self.broken().is_none()
            && let Err(error) = self.try_shut_down()
        {
            tracing::warn!(%error, "the controller was not shut down in an orderly way");
        }
        if let Err(error) = self.transport.set_interrupts(&[]) {
            tracing::debug!(%error, "interrupts stay on until the device is closed");
        }
        lifecycle.queues.clear();
        lifecycle.shadow = None;
    }

    /// Shuts down and stops the controller. No commands are sent meanwhile.
    pub(super) fn try_shut_down(&self) -> Result<()> {
        self.status()?;
        let config = self.transport.read32(reg::CC);
        if config & cc::EN != 0 {
            self.transport.write32(reg::CC, config & !cc::SHN_MASK | cc::SHN_NORMAL);
            // RTD3 Entry Latency says how long it may take, in microseconds, where the controller
            // tells.
            let told = self.identity.get().map_or(0, |identity| identity.rtd3e.get());
            let most = SHUTDOWN_TIMEOUT[1].min(self.options.timeout * SHUTDOWN_PATIENCE);
            let timeout = Duration::from_micros(told.into()).max(SHUTDOWN_TIMEOUT[0]).min(most);
            self.wait_status(csts::SHST_MASK, csts::SHST_COMPLETE, timeout, "does not finish its shutdown (CSTS.SHST)")?;
        }
        self.disable()
    }
}
