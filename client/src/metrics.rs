//! What a mount's daemon counted of operations, and how long they took.

use gpunvme_abi as abi;
use std::time::Duration;

/// Counters and histograms of a mount since its daemon began to serve, over all processes.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Metrics {
    /// Since the daemon began to serve.
    pub uptime: Duration,
    /// Bytes that the volume can hold.
    pub capacity: u64,
    /// Bytes of it that are free.
    pub free: u64,
    /// Bytes of the write buffer that are in use: most of them wait for the device.
    pub dirty: u64,
    /// Blocks of metadata that were looked for in the cache.
    pub cache_lookups: u64,
    /// Those of them that were not there.
    pub cache_misses: u64,
    /// Bytes of metadata in the cache.
    pub cache_bytes: u64,
    /// Rings that there are now.
    pub rings: u64,
    /// Operations, of each kind of which there were any.
    pub operations: Vec<Operations>,
}

/// Operations of one kind.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Operations {
    /// What they are.
    pub kind: OperationKind,
    /// Their name, as `lookup`, `read-host` or `flush`.
    pub name: String,
    /// Begun.
    pub begun: u64,
    /// Going on when it was read.
    pub in_flight: u64,
    /// Ended with an error. To the kernel's requests an error may be the right answer: ENOENT of
    /// a lookup is one.
    pub failed: u64,
    /// Bytes that they moved.
    pub bytes: u64,
    /// How long those that ended took, added up.
    pub time: Duration,
    /// Those that ended, by how long they took ([`Operations::bound`]).
    pub buckets: [u64; abi::METRIC_BUCKETS],
}

/// What operations are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum OperationKind {
    /// Requests of the kernel.
    Request,
    /// Transfers of the direct path, by direction and route. They end when they are answered.
    Transfer,
    /// Requests to the device. They took as long as the last that was submitted with them.
    Device,
    /// Of a later version than this library.
    Unknown,
}

impl Metrics {
    pub(crate) fn of(header: &abi::Metrics, entries: &[abi::Metric]) -> Metrics {
        Metrics {
            uptime: Duration::from_nanos(header.uptime),
            capacity: header.volume_bytes,
            free: header.free,
            dirty: header.dirty,
            cache_lookups: header.cache_lookups,
            cache_misses: header.cache_misses,
            cache_bytes: header.cache_bytes,
            rings: header.rings,
            operations: entries.iter().map(Operations::of).collect(),
        }
    }
}

impl Operations {
    fn of(metric: &abi::Metric) -> Operations {
        const KINDS: [(abi::MetricKind, OperationKind); 3] = [
            (abi::MetricKind::Request, OperationKind::Request),
            (abi::MetricKind::Transfer, OperationKind::Transfer),
            (abi::MetricKind::Device, OperationKind::Device),
        ];
        let kind =
            KINDS.into_iter().find(|(code, _)| *code as u32 == metric.kind).map_or(OperationKind::Unknown, |(_, kind)| kind);
        Operations {
            kind,
            name: abi::get_text(&metric.name),
            begun: metric.begun,
            in_flight: metric.begun.saturating_sub(metric.buckets.iter().sum()),
            failed: metric.failed,
            bytes: metric.bytes,
            time: Duration::from_nanos(metric.nanoseconds),
            buckets: metric.buckets,
        }
    }

    /// How many ended.
    pub fn ended(&self) -> u64 {
        self.buckets.iter().sum()
    }

    /// The longest duration that a bucket counts; `None` for the last, which has no bound.
    pub fn bound(bucket: usize) -> Option<Duration> {
        (bucket + 1 < abi::METRIC_BUCKETS).then(|| Duration::from_nanos(1024 << bucket))
    }

    /// How long they took on average; `None` where none ended.
    pub fn mean(&self) -> Option<Duration> {
        let nanoseconds = self.time.as_nanos().checked_div(u128::from(self.ended()))?;
        Some(Duration::from_nanos(u64::try_from(nanoseconds).unwrap_or(u64::MAX)))
    }

    /// How long this share of them took at most, by the bounds of the buckets: at most twice as
    /// long as it was. `None` where none ended, or it is more than the last bound.
    pub fn quantile(&self, share: f64) -> Option<Duration> {
        let wanted = (self.ended() as f64 * share).ceil().max(1.0) as u64;
        let mut count = 0;
        let bucket = self.buckets.iter().position(|bucket| {
            count += bucket;
            count >= wanted
        });
        bucket.and_then(Operations::bound)
    }

    /// What was counted since `earlier`, which was counted of the same mount.
    #[must_use]
    pub fn since(&self, earlier: &Operations) -> Operations {
        Operations {
            begun: self.begun.saturating_sub(earlier.begun),
            failed: self.failed.saturating_sub(earlier.failed),
            bytes: self.bytes.saturating_sub(earlier.bytes),
            time: self.time.saturating_sub(earlier.time),
            buckets: std::array::from_fn(|at| self.buckets[at].saturating_sub(earlier.buckets[at])),
            ..self.clone()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use zerocopy::FromZeros;

    fn operations(buckets: &[(usize, u64)]) -> Operations {
        let mut metric = abi::Metric { kind: 1, nanoseconds: 9000, ..abi::Metric::new_zeroed() };
        buckets.iter().for_each(|(at, count)| metric.buckets[*at] = *count);
        metric.begun = metric.buckets.iter().sum::<u64>() + 2;
        Operations::of(&metric)
    }

    #[test]
    fn quantiles_are_bounds_of_buckets() {
        let some = operations(&[(0, 90), (3, 9), (23, 1)]);
        let micros = |nanoseconds| Some(Duration::from_nanos(nanoseconds));
        assert_eq!((some.kind, some.ended(), some.in_flight, some.mean()), (OperationKind::Transfer, 100, 2, micros(90)));
        assert_eq!([some.quantile(0.5), some.quantile(0.9), some.quantile(0.91)], [micros(1024), micros(1024), micros(8192)]);
        assert_eq!((some.quantile(0.99), some.quantile(1.0)), (micros(8192), None));
        assert_eq!((operations(&[]).quantile(0.5), operations(&[]).mean()), (None, None));
        let later = operations(&[(0, 95), (3, 9), (23, 1)]);
        assert_eq!((later.since(&some).ended(), later.since(&some).in_flight), (5, 2));
    }
}
