//! Busy blocks: those that must not be allocated although their bits say that they are free. They
//! are on their way to a file (allocated, data not on the device yet), or on their way out of one
//! (freed, but the free is not durable, or a transfer may still touch them). They are kept in
//! memory only: after a crash the bitmap alone counts, and it never knew of them.

use std::collections::BTreeMap;

use super::run::Run;

/// A set of blocks, as runs that do not overlap.
#[derive(Default)]
pub(crate) struct Busy {
    /// Start to end.
    runs: BTreeMap<u64, u64>,
}

impl Busy {
    /// Adds blocks. None of them may be in the set.
    pub fn insert(&mut self, run: Run) {
        assert!(self.overlap(run.start, run.end()).is_none(), "blocks cannot be busy twice: {run:?}");
        self.runs.insert(run.start, run.end());
    }

    /// Takes blocks out. All of them must be in the set.
    pub fn remove(&mut self, run: Run) {
        let mut at = run.start;
        while at < run.end() {
            let (start, end) = self.runs.range(..=at).next_back().map(|(s, e)| (*s, *e)).expect("only busy blocks are taken out");
            assert!(end > at, "only busy blocks are taken out: {run:?}");
            self.runs.remove(&start);
            if start < at {
                self.runs.insert(start, at);
            }
            if end > run.end() {
                self.runs.insert(run.end(), end);
            }
            at = end;
        }
    }

    /// The first busy blocks within `from..to`: (start, end), not cut to the range.
    pub fn overlap(&self, from: u64, to: u64) -> Option<(u64, u64)> {
        if let Some((start, end)) = self.runs.range(..=from).next_back()
            && *end > from
        {
            return Some((*start, *end));
        }
        self.runs.range(from..to).next().map(|(s, e)| (*s, *e))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn it_is_a_set_of_blocks(ops in prop::collection::vec((0u64..60, 1u64..12), 0..200)) {
            let mut busy = Busy::default();
            let mut model = [false; 80];
            for (start, len) in ops {
                let range = start as usize..(start + len) as usize;
                let run = Run { start, len };
                if model[range.clone()].iter().all(|b| !b) {
                    busy.insert(run);
                    model[range].fill(true);
                } else if model[range.clone()].iter().all(|b| *b) {
                    busy.remove(run);
                    model[range].fill(false);
                }
                for from in 0..70u64 {
                    let expected = (from..75).find(|i| model[*i as usize]);
                    let found = busy.overlap(from, 75).map(|(s, _)| s.max(from));
                    prop_assert_eq!(found, expected);
                }
            }
        }
    }
}
