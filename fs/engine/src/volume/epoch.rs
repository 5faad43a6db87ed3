//! Grace periods for freed blocks.
//!
//! Every transfer that touches data blocks holds a [`Guard`] for as long as the device may still
//! read or write them. Blocks that were freed are reused only when every guard taken before the
//! free became durable is gone: a truncate or an unlink detaches blocks at once, and no transfer
//! ever reads or writes another file's data through a mapping that was looked up earlier.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use gpunvme_metrics::shard_number;
use parking_lot::Mutex;
use smallvec::SmallVec;

use super::run::Run;

/// Threads that take guards at once rarely meet in one of so many shards.
const SHARDS: usize = 16;

/// The epochs of a volume.
///
/// Lock order: `retired`, then a shard's; of those never two at a time.
#[derive(Default)]
pub(crate) struct Epochs {
    current: AtomicU64,
    /// Runs that may be reused when no guard of that epoch or an earlier one is held.
    retired: Mutex<VecDeque<(u64, Vec<Run>)>>,
    shards: [Shard; SHARDS],
}

/// Guards that some threads took. A processor that takes one does not take the next one's memory
/// from another processor.
#[derive(Default)]
#[repr(align(128))]
struct Shard(Mutex<Held>);

/// Guards held, by the epoch in which they were taken, in order: the current epoch is looked up
/// under the shard's lock, and only grows.
type Held = SmallVec<[(u64, usize); 4]>;

/// Keeps the blocks that a transfer looked up from being reused.
pub struct Guard {
    epochs: Arc<Epochs>,
    shard: usize,
    epoch: u64,
}

impl Epochs {
    /// Takes a guard. It has to be taken before the mapping is looked up, or under the same hold
    /// of the metadata lock.
    pub fn enter(self: &Arc<Self>) -> Guard {
        let shard = shard_number(SHARDS);
        let mut held = self.shards[shard].0.lock();
        let epoch = self.current.load(Ordering::Acquire);
        match held.last_mut() {
            Some((last, count)) if *last == epoch => *count += 1,
            _ => held.push((epoch, 1)),
        }
        drop(held);
        Guard { epochs: self.clone(), shard, epoch }
    }

    /// Hands over runs whose free is durable.
    pub fn retire(&self, runs: Vec<Run>) {
        if runs.is_empty() {
            return;
        }
        let mut retired = self.retired.lock();
        let epoch = self.current.fetch_add(1, Ordering::AcqRel);
        retired.push_back((epoch, runs));
    }

    /// The runs that may be reused now.
    pub fn reusable(&self) -> Vec<Run> {
        let mut retired = self.retired.lock();
        if retired.is_empty() {
            return Vec::new();
        }
        // A guard that a shard gets after this look is of an epoch that is not retired yet.
        let oldest_of = |shard: &Shard| shard.0.lock().first().map(|(epoch, _)| *epoch);
        let oldest = self.shards.iter().filter_map(oldest_of).min().unwrap_or(u64::MAX);
        let mut runs = Vec::new();
        while retired.front().is_some_and(|(epoch, _)| *epoch < oldest) {
            runs.extend(retired.pop_front().expect("looked at above").1);
        }
        runs
    }

    /// The epoch of the runs that guards hold back and that were freed last.
    pub fn newest_held_back(&self) -> Option<u64> {
        self.retired.lock().back().map(|(epoch, _)| *epoch)
    }

    /// Whether guards hold back runs of that epoch, or of an earlier one.
    pub fn hold_back(&self, until: u64) -> bool {
        self.retired.lock().front().is_some_and(|(epoch, _)| *epoch <= until)
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        let mut held = self.epochs.shards[self.shard].0.lock();
        let at = held.iter().position(|(epoch, _)| *epoch == self.epoch).expect("counted when it was taken");
        held[at].1 -= 1;
        if held[at].1 == 0 {
            held.remove(at);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;

    use super::*;

    #[test]
    fn blocks_wait_for_the_guards_taken_before_they_were_freed_and_no_others() {
        let epochs = Arc::new(Epochs::default());
        let run = Run { start: 5, len: 1 };
        let before = epochs.enter();
        epochs.retire(vec![run]);
        let after = epochs.enter();
        assert_eq!(epochs.reusable(), vec![]);
        drop(before);
        assert_eq!(epochs.reusable(), vec![run]);
        epochs.retire(vec![run]);
        assert_eq!(epochs.reusable(), vec![]);
        drop(after);
        assert_eq!(epochs.reusable(), vec![run]);
    }

    /// Threads take and drop guards, on each other's threads too, while runs retire: none is given
    /// back that a guard from before still covers.
    #[test]
    fn no_run_comes_back_before_the_guards_of_any_thread_from_before_are_gone() {
        let epochs = Arc::new(Epochs::default());
        // The number of runs that were retired, as a transfer may know it before it takes a guard.
        let (retired, reused) = (AtomicU64::new(0), AtomicU64::new(0));
        let over = AtomicBool::new(false);
        let (sender, receiver) = std::sync::mpsc::sync_channel::<(Guard, u64)>(64);
        std::thread::scope(|scope| {
            for _ in 0..3 {
                let (sender, epochs, retired) = (sender.clone(), &epochs, &retired);
                scope.spawn(move || {
                    for _ in 0..20_000 {
                        let guard = epochs.enter();
                        let before = retired.load(Ordering::Acquire);
                        let _ = sender.send((guard, before)); // the receiver takes all of them
                    }
                });
            }
            drop(sender);
            let (epochs, retired, reused, over) = (&epochs, &retired, &reused, &over);
            scope.spawn(move || {
                for (guard, before) in receiver {
                    let now = reused.load(Ordering::Acquire);
                    assert!(now <= before, "{now} runs were reused, {before} were retired when the guard was taken");
                    drop(guard);
                }
                over.store(true, Ordering::Release);
            });
            scope.spawn(move || {
                let mut next = 0;
                while !over.load(Ordering::Acquire) {
                    // Counted first: what retires after a guard saw the number is covered by it.
                    next += 1;
                    retired.store(next, Ordering::Release);
                    epochs.retire(vec![Run { start: next, len: 1 }]);
                    let back = epochs.reusable().len() as u64;
                    reused.fetch_add(back, Ordering::AcqRel);
                }
            });
        });
        assert_eq!(epochs.reusable().len() as u64 + reused.into_inner(), retired.into_inner());
    }
}
