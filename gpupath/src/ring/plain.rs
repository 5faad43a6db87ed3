//! Transfers that are one request of the device each: reads, and writes in place, of whole blocks
//! that lie in one piece. The thread that serves the ring begins and ends them by itself, many at a
//! time.
//!
//! It guards what it costs to take a transfer in: no lock that others need, no memory and no
//! reference count for a transfer; what can be counted, held and answered for several at once, is.
//! All that is not as plain as that goes the way of [`crate::admission`], which looks closer: also
//! a transfer that the device failed, so that there is one place that judges errors.

use super::queue_pair::{AttachedFile, Ring, Taken, flags, weight};
use super::thread::ServingThread;
use crate::admission::{BegunWrite, Hold, WritePermit};
use crate::planner::Alignment;
use crate::registry::Buffer;
use crate::server::Server;
use gpunvme_abi::ring::{Completion, Submission};
use gpunvme_abi::{Command, Direction, Moved, Route, TransferFlags};
use gpunvme_blockdev::{self as blockdev, Op, OwnQueue, Request, Wait};
use gpunvme_metrics::{Begun, Ended};
use slab::Slab;
use smallvec::SmallVec;
use std::ops::Range;
use std::sync::Arc;
use tracing::Level;

/// The plain transfers of a serving thread.
pub(super) struct Plain {
    server: Arc<Server>,
    alignment: Alignment,
    batches: Slab<Batch>,
    /// By their tags.
    in_flight: Slab<InFlight>,
    /// Those that [`Plain::run`] will give to the device.
    requests: Vec<Request>,
    ended: Vec<blockdev::Completion>,
    answers: Vec<Completion>,
}

/// Transfers of a ring that began in one turn: reads into a buffer, or writes from it to a file.
struct Batch {
    ring: Arc<Ring>,
    buffer: Arc<Buffer>,
    writes: Option<Writes>,
    /// From before the first of their places was looked up.
    hold: Hold,
    begun: Option<Counted>,
    in_flight: u32,
}

/// What writes of a batch have in common.
struct Writes {
    /// The file's name in the ring.
    name: u64,
    file: Arc<AttachedFile>,
    permit: WritePermit,
    /// The longest that the ring's owner may make a file, in bytes.
    limit: u64,
}

/// Transfers of a batch as they were counted when they began.
#[derive(Clone, Copy)]
struct Counted {
    transfers: Begun,
    requests: Begun,
}

struct InFlight {
    batch: usize,
    submission: Submission,
    /// Of a read: whether another process reads the same.
    common: bool,
    /// Of a write.
    write: Option<usize>,
}

/// The batches of a turn of one ring, and the file that it used last.
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

impl Batch {
    fn direction(&self) -> Direction {
        if self.writes.is_some() { Direction::Write } else { Direction::Read }
    }

    /// What a transfer of this batch is answered that did all that was asked.
    fn answer(&self, submission: &Submission, common: bool) -> Completion {
        let mut answer =
            Completion { user_data: submission.user_data, reason: self.buffer.reason.code(), ..Completion::default() };
        match self.buffer.route {
            Route::P2p => answer.p2p = submission.len,
            Route::Bounce => answer.bounce = submission.len,
            // No buffer has the last ones.
            Route::Host | Route::None | Route::Cache => answer.host = submission.len,
        }
        answer.flags = flags(true, common);
        answer
    }
}

impl Plain {
    /// None yet. `alignment` is that of the device, for reads.
    pub fn new(server: Arc<Server>, alignment: Alignment) -> Plain {
        let (batches, in_flight) = (Slab::new(), Slab::new());
        let (requests, ended, answers) = (Vec::new(), Vec::new(), Vec::new());
        Plain { server, alignment, batches, in_flight, requests, ended, answers }
    }

    /// Whether transfers can be taken now: not where each is to be told by itself, to the log or to
    /// who watches activity.
    pub fn are_taken(&self, queue: &OwnQueue) -> bool {
        queue.takes_requests() && !self.server.stats.activity().is_watched() && !tracing::enabled!(Level::TRACE)
    }

    /// Whether the device has none of them.
    pub fn is_idle(&self) -> bool {
        self.in_flight.is_empty()
    }

    /// Takes a submission, if it is such a transfer. Not if this is false.
    pub fn take(&mut self, turn: &mut Turn, ring: &Arc<Ring>, submission: &Submission) -> bool {
        let Some((command, request)) = submission.decode() else { return false };
        let direction = match command {
            Command::Read => Direction::Read,
            Command::Write => Direction::Write,
            _ => return false,
        };
        let Submission { file_offset, buffer_offset, len, .. } = *submission;
        let is_aligned = (file_offset | len).is_multiple_of(self.alignment.block)
            && buffer_offset.is_multiple_of(self.alignment.memory)
            && len > 0;
        if !is_aligned || !turn.find_file(ring, submission.file) {
            return false;
        }
        let Some(number) = self.batch(turn, ring, direction, submission) else { return false };
        let (Some((_, file)), batch) = (&turn.file, &mut self.batches[number]) else { return false };
        let is_its = buffer_offset + len <= batch.buffer.region.len() as u64
            && request.required_route().is_none_or(|route| route == batch.buffer.route);
        if !is_its {
            return false;
        }
        let range = file_offset..file_offset + len;
        let is_written_back = request.flags.contains(TransferFlags::WRITTEN_BACK);
        let span = batch.buffer.region.span(buffer_offset as usize..(buffer_offset + len) as usize);
        let (request, common, write) = match &batch.writes {
            None => {
                let Some(place) = file.file.place(range, is_written_back) else { return false };
                let common = file.reader.as_ref().is_some_and(|reader| reader.reads(file_offset, len));
                (Request::read(place, [span]), common, None)
            }
            Some(Writes { permit, limit, .. }) => {
                if !permit.is_given || range.end > *limit {
                    return false;
                }
                let Some(begun) = file.file.begin_write(range, is_written_back) else { return false };
                let BegunWrite { device_offset, write } = begun;
                (Request::write(device_offset, [span], false), false, Some(write))
            }
        };
        batch.in_flight += 1;
        let tag = self.in_flight.insert(InFlight { batch: number, submission: *submission, common, write });
        self.requests.push(Request { tag: tag as u64, ..request });
        true
    }

    /// The turn's batch that a submission belongs to. None where the ring's owner has no such
    /// buffer.
    fn batch(&mut self, turn: &mut Turn, ring: &Arc<Ring>, direction: Direction, submission: &Submission) -> Option<usize> {
        let Submission { buffer, file: name, .. } = *submission;
        let is_it = |batch: &Batch| match &batch.writes {
            Some(writes) => direction == Direction::Write && batch.buffer.id == buffer && writes.name == name,
            None => direction == Direction::Read && batch.buffer.id == buffer,
        };
        if let Some(known) = turn.batches.iter().copied().find(|known| is_it(&self.batches[*known])) {
            return Some(known);
        }
        let buffer = ring.buffer(buffer, || self.server.registry.lookup_of(&ring.owner, buffer)).ok()?;
        let (_, file) = turn.file.as_ref()?;
        let writes = (direction == Direction::Write).then(|| {
            let (file, permit) = (file.clone(), file.file.permit_writes());
            Writes { name, file, permit, limit: ring.file_size_limit() }
        });
        let batch = Batch { ring: ring.clone(), buffer, writes, hold: file.file.hold(), begun: None, in_flight: 0 };
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
            let op = if batch.writes.is_some() { Op::Write { fua: false } } else { Op::Read };
            batch.begun = Some(Counted {
                transfers: self.server.stats.begin(batch.direction(), batch.buffer.route, count),
                requests: queue.begin(op, count),
            });
        }
    }

    /// Gives what was taken to the device, and answers what the device has done, for which it
    /// waits as [`OwnQueue::run`] does. `again` takes transfers that failed. `thread` is this one.
    /// Returns how many requests of the device are over.
    pub fn run(
        &mut self,
        (queue, thread): (&OwnQueue, &Arc<ServingThread>),
        wait: Wait,
        mut again: impl FnMut(&Arc<Ring>, Submission),
    ) -> usize {
        let done = queue.run(&mut self.requests, wait, &mut self.ended);
        let mut ended = std::mem::take(&mut self.ended);
        let mut current = None;
        for blockdev::Completion { tag, result } in ended.drain(..) {
            let InFlight { batch: number, submission, common, write } = self.in_flight.remove(tag as usize);
            if current.is_some_and(|current| current != number) {
                self.answer(current.take(), queue);
            }
            let batch = &self.batches[number];
            let range = submission.file_offset..submission.file_offset + submission.len;
            let is_over = match (&batch.writes, write) {
                (Some(writes), Some(write)) => writes.file.file.end_write(write, range.clone(), result.is_ok()),
                _ => true,
            };
            if let Err(error) = result {
                tracing::debug!(%error, "a transfer is tried again, with a closer look");
                let ring = batch.ring.clone();
                self.leave(number, queue, (1, &Moved::default()), true);
                again(&ring, submission);
                continue;
            }
            let answer = batch.answer(&submission, common);
            if !is_over {
                self.answer_later(number, (queue, thread), (&submission, range), answer);
                continue;
            }
            current = Some(number);
            self.answers.push(answer);
        }
        self.answer(current, queue);
        self.ended = ended;
        done
    }

    /// Gives the answers to their ring, whose transfers are all of this batch.
    fn answer(&mut self, batch: Option<usize>, queue: &OwnQueue) {
        let Some(number) = batch else { return };
        let answers = std::mem::take(&mut self.answers);
        let (mut bytes, mut moved) = (0, Moved::default());
        for Completion { p2p, bounce, host, .. } in &answers {
            (moved.p2p, moved.bounce, moved.host) = (moved.p2p + p2p, moved.bounce + bounce, moved.host + host);
            bytes += weight(p2p + bounce + host);
        }
        match self.leave(number, queue, (answers.len() as u64, &moved), false) {
            Some(ring) => ring.complete(bytes, &answers),
            None => self.batches[number].ring.complete(bytes, &answers),
        }
        // It keeps its memory.
        self.answers = answers;
        self.answers.clear();
    }

    /// Answers a write when the kernel has forgotten its pages of the range.
    fn answer_later(
        &mut self,
        number: usize,
        (queue, thread): (&OwnQueue, &Arc<ServingThread>),
        (submission, range): (&Submission, Range<u64>),
        answer: Completion,
    ) {
        let batch = &self.batches[number];
        let Some(Writes { file, .. }) = &batch.writes else { return };
        let (file, taken) = (file.clone(), Taken::new(thread.clone(), batch.ring.clone(), submission));
        let Completion { p2p, bounce, host, .. } = answer;
        self.leave(number, queue, (1, &Moved { p2p, bounce, host, ..Moved::default() }), false);
        file.file.forget_pages(range, Box::new(move || taken.end(answer)));
    }

    /// Counts the end of transfers of a batch: so many, which moved so much, or failed. Returns its
    /// ring, where these were the last. The buffer is let go of then, which is before the answer:
    /// an application that unregisters it after that finds the memory free.
    fn leave(&mut self, number: usize, queue: &OwnQueue, (count, moved): (u64, &Moved), failed: bool) -> Option<Arc<Ring>> {
        let (batch, stats) = (&mut self.batches[number], &self.server.stats);
        let Counted { transfers, requests } = batch.begun.expect("set when its turn ended");
        if !failed {
            let command = if batch.writes.is_some() { Command::Write } else { Command::Read };
            stats.moved(batch.direction(), count, moved, batch.buffer.reason);
            stats.calls(command, count);
        }
        stats.end(transfers, count, moved, failed);
        queue.end(requests, Ended { count, bytes: moved.total(), failed });
        batch.in_flight -= count as u32;
        if batch.in_flight > 0 {
            return None;
        }
        let Batch { ring, buffer, hold, writes, .. } = self.batches.remove(number);
        drop((buffer, hold, writes));
        Some(ring)
    }
}
