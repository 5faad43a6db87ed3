//! Self-describing metadata blocks.
//!
//! Every metadata block begins with the same 64-byte header: magic, checksum, kind, its own
//! address, the sequence number of the transaction that wrote it, and the filesystem's UUID. A
//! torn, stale, misdirected or foreign block fails one of them.
//!
//! | offset | size | field |
//! | --- | --- | --- |
//! | 0 | 4 | magic `gNVM` |
//! | 4 | 4 | CRC32C of the 4096 bytes, this field taken as zero |
//! | 8 | 2 | kind |
//! | 10 | 6 | reserved, zero |
//! | 16 | 8 | address: number of the block it lives in |
//! | 24 | 8 | sequence of the transaction that wrote it |
//! | 32 | 16 | UUID of the filesystem |
//! | 48 | 16 | for the kind to use |

use std::ops::Range;

use crate::{Corrupt, le};

/// Size of a block in bytes: the unit of allocation and of every address in the format.
pub const BLOCK_SIZE: usize = 4096;
/// Bytes of the header that all kinds share, their own 16 included.
pub const HEADER_SIZE: usize = 64;
/// Where the 16 bytes that belong to the kind begin.
pub(crate) const KIND_FIELDS: usize = 48;

const MAGIC: [u8; 4] = *b"gNVM";
const CRC: usize = 4;
const KIND: usize = 8;
const ADDRESS: usize = 16;
const SEQUENCE: usize = 24;
const UUID: usize = 32;

/// UUID of a filesystem.
pub type Uuid = [u8; 16];

/// What a metadata block holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u16)]
pub enum BlockKind {
    /// [`crate::Superblock`] or a copy of it.
    Superblock = 1,
    /// [`crate::Anchor`], one of two.
    Anchor = 2,
    /// [`crate::State`].
    State = 3,
    /// Descriptors of groups: [`crate::group::Descriptor`].
    Descriptors = 4,
    /// Bitmap of one group: [`crate::group`].
    Bitmap = 5,
    /// Node of the tree: [`crate::node`].
    Node = 6,
    /// Descriptor of a transaction in the journal: [`crate::journal`].
    Journal = 7,
}

/// The bytes of one block.
#[derive(Clone, PartialEq, Eq)]
#[repr(C, align(8))]
pub struct Block {
    bytes: [u8; BLOCK_SIZE],
}

impl std::fmt::Debug for Block {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Block(kind {}, address {}, sequence {})", self.kind(), self.address(), self.sequence())
    }
}

impl Block {
    /// An empty block of `kind`, for `address`. It is not valid before it is sealed.
    pub fn new(kind: BlockKind, address: u64, uuid: &Uuid) -> Block {
        let mut block = Block { bytes: [0; BLOCK_SIZE] };
        block.bytes[..4].copy_from_slice(&MAGIC);
        le::put_u16(&mut block.bytes, KIND, kind as u16);
        le::put_u64(&mut block.bytes, ADDRESS, address);
        block.bytes[UUID..UUID + 16].copy_from_slice(uuid);
        block
    }

    /// The bytes as they were read; nothing is known of them before [`Block::verify`].
    pub fn from_bytes(bytes: &[u8; BLOCK_SIZE]) -> Block {
        Block { bytes: *bytes }
    }

    /// All bytes.
    #[inline]
    pub fn bytes(&self) -> &[u8; BLOCK_SIZE] {
        &self.bytes
    }

    /// All bytes, to change. Changes unseal the block.
    #[inline]
    pub fn bytes_mut(&mut self) -> &mut [u8; BLOCK_SIZE] {
        &mut self.bytes
    }

    /// Whether it begins as every block of a volume does.
    pub fn has_magic(&self) -> bool {
        self.bytes[..4] == MAGIC
    }

    /// Kind, as in the header.
    #[inline]
    pub fn kind(&self) -> u16 {
        le::get_u16(&self.bytes, KIND)
    }

    /// Address, as in the header.
    #[inline]
    pub fn address(&self) -> u64 {
        le::get_u64(&self.bytes, ADDRESS)
    }

    /// Sequence of the transaction that wrote it.
    #[inline]
    pub fn sequence(&self) -> u64 {
        le::get_u64(&self.bytes, SEQUENCE)
    }

    /// UUID, as in the header.
    pub fn uuid(&self) -> Uuid {
        self.bytes[UUID..UUID + 16].try_into().expect("sixteen bytes")
    }

    /// The same content for another address, sealed with the same sequence: how a copy is made.
    pub fn moved_to(&self, address: u64) -> Block {
        let mut block = self.clone();
        le::put_u64(&mut block.bytes, ADDRESS, address);
        block.seal(self.sequence());
        block
    }

    /// The same header, and of the rest the bytes in `kept` alone, sealed with the same sequence.
    /// All other bytes are zero.
    pub fn reduced_to(&self, kept: &[Range<usize>]) -> Block {
        let mut block = Block { bytes: [0; BLOCK_SIZE] };
        let header = [0..CRC, KIND..KIND + 2, ADDRESS..KIND_FIELDS];
        for range in header.iter().chain(kept) {
            block.bytes[range.clone()].copy_from_slice(&self.bytes[range.clone()]);
        }
        block.seal(self.sequence());
        block
    }

    /// Stamps the block with `sequence` and its checksum: the last step before it is written.
    pub fn seal(&mut self, sequence: u64) {
        le::put_u64(&mut self.bytes, SEQUENCE, sequence);
        let crc = self.checksum();
        le::put_u32(&mut self.bytes, CRC, crc);
    }

    /// Checks everything that the header promises of a block read from `address`.
    pub fn verify(&self, kind: BlockKind, address: u64, uuid: &Uuid) -> Result<(), Corrupt> {
        self.verify_any_kind(address, uuid)?;
        self.expect(kind)
    }

    /// As [`Block::verify`], for a reader that does not know the kind yet.
    pub fn verify_any_kind(&self, address: u64, uuid: &Uuid) -> Result<(), Corrupt> {
        self.verify_content(address)?;
        if self.uuid() != *uuid {
            return Err(Corrupt::Uuid { address });
        }
        Ok(())
    }

    /// Checks magic, checksum and address only: what can be said before the UUID is known.
    pub fn verify_content(&self, address: u64) -> Result<(), Corrupt> {
        if !self.has_magic() {
            return Err(Corrupt::Magic { address });
        }
        if le::get_u32(&self.bytes, CRC) != self.checksum() {
            return Err(Corrupt::Checksum { address });
        }
        if self.address() != address {
            return Err(Corrupt::Address { address, found: self.address() });
        }
        Ok(())
    }

    /// Checks the kind of a block that was verified before.
    #[inline]
    pub fn expect(&self, kind: BlockKind) -> Result<(), Corrupt> {
        if self.kind() == kind as u16 { Ok(()) } else { Err(self.other_kind(kind)) }
    }

    #[cold]
    fn other_kind(&self, kind: BlockKind) -> Corrupt {
        Corrupt::Kind { address: self.address(), found: self.kind(), expected: kind as u16 }
    }

    fn checksum(&self) -> u32 {
        let crc = crc32c::crc32c(&self.bytes[..CRC]);
        let crc = crc32c::crc32c_append(crc, &[0; 4]);
        crc32c::crc32c_append(crc, &self.bytes[CRC + 4..])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: Uuid = [7; 16];

    #[test]
    fn a_sealed_block_verifies_and_any_flipped_bit_is_found() {
        let mut block = Block::new(BlockKind::Node, 42, &ID);
        block.bytes_mut()[100] = 9;
        block.seal(5);
        assert_eq!(block.verify(BlockKind::Node, 42, &ID), Ok(()));
        for byte in (0..BLOCK_SIZE).step_by(37) {
            let mut bad = block.clone();
            bad.bytes_mut()[byte] ^= 0x10;
            assert!(bad.verify(BlockKind::Node, 42, &ID).is_err(), "byte {byte}");
        }
    }

    #[test]
    fn a_reduced_block_verifies_and_has_nothing_else() {
        let mut block = Block { bytes: [0xaa; BLOCK_SIZE] };
        block.bytes[..KIND_FIELDS].copy_from_slice(&Block::new(BlockKind::State, 42, &ID).bytes[..KIND_FIELDS]);
        block.seal(5);
        let reduced = block.reduced_to(&[64..80, 90..91]);
        assert_eq!((reduced.verify(BlockKind::State, 42, &ID), reduced.sequence()), (Ok(()), 5));
        let left: Vec<usize> = (KIND_FIELDS..BLOCK_SIZE).filter(|at| reduced.bytes[*at] != 0).collect();
        assert_eq!(left, (64..80).chain(90..91).collect::<Vec<_>>());
    }

    #[test]
    fn each_promise_of_the_header_has_its_own_error() {
        let mut block = Block::new(BlockKind::Node, 42, &ID);
        block.seal(1);
        assert!(matches!(block.verify(BlockKind::Node, 43, &ID), Err(Corrupt::Address { .. })));
        assert!(matches!(block.verify(BlockKind::State, 42, &ID), Err(Corrupt::Kind { .. })));
        assert!(matches!(block.verify(BlockKind::Node, 42, &[8; 16]), Err(Corrupt::Uuid { .. })));
        assert!(matches!(Block::from_bytes(&[0; 4096]).verify(BlockKind::Node, 42, &ID), Err(Corrupt::Magic { .. })));
    }
}
