//! Prints the measurements as tables and as JSON.

use std::fmt;

use gpunvme_tests::machine::{self, Machine};
use serde::Serialize;

/// Everything that one run of the program measured.
#[derive(Serialize)]
pub struct Report {
    machine: Machine,
    pub tables: Vec<Table>,
}

/// Figures of one unit.
#[derive(Serialize)]
pub struct Table {
    title: String,
    unit: &'static str,
    columns: Vec<String>,
    /// The column that the others are compared with.
    base: Option<usize>,
    rows: Vec<Row>,
}

#[derive(Serialize)]
struct Row {
    work: String,
    /// None where a column cannot do it.
    cells: Vec<Option<f64>>,
}

impl Report {
    /// A report without tables.
    pub fn new() -> Self {
        Self { machine: machine::describe(&gpunvme_tests::scratch_root()), tables: Vec::new() }
    }
}

impl Table {
    /// A table without rows.
    pub fn new<T: ToString>(title: impl Into<String>, unit: &'static str, columns: &[T], base: Option<usize>) -> Self {
        let columns = columns.iter().map(T::to_string).collect();
        Self { title: title.into(), unit, columns, base, rows: Vec::new() }
    }

    /// Adds a row, with a cell for each column.
    pub fn row(&mut self, work: impl Into<String>, cells: Vec<Option<f64>>) {
        assert_eq!(cells.len(), self.columns.len());
        self.rows.push(Row { work: work.into(), cells });
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let Machine { date, processor, cores, memory_gib, kernel, backing } = &self.machine;
        writeln!(f, "{date}, {processor}, {cores} cores, {memory_gib} GiB, Linux {kernel}, images on {backing}")?;
        self.tables.iter().try_for_each(|table| write!(f, "\n{table}"))
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        // Markdown, so that it can go into a document as it is.
        let width = self.rows.iter().map(|row| row.work.len()).max().unwrap_or(0);
        write!(f, "{} ({})", self.title, self.unit)?;
        match self.base {
            Some(base) => writeln!(f, "; in brackets: divided by {}\n", self.columns[base])?,
            None => writeln!(f, "\n")?,
        }
        write!(f, "| {:width$} |", "")?;
        self.columns.iter().try_for_each(|column| write!(f, " {column:>16} |"))?;
        writeln!(f, "\n|:--|{}", "--:|".repeat(self.columns.len()))?;
        for row in &self.rows {
            write!(f, "| {:width$} |", row.work)?;
            for (column, cell) in row.cells.iter().enumerate() {
                let base = self.base.filter(|base| *base != column).and_then(|base| row.cells[base]);
                let text = match (cell, base) {
                    (None, _) => String::new(),
                    (Some(value), None) => significant(*value),
                    (Some(value), Some(base)) => format!("{} ({:.2})", significant(*value), value / base),
                };
                write!(f, " {text:>16} |")?;
            }
            writeln!(f)?;
        }
        Ok(())
    }
}

/// Three digits or more.
fn significant(value: f64) -> String {
    match value {
        0.0..10.0 => format!("{value:.2}"),
        10.0..100.0 => format!("{value:.1}"),
        _ => format!("{value:.0}"),
    }
}
