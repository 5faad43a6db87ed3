//! Snapshots of where files lie: a reader that comes back to a file often remembers its extents,
//! and learns without a lock whether they still hold.
//!
//! It guards what the look-up under the locks guards: a read by a snapshot that is current brings
//! what a read that looked the file up at that moment would have brought.
//!
//! - The file's extents and size change under the metadata lock, and its version with them
//!   ([`crate::volume`]).
//! - Content that only the write buffer has comes there by pages that become dirty, which are
//!   counted. There is no snapshot of a file with such pages, or with pages on their way.
//! - Blocks that a file gives up after the look are not reused before the guard is dropped that the
//!   reader took before it.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use gpunvme_layout::Geometry;
use gpunvme_layout::block::BLOCK_SIZE;

use super::file::File;
use super::filesystem::Filesystem;
use crate::error::Attempt;
use crate::volume::epoch::Guard;

const BLOCK: u64 = BLOCK_SIZE as u64;

/// Where a file that is held ([`Filesystem::hold_file`]) lies: its written extents, as they were at
/// some time. It must not outlive the hold.
pub struct Snapshot {
    file: Arc<File>,
    version: u64,
    dirtied: u64,
    /// Size of the file in bytes.
    size: u64,
    /// Sorted; neighbours on the device are one.
    extents: Box<[Extent]>,
}

/// A written part of a file, in bytes.
#[derive(Clone, Copy)]
struct Extent {
    file_offset: u64,
    device_offset: u64,
    len: u64,
}

impl Snapshot {
    /// How many extents it has.
    pub fn extents(&self) -> usize {
        self.extents.len()
    }

    /// The file.
    pub(super) fn file(&self) -> &Arc<File> {
        &self.file
    }

    /// Where a range of the file begins on the device, in bytes, if all of it lies before the end
    /// of the file, and in one piece that was written.
    pub fn find(&self, range: Range<u64>) -> Option<u64> {
        let at = self.extents.partition_point(|extent| extent.file_offset + extent.len <= range.start);
        let extent = self.extents.get(at)?;
        let is_there = extent.file_offset <= range.start && range.end <= (extent.file_offset + extent.len).min(self.size);
        is_there.then(|| extent.device_offset + (range.start - extent.file_offset))
    }
}

impl Filesystem {
    /// A snapshot of a file that is held, of at most `limit` extents. None where it has more, or
    /// where memory has something that the device has not.
    pub fn snapshot(&self, ino: u64, limit: usize) -> Attempt<Option<Snapshot>> {
        let file = self.files.get(ino);
        let state = file.state.lock();
        if state.buffer.dirty > 0 || !state.in_flight.pages.is_empty() || state.newer.size.is_some() {
            return Ok(None);
        }
        let dirtied = file.dirtied.load(Ordering::Acquire);
        let Some((version, size, mappings)) = self.volume.all_mappings(ino, limit)? else { return Ok(None) };
        drop(state);
        let mut extents: Vec<Extent> = Vec::with_capacity(mappings.len());
        for mapping in mappings.iter().filter(|mapping| !mapping.extent.unwritten) {
            let (file_offset, device_offset) = (mapping.offset * BLOCK, Geometry::byte(mapping.extent.block));
            let len = u64::from(mapping.extent.len) * BLOCK;
            match extents.last_mut() {
                Some(last) if (last.file_offset + last.len, last.device_offset + last.len) == (file_offset, device_offset) => {
                    last.len += len;
                }
                _ => extents.push(Extent { file_offset, device_offset, len }),
            }
        }
        Ok(Some(Snapshot { file, version, dirtied, size, extents: extents.into() }))
    }

    /// Whether a snapshot still holds. What it then says is where the file lies as long as a guard
    /// is held that was taken before ([`Filesystem::guard`]).
    pub fn is_current(&self, snapshot: &Snapshot) -> bool {
        let Snapshot { file, version, dirtied, .. } = snapshot;
        self.volume.versions.of(file.ino) == *version && file.dirtied.load(Ordering::Acquire) == *dirtied
    }

    /// Keeps blocks that files give up from now on from being reused until it is dropped.
    pub fn guard(&self) -> Guard {
        self.volume.epochs.enter()
    }
}
