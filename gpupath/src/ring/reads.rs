//! Reads that are one request of the device each: of a whole number of blocks that lie in one
//! piece. The thread that serves the ring begins and ends them by itself, many at a time.
//!
//! It guards what it costs to take a read in: no lock that others need, no memory and no reference
//! count for a read; what can be counted, held and answered for several at once, is. All that is
//! not as plain as that goes the way of [`crate::admission`], which looks closer: also a read that
//! the device failed, so that there is one place that judges errors.

use super::queue_pair::{AttachedFile, Ring, weight};
use crate::admission::Hold;
use crate::planner::Alignment;
use crate::registry::Buffer;
use crate::server::Server;
use gpunvme_abi::ring::{Completion, CompletionFlags, Submission};
use gpunvme_abi::{Command, Direction, Moved, Route, TransferFlags};
use gpunvme_blockdev::{self as blockdev, Op, OwnQueue, Request, Wait};
use gpunvme_metrics::{Begun, Ended};
use slab::Slab;
use smallvec::SmallVec;
use std::sync::Arc;
use tracing::Level;

/// The reads of a serving thread.
pub(super) struct Reads {
    server: Arc<Server>,
    alignment: Alignment,
    batches: Slab<Batch>,
    /// By their tags.
    in_flight: Slab<InFlight>,
    /// Those that [`Reads::run`] will give to the device.
    requests: Vec<Request>,
    ended: Vec<blockdev::Completion>,
    answers: Vec<Completion>,
}

/// Reads of a ring into a buffer that began in one turn.
struct Batch {
    ring: Arc<Ring>,
    buffer: Arc<Buffer>,
    /// From before the first of their places was looked up.
    hold: Hold,
    begun: Option<Counted>,
    in_flight: u32,
}

/// Reads of a batch as they were counted when they began.
#[derive(Clone, Copy)]
struct Counted {
    transfers: Begun,
    requests: Begun,
}

struct InFlight {
    batch: usize,
    submission: Submission,
    /// Whether another process reads the same.
    common: bool,
}

/// The batches of a turn of one ring, and the file that it read last.
#[derive(Default)]
pub(super) struct Turn {
    batches: SmallVec<[usize; 4]>,
    file: Option<(u64, Arc<AttachedFile>)>,
}

impl Turn {
    /// Has `file` be the file of this name of the turn's ring. False where it has none.
    fn find_file(&mut self, ring: &Ring, name: u64) -> bool {
        if self.file.as_ref().is_none_or(|(known, _)| *known != name) {
            self.file = ring.file(name).map(|file| (name, file));
        }
        self.file.is_some()
    }
}

impl Reads {
    /// None yet. `alignment` is that of the device, for reads.
    pub fn new(server: Arc<Server>, alignment: Alignment) -> Reads {
        let (batches, in_flight) = (Slab::new(), Slab::new());
        let (requests, ended, answers) = (Vec::new(), Vec::new(), Vec::new());
        Reads { server, alignment, batches, in_flight, requests, ended, answers }
    }

    /// Whether reads can be taken now: not where each transfer is to be told by itself, to the log
    /// or to who watches activity.
    pub fn are_taken(&self, queue: &OwnQueue) -> bool {
        queue.takes_requests() && !self.server.stats.activity().is_watched() && !tracing::enabled!(Level::TRACE)
    }

    /// Takes a submission, if it is such a read. Not if this is false.
    pub fn take(&mut self, turn: &mut Turn, ring: &Arc<Ring>, submission: &Submission) -> bool {
        let Some((Command::Read, request)) = submission.decode() else { return false };
        let Submission { file_offset, buffer_offset, len, .. } = *submission;
        let is_aligned = (file_offset | len).is_multiple_of(self.alignment.block)
            && buffer_offset.is_multiple_of(self.alignment.memory)
            && len > 0;
        if !is_aligned || !turn.find_file(ring, submission.file) {
            return false;
        }
        let Some(number) = self.batch(turn, ring, submission.buffer) else { return false };
        let (Some((_, file)), batch) = (&turn.file, &mut self.batches[number]) else { return false };
        let is_its = buffer_offset + len <= batch.buffer.region.len() as u64
            && request.required_route().is_none_or(|route| route == batch.buffer.route);
        let is_written_back = request.flags.contains(TransferFlags::WRITTEN_BACK);
        let place = if is_its { file.file.place(file_offset..file_offset + len, is_written_back) } else { None };
        let Some(place) = place else { return false };
        let common = file.reader.as_ref().is_some_and(|reader| reader.reads(file_offset, len));
        let span = batch.buffer.region.span(buffer_offset as usize..(buffer_offset + len) as usize);
        batch.in_flight += 1;
        let tag = self.in_flight.insert(InFlight { batch: number, submission: *submission, common });
        self.requests.push(Request { tag: tag as u64, ..Request::read(place, [span]) });
        true
    }

    /// The turn's batch of this buffer. None where the ring's owner has none of this name.
    fn batch(&mut self, turn: &mut Turn, ring: &Arc<Ring>, buffer: u64) -> Option<usize> {
        if let Some(known) = turn.batches.iter().copied().find(|known| self.batches[*known].buffer.id == buffer) {
            return Some(known);
        }
        let buffer = ring.buffer(buffer, || self.server.registry.lookup_of(&ring.owner, buffer)).ok()?;
        let (_, file) = turn.file.as_ref()?;
        let batch = Batch { ring: ring.clone(), buffer, hold: file.file.hold(), begun: None, in_flight: 0 };
        let number = self.batches.insert(batch);
        turn.batches.push(number);
        Some(number)
    }

    /// Ends a turn: what began in it is counted.
    pub fn end_turn(&mut self, turn: &Turn, queue: &OwnQueue) {
        for number in &turn.batches {
            let batch = &mut self.batches[*number];
            let count = batch.in_flight.into();
            if count == 0 {
                self.batches.remove(*number);
                continue;
            }
            batch.begun = Some(Counted {
                transfers: self.server.stats.begin(Direction::Read, batch.buffer.route, count),
                requests: queue.begin(Op::Read, count),
            });
        }
    }

    /// Gives what was taken to the device, and answers what the device has done, for which it waits
    /// as [`OwnQueue::run`] does. `again` takes reads that failed. Returns how many requests of the
    /// device are over.
    pub fn run(&mut self, queue: &OwnQueue, wait: Wait, mut again: impl FnMut(&Arc<Ring>, Submission)) -> usize {
        let done = queue.run(&mut self.requests, wait, &mut self.ended);
        let mut ended = std::mem::take(&mut self.ended);
        let mut current = None;
        for blockdev::Completion { tag, result } in ended.drain(..) {
            let InFlight { batch, submission, common } = self.in_flight.remove(tag as usize);
            if current.is_some_and(|current| current != batch) {
                self.answer(current.take(), queue);
            }
            if let Err(error) = result {
                tracing::debug!(%error, "a read is tried again, with a closer look");
                again(&self.batches[batch].ring, submission);
                self.give_up(batch, queue);
                continue;
            }
            current = Some(batch);
            let of = &self.batches[batch].buffer;
            let mut answer = Completion { user_data: submission.user_data, reason: of.reason.code(), ..Completion::default() };
            match of.route {
                Route::P2p => answer.p2p = submission.len,
                Route::Bounce => answer.bounce = submission.len,
                // No buffer has the last ones.
                Route::Host | Route::None | Route::Cache => answer.host = submission.len,
            }
            if common {
                answer.flags = CompletionFlags::COMMON.bits();
            }
            self.answers.push(answer);
        }
        self.answer(current, queue);
        self.ended = ended;
        done
    }

    /// Gives the answers to their ring, whose reads are all of this batch.
    fn answer(&mut self, batch: Option<usize>, queue: &OwnQueue) {
        let Some(number) = batch else { return };
        let (mut bytes, mut moved) = (0, Moved::default());
        for Completion { p2p, bounce, host, .. } in &self.answers {
            (moved.p2p, moved.bounce, moved.host) = (moved.p2p + p2p, moved.bounce + bounce, moved.host + host);
            bytes += weight(p2p + bounce + host);
        }
        let (count, stats) = (self.answers.len() as u64, &self.server.stats);
        let batch = &mut self.batches[number];
        let Counted { transfers, requests } = batch.begun.expect("set when its turn ended");
        stats.moved(Direction::Read, count, &moved, batch.buffer.reason);
        stats.end(transfers, count, &moved, false);
        stats.calls(Command::Read, count);
        queue.end(requests, Ended { count, bytes: moved.total(), failed: false });
        batch.in_flight -= count as u32;
        if batch.in_flight > 0 {
            batch.ring.complete(bytes, &self.answers);
        } else {
            let Batch { ring, buffer, hold, .. } = self.batches.remove(number);
            // Before the answer: an application that unregisters after it finds the memory free.
            drop((buffer, hold));
            ring.complete(bytes, &self.answers);
        }
        self.answers.clear();
    }

    /// A read of this batch failed, and is another's from now on.
    fn give_up(&mut self, number: usize, queue: &OwnQueue) {
        let batch = &mut self.batches[number];
        let Counted { transfers, requests } = batch.begun.expect("set when its turn ended");
        self.server.stats.end(transfers, 1, &Moved::default(), true);
        queue.end(requests, Ended { count: 1, bytes: 0, failed: true });
        batch.in_flight -= 1;
        if batch.in_flight == 0 {
            self.batches.remove(number);
        }
    }
}
