//! Taking a device for oneself.
//!
//! umount(8) returns when the mount is gone, a moment before its daemon has written everything down and let go of the device.
//! Whoever comes next waits that moment, and learns at once if the device is held for longer: because it is mounted.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use gpunvme_blockdev::nvme::Controller;
use gpunvme_blockdev::{BlockDevice, Error, OpenMode, path_of};

use super::loops;
use super::mounts::Mount;

/// How long a daemon that is no longer mounted may take to let go of its device.
const RELEASE_LIMIT: Duration = Duration::from_secs(10);
/// Time between two looks at a held device.
const RELEASE_POLL: Duration = Duration::from_millis(20);

/// Why a device cannot be had. The text does not repeat the device's name.
#[derive(Debug, thiserror::Error)]
pub enum ClaimError {
    /// It is mounted.
    #[error("already mounted on {} (type {})", .0.dir.display(), .0.fs_type)]
    Mounted(Mount),
    /// Another process has it, and it is not mounted.
    #[error("in use by another program, or mounted in another mount namespace ({} seconds were waited for its release)", RELEASE_LIMIT.as_secs())]
    Held,
    /// It is an image file that a loop device has.
    #[error("attached to {}; `losetup -d {}` detaches it", .0.display(), .0.display())]
    Attached(PathBuf),
    /// The caller may not open it.
    #[error("permission denied: run as root, or as a user who may open it")]
    Permission,
    /// Anything else.
    #[error("{0}")]
    Device(String),
}

/// Opens `device` with its lock, and waits for a daemon that is about to let go of it.
///
/// # Errors
/// The device is mounted, in use, or cannot be opened.
pub fn claim(device: &str, mode: OpenMode) -> Result<Arc<dyn BlockDevice>, ClaimError> {
    patiently(device, || gpunvme_blockdev::open(device, mode))
}

/// Waits until a daemon that is about to let go of `device` has done so.
///
/// # Errors
/// As [`claim`].
pub fn await_release(device: &str) -> Result<(), ClaimError> {
    patiently(device, || match path_of(device) {
        Some(_) => gpunvme_blockdev::open(device, OpenMode::ReadOnly).map(drop),
        // A controller is taken and given back as it is: bringing it up and down takes seconds on some.
        None => Controller::open(device).map(drop),
    })
}

/// Calls `open` until `device` is not held any more.
fn patiently<T>(device: &str, open: impl Fn() -> gpunvme_blockdev::Result<T>) -> Result<T, ClaimError> {
    if let Some(attached) = path_of(device).and_then(loops::attached_to) {
        return Err(ClaimError::Attached(attached));
    }
    let start = Instant::now();
    loop {
        match open() {
            Ok(opened) => {
                // A reader's lock admits other readers, so having it does not tell that there is no mount.
                return match live_mount(device)? {
                    Some(mount) => Err(ClaimError::Mounted(mount)),
                    None => Ok(opened),
                };
            }
            Err(Error::Busy { .. }) => match live_mount(device)? {
                Some(mount) => return Err(ClaimError::Mounted(mount)),
                None if start.elapsed() > RELEASE_LIMIT => return Err(ClaimError::Held),
                None => std::thread::sleep(RELEASE_POLL),
            },
            Err(Error::Permission { .. }) => return Err(ClaimError::Permission),
            Err(error) => return Err(ClaimError::Device(reason(device, &error))),
        }
    }
}

/// An error's text without the device's name before it: the caller has that already.
pub fn reason(device: &str, error: &impl ToString) -> String {
    let text = error.to_string();
    match text.strip_prefix(device).and_then(|rest| rest.strip_prefix(": ")) {
        Some(reason) => reason.to_owned(),
        None => text,
    }
}

/// The mount that has `device`, or the image file behind it.
fn live_mount(device: &str) -> Result<Option<Mount>, ClaimError> {
    let unknown = |error| ClaimError::Device(format!("/proc/self/mountinfo: {error}"));
    let mut mounts = Mount::all_of(device).map_err(unknown)?;
    if let Some(image) = path_of(device).and_then(loops::backing_file) {
        mounts.extend(Mount::all_of(&image.to_string_lossy()).map_err(unknown)?);
    }
    Ok(mounts.into_iter().find(|mount| !mount.is_dead()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_device_is_named_once() {
        let error = Error::NotFound { device: "/dev/nvme9n1".into() };
        assert_eq!(reason("/dev/nvme9n1", &error), "no such file or device");
        assert_eq!(reason("/dev/nvme9n2", &error), "/dev/nvme9n1: no such file or device");
    }

    #[test]
    fn the_device_of_a_kernel_mount_is_found_mounted() {
        let mounts = Mount::all().unwrap();
        // Any filesystem on a real block device will do; a machine without one has nothing to check.
        let Some(mount) = mounts.iter().find(|mount| mount.source.as_encoded_bytes().starts_with(b"/dev/")) else { return };
        let Some(device) = mount.source.to_str().filter(|source| std::fs::metadata(source).is_ok()) else { return };
        assert!(live_mount(device).unwrap().is_some(), "{mount:?}");
    }
}
