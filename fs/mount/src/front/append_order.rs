//! The order of appends: holds out-of-order fragments of an append past the page cache until the
//! file has reached their offset.
//!
//! The kernel sends all fragments of such a write at once and in their order, but the loops take
//! them side by side. When a fragment arrives early, the one before it is with another loop for a
//! moment, or with a worker for as long as the device takes. Written at once, the early fragment
//! would leave a gap; a direct write could put data into the gap, which the fragment before would
//! then overwrite. So the early fragment is parked until the end of the file reaches it. No thread
//! waits with it. The fragment before may also never come: it failed, or the write is no append at
//! all (`RWF_NOAPPEND`, of which no flag tells).

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustc_hash::FxHashMap;

use super::caller::Caller;
use super::resources::request_budget::RequestPermit;
use super::write_request::WriteRequest;
use gpunvme_engine::error::FsError;

/// How long fragments wait for a missing one: far longer than a loop takes with it.
const WAIT: Duration = Duration::from_secs(2);
/// The same where too many wait: longer than a loop takes that has lost its processor meanwhile.
const SHORT_WAIT: Duration = Duration::from_millis(300);

/// A fragment of an append, on its way: as much of it as the kernel sends in one request.
pub(crate) struct Fragment {
    pub caller: Caller,
    pub ino: u64,
    pub how: WriteRequest,
    pub data: Vec<u8>,
    pub permit: RequestPermit,
    pub done: Box<dyn FnOnce(Result<u64, FsError>) + Send>,
}

/// The fragments that are parked.
pub(crate) struct AppendOrder<P = Fragment> {
    limit: usize,
    state: Mutex<Parked<P>>,
}

struct Parked<P> {
    bytes: usize,
    files: FxHashMap<u64, File<P>>,
}

struct File<P> {
    /// Number of fragments that are with a worker.
    working: usize,
    /// When `working` last changed.
    since: Instant,
    /// By their offset, with the length of each. (Two have the same one where they are no
    /// appends.)
    parked: BTreeMap<u64, Vec<(usize, P)>>,
}

impl<P> AppendOrder<P> {
    /// `limit`: bytes of parked fragments beyond which fragments wait for less long for a missing
    /// one.
    pub fn new(limit: usize) -> AppendOrder<P> {
        AppendOrder { limit, state: Mutex::new(Parked { bytes: 0, files: FxHashMap::default() }) }
    }

    /// Notes that a fragment of a file goes to a worker.
    pub(crate) fn begin_work(&self, ino: u64) {
        let mut state = self.state.lock();
        let file = state.file(ino);
        (file.working, file.since) = (file.working + 1, Instant::now());
    }

    /// Notes that a worker is done with a fragment, or gives it back.
    pub(crate) fn end_work(&self, ino: u64) {
        let mut state = self.state.lock();
        let file = state.file(ino);
        (file.working, file.since) = (file.working - 1, Instant::now());
        state.forget_idle(ino);
    }

    /// Whether something that goes before a fragment is parked, or with a worker.
    pub(crate) fn are_before(&self, ino: u64, offset: u64) -> bool {
        let state = self.state.lock();
        let parked_before = |file: &File<P>| file.parked.first_key_value().is_some_and(|(first, _)| *first < offset);
        state.files.get(&ino).is_some_and(|file| file.working > 0 || parked_before(file))
    }

    /// Parks a fragment.
    pub(crate) fn park(&self, ino: u64, offset: u64, len: usize, fragment: P) {
        let mut state = self.state.lock();
        state.bytes += len;
        state.file(ino).parked.entry(offset).or_default().push((len, fragment));
    }

    pub(crate) fn has(&self, ino: u64) -> bool {
        self.state.lock().files.get(&ino).is_some_and(|file| !file.parked.is_empty())
    }

    /// Takes out the first fragment of a file for a worker, if it begins at `end` or before and no
    /// other is with one.
    pub(crate) fn take(&self, ino: u64, end: u64) -> Option<P> {
        self.state.lock().take(ino, end)
    }

    /// Takes out the first fragment of each file in which they have waited too long, for a worker.
    pub(crate) fn take_late(&self) -> Vec<P> {
        let mut state = self.state.lock();
        let wait = if state.bytes > self.limit { SHORT_WAIT } else { WAIT };
        let is_late = |file: &File<P>| file.working == 0 && file.since.elapsed() >= wait;
        let late: Vec<u64> = state.files.iter().filter(|(_, file)| is_late(file)).map(|(ino, _)| *ino).collect();
        late.into_iter().filter_map(|ino| state.take(ino, u64::MAX)).collect()
    }

    /// Drops all parked fragments. For the end of a mount, when no process waits for an answer any
    /// more.
    pub fn clear(&self) {
        let files = std::mem::take(&mut self.state.lock().files);
        drop(files);
    }
}

impl<P> Parked<P> {
    fn file(&mut self, ino: u64) -> &mut File<P> {
        self.files.entry(ino).or_insert_with(|| File { working: 0, since: Instant::now(), parked: BTreeMap::new() })
    }

    fn take(&mut self, ino: u64, end: u64) -> Option<P> {
        let file = self.files.get_mut(&ino).filter(|file| file.working == 0)?;
        let mut first = file.parked.first_entry().filter(|first| *first.key() <= end)?;
        let (len, fragment) = first.get_mut().pop()?;
        if first.get().is_empty() {
            first.remove();
        }
        (file.working, file.since) = (1, Instant::now());
        self.bytes -= len;
        Some(fragment)
    }

    fn forget_idle(&mut self, ino: u64) {
        if self.files.get(&ino).is_some_and(|file| file.working == 0 && file.parked.is_empty()) {
            self.files.remove(&ino);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_of_a_file_goes_at_a_time_when_the_end_comes_to_it_and_nothing_is_left_behind() {
        let order = AppendOrder::new(100);
        for (ino, offset, fragment) in [(1, 20, "c"), (1, 10, "b"), (2, 10, "other")] {
            order.park(ino, offset, 10, fragment);
        }
        assert_eq!([order.take(1, 9), order.take(1, 10), order.take(1, 30)], [None, Some("b"), None]);
        order.end_work(1);
        assert_eq!([order.take(1, 10), order.take(1, 30)], [None, Some("c")]);
        order.end_work(1);
        assert!(!order.has(1) && order.has(2));
        assert_eq!(order.take(2, u64::MAX), Some("other"));
        order.end_work(2);
        let state = order.state.lock();
        assert!(state.files.is_empty() && state.bytes == 0);
    }

    #[test]
    fn a_part_goes_behind_those_before_it_and_those_with_a_worker() {
        let order = AppendOrder::new(100);
        assert!(!order.are_before(1, 30));
        order.park(1, 20, 10, ());
        assert!(order.are_before(1, 30) && !order.are_before(1, 10) && !order.are_before(2, 30));
        order.begin_work(1);
        assert!(order.are_before(1, 10));
    }

    #[test]
    fn they_wait_for_long_but_not_for_ever_where_no_worker_has_what_is_missing() {
        let order = AppendOrder::new(30);
        let later = |by: Duration| [1, 2].map(|ino| order.state.lock().file(ino).since -= by);
        order.begin_work(1);
        for ino in [1, 2] {
            order.park(ino, 10, 10, ino);
        }
        later(SHORT_WAIT);
        assert!(order.take_late().is_empty());
        later(WAIT);
        assert_eq!(order.take_late(), [2]);
        order.end_work(1);
        order.end_work(2);
        assert!(order.take_late().is_empty(), "the end may come to it now");
        // Too many of them wait for less long, but never for no time: what is missing may be with
        // a loop.
        order.park(2, 10, 30, 2);
        assert!(order.take_late().is_empty());
        later(SHORT_WAIT);
        assert_eq!(order.take_late().len(), 2);
    }
}
