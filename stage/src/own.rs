//! The folder in a set's folder that the program keeps for itself.
//!
//! Root hydrates and evicts in folders that others can write, so nothing there is followed: a
//! symbolic link, a second name of another file, a pipe in place of a file is an error.

use crate::error::{Error, Result};
use crate::names::OWN;
use rustix::fs::{AtFlags, FileType, Mode, OFlags, Stat};
use rustix::io::Errno;
use std::fs::File;
use std::io::Write;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// How folders are opened whose names others may have given away.
pub const FOLDER: OFlags = OFlags::DIRECTORY.union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

/// The users of a file: all that umask(2) lets, and those of them that may write.
pub const ALL: Mode = Mode::from_raw_mode(0o666);
pub const WRITERS: Mode = Mode::from_raw_mode(0o622);

/// That folder, open.
#[derive(Debug)]
pub struct Own {
    path: PathBuf,
    folder: OwnedFd,
}

impl Own {
    /// Opens that of the folder `above`, which lies at `path`, and makes it where there is none.
    ///
    /// # Errors
    /// [`Error::Path`], as all that follow; also where a symbolic link has its name.
    pub fn make(above: impl AsFd, path: &Path) -> Result<Own> {
        let folder = make_folder(above, OWN, path)?;
        Ok(Own { path: path.join(OWN), folder })
    }

    /// Opens that of the folder `above`, which lies at `path`, if there is one.
    pub fn open(above: impl AsFd, path: &Path) -> Result<Option<Own>> {
        let path = path.join(OWN);
        match rustix::fs::openat(above, OWN, FOLDER, Mode::empty()) {
            Ok(folder) => Ok(Some(Own { path, folder })),
            Err(Errno::NOENT) => Ok(None),
            Err(errno) => Err(Error::path(path, "open it")(errno)),
        }
    }

    /// The path of a name in it, for messages.
    pub fn path(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// A folder in it, made where there is none.
    pub fn folder(&self, name: &str) -> Result<OwnedFd> {
        make_folder(&self.folder, name, &self.path)
    }

    /// A folder in it, if there is one.
    pub fn folder_there(&self, name: &str) -> Result<Option<OwnedFd>> {
        match rustix::fs::openat(&self.folder, name, FOLDER, Mode::empty()) {
            Ok(folder) => Ok(Some(folder)),
            Err(Errno::NOENT) => Ok(None),
            Err(errno) => Err(Error::path(self.path(name), "open it")(errno)),
        }
    }

    /// A file in it, open as `flags` say; none where there is none and `flags` do not make it.
    pub fn file(&self, name: &str, flags: OFlags) -> Result<Option<File>> {
        self.file_for(ALL, name, flags)
    }

    /// The same, for the users that `mode` names if it is made.
    pub fn file_for(&self, mode: Mode, name: &str, flags: OFlags) -> Result<Option<File>> {
        open_file(self.folder.as_fd(), name, flags, mode, &self.path)
    }

    /// When a file in it was last changed, if there is one. It need not be one that this user may
    /// read.
    pub fn changed(&self, name: &str) -> Result<Option<SystemTime>> {
        match rustix::fs::statat(&self.folder, name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(found) if !is_own(&found) => Err(Error::Foreign(self.path(name))),
            Ok(found) => {
                let since = Duration::new(found.st_mtime.try_into().unwrap_or(0), found.st_mtime_nsec as u32);
                Ok(Some(UNIX_EPOCH + since))
            }
            Err(Errno::NOENT) => Ok(None),
            Err(errno) => Err(Error::path(self.path(name), "ask its time")(errno)),
        }
    }

    /// Gives a file other content, durably and at once, and returns it.
    pub fn replace(&self, name: &str, content: &[u8]) -> Result<File> {
        let new = format!("{name}.new");
        let path = self.path(&new);
        match rustix::fs::unlinkat(&self.folder, &new, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => {}
            Err(errno) => return Err(Error::path(path, "remove it")(errno)),
        }
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        let made = rustix::fs::openat(&self.folder, &new, flags, ALL).map_err(Error::path(&path, "make it"))?;
        let mut file = File::from(made);
        file.write_all(content).and_then(|()| file.sync_all()).map_err(Error::path(&path, "write it"))?;
        rustix::fs::renameat(&self.folder, &new, &self.folder, name).map_err(Error::path(self.path(name), "replace it"))?;
        rustix::fs::fsync(&self.folder).map_err(Error::path(self.path(name), "make it durable"))?;
        Ok(file)
    }
}

fn make_folder(above: impl AsFd, name: &str, path: &Path) -> Result<OwnedFd> {
    let path = path.join(name);
    match rustix::fs::mkdirat(&above, name, Mode::from_raw_mode(0o777)) {
        Ok(()) | Err(Errno::EXIST) => {}
        Err(errno) => return Err(Error::path(path, "make it")(errno)),
    }
    rustix::fs::openat(above, name, FOLDER, Mode::empty()).map_err(Error::path(path, "open it"))
}

/// Opens a file of this program's in `folder`, which lies at `path`, as `flags` say; none where
/// there is none and `flags` do not make it. One that is made has `mode`, less what umask(2) takes.
/// It is a regular file with no other name.
///
/// # Errors
/// [`Error::Foreign`], [`Error::Path`].
pub fn open_file(folder: BorrowedFd<'_>, name: &str, flags: OFlags, mode: Mode, path: &Path) -> Result<Option<File>> {
    // What is no file does not make the program wait.
    let flags = flags | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let path = path.join(name);
    let file = match rustix::fs::openat(folder, name, flags, mode) {
        Ok(file) => File::from(file),
        Err(Errno::NOENT) => return Ok(None),
        Err(Errno::LOOP | Errno::NXIO) => return Err(Error::Foreign(path)),
        Err(errno) => return Err(Error::path(path, "open it")(errno)),
    };
    // Not by the standard library, which asks for more than the kernel has at hand.
    let found = rustix::fs::fstat(&file).map_err(Error::path(&path, "ask what it is"))?;
    if is_own(&found) { Ok(Some(file)) } else { Err(Error::Foreign(path)) }
}

/// Whether it is a regular file with no other name.
fn is_own(found: &Stat) -> bool {
    FileType::from_raw_mode(found.st_mode) == FileType::RegularFile && found.st_nlink <= 1
}
