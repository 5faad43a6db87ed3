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

use parking_lot::Mutex;
use rustc_hash::FxHashMap;

const SHARDS: usize = 16;

#[derive(Default)]
struct Node {
    /// Answers that gave it to the kernel, less what it has forgotten.
    lookups: u64,
    /// It has lost its last name.
    orphan: bool,
    /// It is being removed.
    leaving: bool,
    /// The kernel may have pages of the content from here to there. They come into its cache by the reads and writes that it sends for them and in no
    /// other way. What leaves it is not known: a page that somebody uses survives an invalidation, and can be written to without a word to us.
    cached: Range<u64>,
    /// The page that the kernel was last given to learn the length from. It is taken back at once, but for whoever got hold of it.
    told: Range<u64>,
}

/// The inodes that the kernel knows.
#[derive(Default)]
pub(super) struct Nodes {
    shards: [Mutex<FxHashMap<u64, Node>>; SHARDS],
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

    /// Notes that the kernel asks for pages of a file. To be called before it is looked up what they hold.
    pub fn caches(&self, ino: u64, range: Range<u64>) {
        let range = whole_pages(range);
        if let Some(Node { cached, .. }) = self.shard(ino).lock().get_mut(&ino) {
            *cached = if cached.is_empty() { range } else { cached.start.min(range.start)..cached.end.max(range.end) };
        }
    }

    /// Notes that the kernel is given bytes at the end of a file. To be called before they are.
    pub fn tells(&self, ino: u64, range: Range<u64>) {
        if let Some(Node { told, .. }) = self.shard(ino).lock().get_mut(&ino) {
            *told = whole_pages(range);
        }
    }

    /// Whether the kernel may have pages of these ranges of a file.
    pub fn may_have(&self, ino: u64, mut ranges: impl Iterator<Item = Range<u64>>) -> bool {
        let shard = self.shard(ino).lock();
        let noted = shard.get(&ino).map_or([0..0, 0..0], |node| [node.cached.clone(), node.told.clone()]);
        ranges.any(|range| noted.iter().any(|noted| range.start < noted.end && noted.start < range.end))
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

/// The pages that a range touches: what the kernel keeps of a file is pages.
fn whole_pages(range: Range<u64>) -> Range<u64> {
    const PAGE: u64 = 4096;
    range.start / PAGE * PAGE..range.end.div_ceil(PAGE).saturating_mul(PAGE)
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
