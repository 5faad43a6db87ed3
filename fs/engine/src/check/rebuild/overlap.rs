//! Decides which leaf wins where several cover the same keys. Candidates come in the order of their
//! keys, so that one at a time is held: of those that reach to where the next one begins, only one
//! can win.

use gpunvme_layout::Key;
use zerocopy::{FromBytes, Immutable, IntoBytes};

use super::super::spool::Sorted;
use super::super::walk::Range;
use crate::error::FsError;

/// A key as numbers that are ordered as keys are.
pub(super) type Words = [u64; 2];

/// The words of a key.
pub(super) fn words(key: Key) -> Words {
    key.words().into()
}

/// A sound leaf, and its precedence.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
pub(super) struct Candidate {
    /// Its first key.
    pub first: Words,
    /// Its last key.
    pub last: Words,
    /// 0: the tree points to it. 1: it was found in a chunk of metadata.
    pub found: u64,
    /// Of two that overlap the lower counts: for one that the tree points to, its place in the
    /// order of the tree; for one that was found, `u64::MAX` less its sequence.
    pub rank: u64,
    /// Address of its block.
    pub address: u64,
}

impl Candidate {
    fn counts_before(&self, other: &Candidate) -> bool {
        (self.found, self.rank, self.address) < (other.found, other.rank, other.address)
    }
}

/// Keys that nothing readable covers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
pub(super) struct Hole {
    first: Words,
    last: Words,
}

impl Hole {
    /// The keys of that range, if there are any.
    pub fn new(range: Range) -> Option<Hole> {
        let last = match range.upper {
            None => [u64::MAX; 2],
            Some(upper) => words(upper.predecessor()?),
        };
        Some(Hole { first: words(range.lower), last })
    }
}

/// Decision about a candidate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verdict {
    /// It is a leaf of the new tree. These come in the order of their keys, and none covers keys
    /// of another.
    Kept,
    /// One that counts before it covers some of the same keys.
    Covered,
    /// It is found, and covers keys that something readable may cover.
    Foreign,
}

/// Judges all candidates.
///
/// What the tree points to counts before what was found. Of what was found, the one that was
/// written later counts: a leaf was no part of the tree any more when one was written that covers
/// some of its keys, and so it does not count either where a third one takes the place of the
/// second.
pub(super) fn judge(
    mut candidates: Sorted<Candidate>,
    mut holes: Sorted<Hole>,
    mut verdict: impl FnMut(&Candidate, Verdict) -> Result<(), FsError>,
) -> Result<(), FsError> {
    let mut held: Option<Candidate> = None;
    // Last key of the holes that begin before the candidate: the farthest of them has it, or none
    // does.
    let mut hole_end: Option<Words> = None;
    while let Some(candidate) = candidates.next()? {
        while let Some(hole) = holes.next_if(|hole| hole.first <= candidate.first)? {
            hole_end = hole_end.max(Some(hole.last));
        }
        if candidate.found > 0 && hole_end < Some(candidate.last) {
            verdict(&candidate, Verdict::Foreign)?;
            continue;
        }
        held = Some(match held {
            Some(held) if held.last < candidate.first => {
                verdict(&held, Verdict::Kept)?;
                candidate
            }
            Some(held) => {
                let (held, covered) = if candidate.counts_before(&held) { (candidate, held) } else { (held, candidate) };
                verdict(&covered, Verdict::Covered)?;
                held
            }
            None => candidate,
        });
    }
    held.map_or(Ok(()), |held| verdict(&held, Verdict::Kept))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::super::spool::Spool;
    use super::super::super::stop::Stop;
    use super::*;

    fn sorted<T: super::super::super::spool::Record>(records: &[T]) -> Sorted<T> {
        let mut spool = Spool::new(1, &Stop::default());
        records.iter().for_each(|record| spool.push(*record).unwrap());
        spool.sorted().unwrap()
    }

    fn overlap(a: &Candidate, b: &Candidate) -> bool {
        a.first <= b.last && b.first <= a.last
    }

    fn candidate() -> impl Strategy<Value = Candidate> {
        (0..40u64, 0..8u64, 0..2u64, 0..50u64, 0..1000u64).prop_map(|(first, len, found, rank, address)| Candidate {
            first: [1, first],
            last: [1, first + len],
            found,
            rank,
            address,
        })
    }

    proptest! {
        #[test]
        fn what_none_that_counts_before_it_overlaps_is_kept_and_no_two_that_overlap(
            mut candidates in prop::collection::vec(candidate(), 0..30),
            holes in prop::collection::vec((0..40u64, 0..20u64), 0..4),
        ) {
            candidates.sort_unstable();
            candidates.dedup_by_key(|c| (c.found, c.rank, c.address));
            let holes: Vec<Hole> = holes.iter().map(|(first, len)| Hole { first: [1, *first], last: [1, first + len] }).collect();
            let mut judged = Vec::new();
            judge(sorted(&candidates), sorted(&holes), |candidate, verdict| {
                judged.push((*candidate, verdict));
                Ok(())
            })
            .unwrap();
            let mut all: Vec<Candidate> = judged.iter().map(|(candidate, _)| *candidate).collect();
            all.sort_unstable();
            prop_assert_eq!(&all, &candidates, "each is judged once");

            let of = |wanted: Verdict| judged.iter().filter(move |(_, verdict)| *verdict == wanted).map(|(candidate, _)| *candidate);
            let kept: Vec<Candidate> = of(Verdict::Kept).collect();
            prop_assert!(kept.is_sorted_by(|a, b| a.last < b.first), "{:?}", kept);
            let in_hole = |c: &Candidate| holes.iter().any(|hole| hole.first <= c.first && c.last <= hole.last);
            prop_assert!(of(Verdict::Foreign).all(|c| c.found == 1 && !in_hole(&c)));
            let at_home: Vec<Candidate> = candidates.iter().copied().filter(|c| c.found == 0 || in_hole(c)).collect();
            for candidate in &at_home {
                let before = at_home.iter().filter(|other| other.counts_before(candidate) && overlap(other, candidate));
                match kept.contains(candidate) {
                    true => {}
                    false => prop_assert!(before.count() > 0, "{:?} is gone for nothing", candidate),
                }
            }
        }
    }
}
