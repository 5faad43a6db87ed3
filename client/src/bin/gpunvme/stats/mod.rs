//! The command `stats`: what a mount did since it was mounted; again and again (`--watch`), and for
//! Prometheus, once or by a listener.

mod clients;
mod listener;
mod prometheus;
mod readers;
pub mod table;
mod watch;

use crate::report::{self, Failure, Report};
use gpunvme::{Metrics, Mount, OperationKind, Operations};
use listener::Address;
use readers::Reader;
use serde_json::{Value, json};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use table::Units;

#[derive(clap::Args)]
pub struct Stats {
    /// The mount, or anything in it; several with --prometheus and --listen
    #[arg(required = true, value_name = "MOUNT")]
    mounts: Vec<PathBuf>,
    /// Print bytes and nanoseconds
    #[arg(long)]
    exact: bool,
    /// Print what happened in each of so many seconds, until it is interrupted
    #[arg(long, value_name = "SECONDS", num_args = 0..=1, default_missing_value = "1", require_equals = true,
          value_parser = clap::value_parser!(u32).range(1..=86400), conflicts_with_all = ["prometheus", "listen"])]
    watch: Option<u32>,
    /// With --watch, stop after so many times
    #[arg(long, value_name = "TIMES", requires = "watch", conflicts_with_all = ["prometheus", "listen"])]
    count: Option<u64>,
    /// Print in the text format of Prometheus
    #[arg(long, conflicts_with = "json")]
    prometheus: bool,
    /// Answer Prometheus at an address of this machine, such as 127.0.0.1:9108, or at a Unix
    /// socket, unix:PATH, until it is interrupted
    #[arg(long, value_name = "ADDRESS", conflicts_with_all = ["prometheus", "json"])]
    listen: Option<Address>,
}

/// What was read of a mount at one moment.
struct Reading {
    info: gpunvme::Info,
    stats: gpunvme::Stats,
    metrics: Metrics,
}

impl Reading {
    fn of(path: &Path) -> gpunvme::Result<Reading> {
        let mount = Mount::open(path)?;
        Ok(Reading { info: mount.info()?, stats: mount.stats()?, metrics: mount.metrics()? })
    }
}

pub fn run(stats: &Stats, json: bool) -> Result<Report, Failure> {
    if let Some(address) = &stats.listen {
        return listener::serve(address, &stats.mounts);
    }
    if stats.prometheus {
        exist(&stats.mounts)?;
        let readers = Reader::start(&stats.mounts)?;
        let mut report = Report::new(Value::Null);
        report.text = prometheus::text(&readers::read(&readers));
        return Ok(report);
    }
    let [mount] = stats.mounts.as_slice() else {
        return Err(Failure("several mounts go with --prometheus and --listen only".into()));
    };
    let units = if stats.exact { Units::Exact } else { Units::Human };
    match stats.watch {
        Some(seconds) => watch::run(mount, seconds, stats.count, units, json),
        None => Ok(summary(&Reading::of(mount)?, units)),
    }
}

/// Wrong names are told at once. A mount that is away is none.
fn exist(mounts: &[PathBuf]) -> Result<(), Failure> {
    mounts.iter().try_for_each(|mount| match fs::symlink_metadata(mount) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Err(Failure(format!("{}: {error}", mount.display()))),
        _ => Ok(()),
    })
}

/// Everything since the mount.
fn summary(Reading { info, stats, metrics }: &Reading, units: Units) -> Report {
    let calls: serde_json::Map<_, _> = stats.calls.iter().map(|(name, count)| ((*name).to_owned(), json!(count))).collect();
    let reasons: serde_json::Map<_, _> =
        stats.reasons.iter().map(|(reason, count)| (reason.name().to_owned(), json!(count))).collect();
    let mut report = Report::new(json!({
        "device": info.device,
        "uptime": metrics.uptime.as_secs_f64(),
        "calls": calls,
        "failed": stats.failed,
        "read": report::routes_json(&stats.read),
        "write": report::routes_json(&stats.write),
        "reasons": reasons,
        "buffers": stats.buffers,
        "buffer_bytes": stats.buffer_bytes,
        "processes": stats.processes,
        "rings": metrics.rings,
        "capacity": metrics.capacity,
        "free": metrics.free,
        "dirty": metrics.dirty,
        "cache": {
            "lookups": metrics.cache_lookups,
            "misses": metrics.cache_misses,
            "bytes": metrics.cache_bytes,
        },
        "requests": operations(metrics, OperationKind::Request),
        "transfers": operations(metrics, OperationKind::Transfer),
        "device_requests": operations(metrics, OperationKind::Device),
    }));
    report.line("device", &info.device);
    report.line("uptime", table::uptime(metrics.uptime, units));
    let (capacity, free) = (units.bytes(metrics.capacity), units.bytes(metrics.free));
    report.line("capacity", format!("{capacity}, {free} free; {} in the write buffer", units.bytes(metrics.dirty)));
    let hits = metrics.cache_lookups.saturating_sub(metrics.cache_misses);
    let share = units.share(hits, metrics.cache_lookups);
    report.line(
        "cache",
        format!(
            "{share} of {} lookups of metadata found, {} in it",
            units.count(metrics.cache_lookups),
            units.bytes(metrics.cache_bytes)
        ),
    );
    let counted = stats.calls.iter().filter(|(_, count)| *count > 0);
    let counted: Vec<_> = counted.map(|(name, count)| format!("{name} {}", units.count(*count))).collect();
    report.line("calls", format!("{}; {} failed", counted.join(", "), units.count(stats.failed)));
    report.line("read", format!("{}: {}", units.bytes(stats.read.total()), units.routes(&stats.read)));
    report.line("written", format!("{}: {}", units.bytes(stats.write.total()), units.routes(&stats.write)));
    let held = units.bytes(stats.buffer_bytes);
    report
        .line("buffers", format!("{} of {} processes, {held} in them; {} rings", stats.buffers, stats.processes, metrics.rings));
    for (reason, count) in &stats.reasons {
        report.line("reason", format!("{} ({} transfers)", report::reason(*reason), units.count(*count)));
    }
    report.text += &table::of(&metrics.operations, units, None);
    report
}

/// Operations of a kind, for programs: times in seconds.
fn operations(metrics: &Metrics, kind: OperationKind) -> serde_json::Map<String, Value> {
    let of_kind = metrics.operations.iter().filter(|operations| operations.kind == kind);
    of_kind.map(|operations| (operations.name.clone(), told(operations))).collect()
}

fn told(operations: &Operations) -> Value {
    json!({
        "count": operations.ended(),
        "failed": operations.failed,
        "in_flight": operations.in_flight,
        "bytes": operations.bytes,
        "seconds": operations.time.as_secs_f64(),
        "p50": operations.quantile(0.5).map(|time| time.as_secs_f64()),
        "p99": operations.quantile(0.99).map(|time| time.as_secs_f64()),
        "buckets": operations.buckets,
    })
}
