//! The write buffer: memory for data that was written and is not on the device yet. One region, mapped for the device's DMA,
//! handed out in pages of one block; pages that are taken together lie together, so that they go out as one piece.

use std::ops::Range;
use std::sync::Arc;

use gpunvme_blockdev::{BlockDevice, Region, Span};
use gpunvme_layout::block::BLOCK_SIZE;
use parking_lot::{Condvar, Mutex};

use crate::error::FsError;

struct Free {
    /// One bit a page: 1 = free.
    words: Vec<u64>,
    count: usize,
    /// Word where the next search begins.
    next: usize,
}

/// The write buffer.
pub(crate) struct PagePool {
    device: Arc<dyn BlockDevice>,
    region: Arc<Region>,
    free: Mutex<Free>,
    freed: Condvar,
}

/// A page of the write buffer; it goes back when it is dropped.
pub(crate) struct Page {
    pool: Arc<PagePool>,
    index: usize,
}

impl PagePool {
    /// A write buffer of at least `bytes` bytes.
    pub fn new(device: &Arc<dyn BlockDevice>, bytes: usize) -> Result<Arc<PagePool>, FsError> {
        let words = bytes.div_ceil(64 * BLOCK_SIZE).max(1);
        let region = Region::allocate(words * 64 * BLOCK_SIZE)?;
        device.map(&region)?;
        let free = Free { words: vec![u64::MAX; words], count: words * 64, next: 0 };
        Ok(Arc::new(PagePool { device: device.clone(), region, free: Mutex::new(free), freed: Condvar::new() }))
    }

    /// Takes `count` pages, or none when there are not that many.
    pub fn take(self: &Arc<PagePool>, count: usize) -> Option<Vec<Page>> {
        let mut free = self.free.lock();
        if free.count < count {
            return None;
        }
        free.count -= count;
        let mut pages = Vec::with_capacity(count);
        while pages.len() < count {
            let word = free.next;
            if free.words[word] == 0 {
                free.next = (word + 1) % free.words.len();
                continue;
            }
            let bit = free.words[word].trailing_zeros() as usize;
            free.words[word] &= !(1 << bit);
            pages.push(Page { pool: self.clone(), index: word * 64 + bit });
        }
        Some(pages)
    }

    /// Whether so little is free that writing out should not wait any longer.
    pub fn is_short(&self) -> bool {
        let free = self.free.lock();
        free.count < free.words.len() * 32
    }

    /// Whether so much is free that a page may be kept for later.
    pub fn is_roomy(&self) -> bool {
        let free = self.free.lock();
        free.count > free.words.len() * 48
    }

    /// Waits until a page is given back, but not long: it may have happened already.
    pub fn wait(&self) {
        let mut free = self.free.lock();
        self.freed.wait_for(&mut free, std::time::Duration::from_millis(10));
    }
}

impl Drop for PagePool {
    fn drop(&mut self) {
        if Arc::get_mut(&mut self.region).is_some() {
            self.device.unmap(&self.region);
        } else {
            tracing::warn!("requests outlive the write buffer; its memory stays mapped");
        }
    }
}

impl Page {
    fn offset(&self) -> usize {
        self.index * BLOCK_SIZE
    }

    /// Copies bytes into the page.
    pub fn write(&self, at: usize, bytes: &[u8]) -> Result<(), FsError> {
        assert!(at + bytes.len() <= BLOCK_SIZE);
        Ok(self.region().write_at(self.offset() + at, bytes)?)
    }

    /// Makes a part of the page zeros.
    pub fn zero(&self, range: Range<usize>) -> Result<(), FsError> {
        assert!(range.end <= BLOCK_SIZE);
        Ok(self.region().zero_at(self.offset() + range.start, range.len())?)
    }

    /// Copies bytes out of the page.
    pub fn read(&self, at: usize, out: &mut [u8]) -> Result<(), FsError> {
        assert!(at + out.len() <= BLOCK_SIZE);
        Ok(self.region().read_at(self.offset() + at, out)?)
    }

    /// Makes this page a copy of another.
    pub fn copy_from(&self, other: &Page) -> Result<(), FsError> {
        let mut bytes = [0; BLOCK_SIZE];
        other.read(0, &mut bytes)?;
        self.write(0, &bytes)
    }

    /// The page as a device sees it.
    pub fn span(&self) -> Span {
        Span { region: self.region().clone(), offset: self.offset(), len: BLOCK_SIZE }
    }

    fn region(&self) -> &Arc<Region> {
        &self.pool.region
    }
}

impl Drop for Page {
    fn drop(&mut self) {
        let mut free = self.pool.free.lock();
        free.words[self.index / 64] |= 1 << (self.index % 64);
        free.count += 1;
        self.pool.freed.notify_all();
    }
}

/// Appends a span to others; one that continues the last becomes part of it.
pub(crate) fn push_span(spans: &mut Vec<Span>, span: Span) {
    match spans.last_mut() {
        Some(last) if Arc::ptr_eq(&last.region, &span.region) && last.offset + last.len == span.offset => last.len += span.len,
        _ => spans.push(span),
    }
}
