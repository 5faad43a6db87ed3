//! Uses of a device that its lock does not show: a loop device over an image file, and swap.

use std::fs;
use std::path::{Path, PathBuf};

/// Who uses the file or device `device`, as an English sentence's end ("attached to /dev/loop0"), if anybody does.
pub fn find(device: &str) -> Option<String> {
    let path = fs::canonicalize(device).ok()?;
    if let Some(name) = loop_device(&path) {
        return Some(format!("attached to {}; `losetup -d {0}` detaches it", name.display()));
    }
    let swaps = fs::read_to_string("/proc/swaps").ok()?;
    let is_swap = swaps.lines().skip(1).any(|line| line.split_whitespace().next() == path.to_str());
    is_swap.then(|| "in use as swap; `swapoff` ends that".to_owned())
}

/// The loop device that has `path` attached.
fn loop_device(path: &Path) -> Option<PathBuf> {
    fs::read_dir("/sys/block").ok()?.flatten().find_map(|entry| {
        let backing = fs::read_to_string(entry.path().join("loop/backing_file")).ok()?;
        (Path::new(backing.trim_end_matches('\n')) == path).then(|| Path::new("/dev").join(entry.file_name()))
    })
}
