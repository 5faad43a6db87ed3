//! Sets of blocks.

use std::collections::BTreeMap;

use gpunvme_layout::geometry::CHUNK_BLOCKS;

const WORDS: usize = CHUNK_BLOCKS as usize / 64;

/// Blocks by chunk, a bit each: metadata fills its chunks.
#[derive(Default)]
pub struct BlockSet(BTreeMap<u64, [u64; WORDS]>);

impl BlockSet {
    /// Adds a block.
    pub fn insert(&mut self, address: u64) {
        let bit = address % CHUNK_BLOCKS;
        self.0.entry(address / CHUNK_BLOCKS).or_default()[bit as usize / 64] |= 1 << (bit % 64);
    }

    /// Whether the block is in it.
    pub fn contains(&self, address: u64) -> bool {
        let bit = address % CHUNK_BLOCKS;
        self.0.get(&(address / CHUNK_BLOCKS)).is_some_and(|words| words[bit as usize / 64] >> (bit % 64) & 1 == 1)
    }

    /// The blocks that the other set has not, ascending.
    pub fn without(&self, other: &BlockSet) -> Vec<u64> {
        let mut blocks = Vec::new();
        for (chunk, words) in &self.0 {
            let others = other.0.get(chunk).copied().unwrap_or_default();
            for (index, (word, other)) in (0..).zip(words.iter().zip(others)) {
                let left = word & !other;
                let first = chunk * CHUNK_BLOCKS + index * 64;
                blocks.extend((0..64).filter(|bit| left >> bit & 1 == 1).map(|bit| first + bit));
            }
        }
        blocks
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_one_has_and_the_other_has_not() {
        let set = |blocks: &[u64]| {
            let mut set = BlockSet::default();
            blocks.iter().for_each(|block| set.insert(*block));
            set
        };
        let all = [0, 63, 64, 511, 512, 513, 70_000];
        assert!(all.iter().all(|block| set(&all).contains(*block)) && !set(&all).contains(1) && !set(&all).contains(1024));
        assert_eq!(set(&all).without(&BlockSet::default()), all);
        assert_eq!(set(&all).without(&set(&[63, 512, 9])), [0, 64, 511, 513, 70_000]);
    }
}
