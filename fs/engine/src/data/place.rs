//! Placement: chooses the place on the device of blocks that are about to be written.

use std::ops::Range;

use smallvec::SmallVec;

use super::file::FileState;
use super::filesystem::Filesystem;
use crate::error::Attempt;
use crate::volume::{Mapping, PlacedRun, Promised, Run, Stamp};

/// Blocks that a growing file reserves ahead, at least and at most: 8 MiB and 128 MiB.
const PREALLOCATION: std::ops::RangeInclusive<u64> = 2048..=32768;
/// Files below this size reserve nothing ahead.
const GROWS_FROM: u64 = 1 << 20;

/// Where the blocks of one batch go, and how far their mapping has come.
#[derive(Default)]
pub(super) struct Placement {
    /// In the order of the blocks.
    targets: SmallVec<[Target; 1]>,
    /// Targets before this index are mapped; the target at it holds only the blocks that are left.
    mapped: usize,
}

/// A run that blocks are written to.
#[derive(Clone, Copy)]
struct Target {
    placed: PlacedRun,
    /// The blocks were written before: nothing in the metadata changes.
    in_place: bool,
}

impl Placement {
    /// All runs, in the order of the blocks that were asked for.
    pub fn runs(&self) -> impl Iterator<Item = &PlacedRun> {
        self.targets.iter().map(|target| &target.placed)
    }

    /// Notes that the next blocks are mapped.
    fn skip(&mut self, mut blocks: u64) {
        while blocks > 0 {
            let placed = &mut self.targets[self.mapped].placed;
            let part = blocks.min(placed.run.len);
            blocks -= part;
            placed.skip(part);
            self.mapped += usize::from(placed.run.len == 0);
        }
    }

    /// Whether all blocks were written before, so that none has to be mapped.
    pub fn is_in_place(&self) -> bool {
        self.targets.iter().all(|target| target.in_place)
    }
}

impl Filesystem {
    /// Finds or reserves a place for runs of blocks of a file of `size` bytes. All or nothing.
    pub(super) fn place(
        &self,
        state: &mut FileState,
        ino: u64,
        size: u64,
        runs: impl IntoIterator<Item = Range<u64>>,
    ) -> Attempt<Placement> {
        let mut placement = Placement::default();
        for run in runs {
            if let Err(fail) = self.place_run(state, ino, size, run, &mut placement) {
                self.unplace(&mut placement);
                state.allocation.goal = None;
                return Err(fail);
            }
        }
        Ok(placement)
    }

    /// Gives back the reserved blocks that are not mapped.
    pub(super) fn unplace(&self, placement: &mut Placement) {
        for target in placement.targets.drain(..).skip(placement.mapped).filter(|target| target.placed.reserved) {
            self.volume.unreserve(target.placed.run);
        }
    }

    /// Maps the placed blocks, once their data is on the device, as far as one operation goes.
    /// Returns whether all are mapped. Only the placement records how far it came: the file's lock
    /// need not be held in between.
    pub(super) fn map_placement(
        &self,
        ino: u64,
        placement: &mut Placement,
        promised: &mut Promised,
        stamp: &Stamp,
    ) -> Attempt<bool> {
        if placement.mapped == 0 {
            // Those that change nothing go first, so that the rest is one slice.
            placement.targets.sort_by_key(|target| !target.in_place);
            placement.mapped = placement.targets.iter().filter(|target| target.in_place).count();
        }
        let left = &placement.targets[placement.mapped..];
        let mapped = self.volume.map_placed(ino, left.iter().map(|target| target.placed), promised, stamp)?;
        placement.skip(mapped);
        Ok(placement.mapped == placement.targets.len())
    }

    fn place_run(&self, state: &mut FileState, ino: u64, size: u64, run: Range<u64>, placement: &mut Placement) -> Attempt<()> {
        let mut at = run.start;
        let mut mappings: SmallVec<[Mapping; 2]> = SmallVec::new();
        self.volume.each_mapping(ino, run.start, run.end, |mapping| mappings.push(mapping))?;
        for mapping in mappings {
            self.place_hole(state, ino, size, at..mapping.offset, placement)?;
            let run = Run { start: mapping.extent.block, len: mapping.extent.len.into() };
            let placed = PlacedRun { offset: mapping.offset, run, reserved: false };
            placement.targets.push(Target { placed, in_place: !mapping.extent.unwritten });
            at = mapping.end();
        }
        self.place_hole(state, ino, size, at..run.end, placement)
    }

    fn place_hole(&self, state: &mut FileState, ino: u64, size: u64, hole: Range<u64>, placement: &mut Placement) -> Attempt<()> {
        let mut at = hole.start;
        while at < hole.end {
            let run = self.reserve(state, ino, size, at, hole.end - at)?;
            placement.targets.push(Target { placed: PlacedRun { offset: at, run, reserved: true }, in_place: false });
            at += run.len;
            state.allocation.goal = Some((at, run.end()));
        }
        Ok(())
    }

    /// Reserves a run for a hole at block `at`: behind the block before it, and from what was
    /// reserved ahead where it can.
    fn reserve(&self, state: &mut FileState, ino: u64, size: u64, at: u64, want: u64) -> Attempt<Run> {
        let goal = match state.allocation.goal.filter(|(block, _)| *block == at) {
            Some((_, goal)) => Some(goal),
            None if at > 0 => self.volume.mappings(ino, at - 1, at, 1)?.first().map(|m| m.extent.block + 1),
            None => None,
        };
        if let Some(ahead) = state.allocation.ahead.filter(|w| Some(w.start) == goal) {
            let run = Run { start: ahead.start, len: ahead.len.min(want) };
            self.volume.take_from_ahead(run.len);
            let rest = Run { start: run.end(), len: ahead.len - run.len };
            state.allocation.ahead = Some(rest).filter(|rest| rest.len > 0);
            return Ok(run);
        }
        let end = (at + want) * gpunvme_layout::block::BLOCK_SIZE as u64;
        let ahead = if end >= size && size >= GROWS_FROM && state.is_in_use() {
            at.clamp(*PREALLOCATION.start(), *PREALLOCATION.end())
        } else {
            0
        };
        let run = self.volume.reserve(goal, want, ahead)?;
        if run.len > want {
            self.release_ahead(state);
            state.allocation.ahead = Some(Run { start: run.start + want, len: run.len - want });
        }
        Ok(Run { start: run.start, len: run.len.min(want) })
    }

    /// Gives back what a file has reserved ahead.
    pub(super) fn release_ahead(&self, state: &mut FileState) {
        if let Some(ahead) = state.allocation.ahead.take() {
            self.volume.unreserve_ahead(ahead);
        }
    }

    /// Gives back what all files have reserved ahead.
    pub(super) fn release_all_ahead(&self) {
        for file in self.files.all() {
            self.release_ahead(&mut file.state.lock());
        }
    }
}
