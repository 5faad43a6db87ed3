//! What a mount counted, in the text format of Prometheus (version 0.0.4 of the exposition
//! format): base units, a line of help and one of type for each metric, and the histograms
//! cumulative.

use super::Reading;
use crate::report;
use gpunvme::{Moved, OperationKind, Operations};
use std::fmt::{Display, Write};
use std::path::Path;

/// The type of the text, for HTTP.
pub const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Samples under construction.
#[derive(Default)]
struct Text(String);

impl Text {
    /// Begins a metric.
    fn metric(&mut self, name: &str, kind: &str, help: &str) {
        // Writing to a String cannot fail.
        let _ = write!(self.0, "# HELP {name} {help}\n# TYPE {name} {kind}\n");
    }

    fn sample(&mut self, name: &str, labels: &[(&str, &str)], value: impl Display) {
        let labels: Vec<_> = labels.iter().map(|(name, value)| format!("{name}=\"{}\"", escaped(value))).collect();
        let _ = writeln!(self.0, "{name}{{{}}} {value}", labels.join(","));
    }
}

/// The value of a label.
fn escaped(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

/// Everything that was counted of some mounts, and of each whether it could be asked.
pub fn text(read: &[(&Path, Result<Reading, String>)]) -> String {
    let mut text = Text::default();
    text.metric("gpunvme_up", "gauge", "Whether the mount answers.");
    for (mount, reading) in read {
        text.sample("gpunvme_up", &[("mount", &mount.to_string_lossy())], u8::from(reading.is_ok()));
    }
    let readings: Vec<_> = read.iter().filter_map(|(_, reading)| reading.as_ref().ok()).collect();
    let uuids: Vec<_> = readings.iter().map(|reading| report::uuid(&reading.info.uuid)).collect();
    let mounts: Vec<_> = readings.into_iter().zip(&uuids).collect();
    let mut plain = |name: &str, kind: &str, help: &str, value: &dyn Fn(&Reading) -> String| {
        text.metric(name, kind, help);
        for (reading, uuid) in &mounts {
            text.sample(name, &[("device", &reading.info.device), ("uuid", uuid)], value(reading));
        }
    };
    let number = |value: u64| value.to_string();
    plain("gpunvme_uptime_seconds", "gauge", "Time since the daemon began to serve.", &|of| {
        of.metrics.uptime.as_secs_f64().to_string()
    });
    plain("gpunvme_capacity_bytes", "gauge", "What the volume can hold.", &|of| number(of.metrics.capacity));
    plain("gpunvme_free_bytes", "gauge", "What of it is free.", &|of| number(of.metrics.free));
    plain("gpunvme_write_buffer_bytes", "gauge", "What of the write buffer is in use.", &|of| number(of.metrics.dirty));
    plain("gpunvme_cache_bytes", "gauge", "Metadata in the cache.", &|of| number(of.metrics.cache_bytes));
    plain("gpunvme_cache_lookups_total", "counter", "Blocks of metadata looked for in the cache.", &|of| {
        number(of.metrics.cache_lookups)
    });
    plain("gpunvme_cache_misses_total", "counter", "Blocks of metadata that were not in the cache.", &|of| {
        number(of.metrics.cache_misses)
    });
    plain("gpunvme_rings", "gauge", "Rings that there are.", &|of| number(of.metrics.rings));
    plain("gpunvme_buffers", "gauge", "Buffers registered.", &|of| number(of.stats.buffers));
    plain("gpunvme_buffer_bytes", "gauge", "Bytes in registered buffers.", &|of| number(of.stats.buffer_bytes));
    plain("gpunvme_processes", "gauge", "Processes that have registered buffers.", &|of| number(of.stats.processes));
    plain("gpunvme_call_errors_total", "counter", "Calls of the direct path that failed.", &|of| number(of.stats.failed));

    text.metric("gpunvme_calls_total", "counter", "Calls of the direct path.");
    for (reading, uuid) in &mounts {
        for (command, count) in &reading.stats.calls {
            let labels = [("device", reading.info.device.as_str()), ("uuid", uuid), ("command", command)];
            text.sample("gpunvme_calls_total", &labels, count);
        }
    }
    text.metric("gpunvme_moved_bytes_total", "counter", "Bytes moved by the direct path, by the way they took.");
    for (reading, uuid) in &mounts {
        for (direction, moved) in [("read", &reading.stats.read), ("write", &reading.stats.write)] {
            for (route, bytes) in by_the_daemon(moved) {
                let labels =
                    [("device", reading.info.device.as_str()), ("uuid", uuid), ("direction", direction), ("route", route)];
                text.sample("gpunvme_moved_bytes_total", &labels, bytes);
            }
        }
    }
    text.metric("gpunvme_transfer_reasons_total", "counter", "Transfers, by the reason why they took no faster route.");
    for (reading, uuid) in &mounts {
        for (reason, count) in &reading.stats.reasons {
            let labels = [("device", reading.info.device.as_str()), ("uuid", uuid), ("reason", reason.name())];
            text.sample("gpunvme_transfer_reasons_total", &labels, count);
        }
    }
    for (kind, name, what) in [
        (OperationKind::Request, "request", "Requests of the kernel"),
        (OperationKind::Transfer, "transfer", "Transfers of the direct path"),
        (OperationKind::Device, "device", "Requests to the device"),
    ] {
        operations(&mut text, &mounts, kind, name, what);
    }
    text.0
}

/// The ways that the daemon counts.
fn by_the_daemon(moved: &Moved) -> [(&'static str, u64); 5] {
    let Moved { p2p, bounce, host, hole, edge, .. } = *moved;
    [("p2p", p2p), ("bounce", bounce), ("host", host), ("hole", hole), ("edge", edge)]
}

/// Adds the samples of a metric that tell of operations with these labels.
type Sample = dyn Fn(&mut Text, &str, &[(&str, &str)], &Operations);

/// The metrics of one kind of operations.
fn operations(text: &mut Text, mounts: &[(&Reading, &String)], kind: OperationKind, name: &str, what: &str) {
    let mut each = |metric: &str, of_type: &str, help: &str, sample: &Sample| {
        let metric = format!("gpunvme_{name}_{metric}");
        text.metric(&metric, of_type, &format!("{what}: {help}"));
        for (reading, uuid) in mounts {
            for operations in reading.metrics.operations.iter().filter(|operations| operations.kind == kind) {
                let labels = [("device", reading.info.device.as_str()), ("uuid", uuid), ("operation", &operations.name)];
                sample(text, &metric, &labels, operations);
            }
        }
    };
    each("duration_seconds", "histogram", "how long they took.", &|text, metric, labels, operations| {
        let (bucket, mut below) = (format!("{metric}_bucket"), 0);
        for (at, count) in operations.buckets.iter().enumerate() {
            below += count;
            let bound = Operations::bound(at).map_or_else(|| "+Inf".into(), |bound| bound.as_secs_f64().to_string());
            text.sample(&bucket, &[labels, &[("le", bound.as_str())]].concat(), below);
        }
        text.sample(&format!("{metric}_sum"), labels, operations.time.as_secs_f64());
        text.sample(&format!("{metric}_count"), labels, below);
    });
    each("errors_total", "counter", "those that ended with an error.", &|text, metric, labels, operations| {
        text.sample(metric, labels, operations.failed);
    });
    each("bytes_total", "counter", "bytes that they moved.", &|text, metric, labels, operations| {
        text.sample(metric, labels, operations.bytes);
    });
    each("in_flight", "gauge", "those that are going on.", &|text, metric, labels, operations| {
        text.sample(metric, labels, operations.in_flight);
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_are_escaped() {
        let mut text = Text::default();
        text.sample("m", &[("device", "a\"b\\c\nd"), ("x", "y")], 7);
        assert_eq!(text.0, "m{device=\"a\\\"b\\\\c\\nd\",x=\"y\"} 7\n");
    }
}
