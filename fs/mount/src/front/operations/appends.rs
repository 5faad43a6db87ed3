//! Appends past the page cache (`O_DIRECT | O_APPEND`), fragment by fragment in their order.

use std::io;
use std::sync::Arc;
use std::thread::{self, JoinHandle};

use super::files::land;
use crate::front::append_order::Fragment;
use crate::front::caller::Caller;
use crate::front::shared::Front;
use crate::front::write_request::WriteRequest;
use gpunvme_engine::error::{Attempt, Fail, FsError};

impl Front {
    /// Writes a fragment of an append, if the file has reached its offset. Returns where it is
    /// then.
    fn try_fragment(&self, caller: &Caller, ino: u64, how: WriteRequest, data: &[u8], waits: bool) -> Attempt<Option<u64>> {
        if waits && self.fs.attributes(ino)?.inode.size < how.offset {
            return Ok(None);
        }
        if how.strip {
            self.strip(caller, ino)?;
        }
        self.fs.append_part(ino, how.offset, data, caller.context.now).map(Some)
    }

    /// Writes a fragment of an append, at once or when the file has reached its offset. Calls
    /// `done` with the offset when the device has the fragment.
    pub(crate) fn append_fragment(
        self: &Arc<Self>,
        caller: Caller,
        ino: u64,
        data: &[u8],
        how: WriteRequest,
        done: impl FnOnce(Result<u64, FsError>) + Send + 'static,
    ) {
        let behind = self.append_order.are_before(ino, how.offset);
        let tried = if behind { Ok(None) } else { self.try_fragment(&caller, ino, how, data, true) };
        match tried {
            Ok(Some(place)) => {
                self.wake_parts(ino);
                self.wait(caller.owner(), move |fs| land(fs, ino, &caller).map(|()| place), done);
            }
            Err(Fail::Error(error)) => done(Err(error)),
            Ok(None) | Err(Fail::Stall(_)) => {
                // The bytes lie in the transport's buffer, which its next request overwrites.
                let (permit, data) = (self.request_budget.take(data.len()), data.to_vec());
                let fragment = Fragment { caller, ino, how, data, permit, done: Box::new(done) };
                if tried.is_ok() {
                    return self.park(fragment);
                }
                self.append_order.begin_work(ino);
                self.work_on(fragment, true);
            }
        }
    }

    /// Writes a fragment that is with a worker now, on a thread that may wait for the device.
    /// `waits`: it is parked where it comes early.
    fn work_on(self: &Arc<Self>, fragment: Fragment, waits: bool) {
        let front = self.clone();
        self.general.run_for(fragment.caller.owner(), move || {
            let Fragment { caller, ino, how, ref data, .. } = fragment;
            let written = front.fs.wait(|| front.try_fragment(&caller, ino, how, data, waits));
            let Some(written) = written.transpose() else {
                front.append_order.end_work(ino);
                return front.park(fragment);
            };
            front.append_order.end_work(ino);
            front.wake_parts(ino);
            let Fragment { data, permit, done, .. } = fragment;
            drop((data, permit));
            done(written.and_then(|place| land(&front.fs, ino, &caller).map(|()| place)));
        });
    }

    fn park(self: &Arc<Self>, fragment: Fragment) {
        let (ino, offset, user) = (fragment.ino, fragment.how.offset, fragment.caller.context.uid);
        self.append_order.park(ino, offset, user, fragment);
        // The fragment before it may have been written since this thread looked.
        self.wake_parts(ino);
    }

    /// Continues with the first of a file's parked fragments, if the end of the file has reached
    /// it. The next ones follow when it is written, behind it, even where it goes elsewhere than
    /// the kernel believes.
    fn wake_parts(self: &Arc<Self>, ino: u64) {
        if !self.append_order.has(ino) {
            return;
        }
        // Where that is not in memory they look by themselves.
        let end = self.fs.attributes(ino).map_or(u64::MAX, |now| now.inode.size);
        if let Some(fragment) = self.append_order.take(ino, end) {
            self.work_on(fragment, true);
        }
    }
}

/// The thread that continues with fragments which have waited too long for those before them.
/// Dropping it ends the thread, and drops the fragments that wait.
pub(crate) struct LateFragments {
    front: Arc<Front>,
    thread: Option<JoinHandle<()>>,
}

impl LateFragments {
    /// Starts the thread.
    ///
    /// # Errors
    /// If the system has no thread to give.
    pub fn start(front: Arc<Front>) -> io::Result<LateFragments> {
        let thread = thread::Builder::new().name("late fragments".into()).spawn({
            let front = front.clone();
            move || {
                while let Some(late) = front.append_order.wait_for_late() {
                    late.into_iter().for_each(|fragment| front.work_on(fragment, false));
                }
            }
        })?;
        Ok(LateFragments { front, thread: Some(thread) })
    }
}

impl Drop for LateFragments {
    fn drop(&mut self) {
        self.front.append_order.end();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join(); // a panic there was reported there
        }
    }
}
