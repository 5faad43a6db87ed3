//! Prints the measurements as tables and as JSON.

use std::collections::BTreeMap;
use std::fmt;

use gpunvme_tests::machine::Machine;
use serde::Serialize;

use crate::Scale;
use crate::subject::Subject;

/// Everything that one run of the program measured.
#[derive(Serialize)]
pub struct Report {
    machine: Machine,
    runs: usize,
    seconds: f64,
    file_bytes: u64,
    pub sections: Vec<Section>,
}

/// A table.
#[derive(Serialize)]
pub struct Section {
    pub title: &'static str,
    pub unit: &'static str,
    pub rows: Vec<Row>,
}

/// One piece of work on each subject that can do it.
#[derive(Serialize)]
pub struct Row {
    work: String,
    results: BTreeMap<Subject, Cell>,
}

#[derive(Default, Serialize)]
struct Cell {
    median: f64,
    runs: Vec<f64>,
}

impl Report {
    /// A report without sections.
    pub fn new(machine: Machine, scale: &Scale) -> Self {
        let seconds = scale.time.as_secs_f64();
        Self { machine, runs: scale.runs, seconds, file_bytes: scale.file_len, sections: Vec::new() }
    }
}

impl Row {
    /// A row without results.
    pub fn new(work: String) -> Self {
        Self { work, results: BTreeMap::new() }
    }

    /// Adds a run's result.
    pub fn add(&mut self, subject: Subject, value: f64) {
        let cell = self.results.entry(subject).or_default();
        cell.runs.push(value);
        let mut sorted = cell.runs.clone();
        sorted.sort_by(f64::total_cmp);
        let (low, high) = ((sorted.len() - 1) / 2, sorted.len() / 2);
        cell.median = (sorted[low] + sorted[high]) / 2.0;
    }

    fn median(&self, subject: Subject) -> Option<f64> {
        self.results.get(&subject).map(|cell| cell.median)
    }

    /// What the mounted volume reaches of the lower of the ceilings that apply.
    fn of_ceiling(&self) -> Option<f64> {
        let ceilings = [Subject::FuseCeiling, Subject::DeviceCeiling].map(|subject| self.median(subject));
        let lower = ceilings.into_iter().flatten().min_by(f64::total_cmp)?;
        Some(self.median(Subject::Gpunvme)? / lower)
    }

    /// What a way past the kernel's file interface reaches of the device.
    fn of_device(&self, subject: Subject) -> Option<f64> {
        Some(self.median(subject)? / self.median(Subject::DeviceCeiling)?)
    }

    /// What the mounted volume reaches of another mounted filesystem.
    fn of_mounted(&self, subject: Subject) -> Option<f64> {
        Some(self.median(Subject::Gpunvme)? / self.median(subject)?)
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let Machine { date, processor, cores, memory_gib, kernel, backing } = &self.machine;
        writeln!(f, "{date}, {processor}, {cores} cores, {memory_gib} GiB, Linux {kernel}, images on {backing}")?;
        writeln!(
            f,
            "median of {} runs of at most {} s on files of {} MiB; ratios: gpunvme to the lower ceiling and to FUSE + device, ioctl and ring to the device, gpunvme to ext4",
            self.runs,
            self.seconds,
            self.file_bytes >> 20
        )?;
        for section in self.sections.iter().filter(|section| !section.rows.is_empty()) {
            write!(f, "\n{section}")?;
        }
        Ok(())
    }
}

impl fmt::Display for Section {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        // Markdown, so that it can go into a document as it is.
        let subjects: Vec<_> =
            Subject::ALL.into_iter().filter(|subject| self.rows.iter().any(|row| row.results.contains_key(subject))).collect();
        let width = self.rows.iter().map(|row| row.work.len()).max().unwrap_or(0);
        writeln!(f, "{} ({})\n", self.title, self.unit)?;
        write!(f, "| {:width$} |", "")?;
        for subject in &subjects {
            write!(f, " {:>14} |", subject.name())?;
        }
        let ratios = ["of ceiling", "of FUSE + device", "ioctl of device", "ring of device", "of ext4"];
        ratios.iter().try_for_each(|ratio| write!(f, " {ratio} |"))?;
        writeln!(f, "\n|{}", ":--|".to_owned() + &"--:|".repeat(subjects.len() + ratios.len()))?;
        for row in &self.rows {
            write!(f, "| {:width$} |", row.work)?;
            for &subject in &subjects {
                write!(f, " {:>14} |", number(row.median(subject), significant))?;
            }
            let values = [
                row.of_ceiling(),
                row.of_mounted(Subject::FuseAndDevice),
                row.of_device(Subject::Ioctl),
                row.of_device(Subject::Ring),
                row.of_mounted(Subject::Ext4),
            ];
            for (ratio, value) in ratios.iter().zip(values) {
                let width = ratio.len();
                write!(f, " {:>width$} |", number(value, |value| format!("{value:.2}")))?;
            }
            writeln!(f)?;
        }
        Ok(())
    }
}

fn number(value: Option<f64>, format: impl Fn(f64) -> String) -> String {
    value.map(format).unwrap_or_default()
}

/// Three digits or more.
fn significant(value: f64) -> String {
    match value {
        0.0..10.0 => format!("{value:.2}"),
        10.0..100.0 => format!("{value:.1}"),
        _ => format!("{value:.0}"),
    }
}
