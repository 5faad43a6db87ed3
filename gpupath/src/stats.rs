//! Counters of what the direct path did since mount. They guard the promise that nothing falls
//! back in silence: whatever was moved, and however, is in them.

use crate::registry::Usage;
use gpunvme_abi::{self as abi, Command, Direction, Moved, REASON_SLOTS, Reason};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};

/// Threads that count at once rarely meet in one of so many parts.
const PARTS: usize = 16;

thread_local! {
    /// The part in which this thread counts.
    static PART: usize = {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        NEXT.fetch_add(1, Relaxed) % PARTS
    };
}

/// The counters. Each is exact; together they are of no one moment.
#[derive(Debug, Default)]
pub struct Stats([Part; PARTS]);

/// The counts of some threads. A processor that counts does not take the next one's memory from
/// another processor.
#[derive(Debug)]
#[repr(align(64))]
struct Part {
    calls: [AtomicU64; 16],
    failed: AtomicU64,
    read: Counters,
    write: Counters,
    reasons: [AtomicU64; REASON_SLOTS],
}

#[derive(Debug, Default)]
struct Counters {
    p2p: AtomicU64,
    bounce: AtomicU64,
    host: AtomicU64,
    hole: AtomicU64,
    edge: AtomicU64,
}

impl Default for Part {
    fn default() -> Self {
        Part {
            calls: Default::default(),
            failed: AtomicU64::new(0),
            read: Counters::default(),
            write: Counters::default(),
            reasons: std::array::from_fn(|_| AtomicU64::new(0)),
        }
    }
}

impl Stats {
    fn part(&self) -> &Part {
        &self.0[PART.with(|part| *part)]
    }

    /// Counts a call, when it is answered.
    pub fn call(&self, command: Command, failed: bool) {
        let part = self.part();
        part.calls[command as usize].fetch_add(1, Relaxed);
        add(&part.failed, failed.into());
    }

    /// Counts what a transfer moved.
    pub fn moved(&self, direction: Direction, moved: &Moved, reason: Reason) {
        let part = self.part();
        let counters = match direction {
            Direction::Read => &part.read,
            Direction::Write => &part.write,
        };
        add(&counters.p2p, moved.p2p);
        add(&counters.bounce, moved.bounce);
        add(&counters.host, moved.host);
        add(&counters.hole, moved.hole);
        add(&counters.edge, moved.edge);
        part.reasons[reason as usize].fetch_add(1, Relaxed);
    }

    /// All of them, as `STATS` reports them.
    pub fn snapshot(&self, usage: Usage) -> abi::Stats {
        let moved = |counters: fn(&Part) -> &Counters| Moved {
            p2p: self.sum(|part| &counters(part).p2p),
            bounce: self.sum(|part| &counters(part).bounce),
            host: self.sum(|part| &counters(part).host),
            hole: self.sum(|part| &counters(part).hole),
            edge: self.sum(|part| &counters(part).edge),
        };
        abi::Stats {
            calls: std::array::from_fn(|at| self.sum(|part| &part.calls[at])),
            failed: self.sum(|part| &part.failed),
            read: moved(|part| &part.read),
            write: moved(|part| &part.write),
            buffers: usage.buffers,
            buffer_bytes: usage.bytes,
            processes: usage.processes,
            reasons: std::array::from_fn(|at| self.sum(|part| &part.reasons[at])),
            ..abi::Stats::default()
        }
    }

    fn sum<'a>(&'a self, counter: impl Fn(&'a Part) -> &'a AtomicU64) -> u64 {
        self.0.iter().map(|part| counter(part).load(Relaxed)).sum()
    }
}

/// Adds to a counter; most counts are 0.
fn add(counter: &AtomicU64, count: u64) {
    if count > 0 {
        counter.fetch_add(count, Relaxed);
    }
}
