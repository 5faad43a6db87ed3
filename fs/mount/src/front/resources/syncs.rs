//! The callers that wait until everything is durable. All who ask while one pass is going on share
//! the next, so that no number of callers takes more than one thread, or the device from others.

use gpunvme_engine::error::FsError;
use parking_lot::Mutex;

pub(crate) type Done = Box<dyn FnOnce(Result<(), FsError>) + Send>;

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
    pub fn add(&self, done: Done) -> bool {
        let mut state = self.0.lock();
        state.waiting.push(done);
        !std::mem::replace(&mut state.is_running, true)
    }

    /// The callers of the next pass; none ends the passes.
    pub fn next(&self) -> Vec<Done> {
        let mut state = self.0.lock();
        state.is_running = !state.waiting.is_empty();
        std::mem::take(&mut state.waiting)
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
