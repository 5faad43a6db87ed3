//! Queues that are lent to threads that wait for what they submit. Such a thread collects the
//! completions itself: the device's answer wakes it, and not first a reaper, which wakes it then.
//!
//! Locks: `idle`, for moments, never while a queue is used.
use gpunvme_metrics::{Ended, Meter};
use parking_lot::Mutex;

use super::abort::AbortOnPanic;
use super::worker::run_inline;
use crate::{BlockDevice, Op, Queue, Request, Result};

/// Queues at the most, of all members together: each costs descriptors, and some devices memory.
const MOST: usize = 16;
/// Queues of the device that are left for others: four threads with a queue of their own, and two
/// for who looks at a device, or a member, that is in use.
const LEFT: usize = 6;

/// The queues that no thread has at the moment.
pub(super) struct Waiters {
    idle: Mutex<Vec<Box<dyn Queue>>>,
}

impl Waiters {
    /// Those of a device on which `others` queues are open. They are opened here, and not by who
    /// waits for the first time: a controller may take long for that.
    pub fn open(device: &dyn BlockDevice, others: usize) -> Waiters {
        let spare = (device.geometry().max_queues as usize).saturating_sub(others + LEFT);
        let most = (MOST / device.member_names().len()).max(1);
        let mut idle = Vec::new();
        for _ in 0..spare.min(most) {
            match device.open_queue() {
                Ok(queue) => idle.push(queue),
                Err(error) => {
                    tracing::debug!(%error, "fewer queues for threads that wait");
                    break;
                }
            }
        }
        Waiters { idle: Mutex::new(idle) }
    }

    /// A queue for the calling thread alone; none where all are in use.
    pub fn lend(&self) -> Option<Box<dyn Queue>> {
        self.idle.lock().pop()
    }

    /// Runs a batch on a queue that was lent, and takes the queue back. Returns the first error.
    /// `may_block`: nothing that this thread submitted needs it to go on.
    pub fn run(&self, queue: Box<dyn Queue>, meter: &Meter, batch: Vec<Request>, may_block: bool) -> Result<()> {
        let _guard = AbortOnPanic::new();
        let Some(first) = batch.first() else {
            self.take_back(queue);
            return Ok(());
        };
        let (count, bytes) = (batch.len() as u64, batch.iter().map(|request| request.len).sum());
        let begun = meter.begin(first.op.kind(), count);
        let is_flush = matches!(&batch[..], [Request { op: Op::Flush, .. }]);
        let here = if is_flush && may_block { queue.flush_here() } else { None };
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
