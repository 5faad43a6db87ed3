//! The admin queue: commands that configure and query the controller, one for each caller, and the
//! Asynchronous Event Requests that stay outstanding until it has an event. It guards that no
//! caller waits beyond its timeout, and that the memory of a command that did not come back is
//! kept until the controller is reset.
//!
//! Locks: `state`, for moments only.
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use zerocopy::FromBytes;
use zerocopy::little_endian::{U16, U32, U64};

use super::dma::{Dma, DmaMemory};
use super::queue::{QueuePair, Shadow};
use crate::spec::Status;
use crate::spec::{Cqe, NSID_ALL, Sqe, admin, cns, csts, reg};
use crate::transport::Transport;
use crate::{Error, Result};

/// Entries of the admin queue, and one more than the commands in flight.
const ENTRIES: u32 = 32;
/// Bytes that a command reads or writes at most: one PRP.
pub(super) const DATA: usize = 4096;
/// Asynchronous Event Requests kept outstanding.
const EVENT_REQUESTS: u8 = 4;
/// A caller looks again after this long, at first and at most.
const NAPS: [Duration; 2] = [Duration::from_micros(20), Duration::from_millis(2)];

pub(super) struct Admin {
    name: Arc<str>,
    transport: Arc<dyn Transport>,
    dma: Arc<Dma>,
    state: Mutex<CommandSlots>,
}

struct CommandSlots {
    pair: QueuePair,
    /// By command identifier.
    slots: Vec<Slot>,
    /// Events told and not taken yet: command dword 0 of their completions.
    events: Vec<u32>,
    /// Whether a command was given up. Only a reset gets its slot back.
    late: bool,
    /// Whether the controller was enabled since it stopped last.
    enabled: bool,
}

enum Slot {
    Free,
    /// A caller waits for it. The memory is the command's.
    Busy(Option<DmaMemory>),
    Done(Cqe, Option<DmaMemory>),
    /// The controller was reset under it.
    Lost,
    /// The caller gave it up; the controller may still use the memory.
    Orphan {
        _data: Option<DmaMemory>,
    },
    AsyncEvent,
}

impl Admin {
    pub(super) fn new(name: Arc<str>, transport: Arc<dyn Transport>, dma: Arc<Dma>, stride: usize) -> Result<Self> {
        let pair = QueuePair::new(transport.clone(), &dma, 0, ENTRIES, stride)?;
        let slots = (0..ENTRIES - 1).map(|_| Slot::Free).collect();
        let state = Mutex::new(CommandSlots { pair, slots, events: Vec::new(), late: false, enabled: false });
        Ok(Self { name, transport, dma, state })
    }

    /// Entries, address of the submission queue, address of the completion queue.
    pub(super) fn memory(&self) -> (u32, u64, u64) {
        let state = self.state.lock();
        (ENTRIES, state.pair.sq_iova(), state.pair.cq_iova())
    }

    /// The controller stopped: nothing is in flight any more.
    pub(super) fn restart(&self) {
        let mut state = self.state.lock();
        state.pair.restart();
        (state.late, state.enabled) = (false, false);
        for slot in &mut state.slots {
            *slot = match std::mem::replace(slot, Slot::Free) {
                Slot::Busy(_) | Slot::Lost => Slot::Lost,
                // Its caller did not look yet.
                done @ Slot::Done(..) => done,
                Slot::Free | Slot::Orphan { .. } | Slot::AsyncEvent => Slot::Free,
            };
        }
    }

    /// The controller is ready. What was to be sent meanwhile is sent from now on.
    pub(super) fn enabled(&self) {
        self.state.lock().enabled = true;
    }

    /// Uses shadow doorbells from now on.
    pub(super) fn set_shadow(&self, shadow: Option<Arc<Shadow>>) {
        self.state.lock().pair.set_shadow(shadow);
    }

    /// Whether a command was given up since the last reset.
    pub(super) fn has_late(&self) -> bool {
        self.state.lock().late
    }

    /// Runs a command without data; gives dword 0 of its completion.
    pub(super) fn run(&self, command: Sqe, what: &'static str, timeout: Duration) -> Result<u32> {
        Ok(self.execute(command, None, what, timeout)?.0)
    }

    /// Runs a command that reads `len` bytes, at most [`DATA`], from the controller.
    pub(super) fn read(&self, mut command: Sqe, len: usize, what: &'static str, timeout: Duration) -> Result<Vec<u8>> {
        let data = self.dma.allocate(DATA)?;
        command.dptr[0] = U64::new(data.iova(0));
        let (_, data) = self.execute(command, Some(data), what, timeout)?;
        let mut bytes = vec![0; len.min(DATA)];
        data.expect("it was handed in").read_bytes(0, &mut bytes);
        Ok(bytes)
    }

    /// Identify (Base 5.17), as a structure of 4096 bytes.
    pub(super) fn identify<T: FromBytes>(&self, cns: u8, nsid: u32, timeout: Duration) -> Result<T> {
        let command = Sqe { opcode: admin::IDENTIFY, nsid: U32::new(nsid), cdw10: U32::new(cns.into()), ..Sqe::default() };
        let bytes = self.read(command, DATA, "Identify", timeout)?;
        Ok(T::read_from_bytes(&bytes).expect("identify structures have 4096 bytes"))
    }

    /// The numbers of the active namespaces: the first 1024.
    pub(super) fn namespaces(&self, timeout: Duration) -> Result<Vec<u32>> {
        let list: [U32; DATA / 4] = self.identify(cns::ACTIVE_NAMESPACES, 0, timeout)?;
        Ok(list.iter().map(|number| number.get()).take_while(|number| *number != 0).collect())
    }

    /// Get Log Page (Base 5.16), the first `len` bytes. The controller then reports further events
    /// of this page.
    pub(super) fn log_page(&self, page: u8, len: usize, timeout: Duration) -> Result<Vec<u8>> {
        let dwords = (len / 4 - 1) as u32;
        let command = Sqe {
            opcode: admin::GET_LOG_PAGE,
            nsid: U32::new(NSID_ALL),
            cdw10: U32::new(dwords << 16 | u32::from(page)),
            ..Sqe::default()
        };
        self.read(command, len, "Get Log Page", timeout)
    }

    /// Set Features (Base 5.27), of features that fit into a dword; gives what was granted.
    pub(super) fn set_feature(&self, feature: u8, value: u32, timeout: Duration) -> Result<u32> {
        let command =
            Sqe { opcode: admin::SET_FEATURES, cdw10: U32::new(feature.into()), cdw11: U32::new(value), ..Sqe::default() };
        self.run(command, "Set Features", timeout)
    }

    /// Leaves requests for asynchronous events with the controller, which takes `limit` at most.
    pub(super) fn request_events(&self, limit: u8) {
        let mut state = self.state.lock();
        let outstanding = state.slots.iter().filter(|slot| matches!(slot, Slot::AsyncEvent)).count();
        for _ in outstanding..limit.min(EVENT_REQUESTS).into() {
            let Some(cid) = state.free_slot() else { break };
            state.slots[cid] = Slot::AsyncEvent;
            let command = Sqe { opcode: admin::ASYNC_EVENT, cid: U16::new(cid as u16), ..Sqe::default() };
            state.pair.push(&command);
        }
        state.pair.ring();
    }

    /// The events told since the last call.
    pub(super) fn take_events(&self) -> Vec<u32> {
        let mut state = self.state.lock();
        state.collect(&self.name);
        std::mem::take(&mut state.events)
    }

    fn execute(
        &self,
        mut command: Sqe,
        data: Option<DmaMemory>,
        what: &'static str,
        timeout: Duration,
    ) -> Result<(u32, Option<DmaMemory>)> {
        let started = Instant::now();
        let mut data = Some(data);
        let mut cid = None;
        let mut nap = NAPS[0];
        loop {
            // A controller that failed, is gone (all ones), or was reset by something else since
            // the command was sent will not answer. Its caller may keep the supervisor from the
            // reset.
            let over = started.elapsed() >= timeout || nap == NAPS[1] && self.will_not_answer(cid.is_some());
            let mut state = self.state.lock();
            state.collect(&self.name);
            match cid {
                None => {
                    if let Some(free) = state.free_slot().filter(|_| state.enabled) {
                        cid = Some(free);
                        command.cid = U16::new(free as u16);
                        state.slots[free] = Slot::Busy(data.take().expect("it is put into a slot once"));
                        state.pair.push(&command);
                        state.pair.ring();
                    }
                }
                Some(cid) => match std::mem::replace(&mut state.slots[cid], Slot::Free) {
                    Slot::Done(completion, data) => return self.judge(&completion, what).map(|dword| (dword, data)),
                    Slot::Lost => return Err(self.lost()),
                    Slot::Busy(data) if over => {
                        state.slots[cid] = Slot::Orphan { _data: data };
                        state.late = true;
                        tracing::warn!(device = %self.name, command = what, "an admin command did not complete");
                        return Err(self.lost());
                    }
                    other => state.slots[cid] = other,
                },
            }
            drop(state);
            if cid.is_none() && over {
                return Err(self.lost());
            }
            std::thread::sleep(nap);
            nap = (nap * 2).min(NAPS[1]);
        }
    }

    /// Whether the registers say that commands are not answered any more. Before one is `sent`,
    /// the controller may be on its way up.
    fn will_not_answer(&self, sent: bool) -> bool {
        let status = self.transport.read32(reg::CSTS);
        status & csts::CFS != 0 || sent && status & csts::RDY == 0
    }

    fn judge(&self, completion: &Cqe, what: &'static str) -> Result<u32> {
        let status = Status::from_completion(completion.status.get());
        if status.is_success() {
            return Ok(completion.dw0.get());
        }
        Err(Error::Admin { device: self.name.clone(), command: what, status })
    }

    fn lost(&self) -> Error {
        if self.transport.read32(reg::CSTS) == u32::MAX {
            return Error::Gone { device: self.name.clone() };
        }
        Error::Controller { device: self.name.clone(), what: "does not answer admin commands" }
    }
}

impl CommandSlots {
    fn free_slot(&self) -> Option<usize> {
        self.slots.iter().position(|slot| matches!(slot, Slot::Free))
    }

    /// Takes completions off the queue.
    fn collect(&mut self, name: &str) {
        while let Some(completion) = self.pair.pop() {
            let cid = completion.cid.get();
            let Some(slot) = self.slots.get_mut(cid as usize) else {
                tracing::warn!(device = name, cid, "completion of an admin command that was never sent");
                continue;
            };
            *slot = match std::mem::replace(slot, Slot::Free) {
                Slot::Busy(data) => Slot::Done(completion, data),
                // It came back after all.
                Slot::Orphan { .. } => Slot::Free,
                Slot::AsyncEvent => {
                    if Status::from_completion(completion.status.get()).is_success() {
                        self.events.push(completion.dw0.get());
                    }
                    Slot::Free
                }
                other => {
                    tracing::warn!(device = name, cid, "completion of an admin command that is not in flight");
                    other
                }
            };
        }
        self.pair.acknowledge();
    }
}
