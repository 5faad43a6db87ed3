//! Makes cached ranges, on a thread of its own, and gives them up: the least recently used first
//! where there are as many as may be, and half of them when memory runs short. Those that lie far
//! from their GPU age faster.
//!
//! It guards that no read waits for a registration, and that no more is registered than may be.

use super::cached_file::{CachedFile, RangePlace};
use super::cached_range::{CachedRange, Missing, NoRange, RANGE_LEN, Registered};
use super::readers::{PageRead, PageReaders};
use super::room::Room;
use gpunvme_abi::Reason;
use gpunvme_cuda::{Cuda, Gpu};
use parking_lot::Mutex;
use std::cmp::Reverse;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Weak};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// The longest piece that a thread reads out of the page cache itself, since another one would have
/// to be woken, where it has others as well, and where it is alone.
const LONGEST_HERE: usize = 32 << 10;
const LONGEST_ALONE: usize = 128 << 10;

/// How often a range is read in, at most, for one that is to be there.
const ATTEMPTS: usize = 10;

/// The cached ranges of all open files that an application reads by one
/// [`super::super::Transfers`].
pub struct PageCache {
    shared: Arc<Shared>,
    readers: PageReaders,
    /// The thread, once there was something to do for it.
    thread: Mutex<Option<(Sender<Work>, JoinHandle<()>)>>,
}

struct Shared {
    cuda: &'static Cuda,
    room: Room,
    /// Bytes of cached ranges.
    registered: Registered,
    /// Places that have, or had, a cached range.
    places: Mutex<Vec<Weak<RangePlace>>>,
    /// Counts the cached ranges that were made: the time by which places are used.
    clock: AtomicU64,
    is_over: AtomicBool,
}

/// What the thread is to do.
enum Work {
    Make(Wanted),
    /// There are cached ranges that it did not make.
    LookAfterMemory,
}

/// A cached range that is to be made.
struct Wanted {
    gpu: Gpu,
    file: Arc<OwnedFd>,
    start: u64,
    place: Weak<RangePlace>,
    missing: Missing,
}

impl PageCache {
    /// With no cached ranges yet. `limit` is the most bytes of them.
    pub fn new(cuda: &'static Cuda, limit: Option<u64>) -> PageCache {
        let shared = Shared {
            cuda,
            room: Room::new(limit),
            registered: Registered::default(),
            places: Mutex::default(),
            clock: AtomicU64::new(0),
            is_over: AtomicBool::new(false),
        };
        PageCache { shared: Arc::new(shared), readers: PageReaders::default(), thread: Mutex::default() }
    }

    /// The time by which cached ranges are used.
    pub fn now(&self) -> u64 {
        self.shared.clock.load(Ordering::Relaxed)
    }

    /// Has a piece read through the page cache, if that is worth it: by this thread, or by
    /// others if it is long.
    ///
    /// # Errors
    /// Why it is not.
    pub fn read(&self, cached: &CachedFile, read: PageRead, is_alone: bool) -> Result<(), Reason> {
        cached.is_worth_reading(read.file.as_fd(), read.offset, read.len as u64)?;
        if read.len <= if is_alone { LONGEST_ALONE } else { LONGEST_HERE } {
            read.read_here();
            return Ok(());
        }
        if self.readers.read(read) { Ok(()) } else { Err(Reason::NotCached) }
    }

    /// A range of a file is read, to memory of a GPU: cached ranges that are missing are made
    /// meanwhile, if that is worth it. What they miss of the page cache is `missing`.
    pub fn is_read(&self, cached: &CachedFile, gpu: Gpu, file: &Arc<OwnedFd>, (offset, len): (u64, u64), missing: Missing) {
        for (start, place) in cached.misses(offset, len) {
            let place = Arc::downgrade(&place);
            self.send(Work::Make(Wanted { gpu, file: file.clone(), start, place, missing }));
        }
    }

    /// Makes the cached ranges of a range now, and returns how many of its bytes lie in cached
    /// ranges.
    ///
    /// # Errors
    /// Why one could not be made, other than that its pages are not in the page cache.
    pub fn prepare(
        &self,
        file: &CachedFile,
        gpu: Gpu,
        descriptor: &Arc<OwnedFd>,
        (offset, len): (u64, u64),
        missing: Missing,
    ) -> Result<u64, NoRange> {
        let (places, begun) = (file.places(offset, len), self.now());
        for (start, place) in &places {
            let wanted = Wanted { gpu, file: descriptor.clone(), start: *start, place: Arc::downgrade(place), missing };
            // Pages that were read in may have left again: others change the file, or the kernel
            // needs the room.
            let make = |_| self.shared.make(&wanted, begun);
            match (0..ATTEMPTS).map(make).find(|made| !matches!(made, Err(NoRange::NotResident))) {
                None | Some(Ok(())) => {}
                // Those that were made first stay.
                Some(Err(NoRange::NoRoom)) => break,
                Some(Err(error)) => return Err(error),
            }
        }
        self.send(Work::LookAfterMemory);
        let cached = |(start, place): &(u64, Arc<RangePlace>)| {
            let end = place.get().map_or(*start, |cached_range| start + cached_range.len());
            end.min(offset + len).saturating_sub((*start).max(offset))
        };
        Ok(places.iter().map(cached).sum())
    }

    fn send(&self, work: Work) {
        let mut thread = self.thread.lock();
        if thread.is_none() {
            let (sender, receiver) = channel();
            let shared = self.shared.clone();
            let started = thread::Builder::new().name("gpunvme-cache".into()).spawn(move || shared.run(&receiver));
            match started {
                Ok(handle) => *thread = Some((sender, handle)),
                Err(error) => return tracing::debug!(%error, "no thread for the page cache"),
            }
        }
        if let Some((sender, _)) = &*thread {
            let _ = sender.send(work); // a thread that is gone makes no cached ranges
        }
    }
}

impl Drop for PageCache {
    fn drop(&mut self) {
        self.shared.is_over.store(true, Ordering::Relaxed);
        if let Some((sender, thread)) = self.thread.get_mut().take() {
            drop(sender);
            let _ = thread.join(); // a panic there was reported there
        }
    }
}

impl Shared {
    fn run(&self, work: &Receiver<Work>) {
        let _alone = self.cuda.leave_captures_alone();
        let mut look = Instant::now();
        loop {
            // Without cached ranges there is nothing to give back.
            let next = if self.registered.bytes() > 0 {
                if Instant::now() >= look {
                    look = Instant::now() + self.look_after_memory();
                }
                work.recv_timeout(look.saturating_duration_since(Instant::now()))
            } else {
                work.recv().map_err(|_| RecvTimeoutError::Disconnected)
            };
            match next {
                Ok(Work::LookAfterMemory) => {}
                Ok(Work::Make(wanted)) => {
                    if self.is_over.load(Ordering::Relaxed) {
                        continue;
                    }
                    if let Err(error) = self.make(&wanted, u64::MAX) {
                        tracing::debug!(%error, offset = wanted.start, "no cached range of a file's pages");
                    }
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return,
            }
        }
    }

    /// Makes a cached range, unless its place is gone, or has one that is as long as it can be. For
    /// its sake those are given up that were last used at `time` or before.
    fn make(&self, wanted: &Wanted, time: u64) -> Result<(), NoRange> {
        let Some(place) = wanted.place.upgrade() else { return Ok(()) };
        let size = rustix::fs::fstat(&wanted.file).map_err(NoRange::Map)?.st_size as u64;
        let len = size.saturating_sub(wanted.start).min(RANGE_LEN);
        if len == 0
            || place.get().is_some_and(|cached_range| cached_range.len() >= len && cached_range.is_true(wanted.start, len))
        {
            return Ok(());
        }
        if wanted.missing == Missing::Refuse && !super::view::shows_residency(wanted.file.as_fd()) {
            return Err(NoRange::Hidden);
        }
        self.make_room(len, time)?;
        let registered = self.registered.with(len);
        let cached_range =
            CachedRange::new(self.cuda, &wanted.gpu, &wanted.file, (wanted.start, len), wanted.missing, registered)?;
        let now = self.clock.fetch_add(1, Ordering::Relaxed) + 1;
        place.used.store(now, Ordering::Relaxed);
        place.put(cached_range);
        self.places.lock().push(wanted.place.clone());
        Ok(())
    }

    /// Gives up cached ranges that were last used at `time` or before, until there is room for
    /// `more` bytes.
    fn make_room(&self, more: u64, time: u64) -> Result<(), NoRange> {
        if !self.room.takes(more) || !Room::is_there(self.registered.bytes(), more) {
            return Err(NoRange::NoRoom);
        }
        while !self.room.fits(self.registered.bytes(), more) {
            // One that is in use counts until the last copy from it has ended.
            let before = self.registered.bytes();
            let places = self.by_age();
            let oldest = places.iter().find(|place| place.used.load(Ordering::Relaxed) <= time);
            drop(oldest.ok_or(NoRange::NoRoom)?.take());
            if self.registered.bytes() == before {
                return Err(NoRange::NoRoom);
            }
        }
        Ok(())
    }

    /// Gives cached ranges back while memory runs short, and returns when to look again.
    fn look_after_memory(&self) -> Duration {
        loop {
            let registered = self.registered.bytes();
            if let Some(after) = Room::look_after(registered) {
                return after;
            }
            self.give_back_half();
            // What is in use ends when its copies have.
            if self.registered.bytes() == registered {
                return Duration::from_millis(1);
            }
        }
    }

    fn give_back_half(&self) {
        let places = self.by_age();
        if places.is_empty() {
            return;
        }
        tracing::info!(
            ranges = places.len(),
            bytes = self.registered.bytes(),
            "memory runs short: half of what GPUs read of the page cache is given back"
        );
        places.iter().take(places.len().div_ceil(2)).for_each(|place| drop(place.take()));
    }

    /// The places that have a cached range, the oldest first.
    fn by_age(&self) -> Vec<Arc<RangePlace>> {
        let mut places = self.places.lock();
        let now = self.clock.load(Ordering::Relaxed);
        let with_age = |place: Arc<RangePlace>| Some((age(now, place.used.load(Ordering::Relaxed), place.is_near()?), place));
        let mut found: Vec<_> = places.iter().filter_map(Weak::upgrade).filter_map(with_age).collect();
        found.sort_by_key(|(age, _)| Reverse(*age));
        *places = found.iter().map(|(_, place)| Arc::downgrade(place)).collect();
        found.into_iter().map(|(_, place)| place).collect()
    }
}

/// How old a cached range is that was last used at a time. One that is not near its GPU ages twice
/// as fast: reads of it are slower, so that the room is better used by another. Of those that were
/// used just now, it is the older one too.
fn age(now: u64, used: u64, is_near: bool) -> u64 {
    let unused = now.saturating_sub(used) + 1;
    if is_near { unused } else { 2 * unused }
}

#[cfg(test)]
mod tests {
    use super::age;

    #[test]
    fn what_lies_far_from_its_gpu_ages_twice_as_fast() {
        let now = 100;
        // As often used: the far one goes first, however long ago that was.
        assert!((0..=now).all(|used| age(now, used, false) > age(now, used, true)));
        // Half as long unused, they are as old as each other.
        assert!(age(now, 90, false) > age(now, 80, true));
        assert!(age(now, 90, false) < age(now, 78, true), "a near one that is not used goes in the end");
        // Of one kind the least recently used goes first.
        for is_near in [false, true] {
            assert!((1..=now).all(|used| age(now, used - 1, is_near) > age(now, used, is_near)));
        }
        assert_eq!(age(now, now + 1, true), 1, "the clock was read before another range was made");
    }
}
