//! The figures of a run, and their form in a file that is kept.

use super::load::Operation;
use crate::report::{self, Failure};
use gpunvme::{Moved, Route};
use serde_json::{Value, json};
use std::path::Path;

/// The version of the form. Fields may be added; one that changes its meaning raises it.
const VERSION: u64 = 1;

pub struct Run {
    pub device: String,
    pub daemon: String,
    pub memory: String,
    /// Of the file, in bytes.
    pub length: u64,
    /// Bytes that were written to the volume in all.
    pub written: u64,
    pub rows: Vec<Row>,
}

/// What was measured of one operation.
pub struct Row {
    pub operation: Operation,
    /// Of a request, in bytes.
    pub size: u64,
    pub threads: u16,
    pub figures: Figures,
}

/// Latencies are seconds, by the part of the requests that took no longer.
pub struct Figures {
    pub requests: u64,
    pub seconds: f64,
    pub moved: Moved,
    pub p50: f64,
    pub p90: f64,
    pub p99: f64,
    pub p999: f64,
    pub max: f64,
}

impl Figures {
    pub fn route(&self) -> Route {
        report::route(&self.moved)
    }
}

impl Row {
    pub fn gb_per_s(&self) -> f64 {
        self.figures.moved.total() as f64 / self.figures.seconds / 1e9
    }

    fn json(&self) -> Value {
        let Figures { requests, seconds, ref moved, p50, p90, p99, p999, max } = self.figures;
        json!({
            "operation": self.operation.name(),
            "size": self.size,
            "threads": self.threads,
            "requests": requests,
            "seconds": seconds,
            "gb_per_s": self.gb_per_s(),
            "route": self.figures.route().name(),
            "bytes_by_route": report::routes_json(moved),
            "latency": { "p50": p50, "p90": p90, "p99": p99, "p999": p999, "max": max },
        })
    }

    fn of(json: &Value) -> Option<Row> {
        let operation = match json["operation"].as_str()? {
            "read" => Operation::Read,
            "write" => Operation::Write,
            _ => return None,
        };
        let bytes = |route: &str| json["bytes_by_route"][route].as_u64();
        let latency = |part: &str| json["latency"][part].as_f64();
        Some(Row {
            operation,
            size: json["size"].as_u64()?,
            threads: json["threads"].as_u64()?.try_into().ok()?,
            figures: Figures {
                requests: json["requests"].as_u64()?,
                seconds: json["seconds"].as_f64().filter(|seconds| *seconds > 0.0)?,
                moved: Moved {
                    p2p: bytes("p2p")?,
                    bounce: bytes("bounce")?,
                    cache: bytes("cache")?,
                    host: bytes("host")?,
                    hole: bytes("hole")?,
                    edge: bytes("edge")?,
                },
                p50: latency("p50")?,
                p90: latency("p90")?,
                p99: latency("p99")?,
                p999: latency("p999")?,
                max: latency("max")?,
            },
        })
    }
}

impl Run {
    pub fn json(&self) -> Value {
        json!({
            "version": VERSION,
            "device": self.device,
            "daemon": self.daemon,
            "memory": self.memory,
            "length": self.length,
            "written": self.written,
            "results": self.rows.iter().map(Row::json).collect::<Vec<_>>(),
        })
    }

    /// The run that a file keeps.
    pub fn load(path: &Path) -> Result<Run, Failure> {
        let failed = |why: String| Failure(format!("{}: {why}", path.display()));
        let text = std::fs::read(path).map_err(|error| failed(error.to_string()))?;
        let json = serde_json::from_slice(&text).map_err(|error| failed(format!("is not JSON: {error}")))?;
        Run::of(&json).ok_or_else(|| failed("does not hold the figures of `gpunvme bench` in a form that is known here".into()))
    }

    fn of(json: &Value) -> Option<Run> {
        let text = |name: &str| json[name].as_str().map(str::to_owned);
        (json["version"].as_u64()? == VERSION).then_some(())?;
        Some(Run {
            device: text("device")?,
            daemon: text("daemon")?,
            memory: text("memory")?,
            length: json["length"].as_u64()?,
            written: json["written"].as_u64()?,
            rows: json["results"].as_array()?.iter().map(Row::of).collect::<Option<_>>()?,
        })
    }

    /// The row that measured the same.
    pub fn like(&self, row: &Row) -> Option<&Row> {
        self.rows.iter().find(|other| (other.operation, other.size, other.threads) == (row.operation, row.size, row.threads))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_that_is_kept_comes_back() {
        let moved = Moved { host: 8 << 20, edge: 4096, ..Moved::default() };
        let figures = Figures { requests: 7, seconds: 0.5, moved, p50: 1e-5, p90: 2e-5, p99: 3e-5, p999: 4e-5, max: 5e-5 };
        let row = Row { operation: Operation::Write, size: 4096, threads: 3, figures };
        let text = |text: &str| text.to_owned();
        let run = Run {
            device: text("sim:x"),
            daemon: text("mount.gpunvme 0.1.0"),
            memory: text("host"),
            length: 1 << 30,
            written: 2 << 30,
            rows: vec![row],
        };
        let json = run.json();
        assert_eq!(json["results"][0]["route"], "host");
        let again = Run::of(&json).unwrap();
        assert_eq!(again.json(), json);
        assert!(again.like(&run.rows[0]).is_some());
        for name in ["version", "device", "results", "length"] {
            let mut wrong = json.clone();
            wrong[name] = Value::Null;
            assert!(Run::of(&wrong).is_none(), "{name}");
        }
        let mut later = json.clone();
        later["version"] = json!(VERSION + 1);
        assert!(Run::of(&later).is_none());
    }
}
