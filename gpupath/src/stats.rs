//! Counters of what the direct path did since mount. They guard the promise that nothing falls back in silence: whatever was moved, and however, is
//! in them.

use crate::abi::{self, Command, Moved, REASON_SLOTS, Reason};
use crate::planner::Direction;
use crate::registry::Usage;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// The counters. Each is exact; together they are of no one moment.
#[derive(Debug)]
pub struct Stats {
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

impl Default for Stats {
    fn default() -> Self {
        Stats {
            calls: Default::default(),
            failed: AtomicU64::new(0),
            read: Counters::default(),
            write: Counters::default(),
            reasons: std::array::from_fn(|_| AtomicU64::new(0)),
        }
    }
}

impl Stats {
    /// Counts a call, when it is answered.
    pub fn call(&self, command: Command, failed: bool) {
        self.calls[command as usize].fetch_add(1, Relaxed);
        self.failed.fetch_add(failed.into(), Relaxed);
    }

    /// Counts what a transfer moved.
    pub fn moved(&self, direction: Direction, moved: &Moved, reason: Reason) {
        let counters = match direction {
            Direction::Read => &self.read,
            Direction::Write => &self.write,
        };
        for (counter, bytes) in [
            (&counters.p2p, moved.p2p),
            (&counters.bounce, moved.bounce),
            (&counters.host, moved.host),
            (&counters.hole, moved.hole),
            (&counters.edge, moved.edge),
        ] {
            counter.fetch_add(bytes, Relaxed);
        }
        self.reasons[reason as usize].fetch_add(1, Relaxed);
    }

    /// All of them, as `STATS` reports them.
    pub fn snapshot(&self, usage: Usage) -> abi::Stats {
        let load = |counters: &Counters| Moved {
            p2p: counters.p2p.load(Relaxed),
            bounce: counters.bounce.load(Relaxed),
            host: counters.host.load(Relaxed),
            hole: counters.hole.load(Relaxed),
            edge: counters.edge.load(Relaxed),
        };
        abi::Stats {
            calls: std::array::from_fn(|at| self.calls[at].load(Relaxed)),
            failed: self.failed.load(Relaxed),
            read: load(&self.read),
            write: load(&self.write),
            buffers: usage.buffers,
            buffer_bytes: usage.bytes,
            processes: usage.processes,
            reasons: std::array::from_fn(|at| self.reasons[at].load(Relaxed)),
            ..abi::Stats::default()
        }
    }
}
