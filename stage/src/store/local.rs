//! Folders as sources: which links are followed there, and which names cannot be read.

use crate::error::{Error, Result};
use rustix::fs::{FileType, Mode, OFlags};
use rustix::io::Errno;
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

/// Most symbolic links on the way to a file, as the kernel has it.
const MOST_LINKS: usize = 40;

/// Reads bytes of a file that was opened by its name in a folder; says whether the name leads to it
/// by links that may be followed.
///
/// # Errors
/// Those of [`identity`].
pub fn read(file: &File, folder: &Path, name: &str, bytes: &mut [u8], offset: u64) -> Result<bool> {
    let failed = |action| Error::path(folder.join(name), action);
    let found = file.metadata().map_err(failed("ask what it is"))?;
    if identity(folder, name)? != (found.dev(), found.ino()) {
        return Ok(false);
    }
    file.read_exact_at(bytes, offset).map_err(failed("read it")).map(|()| true)
}

/// Device and inode of the file `name` in `folder`. On the way there, links are followed that
/// belong to this process's user or to root: others may lead to what only that user may read.
///
/// # Errors
/// [`Error::Link`], [`Error::Path`].
fn identity(folder: &Path, name: &str) -> Result<(u64, u64)> {
    let failed = |errno: Errno| Error::path(folder.join(name), "find it")(errno);
    let open = |path: &Path| rustix::fs::open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).map_err(failed);
    let parts = |path: &Path| path.iter().rev().map(OsStr::to_owned).collect::<Vec<OsString>>();
    let (mut at, mut links, mut ahead): (OwnedFd, _, _) = (open(folder)?, 0, parts(Path::new(name)));
    while let Some(part) = ahead.pop() {
        if part == "/" {
            at = open(Path::new("/"))?;
            continue;
        }
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let next = rustix::fs::openat(&at, &part, flags, Mode::empty()).map_err(failed)?;
        let found = rustix::fs::fstat(&next).map_err(failed)?;
        if FileType::from_raw_mode(found.st_mode) != FileType::Symlink {
            at = next;
            continue;
        }
        links += 1;
        if links > MOST_LINKS {
            return Err(failed(Errno::LOOP));
        }
        if ![0, rustix::process::geteuid().as_raw()].contains(&found.st_uid) {
            return Err(Error::Link { path: folder.join(name), owner: found.st_uid });
        }
        let target = rustix::fs::readlinkat(&next, "", Vec::new()).map_err(failed)?;
        ahead.extend(parts(&PathBuf::from(OsString::from_vec(target.into_bytes()))));
    }
    let found = rustix::fs::fstat(&at).map_err(failed)?;
    Ok((found.st_dev, found.st_ino))
}

/// Sees to it that a folder has no files that its listing leaves out: object_store takes them for
/// files that it has not written to their ends.
///
/// # Errors
/// [`Error::Unlisted`] of the first, [`Error::Path`].
pub fn check_listed(folder: &Path) -> Result<()> {
    if !folder.is_dir() {
        return Ok(());
    }
    for entry in std::fs::read_dir(folder).map_err(Error::path(folder, "read it"))? {
        let entry = entry.map_err(Error::path(folder, "read it"))?;
        let kind = entry.file_type().map_err(Error::path(entry.path(), "ask what it is"))?;
        if kind.is_dir() || kind.is_symlink() && entry.path().is_dir() {
            check_listed(&entry.path())?;
        } else if is_unlisted(entry.file_name().as_bytes()) {
            return Err(Error::Unlisted(entry.path()));
        }
    }
    Ok(())
}

/// Whether a name goes on with a number, and nothing else, after its first `#`.
fn is_unlisted(name: &[u8]) -> bool {
    let number = name.iter().position(|&byte| byte == b'#').map(|at| &name[at + 1..]);
    number.is_some_and(|number| !number.is_empty() && number.iter().all(u8::is_ascii_digit))
}
