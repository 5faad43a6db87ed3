//! Where the blocks of a file go that are about to be written.

use super::Filesystem;
use super::file::FileState;
use crate::error::Attempt;
use crate::volume::{Piece, Run};

/// Blocks that a growing file reserves ahead, at least and at most: 8 MiB and 128 MiB.
const WINDOW: std::ops::RangeInclusive<u64> = 2048..=32768;
/// Files below this size reserve nothing ahead.
const GROWS_FROM: u64 = 1 << 20;

/// Blocks of a file that have a place on the device.
#[derive(Debug, Clone, Copy)]
pub(super) struct Placed {
    /// Blocks of the file and of the device, and whether the place was reserved for this write.
    pub piece: Piece,
    /// Mapping them needs no change of metadata: they were written before.
    pub in_place: bool,
}

impl Filesystem {
    /// Finds or reserves a place for blocks `from..to` of a file of `size` bytes. All or nothing.
    pub(super) fn place(&self, state: &mut FileState, ino: u64, size: u64, from: u64, to: u64) -> Attempt<Vec<Placed>> {
        let mut placed = Vec::new();
        let result = self.place_each(state, ino, size, from, to, &mut placed);
        if let Err(fail) = result {
            self.unplace(&placed);
            state.goal = None;
            return Err(fail);
        }
        Ok(placed)
    }

    /// Gives back what was reserved.
    pub(super) fn unplace(&self, placed: &[Placed]) {
        for part in placed.iter().filter(|p| p.piece.reserved) {
            self.volume.unreserve(part.piece.run);
        }
    }

    fn place_each(
        &self,
        state: &mut FileState,
        ino: u64,
        size: u64,
        from: u64,
        to: u64,
        placed: &mut Vec<Placed>,
    ) -> Attempt<()> {
        let mut at = from;
        for mapping in self.volume.map(ino, from, to, usize::MAX)? {
            self.place_hole(state, ino, size, at, mapping.offset, placed)?;
            let run = Run { start: mapping.extent.block, len: mapping.extent.len.into() };
            let piece = Piece { offset: mapping.offset, run, reserved: false };
            placed.push(Placed { piece, in_place: !mapping.extent.unwritten });
            at = mapping.end();
        }
        self.place_hole(state, ino, size, at, to, placed)
    }

    fn place_hole(
        &self,
        state: &mut FileState,
        ino: u64,
        size: u64,
        from: u64,
        to: u64,
        placed: &mut Vec<Placed>,
    ) -> Attempt<()> {
        let mut at = from;
        while at < to {
            let run = self.reserve(state, ino, size, at, to - at)?;
            placed.push(Placed { piece: Piece { offset: at, run, reserved: true }, in_place: false });
            at += run.len;
            state.goal = Some((at, run.end()));
        }
        Ok(())
    }

    /// Reserves a run for a hole at block `at`: behind the block before it, and from what was reserved ahead where it can.
    fn reserve(&self, state: &mut FileState, ino: u64, size: u64, at: u64, want: u64) -> Attempt<Run> {
        let goal = match state.goal.filter(|(block, _)| *block == at) {
            Some((_, goal)) => Some(goal),
            None if at > 0 => self.volume.map(ino, at - 1, at, 1)?.first().map(|m| m.extent.block + 1),
            None => None,
        };
        if let Some(window) = state.window.filter(|w| Some(w.start) == goal) {
            let run = Run { start: window.start, len: window.len.min(want) };
            self.volume.take_from_window(run.len);
            let rest = Run { start: run.end(), len: window.len - run.len };
            state.window = Some(rest).filter(|rest| rest.len > 0);
            return Ok(run);
        }
        let end = (at + want) * gpunvme_layout::block::BLOCK_SIZE as u64;
        let ahead =
            if end >= size && size >= GROWS_FROM && state.opens > 0 { at.clamp(*WINDOW.start(), *WINDOW.end()) } else { 0 };
        let run = self.volume.reserve(goal, want, ahead)?;
        if run.len > want {
            self.drop_window(state);
            state.window = Some(Run { start: run.start + want, len: run.len - want });
        }
        Ok(Run { start: run.start, len: run.len.min(want) })
    }

    /// Gives back what a file has reserved ahead.
    pub(super) fn drop_window(&self, state: &mut FileState) {
        if let Some(window) = state.window.take() {
            self.volume.unreserve_window(window);
        }
    }

    /// Gives back what all files have reserved ahead.
    pub(super) fn drop_windows(&self) {
        for file in self.files.all() {
            self.drop_window(&mut file.state.lock());
        }
    }
}
