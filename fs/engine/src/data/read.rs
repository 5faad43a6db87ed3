//! Reading: holes are zeros, blocks in memory are copied from there, and the device reads the rest
//! into the caller's buffer.

use std::ops::Range;

use gpunvme_blockdev::{Buffer, Request};
use gpunvme_layout::Geometry;
use gpunvme_layout::block::BLOCK_SIZE;

use super::filesystem::Filesystem;
use super::page_map::without;
use crate::error::{Attempt, FsError};
use crate::volume::epoch::Guard;

const BLOCK: u64 = BLOCK_SIZE as u64;

/// A read that is ready to go to the device.
pub struct ReadPlan {
    buffer: Option<Buffer>,
    range: Range<usize>,
    requests: Vec<Request>,
    guard: Option<Guard>,
}

/// Bytes that were read.
pub struct Read {
    buffer: Option<Buffer>,
    range: Range<usize>,
}

impl Read {
    /// The bytes; fewer than were asked for where the file ends.
    pub fn bytes(&self) -> &[u8] {
        self.buffer.as_ref().map_or(&[], |buffer| &buffer.bytes()[self.range.clone()])
    }
}

impl Filesystem {
    /// Looks up where the bytes are, and gathers what is not on the device.
    pub fn plan_read(&self, ino: u64, offset: u64, len: usize) -> Attempt<ReadPlan> {
        let file = self.files.find(ino);
        let state = file.as_ref().map(|file| file.state.lock());
        let size = match &state {
            Some(state) => self.size_of_regular(state, ino)?,
            None => self.size_of_regular(&Default::default(), ino)?,
        };
        let end = offset.saturating_add(len as u64).min(size);
        if offset >= end {
            return Ok(ReadPlan { buffer: None, range: 0..0, requests: Vec::new(), guard: None });
        }
        let (first, last) = (offset / BLOCK, (end - 1) / BLOCK);
        let guard = self.volume.epochs.enter();
        let mappings = self.volume.mappings(ino, first, last + 1, usize::MAX)?;
        let mut buffer = self.buffers.get(((last + 1 - first) * BLOCK) as usize).map_err(FsError::from)?;
        let place = |block: u64| ((block - first) * BLOCK) as usize;

        let mut requests = Vec::new();
        let mut at = first;
        for mapping in &mappings {
            buffer.bytes_mut()[place(at)..place(mapping.offset)].fill(0);
            at = mapping.end();
            if mapping.extent.unwritten {
                buffer.bytes_mut()[place(mapping.offset)..place(at)].fill(0);
            }
        }
        buffer.bytes_mut()[place(at)..place(last + 1)].fill(0);
        // Data that waits to be written is newer than data on its way, which is newer than the
        // device's.
        let mut newer: Vec<Range<u64>> = Vec::new();
        if let Some(state) = &state {
            let writing = state.in_flight.pages.overlapping(first..last + 1).map(|(held, pages)| (held, &**pages));
            let waiting = state.buffer.pages.overlapping(first..last + 1).map(|(held, entry)| (held, &entry.pages));
            for (held, pages) in writing.chain(waiting) {
                let part = held.start.max(first)..held.end.min(last + 1);
                let out = &mut buffer.bytes_mut()[place(part.start)..place(part.end)];
                pages.read((part.start - held.start) as usize * BLOCK_SIZE, out)?;
                newer.push(part);
            }
            newer.sort_unstable_by_key(|part| part.start);
        }
        for mapping in mappings.iter().filter(|m| !m.extent.unwritten) {
            for run in without(mapping.offset..mapping.end(), newer.iter().cloned()) {
                let device = Geometry::byte(mapping.extent.block + (run.start - mapping.offset));
                requests.push(Request::read(device, vec![buffer.span(place(run.start)..place(run.end))]));
            }
        }
        let skip = (offset - first * BLOCK) as usize;
        Ok(ReadPlan { buffer: Some(buffer), range: skip..skip + (end - offset) as usize, requests, guard: Some(guard) })
    }

    /// Reads from the device what the plan needs; `done` gets the bytes, from a thread that
    /// completes I/O when there was any.
    pub fn submit_read(&self, plan: ReadPlan, done: impl FnOnce(Result<Read, FsError>) + Send + 'static) {
        self.send_read(plan, false, done);
    }

    /// As [`Filesystem::submit_read`], by a thread that may wait for the device: it does where
    /// nothing else is in flight, and calls `done`.
    pub fn run_read(&self, plan: ReadPlan, done: impl FnOnce(Result<Read, FsError>) + Send + 'static) {
        self.send_read(plan, true, done);
    }

    fn send_read(&self, plan: ReadPlan, may_wait: bool, done: impl FnOnce(Result<Read, FsError>) + Send + 'static) {
        let ReadPlan { buffer, range, requests, guard } = plan;
        let read = Read { buffer, range };
        if requests.is_empty() {
            return done(Ok(read));
        }
        let end = move |result: gpunvme_blockdev::Result<()>| {
            drop(guard);
            done(result.map(|()| read).map_err(FsError::from));
        };
        if may_wait { self.volume.io.submit_or_run(requests, end) } else { self.volume.io.submit(requests, end) }
    }

    /// Reads and waits.
    ///
    /// # Errors
    /// The device failed, or the inode is no regular file.
    pub fn read(self: &std::sync::Arc<Self>, ino: u64, offset: u64, len: usize) -> Result<Vec<u8>, FsError> {
        let plan = self.wait(|| self.plan_read(ino, offset, len))?;
        let (sender, receiver) = std::sync::mpsc::channel();
        self.submit_read(plan, move |result| {
            // The receiver waits below.
            let _ = sender.send(result.map(|read| read.bytes().to_vec()));
        });
        loop {
            match receiver.try_recv() {
                Ok(result) => return result,
                Err(_) if self.completions.help() => {}
                Err(_) => return receiver.recv().expect("a read is always answered"),
            }
        }
    }
}
