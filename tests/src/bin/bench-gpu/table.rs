//! Prints the measurements as tables, and turns them into results.

use std::collections::BTreeMap;
use std::fmt;

use gpunvme_tests::results;

use crate::Work;
use crate::run::Subject;

/// Which subject is compared with the best of which others, and the head of that column.
const RATIOS: [(Subject, &[Subject], &str); 7] = [
    (Subject::Gpunvme, &[Subject::CuFile], "of cuFile"),
    (Subject::Gpunvme, &Subject::DIRECT, "of best peer"),
    (Subject::Gpunvme, &[Subject::Bare], "of device"),
    (Subject::OurCuFile, &[Subject::CuFile], "cuFile, our / theirs"),
    (Subject::OurBatch, &[Subject::Batch], "batch, our / theirs"),
    (Subject::Hot, &[Subject::PinnedHot], "hot / pinned"),
    (Subject::HotFirst, &[Subject::PinnedHot], "first / pinned"),
];

/// A table.
pub struct Table {
    pub backing: &'static str,
    pub subjects: Vec<Subject>,
    pub rows: Vec<Row>,
}

/// A piece of work, and what each subject did of it.
pub struct Row {
    work: Work,
    /// Operations a second.
    results: BTreeMap<Subject, Vec<f64>>,
    /// Why a subject has no result.
    errors: BTreeMap<Subject, String>,
}

impl Table {
    /// Its rows, to be kept.
    pub fn results(&self) -> Vec<results::Row> {
        let of = |row: &Row| {
            let (unit, factor) = row.unit();
            let of = |(subject, runs): (&Subject, &Vec<f64>)| {
                let runs: Vec<_> = runs.iter().map(|rate| rate * factor).collect();
                results::Row::of(self.backing, subject.name(), row.work.described(), unit, &runs)
            };
            row.results.iter().filter(|(subject, _)| !row.errors.contains_key(subject)).filter_map(of).collect::<Vec<_>>()
        };
        self.rows.iter().flat_map(of).collect()
    }
}

impl Row {
    pub fn new(work: Work) -> Row {
        Row { work, results: BTreeMap::new(), errors: BTreeMap::new() }
    }

    pub fn add(&mut self, subject: Subject, rate: f64) {
        self.results.entry(subject).or_default().push(rate);
    }

    /// Notes why a subject has no result.
    pub fn failed(&mut self, subject: Subject, error: String) {
        self.errors.insert(subject, error);
    }

    fn median(&self, subject: Subject) -> Option<f64> {
        let runs = self.results.get(&subject).filter(|_| !self.errors.contains_key(&subject));
        results::median(runs?)
    }

    /// What a subject is of the best of others.
    fn ratio(&self, subject: Subject, others: &[Subject]) -> String {
        let best = others.iter().filter_map(|&subject| self.median(subject)).max_by(f64::total_cmp);
        match (self.median(subject), best) {
            (Some(rate), Some(best)) => format!("{:.2}", rate / best),
            _ => "-".to_owned(),
        }
    }

    /// Thousands of operations a second for 4 KiB, GB/s for the rest; and what makes them of
    /// operations a second.
    fn unit(&self) -> (&'static str, f64) {
        if self.work.size == 4096 { ("thousand/s", 1e-3) } else { ("GB/s", self.work.size as f64 / 1e9) }
    }

    fn cell(&self, subject: Subject) -> String {
        match self.median(subject) {
            None if self.errors.contains_key(&subject) => "failed".to_owned(),
            None => String::new(),
            Some(rate) => results::significant(rate * self.unit().1),
        }
    }
}

/// Those ratios of which there are both sides.
fn ratios(subjects: &[Subject]) -> impl Iterator<Item = &'static (Subject, &'static [Subject], &'static str)> {
    let is_there = |subject: &Subject| subjects.contains(subject);
    RATIOS.iter().filter(move |(subject, others, _)| is_there(subject) && others.iter().any(is_there))
}

impl Row {
    /// As a line of a table with columns for these subjects.
    pub fn line(&self, subjects: &[Subject]) -> String {
        let cells = subjects.iter().map(|&subject| format!(" {:>12} |", self.cell(subject)));
        let ratio = |(subject, others, head): &(Subject, &[Subject], &str)| {
            format!(" {:>width$} |", self.ratio(*subject, others), width = head.len())
        };
        format!("| {:44} |{}{}", self.work.name(), cells.collect::<String>(), ratios(subjects).map(ratio).collect::<String>())
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        // Markdown, so that it can go into a document as it is.
        writeln!(f, "on {} (4 KiB: thousand operations a second; the rest: GB/s)\n", self.backing)?;
        write!(f, "| {:44} |", "")?;
        for subject in &self.subjects {
            write!(f, " {:>12} |", subject.name())?;
        }
        for (.., head) in ratios(&self.subjects) {
            write!(f, " {head} |")?;
        }
        writeln!(f, "\n|:--|{}", "--:|".repeat(self.subjects.len() + ratios(&self.subjects).count()))?;
        for row in &self.rows {
            writeln!(f, "{}", row.line(&self.subjects))?;
        }
        for row in &self.rows {
            for (subject, error) in &row.errors {
                writeln!(f, "\n{}, {}: {}", row.work.name(), subject.name(), error.trim())?;
            }
        }
        Ok(())
    }
}
