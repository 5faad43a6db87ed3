//! Which inodes the kernel knows, and when one that has lost its last name can be removed.
//!
//! An inode without a name works on for as long as somebody has it: the kernel counts that for us, open files and mappings
//! included, and forgets the inode when nobody does. So every answer that gives the kernel an inode is counted *before* it is
//! sent, and every forget is taken off the count.
//!
//! An inode is removed when it is an orphan and its count is zero, whichever comes last. Both are one entry of one table,
//! changed under one lock, so exactly one of the two sees both and removes it. What is left is an answer that found the inode
//! by its name just before the name went, and is counted after: while the removal goes on, the entry says so, and
//! [`Nodes::look_up`] refuses; once it has ended, the answer gives the kernel a number that stands for nothing, now and for
//! ever, since numbers are never used again. (The kernel does not even ask for a name while it removes it: both hold the
//! directory's lock.)

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;
use rustc_hash::FxHashMap;

use super::cached::Cached;

const SHARDS: usize = 16;

#[derive(Default)]
struct Node {
    /// Answers that gave it to the kernel, less what it has forgotten.
    lookups: u64,
    /// It has lost its last name.
    orphan: bool,
    /// It is being removed.
    leaving: bool,
    /// What the kernel may have of the content; of most it never had any, and there may be millions.
    cached: Option<Box<Cached>>,
}

/// The inodes that the kernel knows.
#[derive(Default)]
pub(super) struct Nodes {
    shards: [Mutex<FxHashMap<u64, Node>>; SHARDS],
    invalidations: AtomicU64,
}

impl Nodes {
    fn shard(&self, ino: u64) -> &Mutex<FxHashMap<u64, Node>> {
        &self.shards[ino as usize % SHARDS]
    }

    /// Counts an answer that is about to give the inode to the kernel. False: it must not be given, it is being removed.
    #[must_use]
    pub fn look_up(&self, ino: u64) -> bool {
        let mut shard = self.shard(ino).lock();
        let node = shard.entry(ino).or_default();
        node.lookups += u64::from(!node.leaving);
        !node.leaving
    }

    /// Takes forgotten answers off the count. True: the inode is to be removed, and [`Nodes::removed`] to be called.
    #[must_use]
    pub fn forget(&self, ino: u64, lookups: u64) -> bool {
        let mut shard = self.shard(ino).lock();
        let Some(node) = shard.get_mut(&ino) else { return false };
        node.lookups = node.lookups.saturating_sub(lookups);
        if node.lookups > 0 || node.leaving {
            return false;
        }
        node.leaving = node.orphan;
        if !node.orphan {
            shard.remove(&ino);
            return false;
        }
        true
    }

    /// Notes that an inode has lost its last name. True: as for [`Nodes::forget`].
    #[must_use]
    pub fn orphaned(&self, ino: u64) -> bool {
        let mut shard = self.shard(ino).lock();
        let node = shard.entry(ino).or_default();
        let removes = node.lookups == 0 && !node.leaving;
        node.orphan = true;
        node.leaving |= removes;
        removes
    }

    /// As [`Cached::note`].
    pub fn caches(&self, ino: u64, range: Range<u64>) {
        if let Some(node) = self.shard(ino).lock().get_mut(&ino) {
            node.cached.get_or_insert_default().note(range);
        }
    }

    /// As [`Cached::may_have`].
    pub fn may_have(&self, ino: u64, ranges: impl Iterator<Item = Range<u64>>) -> bool {
        self.shard(ino).lock().get(&ino).and_then(|node| node.cached.as_ref()).is_some_and(|cached| cached.may_have(ranges))
    }

    /// As [`Cached::begin`]. Returns the number of the invalidation, too.
    pub fn begin_invalidation(&self, ino: u64, ranges: Vec<Range<u64>>, stored: Option<Range<u64>>) -> (u64, Vec<Range<u64>>) {
        let number = self.invalidations.fetch_add(1, Ordering::Relaxed);
        let mut shard = self.shard(ino).lock();
        (
            number,
            shard.get_mut(&ino).map_or_else(Vec::new, |node| node.cached.get_or_insert_default().begin(number, ranges, stored)),
        )
    }

    /// As [`Cached::end`].
    pub fn end_invalidation(&self, ino: u64, number: u64, done: bool) {
        if let Some(cached) = self.shard(ino).lock().get_mut(&ino).and_then(|node| node.cached.as_mut()) {
            cached.end(number, done);
        }
    }

    /// Notes that an inode has a name again.
    pub fn named(&self, ino: u64) {
        if let Some(node) = self.shard(ino).lock().get_mut(&ino) {
            node.orphan = false;
        }
    }

    /// Notes that an inode is gone.
    pub fn removed(&self, ino: u64) {
        self.shard(ino).lock().remove(&ino);
    }

    /// The orphans that are still counted. For the end of a mount, when nobody has anything any more.
    pub fn orphans(&self) -> Vec<u64> {
        let of = |shard: &Mutex<FxHashMap<u64, Node>>| {
            let shard = shard.lock();
            shard.iter().filter(|(_, node)| node.orphan && !node.leaving).map(|(ino, _)| *ino).collect::<Vec<_>>()
        };
        self.shards.iter().flat_map(of).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whichever_comes_last_removes_and_only_once() {
        let nodes = Nodes::default();
        assert!(nodes.look_up(5) && nodes.look_up(5));
        assert!(!nodes.forget(5, 1));
        assert!(!nodes.orphaned(5));
        assert_eq!(nodes.orphans(), [5]);
        assert!(nodes.forget(5, 1));
        assert!(!nodes.forget(5, 1) && !nodes.orphaned(5));
        assert!(!nodes.look_up(5), "it is being removed");
        nodes.removed(5);

        assert!(nodes.orphaned(6), "the kernel does not know it");
        assert!(nodes.look_up(7) && !nodes.forget(7, 1), "it has a name");
        assert!(nodes.orphaned(7), "the count was zero before");
    }

    #[test]
    fn a_new_name_saves_an_orphan() {
        let nodes = Nodes::default();
        assert!(nodes.look_up(5));
        assert!(!nodes.orphaned(5));
        nodes.named(5);
        assert!(!nodes.forget(5, 1));
    }
}
