//! Extents of files: which blocks of the device hold which blocks of a file. Blocks of a file that
//! no extent covers are a hole.

use std::ops::ControlFlow;

use gpunvme_layout::geometry::GROUP_BLOCKS;
use gpunvme_layout::item::EXTENT_BLOCKS_MAX;
use gpunvme_layout::{Corrupt, Extent, Geometry, Key, Kind};

use super::meta::Blocks;
use super::op::Op;
use super::run::Run;
use super::tree;
use crate::error::Attempt;

/// Extents that one step of an operation removes or converts at the most: it keeps operations
/// bounded.
const EXTENTS_PER_STEP: usize = 16;
/// Blocks that one step takes or frees at the most, for the same reason.
pub(crate) const BLOCKS_PER_STEP: u64 = 16 * GROUP_BLOCKS;

/// A part of a file and where it lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mapping {
    /// First block of the file.
    pub offset: u64,
    /// Where it lies.
    pub extent: Extent,
}

impl Mapping {
    /// First block of the file beyond it.
    pub fn end(&self) -> u64 {
        self.offset + u64::from(self.extent.len)
    }

    /// Where it begins on the device, in bytes.
    pub fn device_offset(&self) -> u64 {
        Geometry::byte(self.extent.block)
    }

    /// The part of it within `from..to`.
    pub(crate) fn clip(&self, from: u64, to: u64) -> Mapping {
        let (start, end) = (self.offset.max(from), self.end().min(to));
        Mapping {
            offset: start,
            extent: Extent { block: self.extent.block + (start - self.offset), len: (end - start) as u32, ..self.extent },
        }
    }

    fn run(&self) -> Run {
        Run { start: self.extent.block, len: self.extent.len.into() }
    }
}

/// The mappings within blocks `from..to` of a file, clipped to it, in order; at most `limit`.
pub(crate) fn mappings(blocks: &impl Blocks, ino: u64, from: u64, to: u64, limit: usize) -> Attempt<Vec<Mapping>> {
    let whole = map_whole(blocks, ino, from, to, limit)?;
    Ok(whole.into_iter().map(|m| m.clip(from, to)).collect())
}

/// Calls `visit` with each mapping within blocks `from..to` of a file, clipped to it, in order.
pub(crate) fn each_mapping(blocks: &impl Blocks, ino: u64, from: u64, to: u64, mut visit: impl FnMut(Mapping)) -> Attempt<()> {
    visit_whole(blocks, ino, from, to, |mapping| {
        visit(mapping.clip(from, to));
        ControlFlow::Continue(())
    })
}

/// The mappings that overlap blocks `from..to` of a file, in order; at most `limit`.
fn map_whole(blocks: &impl Blocks, ino: u64, from: u64, to: u64, limit: usize) -> Attempt<Vec<Mapping>> {
    let mut found = Vec::new();
    if limit > 0 {
        visit_whole(blocks, ino, from, to, |mapping| {
            found.push(mapping);
            if found.len() < limit { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
        })?;
    }
    Ok(found)
}

/// Calls `visit` with the mappings that overlap blocks `from..to` of a file, in order, until it
/// breaks.
fn visit_whole(
    blocks: &impl Blocks,
    ino: u64,
    from: u64,
    to: u64,
    mut visit: impl FnMut(Mapping) -> ControlFlow<()>,
) -> Attempt<()> {
    let start = Key::new(ino, Kind::Extent, from);
    let mut end = 0;
    tree::scan_floor(blocks, start, |key, value| {
        if key < start && !key.is(ino, Kind::Extent) {
            return Ok(ControlFlow::Continue(()));
        }
        if !key.is(ino, Kind::Extent) || key.offset() >= to {
            return Ok(ControlFlow::Break(()));
        }
        let mapping = Mapping { offset: key.offset(), extent: Extent::decode(ino, key.offset(), value)? };
        if mapping.offset < end || !blocks.meta().geometry.contains_data(mapping.extent.block, mapping.extent.len.into()) {
            return Err(Corrupt::Item { ino, what: "extents overlap, or lie outside the data area" }.into());
        }
        end = mapping.end();
        Ok(if mapping.end() > from { visit(mapping) } else { ControlFlow::Continue(()) })
    })?;
    Ok(())
}

/// Maps blocks of a file that are a hole; joins the neighbours where they continue one another.
pub(crate) fn insert(op: &mut Op, ino: u64, mut new: Mapping) -> Attempt<()> {
    let fits = |a: &Mapping, b: &Mapping| {
        a.end() == b.offset
            && a.extent.block + u64::from(a.extent.len) == b.extent.block
            && a.extent.unwritten == b.extent.unwritten
            && u64::from(a.extent.len) + u64::from(b.extent.len) <= EXTENT_BLOCKS_MAX
    };
    let near = map_whole(op, ino, new.offset.saturating_sub(1), new.end() + 1, 3)?;
    let before = near.iter().find(|m| fits(m, &new)).copied();
    let after = near.iter().find(|m| fits(&new, m)).copied();
    if let Some(after) = after {
        tree::remove(op, Key::new(ino, Kind::Extent, after.offset))?;
        new.extent.len += after.extent.len;
    }
    match before {
        Some(before) if fits(&before, &new) => {
            let extent = Extent { len: before.extent.len + new.extent.len, ..before.extent };
            tree::put(op, Key::new(ino, Kind::Extent, before.offset), &extent.encode())
        }
        _ => tree::put(op, Key::new(ino, Kind::Extent, new.offset), &new.extent.encode()),
    }
}

/// How far a step came.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Step {
    /// Extents that it came by.
    pub extents: usize,
    /// Blocks that changed hands.
    pub blocks: u64,
    /// Block of the file to go on from; none when the range is done.
    pub next: Option<u64>,
}

/// Makes blocks `from..to` of a file a hole, as far as one step goes, and frees what they had.
pub(crate) fn remove(op: &mut Op, ino: u64, from: u64, to: u64) -> Attempt<Step> {
    let found = map_whole(op, ino, from, to, EXTENTS_PER_STEP)?;
    let mut step = step_over(&found, to);
    for whole in &found {
        let cut = whole.clip(from, to);
        let cut = cut.clip(cut.offset, cut.offset + (BLOCKS_PER_STEP - step.blocks));
        take_out(op, ino, whole, &cut)?;
        op.release(cut.run())?;
        step.blocks += u64::from(cut.extent.len);
        if step.blocks == BLOCKS_PER_STEP {
            step.next = Some(cut.end()).filter(|next| *next < to);
            break;
        }
    }
    Ok(step)
}

/// Makes preallocated blocks `from..to` of a file written ones (`unwritten` false), or written
/// ones preallocated, which read as zeros; holes stay holes. As far as one step goes.
pub(crate) fn convert(op: &mut Op, ino: u64, from: u64, to: u64, unwritten: bool) -> Attempt<Step> {
    let found = map_whole(op, ino, from, to, EXTENTS_PER_STEP)?;
    let mut step = step_over(&found, to);
    for whole in found.iter().filter(|m| m.extent.unwritten != unwritten) {
        let cut = whole.clip(from, to);
        // In the order of the keys: a leaf that grows at its end stays full.
        end_before(op, ino, whole, &cut)?;
        insert(op, ino, Mapping { extent: Extent { unwritten, ..cut.extent }, ..cut })?;
        begin_behind(op, ino, whole, &cut)?;
        step.blocks += u64::from(cut.extent.len);
    }
    Ok(step)
}

/// A step that comes by these extents on its way to block `to`.
fn step_over(found: &[Mapping], to: u64) -> Step {
    let last = found.last().filter(|_| found.len() == EXTENTS_PER_STEP);
    Step { extents: found.len(), blocks: 0, next: last.map(Mapping::end).filter(|next| *next < to) }
}

/// Takes the part `cut` out of the extent `whole`; what is left and right of it stays.
pub(crate) fn take_out(op: &mut Op, ino: u64, whole: &Mapping, cut: &Mapping) -> Attempt<()> {
    end_before(op, ino, whole, cut)?;
    begin_behind(op, ino, whole, cut)
}

/// Leaves of an extent what is left of a part of it.
fn end_before(op: &mut Op, ino: u64, whole: &Mapping, cut: &Mapping) -> Attempt<()> {
    if whole.offset < cut.offset {
        let left = whole.clip(whole.offset, cut.offset);
        tree::put(op, Key::new(ino, Kind::Extent, left.offset), &left.extent.encode())?;
    } else {
        tree::remove(op, Key::new(ino, Kind::Extent, whole.offset))?;
    }
    Ok(())
}

/// Maps what is right of a part of an extent.
fn begin_behind(op: &mut Op, ino: u64, whole: &Mapping, cut: &Mapping) -> Attempt<()> {
    if cut.end() < whole.end() {
        let right = whole.clip(cut.end(), whole.end());
        tree::put(op, Key::new(ino, Kind::Extent, right.offset), &right.extent.encode())?;
    }
    Ok(())
}
