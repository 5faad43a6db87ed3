//! Prints the measurements as tables, and turns them into results.

use std::collections::BTreeMap;
use std::fmt;

use gpunvme_tests::machine::Machine;
use gpunvme_tests::results::{self, Run, Work, significant};

use crate::Scale;
use crate::subject::Subject;

/// Everything that one run of the program measured.
pub struct Report {
    machine: Machine,
    method: String,
    pub sections: Vec<Section>,
}

/// A table.
pub struct Section {
    pub title: &'static str,
    pub unit: &'static str,
    pub rows: Vec<Row>,
}

/// One piece of work on each subject that can do it, with the result of each run.
pub struct Row {
    work: Work,
    results: BTreeMap<Subject, Vec<f64>>,
}

impl Report {
    /// A report without sections.
    pub fn new(machine: Machine, scale: &Scale) -> Self {
        let (runs, seconds, file) = (scale.runs, scale.time.as_secs_f64(), scale.file_len >> 20);
        let plural = if runs == 1 { "" } else { "s" };
        let method = format!("median of {runs} run{plural} of at most {seconds} s on files of {file} MiB");
        Self { machine, method, sections: Vec::new() }
    }

    /// The results, to be kept.
    pub fn into_run(self) -> Run {
        let mut rows = Vec::new();
        for Section { title, unit, rows: measured } in &self.sections {
            for Row { work, results } in measured {
                let of =
                    |(subject, runs): (&Subject, &Vec<f64>)| results::Row::of(title, subject.name(), work.clone(), unit, runs);
                rows.extend(results.iter().filter_map(of));
            }
        }
        Run::new("bench", self.machine, self.method, rows)
    }
}

impl Row {
    /// A row without results.
    pub fn new(work: Work) -> Self {
        Self { work, results: BTreeMap::new() }
    }

    /// Adds a run's result.
    pub fn add(&mut self, subject: Subject, value: f64) {
        self.results.entry(subject).or_default().push(value);
    }

    fn median(&self, subject: Subject) -> Option<f64> {
        results::median(self.results.get(&subject)?)
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
        writeln!(
            f,
            "{}\n{}; ratios: gpunvme to the lower ceiling and to FUSE + device, ioctl and ring to the device, gpunvme to ext4",
            self.machine, self.method
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
        let width = self.rows.iter().map(|row| row.work.to_string().len()).max().unwrap_or(0);
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
