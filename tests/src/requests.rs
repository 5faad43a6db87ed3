//! Counts the requests that the kernel sends to a mount, by its tracepoint.

use std::collections::BTreeMap;
use std::fs;
use std::os::linux::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use tempfile::TempDir;

/// How many requests of each kind there were, by the kernel's name, as in `FUSE_LOOKUP`.
pub type Counts = BTreeMap<String, usize>;

/// Requests to one mount. Dropping it ends the trace.
#[derive(Debug)]
pub struct Requests {
    tracefs: TempDir,
    /// This trace's own buffer and switches.
    instance: PathBuf,
}

impl Requests {
    /// Traces the mount at `root`; None where the kernel has no such tracepoint.
    ///
    /// # Panics
    /// If the kernel has it and does not trace.
    pub fn to(root: &Path) -> Option<Self> {
        let tracefs = tempfile::tempdir().expect("a folder");
        let mounted = Command::new("mount").args(["-t", "tracefs", "tracefs"]).arg(tracefs.path()).status();
        if !mounted.is_ok_and(|status| status.success()) {
            return None;
        }
        let connection = rustix::fs::minor(fs::metadata(root).expect("a mount").st_dev());
        let instance = tracefs.path().join("instances").join(format!("gpunvme-{connection}"));
        let requests = Self { tracefs, instance };
        if !requests.tracefs.path().join("events/fuse/fuse_request_send").exists() {
            return None;
        }
        // One of a test that was killed stays, and the number of its mount comes again.
        let _ = fs::remove_dir(&requests.instance);
        fs::create_dir(&requests.instance).expect("an instance of the trace");
        requests.set("events/fuse/fuse_request_send/filter", &format!("connection == {connection}"));
        requests.set("events/fuse/fuse_request_send/enable", "1");
        Some(requests)
    }

    /// The requests that some work makes the kernel send.
    ///
    /// # Panics
    /// If the trace cannot be read.
    pub fn of(&self, work: impl FnOnce()) -> Counts {
        self.settle();
        self.set("trace", "");
        work();
        self.settle();
        let trace = fs::read_to_string(self.instance.join("trace")).expect("a trace");
        let mut counts = Counts::new();
        for line in trace.lines().filter(|line| line.contains("fuse_request_send")) {
            let kind = line.rsplit_once('(').and_then(|(_, rest)| rest.split_once(')')).expect("a kind").0;
            *counts.entry(kind.to_owned()).or_default() += 1;
        }
        counts
    }

    /// Waits for the requests that no call waits for, as RELEASE: until none has come for a while.
    fn settle(&self) {
        let seen = || fs::read_to_string(self.instance.join("trace")).expect("a trace").len();
        let mut before = seen();
        loop {
            std::thread::sleep(Duration::from_millis(100));
            let now = seen();
            if now == before {
                return;
            }
            before = now;
        }
    }

    fn set(&self, file: &str, value: &str) {
        fs::write(self.instance.join(file), value).expect("a file of tracefs");
    }
}

impl Drop for Requests {
    fn drop(&mut self) {
        if self.instance.exists() {
            let _ = fs::remove_dir(&self.instance);
        }
        let _ = Command::new("umount").arg(self.tracefs.path()).status();
    }
}
