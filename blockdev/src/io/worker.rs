//! A queue, the batches in flight on it, and how they end.
use std::cell::Cell;
use std::num::NonZero;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use gpunvme_metrics::{Begun, Ended, Meter};
use parking_lot::Mutex;
use slab::Slab;

use super::Done;
use super::abort::AbortOnPanic;
use crate::{Completion, Error, Queue, Request, Result, Wait};

/// Marks the tags of requests that are no batch's.
pub(super) const NO_BATCH: u64 = 1 << 63;

thread_local! {
    /// Whether the thread collects the completions of others, so that it must not wait for any.
    pub(super) static IS_REAPER: Cell<bool> = const { Cell::new(false) };
}

/// A queue and the batches in flight on it. One thread collects its completions: a reaper, or the
/// owner of a queue of its own.
pub(super) struct QueueWorker {
    pub queue: Box<dyn Queue>,
    batches: Mutex<Batches>,
    /// Batches whose `done` was not called yet, and requests that are no batch's.
    pub in_flight: AtomicUsize,
    pub stopping: AtomicBool,
    pub meter: Arc<Meter>,
}

/// Batches by the key that is the tag of their requests.
#[derive(Default)]
struct Batches {
    pending: Slab<Batch>,
    /// Batches without any request, for the reaper to call.
    empty: Vec<Done>,
}

struct Batch {
    /// Requests not completed yet.
    remaining: usize,
    error: Option<Error>,
    done: Done,
    /// When it began, for the meter; of what kind its first request is, all are as a rule.
    begun: Begun,
    count: u64,
    bytes: u64,
}

/// Runs a batch on a queue that has no other user.
pub(super) fn run_inline(queue: &dyn Queue, mut batch: Vec<Request>) -> Result<()> {
    let requests = batch.len();
    queue.submit(&mut batch);
    drain(queue, requests)
}

/// Waits for all that is in flight on a queue, `remaining` requests. Returns the first error.
pub(super) fn drain(queue: &dyn Queue, mut remaining: usize) -> Result<()> {
    let mut result = Ok(());
    let mut completions = Vec::new();
    while remaining > 0 {
        take_completions(queue, Wait::Forever, &mut completions);
        remaining -= completions.len();
        for completion in completions.drain(..) {
            result = result.and(completion.result);
        }
    }
    result
}

fn take_completions(queue: &dyn Queue, wait: Wait, completions: &mut Vec<Completion>) {
    if let Err(error) = queue.complete(wait, completions) {
        // Its requests may be in flight for ever: their callers could be told nothing true.
        panic!("an I/O queue broke: {error}");
    }
}

impl QueueWorker {
    pub fn new(queue: Box<dyn Queue>, meter: &Arc<Meter>) -> QueueWorker {
        let (in_flight, stopping) = (AtomicUsize::new(0), AtomicBool::new(false));
        QueueWorker { queue, batches: Mutex::default(), in_flight, stopping, meter: meter.clone() }
    }

    /// Takes a batch in. What it appends to `requests` has to be submitted to the queue.
    pub fn begin(&self, batch: impl ExactSizeIterator<Item = Request>, done: Done, requests: &mut Vec<Request>) {
        self.in_flight.fetch_add(1, Ordering::AcqRel);
        let Some(remaining) = NonZero::new(batch.len()) else {
            self.batches.lock().empty.push(done);
            return self.queue.wake();
        };
        let first = requests.len();
        requests.extend(batch);
        let (count, bytes) = (remaining.get() as u64, requests[first..].iter().map(|request| request.len).sum());
        let begun = self.meter.begin(requests[first].op.kind(), count);
        let batch = Batch { remaining: remaining.get(), error: None, done, begun, count, bytes };
        let tag = self.batches.lock().pending.insert(batch);
        requests[first..].iter_mut().for_each(|request| request.tag = tag as u64);
    }

    /// The reaper thread.
    pub fn reap(&self) {
        let _guard = AbortOnPanic::new();
        IS_REAPER.set(true);
        let mut reaped = Reaped::default();
        while !self.stopping.load(Ordering::Acquire) || self.in_flight.load(Ordering::Acquire) > 0 {
            self.collect(Wait::Forever, &mut reaped, &mut Vec::new());
        }
    }

    /// Collects completions, calls the `done` of batches that are over, and appends completions
    /// that are no batch's to `ended`. Returns how many requests were over.
    pub fn collect(&self, wait: Wait, reaped: &mut Reaped, ended: &mut Vec<Completion>) -> usize {
        let Reaped { completions, finished } = reaped;
        take_completions(&*self.queue, wait, completions);
        let count = completions.len();
        {
            let mut batches = self.batches.lock();
            finished.extend(batches.empty.drain(..).map(|done| (done, Ok(()))));
            let before = ended.len();
            for completion in completions.drain(..) {
                if completion.tag & NO_BATCH != 0 {
                    ended.push(Completion { tag: completion.tag ^ NO_BATCH, ..completion });
                } else {
                    finished.extend(batches.complete(completion, &self.meter));
                }
            }
            self.in_flight.fetch_sub(ended.len() - before, Ordering::AcqRel);
        }
        for (done, result) in finished.drain(..) {
            self.in_flight.fetch_sub(1, Ordering::AcqRel);
            done(result);
        }
        count
    }
}

/// What one [`QueueWorker::collect`] works on, in vectors that keep their memory.
#[derive(Default)]
pub(super) struct Reaped {
    completions: Vec<Completion>,
    finished: Vec<(Done, Result<()>)>,
}

impl Batches {
    /// Counts a completion; gives the batch's `done` and result if it was the last.
    fn complete(&mut self, completion: Completion, meter: &Meter) -> Option<(Done, Result<()>)> {
        let key = completion.tag as usize;
        let batch = &mut self.pending[key];
        batch.remaining -= 1;
        if let Err(error) = completion.result {
            batch.error.get_or_insert(error);
        }
        if batch.remaining > 0 {
            return None;
        }
        let batch = self.pending.remove(key);
        meter.end(batch.begun, Ended { count: batch.count, bytes: batch.bytes, failed: batch.error.is_some() });
        Some((batch.done, batch.error.map_or(Ok(()), Err)))
    }
}
