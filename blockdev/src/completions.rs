//! Completions of devices that run their requests at once: a list with a wait, a wake and a timeout.
use std::time::Instant;

use parking_lot::{Condvar, Mutex};

use crate::{Completion, Wait};

/// Where finished requests wait to be collected.
#[derive(Default)]
pub(crate) struct Completions {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    finished: Vec<Completion>,
    woken: bool,
}

impl Completions {
    /// Adds finished requests.
    pub(crate) fn extend(&self, completions: impl IntoIterator<Item = Completion>) {
        self.state.lock().finished.extend(completions);
        self.changed.notify_all();
    }

    /// As [`crate::Queue::complete`].
    pub(crate) fn take(&self, wait: Wait, out: &mut Vec<Completion>) -> usize {
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
        let count = state.finished.len();
        out.append(&mut state.finished);
        count
    }

    /// As [`crate::Queue::wake`].
    pub(crate) fn wake(&self) {
        self.state.lock().woken = true;
        self.changed.notify_all();
    }
}
