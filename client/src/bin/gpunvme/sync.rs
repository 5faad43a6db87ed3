//! The command `sync`: what sync(1) does for other filesystems.

use crate::report::{Failure, Report};
use gpunvme::Mount;
use serde_json::json;
use std::path::PathBuf;

pub fn run(mounts: &[PathBuf]) -> Result<Report, Failure> {
    for mount in mounts {
        Mount::open(mount)?.sync()?;
    }
    let synced: Vec<_> = mounts.iter().map(|mount| mount.to_string_lossy()).collect();
    Ok(Report::new(json!({ "synced": synced })))
}
