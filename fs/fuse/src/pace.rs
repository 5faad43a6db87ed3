//! How fast the kernel's requests follow each other: whether it is worth it for loops to spin until
//! the next one comes, instead of sleeping.
//!
//! A client that finds every loop asleep wakes one, and the loop's processor with it: longer than
//! most requests take. A loop that spins spares it that, and costs a processor. So loops spin only
//! while requests come within microseconds, as those of a client do that makes one after the other,
//! and only where there are many processors.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// How long loops spin after a request has come, or was served. A longer pause is a client's that
/// has other things to do.
const SPIN: Duration = Duration::from_micros(50);
/// Processors from which on loops spin: up to three do.
const PROCESSORS: usize = 16;
/// Points from which on requests count as fast. Each that comes soon after another is a point.
const FAST: u32 = 16;
const MOST_POINTS: u32 = 32;
/// Points that a longer pause costs.
const PAUSE: u32 = 8;

/// The pace of one mount's requests.
pub(crate) struct Pace {
    begin: Instant,
    /// When a request came or was served last, in nanoseconds since `begin`.
    last: AtomicU64,
    points: AtomicU32,
    is_watched: bool,
}

impl Pace {
    /// On a machine with so many processors.
    pub fn new(processors: usize) -> Pace {
        Pace { begin: Instant::now(), last: AtomicU64::new(0), points: AtomicU32::new(0), is_watched: processors >= PROCESSORS }
    }

    /// Notes that a request has come.
    pub fn request_came(&self) {
        if !self.is_watched {
            return;
        }
        let now = self.now();
        let gap = now.saturating_sub(self.last.swap(now, Ordering::Relaxed));
        let points = self.points.load(Ordering::Relaxed);
        let next = if gap < SPIN.as_nanos() as u64 { (points + 1).min(MOST_POINTS) } else { points.saturating_sub(PAUSE) };
        if next != points {
            self.points.store(next, Ordering::Relaxed);
        }
    }

    /// Notes that a request was served: its client goes on.
    pub fn request_served(&self) {
        if self.is_watched {
            self.last.store(self.now(), Ordering::Relaxed);
        }
    }

    /// Whether requests come fast.
    pub fn is_fast(&self) -> bool {
        self.points.load(Ordering::Relaxed) >= FAST
    }

    /// Whether requests come fast, and the last one was there so lately that the next may be near.
    pub fn is_next_near(&self) -> bool {
        self.is_fast() && self.now().saturating_sub(self.last.load(Ordering::Relaxed)) < SPIN.as_nanos() as u64
    }

    fn now(&self) -> u64 {
        self.begin.elapsed().as_nanos() as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    impl Pace {
        /// As if the last request had come so long ago.
        fn since(&self, time: Duration) {
            self.last.store(self.now().saturating_sub(time.as_nanos() as u64), Ordering::Relaxed);
        }
    }

    /// That of a mount older than any time that tests choose.
    fn pace(processors: usize) -> Pace {
        let mut pace = Pace::new(processors);
        pace.begin -= Duration::from_secs(1);
        pace
    }

    /// This thread may lose its processor in between, which looks like a pause.
    fn come_fast(pace: &Pace) {
        while pace.points.load(Ordering::Relaxed) < MOST_POINTS {
            pace.since(Duration::ZERO);
            pace.request_came();
        }
        assert!(pace.is_fast());
    }

    #[test]
    fn requests_are_fast_when_many_have_come_at_once_and_slow_after_some_pauses() {
        let pace = pace(16);
        come_fast(&pace);
        let mut pauses = 0;
        while pace.is_fast() {
            pace.since(SPIN * 2);
            pace.request_came();
            pauses += 1;
        }
        assert_eq!(pauses, 3);
        pace.since(Duration::ZERO);
        pace.request_came();
        assert!(!pace.is_fast(), "one request that comes soon says nothing");
    }

    #[test]
    fn the_next_request_is_near_for_a_while_only() {
        let pace = pace(16);
        come_fast(&pace);
        // This thread may lose its processor for longer than a loop spins.
        let near = (0..1000).any(|_| {
            pace.since(Duration::ZERO);
            pace.is_next_near()
        });
        assert!(near);
        pace.since(SPIN);
        assert!(!pace.is_next_near());
        assert!(pace.is_fast());
    }

    #[test]
    fn with_few_processors_nothing_is_fast() {
        let pace = pace(PROCESSORS - 1);
        for _ in 0..MOST_POINTS {
            pace.since(Duration::ZERO);
            pace.request_came();
        }
        assert!(!pace.is_fast());
    }
}
