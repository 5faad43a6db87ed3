//! The completions of devices that run requests as they are submitted: a list with a wait, a wake
//! and a timeout.
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::OnceLock;
use std::time::Instant;

use gpunvme_blockdev::Wait;
use parking_lot::{Condvar, Mutex};
use rustix::event::{EventfdFlags, eventfd};

/// Where finished requests wait to be collected.
pub(crate) struct Completions<T> {
    state: Mutex<Finished<T>>,
    changed: Condvar,
    /// An eventfd for those who sleep on several queues, from the first time on.
    event: OnceLock<OwnedFd>,
}

struct Finished<T> {
    finished: Vec<T>,
    woken: bool,
}

impl<T> Default for Completions<T> {
    fn default() -> Self {
        Self {
            state: Mutex::new(Finished { finished: Vec::new(), woken: false }),
            changed: Condvar::new(),
            event: OnceLock::new(),
        }
    }
}

impl<T> Completions<T> {
    /// Adds finished requests.
    pub(crate) fn extend(&self, completions: impl IntoIterator<Item = T>) {
        self.state.lock().finished.extend(completions);
        self.notify();
    }

    /// Takes all that finished; waits for the first as [`gpunvme_blockdev::Queue::complete`] does.
    pub(crate) fn take(&self, wait: Wait) -> Vec<T> {
        let deadline = match wait {
            Wait::Timeout(timeout) => Instant::now().checked_add(timeout),
            Wait::No | Wait::Forever => None,
        };
        let mut state = self.state.lock();
        while wait != Wait::No && state.finished.is_empty() && !state.woken {
            match deadline {
                Some(deadline) if self.changed.wait_until(&mut state, deadline).timed_out() => break,
                Some(_) => {}
                None => self.changed.wait(&mut state),
            }
        }
        state.woken = false;
        std::mem::take(&mut state.finished)
    }

    /// As [`gpunvme_blockdev::Queue::wake`].
    pub(crate) fn wake(&self) {
        self.state.lock().woken = true;
        self.notify();
    }

    /// As [`gpunvme_blockdev::Queue::sleep_on`].
    pub(crate) fn sleep_on(&self) -> Option<BorrowedFd<'_>> {
        let event = self.event.get_or_init(|| eventfd(0, EventfdFlags::NONBLOCK).expect("an eventfd can be had"));
        let _ = rustix::io::read(event, &mut [0; 8]); // there may be nothing to take
        let state = self.state.lock();
        (state.finished.is_empty() && !state.woken).then_some(event.as_fd())
    }

    fn notify(&self) {
        self.changed.notify_all();
        if let Some(event) = self.event.get() {
            let _ = rustix::io::write(event, &1u64.to_ne_bytes()); // it is full: signalled already
        }
    }
}
