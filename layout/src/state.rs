//! The state block: the root of the tree and the counters of the volume. An ordinary metadata
//! block, changed by transactions.
//!
//! | offset | size | field |
//! | --- | --- | --- |
//! | 0 | 64 | block header |
//! | 64 | 8 | root node of the tree |
//! | 72 | 8 | next inode number |
//! | 80 | 8 | inodes in use |
//! | 88 | 8 | free blocks, those inside metadata chunks not counted |
//! | 96 | 8 | wholly free chunks |
//! | 104 | 1 | level of the root node |
//! | 106 | 2 | regions behind the first that the counters count |

use crate::block::{BlockKind, Uuid};
use crate::geometry::{CHUNK_BLOCKS, STATE};
use crate::key::{INO_MAX, INO_ROOT};
use crate::node::LEVEL_MAX;
use crate::{Block, Corrupt, Geometry, le};

/// Root of the tree and counters of the volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct State {
    /// Block of the root node.
    pub root: u64,
    /// Level of the root node.
    pub level: u8,
    /// Number that the next inode gets; numbers are never used twice.
    pub next_ino: u64,
    /// Inodes in use.
    pub inodes: u64,
    /// Free blocks, those inside metadata chunks not counted.
    pub free_blocks: u64,
    /// Wholly free chunks.
    pub free_chunks: u64,
    /// Regions behind the first that the counters count. The volume may have one more, where its
    /// growth was cut short.
    pub regions: u16,
}

/// Bytes of the block that mean something, besides the header.
pub const FIELDS: std::ops::Range<usize> = ROOT..REGIONS + 2;

const ROOT: usize = 64;
const NEXT_INO: usize = 72;
const INODES: usize = 80;
const FREE_BLOCKS: usize = 88;
const FREE_CHUNKS: usize = 96;
const LEVEL: usize = 104;
const REGIONS: usize = 106;

impl State {
    /// Counts what is free in the regions of the volume that it does not count yet, of which
    /// nothing was used.
    pub fn count_regions(&mut self, geometry: &Geometry) {
        for region in geometry.regions().skip(1 + usize::from(self.regions)) {
            self.free_blocks += region.chunks * CHUNK_BLOCKS;
            self.free_chunks += region.chunks;
            self.regions += 1;
        }
    }

    /// A new block with this state.
    pub fn encode(&self, uuid: &Uuid) -> Block {
        let mut block = Block::new(BlockKind::State, STATE, uuid);
        self.store(&mut block);
        block
    }

    /// Writes this state into the state block.
    pub fn store(&self, block: &mut Block) {
        let bytes = block.bytes_mut();
        le::put_u64(bytes, ROOT, self.root);
        le::put_u64(bytes, NEXT_INO, self.next_ino);
        le::put_u64(bytes, INODES, self.inodes);
        le::put_u64(bytes, FREE_BLOCKS, self.free_blocks);
        le::put_u64(bytes, FREE_CHUNKS, self.free_chunks);
        bytes[LEVEL] = self.level;
        le::put_u16(bytes, REGIONS, self.regions);
    }

    /// Reads a verified state block.
    pub fn decode(block: &Block, geometry: &Geometry) -> Result<State, Corrupt> {
        block.expect(BlockKind::State)?;
        let bytes = block.bytes();
        let state = State {
            root: le::get_u64(bytes, ROOT),
            level: bytes[LEVEL],
            next_ino: le::get_u64(bytes, NEXT_INO),
            inodes: le::get_u64(bytes, INODES),
            free_blocks: le::get_u64(bytes, FREE_BLOCKS),
            free_chunks: le::get_u64(bytes, FREE_CHUNKS),
            regions: le::get_u16(bytes, REGIONS),
        };
        let fail = |what| Err(Corrupt::Field { address: STATE, what });
        if !geometry.contains_data(state.root, 1) || state.level > LEVEL_MAX {
            return fail("root of the tree is out of range");
        }
        if state.next_ino <= INO_ROOT || state.next_ino > INO_MAX {
            return fail("next inode number is out of range");
        }
        if state.free_blocks > geometry.data_blocks() || state.free_chunks > geometry.chunks || state.inodes >= state.next_ino {
            return fail("counters of the volume are impossible");
        }
        if usize::from(state.regions) >= geometry.regions().len() {
            return fail("it counts more regions than the volume has");
        }
        Ok(state)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_survives_the_round_trip_and_refuses_the_impossible() {
        let geometry = Geometry::new(1 << 20, 4096).unwrap();
        let state =
            State { root: geometry.data, level: 3, next_ino: 100, inodes: 4, free_blocks: 77, free_chunks: 0, regions: 0 };
        assert_eq!(State::decode(&state.encode(&[1; 16]), &geometry), Ok(state));
        for bad in [
            State { root: 5, ..state },
            State { level: 99, ..state },
            State { next_ino: 1, ..state },
            State { inodes: 100, ..state },
            State { free_blocks: u64::MAX, ..state },
        ] {
            assert!(State::decode(&bad.encode(&[1; 16]), &geometry).is_err(), "{bad:?}");
        }
    }
}
