//! A rate limit for messages that a client can cause as often as it likes: some are logged, the
//! rest is counted.

use parking_lot::Mutex;
use std::time::{Duration, Instant};

/// Time between two messages of one kind.
const PAUSE: Duration = Duration::from_secs(10);

/// One kind of message.
#[derive(Debug, Default)]
pub struct RateLimit(Mutex<LastLogged>);

#[derive(Debug, Default)]
struct LastLogged {
    last: Option<Instant>,
    left_out: u64,
}

impl RateLimit {
    /// Whether a message is to be logged now, and then how many were not since the last one.
    pub fn allow(&self) -> Option<u64> {
        self.allow_at(Instant::now())
    }

    fn allow_at(&self, now: Instant) -> Option<u64> {
        let mut state = self.0.lock();
        if state.last.is_some_and(|last| now.saturating_duration_since(last) < PAUSE) {
            state.left_out += 1;
            return None;
        }
        state.last = Some(now);
        Some(std::mem::take(&mut state.left_out))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_left_out_is_counted() {
        let (limit, start) = (RateLimit::default(), Instant::now());
        let said: Vec<_> = (0..1000).map(|at| limit.allow_at(start + PAUSE * at / 400)).collect();
        let logged: Vec<_> = said.iter().enumerate().filter_map(|(at, said)| said.map(|left_out| (at, left_out))).collect();
        assert_eq!(logged, [(0, 0), (400, 399), (800, 399)]);
    }
}
