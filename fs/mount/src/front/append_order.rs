//! Parts of long appends past the page cache that come before those which go before them in the file.
//!
//! The kernel sends all parts of such a write at once and in their order, but the loops take them side by side. What is missing is with
//! another loop for a moment, or with a worker for as long as the device takes. A part that was written then would leave a gap, in
//! which a direct write could put what an earlier part is to be written over; so it is parked until the end of the file comes to it. No thread
//! waits with it. What is missing may also never come: it failed, or the write is no append at all (`RWF_NOAPPEND`, of which no flag tells).

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustc_hash::FxHashMap;

use super::files::{Write, land};
use super::room::Taken;
use super::{Caller, Front};
use gpunvme_engine::error::{Attempt, Fail, FsError};

/// How long parts wait for one of which nothing is known: far longer than a loop takes with it.
const WAIT: Duration = Duration::from_secs(2);
/// The same where too many wait: longer than a loop takes that has lost its processor meanwhile.
const SHORT_WAIT: Duration = Duration::from_millis(300);

/// A part of an append, on its way.
pub(super) struct Part {
    pub caller: Caller,
    pub ino: u64,
    pub how: Write,
    pub data: Vec<u8>,
    pub room: Taken,
    pub done: Box<dyn FnOnce(Result<u64, FsError>) + Send>,
}

impl Front {
    /// Writes a part of an append, if what goes before it is there. Returns where it is then.
    fn try_part(&self, caller: &Caller, ino: u64, how: Write, data: &[u8], waits: bool) -> Attempt<Option<u64>> {
        if waits && self.fs.attributes(ino)?.inode.size < how.offset {
            return Ok(None);
        }
        if how.strip {
            self.strip(caller, ino)?;
        }
        self.fs.append_part(ino, how.offset, data, caller.context.now).map(Some)
    }

    /// Writes a part of an append, at once or when what goes before it is there. `done` is told where it is when the device has it.
    pub(super) fn append_part(
        self: &Arc<Self>,
        caller: Caller,
        ino: u64,
        data: &[u8],
        how: Write,
        done: impl FnOnce(Result<u64, FsError>) + Send + 'static,
    ) {
        let behind = self.parts.are_before(ino, how.offset);
        let tried = if behind { Ok(None) } else { self.try_part(&caller, ino, how, data, true) };
        match tried {
            Ok(Some(place)) => {
                self.wake_parts(ino);
                self.wait(move |fs| land(fs, ino, how.handle).map(|()| place), done);
            }
            Err(Fail::Error(error)) => done(Err(error)),
            Ok(None) | Err(Fail::Stall(_)) => {
                // The bytes are the transport's, which takes its next request into the same place.
                let (room, data) = (self.room.take(data.len()), data.to_vec());
                let part = Part { caller, ino, how, data, room, done: Box::new(done) };
                if tried.is_ok() {
                    return self.park(part);
                }
                self.parts.begin_work(ino);
                self.work_on(part, true);
            }
        }
    }

    /// Writes a part that is with a worker now, on a thread that may wait for the device. `waits`: it is parked where it comes early.
    fn work_on(self: &Arc<Self>, part: Part, waits: bool) {
        let front = self.clone();
        self.general.run(move || {
            let Part { caller, ino, how, ref data, .. } = part;
            let written = front.fs.wait(|| front.try_part(&caller, ino, how, data, waits));
            let Some(written) = written.transpose() else {
                front.parts.end_work(ino);
                return front.park(part);
            };
            front.parts.end_work(ino);
            front.wake_parts(ino);
            let Part { data, room, done, .. } = part;
            drop((data, room));
            done(written.and_then(|place| land(&front.fs, ino, how.handle).map(|()| place)));
        });
    }

    fn park(self: &Arc<Self>, part: Part) {
        let (ino, offset, len) = (part.ino, part.how.offset, part.data.len());
        self.parts.park(ino, offset, len, part);
        // What goes before it may have been written since it looked.
        self.wake_parts(ino);
    }

    /// Goes on with the first of the parked parts of a file, if the end of the file has come to it. The next follow when it is written: they go behind it, also where it
    /// goes elsewhere than the kernel believes.
    fn wake_parts(self: &Arc<Self>, ino: u64) {
        if !self.parts.has(ino) {
            return;
        }
        // Where that is not in memory they look by themselves.
        let end = self.fs.attributes(ino).map_or(u64::MAX, |now| now.inode.size);
        if let Some(part) = self.parts.take(ino, end) {
            self.work_on(part, true);
        }
    }

    /// Goes on with parts that have waited too long for those before them.
    pub(super) fn wake_late_parts(self: &Arc<Self>) {
        for part in self.parts.take_late() {
            self.work_on(part, false);
        }
    }
}

/// The parts that are parked.
pub(super) struct Parts<P = Part> {
    limit: usize,
    state: Mutex<State<P>>,
}

struct State<P> {
    bytes: usize,
    files: FxHashMap<u64, File<P>>,
}

struct File<P> {
    /// Parts that are with a worker.
    working: usize,
    /// When that was last another number.
    since: Instant,
    /// By their offset, with the length of each. (Two have the same one where they are no appends.)
    parked: BTreeMap<u64, Vec<(usize, P)>>,
}

impl<P> Parts<P> {
    /// `limit`: bytes of parts beyond which they wait for less long for one of which nothing is known.
    pub fn new(limit: usize) -> Parts<P> {
        Parts { limit, state: Mutex::new(State { bytes: 0, files: FxHashMap::default() }) }
    }

    /// A part of a file goes to a worker.
    fn begin_work(&self, ino: u64) {
        let mut state = self.state.lock();
        let file = state.file(ino);
        (file.working, file.since) = (file.working + 1, Instant::now());
    }

    /// A worker is done with a part, or gives it back.
    fn end_work(&self, ino: u64) {
        let mut state = self.state.lock();
        let file = state.file(ino);
        (file.working, file.since) = (file.working - 1, Instant::now());
        state.forget_idle(ino);
    }

    /// Whether something that goes before a part is parked, or with a worker.
    fn are_before(&self, ino: u64, offset: u64) -> bool {
        let state = self.state.lock();
        let parked_before = |file: &File<P>| file.parked.first_key_value().is_some_and(|(first, _)| *first < offset);
        state.files.get(&ino).is_some_and(|file| file.working > 0 || parked_before(file))
    }

    /// Parks a part.
    fn park(&self, ino: u64, offset: u64, len: usize, part: P) {
        let mut state = self.state.lock();
        state.bytes += len;
        state.file(ino).parked.entry(offset).or_default().push((len, part));
    }

    fn has(&self, ino: u64) -> bool {
        self.state.lock().files.get(&ino).is_some_and(|file| !file.parked.is_empty())
    }

    /// Takes out the first part of a file for a worker, if it begins at `end` or before and no other is with one.
    fn take(&self, ino: u64, end: u64) -> Option<P> {
        self.state.lock().take(ino, end)
    }

    /// Takes out the first part of each file in which they have waited too long, for a worker.
    fn take_late(&self) -> Vec<P> {
        let mut state = self.state.lock();
        let wait = if state.bytes > self.limit { SHORT_WAIT } else { WAIT };
        let is_late = |file: &File<P>| file.working == 0 && file.since.elapsed() >= wait;
        let late: Vec<u64> = state.files.iter().filter(|(_, file)| is_late(file)).map(|(ino, _)| *ino).collect();
        late.into_iter().filter_map(|ino| state.take(ino, u64::MAX)).collect()
    }

    /// Takes out all of them. For the end of a mount, when nobody waits for an answer any more.
    pub fn clear(&self) {
        let files = std::mem::take(&mut self.state.lock().files);
        drop(files);
    }
}

impl<P> State<P> {
    fn file(&mut self, ino: u64) -> &mut File<P> {
        self.files.entry(ino).or_insert_with(|| File { working: 0, since: Instant::now(), parked: BTreeMap::new() })
    }

    fn take(&mut self, ino: u64, end: u64) -> Option<P> {
        let file = self.files.get_mut(&ino).filter(|file| file.working == 0)?;
        let mut first = file.parked.first_entry().filter(|first| *first.key() <= end)?;
        let (len, part) = first.get_mut().pop()?;
        if first.get().is_empty() {
            first.remove();
        }
        (file.working, file.since) = (1, Instant::now());
        self.bytes -= len;
        Some(part)
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
        let parts = Parts::new(100);
        for (ino, offset, part) in [(1, 20, "c"), (1, 10, "b"), (2, 10, "other")] {
            parts.park(ino, offset, 10, part);
        }
        assert_eq!([parts.take(1, 9), parts.take(1, 10), parts.take(1, 30)], [None, Some("b"), None]);
        parts.end_work(1);
        assert_eq!([parts.take(1, 10), parts.take(1, 30)], [None, Some("c")]);
        parts.end_work(1);
        assert!(!parts.has(1) && parts.has(2));
        assert_eq!(parts.take(2, u64::MAX), Some("other"));
        parts.end_work(2);
        let state = parts.state.lock();
        assert!(state.files.is_empty() && state.bytes == 0);
    }

    #[test]
    fn a_part_goes_behind_those_before_it_and_those_with_a_worker() {
        let parts = Parts::new(100);
        assert!(!parts.are_before(1, 30));
        parts.park(1, 20, 10, ());
        assert!(parts.are_before(1, 30) && !parts.are_before(1, 10) && !parts.are_before(2, 30));
        parts.begin_work(1);
        assert!(parts.are_before(1, 10));
    }

    #[test]
    fn they_wait_for_long_but_not_for_ever_where_no_worker_has_what_is_missing() {
        let parts = Parts::new(30);
        let later = |by: Duration| [1, 2].map(|ino| parts.state.lock().file(ino).since -= by);
        parts.begin_work(1);
        for ino in [1, 2] {
            parts.park(ino, 10, 10, ino);
        }
        later(SHORT_WAIT);
        assert!(parts.take_late().is_empty());
        later(WAIT);
        assert_eq!(parts.take_late(), [2]);
        parts.end_work(1);
        parts.end_work(2);
        assert!(parts.take_late().is_empty(), "the end may come to it now");
        // Too many of them wait for less long, but never for no time: what is missing may be with a loop.
        parts.park(2, 10, 30, 2);
        assert!(parts.take_late().is_empty());
        later(SHORT_WAIT);
        assert_eq!(parts.take_late().len(), 2);
    }
}
