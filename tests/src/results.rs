//! The results of a bench: one form for all of them, written with `--json` and kept in
//! `docs/performance/results`, from which `performance-pages` makes pages and plots.

use std::error::Error;
use std::fmt;
use std::fs;
use std::path::Path;
use std::process::Command;

use serde::{Deserialize, Serialize};

use crate::machine::Machine;

/// One run of a bench on one machine.
#[derive(Debug, Serialize, Deserialize)]
pub struct Run {
    /// Where, when and how.
    #[serde(flatten)]
    pub about: About,
    /// The figures.
    pub rows: Vec<Row>,
}

/// Where, when and how figures were taken.
#[derive(Debug, Serialize, Deserialize)]
pub struct About {
    /// The bench's name: `bench`, `bench-mount`, `bench-scale` or `bench-gpu`.
    pub bench: String,
    /// The machine, and the date.
    pub machine: Machine,
    /// The commit that was measured.
    pub commit: String,
    /// The command that was run.
    pub command: String,
    /// What a figure is: how long, how often, on how much.
    pub method: String,
}

/// What one subject did of one piece of work.
#[derive(Debug, Serialize, Deserialize)]
pub struct Row {
    /// The table that it belongs to.
    pub section: String,
    /// What was measured: `gpunvme`, or what it is compared with.
    pub subject: String,
    /// What it did.
    #[serde(flatten)]
    pub work: Work,
    /// The unit of the figures.
    pub unit: String,
    /// The median of the runs.
    pub median: f64,
    /// Lowest and highest of the runs, where they were kept.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub spread: Option<[f64; 2]>,
    /// How many runs, or samples, the median is of, where that is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub runs: Option<usize>,
}

/// A piece of work. What does not apply to it is absent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Work {
    /// Its name, as in "random read".
    pub work: String,
    /// Bytes of an operation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size: Option<u64>,
    /// Threads that do it at once.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub threads: Option<usize>,
    /// Operations that each thread has in flight.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub depth: Option<usize>,
}

impl Work {
    /// Work that has a name and nothing else.
    pub fn named(work: impl Into<String>) -> Self {
        Self { work: work.into(), size: None, threads: None, depth: None }
    }

    /// The same by so many threads.
    #[must_use]
    pub fn by(self, threads: usize) -> Self {
        Self { threads: Some(threads), ..self }
    }
}

impl fmt::Display for Work {
    /// As in "random read, 4 KiB, 2 threads, depth 32"; a depth of one goes without saying.
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let mut name = self.work.clone();
        if let Some(size) = self.size {
            name += &format!(", {}", bytes(size));
        }
        if let Some(threads) = self.threads {
            name += &format!(", {threads} thread{}", if threads == 1 { "" } else { "s" });
        }
        if let Some(depth) = self.depth.filter(|depth| *depth > 1) {
            name += &format!(", depth {depth}");
        }
        f.pad(&name)
    }
}

/// A size as people say it.
pub fn bytes(size: u64) -> String {
    match size {
        0..1024 => format!("{size} bytes"),
        1024..0x10_0000 => format!("{} KiB", size >> 10),
        _ => format!("{} MiB", size >> 20),
    }
}

/// Three significant digits, or all before the point.
pub fn significant(value: f64) -> String {
    match value {
        0.0..10.0 => format!("{value:.2}"),
        10.0..100.0 => format!("{value:.1}"),
        _ => format!("{value:.0}"),
    }
}

/// The middle of some values, or the mean of the two in the middle; None of none.
pub fn median(values: &[f64]) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let (low, high) = (sorted.get(sorted.len().checked_sub(1)? / 2)?, sorted.get(sorted.len() / 2)?);
    Some((low + high) / 2.0)
}

impl Row {
    /// A row from the results of some runs; None without any.
    pub fn of(section: &str, subject: &str, work: Work, unit: &str, runs: &[f64]) -> Option<Self> {
        let fold = |which: fn(f64, f64) -> f64| runs.iter().copied().reduce(which).map(rounded);
        Some(Self {
            section: section.into(),
            subject: subject.into(),
            work,
            unit: unit.into(),
            median: rounded(median(runs)?),
            spread: Some([fold(f64::min)?, fold(f64::max)?]),
            runs: Some(runs.len()),
        })
    }
}

/// To four significant digits: no bench has more.
fn rounded(value: f64) -> f64 {
    format!("{value:.3e}").parse().expect("a number that was just written")
}

impl Run {
    /// A run of this process's bench, whose images are described by `machine`.
    pub fn new(bench: &str, machine: Machine, method: String, rows: Vec<Row>) -> Self {
        let about = About { bench: bench.into(), machine, commit: commit(), command: command(bench), method };
        Self { about, rows }
    }

    /// Reads a run from a file.
    ///
    /// # Errors
    /// The file is missing, or is not of this form; the message names it.
    pub fn read(path: &Path) -> Result<Self, Box<dyn Error>> {
        let text = fs::read_to_string(path).map_err(|error| format!("{}: {error}", path.display()))?;
        serde_json::from_str(&text).map_err(|error| format!("{}: {error}", path.display()).into())
    }

    /// Writes it to a file, or to the standard output where `path` is `-`: a line for each row.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn write(&self, path: &Path) -> Result<(), Box<dyn Error>> {
        let about = serde_json::to_string_pretty(&self.about)?;
        let about = about.strip_suffix("\n}").ok_or("an object of several lines")?;
        let rows = self.rows.iter().map(serde_json::to_string).collect::<Result<Vec<_>, _>>()?;
        let text = format!("{about},\n  \"rows\": [\n    {}\n  ]\n}}\n", rows.join(",\n    "));
        if path == Path::new("-") {
            print!("{text}");
        } else {
            fs::write(path, text).map_err(|error| format!("{}: {error}", path.display()))?;
        }
        Ok(())
    }
}

/// The commit of this source, with `-dirty` where something was changed since.
fn commit() -> String {
    let output = Command::new("git")
        .args(["-c", "safe.directory=*", "-C", env!("CARGO_MANIFEST_DIR"), "describe", "--always", "--dirty"])
        .output();
    let text = output.map(|output| String::from_utf8_lossy(&output.stdout).trim().to_owned()).unwrap_or_default();
    if text.is_empty() { "unknown".into() } else { text }
}

/// The script that ran this process, with the arguments that change what it measures.
fn command(bench: &str) -> String {
    let mut words = vec![format!("scripts/{bench}")];
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--json" | "--peers" => drop(arguments.next()),
            _ if argument.starts_with("--json=") || argument.starts_with("--peers=") => {}
            _ if argument.contains(' ') => words.push(format!("\"{argument}\"")),
            _ => words.push(argument),
        }
    }
    words.join(" ")
}
