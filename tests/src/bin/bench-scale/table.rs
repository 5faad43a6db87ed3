//! Prints the measurements as tables, and turns them into results.

use std::fmt;

use gpunvme_tests::machine::{self, Machine};
use gpunvme_tests::results::{self, Run, Work, significant};

use crate::Scale;

/// Everything that one run of the program measured.
pub struct Report {
    machine: Machine,
    pub tables: Vec<Table>,
}

/// Figures of one unit.
pub struct Table {
    title: String,
    unit: &'static str,
    columns: Vec<String>,
    /// The column that the others are compared with.
    base: Option<usize>,
    rows: Vec<Row>,
}

struct Row {
    work: Work,
    /// None where a column cannot do it.
    cells: Vec<Option<f64>>,
}

impl Report {
    /// A report without tables.
    pub fn new() -> Self {
        Self { machine: machine::describe(&gpunvme_tests::scratch_root()), tables: Vec::new() }
    }

    /// The results, to be kept. Columns are subjects.
    pub fn into_run(self, scale: &Scale) -> Run {
        let mut rows = Vec::new();
        for Table { title, unit, columns, rows: measured, .. } in &self.tables {
            for Row { work, cells } in measured {
                let of = |(column, cell): (&String, &Option<f64>)| {
                    // A table keeps one figure of its samples.
                    let row = results::Row::of(title, column, work.clone(), unit, &[(*cell)?])?;
                    Some(results::Row { spread: None, runs: None, ..row })
                };
                rows.extend(columns.iter().zip(cells).filter_map(of));
            }
        }
        let Scale { rounds, operations, time, .. } = scale;
        let method = format!(
            "operations: {rounds} rounds of {operations}; clients and neighbours: {} s each; others once",
            time.as_secs_f64()
        );
        Run::new("bench-scale", self.machine, method, rows)
    }
}

impl Table {
    /// A table without rows.
    pub fn new<T: ToString>(title: impl Into<String>, unit: &'static str, columns: &[T], base: Option<usize>) -> Self {
        let columns = columns.iter().map(T::to_string).collect();
        Self { title: title.into(), unit, columns, base, rows: Vec::new() }
    }

    /// Adds a row, with a cell for each column.
    pub fn row(&mut self, work: Work, cells: Vec<Option<f64>>) {
        assert_eq!(cells.len(), self.columns.len());
        self.rows.push(Row { work, cells });
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        writeln!(f, "{}", self.machine)?;
        self.tables.iter().try_for_each(|table| write!(f, "\n{table}"))
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        // Markdown, so that it can go into a document as it is.
        let width = self.rows.iter().map(|row| row.work.to_string().len()).max().unwrap_or(0);
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
