//! Writing out: from the write buffer to the device, many batches at a time, and into the metadata when they have landed.

use std::sync::Arc;

use gpunvme_blockdev::{Request, Span};
use gpunvme_layout::Geometry;
use gpunvme_layout::block::BLOCK_SIZE;

use super::Filesystem;
use super::file::{File, FileState};
use super::pages::{Page, push_span};
use super::place::Placement;
use crate::error::{Attempt, Fail, FsError};
use crate::volume::Stamp;
use crate::volume::epoch::Guard;

/// Pages that are worth a batch of their own: 2 MiB, a chunk.
pub(super) const BATCH_PAGES: u64 = 512;
/// Pages of one batch at the most: it keeps the operation that maps them bounded.
const BATCH_MAX: usize = 2048;

/// A batch of writes under way.
struct Batch {
    placed: Placement,
    pages: Vec<(u64, Arc<Page>)>,
    promised: u64,
    /// First byte of the file beyond the batch.
    end: u64,
    /// Size of the file when it was put together.
    size: u64,
    /// Until the device is done with the blocks.
    guard: Option<Guard>,
}

impl Filesystem {
    /// Begins writing out the dirty pages of a file. Pages whose older content is still on its way wait for it to land.
    pub(super) fn start_flush(self: &Arc<Self>, file: &Arc<File>) -> Attempt<()> {
        while let Some((requests, batch)) = self.next_batch(file)? {
            let (fs, file) = (self.clone(), file.clone());
            self.volume.io.submit(requests, move |result| match result {
                Ok(()) => fs.landed(&file, batch),
                Err(error) => fs.lost(&file, batch, error.into()),
            });
        }
        Ok(())
    }

    fn next_batch(&self, file: &File) -> Attempt<Option<(Vec<Request>, Batch)>> {
        let mut state = file.state.lock();
        let state = &mut *state;
        let eligible = state.pages.iter().filter(|(block, p)| p.dirty && !state.writing.contains_key(block));
        let blocks: Vec<u64> = eligible.map(|(block, _)| *block).take(BATCH_MAX).collect();
        let Some(last) = blocks.last() else { return Ok(None) };
        let end = (last + 1) * BLOCK_SIZE as u64;
        let guard = self.volume.epochs.enter();
        let size = self.size_of_regular(state, file.ino)?;
        let runs = blocks.chunk_by(|a, b| a + 1 == *b).map(|run| run[0]..run[0] + run.len() as u64);
        let placed = self.place(state, file.ino, size, runs)?;
        let mut batch = Batch { placed, pages: Vec::with_capacity(blocks.len()), promised: 0, end, size, guard: Some(guard) };
        for block in &blocks {
            let page = state.pages.remove(block).expect("listed above");
            batch.promised += u64::from(page.promised);
            let page = Arc::new(page.page);
            state.writing.insert(*block, page.clone());
            batch.pages.push((*block, page));
        }
        state.dirty -= blocks.len() as u64;
        state.promised -= batch.promised;
        state.flights += 1;
        Ok(Some((requests(&batch), batch)))
    }

    /// The data of a batch is on the device: maps it.
    fn landed(self: &Arc<Self>, file: &Arc<File>, mut batch: Batch) {
        self.volume.data_written.store(true, std::sync::atomic::Ordering::Release);
        // Mapping may wait for freed blocks, and must not hold them back itself.
        batch.guard = None;
        match self.map_batch(file, &mut batch) {
            Ok(()) => self.ended(file, batch),
            Err(Fail::Error(error)) => self.lost(file, batch, error),
            Err(Fail::Stall(_)) => {
                let (fs, file) = (self.clone(), file.clone());
                self.completions.spawn(Box::new(move || match fs.wait_for_space(|| fs.map_batch(&file, &mut batch)) {
                    Ok(()) => fs.ended(&file, batch),
                    Err(error) => fs.lost(&file, batch, error),
                }));
            }
        }
    }

    fn map_batch(&self, file: &File, batch: &mut Batch) -> Attempt<()> {
        let mut state = file.state.lock();
        let stamp = Stamp { size: state.size.map(|size| size.min(batch.end)), changed: state.changed };
        self.attach(file.ino, &mut batch.placed, batch.promised, &stamp)?;
        state.changed = None;
        // Pages are zeros beyond the end.
        state.tail_is_zero |= state.size.unwrap_or(batch.size) <= batch.end;
        state.size = state.size.filter(|size| *size > batch.end);
        Ok(())
    }

    /// A batch failed: its data is lost, and somebody has to be told.
    fn lost(self: &Arc<Self>, file: &Arc<File>, mut batch: Batch, error: FsError) {
        tracing::error!(ino = file.ino, %error, "data could not be written out and is lost");
        self.unplace(&mut batch.placed);
        self.volume.forget_promise(batch.promised);
        let mut state = file.state.lock();
        if state.opens > 0 {
            state.error.get_or_insert(error);
        }
        if state.dirty == 0 && state.flights == 1 {
            // Nothing else is newer than the device: the file is what that has.
            (state.size, state.changed) = (None, None);
        }
        drop(state);
        self.ended(file, batch);
    }

    fn ended(&self, file: &Arc<File>, batch: Batch) {
        let mut state = file.state.lock();
        for (block, page) in batch.pages {
            if state.writing.get(&block).is_some_and(|p| Arc::ptr_eq(p, &page)) {
                state.writing.remove(&block);
            }
        }
        state.flights -= 1;
        state.version += 1;
        drop(state);
        file.landed.notify_all();
    }

    /// Writes out what is in memory of a file and waits until it is on the device and mapped.
    ///
    /// # Errors
    /// What had to be waited for failed. A failed write is reported by [`Filesystem::write_error`].
    pub fn flush_file(self: &Arc<Self>, ino: u64) -> Result<(), FsError> {
        let Some(file) = self.files.find(ino) else { return Ok(()) };
        let flushed = self.flush_until_clean(&file);
        self.release(&file);
        flushed
    }

    fn flush_until_clean(self: &Arc<Self>, file: &Arc<File>) -> Result<(), FsError> {
        loop {
            self.wait_for_space(|| self.start_flush(file))?;
            let mut state = file.state.lock();
            if state.flights > 0 {
                file.landed.wait(&mut state);
            } else if state.dirty == 0 {
                // Pages that were only read in, for a write that came to nothing.
                state.pages.clear();
                drop(state);
                return self.volume.wait(|| self.stamp(file));
            }
        }
    }

    /// As [`crate::volume::Volume::wait`], but lets go of what files have reserved ahead before it gives up.
    pub(super) fn wait_for_space<T>(&self, mut attempt: impl FnMut() -> Attempt<T>) -> Result<T, FsError> {
        self.volume.wait(|| {
            attempt().inspect_err(|fail| {
                if matches!(fail, Fail::Stall(crate::error::Stall::Reuse)) {
                    self.drop_windows();
                }
            })
        })
    }

    /// Stores what is left of a write whose pages are gone: its time.
    fn stamp(&self, file: &File) -> Attempt<()> {
        let mut state = file.state.lock();
        if state.flights > 0 || state.dirty > 0 || (state.size.is_none() && state.changed.is_none()) {
            return Ok(());
        }
        self.volume.stamp(file.ino, &Stamp { size: state.size, changed: state.changed })?;
        (state.size, state.changed) = (None, None);
        Ok(())
    }

    /// Writes out what is in memory of all files.
    ///
    /// # Errors
    /// The first error; the other files are written out all the same.
    pub fn flush_all(self: &Arc<Self>) -> Result<(), FsError> {
        let files = self.files.all();
        for file in &files {
            // All of them under way before any is waited for.
            if file.state.lock().dirty > 0 {
                let _ = self.wait_for_space(|| self.start_flush(file));
            }
        }
        let mut result = Ok(());
        for file in &files {
            let flushed = self.flush_until_clean(file);
            self.release(file);
            result = result.and(flushed);
        }
        result
    }

    /// Begins writing out what is in memory of all files, and lets go of those that nobody has open when that has landed. Unlike
    /// [`Filesystem::flush_all`] it does not wait for writers to pause.
    ///
    /// # Errors
    /// As [`Filesystem::flush_all`].
    pub fn write_back(self: &Arc<Self>) -> Result<(), FsError> {
        let files = self.files.all();
        let mut result = Ok(());
        for file in &files {
            if file.state.lock().dirty > 0 {
                result = result.and(self.wait_for_space(|| self.start_flush(file)));
            }
        }
        for file in files {
            if file.state.lock().opens == 0 {
                result = result.and(self.flush_until_clean(&file));
            }
            self.release(&file);
        }
        result
    }

    /// Waits until there is room in the write buffer.
    pub(super) fn make_room(self: &Arc<Self>) -> Result<(), FsError> {
        for file in self.files.all() {
            if file.state.lock().dirty > 0 {
                self.wait_for_space(|| self.start_flush(&file))?;
            }
        }
        self.pages.wait();
        Ok(())
    }

    /// Whether files should be written out before their time, because the write buffer fills up.
    pub fn wants_flush(&self) -> bool {
        self.pages.is_short()
    }
}

/// One write for each piece of the device that the batch goes to.
fn requests(batch: &Batch) -> Vec<Request> {
    let mut pages = batch.pages.iter();
    let pieces = batch.placed.pieces().map(|piece| {
        let mut spans: Vec<Span> = Vec::new();
        for (_, page) in pages.by_ref().take(piece.run.len as usize) {
            push_span(&mut spans, page.span());
        }
        (Geometry::byte(piece.run.start), spans)
    });
    pieces.map(|(offset, spans)| Request::write(offset, spans, false)).collect()
}

impl FileState {
    /// Whether blocks `from..to` have content in memory that the device does not have.
    pub(super) fn has_dirty(&self, from: u64, to: u64) -> bool {
        self.writing.range(from..to).next().is_some() || self.pages.range(from..to).any(|(_, p)| p.dirty)
    }
}
