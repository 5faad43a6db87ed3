//! What moves the bytes of requests: it cuts them into pieces, and moves each piece between the ring, its slot and the GPU. Whose thread it runs on is not its business.
//!
//! It guards two things. Requests share what there is: they take turns, a few pieces each. And nothing in flight is ever given up: a request that failed is answered when
//! the last of its pieces is back. It makes no system call while there is something to see: it looks at the ring and at the words that its streams write.

use super::lane::{Copy, Lane, NotCopied};
use super::memory::pieces::{self, Blocks, Piece};
use super::outcome::{Outcome, action, at_place, of_the_application};
use super::queue::Deliveries;
use super::registered::Lease;
use super::request::{Part, Request, Source, operation};
use crate::Segment;
use crate::error::Error;
use crate::file::{File, Transfer};
use crate::ring::{Completed, Ring};
use gpunvme_abi::{Command, Direction};
use gpunvme_cuda::{Entered, Gpu};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use slab::Slab;
use smallvec::SmallVec;
use std::collections::VecDeque;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Bytes that a request may begin in one turn.
const TURN: u64 = 256 << 10;
/// How long it sleeps at most while a stream is busy, which cannot wake it.
const NAP: Duration = Duration::from_micros(50);
/// How long it sleeps at most while the daemon is busy, whose death would wake nobody: the ring is then asked about it.
const LOOK: Duration = Duration::from_secs(1);
/// After how long without progress, and how often then, a stream is asked what is the matter.
pub(super) const STALLED: Duration = Duration::from_millis(100);

/// A request that is being done.
struct Active {
    request: Request,
    /// The part to be cut next, and how much of it was.
    part: usize,
    within: u64,
    in_flight: usize,
    /// It has a turn to come, and is not answered before.
    in_turns: bool,
    outcome: Outcome,
}

impl Active {
    fn next(&self) -> Option<&Part> {
        if self.outcome.is_failed() { None } else { self.request.parts.get(self.part) }
    }
}

/// A piece in flight: it is either in the ring or being copied.
struct InFlight {
    request: usize,
    part: usize,
    address: u64,
    /// In the staging pool; none for what the device moves itself.
    slot: Option<usize>,
    piece: Piece,
    /// Of a read, what the ring moved.
    done: Transfer,
    in_ring: bool,
}

pub(super) struct Engine {
    ring: Ring,
    blocks: Blocks,
    /// By the GPU's index.
    lanes: Vec<Option<Box<Lane>>>,
    /// When each of them last did something.
    progress: Vec<Instant>,
    requests: Slab<Active>,
    /// Those that have something to be cut, in the order of their turns.
    turns: VecDeque<usize>,
    pieces: Slab<InFlight>,
    /// How many of those there may be: as many as the ring has entries.
    most: usize,
    /// What ended the ring.
    closed: bool,
    completed: Vec<Completed>,
    copied: Vec<usize>,
    not_copied: Vec<(usize, NotCopied)>,
    deliveries: Deliveries,
}

impl Engine {
    /// With nothing to do, and a ring that is its own.
    pub fn new(ring: Ring, blocks: Blocks) -> Engine {
        Engine {
            blocks,
            lanes: Vec::new(),
            progress: Vec::new(),
            requests: Slab::new(),
            turns: VecDeque::new(),
            pieces: Slab::new(),
            most: ring.room(),
            closed: false,
            deliveries: Deliveries::default(),
            completed: Vec::new(),
            copied: Vec::new(),
            not_copied: Vec::new(),
            ring,
        }
    }

    /// The ring, for files to be attached to.
    pub fn ring(&self) -> &Ring {
        &self.ring
    }

    /// Whether there is a lane of this GPU.
    pub fn has_lane(&self, gpu: Gpu) -> bool {
        self.lanes.get(gpu.index() as usize).is_some_and(Option::is_some)
    }

    /// Adds the lane of a GPU. It has to be there before a request that needs it.
    pub fn add_lane(&mut self, gpu: Gpu, lane: Box<Lane>) {
        let index = gpu.index() as usize;
        self.lanes.resize_with(self.lanes.len().max(index + 1), || None);
        self.lanes[index] = Some(lane);
        self.progress.resize(self.lanes.len(), Instant::now());
    }

    /// Makes a GPU's context current on this thread, if there is a GPU: calls for that one, mostly the only one, need not enter it each then.
    pub fn enter(&self) -> Option<Entered> {
        self.lanes.iter().flatten().next().and_then(|lane| lane.enter().ok())
    }

    /// Takes a request.
    pub fn begin(&mut self, request: Request) {
        let id = self.requests.insert(Active {
            request,
            part: 0,
            within: 0,
            in_flight: 0,
            in_turns: true,
            outcome: Outcome::default(),
        });
        self.turns.push_back(id);
    }

    /// Takes a read of one part that is one piece, and has its bytes brought into its slot by a call on the file itself: for a file that is read once that costs less than to make it known
    /// to the ring. Only where all requests are answered, so that there is room.
    pub fn read_by_call(&mut self, request: Request, file: &File) {
        if self.closed {
            return self.begin(request);
        }
        let [part] = &request.parts[..] else { unreachable!("a read of one part") };
        let (address, gpu) = (part.address, part.allocation.gpu);
        let piece = pieces::first(Direction::Read, self.blocks, part.file_offset, part.len, request.piece_len);
        debug_assert_eq!(piece.wanted, part.len);
        let lane = lane(&mut self.lanes, gpu);
        let slot = lane.slots.take(piece.slot_len()).expect("an unused pool has room for a piece");
        let segment = Segment { file_offset: piece.file_offset, buffer_offset: slot as u64 + piece.slot_offset, len: piece.len };
        let flags = request.require.flags();
        let mut result = file.transfer(Command::Read, lane.staging.registered(), &[segment], flags);
        if let Err(Error::Transfer { errno: Errno::CONNABORTED | Errno::NOTCONN, .. }) = result {
            // The mount's end told by the kernel, and not by the daemon: that may be using the slot still, which nobody gets from now on.
            self.closed = true;
            result = Err(Error::RingClosed { path: file.path().to_owned() });
        }
        let within = part.len;
        let active = Active { request, part: 0, within, in_flight: 1, in_turns: false, outcome: Outcome::default() };
        let request = self.requests.insert(active);
        let (slot, done) = (Some(slot), Transfer::default());
        let index = self.pieces.insert(InFlight { request, part: 0, address, slot, piece, done, in_ring: false });
        self.transferred(index, result);
    }

    /// Whether all requests are answered.
    pub fn is_idle(&self) -> bool {
        self.requests.is_empty()
    }

    /// Does what can be done now. False if that was nothing.
    pub fn turn(&mut self, now: Instant) -> bool {
        let mut busy = self.collect(now);
        busy |= self.copy(now);
        busy |= self.cut();
        self.ring.submit();
        self.deliveries.deliver();
        busy
    }

    /// Asks to be woken by the ring. False if there is something to be looked at first.
    pub fn arm(&mut self) -> bool {
        if !self.is_in_ring() {
            return true;
        }
        self.ring.arm().unwrap_or_else(|_| {
            self.close();
            false
        })
    }

    /// After [`Engine::arm`]: waits until something happens, or may have. `other` is where else it may come from.
    pub fn wait(&self, other: Option<&OwnedFd>) {
        let in_ring = self.is_in_ring();
        let copying = self.lanes.iter().flatten().any(|lane| lane.is_busy());
        let limit = if copying { Some(NAP) } else { in_ring.then_some(LOOK) };
        let timeout = limit.map(|limit| Timespec { tv_sec: limit.as_secs() as i64, tv_nsec: limit.subsec_nanos().into() });
        // A ring that was not armed may hold an old signal.
        let ring = in_ring.then_some(self.ring.as_fd());
        let watched = other.map(AsFd::as_fd).into_iter().chain(ring);
        let mut events: SmallVec<[PollFd<'_>; 2]> = watched.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).collect();
        // Whatever it says, everything is looked at next.
        let _ = rustix::event::poll(&mut events, timeout.as_ref());
    }

    fn is_in_ring(&self) -> bool {
        self.ring.in_flight() > 0 && !self.closed
    }

    /// Takes what the ring completed.
    fn collect(&mut self, now: Instant) -> bool {
        if self.closed || self.ring.in_flight() == 0 {
            return false;
        }
        let mut completed = std::mem::take(&mut self.completed);
        let taken = self.ring.poll(now, &mut completed);
        for Completed { user_data, result } in completed.drain(..) {
            self.transferred(user_data as usize, result);
        }
        self.completed = completed;
        // An error is only told when nothing more comes; it ends requests.
        taken.inspect_err(|_| self.close()).map_or(true, |taken| taken > 0)
    }

    /// The ring is done with a piece.
    fn transferred(&mut self, index: usize, result: crate::Result<Transfer>) {
        let in_flight = &mut self.pieces[index];
        in_flight.in_ring = false;
        let done = match result {
            Ok(done) => done,
            Err(error) => return self.fail(index, error),
        };
        let active = &mut self.requests[in_flight.request];
        let part = &active.request.parts[in_flight.part];
        let piece = &in_flight.piece;
        let wanted = piece.arrived(done.bytes());
        in_flight.done = match part.registered {
            Ok(_) => done,
            Err(reason) => of_the_application(done, wanted, reason),
        };
        match active.request.direction {
            Direction::Write if wanted < piece.wanted => {
                // The daemon owes a status for this; a file with a gap in it must not pass for written.
                let error = Error::Path { path: active.request.source.path().to_owned(), action: "write", errno: Errno::IO };
                self.fail(index, error);
            }
            Direction::Write => self.finish(index),
            Direction::Read => {
                if wanted < piece.wanted && active.part == in_flight.part {
                    // The file ends here: the rest of the part is not even asked for.
                    active.within = part.len;
                }
                let Some(slot) = in_flight.slot.filter(|_| wanted > 0) else { return self.finish(index) };
                let copy = Copy {
                    direction: Direction::Read,
                    address: in_flight.address,
                    slot: slot + piece.skip as usize,
                    len: wanted,
                    allocation: part.allocation,
                    piece: index,
                };
                lane(&mut self.lanes, part.allocation.gpu).copy(copy);
            }
        }
    }

    /// Lets streams copy, and takes what they copied.
    fn copy(&mut self, now: Instant) -> bool {
        let mut any = false;
        let coming = self.ring.in_flight();
        for at in 0..self.lanes.len() {
            let Some(lane) = &mut self.lanes[at] else { continue };
            lane.finished(&mut self.copied);
            let moved = lane.issue(coming, now, &mut self.copied, &mut self.not_copied) || !self.copied.is_empty();
            if moved {
                self.progress[at] = now;
                any = true;
            } else if lane.is_copying() && now.saturating_duration_since(self.progress[at]) > STALLED {
                lane.probe(&mut self.not_copied);
                self.progress[at] = now;
            }
            self.after_copies();
        }
        any
    }

    fn after_copies(&mut self) {
        let mut copied = std::mem::take(&mut self.copied);
        for index in copied.drain(..) {
            match self.requests[self.pieces[index].request].request.direction {
                Direction::Read => self.finish(index),
                Direction::Write => self.push(index),
            }
        }
        self.copied = copied;
        let mut not_copied = std::mem::take(&mut self.not_copied);
        for (index, error) in not_copied.drain(..) {
            let in_flight = &self.pieces[index];
            let active = &self.requests[in_flight.request];
            let request = &active.request;
            let action = action(request.direction);
            let segment = request.parts[in_flight.part].segment;
            let (path, offset) = (
                request.source.path().to_owned(),
                in_flight.piece.file_offset + in_flight.piece.skip - in_flight.piece.slot_offset,
            );
            let error = Error::Copy { path, action, segment, offset, error: error.map(Box::new), done: Transfer::default() };
            self.fail(index, error);
        }
        self.not_copied = not_copied;
    }

    /// Begins pieces, as far as there is room.
    fn cut(&mut self) -> bool {
        let mut any = false;
        let (mut at, mut full) = (0, Vec::new());
        while at < self.turns.len() && self.pieces.len() < self.most {
            let id = self.turns[at];
            let lane = self.requests[id].next().filter(|part| part.registered.is_err()).map(|part| part.allocation.gpu);
            if lane.is_some_and(|lane| full.contains(&lane)) {
                at += 1; // whoever is before it in this lane has the first right to what becomes free
                continue;
            }
            if !self.cut_some(id) {
                full.extend(lane);
                at += 1;
                continue;
            }
            any = true;
            self.turns.remove(at);
            if self.requests[id].next().is_some() {
                self.turns.push_back(id);
            } else {
                self.requests[id].in_turns = false;
                self.answer_if_done(id);
            }
        }
        any
    }

    /// Begins pieces of one request. False if there is no room for any.
    fn cut_some(&mut self, id: usize) -> bool {
        let mut left = TURN;
        let mut any = false;
        loop {
            let active = &mut self.requests[id];
            if self.closed {
                let path = active.request.source.path().to_owned();
                active.outcome.failed(Error::RingClosed { path });
            }
            let Some(part) = active.next() else { return true };
            if active.within >= part.len {
                (active.part, active.within) = (active.part + 1, 0);
                continue;
            }
            if left == 0 || self.pieces.len() == self.most {
                return any;
            }
            let request = &active.request;
            let (direction, offset, rest) = (request.direction, part.file_offset + active.within, part.len - active.within);
            let (piece, slot) = if part.registered.is_ok() {
                (pieces::first_unstaged(self.blocks, offset, rest, request.piece_len), None)
            } else {
                let piece = pieces::first(direction, self.blocks, offset, rest, request.piece_len);
                let slot = lane(&mut self.lanes, part.allocation.gpu).slots.take(piece.slot_len());
                if slot.is_none() {
                    return any;
                }
                (piece, slot)
            };
            let (address, allocation) = (part.address + active.within, part.allocation);
            let in_flight =
                InFlight { request: id, part: active.part, address, slot, piece, done: Transfer::default(), in_ring: false };
            active.within += piece.wanted;
            active.in_flight += 1;
            let index = self.pieces.insert(in_flight);
            match slot {
                Some(slot) if direction == Direction::Write => {
                    let slot = slot + piece.skip as usize;
                    let copy = Copy { direction, address, slot, len: piece.wanted, allocation, piece: index };
                    lane(&mut self.lanes, allocation.gpu).copy(copy);
                }
                _ => self.push(index),
            }
            any = true;
            left = left.saturating_sub(piece.wanted);
        }
    }

    /// Gives a piece to the ring.
    fn push(&mut self, index: usize) {
        let InFlight { request, part, address, slot, piece, .. } = &self.pieces[index];
        let request = &self.requests[*request].request;
        let Source::Ring(file) = &request.source else { unreachable!("what was brought by a call is not transferred again") };
        if self.closed {
            // While it was being copied.
            let path = file.path().to_owned();
            return self.fail(index, Error::RingClosed { path });
        }
        let part = &request.parts[*part];
        let operation = match (&part.registered, slot) {
            (Ok(lease), _) => {
                let at = lease.offset + (address - part.address);
                operation(request.direction, file, piece, &lease.buffer, at)
            }
            (Err(_), slot) => {
                let at = slot.expect("what is staged has a slot") as u64 + piece.slot_offset;
                operation(request.direction, file, piece, &lane(&mut self.lanes, part.allocation.gpu).staging, at)
            }
        };
        match self.ring.push(&operation.requiring(request.require).tagged(index as u64)) {
            Ok(()) => self.pieces[index].in_ring = true,
            Err(error) => self.fail(index, error),
        }
    }

    /// A piece is done.
    fn finish(&mut self, index: usize) {
        let InFlight { request: id, part, slot, done, .. } = self.pieces.remove(index);
        let active = &mut self.requests[id];
        if let Some(slot) = slot {
            lane(&mut self.lanes, active.request.parts[part].allocation.gpu).slots.give_back(slot);
        }
        active.outcome.add(&done);
        active.in_flight -= 1;
        self.answer_if_done(id);
    }

    /// A piece is done, and its request failed: the first failure is what it is answered with.
    fn fail(&mut self, index: usize, error: Error) {
        let in_flight = &mut self.pieces[index];
        in_flight.done = Transfer::default();
        let active = &mut self.requests[in_flight.request];
        let at = active.request.parts[in_flight.part].segment;
        let piece = &in_flight.piece;
        active.outcome.failed(at_place(error, at, piece.file_offset));
        self.finish(index);
    }

    /// Answers a request of which nothing is left to do.
    fn answer_if_done(&mut self, id: usize) {
        let active = &self.requests[id];
        if active.in_flight > 0 || active.in_turns {
            return;
        }
        let Active { request, mut outcome, .. } = self.requests.remove(id);
        if let Err(error) = settle(&request) {
            outcome.failed(error);
        }
        request.end.answer(outcome.result(), &mut self.deliveries);
    }

    /// The ring is over: what is in it never comes back.
    fn close(&mut self) {
        self.closed = true;
        let lost: Vec<usize> = self.pieces.iter().filter(|(_, piece)| piece.in_ring).map(|(index, _)| index).collect();
        for index in lost {
            let path = self.requests[self.pieces[index].request].request.source.path().to_owned();
            self.fail(index, Error::RingClosed { path });
        }
    }
}

/// Before a read is answered: what the device wrote to GPU memory itself is there for whoever looks.
fn settle(request: &Request) -> crate::Result<()> {
    let registered = request.parts.iter().filter_map(|part| part.registered.as_ref().ok());
    let mut settled: Option<&Lease> = None;
    for lease in registered.filter(|_| request.direction == Direction::Read) {
        // Parts of the same memory mostly follow each other.
        if !settled.is_some_and(|settled| Arc::ptr_eq(&settled.buffer, &lease.buffer)) {
            lease.settle().map_err(|(gpu, error)| {
                Error::on_gpu(request.source.path(), "make sure that what was read is in", &gpu, error)
            })?;
            settled = Some(lease);
        }
    }
    Ok(())
}

/// The lane of a GPU. It came before the request.
fn lane(lanes: &mut [Option<Box<Lane>>], gpu: Gpu) -> &mut Lane {
    lanes[gpu.index() as usize].as_mut().expect("a lane comes before the requests that use it")
}
