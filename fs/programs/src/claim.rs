//! Claiming a device: opens it for one program alone.
//!
//! umount(8) returns when the mount is gone, a moment before its daemon has written everything
//! down and let go of the device. The next program waits that moment, and learns at once if the
//! device is held for longer: because it is mounted.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use gpunvme_blockdev::{BlockDevice, Error, OpenMode, open_controller, path_of, split_names};
use rustix::process::geteuid;

pub use crate::below::has_users;
use crate::below::{self, Rival};
use crate::holders;
use crate::mounts::Mount;

/// How long a daemon that is no longer mounted may take to let go of its device.
const RELEASE_LIMIT: Duration = Duration::from_secs(10);
/// How long a daemon may take that is still listed as mounted. It was killed and is about to end,
/// or is alive: the filesystem would know, but a daemon that was stopped does not answer.
const DYING_LIMIT: Duration = Duration::from_secs(2);
/// How long the kernel may take to let go of the files of an io_uring whose process has ended.
const LET_GO_LIMIT: Duration = Duration::from_millis(300);
/// Time between two looks at a held device.
const RELEASE_POLL: Duration = Duration::from_millis(20);

/// Reasons why a device cannot be claimed. The text does not repeat the device's name.
#[derive(Debug, thiserror::Error)]
pub enum ClaimError {
    /// It is mounted.
    #[error("already mounted on {dir} (type {}); `umount {dir}` first", .0.fs_type, dir = shown(.0))]
    Mounted(Mount),
    /// It is mounted by a daemon that has gone without unmounting.
    #[error("still mounted on {dir}, by a daemon that was killed; `umount {dir}` ends that", dir = shown(.0))]
    LeftBehind(Mount),
    /// Another process has it, and it is not mounted.
    #[error("in use by another program{} ({} seconds were waited for its release)", named(.0), RELEASE_LIMIT.as_secs())]
    Held(
        /// Programs that have it open, as far as they can be told.
        Vec<String>,
    ),
    /// It is an image file that a loop device has.
    #[error("attached to {}; `losetup -d {}` detaches it", .0.display(), .0.display())]
    Attached(PathBuf),
    /// It is in use by another name: a second loop device over one image, for example.
    #[error("the same data is in use through {}", .0.display())]
    Shared(PathBuf),
    /// The caller may not open it.
    #[error("permission denied: run as root, or as a user who may open it")]
    Permission,
    /// It is one of several devices that are claimed together, or needed together.
    #[error("{device}: {error}")]
    Member {
        /// The device.
        device: String,
        /// Its error.
        error: Box<ClaimError>,
    },
    /// Anything else.
    #[error("{0}")]
    Device(String),
}

/// Opens `device` with its lock, and waits for a daemon that is about to let go of it. Mounts of
/// it that are still listed then are those of daemons that were killed.
///
/// # Errors
/// The device is mounted, in use, or cannot be opened.
pub fn claim(device: &str, mode: OpenMode) -> Result<Arc<dyn BlockDevice>, ClaimError> {
    claim_beside(device, mode, || Ok(None))
}

/// As [`claim`]; `beside` tells of a mount that has the device without being listed as its own.
///
/// # Errors
/// As [`claim`], and those of `beside`.
pub(crate) fn claim_beside(
    device: &str,
    mode: OpenMode,
    beside: impl Fn() -> Result<Option<Mount>, ClaimError>,
) -> Result<Arc<dyn BlockDevice>, ClaimError> {
    patiently(device, mode, || gpunvme_blockdev::open(device, mode), beside)
}

/// As [`claim`], where `open` does something else than [`gpunvme_blockdev::open`] to claim it; what
/// it returns is handed on.
///
/// # Errors
/// As [`claim`].
pub(crate) fn claim_by<T>(device: &str, mode: OpenMode, open: impl Fn() -> gpunvme_blockdev::Result<T>) -> Result<T, ClaimError> {
    patiently(device, mode, open, || Ok(None))
}

/// Waits until a daemon that is about to let go of `device`, or of several with `+` between their
/// names, has done so.
///
/// # Errors
/// As [`claim`].
pub fn await_release(device: &str) -> Result<(), ClaimError> {
    split_names(device).into_iter().try_for_each(|device| {
        let open = || match path_of(device) {
            Some(_) => gpunvme_blockdev::open(device, OpenMode::ReadOnly).map(drop),
            // A controller is taken and given back as it is: bringing it up and down takes seconds
            // on some.
            None => open_controller(device).map(drop),
        };
        patiently(device, OpenMode::ReadOnly, open, || Ok(None))
    })
}

/// Whether another process has a device, or one of several, for writing, and does not just let go
/// of it. `None`: they cannot be looked at. Nothing is claimed.
pub fn has_writer(device: &str) -> Option<bool> {
    let paths = split_names(device).into_iter().map(path_of).collect::<Option<Vec<_>>>()?;
    let start = Instant::now();
    loop {
        let found = paths.iter().map(|path| below::has_writer(path)).collect::<Option<Vec<_>>>()?;
        let is_held = found.contains(&true);
        if !is_held || start.elapsed() > LET_GO_LIMIT {
            return Some(is_held);
        }
        std::thread::sleep(RELEASE_POLL);
    }
}

/// Calls `open` until `device` is not held any more. Nothing is asked of a mount, which may not
/// answer: a daemon that lives holds its device.
fn patiently<T>(
    device: &str,
    mode: OpenMode,
    open: impl Fn() -> gpunvme_blockdev::Result<T>,
    beside: impl Fn() -> Result<Option<Mount>, ClaimError>,
) -> Result<T, ClaimError> {
    let start = Instant::now();
    let listed = || listed_mount(device)?.map_or_else(&beside, |mount| Ok(Some(mount)));
    loop {
        // A reader's lock admits other readers, so having it does not tell that there is no mount.
        // Asked before this process is one.
        let shared = mode == OpenMode::ReadOnly && path_of(device).is_some_and(below::has_users);
        let refusal = match open() {
            Ok(opened) => match path_of(device).and_then(|path| below::rival(path, mode)) {
                Some(Rival::Attached(attached)) => return Err(ClaimError::Attached(attached)),
                Some(Rival::InUse(name)) => match listed_mount(&name.to_string_lossy())? {
                    Some(mount) => ClaimError::Mounted(mount),
                    None => ClaimError::Shared(name),
                },
                None => match if shared { listed()? } else { None } {
                    Some(mount) => ClaimError::Mounted(mount),
                    None => return Ok(opened),
                },
            },
            Err(Error::Busy { .. }) => listed()?.map_or(ClaimError::Held(Vec::new()), ClaimError::Mounted),
            Err(Error::Permission { .. }) => return Err(ClaimError::Permission),
            Err(error) => return Err(ClaimError::Device(reason(device, &error))),
        };
        let limit = if matches!(refusal, ClaimError::Mounted(_)) { DYING_LIMIT } else { RELEASE_LIMIT };
        if start.elapsed() > limit {
            return Err(match refusal {
                ClaimError::Mounted(mount) if path_of(device).is_some_and(|path| mount.is_left_behind(path)) => {
                    ClaimError::LeftBehind(mount)
                }
                ClaimError::Held(_) => ClaimError::Held(path_of(device).map_or_else(Vec::new, holders::of)),
                refusal => refusal,
            });
        }
        std::thread::sleep(RELEASE_POLL);
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

/// The programs that have a device, or what else it may be.
fn named(programs: &[String]) -> String {
    match programs {
        [] => ", mounted in another mount namespace, or held by open files of a mount that was cut off".to_owned(),
        programs => format!(": {}", programs.join(", ")),
    }
}

/// Where a mount is. Its user chose the name: nothing of that steers a terminal.
fn shown(mount: &Mount) -> String {
    mount.dir.to_string_lossy().replace(char::is_control, " ")
}

/// The mount of `device`, or of the image file below it, that the mount table lists.
pub(crate) fn listed_mount(device: &str) -> Result<Option<Mount>, ClaimError> {
    let mounts_of = |device: &str| {
        let mounts = Mount::all_of(device);
        let mounts = mounts.map_err(|error| ClaimError::Device(format!("/proc/self/mountinfo: {error}")))?;
        Ok(mounts.into_iter().find(|mount| may_have(mount, device)))
    };
    match (mounts_of(device)?, path_of(device).and_then(below::backing_file)) {
        (None, Some(image)) => mounts_of(&image.to_string_lossy()),
        (mount, _) => Ok(mount),
    }
}

/// Whether a mount that names a device may have it. A user may give any name to a mount of FUSE: it
/// counts where it is root's or this process's user's, or the device's owner's.
pub fn may_have(mount: &Mount, device: &str) -> bool {
    let owner = || path_of(device).and_then(|path| fs::metadata(path).ok()).map(|status| status.uid());
    mount.user.is_none_or(|user| user == 0 || user == geteuid().as_raw() || Some(user) == owner())
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
        // Any filesystem on a real block device will do; a machine without one has nothing to
        // check.
        let Some(mount) = mounts.iter().find(|mount| mount.source.as_encoded_bytes().starts_with(b"/dev/")) else { return };
        let Some(device) = mount.source.to_str().filter(|source| std::fs::metadata(source).is_ok()) else { return };
        assert!(listed_mount(device).unwrap().is_some(), "{mount:?}");
    }
}
