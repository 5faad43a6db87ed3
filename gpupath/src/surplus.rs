//! Threads of a pool that it does not need. Threads take tasks in turns, so that none is idle for
//! long where there is a task now and then: what counts is how many were idle all the time.

use std::time::{Duration, Instant};

/// How many threads of a pool can end.
#[derive(Debug, Default)]
pub struct Surplus {
    /// The lowest number of idle threads since `since`.
    least_idle: usize,
    since: Option<Instant>,
    /// Threads to end: so many had nothing to do for a while, whichever they were.
    threads: usize,
}

impl Surplus {
    /// Notes that so many threads are idle, now that one has taken a task.
    pub fn note(&mut self, idle: usize) {
        self.least_idle = self.least_idle.min(idle);
    }

    /// Whether a thread that has nothing to do ends, beside `idle` others: that many had nothing to
    /// do for as long as `while_idle`, and the pool `may_lose` one. It counts as ended then.
    pub fn ends(&mut self, idle: usize, while_idle: Duration, may_lose: bool) -> bool {
        let since = *self.since.get_or_insert_with(Instant::now);
        if since.elapsed() > while_idle {
            (self.threads, self.least_idle, self.since) = (self.least_idle, idle, Some(Instant::now()));
        }
        let ends = self.threads > 0 && may_lose;
        self.threads -= usize::from(ends);
        ends
    }
}
