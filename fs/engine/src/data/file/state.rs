//! State of one file in memory, and the lock that guards it.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use gpunvme_layout::block::BLOCK_SIZE;
use parking_lot::{Condvar, Mutex};

use crate::data::errors::Errors;
use crate::data::pages::Pages;
use crate::error::{Attempt, Fail, Stall};
use crate::volume::Run;

use super::buffer::FileBuffer;
use super::in_flight::InFlight;
use super::kernel_view::KernelView;
use super::newer::Newer;

/// State of a file that its lock guards.
#[derive(Default)]
pub(crate) struct FileState {
    /// Holders of [`Filesystem::hold_file`](crate::data::Filesystem::hold_file).
    pub holders: u32,
    /// Whether it was written since the last look at all files that are written back.
    pub is_active: bool,
    /// The part of it that is in the write buffer.
    pub buffer: FileBuffer,
    /// Writes to it that are on their way to the device.
    pub in_flight: InFlight,
    /// Size and times that are newer in memory than in the inode.
    pub newer: Newer,
    /// What the kernel may have cached.
    pub kernel: KernelView,
    /// Where its next blocks go.
    pub allocation: Allocation,
    /// Whether blocks beyond the end wait to be freed.
    pub truncation: Truncation,
    /// Data of it that was lost, and which processes have learned of it.
    pub errors: Errors,
}

/// Where the next blocks of a file go, and what lies behind its last one.
#[derive(Default)]
pub(crate) struct Allocation {
    /// Where the next new block of the file best goes: (block of the file, block of the device).
    pub goal: Option<(u64, u64)>,
    /// Blocks reserved ahead: beyond the last write of a file that grows.
    pub ahead: Option<Run>,
    /// The bytes beyond the end, in the last block on the device, are known to be zeros.
    pub tail_is_zero: bool,
}

/// Progress of freeing the blocks beyond a new, smaller size, which takes many operations. Until it
/// is over, the file must not grow: the old blocks would become part of it again.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Truncation {
    /// It was not looked for one yet that an earlier mount did not end.
    #[default]
    Unknown,
    /// Nothing is left to be freed.
    Over,
    /// Blocks are left to be freed, and no thread frees them yet.
    Pending,
    /// A thread is freeing them.
    InFlight,
}

impl FileState {
    /// Whether nothing in memory is newer than the device.
    pub fn is_clean(&self) -> bool {
        self.in_flight.writes.is_empty() && self.buffer.dirty == 0 && self.newer.is_empty()
    }

    /// The newest content of a block that is in no page waiting to be written, if it is in memory:
    /// the memory, and which page of it.
    pub fn settled(&self, block: u64) -> Option<(&Pages, usize)> {
        let last = || self.buffer.last.as_ref().filter(|(number, _)| *number == block).map(|(_, page)| (page, 0));
        self.in_flight.pages.find(block).or_else(last)
    }

    /// Whether it stays in memory, because it is likely to be used again soon.
    pub fn is_in_use(&self) -> bool {
        self.holders > 0 || self.is_active
    }

    /// Whether the device may have, in the block with the end of a file of `size` bytes and behind
    /// that end, anything but zeros.
    pub fn may_hide(&self, size: u64) -> bool {
        !size.is_multiple_of(BLOCK_SIZE as u64) && !self.allocation.tail_is_zero
    }

    /// Whether blocks `from..to` have content in memory that the device does not have.
    pub fn has_dirty(&self, from: u64, to: u64) -> bool {
        self.in_flight.pages.overlaps(from..to) || self.buffer.has_dirty(from..to)
    }

    /// A direct write of these blocks begins. Returns its number among the writes in flight.
    pub fn begin_direct(&mut self, blocks: &[Range<u64>]) -> u64 {
        self.in_flight.direct.extend_from_slice(blocks);
        blocks.iter().for_each(|run| self.buffer.content_changes(run.clone()));
        self.in_flight.writes.begin()
    }

    /// A direct write of these blocks is over, however it went.
    pub fn end_direct(&mut self, number: u64, blocks: &[Range<u64>]) {
        self.in_flight.writes.end(number);
        for run in blocks {
            self.buffer.content_changes(run.clone());
            let at = self.in_flight.direct.iter().position(|r| r == run).expect("noted when it began");
            self.in_flight.direct.swap_remove(at);
        }
    }

    /// Passes when no direct write to blocks `from..to` is in flight.
    pub fn has_no_direct(&self, ino: u64, from: u64, to: u64) -> Attempt<()> {
        let overlaps = |run: &Range<u64>| run.start < to && from < run.end;
        if self.in_flight.direct.iter().any(overlaps) { Err(Fail::Stall(Stall::InFlight { ino })) } else { Ok(()) }
    }
}

/// A file in memory.
pub(crate) struct File {
    /// Inode.
    pub ino: u64,
    /// Taken before the journal's and the metadata's locks, and never two files' at a time.
    pub state: Mutex<FileState>,
    /// As [`FileBuffer::dirtied`].
    pub dirtied: Arc<AtomicU64>,
    /// Signalled when a batch of writes, or anything else that held others back, has ended.
    pub landed: Condvar,
}

impl File {
    /// A file of which nothing is in memory yet.
    pub fn new(ino: u64) -> File {
        let state = FileState::default();
        let dirtied = state.buffer.dirtied.clone();
        File { ino, state: Mutex::new(state), dirtied, landed: Condvar::new() }
    }
}
