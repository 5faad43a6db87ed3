//! Removing inodes that have no name, once the kernel has forgotten them.
//!
//! Those that are forgotten while a thread removes others are left to that thread, which removes
//! several in one operation: the metadata lock is taken once for them, and what they share in the
//! tree is changed by one processor.

use std::collections::VecDeque;
use std::sync::Arc;

use gpunvme_engine::error::{Fail, FsError};
use parking_lot::Mutex;

use crate::front::messages;
use crate::front::resources::turns::Owner;
use crate::front::shared::Front;

/// Inodes that are removed together at the most: others wait for the metadata meanwhile.
const TOGETHER: usize = 16;
/// Times that a thread removes some before it leaves the rest to one that has nothing else to do.
const ROUNDS: usize = 4;

/// The inodes that are to be removed.
#[derive(Default)]
pub(crate) struct Removals(Mutex<Waiting>);

#[derive(Default)]
struct Waiting {
    inos: VecDeque<u64>,
    /// A thread removes some, and looks for more before it ends.
    taken_care_of: bool,
}

impl Removals {
    /// Adds inodes. Returns whether the caller is to remove what there is: no thread does so yet.
    #[must_use]
    fn add(&self, inos: impl IntoIterator<Item = u64>) -> bool {
        let mut waiting = self.0.lock();
        waiting.inos.extend(inos);
        !std::mem::replace(&mut waiting.taken_care_of, true)
    }

    /// The next ones that are to be removed together; none when the caller is done.
    fn next(&self) -> Vec<u64> {
        let mut waiting = self.0.lock();
        let count = waiting.inos.len().min(TOGETHER);
        waiting.taken_care_of = count > 0;
        waiting.inos.drain(..count).collect()
    }
}

impl Front {
    /// Removes orphans that the kernel has forgotten, or leaves them to a thread that removes
    /// others.
    pub(crate) fn remove(self: &Arc<Self>, inos: impl IntoIterator<Item = u64>) {
        if !self.removals.add(inos) {
            return;
        }
        for _ in 0..ROUNDS {
            if !self.remove_some() {
                return;
            }
        }
        let front = self.clone();
        self.general.run(move || while front.remove_some() {});
    }

    /// Removes the next orphans. Returns whether there may be more.
    fn remove_some(self: &Arc<Self>) -> bool {
        let inos = self.removals.next();
        if inos.is_empty() {
            return false;
        }
        // What stands in the way of one is that one's own.
        if matches!(self.fs.reap_together(&inos), Ok(true)) {
            inos.iter().for_each(|ino| self.removed(*ino, Ok(())));
        } else {
            inos.iter().for_each(|ino| self.remove_alone(*ino));
        }
        true
    }

    /// Removes an orphan, of which another thread does what takes long.
    fn remove_alone(self: &Arc<Self>, ino: u64) {
        match self.fs.reap_step(ino) {
            Ok(false) => self.removed(ino, Ok(())),
            Err(Fail::Error(error)) => self.removed(ino, Err(error)),
            Ok(true) | Err(Fail::Stall(_)) => {
                // Who made the kernel forget it is not known: the owner's turn it is.
                let user = self.fs.attributes(ino).map_or(0, |now| now.inode.uid);
                let front = self.clone();
                self.general.run_for(Owner { user, process: 0 }, move || front.remove_waiting(ino));
            }
        }
    }

    /// Removes an orphan, on a thread that may wait.
    pub(crate) fn remove_waiting(&self, ino: u64) {
        let remove = || -> Result<(), FsError> {
            while self.fs.wait(|| self.fs.reap_step(ino))? {}
            Ok(())
        };
        self.removed(ino, remove());
    }

    fn removed(&self, ino: u64, result: Result<(), FsError>) {
        if let Err(error) = result {
            messages::not_removed(ino, &error);
        }
        self.lookups.removed(ino);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_added_while_a_thread_removes_is_left_to_it_and_nothing_stays_behind() {
        let removals = Removals::default();
        assert!(removals.add(0..20));
        assert!(!removals.add([20]));
        let mut removed = removals.next();
        assert_eq!(removed.len(), TOGETHER);
        assert!(!removals.add([21]));
        removed.extend(removals.next());
        assert_eq!(removed, (0..22).collect::<Vec<u64>>(), "in the order in which they came");
        assert!(removals.next().is_empty());
        assert!(removals.add([22]), "the thread has ended");
    }
}
