//! A directory of the mount by which a file was opened.
//!
//! It guards that what is kept of a mount keeps no file of it open: the space of a file that was
//! deleted is free once the application has closed it, and no user who wants a file for himself
//! waits for us.

use rustix::fs::{AtFlags, CWD, Mode, OFlags, StatxFlags};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

/// An open directory above a file on the same mount, and its path: the mount's root, or the first
/// below that which the caller may read. Searching is not enough: what is opened by `O_PATH` takes
/// no ioctl.
///
/// None where there is no such directory that the caller can reach: the file itself is mounted, or
/// was opened in another mount namespace.
pub(crate) fn above(file: BorrowedFd<'_>) -> Option<(OwnedFd, PathBuf)> {
    let path = std::fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd())).ok()?;
    let mount = mount_of(file, Path::new(""))?;
    // What the kernel writes before a path that is out of reach is no path.
    let above: Vec<_> = path.ancestors().skip(1).filter(|folder| folder.is_absolute()).collect();
    let on_mount = above.into_iter().rev().filter(|folder| mount_of(CWD, folder) == Some(mount));
    on_mount.filter_map(|folder| Some((open(folder, mount)?, folder.to_owned()))).next()
}

fn open(folder: &Path, mount: u64) -> Option<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let opened = rustix::fs::open(folder, flags, Mode::empty()).ok()?;
    // Something may have been mounted there meanwhile.
    (mount_of(opened.as_fd(), Path::new("")) == Some(mount)).then_some(opened)
}

/// The kernel's number of the mount that something lies on.
fn mount_of(at: BorrowedFd<'_>, path: &Path) -> Option<u64> {
    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
    let found = rustix::fs::statx(at, path, flags, StatxFlags::MNT_ID).ok()?;
    // Kernels before 5.8 do not tell.
    (found.stx_mask & StatxFlags::MNT_ID.bits() != 0).then_some(found.stx_mnt_id)
}
