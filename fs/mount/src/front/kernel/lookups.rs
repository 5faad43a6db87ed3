//! Lookup counts: which inodes the kernel knows, and when one that has lost its last name can be
//! removed.
//!
//! An inode without a name works on for as long as a process has it: the kernel counts that, open
//! files and mappings included, and forgets the inode when no process has it. So every answer that
//! gives the kernel an inode is counted *before* it is sent, and every forget is taken off the
//! count.
//!
//! An inode is removed when it is an orphan and its count is zero, whichever comes last. Both are
//! one entry of one table, changed under one lock, so exactly one of the two events sees both and
//! removes it. One case is left: an answer that found the inode by its name just before the name
//! went, and that is counted after. While the removal goes on, the entry says so, and
//! [`Lookups::look_up`] refuses. Once it has ended, the answer gives the kernel a number that
//! stands for nothing, now and for ever, since numbers are never used again. (The kernel does not
//! even ask for a name while it removes it: both hold the directory's lock.)

use std::hint::black_box;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::MutexGuard;
use rustc_hash::FxHashMap;

use super::page_cache::PageCache;
use gpunvme_engine::sharded::Sharded;

/// Memory, in bytes, for each of the entries that a table has room for: one in eight of its slots
/// stays free, and each slot has one byte besides.
const fn slot<T>() -> usize {
    (size_of::<(u64, T)>() + 1) * 8 / 7
}
/// Memory, in bytes, for what the kernel has of the files of one shard. As a rule that is one run
/// of pages for each; beyond this it becomes one for every file that is used.
const CACHED: usize = 4 << 20;
/// A table with fewer entries than one in so many of those that it has room for becomes smaller.
const SPARSE: usize = 8;

/// What is known of an inode besides its count. For most inodes that is nothing, and there may be
/// millions.
#[derive(Default)]
struct Known {
    /// It has lost its last name.
    orphan: bool,
    /// It is being removed.
    leaving: bool,
    /// What the kernel may have of the content.
    page_cache: PageCache,
}

#[derive(Default)]
struct Shard {
    /// Answers that gave an inode to the kernel, less those that it has forgotten. Never zero.
    lookups: FxHashMap<u64, u64>,
    inodes: FxHashMap<u64, Known>,
    /// Memory of their page caches, in bytes.
    cached: usize,
}

impl Shard {
    /// As [`Lookups::look_up`].
    fn look_up(&mut self, ino: u64) -> bool {
        let leaving = self.inodes.get(&ino).is_some_and(|node| node.leaving);
        if !leaving {
            *self.lookups.entry(ino).or_default() += 1;
        }
        !leaving
    }

    /// Uses what the kernel has of an inode that it knows, or that is an orphan.
    fn of_known<T>(&mut self, ino: u64, using: impl FnOnce(&mut PageCache) -> T) -> Option<T> {
        if self.lookups.contains_key(&ino) {
            self.inodes.entry(ino).or_default();
        }
        self.of(ino, using)
    }

    /// Uses what the kernel has of an inode, if something is known of that.
    fn of<T>(&mut self, ino: u64, using: impl FnOnce(&mut PageCache) -> T) -> Option<T> {
        let page_cache = &mut self.inodes.get_mut(&ino)?.page_cache;
        let others = self.cached - page_cache.memory();
        let result = using(page_cache);
        if others + page_cache.memory() > CACHED {
            page_cache.condense();
        }
        self.cached = others + page_cache.memory();
        Some(result)
    }

    /// Forgets an inode, but for its count.
    fn forget(&mut self, ino: u64) {
        if let Some(gone) = self.inodes.remove(&ino) {
            self.cached -= gone.page_cache.memory();
        }
    }
}

/// Frees memory of a table that has lost most of its entries.
fn shrink<T>(table: &mut FxHashMap<u64, T>) {
    if table.len() * SPARSE < table.capacity() {
        table.shrink_to(2 * table.len());
    }
}

/// The inodes that the kernel knows.
#[derive(Default)]
pub(crate) struct Lookups {
    shards: Sharded<Shard>,
    invalidations: AtomicU64,
}

impl Lookups {
    /// Counts an answer that is about to give the inode to the kernel. Returns false when the inode
    /// is being removed: it must not be given.
    #[must_use]
    pub fn look_up(&self, ino: u64) -> bool {
        self.shards.lock(ino).look_up(ino)
    }

    /// As [`Lookups::look_up`], of several inodes. It takes less time than one by one.
    #[must_use]
    pub fn look_up_all(&self, inos: &[u64]) -> Vec<bool> {
        let mut counted = vec![false; inos.len()];
        self.shards.lock_all(inos, |places, shard| {
            // Found first, all of them: then the counts come from memory side by side.
            black_box(places.iter().filter(|place| shard.lookups.contains_key(&inos[**place])).count());
            places.iter().for_each(|place| counted[*place] = shard.look_up(inos[*place]));
        });
        counted
    }

    /// Takes forgotten answers off the count. Returns true when the inode is to be removed: the
    /// caller removes it, then calls [`Lookups::removed`].
    #[must_use]
    pub fn forget(&self, ino: u64, lookups: u64) -> bool {
        let mut shard = self.shards.lock(ino);
        let Some(count) = shard.lookups.get_mut(&ino) else { return false };
        *count = count.saturating_sub(lookups);
        if *count > 0 {
            return false;
        }
        shard.lookups.remove(&ino);
        shrink(&mut shard.lookups);
        let Some(node) = shard.inodes.get_mut(&ino) else { return false };
        node.leaving = node.orphan;
        if !node.orphan {
            shard.forget(ino);
            shrink(&mut shard.inodes);
            return false;
        }
        true
    }

    /// Whether the kernel knows an inode.
    pub fn knows(&self, ino: u64) -> bool {
        self.shards.lock(ino).lookups.contains_key(&ino)
    }

    /// Notes that an inode has lost its last name. True: as for [`Lookups::forget`].
    #[must_use]
    pub fn orphaned(&self, ino: u64) -> bool {
        let mut shard = self.shards.lock(ino);
        let counted = shard.lookups.contains_key(&ino);
        let node = shard.inodes.entry(ino).or_default();
        let removes = !counted && !node.leaving;
        node.orphan = true;
        node.leaving |= removes;
        removes
    }

    /// Memory for all this, in bytes.
    pub fn memory(&self) -> usize {
        let of = |shard: MutexGuard<'_, Shard>| {
            let Shard { lookups, inodes, cached } = &*shard;
            lookups.capacity() * slot::<u64>() + inodes.capacity() * slot::<Known>() + cached
        };
        self.shards.lock_each().map(of).sum()
    }

    /// As [`PageCache::read`].
    pub fn reads(&self, ino: u64, range: Range<u64>) {
        self.shards.lock(ino).of_known(ino, |cache| cache.read(range));
    }

    /// As [`PageCache::note`], of bytes that the kernel sends.
    pub fn writes(&self, ino: u64, range: Range<u64>) {
        self.shards.lock(ino).of_known(ino, |cache| cache.note(range));
    }

    /// As [`PageCache::is_overtaken`].
    #[must_use]
    pub fn is_overtaken(&self, ino: u64, range: Range<u64>) -> bool {
        self.shards.lock(ino).of(ino, |cache| cache.is_overtaken(range)).unwrap_or(false)
    }

    /// As [`PageCache::may_have`].
    pub fn may_have(&self, ino: u64, ranges: impl Iterator<Item = Range<u64>>) -> bool {
        self.shards.lock(ino).inodes.get(&ino).is_some_and(|node| node.page_cache.may_have(ranges))
    }

    /// As [`PageCache::begin`]. Returns the number of the invalidation, too.
    pub fn begin_invalidation(
        &self,
        ino: u64,
        ranges: Vec<Range<u64>>,
        stored: Option<Range<u64>>,
        beside_writes: bool,
    ) -> (u64, Vec<Range<u64>>) {
        let number = self.invalidations.fetch_add(1, Ordering::Relaxed);
        let begin = |cache: &mut PageCache| cache.begin(number, ranges, stored, beside_writes);
        (number, self.shards.lock(ino).of_known(ino, begin).unwrap_or_default())
    }

    /// As [`PageCache::end`].
    pub fn end_invalidation(&self, ino: u64, number: u64, done: bool) {
        self.shards.lock(ino).of(ino, |cache| cache.end(number, done));
    }

    /// Notes that an inode has a name again.
    pub fn named(&self, ino: u64) {
        if let Some(node) = self.shards.lock(ino).inodes.get_mut(&ino) {
            node.orphan = false;
        }
    }

    /// Notes that an inode is gone.
    pub fn removed(&self, ino: u64) {
        self.shards.lock(ino).forget(ino);
    }

    /// The orphans that were not removed. For the end of a mount, when no process uses it any more.
    pub fn orphans(&self) -> Vec<u64> {
        let of = |shard: MutexGuard<'_, Shard>| {
            shard.inodes.iter().filter(|(_, node)| node.orphan).map(|(ino, _)| *ino).collect::<Vec<_>>()
        };
        self.shards.lock_each().flat_map(of).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::super::page_cache::PAGE;
    use super::*;

    #[test]
    fn whichever_comes_last_removes_and_only_once() {
        let lookups = Lookups::default();
        assert!(lookups.look_up(5) && lookups.look_up(5));
        assert!(!lookups.forget(5, 1));
        assert!(!lookups.orphaned(5));
        assert_eq!(lookups.orphans(), [5]);
        assert!(lookups.forget(5, 1));
        assert!(!lookups.forget(5, 1) && !lookups.orphaned(5));
        assert!(!lookups.look_up(5), "it is being removed");
        lookups.removed(5);

        assert!(lookups.orphaned(6), "the kernel does not know it");
        assert!(lookups.look_up(7) && !lookups.forget(7, 1), "it has a name");
        assert!(lookups.orphaned(7), "the count was zero before");
    }

    #[test]
    fn a_new_name_saves_an_orphan() {
        let lookups = Lookups::default();
        assert!(lookups.look_up(5));
        assert!(!lookups.orphaned(5));
        lookups.named(5);
        assert!(!lookups.forget(5, 1));
    }

    #[test]
    fn several_are_counted_as_often_as_they_are_named_but_none_that_is_being_removed() {
        let lookups = Lookups::default();
        assert!(lookups.orphaned(21), "the kernel does not know it");
        assert_eq!(lookups.look_up_all(&[5, 21, 6, 5]), [true, false, true, true]);
        assert!(!lookups.orphaned(5) && !lookups.orphaned(6));
        assert!(!lookups.forget(5, 1) && lookups.forget(5, 1) && lookups.forget(6, 1));
    }

    #[test]
    fn an_inode_that_is_only_known_takes_a_few_bytes_and_none_when_it_is_forgotten() {
        const KNOWN: u64 = 1_000_000;
        let lookups = Lookups::default();
        assert!((0..KNOWN).all(|ino| lookups.look_up(ino) && !lookups.may_have(ino, std::iter::once(0..1))));
        assert!(lookups.memory() <= KNOWN as usize * 40, "{}", lookups.memory());
        assert!(lookups.shards.lock_each().all(|shard| shard.inodes.is_empty()));
        assert!(!(0..KNOWN).any(|ino| lookups.forget(ino, 1)));
        assert!(lookups.memory() < 4096, "{}", lookups.memory());
    }

    #[test]
    fn what_the_kernel_has_of_many_files_takes_bounded_memory_and_is_not_forgotten() {
        const FILES: u64 = 20_000;
        let lookups = Lookups::default();
        let page = |n: u64| n * 2 * PAGE..n * 2 * PAGE + 1;
        for ino in 0..FILES {
            assert!(lookups.look_up(ino));
            (0..200).for_each(|n| lookups.reads(ino, page(n)));
        }
        // 80 MB would tell all of them apart.
        let most = 16 * CACHED + FILES as usize * 300;
        assert!(lookups.memory() < most, "{} of {most}", lookups.memory());
        assert!((0..FILES).all(|ino| [0, 77, 199].into_iter().all(|n| lookups.may_have(ino, std::iter::once(page(n))))));
        assert!(!(0..FILES).any(|ino| lookups.forget(ino, 1)));
        assert!(lookups.shards.lock_each().all(|shard| shard.cached == 0));
    }
}
