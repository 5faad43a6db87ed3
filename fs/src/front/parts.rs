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

use super::files::{Write, land, strip};
use super::room::Taken;
use super::{Caller, Front};
use crate::error::{Attempt, Fail, FsError};

/// How long parts wait for one of which nothing is known: far longer than a loop takes with it.
const WAIT: Duration = Duration::from_secs(2);

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
            strip(&self.fs, caller, ino)?;
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
        let tried = self.try_part(&caller, ino, how, data, true);
        match tried {
            Ok(Some(place)) => {
                self.wake_parts(ino);
                self.wait(move |fs| land(fs, ino).map(|()| place), done);
            }
            Err(Fail::Error(error)) => done(Err(error)),
            Ok(None) | Err(Fail::Stall(_)) => {
                // The bytes are the transport's, which takes its next request into the same place.
                let (room, data) = (self.room.take(data.len()), data.to_vec());
                let part = Part { caller, ino, how, data, room, done: Box::new(done) };
                if tried.is_ok() { self.park(part) } else { self.work_on(part, true) }
            }
        }
    }

    /// Writes a part of an append on a thread that may wait for the device. `waits`: it is parked where it comes early.
    fn work_on(self: &Arc<Self>, part: Part, waits: bool) {
        let front = self.clone();
        self.parts.begin_work(part.ino);
        self.general.run(move || {
            let Part { caller, ino, how, ref data, .. } = part;
            let written = front.fs.wait(|| front.try_part(&caller, ino, how, data, waits));
            let Some(written) = written.transpose() else {
                front.park(part);
                return front.parts.end_work(ino);
            };
            front.wake_parts(ino);
            front.parts.end_work(ino);
            let Part { data, room, done, .. } = part;
            drop((data, room));
            done(written.and_then(|place| land(&front.fs, ino).map(|()| place)));
        });
    }

    fn park(self: &Arc<Self>, part: Part) {
        let (ino, offset, len) = (part.ino, part.how.offset, part.data.len());
        if let Some(first) = self.parts.park(ino, offset, len, part) {
            self.work_on(first, false);
        }
        // What goes before it may have been written since it looked.
        self.wake_parts(ino);
    }

    /// Goes on with the parked parts of a file that its end has come to.
    fn wake_parts(self: &Arc<Self>, ino: u64) {
        if !self.parts.has(ino) {
            return;
        }
        // Where that is not in memory they look by themselves.
        let end = self.fs.attributes(ino).map_or(u64::MAX, |now| now.inode.size);
        while let Some(part) = self.parts.take(ino, end) {
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
    /// `limit`: bytes of parts that may wait for one of which nothing is known. Those that wait for a worker are not limited.
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

    /// Parks a part. Returns the first of the file where it may not wait any longer, since too many do.
    fn park(&self, ino: u64, offset: u64, len: usize, part: P) -> Option<P> {
        let mut state = self.state.lock();
        state.bytes += len;
        let full = state.bytes > self.limit;
        let file = state.file(ino);
        file.parked.entry(offset).or_default().push((len, part));
        if full && file.working == 0 { state.take(ino, u64::MAX) } else { None }
    }

    fn has(&self, ino: u64) -> bool {
        self.state.lock().files.get(&ino).is_some_and(|file| !file.parked.is_empty())
    }

    /// Takes out the first part of a file, if it begins at `end` or before.
    fn take(&self, ino: u64, end: u64) -> Option<P> {
        self.state.lock().take(ino, end)
    }

    /// Takes out the first part of each file in which they have waited too long.
    fn take_late(&self) -> Vec<P> {
        let mut state = self.state.lock();
        let is_late = |file: &File<P>| file.working == 0 && file.since.elapsed() >= WAIT;
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
        let mut first = self.files.get_mut(&ino)?.parked.first_entry().filter(|first| *first.key() <= end)?;
        let (len, part) = first.get_mut().pop()?;
        if first.get().is_empty() {
            first.remove();
        }
        self.bytes -= len;
        self.forget_idle(ino);
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
    fn the_first_of_a_file_goes_when_the_end_comes_to_it_and_nothing_is_left_behind() {
        let parts = Parts::new(100);
        assert!(
            parts.park(1, 20, 10, "c").is_none()
                && parts.park(1, 10, 10, "b").is_none()
                && parts.park(2, 10, 10, "other").is_none()
        );
        assert_eq!(
            [parts.take(1, 9), parts.take(1, 10), parts.take(1, 10), parts.take(1, 30)],
            [None, Some("b"), None, Some("c")]
        );
        assert!(!parts.has(1) && parts.has(2));
        assert_eq!(parts.take(2, u64::MAX), Some("other"));
        let state = parts.state.lock();
        assert!(state.files.is_empty() && state.bytes == 0);
    }

    #[test]
    fn so_many_wait_for_what_nobody_knows_of_and_all_for_a_worker() {
        let parts = Parts::new(20);
        assert_eq!([30, 20, 10].map(|offset| parts.park(1, offset, 10, offset)), [None, None, Some(10)]);
        parts.begin_work(1);
        assert_eq!([5, 40].map(|offset| parts.park(1, offset, 10, offset)), [None, None]);
        parts.end_work(1);
        assert_eq!(parts.park(1, 50, 10, 50), Some(5));
    }

    #[test]
    fn they_wait_for_long_but_not_for_ever_where_no_worker_has_what_is_missing() {
        let parts = Parts::new(100);
        parts.begin_work(1);
        for ino in [1, 2] {
            assert_eq!(parts.park(ino, 10, 10, ino), None);
            parts.state.lock().file(ino).since -= WAIT;
        }
        assert_eq!(parts.take_late(), [2]);
        parts.end_work(1);
        assert!(parts.take_late().is_empty(), "the end may come to it now");
    }
}
