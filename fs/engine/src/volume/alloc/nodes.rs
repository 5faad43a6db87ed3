//! Blocks for the nodes of the tree, and the chunks of metadata that they lie in.

use gpunvme_layout::Corrupt;
use gpunvme_layout::geometry::CHUNK_BLOCKS;
use gpunvme_layout::group::{self, ChunkKind};

use super::bitmaps::{Descriptors, bitmap, descriptor};
use super::room::NODES_LEFT;
use crate::error::{Attempt, Fail, Stall};
use crate::volume::meta::Blocks;
use crate::volume::op::Op;
use crate::volume::promised::NODE_PARTS;

/// The empty metadata chunks of a group, each by its first block.
pub(crate) fn empty_metadata_chunks(blocks: &impl Blocks, group: u64) -> Attempt<Vec<u64>> {
    if u64::from(descriptor(blocks, group)?.free_metadata) < CHUNK_BLOCKS {
        return Ok(Vec::new());
    }
    let Some(bitmap) = bitmap(blocks, group)? else { return Ok(Vec::new()) };
    let geometry = &blocks.meta().geometry;
    let is_empty = |chunk: &u64| group::kind(bitmap, *chunk) == ChunkKind::Metadata && group::chunk_used(bitmap, *chunk) == 0;
    let empty = (0..geometry.group_chunks(group)).filter(is_empty);
    Ok(empty.map(|chunk| geometry.group_start(group) + chunk * CHUNK_BLOCKS).collect())
}

impl Op<'_> {
    /// Fails when there is no room for operations that add names or attributes. They take no chunk
    /// that is promised to data, and no node that was promised, or is of the margin.
    pub fn room_for_names(&mut self) -> Attempt<()> {
        let meta = self.meta();
        let blocks = meta.promised.blocks + (meta.kept_chunks() + 1) * CHUNK_BLOCKS;
        if meta.breakable_chunks() > 0 && meta.state.free_blocks >= blocks {
            return Ok(());
        }
        let (promised, margin) = (meta.promised.parts.div_ceil(NODE_PARTS), meta.margin_nodes);
        let free = self.free_nodes()?;
        if free >= promised + NODES_LEFT + margin {
            return Ok(());
        }
        // Writes in flight give back what they do not need, which is most.
        let others_end = promised > 0 && free >= NODES_LEFT + margin;
        Err(match self.meta() {
            _ if others_end => Fail::Stall(Stall::Nodes),
            // Files that grow have it, and give it back.
            meta if meta.ahead > 0 => Fail::Stall(Stall::Reuse),
            meta => meta.no_chunk(),
        })
    }

    /// Allocates a block for a node of the tree.
    pub fn allocate_node(&mut self) -> Attempt<u64> {
        let has_none = self.meta().free_nodes == Some(0);
        let groups = if has_none { 0 } else { self.meta().geometry.groups };
        let first = self.hints().node;
        let mut descriptors = Descriptors::of(&*self);
        for i in 0..groups {
            let group = (first + i) % groups;
            if descriptors.get(group)?.free_metadata > 0 {
                return self.take_node(group);
            }
        }
        let group = self.new_metadata_chunk()?;
        self.take_node(group)
    }

    /// Frees a block of the tree. It can be reused for metadata at once: its images reach home in
    /// the order of the journal.
    pub fn release_node(&mut self, address: u64) -> Attempt<()> {
        self.forget_places();
        self.nodes_taken -= 1;
        let (group, at) = self.meta().geometry.locate(address);
        let bitmap = self.bitmap_mut(group)?;
        if group::kind(bitmap, at / CHUNK_BLOCKS) != ChunkKind::Metadata || !group::is_used(bitmap, at) {
            return Err(Corrupt::Field { address, what: "node lies in a block that is not allocated to metadata" }.into());
        }
        group::set(bitmap, at, 1, false);
        let emptied = group::chunk_used(bitmap, at / CHUNK_BLOCKS) == 0;
        self.change_descriptor(group, |d| {
            d.free_metadata = d.free_metadata.checked_add(1)?;
            Some(())
        })?;
        if emptied {
            let chunk = self.meta().geometry.group_start(group) + at / CHUNK_BLOCKS * CHUNK_BLOCKS;
            self.emptied.push(chunk);
        }
        Ok(())
    }

    /// Gives an empty metadata chunk, by its first block, back to all uses. No image of it may be
    /// in the live journal.
    pub fn free_metadata_chunk(&mut self, chunk: u64) -> Attempt<()> {
        let (group, at) = self.meta().geometry.locate(chunk);
        let number = at / CHUNK_BLOCKS;
        let bitmap = self.bitmap_mut(group)?;
        if group::kind(bitmap, number) != ChunkKind::Metadata || group::chunk_used(bitmap, number) != 0 {
            return Ok(());
        }
        group::set_kind(bitmap, number, ChunkKind::Free);
        self.change_descriptor(group, |d| {
            d.free_metadata = d.free_metadata.checked_sub(CHUNK_BLOCKS as u16)?;
            d.free_blocks = d.free_blocks.checked_add(CHUNK_BLOCKS as u16)?;
            d.free_chunks = d.free_chunks.checked_add(1)?;
            Some(())
        })?;
        self.count_freed(CHUNK_BLOCKS, 1)
    }

    fn take_node(&mut self, group: u64) -> Attempt<u64> {
        self.hints().node = group;
        self.nodes_taken += 1;
        let chunks = self.meta().geometry.group_chunks(group);
        let bitmap = self.bitmap_mut(group)?;
        let free = (0..chunks)
            .filter(|chunk| group::kind(bitmap, *chunk) == ChunkKind::Metadata)
            .find_map(|chunk| group::find_run(bitmap, chunk * CHUNK_BLOCKS, (chunk + 1) * CHUNK_BLOCKS, false));
        let Some((at, _)) = free else {
            let address = self.meta().geometry.bitmap(group);
            return Err(Corrupt::Field { address, what: "bitmap does not agree with its descriptor" }.into());
        };
        group::set(bitmap, at, 1, true);
        self.change_descriptor(group, |d| {
            d.free_metadata = d.free_metadata.checked_sub(1)?;
            Some(())
        })?;
        Ok(self.meta().geometry.group_start(group) + at)
    }

    /// Makes a free chunk one for metadata, and returns its group.
    fn new_metadata_chunk(&mut self) -> Attempt<u64> {
        let Some(start) = self.meta().free_chunk()? else { return Err(self.meta().no_space()) };
        self.margin_chunks += u64::from(self.meta().unbroken_chunks() <= self.meta().chunk_margin());
        let (group, at) = self.meta().geometry.locate(start);
        group::set_kind(self.bitmap_mut(group)?, at / CHUNK_BLOCKS, ChunkKind::Metadata);
        self.change_descriptor(group, |d| {
            d.free_chunks = d.free_chunks.checked_sub(1)?;
            d.free_blocks = d.free_blocks.checked_sub(CHUNK_BLOCKS as u16)?;
            d.free_metadata = d.free_metadata.checked_add(CHUNK_BLOCKS as u16)?;
            Some(())
        })?;
        let state = self.state_mut();
        state.free_blocks = state.free_blocks.saturating_sub(CHUNK_BLOCKS);
        state.free_chunks = state.free_chunks.saturating_sub(1);
        Ok(group)
    }
}

#[cfg(test)]
mod tests {
    use super::super::bitmaps::tests::LOOKED_AT;
    use gpunvme_layout::geometry::DESCRIPTORS_PER_BLOCK;
    use gpunvme_layout::{BLOCK_SIZE, Block};

    use super::*;
    use crate::error::FsError;
    use crate::volume::Promised;
    use crate::volume::format::tests::volume;
    use crate::volume::io::write_block;

    #[test]
    fn names_wait_for_nodes_that_writes_in_flight_give_back() {
        let volume = volume(256 << 20);
        volume.meta.write().state.free_chunks = 0;
        let free = volume.wait(|| volume.begin()?.free_nodes()).unwrap();
        let promised = Promised { blocks: 0, parts: (free - NODES_LEFT + 1) * NODE_PARTS };
        volume.meta.write().promised = promised;
        let room = || volume.begin().unwrap().room_for_names();
        assert!(matches!(room(), Err(Fail::Stall(Stall::Nodes))));
        volume.forget_promise(promised);
        assert!(room().is_ok());
    }

    #[test]
    fn who_looks_at_all_groups_begins_anew_a_few_times() {
        let volume = volume(64 << 40);
        assert!(volume.superblock().geometry().descriptor_blocks().count() > 1000);
        let mut attempts = 0;
        let free = volume.wait(|| {
            attempts += 1;
            volume.begin()?.free_nodes()
        });
        assert_eq!(free.unwrap(), CHUNK_BLOCKS - 1);
        assert!(attempts < 8, "{attempts} attempts");
    }

    #[test]
    fn a_damaged_descriptor_block_concerns_those_who_need_it() {
        let volume = volume(1 << 40);
        let blocks: Vec<u64> = volume.superblock().geometry().descriptor_blocks().map(|(address, _)| address).collect();
        write_block(&volume.io, &Block::from_bytes(&[0; BLOCK_SIZE]), blocks[9]).unwrap();
        let look_at = |group| volume.wait(|| descriptor(&*volume.meta.read(), group).map(drop));
        look_at(8 * DESCRIPTORS_PER_BLOCK).unwrap();
        look_at(10 * DESCRIPTORS_PER_BLOCK).unwrap();
        assert!(matches!(look_at(9 * DESCRIPTORS_PER_BLOCK), Err(FsError::Corrupt(_))));
    }

    #[test]
    fn whether_names_have_room_is_known_without_looking_at_all_groups() {
        let volume = volume(4 << 40);
        let groups = volume.superblock().geometry().groups;
        assert!(groups > 30_000);
        // Everything is full, but for a few nodes.
        volume.meta.write().state.free_chunks = 0;
        let nodes = volume.wait(|| {
            let mut op = volume.begin()?;
            let all = op.free_nodes()?;
            (NODES_LEFT..all).try_for_each(|_| op.allocate_node().map(drop))?;
            op.finish();
            Ok(all)
        });
        assert_eq!(nodes.unwrap(), CHUNK_BLOCKS - 1);
        let room = || volume.wait(|| volume.begin()?.room_for_names());
        assert!(room().is_ok());
        LOOKED_AT.set(0);
        for _ in 0..100 {
            // A block that is put back counts as if it had never been taken.
            let _ = volume.begin().unwrap().allocate_node().unwrap();
            assert!(room().is_ok());
        }
        let last = volume.wait(|| {
            let mut op = volume.begin()?;
            let last = op.allocate_node()?;
            op.finish();
            Ok(last)
        });
        assert!(matches!(room(), Err(FsError::NoSpace)));
        assert!(LOOKED_AT.get() < 1000, "{} descriptors of {groups} groups", LOOKED_AT.get());
        volume
            .wait(|| {
                let mut op = volume.begin()?;
                op.release_node(*last.as_ref().unwrap())?;
                op.finish();
                Ok(())
            })
            .unwrap();
        assert!(room().is_ok());
    }
}
