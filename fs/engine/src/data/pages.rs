//! The write buffer's memory: holds data that was written and is not on the device yet. It is one
//! region, mapped for the device's DMA, and is handed out in runs of pages of one block each. A run
//! is contiguous where possible, so that it is copied and written back as one piece. The lowest
//! pages are used again first: a stream of writes stays in memory that the processor's caches hold.

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use gpunvme_blockdev::{BlockDevice, Region, Span};
use gpunvme_layout::block::BLOCK_SIZE;
use parking_lot::{Condvar, Mutex};
use smallvec::SmallVec;

use crate::error::FsError;

const WORD: usize = u64::BITS as usize;
/// How long [`PagePool::wait`] waits: several times as long as a device needs for a request.
const WAIT: Duration = Duration::from_millis(10);

struct Free {
    /// One bit a page: 1 = free.
    words: Vec<u64>,
    count: usize,
    /// No word before this one has a free page.
    first: usize,
    /// Times that pages were given back.
    returns: u64,
}

/// The write buffer.
pub(crate) struct PagePool {
    device: Arc<dyn BlockDevice>,
    region: Arc<Region>,
    free: Mutex<Free>,
    freed: Condvar,
}

/// Pages of the write buffer that lie side by side; they go back when they are dropped.
pub(crate) struct Pages {
    pool: Arc<PagePool>,
    run: Range<usize>,
}

impl PagePool {
    /// A write buffer of at least `bytes` bytes.
    pub fn new(device: &Arc<dyn BlockDevice>, bytes: usize) -> Result<Arc<PagePool>, FsError> {
        let words = bytes.div_ceil(WORD * BLOCK_SIZE).max(1);
        let region = Region::allocate(words * WORD * BLOCK_SIZE)?;
        device.map(&region)?;
        let free = Free { words: vec![u64::MAX; words], count: words * WORD, first: 0, returns: 0 };
        Ok(Arc::new(PagePool { device: device.clone(), region, free: Mutex::new(free), freed: Condvar::new() }))
    }

    /// Takes `count` pages, in as few runs as a short search finds; none when fewer pages are free.
    pub fn take(self: &Arc<PagePool>, count: usize) -> Option<SmallVec<[Pages; 2]>> {
        let mut taken: SmallVec<[Pages; 2]> = SmallVec::new();
        let mut free = self.free.lock();
        if free.count < count {
            return None;
        }
        let mut left = count;
        if count >= WORD
            && let Some(start) = free.whole_words(count.div_ceil(WORD))
        {
            free.set(start..start + count, false);
            taken.push(Pages { pool: self.clone(), run: start..start + count });
            left = 0;
        }
        while left > 0 {
            let run = free.next_run(left);
            left -= run.len();
            match taken.last_mut() {
                Some(last) if last.run.end == run.start => last.run.end = run.end,
                _ => taken.push(Pages { pool: self.clone(), run }),
            }
        }
        Some(taken)
    }

    /// Bytes that are taken.
    pub fn taken(&self) -> u64 {
        let free = self.free.lock();
        ((free.words.len() * WORD - free.count) * BLOCK_SIZE) as u64
    }

    /// Whether so little is free that writing back should not wait any longer.
    pub fn is_short(&self) -> bool {
        let free = self.free.lock();
        free.count < free.words.len() * WORD / 2
    }

    /// Whether so much is free that a page may be kept for later.
    pub fn is_roomy(&self) -> bool {
        let free = self.free.lock();
        free.count > free.words.len() * WORD / 4 * 3
    }

    /// How often pages were given back.
    pub fn returns(&self) -> u64 {
        self.free.lock().returns
    }

    /// Waits until pages have been given back more often than `returns` times, but not long.
    /// Returns whether they have.
    pub fn wait(&self, returns: u64) -> bool {
        let mut free = self.free.lock();
        let end = Instant::now() + WAIT;
        while free.returns == returns {
            if self.freed.wait_until(&mut free, end).timed_out() {
                return false;
            }
        }
        true
    }
}

impl Free {
    /// The first of so many words side by side that are all free.
    fn whole_words(&self, count: usize) -> Option<usize> {
        let mut found = 0;
        for (at, word) in self.words.iter().enumerate().skip(self.first) {
            found = if *word == u64::MAX { found + 1 } else { 0 };
            if found == count {
                return Some((at + 1 - count) * WORD);
            }
        }
        None
    }

    /// Takes the next run of at most `most` free pages of one word. There must be a free page.
    fn next_run(&mut self, most: usize) -> Range<usize> {
        while self.words[self.first] == 0 {
            self.first += 1;
        }
        let word = self.words[self.first];
        let bit = word.trailing_zeros();
        let len = (word >> bit).trailing_ones() as usize;
        let start = self.first * WORD + bit as usize;
        let run = start..start + len.min(most);
        self.set(run.clone(), false);
        run
    }

    fn set(&mut self, run: Range<usize>, free: bool) {
        let mut at = run.start;
        while at < run.end {
            let (word, bit) = (at / WORD, at % WORD);
            let len = (WORD - bit).min(run.end - at);
            let mask = (u64::MAX >> (WORD - len)) << bit;
            self.words[word] = if free { self.words[word] | mask } else { self.words[word] & !mask };
            at += len;
        }
        if free {
            self.count += run.len();
            self.first = self.first.min(run.start / WORD);
        } else {
            self.count -= run.len();
        }
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

impl Pages {
    /// Number of pages.
    pub fn len(&self) -> usize {
        self.run.len()
    }

    /// Splits off the pages from `at` on, which are then not in this run any more.
    pub fn split_off(&mut self, at: usize) -> Pages {
        assert!(at <= self.len());
        let cut = self.run.start + at;
        let rest = Pages { pool: self.pool.clone(), run: cut..self.run.end };
        self.run.end = cut;
        rest
    }

    /// Whether `next` lies right behind these pages.
    pub fn is_before(&self, next: &Pages) -> bool {
        self.run.end == next.run.start
    }

    /// Joins these pages with others that lie right behind them.
    pub fn join(&mut self, mut next: Pages) {
        assert!(self.is_before(&next));
        self.run.end = next.run.end;
        next.run.start = next.run.end;
    }

    /// Copies bytes into the pages, from byte `at` of them on.
    pub fn write(&self, at: usize, bytes: &[u8]) -> Result<(), FsError> {
        Ok(self.pool.region.write_at(self.bytes(at..at + bytes.len()).start, bytes)?)
    }

    /// Makes bytes zeros.
    pub fn zero(&self, range: Range<usize>) -> Result<(), FsError> {
        let range = self.bytes(range);
        Ok(self.pool.region.zero_at(range.start, range.len())?)
    }

    /// Copies bytes out of the pages, from byte `at` of them on.
    pub fn read(&self, at: usize, out: &mut [u8]) -> Result<(), FsError> {
        Ok(self.pool.region.read_at(self.bytes(at..at + out.len()).start, out)?)
    }

    /// Pages `range` of this run as a device sees them.
    pub fn span(&self, range: Range<usize>) -> Span {
        self.pool.region.span(self.bytes(range.start * BLOCK_SIZE..range.end * BLOCK_SIZE))
    }

    /// Where bytes of these pages lie in the region.
    fn bytes(&self, range: Range<usize>) -> Range<usize> {
        assert!(range.start <= range.end && range.end <= self.len() * BLOCK_SIZE);
        let start = self.run.start * BLOCK_SIZE;
        start + range.start..start + range.end
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        if !self.run.is_empty() {
            let mut free = self.pool.free.lock();
            free.set(self.run.clone(), true);
            free.returns += 1;
            drop(free);
            self.pool.freed.notify_all();
        }
    }
}

/// Appends a span to others; one that continues the last becomes part of it.
pub(crate) fn push_span(spans: &mut Vec<Span>, span: Span) {
    match spans.last_mut() {
        Some(last) if Arc::ptr_eq(&last.region, &span.region) && last.offset + last.len == span.offset => last.len += span.len,
        _ => spans.push(span),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    impl PagePool {
        /// A write buffer for a small file as its device.
        pub(crate) fn of_a_file(pages: usize) -> Arc<PagePool> {
            let image = tempfile::NamedTempFile::new().unwrap();
            image.as_file().set_len(1 << 20).unwrap();
            let path = image.path().to_str().unwrap();
            let device = gpunvme_blockdev::open(path, gpunvme_blockdev::OpenMode::ReadWrite).unwrap();
            PagePool::new(&device, pages * BLOCK_SIZE).unwrap()
        }
    }

    /// Runs that are taken, cut, joined and given back in any order: no page is in two of them,
    /// and none is missing afterwards.
    #[test]
    fn a_page_belongs_to_one_run_and_all_come_back() {
        const PAGES: usize = 512;
        let pool = PagePool::of_a_file(PAGES);
        let mut state = 1_u64;
        let mut below = |limit: usize| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) as usize % limit
        };
        let mut held: Vec<Pages> = Vec::new();
        let mut short = 0;
        for _ in 0..20_000 {
            let at = below(held.len() + 1);
            match below(4) {
                0 => {
                    let count = [1, 2, 64, 200][below(4)];
                    let free = PAGES - held.iter().map(Pages::len).sum::<usize>();
                    let taken = pool.take(count);
                    assert_eq!(taken.is_some(), count <= free);
                    short += usize::from(taken.is_none());
                    assert!(taken.iter().flatten().map(Pages::len).sum::<usize>() == if count <= free { count } else { 0 });
                    held.extend(taken.into_iter().flatten());
                }
                1 if at < held.len() => drop(held.swap_remove(at)),
                2 if at < held.len() => {
                    let cut = below(held[at].len() + 1);
                    let rest = held[at].split_off(cut);
                    held.push(rest);
                }
                3 if at < held.len() => {
                    if let Some(next) =
                        held.iter().position(|next| held[at].is_before(next) && next.len() > 0 && held[at].len() > 0)
                    {
                        let next = held.remove(next);
                        let first = held.iter().position(|first| first.len() > 0 && first.is_before(&next)).unwrap();
                        held[first].join(next);
                    }
                }
                _ => {}
            }
            let mut owners = [0; PAGES];
            held.iter().flat_map(|pages| pages.run.clone()).for_each(|page| owners[page] += 1);
            assert!(owners.iter().all(|owners| *owners <= 1));
        }
        assert!(short > 0, "it was never full");
        drop(held);
        let all = pool.take(PAGES).unwrap();
        assert_eq!((all.len(), all[0].len()), (1, PAGES), "all of it lies together again");
    }
}
