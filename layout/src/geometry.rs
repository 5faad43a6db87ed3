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
//!
//! Each time the volume grows, a *region* comes behind, with groups of its own: their descriptors,
//! their bitmaps, data from the next multiple of 512 blocks on, and a superblock copy in the last
//! block. Groups are numbered through all regions.

use std::ops::Range;

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

/// Most regions of a volume: the one that mkfs made, and those that it has grown by.
pub const REGIONS_MAX: usize = 16;

/// Where everything lies. All numbers are blocks unless they say otherwise.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Geometry {
    /// Size of the volume.
    pub total_blocks: u64,
    /// First block of the group bitmaps of the first region.
    pub bitmaps: u64,
    /// First block of the journal.
    pub journal: u64,
    /// Length of the journal.
    pub journal_blocks: u64,
    /// First block of the data area of the first region.
    pub data: u64,
    /// Chunks in the data areas of all regions.
    pub chunks: u64,
    /// Number of groups in all regions.
    pub groups: u64,
    /// Regions.
    count: usize,
    /// The end of each region, and the number of its first group.
    regions: [(u64, u64); REGIONS_MAX],
}

/// A part of the volume that has groups of its own: what mkfs made, or what the volume has grown
/// by. Its last block is a copy of the superblock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Region {
    /// First block behind it.
    pub end: u64,
    /// First block of its group descriptors.
    pub descriptors: u64,
    /// First block of its group bitmaps.
    pub bitmaps: u64,
    /// First block of its data area.
    pub data: u64,
    /// Chunks in its data area.
    pub chunks: u64,
    /// Number of its first group.
    pub first_group: u64,
}

impl Region {
    /// A region in blocks `start..end` behind others, which have so many groups. None where it is
    /// too small.
    fn behind(start: u64, end: u64, first_group: u64) -> Option<Region> {
        let room = end.checked_sub(start)?.div_ceil(GROUP_BLOCKS);
        let bitmaps = start + room.div_ceil(DESCRIPTORS_PER_BLOCK);
        let data = (bitmaps + room).next_multiple_of(CHUNK_BLOCKS);
        let chunks = end.checked_sub(1)?.checked_sub(data)? / CHUNK_BLOCKS;
        (chunks >= 2).then_some(Region { end, descriptors: start, bitmaps, data, chunks, first_group })
    }

    /// Number of its groups.
    pub fn groups(&self) -> u64 {
        self.chunks.div_ceil(GROUP_CHUNKS)
    }

    /// The block behind those of its group descriptors.
    fn descriptors_end(&self) -> u64 {
        self.descriptors + self.groups().div_ceil(DESCRIPTORS_PER_BLOCK)
    }

    /// End of its data area.
    pub fn data_end(&self) -> u64 {
        self.data + self.chunks * CHUNK_BLOCKS
    }

    /// Blocks of its group descriptors, with the groups that each describes.
    pub fn descriptor_blocks(self) -> impl Iterator<Item = (u64, Range<u64>)> {
        let end = self.first_group + self.groups();
        (0..self.groups().div_ceil(DESCRIPTORS_PER_BLOCK)).map(move |number| {
            let first = self.first_group + number * DESCRIPTORS_PER_BLOCK;
            (self.descriptors + number, first..(first + DESCRIPTORS_PER_BLOCK).min(end))
        })
    }
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
        let groups = chunks.div_ceil(GROUP_CHUNKS);
        let mut regions = [(0, 0); REGIONS_MAX];
        regions[0] = (total_blocks, 0);
        Some(Geometry { total_blocks, bitmaps, journal, journal_blocks, data, chunks, groups, count: 1, regions })
    }

    /// The volume when it has grown up to `total_blocks`; `None` when that is too little more, or
    /// out of range, or it has as many regions as it can have.
    pub fn grown(&self, total_blocks: u64) -> Option<Geometry> {
        if self.count == REGIONS_MAX || total_blocks > TOTAL_BLOCKS_MAX {
            return None;
        }
        let region = Region::behind(self.total_blocks, total_blocks, self.groups)?;
        let mut grown = *self;
        grown.regions[self.count] = (total_blocks, self.groups);
        grown.count += 1;
        grown.total_blocks = total_blocks;
        grown.chunks += region.chunks;
        grown.groups += region.groups();
        Some(grown)
    }

    /// The regions.
    pub fn regions(&self) -> impl DoubleEndedIterator<Item = Region> + ExactSizeIterator + '_ {
        (0..self.count).map(|number| self.region(number))
    }

    fn region(&self, number: usize) -> Region {
        let (end, first_group) = self.regions[number];
        let Some((start, _)) = number.checked_sub(1).map(|before| self.regions[before]) else {
            let (bitmaps, data) = (self.bitmaps, self.data);
            return Region { end, descriptors: DESCRIPTORS, bitmaps, data, chunks: (end - 1 - data) / CHUNK_BLOCKS, first_group };
        };
        Region::behind(start, end, first_group).expect("checked when it was added")
    }

    /// The region of a group.
    fn of_group(&self, group: u64) -> Region {
        assert!(group < self.groups);
        let behind = self.regions[1..self.count].iter().take_while(|(_, first)| *first <= group).count();
        self.region(behind)
    }

    /// The region of a block of the volume.
    fn of_block(&self, block: u64) -> Region {
        let before = self.regions[..self.count - 1].iter().take_while(|(end, _)| *end <= block).count();
        self.region(before)
    }

    /// Addresses of the superblock and its copies: the last is that in the volume's last block.
    pub fn superblocks(&self) -> Vec<u64> {
        let ends = self.regions[..self.count].iter().map(|(end, _)| end - 1);
        [SUPERBLOCK, self.journal - 1].into_iter().chain(ends).collect()
    }

    /// Address of the copy before the journal in a volume of so many blocks, as mkfs makes it;
    /// `None` where they are too few. Of one that has grown, or is on several devices, it lies
    /// elsewhere.
    pub fn middle_superblock(total_blocks: u64) -> Option<u64> {
        Geometry::new(total_blocks, Geometry::default_journal_blocks(total_blocks)).map(|geometry| geometry.journal - 1)
    }

    /// Block and index in it of the descriptor of a group.
    pub fn descriptor(&self, group: u64) -> (u64, usize) {
        let region = self.of_group(group);
        let number = group - region.first_group;
        (region.descriptors + number / DESCRIPTORS_PER_BLOCK, (number % DESCRIPTORS_PER_BLOCK) as usize)
    }

    /// All descriptor blocks, with the groups that each describes.
    pub fn descriptor_blocks(&self) -> impl Iterator<Item = (u64, Range<u64>)> + '_ {
        self.regions().flat_map(Region::descriptor_blocks)
    }

    /// The descriptor blocks of one region around an address, at most `count`, if it is one's.
    pub fn descriptor_blocks_near(&self, address: u64, count: u64) -> Option<Range<u64>> {
        let region = self.of_block(address);
        let all = region.descriptors_end();
        let number = address.checked_sub(region.descriptors).filter(|_| address < all)?;
        let first = address - number % count;
        Some(first..(first + count).min(all))
    }

    /// Address of the bitmap of a group.
    pub fn bitmap(&self, group: u64) -> u64 {
        let region = self.of_group(group);
        region.bitmaps + group - region.first_group
    }

    /// The group whose bitmap lies at an address.
    pub fn bitmap_group(&self, address: u64) -> Option<u64> {
        let region = self.of_block(address);
        let number = address.checked_sub(region.bitmaps).filter(|number| *number < region.groups())?;
        Some(region.first_group + number)
    }

    /// Whether a block of metadata that changes after mkfs may lie at an address.
    pub fn is_home(&self, address: u64) -> bool {
        let region = self.of_block(address);
        address == STATE
            || (region.descriptors..region.descriptors_end()).contains(&address)
            || self.bitmap_group(address).is_some()
            || self.contains_data(address, 1)
    }

    /// Chunks of a group: the last one of a region may have fewer than the others.
    pub fn group_chunks(&self, group: u64) -> u64 {
        let region = self.of_group(group);
        (region.chunks - (group - region.first_group) * GROUP_CHUNKS).min(GROUP_CHUNKS)
    }

    /// First block of a group's data.
    pub fn group_start(&self, group: u64) -> u64 {
        let region = self.of_group(group);
        region.data + (group - region.first_group) * GROUP_BLOCKS
    }

    /// The first group that ends behind a block; the number of groups where none does.
    pub fn group_behind(&self, block: u64) -> u64 {
        let region = self.of_block(block);
        let before = block.saturating_sub(region.data) / GROUP_BLOCKS;
        if block < region.data_end() { region.first_group + before } else { region.first_group + region.groups() }
    }

    /// Group of a data block, and the block's number in that group.
    pub fn locate(&self, block: u64) -> (u64, u64) {
        let region = self.of_block(block);
        let at = block - region.data;
        (region.first_group + at / GROUP_BLOCKS, at % GROUP_BLOCKS)
    }

    /// End of the last data area.
    pub fn data_end(&self) -> u64 {
        self.region(self.count - 1).data_end()
    }

    /// Whether the blocks lie in one data area.
    pub fn contains_data(&self, block: u64, len: u64) -> bool {
        let region = self.of_block(block);
        block >= region.data && block.checked_add(len).is_some_and(|end| end <= region.data_end())
    }

    /// Blocks in the data areas.
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
            let region = g.regions().next().expect("there is one");
            prop_assert!(region.descriptor_blocks().all(|(address, _)| address < g.bitmaps));
            prop_assert!(g.bitmaps + g.groups <= g.superblocks()[1]);
            prop_assert!(g.superblocks()[1] < g.journal);
            prop_assert!(g.journal + g.journal_blocks <= g.data);
            prop_assert_eq!(g.data % CHUNK_BLOCKS, 0);
            prop_assert!(g.data_end() < g.total_blocks);
            prop_assert_eq!((0..g.groups.min(100)).map(|i| g.group_chunks(i)).min().is_some_and(|n| n > 0), true);
            prop_assert_eq!(g.locate(g.data_end() - 1).0, g.groups - 1);
        }

        #[test]
        fn regions_follow_one_another_and_each_group_has_its_place(
            first in 4096u64..1 << 21, more in proptest::collection::vec(0u64..1 << 20, 0..REGIONS_MAX + 2),
        ) {
            let Some(mut g) = Geometry::new(first, 1024) else { return Ok(()) };
            let chunks = g.chunks;
            for more in more {
                let Some(grown) = g.grown(g.total_blocks + more) else { continue };
                // What lay on the volume lies where it did.
                for group in 0..g.groups {
                    prop_assert_eq!(g.descriptor(group), grown.descriptor(group));
                    prop_assert_eq!((g.bitmap(group), g.group_start(group)), (grown.bitmap(group), grown.group_start(group)));
                    prop_assert_eq!(g.group_chunks(group), grown.group_chunks(group));
                }
                g = grown;
            }
            prop_assert!(g.regions().len() <= REGIONS_MAX);
            let mut end = 0;
            for region in g.regions() {
                prop_assert!(region.descriptors >= end && region.bitmaps > region.descriptors && region.data % CHUNK_BLOCKS == 0);
                prop_assert!(region.bitmaps + region.groups() <= region.data && region.data_end() < region.end);
                prop_assert!(g.superblocks().contains(&(region.end - 1)) && !g.contains_data(region.end - 1, 1));
                prop_assert!(g.contains_data(region.data, region.chunks * CHUNK_BLOCKS));
                prop_assert!(!g.contains_data(region.data, region.chunks * CHUNK_BLOCKS + 1));
                prop_assert_eq!(g.group_behind(region.descriptors), region.first_group);
                prop_assert_eq!(g.group_behind(region.end - 1), region.first_group + region.groups());
                end = region.end;
            }
            prop_assert!(end == g.total_blocks && g.chunks >= chunks);
            prop_assert_eq!((0..g.groups).map(|group| g.group_chunks(group)).sum::<u64>(), g.chunks);
            let described: Vec<u64> = g.descriptor_blocks().flat_map(|(_, groups)| groups).collect();
            prop_assert_eq!(described, (0..g.groups).collect::<Vec<_>>());
            for group in 0..g.groups {
                let (start, len) = (g.group_start(group), g.group_chunks(group) * CHUNK_BLOCKS);
                prop_assert_eq!((g.locate(start), g.locate(start + len - 1)), ((group, 0), (group, len - 1)));
                prop_assert_eq!((g.group_behind(start), g.group_behind(start + len - 1)), (group, group));
                prop_assert_eq!(g.bitmap_group(g.bitmap(group)), Some(group));
                prop_assert!(g.is_home(g.bitmap(group)) && g.is_home(g.descriptor(group).0) && g.is_home(start));
            }
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
