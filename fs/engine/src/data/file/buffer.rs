//! The part of a file that is in the write buffer.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::data::page_map::{BufferedPages, PageMap, without};
use crate::data::pages::Pages;

/// The part of a file that is in the write buffer, or being read into it.
#[derive(Default)]
pub(crate) struct FileBuffer {
    /// Pages that may be written to.
    pub pages: PageMap<BufferedPages>,
    /// Pages of them that are dirty.
    pub dirty: u64,
    /// Whether the file is on the list of those that became dirty.
    pub is_listed: bool,
    /// Times that pages became dirty, also for readers without the file's lock.
    pub dirtied: Arc<AtomicU64>,
    /// Pages of them that a block was promised for.
    pub promised: u64,
    /// Nodes that are promised to the mapping of dirty pages.
    pub nodes: NodesPromised,
    /// Blocks that are being read into pages.
    pub fills: Fills,
    /// The block in which the file ends, as the device has it, for the next append to begin with.
    /// Kept from when it was written until content changes, or until the write buffer needs the
    /// page.
    pub last: Option<(u64, Pages)>,
}

/// Nodes that are promised to the mapping of dirty pages.
#[derive(Default)]
pub(crate) struct NodesPromised {
    /// How many, in parts.
    pub parts: u64,
    /// Where the range of blocks ends that the last were promised to.
    pub end: Option<u64>,
}

impl FileBuffer {
    /// Notes that the content of these blocks on the device changes.
    pub fn content_changes(&mut self, blocks: Range<u64>) {
        self.fills.spoil(blocks);
        self.last = None;
    }

    /// Notes that these blocks, which are in memory, have to be written.
    pub fn mark_dirty(&mut self, blocks: Range<u64>) {
        self.dirtied.fetch_add(1, Ordering::AcqRel);
        self.dirty += self.pages.change(blocks, |entry| !entry.dirty, |entry| entry.dirty = true);
    }

    /// Whether all of these blocks wait to be written.
    pub fn is_all_dirty(&self, blocks: Range<u64>) -> bool {
        let dirty = self.pages.overlapping(blocks.clone()).filter(|(_, entry)| entry.dirty).map(|(held, _)| held);
        without(blocks, dirty).is_empty()
    }

    /// Whether pages of these blocks wait to be written.
    pub fn has_dirty(&self, blocks: Range<u64>) -> bool {
        self.pages.overlapping(blocks).any(|(_, entry)| entry.dirty)
    }
}

/// Blocks that are being read from the device into pages, as long as their content on the device
/// does not change.
#[derive(Default)]
pub(crate) struct Fills {
    begun: u64,
    /// Number and block of each.
    good: Vec<(u64, u64)>,
}

impl Fills {
    /// Notes that a block is about to be read. Returns the number of the fill.
    pub fn begin(&mut self, block: u64) -> u64 {
        self.begun += 1;
        self.good.push((self.begun, block));
        self.begun
    }

    /// Whether the block's content has not changed since the fill began.
    pub fn is_good(&self, number: u64) -> bool {
        self.good.iter().any(|(good, _)| *good == number)
    }

    /// Ends a fill.
    pub fn end(&mut self, number: u64) {
        self.good.retain(|(good, _)| *good != number);
    }

    /// Notes that fills of these blocks may read content that is out of date.
    pub fn spoil(&mut self, blocks: Range<u64>) {
        self.good.retain(|(_, block)| !blocks.contains(block));
    }
}
