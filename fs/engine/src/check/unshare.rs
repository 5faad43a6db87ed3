//! Gives files blocks of their own in place of those that something else has too: all of a file in
//! one pass over its extents, however many of its blocks are shared.

use std::ops::ControlFlow;

use gpunvme_blockdev::{Region, Request, Span};
use gpunvme_layout::block::BLOCK_SIZE;
use gpunvme_layout::{Extent, Geometry, Key, Kind as ItemKind};

use super::mend::Mender;
use crate::error::{Attempt, FsError};
use crate::volume::extents::{Mapping, take_out};
use crate::volume::meta::Blocks;
use crate::volume::op::Op;
use crate::volume::{Run, tree};

/// Extents that are looked at together: the leaves that hold them are in memory at once.
const EXTENTS_PER_LOOK: usize = 256;
/// Blocks that are copied at once.
const COPY_BLOCKS: u64 = 256;

/// Blocks of a file that something else has too.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Shared {
    pub run: Run,
    /// Whether their content is copied to the new blocks; else a hole takes their place.
    pub copy: bool,
    /// It is the file itself that has them twice: its first part that does keeps them.
    pub second: bool,
}

impl Mender<'_> {
    /// Gives the parts of a file that lie in shared blocks others.
    pub(super) fn unshare(&self, ino: u64, shared: &[Shared]) -> Result<(), FsError> {
        let mut shared = disjoint(shared);
        let mut from = Some(0);
        while let Some(start) = from {
            self.stop.check()?;
            let (extents, next) = self.volume.wait(|| look(&*self.volume.meta.read(), ino, start, &shared))?;
            for extent in extents {
                self.unshare_extent(ino, extent, &mut shared)?;
            }
            from = next;
        }
        Ok(())
    }

    fn unshare_extent(&self, ino: u64, mut rest: Mapping, shared: &mut [Shared]) -> Result<(), FsError> {
        let end = rest.extent.block + u64::from(rest.extent.len);
        let first = first_behind(shared, rest.extent.block);
        for Shared { run, copy, second } in shared[first..].iter_mut().take_while(|shared| shared.run.start < end) {
            if std::mem::take(second) {
                continue;
            }
            let in_file = |block: u64| rest.offset + (block - rest.extent.block);
            let cut = rest.clip(in_file(run.start.max(rest.extent.block)), in_file(run.end().min(end)));
            match copy {
                true => self.copy(ino, cut)?,
                false => self.op(&mut |op| take_out(op, ino, &rest, &cut))?,
            }
            if cut.end() == rest.end() {
                break;
            }
            rest = rest.clip(cut.end(), rest.end());
        }
        Ok(())
    }

    /// Copies a part of a file into blocks of its own, and maps those.
    fn copy(&self, ino: u64, part: Mapping) -> Result<(), FsError> {
        let mut at = part.offset;
        while at < part.end() {
            let want = part.end() - at;
            let run = self.volume.wait(|| self.volume.reserve(None, want, 0))?;
            let from = part.clip(at, at + run.len);
            let copied = if part.extent.unwritten { Ok(()) } else { self.copy_blocks(from.extent.block, run) };
            let mapped = copied.and_then(|()| {
                self.op(&mut |op| {
                    let whole = extent_with(op, ino, &from)?;
                    take_out(op, ino, &whole, &from)?;
                    op.claim(run)?;
                    let extent = Extent { block: run.start, ..from.extent };
                    tree::put(op, Key::new(ino, ItemKind::Extent, at), &extent.encode())
                })
            });
            if let Err(error) = mapped {
                self.volume.unreserve(run);
                return Err(error);
            }
            at += run.len;
        }
        Ok(())
    }

    fn copy_blocks(&self, from: u64, to: Run) -> Result<(), FsError> {
        for at in (0..to.len).step_by(COPY_BLOCKS as usize) {
            self.stop.check()?;
            let len = COPY_BLOCKS.min(to.len - at) as usize * BLOCK_SIZE;
            let span = Span { region: Region::allocate(len)?, offset: 0, len };
            let io = self.volume.io();
            io.run(vec![Request::read(Geometry::byte(from + at), vec![span.clone()])])?;
            io.run(vec![Request::write(Geometry::byte(to.start + at), vec![span], false)])?;
        }
        // The commit that maps them flushes them first.
        self.volume.unflushed.add();
        Ok(())
    }
}

/// Runs that do not overlap, in their order. Where some overlap, no part of the file keeps blocks
/// that something else has, and nothing is copied that is a node of the tree.
fn disjoint(shared: &[Shared]) -> Vec<Shared> {
    // What begins (or, with -1, ends) at a block: runs, runs that are not copied, runs that no part
    // of the file keeps.
    let mut edges: Vec<(u64, [i32; 3])> = Vec::with_capacity(2 * shared.len());
    for Shared { run, copy, second } in shared {
        let counts = [1, i32::from(!copy), i32::from(!second)];
        edges.extend([(run.start, counts), (run.end(), counts.map(|count| -count))]);
    }
    edges.sort_unstable();
    let (mut disjoint, mut counts, mut start) = (Vec::new(), [0; 3], 0);
    for (at, change) in edges {
        if at > start && counts[0] > 0 {
            disjoint.push(Shared { run: Run { start, len: at - start }, copy: counts[1] == 0, second: counts[2] == 0 });
        }
        start = at;
        counts.iter_mut().zip(change).for_each(|(count, change)| *count += change);
    }
    disjoint
}

/// The first of the runs that ends behind a block.
fn first_behind(shared: &[Shared], block: u64) -> usize {
    shared.partition_point(|shared| shared.run.end() <= block)
}

/// The extents of a file, of the next ones from block `from` of it on, that have shared blocks; and
/// where the next look begins.
fn look(blocks: &impl Blocks, ino: u64, from: u64, shared: &[Shared]) -> Attempt<(Vec<Mapping>, Option<u64>)> {
    let (mut found, mut left) = (Vec::new(), EXTENTS_PER_LOOK);
    let next = tree::scan(blocks, Key::new(ino, ItemKind::Extent, from), |key, value| {
        if !key.is(ino, ItemKind::Extent) {
            return Ok(ControlFlow::Break(None));
        }
        let extent = Mapping { offset: key.offset(), extent: Extent::decode(ino, key.offset(), value)? };
        let Extent { block, len, .. } = extent.extent;
        if shared.get(first_behind(shared, block)).is_some_and(|shared| shared.run.start < block + u64::from(len)) {
            found.push(extent);
        }
        left -= 1;
        Ok(if left == 0 { ControlFlow::Break(Some(extent.end())) } else { ControlFlow::Continue(()) })
    })?;
    Ok((found, next.flatten()))
}

/// The extent of a file of which this is a part.
fn extent_with(op: &Op, ino: u64, part: &Mapping) -> Attempt<Mapping> {
    let found = tree::floor(op, Key::new(ino, ItemKind::Extent, part.offset))?.filter(|(key, _)| key.is(ino, ItemKind::Extent));
    let (key, value) = found.ok_or(FsError::NotFound)?;
    let whole = Mapping { offset: key.offset(), extent: Extent::decode(ino, key.offset(), value)? };
    let is_part = whole.end() >= part.end() && whole.clip(part.offset, part.end()) == *part;
    if is_part { Ok(whole) } else { Err(FsError::NotFound.into()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shared(run: std::ops::Range<u64>, copy: bool, second: bool) -> Shared {
        Shared { run: Run { start: run.start, len: run.end - run.start }, copy, second }
    }

    #[test]
    fn overlapping_runs_become_runs_side_by_side_that_do_all_that_is_asked_for() {
        assert_eq!(disjoint(&[]), []);
        let asked = [
            shared(20..30, true, true),
            shared(5..10, true, false),
            shared(25..40, true, false),
            shared(28..35, false, false),
            shared(20..30, true, true),
            shared(10..12, true, true),
        ];
        let expected = [
            shared(5..10, true, false),
            shared(10..12, true, true),
            shared(20..25, true, true),
            shared(25..28, true, false),
            shared(28..30, false, false),
            shared(30..35, false, false),
            shared(35..40, true, false),
        ];
        assert_eq!(disjoint(&asked), expected);
        assert_eq!([4, 5, 9, 10, 39, 40].map(|block| first_behind(&expected, block)), [0, 0, 0, 1, 6, 7]);
    }
}
