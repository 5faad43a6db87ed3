//! Prints rows as they are measured, and keeps the results.

use std::error::Error;
use std::path::PathBuf;

use gpunvme_tests::machine;
use gpunvme_tests::results::{Row, Run, Work, median, significant};

use crate::Scale;
use crate::subject::Subjects;

/// Everything that one run of the program measured.
pub struct Report {
    run: Run,
    json: Option<PathBuf>,
}

/// Rows of one section and unit, with each subject's results.
pub struct Rows {
    section: String,
    unit: &'static str,
    results: Vec<(Work, String, Vec<f64>)>,
}

impl Report {
    /// A report without rows, kept in `json` where that is given.
    pub fn new(scale: &Scale, subjects: &Subjects, json: Option<PathBuf>) -> Result<Self, Box<dyn Error>> {
        let method = format!("median of {}; appends {} s a run", scale.runs, scale.time.as_secs_f64());
        let run = Run::new("bench-mount", machine::describe(subjects.scratch()), method, Vec::new());
        println!("{}\n{}; in brackets: of ext4", run.about.machine, run.about.method);
        Ok(Self { run, json })
    }

    /// Prints rows, as a table, and keeps them.
    pub fn add(&mut self, rows: Rows) -> Result<(), Box<dyn Error>> {
        let Rows { section, unit, results } = rows;
        let works: Vec<&Work> = results.iter().map(|(work, ..)| work).collect();
        println!("\n{section} ({unit})");
        for work in first_of_each(&works) {
            let of = |name: &str| results.iter().find(|(of, subject, _)| of == work && subject == name);
            let base = of("ext4").and_then(|(.., runs)| median(runs));
            print!("{work}:");
            for (_, subject, runs) in results.iter().filter(|(of, ..)| of == work) {
                let value = median(runs).ok_or("a row with results")?;
                let ratio = base.map(|base| format!(" ({:.2})", value / base)).unwrap_or_default();
                print!(" {subject} {}{ratio}", significant(value));
            }
            println!();
        }
        let kept = results.iter().filter_map(|(work, subject, runs)| Row::of(&section, subject, work.clone(), unit, runs));
        self.run.rows.extend(kept);
        if let Some(path) = &self.json {
            self.run.write(path)?;
        }
        Ok(())
    }
}

impl Rows {
    /// No rows yet.
    pub fn new(section: &str, unit: &'static str) -> Self {
        Self { section: section.into(), unit, results: Vec::new() }
    }

    /// Adds the result of a run.
    pub fn add(&mut self, work: &Work, subject: &str, value: f64) {
        match self.results.iter_mut().find(|(of, name, _)| of == work && name == subject) {
            Some((.., runs)) => runs.push(value),
            None => self.results.push((work.clone(), subject.into(), vec![value])),
        }
    }
}

/// Each piece of work once, in the order of its first result.
fn first_of_each<'a>(works: &[&'a Work]) -> Vec<&'a Work> {
    let mut once: Vec<&Work> = Vec::new();
    works.iter().for_each(|work| {
        if !once.contains(work) {
            once.push(work);
        }
    });
    once
}
