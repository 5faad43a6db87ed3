//! The anchors: the place in the journal where its live part begins. They are two blocks, written
//! alternately; the valid one with the higher generation counts, so that a torn write of one
//! leaves the other.
//!
//! | offset | size | field |
//! | --- | --- | --- |
//! | 0 | 64 | block header; its sequence is the generation |
//! | 64 | 8 | tail: block of the journal where the oldest live transaction begins |
//! | 72 | 8 | sequence of that transaction |
//! | 80 | 4 | flags: 1 = unmounted cleanly |

use crate::block::{BlockKind, Uuid};
use crate::geometry::ANCHORS;
use crate::{Block, COUNT_MAX, Corrupt, Geometry, le};

/// Where the live part of the journal begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Anchor {
    /// Grows with every write of an anchor.
    pub generation: u64,
    /// Block of the journal, counted from its start, where the oldest live transaction begins, or
    /// the next one will.
    pub tail: u64,
    /// Sequence of that transaction.
    pub sequence: u64,
    /// The volume was unmounted cleanly: the journal is empty.
    pub clean: bool,
}

/// Bytes of the block that mean something, besides the header.
pub const FIELDS: std::ops::Range<usize> = TAIL..FLAGS + 4;

const TAIL: usize = 64;
const TAIL_SEQUENCE: usize = 72;
const FLAGS: usize = 80;

impl Anchor {
    /// Address that this generation is written to.
    pub fn address(&self) -> u64 {
        ANCHORS[(self.generation % 2) as usize]
    }

    /// The stored form, sealed.
    pub fn encode(&self, uuid: &Uuid) -> Block {
        let mut block = Block::new(BlockKind::Anchor, self.address(), uuid);
        le::put_u64(block.bytes_mut(), TAIL, self.tail);
        le::put_u64(block.bytes_mut(), TAIL_SEQUENCE, self.sequence);
        le::put_u32(block.bytes_mut(), FLAGS, u32::from(self.clean));
        block.seal(self.generation);
        block
    }

    /// Reads one of the two.
    pub fn decode(block: &Block, address: u64, uuid: &Uuid, geometry: &Geometry) -> Result<Anchor, Corrupt> {
        block.verify(BlockKind::Anchor, address, uuid)?;
        let anchor = Anchor {
            generation: block.sequence(),
            tail: le::get_u64(block.bytes(), TAIL),
            sequence: le::get_u64(block.bytes(), TAIL_SEQUENCE),
            clean: le::get_u32(block.bytes(), FLAGS) & 1 == 1,
        };
        if anchor.tail >= geometry.journal_blocks {
            return Err(Corrupt::Field { address, what: "anchor points outside the journal" });
        }
        if anchor.sequence > COUNT_MAX || anchor.generation > COUNT_MAX {
            return Err(Corrupt::Field { address, what: "anchor counts more than there can have been" });
        }
        Ok(anchor)
    }

    /// Of the two, the one that counts.
    ///
    /// # Errors
    /// The error of the first, when neither is valid.
    pub fn choose(read: [Result<Anchor, Corrupt>; 2]) -> Result<Anchor, Corrupt> {
        match read {
            [Ok(a), Ok(b)] => Ok(if a.generation > b.generation { a } else { b }),
            [Ok(a), Err(_)] | [Err(_), Ok(a)] => Ok(a),
            [Err(e), Err(_)] => Err(e),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newer_valid_one_counts() {
        let geometry = Geometry::new(1 << 20, 4096).unwrap();
        let old = Anchor { generation: 4, tail: 1, sequence: 9, clean: true };
        let new = Anchor { generation: 5, tail: 2, sequence: 12, clean: false };
        assert_ne!(old.address(), new.address());
        let read = |a: &Anchor, torn: bool| {
            let mut block = a.encode(&[1; 16]);
            block.bytes_mut()[2000] ^= u8::from(torn);
            Anchor::decode(&block, a.address(), &[1; 16], &geometry)
        };
        assert_eq!(Anchor::choose([read(&old, false), read(&new, false)]), Ok(new));
        assert_eq!(Anchor::choose([read(&old, false), read(&new, true)]), Ok(old));
        assert!(Anchor::choose([read(&old, true), read(&new, true)]).is_err());
        for bad in
            [Anchor { tail: 4096, ..new }, Anchor { sequence: COUNT_MAX + 1, ..new }, Anchor { generation: COUNT_MAX + 1, ..new }]
        {
            assert!(read(&bad, false).is_err(), "{bad:?}");
        }
    }
}
