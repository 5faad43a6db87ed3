//! What a repair found in all its rounds, each finding counted once. A round finds again what the
//! one before could not mend, and lists what had no room in its list.

use std::collections::BTreeMap;

use rustc_hash::FxHashSet;

use super::finding::{Finding, Findings, Kind, Place};

/// Findings of several rounds.
pub(crate) struct Tally {
    found: Findings,
    /// What `found` lists, and what the last round listed.
    listed: FxHashSet<(Kind, Place)>,
    last: FxHashSet<(Kind, Place)>,
    /// What the last round counted and had no room for in its list.
    unlisted: BTreeMap<Kind, u64>,
}

impl Tally {
    /// Begins with what was found before anything was mended.
    pub fn new(found: Findings) -> Tally {
        Tally { listed: keys(&found.list), last: FxHashSet::default(), unlisted: found.unlisted(), found }
    }

    /// Adds what a round found.
    pub fn add(&mut self, round: &Findings) {
        let last = std::mem::replace(&mut self.last, keys(&round.list));
        // Several findings of one round may have one key, two overlaps in one file say.
        let mut kept = Vec::new();
        for finding in &round.list {
            let key = (finding.kind, finding.place);
            if self.listed.contains(&key) || last.contains(&key) {
                continue;
            }
            match self.unlisted.get_mut(&finding.kind) {
                Some(unlisted) if *unlisted > 0 => *unlisted -= 1,
                _ => self.found.count(finding.kind, 1),
            }
            if self.found.keep(finding.clone()) {
                kept.push(key);
            }
        }
        self.listed.extend(kept);
        let unlisted = round.unlisted();
        for (kind, count) in &unlisted {
            let before = self.unlisted.get(kind).copied().unwrap_or(0);
            self.found.count(*kind, count.saturating_sub(before));
        }
        self.unlisted = unlisted;
    }

    /// How many there are.
    pub fn total(&self) -> u64 {
        self.found.total()
    }

    /// All of them.
    pub fn into_findings(self) -> Findings {
        self.found
    }
}

fn keys(list: &[Finding]) -> FxHashSet<(Kind, Place)> {
    list.iter().map(|finding| (finding.kind, finding.place)).collect()
}

#[cfg(test)]
mod tests {
    use super::super::finding::Fix;
    use super::*;

    const LIMIT: usize = 10;

    fn findings(kind: Kind, inodes: std::ops::Range<u64>) -> Findings {
        let mut findings = Findings::new(LIMIT);
        inodes.for_each(|ino| findings.add(kind, Place::Inode(ino), Fix::Elsewhere, String::new));
        findings
    }

    #[test]
    fn what_had_no_room_in_the_list_is_counted_once_although_later_rounds_list_it() {
        let mut tally = Tally::new(findings(Kind::Lost, 0..35));
        for begin in [0, 10, 20, 30] {
            tally.add(&findings(Kind::Lost, begin..35));
        }
        assert_eq!(tally.total(), 35);
        assert_eq!(tally.into_findings().list.len(), LIMIT);
    }

    #[test]
    fn what_comes_up_while_others_are_mended_is_counted_whether_it_is_listed_or_not() {
        let mut tally = Tally::new(findings(Kind::Node, 0..1));
        tally.add(&findings(Kind::Node, 0..1));
        tally.add(&findings(Kind::Lost, 0..25));
        tally.add(&findings(Kind::Lost, 10..25));
        tally.add(&findings(Kind::Lost, 20..25));
        tally.add(&findings(Kind::LinkCount, 20..25));
        let found = tally.into_findings();
        assert_eq!(found.counts, BTreeMap::from([(Kind::Node, 1), (Kind::Lost, 25), (Kind::LinkCount, 5)]));
        assert_eq!(found.list.len(), LIMIT);
    }

    #[test]
    fn findings_of_one_kind_in_one_place_are_counted_and_listed_each() {
        let mut overlaps = Findings::new(LIMIT);
        (0..3).for_each(|_| overlaps.add(Kind::ExtentOverlap, Place::Inode(7), Fix::Elsewhere, String::new));
        let mut tally = Tally::new(findings(Kind::Node, 0..1));
        tally.add(&overlaps);
        tally.add(&overlaps);
        let found = tally.into_findings();
        assert_eq!(found.counts, BTreeMap::from([(Kind::Node, 1), (Kind::ExtentOverlap, 3)]));
        assert_eq!(found.list.len(), 4);
    }

    #[test]
    fn what_cannot_be_mended_is_found_again_and_counted_once() {
        let mut tally = Tally::new(findings(Kind::Lost, 0..25));
        (0..5).for_each(|_| tally.add(&findings(Kind::Lost, 0..25)));
        assert_eq!(tally.total(), 25);
    }
}
