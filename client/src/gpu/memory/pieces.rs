//! Cuts a segment between a file and GPU memory into pieces, each of which goes through one slot of
//! the staging pool.
//!
//! It guards the promise that staging makes no byte go through the CPU that would not have to:
//! reads are rounded outwards to what the device reads whole, and what was read too much is not
//! copied on; writes, which cannot be rounded, lie in their slots as they lie in the file's
//! blocks.

use super::slots::CHUNK;
use gpunvme_abi::Direction;

/// The least that a long transfer is cut into. An H200's copy engine moves more in copies of 256
/// KiB (37 GB/s) than any SSD does, but each piece is a request of the device: one thread read
/// 4.2 GB/s there in requests of 1 MiB that were cut into four, and 5.2 in those cut into two.
const LEAST: u64 = 512 << 10;
/// Pieces that a transfer is cut into at least, if they are not shorter than [`LEAST`]: while one
/// is copied the others are read.
const PIECES: u64 = 4;

/// What a device and a file's blocks ask for, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Blocks {
    /// Reads that cover whole ones are direct: the device's logical block.
    pub read: u64,
    /// Writes that cover whole ones are direct: the filesystem's block.
    pub write: u64,
}

/// Where one piece lies. Of its slot, `wanted` bytes after the first `skip` are the application's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PieceRange {
    /// Where in the file the transfer between file and slot begins.
    pub file_offset: u64,
    /// Where in the slot it begins.
    pub slot_offset: u64,
    /// How long it is.
    pub len: u64,
    /// Where in the slot the application's bytes begin.
    pub skip: u64,
    /// How many they are.
    pub wanted: u64,
}

impl PieceRange {
    /// Bytes of the slot that it needs.
    pub fn slot_len(&self) -> usize {
        (self.slot_offset + self.len) as usize
    }

    /// The same piece elsewhere in the file, by so many bytes, a multiple of both block sizes.
    pub fn moved_by(&self, bytes: i64) -> PieceRange {
        PieceRange { file_offset: self.file_offset.wrapping_add_signed(bytes), ..*self }
    }

    /// Of the application's bytes, those that are in the slot when `moved` bytes of the transfer
    /// are done.
    pub fn arrived(&self, moved: u64) -> u64 {
        (self.slot_offset + moved).saturating_sub(self.skip).min(self.wanted)
    }
}

/// How long the pieces of a transfer of `len` bytes in all should be: long enough for the copy
/// engine, and enough of them that reading and copying overlap.
pub fn piece_len(len: u64) -> u64 {
    (len / PIECES).next_multiple_of(LEAST).clamp(LEAST, CHUNK as u64)
}

/// The first piece of `len` bytes at `file_offset`, at most about `piece_len` long: a multiple of
/// both block sizes that is at most [`CHUNK`].
pub fn first(direction: Direction, blocks: Blocks, file_offset: u64, len: u64, piece_len: u64) -> PieceRange {
    let block = match direction {
        Direction::Read => blocks.read,
        Direction::Write => blocks.write,
    };
    let skip = file_offset % block;
    let start = file_offset - skip;
    let wanted = len.min(piece_len - skip);
    match direction {
        Direction::Read => {
            PieceRange { file_offset: start, slot_offset: 0, len: (skip + wanted).next_multiple_of(block), skip, wanted }
        }
        Direction::Write => PieceRange { file_offset, slot_offset: skip, len: wanted, skip, wanted },
    }
}

/// The first piece, likewise, of a transfer between the file and the application's memory itself.
/// It moves what was asked for and nothing more.
pub fn first_unstaged(blocks: Blocks, file_offset: u64, len: u64, piece_len: u64) -> PieceRange {
    let wanted = len.min(piece_len - file_offset % blocks.read.max(blocks.write));
    PieceRange { file_offset, slot_offset: 0, len: wanted, skip: 0, wanted }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// However a range lies: its pieces follow each other without a gap, fit their slots, are
        /// direct but for the ends of a write, and hold the bytes that they should.
        #[test]
        fn pieces_add_up(
            write in any::<bool>(),
            read_block in prop::sample::select(vec![512u64, 4096]),
            file_offset in 0..(8u64 << 20),
            len in 1..(8u64 << 20),
        ) {
            let direction = if write { Direction::Write } else { Direction::Read };
            let blocks = Blocks { read: read_block, write: 4096 };
            let block = if write { 4096 } else { read_block };
            let (mut at, end, most) = (file_offset, file_offset + len, piece_len(len));
            while at < end {
                let piece = first(direction, blocks, at, end - at, most);
                prop_assert!(piece.wanted > 0 && piece.slot_len() <= CHUNK);
                prop_assert_eq!(piece.file_offset - piece.slot_offset + piece.skip, at, "the slot lies as the file does");
                prop_assert!(piece.slot_offset <= piece.skip && piece.skip + piece.wanted <= piece.slot_offset + piece.len);
                prop_assert_eq!(piece.slot_offset % block, piece.file_offset % block);
                if write {
                    prop_assert_eq!((piece.file_offset, piece.len), (at, piece.wanted));
                } else {
                    prop_assert!(piece.file_offset.is_multiple_of(block) && piece.len.is_multiple_of(block));
                }
                prop_assert_eq!(piece.arrived(piece.len), piece.wanted);
                prop_assert_eq!(piece.arrived(0), 0);
                at += piece.wanted;
                prop_assert!(at == end || at.is_multiple_of(block), "a cut is at the edge of a block");
            }
            prop_assert_eq!(at, end);
        }
    }

    #[test]
    fn long_transfers_are_cut_and_short_ones_are_not() {
        let kib = 1 << 10;
        for (len, expected) in [(1, 512), (64, 512), (1024, 512), (2048, 512), (4096, 1024), (16384, 1024)] {
            assert_eq!(piece_len(len * kib), expected * kib);
        }
    }

    /// A file that ends within a piece.
    #[test]
    fn what_arrived_is_counted_from_the_wanted_byte_on() {
        let piece = first(Direction::Read, Blocks { read: 4096, write: 4096 }, 5000, 100, 256 << 10);
        assert_eq!((piece.file_offset, piece.len, piece.skip), (4096, 4096, 904));
        assert_eq!([0, 904, 905, 1004, 4096].map(|moved| piece.arrived(moved)), [0, 0, 1, 100, 100]);
    }
}
