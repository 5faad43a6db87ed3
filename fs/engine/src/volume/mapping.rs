//! Mapping: adds blocks to a file once their data is on the device; and sizes, holes and
//! preallocation.
//!
//! A write goes: [`Volume::promise`] when bytes are taken into memory, [`Volume::reserve`] when
//! their place is chosen, [`Volume::map_placed`] when they are on the device. Only the last one
//! changes metadata.

use gpunvme_layout::block::BLOCK_SIZE;
use gpunvme_layout::item::FILE_SIZE_MAX;
use gpunvme_layout::{Extent, FileType, Inode, Timestamp};

use super::extents::{self, Mapping};
use super::inode;
use super::io::blocks_of;
use super::op::Op;
use super::open::{Context, Volume};
use super::orphan;
use super::promised::Promised;
use super::run::Run;
use super::undo::OP_BLOCKS_MAX;
use crate::error::{Attempt, FsError};

/// Extents that one operation maps or passes, about: other threads wait for the metadata lock for
/// as long as that takes.
const EXTENTS_PER_OP: usize = 64;

/// A part of a file whose data is on the device.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PlacedRun {
    /// First block of the file.
    pub offset: u64,
    /// Where the data is.
    pub run: Run,
    /// The blocks were reserved for this write; else they were preallocated to the file, and stay
    /// the file's until it is mapped.
    pub reserved: bool,
}

impl PlacedRun {
    /// Takes away its first blocks.
    pub fn skip(&mut self, blocks: u64) {
        self.offset += blocks;
        self.run = Run { start: self.run.start + blocks, len: self.run.len - blocks };
    }
}

/// Changes to the inode that come with an operation on a file's content.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Stamp {
    /// The size grows to this, if it is smaller.
    pub size: Option<u64>,
    /// Times of change.
    pub changed: Option<Timestamp>,
}

impl Stamp {
    fn apply(&self, inode: &mut Inode) {
        inode.size = inode.size.max(self.size.unwrap_or(0));
        if let Some(changed) = self.changed {
            inode::content_changed(inode, changed);
        }
    }
}

/// The inode of a regular file.
fn regular(op: &Op, ino: u64) -> Attempt<Inode> {
    let inode = inode::load(op, ino)?;
    match inode.file_type() {
        FileType::Regular => Ok(inode),
        FileType::Directory => Err(FsError::IsDirectory.into()),
        _ => Err(FsError::Invalid("not a regular file").into()),
    }
}

impl Volume {
    /// Mappings of blocks `from..to` of a file, in order; at most `limit`.
    pub(crate) fn mappings(&self, ino: u64, from: u64, to: u64, limit: usize) -> Attempt<Vec<Mapping>> {
        extents::mappings(&*self.meta.read(), ino, from, to, limit)
    }

    /// Calls `visit`, under the metadata lock, with each mapping within blocks `from..to` of a
    /// file, clipped to it, in order.
    pub(crate) fn each_mapping(&self, ino: u64, from: u64, to: u64, visit: impl FnMut(Mapping)) -> Attempt<()> {
        extents::each_mapping(&*self.meta.read(), ino, from, to, visit)
    }

    /// The size of a regular file, its mappings, and their version ([`Versions::of`]). None where
    /// it has more than `limit` mappings.
    ///
    /// [`Versions::of`]: super::versions::Versions::of
    pub(crate) fn all_mappings(&self, ino: u64, limit: usize) -> Attempt<Option<(u64, u64, Vec<Mapping>)>> {
        let meta = self.meta.read();
        let inode = inode::load(&*meta, ino)?;
        if inode.file_type() != FileType::Regular {
            return Err(FsError::Invalid("not a regular file").into());
        }
        let found = extents::mappings(&*meta, ino, 0, blocks_of(inode.size), limit + 1)?;
        Ok((found.len() <= limit).then(|| (meta.versions.of(ino), inode.size, found)))
    }

    /// Maps data that is on the device: as many blocks of the placed as one operation can take,
    /// from the first on. It redeems the promised nodes that it needs, and with the last blocks the
    /// promised blocks; and applies the stamp. Returns how many blocks it mapped.
    pub(crate) fn map_placed(
        &self,
        ino: u64,
        placed: impl Iterator<Item = PlacedRun>,
        promised: &mut Promised,
        stamp: &Stamp,
    ) -> Attempt<u64> {
        let mut op = self.begin()?;
        op.promised_parts = promised.parts;
        let mut inode = regular(&op, ino)?;
        let (mut mapped, mut extents, mut reached) = (0, 0, 0);
        for mut placed_run in placed {
            while placed_run.run.len > 0 {
                if extents >= EXTENTS_PER_OP || op.changed_blocks() > OP_BLOCKS_MAX / 3 {
                    // The blocks mapped so far lie below the end, whether or not the rest gets
                    // mapped.
                    inode.size = inode.size.max(stamp.size.unwrap_or(0).min(reached * BLOCK_SIZE as u64));
                    inode::store(&mut op, ino, &inode)?;
                    promised.parts -= op.redeemed_parts();
                    op.finish();
                    return Ok(mapped);
                }
                let (blocks, passed) = map_part(&mut op, ino, &mut inode, &placed_run)?;
                placed_run.skip(blocks);
                mapped += blocks;
                extents += passed;
                reached = reached.max(placed_run.offset);
            }
        }
        stamp.apply(&mut inode);
        inode::store(&mut op, ino, &inode)?;
        promised.parts -= op.redeemed_parts();
        op.redeemed = std::mem::take(&mut promised.blocks);
        op.finish();
        Ok(mapped)
    }

    /// Sets the size. Returns whether [`Volume::truncate_step`] has to free more.
    pub(crate) fn set_size(&self, context: &Context, ino: u64, size: u64) -> Attempt<bool> {
        if size > FILE_SIZE_MAX {
            return Err(FsError::FileTooLarge.into());
        }
        let mut op = self.begin()?;
        let mut inode = regular(&op, ino)?;
        // Blocks preallocated beyond the end stay when the file grows, and only then.
        let step = match size <= inode.size {
            true => extents::remove(&mut op, ino, blocks_of(size), u64::MAX)?,
            false => extents::Step::default(),
        };
        inode.size = size;
        inode.blocks = inode.blocks.saturating_sub(step.blocks);
        inode::content_changed(&mut inode, context.now);
        inode::store(&mut op, ino, &inode)?;
        if step.next.is_some() {
            orphan::add(&mut op, ino)?;
        }
        op.finish();
        Ok(step.next.is_some())
    }

    /// Makes blocks `from..to` a hole, as far as one operation goes. Returns the block to go on
    /// from.
    pub(crate) fn punch_step(&self, context: &Context, ino: u64, from: u64, to: u64) -> Attempt<Option<u64>> {
        let mut op = self.begin()?;
        let mut inode = regular(&op, ino)?;
        let step = extents::remove(&mut op, ino, from, to)?;
        inode.blocks = inode.blocks.saturating_sub(step.blocks);
        inode::content_changed(&mut inode, context.now);
        inode::store(&mut op, ino, &inode)?;
        op.leaves_room()?;
        op.finish();
        Ok(step.next)
    }

    /// Makes written blocks of `from..to` read as zeros while they stay allocated. Returns the
    /// block to go on from.
    pub(crate) fn unwrite_step(&self, context: &Context, ino: u64, from: u64, to: u64) -> Attempt<Option<u64>> {
        let mut op = self.begin()?;
        regular(&op, ino)?;
        let step = extents::convert(&mut op, ino, from, to, true)?;
        inode::change(&mut op, ino, |inode| inode::content_changed(inode, context.now))?;
        op.leaves_room()?;
        op.finish();
        Ok(step.next)
    }

    /// Maps reserved blocks as preallocated ones, and redeems the promised ones. Returns false, and
    /// changes nothing, when another operation has mapped a part of the range in the meantime.
    pub(crate) fn map_unwritten(&self, ino: u64, offset: u64, run: Run, promised: &mut Promised) -> Attempt<bool> {
        let mut op = self.begin()?;
        op.promised_parts = promised.parts;
        regular(&op, ino)?;
        if !extents::mappings(&op, ino, offset, offset + run.len, 1)?.is_empty() {
            return Ok(false);
        }
        op.claim(run)?;
        let extent = Extent { block: run.start, len: run.len as u32, unwritten: true, device: 0 };
        extents::insert(&mut op, ino, Mapping { offset, extent })?;
        inode::change(&mut op, ino, |inode| inode.blocks += run.len)?;
        promised.parts -= op.redeemed_parts();
        op.redeemed = std::mem::take(&mut promised.blocks);
        op.finish();
        Ok(true)
    }

    /// Changes size and times of a file without touching its blocks.
    pub(crate) fn stamp(&self, ino: u64, stamp: &Stamp) -> Attempt<()> {
        let mut op = self.begin()?;
        let mut inode = regular(&op, ino)?;
        stamp.apply(&mut inode);
        inode::store(&mut op, ino, &inode)?;
        op.finish();
        Ok(())
    }
}

/// Maps the first blocks of a placed_run, as far as one step goes. Returns how many, and the
/// extents that it came by.
fn map_part(op: &mut Op, ino: u64, inode: &mut Inode, placed_run: &PlacedRun) -> Attempt<(u64, usize)> {
    let end = placed_run.offset + placed_run.run.len;
    if !placed_run.reserved {
        let step = extents::convert(op, ino, placed_run.offset, end, false)?;
        return Ok((step.next.unwrap_or(end) - placed_run.offset, step.extents));
    }
    // Another write may have mapped the range meanwhile: the last one wins.
    let step = extents::remove(op, ino, placed_run.offset, end)?;
    let run = Run { start: placed_run.run.start, len: step.next.unwrap_or(end) - placed_run.offset };
    op.claim(run)?;
    let extent = Extent { block: run.start, len: run.len as u32, unwritten: false, device: 0 };
    extents::insert(op, ino, Mapping { offset: placed_run.offset, extent })?;
    inode.blocks = (inode.blocks + run.len).saturating_sub(step.blocks);
    Ok((run.len, step.extents + 1))
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::volume::Splits;
    use crate::volume::format::tests::volume;

    #[test]
    fn what_a_file_reserves_ahead_leaves_the_margin_to_metadata() {
        let volume = volume(64 << 20);
        let available = volume.usage().available;
        let run = volume.wait(|| volume.reserve(None, 512, 1 << 20)).unwrap();
        assert!(run.len > 512 && run.len <= available, "{} blocks, and {available} are for data", run.len);
    }

    #[test]
    fn the_last_blocks_are_found_behind_writes_that_are_in_flight() {
        let volume = volume(64 << 20);
        let mut left = volume.usage().available;
        let reserve = |want| volume.wait(|| volume.reserve(None, want, 0));
        while left > 2048 {
            left -= reserve((left - 2048).min(512 * 8)).unwrap().len;
        }
        // Each takes a new chunk: what the last one left in its own is too short for the next one.
        for want in [2, 511, 2, 511, 2, 511] {
            let run = reserve(want).unwrap();
            assert_eq!(run.len, want);
            left -= want;
        }
        while left > 0 {
            let run = reserve(left.min(300)).unwrap_or_else(|error| panic!("{left} blocks are left: {error}"));
            left -= run.len;
        }
    }

    pub(in crate::volume) fn new_file(volume: &Volume, name: &[u8]) -> u64 {
        let context = Context { uid: 0, gid: 0, now: Timestamp { seconds: 1, nanoseconds: 0 } };
        let new = crate::volume::NewNode { mode: 0o100644, umask: 0, rdev: 0, target: &[] };
        volume.wait(|| volume.create(&context, 1, name, &new)).unwrap().0.ino
    }

    /// Maps pieces to the last, and returns how many operations that took.
    fn map_all(volume: &Volume, ino: u64, pieces: &[PlacedRun]) -> usize {
        let mut left = pieces.to_vec();
        for operations in 1.. {
            let mut mapped = volume
                .wait(|| volume.map_placed(ino, left.iter().copied(), &mut Promised::default(), &Stamp::default()))
                .unwrap();
            while let Some(first) = left.first_mut().filter(|_| mapped > 0) {
                let blocks = mapped.min(first.run.len);
                first.skip(blocks);
                mapped -= blocks;
                if first.run.len == 0 {
                    left.remove(0);
                }
            }
            if left.is_empty() {
                return operations;
            }
        }
        unreachable!("it ends")
    }

    #[test]
    fn extents_that_come_in_descending_order_behind_a_full_leaf_share_leaves() {
        let volume = volume(256 << 20);
        let free_nodes = || volume.wait(|| volume.begin()?.free_nodes()).unwrap();
        let all = free_nodes();
        // One of the files has filled its leaf when the order turns.
        for first in 0..120u64 {
            let ino = new_file(&volume, first.to_string().as_bytes());
            let map = |offset: u64| {
                let run = volume.wait(|| volume.reserve(None, 1, 0)).unwrap();
                map_all(&volume, ino, &[PlacedRun { offset, run, reserved: true }]);
            };
            (0..first).for_each(|number| map(2 * number));
            let before = free_nodes();
            (0..100).rev().for_each(|number| map(10_000 + 2 * number));
            let taken = before.saturating_sub(free_nodes());
            assert!(taken < 5, "{taken} nodes of {all} after {first} extents");
        }
    }

    /// Each hole between extents that fill leaves splits one of these.
    #[test]
    fn a_write_over_full_leaves_takes_no_more_nodes_than_were_promised() {
        const BLOCKS: u64 = 9000;
        let volume = volume(256 << 20);
        let inos = [new_file(&volume, b"a"), new_file(&volume, b"b")];
        let map = |ino: u64, offset: u64, promised: &mut Promised| {
            let run = volume.wait(|| volume.reserve(None, 1, 0)).unwrap();
            let placed = [PlacedRun { offset, run, reserved: true }];
            volume.wait(|| volume.map_placed(ino, placed.into_iter(), promised, &Stamp::default())).unwrap();
        };
        let is_hole = |block: &u64| block % 113 == 56;
        // In turns, so that no two blocks of a file lie side by side. The last file fills leaves.
        for block in (0..BLOCKS).filter(|block| !is_hole(block)) {
            inos.iter().for_each(|ino| map(*ino, block, &mut Promised::default()));
        }
        let holes = (0..BLOCKS).filter(is_hole).count() as u64;
        let mut splits = Splits::default();
        splits.add_write(holes, 0, BLOCKS - holes);
        let mut promised = volume.wait(|| volume.promise(holes, splits)).unwrap();
        promised.blocks = 0;
        let free_nodes = || volume.wait(|| volume.begin()?.free_nodes()).unwrap();
        let before = free_nodes();
        (0..BLOCKS).filter(is_hole).for_each(|block| map(inos[1], block, &mut promised));
        let taken = before - free_nodes();
        assert!(taken > holes / 2, "no leaf was full: {taken} nodes for {holes} holes");
        assert!(promised.parts > 0, "{taken} nodes were taken, and no more promised");
    }

    #[test]
    fn mapping_a_long_piece_over_many_extents_takes_operations_that_are_each_bounded() {
        const PIECES: u64 = 60_000;
        let volume = volume(1 << 30);
        let ino = new_file(&volume, b"file");
        let (mut long, mut at) = (Vec::new(), 0);
        while at < 2 * PIECES {
            let run = volume.wait(|| volume.reserve(None, 2 * PIECES - at, 0)).unwrap();
            assert!(volume.wait(|| volume.map_unwritten(ino, at, run, &mut Promised::default())).unwrap());
            long.push(PlacedRun { offset: at, run, reserved: false });
            at += run.len;
        }
        // In no order, as they come from many threads.
        for number in 0..PIECES {
            let at = number * 7919 % PIECES * 2;
            let piece = long.iter().find(|piece| (piece.offset..piece.offset + piece.run.len).contains(&at)).unwrap();
            let run = Run { start: piece.run.start + (at - piece.offset), len: 1 };
            map_all(&volume, ino, &[PlacedRun { offset: at, run, reserved: false }]);
        }
        let before = volume.wait(|| volume.mappings(ino, 0, 2 * PIECES, usize::MAX)).unwrap();
        assert!(before.len() as u64 >= 2 * PIECES);
        let operations = map_all(&volume, ino, &long);
        assert!(operations >= before.len() / (EXTENTS_PER_OP + 16), "{operations} operations for {} extents", before.len());
        let after = volume.wait(|| volume.mappings(ino, 0, 2 * PIECES, usize::MAX)).unwrap();
        assert!(after.iter().all(|mapping| !mapping.extent.unwritten) && after.len() < 32);
    }
}
