//! The supervisor of a controller, a thread. It guards that no request hangs: a command that is
//! late is aborted, then the controller is reset and what was in flight is sent once more, and
//! where that does not help every request ends with an error. It also answers asynchronous events,
//! and a host that asks for the device back.
//!
//! Memory of commands in flight: before their requests end with an error, the controller is known
//! to have stopped, or the IOMMU shuts it off from all memory. If even that fails, the memory is
//! never given back.
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::controller::{ALL_ONES, Core, Lifecycle};
use super::io_queue::{IoQueue, Overdue};
use crate::spec::Status;
use crate::spec::log::{ErrorEntry, SmartLog};
use crate::spec::{Sqe, admin, csts, log_page, reg};
use crate::transport::event::{is_signalled, wait_any};
use crate::{Error, Result};

use zerocopy::FromBytes;
use zerocopy::little_endian::U32;

/// How often the supervisor looks, at the most and at the least. In between, a quarter of the
/// command timeout.
const TICKS: [Duration; 2] = [Duration::from_millis(5), Duration::from_millis(500)];
/// What an Abort gets before the controller is reset: so many parts of the command timeout.
const GRACE: u32 = 4;
/// How long the host's recovery of the bus may take, and how often the supervisor looks.
const BUS_PATIENCE: Duration = Duration::from_secs(10);
const BUS_NAP: Duration = Duration::from_millis(50);
/// How much later than the controller's silence the host may tell of an error of the bus.
const BUS_NOTICE: Duration = Duration::from_secs(1);

/// What a reset begins with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Reset {
    /// CC.EN, and the PCI function only where that does not help.
    Controller,
    /// The PCI function: its configuration is not to be trusted.
    Function,
}

/// What was true of the controller when its reset began.
#[derive(Debug, Clone, Copy)]
struct Before {
    /// It had been reset by something else than its driver, for all that is known.
    stopped: bool,
    /// Its whole subsystem had been reset.
    subsystem_reset: bool,
}

/// The supervisor's thread, until `stopping` is set and the core's event signalled.
pub(super) fn supervise(core: &Core, stopping: &AtomicBool) {
    let tick = (core.options.timeout / 4).clamp(TICKS[0], TICKS[1]);
    let mut busy = false;
    while !stopping.load(Ordering::Acquire) {
        if core.broken().is_some() {
            core.event.wait(None);
            continue;
        }
        let (release, bus_error) = (core.transport.release_requested(), core.transport.bus_error());
        let notices = release.into_iter().chain(bus_error.map(AsFd::as_fd));
        wait_any(&std::iter::once(core.event.as_fd()).chain(notices).collect::<Vec<BorrowedFd<'_>>>(), Some(tick));
        core.event.drain();
        if stopping.load(Ordering::Acquire) {
            return;
        }
        if release.is_some_and(is_signalled) {
            tracing::warn!(device = %core.name, "the host asks for the device back; all requests in flight fail");
            core.let_go();
            continue;
        }
        if let Some(bus_error) = bus_error.filter(|error| is_signalled(error.as_fd())) {
            bus_error.drain();
            // A controller that fails here was given up, and all callers that wait were told.
            let _ = core.recover_from("the bus reports an error that it did not correct (AER)", Reset::Function);
            continue;
        }
        core.handle_events();
        // An idle controller is left alone: reading its registers would keep it awake.
        let queues = core.queues();
        let was_busy = std::mem::replace(&mut busy, queues.iter().any(|queue| queue.in_flight() > 0));
        if busy || was_busy || core.admin.has_late() {
            // A controller that fails here was given up, and all callers that wait were told.
            let _ = core.look_after(&queues);
        }
    }
}

impl Core {
    fn queues(&self) -> Vec<Arc<IoQueue>> {
        self.lifecycle().queues.values().cloned().collect()
    }

    fn look_after(&self, queues: &[Arc<IoQueue>]) -> Result<()> {
        // Not while another thread resets it.
        let status = {
            let _lifecycle = self.lifecycle();
            self.status()
        };
        let status = match status {
            // The host tells, or it is there at the next look.
            Err(_) if self.may_return() => return Ok(()),
            status => status.inspect_err(|gone| self.give_up(gone.clone()))?,
        };
        if status & csts::CFS != 0 {
            return self.recover("it reports a fatal status (CSTS.CFS)");
        }
        if status & csts::RDY == 0 {
            // The function was reset, by the bus or by the host: what was in flight never
            // completes.
            return self.recover("it stopped by itself (CSTS.RDY is clear)");
        }
        if self.admin.has_late() {
            return self.recover("an admin command did not complete");
        }
        let grace = self.options.timeout / GRACE;
        for queue in queues {
            for Overdue { cid, aborted } in queue.overdue(Instant::now(), grace) {
                if aborted {
                    return self.recover("a command did not complete, also not after an Abort");
                }
                if !self.abort(queue.id(), cid, grace) {
                    // No other will either, and each would be waited for.
                    return self.recover("an Abort did not complete");
                }
            }
        }
        Ok(())
    }

    /// Whether a controller whose registers read as all ones may be there again: they do not any
    /// more, or the host tells of an error of the bus, within a moment. A link that the port has
    /// contained is down before the host hears of it.
    fn may_return(&self) -> bool {
        let Some(bus_error) = self.transport.bus_error() else { return false };
        let started = Instant::now();
        while started.elapsed() < BUS_NOTICE {
            if is_signalled(bus_error.as_fd()) || self.transport.read32(reg::CSTS) != ALL_ONES {
                return true;
            }
            std::thread::sleep(BUS_NAP);
        }
        false
    }

    /// Asks the controller to end a command (Base 5.1). Whether it does shows by the command's
    /// completion. False if it does not even answer.
    fn abort(&self, queue: u16, cid: u16, timeout: Duration) -> bool {
        tracing::warn!(device = %self.name, queue, cid, "a command is late; aborting it");
        let command = Sqe { opcode: admin::ABORT, cdw10: U32::new(u32::from(cid) << 16 | u32::from(queue)), ..Sqe::default() };
        match self.admin.run(command, "Abort", timeout) {
            Ok(_) => true,
            Err(error) => {
                tracing::warn!(%error, "the Abort failed");
                matches!(error, Error::Admin { .. })
            }
        }
    }

    /// Resets the controller, or gives it up.
    pub(super) fn recover(&self, reason: &str) -> Result<()> {
        self.recover_from(reason, Reset::Controller)
    }

    fn recover_from(&self, reason: &str, reset: Reset) -> Result<()> {
        self.reset(reason, reset).inspect_err(|error| self.give_up(error.clone()))
    }

    /// Controller reset: stops it, brings it up again with the same queues, and sends what was in
    /// flight once more ([`IoQueue::resume`] says why that is safe).
    fn reset(&self, reason: &str, reset: Reset) -> Result<()> {
        tracing::warn!(device = %self.name, reason, "resetting the controller");
        let mut lifecycle = self.lifecycle();
        if let Some(error) = self.broken() {
            return Err(error.clone());
        }
        // Under the same hold: no queue is opened on what may have lost its cache.
        self.reset_locked(&mut lifecycle, reset).inspect_err(|error| self.set_broken(error.clone()))?;
        tracing::info!(device = %self.name, queues = lifecycle.queues.len(), "the controller is back");
        Ok(())
    }

    fn reset_locked(&self, lifecycle: &mut Lifecycle, reset: Reset) -> Result<()> {
        for queue in lifecycle.queues.values() {
            queue.pause();
        }
        let status = self.transport.read32(reg::CSTS);
        let mut before = Before {
            stopped: reset == Reset::Function || status == ALL_ONES || status & csts::RDY == 0,
            // A reset of the function may clear it.
            subsystem_reset: status != ALL_ONES && status & csts::NSSRO != 0,
        };
        if reset == Reset::Function {
            self.reset_function()?;
        }
        if let Err(error) = self.disable() {
            if matches!(error, Error::Gone { .. }) && !self.may_return() {
                return Err(error);
            }
            tracing::warn!(%error, "the controller reset failed; trying a function-level reset");
            before.stopped |= matches!(error, Error::Gone { .. });
            self.reset_function()?;
            self.disable()?;
        }
        self.rebuild(lifecycle, before)
    }

    /// Resets the PCI function after an error of the bus, again until it answers. The host
    /// recovers the bus meanwhile, and may do so under a reset; until then registers read as all
    /// ones.
    fn reset_function(&self) -> Result<()> {
        let started = Instant::now();
        loop {
            self.transport.reset()?;
            if self.transport.read32(reg::CSTS) != ALL_ONES || started.elapsed() > BUS_PATIENCE {
                return Ok(());
            }
            std::thread::sleep(BUS_NAP);
        }
    }

    /// Brings a stopped controller up with the queues that it had.
    fn rebuild(&self, lifecycle: &mut Lifecycle, before: Before) -> Result<()> {
        // A queue that could not be deleted when its user let go of it: the controller does not
        // know it any more.
        lifecycle.queues.retain(|_, queue| !queue.is_abandoned());
        for queue in lifecycle.queues.values() {
            queue.restart();
        }
        self.enable(lifecycle)?;
        if let Some(what) = self.may_have_lost_cache(lifecycle, before)? {
            // A flush from now on would not say so.
            return Err(Error::Controller { device: self.name.clone(), what });
        }
        for queue in lifecycle.queues.values() {
            self.create(queue, lifecycle)?;
        }
        for queue in lifecycle.queues.values() {
            queue.resume();
        }
        Ok(())
    }

    /// Whether writes that completed and were not flushed may be lost, and why. The controller was
    /// reset and is enabled again. A reset of a controller loses none (Base 3.7.2), and one of the
    /// whole subsystem may. Loss of power does; a controller that had it is one that stopped by
    /// itself and has no bit that says so, so that its SMART log has to tell.
    fn may_have_lost_cache(&self, lifecycle: &Lifecycle, before: Before) -> Result<Option<&'static str>> {
        let subsystem_reset = self.take_subsystem_reset()? || before.subsystem_reset;
        if !self.has_volatile_cache() {
            return Ok(None);
        }
        if subsystem_reset {
            return Ok(Some("was reset with its whole subsystem (CSTS.NSSRO): writes that were not flushed may be lost"));
        }
        let now = match self.power_cycles() {
            Ok(now) => Some(now),
            Err(error @ Error::Admin { .. }) => {
                tracing::warn!(%error, "the SMART log, which says whether power was lost, cannot be read");
                None
            }
            // It does not answer, as it would not when its queues are made.
            Err(error) => return Err(error),
        };
        Ok(match (lifecycle.power, now) {
            (Some(power), Some(now)) if power == now => None,
            (Some(_), Some(_)) => Some("lost power, as its SMART log says: writes that were not flushed may be lost"),
            _ if before.stopped => {
                Some("was reset from outside and does not say whether it lost power: writes that were not flushed may be lost")
            }
            _ => None,
        })
    }

    /// Notes how often power came back until now: after a reset it tells whether it was lost again.
    pub(super) fn note_power(&self, lifecycle: &mut Lifecycle) -> Result<()> {
        lifecycle.power = None;
        if self.has_volatile_cache() {
            match self.power_cycles() {
                Ok(power) => lifecycle.power = Some(power),
                Err(error @ Error::Admin { .. }) => {
                    tracing::warn!(%error, "no SMART log: after a reset from outside, the write cache counts as lost");
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// How often the controller was switched on, as its SMART log says. It counts unsafe shutdowns
    /// too, but firmware may count a reset as one.
    fn power_cycles(&self) -> Result<u128> {
        let log = self.admin.log_page(log_page::SMART, size_of::<SmartLog>(), self.setup_timeout())?;
        Ok(SmartLog::read_from_bytes(&log).expect("it has this length").power_cycles.get())
    }

    /// Gives the device back to the host: it is shut down while it still is there.
    fn let_go(&self) {
        let gone = Error::Gone { device: self.name.clone() };
        {
            let lifecycle = self.lifecycle();
            self.set_broken(gone.clone());
            for queue in lifecycle.queues.values() {
                queue.pause();
            }
            if let Err(error) = self.try_shut_down() {
                tracing::warn!(%error, "the controller was not shut down in an orderly way");
            }
        }
        self.give_up(gone);
    }

    /// Ends everything with an error, for good.
    pub(super) fn give_up(&self, error: Error) {
        tracing::error!(%error, "the device is given up");
        let lifecycle = self.lifecycle();
        self.set_broken(error.clone());
        for queue in lifecycle.queues.values() {
            queue.pause();
        }
        // It is told to stop, but not waited for: what it writes in spite of that, the IOMMU
        // refuses.
        self.transport.write32(reg::CC, 0);
        // Before a caller hears of it, and gives memory back.
        let fenced = match self.dma.fence() {
            Ok(()) => true,
            Err(error) => {
                tracing::error!(%error, "the IOMMU still lets the controller reach memory; what it may write to is kept for ever");
                false
            }
        };
        for queue in lifecycle.queues.values() {
            queue.fail(&error, fenced);
        }
    }

    /// Answers what the controller told of its own accord (Base 5.2): reading the log page that an
    /// event names lets the controller report the next of its kind.
    fn handle_events(&self) {
        let events = self.admin.take_events();
        let timeout = self.setup_timeout();
        for event in &events {
            let (kind, info, page) = (event & 7, event >> 8 & 0xff, (event >> 16) as u8);
            let device = &self.name;
            match page {
                log_page::SMART => {
                    let log = self.admin.log_page(page, size_of::<SmartLog>(), timeout);
                    let Ok(log) = log.map(|log| SmartLog::read_from_bytes(&log).expect("it has this length")) else { continue };
                    let (warning, kelvins) = (log.critical_warning, log.temperature.get());
                    tracing::warn!(%device, warning, kelvins, "the controller reports on its health; see `gpunvme nvme {device} smart`");
                }
                log_page::ERROR => {
                    let Ok(log) = self.admin.log_page(page, size_of::<ErrorEntry>(), timeout) else { continue };
                    let entry = ErrorEntry::read_from_bytes(&log).expect("it has this length");
                    let status = Status::from_completion(entry.status.get());
                    tracing::warn!(%device, info, %status, "the controller reports an error; see `gpunvme nvme {device} errors`");
                }
                _ => {
                    // Whatever it is, reading its page is the answer.
                    let _ = self.admin.log_page(page, 512, timeout);
                    tracing::warn!(%device, kind, info, page, "the controller reports an event");
                }
            }
        }
        if !events.is_empty() {
            self.admin.request_events(self.identity().aerl.saturating_add(1));
        }
    }
}
