//! What a mount knows of orphans while some may be left that earlier mounts made.

use rustc_hash::FxHashMap;

/// The orphans of earlier mounts, as far as they were looked at, and those of this mount.
#[derive(Default)]
pub(crate) struct KnownOrphans {
    /// The lowest number that may be one's; none where all were looked at.
    next: Option<u64>,
    /// Some of them are not finished by this mount.
    stay: bool,
    /// The lowest number of an inode that this mount makes: they end before it.
    end: u64,
    /// Inodes of earlier mounts that are orphans of this one, which processes may use, as long as
    /// there may be others; with whether an earlier mount left blocks beyond their end.
    ours: FxHashMap<u64, bool>,
}

/// What an operation did to an inode that is, or was, an orphan.
#[derive(Clone, Copy)]
pub(crate) enum Change {
    /// It is one.
    Is {
        /// Whether it was one before.
        was: bool,
    },
    /// It is one, and has nothing beyond its end.
    IsWhole,
    /// It is none any more.
    IsNone,
}

impl KnownOrphans {
    /// Those of a volume that was just opened: none is below `first`, and the next inode that is
    /// made has the number `end`.
    pub fn between(first: Option<u64>, end: u64) -> KnownOrphans {
        KnownOrphans { next: first.filter(|first| *first < end), end, ..KnownOrphans::default() }
    }

    /// Those of a volume that is not written.
    pub fn unknown() -> KnownOrphans {
        KnownOrphans { stay: true, end: u64::MAX, ..KnownOrphans::default() }
    }

    /// The lowest number that an orphan of an earlier mount may have; none where all were looked
    /// at.
    pub fn next(&self) -> Option<u64> {
        self.next
    }

    /// Whether an inode may be one that an earlier mount left, looked at or not.
    pub fn may_have(&self, ino: u64) -> bool {
        ino < self.end && self.may_be()
    }

    fn may_be(&self) -> bool {
        self.next.is_some() || self.stay
    }

    /// Of an orphan of this mount that an earlier one made as a file, while there may be others:
    /// whether an earlier mount left blocks beyond its end.
    pub fn ours(&self, ino: u64) -> Option<bool> {
        self.ours.get(&ino).copied()
    }

    /// Notes how far those of earlier mounts were looked at, and whether some of these stay.
    pub fn are_looked_at(&mut self, next: Option<u64>, stay: bool) {
        self.next = next.filter(|next| *next < self.end);
        self.stay |= stay;
        if !self.may_be() {
            self.ours = FxHashMap::default();
        }
    }

    /// Notes what an operation did.
    pub fn change(&mut self, ino: u64, change: Change) {
        if !self.may_have(ino) {
            return;
        }
        match change {
            // Of one that this mount made an orphan earlier, it is known.
            Change::Is { was } => _ = self.ours.entry(ino).or_insert(was),
            Change::IsWhole => self.ours.get_mut(&ino).into_iter().for_each(|is_cut_short| *is_cut_short = false),
            Change::IsNone => _ = self.ours.remove(&ino),
        }
    }
}
