//! The allocator of IOVAs. It guards that no two mappings overlap and that none leaves the ranges
//! which the IOMMU offers.
use std::collections::BTreeMap;
use std::ops::RangeInclusive;

/// Free IOVAs as inclusive ranges, first fit from below.
pub(super) struct IovaAllocator {
    /// First to last IOVA; neither overlapping nor touching.
    free: BTreeMap<u64, u64>,
}

impl IovaAllocator {
    /// All of `ranges`, cut to whole pages of `page` bytes (a power of two). Page 0 is left out:
    /// an address of 0 means "none" in too many places.
    pub(super) fn new(ranges: &[RangeInclusive<u64>], page: u64) -> Self {
        let mut allocator = Self { free: BTreeMap::new() };
        for range in ranges {
            let start = (*range.start()).max(page).checked_next_multiple_of(page);
            // The end is inclusive so that it can be the last of all addresses.
            let pages_end = range.end().checked_add(1).map_or(u64::MAX - (page - 1), |end| end - end % page);
            if let Some(start) = start.filter(|start| *start < pages_end) {
                allocator.insert(start, pages_end - 1);
            }
        }
        allocator
    }

    /// Takes `len` bytes aligned to `align`, a power of two. `len` must not be 0.
    pub(super) fn allocate(&mut self, len: u64, align: u64) -> Option<u64> {
        let (start, first, last) = self.free.iter().find_map(|(first, last)| {
            let start = first.checked_next_multiple_of(align)?;
            (start.checked_add(len - 1)? <= *last).then_some((start, *first, *last))
        })?;
        self.free.remove(&first);
        if first < start {
            self.free.insert(first, start - 1);
        }
        let end = start + (len - 1);
        if end < last {
            self.free.insert(end + 1, last);
        }
        Some(start)
    }

    /// Gives back what [`IovaAllocator::allocate`] gave.
    pub(super) fn free(&mut self, start: u64, len: u64) {
        self.insert(start, start + (len - 1));
    }

    fn insert(&mut self, mut first: u64, mut last: u64) {
        if let Some((before, end)) = self.free.range(..first).next_back().map(|(before, end)| (*before, *end)) {
            debug_assert!(end < first, "IOVAs were given back twice");
            if end + 1 == first {
                first = before;
            }
        }
        if let Some(end) = last.checked_add(1).and_then(|next| self.free.remove(&next)) {
            last = end;
        }
        self.free.insert(first, last);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const PAGE: u64 = 4096;

    #[test]
    fn the_edges_of_the_address_space_are_kept_out_and_in() {
        let mut allocator = IovaAllocator::new(&[0..=u64::MAX], PAGE);
        assert_eq!(allocator.allocate(PAGE, PAGE), Some(PAGE), "page 0 is never given out");
        let mut allocator = IovaAllocator::new(&[100..=PAGE * 3 + 5], PAGE);
        assert_eq!(allocator.free, BTreeMap::from([(PAGE, PAGE * 3 - 1)]), "whole pages only");
        assert_eq!(allocator.allocate(PAGE * 3, PAGE), None);
        let allocator = IovaAllocator::new(&[10..=PAGE + 10, PAGE * 5..=PAGE * 5 + 1], PAGE);
        assert!(allocator.free.is_empty());
    }

    proptest! {
        #[test]
        fn no_two_allocations_overlap_and_all_comes_back(
            steps in proptest::collection::vec((0..4u8, 1..700u64, 0..10u32), 1..200),
        ) {
            // The hole that x86 leaves for message-signalled interrupts, scaled down.
            let ranges = [0..=PAGE * 1000 - 1, PAGE * 1100..=PAGE * 3000 - 1];
            let mut allocator = IovaAllocator::new(&ranges, PAGE);
            let whole = allocator.free.clone();
            let mut live: Vec<(u64, u64)> = Vec::new();
            for (kind, pages, align) in steps {
                if kind == 0 && !live.is_empty() {
                    let (start, len) = live.swap_remove(pages as usize % live.len());
                    allocator.free(start, len);
                    continue;
                }
                let (len, align) = (pages * PAGE, PAGE << align);
                let Some(start) = allocator.allocate(len, align) else { continue };
                prop_assert_eq!(start % align, 0);
                prop_assert!(start >= PAGE && ranges.iter().any(|range| range.contains(&start) && range.contains(&(start + len - 1))));
                prop_assert!(live.iter().all(|(other, length)| start + len <= *other || other + length <= start));
                live.push((start, len));
            }
            for (start, len) in live {
                allocator.free(start, len);
            }
            prop_assert_eq!(allocator.free, whole);
        }
    }
}
