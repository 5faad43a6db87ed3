//! Bitmaps of groups, and the counts of their bits: descriptors, and the counters of the volume.

use gpunvme_layout::geometry::STATE;
use gpunvme_layout::group::{self, Descriptor};
use gpunvme_layout::{Block, BlockKind, Corrupt};

use crate::error::Attempt;
use crate::volume::meta::Blocks;
use crate::volume::op::Op;

pub(in crate::volume) fn descriptor(blocks: &impl Blocks, group: u64) -> Attempt<Descriptor> {
    #[cfg(test)]
    tests::LOOKED_AT.set(tests::LOOKED_AT.get() + 1);
    let (address, index) = blocks.meta().geometry.descriptor(group);
    Ok(Descriptor::load(blocks.block(address, BlockKind::Descriptors)?, index))
}

/// The descriptors of many groups, one after the other: each of their blocks is looked up once.
pub(super) struct Descriptors<'a, B> {
    blocks: &'a B,
    last: Option<(u64, &'a Block)>,
}

impl<'a, B: Blocks> Descriptors<'a, B> {
    pub fn of(blocks: &'a B) -> Self {
        Descriptors { blocks, last: None }
    }

    pub fn get(&mut self, group: u64) -> Attempt<Descriptor> {
        #[cfg(test)]
        tests::LOOKED_AT.set(tests::LOOKED_AT.get() + 1);
        let (address, index) = self.blocks.meta().geometry.descriptor(group);
        let block = match self.last {
            Some((last, block)) if last == address => block,
            _ => self.blocks.block(address, BlockKind::Descriptors)?,
        };
        self.last = Some((address, block));
        Ok(Descriptor::load(block, index))
    }
}

/// The bitmap of a group; none when nothing was allocated in it yet.
pub(in crate::volume) fn bitmap(blocks: &impl Blocks, group: u64) -> Attempt<Option<&Block>> {
    if !descriptor(blocks, group)?.initialized {
        return Ok(None);
    }
    blocks.block(blocks.meta().geometry.bitmap(group), BlockKind::Bitmap).map(Some)
}

impl Op<'_> {
    /// The bitmap of a group, to change; made when there was none.
    pub(super) fn bitmap_mut(&mut self, group: u64) -> Attempt<&mut Block> {
        let geometry = self.meta().geometry;
        if !descriptor(self, group)?.initialized {
            self.create(group::new_bitmap(&geometry, group, &self.meta().uuid.clone()))?;
            self.change_descriptor(group, |d| {
                d.initialized = true;
                Some(())
            })?;
        }
        self.block_mut(geometry.bitmap(group), BlockKind::Bitmap)
    }

    /// Changes a descriptor; `change` returns none when its counters cannot be true.
    pub(super) fn change_descriptor(&mut self, group: u64, change: impl FnOnce(&mut Descriptor) -> Option<()>) -> Attempt<()> {
        let (address, index) = self.meta().geometry.descriptor(group);
        let mut descriptor = descriptor(self, group)?;
        let nodes = descriptor.free_metadata;
        if change(&mut descriptor).is_none() {
            return Err(Corrupt::Field { address, what: "descriptor does not agree with its bitmap" }.into());
        }
        self.nodes_freed(i64::from(descriptor.free_metadata) - i64::from(nodes));
        descriptor.store(self.block_mut(address, BlockKind::Descriptors)?, index);
        let behind = self.meta().geometry.groups - 1 - group;
        let hints = self.hints();
        if descriptor.free_chunks > 0 {
            hints.first_chunk = hints.first_chunk.min(group);
            hints.full_behind = hints.full_behind.min(behind);
        } else {
            hints.first_chunk += u64::from(hints.first_chunk == group);
            hints.full_behind += u64::from(hints.full_behind == behind);
        }
        Ok(())
    }

    /// Counts blocks, and chunks that are wholly free now, that were not free.
    pub(super) fn count_freed(&mut self, blocks: u64, chunks: u64) -> Attempt<()> {
        let geometry = self.meta().geometry;
        let state = self.state_mut();
        state.free_blocks += blocks;
        state.free_chunks += chunks;
        if state.free_blocks > geometry.data_blocks() || state.free_chunks > geometry.chunks {
            // Stored, it would be a state that no mount accepts.
            return Err(Corrupt::Field { address: STATE, what: "more is free than the volume has" }.into());
        }
        Ok(())
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::cell::Cell;

    thread_local! {
        /// Descriptors that were looked at.
        pub static LOOKED_AT: Cell<u64> = const { Cell::new(0) };
        /// Places in bitmaps that were looked at.
        pub static PLACES: Cell<u64> = const { Cell::new(0) };
    }
}
