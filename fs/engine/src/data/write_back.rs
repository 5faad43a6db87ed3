//! Write-back: from the write buffer to the device, many batches at a time, and into the metadata
//! when they have landed.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use gpunvme_blockdev::{Request, Span};
use gpunvme_layout::Geometry;
use gpunvme_layout::block::BLOCK_SIZE;
use parking_lot::MutexGuard;
use smallvec::SmallVec;

use super::file::{File, FileState, NodesPromised};
use super::filesystem::Filesystem;
use super::page_map::{Entry, without};
use super::pages::{Pages, push_span};
use super::place::Placement;
use crate::error::{Attempt, Fail, FsError};
use crate::volume::epoch::Guard;
use crate::volume::{Promised, Stamp};

/// Pages that are worth a batch of their own: 2 MiB, a chunk.
pub(super) const BATCH_PAGES: u64 = 512;
/// Pages of one batch at the most: it keeps the list of its parts short.
const BATCH_MAX: u64 = 2048;
/// Bytes of a write that is worth no other thread.
const SMALL: u64 = 128 << 10;

/// A batch of writes in flight.
struct Batch {
    /// Number of this batch among the writes in flight to the file.
    number: u64,
    placed: Placement,
    pages: Vec<(u64, Arc<Pages>)>,
    promised: u64,
    /// First byte of the file beyond the batch.
    end: u64,
    /// Size of the file in bytes when the batch was put together.
    size: u64,
    /// The block with the stored end, if it is in the batch and later blocks wait for it.
    tail: Option<u64>,
    /// Held until the device is done with the blocks.
    guard: Option<Guard>,
}

impl Filesystem {
    /// Begins writing back the dirty pages of a file. Pages whose older content is still on its way
    /// wait for it to land, and so may those behind the old end of the file.
    pub(super) fn start_flush(self: &Arc<Self>, file: &Arc<File>) -> Attempt<()> {
        self.volume.has_device()?;
        while let Some((requests, batch)) = self.next_batch(file)? {
            let (fs, file) = (self.clone(), file.clone());
            self.volume.io.submit(requests, move |result| fs.written(&file, batch, result));
        }
        Ok(())
    }

    /// As [`Filesystem::start_flush`], for a thread that will wait for what is written: it writes a
    /// small first batch itself, which is often all. Further ones may be of others that go on
    /// writing.
    fn start_flush_here(self: &Arc<Self>, file: &Arc<File>) -> Attempt<()> {
        self.volume.has_device()?;
        let Some((requests, batch)) = self.next_batch(file)? else { return Ok(()) };
        let is_small = matches!(&requests[..], [request] if request.len <= SMALL);
        let (fs, of) = (self.clone(), file.clone());
        let written = move |result| fs.written(&of, batch, result);
        if is_small {
            self.volume.io.run_then(requests, written)
        } else {
            self.volume.io.submit(requests, written)
        }
        self.start_flush(file)
    }

    /// The device is done with a batch.
    fn written(self: &Arc<Self>, file: &Arc<File>, batch: Batch, result: gpunvme_blockdev::Result<()>) {
        match result {
            Ok(()) => self.landed(file, batch),
            Err(error) => self.lost(file, batch, error.into()),
        }
    }

    fn next_batch(&self, file: &File) -> Attempt<Option<(Vec<Request>, Batch)>> {
        let mut state = file.state.lock();
        let state = &mut *state;
        if state.buffer.dirty == 0 {
            return Ok(None);
        }
        // The last block of the file, by the size on disk, may still hold bytes that a truncation
        // cut off. Until it is rewritten nothing beyond it may be mapped.
        let stored = self.volume.stored_attributes(file.ino)?.inode.size;
        let tail = stored / BLOCK_SIZE as u64;
        let behind_tail = state.may_hide(stored) && state.in_flight.pages.contains(tail);
        let mut ready: SmallVec<[Range<u64>; 4]> = SmallVec::new();
        let mut room = BATCH_MAX;
        for (blocks, _) in state.buffer.pages.iter().filter(|(_, entry)| entry.dirty) {
            let on_their_way = state.in_flight.pages.overlapping(blocks.clone()).map(|(blocks, _)| blocks);
            for part in without(blocks, on_their_way) {
                let end = if behind_tail { part.end.min(tail + 1) } else { part.end };
                let part = part.start..end.min(part.start + room);
                if !part.is_empty() {
                    room -= part.end - part.start;
                    ready.push(part);
                }
            }
            if room == 0 {
                break;
            }
        }
        let Some(last) = ready.last() else { return Ok(None) };
        let end = last.end * BLOCK_SIZE as u64;
        let guard = self.volume.epochs.enter();
        let size = self.size_of_regular(state, file.ino)?;
        let runs = ready.chunk_by(|a, b| a.end == b.start).map(|run| run[0].start..run[run.len() - 1].end);
        let placed = self.place(state, file.ino, size, runs)?;
        let number = state.in_flight.writes.begin();
        let pages = Vec::with_capacity(ready.len());
        let tail = Some(tail).filter(|tail| state.may_hide(stored) && ready.iter().any(|part| part.contains(tail)));
        let mut batch = Batch { number, placed, pages, promised: 0, end, size, tail, guard: Some(guard) };
        for part in ready {
            let entry = state.buffer.pages.take(&part);
            state.buffer.dirty -= entry.blocks();
            batch.promised += if entry.promised { entry.blocks() } else { 0 };
            let pages = Arc::new(entry.pages);
            state.in_flight.pages.insert(part.start, pages.clone());
            batch.pages.push((part.start, pages));
        }
        state.buffer.promised -= batch.promised;
        let nodes = if state.buffer.dirty == 0 { std::mem::take(&mut state.buffer.nodes) } else { NodesPromised::default() };
        state.in_flight.nodes.begin(number, nodes.parts);
        Ok(Some((requests(&batch), batch)))
    }

    /// The data of a batch is on the device: maps it.
    fn landed(self: &Arc<Self>, file: &Arc<File>, mut batch: Batch) {
        self.volume.unflushed.add();
        // Mapping may wait for freed blocks, and must not hold them back itself.
        batch.guard = None;
        match self.map_batch(file, &mut batch) {
            Ok(()) => self.ended(file, batch, true),
            Err(Fail::Error(error)) => self.lost(file, batch, error),
            Err(Fail::Stall(_)) => {
                let (fs, file) = (self.clone(), file.clone());
                self.completions.spawn(Box::new(move || match fs.wait_for_space(|| fs.map_batch(&file, &mut batch)) {
                    Ok(()) => fs.ended(&file, batch, true),
                    Err(error) => fs.lost(&file, batch, error),
                }));
            }
        }
    }

    fn map_batch(&self, file: &File, batch: &mut Batch) -> Attempt<()> {
        loop {
            let mut state = file.state.lock();
            let stamp = Stamp { size: state.newer.size.map(|size| size.min(batch.end)), changed: state.newer.changed };
            let parts = state.in_flight.nodes.parts() + state.buffer.nodes.parts;
            let mut promised = Promised { blocks: batch.promised, parts };
            let mapped = self.map_placement(file.ino, &mut batch.placed, &mut promised, &stamp);
            batch.promised = promised.blocks;
            let missing = state.in_flight.nodes.redeem(parts - promised.parts);
            state.buffer.nodes.parts -= missing;
            if !mapped? {
                self.let_others_in(state);
                continue;
            }
            state.newer.changed = None;
            // Pages are zeros beyond the end.
            state.allocation.tail_is_zero |= state.newer.size.unwrap_or(batch.size) <= batch.end;
            state.newer.size = state.newer.size.filter(|size| *size > batch.end);
            return Ok(());
        }
    }

    /// Lets the threads that wait for the file's lock, or for the metadata lock, go first. Called
    /// between two steps of a long operation.
    pub(super) fn let_others_in(&self, state: MutexGuard<FileState>) {
        MutexGuard::unlock_fair(state);
        self.volume.meta.let_others_in();
    }

    /// Ends a batch that failed: its data is lost, and a caller has to be told.
    fn lost(self: &Arc<Self>, file: &Arc<File>, mut batch: Batch, error: FsError) {
        self.unplace(&mut batch.placed);
        self.volume.forget_promise(Promised { blocks: batch.promised, parts: 0 });
        let mut state = file.state.lock();
        // Noted also when the file is not open: a caller that syncs it later, or replaces another
        // file by it, has to know.
        if state.errors.is_empty() {
            tracing::error!(ino = file.ino, %error, "data could not be written back and is lost");
        } else {
            tracing::debug!(ino = file.ino, %error, "more of its data could not be written back");
        }
        *self.untold.lock() = Some(error.clone());
        self.lossy.lock().insert(file.ino);
        state.errors.add(error);
        self.has_lost_data.store(true, Ordering::Relaxed);
        // The device may have done a part of it, behind the end of the file too.
        state.allocation.tail_is_zero = false;
        if let Some(tail) = batch.tail.filter(|tail| !state.buffer.has_dirty(*tail..*tail + 1)) {
            // The block on the device still holds the bytes that a truncation cut off: data that
            // waits to grow the file beyond it is lost with it.
            self.drop_pages(&mut state, tail + 1);
            state.newer.size = None;
            // Nor may a flush in flight store the size that it found.
            state.newer.shrinks += 1;
        }
        if state.buffer.dirty == 0 && state.in_flight.writes.is_last(batch.number) {
            // Nothing else is newer than the device: the file is what that has.
            (state.newer.size, state.newer.changed) = (None, None);
        }
        drop(state);
        self.ended(file, batch, false);
    }

    /// A batch is over; `landed`: the device has it.
    fn ended(&self, file: &Arc<File>, batch: Batch, landed: bool) {
        let mut state = file.state.lock();
        let size = state.newer.size.unwrap_or(batch.size);
        let is_last = |block: u64| !size.is_multiple_of(BLOCK_SIZE as u64) && block == size / BLOCK_SIZE as u64;
        let mut last = None;
        for (start, pages) in batch.pages {
            state.in_flight.pages.remove(start);
            state.buffer.content_changes(start..start + pages.len() as u64);
            let block = start + pages.len() as u64 - 1;
            if landed && is_last(block) && self.pages.is_roomy() {
                last = Arc::into_inner(pages).map(|mut pages| (block, pages.split_off(pages.len() - 1)));
            }
        }
        state.in_flight.writes.end(batch.number);
        let parts = state.in_flight.nodes.end(batch.number);
        state.buffer.last = last;
        drop(state);
        self.volume.forget_promise(Promised { blocks: 0, parts });
        file.landed.notify_all();
    }

    /// Writes out the data of a file in memory and waits until it is on the device and mapped. It
    /// does not wait for later writes, so that it ends however much others write.
    ///
    /// # Errors
    /// A write that it had to wait for failed. [`Filesystem::write_error`] reports lost data.
    pub fn flush_file(self: &Arc<Self>, ino: u64) -> Result<(), FsError> {
        let Some(file) = self.files.find(ino) else { return Ok(()) };
        let flushed = self.flush(&file);
        self.release(&file);
        flushed
    }

    /// As [`Filesystem::flush_file`], for an operation that wants it on the device, and nothing
    /// beyond the end of the file.
    ///
    /// # Errors
    /// Also that of data that was lost meanwhile, and of a truncation that cannot be ended.
    pub(super) fn flush_whole(self: &Arc<Self>, ino: u64) -> Result<(), FsError> {
        let Some(file) = self.files.find(ino) else { return Ok(()) };
        let before = file.state.lock().errors.count();
        let truncated = self.finish_truncation(&file);
        // It stays in memory: the operation comes back to it, and may rely on what is known by now.
        self.flush(&file)?;
        truncated?;
        let mut state = file.state.lock();
        if state.errors.count() == before {
            return Ok(());
        }
        state.errors.tell_again()
    }

    fn flush(self: &Arc<Self>, file: &Arc<File>) -> Result<(), FsError> {
        let (number, grown, shrinks) = {
            let mut state = file.state.lock();
            state.in_flight.flushes.begun += 1;
            (state.in_flight.flushes.begun, state.newer.size, state.newer.shrinks)
        };
        // Twice: what has to wait for something that is on its way can only go when that has
        // landed.
        for _ in 0..2 {
            self.wait_for_space(|| self.start_flush_here(file))?;
            let mut state = file.state.lock();
            let last = state.in_flight.writes.begun();
            self.wait_until(file, &mut state, |state| state.in_flight.writes.are_over(last));
        }
        self.volume.wait(|| self.stamp(file, grown, shrinks))?;
        let mut state = file.state.lock();
        state.in_flight.flushes.done = state.in_flight.flushes.done.max(number);
        Ok(())
    }

    /// Waits for something that ends with a write or a truncation of the file.
    pub(super) fn wait_until(&self, file: &File, state: &mut MutexGuard<FileState>, over: impl Fn(&FileState) -> bool) {
        while !over(state) {
            let helped = MutexGuard::unlocked(state, || self.completions.help());
            if !helped && !over(state) {
                file.landed.wait(state);
            }
        }
    }

    /// As [`crate::volume::Volume::wait`], but releases the blocks that files have reserved ahead
    /// before it gives up.
    pub(super) fn wait_for_space<T>(&self, mut attempt: impl FnMut() -> Attempt<T>) -> Result<T, FsError> {
        self.volume.wait(|| {
            attempt().inspect_err(|fail| {
                if matches!(fail, Fail::Stall(crate::error::Stall::Reuse)) {
                    self.release_all_ahead();
                    self.completions.help();
                }
            })
        })
    }

    /// Stores what no page is left to store: the time of a write, and a size that was reached
    /// without one. While others write, that is the size that the file had `grown` to when all
    /// that has landed now was still in memory.
    fn stamp(&self, file: &File, grown: Option<u64>, shrinks: u64) -> Attempt<()> {
        let mut state = file.state.lock();
        let quiet = state.in_flight.writes.is_empty() && state.buffer.dirty == 0;
        if quiet {
            // Pages that were only read in, for a write that came to nothing.
            state.buffer.pages.clear();
        }
        let size = if quiet { state.newer.size } else { grown.filter(|_| state.newer.shrinks == shrinks) };
        if size.is_some() || state.newer.changed.is_some() {
            self.volume.stamp(file.ino, &Stamp { size, changed: state.newer.changed })?;
            state.newer.changed = None;
        }
        if quiet {
            state.newer.size = None;
        }
        Ok(())
    }

    /// Writes out what is in memory of all files.
    ///
    /// # Errors
    /// The first error; the other files are written back all the same.
    pub fn flush_all(self: &Arc<Self>) -> Result<(), FsError> {
        // All of them in flight before any is waited for. What fails fails again below.
        let _ = self.start_listed();
        let mut result = Ok(());
        for file in self.files.all() {
            let flushed = self.flush(&file);
            self.release(&file);
            result = result.and(flushed);
        }
        result
    }

    /// Begins writing back what is in memory of all files, and drops from memory, when that has
    /// landed, the files that were not written since the last call. Unlike
    /// [`Filesystem::flush_all`] it does not wait for the others.
    ///
    /// # Errors
    /// As [`Filesystem::flush_all`].
    pub fn write_back(self: &Arc<Self>) -> Result<(), FsError> {
        let mut result = self.start_listed();
        for file in self.files.all() {
            let (is_in_use, only_touched) = {
                let mut state = file.state.lock();
                let is_in_use = state.is_in_use();
                state.is_active = false;
                (is_in_use, state.buffer.dirty == 0 && state.newer.changed.is_some())
            };
            if !is_in_use {
                result = result.and(self.flush(&file));
                self.release(&file);
            } else if only_touched {
                result = result.and(self.volume.wait(|| self.stamp(&file, None, 0)));
            }
        }
        result
    }

    /// The file with dirty pages that has been on the list of those for the longest; it is not on
    /// it from now on.
    pub(super) fn next_dirty(&self) -> Option<Arc<File>> {
        loop {
            let Some(file) = self.files.find(self.files.next_dirty()?) else { continue };
            let mut state = file.state.lock();
            state.buffer.is_listed = false;
            if state.buffer.dirty > 0 {
                drop(state);
                return Some(file);
            }
        }
    }

    /// Puts a file on the list again of which pages are dirty still: they wait for others that are
    /// on their way.
    pub(super) fn list_if_dirty(&self, file: &File) {
        let mut state = file.state.lock();
        if state.buffer.dirty > 0 && !std::mem::replace(&mut state.buffer.is_listed, true) {
            self.files.became_dirty(file.ino);
        }
    }

    /// Begins writing back all files on the list. Returns the first error.
    fn start_listed(self: &Arc<Self>) -> Result<(), FsError> {
        let mut result = Ok(());
        // No more than are on it now: what goes back to it waits for something else.
        for _ in 0..self.files.dirty() {
            let Some(file) = self.next_dirty() else { break };
            result = result.and(self.wait_for_space(|| self.start_flush(&file)));
            self.list_if_dirty(&file);
        }
        result
    }

    /// Waits until there may be room in the write buffer; `returns`: how often pages had come back
    /// before there was too little of it. Errors are those of other files: they matter where no
    /// page comes back.
    pub(super) fn make_room(self: &Arc<Self>, returns: u64) -> Result<(), FsError> {
        let started = self.start_listed();
        if self.completions.help() || self.pages.wait(returns) {
            return Ok(());
        }
        self.files.all().iter().for_each(|file| file.state.lock().buffer.last = None);
        started
    }

    /// Bytes of the write buffer that are in use: most of them wait for the device.
    pub fn buffered(&self) -> u64 {
        self.pages.taken()
    }

    /// Whether files should be written back before their time, because the write buffer fills up.
    pub fn wants_flush(&self) -> bool {
        self.pages.is_short()
    }
}

/// One write for each run of the device that the batch goes to.
fn requests(batch: &Batch) -> Vec<Request> {
    let mut parts = batch.pages.iter().map(|(_, pages)| (pages, 0..pages.len()));
    let mut part = parts.next();
    let writes = batch.placed.runs().map(|placed| {
        let mut spans: Vec<Span> = Vec::new();
        let mut missing = placed.run.len as usize;
        while missing > 0 {
            let (pages, left) = part.as_mut().expect("each block has a page");
            let taken = left.start..left.end.min(left.start + missing);
            missing -= taken.len();
            left.start = taken.end;
            push_span(&mut spans, pages.span(taken));
            if left.start == left.end {
                part = parts.next();
            }
        }
        Request::write(Geometry::byte(placed.run.start), spans, false)
    });
    writes.collect()
}

#[cfg(test)]
mod tests;
