//! How much listings of directories bring into memory at a time.
//!
//! It is held there while a listing is filled, whatever the cache of metadata has room for: so the
//! more listings wait for the device, the less each of them brings.

use std::sync::atomic::{AtomicUsize, Ordering};

/// Entries that one listing brings at a time, alone: several requests' worth, so that the device is
/// asked rarely. The inodes of each may lie in a block of its own.
const MOST: usize = 1024;
/// And among however many.
const LEAST: usize = 64;
/// Bytes of the cache of metadata for each listing that brings [`MOST`] entries.
const CACHE_OF_ONE: u64 = 16 << 20;
/// So many listings bring as much at the most.
const AT_ONCE: u64 = 16;

/// What all listings of a mount share.
#[derive(Debug)]
pub(crate) struct ListingBudget {
    entries: usize,
    listings: AtomicUsize,
}

impl ListingBudget {
    /// Beside a cache of so many bytes.
    pub fn new(cache: u64) -> ListingBudget {
        ListingBudget { entries: (cache / CACHE_OF_ONE).clamp(1, AT_ONCE) as usize * MOST, listings: AtomicUsize::new(0) }
    }

    /// Counts a listing in, until the share is dropped.
    pub fn enter(&self) -> Share<'_> {
        self.listings.fetch_add(1, Ordering::Relaxed);
        Share(self)
    }
}

/// One listing's.
pub(crate) struct Share<'a>(&'a ListingBudget);

impl Share<'_> {
    /// Entries that it may bring now.
    pub fn entries(&self) -> usize {
        (self.0.entries / self.0.listings.load(Ordering::Relaxed)).clamp(LEAST, MOST)
    }
}

impl Drop for Share<'_> {
    fn drop(&mut self) {
        self.0.listings.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_listings_share_what_the_cache_allows_one() {
        let small = ListingBudget::new(1 << 20);
        let first = small.enter();
        assert_eq!(first.entries(), MOST);
        let others: Vec<Share> = (0..3).map(|_| small.enter()).collect();
        assert_eq!((first.entries(), others[2].entries()), (256, 256));
        let more: Vec<Share> = (0..100).map(|_| small.enter()).collect();
        assert_eq!(first.entries(), LEAST);
        drop((others, more));
        assert_eq!(first.entries(), MOST);
        let large = ListingBudget::new(64 << 20);
        let of_large: Vec<Share> = (0..4).map(|_| large.enter()).collect();
        assert_eq!(of_large[3].entries(), MOST);
    }
}
