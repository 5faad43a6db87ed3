//! Reserving: finds free blocks for data, and marks them busy, in memory only.

use gpunvme_layout::Block;
use gpunvme_layout::geometry::{CHUNK_BLOCKS, DESCRIPTORS_PER_BLOCK, GROUP_CHUNKS};
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
/// Groups with free chunks that are searched for a longer run when a shorter one is known.
const LONGER_GROUPS: u64 = 16;
/// Groups in which a hole between data is looked for at once: so many as a block describes.
const SEARCH_GROUPS: u64 = DESCRIPTORS_PER_BLOCK;
/// Places that are looked at for that: holes, and busy blocks between them.
const SEARCH_LOOKS: u64 = 64;

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
        // What lies behind the goal is no matter.
        Ok(self.free_within(group, at, end, breakable, &mut 1)?.filter(|run| run.start == goal))
    }

    /// The first free run of data blocks within `from..to` of a group that is not busy.
    /// `breakable`: also in free chunks, those that data is on its way to and so many others.
    /// `looks`: how many places are looked at, at the most; counted down.
    fn free_within(&self, group: u64, from: u64, to: u64, breakable: Option<u64>, looks: &mut u64) -> Attempt<Option<Run>> {
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
            if *looks == 0 {
                return Ok(None);
            }
            *looks -= 1;
            #[cfg(test)]
            super::bitmaps::tests::PLACES.set(super::bitmaps::tests::PLACES.get() + 1);
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
            if best.is_some() && searched >= LONGER_GROUPS {
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
        self.hints.small = run.end();
        Ok(run)
    }

    /// A run in a chunk that is broken for it: in the last one that was, or in another.
    fn broken_chunk_run(&mut self, want: u64) -> Attempt<Option<Run>> {
        let len = want.min(CHUNK_BLOCKS);
        if let Some(broken) = self.hints.broken {
            let (group, at) = self.geometry.locate(broken);
            let end = (at / CHUNK_BLOCKS + 1) * CHUNK_BLOCKS;
            let rest = self.free_within(group, at, end, Some(self.breakable_chunks()), &mut { CHUNK_BLOCKS })?;
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
        let (first, _) = self.last_small();
        for i in 0..self.geometry.groups {
            let group = (first + i) % self.geometry.groups;
            if descriptors.get(group)?.free_blocks == 0 {
                continue;
            }
            let end = self.geometry.group_chunks(group) * CHUNK_BLOCKS;
            if let Some(run) = self.free_within(group, 0, end, breakable, &mut { u64::MAX })? {
                return Ok(Some(Run { start: run.start, len: run.len.min(want) }));
            }
        }
        Ok(None)
    }

    /// A run in chunks that hold data already, from the last small one on: `want` blocks of the
    /// shortest run that has as many, in the first group that has one, or the longest of those that
    /// were looked at. These are few, for the metadata lock is held.
    fn shared_run(&self, want: u64) -> Attempt<Option<Run>> {
        let geometry = &self.geometry;
        let (first, begin) = self.last_small();
        let (mut longest, mut looks): (Option<Run>, u64) = (None, SEARCH_LOOKS);
        let mut descriptors = Descriptors::of(self);
        // At last the part of the first group that lies before.
        for i in 0..=geometry.groups.min(SEARCH_GROUPS) {
            let group = (first + i) % geometry.groups;
            let shared = descriptors.get(group)?.free_shared();
            if shared == 0 || longest.is_some_and(|run| shared <= run.len) {
                continue;
            }
            let (mut from, to) = (if i == 0 { begin } else { 0 }, geometry.group_chunks(group) * CHUNK_BLOCKS);
            let mut fits: Option<Run> = None;
            while from < to
                && let Some(run) = self.free_within(group, from, to, None, &mut looks)?
            {
                if run.len >= want && fits.is_none_or(|f| run.len < f.len) {
                    fits = Some(run);
                }
                if longest.is_none_or(|l| run.len > l.len) {
                    longest = Some(run);
                }
                from = geometry.locate(run.start).1 + run.len;
                if run.len == want {
                    break;
                }
            }
            if let Some(run) = fits {
                return Ok(Some(Run { start: run.start, len: want }));
            }
            if looks == 0 {
                break;
            }
        }
        Ok(longest)
    }

    /// The group of the last small run, and where in it that has ended.
    fn last_small(&self) -> (u64, u64) {
        if self.geometry.contains_data(self.hints.small, 1) { self.geometry.locate(self.hints.small) } else { (0, 0) }
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

#[cfg(test)]
mod tests {
    use super::super::bitmaps::tests::{LOOKED_AT, PLACES};
    use super::*;
    use crate::volume::format::tests::volume;
    use crate::volume::mapping::tests::new_file;
    use crate::volume::{Context, Promised, Volume};
    use gpunvme_layout::Timestamp;

    const CONTEXT: Context = Context { uid: 0, gid: 0, now: Timestamp { seconds: 1, nanoseconds: 0 } };

    /// Preallocates a file of so many blocks, and makes a hole of every other one.
    fn make_holes(volume: &Volume, blocks: u64) {
        let ino = new_file(volume, b"holes");
        let mut at = 0;
        while at < blocks {
            let run = volume.wait(|| volume.reserve(None, blocks - at, 0)).unwrap();
            assert!(volume.wait(|| volume.map_unwritten(ino, at, run, &mut Promised::default())).unwrap());
            at += run.len;
        }
        for block in (0..blocks).step_by(2) {
            assert_eq!(volume.wait(|| volume.punch_step(&CONTEXT, ino, block, block + 1)).unwrap(), None);
        }
    }

    /// The metadata lock is held meanwhile.
    #[test]
    fn few_places_are_looked_at_where_free_blocks_lie_between_others() {
        let volume = volume(256 << 20);
        let looked_at = |want| {
            PLACES.set(0);
            let run = volume.wait(|| volume.reserve(None, want, 0)).unwrap();
            (run.len, PLACES.get())
        };
        let blocks = volume.usage().available;
        make_holes(&volume, blocks);
        // At first they cannot be reused yet.
        for want in [1, 75, 75, 300] {
            let places = looked_at(want).1;
            assert!(places <= 4 * SEARCH_LOOKS, "{places} places");
        }
        volume.commit().unwrap();
        volume.reuse_freed();
        for _ in 0..1000 {
            let (len, places) = looked_at(511);
            assert!(places <= 4 * SEARCH_LOOKS, "{places} places for {len} blocks");
        }
    }

    #[test]
    fn few_groups_are_looked_at_where_none_has_a_hole() {
        let volume = volume(64 << 40);
        assert!(volume.superblock().geometry().groups > 500_000);
        for _ in 0..10 {
            volume.wait(|| volume.reserve(None, 300, 0)).unwrap();
        }
        LOOKED_AT.set(0);
        for _ in 0..100 {
            volume.wait(|| volume.reserve(None, 300, 0)).unwrap();
        }
        assert!(LOOKED_AT.get() < 100 * 3 * SEARCH_GROUPS, "{} descriptors", LOOKED_AT.get());
    }
}
