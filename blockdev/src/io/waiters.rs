//! Queues that are lent to threads that wait for what they submit. Such a thread collects the
//! completions itself: the device's answer wakes it, and not first a reaper, which wakes it then.
//!
//! Locks: `idle`, for moments, never while a queue is used.
use std::sync::atomic::{AtomicUsize, Ordering};

use gpunvme_metrics::{Ended, Meter};
use parking_lot::Mutex;

use super::{AbortOnPanic, run_inline};
use crate::{BlockDevice, Op, Queue, Request, Result};

/// Queues at the most: as many threads wait for the device at once, and are served best.
const MOST: usize = 16;
/// Queues of the device that are left for threads with a queue of their own.
const LEFT: usize = 4;

pub(super) struct Waiters {
    idle: Mutex<Vec<Box<dyn Queue>>>,
    /// Queues that may still be opened.
    unopened: AtomicUsize,
}

impl Waiters {
    /// Those of a device on which `others` queues are open.
    pub fn new(device: &dyn BlockDevice, others: usize) -> Waiters {
        let spare = (device.geometry().max_queues as usize).saturating_sub(others + LEFT);
        Waiters { idle: Mutex::default(), unopened: AtomicUsize::new(spare.min(MOST)) }
    }

    /// A queue for the calling thread alone; none where all are in use.
    pub fn lend(&self, device: &dyn BlockDevice) -> Option<Box<dyn Queue>> {
        if let Some(queue) = self.idle.lock().pop() {
            return Some(queue);
        }
        let one_less = |unopened: usize| unopened.checked_sub(1);
        self.unopened.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_less).ok()?;
        match device.open_queue() {
            Ok(queue) => Some(queue),
            Err(error) => {
                tracing::debug!(%error, "threads that wait share queues from now on");
                self.unopened.store(0, Ordering::Relaxed);
                None
            }
        }
    }

    /// Runs a batch on a queue that was lent, and takes the queue back. Returns the first error.
    pub fn run(&self, queue: Box<dyn Queue>, meter: &Meter, batch: Vec<Request>) -> Result<()> {
        let _guard = AbortOnPanic;
        let Some(first) = batch.first() else {
            self.take_back(queue);
            return Ok(());
        };
        let (count, bytes) = (batch.len() as u64, batch.iter().map(|request| request.len).sum());
        let begun = meter.begin(first.op.kind(), count);
        let here = if let [Request { op: Op::Flush, .. }] = &batch[..] { queue.flush_here() } else { None };
        let result = here.unwrap_or_else(|| run_inline(&*queue, batch));
        meter.end(begun, Ended { count, bytes, failed: result.is_err() });
        self.take_back(queue);
        result
    }

    /// Takes a queue back, on which nothing is in flight.
    fn take_back(&self, queue: Box<dyn Queue>) {
        self.idle.lock().push(queue);
    }
}
