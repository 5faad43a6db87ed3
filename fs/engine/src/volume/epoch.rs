//! Grace periods for freed blocks.
//!
//! Every transfer that touches data blocks holds a [`Guard`] for as long as the device may still
//! read or write them. Blocks that were freed are reused only when every guard taken before the
//! free became durable is gone: a truncate or an unlink detaches blocks at once, and no transfer
//! ever reads or writes another file's data through a mapping that was looked up earlier.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use parking_lot::Mutex;

use super::run::Run;

#[derive(Default)]
struct EpochTable {
    current: u64,
    /// Guards held, by the epoch in which they were taken.
    held: BTreeMap<u64, usize>,
    /// Runs that may be reused when no guard of that epoch or an earlier one is held.
    retired: VecDeque<(u64, Vec<Run>)>,
}

/// The epochs of a volume.
#[derive(Default)]
pub(crate) struct Epochs {
    state: Mutex<EpochTable>,
}

/// Keeps the blocks that a transfer looked up from being reused.
pub struct Guard {
    epochs: Arc<Epochs>,
    epoch: u64,
}

impl Epochs {
    /// Takes a guard. It has to be taken before the mapping is looked up, or under the same hold
    /// of the metadata lock.
    pub fn enter(self: &Arc<Self>) -> Guard {
        let mut state = self.state.lock();
        let epoch = state.current;
        *state.held.entry(epoch).or_default() += 1;
        Guard { epochs: self.clone(), epoch }
    }

    /// Hands over runs whose free is durable.
    pub fn retire(&self, runs: Vec<Run>) {
        if runs.is_empty() {
            return;
        }
        let mut state = self.state.lock();
        let epoch = state.current;
        state.retired.push_back((epoch, runs));
        state.current += 1;
    }

    /// The runs that may be reused now.
    pub fn reusable(&self) -> Vec<Run> {
        let mut state = self.state.lock();
        let oldest = state.held.keys().next().copied().unwrap_or(u64::MAX);
        let mut runs = Vec::new();
        while state.retired.front().is_some_and(|(epoch, _)| *epoch < oldest) {
            runs.extend(state.retired.pop_front().expect("looked at above").1);
        }
        runs
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        let mut state = self.epochs.state.lock();
        let held = state.held.get_mut(&self.epoch).expect("counted when it was taken");
        *held -= 1;
        if *held == 0 {
            state.held.remove(&self.epoch);
        }
    }
}

#[cfg(test)]
mod tests {
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
}
