//! Counters of what the direct path did since mount. They guard the promise that nothing falls
//! back in silence: whatever was moved, and however, is in them.

use crate::registry::Usage;
use gpunvme_abi::{self as abi, Command, Direction, Moved, REASON_SLOTS, Reason};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};

/// Threads that count at once rarely meet in one of so many shards.
const SHARDS: usize = 16;

thread_local! {
    /// The shard in which this thread counts.
    static SHARD: usize = {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        NEXT.fetch_add(1, Relaxed) % SHARDS
    };
}

/// The counters. Each is exact; together they are of no one moment.
#[derive(Debug, Default)]
pub struct Stats([Shard; SHARDS]);

/// The counts of some threads. A processor that counts does not take the next one's memory from
/// another processor.
#[derive(Debug)]
#[repr(align(64))]
struct Shard {
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

impl Default for Shard {
    fn default() -> Self {
        Shard {
            calls: Default::default(),
            failed: AtomicU64::new(0),
            read: Counters::default(),
            write: Counters::default(),
            reasons: std::array::from_fn(|_| AtomicU64::new(0)),
        }
    }
}

impl Stats {
    fn shard(&self) -> &Shard {
        &self.0[SHARD.with(|shard| *shard)]
    }

    /// Counts a call, when it is answered.
    pub fn call(&self, command: Command, failed: bool) {
        let shard = self.shard();
        shard.calls[command as usize].fetch_add(1, Relaxed);
        add(&shard.failed, failed.into());
    }

    /// Counts what a transfer moved.
    pub fn moved(&self, direction: Direction, moved: &Moved, reason: Reason) {
        let shard = self.shard();
        let counters = match direction {
            Direction::Read => &shard.read,
            Direction::Write => &shard.write,
        };
        add(&counters.p2p, moved.p2p);
        add(&counters.bounce, moved.bounce);
        add(&counters.host, moved.host);
        add(&counters.hole, moved.hole);
        add(&counters.edge, moved.edge);
        shard.reasons[reason as usize].fetch_add(1, Relaxed);
    }

    /// All of them, as `STATS` reports them.
    pub fn snapshot(&self, usage: Usage) -> abi::Stats {
        let moved = |counters: fn(&Shard) -> &Counters| Moved {
            p2p: self.sum(|shard| &counters(shard).p2p),
            bounce: self.sum(|shard| &counters(shard).bounce),
            host: self.sum(|shard| &counters(shard).host),
            hole: self.sum(|shard| &counters(shard).hole),
            edge: self.sum(|shard| &counters(shard).edge),
        };
        abi::Stats {
            calls: std::array::from_fn(|at| self.sum(|shard| &shard.calls[at])),
            failed: self.sum(|shard| &shard.failed),
            read: moved(|shard| &shard.read),
            write: moved(|shard| &shard.write),
            buffers: usage.buffers,
            buffer_bytes: usage.bytes,
            processes: usage.processes,
            reasons: std::array::from_fn(|at| self.sum(|shard| &shard.reasons[at])),
            ..abi::Stats::default()
        }
    }

    fn sum<'a>(&'a self, counter: impl Fn(&'a Shard) -> &'a AtomicU64) -> u64 {
        self.0.iter().map(|shard| counter(shard).load(Relaxed)).sum()
    }
}

/// Adds to a counter; most counts are 0.
fn add(counter: &AtomicU64, count: u64) {
    if count > 0 {
        counter.fetch_add(count, Relaxed);
    }
}
