//! The software controller's state and its registers: enabling, disabling, shutdown, resets and
//! doorbells (Base 3.1.3, 3.5, 3.6). It guards the state machine: commands are fetched only while
//! the controller is ready, and after a reset or a loss of power nothing that was in flight is
//! done.
use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Instant;

use rustix::io::Errno;

use super::events::{Events, Raised};
use super::faults::{Effect, Event, Fault};
use super::iommu::Iommu;
use super::logs::Logs;
use super::medium::Medium;
use super::options::Options;
use super::queues::{CompletionQueue, Late, Stalled, SubmissionQueue};
use super::random::Random;
use crate::spec::{NSSR_MAGIC, cc, csts, reg};

/// Largest memory page, as a power of two above 4096 (CAP.MPSMAX), where the smallest is not
/// larger.
const MPSMAX: u8 = 4;
/// The most bytes of registers. Doorbells behind them are not there.
const MAX_REGISTERS: usize = 256 << 10;
/// NVM Express 1.4.
pub(super) const VERSION: u32 = 0x0001_0400;

/// Whether the controller is ready.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ready {
    No,
    At(Instant),
    Never,
}

/// Everything of the controller that changes. It is locked for every access; nothing
/// else is locked before.
pub(super) struct Controller {
    pub(super) iommu: Arc<Iommu>,
    pub(super) options: Options,
    pub(super) namespaces: Vec<Medium>,
    pub(super) read_only: bool,
    pub(super) faults: Vec<Fault>,
    pub(super) hits: u64,
    pub(super) random: Random,
    /// The worker is to end.
    pub(super) stopping: bool,
    /// Out of the slot, or without power.
    gone: bool,

    config: u32,
    ready: Ready,
    fatal: bool,
    /// CSTS.SHST.
    shutdown: u32,
    subsystem_reset: bool,
    admin_attributes: u32,
    admin_sq: u64,
    admin_cq: u64,

    pub(super) sqs: BTreeMap<u16, SubmissionQueue>,
    pub(super) cqs: BTreeMap<u16, CompletionQueue>,
    /// The queue that is looked at first.
    pub(super) turn: u16,
    pub(super) stalled: Vec<Stalled>,
    /// Completions held back behind those of the same batch.
    pub(super) late: Vec<Late>,
    /// Shadow doorbells and event indexes.
    pub(super) shadow: Option<(u64, u64)>,
    pub(super) vectors: Vec<OwnedFd>,
    /// Vectors to signal at the end of a batch.
    pub(super) to_signal: Vec<u16>,
    pub(super) write_cache: bool,
    pub(super) events: Events,
    pub(super) logs: Logs,
    /// Memory that was unmapped under commands in flight.
    pub(super) unmapped_in_flight: u64,
}

impl Controller {
    pub(super) fn new(options: Options, namespaces: Vec<Medium>, read_only: bool) -> Self {
        Self {
            iommu: Arc::default(),
            random: Random::new(options.seed),
            faults: options.faults.clone(),
            write_cache: options.volatile_cache,
            options,
            namespaces,
            read_only,
            hits: 0,
            stopping: false,
            gone: false,
            config: 0,
            ready: Ready::No,
            fatal: false,
            shutdown: 0,
            subsystem_reset: false,
            admin_attributes: 0,
            admin_sq: 0,
            admin_cq: 0,
            sqs: BTreeMap::new(),
            cqs: BTreeMap::new(),
            turn: 0,
            stalled: Vec::new(),
            late: Vec::new(),
            shadow: None,
            vectors: Vec::new(),
            to_signal: Vec::new(),
            events: Events::default(),
            logs: Logs::default(),
            unmapped_in_flight: 0,
        }
    }

    /// Bytes of a memory page, as the driver chose it.
    pub(super) fn page(&self) -> u64 {
        4096 << (self.config >> cc::MPS_SHIFT & 0xf)
    }

    fn mpsmax(&self) -> u8 {
        MPSMAX.max(self.options.mpsmin)
    }

    /// Bytes from one doorbell to the next.
    pub(super) fn stride(&self) -> usize {
        4 << self.options.dstrd
    }

    pub(super) fn registers_len(&self) -> usize {
        let doorbells = 2 * (usize::from(self.options.io_queues) + 1) * self.stride();
        (reg::DOORBELLS + doorbells).next_multiple_of(4096).min(MAX_REGISTERS)
    }

    fn is_ready(&self) -> bool {
        matches!(self.ready, Ready::At(time) if time <= Instant::now())
    }

    /// Whether commands are fetched and done.
    pub(super) fn is_running(&self) -> bool {
        !self.gone && !self.fatal && self.shutdown == 0 && self.is_ready()
    }

    /// What goes wrong with this event.
    pub(super) fn fault(&mut self, event: Event<'_>) -> Option<Effect> {
        let random = &mut self.random;
        let effect = self.faults.iter_mut().find_map(|fault| fault.hit(event, random));
        self.hits += u64::from(effect.is_some());
        effect
    }

    fn capabilities(&self) -> u64 {
        let timeout = 1u64; // 500 ms
        let (contiguous, subsystem_reset, nvm_command_set) = (1u64 << 16, 1u64 << 36, 1u64 << 37);
        u64::from(self.options.entries - 1)
            | contiguous
            | timeout << 24
            | u64::from(self.options.dstrd) << 32
            | subsystem_reset
            | nvm_command_set
            | u64::from(self.options.mpsmin) << 48
            | u64::from(self.mpsmax()) << 52
    }

    pub(super) fn read(&self, offset: usize) -> u32 {
        if self.gone {
            return u32::MAX;
        }
        let half = |value: u64| if offset.is_multiple_of(8) { value as u32 } else { (value >> 32) as u32 };
        match offset {
            reg::CAP | 0x04 => half(self.capabilities()),
            reg::VS => VERSION,
            reg::CC => self.config,
            reg::CSTS => {
                let bit = |on: bool, bit: u32| if on { bit } else { 0 };
                bit(self.is_ready(), csts::RDY)
                    | bit(self.fatal, csts::CFS)
                    | self.shutdown
                    | bit(self.subsystem_reset, csts::NSSRO)
            }
            reg::AQA => self.admin_attributes,
            reg::ASQ | 0x2c => half(self.admin_sq),
            reg::ACQ | 0x34 => half(self.admin_cq),
            _ => 0,
        }
    }

    pub(super) fn write(&mut self, offset: usize, value: u32) {
        if self.gone {
            return;
        }
        let low = |old: u64| old >> 32 << 32 | u64::from(value);
        let high = |old: u64| old & 0xffff_ffff | u64::from(value) << 32;
        match offset {
            reg::CC => self.configure(value),
            reg::CSTS => self.subsystem_reset &= value & csts::NSSRO == 0,
            reg::NSSR if value == NSSR_MAGIC => {
                self.reset();
                self.subsystem_reset = true;
            }
            reg::AQA => self.admin_attributes = value & 0x0fff_0fff,
            reg::ASQ => self.admin_sq = low(self.admin_sq),
            0x2c => self.admin_sq = high(self.admin_sq),
            reg::ACQ => self.admin_cq = low(self.admin_cq),
            0x34 => self.admin_cq = high(self.admin_cq),
            reg::DOORBELLS.. => self.doorbell(offset - reg::DOORBELLS, value),
            _ => {}
        }
    }

    /// CC was written.
    fn configure(&mut self, value: u32) {
        let was = std::mem::replace(&mut self.config, value);
        match (was & cc::EN != 0, value & cc::EN != 0) {
            (false, true) => self.enable(),
            (true, false) => self.disable(),
            _ => {}
        }
        if value & cc::SHN_MASK != 0 && was & cc::SHN_MASK == 0 {
            self.shut_down();
        }
    }

    fn enable(&mut self) {
        let effect = self.fault(Event::Enable);
        (self.shutdown, self.fatal) = (0, effect == Some(Effect::Fatal) || !self.is_well_configured());
        self.ready = match effect {
            _ if self.fatal => Ready::No,
            Some(Effect::Delay(delay)) => Ready::At(Instant::now() + delay),
            Some(Effect::Lose | Effect::Hold) => Ready::Never,
            _ => Ready::At(Instant::now()),
        };
        if effect == Some(Effect::Vanish) {
            self.vanish();
        }
        let entries = |shift: u32| (self.admin_attributes >> shift & 0xfff) + 1;
        self.sqs.insert(0, SubmissionQueue::new(self.admin_sq, entries(0), 0, None));
        self.cqs.insert(0, CompletionQueue::new(self.admin_cq, entries(16), Some(0), None));
    }

    /// What the specification lets the driver write before it sets CC.EN.
    fn is_well_configured(&self) -> bool {
        let (command_set, page_shift) = (self.config >> 4 & 7, self.config >> cc::MPS_SHIFT & 0xf);
        let sizes = [self.admin_attributes & 0xfff, self.admin_attributes >> 16 & 0xfff];
        let aligned = [self.admin_sq, self.admin_cq].iter().all(|address| address % self.page() == 0);
        command_set == 0
            && (u32::from(self.options.mpsmin)..=u32::from(self.mpsmax())).contains(&page_shift)
            && sizes.iter().all(|size| *size > 0)
            && aligned
    }

    fn disable(&mut self) {
        match self.fault(Event::Disable) {
            Some(Effect::Lose | Effect::Hold) => return,
            Some(Effect::Vanish) => self.vanish(),
            _ => {}
        }
        self.stop();
    }

    /// Controller reset: all queues and commands are gone.
    fn stop(&mut self) {
        self.ready = Ready::No;
        (self.fatal, self.shutdown) = (false, 0);
        self.sqs.clear();
        self.cqs.clear();
        self.stalled.clear();
        self.late.clear();
        self.to_signal.clear();
        self.shadow = None;
        self.write_cache = self.options.volatile_cache;
        self.events = Events::default();
    }

    fn shut_down(&mut self) {
        let lost = matches!(self.fault(Event::Shutdown), Some(Effect::Lose | Effect::Hold));
        self.shutdown = if lost { csts::SHST_OCCURRING } else { csts::SHST_COMPLETE };
        if !lost && let Err(error) = self.namespaces.iter_mut().try_for_each(Medium::flush) {
            tracing::error!(%error, "the software controller could not write its cache back");
        }
    }

    /// Function-level reset: as after power-on, but nothing in the cache is lost.
    pub(super) fn reset(&mut self) {
        self.stop();
        self.config = 0;
        (self.admin_attributes, self.admin_sq, self.admin_cq) = (0, 0, 0);
        self.subsystem_reset = false;
    }

    /// A failure from which only a reset helps.
    pub(super) fn fail(&mut self) {
        self.fatal = true;
    }

    /// The controller is pulled out of its slot, or loses power: nothing in flight is done.
    pub(super) fn vanish(&mut self) {
        self.stop();
        self.gone = true;
    }

    pub(super) fn power_cut(&mut self) -> Result<(), Errno> {
        self.vanish();
        self.logs.unsafe_shutdowns += 1;
        self.namespaces.iter_mut().try_for_each(Medium::power_cut)
    }

    pub(super) fn power_on(&mut self) {
        self.reset();
        self.gone = false;
        self.logs.power_cycles += 1;
    }

    /// A doorbell was written, `offset` bytes behind the first.
    fn doorbell(&mut self, offset: usize, value: u32) {
        if !self.is_running() || !offset.is_multiple_of(self.stride()) {
            return;
        }
        let number = offset / self.stride();
        let id = (number / 2) as u16;
        let told = match number % 2 {
            0 => self.sqs.get_mut(&id).map(|queue| queue.set_tail(value)),
            _ => self.cqs.get_mut(&id).map(|queue| queue.set_head(value)),
        };
        match told {
            Some(true) if number % 2 == 1 => self.post_backlog(id),
            Some(true) => {}
            Some(false) => self.raise(Raised::INVALID_DOORBELL_VALUE),
            None => self.raise(Raised::INVALID_DOORBELL),
        }
    }

    /// When something becomes due by itself.
    pub(super) fn next_due(&self) -> Option<Instant> {
        self.stalled.iter().filter_map(Stalled::due).min()
    }
}
