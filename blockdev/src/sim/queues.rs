//! The queues of the software controller (Base 3.3.1): fetching commands, applying faults to them,
//! and posting completions. It guards the order of a completion's bytes, the phase tags, and that
//! no completion queue overflows.
use std::collections::VecDeque;
use std::time::Instant;

use zerocopy::little_endian::{U16, U32};

use super::controller::Controller;
use super::data::{self, IovaRange};
use super::faults::{Effect, Event};
use super::status;
use crate::spec::Status;
use crate::spec::{Cqe, Sqe};

/// A shadow doorbell: where its value and its event index are.
pub(super) type Shadow = Option<(u64, u64)>;

pub(super) struct SubmissionQueue {
    base: u64,
    entries: u32,
    head: u32,
    tail: u32,
    pub(super) cq: u16,
    shadow: Shadow,
}

pub(super) struct CompletionQueue {
    base: u64,
    entries: u32,
    /// The driver's.
    head: u32,
    tail: u32,
    phase: bool,
    pub(super) vector: Option<u16>,
    shadow: Shadow,
    /// What finds the queue full.
    backlog: VecDeque<Cqe>,
}

/// A command that is not done yet.
pub(super) struct Stalled {
    pub(super) sq: u16,
    pub(super) sqe: Sqe,
    until: Until,
    /// Where it will read or write.
    memory: Vec<IovaRange>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Until {
    Time(Instant),
    Released,
    /// As [`Until::Released`], but it never completes.
    Lost,
}

/// A completion that comes after others.
pub(super) struct Late {
    sq: u16,
    cid: u16,
    status: Status,
    dword: u32,
}

impl SubmissionQueue {
    pub(super) fn new(base: u64, entries: u32, cq: u16, shadow: Shadow) -> Self {
        Self { base, entries, head: 0, tail: 0, cq, shadow }
    }

    /// Whether the value makes sense.
    pub(super) fn set_tail(&mut self, tail: u32) -> bool {
        self.tail = if tail < self.entries { tail } else { self.tail };
        tail < self.entries
    }
}

impl CompletionQueue {
    pub(super) fn new(base: u64, entries: u32, vector: Option<u16>, shadow: Shadow) -> Self {
        Self { base, entries, head: 0, tail: 0, phase: true, vector, shadow, backlog: VecDeque::new() }
    }

    /// Whether the value makes sense.
    pub(super) fn set_head(&mut self, head: u32) -> bool {
        self.head = if head < self.entries { head } else { self.head };
        head < self.entries
    }

    fn is_full(&self) -> bool {
        (self.tail + 1) % self.entries == self.head
    }
}

impl Stalled {
    /// When it goes on by itself.
    pub(super) fn due(&self) -> Option<Instant> {
        if let Until::Time(time) = self.until { Some(time) } else { None }
    }

    pub(super) fn is_abortable(&self) -> bool {
        self.until != Until::Lost
    }

    /// Whether it will use some of this memory.
    pub(super) fn uses(&self, iova: u64, len: usize) -> bool {
        self.memory.iter().any(|(start, bytes)| *start < iova + len as u64 && iova < start + *bytes as u64)
    }
}

impl Controller {
    /// Fetches one command and does it. False where there is none.
    pub(super) fn step(&mut self) -> bool {
        if !self.is_running() {
            return false;
        }
        // Round robin (Base 3.4.4).
        let after = self.sqs.range(self.turn..).map(|(id, _)| *id);
        let order: Vec<u16> = after.chain(self.sqs.range(..self.turn).map(|(id, _)| *id)).collect();
        for id in order {
            match self.fetch(id) {
                Ok(Some(sqe)) => {
                    self.turn = id.wrapping_add(1);
                    self.take(id, sqe);
                    return true;
                }
                Ok(None) => {}
                Err(()) => {
                    self.fail();
                    return false;
                }
            }
        }
        false
    }

    /// Does everything that there is to do now.
    pub(super) fn run(&mut self) {
        while self.step() {}
        self.finish_batch();
    }

    /// Posts what was held back, and interrupts.
    pub(super) fn finish_batch(&mut self) {
        for Late { sq, cid, status, dword } in std::mem::take(&mut self.late) {
            self.complete(sq, cid, status, dword);
        }
        self.tell_events();
        for vector in std::mem::take(&mut self.to_signal) {
            if let Some(event) = self.vectors.get(usize::from(vector)) {
                // It can only fail when the counter is full, and then it is signalled already.
                let _ = rustix::io::write(event, &1u64.to_ne_bytes());
            }
        }
    }

    /// The next entry of a queue. An error: the queue cannot be read.
    fn fetch(&mut self, id: u16) -> Result<Option<Sqe>, ()> {
        let queue = self.sqs.get_mut(&id).ok_or(())?;
        if queue.head == queue.tail
            && let Some((value, event_index)) = queue.shadow
        {
            // The driver tells by the register of what comes after the event index; what came
            // before it was written is seen by looking once more.
            let mut seen = queue.tail;
            loop {
                let tail = self.iommu.load(value).map_err(drop)?;
                if tail >= queue.entries {
                    return Err(());
                }
                queue.tail = tail;
                self.iommu.store(event_index, tail).map_err(drop)?;
                if tail == std::mem::replace(&mut seen, tail) {
                    break;
                }
            }
        }
        if queue.head == queue.tail {
            return Ok(None);
        }
        let sqe = self.iommu.read(queue.base + u64::from(queue.head) * size_of::<Sqe>() as u64).map_err(drop)?;
        queue.head = (queue.head + 1) % queue.entries;
        Ok(Some(sqe))
    }

    /// A command came in: it is done, or something goes wrong with it.
    fn take(&mut self, sq: u16, sqe: Sqe) {
        let cid = sqe.cid.get();
        if self.stalled.iter().any(|stalled| stalled.sq == sq && stalled.sqe.cid.get() == cid) {
            return self.complete(sq, cid, status::ID_CONFLICT, 0);
        }
        let blocks = if sq == 0 { None } else { self.blocks(&sqe) };
        let event = match sq {
            0 => Event::Admin(sqe.opcode),
            _ => Event::Io { opcode: sqe.opcode, blocks: blocks.as_ref() },
        };
        match self.fault(event) {
            None => self.execute(sq, &sqe),
            Some(Effect::Status(kind, code)) => self.complete(sq, cid, Status::new(kind, code), 0),
            Some(Effect::Delay(delay)) => self.stall(sq, sqe, Until::Time(Instant::now() + delay)),
            Some(Effect::Hold) => self.stall(sq, sqe, Until::Released),
            Some(Effect::Lose) => self.stall(sq, sqe, Until::Lost),
            Some(Effect::LoseCompletion) => {
                self.perform(sq, &sqe);
            }
            Some(Effect::Reorder) => {
                if let Some((status, dword)) = self.perform(sq, &sqe) {
                    self.late.push(Late { sq, cid, status, dword });
                }
            }
            Some(Effect::Duplicate) => {
                if let Some((status, dword)) = self.perform(sq, &sqe) {
                    self.complete(sq, cid, status, dword);
                    self.complete(sq, cid, status, dword);
                }
            }
            Some(Effect::Bogus) => {
                self.complete(sq, !cid, Status::SUCCESS, 0);
                self.execute(sq, &sqe);
            }
            Some(Effect::Fatal) => self.fail(),
            Some(Effect::Reset) => self.reset(),
            Some(Effect::Vanish) => self.vanish(),
            Some(Effect::PowerCut) => {
                if let Err(error) = self.power_cut() {
                    tracing::error!(%error, "the medium failed during a power cut of the software controller");
                }
            }
        }
    }

    fn stall(&mut self, sq: u16, sqe: Sqe, until: Until) {
        let memory = if sq == 0 { Vec::new() } else { self.memory(&sqe) };
        self.stalled.push(Stalled { sq, sqe, until, memory });
    }

    fn execute(&mut self, sq: u16, sqe: &Sqe) {
        if let Some((status, dword)) = self.perform(sq, sqe) {
            self.complete(sq, sqe.cid.get(), status, dword);
        }
    }

    /// Does a command. `None` where its completion comes by itself, some day.
    fn perform(&mut self, sq: u16, sqe: &Sqe) -> Option<(Status, u32)> {
        let done = if sq == 0 { self.admin(sqe) } else { self.io(sqe).map(|()| Some(0)) };
        match done {
            Ok(dword) => dword.map(|dword| (Status::SUCCESS, dword)),
            Err(status) => Some((status, 0)),
        }
    }

    /// Does the stalled commands whose time has come, and where `all`, those that wait for a
    /// release.
    pub(super) fn resume(&mut self, all: bool) {
        if !self.is_running() {
            return;
        }
        let now = Instant::now();
        let over = |stalled: &mut Stalled| all || stalled.due().is_some_and(|due| due <= now);
        let due: Vec<Stalled> = self.stalled.extract_if(.., over).collect();
        for Stalled { sq, sqe, until, .. } in due {
            if !self.sqs.contains_key(&sq) || !self.is_running() {
                continue;
            }
            match until {
                Until::Lost => {
                    self.perform(sq, &sqe);
                }
                Until::Time(_) | Until::Released => self.execute(sq, &sqe),
            }
        }
        self.finish_batch();
    }

    /// Tells the driver that a command is over.
    pub(super) fn complete(&mut self, sq: u16, cid: u16, status: Status, dword: u32) {
        let Some(queue) = self.sqs.get(&sq) else { return };
        let (head, cq) = (queue.head as u16, queue.cq);
        if !status.is_success() {
            self.logs.record(sq, cid, status);
        }
        let completion = Cqe {
            dw0: U32::new(dword),
            sq_head: U16::new(head),
            sq_id: U16::new(sq),
            cid: U16::new(cid),
            status: U16::new(status.in_completion()),
            ..Cqe::default()
        };
        if let Some(queue) = self.cqs.get_mut(&cq) {
            queue.backlog.push_back(completion);
            self.post_backlog(cq);
        }
    }

    /// Posts what a completion queue has room for.
    pub(super) fn post_backlog(&mut self, id: u16) {
        let Some(queue) = self.cqs.get_mut(&id) else { return };
        let mut failed = false;
        while let Some(mut completion) = queue.backlog.front().copied() {
            if queue.is_full()
                && let Some((value, event_index)) = queue.shadow
            {
                // The driver has to ring the register when it makes room.
                failed |= self.iommu.store(event_index, queue.head).is_err();
                match self.iommu.load(value) {
                    Ok(head) if head < queue.entries => queue.head = head,
                    _ => failed = true,
                }
            }
            if failed || queue.is_full() {
                break;
            }
            completion.status = U16::new(completion.status.get() | u16::from(queue.phase));
            let at = queue.base + u64::from(queue.tail) * size_of::<Cqe>() as u64;
            if self.iommu.write_completion(at, &completion).is_err() {
                failed = true;
                break;
            }
            queue.backlog.pop_front();
            queue.tail = (queue.tail + 1) % queue.entries;
            queue.phase ^= queue.tail == 0;
            if let Some(vector) = queue.vector
                && !self.to_signal.contains(&vector)
            {
                self.to_signal.push(vector);
            }
        }
        if failed {
            self.fail();
        }
    }

    /// Where a command's data is; nothing where that makes no sense.
    fn memory(&self, sqe: &Sqe) -> Vec<IovaRange> {
        let len = self.data_len(sqe);
        if len == 0 {
            return Vec::new();
        }
        data::locate(&self.iommu, sqe, len, self.page(), self.options.sgls).unwrap_or_default()
    }
}
