//! An I/O queue: it turns requests into commands that the controller can take, keeps as many in
//! flight as it allows, and collects their completions. It guards that memory named by a command
//! stays mapped and alive until the command is over, that a request is over when its last command
//! is, and that a thread which waits for a completion is woken for it.
//!
//! Locks: `reaper` before `state`. The first is held by the one thread that collects completions,
//! also while it waits; the second for moments only, never while anything is waited for. A request
//! on memory that is not mapped is copied with `state` locked.
use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use slab::Slab;
use zerocopy::little_endian::U16;

use super::command_ids::CommandIds;
use super::dma::{Dma, DmaMemory};
use super::encoder::{Encoded, Encoder};
use super::options::CompletionMode;
use super::queue::{Position, QueuePair, Shadow};
use super::queue_setup::QueueSetup;
use super::scatter::Cursor;
use crate::spec::Status;
use crate::spec::{Cqe, Sqe};
use crate::transport::Transport;
use crate::transport::event::Event;
use crate::{Completion, Error, Op, Request, Result, Wait};

/// How long an adaptive queue looks for completions before it sleeps: about what falling asleep
/// and waking up costs.
const SPIN: Duration = Duration::from_micros(20);
/// How often a command is sent that the controller gives back for the moment, or that was in
/// flight when it was reset.
const MAX_TRIES: u8 = 3;

pub(super) struct IoQueue {
    setup: Arc<QueueSetup>,
    id: u16,
    /// What the controller's interrupts, and [`IoQueue::wake`], signal.
    event: Arc<Event>,
    /// For a look at the completion queue without the lock: its memory, and a [`Position`].
    cq: Arc<DmaMemory>,
    position: AtomicU32,
    /// Commands that the controller has.
    in_flight: AtomicU32,
    woken: AtomicBool,
    /// Whether requests may be over of which the completion queue does not tell: set by each wake,
    /// until they are collected.
    unseen: AtomicBool,
    /// Whether its user let go of it, and the controller could not be told.
    abandoned: AtomicBool,
    /// Whether the reaper sleeps, or is about to.
    sleeping: AtomicBool,
    reaper: Mutex<()>,
    state: Mutex<QueueState>,
}

struct QueueState {
    pair: QueuePair,
    mode: Mode,
    ids: CommandIds,
    slots: Vec<Option<Command>>,
    /// Slots.
    free: Vec<u16>,
    /// Slots of commands to be sent again.
    again: Vec<u16>,
    requests: Slab<PendingRequest>,
    /// Requests of which not all commands were sent.
    waiting: VecDeque<usize>,
    finished: Vec<Completion>,
    encoder: Encoder,
}

enum Mode {
    Running,
    /// The controller is being reset: nothing goes out.
    Paused,
    /// For good.
    Broken(Error),
}

struct PendingRequest {
    request: Request,
    /// What was cut into commands.
    cursor: Cursor,
    /// Commands not over yet.
    commands: usize,
    /// Whether it is in `waiting`.
    waits: bool,
    error: Option<Error>,
}

/// A command in flight.
struct Command {
    sqe: Sqe,
    /// Key of its request.
    request: usize,
    /// Its part of the request.
    start: Cursor,
    len: u64,
    bounce: Option<usize>,
    deadline: Instant,
    /// Whether it was late once, and an Abort was sent.
    aborted: bool,
    tries: u8,
}

/// A command that is late.
pub(super) struct Overdue {
    pub(super) cid: u16,
    /// Whether an Abort was sent before.
    pub(super) aborted: bool,
}

impl IoQueue {
    /// A queue that is paused: the controller does not know it yet. [`IoQueue::resume`] follows.
    pub(super) fn new(
        setup: Arc<QueueSetup>,
        transport: Arc<dyn Transport>,
        dma: &Arc<Dma>,
        event: Arc<Event>,
        id: u16,
        stride: usize,
    ) -> Result<Self> {
        let depth = setup.geometry.queue_depth;
        let pair = QueuePair::new(transport, dma, id, depth + 1, stride)?;
        let state = QueueState {
            mode: Mode::Paused,
            ids: CommandIds::new(depth),
            slots: (0..depth).map(|_| None).collect(),
            free: (0..depth as u16).rev().collect(),
            again: Vec::new(),
            requests: Slab::with_capacity(depth as usize),
            waiting: VecDeque::new(),
            finished: Vec::new(),
            encoder: Encoder::new(&setup, dma)?,
            pair,
        };
        Ok(Self {
            setup,
            id,
            event,
            cq: state.pair.cq(),
            position: AtomicU32::new(state.pair.position().bits()),
            in_flight: AtomicU32::new(0),
            woken: AtomicBool::new(false),
            unseen: AtomicBool::new(false),
            abandoned: AtomicBool::new(false),
            sleeping: AtomicBool::new(false),
            reaper: Mutex::new(()),
            state: Mutex::new(state),
        })
    }

    pub(super) fn id(&self) -> u16 {
        self.id
    }

    /// Entries, address of the submission queue, address of the completion queue.
    pub(super) fn memory(&self) -> (u32, u64, u64) {
        let state = self.state.lock();
        (state.pair.entries(), state.pair.sq_iova(), state.pair.cq_iova())
    }

    /// Commands that the controller has.
    pub(super) fn in_flight(&self) -> u32 {
        self.in_flight.load(Ordering::Relaxed)
    }

    pub(super) fn submit(&self, requests: &mut Vec<Request>) {
        let mut state = self.state.lock();
        for request in requests.drain(..) {
            self.accept(&mut state, request);
        }
        self.pump(&mut state);
        let finished = !state.finished.is_empty();
        drop(state);
        if finished {
            self.wake();
        } else if self.setup.completion == CompletionMode::Poll && self.sleeping.load(Ordering::SeqCst) {
            // It slept because there was nothing to look for.
            self.event.signal();
        }
    }

    pub(super) fn complete(&self, wait: Wait, out: &mut Vec<Completion>) -> Result<usize> {
        let before = out.len();
        let _reaper = self.reaper.lock();
        let deadline = match wait {
            Wait::Timeout(timeout) => Instant::now().checked_add(timeout),
            Wait::No | Wait::Forever => None,
        };
        loop {
            // A call that would not wait leaves a wake to the next one that would.
            let woken = match wait {
                Wait::No => self.woken.load(Ordering::Acquire),
                _ => self.woken.swap(false, Ordering::AcqRel),
            };
            if self.unseen.swap(false, Ordering::AcqRel) || woken || self.is_completed() {
                self.collect(out);
            }
            if out.len() > before || woken || wait == Wait::No {
                return Ok(out.len() - before);
            }
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            if left == Some(Duration::ZERO) {
                return Ok(0);
            }
            if self.spin(left) {
                continue;
            }
            self.sleeping.store(true, Ordering::SeqCst);
            // A wake or completion from before that signalled no sleeper, and is seen now.
            if !self.is_ready() && !self.has_to_poll() {
                self.event.wait(left);
            }
            self.sleeping.store(false, Ordering::SeqCst);
        }
    }

    pub(super) fn wake(&self) {
        self.unseen.store(true, Ordering::SeqCst);
        self.woken.store(true, Ordering::SeqCst);
        if self.sleeping.load(Ordering::SeqCst) {
            self.event.signal();
        }
    }

    /// As [`crate::Queue::sleep_on`].
    pub(super) fn sleep_on(&self, since: Instant) -> Option<BorrowedFd<'_>> {
        let is_worth_a_look = self.setup.completion == CompletionMode::Adaptive && self.in_flight() > 0 && since.elapsed() < SPIN;
        self.sleeping.store(true, Ordering::SeqCst);
        // A signal from before belongs to what is seen now.
        self.event.drain();
        if self.woken.swap(false, Ordering::SeqCst) || is_worth_a_look || self.is_completed() || self.has_to_poll() {
            self.sleeping.store(false, Ordering::SeqCst);
            return None;
        }
        Some(self.event.as_fd())
    }

    fn is_completed(&self) -> bool {
        Position::from_bits(self.position.load(Ordering::Relaxed)).is_filled(&self.cq)
    }

    fn is_ready(&self) -> bool {
        self.woken.load(Ordering::SeqCst) || self.is_completed()
    }

    /// Whether nothing would wake a sleeper for the commands in flight.
    fn has_to_poll(&self) -> bool {
        self.setup.completion == CompletionMode::Poll && self.in_flight.load(Ordering::SeqCst) > 0
    }

    /// Looks for completions without sleeping, as long as the mode says and at most for `left`.
    /// Says whether to look again.
    fn spin(&self, left: Option<Duration>) -> bool {
        let limit = match self.setup.completion {
            _ if self.in_flight.load(Ordering::Relaxed) == 0 => return self.is_ready(),
            CompletionMode::Interrupt => return self.is_ready(),
            CompletionMode::Adaptive => SPIN,
            CompletionMode::Poll => Duration::from_millis(1),
        };
        let started = Instant::now();
        let limit = left.map_or(limit, |left| left.min(limit));
        while !self.is_ready() {
            if started.elapsed() >= limit {
                return self.setup.completion == CompletionMode::Poll;
            }
            std::hint::spin_loop();
        }
        true
    }

    /// Takes all completions there are, and sends what they made room for.
    fn collect(&self, out: &mut Vec<Completion>) {
        let mut state = self.state.lock();
        self.reap(&mut state);
        self.pump(&mut state);
        out.append(&mut state.finished);
    }

    fn reap(&self, state: &mut QueueState) {
        while let Some(completion) = state.pair.pop() {
            self.completed(state, &completion);
        }
        state.pair.acknowledge();
        self.position.store(state.pair.position().bits(), Ordering::Relaxed);
    }

    /// Takes a request in, or refuses it.
    fn accept(&self, state: &mut QueueState, request: Request) {
        let checked = match &state.mode {
            Mode::Broken(error) => Err(error.clone()),
            Mode::Running | Mode::Paused => request.check(&self.setup.name, &self.setup.geometry),
        };
        // Without a volatile cache whatever completed is durable.
        let nothing_to_do = if request.op == Op::Flush { !self.setup.geometry.volatile_cache } else { request.len == 0 };
        if checked.is_err() || nothing_to_do {
            let tag = request.tag;
            drop(request);
            state.finished.push(Completion { tag, result: checked });
            return;
        }
        let pending = PendingRequest { request, cursor: Cursor::default(), commands: 0, waits: true, error: None };
        let key = state.requests.insert(pending);
        state.waiting.push_back(key);
    }

    /// Sends commands as long as there are some, and room for them.
    fn pump(&self, state: &mut QueueState) {
        if !matches!(state.mode, Mode::Running) {
            return;
        }
        let deadline = std::cell::OnceCell::new();
        let deadline = || *deadline.get_or_init(|| Instant::now() + self.setup.timeout);
        while let Some(slot) = state.again.pop() {
            self.send_again(state, slot, deadline());
        }
        while let Some(key) = state.waiting.front().copied() {
            let pending = &mut state.requests[key];
            let over = pending.error.is_some() || pending.cursor.done == pending.request.len && pending.commands > 0;
            if over {
                pending.waits = false;
                state.waiting.pop_front();
                state.finish_if_over(key);
                continue;
            }
            let Some(slot) = state.free.last().copied() else { break };
            match state.encoder.next(&pending.request, &pending.cursor, slot) {
                Ok(Some(Encoded { mut sqe, len, bounce })) => {
                    sqe.cid = U16::new(state.ids.next(slot));
                    let start = pending.cursor;
                    if pending.request.spans.is_empty() {
                        pending.cursor.done += len;
                    } else {
                        pending.cursor.advance(&pending.request.spans, len);
                    }
                    pending.commands += 1;
                    state.free.pop();
                    state.pair.push(&sqe);
                    let command =
                        Command { sqe, request: key, start, len, bounce, deadline: deadline(), aborted: false, tries: 1 };
                    state.slots[slot as usize] = Some(command);
                }
                // All of the bounce buffer is in use, by commands of this queue.
                Ok(None) => break,
                Err(error) => pending.error = Some(error),
            }
        }
        state.pair.ring();
        self.in_flight.store((state.slots.len() - state.free.len()) as u32, Ordering::SeqCst);
    }

    fn send_again(&self, state: &mut QueueState, slot: u16, deadline: Instant) {
        let Some(command) = &mut state.slots[slot as usize] else { return };
        command.tries += 1;
        command.deadline = deadline;
        command.aborted = false;
        state.pair.push(&command.sqe);
    }

    /// Accounts for the end of a command.
    fn completed(&self, state: &mut QueueState, completion: &Cqe) {
        let cid = completion.cid.get();
        let slot = state.ids.slot(cid);
        let command = state.slots.get_mut(slot as usize).and_then(Option::as_mut).filter(|command| command.sqe.cid.get() == cid);
        let Some(command) = command else {
            tracing::warn!(device = %self.setup.name, queue = self.id, cid, "completion of a command that is not in flight");
            return;
        };
        let status = Status::from_completion(completion.status.get());
        let result = match status {
            status if status.is_success() => Ok(()),
            // The abort was ours, because it was late. The command as such may be fine.
            status if is_transient(status) && !status.do_not_retry() && command.tries < MAX_TRIES => {
                // From now on, so that nothing else that comes under the old one counts.
                command.sqe.cid = U16::new(state.ids.next(slot));
                state.again.push(slot);
                return;
            }
            status => Err(self.error(&state.requests[command.request].request, command, status)),
        };
        self.end(state, slot, result);
    }

    /// Ends a command that the controller does not know any more.
    fn end(&self, state: &mut QueueState, slot: u16, result: Result<()>) {
        let Some(command) = state.slots[slot as usize].take() else { return };
        let pending = &mut state.requests[command.request];
        let mut result = result;
        if let Some(chunk) = command.bounce {
            if result.is_ok() && pending.request.op == Op::Read {
                result = state.encoder.bounce.empty(chunk, &pending.request.spans, &command.start, command.len as usize);
            }
            state.encoder.bounce.put(chunk);
        }
        if let Err(error) = result {
            pending.error.get_or_insert(error);
        }
        pending.commands -= 1;
        state.free.push(slot);
        state.finish_if_over(command.request);
        self.in_flight.store((state.slots.len() - state.free.len()) as u32, Ordering::SeqCst);
    }

    fn error(&self, request: &Request, command: &Command, status: Status) -> Error {
        let offset = request.offset + command.start.done;
        Error::Command {
            device: self.setup.name.clone(),
            op: request.op,
            offset,
            len: command.len,
            opcode: command.sqe.opcode,
            lba: offset / u64::from(self.setup.geometry.logical_block),
            status,
        }
    }

    /// Commands whose time is up, each reported once before and once after its Abort. `grace` is
    /// what an Abort gets.
    pub(super) fn overdue(&self, now: Instant, grace: Duration) -> Vec<Overdue> {
        let mut state = self.state.lock();
        if !matches!(state.mode, Mode::Running) {
            return Vec::new();
        }
        // Completions that are there already only have to be collected.
        self.reap(&mut state);
        self.pump(&mut state);
        if !state.finished.is_empty() {
            self.wake();
        }
        let mut late = Vec::new();
        for command in state.slots.iter_mut().flatten() {
            if command.deadline <= now {
                late.push(Overdue { cid: command.sqe.cid.get(), aborted: command.aborted });
                command.aborted = true;
                command.deadline = now + grace;
            }
        }
        late
    }

    /// Notes that it has no user any more. The controller still knows it.
    pub(super) fn abandon(&self) {
        self.abandoned.store(true, Ordering::Release);
    }

    /// Whether it has no user any more.
    pub(super) fn is_abandoned(&self) -> bool {
        self.abandoned.load(Ordering::Acquire)
    }

    /// Stops sending. The controller is about to be reset.
    pub(super) fn pause(&self) {
        let mut state = self.state.lock();
        if matches!(state.mode, Mode::Running) {
            state.mode = Mode::Paused;
        }
    }

    /// After the controller stopped: takes the completions that it still wrote, and forgets the
    /// queue's contents.
    pub(super) fn restart(&self) {
        let mut state = self.state.lock();
        self.reap(&mut state);
        state.pair.restart();
        self.position.store(state.pair.position().bits(), Ordering::Relaxed);
        state.again.clear();
    }

    /// Uses shadow doorbells from now on. The controller does not know the queue yet.
    pub(super) fn set_shadow(&self, shadow: Option<Arc<Shadow>>) {
        self.state.lock().pair.set_shadow(shadow);
    }

    /// The controller knows the queue (again): sends what was in flight once more, then what
    /// waits.
    ///
    /// Repeating is safe. A read, a write, a write of zeroes and a discard have the same effect
    /// twice as once, and a command that did not complete has no order towards others: of an
    /// overlapping one that is submitted meanwhile, either may come first. A flush covers writes
    /// that completed before it was submitted. Those may be in the volatile cache still. A
    /// controller level reset ends queues and commands and resets registers (Base 3.7.2), whether
    /// through CC.EN or of the PCI function; what empties a volatile cache (Base 5.27.1.4) is loss
    /// of power. [`super::recovery`] finds out before whether there may have been one, also where
    /// the controller only seems to have been reset by something else; then nothing is repeated.
    pub(super) fn resume(&self) {
        let mut state = self.state.lock();
        if matches!(state.mode, Mode::Broken(_)) {
            return;
        }
        for slot in 0..state.slots.len() as u16 {
            let Some(command) = &state.slots[slot as usize] else { continue };
            if command.tries < MAX_TRIES {
                state.again.push(slot);
                continue;
            }
            let request = &state.requests[command.request].request;
            let error = Error::TimedOut {
                device: self.setup.name.clone(),
                op: request.op,
                offset: request.offset + command.start.done,
                len: command.len,
            };
            self.end(&mut state, slot, Err(error));
        }
        state.mode = Mode::Running;
        self.pump(&mut state);
        drop(state);
        self.wake();
    }

    /// Ends all requests with an error, and all that come. Unless the controller is `fenced` off,
    /// it may still write to their memory: that is then kept for ever.
    pub(super) fn fail(&self, error: &Error, fenced: bool) {
        let mut state = self.state.lock();
        if matches!(state.mode, Mode::Broken(_)) {
            return;
        }
        state.mode = Mode::Broken(error.clone());
        self.reap(&mut state);
        let QueueState { requests, finished, slots, free, .. } = &mut *state;
        for pending in requests.drain() {
            if !fenced {
                std::mem::forget(pending.request.spans);
            }
            finished.push(Completion { tag: pending.request.tag, result: Err(error.clone()) });
        }
        free.clear();
        free.extend((0..slots.len() as u16).rev());
        slots.iter_mut().for_each(|slot| *slot = None);
        state.waiting.clear();
        state.again.clear();
        self.in_flight.store(0, Ordering::SeqCst);
        drop(state);
        self.wake();
    }

    /// Waits for the commands in flight; what waits to be sent is dropped.
    pub(super) fn drain(&self) {
        let mut ignored = Vec::new();
        loop {
            {
                let mut state = self.state.lock();
                while let Some(key) = state.waiting.pop_front() {
                    state.requests[key].waits = false;
                    state.finish_if_over(key);
                }
                if state.requests.is_empty() {
                    return;
                }
            }
            // A controller that does not answer is reset, and if that does not help, given up.
            if self.complete(Wait::Timeout(Duration::from_millis(100)), &mut ignored).is_err() {
                return;
            }
            ignored.clear();
        }
    }
}

impl QueueState {
    fn finish_if_over(&mut self, key: usize) {
        let pending = &self.requests[key];
        if pending.commands > 0 || pending.waits {
            return;
        }
        let PendingRequest { request, error, .. } = self.requests.remove(key);
        let tag = request.tag;
        drop(request);
        self.finished.push(Completion { tag, result: error.map_or(Ok(()), Err) });
    }
}

/// Whether the command may well succeed when sent again.
fn is_transient(status: Status) -> bool {
    [
        Status::ABORT_REQUESTED,
        Status::SQ_DELETED,
        Status::COMMAND_INTERRUPTED,
        Status::TRANSIENT_TRANSPORT_ERROR,
        Status::NAMESPACE_NOT_READY,
    ]
    .into_iter()
    .any(|transient| status.is(transient))
}
