//! Writing into the write buffer.

use std::ops::Range;
use std::sync::Arc;

use gpunvme_blockdev::Request;
use gpunvme_layout::block::BLOCK_SIZE;
use gpunvme_layout::item::FILE_SIZE_MAX;
use gpunvme_layout::{FileType, Geometry, Timestamp};
use smallvec::SmallVec;

use super::file::{File, FileState, NodesPromised};
use super::filesystem::Filesystem;
use super::page_map::{BufferedPages, Entry, without};
use super::pages::Pages;
use super::quiesce::Quiesced;
use super::write_back::BATCH_PAGES;
use crate::error::{Attempt, Fail, FsError, Stall};
use crate::volume::{Promised, Splits};

const BLOCK: u64 = BLOCK_SIZE as u64;

/// Source of the bytes that are written.
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
    /// Writes bytes into a file's write buffer. They are on the device after
    /// [`Filesystem::sync_file`], or once another caller writes the file back. The caller answers
    /// the writing process, then calls [`Filesystem::write_behind`].
    ///
    /// # Errors
    /// [`FsError::NoSpace`] here and not later: blocks are promised to what is taken, and nodes to
    /// its extents.
    pub fn write(self: &Arc<Self>, ino: u64, offset: u64, data: &[u8], now: Timestamp) -> Attempt<()> {
        self.write_as(Writer::Kernel, ino, offset, data, now).map(drop)
    }

    /// Writes bytes behind the last of a file (`O_APPEND`), as [`Filesystem::write`] does. The
    /// kernel sends where that is, but direct writes may have made the file longer since it
    /// looked. Returns where the bytes are.
    ///
    /// # Errors
    /// As [`Filesystem::write`].
    pub fn append(self: &Arc<Self>, ino: u64, offset: u64, data: &[u8], now: Timestamp) -> Attempt<u64> {
        self.write_as(Writer::Appending, ino, offset, data, now)
    }

    /// As [`Filesystem::append`], for one part of a long append past the page cache. The kernel
    /// splits such an append and sends all parts at once, so that they arrive in any order. A
    /// caller that writes a part before the file has reached its offset leaves a gap.
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
        drop(state);
        if written.is_err() {
            self.release(&file);
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
        let is_outgrown = |by: &Range<u64>| by.contains(&offset) && offset < size;
        let appends = matches!(writer, Writer::Appending | Writer::AppendingPart);
        let moves = appends && state.kernel.outgrown.as_ref().is_some_and(is_outgrown);
        let offset = if moves { size } else { offset };
        let end = offset.checked_add(data.len() as u64).filter(|end| *end <= FILE_SIZE_MAX).ok_or(FsError::FileTooLarge)?;
        let (first, last) = (offset / BLOCK, (end - 1) / BLOCK);
        let touches = |run: &Range<u64>| (run.start <= last && first < run.end) || run.contains(&(size / BLOCK));
        if state.in_flight.direct.iter().any(touches) {
            return Err(Fail::Stall(Stall::InFlight { ino }));
        }
        if end > size && self.is_cut_short(state, ino)? {
            return Err(Fail::Stall(Stall::File { ino }));
        }
        let gap = self.tail_before(state, ino, size, first)?;
        let is_partial = |block: &u64| offset > block * BLOCK || end < (block + 1) * BLOCK;
        let mut partial: SmallVec<[u64; 2]> = [first, last].into_iter().filter(is_partial).collect();
        partial.dedup();
        partial.retain(|block| !state.buffer.pages.contains(*block));
        for &block in &partial {
            // What they have around the new bytes, up to the end of the file, stays.
            let kept = block * BLOCK < offset.min(size) || end < size.min((block + 1) * BLOCK);
            if kept && state.settled(block).is_none() {
                self.needs_no_content(ino, block)?;
            }
        }
        let blocks = first..last + 1;
        let (mut mapped, mut unwritten) = (SmallVec::<[Range<u64>; 2]>::new(), 0);
        self.volume.each_mapping(ino, first, last + 1, |mapping| {
            let mapping_blocks = mapping.offset..mapping.end();
            // What is dirty already had its promise.
            let is_new = || !state.buffer.is_all_dirty(mapping_blocks.clone());
            unwritten += u64::from(mapping.extent.unwritten && is_new());
            mapped.push(mapping_blocks);
        })?;
        let written = mapped.len() as u64 - unwritten;
        let mut unpromised: SmallVec<[Range<u64>; 2]> = SmallVec::new();
        for hole in without(blocks.clone(), mapped.into_iter()) {
            let promised = state.buffer.pages.overlapping(hole.clone()).filter(|(_, entry)| entry.promised).map(|(held, _)| held);
            unpromised.extend(without(hole, promised));
        }
        let missing = state.buffer.pages.gaps(blocks.clone());
        let mut memory = self.pages.take(blocks_of(&missing) as usize).ok_or(Fail::Stall(Stall::Memory))?.into_iter();
        let mut splits = Splits::default();
        splits.add_write(blocks_of(&unpromised), unwritten, written);
        if state.buffer.nodes.end.is_some_and(|end| blocks.contains(&end)) {
            // It goes on where an earlier one ended.
            splits.runs = 0;
        }
        let promised = self.volume.promise(blocks_of(&unpromised), splits)?;

        // From here on nothing fails: the pages are ours, and copying inside them is within
        // bounds.
        let mut rest: Option<Pages> = None;
        for gap in missing {
            let mut at = gap.start;
            while at < gap.end {
                let mut pages = rest.take().or_else(|| memory.next()).expect("as many were taken");
                if pages.len() as u64 > gap.end - at {
                    rest = Some(pages.split_off((gap.end - at) as usize));
                }
                let start = at;
                at += pages.len() as u64;
                state.buffer.pages.insert(start, BufferedPages { pages, dirty: false, promised: false });
            }
        }
        for &block in &partial {
            let (page, at) = state.buffer.pages.find(block).expect("inserted above");
            let mut bytes = [0; BLOCK_SIZE];
            if let Some((old, at)) = state.settled(block) {
                old.read(at * BLOCK_SIZE, &mut bytes)?;
            }
            page.write(at * BLOCK_SIZE, &bytes)?;
        }
        for (held, entry) in state.buffer.pages.overlapping(blocks.clone()) {
            let start = offset.max(held.start * BLOCK);
            let stop = end.min(held.end * BLOCK);
            let bytes = &data[(start - offset) as usize..(stop - offset) as usize];
            entry.pages.write((start - held.start * BLOCK) as usize, bytes)?;
        }
        for hole in unpromised {
            state.buffer.promised += state.buffer.pages.change(hole, |entry| !entry.promised, |entry| entry.promised = true);
        }
        if promised.parts > 0 {
            state.buffer.nodes.parts += promised.parts;
            state.buffer.nodes.end = Some(blocks.end);
        }
        self.mark_dirty(state, ino, blocks);
        if let Some(tail) = gap {
            self.mark_dirty(state, ino, tail..tail + 1);
        }
        if end > size {
            state.newer.size = Some(end);
            match writer {
                Writer::Direct => state.kernel.outgrows(size..end),
                _ if moves => state.kernel.outgrows(size..end),
                // The kernel knows where it ends. Of a part that is not sure, since the first one
                // may still come: it knows of this one.
                Writer::Appending if state.in_flight.direct.is_empty() => state.kernel.outgrown = None,
                _ => {}
            }
        }
        state.newer.changes_at(now);
        state.is_active = true;
        state.buffer.last = None;
        Ok(offset)
    }

    /// Size of a file, in memory or as stored; fails for anything but a regular file.
    pub(super) fn size_of_regular(&self, state: &FileState, ino: u64) -> Attempt<u64> {
        let inode = self.volume.stored_attributes(ino)?.inode;
        match inode.file_type() {
            FileType::Regular => Ok(state.newer.size.unwrap_or(0).max(inode.size)),
            FileType::Directory => Err(FsError::IsDirectory.into()),
            _ => Err(FsError::Invalid("not a regular file").into()),
        }
    }

    /// When a file grows from the middle of a block to a later one: that block, whose bytes beyond
    /// the old end have to be zeros on the device before the new size is. They are unknown when
    /// the file was shortened before.
    pub(super) fn tail_before(&self, state: &FileState, ino: u64, size: u64, next: u64) -> Attempt<Option<u64>> {
        let tail = size / BLOCK;
        if tail >= next || !state.may_hide(size) {
            return Ok(None);
        }
        if state.in_flight.pages.contains(tail) {
            return Err(Fail::Stall(Stall::File { ino }));
        }
        if state.buffer.pages.contains(tail) {
            return Ok(Some(tail));
        }
        self.needs_no_content(ino, tail)?;
        Ok(None)
    }

    /// Passes when a block of a file has nothing on the device; stalls until its page is in memory
    /// when it has.
    fn needs_no_content(&self, ino: u64, block: u64) -> Attempt<()> {
        let mapped = self.volume.mappings(ino, block, block + 1, 1)?;
        if mapped.first().is_some_and(|m| !m.extent.unwritten) {
            return Err(Fail::Stall(Stall::Page { ino, block }));
        }
        Ok(())
    }

    /// Reads a block of a file into the write buffer, so that a part of it can be written. Bytes
    /// beyond the end are zeros.
    pub(super) fn fill_page(self: &Arc<Self>, ino: u64, block: u64) -> Result<(), FsError> {
        let file = self.files.get(ino);
        let mut quiesced: Option<Quiesced> = None;
        loop {
            let returns = self.pages.returns();
            let Some(page) = self.pages.take(1).and_then(|mut pages| pages.pop()) else {
                self.make_room(returns)?;
                continue;
            };
            let number = file.state.lock().buffer.fills.begin(block);
            let filled = self.fill(&file, block, number, page);
            file.state.lock().buffer.fills.end(number);
            if filled? {
                return Ok(());
            }
            // In a stream of direct writes to the block one always begins or ends.
            quiesced.get_or_insert_with(|| self.quiesce(ino)).wait();
        }
    }

    /// Reads a block into a page. Returns whether the block is in memory then, or has nothing on
    /// the device: not where what was read may be out of date.
    fn fill(&self, file: &File, block: u64, number: u64, page: Pages) -> Result<bool, FsError> {
        let guard = self.volume.epochs.enter();
        let mapped = self.volume.wait(|| self.volume.mappings(file.ino, block, block + 1, 1))?;
        let Some(mapping) = mapped.first().filter(|m| !m.extent.unwritten) else { return Ok(true) };
        self.volume.io.run(vec![Request::read(Geometry::byte(mapping.extent.block), vec![page.span(0..1)])])?;
        drop(guard);
        let mut page = Some(page);
        self.volume.wait(|| {
            let mut state = file.state.lock();
            let size = self.size_of_regular(&state, file.ino)?;
            if state.buffer.pages.contains(block) || state.in_flight.pages.contains(block) {
                // Another caller filled the page and wrote to it meanwhile: that is newer than
                // what was read.
                return Ok(true);
            }
            if !state.buffer.fills.is_good(number) || state.in_flight.direct.iter().any(|run| run.contains(&block)) {
                return Ok(false);
            }
            let Some(page) = page.take() else { return Ok(true) };
            let end = size.saturating_sub(block * BLOCK).min(BLOCK) as usize;
            page.zero(end..BLOCK_SIZE)?;
            state.buffer.pages.insert(block, BufferedPages { pages: page, dirty: false, promised: false });
            Ok(true)
        })
    }

    /// Forgets the pages from block `from` on.
    pub(super) fn drop_pages(&self, state: &mut FileState, from: u64) {
        let mut promised = 0;
        for entry in state.buffer.pages.take_from(from) {
            state.buffer.dirty -= if entry.dirty { entry.blocks() } else { 0 };
            promised += if entry.promised { entry.blocks() } else { 0 };
        }
        state.buffer.promised -= promised;
        state.buffer.content_changes(from..u64::MAX);
        let nodes = if state.buffer.dirty == 0 { std::mem::take(&mut state.buffer.nodes) } else { NodesPromised::default() };
        self.volume.forget_promise(Promised { blocks: promised, parts: nodes.parts });
    }

    /// Notes that these blocks of a file, which are in memory, have to be written.
    pub(super) fn mark_dirty(&self, state: &mut FileState, ino: u64, blocks: Range<u64>) {
        state.buffer.mark_dirty(blocks);
        if !std::mem::replace(&mut state.buffer.is_listed, true) {
            self.files.became_dirty(ino);
        }
    }

    /// Begins writing a file back if enough of it is in memory for that, or too much of all files,
    /// and then also one that has been dirty for longer; does not wait for it.
    pub fn write_behind(self: &Arc<Self>, ino: u64) {
        let is_short = self.pages.is_short();
        if let Some(file) = self.files.find(ino) {
            let dirty = file.state.lock().buffer.dirty;
            if dirty >= BATCH_PAGES || (dirty > 0 && is_short) {
                self.begin_write_back(file);
            }
        }
        if is_short && let Some(file) = self.next_dirty() {
            self.begin_write_back(file);
        }
    }

    /// Begins writing a file back, on another thread if something has to be waited for first.
    fn begin_write_back(self: &Arc<Self>, file: Arc<File>) {
        if !matches!(self.start_flush(&file), Err(Fail::Stall(_))) {
            return self.list_if_dirty(&file);
        }
        let fs = self.clone();
        self.completions.spawn(Box::new(move || {
            // An error comes again, and is reported, when a caller waits for the write-back.
            if let Err(error) = fs.wait_for_space(|| fs.start_flush(&file)) {
                tracing::debug!(ino = file.ino, %error, "writing back was put off");
            }
            fs.list_if_dirty(&file);
        }));
    }
}

fn blocks_of(ranges: &[Range<u64>]) -> u64 {
    ranges.iter().map(|range| range.end - range.start).sum()
}
