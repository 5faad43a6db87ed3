//! Groups: the free space of a volume. A group is 62 chunks of 512 blocks, described by one bitmap
//! block and one descriptor.
//!
//! A chunk holds data or metadata, never both: large runs of free chunks do not erode, and a
//! metadata block is never reused for data while an image of it may be in the journal.
//!
//! Bitmap block: the kinds of the 62 chunks, one byte each, at offset 64 (two bytes of zeros after
//! them), then at offset 128 one bit a block, lowest bit first, 1 = in use. Bits and kinds of
//! chunks that the last group does not have are 1 and free.
//!
//! Descriptor, 8 bytes: free blocks outside metadata chunks (2), free blocks inside metadata
//! chunks (2), wholly free chunks (2), flags (2: 1 = the bitmap block was written; without it the
//! group is wholly free and its bitmap block is not read).

use std::ops::Range;

use crate::block::{BLOCK_SIZE, BlockKind, Uuid};
use crate::geometry::{CHUNK_BLOCKS, GROUP_BLOCKS, GROUP_CHUNKS};
use crate::{Block, Corrupt, Geometry, le};

/// What a chunk is used for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum ChunkKind {
    /// Nothing: all of its blocks are free.
    Free = 0,
    /// Data of files.
    Data = 1,
    /// Nodes of the tree.
    Metadata = 2,
}

/// What a descriptor says of a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Descriptor {
    /// Free blocks, those inside metadata chunks not counted.
    pub free_blocks: u16,
    /// Free blocks inside metadata chunks.
    pub free_metadata: u16,
    /// Chunks that are wholly free.
    pub free_chunks: u16,
    /// The bitmap block was written.
    pub initialized: bool,
}

/// Bytes of a bitmap block that mean something, besides the header.
pub const BITMAP_FIELDS: [Range<usize>; 2] = [KINDS..KINDS + GROUP_CHUNKS as usize, BITS..BLOCK_SIZE];

const KINDS: usize = 64;
const BITS: usize = 128;
const WORDS_PER_CHUNK: u64 = CHUNK_BLOCKS / 64;
const DESCRIPTORS: usize = 64;
const DESCRIPTOR_SIZE: usize = 8;

impl Descriptor {
    /// The descriptor of a group that nothing was allocated in.
    pub fn empty(geometry: &Geometry, group: u64) -> Descriptor {
        let chunks = geometry.group_chunks(group);
        Descriptor {
            free_blocks: (chunks * CHUNK_BLOCKS) as u16,
            free_metadata: 0,
            free_chunks: chunks as u16,
            initialized: false,
        }
    }

    /// Free blocks in chunks that hold data.
    pub fn free_shared(&self) -> u64 {
        u64::from(self.free_blocks).saturating_sub(u64::from(self.free_chunks) * CHUNK_BLOCKS)
    }

    /// Reads descriptor `index` of a descriptor block.
    pub fn load(block: &Block, index: usize) -> Descriptor {
        let at = DESCRIPTORS + index * DESCRIPTOR_SIZE;
        Descriptor {
            free_blocks: le::get_u16(block.bytes(), at),
            free_metadata: le::get_u16(block.bytes(), at + 2),
            free_chunks: le::get_u16(block.bytes(), at + 4),
            initialized: le::get_u16(block.bytes(), at + 6) & 1 == 1,
        }
    }

    /// Writes descriptor `index` of a descriptor block.
    pub fn store(&self, block: &mut Block, index: usize) {
        let at = DESCRIPTORS + index * DESCRIPTOR_SIZE;
        le::put_u16(block.bytes_mut(), at, self.free_blocks);
        le::put_u16(block.bytes_mut(), at + 2, self.free_metadata);
        le::put_u16(block.bytes_mut(), at + 4, self.free_chunks);
        le::put_u16(block.bytes_mut(), at + 6, u16::from(self.initialized));
    }
}

/// Bytes of the descriptor block at `address` that mean something, besides the header.
pub fn descriptor_fields(geometry: &Geometry, address: u64) -> Range<usize> {
    let here = geometry.descriptor_blocks().find(|(block, _)| *block == address);
    let groups = here.map_or(0, |(_, groups)| groups.end - groups.start);
    DESCRIPTORS..DESCRIPTORS + groups as usize * DESCRIPTOR_SIZE
}

/// A descriptor block of a group, and those beside it, that nothing was allocated in.
pub fn new_descriptors(geometry: &Geometry, address: u64, groups: Range<u64>, uuid: &Uuid) -> Block {
    let mut block = Block::new(BlockKind::Descriptors, address, uuid);
    for (index, group) in groups.enumerate() {
        Descriptor::empty(geometry, group).store(&mut block, index);
    }
    block
}

/// The bitmap block of a group that nothing was allocated in.
pub fn new_bitmap(geometry: &Geometry, group: u64, uuid: &Uuid) -> Block {
    let mut block = Block::new(BlockKind::Bitmap, geometry.bitmap(group), uuid);
    let existing = geometry.group_chunks(group) * CHUNK_BLOCKS;
    set(&mut block, existing, GROUP_BLOCKS - existing, true);
    block
}

/// Checks a bitmap block. `block` was verified.
pub fn check_bitmap(block: &Block) -> Result<(), Corrupt> {
    for chunk in 0..GROUP_CHUNKS {
        let kind = block.bytes()[KINDS + chunk as usize];
        if kind > ChunkKind::Metadata as u8 {
            return Err(Corrupt::Field { address: block.address(), what: "bitmap has a chunk of an unknown kind" });
        }
    }
    Ok(())
}

/// Kind of a chunk.
pub fn kind(block: &Block, chunk: u64) -> ChunkKind {
    match block.bytes()[KINDS + chunk as usize] {
        0 => ChunkKind::Free,
        1 => ChunkKind::Data,
        _ => ChunkKind::Metadata,
    }
}

/// Sets the kind of a chunk.
pub fn set_kind(block: &mut Block, chunk: u64, kind: ChunkKind) {
    block.bytes_mut()[KINDS + chunk as usize] = kind as u8;
}

/// 64 bits of the bitmap; bit 0 is block `word * 64` of the group.
fn word(block: &Block, word: u64) -> u64 {
    le::get_u64(block.bytes(), BITS + word as usize * 8)
}

/// Whether block `at` of the group is in use.
pub fn is_used(block: &Block, at: u64) -> bool {
    word(block, at / 64) >> (at % 64) & 1 == 1
}

/// Sets the bits of `len` blocks from `at` on.
pub fn set(block: &mut Block, at: u64, len: u64, used: bool) {
    assert!(at + len <= GROUP_BLOCKS);
    let mut at = at;
    let end = at + len;
    while at < end {
        let (index, bit) = (at / 64, at % 64);
        let n = (64 - bit).min(end - at);
        let mask = (u64::MAX >> (64 - n)) << bit;
        let old = word(block, index);
        let new = if used { old | mask } else { old & !mask };
        le::put_u64(block.bytes_mut(), BITS + index as usize * 8, new);
        at += n;
    }
}

/// The first run of blocks in state `used` within `from..to` of the group: (start, length); the
/// run is cut at `to`.
pub fn find_run(block: &Block, from: u64, to: u64, used: bool) -> Option<(u64, u64)> {
    let start = next(block, from, to, used)?;
    let end = next(block, start, to, !used).unwrap_or(to);
    Some((start, end - start))
}

/// Whether two bitmap blocks mark the same blocks.
pub fn same_bits(a: &Block, b: &Block) -> bool {
    a.bytes()[BITS..] == b.bytes()[BITS..]
}

/// Blocks in use in a chunk.
pub fn chunk_used(block: &Block, chunk: u64) -> u64 {
    let first = chunk * WORDS_PER_CHUNK;
    (first..first + WORDS_PER_CHUNK).map(|w| u64::from(word(block, w).count_ones())).sum()
}

/// The first block in state `used` within `from..to`.
fn next(block: &Block, from: u64, to: u64, used: bool) -> Option<u64> {
    let mut at = from;
    while at < to {
        let bits = word(block, at / 64);
        let bits = (if used { bits } else { !bits }) >> (at % 64);
        if bits != 0 {
            return Some(at + u64::from(bits.trailing_zeros())).filter(|found| *found < to);
        }
        at = (at / 64 + 1) * 64;
    }
    None
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn the_bitmap_is_a_set_of_blocks(ops in prop::collection::vec((0u64..GROUP_BLOCKS, 1u64..2000, any::<bool>()), 1..40)) {
            let geometry = Geometry::new(1 << 20, 4096).unwrap();
            let mut block = new_bitmap(&geometry, 0, &[1; 16]);
            let mut model = vec![false; GROUP_BLOCKS as usize];
            for (at, len, used) in ops {
                let len = len.min(GROUP_BLOCKS - at);
                set(&mut block, at, len, used);
                model[at as usize..(at + len) as usize].fill(used);
                let run = find_run(&block, at / 2, GROUP_BLOCKS, !used);
                let start = (at / 2..GROUP_BLOCKS).find(|i| model[*i as usize] != used);
                let expected = start.map(|s| (s, (s..GROUP_BLOCKS).find(|i| model[*i as usize] == used).unwrap_or(GROUP_BLOCKS) - s));
                prop_assert_eq!(run, expected);
            }
            for chunk in 0..GROUP_CHUNKS {
                let slice = &model[(chunk * CHUNK_BLOCKS) as usize..][..CHUNK_BLOCKS as usize];
                prop_assert_eq!(chunk_used(&block, chunk), slice.iter().filter(|u| **u).count() as u64);
            }
        }
    }

    #[test]
    fn chunks_that_the_last_group_lacks_are_in_use() {
        let geometry = Geometry::new(4096, 1024).unwrap();
        let block = new_bitmap(&geometry, 0, &[1; 16]);
        let existing = geometry.chunks * CHUNK_BLOCKS;
        assert_eq!(find_run(&block, 0, GROUP_BLOCKS, false), Some((0, existing)));
        assert_eq!(Descriptor::empty(&geometry, 0).free_blocks as u64, existing);
    }
}
