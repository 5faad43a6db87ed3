//! The inodes that are to be removed, of which one thread at a time takes care.

use std::collections::VecDeque;

use parking_lot::Mutex;

/// Inodes that are removed together at the most: others wait for the metadata meanwhile.
const TOGETHER: usize = 16;

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
    pub fn add(&self, inos: impl IntoIterator<Item = u64>) -> bool {
        let mut waiting = self.0.lock();
        waiting.inos.extend(inos);
        !std::mem::replace(&mut waiting.taken_care_of, true)
    }

    /// The next ones that are to be removed together; none when the caller is done.
    pub fn next(&self) -> Vec<u64> {
        let mut waiting = self.0.lock();
        let count = waiting.inos.len().min(TOGETHER);
        waiting.taken_care_of = count > 0;
        waiting.inos.drain(..count).collect()
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
