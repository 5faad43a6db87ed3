//! A block device for tests: a loop device over a file.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::report_skipped;

/// A loop device, detached when it is dropped.
#[derive(Debug)]
pub struct LoopDevice(PathBuf);

impl LoopDevice {
    /// Over this file. None, said aloud for `test`, where none can be had.
    pub fn over(test: &str, file: &Path) -> Option<LoopDevice> {
        let attach = |options: &[&str]| {
            let output = Command::new("losetup").args(options).args(["--find", "--show"]).arg(file).output().ok()?;
            output.status.success().then(|| PathBuf::from(String::from_utf8_lossy(&output.stdout).trim()))
        };
        // Not every filesystem has direct I/O.
        let device = attach(&["--direct-io=on"]).or_else(|| attach(&[]));
        if device.is_none() {
            report_skipped(test, "no loop device can be had here");
        }
        device.map(LoopDevice)
    }

    /// Its file in `/dev`.
    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        let _ = Command::new("losetup").arg("--detach").arg(&self.0).status();
    }
}
