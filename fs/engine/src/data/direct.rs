//! Direct transfers between files and registered buffers, past the write buffer.
//!
//! A transfer of data that the write buffer still holds stalls until that data is written back.
//! Blocks that a write needs are reserved first and mapped when the device has their data, as for
//! any other write. A caller that plans has to submit or drop the plan: both give back the blocks
//! that do not become the file's.

use std::ops::Range;
use std::sync::Arc;

use gpunvme_abi::{Direction, Segment};
use gpunvme_blockdev::Region;
use gpunvme_gpupath::planner::{self, Alignment, Bounds, Extent, Plan, Position};
use gpunvme_gpupath::registry::Buffer;
use gpunvme_gpupath::transfer::{self, Failed};
use gpunvme_layout::block::BLOCK_SIZE;
use gpunvme_layout::item::FILE_SIZE_MAX;
use gpunvme_layout::{Geometry, Timestamp};
use smallvec::SmallVec;

use super::file::File;
use super::filesystem::Filesystem;
use super::place::Placement;
use crate::error::{Attempt, Fail, FsError, Stall};
use crate::volume::epoch::Guard;
use crate::volume::{Mapping, Promised, Splits, Stamp};

const BLOCK: u64 = BLOCK_SIZE as u64;
/// Bytes of an edge that are copied at once.
const EDGE_STEP: u64 = 1 << 20;

/// A direct read whose blocks were looked up.
pub struct DirectRead {
    /// Plan of the transfer.
    pub plan: Plan,
    /// Where the next part of the transfer begins.
    pub next: Option<Position>,
    /// The alignment it was planned for.
    pub alignment: Alignment,
    /// Keeps the blocks from being reused, until the last byte has arrived.
    pub guard: Guard,
}

/// A direct write whose blocks have a place.
pub struct DirectWrite {
    /// Plan of the transfer. Its edges are only counted: [`Filesystem::write_edges`] has
    /// written them before.
    pub plan: Plan,
    flight: Flight,
}

/// State of a direct write in flight; dropping it ends the write, however it went.
struct Flight {
    /// Number of this write among those in flight to the file.
    number: u64,
    fs: Arc<Filesystem>,
    file: Arc<File>,
    /// Blocks of the file that it writes.
    direct: SmallVec<[Range<u64>; 1]>,
    placement: Placement,
    /// What was promised to it.
    promised: Promised,
    /// Only content changes, where the file had blocks before.
    in_place: bool,
    /// First byte of the file beyond it; 0 if nothing of it goes direct.
    end: u64,
    /// Held until the device is done with the blocks.
    guard: Option<Guard>,
}

/// Effects of a direct write on its file.
#[derive(Debug, Clone, Copy)]
pub struct Written {
    /// Only content and times changed, where the file had blocks before.
    pub in_place: bool,
    /// The kernel may keep attributes of the file that are out of date now.
    pub shown: bool,
}

/// How a direct write can fail.
#[derive(Debug, Clone, thiserror::Error)]
pub enum WriteFailed {
    /// The device failed.
    #[error(transparent)]
    Device(Failed),
    /// The data is on the device, but mapping it into the file failed.
    #[error(transparent)]
    Mapping(#[from] FsError),
}

impl From<WriteFailed> for FsError {
    fn from(failed: WriteFailed) -> FsError {
        match failed {
            WriteFailed::Device(failed) => failed.error.into(),
            WriteFailed::Mapping(error) => error,
        }
    }
}

impl Filesystem {
    /// Looks up where the bytes of a part of a direct read are, from a place on. The segments must
    /// lie inside the region.
    pub fn plan_direct_read(
        &self,
        ino: u64,
        segments: &[Segment],
        part: (Position, Bounds),
        region: &Arc<Region>,
    ) -> Attempt<DirectRead> {
        let file = self.files.find(ino);
        let state = file.as_ref().map(|file| file.state.lock());
        if let Some(state) = &state {
            let dirty = |s: &Segment| state.has_dirty(s.file_offset / BLOCK, s.file_offset.saturating_add(s.len).div_ceil(BLOCK));
            if segments.iter().any(dirty) {
                return Err(Fail::Stall(Stall::File { ino }));
            }
        }
        let size = self.size_of_regular(state.as_deref().unwrap_or(&Default::default()), ino)?;
        let guard = self.volume.epochs.enter();
        let alignment = Alignment::for_reads(self.volume.device().geometry());
        let (plan, next) = planner::plan_part(segments, part, size, region, alignment, |range, limit, extents| -> Attempt<()> {
            let (from, to) = (range.start / BLOCK, range.end.div_ceil(BLOCK));
            if to - from <= limit as u64 {
                return self.volume.each_mapping(ino, from, to, |mapping| extents.push(extent(&mapping)));
            }
            extents.extend(self.volume.mappings(ino, from, to, limit)?.iter().map(extent));
            Ok(())
        })?;
        Ok(DirectRead { plan, next, alignment, guard })
    }

    /// Reads from the device into the buffer; `done` is called once, when the last byte has
    /// arrived. Holes that were not filled before ([`transfer::fill`]) are filled here, at the
    /// speed of memory.
    pub fn submit_direct_read(
        &self,
        read: DirectRead,
        buffer: Arc<Buffer>,
        done: impl FnOnce(Result<(), Failed>) + Send + 'static,
    ) {
        let DirectRead { plan, alignment, guard, .. } = read;
        transfer::read(&self.volume.io, &self.buffers, alignment, plan, buffer, move |result| {
            drop(guard);
            done(result);
        });
    }

    /// Finds a place for a direct write. The segments must lie inside the region.
    pub fn plan_direct_write(
        self: &Arc<Self>,
        ino: u64,
        segments: &[Segment],
        region: &Arc<Region>,
        now: Timestamp,
    ) -> Attempt<DirectWrite> {
        let end = segments.iter().map(|s| s.file_offset.saturating_add(s.len)).max().unwrap_or(0);
        if end > FILE_SIZE_MAX {
            return Err(FsError::FileTooLarge.into());
        }
        self.volume.writable()?;
        let alignment = self.write_alignment();
        let middles: SmallVec<[Range<u64>; 1]> = segments.iter().map(|s| planner::aligned_middle(s, alignment)).collect();
        let runs = || middles.iter().filter(|m| !m.is_empty()).map(|m| m.start / BLOCK..m.end / BLOCK);
        let file = self.files.get(ino);
        let mut state = file.state.lock();
        if state.in_flight.quiescers > 0 {
            return Err(Fail::Stall(Stall::Quiesced { ino }));
        }
        let size = self.size_of_regular(&state, ino)?;
        if runs().any(|run| state.buffer.pages.overlaps(run.clone()) || state.in_flight.pages.overlaps(run)) {
            return Err(Fail::Stall(Stall::File { ino }));
        }
        let last = runs().map(|run| run.end).max().unwrap_or(0);
        self.may_grow(&mut state, ino, last * BLOCK)?;
        // A tail that is written over as a whole has nothing beyond the old end to keep. Asked
        // first: reading the tail would put a page into the buffer; this write would then wait for
        // that page to go, and have it read again, for ever.
        if last * BLOCK > size
            && !runs().any(|run| run.contains(&(size / BLOCK)))
            && let Some(tail) = self.tail_before(&state, ino, size, last)?
        {
            self.mark_dirty(&mut state, ino, tail..tail + 1);
            return Err(Fail::Stall(Stall::File { ino }));
        }
        let (mut new, mut splits) = (0, Splits::default());
        for run in runs() {
            let (mut holes, mut unwritten, mut written) = (run.end - run.start, 0, 0);
            self.volume.each_mapping(ino, run.start, run.end, |mapping| {
                holes -= u64::from(mapping.extent.len);
                unwritten += u64::from(mapping.extent.unwritten);
                written += u64::from(!mapping.extent.unwritten);
            })?;
            new += holes;
            splits.add_write(holes, unwritten, written);
        }
        let guard = self.volume.epochs.enter();
        let promised = self.volume.promise(new, splits)?;
        let placement = self.place(&mut state, ino, size, runs()).inspect_err(|_| self.volume.forget_promise(promised))?;
        let direct: SmallVec<[Range<u64>; 1]> = runs().collect();
        let number = state.begin_direct(&direct);
        let mut places = placement.runs().map(|p| Extent {
            file_offset: p.offset * BLOCK,
            device_offset: Geometry::byte(p.run.start),
            len: p.run.len * BLOCK,
            written: true,
        });
        let mut middles = middles.iter();
        let plan = planner::plan(Direction::Write, segments, size, region, alignment, |_, extents| -> Result<(), FsError> {
            let middle = middles.next().expect("asked once for each segment");
            let mut missing = middle.end - middle.start;
            while missing > 0 {
                let place = places.next().expect("every block of the middle has a place");
                missing -= place.len;
                extents.push(place);
            }
            Ok(())
        })?;
        drop(places);
        state.newer.changes_at(now);
        state.is_active = true;
        let end = last * BLOCK;
        if end > size {
            state.kernel.outgrows(size..end);
        }
        let in_place = placement.is_in_place() && end <= size;
        drop(state);
        let fs = self.clone();
        let flight = Flight { number, fs, file, direct, placement, promised, in_place, end, guard: Some(guard) };
        Ok(DirectWrite { plan, flight })
    }

    /// Writes the parts of the segments that cannot go direct as ordinary bytes. Must be called
    /// before the write is planned: it may need blocks in memory that the direct part is about to
    /// replace. Waits for the device where it has to.
    ///
    /// # Errors
    /// As an ordinary write; the buffer's owner has shrunk it.
    pub fn write_edges(self: &Arc<Self>, ino: u64, segments: &[Segment], region: &Region, now: Timestamp) -> Result<(), FsError> {
        let alignment = self.write_alignment();
        let mut bytes = Vec::new();
        for segment in segments {
            let middle = planner::aligned_middle(segment, alignment);
            let end = segment.file_offset.checked_add(segment.len).ok_or(FsError::FileTooLarge)?;
            for edge in [segment.file_offset..middle.start, middle.end..end] {
                let mut at = edge.start;
                while at < edge.end {
                    bytes.resize((edge.end - at).min(EDGE_STEP) as usize, 0);
                    region.read_at((segment.buffer_offset + (at - segment.file_offset)) as usize, &mut bytes)?;
                    self.wait(|| self.write_edge(ino, at, &bytes, now))?;
                    self.write_behind(ino);
                    at += bytes.len() as u64;
                }
            }
        }
        Ok(())
    }

    /// Alignment of the part of a direct write that goes direct.
    pub fn write_alignment(&self) -> Alignment {
        Alignment::for_writes(BLOCK_SIZE as u32, self.volume.device().geometry())
    }

    /// Writes from the buffer to the device. Calls `done` when the data is there and mapped into
    /// the file.
    pub fn submit_direct_write(&self, write: DirectWrite, done: impl FnOnce(Result<Written, WriteFailed>) + Send + 'static) {
        self.send_direct_write(write, false, done);
    }

    /// As [`Filesystem::submit_direct_write`], by a thread that may wait for the device: it does
    /// where nothing else is in flight, and may be the one that calls `done`.
    pub fn run_direct_write(&self, write: DirectWrite, done: impl FnOnce(Result<Written, WriteFailed>) + Send + 'static) {
        self.send_direct_write(write, true, done);
    }

    fn send_direct_write(
        &self,
        write: DirectWrite,
        may_wait: bool,
        done: impl FnOnce(Result<Written, WriteFailed>) + Send + 'static,
    ) {
        let DirectWrite { mut plan, mut flight } = write;
        let in_place = flight.in_place && plan.edges.is_empty();
        let requests = std::mem::take(&mut plan.requests);
        let end = move |result: gpunvme_blockdev::Result<()>| {
            if let Err(error) = result {
                drop(flight);
                return done(Err(WriteFailed::Device(Failed::new(error, &plan))));
            }
            flight.fs.volume.unflushed.add();
            flight.guard = None;
            match flight.map() {
                Ok(()) => {
                    let written = Written { in_place, shown: flight.file.state.lock().kernel.attributes.are_kept() };
                    drop(flight);
                    done(Ok(written));
                }
                Err(Fail::Error(error)) => {
                    drop(flight);
                    done(Err(error.into()));
                }
                Err(Fail::Stall(_)) => {
                    let fs = flight.fs.clone();
                    let completions = fs.completions.clone();
                    completions.spawn(Box::new(move || {
                        let result = fs.wait_for_space(|| flight.map());
                        drop(flight);
                        done(result.map(|()| Written { in_place, shown: true }).map_err(WriteFailed::from));
                    }));
                }
            }
        };
        if may_wait { self.volume.io.submit_or_run(requests, end) } else { self.volume.io.submit(requests, end) }
    }

    /// The mappings of a file for its reader, from block `from` on, at most `limit`, and the size
    /// of the file. Stalls until the file's data in memory is written back. What a truncation has
    /// still to free is not the file's any more.
    pub fn resolve(&self, ino: u64, from: u64, to: u64, limit: usize) -> Attempt<(Vec<Mapping>, u64)> {
        let file = self.files.find(ino);
        let mut state = file.as_ref().map(|file| file.state.lock());
        if state.as_ref().is_some_and(|s| s.has_dirty(from, to)) {
            return Err(Fail::Stall(Stall::File { ino }));
        }
        let size = self.size_of_regular(state.as_deref().unwrap_or(&Default::default()), ino)?;
        let is_cut_short = match &mut state {
            Some(state) => self.is_cut_short(state, ino)?,
            None => self.volume.is_cut_short(ino)?,
        };
        let to = if is_cut_short { to.min(size.div_ceil(BLOCK)) } else { to };
        Ok((self.volume.mappings(ino, from, to, limit)?, size))
    }
}

impl Flight {
    /// Maps the written blocks into the file.
    fn map(&mut self) -> Attempt<()> {
        if self.in_place {
            return Ok(());
        }
        loop {
            let mut state = self.file.state.lock();
            let stamp = Stamp { size: Some(self.end), changed: state.newer.changed };
            if !self.fs.map_placement(self.file.ino, &mut self.placement, &mut self.promised, &stamp)? {
                self.fs.let_others_in(state);
                continue;
            }
            state.newer.changed = None;
            self.placement = Placement::default();
            return Ok(());
        }
    }
}

impl Drop for Flight {
    fn drop(&mut self) {
        self.fs.unplace(&mut self.placement);
        self.fs.volume.forget_promise(self.promised);
        let mut state = self.file.state.lock();
        // The device may have done what failed, behind the end of the file too.
        state.allocation.tail_is_zero &= self.in_place;
        state.end_direct(self.number, &self.direct);
        let is_in_use = state.is_in_use();
        drop(state);
        self.file.landed.notify_all();
        if !is_in_use {
            self.fs.release(&self.file);
        }
    }
}

fn extent(mapping: &Mapping) -> Extent {
    Extent {
        file_offset: mapping.offset * BLOCK,
        device_offset: mapping.device_offset(),
        len: u64::from(mapping.extent.len) * BLOCK,
        written: !mapping.extent.unwritten,
    }
}
