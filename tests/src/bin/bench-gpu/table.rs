//! Prints the measurements as tables and as JSON.

use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::process::Command;

use serde::Serialize;

use crate::Work;
use crate::run::Subject;

/// A table.
#[derive(Serialize)]
pub struct Table {
    pub backing: &'static str,
    pub rows: Vec<Row>,
}

/// A piece of work, and what each subject did of it.
#[derive(Serialize)]
pub struct Row {
    #[serde(rename = "work", serialize_with = "name")]
    work: Work,
    /// Operations a second.
    results: BTreeMap<Subject, Vec<f64>>,
    /// Why a subject has no result.
    errors: BTreeMap<Subject, String>,
}

fn name<S: serde::Serializer>(work: &Work, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_str(&work.name())
}

impl Row {
    pub fn new(work: Work) -> Row {
        Row { work, results: BTreeMap::new(), errors: BTreeMap::new() }
    }

    pub fn add(&mut self, subject: Subject, result: Result<f64, String>) {
        match result {
            Ok(rate) => self.results.entry(subject).or_default().push(rate),
            Err(error) => drop(self.errors.insert(subject, error)),
        }
    }

    fn median(&self, subject: Subject) -> Option<f64> {
        let mut runs = self.results.get(&subject)?.clone();
        runs.sort_by(f64::total_cmp);
        Some((runs[(runs.len() - 1) / 2] + runs[runs.len() / 2]) / 2.0)
    }

    fn of(&self, subjects: &[Subject]) -> String {
        let best = subjects.iter().filter_map(|&subject| self.median(subject)).max_by(f64::total_cmp);
        match (self.median(Subject::Gpunvme), best) {
            (Some(ours), Some(best)) => format!("{:.2}", ours / best),
            _ => "-".to_owned(),
        }
    }

    /// Thousands of operations a second for 4 KiB, GB/s for the rest.
    fn cell(&self, subject: Subject) -> String {
        match self.median(subject) {
            None if self.errors.contains_key(&subject) => "failed".to_owned(),
            None => String::new(),
            Some(rate) if self.work.size == 4096 => format!("{:.0}k", rate / 1e3),
            Some(rate) => format!("{:.2}", rate * self.work.size as f64 / 1e9),
        }
    }
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "| {:44} |", self.work.name())?;
        for subject in Subject::ALL {
            write!(f, " {:>12} |", self.cell(subject))?;
        }
        let ratios = [self.of(&[Subject::CuFile]), self.of(&Subject::DIRECT), self.of(&[Subject::Bare])];
        write!(f, " {:>9} | {:>12} | {:>7} |", ratios[0], ratios[1], ratios[2])
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        // Markdown, so that it can go into a document as it is.
        writeln!(f, "on {} (4 KiB: operations a second; the rest: GB/s)\n", self.backing)?;
        write!(f, "| {:44} |", "")?;
        for subject in Subject::ALL {
            write!(f, " {:>12} |", subject.name())?;
        }
        writeln!(f, " {:>9} | {:>12} | {:>7} |", "of cuFile", "of best peer", "of bare")?;
        writeln!(f, "|:--|{}", "--:|".repeat(Subject::ALL.len() + 3))?;
        for row in &self.rows {
            writeln!(f, "{row}")?;
        }
        for row in &self.rows {
            for (subject, error) in &row.errors {
                writeln!(f, "\n{}, {}: {}", row.work.name(), subject.name(), error.trim())?;
            }
        }
        Ok(())
    }
}

/// Where and when.
pub fn machine(gpu: usize) -> String {
    let line = |command: &mut Command| {
        let output = command.output().map(|output| String::from_utf8_lossy(&output.stdout).into_owned()).unwrap_or_default();
        output.lines().next().unwrap_or("unknown").trim().to_owned()
    };
    let query = ["--query-gpu=name,driver_version", "--format=csv,noheader"];
    format!(
        "{}, {}, {} cores, Linux {}",
        line(Command::new("date").args(["--utc", "+%F %R UTC"])),
        line(Command::new("nvidia-smi").args(query).args(["--id", &gpu.to_string()])),
        std::thread::available_parallelism().map_or(1, usize::from),
        fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default().trim()
    )
}

/// Everything, every run.
pub fn json(machine: &str, tables: &[Table]) -> String {
    serde_json::to_string_pretty(&serde_json::json!({ "machine": machine, "tables": tables })).expect("plain data")
}
