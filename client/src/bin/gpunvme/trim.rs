//! The command `trim`: what fstrim(8) does for other filesystems, which ask the kernel.

use crate::args::Trim;
use crate::report::{self, Failure, Report};
use gpunvme::Mount;
use serde_json::json;

pub fn run(trim: &Trim) -> Result<Report, Failure> {
    let mount = Mount::open(&trim.mount)?;
    let trimmed = mount.trim(trim.offset, trim.length.unwrap_or(u64::MAX), trim.minimum, |_| true)?;
    let mut report = Report::new(json!({ "trimmed": trimmed }));
    report.line("trimmed", format!("{} ({trimmed} bytes)", report::size(trimmed)));
    Ok(report)
}
