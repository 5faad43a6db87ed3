//! The kernel's control files for FUSE connections (Documentation/filesystems/fuse/fuse.rst,
//! "Control filesystem").

use std::fs::File;
use std::io::{self, Write};

use rustix::fs::{Mode, OFlags, openat};
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsmount, fsopen};

/// The file that ends the connection behind the mount with the device number `dev`, and no later
/// one: the kernel has taken the connection out of it when the number is another's.
///
/// # Errors
/// If the caller is not root, or the connection has gone.
pub fn control(dev: u64) -> io::Result<File> {
    // A mount of one's own, attached nowhere: /sys/fs/fuse/connections is empty in containers.
    let context = fsopen("fusectl", FsOpenFlags::FSOPEN_CLOEXEC)?;
    fsconfig_create(&context)?;
    let root = fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, MountAttrFlags::empty())?;
    let path = format!("{}/abort", rustix::fs::minor(dev));
    Ok(openat(&root, path, OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty())?.into())
}

/// Ends a connection: its requests and all that is open on it fail from now on, wherever it is
/// mounted.
///
/// # Errors
/// If the kernel refuses.
pub fn abort(mut control: &File) -> io::Result<()> {
    control.write_all(b"1")
}
