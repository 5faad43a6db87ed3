//! The kernel's read-ahead for a mount. It offers a FUSE server 128 KiB at the most; the setting of the mount's backing device
//! in sysfs has no such limit.

use std::fs;
use std::path::Path;

use super::mounts::Mount;

/// What sequential readers gain from: several of the largest requests in flight.
const READ_AHEAD_KIB: u32 = 4096;

/// Raises the read-ahead of the mount on `dir`. Best effort: without root it stays as it is, and reading works.
///
/// The mount is found in the mount table, since asking the mount itself could wait for the daemon that calls this.
pub fn raise(dir: &Path) {
    let mounts = Mount::all().unwrap_or_default();
    let Some(mount) = mounts.iter().rev().find(|mount| mount.dir == dir) else { return };
    let (major, minor) = (rustix::fs::major(mount.dev), rustix::fs::minor(mount.dev));
    let setting = format!("/sys/class/bdi/{major}:{minor}/read_ahead_kb");
    if let Err(error) = fs::write(&setting, READ_AHEAD_KIB.to_string()) {
        tracing::debug!("{setting}: {error}");
    }
}
