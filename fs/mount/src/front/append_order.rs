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
//!
//! A parked fragment holds one of the requests that the kernel has in flight in the background, and
//! memory for its bytes; all users share both. So a user has a quota of the fragments that wait for
//! a missing one, and what exceeds the quota goes on soon without it. (Fragments behind one that is
//! with a worker wait for the device, as any write does, and are not counted.)

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use gpunvme_gpupath::quota::quota;
use parking_lot::{Condvar, Mutex};
use rustc_hash::FxHashMap;

use super::caller::Caller;
use super::resources::request_budget::RequestPermit;
use super::write_request::WriteRequest;
use gpunvme_engine::error::FsError;

/// How long fragments wait for a missing one: far longer than a loop takes with it.
const WAIT: Duration = Duration::from_secs(2);
/// The same where their user has more of them than a quota: longer than a loop usually takes that
/// has lost its processor meanwhile. One that goes on too early matters only where direct writes
/// make the same file longer just then.
const SHORT_WAIT: Duration = Duration::from_millis(50);

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
    /// Signalled when a fragment begins to wait for a missing one, and at the end.
    waits: Condvar,
}

struct Parked<P> {
    files: FxHashMap<u64, File<P>>,
    ended: bool,
}

struct File<P> {
    /// Number of fragments that are with a worker.
    working: usize,
    /// When `working` last changed.
    since: Instant,
    /// By their offset, with the user of each. (Two have the same one where they are no appends.)
    parked: BTreeMap<u64, Vec<(u32, P)>>,
}

impl<P> AppendOrder<P> {
    /// `limit`: fragments that may wait for a missing one, those of all users together.
    pub fn new(limit: usize) -> AppendOrder<P> {
        let state = Parked { files: FxHashMap::default(), ended: false };
        AppendOrder { limit, state: Mutex::new(state), waits: Condvar::new() }
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
        self.tell_of_wait(file);
        state.forget_idle(ino);
    }

    /// Whether something that goes before a fragment is parked, or with a worker.
    pub(crate) fn are_before(&self, ino: u64, offset: u64) -> bool {
        let state = self.state.lock();
        let parked_before = |file: &File<P>| file.parked.first_key_value().is_some_and(|(first, _)| *first < offset);
        state.files.get(&ino).is_some_and(|file| file.working > 0 || parked_before(file))
    }

    /// Parks a fragment of a user.
    pub(crate) fn park(&self, ino: u64, offset: u64, user: u32, fragment: P) {
        let mut state = self.state.lock();
        let file = state.file(ino);
        file.parked.entry(offset).or_default().push((user, fragment));
        self.tell_of_wait(file);
    }

    pub(crate) fn has(&self, ino: u64) -> bool {
        self.state.lock().files.get(&ino).is_some_and(|file| !file.parked.is_empty())
    }

    /// Takes out the first fragment of a file for a worker, if it begins at `end` or before and no
    /// other is with one.
    pub(crate) fn take(&self, ino: u64, end: u64) -> Option<P> {
        self.state.lock().take(ino, end)
    }

    /// Waits until there are files in which fragments have waited too long, and takes out the first
    /// fragment of each for a worker. None at the end of the mount.
    pub(crate) fn wait_for_late(&self) -> Option<Vec<P>> {
        let mut state = self.state.lock();
        while !state.ended {
            let now = Instant::now();
            let due = state.due(self.limit);
            let late: Vec<P> =
                due.iter().filter(|(at, _)| *at <= now).filter_map(|(_, ino)| state.take(*ino, u64::MAX)).collect();
            if !late.is_empty() {
                return Some(late);
            }
            match due.into_iter().map(|(at, _)| at).min() {
                Some(at) => drop(self.waits.wait_until(&mut state, at)),
                None => self.waits.wait(&mut state),
            }
        }
        None
    }

    /// Drops all parked fragments. For the end of a mount, when no process waits for an answer any
    /// more.
    pub fn end(&self) {
        let mut state = self.state.lock();
        state.ended = true;
        let files = std::mem::take(&mut state.files);
        drop(state);
        drop(files);
        self.waits.notify_all();
    }

    fn tell_of_wait(&self, file: &File<P>) {
        if file.waits_for_missing() {
            self.waits.notify_one();
        }
    }
}

impl<P> File<P> {
    fn waits_for_missing(&self) -> bool {
        self.working == 0 && !self.parked.is_empty()
    }

    fn users(&self) -> impl Iterator<Item = u32> {
        self.parked.values().flatten().map(|(user, _)| *user)
    }
}

impl<P> Parked<P> {
    fn file(&mut self, ino: u64) -> &mut File<P> {
        self.files.entry(ino).or_insert_with(|| File { working: 0, since: Instant::now(), parked: BTreeMap::new() })
    }

    /// The files in which fragments wait for a missing one, with the time when they have waited too
    /// long. Where a user has more than a quota of `limit`, that comes early for those files that
    /// have waited longest.
    fn due(&self, limit: usize) -> Vec<(Instant, u64)> {
        let mut waiting: Vec<_> = self.files.iter().filter(|(_, file)| file.waits_for_missing()).collect();
        waiting.sort_unstable_by_key(|(_, file)| file.since);
        let mut held: FxHashMap<u32, u64> = FxHashMap::default();
        waiting.iter().flat_map(|(_, file)| file.users()).for_each(|user| *held.entry(user).or_default() += 1);
        let mut all: u64 = held.values().sum();
        let due = |(ino, file): (&u64, &File<P>)| {
            let exceeds = |user| held[&user] > quota(user, limit as u64, all - held[&user]);
            if !file.users().any(exceeds) {
                return (file.since + WAIT, *ino);
            }
            for user in file.users() {
                *held.get_mut(&user).expect("it was counted") -= 1;
                all -= 1;
            }
            (file.since + SHORT_WAIT, *ino)
        };
        waiting.into_iter().map(due).collect()
    }

    fn take(&mut self, ino: u64, end: u64) -> Option<P> {
        let file = self.files.get_mut(&ino).filter(|file| file.working == 0)?;
        let mut first = file.parked.first_entry().filter(|first| *first.key() <= end)?;
        let (_, fragment) = first.get_mut().pop()?;
        if first.get().is_empty() {
            first.remove();
        }
        (file.working, file.since) = (1, Instant::now());
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

    const USER: u32 = 1000;

    /// The files that have a fragment which goes on without the one before it, had `by` passed.
    fn late_after<P>(order: &AppendOrder<P>, by: Duration) -> Vec<u64> {
        let state = order.state.lock();
        let mut late: Vec<u64> =
            state.due(order.limit).into_iter().filter(|(at, _)| *at <= Instant::now() + by).map(|(_, ino)| ino).collect();
        late.sort_unstable();
        late
    }

    #[test]
    fn one_of_a_file_goes_at_a_time_when_the_end_comes_to_it_and_nothing_is_left_behind() {
        let order = AppendOrder::new(100);
        for (ino, offset, fragment) in [(1, 20, "c"), (1, 10, "b"), (2, 10, "other")] {
            order.park(ino, offset, USER, fragment);
        }
        assert_eq!([order.take(1, 9), order.take(1, 10), order.take(1, 30)], [None, Some("b"), None]);
        order.end_work(1);
        assert_eq!([order.take(1, 10), order.take(1, 30)], [None, Some("c")]);
        order.end_work(1);
        assert!(!order.has(1) && order.has(2));
        assert_eq!(order.take(2, u64::MAX), Some("other"));
        order.end_work(2);
        assert!(order.state.lock().files.is_empty());
    }

    #[test]
    fn a_part_goes_behind_those_before_it_and_those_with_a_worker() {
        let order = AppendOrder::new(100);
        assert!(!order.are_before(1, 30));
        order.park(1, 20, USER, ());
        assert!(order.are_before(1, 30) && !order.are_before(1, 10) && !order.are_before(2, 30));
        order.begin_work(1);
        assert!(order.are_before(1, 10));
    }

    #[test]
    fn they_wait_for_long_but_not_for_ever_where_no_worker_has_what_is_missing() {
        let order = AppendOrder::new(100);
        order.begin_work(1);
        for ino in [1, 2] {
            order.park(ino, 10, USER, ino);
        }
        assert_eq!(late_after(&order, WAIT / 2), [0; 0]);
        assert_eq!(late_after(&order, WAIT), [2]);
        order.end_work(1);
        assert_eq!(late_after(&order, WAIT), [1, 2]);
        order.state.lock().file(2).since -= WAIT;
        assert_eq!(order.wait_for_late(), Some(vec![2]));
        order.end();
        assert_eq!(order.wait_for_late(), None);
    }

    #[test]
    fn a_user_who_has_more_than_a_share_waits_shortly_and_others_and_root_do_not() {
        const ALL: usize = 64;
        let order = AppendOrder::new(ALL);
        let alone = quota(USER, ALL as u64, 0);
        for ino in 0..alone {
            order.park(ino, 10, USER, ());
        }
        assert_eq!(late_after(&order, SHORT_WAIT), [0; 0], "that is the quota");
        for ino in [100, 101] {
            order.park(ino, 10, 0, ());
        }
        order.park(102, 10, USER + 1, ());
        order.park(0, 20, USER, ());
        order.park(1, 20, USER, ());
        assert_eq!(late_after(&order, SHORT_WAIT), [0, 1], "the oldest");
        // One with a worker waits for the device, and counts no more.
        order.begin_work(5);
        order.begin_work(6);
        order.begin_work(7);
        assert_eq!(late_after(&order, SHORT_WAIT), [0; 0]);
        order.park(5, 20, USER, ());
        assert_eq!(late_after(&order, SHORT_WAIT), [0; 0]);
    }
}
