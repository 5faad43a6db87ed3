//! Makes cached ranges, on a thread of its own, and gives them up: the least recently used first
//! where there are as many as may be, and half of them when memory runs short.
//!
//! It guards that no read waits for a registration, and that no more is registered than may be.

use super::cached_file::{CachedFile, RangePlace};
use super::cached_range::{CachedRange, Missing, NoRange, RANGE_LEN, Registered};
use super::room::Room;
use gpunvme_cuda::{Cuda, Gpu};
use parking_lot::Mutex;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

/// How often it is looked whether memory runs short, while there are cached ranges.
const LOOK: Duration = Duration::from_millis(200);

/// How often a range is read in, at most, for one that is to be there.
const ATTEMPTS: usize = 10;

/// The cached ranges of all open files that an application reads by one
/// [`super::super::Transfers`].
pub struct PageCache {
    shared: Arc<Shared>,
    /// What is done for reads about pages that the page cache has not got; none where cached ranges
    /// are made only when the application says so.
    missing: Option<Missing>,
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

/// A cached range that is to be made.
struct Work {
    gpu: Gpu,
    file: Arc<OwnedFd>,
    start: u64,
    place: Weak<RangePlace>,
    missing: Missing,
}

impl PageCache {
    /// With no cached ranges yet. `limit` is the most bytes of them.
    pub fn new(cuda: &'static Cuda, missing: Option<Missing>, limit: Option<u64>) -> PageCache {
        let shared = Shared {
            cuda,
            room: Room::new(limit),
            registered: Registered::default(),
            places: Mutex::default(),
            clock: AtomicU64::new(0),
            is_over: AtomicBool::new(false),
        };
        PageCache { shared: Arc::new(shared), missing, thread: Mutex::default() }
    }

    /// Whether reads may take what the page cache has and no cached range.
    pub fn reads_resident(&self) -> bool {
        self.missing.is_some()
    }

    /// The time by which cached ranges are used.
    pub fn now(&self) -> u64 {
        self.shared.clock.load(Ordering::Relaxed)
    }

    /// A range of a file is read, to memory of a GPU: cached ranges that are missing are made
    /// meanwhile, if that is worth it. `open` gives a descriptor of the file.
    pub fn is_read(&self, file: &CachedFile, gpu: Gpu, (offset, len): (u64, u64), open: impl FnOnce() -> Option<OwnedFd>) {
        let Some(missing) = self.missing else { return };
        let places = file.misses(offset, len);
        if places.is_empty() {
            return;
        }
        let Ok(descriptor) = file.descriptor(|| open().ok_or(())) else { return };
        for (start, place) in places {
            let place = Arc::downgrade(&place);
            self.send(Work { gpu, file: descriptor.clone(), start, place, missing });
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
        let mut bytes = 0;
        for (start, place) in file.places(offset, len) {
            let work = Work { gpu, file: descriptor.clone(), start, place: Arc::downgrade(&place), missing };
            // Pages that were read in may have left again: others change the file, or the kernel
            // needs the room.
            let made = (0..ATTEMPTS).map(|_| self.shared.make(&work)).find(|made| !matches!(made, Err(NoRange::NotResident)));
            match made {
                None | Some(Ok(()) | Err(NoRange::NoRoom)) => {}
                Some(Err(error)) => return Err(error),
            }
            let end = place.get().map_or(start, |cached_range| start + cached_range.len());
            bytes += end.min(offset + len).saturating_sub(start.max(offset));
        }
        Ok(bytes)
    }

    fn send(&self, work: Work) {
        let mut thread = self.thread.lock();
        if thread.is_none() {
            let (sender, receiver) = channel();
            let shared = self.shared.clone();
            let started = std::thread::Builder::new().name("gpunvme-cache".into()).spawn(move || shared.run(&receiver));
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
        loop {
            // Without cached ranges there is nothing to give back.
            let next = if self.registered.bytes() > 0 {
                work.recv_timeout(LOOK)
            } else {
                work.recv().map_err(|_| RecvTimeoutError::Disconnected)
            };
            match next {
                Ok(work) => {
                    if !self.is_over.load(Ordering::Relaxed)
                        && let Err(error) = self.make(&work)
                    {
                        tracing::debug!(%error, offset = work.start, "no cached range of a file's pages");
                    }
                }
                Err(RecvTimeoutError::Timeout) if Room::is_short(self.registered.bytes()) => self.give_back_half(),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return,
            }
        }
    }

    /// Makes a cached range, unless its place is gone, or has one that is as long as it can be.
    fn make(&self, work: &Work) -> Result<(), NoRange> {
        let Some(place) = work.place.upgrade() else { return Ok(()) };
        let size = rustix::fs::fstat(&work.file).map_err(NoRange::Map)?.st_size as u64;
        let len = size.saturating_sub(work.start).min(RANGE_LEN);
        if len == 0 || place.get().is_some_and(|cached_range| cached_range.len() >= len && cached_range.is_true(work.start, len))
        {
            return Ok(());
        }
        if work.missing == Missing::Refuse && !super::view::shows_residency(work.file.as_fd()) {
            return Err(NoRange::Hidden);
        }
        self.make_room(len)?;
        let registered = self.registered.with(len);
        let cached_range = CachedRange::new(self.cuda, &work.gpu, &work.file, (work.start, len), work.missing, registered)?;
        let now = self.clock.fetch_add(1, Ordering::Relaxed) + 1;
        place.used.store(now, Ordering::Relaxed);
        place.put(cached_range);
        self.places.lock().push(work.place.clone());
        Ok(())
    }

    /// Gives up cached ranges until there is room for `more` bytes.
    fn make_room(&self, more: u64) -> Result<(), NoRange> {
        if !self.room.takes(more) || !Room::is_there(self.registered.bytes(), more) {
            return Err(NoRange::NoRoom);
        }
        while !self.room.fits(self.registered.bytes(), more) {
            // One that is in use counts until the last copy from it has ended.
            let before = self.registered.bytes();
            drop(self.by_use().first().ok_or(NoRange::NoRoom)?.take());
            if self.registered.bytes() == before {
                return Err(NoRange::NoRoom);
            }
        }
        Ok(())
    }

    fn give_back_half(&self) {
        let places = self.by_use();
        tracing::info!(
            ranges = places.len(),
            bytes = self.registered.bytes(),
            "memory runs short: half of what GPUs read of the page cache is given back"
        );
        places.iter().take(places.len().div_ceil(2)).for_each(|place| drop(place.take()));
    }

    /// The places that have a cached range, the least recently used first.
    fn by_use(&self) -> Vec<Arc<RangePlace>> {
        let mut places = self.places.lock();
        let mut found: Vec<_> = places.iter().filter_map(Weak::upgrade).filter(|place| place.get().is_some()).collect();
        found.sort_by_key(|place| place.used.load(Ordering::Relaxed));
        *places = found.iter().map(Arc::downgrade).collect();
        found
    }
}
