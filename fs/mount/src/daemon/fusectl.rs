//! The kernel's control files for FUSE connections (Documentation/filesystems/fuse/fuse.rst,
//! "Control filesystem").

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;

use rustix::fs::{AtFlags, Mode, OFlags, openat, statat};
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsmount, fsopen};

/// The control files of one connection, and no later one: the kernel has taken the connection out
/// of them when the number is another's.
#[derive(Debug)]
pub struct Control {
    abort: File,
    folder: OwnedFd,
}

impl Control {
    /// Of the connection behind the mount with the device number `dev`.
    ///
    /// # Errors
    /// If the caller is not root, or the connection has gone.
    pub fn of(dev: u64) -> io::Result<Control> {
        // A mount of one's own, attached nowhere: /sys/fs/fuse/connections is empty in containers.
        let context = fsopen("fusectl", FsOpenFlags::FSOPEN_CLOEXEC)?;
        fsconfig_create(&context)?;
        let root = fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, MountAttrFlags::empty())?;
        // The kernel names it by its own form of the number (`dev_t`), which has 20 bits of minor.
        let name = u64::from(rustix::fs::major(dev)) << 20 | u64::from(rustix::fs::minor(dev));
        let folder = openat(&root, name.to_string(), OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
        let abort = openat(&folder, "abort", OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty())?.into();
        Ok(Control { abort, folder })
    }

    /// Ends the connection: its requests and all that is open on it fail from now on, wherever it
    /// is mounted.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn abort(&self) -> io::Result<()> {
        (&self.abort).write_all(b"1")
    }

    /// Requests that the daemon has not answered; 0 where that cannot be told.
    pub fn waiting(&self) -> u64 {
        let text = || -> io::Result<String> {
            let mut text = String::new();
            File::from(openat(&self.folder, "waiting", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?)
                .read_to_string(&mut text)?;
            Ok(text)
        };
        text().ok().and_then(|text| text.trim().parse().ok()).unwrap_or(0)
    }

    /// Whether the superblock of the connection is there still, perhaps without a daemon.
    pub fn has_superblock(&self) -> bool {
        statat(&self.folder, "waiting", AtFlags::SYMLINK_NOFOLLOW).is_ok()
    }
}
