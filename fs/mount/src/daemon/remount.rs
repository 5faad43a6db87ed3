//! `mount -o remount`: the kernel's flags of a live mount change, `ro` and `rw` above all. The
//! daemon goes on as it was started, and writes down what it has.

use std::fs::File;

use rustix::fs::removexattr;
use rustix::io::Errno;
use rustix::mount::{MountFlags, mount_remount};

use super::error::MountError;
use super::options::Options;
use super::place::MountPoint;
use gpunvme_programs::mounts::Mount;

/// An attribute that no file has.
const NONE: &str = "user.gpunvme.none";

/// Changes the flags of the mount that these options name.
///
/// # Errors
/// There is no such mount, or the volume is to become writable under a daemon that was started
/// read-only.
pub(super) fn remount(options: &Options) -> Result<(), MountError> {
    let point = MountPoint::of(&options.dir)?;
    let (dir, path) = (point.dir(), point.path());
    let failed = |why: &dyn std::fmt::Display| MountError::Failed(format!("{}: {why}", dir.display()));
    if !Mount::on(dir).map_err(|error| failed(&error))?.is_ours() {
        return Err(failed(&"not the mount of a gpunvme volume"));
    }
    let read_only = options.settings.read_only;
    let mut flags = options.flags;
    flags.set(MountFlags::RDONLY, read_only);
    mount_remount(&path, flags, "").map_err(|error| failed(&error))?;
    if !read_only && removexattr(&path, NONE) == Err(Errno::ROFS) {
        // The mount's flags and the daemon's behaviour have to agree.
        mount_remount(&path, flags | MountFlags::RDONLY, "").map_err(|error| failed(&error))?;
        return Err(failed(&"was mounted read-only from the start: unmount it first"));
    }
    if read_only {
        // The daemon refuses writes that begin from now on; writes that a ring had in flight are
        // over when it answers this.
        File::open(&path).and_then(|dir| dir.sync_all()).map_err(|error| failed(&error))?;
    }
    Ok(())
}
