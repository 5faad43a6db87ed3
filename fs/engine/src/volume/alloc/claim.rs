//! Claiming: makes reserved blocks a file's, and takes blocks from files, in bitmaps and counters.

use gpunvme_layout::Corrupt;
use gpunvme_layout::geometry::{CHUNK_BLOCKS, GROUP_BLOCKS};
use gpunvme_layout::group::{self, ChunkKind};

use crate::error::Attempt;
use crate::volume::meta::Blocks;
use crate::volume::op::Op;
use crate::volume::run::Run;

impl Op<'_> {
    /// Makes reserved blocks a file's.
    pub fn claim(&mut self, run: Run) -> Attempt<()> {
        self.each_group(run, |op, group, at, len| op.mark(group, at, len, true))?;
        self.claimed.push(run);
        Ok(())
    }

    /// Takes blocks from a file. They can be reused when the operation is durable and no transfer
    /// touches them any more.
    pub fn release(&mut self, run: Run) -> Attempt<()> {
        if !self.meta().geometry.contains_data(run.start, run.len) {
            return Err(Corrupt::Field { address: run.start, what: "extent lies outside the data area" }.into());
        }
        self.each_group(run, |op, group, at, len| op.mark(group, at, len, false))?;
        self.freed.push(run);
        Ok(())
    }

    fn each_group(&mut self, run: Run, mut each: impl FnMut(&mut Self, u64, u64, u64) -> Attempt<()>) -> Attempt<()> {
        let mut start = run.start;
        while start < run.end() {
            let (group, at) = self.meta().geometry.locate(start);
            let len = (run.end() - start).min(GROUP_BLOCKS - at);
            each(self, group, at, len)?;
            start += len;
        }
        Ok(())
    }

    /// Marks data blocks of one group as in use or free, with all that counts them.
    fn mark(&mut self, group: u64, at: u64, len: u64, used: bool) -> Attempt<()> {
        let address = self.meta().geometry.bitmap(group);
        let bitmap = self.bitmap_mut(group)?;
        let expected = group::find_run(bitmap, at, at + len, !used);
        if expected != Some((at, len)) {
            return Err(Corrupt::Field { address, what: "bitmap does not agree with the extents" }.into());
        }
        group::set(bitmap, at, len, used);
        let mut chunks = 0;
        for chunk in at / CHUNK_BLOCKS..=(at + len - 1) / CHUNK_BLOCKS {
            match (group::kind(bitmap, chunk), used) {
                (ChunkKind::Free, true) => {
                    group::set_kind(bitmap, chunk, ChunkKind::Data);
                    chunks += 1;
                }
                (ChunkKind::Data, true) => {}
                (ChunkKind::Data, false) if group::chunk_used(bitmap, chunk) == 0 => {
                    group::set_kind(bitmap, chunk, ChunkKind::Free);
                    chunks += 1;
                }
                (ChunkKind::Data, false) => {}
                _ => return Err(Corrupt::Field { address, what: "data lies in a chunk of another kind" }.into()),
            }
        }
        if !used {
            self.change_descriptor(group, |d| {
                d.free_blocks = d.free_blocks.checked_add(len as u16)?;
                d.free_chunks = d.free_chunks.checked_add(chunks)?;
                Some(())
            })?;
            return self.count_freed(len, chunks.into());
        }
        self.change_descriptor(group, |d| {
            d.free_blocks = d.free_blocks.checked_sub(len as u16)?;
            d.free_chunks = d.free_chunks.checked_sub(chunks)?;
            Some(())
        })?;
        let state = self.state_mut();
        let left = state.free_blocks.checked_sub(len).zip(state.free_chunks.checked_sub(chunks.into()));
        let Some((free_blocks, free_chunks)) = left else {
            return Err(Corrupt::Field { address, what: "counters of the volume do not agree with the bitmaps" }.into());
        };
        (state.free_blocks, state.free_chunks) = (free_blocks, free_chunks);
        Ok(())
    }
}
