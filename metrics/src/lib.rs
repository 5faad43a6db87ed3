//! Counts of operations, and histograms of how long they took, which any number of threads add to
//! at once.
//!
//! It guards the operations' speed: a count costs some tens of nanoseconds, takes no lock, and no
//! processor takes another one's memory for it as a rule.
#![forbid(unsafe_code)]

pub mod activity;

use activity::Activity;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// Buckets of a histogram. Bucket `n` counts what took at most [`upper_bound`]`(n)`; the last one
/// all that took longer than the bound of the one before.
pub const BUCKETS: usize = 24;

/// The longest duration that bucket `n` counts: 1.024 µs, and twice as much with each further one;
/// `None` for the last, which has no bound.
pub const fn upper_bound(bucket: usize) -> Option<Duration> {
    if bucket + 1 < BUCKETS { Some(Duration::from_nanos(1 << (bucket + 10))) } else { None }
}

/// Threads that count at once rarely meet in one of so many shards.
const SHARDS: usize = 16;

thread_local! {
    static SHARD: usize = {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        NEXT.fetch_add(1, Relaxed) % SHARDS
    };
}

/// The shard in which this thread counts, of `shards`.
pub fn shard<T>(shards: &[T]) -> &T {
    &shards[shard_number(shards.len())]
}

/// The number of this thread's shard, of `shards` of them, at least one.
pub fn shard_number(shards: usize) -> usize {
    SHARD.with(|shard| shard % shards)
}

/// One number that many threads count up.
#[derive(Debug, Default)]
pub struct Count([Line; SHARDS]);

/// A line of memory of its own.
#[derive(Debug, Default)]
#[repr(align(64))]
struct Line(AtomicU64);

impl Count {
    /// Counts one more.
    pub fn increment(&self) {
        shard(&self.0).0.fetch_add(1, Relaxed);
    }

    /// What was counted.
    pub fn read(&self) -> u64 {
        self.0.iter().map(|line| line.0.load(Relaxed)).sum()
    }
}

/// Counters of operations, by kinds that the one who counts numbers.
#[derive(Debug)]
pub struct Meter {
    shards: Vec<Vec<Cell>>,
    /// Who does them.
    pub activity: Activity,
}

/// What one shard counted of one kind. A cell begins a line of memory of its own.
#[derive(Debug, Default)]
#[repr(align(64))]
struct Cell {
    begun: AtomicU64,
    failed: AtomicU64,
    bytes: AtomicU64,
    nanoseconds: AtomicU64,
    buckets: [AtomicU64; BUCKETS],
}

/// What was counted of a kind. Each number is exact; together they are of no one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reading {
    /// Operations begun.
    pub begun: u64,
    /// Operations that ended with an error.
    pub failed: u64,
    /// Bytes that they moved.
    pub bytes: u64,
    /// How long all that ended took, added up, in nanoseconds.
    pub nanoseconds: u64,
    /// Operations that ended, by how long they took ([`upper_bound`]).
    pub buckets: [u64; BUCKETS],
}

/// An operation that is going on.
#[derive(Clone, Copy, Debug)]
pub struct Begun {
    kind: usize,
    since: Instant,
}

/// How operations of one kind ended that began together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ended {
    /// How many.
    pub count: u64,
    /// Bytes that they moved.
    pub bytes: u64,
    /// Whether one of them failed.
    pub failed: bool,
}

impl Begun {
    /// Its kind; 0 where it was none of the meter's.
    pub fn kind(&self) -> usize {
        self.kind
    }

    /// How long it has gone on.
    pub fn elapsed(&self) -> Duration {
        self.since.elapsed()
    }
}

impl Meter {
    /// A meter of `kinds` kinds, numbered from 0.
    pub fn new(kinds: usize) -> Meter {
        let cells = || (0..kinds).map(|_| Cell::default()).collect();
        Meter { shards: (0..SHARDS).map(|_| cells()).collect(), activity: Activity::default() }
    }

    /// Counts `count` operations of a kind that begin now. What is no kind of the meter counts as
    /// kind 0.
    pub fn begin(&self, kind: usize, count: u64) -> Begun {
        let cells = shard(&self.shards);
        let kind = if kind < cells.len() { kind } else { 0 };
        if let Some(cell) = cells.get(kind) {
            cell.begun.fetch_add(count, Relaxed);
        }
        Begun { kind, since: Instant::now() }
    }

    /// Counts the end of operations that began together.
    pub fn end(&self, begun: Begun, ended: Ended) {
        let Some(cell) = shard(&self.shards).get(begun.kind) else { return };
        let took = u64::try_from(begun.since.elapsed().as_nanos()).unwrap_or(u64::MAX);
        cell.nanoseconds.fetch_add(took.saturating_mul(ended.count), Relaxed);
        cell.buckets[bucket(took)].fetch_add(ended.count, Relaxed);
        if ended.bytes > 0 {
            cell.bytes.fetch_add(ended.bytes, Relaxed);
        }
        if ended.failed {
            cell.failed.fetch_add(1, Relaxed);
        }
    }

    /// What was counted of a kind.
    pub fn read(&self, kind: usize) -> Reading {
        let mut sum = Reading::default();
        for cell in self.shards.iter().filter_map(|cells| cells.get(kind)) {
            // The ends first: no more end than have begun.
            for (total, bucket) in sum.buckets.iter_mut().zip(&cell.buckets) {
                *total += bucket.load(Relaxed);
            }
            sum.failed += cell.failed.load(Relaxed);
            sum.bytes += cell.bytes.load(Relaxed);
            sum.nanoseconds = sum.nanoseconds.wrapping_add(cell.nanoseconds.load(Relaxed));
        }
        sum.begun = self.shards.iter().filter_map(|cells| cells.get(kind)).map(|cell| cell.begun.load(Relaxed)).sum();
        sum
    }
}

/// The bucket of a duration in nanoseconds.
fn bucket(took: u64) -> usize {
    let bits = u64::BITS - took.saturating_sub(1).leading_zeros();
    (bits.saturating_sub(10) as usize).min(BUCKETS - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_counted_in_the_bucket_whose_bound_is_next() {
        assert_eq!([bucket(0), bucket(1), bucket(1024), bucket(1025), bucket(2048), bucket(2049)], [0, 0, 0, 1, 1, 2]);
        for number in 0..BUCKETS {
            match upper_bound(number) {
                Some(bound) => {
                    let bound = bound.as_nanos() as u64;
                    assert_eq!((bucket(bound), bucket(bound + 1)), (number, number + 1));
                }
                None => assert_eq!((number, bucket(u64::MAX)), (BUCKETS - 1, BUCKETS - 1)),
            }
        }
    }

    #[test]
    fn counts_of_many_threads_add_up() {
        let meter = Meter::new(3);
        std::thread::scope(|threads| {
            for _ in 0..20 {
                threads.spawn(|| {
                    for number in 0..100 {
                        let begun = meter.begin(1, 2);
                        meter.end(begun, Ended { count: 2, bytes: 10, failed: number == 7 });
                    }
                    meter.begin(2, 1);
                    let beyond = meter.begin(77, 1);
                    meter.end(beyond, Ended { count: 1, bytes: 0, failed: false });
                });
            }
        });
        let Reading { begun, failed, bytes, buckets, .. } = meter.read(1);
        assert_eq!((begun, failed, bytes, buckets.iter().sum::<u64>()), (4000, 20, 20_000, 4000));
        assert_eq!((meter.read(2).begun, meter.read(2).buckets.iter().sum::<u64>()), (20, 0));
        assert_eq!(meter.read(0).begun, 20);
        assert_eq!(meter.read(3), Reading::default());
    }
}
