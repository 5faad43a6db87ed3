//! Sizes, holes and preallocation: truncate, fallocate and lseek.

use std::ops::Range;
use std::sync::Arc;

use gpunvme_layout::block::BLOCK_SIZE;
use gpunvme_layout::item::FILE_SIZE_MAX;
use parking_lot::MutexGuard;

use super::file::{File, FileState, Truncation};
use super::filesystem::Filesystem;
use crate::error::{Attempt, Fail, FsError, Stall};
use crate::volume::extents::BLOCKS_PER_STEP;
use crate::volume::{Attributes, Context, Splits, Stamp};

const BLOCK: u64 = BLOCK_SIZE as u64;

/// The kinds of fallocate(2).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Allocate {
    /// Preallocate; the file grows when `grow` is set.
    Reserve {
        /// Without `FALLOC_FL_KEEP_SIZE`.
        grow: bool,
    },
    /// Make a hole (`FALLOC_FL_PUNCH_HOLE`).
    Punch,
    /// Make zeros that are allocated (`FALLOC_FL_ZERO_RANGE`).
    Zero {
        /// Without `FALLOC_FL_KEEP_SIZE`.
        grow: bool,
    },
}

impl Filesystem {
    /// Sets the size of a file. Stalls while writes of the file are in flight, and blocks the
    /// thread while it frees blocks beyond the new end: not for a FUSE loop.
    pub fn set_size(self: &Arc<Self>, context: &Context, ino: u64, size: u64) -> Attempt<Attributes> {
        if size > FILE_SIZE_MAX {
            return Err(FsError::FileTooLarge.into());
        }
        let file = self.files.get(ino);
        let mut state = file.state.lock();
        let result = self.resize(&mut state, context, ino, size);
        drop(state);
        let result = result.and_then(|()| Ok(self.finish_truncation(&file)?));
        self.release(&file);
        result?;
        self.attributes(ino)
    }

    /// Whether a truncation has left blocks beyond the end of a file that are still to be freed.
    pub(super) fn is_cut_short(&self, state: &mut FileState, ino: u64) -> Attempt<bool> {
        if state.truncation == Truncation::Unknown {
            let is_cut_short = self.volume.is_cut_short(ino)?;
            state.truncation = if is_cut_short { Truncation::Pending } else { Truncation::Over };
        }
        Ok(state.truncation != Truncation::Over)
    }

    /// Frees the blocks that a truncation has left beyond the end of a file. Other operations wait
    /// for this only if they make the file grow.
    pub(super) fn finish_truncation(self: &Arc<Self>, file: &Arc<File>) -> Result<(), FsError> {
        let mut state = file.state.lock();
        self.wait_until(file, &mut state, |state| state.truncation != Truncation::InFlight);
        self.free_remains(file, state, &mut || true).map(drop)
    }

    /// Frees, step by step as long as `goes_on` says so, what a truncation has left that no thread
    /// frees. Returns whether there is more.
    pub(super) fn free_remains(
        &self,
        file: &File,
        mut state: MutexGuard<FileState>,
        goes_on: &mut dyn FnMut() -> bool,
    ) -> Result<bool, FsError> {
        if state.truncation != Truncation::Pending {
            return Ok(false);
        }
        state.truncation = Truncation::InFlight;
        drop(state);
        let freed = loop {
            match self.volume.wait(|| self.volume.truncate_step(file.ino)) {
                Ok(true) if goes_on() => {}
                Err(FsError::NotFound) => break Ok(false),
                freed => break freed,
            }
        };
        file.state.lock().truncation = if matches!(freed, Ok(false)) { Truncation::Over } else { Truncation::Pending };
        file.landed.notify_all();
        freed
    }

    fn resize(&self, state: &mut FileState, context: &Context, ino: u64, size: u64) -> Attempt<()> {
        let old = self.size_of_regular(state, ino)?;
        self.volume.writable()?;
        let stored = self.volume.stored_attributes(ino)?.inode.size;
        if !state.in_flight.writes.is_empty() {
            return Err(Fail::Stall(Stall::InFlight { ino }));
        }
        // A size that grows must not be stored before the data below it is on the device.
        if self.is_cut_short(state, ino)? || (state.buffer.dirty > 0 && size > stored) {
            return Err(Fail::Stall(Stall::File { ino }));
        }
        // The kernel sets the size, so it knows the size.
        state.kernel.outgrown = None;
        if size > old && self.zero_tail(state, ino, old, size)? {
            // As after a write: the inode learns of the size when the zeros are on the device.
            state.newer.size = Some(size);
            state.newer.changes_at(context.now);
            state.buffer.last = None;
            return Ok(());
        }
        let now = state.newer.time_of_change(context.now);
        let more = self.volume.set_size(&Context { now, ..*context }, ino, size)?;
        self.drop_pages(state, size.div_ceil(BLOCK));
        state.buffer.content_changes(size.min(old) / BLOCK..u64::MAX);
        self.release_ahead(state);
        if let Some((pages, at)) = state.buffer.pages.find(size / BLOCK) {
            pages.zero(at * BLOCK_SIZE + (size % BLOCK) as usize..(at + 1) * BLOCK_SIZE)?;
        }
        // The inode has the new size; what is still in memory lies below it.
        (state.newer.size, state.allocation.goal) = (None, None);
        state.newer.changed_at(now);
        state.allocation.tail_is_zero &= size >= old;
        state.newer.shrinks += u64::from(size < old);
        if more {
            state.truncation = Truncation::Pending;
        }
        Ok(())
    }

    /// Passes when a size of `end` bytes may be stored. Stalls while blocks that it would uncover
    /// are still to be freed, or to be overwritten by data in memory.
    pub(super) fn may_grow(&self, state: &mut FileState, ino: u64, end: u64) -> Attempt<()> {
        let is_cut_short = self.is_cut_short(state, ino)?;
        if !is_cut_short && state.buffer.pages.is_empty() && state.in_flight.pages.is_empty() {
            return Ok(());
        }
        let stored = self.volume.stored_attributes(ino)?.inode.size;
        let tail = stored / BLOCK;
        let uncovers = is_cut_short || (state.may_hide(stored) && state.has_dirty(tail, tail + 1));
        if end > stored && uncovers { Err(Fail::Stall(Stall::File { ino })) } else { Ok(()) }
    }

    /// Has zeros written between the old end of a file that grows and the end of its block, unless
    /// they are there. Returns whether that page is waiting to be written back.
    fn zero_tail(&self, state: &mut FileState, ino: u64, old: u64, new: u64) -> Attempt<bool> {
        let Some(tail) = self.tail_before(state, ino, old, new.div_ceil(BLOCK))? else { return Ok(false) };
        self.mark_dirty(state, ino, tail..tail + 1);
        Ok(true)
    }

    /// Preallocates, punches or zeroes a range of a file. Waits for the device.
    ///
    /// # Errors
    /// No space, the file would grow too large, or it is no regular file.
    pub fn allocate(self: &Arc<Self>, context: &Context, ino: u64, offset: u64, len: u64, what: Allocate) -> Result<(), FsError> {
        let end = offset.checked_add(len).filter(|end| *end <= FILE_SIZE_MAX).ok_or(FsError::FileTooLarge)?;
        if len == 0 {
            return Err(FsError::Invalid("an empty range"));
        }
        self.flush_file(ino)?;
        self.has_no_remains(ino)?;
        let grow = matches!(what, Allocate::Reserve { grow: true } | Allocate::Zero { grow: true });
        let size = self.wait(|| self.attributes(ino))?.inode.size;
        if grow && end > size {
            // Fails early where the size cannot be.
            self.grow(ino, size)?;
        }
        match what {
            Allocate::Reserve { .. } => self.preallocate(ino, offset / BLOCK, end.div_ceil(BLOCK))?,
            Allocate::Punch => self.clear(context, ino, offset, end, size, false)?,
            Allocate::Zero { .. } => {
                // What cannot be had as a whole clears nothing.
                self.has_room(ino, offset / BLOCK, end.div_ceil(BLOCK))?;
                self.clear(context, ino, offset, end, size, true)?;
                self.preallocate(ino, offset / BLOCK, end.div_ceil(BLOCK))?;
            }
        }
        self.touched(ino, offset / BLOCK..end.div_ceil(BLOCK));
        let file = self.files.get(ino);
        let stamped = self.wait(|| {
            let mut state = file.state.lock();
            let now = state.newer.time_of_change(context.now);
            let stamp = Stamp { size: grow.then_some(end), changed: Some(now) };
            self.may_grow(&mut state, ino, stamp.size.unwrap_or(0))?;
            self.volume.stamp(ino, &stamp)?;
            state.newer.changed_at(now);
            Ok(())
        });
        self.release(&file);
        stamped
    }

    /// Ends a truncation that is not over: it would free what is preallocated beyond the end.
    fn has_no_remains(self: &Arc<Self>, ino: u64) -> Result<(), FsError> {
        let file = self.files.get(ino);
        let ended = self.wait(|| match self.is_cut_short(&mut file.state.lock(), ino)? {
            true => Err(Fail::Stall(Stall::File { ino })),
            false => Ok(()),
        });
        self.release(&file);
        ended
    }

    /// Passes where the holes in blocks `from..to` may have room: nothing is taken for what cannot
    /// be had as a whole.
    fn has_room(self: &Arc<Self>, ino: u64, from: u64, to: u64) -> Result<(), FsError> {
        let has = self.volume.wait(|| self.volume.stored_attributes(ino))?.inode.blocks;
        self.wait(|| self.volume.may_have((to - from).saturating_sub(has)))
    }

    /// Preallocates the holes in blocks `from..to`.
    fn preallocate(self: &Arc<Self>, ino: u64, from: u64, to: u64) -> Result<(), FsError> {
        let file = self.files.get(ino);
        let preallocated = self.preallocate_holes(&file, from, to);
        self.release(&file);
        preallocated
    }

    fn preallocate_holes(self: &Arc<Self>, file: &File, from: u64, to: u64) -> Result<(), FsError> {
        let (ino, mut at) = (file.ino, from);
        self.has_room(ino, from, to)?;
        while at < to {
            let next = self.volume.wait(|| self.volume.mappings(ino, at, to, 1))?.first().copied();
            let hole_end = next.map_or(to, |m| m.offset);
            if at == hole_end {
                at = next.map_or(to, |m| m.end());
                continue;
            }
            let goal = match at.checked_sub(1) {
                Some(before) => {
                    self.volume.wait(|| self.volume.mappings(ino, before, at, 1))?.first().map(|m| m.extent.block + 1)
                }
                None => None,
            };
            let want = (hole_end - at).min(BLOCKS_PER_STEP);
            let mut promised = self.wait(|| self.volume.promise(want, Splits { runs: 1, items: 1 }))?;
            let reserved = self.wait(|| self.volume.reserve(goal, want, 0));
            let run = reserved.inspect_err(|_| self.volume.forget_promise(promised))?;
            let attach = || {
                // A write that is about to map a part of the hole would take away what others find
                // preallocated there meanwhile.
                file.state.lock().has_no_direct(ino, at, at + run.len)?;
                self.volume.map_unwritten(ino, at, run, &mut promised)
            };
            let attached = self.wait(attach);
            self.volume.forget_promise(promised);
            match attached {
                Ok(true) => at += run.len,
                // Another thread wrote there: looks again.
                result => {
                    self.volume.unreserve(run);
                    result?;
                }
            }
        }
        Ok(())
    }

    /// Puts zeros behind the end of a file in its last block, on the device, before the file
    /// grows.
    fn grow(self: &Arc<Self>, ino: u64, size: u64) -> Result<(), FsError> {
        let file = self.files.get(ino);
        let waiting = self.wait(|| self.zero_tail(&mut file.state.lock(), ino, size, size + BLOCK));
        let flushed = waiting.and_then(|waiting| if waiting { self.flush_whole(ino) } else { Ok(()) });
        self.release(&file);
        flushed
    }

    /// Makes a range read as zeros: whole blocks by their mapping, the edges by writing.
    fn clear(
        self: &Arc<Self>,
        context: &Context,
        ino: u64,
        offset: u64,
        end: u64,
        size: u64,
        keep_blocks: bool,
    ) -> Result<(), FsError> {
        let (first, last) = (offset.div_ceil(BLOCK), end / BLOCK);
        let edges = if first > last { vec![(offset, end)] } else { vec![(offset, first * BLOCK), (last * BLOCK, end)] };
        for (from, to) in edges {
            let to = to.min(size);
            if from < to && !self.is_hole(ino, from / BLOCK)? {
                let zeros = [0; BLOCK_SIZE];
                self.wait(|| self.write(ino, from, &zeros[..(to - from) as usize], context.now))?;
            }
        }
        let file = self.files.get(ino);
        let mut at = Some(first).filter(|first| *first < last);
        let cleared = loop {
            let Some(from) = at else { break Ok(()) };
            match self.wait(|| self.clear_step(&file, context, from, last, keep_blocks)) {
                Ok(next) => at = next,
                Err(error) => break Err(error),
            }
        };
        self.release(&file);
        cleared
    }

    /// Makes some of these blocks read as zeros, in one step. Returns the block to go on from.
    /// Afterwards no page in memory has the old content, and no thread is about to read it into
    /// one: such a page, written back later, would bring it back.
    fn clear_step(&self, file: &File, context: &Context, from: u64, to: u64, keep_blocks: bool) -> Attempt<Option<u64>> {
        let mut state = file.state.lock();
        if state.has_dirty(from, to) {
            return Err(Fail::Stall(Stall::File { ino: file.ino }));
        }
        // The blocks that a write goes to are the file's until it is over.
        state.has_no_direct(file.ino, from, to)?;
        let context = Context { now: state.newer.time_of_change(context.now), ..*context };
        let next = match keep_blocks {
            true => self.volume.unwrite_step(&context, file.ino, from, to)?,
            false => self.volume.punch_step(&context, file.ino, from, to)?,
        };
        state.newer.changed_at(context.now);
        let read_in: Vec<_> =
            state.buffer.pages.overlapping(from..to).map(|(held, _)| held.start.max(from)..held.end.min(to)).collect();
        read_in.iter().for_each(|blocks| drop(state.buffer.pages.take(blocks)));
        state.buffer.content_changes(from..to);
        state.allocation.goal = None;
        Ok(next)
    }

    fn is_hole(&self, ino: u64, block: u64) -> Result<bool, FsError> {
        Ok(self.volume.wait(|| self.volume.mappings(ino, block, block + 1, 1))?.is_empty())
    }

    /// Notes that content of these blocks changed without the write buffer.
    fn touched(&self, ino: u64, blocks: Range<u64>) {
        if let Some(file) = self.files.find(ino) {
            let mut state = file.state.lock();
            state.buffer.content_changes(blocks);
            state.allocation.goal = None;
        }
    }

    /// The next data (`SEEK_DATA`) or hole (`SEEK_HOLE`) from `offset` on; the end of a file
    /// counts as a hole. Waits for the device: what is in memory is written back first.
    ///
    /// # Errors
    /// [`FsError::BeyondEnd`] when there is none, or the offset is not inside the file.
    pub fn seek(self: &Arc<Self>, ino: u64, offset: u64, hole: bool) -> Result<u64, FsError> {
        self.flush_file(ino)?;
        let size = self.wait(|| self.attributes(ino))?.inode.size;
        if offset >= size {
            return Err(FsError::BeyondEnd);
        }
        let mut at = offset / BLOCK;
        let end = size.div_ceil(BLOCK);
        while at < end {
            let next = self.volume.wait(|| self.volume.mappings(ino, at, end, 1))?.first().copied();
            match next {
                None if hole => return Ok(offset.max(at * BLOCK)),
                None => return Err(FsError::BeyondEnd),
                Some(mapping) if hole && (mapping.offset > at || mapping.extent.unwritten) => return Ok(offset.max(at * BLOCK)),
                Some(mapping) if !hole && !mapping.extent.unwritten => return Ok(offset.max(mapping.offset * BLOCK)),
                Some(mapping) => at = mapping.end(),
            }
        }
        if hole { Ok(size) } else { Err(FsError::BeyondEnd) }
    }
}
