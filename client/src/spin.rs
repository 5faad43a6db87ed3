//! Waiting for an event that is expected soon: the thread spins, and yields now and then, before it
//! sleeps.
//!
//! It guards against two costs: being woken takes longer than looking for some microseconds, and a
//! thread that looks must not keep a processor from the thread that it waits for.

use std::time::{Duration, Instant};

/// Looks before the processor is offered to others, and the clock is asked: about a microsecond.
const LOOKS: u32 = 16;

/// The time since something happened last.
#[derive(Debug)]
pub(crate) struct Spin {
    since: Instant,
    now: Instant,
    looks: u32,
}

impl Spin {
    /// Begins now.
    pub fn new() -> Spin {
        let now = Instant::now();
        Spin { since: now, now, looks: 0 }
    }

    /// Begins anew, because something happened.
    pub fn restart(&mut self) {
        *self = Spin::new();
    }

    /// When it began.
    pub fn since(&self) -> Instant {
        self.since
    }

    /// The time, as it was about a microsecond ago at most while this is asked in turns with
    /// [`Spin::goes_on`].
    pub fn now(&self) -> Instant {
        self.now
    }

    /// Asks the clock, after a sleep.
    pub fn look_at_clock(&mut self) {
        self.now = Instant::now();
    }

    /// Lets a moment pass. False once `limit` has passed since the start: the caller then does
    /// better to sleep.
    pub fn goes_on(&mut self, limit: Duration) -> bool {
        self.looks = self.looks.wrapping_add(1);
        if self.looks.is_multiple_of(LOOKS) {
            std::thread::yield_now();
            self.now = Instant::now();
        } else {
            std::hint::spin_loop();
        }
        self.now.duration_since(self.since) < limit
    }
}
