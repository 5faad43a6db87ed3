//! Room: what is promised to writes before they are accepted, and what is kept for metadata.
//!
//! A write that was accepted can be written back. So a promise has two halves: the blocks that its
//! data needs, and the nodes that its extents need, because each write into a hole, or into the
//! middle of preallocated blocks, adds items to the tree. Two things hold at any time:
//!
//! 1. Free nodes, and the blocks of the free chunks that no data is on its way to, are at least as
//!    many as the promised nodes: data breaks no chunk that these need
//!    ([`Meta::chunks_for_promised_data`]).
//! 2. Free blocks beyond those chunks are at least as many as the promised blocks.
//!
//! Promised nodes are those of the worst case, of which an operation seldom needs any. They count
//! until the write is over, so that where few are left, writes wait for earlier ones before they
//! are refused ([`Stall::Nodes`]).

use gpunvme_layout::geometry::CHUNK_BLOCKS;

use super::bitmaps::Descriptors;
use crate::error::{Attempt, Fail, FsError, Stall};
use crate::volume::meta::{Blocks, Meta};
use crate::volume::op::Op;
use crate::volume::promised::{NODE_PARTS, Promised, Splits};

/// Free nodes, beside those that are promised, with which names can still be added when no chunk
/// may be taken, and writes accepted: far more than one operation needs. The last ones are left to
/// operations that are never refused: deletions.
pub(super) const NODES_LEFT: u64 = 128;
/// Blocks of files to one node that is kept for their extents. Where all blocks are preallocated,
/// and every other one is written in the worst order, a node of extents has 56, and an inner node
/// has 84 of those.
const BLOCKS_PER_NODE: u64 = 54;

impl Meta {
    /// Wholly free chunks that data leaves to metadata as long as it finds room elsewhere: they
    /// allow written data to be mapped, and a deletion to go on. A node for each
    /// [`BLOCKS_PER_NODE`] blocks; volumes of more than 7 GiB, which are unlikely to need so many,
    /// keep 128 MiB.
    pub(super) fn chunk_margin(&self) -> u64 {
        self.geometry.chunks.div_ceil(BLOCKS_PER_NODE).min(64)
    }

    /// Wholly free chunks that no data is on its way to.
    pub(super) fn unbroken_chunks(&self) -> u64 {
        self.state.free_chunks.saturating_sub(self.reserved.free())
    }

    /// Wholly free chunks beyond the margin that data leaves to names.
    fn chunks_for_names(&self) -> u64 {
        self.chunk_margin().div_ceil(2)
    }

    /// Blocks that can still be promised to data, when the writes in flight have given back the
    /// nodes that they did not need. None where there is no node left for a further extent: free
    /// blocks lie in between those of files then.
    pub fn available(&self) -> u64 {
        let one = self.parts(Splits { runs: 1, items: 1 });
        if self.free_nodes.is_some() && !self.fits(1, one, NODES_LEFT, self.state.free_chunks) {
            return 0;
        }
        self.state.free_blocks.saturating_sub(self.promised.blocks + self.kept_from_data())
    }

    /// Blocks that data could have if it needed all that was promised, and all emptied chunks.
    pub fn attainable(&self) -> u64 {
        (self.state.free_blocks + self.emptied.len() as u64 * CHUNK_BLOCKS).saturating_sub(self.kept_from_data())
    }

    /// Blocks that data could have if there were no other.
    pub fn most_for_data(&self) -> u64 {
        self.geometry.data_blocks().saturating_sub(self.kept_from_data())
    }

    fn kept_from_data(&self) -> u64 {
        (self.chunk_margin() + self.chunks_for_names()) * CHUNK_BLOCKS
    }

    /// Wholly free chunks that are kept for metadata: the margin, or as many as were promised.
    pub(super) fn kept_chunks(&self) -> u64 {
        self.chunk_margin().max(self.chunks_for_nodes(self.promised.parts, NODES_LEFT))
    }

    /// Free chunks that data may break as long as it finds room elsewhere.
    pub(super) fn breakable_chunks(&self) -> u64 {
        self.unbroken_chunks().saturating_sub(self.kept_chunks())
    }

    /// Free chunks that data may break when all else is full: they were promised to it.
    pub(super) fn chunks_for_promised_data(&self) -> u64 {
        self.unbroken_chunks().saturating_sub(self.chunks_for_nodes(self.promised.parts, 0))
    }

    /// Chunks that have to become metadata's for so many nodes, beside those that it has.
    fn chunks_for_nodes(&self, parts: u64, more: u64) -> u64 {
        let nodes = parts.div_ceil(NODE_PARTS) + more;
        nodes.saturating_sub(self.free_nodes.unwrap_or(0)).div_ceil(CHUNK_BLOCKS)
    }

    /// Promises blocks to data, and nodes to what mapping it does to the tree.
    ///
    /// # Errors
    /// [`FsError::NoSpace`]; [`Stall::Nodes`] where writes in flight have to end first.
    pub fn promise(&mut self, blocks: u64, splits: Splits) -> Attempt<Promised> {
        let parts = self.parts(splits);
        if self.has_room(blocks, parts, NODES_LEFT).is_err() {
            self.free_nodes = Some(self.count_free_nodes()?);
            self.has_room(blocks, parts, NODES_LEFT)?;
        }
        self.promised.blocks += blocks;
        self.promised.parts += parts;
        Ok(Promised { blocks, parts })
    }

    /// The nodes that splits may take, in parts.
    fn parts(&self, splits: Splits) -> u64 {
        // A split of a leaf may split the nodes above it, up to the root, which gets one above.
        let splits_up = u64::from(self.state.level) + 2;
        splits.runs * 2 * splits_up * NODE_PARTS + splits.items
    }

    /// Notes that an operation has made chunks of the margin metadata's, and that it took so many
    /// nodes for extents. The margin is whole again when as many chunks are free.
    pub fn margin_changes(&mut self, chunks: u64, taken: u64) {
        let is_whole = self.unbroken_chunks() >= self.chunk_margin();
        let left = (self.margin_nodes + chunks * CHUNK_BLOCKS).saturating_sub(taken);
        self.margin_nodes = if is_whole { 0 } else { left };
    }

    /// Passes when so much can be promised beside what is, and so many nodes are left then.
    fn has_room(&self, blocks: u64, parts: u64, left: u64) -> Attempt<()> {
        if self.fits(blocks, self.promised.parts + parts, left, self.unbroken_chunks()) {
            return Ok(());
        }
        let others_end = self.fits(blocks, parts, left, self.state.free_chunks);
        Err(if others_end { Fail::Stall(Stall::Nodes) } else { self.no_chunk() })
    }

    fn fits(&self, blocks: u64, parts: u64, left: u64, free_chunks: u64) -> bool {
        let chunks = self.chunks_for_nodes(parts, left);
        let kept = if blocks > 0 { chunks.max(self.chunk_margin()) + self.chunks_for_names() } else { chunks };
        chunks <= free_chunks && self.promised.blocks + blocks + kept * CHUNK_BLOCKS <= self.state.free_blocks
    }

    /// Free nodes in all chunks of metadata: counted once, and kept up to date.
    pub(super) fn count_free_nodes(&self) -> Attempt<u64> {
        if let Some(nodes) = self.free_nodes {
            return Ok(nodes);
        }
        let (mut nodes, mut descriptors) = (0, Descriptors::of(self));
        for group in 0..self.geometry.groups {
            nodes += u64::from(descriptors.get(group)?.free_metadata);
        }
        Ok(nodes)
    }

    /// No block can be had: for now, when some were freed that cannot be reused yet.
    pub(super) fn no_space(&self) -> Fail {
        if self.pending > 0 { Fail::Stall(Stall::Reuse) } else { self.no_chunk() }
    }

    /// No chunk can be had: for now, when some emptied that a checkpoint gives back, or where
    /// earlier mounts left something to be freed.
    pub fn no_chunk(&self) -> Fail {
        match () {
            () if !self.emptied.is_empty() => Fail::Stall(Stall::Checkpoint),
            () if self.orphans.next().is_some() => Fail::Stall(Stall::Orphans),
            () => FsError::NoSpace.into(),
        }
    }
}

impl Op<'_> {
    /// Passes when what the operation made of the tree, without a promise, leaves what was promised
    /// to others. Asked before the operation is finished.
    pub fn leaves_room(&mut self) -> Attempt<()> {
        if self.nodes_taken <= 0 {
            return Ok(());
        }
        self.free_nodes()?;
        self.meta().has_room(0, 0, NODES_LEFT / 2)
    }

    /// Free nodes in all chunks of metadata.
    pub fn free_nodes(&mut self) -> Attempt<u64> {
        let nodes = self.meta().count_free_nodes()?;
        self.set_free_nodes(Some(nodes));
        Ok(nodes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::volume::format::tests::volume;
    use crate::volume::promised::Promised;

    #[test]
    fn what_others_will_give_back_can_be_attained() {
        let volume = volume(250 << 20);
        let available = volume.usage().available;
        assert!(volume.may_have(available).is_ok() && volume.may_have(available + 1).is_err());
        // Promised to a write that needs less, as it turns out.
        volume.meta.write().promised = Promised { blocks: 1000, parts: 0 };
        assert!(volume.usage().available < available && volume.may_have(available).is_ok());
        // Full of metadata's chunks, one of which has become empty.
        let mut meta = volume.meta.write();
        (meta.promised, meta.state.free_blocks) = (Promised::default(), meta.kept_from_data());
        assert_eq!(meta.attainable(), 0);
        meta.emptied.push((0, 1));
        assert_eq!(meta.attainable(), CHUNK_BLOCKS);
    }
}
