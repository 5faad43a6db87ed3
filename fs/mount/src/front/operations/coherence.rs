//! Coherence of the kernel's page cache with direct transfers: dirty pages are written back before
//! a transfer looks, and pages that a transfer has changed are dropped.

use std::ops::Range;
use std::sync::Arc;

use crate::front::shared::Front;

impl Front {
    /// Runs `then` when the kernel holds nothing of these ranges that the filesystem does not have.
    /// `is_written_back`: the caller has seen to it. If the kernel has to be asked, it runs on a
    /// thread that the kernel does not wait for.
    pub(crate) fn written_back(
        self: &Arc<Self>,
        ino: u64,
        ranges: impl Iterator<Item = Range<u64>> + Clone,
        is_written_back: bool,
        then: impl FnOnce() + Send + 'static,
    ) {
        if is_written_back || !self.lookups.may_have(ino, ranges.clone()) {
            return then();
        }
        let (front, ranges): (_, Vec<Range<u64>>) = (self.clone(), ranges.collect());
        self.invalidations.run(move || {
            front.invalidate(ino, ranges, || None);
            front.general.run(then);
        });
    }

    /// Makes the kernel write back and forget its pages of these ranges of a file, and the file's
    /// attributes. `last`: the last byte of the file, which lies in one of the ranges. The kernel
    /// is given it first, and learns the length of the file by it; then the byte is forgotten, and
    /// only the length stays.
    pub(crate) fn invalidate(&self, ino: u64, ranges: Vec<Range<u64>>, last: impl FnOnce() -> Option<(u64, u8)>) {
        let Some(kernel) = self.kernel.get() else { return };
        let telling = self.lengths.tell(ino);
        let last = last();
        let (number, ranges) = self.lookups.begin_invalidation(ino, ranges, last.map(|(offset, _)| offset..offset + 1));
        if let Some((offset, byte)) = last {
            kernel.store(ino, offset, &[byte]);
        }
        for answer in self.lengths.told(telling) {
            self.general.run(answer);
        }
        if ranges.is_empty() {
            kernel.invalidate_attributes(ino);
        }
        let refused = ranges.into_iter().filter(|range| !kernel.invalidate(ino, range.clone())).count();
        self.lookups.end_invalidation(ino, number, refused == 0);
    }
}
