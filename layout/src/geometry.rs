//! The geometry of a volume: the place of every structure, derived from two numbers of the
//! superblock, total blocks and journal blocks.
//!
//! ```text
//! 0          superblock
//! 1, 2       anchors
//! 3          state
//! 4 ..       group descriptors, 504 a block
//! ..         group bitmaps, one block a group
//! ..         superblock copy
//! ..         journal
//! ..         data, from the next multiple of 512 blocks (2 MiB) on, in whole chunks of 512 blocks
//! last       superblock copy
//! ```

use crate::block::BLOCK_SIZE;

/// Blocks of a chunk: 2 MiB, the unit in which large files are laid out and in which metadata and
/// data are kept apart.
pub const CHUNK_BLOCKS: u64 = 512;
/// Chunks of a group: as many as one bitmap block can describe.
pub const GROUP_CHUNKS: u64 = 62;
/// Blocks of a group.
pub const GROUP_BLOCKS: u64 = GROUP_CHUNKS * CHUNK_BLOCKS;
/// Descriptors in one block.
pub const DESCRIPTORS_PER_BLOCK: u64 = 504;
/// Smallest volume in blocks: 16 MiB.
pub const TOTAL_BLOCKS_MIN: u64 = 4096;
/// Largest volume in blocks: 2^44 (64 PiB), far from any overflow of a byte address.
pub const TOTAL_BLOCKS_MAX: u64 = 1 << 44;
/// Smallest journal in blocks.
pub const JOURNAL_BLOCKS_MIN: u64 = 1024;
/// Largest journal in blocks: recovery reads no more than 128 MiB.
pub const JOURNAL_BLOCKS_MAX: u64 = 32768;

/// Address of the superblock.
pub const SUPERBLOCK: u64 = 0;
/// Addresses of the two anchors.
pub const ANCHORS: [u64; 2] = [1, 2];
/// Address of the state block.
pub const STATE: u64 = 3;
const DESCRIPTORS: u64 = 4;

/// Where everything lies. All numbers are blocks unless they say otherwise.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Geometry {
    /// Size of the volume.
    pub total_blocks: u64,
    /// First block of the group bitmaps.
    pub bitmaps: u64,
    /// First block of the journal.
    pub journal: u64,
    /// Length of the journal.
    pub journal_blocks: u64,
    /// First block of the data area.
    pub data: u64,
    /// Chunks in the data area.
    pub chunks: u64,
    /// Number of groups.
    pub groups: u64,
}

impl Geometry {
    /// The journal that mkfs gives to a volume of that size.
    pub fn default_journal_blocks(total_blocks: u64) -> u64 {
        (total_blocks / 64).clamp(JOURNAL_BLOCKS_MIN, JOURNAL_BLOCKS_MAX)
    }

    /// Lays out a volume; `None` when the numbers are out of range.
    pub fn new(total_blocks: u64, journal_blocks: u64) -> Option<Geometry> {
        if !(TOTAL_BLOCKS_MIN..=TOTAL_BLOCKS_MAX).contains(&total_blocks)
            || !(JOURNAL_BLOCKS_MIN..=JOURNAL_BLOCKS_MAX).contains(&journal_blocks)
        {
            return None;
        }
        let groups_room = total_blocks.div_ceil(GROUP_BLOCKS);
        let bitmaps = DESCRIPTORS + groups_room.div_ceil(DESCRIPTORS_PER_BLOCK);
        let journal = bitmaps + groups_room + 1;
        let data = (journal + journal_blocks).next_multiple_of(CHUNK_BLOCKS);
        let chunks = (total_blocks - 1).checked_sub(data)? / CHUNK_BLOCKS;
        if chunks < 2 {
            return None;
        }
        Some(Geometry { total_blocks, bitmaps, journal, journal_blocks, data, chunks, groups: chunks.div_ceil(GROUP_CHUNKS) })
    }

    /// Addresses of the superblock and its copies.
    pub fn superblocks(&self) -> [u64; 3] {
        [SUPERBLOCK, self.journal - 1, self.total_blocks - 1]
    }

    /// Block and index in it of the descriptor of a group.
    pub fn descriptor(&self, group: u64) -> (u64, usize) {
        assert!(group < self.groups);
        (DESCRIPTORS + group / DESCRIPTORS_PER_BLOCK, (group % DESCRIPTORS_PER_BLOCK) as usize)
    }

    /// Addresses of all descriptor blocks.
    pub fn descriptor_blocks(&self) -> std::ops::Range<u64> {
        DESCRIPTORS..DESCRIPTORS + self.groups.div_ceil(DESCRIPTORS_PER_BLOCK)
    }

    /// Address of the bitmap of a group.
    pub fn bitmap(&self, group: u64) -> u64 {
        assert!(group < self.groups);
        self.bitmaps + group
    }

    /// Chunks of a group: the last one may have fewer than the others.
    pub fn group_chunks(&self, group: u64) -> u64 {
        (self.chunks - group * GROUP_CHUNKS).min(GROUP_CHUNKS)
    }

    /// First block of a group's data.
    pub fn group_start(&self, group: u64) -> u64 {
        self.data + group * GROUP_BLOCKS
    }

    /// Group of a data block, and the block's number in that group.
    pub fn locate(&self, block: u64) -> (u64, u64) {
        let at = block - self.data;
        (at / GROUP_BLOCKS, at % GROUP_BLOCKS)
    }

    /// End of the data area.
    pub fn data_end(&self) -> u64 {
        self.data + self.chunks * CHUNK_BLOCKS
    }

    /// Whether the blocks lie in the data area.
    pub fn contains_data(&self, block: u64, len: u64) -> bool {
        block >= self.data && block.checked_add(len).is_some_and(|end| end <= self.data_end())
    }

    /// Blocks in the data area.
    pub fn data_blocks(&self) -> u64 {
        self.chunks * CHUNK_BLOCKS
    }

    /// Byte address of a block.
    pub fn byte(block: u64) -> u64 {
        block * BLOCK_SIZE as u64
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn areas_do_not_overlap_and_stay_on_the_volume(total in 0u64..1 << 45, journal in 0u64..40_000) {
            let Some(g) = Geometry::new(total, journal) else { return Ok(()) };
            prop_assert!(g.descriptor_blocks().end <= g.bitmaps);
            prop_assert!(g.bitmaps + g.groups <= g.superblocks()[1]);
            prop_assert!(g.superblocks()[1] < g.journal);
            prop_assert!(g.journal + g.journal_blocks <= g.data);
            prop_assert_eq!(g.data % CHUNK_BLOCKS, 0);
            prop_assert!(g.data_end() < g.total_blocks);
            prop_assert_eq!((0..g.groups.min(100)).map(|i| g.group_chunks(i)).min().is_some_and(|n| n > 0), true);
            prop_assert_eq!(g.locate(g.data_end() - 1).0, g.groups - 1);
        }
    }

    #[test]
    fn the_smallest_volume_and_16_tib_can_be_laid_out() {
        assert!(Geometry::new(TOTAL_BLOCKS_MIN, JOURNAL_BLOCKS_MIN).is_some());
        let g = Geometry::new(1 << 32, JOURNAL_BLOCKS_MAX).unwrap();
        assert!(g.data * 4096 < 1 << 30, "fixed metadata of 16 TiB takes less than 1 GiB");
        assert!(g.descriptor_blocks().count() * 4096 < 2 << 20);
    }
}
