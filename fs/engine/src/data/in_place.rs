//! Direct writes in place whose place a snapshot knows: they take the file's lock for moments, and
//! no other.
//!
//! It guards what [`Filesystem::plan_direct_write`] guards. Under the file's lock the snapshot is
//! current, so the blocks are the file's, written before, and before its end; no page of them is in
//! memory, and the file is not quiesced. From then on the write is among those in flight, for which
//! waits whatever would free its blocks or change their content.

use std::ops::Range;
use std::sync::Arc;

use gpunvme_layout::Timestamp;
use gpunvme_layout::block::BLOCK_SIZE;

use super::file::File;
use super::filesystem::Filesystem;
use super::snapshot::Snapshot;

const BLOCK: u64 = BLOCK_SIZE as u64;

/// A write in place on its way to the device. Dropping it ends it, as failed. It must not outlive
/// the hold of its file ([`Filesystem::hold_file`]).
pub struct InPlaceWrite {
    file: Arc<File>,
    number: u64,
    blocks: Range<u64>,
    /// Where on the device it begins, in bytes.
    pub device_offset: u64,
}

impl Filesystem {
    /// Begins a write to a range of a file, of whole blocks, in bytes, that lies in one piece on
    /// the device. The caller holds a [`Filesystem::guard`] from before until the device is done.
    /// `None` may mean anything: [`Filesystem::plan_direct_write`] looks closer.
    pub fn begin_in_place(&self, snapshot: &Snapshot, range: Range<u64>, now: Timestamp) -> Option<InPlaceWrite> {
        debug_assert!(range.start.is_multiple_of(BLOCK) && range.end.is_multiple_of(BLOCK));
        let device_offset = snapshot.find(range.clone())?;
        self.volume.writable().ok()?;
        let file = snapshot.file();
        let blocks = range.start / BLOCK..range.end / BLOCK;
        let mut state = file.state.lock();
        let may_begin = state.in_flight.quiescers == 0
            && self.is_current(snapshot)
            && !state.buffer.pages.overlaps(blocks.clone())
            && !state.in_flight.pages.overlaps(blocks.clone());
        if !may_begin {
            return None;
        }
        let number = state.begin_direct(std::slice::from_ref(&blocks));
        state.newer.changes_at(now);
        state.is_active = true;
        drop(state);
        Some(InPlaceWrite { file: file.clone(), number, blocks, device_offset })
    }

    /// Ends a write that the device has. Returns whether the kernel may keep attributes of the file
    /// that are out of date now.
    pub fn end_in_place(&self, write: InPlaceWrite) -> bool {
        self.volume.unflushed.add();
        let are_kept = write.file.state.lock().kernel.attributes.are_kept();
        drop(write);
        are_kept
    }
}

impl Drop for InPlaceWrite {
    fn drop(&mut self) {
        self.file.state.lock().end_direct(self.number, std::slice::from_ref(&self.blocks));
        self.file.landed.notify_all();
    }
}
