//! Reserving: finds free blocks for data, and marks them busy, in memory only.

use gpunvme_layout::Block;
use gpunvme_layout::geometry::{CHUNK_BLOCKS, GROUP_CHUNKS};
use gpunvme_layout::group::{self, ChunkKind};

use super::bitmaps::{Descriptors, bitmap};
use crate::error::Attempt;
use crate::volume::meta::Meta;
use crate::volume::reserved;
use crate::volume::run::Run;

/// A file that wants more chunks than this at once has taken some before.
const GROWS_FROM: u64 = 8;
/// Pieces that a small run is cut into at the most before a chunk is broken for it.
const PIECES_MAX: u64 = 8;
/// If more than one in so many blocks of a volume is free in holes between small runs, the holes
/// are used in pieces.
const HOLES_PART: u64 = 64;
/// Groups that are searched for a longer run when a shorter one is known.
const SEARCH_GROUPS: u64 = 16;

/// Whether a run of `run` chunks is a better place than one of `than` chunks for a file that wants
/// `want` now. A file wants more as it grows: a file that has shown that it is long gets the
/// longest run, and can go on there. Others leave as little over as they can.
fn fits_better(want: u64, run: u64, than: u64) -> bool {
    if want > GROWS_FROM || run < want || than < want { run > than } else { run < than }
}

impl Meta {
    /// Takes a run of at most `want` free blocks, and marks it busy. `goal`: where it would best
    /// begin.
    ///
    /// # Errors
    /// [`NoSpace`] when no block is free; blocks that were freed lately may become usable later.
    ///
    /// [`NoSpace`]: crate::error::FsError::NoSpace
    pub fn reserve(&mut self, goal: Option<u64>, want: u64) -> Attempt<Run> {
        let run = match goal.map(|goal| self.run_at(goal, want)).transpose()?.flatten() {
            Some(run) => run,
            None if want >= CHUNK_BLOCKS => match self.large_run(want)? {
                Some(run) => run,
                None => self.small_run(want)?,
            },
            None => self.small_run(want)?,
        };
        self.note_reserved(run)?;
        self.busy.insert(run);
        Ok(run)
    }

    /// Gives reserved blocks back that were not claimed.
    pub fn unreserve(&mut self, run: Run) {
        self.busy.remove(run);
        self.reserved.remove(run, false);
    }

    /// Whether much of the free space lies between small runs.
    fn has_many_holes(&self) -> bool {
        let holes = self.state.free_blocks.saturating_sub(self.state.free_chunks * CHUNK_BLOCKS);
        holes > self.geometry.data_blocks() / HOLES_PART
    }

    /// Free chunks that data may take as long as it finds room elsewhere: names need some beyond
    /// the margin.
    fn chunks_for_data(&self) -> u64 {
        self.breakable_chunks().saturating_sub(self.chunk_margin().div_ceil(4))
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
        let breakable = whole.then(|| self.breakable_chunks());
        Ok(self.free_within(group, at, end, breakable)?.filter(|run| run.start == goal))
    }

    /// The first free run of data blocks within `from..to` of a group that is not busy.
    /// `breakable`: also in free chunks, those that data is on its way to and so many others.
    fn free_within(&self, group: u64, from: u64, to: u64, breakable: Option<u64>) -> Attempt<Option<Run>> {
        let bitmap = bitmap(self, group)?;
        let base = self.geometry.group_start(group);
        // Whether a run may lie in a chunk, when it already takes so many that nothing is in.
        let is_open = |chunk: u64, taken: u64| match bitmap.map_or(ChunkKind::Free, |b| group::kind(b, chunk)) {
            ChunkKind::Metadata => false,
            ChunkKind::Data => true,
            ChunkKind::Free => breakable.is_some_and(|left| taken < left || self.reserved.contains(base + chunk * CHUNK_BLOCKS)),
        };
        let mut at = from;
        while at < to {
            let chunk_end = (at / CHUNK_BLOCKS + 1) * CHUNK_BLOCKS;
            if !is_open(at / CHUNK_BLOCKS, 0) {
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
            let (mut cut, mut taken) = (chunk_end, 1);
            while cut < end && is_open(cut / CHUNK_BLOCKS, taken) {
                (cut, taken) = (cut + CHUNK_BLOCKS, taken + 1);
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

    /// The first block of the last wholly free chunk: small runs and metadata come from the other
    /// end than large runs.
    pub(super) fn free_chunk(&self) -> Attempt<Option<u64>> {
        let (groups, mut descriptors) = (self.geometry.groups, Descriptors::of(self));
        for i in 0..groups {
            let group = (2 * groups - 1 - self.hints.full_behind - i) % groups;
            if descriptors.get(group)?.free_chunks == 0 {
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
        // The last part of a file, if less than a chunk, fills a hole.
        let want = if self.has_many_holes() { want - want % CHUNK_BLOCKS } else { want };
        let want_chunks = want.div_ceil(CHUNK_BLOCKS).min(self.chunks_for_data());
        if want_chunks == 0 {
            return Ok(None);
        }
        let (groups, mut descriptors) = (self.geometry.groups, Descriptors::of(self));
        let mut best: Option<(u64, u64, u64)> = None;
        let mut searched = 0;
        for i in 0..groups {
            let group = (self.hints.first_chunk + i) % groups;
            let most = u64::from(descriptors.get(group)?.free_chunks);
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

    /// A run beside other small ones: in a chunk that holds data, else in a free chunk. Large runs
    /// and metadata live on free chunks. So once most of the free space is in the others, it is
    /// used up in pieces first.
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
        let len = want.min(CHUNK_BLOCKS);
        if let Some(broken) = self.hints.broken {
            let (group, at) = self.geometry.locate(broken);
            let rest = self.free_within(group, at, (at / CHUNK_BLOCKS + 1) * CHUNK_BLOCKS, Some(self.breakable_chunks()))?;
            if let Some(rest) = rest.filter(|rest| rest.len >= len) {
                self.hints.broken = Some(rest.start + len).filter(|next| !next.is_multiple_of(CHUNK_BLOCKS));
                return Ok(Some(Run { start: rest.start, len }));
            }
        }
        if self.breakable_chunks() == 0 {
            return Ok(None);
        }
        let Some(start) = self.free_chunk()? else { return Ok(None) };
        self.hints.broken = Some(start + len).filter(|next| !next.is_multiple_of(CHUNK_BLOCKS));
        Ok(Some(Run { start, len }))
    }

    /// The first run that is left, in chunks that nothing was claimed of yet and data is on its way
    /// to, or in those that metadata can do without.
    fn any_run(&self, want: u64) -> Attempt<Option<Run>> {
        let (breakable, mut descriptors) = (Some(self.chunks_for_promised_data()), Descriptors::of(self));
        for i in 0..self.geometry.groups {
            let group = (self.hints.small + i) % self.geometry.groups;
            if descriptors.get(group)?.free_blocks == 0 {
                continue;
            }
            let end = self.geometry.group_chunks(group) * CHUNK_BLOCKS;
            if let Some(run) = self.free_within(group, 0, end, breakable)? {
                return Ok(Some(Run { start: run.start, len: run.len.min(want) }));
            }
        }
        Ok(None)
    }

    /// A run in chunks that hold data already: `want` blocks of the shortest run that has as many,
    /// in the first group that has one, or the longest run of some groups.
    fn shared_run(&self, want: u64) -> Attempt<Option<Run>> {
        let (groups, mut descriptors) = (self.geometry.groups, Descriptors::of(self));
        let mut longest: Option<Run> = None;
        let mut searched = 0;
        for i in 0..groups {
            let group = (self.hints.small + i) % groups;
            let shared = descriptors.get(group)?.free_shared();
            if shared == 0 || longest.is_some_and(|run| shared <= run.len) {
                continue;
            }
            if longest.is_some() && searched >= SEARCH_GROUPS {
                break;
            }
            searched += 1;
            let (mut from, to) = (0, self.geometry.group_chunks(group) * CHUNK_BLOCKS);
            let mut fits: Option<Run> = None;
            while let Some(run) = self.free_within(group, from, to, None)? {
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

    /// Notes that data is on its way to free blocks.
    fn note_reserved(&mut self, run: Run) -> Attempt<()> {
        for part in reserved::parts(run) {
            let is_free = self.is_free_by_bitmap(part.start)?;
            self.reserved.add(part, is_free);
        }
        Ok(())
    }

    /// Notes that a finished operation has freed blocks: a chunk of them may be wholly free now
    /// although data is on its way to others of its blocks.
    pub fn note_freed(&mut self, run: Run) {
        for part in reserved::parts(run) {
            if self.reserved.contains(part.start) && matches!(self.is_free_by_bitmap(part.start), Ok(true)) {
                self.reserved.becomes_free(part.start);
            }
        }
    }

    fn is_free_by_bitmap(&self, block: u64) -> Attempt<bool> {
        let (group, at) = self.geometry.locate(block);
        Ok(bitmap(self, group)?.is_none_or(|b| group::kind(b, at / CHUNK_BLOCKS) == ChunkKind::Free))
    }
}
