//! The command `log`: which events the daemon of a mount logs.

use crate::report::{Failure, Report};
use gpunvme::Mount;
use serde_json::json;
use std::path::Path;

pub fn run(path: &Path, filter: Option<&str>) -> Result<Report, Failure> {
    let before = Mount::open(path)?.log(filter)?;
    let mut report = Report::new(json!({ "filter": filter.unwrap_or(&before) }));
    report.line("log", filter.unwrap_or(&before));
    if filter.is_some() {
        report.line("before", &before);
        report.json["before"] = json!(before);
    }
    Ok(report)
}
