//! Which processes have a file or a device open. Nothing is asked that may not be answered, neither
//! of a filesystem nor of what `/proc` says of a descriptor: the kernel knows what file it is of.

use std::fs;
use std::path::Path;

use rustix::fs::{AtFlags, CWD, Statx, StatxFlags, statx};

/// Processes that are named at the most.
const NAMED: usize = 4;

/// Other processes that have `path` open, as `name (process 12)`: the first few of those that this
/// process may look at.
pub fn of(path: &Path) -> Vec<String> {
    let Some(wanted) = known(path) else { return Vec::new() };
    let own = std::process::id();
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    let numbers = processes.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    let holders = numbers.filter(|process| *process != own && has_open(*process, &wanted));
    holders.map(|process| format!("{} (process {process})", name(process))).take(NAMED).collect()
}

/// What the kernel knows of a file, without a question to its filesystem.
fn known(path: &Path) -> Option<Statx> {
    let mask = StatxFlags::TYPE | StatxFlags::INO;
    statx(CWD, path, AtFlags::STATX_DONT_SYNC | AtFlags::NO_AUTOMOUNT, mask).ok()
}

fn has_open(process: u32, wanted: &Statx) -> bool {
    let descriptors = fs::read_dir(format!("/proc/{process}/fd")).into_iter().flatten().flatten();
    descriptors.filter_map(|entry| known(&entry.path())).any(|found| is_same(&found, wanted))
}

fn is_same(one: &Statx, other: &Statx) -> bool {
    let identity = |file: &Statx| (file.stx_ino, file.stx_dev_major, file.stx_dev_minor);
    identity(one) == identity(other)
}

/// A process's name, of which its user may have made anything: nothing of it steers a terminal.
fn name(process: u32) -> String {
    let name = fs::read_to_string(format!("/proc/{process}/comm")).unwrap_or_default();
    name.trim_end().replace(char::is_control, " ")
}
