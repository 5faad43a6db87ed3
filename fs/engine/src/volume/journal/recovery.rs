//! Recovery: reads the live transactions of a journal that was not closed.

use std::collections::BTreeMap;

use gpunvme_blockdev::Io;
use gpunvme_layout::geometry::{ANCHORS, CHUNK_BLOCKS};
use gpunvme_layout::group::{self, ChunkKind};
use gpunvme_layout::{Anchor, Block, BlockKind, Corrupt, Geometry, Superblock, journal};

use super::anchors::{Anchors, read_anchors};
use super::ring::{Journal, read_ring};
use crate::error::FsError;
use crate::volume::meta::TRANSACTION_MAX;

/// Sequences that recovery leaves out, so that a torn transaction's images can never complete a
/// later one.
pub(crate) const SEQUENCE_GAP: u64 = 1024;
/// Blocks that are read in one piece when the journal is searched.
const PIECE: u64 = 256;

/// Result of recovery.
pub(crate) struct Recovered {
    /// Journal to go on with.
    pub journal: Journal,
    /// Anchors to go on with.
    pub anchors: Anchors,
    /// Sequence of the next transaction.
    pub sequence: u64,
    /// The latest image of each block in the live journal.
    pub images: BTreeMap<u64, Block>,
    /// Transactions that were found.
    pub transactions: u64,
    /// A transaction that is complete and makes no sense, or that the device cannot read: it and
    /// later ones were not taken.
    pub stopped: Option<Corrupt>,
}

/// Reads the live transactions. Writes nothing: the images are put into the cache, and a
/// checkpoint writes them home.
///
/// # Errors
/// A transaction makes no sense, or is missing although a later one is there, or a block cannot be
/// read that may be one's: what was durable would be lost without a word.
pub(crate) fn recover(io: &Io, superblock: &Superblock) -> Result<Recovered, FsError> {
    let anchors = read_anchors(io, superblock)?;
    let damaged = ANCHORS.into_iter().zip(&anchors).find_map(|(address, anchor)| anchor.is_err().then_some(address));
    let anchor = Anchor::choose(anchors)?;
    let mut recovered = recover_from(io, superblock, &anchor)?;
    if let Some(error) = recovered.stopped {
        return Err(error.into());
    }
    if damaged.is_some() {
        recovered.leave_out_data(&superblock.geometry());
    }
    // Where a power cut tore an anchor, the other one knows all but the transaction that was cut
    // with it. Where it was damaged later, the other one may be of a time long gone.
    let next = recovered.sequence - SEQUENCE_GAP;
    if let Some(address) = damaged
        && transactions(io, superblock, Err)?.range(next + 1..).next().is_some()
    {
        let what = "an anchor is damaged, and the other one is older than the journal";
        return Err(Corrupt::Field { address, what }.into());
    }
    if !anchor.clean && has_hole(io, superblock, &recovered)? {
        let geometry = superblock.geometry();
        let address = geometry.journal + recovered.journal.head % geometry.journal_blocks;
        let what = "a transaction of the journal is damaged or gone, and the one after it is there";
        return Err(Corrupt::Field { address, what }.into());
    }
    Ok(recovered)
}

/// Where the descriptors of transactions lie in the journal, by sequence. `unreadable` is told of
/// each block that the device cannot read, and says whether to go on.
pub(crate) fn transactions(
    io: &Io,
    superblock: &Superblock,
    mut unreadable: impl FnMut(Corrupt) -> Result<(), Corrupt>,
) -> Result<BTreeMap<u64, u64>, FsError> {
    let geometry = superblock.geometry();
    let mut found = BTreeMap::new();
    for start in (0..geometry.journal_blocks).step_by(PIECE as usize) {
        let blocks = read_ring(io, &geometry, start, PIECE.min(geometry.journal_blocks - start))?;
        for (position, block) in (start..).zip(blocks) {
            let block = match block {
                Ok(block) => block,
                Err(error) => {
                    unreadable(error)?;
                    continue;
                }
            };
            let sequence = block.sequence();
            if block.kind() == BlockKind::Journal as u16
                && journal::decode_descriptor(&geometry, position, sequence, 0, &block, &superblock.uuid).is_ok()
            {
                found.insert(sequence, position);
            }
        }
    }
    Ok(found)
}

/// Whether the transaction after the one that recovery did not find is there. A commit begins when
/// the one before is durable, so that a power cut leaves none behind the end; and it begins no
/// further away than the longest transaction reaches.
fn has_hole(io: &Io, superblock: &Superblock, recovered: &Recovered) -> Result<bool, FsError> {
    let geometry = superblock.geometry();
    let (head, after) = (recovered.journal.head, recovered.sequence - SEQUENCE_GAP + 1);
    let room = geometry.journal_blocks - (head - recovered.journal.tail);
    let end = head + room.min(journal::transaction_blocks(TRANSACTION_MAX) + 1);
    for start in (head..end).step_by(PIECE as usize) {
        for (position, block) in (start..).zip(read_ring(io, &geometry, start, PIECE.min(end - start))?) {
            if journal::decode_descriptor(&geometry, position, after, 0, &block?, &superblock.uuid).is_ok() {
                return Ok(true);
            }
        }
    }
    Ok(false)
}

/// Reads the live transactions from where that anchor says.
pub(crate) fn recover_from(io: &Io, superblock: &Superblock, anchor: &Anchor) -> Result<Recovered, FsError> {
    let geometry = superblock.geometry();
    let (mut head, mut sequence) = (anchor.tail, anchor.sequence);
    let mut images = BTreeMap::new();
    let (mut transactions, mut stopped) = (0, None);
    while !anchor.clean && head - anchor.tail < geometry.journal_blocks {
        let room = geometry.journal_blocks - (head - anchor.tail);
        let found = match read_transaction(io, superblock, &geometry, head, sequence, room) {
            Ok(Some(found)) => found,
            Ok(None) => break,
            Err(FsError::Corrupt(error)) => {
                stopped = Some(error);
                break;
            }
            Err(error) => return Err(error),
        };
        images.extend(found.images);
        head += found.blocks;
        sequence += 1;
        transactions += 1;
    }
    let journal = Journal { head, tail: anchor.tail, freed: Vec::new(), buffer: None };
    let anchors = Anchors::read(io, anchor.generation);
    Ok(Recovered { journal, anchors, sequence: sequence + SEQUENCE_GAP, images, transactions, stopped })
}

/// A transaction that is all in the journal.
pub(crate) struct Found {
    /// Its length in the journal.
    pub blocks: u64,
    /// Home addresses and images.
    images: Vec<(u64, Block)>,
}

/// The transaction `sequence` at `position`. None when it is not all there.
///
/// # Errors
/// Also [`FsError::Corrupt`]: it is there and makes no sense, or the device cannot read what is.
pub(crate) fn read_transaction(
    io: &Io,
    superblock: &Superblock,
    geometry: &Geometry,
    position: u64,
    sequence: u64,
    room: u64,
) -> Result<Option<Found>, FsError> {
    let mut homes = Vec::new();
    let (mut images, mut descriptors) = (0, 0);
    while descriptors == 0 || descriptors < journal::descriptor_blocks(images) {
        let block = read_ring(io, geometry, position + descriptors, 1)?.swap_remove(0)?;
        let decoded =
            journal::decode_descriptor(geometry, position + descriptors, sequence, descriptors, &block, &superblock.uuid);
        let Ok((count, part)) = decoded else { return Ok(None) };
        if descriptors > 0 && count != images {
            return Ok(None);
        }
        images = count;
        homes.extend(part);
        descriptors += 1;
    }
    if journal::transaction_blocks(images) > room {
        return Ok(None);
    }
    let blocks: Vec<Block> = read_ring(io, geometry, position + descriptors, images)?.into_iter().collect::<Result<_, _>>()?;
    for (home, block) in homes.iter().zip(&blocks) {
        if block.sequence() != sequence || block.verify_any_kind(*home, &superblock.uuid).is_err() {
            return Ok(None);
        }
        if !geometry.is_home(*home) {
            return Err(Corrupt::Field { address: *home, what: "journal holds an image of a block that has none" }.into());
        }
    }
    Ok(Some(Found { blocks: descriptors + images, images: homes.into_iter().zip(blocks).collect() }))
}

impl Recovered {
    /// Leaves out the images of nodes whose chunk is data's, or free, by the last transaction that
    /// was found. Where recovery began before the last checkpoint, a chunk may have been emptied
    /// and given back since. The transaction that did so came after all images of the chunk's
    /// nodes, and has one of its bitmap: without one, the chunk is metadata's as it was.
    pub fn leave_out_data(&mut self, geometry: &Geometry) {
        let is_data = |address: &u64| {
            let (group, at) = geometry.locate(*address);
            let bitmap = self.images.get(&geometry.bitmap(group)).filter(|block| block.expect(BlockKind::Bitmap).is_ok());
            bitmap.is_some_and(|bitmap| group::kind(bitmap, at / CHUNK_BLOCKS) != ChunkKind::Metadata)
        };
        let nodes = self.images.keys().copied().filter(|address| geometry.contains_data(*address, 1));
        for address in nodes.filter(is_data).collect::<Vec<u64>>() {
            self.images.remove(&address);
        }
    }

    /// Lets sequences and generations begin anew. The journal has to be erased, and both anchors
    /// written, before anything is committed.
    pub fn begin_again(&mut self, sequence: u64) {
        self.sequence = sequence;
        self.anchors.generation = 0;
    }
}
