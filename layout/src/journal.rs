//! Transactions in the journal: descriptor blocks, then one image for each metadata block that the
//! transaction changed.
//!
//! Each image is the whole block as it will stand at home, sealed with its own address and with
//! the sequence of this transaction. So a transaction is in the journal exactly when its
//! descriptors and all its images verify; there is no commit block, and a torn one is simply not
//! there. Sequences are never used twice, so an old image cannot pass for a new one.
//!
//! | offset | size | field of a descriptor block |
//! | --- | --- | --- |
//! | 0 | 64 | block header; address of the block in the journal, sequence of the transaction |
//! | 64 | 4 | images of the whole transaction |
//! | 68 | 4 | index of this descriptor block |
//! | 72 | 8 | reserved, zero |
//! | 80 | 8 each | home addresses of the images, 502 a block |

use std::ops::Range;

use crate::block::{BLOCK_SIZE, BlockKind, Uuid};
use crate::{Block, COUNT_MAX, Corrupt, Geometry, le};

/// Home addresses in one descriptor block.
pub const ADDRESSES_PER_BLOCK: usize = (BLOCK_SIZE - ADDRESSES) / 8;

const IMAGES: usize = 64;
const INDEX: usize = 68;
const ADDRESSES: usize = 80;

/// Blocks that a transaction of that many images takes in the journal.
pub fn transaction_blocks(images: u64) -> u64 {
    images + descriptor_blocks(images)
}

/// Descriptor blocks of a transaction of that many images.
pub fn descriptor_blocks(images: u64) -> u64 {
    images.div_ceil(ADDRESSES_PER_BLOCK as u64)
}

/// Bytes of a descriptor block that mean something, besides the header.
pub fn descriptor_fields(block: &Block) -> [Range<usize>; 2] {
    let (images, index) = (le::get_u32(block.bytes(), IMAGES), le::get_u32(block.bytes(), INDEX));
    let before = (index as usize).saturating_mul(ADDRESSES_PER_BLOCK);
    let here = (images as usize).saturating_sub(before).min(ADDRESSES_PER_BLOCK);
    [IMAGES..INDEX + 4, ADDRESSES..ADDRESSES + here * 8]
}

/// Address on the volume of block `position` of the journal; positions wrap around.
pub fn address(geometry: &Geometry, position: u64) -> u64 {
    geometry.journal + position % geometry.journal_blocks
}

/// The descriptor blocks of a transaction that begins at `position` of the journal, sealed.
pub fn encode_descriptors(geometry: &Geometry, position: u64, sequence: u64, homes: &[u64], uuid: &Uuid) -> Vec<Block> {
    homes
        .chunks(ADDRESSES_PER_BLOCK)
        .enumerate()
        .map(|(index, part)| {
            let mut block = Block::new(BlockKind::Journal, address(geometry, position + index as u64), uuid);
            le::put_u32(block.bytes_mut(), IMAGES, homes.len() as u32);
            le::put_u32(block.bytes_mut(), INDEX, index as u32);
            for (i, home) in part.iter().enumerate() {
                le::put_u64(block.bytes_mut(), ADDRESSES + i * 8, *home);
            }
            block.seal(sequence);
            block
        })
        .collect()
}

/// Reads descriptor block `index` of transaction `sequence` at `position` of the journal: the
/// number of images of the whole transaction, and the home addresses in this block.
///
/// # Errors
/// The block is not that descriptor: the transaction is not in the journal.
pub fn decode_descriptor(
    geometry: &Geometry,
    position: u64,
    sequence: u64,
    index: u64,
    block: &Block,
    uuid: &Uuid,
) -> Result<(u64, Vec<u64>), Corrupt> {
    let at = address(geometry, position);
    block.verify(BlockKind::Journal, at, uuid)?;
    let images = u64::from(le::get_u32(block.bytes(), IMAGES));
    let fits = images > 0 && transaction_blocks(images) <= geometry.journal_blocks;
    if sequence > COUNT_MAX || block.sequence() != sequence || u64::from(le::get_u32(block.bytes(), INDEX)) != index || !fits {
        return Err(Corrupt::Field { address: at, what: "not the descriptor of the next transaction" });
    }
    let here = (images - (index * ADDRESSES_PER_BLOCK as u64).min(images)).min(ADDRESSES_PER_BLOCK as u64);
    Ok((images, (0..here as usize).map(|i| le::get_u64(block.bytes(), ADDRESSES + i * 8)).collect()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptors_survive_the_round_trip() {
        let geometry = Geometry::new(1 << 20, 4096).unwrap();
        let homes: Vec<u64> = (0..1200).map(|i| i * 3).collect();
        let blocks = encode_descriptors(&geometry, 4095, 8, &homes, &[1; 16]);
        assert_eq!(blocks.len() as u64, descriptor_blocks(1200));
        let mut found = Vec::new();
        for (i, block) in blocks.iter().enumerate() {
            let i = i as u64;
            let (images, part) = decode_descriptor(&geometry, 4095 + i, 8, i, block, &[1; 16]).unwrap();
            assert_eq!(images, 1200);
            found.extend(part);
            assert!(decode_descriptor(&geometry, 4095 + i, 9, i, block, &[1; 16]).is_err());
            assert!(decode_descriptor(&geometry, 4094 + i, 8, i, block, &[1; 16]).is_err());
        }
        assert_eq!(found, homes);
    }
}
