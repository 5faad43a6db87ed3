//! The cache of metadata blocks.
//!
//! It is bounded: clean blocks are dropped by the clock algorithm when there are more than the
//! limit. A block that the running transaction changed, or whose committed image has not been
//! written home yet, cannot be dropped: the journal bounds those. Other users of the memory may
//! take a part of it; the rest is the limit ([`Cache::give_way`]).

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use gpunvme_layout::Block;
use gpunvme_layout::block::BLOCK_SIZE;
use gpunvme_layout::geometry::STATE;
use gpunvme_metrics::Count;
use rustc_hash::{FxHashMap, FxHashSet};

/// Memory for a block, in bytes: its content, and its entry in the tables.
const BLOCK_MEMORY: usize = BLOCK_SIZE + 128;
/// Blocks that there is always room for: an operation needs some at once.
const LIMIT_MIN: usize = 256;
/// One in so many of the given blocks stays, however much memory other users take.
const KEPT: usize = 4;
/// Places in the clock of blocks that are gone, beside as many as there are blocks.
const GONE_MAX: usize = 1024;
/// Dropped blocks that are kept for the next ones.
const SPARE_MAX: usize = 64;

/// A block in memory.
pub(crate) struct Entry {
    /// Content, as the latest operation left it.
    pub block: Arc<Block>,
    /// The running transaction has changed it.
    pub running: bool,
    /// The latest committed image that is not at home yet, with the sequence of its transaction.
    image: Option<(u64, Arc<Block>)>,
    /// Number of the last operation that changed it.
    pub operation: u64,
    /// The undo list of that operation has a copy of the whole block.
    pub copied: bool,
    recent: AtomicBool,
}

/// The metadata blocks in memory, by address.
pub(crate) struct Cache {
    entries: FxHashMap<u64, Entry>,
    /// Blocks with an image: a checkpoint looks at no others.
    imaged: FxHashSet<u64>,
    clock: VecDeque<u64>,
    /// Blocks that fit into the memory given to the cache.
    given: usize,
    /// Blocks that the cache may have: those given, less what other users of the memory take.
    limit: usize,
    /// Dropped blocks. An allocator keeps what one thread gives back for that thread, and another
    /// one that loads takes more from the system.
    spare: Vec<Arc<Block>>,
    lookups: Count,
    misses: Count,
}

/// What the cache of metadata did since the volume was opened, and what is in it now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheUse {
    /// Blocks that were looked for.
    pub lookups: u64,
    /// Those of them that were not there.
    pub misses: u64,
    /// Bytes in it.
    pub bytes: u64,
}

impl Cache {
    /// An empty cache for clean blocks in so many bytes.
    pub fn new(bytes: usize) -> Cache {
        let given = (bytes / BLOCK_MEMORY).max(LIMIT_MIN);
        let (entries, imaged) = (FxHashMap::default(), FxHashSet::default());
        let (lookups, misses) = (Count::default(), Count::default());
        Cache { entries, imaged, clock: VecDeque::new(), given, limit: given, spare: Vec::new(), lookups, misses }
    }

    /// How many blocks there may be when others take so many bytes of the memory.
    fn beside(&self, bytes: usize) -> usize {
        self.given.saturating_sub(bytes / BLOCK_MEMORY).max(self.given / KEPT).max(LIMIT_MIN)
    }

    /// Whether the limit is another when others take so many bytes of the memory.
    pub fn has_to_give_way(&self, bytes: usize) -> bool {
        self.beside(bytes) != self.limit
    }

    /// Others take so many bytes of the memory: there are fewer blocks in it, down to a quarter of
    /// them.
    pub fn give_way(&mut self, bytes: usize) {
        self.limit = self.beside(bytes);
        // Two rounds: the first takes the marks away. What is left then is pinned, and goes when
        // new blocks come.
        self.drop_blocks(2 * self.clock.len());
    }

    /// The entry of a block, if it is in memory, for an operation: it is counted.
    pub fn look_up(&self, address: u64) -> Option<&Entry> {
        self.lookups.increment();
        let found = self.get(address);
        if found.is_none() {
            self.misses.increment();
        }
        found
    }

    /// What it did, and what is in it.
    pub fn usage(&self) -> CacheUse {
        let bytes = (self.entries.len() * BLOCK_MEMORY) as u64;
        CacheUse { lookups: self.lookups.read(), misses: self.misses.read(), bytes }
    }

    /// The entry of a block, if it is in memory.
    pub fn get(&self, address: u64) -> Option<&Entry> {
        let entry = self.entries.get(&address)?;
        if !entry.recent.load(Ordering::Relaxed) {
            entry.recent.store(true, Ordering::Relaxed);
        }
        Some(entry)
    }

    /// The entry of a block, to change.
    pub fn get_mut(&mut self, address: u64) -> Option<&mut Entry> {
        self.entries.get_mut(&address)
    }

    /// Takes a block into memory. One that is there already keeps its image and its place.
    pub fn put(&mut self, address: u64, block: Arc<Block>) -> &mut Entry {
        if !self.entries.contains_key(&address) {
            self.make_room();
            if self.clock.len() > 2 * self.entries.len() + GONE_MAX {
                self.forget_gone();
            }
            self.clock.push_back(address);
        }
        let entry = self.entries.entry(address).or_insert_with(|| Entry {
            block: block.clone(),
            running: false,
            image: None,
            operation: 0,
            copied: false,
            recent: AtomicBool::new(true),
        });
        entry.block = block;
        entry
    }

    /// As [`Cache::put`], for a block that was read, and is copied into the memory of one that was
    /// dropped.
    pub fn put_copy(&mut self, address: u64, block: &Block) -> Arc<Block> {
        self.make_room();
        let copy = match self.spare.pop() {
            Some(mut spare) => {
                Arc::get_mut(&mut spare).expect("it had one owner when it was dropped").clone_from(block);
                spare
            }
            None => Arc::new(block.clone()),
        };
        self.put(address, copy.clone());
        copy
    }

    /// Takes blocks out of the clock that were removed, and all but one place of those that came
    /// back. Where there is room for all blocks, nothing else does.
    fn forget_gone(&mut self) {
        let mut seen = FxHashSet::default();
        self.clock.retain(|address| self.entries.contains_key(address) && seen.insert(*address));
    }

    /// Forgets a block.
    pub fn remove(&mut self, address: u64) {
        self.entries.remove(&address);
        // One that an operation made, and did not need after all: the last that came.
        if self.clock.back() == Some(&address) {
            self.clock.pop_back();
        }
    }

    /// Keeps what a block holds now as its image of a transaction, until that is at home.
    pub fn keep_image(&mut self, address: u64, sequence: u64) {
        let entry = self.entries.get_mut(&address).expect("an image is one of a block in memory");
        entry.image = Some((sequence, entry.block.clone()));
        self.imaged.insert(address);
    }

    /// Addresses of the blocks with an image.
    pub fn imaged(&self) -> Vec<u64> {
        self.imaged.iter().copied().collect()
    }

    /// The image of a block, with the sequence of its transaction.
    pub fn image(&self, address: u64) -> Option<&(u64, Arc<Block>)> {
        self.entries.get(&address)?.image.as_ref()
    }

    /// Forgets the image of a transaction, which is at home. A later one stays.
    pub fn drop_image(&mut self, address: u64, sequence: u64) {
        if let Some(entry) = self.entries.get_mut(&address)
            && entry.image.as_ref().is_some_and(|(of, _)| *of == sequence)
        {
            entry.image = None;
            self.imaged.remove(&address);
        }
    }

    /// Number of blocks in memory.
    #[cfg(test)]
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    fn make_room(&mut self) {
        // Two rounds at the most: the first takes the marks away. The bound keeps one insertion
        // short when all is pinned.
        self.drop_blocks((2 * self.clock.len()).min(64));
    }

    /// Drops blocks down to the limit, or until it has looked at so many.
    fn drop_blocks(&mut self, mut tries: usize) {
        while self.entries.len() >= self.limit && tries > 0 {
            tries -= 1;
            let Some(address) = self.clock.pop_front() else { return };
            let Some(entry) = self.entries.get(&address) else { continue };
            // A block with another holder was loaded for an operation that is not done yet.
            let held = Arc::strong_count(&entry.block) > 1;
            let pinned = held || entry.running || entry.image.is_some() || address == STATE;
            if pinned || entry.recent.swap(false, Ordering::Relaxed) {
                self.clock.push_back(address);
            } else {
                let dropped = self.entries.remove(&address).filter(|_| self.spare.len() < SPARE_MAX);
                self.spare.extend(dropped.map(|entry| entry.block));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use gpunvme_layout::BlockKind;

    use super::*;

    fn block(address: u64) -> Arc<Block> {
        Arc::new(Block::new(BlockKind::Node, address, &[0; 16]))
    }

    #[test]
    fn blocks_that_come_and_go_leave_nothing_behind() {
        let mut cache = Cache::new(0);
        for address in 0..100_000 {
            cache.put(1000 + address % 7, block(1000 + address % 7));
            cache.put(2000, block(2000));
            cache.remove(1000 + address % 7);
            cache.remove(2000);
        }
        assert!(cache.clock.len() <= GONE_MAX + 16, "{} places for {} blocks", cache.clock.len(), cache.len());
        cache.put(3000, block(3000));
        assert!(cache.get(3000).is_some());
    }

    #[test]
    fn clean_blocks_are_dropped_at_the_limit_and_pinned_ones_never() {
        let mut cache = Cache::new(0);
        for address in 1000..1050 {
            cache.put(address, block(address)).running = true;
        }
        for address in 2000..4000 {
            cache.put(address, block(address));
        }
        assert!(cache.len() <= LIMIT_MIN + 1, "{}", cache.len());
        assert!((1000..1050).all(|a| cache.get(a).is_some()));
        for address in 1000..1050 {
            cache.get_mut(address).unwrap().running = false;
        }
        for address in 5000..6000 {
            cache.put(address, block(address));
        }
        assert!(!(1000..1050).any(|a| cache.entries.contains_key(&a)));
    }

    #[test]
    fn only_blocks_with_an_image_are_looked_at_for_a_checkpoint() {
        let mut cache = Cache::new(100_000 * BLOCK_MEMORY);
        for address in 0..50_000 {
            cache.put(address, block(address));
        }
        (0..30).for_each(|address| cache.keep_image(address * 1000, 7));
        cache.keep_image(5000, 8);
        let mut imaged = cache.imaged();
        imaged.sort_unstable();
        assert_eq!(imaged, (0..30).map(|address| address * 1000).collect::<Vec<_>>());
        imaged.iter().for_each(|address| cache.drop_image(*address, 7));
        // The later one is not at home yet.
        assert_eq!(cache.imaged(), [5000]);
        assert!(cache.image(5000).is_some_and(|(sequence, _)| *sequence == 8) && cache.image(6000).is_none());
    }

    #[test]
    fn blocks_give_way_to_what_others_need_but_not_all_of_them() {
        let given = 4000;
        let mut cache = Cache::new(given * BLOCK_MEMORY);
        for (others, left) in [(0, given), (given / 2, given / 2), (0, given), (10 * given, given / KEPT)] {
            cache.give_way(others * BLOCK_MEMORY);
            assert!(cache.len() <= left, "{} of {left}", cache.len());
            for address in 0..2 * given as u64 {
                cache.put(address, block(address));
            }
            assert!(cache.len().abs_diff(left) <= 1, "{} of {left}", cache.len());
        }
    }
}
