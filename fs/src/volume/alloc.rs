//! Allocation: which blocks a file or the tree gets.
//!
//! Data and metadata never share a chunk (2 MiB). Runs of 2 MiB and more take wholly free chunks, so that large files lie in
//! large aligned extents; smaller ones fill chunks that hold data already, next to one another. Space is taken in two steps:
//! [`Meta::reserve`] marks free blocks busy, in memory only; when their data is on the device, [`Op::claim`] makes them the
//! file's in the same operation that maps them. A crash in between loses nothing and leaks nothing.

use gpunvme_layout::geometry::{CHUNK_BLOCKS, GROUP_BLOCKS, GROUP_CHUNKS};
use gpunvme_layout::group::{self, ChunkKind, Descriptor};
use gpunvme_layout::{Block, BlockKind, Corrupt};

use super::op::{Blocks, Meta, Op};
use crate::error::{Attempt, Fail, FsError, Stall};

/// A run of blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Run {
    /// First block.
    pub start: u64,
    /// Number of blocks.
    pub len: u64,
}

impl Run {
    /// First block beyond it.
    pub fn end(self) -> u64 {
        self.start + self.len
    }
}

/// Where the allocator looks first.
#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct Hints {
    /// Block after the last small run.
    small: u64,
    /// Group of the last large run.
    large: u64,
    /// Group of the last node.
    node: u64,
}

/// Free nodes in chunks of metadata with which names can still be added when no chunk may be taken: far more than one operation
/// needs.
const NODES_LEFT: u64 = 128;
/// Groups that are searched for a longer run when a shorter one is known.
const SEARCH_GROUPS: u64 = 16;

fn descriptor(blocks: &impl Blocks, group: u64) -> Attempt<Descriptor> {
    let (address, index) = blocks.meta().geometry.descriptor(group);
    Ok(Descriptor::load(blocks.block(address, BlockKind::Descriptors)?, index))
}

/// The bitmap of a group; none when nothing was allocated in it yet.
fn bitmap(blocks: &impl Blocks, group: u64) -> Attempt<Option<&Block>> {
    if !descriptor(blocks, group)?.initialized {
        return Ok(None);
    }
    blocks.block(blocks.meta().geometry.bitmap(group), BlockKind::Bitmap).map(Some)
}

impl Meta {
    /// Wholly free chunks that data leaves to metadata: with them what was written can be mapped, and a deletion go on.
    fn chunk_margin(&self) -> u64 {
        (self.geometry.chunks / 64).clamp(1, 32)
    }

    /// Blocks that can still be promised to data. Twice the margin is kept: metadata may take chunks between a promise and
    /// the placing of its data, which then still finds room above the margin itself.
    pub fn available(&self) -> u64 {
        self.state.free_blocks.saturating_sub(self.reserved + 2 * self.chunk_margin() * CHUNK_BLOCKS)
    }

    /// Whether there is room for operations that add names or attributes.
    /// They take no chunk that is promised to data, nor one of the margin.
    pub fn has_room_for_names(&self) -> Attempt<bool> {
        let margin = self.chunk_margin();
        let needed = self.reserved + (margin + 1) * CHUNK_BLOCKS;
        if self.state.free_chunks > margin && self.state.free_blocks >= needed {
            return Ok(true);
        }
        let mut nodes = 0;
        for group in 0..self.geometry.groups {
            nodes += u64::from(descriptor(self, group)?.free_metadata);
            if nodes >= NODES_LEFT {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Takes a run of at most `want` free blocks, and marks it busy. `goal`: where it would best begin.
    ///
    /// # Errors
    /// [`FsError::NoSpace`] when no block is free; blocks that were freed lately may become usable later.
    pub fn reserve(&mut self, goal: Option<u64>, want: u64) -> Attempt<Run> {
        let run = match goal.map(|goal| self.run_at(goal, want)).transpose()?.flatten() {
            Some(run) => run,
            None if want >= CHUNK_BLOCKS => match self.large_run(want)? {
                Some(run) => run,
                None => self.small_run(want)?,
            },
            None => self.small_run(want)?,
        };
        self.busy.insert(run);
        Ok(run)
    }

    /// Gives reserved blocks back that were not claimed.
    pub fn unreserve(&mut self, run: Run) {
        self.busy.remove(run);
    }

    /// No block can be had: for now, when some were freed that cannot be reused yet.
    fn no_space(&self) -> Fail {
        if self.pending > 0 { Fail::Stall(Stall::Reuse) } else { FsError::NoSpace.into() }
    }

    /// Whether data may take a free chunk.
    fn may_break_a_chunk(&self) -> bool {
        self.state.free_chunks > self.chunk_margin()
    }

    /// Free blocks from `goal` on, to the end of their group at the most.
    fn run_at(&self, goal: u64, want: u64) -> Attempt<Option<Run>> {
        if !self.geometry.contains_data(goal, 1) {
            return Ok(None);
        }
        let (group, at) = self.geometry.locate(goal);
        let chunks = self.geometry.group_chunks(group);
        let end = (at + want).min(chunks * CHUNK_BLOCKS);
        Ok(self.free_within(group, at, end)?.filter(|run| run.start == goal))
    }

    /// The first free run of data blocks within `from..to` of a group that is not busy.
    fn free_within(&self, group: u64, from: u64, to: u64) -> Attempt<Option<Run>> {
        let bitmap = bitmap(self, group)?;
        let base = self.geometry.group_start(group);
        let mut at = from;
        while at < to {
            let chunk_end = (at / CHUNK_BLOCKS + 1) * CHUNK_BLOCKS;
            let kind = bitmap.map_or(ChunkKind::Free, |b| group::kind(b, at / CHUNK_BLOCKS));
            if kind == ChunkKind::Metadata || (kind == ChunkKind::Free && !self.may_break_a_chunk()) {
                at = chunk_end;
                continue;
            }
            let Some((start, len)) = bitmap.map_or(Some((at, to - at)), |b| group::find_run(b, at, to, false)) else {
                return Ok(None);
            };
            if start >= chunk_end {
                at = start;
                continue;
            }
            let mut end = start + len;
            match self.busy.overlap(base + start, base + end) {
                Some((busy, busy_end)) if busy <= base + start => {
                    at = busy_end - base;
                    continue;
                }
                Some((busy, _)) => end = busy - base,
                None => {}
            }
            // The run may go on into chunks of metadata or into the last free chunks, which are not for data.
            let mut cut = chunk_end;
            while cut < end {
                let kind = bitmap.map_or(ChunkKind::Free, |b| group::kind(b, cut / CHUNK_BLOCKS));
                if kind == ChunkKind::Metadata || (kind == ChunkKind::Free && !self.may_break_a_chunk()) {
                    break;
                }
                cut += CHUNK_BLOCKS;
            }
            return Ok(Some(Run { start: base + start, len: end.min(cut) - start }));
        }
        Ok(None)
    }

    fn is_free_chunk(&self, bitmap: Option<&Block>, group: u64, chunk: u64) -> bool {
        let start = self.geometry.group_start(group) + chunk * CHUNK_BLOCKS;
        bitmap.is_none_or(|b| group::kind(b, chunk) == ChunkKind::Free)
            && self.busy.overlap(start, start + CHUNK_BLOCKS).is_none()
    }

    /// The longest run of wholly free chunks in the first group that has enough of them, or in the one that has most.
    fn large_run(&mut self, want: u64) -> Attempt<Option<Run>> {
        let margin = self.chunk_margin();
        let spare = self.state.free_chunks.saturating_sub(margin);
        let want_chunks = want.div_ceil(CHUNK_BLOCKS).min(spare);
        if want_chunks == 0 {
            return Ok(None);
        }
        let groups = self.geometry.groups;
        let mut best: Option<(u64, u64, u64)> = None;
        for i in 0..groups {
            let group = (self.hints.large + i) % groups;
            let free = u64::from(descriptor(self, group)?.free_chunks);
            if free == 0 || best.is_some_and(|(_, _, len)| free <= len) {
                continue;
            }
            let bitmap = bitmap(self, group)?;
            let (mut start, mut len) = (0, 0);
            for chunk in 0..self.geometry.group_chunks(group) {
                if !self.is_free_chunk(bitmap, group, chunk) {
                    len = 0;
                    continue;
                }
                start = if len == 0 { chunk } else { start };
                len += 1;
                if best.is_none_or(|(_, _, most)| len > most) {
                    best = Some((group, start, len));
                }
                if len == want_chunks {
                    break;
                }
            }
            if best.is_some_and(|(_, _, len)| len >= want_chunks.min(GROUP_CHUNKS)) {
                break;
            }
        }
        Ok(best.map(|(group, chunk, len)| {
            self.hints.large = group;
            let start = self.geometry.group_start(group) + chunk * CHUNK_BLOCKS;
            Run { start, len: (len * CHUNK_BLOCKS).min(want) }
        }))
    }

    /// A run beside other small ones: after the last one, else in any chunk that holds data, else in a free chunk.
    fn small_run(&mut self, want: u64) -> Attempt<Run> {
        let run = self.find_small_run(want)?.ok_or_else(|| self.no_space())?;
        self.hints.small = run.end();
        Ok(run)
    }

    fn find_small_run(&self, want: u64) -> Attempt<Option<Run>> {
        let groups = self.geometry.groups;
        let (first, at) =
            if self.geometry.contains_data(self.hints.small, 1) { self.geometry.locate(self.hints.small) } else { (0, 0) };
        let mut best: Option<Run> = None;
        let mut searched = 0;
        for i in 0..=groups {
            let group = (first + i) % groups;
            if descriptor(self, group)?.free_blocks == 0 {
                continue;
            }
            if best.is_some() && searched >= SEARCH_GROUPS {
                break;
            }
            searched += 1;
            let mut from = if i == 0 { at } else { 0 };
            let to = self.geometry.group_chunks(group) * CHUNK_BLOCKS;
            let to = if i == groups { at.min(to) } else { to };
            while let Some(run) = self.free_within(group, from, to)? {
                if run.len >= want {
                    return Ok(Some(Run { start: run.start, len: want }));
                }
                if best.is_none_or(|b| run.len > b.len) {
                    best = Some(run);
                }
                from = self.geometry.locate(run.start).1 + run.len;
                if from >= to {
                    break;
                }
            }
        }
        Ok(best)
    }
}

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
    /// Makes reserved blocks a file's.
    pub fn claim(&mut self, run: Run) -> Attempt<()> {
        self.each_group(run, |op, group, at, len| op.mark(group, at, len, true))?;
        self.claimed.push(run);
        Ok(())
    }

    /// Takes blocks from a file. They can be reused when the operation is durable and no transfer touches them any more.
    pub fn release(&mut self, run: Run) -> Attempt<()> {
        if !self.meta().geometry.contains_data(run.start, run.len) {
            return Err(Corrupt::Field { address: run.start, what: "extent lies outside the data area" }.into());
        }
        self.each_group(run, |op, group, at, len| op.mark(group, at, len, false))?;
        self.freed.push(run);
        Ok(())
    }

    /// Allocates a block for a node of the tree.
    pub fn allocate_node(&mut self) -> Attempt<u64> {
        let groups = self.meta().geometry.groups;
        let first = self.hints().node;
        for i in 0..groups {
            let group = (first + i) % groups;
            if descriptor(self, group)?.free_metadata > 0 {
                return self.take_node(group);
            }
        }
        let group = self.new_metadata_chunk()?;
        self.take_node(group)
    }

    /// Frees a block of the tree. It can be reused for metadata at once: its images reach home in the order of the journal.
    pub fn release_node(&mut self, address: u64) -> Attempt<()> {
        self.forget_places();
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

    /// Gives an empty metadata chunk, by its first block, back to all uses. No image of it may be in the live journal.
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
        self.state_mut().free_blocks += CHUNK_BLOCKS;
        self.state_mut().free_chunks += 1;
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
        let state = *self.state_mut();
        let counters = if used {
            self.change_descriptor(group, |d| {
                d.free_blocks = d.free_blocks.checked_sub(len as u16)?;
                d.free_chunks = d.free_chunks.checked_sub(chunks)?;
                Some(())
            })?;
            state.free_blocks.checked_sub(len).zip(state.free_chunks.checked_sub(u64::from(chunks)))
        } else {
            self.change_descriptor(group, |d| {
                d.free_blocks = d.free_blocks.checked_add(len as u16)?;
                d.free_chunks = d.free_chunks.checked_add(chunks)?;
                Some(())
            })?;
            Some((state.free_blocks + len, state.free_chunks + u64::from(chunks)))
        };
        let Some((free_blocks, free_chunks)) = counters else {
            return Err(Corrupt::Field { address, what: "counters of the volume do not agree with the bitmaps" }.into());
        };
        (self.state_mut().free_blocks, self.state_mut().free_chunks) = (free_blocks, free_chunks);
        Ok(())
    }

    fn take_node(&mut self, group: u64) -> Attempt<u64> {
        self.hints().node = group;
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

    /// Makes the first free chunk one for metadata, and returns its group.
    fn new_metadata_chunk(&mut self) -> Attempt<u64> {
        for group in 0..self.meta().geometry.groups {
            if descriptor(self, group)?.free_chunks == 0 {
                continue;
            }
            let bitmap = bitmap(self, group)?;
            let chunks = 0..self.meta().geometry.group_chunks(group);
            let Some(chunk) = chunks.into_iter().find(|c| self.meta().is_free_chunk(bitmap, group, *c)) else { continue };
            group::set_kind(self.bitmap_mut(group)?, chunk, ChunkKind::Metadata);
            self.change_descriptor(group, |d| {
                d.free_chunks = d.free_chunks.checked_sub(1)?;
                d.free_blocks = d.free_blocks.checked_sub(CHUNK_BLOCKS as u16)?;
                d.free_metadata = d.free_metadata.checked_add(CHUNK_BLOCKS as u16)?;
                Some(())
            })?;
            let state = self.state_mut();
            state.free_blocks = state.free_blocks.saturating_sub(CHUNK_BLOCKS);
            state.free_chunks = state.free_chunks.saturating_sub(1);
            return Ok(group);
        }
        Err(self.meta().no_space())
    }

    /// The bitmap of a group, to change; made when there was none.
    fn bitmap_mut(&mut self, group: u64) -> Attempt<&mut Block> {
        let geometry = self.meta().geometry;
        if !descriptor(self, group)?.initialized {
            self.create(group::new_bitmap(&geometry, group, &self.meta().uuid.clone()));
            self.change_descriptor(group, |d| {
                d.initialized = true;
                Some(())
            })?;
        }
        self.block_mut(geometry.bitmap(group), BlockKind::Bitmap)
    }

    /// Changes a descriptor; `change` returns none when its counters cannot be true.
    fn change_descriptor(&mut self, group: u64, change: impl FnOnce(&mut Descriptor) -> Option<()>) -> Attempt<()> {
        let (address, index) = self.meta().geometry.descriptor(group);
        let mut descriptor = descriptor(self, group)?;
        if change(&mut descriptor).is_none() {
            return Err(Corrupt::Field { address, what: "descriptor does not agree with its bitmap" }.into());
        }
        descriptor.store(self.block_mut(address, BlockKind::Descriptors)?, index);
        Ok(())
    }
}
