//! The command `grow`: makes a mounted volume as large as its devices have become.

use crate::report::{self, Failure, Report};
use gpunvme::Mount;
use serde_json::json;
use std::path::Path;

pub fn run(path: &Path) -> Result<Report, Failure> {
    let [before, capacity] = Mount::open(path)?.grow()?;
    let mut report = Report::new(json!({ "before": before, "capacity": capacity }));
    report.line("before", report::size(before));
    report.line("capacity", report::size(capacity));
    Ok(report)
}
