//! Opening a file by its path, with the flags of open(2).
//!
//! It guards files of other filesystems: what turns out to lie elsewhere is neither created nor
//! truncated.

use crate::connection::Connection;
use crate::error::{Error, Result};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use std::ffi::OsStr;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

/// Links that are followed to where a file is to be created (`MAXSYMLINKS` of the kernel).
const MAX_LINKS: usize = 40;

/// Opens a file, and creates it where that is asked for and its directory lies on a mount of ours.
/// `O_TRUNC` is left to the caller, who knows what was opened.
pub(crate) fn open(path: &Path, flags: OFlags, mode: Mode) -> Result<OwnedFd> {
    let flags = flags.difference(OFlags::TRUNC) | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    if !flags.contains(OFlags::CREATE) {
        return rustix::fs::open(path, flags, mode).map_err(|errno| failed(path, "open it", errno));
    }
    if !flags.contains(OFlags::EXCL) {
        match rustix::fs::open(path, flags.difference(OFlags::CREATE), Mode::empty()) {
            Err(Errno::NOENT) => {}
            opened => return opened.map_err(|errno| failed(path, "open it", errno)),
        }
    }
    create(path, flags, mode)
}

/// Creates a file. A link that leads nowhere is followed here, and not by the kernel, which would
/// create the file on whatever filesystem that is.
fn create(path: &Path, flags: OFlags, mode: Mode) -> Result<OwnedFd> {
    let mut place = path.to_owned();
    for _ in 0..MAX_LINKS {
        let name = place.file_name().map(OsStr::to_owned).ok_or_else(|| failed(path, "create it", Errno::ISDIR))?;
        let directory = match place.parent() {
            Some(directory) if !directory.as_os_str().is_empty() => directory.to_owned(),
            _ => PathBuf::from("."),
        };
        let opened = open_directory(path, &directory)?;
        match rustix::fs::openat(&opened, &name, flags | OFlags::NOFOLLOW, mode) {
            Err(Errno::LOOP) if !flags.contains(OFlags::NOFOLLOW) => {
                let target =
                    rustix::fs::readlinkat(&opened, &name, Vec::new()).map_err(|errno| failed(path, "create it", errno))?;
                place = directory.join(std::ffi::OsString::from_vec(target.into_bytes()));
            }
            created => return created.map_err(|errno| failed(path, "create it", errno)),
        }
    }
    Err(failed(path, "create it", Errno::LOOP))
}

/// The directory that `path` is to be created in, which lies on a mount of ours.
fn open_directory(path: &Path, directory: &Path) -> Result<OwnedFd> {
    let failed = |errno| failed(path, "open its directory", errno);
    let opened =
        rustix::fs::open(directory, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty()).map_err(failed)?;
    if Connection::known(rustix::fs::fstat(&opened).map_err(failed)?.st_dev).is_none() {
        let asked = rustix::fs::openat(&opened, ".", OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty());
        match Connection::of(asked.map_err(failed)?, directory) {
            Err(Error::NotGpunvme { .. }) => return Err(Error::NotGpunvme { path: path.to_owned() }),
            found => found.map(drop)?,
        }
    }
    Ok(opened)
}

fn failed(path: &Path, action: &'static str, errno: Errno) -> Error {
    Error::Path { path: path.to_owned(), action, errno }
}
