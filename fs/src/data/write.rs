//! Writing into the write buffer.

use std::ops::Range;
use std::sync::Arc;

use gpunvme_blockdev::Request;
use gpunvme_layout::block::BLOCK_SIZE;
use gpunvme_layout::item::FILE_SIZE_MAX;
use gpunvme_layout::{FileType, Geometry, Timestamp};

use super::Filesystem;
use super::file::{File, FilePage, FileState, Truncation};
use super::flush::BATCH_PAGES;
use super::hold::Hold;
use crate::error::{Attempt, Fail, FsError, Stall};

const BLOCK: u64 = BLOCK_SIZE as u64;

/// Whose bytes are written.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Writer {
    /// The kernel's, where it says.
    Kernel,
    /// The kernel's, behind the last byte.
    Appending,
    /// As `Appending`, one of several parts that the kernel sends together.
    AppendingPart,
    /// A direct write's, of which the kernel knows nothing before it is over.
    Direct,
}

impl Filesystem {
    /// Writes bytes into a file, as far as the write buffer: they are on the device after [`Filesystem::sync_file`], or when
    /// somebody writes the file out.
    ///
    /// # Errors
    /// [`FsError::NoSpace`] here and not later: a block is promised to each byte that is taken.
    pub fn write(self: &Arc<Self>, ino: u64, offset: u64, data: &[u8], now: Timestamp) -> Attempt<()> {
        self.write_as(Writer::Kernel, ino, offset, data, now).map(drop)
    }

    /// Writes bytes behind the last of a file (`O_APPEND`), as [`Filesystem::write`] does. The kernel sends where that is, but
    /// direct writes may have made the file longer since it looked. Returns where the bytes are.
    ///
    /// # Errors
    /// As [`Filesystem::write`].
    pub fn append(self: &Arc<Self>, ino: u64, offset: u64, data: &[u8], now: Timestamp) -> Attempt<u64> {
        self.write_as(Writer::Appending, ino, offset, data, now)
    }

    /// As [`Filesystem::append`], for one of the parts in which the kernel sends what is long and past its page cache: all at once,
    /// so that they come in any order. Whoever writes one before the end of the file has come to it leaves a gap.
    ///
    /// # Errors
    /// As [`Filesystem::write`].
    pub fn append_part(self: &Arc<Self>, ino: u64, offset: u64, data: &[u8], now: Timestamp) -> Attempt<u64> {
        self.write_as(Writer::AppendingPart, ino, offset, data, now)
    }

    /// Writes the part of a direct write that cannot go direct.
    pub(super) fn write_edge(self: &Arc<Self>, ino: u64, offset: u64, data: &[u8], now: Timestamp) -> Attempt<()> {
        self.write_as(Writer::Direct, ino, offset, data, now).map(drop)
    }

    fn write_as(self: &Arc<Self>, writer: Writer, ino: u64, offset: u64, data: &[u8], now: Timestamp) -> Attempt<u64> {
        if data.is_empty() {
            return Ok(offset);
        }
        let file = self.files.get(ino);
        let mut state = file.state.lock();
        let written = self.write_pages(&mut state, writer, ino, offset, data, now);
        let full = state.dirty >= BATCH_PAGES || self.pages.is_short();
        drop(state);
        if written.is_err() {
            self.release(&file);
        } else if full {
            self.flush_soon(&file);
        }
        written
    }

    fn write_pages(
        &self,
        state: &mut FileState,
        writer: Writer,
        ino: u64,
        offset: u64,
        data: &[u8],
        now: Timestamp,
    ) -> Attempt<u64> {
        self.volume.writable()?;
        let size = self.size_of_regular(state, ino)?;
        let is_outgrown = |from: u64| (from..size).contains(&offset);
        let appends = matches!(writer, Writer::Appending | Writer::AppendingPart);
        let moves = appends && state.outgrown.is_some_and(is_outgrown);
        let offset = if moves { size } else { offset };
        let end = offset.checked_add(data.len() as u64).filter(|end| *end <= FILE_SIZE_MAX).ok_or(FsError::FileTooLarge)?;
        let (first, last) = (offset / BLOCK, (end - 1) / BLOCK);
        let touches = |run: &Range<u64>| (run.start <= last && first < run.end) || run.contains(&(size / BLOCK));
        if state.direct.iter().any(touches) {
            return Err(Fail::Stall(Stall::Flights { ino }));
        }
        if end > size && state.truncation != Truncation::Over {
            return Err(Fail::Stall(Stall::File { ino }));
        }
        let gap = self.tail_before(state, ino, size, first)?;
        for block in [first, last] {
            // The first and the last page keep what they have around the new bytes, up to the end of the file.
            let kept = (block * BLOCK < offset.min(size)) || end < size.min((block + 1) * BLOCK);
            if kept && !state.pages.contains_key(&block) && state.settled(block).is_none() {
                self.needs_no_content(ino, block)?;
            }
        }
        let mut unmapped: Vec<u64> = Vec::new();
        let mut at = first;
        for mapping in self.volume.map(ino, first, last + 1, usize::MAX)? {
            unmapped.extend(at..mapping.offset);
            at = mapping.end();
        }
        unmapped.extend(at..=last);
        unmapped.retain(|block| state.pages.get(block).is_none_or(|p| !p.promised));

        let missing: Vec<u64> = (first..=last).filter(|block| !state.pages.contains_key(block)).collect();
        let mut pages = self.pages.take(missing.len()).ok_or(Fail::Stall(Stall::Memory))?.into_iter();
        self.volume.promise(unmapped.len() as u64)?;

        // From here on nothing fails: the pages are ours, and copying inside them is within bounds.
        for block in missing {
            let page = pages.next().expect("one was taken for each");
            match state.settled(block) {
                Some(old) => page.copy_from(old)?,
                None if block == first || block == last => page.zero(0..BLOCK_SIZE)?,
                None => {}
            }
            state.pages.insert(block, FilePage { page, dirty: false, promised: false });
        }
        for block in unmapped {
            state.pages.get_mut(&block).expect("inserted above").promised = true;
            state.promised += 1;
        }
        for block in first..=last {
            let start = offset.max(block * BLOCK);
            let stop = end.min((block + 1) * BLOCK);
            let page = state.pages.get_mut(&block).expect("inserted above");
            page.page.write((start - block * BLOCK) as usize, &data[(start - offset) as usize..(stop - offset) as usize])?;
            state.dirty += u64::from(!page.dirty);
            page.dirty = true;
        }
        if let Some(tail) = gap {
            mark_dirty(state, tail);
        }
        if end > size {
            state.size = Some(end);
            match writer {
                Writer::Direct => state.outgrows(size),
                // The kernel knows where it ends. Of a part that is not sure: the first one may still come.
                Writer::Appending if !moves && state.direct.is_empty() => state.outgrown = None,
                _ => {}
            }
        }
        state.changed = state.changed.max(Some(now));
        state.content_changes();
        Ok(offset)
    }

    /// Size of a file, in memory or as stored; fails for anything but a regular file.
    pub(super) fn size_of_regular(&self, state: &FileState, ino: u64) -> Attempt<u64> {
        let inode = self.volume.stored_attributes(ino)?.inode;
        match inode.file_type() {
            FileType::Regular => Ok(state.size.unwrap_or(0).max(inode.size)),
            FileType::Directory => Err(FsError::IsDirectory.into()),
            _ => Err(FsError::Invalid("not a regular file").into()),
        }
    }

    /// When a file grows from the middle of a block to a later one: that block, whose bytes beyond the old end have to be
    /// zeros on the device before the new size is. They are unknown when the file was shortened before.
    pub(super) fn tail_before(&self, state: &FileState, ino: u64, size: u64, next: u64) -> Attempt<Option<u64>> {
        let tail = size / BLOCK;
        if tail >= next || !state.may_hide(size) {
            return Ok(None);
        }
        if state.writing.contains_key(&tail) {
            return Err(Fail::Stall(Stall::File { ino }));
        }
        if state.pages.contains_key(&tail) {
            return Ok(Some(tail));
        }
        self.needs_no_content(ino, tail)?;
        Ok(None)
    }

    /// Passes when a block of a file has nothing on the device; stalls until its page is in memory when it has.
    fn needs_no_content(&self, ino: u64, block: u64) -> Attempt<()> {
        let mapped = self.volume.map(ino, block, block + 1, 1)?;
        if mapped.first().is_some_and(|m| !m.extent.unwritten) {
            return Err(Fail::Stall(Stall::Page { ino, block }));
        }
        Ok(())
    }

    /// Reads a block of a file into the write buffer, so that a part of it can be written. Bytes beyond the end are zeros.
    pub(super) fn fill_page(self: &Arc<Self>, ino: u64, block: u64) -> Result<(), FsError> {
        let file = self.files.get(ino);
        let mut hold: Option<Hold> = None;
        loop {
            let version = file.state.lock().version;
            let Some(page) = self.pages.take(1).and_then(|mut pages| pages.pop()) else {
                self.make_room()?;
                continue;
            };
            let guard = self.volume.epochs.enter();
            let mapped = self.volume.wait(|| self.volume.map(ino, block, block + 1, 1))?;
            let Some(mapping) = mapped.first().filter(|m| !m.extent.unwritten) else { return Ok(()) };
            self.volume.io.run(vec![Request::read(Geometry::byte(mapping.extent.block), vec![page.span()])])?;
            drop(guard);
            let stored = self.volume.wait(|| self.volume.stored_attributes(ino))?.inode.size;
            let mut state = file.state.lock();
            if state.version != version {
                drop(state);
                // In a stream of direct writes one always begins or ends.
                hold.get_or_insert_with(|| self.hold(ino)).wait();
                continue;
            }
            if state.direct.iter().any(|run| run.contains(&block)) {
                // What was read is neither old nor new.
                drop(state);
                return self.flush_file(ino);
            }
            if state.writing.contains_key(&block) {
                // Somebody else filled the page and wrote to it meanwhile: what is on its way is newer than what was read.
                return Ok(());
            }
            let size = state.size.unwrap_or(0).max(stored);
            let end = size.saturating_sub(block * BLOCK).min(BLOCK) as usize;
            page.zero(end..BLOCK_SIZE)?;
            state.pages.entry(block).or_insert(FilePage { page, dirty: false, promised: false });
            return Ok(());
        }
    }

    /// Forgets the pages from block `from` on.
    pub(super) fn drop_pages(&self, state: &mut FileState, from: u64) {
        let dropped = state.pages.split_off(&from);
        let promised = dropped.values().filter(|p| p.promised).count() as u64;
        state.dirty -= dropped.values().filter(|p| p.dirty).count() as u64;
        state.promised -= promised;
        state.content_changes();
        self.volume.forget_promise(promised);
    }

    /// Writes a file's pages out without waiting for them.
    pub(super) fn flush_soon(self: &Arc<Self>, file: &Arc<File>) {
        if self.start_flush(file).is_ok() {
            return;
        }
        let (fs, file) = (self.clone(), file.clone());
        self.completions.spawn(Box::new(move || {
            // What fails here fails again, and is reported, when somebody waits for it.
            if let Err(error) = fs.wait_for_space(|| fs.start_flush(&file)) {
                tracing::debug!(ino = file.ino, %error, "writing out was put off");
            }
        }));
    }
}

/// Makes a page that is in memory one that has to be written.
pub(super) fn mark_dirty(state: &mut FileState, block: u64) {
    let page = state.pages.get_mut(&block).expect("the page is in memory");
    state.dirty += u64::from(!page.dirty);
    page.dirty = true;
}
