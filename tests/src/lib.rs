//! The parts that the end-to-end tests and the measuring programs share: a mounted volume that
//! cleans up after itself, trees of files to copy and compare, and the few system calls that need
//! `unsafe`.
//!
//! The tests need root and `/dev/fuse`. Where either is missing each says `SKIPPED` on stderr, with
//! the reason, and `scripts/test` counts it as skipped and not as passed.

#![deny(unsafe_code)]

pub mod attack;
#[allow(unsafe_code)]
pub mod bare;
pub mod control_group;
#[allow(unsafe_code)]
pub mod cuda;
pub mod differential;
pub mod direct;
pub mod loop_device;
pub mod machine;
pub mod mounted;
pub mod observe;
pub mod peers;
pub mod programs;
pub mod random;
pub mod registrant;
pub mod requests;
pub mod results;
pub mod rings;
pub mod software_cuda;
#[allow(unsafe_code)]
pub mod sys;
pub mod tree;

use std::fs::File;
use std::io::Write;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Why tests that mount cannot run here, or `None` where they can.
pub fn why_no_mount() -> Option<&'static str> {
    if !rustix::process::geteuid().is_root() {
        Some("needs root")
    } else if !Path::new("/dev/fuse").exists() {
        Some("needs /dev/fuse")
    } else {
        None
    }
}

/// Says on stderr, past the test harness's capture, that `test` did not run. `scripts/test` counts
/// these lines.
pub fn report_skipped(test: &str, why: &str) {
    // Printing macros are captured for tests that pass; a direct write is not.
    let _ = writeln!(std::io::stderr(), "SKIPPED {test}: {why}");
}

/// Returns from the calling test, loudly, where volumes cannot be mounted.
#[macro_export]
macro_rules! needs_mount {
    () => {
        if let Some(why) = $crate::why_no_mount() {
            $crate::report_skipped(std::thread::current().name().unwrap_or("a test"), why);
            return;
        }
    };
}

/// Lets this process have so many descriptors beside those that are open, in what is called.
///
/// # Panics
/// If there is none now, or `call` panics.
pub fn with_descriptors<T>(more: u64, call: impl FnOnce() -> T) -> T {
    let (free, limit) = (File::open("/dev/null").expect("a descriptor"), getrlimit(Resource::Nofile));
    // Those below the first that is free are taken, and none above it is, or not by this test.
    let most = free.as_raw_fd() as u64 + more;
    drop(free);
    setrlimit(Resource::Nofile, Rlimit { current: Some(most), ..limit }).expect("it is lower");
    let result = call();
    setrlimit(Resource::Nofile, limit).expect("the hard limit is as it was");
    result
}

/// Where images go: `$TMPDIR`, or `/var/tmp`, which unlike `/tmp` is on a disk almost everywhere.
pub fn scratch_root() -> PathBuf {
    std::env::var_os("TMPDIR").map_or_else(|| PathBuf::from("/var/tmp"), PathBuf::from)
}

/// A fresh directory under [`scratch_root`], removed when it is dropped.
///
/// # Panics
/// If it cannot be made.
pub fn scratch_dir() -> tempfile::TempDir {
    scratch_dir_in(&scratch_root())
}

/// As [`scratch_dir`], in a folder of one's choice.
///
/// # Panics
/// If it cannot be made.
pub fn scratch_dir_in(folder: &Path) -> tempfile::TempDir {
    tempfile::Builder::new().prefix("gpunvme-test.").tempdir_in(folder).expect("a scratch directory")
}
