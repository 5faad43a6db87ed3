//! Allocation: which blocks a file or the tree gets.
//!
//! Data and metadata never share a chunk (2 MiB). Runs of 2 MiB and more take wholly free chunks, so that large files lie in
//! large aligned extents; smaller ones fill chunks that hold data already, where they fit best: a volume that ages would run
//! out of free chunks otherwise, and large files of large extents. Free chunks are taken from both ends, for large runs from the
//! front, for small runs and metadata from the back. Space is taken in two steps:
//! [`Meta::reserve`] marks free blocks busy, in memory only; when their data is on the device, [`Op::claim`] makes them the
//! file's in the same operation that maps them. A crash in between loses nothing and leaks nothing.

use gpunvme_layout::geometry::{CHUNK_BLOCKS, GROUP_BLOCKS, GROUP_CHUNKS, STATE};
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
    /// Group of the last small run.
    small: u64,
    /// Where the chunk goes on that was broken last.
    broken: Option<u64>,
    /// First group with a free chunk.
    first_chunk: u64,
    /// Groups behind the last one with a free chunk.
    full_behind: u64,
    /// Group of the last node.
    node: u64,
}

/// Free nodes in chunks of metadata with which names can still be added when no chunk may be taken: far more than one operation
/// needs.
const NODES_LEFT: u64 = 128;
/// A file that wants more chunks than this at once has taken some before.
const GROWS_FROM: u64 = 8;
/// Pieces that a small run is cut into at the most before a chunk is broken for it.
const PIECES_MAX: u64 = 8;
/// With more than this part of a volume in holes between small runs, they are used in pieces.
const HOLES_PART: u64 = 64;
/// Groups that are searched for a longer run when a shorter one is known.
const SEARCH_GROUPS: u64 = 16;

/// Whether a run of so many chunks is a better place than another for a file that wants some now. What a file wants grows with
/// it: one that has shown that it is long gets the longest run, and can go on there. Others leave no more over than they must.
fn fits_better(want: u64, run: u64, than: u64) -> bool {
    if want > GROWS_FROM || run < want || than < want { run > than } else { run < than }
}

fn descriptor(blocks: &impl Blocks, group: u64) -> Attempt<Descriptor> {
    #[cfg(test)]
    tests::LOOKED_AT.set(tests::LOOKED_AT.get() + 1);
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
        if self.pending > 0 { Fail::Stall(Stall::Reuse) } else { self.no_chunk() }
    }

    /// No chunk can be had: for now, when some emptied that a checkpoint gives back.
    pub fn no_chunk(&self) -> Fail {
        if self.emptied.is_empty() { FsError::NoSpace.into() } else { Fail::Stall(Stall::Checkpoint) }
    }

    /// Whether data may take a free chunk.
    fn may_break_a_chunk(&self) -> bool {
        self.state.free_chunks > self.chunk_margin()
    }

    /// Whether much of the free space lies between small runs.
    fn has_many_holes(&self) -> bool {
        let holes = self.state.free_blocks.saturating_sub(self.state.free_chunks * CHUNK_BLOCKS);
        holes > self.geometry.data_blocks() / HOLES_PART
    }

    /// Free chunks that data may take as long as it finds room elsewhere: names need some beyond the margin.
    fn chunks_for_data(&self) -> u64 {
        let margin = self.chunk_margin();
        self.state.free_chunks.saturating_sub(margin + margin.div_ceil(4))
    }

    /// Free blocks from `goal` on, to the end of their group at the most.
    fn run_at(&self, goal: u64, want: u64) -> Attempt<Option<Run>> {
        if !self.geometry.contains_data(goal, 1) {
            return Ok(None);
        }
        let (group, at) = self.geometry.locate(goal);
        let chunks = self.geometry.group_chunks(group);
        let end = (at + want).min(chunks * CHUNK_BLOCKS);
        let whole = want >= CHUNK_BLOCKS || !self.has_many_holes();
        Ok(self.free_within(group, at, end, whole)?.filter(|run| run.start == goal))
    }

    /// The first free run of data blocks within `from..to` of a group that is not busy. `whole`: also in free chunks.
    fn free_within(&self, group: u64, from: u64, to: u64, whole: bool) -> Attempt<Option<Run>> {
        let whole = whole && self.may_break_a_chunk();
        let bitmap = bitmap(self, group)?;
        let base = self.geometry.group_start(group);
        let mut at = from;
        while at < to {
            let chunk_end = (at / CHUNK_BLOCKS + 1) * CHUNK_BLOCKS;
            let kind = bitmap.map_or(ChunkKind::Free, |b| group::kind(b, at / CHUNK_BLOCKS));
            if kind == ChunkKind::Metadata || (kind == ChunkKind::Free && !whole) {
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
            // The run may go on into chunks of metadata or into free ones that are not for it.
            let mut cut = chunk_end;
            while cut < end {
                let kind = bitmap.map_or(ChunkKind::Free, |b| group::kind(b, cut / CHUNK_BLOCKS));
                if kind == ChunkKind::Metadata || (kind == ChunkKind::Free && !whole) {
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

    /// The first block of the last wholly free chunk: small runs and metadata come from the other end than large runs.
    fn free_chunk(&self) -> Attempt<Option<u64>> {
        let groups = self.geometry.groups;
        for i in 0..groups {
            let group = (2 * groups - 1 - self.hints.full_behind - i) % groups;
            if descriptor(self, group)?.free_chunks == 0 {
                continue;
            }
            let bitmap = bitmap(self, group)?;
            if let Some(chunk) = (0..self.geometry.group_chunks(group)).rev().find(|c| self.is_free_chunk(bitmap, group, *c)) {
                return Ok(Some(self.geometry.group_start(group) + chunk * CHUNK_BLOCKS));
            }
        }
        Ok(None)
    }

    /// The runs of wholly free chunks of a group: first chunk and length.
    fn free_chunks(&self, group: u64) -> Attempt<Vec<(u64, u64)>> {
        let bitmap = bitmap(self, group)?;
        let mut runs: Vec<(u64, u64)> = Vec::new();
        for chunk in (0..self.geometry.group_chunks(group)).filter(|chunk| self.is_free_chunk(bitmap, group, *chunk)) {
            match runs.last_mut().filter(|(start, len)| start + len == chunk) {
                Some((_, len)) => *len += 1,
                None => runs.push((chunk, 1)),
            }
        }
        Ok(runs)
    }

    /// Wholly free chunks, in the run that fits best of those in some groups.
    fn large_run(&mut self, want: u64) -> Attempt<Option<Run>> {
        // What is less than a chunk at the end of a file fills a hole.
        let want = if self.has_many_holes() { want - want % CHUNK_BLOCKS } else { want };
        let want_chunks = want.div_ceil(CHUNK_BLOCKS).min(self.chunks_for_data());
        if want_chunks == 0 {
            return Ok(None);
        }
        let groups = self.geometry.groups;
        let mut best: Option<(u64, u64, u64)> = None;
        let mut searched = 0;
        for i in 0..groups {
            let group = (self.hints.first_chunk + i) % groups;
            let most = u64::from(descriptor(self, group)?.free_chunks);
            if most == 0 || best.is_some_and(|(_, _, len)| most <= len.min(want_chunks)) {
                continue;
            }
            if best.is_some() && searched >= SEARCH_GROUPS {
                break;
            }
            searched += 1;
            for (start, len) in self.free_chunks(group)? {
                if best.is_none_or(|(_, _, old)| fits_better(want_chunks, len, old)) {
                    best = Some((group, start, len));
                }
            }
            if best.is_some_and(|(_, _, len)| len == want_chunks || len == GROUP_CHUNKS) {
                break;
            }
        }
        Ok(best.map(|(group, chunk, len)| {
            let start = self.geometry.group_start(group) + chunk * CHUNK_BLOCKS;
            Run { start, len: (len.min(want_chunks) * CHUNK_BLOCKS).min(want) }
        }))
    }

    /// A run beside other small ones: in a chunk that holds data, else in a free chunk. Large runs and metadata live on free
    /// chunks. So once most of the free space is in the others, it is used up in pieces first.
    fn small_run(&mut self, want: u64) -> Attempt<Run> {
        let shared = self.shared_run(want)?;
        let enough = match shared {
            None => false,
            Some(_) if self.chunks_for_data() == 0 => true,
            Some(run) if self.has_many_holes() => run.len * PIECES_MAX >= want,
            Some(run) => run.len >= want,
        };
        let run = match shared {
            Some(run) if enough => run,
            _ => match self.broken_chunk_run(want)? {
                Some(run) => run,
                None => match shared {
                    Some(run) => run,
                    None => self.any_run(want)?.ok_or_else(|| self.no_space())?,
                },
            },
        };
        self.hints.small = self.geometry.locate(run.start).0;
        Ok(run)
    }

    /// A run in a chunk that is broken for it: in the last one that was, or in another.
    fn broken_chunk_run(&mut self, want: u64) -> Attempt<Option<Run>> {
        if !self.may_break_a_chunk() {
            return Ok(None);
        }
        let len = want.min(CHUNK_BLOCKS);
        if let Some(broken) = self.hints.broken {
            let (group, at) = self.geometry.locate(broken);
            let rest = self.free_within(group, at, (at / CHUNK_BLOCKS + 1) * CHUNK_BLOCKS, true)?;
            if let Some(rest) = rest.filter(|rest| rest.len >= len) {
                self.hints.broken = Some(rest.start + len).filter(|next| !next.is_multiple_of(CHUNK_BLOCKS));
                return Ok(Some(Run { start: rest.start, len }));
            }
        }
        let Some(start) = self.free_chunk()? else { return Ok(None) };
        self.hints.broken = Some(start + len).filter(|next| !next.is_multiple_of(CHUNK_BLOCKS));
        Ok(Some(Run { start, len }))
    }

    /// The first run that is left, in chunks that nothing was claimed of yet and something is busy in.
    fn any_run(&self, want: u64) -> Attempt<Option<Run>> {
        for i in 0..self.geometry.groups {
            let group = (self.hints.small + i) % self.geometry.groups;
            if descriptor(self, group)?.free_blocks == 0 {
                continue;
            }
            let end = self.geometry.group_chunks(group) * CHUNK_BLOCKS;
            if let Some(run) = self.free_within(group, 0, end, true)? {
                return Ok(Some(Run { start: run.start, len: run.len.min(want) }));
            }
        }
        Ok(None)
    }

    /// A run in chunks that hold data already: `want` blocks of the shortest run that has as many, in the first group that has
    /// one, or the longest run of some groups.
    fn shared_run(&self, want: u64) -> Attempt<Option<Run>> {
        let groups = self.geometry.groups;
        let mut longest: Option<Run> = None;
        let mut searched = 0;
        for i in 0..groups {
            let group = (self.hints.small + i) % groups;
            let shared = descriptor(self, group)?.free_shared();
            if shared == 0 || longest.is_some_and(|run| shared <= run.len) {
                continue;
            }
            if longest.is_some() && searched >= SEARCH_GROUPS {
                break;
            }
            searched += 1;
            let (mut from, to) = (0, self.geometry.group_chunks(group) * CHUNK_BLOCKS);
            let mut fits: Option<Run> = None;
            while let Some(run) = self.free_within(group, from, to, false)? {
                if run.len >= want && fits.is_none_or(|f| run.len < f.len) {
                    fits = Some(run);
                }
                if longest.is_none_or(|l| run.len > l.len) {
                    longest = Some(run);
                }
                from = self.geometry.locate(run.start).1 + run.len;
                if from >= to || run.len == want {
                    break;
                }
            }
            if let Some(run) = fits {
                return Ok(Some(Run { start: run.start, len: want }));
            }
        }
        Ok(longest)
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

    /// Fails when there is no room for operations that add names or attributes. They take no chunk that is promised to data, nor
    /// one of the margin.
    pub fn room_for_names(&mut self) -> Attempt<()> {
        let meta = self.meta();
        let margin = meta.chunk_margin();
        let needed = meta.reserved + (margin + 1) * CHUNK_BLOCKS;
        let has_chunk = meta.state.free_chunks > margin && meta.state.free_blocks >= needed;
        if has_chunk || self.free_nodes()? >= NODES_LEFT { Ok(()) } else { Err(self.meta().no_chunk()) }
    }

    /// Free nodes in all chunks of metadata: counted once, and kept up to date.
    fn free_nodes(&mut self) -> Attempt<u64> {
        if let Some(nodes) = self.meta().free_nodes {
            return Ok(nodes);
        }
        let mut nodes = 0;
        for group in 0..self.meta().geometry.groups {
            nodes += u64::from(descriptor(self, group)?.free_metadata);
        }
        self.set_free_nodes(Some(nodes));
        Ok(nodes)
    }

    /// Allocates a block for a node of the tree.
    pub fn allocate_node(&mut self) -> Attempt<u64> {
        let has_none = self.meta().free_nodes == Some(0);
        let groups = if has_none { 0 } else { self.meta().geometry.groups };
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
        self.count_freed(CHUNK_BLOCKS, 1)
    }

    /// Counts blocks, and chunks that are wholly free now, that were not free.
    fn count_freed(&mut self, blocks: u64, chunks: u64) -> Attempt<()> {
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

    /// Makes a free chunk one for metadata, and returns its group.
    fn new_metadata_chunk(&mut self) -> Attempt<u64> {
        let Some(start) = self.meta().free_chunk()? else { return Err(self.meta().no_space()) };
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

    /// The bitmap of a group, to change; made when there was none.
    fn bitmap_mut(&mut self, group: u64) -> Attempt<&mut Block> {
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
    fn change_descriptor(&mut self, group: u64, change: impl FnOnce(&mut Descriptor) -> Option<()>) -> Attempt<()> {
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
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::sync::Arc;

    use gpunvme_blockdev::{BlockDevice, Io};
    use gpunvme_blockdev_testing::MemoryDevice;
    use gpunvme_layout::Timestamp;

    use super::*;
    use crate::volume::{FormatOptions, Volume, VolumeOptions, format};

    thread_local! {
        /// Descriptors that were looked at.
        pub static LOOKED_AT: Cell<u64> = const { Cell::new(0) };
    }

    fn volume(bytes: u64) -> Volume {
        let device: Arc<dyn BlockDevice> = MemoryDevice::new(bytes);
        let now = Timestamp { seconds: 1, nanoseconds: 0 };
        let options = FormatOptions { label: String::new(), uuid: [7; 16], hash_key: [9; 16], now, owner: (0, 0) };
        format(&device, &options).unwrap();
        Volume::open(Io::inline(device).unwrap(), VolumeOptions { read_only: false, cache: 1 << 20 }).unwrap()
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
            // What is put back counts as if it had never been.
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
