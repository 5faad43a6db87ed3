//! The kernel's read-ahead for a mount. It offers a FUSE server 128 KiB at the most; the setting
//! of the mount's backing device in sysfs has no such limit.

use std::fs;

/// Read-ahead that sequential readers gain from: several of the largest requests in flight.
const READ_AHEAD_KIB: u32 = 4096;

/// Raises the read-ahead of the mount with the device number `dev`. Best effort: without root it
/// stays as it is, and reading works.
pub fn raise(dev: u64) {
    let (major, minor) = (rustix::fs::major(dev), rustix::fs::minor(dev));
    // The number of a mount of a block device is the device's, which has a setting of its own.
    // Those without have no major number.
    let kind = if major == 0 { "" } else { "-fuseblk" };
    let setting = format!("/sys/class/bdi/{major}:{minor}{kind}/read_ahead_kb");
    if let Err(error) = fs::write(&setting, READ_AHEAD_KIB.to_string()) {
        tracing::debug!("{setting}: {error}");
    }
}
