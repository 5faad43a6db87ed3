//! Making everything durable at once. All who ask while one such pass is going on share the next,
//! so that no number of callers takes more than one thread, or the device from others.

use std::sync::Arc;

use gpunvme_engine::error::FsError;
use parking_lot::Mutex;

use crate::front::shared::Front;

type Done = Box<dyn FnOnce(Result<(), FsError>) + Send>;

/// The callers that wait for a pass.
#[derive(Default)]
pub(crate) struct Syncs(Mutex<State>);

#[derive(Default)]
struct State {
    is_running: bool,
    /// Came after the pass that is going on began.
    waiting: Vec<Done>,
}

impl Syncs {
    /// Adds a caller. True: no pass is going on, and this caller has to begin one.
    fn add(&self, done: Done) -> bool {
        let mut state = self.0.lock();
        state.waiting.push(done);
        !std::mem::replace(&mut state.is_running, true)
    }

    /// The callers of the next pass; none ends the passes.
    fn next(&self) -> Vec<Done> {
        let mut state = self.0.lock();
        state.is_running = !state.waiting.is_empty();
        std::mem::take(&mut state.waiting)
    }
}

impl Front {
    /// Makes everything durable that was done before, of all files: sync(2), of this volume alone.
    pub fn sync_all(self: &Arc<Self>, done: impl FnOnce(Result<(), FsError>) + Send + 'static) {
        let front = self.clone();
        let sync = move || {
            if front.syncs.add(Box::new(done)) {
                let general = front.general.clone();
                general.run(move || front.run_syncs());
            }
        };
        if self.mount_state.is_read_only() { self.mount_state.after_unseen_writes(sync) } else { sync() }
    }

    fn run_syncs(&self) {
        loop {
            let callers = self.syncs.next();
            if callers.is_empty() {
                return;
            }
            let flushed = self.fs.flush_all();
            let synced = self.fs.commit().and(flushed);
            callers.into_iter().for_each(|done| done(synced.clone()));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn callers_share_the_pass_that_begins_after_they_came() {
        let syncs = Syncs::default();
        assert!(syncs.add(Box::new(|_| ())), "the first begins a pass");
        assert_eq!(syncs.next().len(), 1);
        assert!(!syncs.add(Box::new(|_| ())) && !syncs.add(Box::new(|_| ())), "these wait for the next");
        assert_eq!(syncs.next().len(), 2);
        assert!(syncs.next().is_empty());
        assert!(syncs.add(Box::new(|_| ())), "none is going on any more");
    }
}
