//! The kernel's pages of a file: the pages that its page cache may hold.
//!
//! A direct transfer has the kernel write back and forget the pages that it touches, and waits for
//! that. So the mount has to know which pages those may be: no page too few, or a process reads old
//! bytes for ever, and few too many, since each costs a call.
//!
//! A page comes into the kernel's cache only with a read or a write that it sends for it. Either is
//! noted when it arrives, before the mount looks up what the file holds. The page is in the cache
//! by then, locked if it is to be read, and so an invalidation that begins later finds it, waits
//! for the answer, writes it back where it is dirty, and removes it
//! (`invalidate_inode_pages2_range`, mm/truncate.c). When the invalidation has ended, pages noted
//! before it began are not there any more; pages noted after that may be. (A page that a device
//! writes to in that very moment, through memory that a process has pinned, can stay, and the
//! kernel does not report it.)
//!
//! An invalidation can also come between a write(2) and its request. The kernel puts the bytes into
//! the page, unlocks it, and only then sends them (`fuse_fill_write_pages`, fs/fuse/file.c). If the
//! page is removed in between, and read anew before the request is carried out, the cache has the
//! bytes from before the write, and would keep them. So pages that were read after an invalidation
//! of them, and are then written, are *overtaken*: the mount invalidates them once more when it has
//! the bytes. (Memory that the kernel reclaims is no such case: the request holds its pages. Nor
//! are the kernel's own invalidations, which exclude write(2) by the inode's lock.)

use std::ops::Range;

/// Runs of pages that are told apart. 16 KiB of memory at the most.
const RUNS: usize = 1024;
/// Bytes of a run in memory.
const RUN: usize = size_of::<Range<u64>>();
/// Bytes of a page of the kernel's cache.
pub(crate) const PAGE: u64 = 4096;

/// The pages of a file that the kernel may have.
#[derive(Debug, Default)]
pub(crate) struct PageCache {
    pages: PageRuns,
    /// Invalidations in flight.
    invalidations: Vec<Invalidation>,
    /// None where nothing was invalidated yet.
    overtaking: Option<Box<Overtaking>>,
}

/// Reads that may have overtaken a write of the same pages.
#[derive(Debug, Default)]
struct Overtaking {
    /// Pages that were invalidated since they were last written.
    invalidated: PageRuns,
    /// Those of them that were read after that.
    read: PageRuns,
}

#[derive(Debug)]
struct Invalidation {
    number: u64,
    /// Pages that will not be in the cache when it ends.
    gone: PageRuns,
    /// Pages that it removes.
    ranges: Vec<Range<u64>>,
    /// Bytes that the kernel is given before, unasked. It may use them until the invalidation ends.
    stored: Option<Range<u64>>,
    /// Whether the kernel may send a write meanwhile.
    beside_writes: bool,
}

impl PageCache {
    /// Memory that it has allocated, in bytes.
    pub fn memory(&self) -> usize {
        let runs = self.overtaking.as_ref().map_or(0, |o| size_of::<Overtaking>() + o.invalidated.memory() + o.read.memory());
        let invalidations = self.invalidations.iter().map(|i| i.gone.memory() + i.ranges.capacity() * RUN).sum::<usize>();
        self.pages.memory() + runs + self.invalidations.capacity() * size_of::<Invalidation>() + invalidations
    }

    /// Gives up telling runs of pages apart: takes the kernel to have all pages between the first
    /// and the last, which costs invalidations too many and little memory.
    pub fn condense(&mut self) {
        self.pages.condense();
        if let Some(overtaking) = &mut self.overtaking {
            overtaking.invalidated.condense();
            overtaking.read.condense();
        }
    }

    /// Notes that the kernel asks for bytes. To be called before it is looked up what the file
    /// holds.
    pub fn read(&mut self, range: Range<u64>) {
        if let Some(overtaking) = &mut self.overtaking {
            let pages = whole_pages(range.clone());
            let is_removed = |i: &Invalidation| i.beside_writes && i.ranges.iter().any(|gone| overlap(gone, &pages));
            if overtaking.invalidated.touches(&pages) || self.invalidations.iter().any(is_removed) {
                overtaking.read.insert(pages);
            }
        }
        self.note(range);
    }

    /// Whether the kernel may have read some of these bytes as they were before a write of them
    /// that is carried out now. It tells so once: the caller invalidates them.
    pub fn is_overtaken(&mut self, range: Range<u64>) -> bool {
        let Some(overtaking) = &mut self.overtaking else { return false };
        let pages = whole_pages(range);
        let overtaken = overtaking.read.touches(&pages);
        // Without room to tell them apart they stay: an invalidation too many.
        let _ = overtaking.invalidated.remove(pages.clone());
        let _ = overtaking.read.remove(pages);
        overtaken
    }

    /// Notes that the kernel asks for bytes, or sends some. To be called before it is looked up
    /// what the file holds.
    pub fn note(&mut self, range: Range<u64>) {
        let range = whole_pages(range);
        for invalidation in &mut self.invalidations {
            // Whether the page comes before or after it is not known.
            if !invalidation.gone.remove(range.clone()) {
                invalidation.gone = PageRuns::default();
            }
        }
        self.pages.insert(range);
    }

    /// Whether the kernel may have some of these bytes.
    pub fn may_have(&self, mut ranges: impl Iterator<Item = Range<u64>>) -> bool {
        let stored = |range: &Range<u64>| self.invalidations.iter().filter_map(|i| i.stored.as_ref()).any(|s| overlap(s, range));
        ranges.any(|range| self.pages.touches(&range) || stored(&range))
    }

    /// An invalidation of these ranges is about to begin, and before it the bytes of `stored`,
    /// inside one of them, are given to the kernel. Returns what there is to invalidate: less than
    /// was asked for where the kernel has nothing, and more where there are too many runs to tell
    /// apart what would be left. `beside_writes`: false where a write(2) of these pages is answered
    /// only after the invalidation, since the kernel sends no other one of the file until then.
    pub fn begin(
        &mut self,
        number: u64,
        mut ranges: Vec<Range<u64>>,
        stored: Option<Range<u64>>,
        beside_writes: bool,
    ) -> Vec<Range<u64>> {
        let (gone, stored) = (PageRuns::default(), stored.map(whole_pages));
        self.invalidations.push(Invalidation { number, gone, ranges: Vec::new(), stored, beside_writes });
        ranges.retain(|range| self.may_have(std::iter::once(range.clone())));
        let ranges: Vec<Range<u64>> = ranges.into_iter().map(|range| self.pages.widened(whole_pages(range))).collect();
        let invalidation = self.invalidations.last_mut().expect("pushed above");
        for range in &ranges {
            invalidation.gone.join(range.clone());
        }
        if beside_writes && !ranges.is_empty() {
            invalidation.ranges.clone_from(&ranges);
            self.overtaking.get_or_insert_default();
        }
        ranges
    }

    /// An invalidation has ended; `done`: the kernel has done all of it.
    pub fn end(&mut self, number: u64, done: bool) {
        let Some(at) = self.invalidations.iter().position(|i| i.number == number) else { return };
        let Invalidation { gone, ranges, stored, .. } = self.invalidations.swap_remove(at);
        if let Some(overtaking) = &mut self.overtaking {
            ranges.into_iter().for_each(|range| overtaking.invalidated.insert(range));
        }
        if done {
            for run in gone.runs {
                // Without room to tell it apart it stays noted.
                let _ = self.pages.remove(run);
            }
        } else if let Some(stored) = stored {
            self.note(stored);
        }
    }
}

/// A set of pages: runs in order, that do not touch.
#[derive(Debug, Default)]
struct PageRuns {
    runs: Vec<Range<u64>>,
}

impl PageRuns {
    fn memory(&self) -> usize {
        self.runs.capacity() * RUN
    }

    /// Makes one run of all, with the gaps between them.
    fn condense(&mut self) {
        if let [first, .., last] = &self.runs[..] {
            let all = first.start..last.end;
            self.runs = Vec::from([all]);
        }
    }

    /// The runs that a range overlaps, or, with `beside`, that it touches.
    fn around(&self, range: &Range<u64>, beside: bool) -> Range<usize> {
        let beside = u64::from(beside);
        let first = self.runs.partition_point(|run| run.end + beside <= range.start);
        let last = self.runs.partition_point(|run| run.start < range.end + beside);
        first..last.max(first)
    }

    fn touches(&self, range: &Range<u64>) -> bool {
        !range.is_empty() && !self.around(range, false).is_empty()
    }

    /// Adds a range. Where there would be too many runs, it adds the gap to its nearest neighbour
    /// too.
    fn insert(&mut self, range: Range<u64>) {
        if range.is_empty() {
            return;
        }
        let at = self.join(range);
        if self.runs.len() > RUNS {
            let gap = |run: usize| self.runs.get(run + 1).map_or(u64::MAX, |next| next.start - self.runs[run].end);
            let first = if at > 0 && gap(at - 1) < gap(at) { at - 1 } else { at };
            self.join(self.runs[first].start..self.runs[first + 1].end);
        }
    }

    /// Adds a range that is not empty, exactly. Returns its run.
    fn join(&mut self, range: Range<u64>) -> usize {
        let around = self.around(&range, true);
        let touched = &self.runs[around.clone()];
        let start = touched.first().map_or(range.start, |run| run.start.min(range.start));
        let end = touched.last().map_or(range.end, |run| run.end.max(range.end));
        let at = around.start;
        self.runs.splice(around, std::iter::once(start..end));
        at
    }

    /// Removes a range. False: that would leave too many runs, and nothing was removed.
    #[must_use]
    fn remove(&mut self, range: Range<u64>) -> bool {
        let around = self.around(&range, false);
        if range.is_empty() || around.is_empty() {
            return true;
        }
        let touched = &self.runs[around.clone()];
        let before = touched[0].start..range.start;
        let after = range.end..touched[touched.len() - 1].end;
        let left = [before, after].into_iter().filter(|run| !run.is_empty());
        if self.runs.len() - around.len() + left.clone().count() > RUNS {
            return false;
        }
        self.runs.splice(around, left);
        true
    }

    /// The range, or with it what lies between it and the nearer end of the run around it if there
    /// is no room to keep both ends.
    fn widened(&self, range: Range<u64>) -> Range<u64> {
        let around = self.around(&range, false);
        match &self.runs[around] {
            [run] if self.runs.len() >= RUNS && run.start < range.start && range.end < run.end => {
                if range.start - run.start < run.end - range.end { run.start..range.end } else { range.start..run.end }
            }
            _ => range,
        }
    }
}

fn overlap(one: &Range<u64>, other: &Range<u64>) -> bool {
    one.start < other.end && other.start < one.end
}

/// The pages that a range touches: what the kernel keeps of a file is pages.
fn whole_pages(range: Range<u64>) -> Range<u64> {
    range.start / PAGE * PAGE..range.end.div_ceil(PAGE).saturating_mul(PAGE)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(pages: Range<u64>) -> Range<u64> {
        pages.start * PAGE..pages.end * PAGE
    }

    fn has(cache: &PageCache, page: u64) -> bool {
        cache.may_have(std::iter::once(bytes(page..page + 1)))
    }

    fn invalidate(cache: &mut PageCache, pages: Range<u64>) -> Vec<Range<u64>> {
        let ranges = cache.begin(0, vec![bytes(pages)], None, true);
        cache.end(0, true);
        ranges
    }

    #[test]
    fn what_was_invalidated_is_clean_until_the_kernel_asks_again() {
        let mut cache = PageCache::default();
        cache.note(100..PAGE * 9 + 1);
        assert!(has(&cache, 0) && has(&cache, 9) && !has(&cache, 10));
        assert_eq!(invalidate(&mut cache, 3..5), [bytes(3..5)]);
        assert_eq!([2, 3, 4, 5].map(|page| has(&cache, page)), [true, false, false, true]);
        assert_eq!(invalidate(&mut cache, 3..5), [], "there is nothing to invalidate");
        cache.note(bytes(4..5));
        assert_eq!([3, 4].map(|page| has(&cache, page)), [false, true]);
    }

    #[test]
    fn what_is_asked_for_during_an_invalidation_stays_noted_and_so_does_what_one_that_failed_was_about() {
        let mut cache = PageCache::default();
        cache.note(bytes(0..10));
        cache.begin(1, vec![bytes(0..10)], None, true);
        cache.note(bytes(4..6));
        assert!(has(&cache, 0), "it is there until the end");
        cache.end(1, true);
        assert_eq!([3, 4, 5, 6].map(|page| has(&cache, page)), [false, true, true, false]);
        cache.begin(2, vec![bytes(0..10)], None, true);
        cache.end(2, false);
        assert!(has(&cache, 4));
    }

    #[test]
    fn what_is_stored_is_there_until_its_own_invalidation_ends() {
        let mut cache = PageCache::default();
        assert_eq!(cache.begin(1, vec![bytes(5..9)], Some(9 * PAGE - 1..9 * PAGE), true), [bytes(5..9)]);
        assert_eq!(invalidate(&mut cache, 8..9), [bytes(8..9)]);
        assert!(has(&cache, 8) && !has(&cache, 7), "the other may have ended before it was stored");
        cache.end(1, true);
        assert!(!has(&cache, 8));
    }

    #[test]
    fn a_pass_of_invalidations_in_any_order_leaves_nothing_and_the_memory_is_bounded() {
        let mut cache = PageCache::default();
        let pages = 1 << 16;
        cache.note(bytes(0..pages));
        for i in 0..pages {
            let page = i * 40_503 % pages;
            invalidate(&mut cache, page..page + 1);
            assert!(!has(&cache, page) && cache.pages.runs.len() <= RUNS);
        }
        assert_eq!(cache.pages.runs, []);
        for i in 0..pages {
            cache.note(bytes(i * 40_503 % pages..i * 40_503 % pages + 1));
            assert!(cache.pages.runs.len() <= RUNS);
        }
        assert_eq!(cache.pages.runs, [bytes(0..pages)]);
    }

    #[test]
    fn what_is_condensed_has_no_page_too_few_and_takes_little_memory() {
        let mut cache = PageCache::default();
        invalidate(&mut cache, 0..1);
        (0..500).for_each(|n| cache.note(bytes(3 * n..3 * n + 1)));
        (0..100).for_each(|n| drop(invalidate(&mut cache, 9 * n..9 * n + 1)));
        cache.read(bytes(9..10));
        assert!(cache.memory() > 500 * RUN);
        cache.condense();
        assert!(cache.memory() < 100 * RUN, "{}", cache.memory());
        assert!((1..500).all(|n| has(&cache, 3 * n)));
        assert!(cache.is_overtaken(bytes(9..10)), "what was read since its invalidation stays so");
        assert!(!cache.is_overtaken(bytes(2000..2001)));
    }

    #[test]
    fn a_write_is_overtaken_by_a_read_after_an_invalidation_of_the_same_pages() {
        let mut cache = PageCache::default();
        cache.read(bytes(0..10));
        assert!(!cache.is_overtaken(bytes(0..10)), "nothing was invalidated");
        invalidate(&mut cache, 2..5);
        assert!(!cache.is_overtaken(bytes(2..3)), "it was not read since");
        cache.read(bytes(2..6));
        assert!(!cache.is_overtaken(bytes(6..9)) && cache.is_overtaken(bytes(4..5)));
        assert!(!cache.is_overtaken(bytes(4..5)), "it is told once");
        cache.read(bytes(4..5));
        assert!(!cache.is_overtaken(bytes(4..5)), "it was written since it was invalidated");
        // One that the write's own answer waits for is none, and one in flight is one to its end.
        cache.begin(7, vec![bytes(4..5)], None, false);
        cache.read(bytes(4..5));
        cache.end(7, true);
        cache.read(bytes(4..5));
        assert!(!cache.is_overtaken(bytes(4..5)));
        cache.begin(8, vec![bytes(4..5)], None, true);
        for _ in 0..2 {
            cache.read(bytes(4..5));
            assert!(cache.is_overtaken(bytes(4..5)));
        }
        cache.end(8, true);
        cache.read(bytes(4..5));
        assert!(cache.is_overtaken(bytes(4..5)));
    }

    /// A kernel whose write(2) fills a page, and sends its bytes later: whatever comes in between,
    /// no page stays as it was before the write.
    #[test]
    fn no_page_stays_as_it_was_before_a_write_of_it() {
        let mut random = 7_u64;
        let mut below = |limit: u64| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (random >> 33) % limit
        };
        let (mut stale_but_for_it, mut cache) = (0, PageCache::default());
        // One page. What the file has, what the kernel has of it, and the write on its way.
        let (mut file, mut page, mut filled) = (0, None, None);
        // Reads that the mount has looked up, and what they found.
        let mut looked_up = None;
        let mut in_flight = None;
        for number in 1..200_000 {
            match below(7) {
                0 if page.is_none() && looked_up.is_none() => {
                    cache.read(bytes(0..1));
                    looked_up = Some(file);
                }
                1 if looked_up.is_some() => page = looked_up.take(),
                // The page is locked while it is read.
                2 if filled.is_none() && looked_up.is_none() => {
                    page = Some(number);
                    filled = Some(number);
                }
                3 if let Some(new) = filled => {
                    cache.note(bytes(0..1));
                    file = new;
                    if cache.is_overtaken(bytes(0..1)) {
                        if looked_up.is_some() {
                            page = looked_up.take();
                        }
                        stale_but_for_it += u64::from(page.is_some_and(|page| page != file));
                        if !cache.begin(number, vec![bytes(0..1)], None, false).is_empty() {
                            page = None;
                        }
                        cache.end(number, true);
                    }
                    filled = None;
                    assert!(page.is_none_or(|page| page == file) && looked_up.is_none_or(|page| page == file), "step {number}");
                }
                4 if in_flight.is_none() => {
                    let removes = !cache.begin(number, vec![bytes(0..1)], None, true).is_empty();
                    in_flight = Some((number, removes));
                }
                5 if looked_up.is_none() && matches!(in_flight, Some((_, true))) => page = None,
                6 if looked_up.is_none() => {
                    if let Some((number, removes)) = in_flight.take() {
                        if removes {
                            page = None;
                        }
                        cache.end(number, true);
                    }
                }
                _ => {}
            }
        }
        assert!(stale_but_for_it > 0);
    }

    /// A kernel that reads, and is told to forget, in all orders.
    #[test]
    fn a_page_that_the_kernel_has_been_given_is_always_known() {
        const PAGES: u64 = 4000;
        let mut state = 1_u64;
        let mut below = |limit: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) % limit
        };
        let mut cache = PageCache::default();
        // What the kernel has: pages whose read has arrived here, and such whose read is on its
        // way.
        let (mut given, mut asked) = (vec![false; PAGES as usize], Vec::<Range<u64>>::new());
        // Invalidations, and whether the kernel has come to them.
        let mut in_flight: Vec<(u64, Vec<Range<u64>>, bool)> = Vec::new();
        for number in 0..60_000 {
            match below(6) {
                0 => {
                    let start = below(PAGES);
                    asked.push(start..(start + 1 + below(3)).min(PAGES));
                }
                1 | 2 if !asked.is_empty() => {
                    let range = asked.swap_remove(below(asked.len() as u64) as usize);
                    cache.note(bytes(range.clone()));
                    given[range.start as usize..range.end as usize].fill(true);
                }
                3 if in_flight.len() < 5 => {
                    let start = below(PAGES);
                    let ranges = cache.begin(number, vec![bytes(start..(start + 1 + below(9)).min(PAGES))], None, true);
                    in_flight.push((number, ranges, false));
                }
                4 if !in_flight.is_empty() => {
                    let at = below(in_flight.len() as u64) as usize;
                    let (_, ranges, came) = &mut in_flight[at];
                    for range in ranges {
                        given[(range.start / PAGE) as usize..(range.end / PAGE) as usize].fill(false);
                    }
                    *came = true;
                }
                5 if in_flight.iter().any(|(_, _, came)| *came) => {
                    let at = in_flight.iter().position(|(_, _, came)| *came).unwrap();
                    cache.end(in_flight.swap_remove(at).0, true);
                }
                _ => {}
            }
            let page = below(PAGES);
            assert!(!given[page as usize] || has(&cache, page), "step {number}: page {page} was forgotten");
        }
        assert!((0..PAGES).all(|page| !given[page as usize] || has(&cache, page)));
        assert!((0..PAGES).any(|page| !has(&cache, page)));
    }
}
