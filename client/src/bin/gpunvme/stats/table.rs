//! Operations as a table, in units for people or exact ones.

use crate::report;
use gpunvme::{Moved, OperationKind, Operations};
use std::fmt::Write;
use std::time::Duration;

/// How numbers are told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Units {
    /// Rounded, with a unit.
    Human,
    /// Bytes and nanoseconds, as they were counted.
    Exact,
}

impl Units {
    pub fn bytes(self, bytes: u64) -> String {
        match self {
            Units::Human => report::size(bytes),
            Units::Exact => format!("{bytes} bytes"),
        }
    }

    /// Bytes by route: only what there is.
    pub fn routes(self, moved: &Moved) -> String {
        let there = report::named(moved).into_iter().filter(|(_, bytes)| *bytes > 0);
        let parts: Vec<String> = there.map(|(name, bytes)| format!("{name} {}", self.bytes(bytes))).collect();
        if parts.is_empty() { "none".to_owned() } else { parts.join(", ") }
    }

    /// A number in a column of bytes.
    pub fn cell(self, bytes: u64) -> String {
        match self {
            Units::Human if bytes < 1024 => format!("{bytes} B"),
            Units::Human => report::size(bytes),
            Units::Exact => bytes.to_string(),
        }
    }

    pub fn count(self, count: u64) -> String {
        match (self, count) {
            (Units::Exact, _) | (Units::Human, 0..10_000) => count.to_string(),
            (Units::Human, 10_000..10_000_000) => format!("{:.1}k", count as f64 / 1e3),
            (Units::Human, 10_000_000..10_000_000_000) => format!("{:.1}M", count as f64 / 1e6),
            (Units::Human, _) => format!("{:.1}G", count as f64 / 1e9),
        }
    }

    fn time(self, time: Option<Duration>) -> String {
        let Some(time) = time else { return "-".into() };
        match (self, time.as_nanos()) {
            (Units::Exact, nanoseconds) => nanoseconds.to_string(),
            (Units::Human, nanoseconds @ 0..1000) => format!("{nanoseconds} ns"),
            (Units::Human, nanoseconds @ 1000..1_000_000) => format!("{:.1} us", nanoseconds as f64 / 1e3),
            (Units::Human, nanoseconds @ 1_000_000..1_000_000_000) => format!("{:.1} ms", nanoseconds as f64 / 1e6),
            (Units::Human, _) => format!("{:.1} s", time.as_secs_f64()),
        }
    }

    /// A part of a whole.
    pub fn share(self, part: u64, whole: u64) -> String {
        match self {
            Units::Exact => part.to_string(),
            Units::Human if whole == 0 => "none".into(),
            Units::Human => format!("{:.1} %", part as f64 * 100.0 / whole as f64),
        }
    }
}

/// How long a daemon has been there.
pub fn uptime(time: Duration, units: Units) -> String {
    let seconds = time.as_secs();
    match (units, seconds) {
        (Units::Exact, _) => format!("{} ns", time.as_nanos()),
        (_, 0..60) => format!("{seconds} s"),
        (_, 60..3600) => format!("{} min {} s", seconds / 60, seconds % 60),
        (_, 3600..86_400) => format!("{} h {} min", seconds / 3600, seconds % 3600 / 60),
        _ => format!("{} d {} h", seconds / 86_400, seconds % 86_400 / 3600),
    }
}

/// A table for each kind of operations, the most frequent first. With `over` it is what happened
/// in that time, and counts and bytes are those of a second.
pub fn of(all: &[Operations], units: Units, over: Option<Duration>) -> String {
    let kinds = [
        (OperationKind::Request, "requests of the kernel"),
        (OperationKind::Transfer, "transfers"),
        (OperationKind::Device, "device"),
    ];
    let mut text = String::new();
    for (kind, title) in kinds {
        let mut some: Vec<_> = all.iter().filter(|operations| operations.kind == kind).collect();
        some.retain(|operations| operations.begun > 0 || operations.ended() > 0);
        if some.is_empty() {
            continue;
        }
        some.sort_by_key(|operations| std::cmp::Reverse(operations.ended()));
        let (count, bytes) = if over.is_some() { ("a second", "bytes/s") } else { ("count", "bytes") };
        // Writing to a String cannot fail.
        let _ = writeln!(
            text,
            "\n{title:<24} {count:>10} {:>9} {bytes:>12} {:>10} {:>10} {:>10} {:>9}",
            "failed", "mean", "p50 <=", "p99 <=", "in flight"
        );
        for operations in some {
            let rate = |number: u64| over.map_or(number, |over| (number as f64 / over.as_secs_f64()).round() as u64);
            let _ = writeln!(
                text,
                "{:<24} {:>10} {:>9} {:>12} {:>10} {:>10} {:>10} {:>9}",
                operations.name,
                units.count(rate(operations.ended())),
                units.count(rate(operations.failed)),
                units.cell(rate(operations.bytes)),
                units.time(operations.mean()),
                units.time(operations.quantile(0.5)),
                units.time(operations.quantile(0.99)),
                units.count(operations.in_flight),
            );
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_units_or_none() {
        let human = [0, 9999, 10_000, 12_345_678, 98_765_432_100].map(|count| Units::Human.count(count));
        assert_eq!(human, ["0", "9999", "10.0k", "12.3M", "98.8G"]);
        let times = [999, 1024, 1_048_576, 2_147_483_648].map(|time| Units::Human.time(Some(Duration::from_nanos(time))));
        assert_eq!(times, ["999 ns", "1.0 us", "1.0 ms", "2.1 s"]);
        assert_eq!(
            (Units::Exact.count(12_345_678), Units::Exact.time(Some(Duration::from_micros(7)))),
            ("12345678".into(), "7000".into())
        );
        assert_eq!((Units::Human.share(3, 4), Units::Human.share(0, 0)), ("75.0 %".into(), "none".into()));
        let uptimes = [5, 65, 3700, 90_000].map(|seconds| uptime(Duration::from_secs(seconds), Units::Human));
        assert_eq!(uptimes, ["5 s", "1 min 5 s", "1 h 1 min", "1 d 1 h"]);
    }
}
