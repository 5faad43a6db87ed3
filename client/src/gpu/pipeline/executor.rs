//! The executor moves the bytes of requests: it cuts them into pieces, and moves each piece between
//! the ring, its slot and the GPU. It can run on any thread.
//!
//! It guards two things. Requests share what there is: they take turns, a few pieces each. And
//! nothing in flight is ever given up: a request that failed is answered when the last of its
//! pieces is back. It makes no system call while there is something to see: it looks at the ring
//! and at the words that its streams write.

use super::active_request::{ActiveRequest, Uncut};
use super::copy_stream::{Copy, CopyStream, NotCopied, Other, SlotUser};
use super::piece_ring::PieceRing;
use crate::error::Error;
use crate::file::File;
use crate::gpu::answer::Deliveries;
use crate::gpu::memory::pieces::{self, Blocks, PieceRange};
use crate::gpu::memory::registrations::Lease;
use crate::gpu::memory::slots::CHUNK;
use crate::gpu::outcome::{action, cancelled, from_cache, not_cached, of_piece};
use crate::gpu::page_cache::PageCache;
use crate::gpu::page_cache::cached_file::Cached;
use crate::gpu::page_cache::cached_range::Missing;
use crate::gpu::page_cache::gpu_reads::BY_KERNEL;
use crate::gpu::page_cache::readers::{PageAnswer, PageAnswers, PageRead, To};
use crate::gpu::request::{Cancel, Request, SegmentPart, Source, operation};
use crate::ring::{Completed, Ring, RingName};
use crate::transfer::Transfer;
use gpunvme_abi::{Command, Direction, Reason, Route, Segment};
use gpunvme_cuda::{Entered, Gpu};
use rustix::io::Errno;
use slab::Slab;
use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Bytes that a request may begin in one turn.
const TURN: u64 = 256 << 10;
/// Requests from which on each is cut into the longest pieces, as far as it has whole ones: while a
/// piece of one request is copied, pieces of others are read.
const SEVERAL: usize = 4;
/// Pieces of the longest kind that a pool has room for where they are used: in a smaller pool few
/// would be on their way.
const LONGEST_PIECES: usize = 8;
/// The longest piece that is copied from a cached range: a link of 55 GB/s takes about 40 us for
/// it, in which the next is begun.
const CACHED_PIECE: u64 = 2 << 20;
/// How long the thread sleeps at most while a stream, or a thread that reads pages, is busy: they
/// do not wake it.
const NAP: Duration = Duration::from_micros(50);
/// The time without progress after which a stream is asked for its state, and the interval at which
/// it is asked again.
pub const STALLED: Duration = Duration::from_millis(100);

/// A piece in flight: it is either in the ring or being copied.
struct InFlight {
    request: usize,
    part: usize,
    address: u64,
    /// In the staging pool; none for what the device moves itself.
    slot: Option<usize>,
    /// What it is copied from instead.
    cached: Option<Cached>,
    piece: PieceRange,
    /// Of a read, what the ring moved.
    done: Transfer,
}

pub struct Executor {
    ring: PieceRing,
    blocks: Blocks,
    /// By the GPU's index.
    copy_streams: Vec<Option<Box<CopyStream>>>,
    /// When each of them last did something.
    progress: Vec<Instant>,
    requests: Slab<ActiveRequest>,
    /// Those that have something to be cut, in the order of their turns.
    turns: VecDeque<usize>,
    pieces: Slab<InFlight>,
    /// How many of those there may be: as many as the ring has entries.
    most: usize,
    /// What reads pages of the page cache, what it has read, and how many pieces it has.
    page_cache: Arc<PageCache>,
    answers: Arc<PageAnswers>,
    reading: usize,
    read: Vec<PageAnswer>,
    /// The page cache had not got all of the piece for which it was last asked, or was not asked
    /// yet: what a request begins with, so that of many that come to nothing none takes more room
    /// than a device's transfers have.
    was_absent: bool,
    copied: Vec<usize>,
    not_copied: Vec<(usize, NotCopied)>,
    deliveries: Deliveries,
}

impl Executor {
    /// An executor without requests, with a ring that is its own.
    pub fn new(ring: Ring, blocks: Blocks, page_cache: Arc<PageCache>) -> Executor {
        let ring = PieceRing::new(ring);
        Executor {
            blocks,
            copy_streams: Vec::new(),
            progress: Vec::new(),
            requests: Slab::new(),
            turns: VecDeque::new(),
            pieces: Slab::new(),
            most: ring.capacity(),
            deliveries: Deliveries::default(),
            page_cache,
            answers: Arc::default(),
            reading: 0,
            read: Vec::new(),
            was_absent: true,
            copied: Vec::new(),
            not_copied: Vec::new(),
            ring,
        }
    }

    /// What files are attached to.
    pub fn ring(&self) -> &RingName {
        self.ring.name()
    }

    /// Whether there is a copy stream of this GPU.
    pub fn has_copy_stream(&self, gpu: Gpu) -> bool {
        self.copy_streams.get(gpu.index() as usize).is_some_and(Option::is_some)
    }

    /// Adds the copy stream of a GPU. It has to be there before a request that needs it.
    pub fn add_copy_stream(&mut self, gpu: Gpu, copy_stream: Box<CopyStream>) {
        let index = gpu.index() as usize;
        self.copy_streams.resize_with(self.copy_streams.len().max(index + 1), || None);
        self.copy_streams[index] = Some(copy_stream);
        self.progress.resize(self.copy_streams.len(), Instant::now());
    }

    /// Makes a GPU's context current on this thread, if there is a GPU: calls for that one, mostly
    /// the only one, need not enter it each then.
    pub fn enter(&self) -> Option<Entered> {
        self.copy_streams.iter().flatten().next().and_then(|copy_stream| copy_stream.enter().ok())
    }

    /// Begins a request.
    pub fn begin(&mut self, request: Request) {
        let id = self.requests.insert(ActiveRequest::new(request, self.was_absent));
        self.turns.push_back(id);
    }

    /// Takes a read of one part that is one piece, and has its bytes brought into its slot by a
    /// call on the file itself: for a file that is read once that costs less than to make it known
    /// to the ring. Only where all requests are answered, so that there is room, and of requests
    /// that the device may serve.
    pub fn read_by_call(&mut self, request: Request, file: &File) {
        debug_assert_ne!(request.require.route, Some(Route::Cache));
        if self.ring.has_ended() {
            return self.begin(request);
        }
        let [part] = &request.parts[..] else { unreachable!("a read of one part") };
        let (address, gpu, within, flags) = (part.address, part.allocation.gpu, part.len, request.require.flags());
        let piece = pieces::first(Direction::Read, self.blocks, part.file_offset, part.len, request.piece_len);
        debug_assert_eq!(piece.wanted, part.len);
        let copy_stream = copy_stream(&mut self.copy_streams, gpu);
        let (staging, slot) = (copy_stream.staging.clone(), copy_stream.take_slot(piece.slot_len(), SlotUser::Device));
        let active = ActiveRequest { within, in_flight: 1, in_turns: false, ..ActiveRequest::new(request, self.was_absent) };
        let request = self.requests.insert(active);
        let in_flight = InFlight { request, part: 0, address, slot, cached: None, piece, done: Transfer::default() };
        let index = self.pieces.insert(in_flight);
        if self.read_pages(index, true) {
            return;
        }
        let InFlight { piece, .. } = &self.pieces[index];
        let buffer_offset = slot.expect("an unused pool has room for a piece") as u64 + piece.slot_offset;
        let segment = Segment { file_offset: piece.file_offset, buffer_offset, len: piece.len };
        let mut result = file.transfer(Command::Read, staging.registered(), &[segment], flags);
        if let Err(Error::Transfer { errno: Errno::CONNABORTED | Errno::NOTCONN, .. }) = result {
            // The kernel, and not the daemon, reported the end of the mount: the daemon may still
            // be using the slot, so that no request gets it from now on.
            self.ring.end();
            result = Err(Error::RingClosed { path: file.path().to_owned() });
        }
        self.transferred(index, result);
    }

    /// Whether all requests are answered.
    pub fn is_idle(&self) -> bool {
        self.requests.is_empty()
    }

    /// Does all work that can be done now. False if there was none.
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
        self.ring.arm()
    }

    /// After [`Executor::arm`]: waits until something happens, or may have. `other` is where else
    /// it may come from.
    pub fn wait(&self, other: Option<&OwnedFd>) {
        let copying = self.copy_streams.iter().flatten().any(|copy_stream| copy_stream.is_busy());
        self.ring.wait(other, (copying || self.reading > 0).then_some(NAP));
    }

    /// Takes the pieces that the ring is done with.
    fn collect(&mut self, now: Instant) -> bool {
        let any = self.ring.look(now);
        while let Some(Completed { user_data, result, is_common }) = self.ring.pop() {
            let index = user_data as usize;
            if is_common && let Some((cached, _)) = &self.requests[self.pieces[index].request].request.cached {
                cached.set_common();
            }
            self.transferred(index, result);
        }
        any | self.collect_pages()
    }

    /// Takes the pieces that were read out of the page cache.
    fn collect_pages(&mut self) -> bool {
        if self.reading == 0 {
            return false;
        }
        let mut read = std::mem::take(&mut self.read);
        self.answers.take(&mut read);
        let any = !read.is_empty();
        for (index, result) in read.drain(..) {
            self.reading -= 1;
            match result {
                Ok(arrived) => {
                    self.pieces[index].done = from_cache(arrived);
                    self.arrived(index, arrived, true);
                }
                Err(errno) => match &self.requests[self.pieces[index].request].request.source {
                    // The daemon says what is wrong, if it still is.
                    Source::Ring(_) => {
                        let request = self.pieces[index].request;
                        self.requests[request].outcome.passes_cache(Reason::NotCached);
                        self.push(index);
                    }
                    Source::Call(path) => {
                        let error = Error::Path { path: path.clone(), action: action(Direction::Read), errno };
                        self.fail(index, error);
                    }
                },
            }
        }
        self.read = read;
        any
    }

    /// The ring is done with a piece.
    fn transferred(&mut self, index: usize, result: crate::error::Result<Transfer>) {
        let in_flight = &mut self.pieces[index];
        let active = &mut self.requests[in_flight.request];
        let part = &active.request.parts[in_flight.part];
        let piece = &in_flight.piece;
        let arrived = match of_piece(active.request.direction, active.request.source.path(), part, piece, result) {
            Ok((arrived, done)) => {
                in_flight.done = done;
                arrived
            }
            Err(error) => return self.fail(index, error),
        };
        match active.request.direction {
            Direction::Write => self.finish(index),
            Direction::Read => self.arrived(index, arrived, false),
        }
    }

    /// So many bytes of a piece of a read are in its slot, or where they belong: what was read out
    /// of the page cache to host memory is there.
    fn arrived(&mut self, index: usize, arrived: u64, from_pages: bool) {
        let InFlight { request, part, address, slot, piece, .. } = &self.pieces[index];
        let active = &mut self.requests[*request];
        let allocation = active.request.parts[*part].allocation;
        if arrived < piece.wanted {
            // The file ends here: the rest of the part is not even asked for.
            let of = &active.request.parts[*part];
            active.outcome.ended(of.segment, of.file_offset + (*address - of.address) + arrived);
            if active.part == *part {
                active.within = of.len;
            }
        }
        let is_there = from_pages && allocation.host.is_some();
        let Some(slot) = slot.filter(|_| arrived > 0 && !is_there) else { return self.finish(index) };
        let copy = Copy {
            direction: Direction::Read,
            address: *address,
            other: Other::Slot(slot + piece.skip as usize),
            len: arrived,
            allocation,
            piece: index,
        };
        copy_stream(&mut self.copy_streams, allocation.gpu).copy(copy);
    }

    /// Lets streams copy, and takes what they copied.
    fn copy(&mut self, now: Instant) -> bool {
        let mut any = false;
        let coming = self.ring.in_flight() + self.reading;
        for at in 0..self.copy_streams.len() {
            let Some(copy_stream) = &mut self.copy_streams[at] else { continue };
            copy_stream.finished(&mut self.copied);
            let moved = copy_stream.issue(coming, now, &mut self.copied, &mut self.not_copied) || !self.copied.is_empty();
            if moved {
                self.progress[at] = now;
                any = true;
            } else if copy_stream.is_copying() && now.saturating_duration_since(self.progress[at]) > STALLED {
                copy_stream.probe(&mut self.not_copied);
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
                Direction::Read if self.pieces[index].cached.is_some() => self.copied_from_cache(index),
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
            let copy_stream = self.requests[id].next_gpu();
            if copy_stream.is_some_and(|copy_stream| full.contains(&copy_stream)) {
                at += 1; // a request before it in this copy stream comes first
                continue;
            }
            if !self.cut_some(id) {
                full.extend(copy_stream);
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
        let are_several = self.requests.len() >= SEVERAL;
        loop {
            let active = &mut self.requests[id];
            if self.ring.has_ended() {
                let path = active.request.source.path().to_owned();
                active.outcome.failed(Error::RingClosed { path });
            }
            if active.request.cancel.as_ref().is_some_and(Cancel::is_cancelled) && active.next().is_some() {
                active.outcome.failed(cancelled(&active.request));
            }
            let Some(range) = active.next() else { return true };
            if range.len == 0 {
                (active.part, active.within) = (active.part + 1, 0);
                continue;
            }
            if left == 0 || self.pieces.len() == self.most {
                return any;
            }
            let (cached_range, rest) = active.cached_range(range);
            let request = &active.request;
            let part = &request.parts[range.part];
            let (direction, offset) = (request.direction, part.file_offset + range.within);
            if cached_range.is_none() && request.require.route == Some(Route::Cache) {
                let error = not_cached(request, part.segment, offset);
                active.outcome.failed(error);
                continue;
            }
            let (piece, slot) = if cached_range.is_some() {
                // Halves, so that the last piece of many bytes is not one of few.
                let half = (rest / 2).next_multiple_of(BY_KERNEL);
                let wanted = if rest > CACHED_PIECE { half.min(CACHED_PIECE) } else { rest };
                (PieceRange { file_offset: offset, slot_offset: 0, len: wanted, skip: 0, wanted }, None)
            } else if part.registered.is_ok() {
                (pieces::first_unstaged(self.blocks, offset, rest, request.piece_len), None)
            } else {
                let copy_stream = copy_stream(&mut self.copy_streams, part.allocation.gpu);
                let has_whole = rest >= CHUNK as u64 && copy_stream.chunks_of_devices() >= LONGEST_PIECES;
                let is_longest = are_several && has_whole && active.slot_user(range) == SlotUser::Device;
                let piece_len = if is_longest { CHUNK as u64 } else { request.piece_len };
                let piece = pieces::first(direction, self.blocks, offset, rest, piece_len);
                let slot = copy_stream.take_slot(piece.slot_len(), active.slot_user(range));
                if slot.is_none() {
                    return any;
                }
                (piece, slot)
            };
            let (address, allocation) = (part.address + range.within, part.allocation);
            let other = match (&cached_range, slot) {
                (Some(cached), _) => Some(Other::Cached(cached.cached_range.address(offset))),
                (None, Some(slot)) if direction == Direction::Write => Some(Other::Slot(slot + piece.skip as usize)),
                _ => None,
            };
            let done = Transfer::default();
            let in_flight = InFlight { request: id, part: range.part, address, slot, cached: cached_range, piece, done };
            active.advance(piece.wanted);
            active.in_flight += 1;
            let index = self.pieces.insert(in_flight);
            match other {
                Some(other) => {
                    let copy = Copy { direction, address, other, len: piece.wanted, allocation, piece: index };
                    copy_stream(&mut self.copy_streams, allocation.gpu).copy(copy);
                }
                None if self.read_pages(index, range.cached) => {}
                None => self.push(index),
            }
            any = true;
            left = left.saturating_sub(piece.wanted);
        }
    }

    /// A piece was copied from a cached range: it is done if those were the file's bytes, and else
    /// is read again.
    fn copied_from_cache(&mut self, index: usize) {
        let in_flight = &mut self.pieces[index];
        let Some(Cached { cached_range, place }) = &in_flight.cached else { unreachable!("a piece of a cached range") };
        let PieceRange { file_offset, wanted, .. } = in_flight.piece;
        if cached_range.is_true(file_offset, wanted) {
            in_flight.done = from_cache(wanted);
            return self.finish(index);
        }
        place.take_stale(cached_range);
        let InFlight { request: id, part, address, .. } = self.pieces.remove(index);
        let active = &mut self.requests[id];
        let within = address - active.request.parts[part].address;
        active.again.push(Uncut { part, within, len: wanted, cached: false });
        active.in_flight -= 1;
        if !active.in_turns {
            active.in_turns = true;
            self.turns.push_back(id);
        }
    }

    /// Has a piece read out of the page cache, if that has all of it and `tries` says so. False
    /// where it is not.
    fn read_pages(&mut self, index: usize, tries: bool) -> bool {
        let InFlight { request, part, address, slot, piece, .. } = &self.pieces[index];
        let active = &mut self.requests[*request];
        let (request, outcome) = (&active.request, &mut active.outcome);
        // What the device moves itself, and what is written, has no part in the page cache.
        let (Some(slot), Direction::Read) = (slot, request.direction) else { return false };
        let allocation = &request.parts[*part].allocation;
        let (offset, len) = (piece.file_offset + piece.skip, piece.wanted);
        let resident = match (&request.resident, &request.cached) {
            (Ok(resident), Some((cached, _))) if tries => {
                let to = allocation.on_host(*address).map_or_else(
                    || To::Slot(copy_stream(&mut self.copy_streams, allocation.gpu).staging.clone(), slot + piece.skip as usize),
                    To::Host,
                );
                let (file, answers) = (resident.file.clone(), self.answers.clone());
                let read = PageRead { file, offset, len: len as usize, to, piece: index, answers };
                let found = self.page_cache.read(cached, read, self.pieces.len() == 1);
                (active.was_absent, self.was_absent) = (found.is_err(), found.is_err());
                found.map(|()| (resident, cached))
            }
            (Err(why), _) => Err(*why),
            // It has left the page cache meanwhile.
            (Ok(_), _) => Err(Reason::NotResident),
        };
        match resident {
            Ok((resident, cached)) => {
                self.reading += 1;
                if resident.missing == Missing::Refuse && allocation.host.is_none() {
                    self.page_cache.is_read(cached, allocation.gpu, &resident.file, (offset, len), resident.missing);
                }
                true
            }
            Err(why) => {
                outcome.passes_cache(why);
                false
            }
        }
    }

    /// Gives a piece to the ring.
    fn push(&mut self, index: usize) {
        let InFlight { request, part, address, slot, piece, .. } = &self.pieces[index];
        let request = &self.requests[*request].request;
        let Source::Ring(file) = &request.source else { unreachable!("what was brought by a call is not transferred again") };
        let part = &request.parts[*part];
        let slot = slot.map(|slot| (&copy_stream(&mut self.copy_streams, part.allocation.gpu).staging, slot));
        let operation = operation(request.direction, file, part, piece, *address, slot);
        let operation = operation.requiring(request.require).written_back(request.is_written_back);
        if let Err(error) = self.ring.push(&operation.tagged(index as u64)) {
            self.fail(index, error);
        }
    }

    /// A piece is done.
    fn finish(&mut self, index: usize) {
        let InFlight { request: id, part, slot, done, .. } = self.pieces.remove(index);
        let active = &mut self.requests[id];
        if let Some(slot) = slot {
            copy_stream(&mut self.copy_streams, active.request.parts[part].allocation.gpu).give_back_slot(slot);
        }
        active.outcome.add(&done);
        active.in_flight -= 1;
        self.answer_if_done(id);
    }

    /// A piece is done, and its request failed: the first failure is what it is answered with.
    fn fail(&mut self, index: usize, error: Error) {
        let in_flight = &mut self.pieces[index];
        in_flight.done = Transfer::default();
        self.requests[in_flight.request].outcome.failed(error);
        self.finish(index);
    }

    /// Answers a request of which nothing is left to do.
    fn answer_if_done(&mut self, id: usize) {
        let active = &self.requests[id];
        if active.in_flight > 0 || active.in_turns {
            return;
        }
        let ActiveRequest { request, mut outcome, .. } = self.requests.remove(id);
        if let Err(error) = settle(&request) {
            outcome.failed(error);
        }
        let result = outcome.result(request.parts.iter().map(SegmentPart::range));
        request.end.answer(result, &mut self.deliveries);
    }
}

/// Makes what the device wrote to GPU memory itself visible to every reader, before a read is
/// answered.
fn settle(request: &Request) -> crate::error::Result<()> {
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

/// The copy stream of a GPU. It came before the request.
fn copy_stream(copy_streams: &mut [Option<Box<CopyStream>>], gpu: Gpu) -> &mut CopyStream {
    copy_streams[gpu.index() as usize].as_mut().expect("a copy_stream comes before the requests that use it")
}
