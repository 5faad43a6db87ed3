//! Coherence of the kernel's page cache with direct transfers: dirty pages are written back before
//! a transfer looks, and pages that a transfer has changed are dropped.

use std::iter;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::front::kernel::PAGE;
use crate::front::resources::turns::Owner;
use crate::front::shared::Front;
use gpunvme_engine::error::Fail;
use gpunvme_engine::volume::Attributes;

/// Bytes that are written back at a time. Where the kernel has nothing, or has few pages, which
/// costs it no time, twice as many are next: a range may be as long as a file can be.
const STEP: u64 = 4 << 20;
/// Within this time the kernel has forgotten few pages, or none.
const FEW_PAGES: Duration = Duration::from_micros(100);
/// How long a thread goes on with such steps before others have a turn.
const TURN: Duration = Duration::from_millis(2);

impl Front {
    /// Runs `then` when the kernel holds nothing of these ranges that the filesystem does not have.
    /// `is_written_back`: the caller has seen to it. If the kernel has to be asked, it runs on a
    /// thread that the kernel does not wait for.
    pub(crate) fn written_back(
        self: &Arc<Self>,
        owner: Owner,
        ino: u64,
        ranges: impl Iterator<Item = Range<u64>> + Clone,
        is_written_back: bool,
        then: impl FnOnce() + Send + 'static,
    ) {
        if is_written_back || !self.lookups.may_have(ino, ranges.clone()) {
            return then();
        }
        self.write_back(owner, ino, ranges.collect(), then);
    }

    /// As [`Front::written_back`], in turns with what is done for others.
    fn write_back(self: &Arc<Self>, owner: Owner, ino: u64, mut left: Vec<Range<u64>>, then: impl FnOnce() + Send + 'static) {
        let front = self.clone();
        self.invalidations.run_for(owner, move || {
            let since = Instant::now();
            // Where the kernel has nothing, and where it may have something.
            let (mut most, mut most_held) = (STEP, STEP);
            while since.elapsed() < TURN
                && let Some(step) = next_step(&mut left, most)
            {
                if !front.lookups.may_have(ino, iter::once(step.clone())) {
                    most = most.saturating_mul(2);
                } else if step.end - step.start > most_held {
                    // Somewhere in it.
                    left.push(step);
                    most = most_held;
                } else {
                    let begun = Instant::now();
                    front.invalidate(ino, vec![step], None);
                    most_held = if begun.elapsed() < FEW_PAGES { most_held.saturating_mul(2) } else { STEP };
                    most = most_held;
                }
            }
            if left.is_empty() {
                front.general.run_for(owner, then);
            } else if !front.invalidations.is_ending() {
                front.write_back(owner, ino, left, then);
            }
        });
    }

    /// Makes the kernel forget its pages of these ranges of a file, some time from now.
    pub(crate) fn invalidate_later(self: &Arc<Self>, owner: Owner, ino: u64, ranges: Vec<Range<u64>>) {
        let front = self.clone();
        self.invalidations.run_for(owner, move || front.invalidate(ino, ranges, None));
    }

    /// Makes the kernel forget the pages and attributes of files that lost data: it has what was
    /// lost, and the length that the file would have.
    pub(crate) fn forget_lost(self: &Arc<Self>) {
        let all = 0..i64::MAX as u64;
        for ino in self.fs.take_lossy() {
            self.invalidate_later(Owner::default(), ino, vec![all.clone()]);
        }
    }

    /// Runs `task` on a thread of invalidations, with the size of a file if the file exists.
    pub(crate) fn invalidate_with_size(
        self: &Arc<Self>,
        owner: Owner,
        ino: u64,
        task: impl FnOnce(&Arc<Front>, Option<u64>) + Send + 'static,
    ) {
        let size_of = |found: Attributes| found.inode.size;
        let front = self.clone();
        self.invalidations.run_for(owner, move || match front.fs.attributes(ino) {
            Err(Fail::Stall(_)) => {
                let general = front.general.clone();
                general.run_for(owner, move || {
                    let size = front.fs.wait(|| front.fs.attributes(ino)).ok().map(size_of);
                    let invalidations = front.invalidations.clone();
                    invalidations.run_for(owner, move || task(&front, size));
                });
            }
            found => task(&front, found.ok().map(size_of)),
        });
    }

    /// Makes the kernel write back and forget its pages of these ranges of a file, and the file's
    /// attributes. `last`: the last byte of the file, which lies in one of the ranges. The kernel
    /// is given it first, and learns the length of the file by it; then the byte is forgotten, and
    /// only the length stays.
    pub(crate) fn invalidate(&self, ino: u64, ranges: Vec<Range<u64>>, last: Option<(u64, u8)>) {
        self.invalidate_beside(true, ino, ranges, last);
    }

    /// Answers a write of pages that the kernel may have read as they were before it
    /// ([`Lookups::is_overtaken`]), when the kernel has forgotten them. It keeps locked until the
    /// answer at most those that are not written as a whole; these it forgets after that. Another
    /// invalidation may wait for one of those, so that what comes before the answer must not wait
    /// for a thread of invalidations.
    ///
    /// [`Lookups::is_overtaken`]: crate::front::kernel::Lookups::is_overtaken
    pub(crate) fn answer_overtaken(
        self: &Arc<Self>,
        owner: Owner,
        ino: u64,
        range: Range<u64>,
        answer: impl FnOnce() + Send + 'static,
    ) {
        let whole = range.start.next_multiple_of(PAGE)..range.end / PAGE * PAGE;
        if whole.is_empty() {
            answer();
            return self.invalidate_later(owner, ino, vec![range]);
        }
        let front = self.clone();
        self.overtaken.run_for(owner, move || {
            front.invalidate_beside(false, ino, vec![whole.clone()], None);
            answer();
            let edges = [range.start..whole.start, whole.end..range.end];
            let edges: Vec<Range<u64>> = edges.into_iter().filter(|edge| !edge.is_empty()).collect();
            if !edges.is_empty() {
                front.invalidate_later(owner, ino, edges);
            }
        });
    }

    /// As [`Front::invalidate`]. `beside_writes` as for `PageCache::begin`.
    fn invalidate_beside(&self, beside_writes: bool, ino: u64, ranges: Vec<Range<u64>>, last: Option<(u64, u8)>) {
        let Some(kernel) = self.kernel.get() else { return };
        let stored = last.map(|(offset, _)| offset..offset + 1);
        let (number, ranges) = self.lookups.begin_invalidation(ino, ranges, stored, beside_writes);
        if let Some((offset, byte)) = last {
            kernel.store(ino, offset, &[byte]);
        }
        // After that, always: should the file have become shorter meanwhile, the kernel has a
        // length from before, and asks again. The answer to what made it shorter cannot wait for
        // this: the kernel writes no page of the file back until it has that answer, and a page
        // that is written back may be what it is given a byte of.
        if ranges.is_empty() {
            kernel.invalidate_attributes(ino);
        }
        let refused = ranges.into_iter().filter(|range| !kernel.invalidate(ino, range.clone())).count();
        self.lookups.end_invalidation(ino, number, refused == 0);
    }
}

/// Takes at most so many bytes, and at least one, off the last of the ranges.
fn next_step(ranges: &mut Vec<Range<u64>>, most: u64) -> Option<Range<u64>> {
    let range = ranges.last_mut()?;
    let step = range.start..range.end.min(range.start.saturating_add(most));
    range.start = step.end;
    if range.is_empty() {
        ranges.pop();
    }
    Some(step)
}
