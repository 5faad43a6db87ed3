//! Discards: tell the device which blocks no file has, so that an SSD need not keep what is in
//! them.
//!
//! A block may be discarded once it is free for certain: its bit is clear, the transaction that
//! cleared it is durable, and no transfer touches it any more. While the device is told of it, it
//! is busy, so that nothing is written there meanwhile. [`Volume::trim`] looks for such blocks;
//! with [`super::VolumeOptions::discard`], [`Volume::discard_freed`] tells of those that were freed
//! last before they are used again.

use gpunvme_blockdev::Request;
use gpunvme_layout::Geometry;
use gpunvme_layout::block::BLOCK_SIZE;
use gpunvme_layout::geometry::CHUNK_BLOCKS;
use gpunvme_layout::group::{self, ChunkKind};

use super::alloc::{bitmap, descriptor};
use super::meta::Meta;
use super::open::Volume;
use super::run::Run;
use crate::error::{Attempt, FsError};

/// Blocks that are told of at once, and busy meanwhile: 256 MiB. Writers that need them wait.
const BATCH: u64 = 1 << 16;
/// The same where little is free, 2 MiB; in between it is a quarter of what is, so that writers
/// find other blocks.
const BATCH_MIN: u64 = CHUNK_BLOCKS;
/// Runs of freed blocks that are let go of at once.
const FREED_AT_ONCE: usize = 4096;
/// Groups that one call looks at: some milliseconds of reading where their bitmaps are not in
/// memory.
const GROUPS: u64 = 64;
/// Freed blocks that lie side by side, at least, to be worth a command of their own: 64 KiB. The
/// rest is left to [`Volume::trim`].
const FREED_MIN: u64 = 16;

/// What [`Volume::trim`] did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Trimmed {
    /// Blocks that the device was told of.
    pub blocks: u64,
    /// The block to go on from; none where the volume, or what was asked for, ends.
    pub next: Option<u64>,
}

impl Volume {
    /// Tells the device of free blocks within `from..to` that lie side by side, `minimum` at least,
    /// for a part of the range. A run of free blocks may count as several where groups end.
    ///
    /// # Errors
    /// [`FsError::NoDiscard`] where a device has no such command, [`FsError::ReadOnly`],
    /// [`FsError::Taken`], and errors of the device.
    pub fn trim(&self, from: u64, to: u64, minimum: u64) -> Result<Trimmed, FsError> {
        self.writable()?;
        if let Some(device) = self.device().without_discard() {
            return Err(FsError::NoDiscard { device: device.to_owned() });
        }
        // What was freed by now is free for certain then.
        self.commit()?;
        self.give_back()?;
        self.reuse_freed();
        let geometry = self.geometry();
        let end = to.min(geometry.data_end());
        if from >= end {
            return Ok(Trimmed { blocks: 0, next: None });
        }
        let first = geometry.group_behind(from);
        let last = (first + GROUPS).min(geometry.groups);
        let behind = geometry.group_start(last - 1) + geometry.group_chunks(last - 1) * CHUNK_BLOCKS;
        let end = end.min(behind);
        let (mut at, mut blocks) = (from.max(geometry.group_start(first)), 0);
        let mut cut = None;
        while at < end {
            let _turn = self.space_waits.discard();
            let runs = self.take_free(&mut at, end, minimum.max(1), &mut cut)?;
            let told = self.tell(&runs);
            self.free_busy(&runs);
            told?;
            blocks += runs.iter().map(|run| run.len).sum::<u64>();
        }
        Ok(Trimmed { blocks, next: (behind < to.min(geometry.data_end())).then_some(behind) })
    }

    /// Makes free runs within `at..end` busy, as many as one batch has, and moves `at` behind them.
    /// `cut` is where a run goes on that was too long for the batch before.
    fn take_free(&self, at: &mut u64, end: u64, minimum: u64, cut: &mut Option<u64>) -> Result<Vec<Run>, FsError> {
        let most = (self.usage().available / 4).clamp(BATCH_MIN, BATCH);
        let mut runs: Vec<Run> = Vec::new();
        while *at < end {
            let left = most - runs.iter().map(|run| run.len).sum::<u64>();
            if left == 0 {
                break;
            }
            let taken = self.wait(|| self.take_free_of_group(*at, end, minimum, left, *cut, &mut runs));
            (*at, *cut) = taken.inspect_err(|_| self.free_busy(&runs))?;
        }
        Ok(runs)
    }

    /// As [`Volume::take_free`], in the group of a block, `room` blocks at the most, which it adds
    /// to `runs`. Returns the block to go on from, and where a run goes on that was cut.
    fn take_free_of_group(
        &self,
        from: u64,
        end: u64,
        minimum: u64,
        room: u64,
        cut: Option<u64>,
        runs: &mut Vec<Run>,
    ) -> Attempt<(u64, Option<u64>)> {
        let mut meta = self.meta.write();
        let group = meta.geometry.group_behind(from);
        let begin = meta.geometry.group_start(group);
        let to = (begin + meta.geometry.group_chunks(group) * CHUNK_BLOCKS).min(end);
        let (mut at, mut left) = (from.max(begin), room);
        // Between two regions there is no group.
        if at >= to {
            return Ok((to, None));
        }
        if descriptor(&*meta, group)?.free_blocks == 0 {
            return Ok((to, None));
        }
        while let Some(free) = next_free(&meta, group, at, to)? {
            at = free.end();
            if free.len < minimum && Some(free.start) != cut {
                continue;
            }
            let run = Run { start: free.start, len: free.len.min(left) };
            meta.busy.insert(run);
            // Whoever needs them waits, and does not take the volume for full.
            meta.pending += run.len;
            match runs.last_mut().filter(|last| last.end() == run.start) {
                Some(last) => last.len += run.len,
                None => runs.push(run),
            }
            left -= run.len;
            if left == 0 {
                return Ok((run.end(), (run.len < free.len).then(|| run.end())));
            }
        }
        Ok((to, None))
    }

    fn tell(&self, runs: &[Run]) -> Result<(), FsError> {
        if runs.is_empty() {
            return Ok(());
        }
        self.writable()?;
        // Another that took the device has files there.
        self.is_ours()?;
        let request = |run: &Run| Request::discard(Geometry::byte(run.start), run.len * BLOCK_SIZE as u64);
        Ok(self.io.run(runs.iter().map(request))?)
    }

    /// Lets the allocator have busy blocks that will be free. Others have the metadata lock in
    /// between.
    pub(super) fn free_busy(&self, runs: &[Run]) {
        for some in runs.chunks(FREED_AT_ONCE) {
            let mut meta = self.meta.write();
            for run in some {
                meta.busy.remove(*run);
                meta.pending -= run.len;
            }
        }
    }

    /// Whether the devices have the command; if not, a warning says which one lacks it.
    pub(super) fn can_discard(&self) -> bool {
        let lacking = self.device().without_discard();
        if let Some(device) = lacking {
            tracing::warn!(device, "has no discard: it is not told of blocks that files give up");
        }
        lacking.is_none()
    }

    /// Whether [`Volume::discard_freed`] has something to do.
    pub fn has_to_discard(&self) -> bool {
        !self.discards.lock().is_empty()
    }

    /// Tells the device of the blocks that were freed last, where they lie side by side, and lets
    /// the allocator have them; untold once `goes_on` says no more. A failure is logged: it costs
    /// nothing but the device's speed.
    pub fn discard_freed(&self, goes_on: impl Fn() -> bool) {
        let mut freed = std::mem::take(&mut *self.discards.lock());
        freed.sort_unstable_by_key(|run| run.start);
        let mut left = freed.as_slice();
        while !left.is_empty() {
            let (mut runs, mut taken, mut blocks): (Vec<Run>, _, _) = (Vec::new(), 0, 0);
            for run in left {
                if taken > 0 && blocks + run.len > BATCH {
                    break;
                }
                (taken, blocks) = (taken + 1, blocks + run.len);
                match runs.last_mut().filter(|last| last.end() == run.start) {
                    Some(last) => last.len += run.len,
                    None => runs.push(*run),
                }
            }
            let worth: Vec<Run> = runs.iter().copied().filter(|run| run.len >= FREED_MIN).collect();
            if self.space_waits.has_waiting() || !goes_on() {
                // They are needed now, or the mount ends.
                self.free_busy(&runs);
            } else {
                let _turn = self.space_waits.discard();
                if let Err(error) = self.tell(&worth) {
                    tracing::warn!(device = self.device().name(), %error, "the device was not told of freed blocks");
                }
                self.free_busy(&runs);
            }
            left = &left[taken..];
        }
    }

    /// Lets the allocator have what waits for [`Volume::discard_freed`], untold: it is needed now.
    pub(super) fn use_undiscarded(&self) {
        let freed = std::mem::take(&mut *self.discards.lock());
        self.free_busy(&freed);
    }
}

/// The first free run within `from..to` of a group that is not busy and in no chunk of metadata.
fn next_free(meta: &Meta, group: u64, from: u64, to: u64) -> Attempt<Option<Run>> {
    let bitmap = bitmap(meta, group)?;
    let base = meta.geometry.group_start(group);
    let (mut at, to) = (from - base, to - base);
    let is_metadata = |chunk: u64| bitmap.is_some_and(|b| group::kind(b, chunk) == ChunkKind::Metadata);
    while at < to {
        let Some((start, len)) = bitmap.map_or(Some((at, to - at)), |b| group::find_run(b, at, to, false)) else { break };
        if is_metadata(start / CHUNK_BLOCKS) {
            at = (start / CHUNK_BLOCKS + 1) * CHUNK_BLOCKS;
            continue;
        }
        let mut end = start + len;
        match meta.busy.overlap(base + start, base + end) {
            Some((busy, busy_end)) if busy <= base + start => {
                at = busy_end - base;
                continue;
            }
            Some((busy, _)) => end = busy - base,
            None => {}
        }
        let first_metadata = (start / CHUNK_BLOCKS + 1..=(end - 1) / CHUNK_BLOCKS).find(|chunk| is_metadata(*chunk));
        let end = first_metadata.map_or(end, |chunk| chunk * CHUNK_BLOCKS);
        return Ok(Some(Run { start: base + start, len: end - start }));
    }
    Ok(None)
}
