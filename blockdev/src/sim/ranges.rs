//! A set of bytes, as ranges: the bytes of a namespace that are newer in the cache than on the
//! medium.
use std::collections::BTreeMap;
use std::ops::Range;

/// Disjoint ranges, none adjoining another: end by start.
#[derive(Default)]
pub(super) struct Ranges {
    ends: BTreeMap<u64, u64>,
    total: u64,
}

impl Ranges {
    /// Bytes in all ranges.
    pub(super) fn total(&self) -> u64 {
        self.total
    }

    pub(super) fn insert(&mut self, range: Range<u64>) {
        let Range { mut start, mut end } = range;
        // Whatever touches it becomes one with it.
        while let Some((&before, &until)) = self.ends.range(..=end).next_back()
            && until >= start
        {
            self.ends.remove(&before);
            self.total -= until - before;
            (start, end) = (start.min(before), end.max(until));
        }
        self.ends.insert(start, end);
        self.total += end - start;
    }

    pub(super) fn remove(&mut self, range: Range<u64>) {
        while let Some((&before, &until)) = self.ends.range(..range.end).next_back()
            && until > range.start
        {
            self.ends.remove(&before);
            if before < range.start {
                self.ends.insert(before, range.start);
            }
            if until > range.end {
                self.ends.insert(range.end, until);
            }
            self.total -= until.min(range.end) - before.max(range.start);
        }
    }

    /// The parts of the set that lie in `range`, ascending.
    pub(super) fn within(&self, range: Range<u64>) -> Vec<Range<u64>> {
        let first = self.ends.range(..=range.start).next_back().map_or(range.start, |(start, _)| *start);
        let touching = self.ends.range(first..range.end.max(first)).filter(|(_, end)| **end > range.start);
        touching.map(|(start, end)| (*start).max(range.start)..(*end).min(range.end)).collect()
    }

    /// Cuts `range` into parts that are in the set, and parts that are not.
    pub(super) fn cut(&self, range: Range<u64>) -> Vec<(Range<u64>, bool)> {
        let mut parts = Vec::with_capacity(1);
        let mut at = range.start;
        for inside in self.within(range.clone()) {
            if at < inside.start {
                parts.push((at..inside.start, false));
            }
            at = inside.end;
            parts.push((inside, true));
        }
        if at < range.end {
            parts.push((at..range.end, false));
        }
        parts
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_a_set() {
        const LEN: u64 = 64;
        let mut ranges = Ranges::default();
        let mut model = [false; LEN as usize];
        let mut random = 7u64;
        let mut next = |bound: u64| {
            random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (random >> 33) % bound
        };
        for _ in 0..2000 {
            let start = next(LEN);
            let range = start..start + 1 + next((LEN - start).min(9));
            let insert = next(2) == 0;
            if insert {
                ranges.insert(range.clone())
            } else {
                ranges.remove(range.clone())
            }
            model[range.start as usize..range.end as usize].fill(insert);
            assert_eq!(ranges.total(), model.iter().filter(|inside| **inside).count() as u64);
            let (from, to) = (next(LEN / 2), LEN / 2 + next(LEN / 2));
            let cut = ranges.cut(from..to);
            assert_eq!(cut.iter().map(|(part, _)| part.end - part.start).sum::<u64>(), to - from);
            for (part, inside) in cut {
                assert!(model[part.start as usize..part.end as usize].iter().all(|model| *model == inside), "{part:?}");
            }
        }
    }
}
