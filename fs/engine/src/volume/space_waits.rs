//! Operations that wait for free blocks, and discards, which have free blocks to themselves while
//! the device is told of them. They take turns: an operation waits for the discard in flight and
//! not for the next one too, nor does it find the volume full because of a slow device.
//!
//! Locks: its own is taken for moments, under no other.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

/// How long a discard stands aside at the most. An operation that waits for blocks in vain, because
/// the volume is full, would hold discards up for as long as it tries.
const PATIENCE: Duration = Duration::from_millis(200);

/// Who waits for free blocks of a volume, and what keeps them.
#[derive(Default)]
pub(crate) struct SpaceWaits {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// Operations that found no free block, and are not over.
    waiting: usize,
    /// Discards in flight.
    discarding: usize,
    /// Discards that are over.
    over: u64,
}

/// An operation that found no free block; dropped when it is over.
pub(crate) struct Waiting(Arc<SpaceWaits>);

/// A discard in flight; dropped when its blocks can be used again.
pub(crate) struct Discarding<'a>(&'a SpaceWaits);

impl SpaceWaits {
    /// An operation waits for free blocks from now on.
    pub fn wait(self: &Arc<Self>) -> Waiting {
        self.state.lock().waiting += 1;
        Waiting(self.clone())
    }

    /// Whether an operation waits for free blocks.
    pub fn has_waiting(&self) -> bool {
        self.state.lock().waiting > 0
    }

    /// A discard takes blocks from now on, after the operations that wait for some; but it waits
    /// no longer than [`PATIENCE`].
    pub fn discard(&self) -> Discarding<'_> {
        let mut state = self.state.lock();
        self.changed.wait_while_for(&mut state, |state| state.waiting > 0, PATIENCE);
        state.discarding += 1;
        Discarding(self)
    }
}

impl Waiting {
    /// Waits for the end of a discard. False where none is in flight.
    pub fn wait_for_discard(&self) -> bool {
        let mut state = self.0.state.lock();
        if state.discarding == 0 {
            return false;
        }
        let over = state.over;
        self.0.changed.wait_while(&mut state, |state| state.over == over);
        true
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        let mut state = self.0.state.lock();
        state.waiting -= 1;
        if state.waiting == 0 {
            self.0.changed.notify_all();
        }
    }
}

impl Drop for Discarding<'_> {
    fn drop(&mut self) {
        let mut state = self.0.state.lock();
        state.discarding -= 1;
        state.over += 1;
        self.0.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::thread;

    use super::*;

    #[test]
    fn an_operation_waits_for_discards_and_they_for_it_but_not_for_ever() {
        let waits = Arc::new(SpaceWaits::default());
        let waiting = waits.wait();
        assert!(!waiting.wait_for_discard(), "there is none");
        // It stands aside, and begins although the operation is not over.
        let discard = waits.discard();
        let is_over = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| {
                assert!(waiting.wait_for_discard());
                assert!(is_over.load(Ordering::Acquire), "it ended while the discard was in flight");
                drop(waiting);
            });
            // Until the operation is seen to wait.
            while !waits.changed.notify_one() {
                thread::yield_now();
            }
            is_over.store(true, Ordering::Release);
            drop(discard);
        });
        assert!(!waits.has_waiting());
        drop(waits.discard());
    }
}
