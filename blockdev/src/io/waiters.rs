//! Queues that are lent to threads that wait for what they submit. Such a thread collects the
//! completions itself: the device's answer wakes it, and not first a reaper, which wakes it then.
//!
//! Locks: `idle`, for moments, never while a queue is used.
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;

use crate::{BlockDevice, Queue};

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

    /// Takes a queue back, on which nothing is in flight.
    pub fn take_back(&self, queue: Box<dyn Queue>) {
        self.idle.lock().push(queue);
    }
}
