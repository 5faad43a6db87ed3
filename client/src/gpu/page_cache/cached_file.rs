//! The cached ranges of one open file: which there are, and which are worth having.
//!
//! It guards that looking costs a read next to nothing: a file of which the page cache has nothing
//! has no cached range, and the kernel is asked less and less often what it has.

use super::cached_range::{CachedRange, RANGE_LEN};
use super::view::residency;
use crate::codes;
use crate::gpu::settings::Caching;
use gpunvme_abi::Reason;
use parking_lot::Mutex;
use smallvec::SmallVec;
use std::collections::HashMap;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

/// How often a cached range's range is read in full, at most, between two attempts to make it.
const PATIENCE: u64 = 1 << 10;
/// The longest read of which the kernel is not always asked whether the page cache has it: asking
/// takes as long as a part of such a read.
const SHORT: u64 = 128 << 10;
/// How many short reads are not asked for, at most, as a power of 2.
const SILENCE: u32 = 8;

/// What is known of an open file's cached ranges.
#[derive(Debug, Default)]
pub struct CachedFile {
    places: Mutex<HashMap<u64, Arc<RangePlace>>>,
    /// Whether there are any.
    has_places: AtomicBool,
    /// How many short reads the page cache had not got, one after the other, and for how many more
    /// the kernel is not asked.
    absent: AtomicU32,
    silent: AtomicU32,
    /// Why they were not there: the code of the last answer.
    why: AtomicU32,
    /// Whether another process reads the same of it.
    common: AtomicBool,
    /// The file, once something of it was looked for in the page cache.
    descriptor: OnceLock<Arc<OwnedFd>>,
    /// What reads of it take of the page cache, if that was set.
    caching: Mutex<Option<Caching>>,
}

/// The place of a cached range in a file: the cached range itself may come and go.
#[derive(Debug, Default)]
pub struct RangePlace {
    cached_range: Mutex<Option<Arc<CachedRange>>>,
    /// When it was last used, by the counter of [`super::PageCache`].
    pub used: AtomicU64,
    demand: Mutex<Demand>,
}

/// How much of a cached range's range was read without one.
#[derive(Debug)]
struct Demand {
    bytes: u64,
    /// How many it has to be more than.
    wanted: u64,
}

impl Default for Demand {
    /// A range of which more was read than it has is worth a cached range: it is read again.
    fn default() -> Demand {
        Demand { bytes: 0, wanted: RANGE_LEN }
    }
}

impl RangePlace {
    /// The cached range, if there is one.
    pub fn get(&self) -> Option<Arc<CachedRange>> {
        self.cached_range.lock().clone()
    }

    /// Whether the cached range lies near its GPU, if there is one.
    pub fn is_near(&self) -> Option<bool> {
        self.cached_range.lock().as_ref().map(|cached_range| cached_range.is_near())
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
    fn miss(&self, bytes: u64) -> bool {
        let mut demand = self.demand.lock();
        demand.bytes += bytes;
        if demand.bytes <= demand.wanted {
            return false;
        }
        *demand = Demand { bytes: 0, wanted: (demand.wanted * 2).min(PATIENCE * RANGE_LEN) };
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
        if !self.has_places.load(Ordering::Relaxed) {
            return (None, left);
        }
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
    pub fn misses(&self, offset: u64, len: u64) -> SmallVec<[(u64, Arc<RangePlace>); 1]> {
        let end = offset + len;
        let of_place = |start: u64| end.min(start + RANGE_LEN) - offset.max(start);
        let is_missing =
            |start: u64, place: &RangePlace| place.get().is_none_or(|range| start + range.len() < end.min(start + RANGE_LEN));
        let mut places = self.places(offset, len);
        places.retain(|(start, place)| is_missing(*start, place) && place.miss(of_place(*start)));
        places
    }

    /// The places of a range, by where they begin.
    pub fn places(&self, offset: u64, len: u64) -> SmallVec<[(u64, Arc<RangePlace>); 1]> {
        let mut places = self.places.lock();
        let starts = (offset / RANGE_LEN..(offset + len).div_ceil(RANGE_LEN)).map(|number| number * RANGE_LEN);
        let found = starts.map(|start| (start, places.entry(start).or_default().clone())).collect();
        self.has_places.store(true, Ordering::Relaxed);
        found
    }

    /// Another process reads the same of it.
    pub fn set_common(&self) {
        self.common.store(true, Ordering::Relaxed);
    }

    /// Finds out whether a range is worth reading through the page cache: it has all of it, or
    /// another process reads the same, so that the device reads for both at once.
    ///
    /// # Errors
    /// Why it is not.
    pub fn is_worth_reading(&self, file: BorrowedFd<'_>, offset: u64, len: u64) -> Result<(), Reason> {
        let is_common = || len > SHORT && self.common.load(Ordering::Relaxed);
        self.residency(file, offset, len).or_else(|why| if is_common() { Ok(()) } else { Err(why) })
    }

    /// Finds out whether the page cache has all of a range, as far as the kernel tells, and as far
    /// as it is asked: where it had nothing for many short reads, it is asked for few of them.
    ///
    /// # Errors
    /// Why it is not to be read from there.
    pub fn residency(&self, file: BorrowedFd<'_>, offset: u64, len: u64) -> Result<(), Reason> {
        if len > SHORT {
            return residency(file, offset, len);
        }
        // Threads that count at once ask once more, or once less.
        let silent = self.silent.load(Ordering::Relaxed);
        if silent > 0 {
            self.silent.store(silent - 1, Ordering::Relaxed);
            return Err(codes::reason(self.why.load(Ordering::Relaxed)));
        }
        let found = residency(file, offset, len);
        if let Err(why) = found {
            self.why.store(why.code(), Ordering::Relaxed);
        }
        let absent = if found.is_ok() { 0 } else { (self.absent.load(Ordering::Relaxed) + 1).min(SILENCE) };
        self.absent.store(absent, Ordering::Relaxed);
        self.silent.store((1 << absent) - 1, Ordering::Relaxed);
        found
    }

    /// What reads of the file take of the page cache, if that was set.
    pub fn caching(&self) -> Option<Caching> {
        *self.caching.lock()
    }

    /// Sets it.
    pub fn set_caching(&self, caching: Option<Caching>) {
        *self.caching.lock() = caching;
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
