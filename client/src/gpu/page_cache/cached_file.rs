//! The cached ranges of one open file: which there are, and which are worth having.
//!
//! It guards that looking costs a read next to nothing: a file that is read once has no cached
//! range, and nothing is asked of the kernel.

use super::cached_range::{CachedRange, RANGE_LEN};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

/// The most reads of a cached range's range between two attempts to make it.
const PATIENCE: u32 = 1 << 10;

/// What is known of an open file's cached ranges.
#[derive(Debug, Default)]
pub struct CachedFile {
    places: Mutex<HashMap<u64, Arc<RangePlace>>>,
    /// The file, once there is a cached range of it.
    descriptor: OnceLock<Arc<OwnedFd>>,
}

/// The place of a cached range in a file: the cached range itself may come and go.
#[derive(Debug, Default)]
pub struct RangePlace {
    cached_range: Mutex<Option<Arc<CachedRange>>>,
    /// When it was last used, by the counter of [`super::PageCache`].
    pub used: AtomicU64,
    demand: Mutex<Demand>,
}

/// How often a cached range's range was read without one.
#[derive(Debug)]
struct Demand {
    reads: u32,
    /// How many there have to be.
    wanted: u32,
}

impl Default for Demand {
    /// A range that is read a second time is worth a cached range.
    fn default() -> Demand {
        Demand { reads: 0, wanted: 2 }
    }
}

impl RangePlace {
    /// The cached range, if there is one.
    pub fn get(&self) -> Option<Arc<CachedRange>> {
        self.cached_range.lock().clone()
    }

    /// Puts a cached range there.
    pub fn put(&self, cached_range: CachedRange) {
        let before = self.cached_range.lock().replace(Arc::new(cached_range));
        drop(before);
    }

    /// Takes the cached range away. It ends when the last copy from it has.
    pub fn take(&self) -> Option<Arc<CachedRange>> {
        self.cached_range.lock().take()
    }

    /// Takes this cached range away, because a copy from it was not of the file's bytes.
    pub fn take_stale(&self, stale: &Arc<CachedRange>) {
        let taken = {
            let mut cached_range = self.cached_range.lock();
            cached_range.take_if(|cached_range| Arc::ptr_eq(cached_range, stale))
        };
        // CUDA is called without the lock.
        drop(taken);
    }

    /// Counts a read that found no cached range. True where one should be made now.
    fn miss(&self) -> bool {
        let mut demand = self.demand.lock();
        demand.reads += 1;
        if demand.reads < demand.wanted {
            return false;
        }
        *demand = Demand { reads: 0, wanted: (demand.wanted * 2).min(PATIENCE) };
        true
    }
}

/// A range of a cached range.
#[derive(Clone, Debug)]
pub struct Cached {
    pub cached_range: Arc<CachedRange>,
    pub place: Arc<RangePlace>,
}

impl CachedFile {
    /// The cached range in which an offset of the file lies, if there is one, and how many bytes
    /// from there on belong to its place. `now` is the time by the counter of [`super::PageCache`].
    pub fn range_at(&self, offset: u64, now: u64) -> (Option<Cached>, u64) {
        let start = offset - offset % RANGE_LEN;
        let left = RANGE_LEN - offset % RANGE_LEN;
        let Some(place) = self.places.lock().get(&start).cloned() else { return (None, left) };
        let Some(cached_range) = place.get().filter(|cached_range| offset < start + cached_range.len()) else {
            return (None, left);
        };
        place.used.fetch_max(now, Ordering::Relaxed);
        let left = start + cached_range.len() - offset;
        (Some(Cached { cached_range, place }), left)
    }

    /// Whether there are cached ranges for all of a range.
    pub fn has_all(&self, offset: u64, len: u64) -> bool {
        let mut at = offset;
        while at < offset + len {
            match self.range_at(at, 0) {
                (Some(_), left) => at += left,
                (None, _) => return false,
            }
        }
        true
    }

    /// Counts a read of a range, and returns the places of which a cached range should be made now,
    /// by where they begin.
    pub fn misses(&self, offset: u64, len: u64) -> Vec<(u64, Arc<RangePlace>)> {
        let mut places = self.places.lock();
        let starts = (offset / RANGE_LEN..(offset + len).div_ceil(RANGE_LEN)).map(|number| number * RANGE_LEN);
        let places = starts.map(|start| (start, places.entry(start).or_default().clone()));
        let end = |start: u64| (offset + len).min(start + RANGE_LEN);
        let is_missing =
            |start: u64, place: &RangePlace| place.get().is_none_or(|cached_range| start + cached_range.len() < end(start));
        places.filter(|(start, place)| is_missing(*start, place) && place.miss()).collect()
    }

    /// The places of a range, by where they begin.
    pub fn places(&self, offset: u64, len: u64) -> Vec<(u64, Arc<RangePlace>)> {
        let mut places = self.places.lock();
        let starts = (offset / RANGE_LEN..(offset + len).div_ceil(RANGE_LEN)).map(|number| number * RANGE_LEN);
        starts.map(|start| (start, places.entry(start).or_default().clone())).collect()
    }

    /// The file, by a descriptor that `open` makes the first time.
    ///
    /// # Errors
    /// That of `open`.
    pub fn descriptor<E>(&self, open: impl FnOnce() -> Result<OwnedFd, E>) -> Result<Arc<OwnedFd>, E> {
        if let Some(descriptor) = self.descriptor.get() {
            return Ok(descriptor.clone());
        }
        let opened = Arc::new(open()?);
        Ok(self.descriptor.get_or_init(|| opened).clone())
    }
}
