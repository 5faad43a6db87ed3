//! Counters of what the direct path did since mount. They guard the promise that nothing falls
//! back in silence: whatever was moved, and however, is in them.

use crate::registry::Usage;
use gpunvme_abi::{self as abi, Command, Direction, Moved, REASON_SLOTS, Reason, Route};
use gpunvme_metrics::activity::{Activity, Actor, Done};
use gpunvme_metrics::{Begun, Ended, Meter, Reading};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Threads that count at once rarely meet in one of so many shards.
const SHARDS: usize = 16;

/// The routes that transfers of the daemon take.
const ROUTES: [Route; 3] = [Route::P2p, Route::Bounce, Route::Host];

/// Commands that can be counted: as many as [`abi::Stats`] has room for.
const CALLS: usize = 20;

/// The counters. Each is exact; together they are of no one moment.
#[derive(Debug)]
pub struct Stats {
    shards: [Shard; SHARDS],
    /// Transfers, by direction and route.
    transfers: Meter,
}

/// The counts of some threads. A processor that counts does not take the next one's memory from
/// another processor.
#[derive(Debug)]
#[repr(align(64))]
struct Shard {
    calls: [AtomicU64; CALLS],
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

impl Default for Stats {
    fn default() -> Self {
        Stats { shards: Default::default(), transfers: Meter::new(2 * ROUTES.len()) }
    }
}

impl Stats {
    fn shard(&self) -> &Shard {
        gpunvme_metrics::shard(&self.shards)
    }

    /// Counts `count` transfers by this route that begin.
    pub(crate) fn begin(&self, direction: Direction, route: Route, count: u64) -> Begun {
        let route = ROUTES.iter().position(|other| *other == route).unwrap_or(ROUTES.len() - 1);
        let first = if direction == Direction::Read { 0 } else { ROUTES.len() };
        self.transfers.begin(first + route, count)
    }

    /// Counts the end of `count` transfers that were counted together when they began.
    pub(crate) fn end(&self, begun: Begun, count: u64, moved: &Moved, failed: bool) {
        self.transfers.end(begun, Ended { count, bytes: moved.total(), failed });
    }

    /// Adds what an actor had moved, while that is watched.
    pub(crate) fn moved_by(&self, direction: Direction, moved: &Moved, begun: Begun, actor: impl FnOnce() -> Actor) {
        let activity = &self.transfers.activity;
        if activity.is_watched() {
            let (read, written) = if direction == Direction::Read { (moved.total(), 0) } else { (0, moved.total()) };
            let nanoseconds = u64::try_from(begun.elapsed().as_nanos()).unwrap_or(u64::MAX);
            activity.add(actor(), Done { operations: 1, read, written, nanoseconds });
        }
    }

    /// Who has transfers done.
    pub fn activity(&self) -> &Activity {
        &self.transfers.activity
    }

    /// Transfers by direction and route, and how long they took.
    pub fn transfers(&self) -> impl Iterator<Item = (Direction, Route, Reading)> {
        let kinds = [Direction::Read, Direction::Write].into_iter().flat_map(|direction| ROUTES.map(|route| (direction, route)));
        kinds.enumerate().map(|(kind, (direction, route))| (direction, route, self.transfers.read(kind)))
    }

    /// Counts a call, when it is answered.
    pub fn call(&self, command: Command, failed: bool) {
        self.calls(command, 1);
        add(&self.shard().failed, failed.into());
    }

    /// Counts calls that did not fail.
    pub(crate) fn calls(&self, command: Command, count: u64) {
        self.shard().calls[command as usize].fetch_add(count, Relaxed);
    }

    /// Counts what `count` transfers moved.
    pub fn moved(&self, direction: Direction, count: u64, moved: &Moved, reason: Reason) {
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
        shard.reasons[reason as usize].fetch_add(count, Relaxed);
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
            more_calls: std::array::from_fn(|at| self.sum(|shard| &shard.calls[16 + at])),
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
        self.shards.iter().map(|shard| counter(shard).load(Relaxed)).sum()
    }
}

/// Adds to a counter; most counts are 0.
fn add(counter: &AtomicU64, count: u64) {
    if count > 0 {
        counter.fetch_add(count, Relaxed);
    }
}
