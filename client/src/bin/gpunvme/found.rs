//! The regular files that a command line names, those in folders among them. Folders may be other
//! users', who make, remove and swap files meanwhile: what is opened lies on the mount that was
//! named, and no link, FIFO or device is.

use crate::report::Failure;
use gpunvme::{File, Mount};
use rustix::fs::{AtFlags, CWD, Dir, FileType, Mode, OFlags, ResolveFlags, fstat, openat, openat2, statat};
use rustix::io::Errno;
use std::ffi::OsStr;
use std::fs;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::rc::Rc;

/// Nothing is waited for: to open a FIFO waits for its other end.
const FLAGS: OFlags = OFlags::RDONLY.union(OFlags::NONBLOCK).union(OFlags::NOCTTY).union(OFlags::CLOEXEC);
/// What is found below a folder stays there.
const INSIDE: ResolveFlags = ResolveFlags::BENEATH.union(ResolveFlags::NO_SYMLINKS).union(ResolveFlags::NO_XDEV);

/// A regular file that there was.
pub struct Found {
    /// Its path, as it was named or begins with a folder that was.
    pub path: PathBuf,
    /// Its size in bytes.
    pub size: u64,
    /// The folder that was named, and the path in it. None: the file itself was named.
    inside: Option<(Rc<OwnedFd>, PathBuf)>,
}

impl Found {
    /// Opens it; `None` where it is not there any more.
    pub fn open(&self) -> Result<Option<fs::File>, Failure> {
        let opened = match &self.inside {
            Some((folder, inside)) => openat2(folder, inside, FLAGS, Mode::empty(), INSIDE),
            None => openat(CWD, &self.path, FLAGS, Mode::empty()),
        };
        let opened = match opened {
            Err(errno) if is_gone(errno) => return Ok(None),
            opened => opened.map_err(|errno| failed(&self.path, errno))?,
        };
        let stat = fstat(&opened).map_err(|errno| failed(&self.path, errno))?;
        let is_file = FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile;
        Ok(is_file.then(|| opened.into()))
    }
}

/// The files of these paths, in the order of their names. Links in folders are not followed, and
/// other mounts not entered.
pub fn files(paths: &[PathBuf]) -> Result<Vec<Found>, Failure> {
    let mut files = Vec::new();
    for path in paths {
        // What is named must lie on a mount.
        let named = fs::metadata(path).map_err(|error| Failure(format!("{}: {error}", path.display())))?;
        if named.is_dir() {
            Mount::open(path)?;
            let flags = FLAGS | OFlags::DIRECTORY;
            let folder = openat(CWD, path, flags, Mode::empty()).map_err(|errno| failed(path, errno))?;
            add_folder(path, &Rc::new(folder), &mut files)?;
        } else {
            File::open(path)?;
            files.push(Found { path: path.clone(), size: named.len(), inside: None });
        }
    }
    files.sort_by(|one, other| one.path.cmp(&other.path));
    Ok(files)
}

fn add_folder(path: &Path, named: &Rc<OwnedFd>, files: &mut Vec<Found>) -> Result<(), Failure> {
    let mut rest = vec![PathBuf::new()];
    while let Some(inside) = rest.pop() {
        let failed = |errno| failed(&path.join(&inside), errno);
        let this = if inside.as_os_str().is_empty() { Path::new(".") } else { &inside };
        let folder = match openat2(named, this, FLAGS | OFlags::DIRECTORY, Mode::empty(), INSIDE) {
            Err(errno) if is_gone(errno) => continue,
            opened => opened.map_err(failed)?,
        };
        for entry in Dir::read_from(&folder).map_err(failed)? {
            let entry = entry.map_err(failed)?;
            let name = OsStr::from_bytes(entry.file_name().to_bytes());
            if name == "." || name == ".." {
                continue;
            }
            let stat = match statat(&folder, name, AtFlags::SYMLINK_NOFOLLOW) {
                Err(Errno::NOENT) => continue,
                found => found.map_err(failed)?,
            };
            let inside = inside.join(name);
            match FileType::from_raw_mode(stat.st_mode) {
                FileType::RegularFile => {
                    let (path, size) = (path.join(&inside), stat.st_size as u64);
                    files.push(Found { path, size, inside: Some((named.clone(), inside)) });
                }
                FileType::Directory => rest.push(inside),
                _ => {}
            }
        }
    }
    Ok(())
}

/// Whether a name has gone, or has become that of something else.
fn is_gone(errno: Errno) -> bool {
    [Errno::NOENT, Errno::NOTDIR, Errno::LOOP, Errno::XDEV, Errno::NXIO].contains(&errno)
}

fn failed(path: &Path, errno: Errno) -> Failure {
    Failure(format!("{}: {}", path.display(), std::io::Error::from(errno)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    /// What another user puts in the place of a file between the listing and the opening.
    #[test]
    fn what_has_become_something_else_is_passed_over() {
        let scratch = tempfile::tempdir().unwrap();
        let (folder, elsewhere) = (scratch.path().join("folder"), scratch.path().join("elsewhere"));
        fs::create_dir_all(folder.join("deep")).unwrap();
        fs::create_dir(&elsewhere).unwrap();
        fs::write(elsewhere.join("file"), b"another's").unwrap();
        let names = ["deep/file", "fifo", "gone", "kept", "link"];
        names.iter().for_each(|name| fs::write(folder.join(name), name).unwrap());
        let mut files = Vec::new();
        add_folder(&folder, &Rc::new(fs::File::open(&folder).unwrap().into()), &mut files).unwrap();
        files.sort_by(|one, other| one.path.cmp(&other.path));
        let found: Vec<_> =
            files.iter().map(|file| (file.path.strip_prefix(&folder).unwrap().to_str().unwrap(), file.size)).collect();
        assert_eq!(found, names.map(|name| (name, name.len() as u64)));
        names.iter().skip(1).filter(|name| **name != "kept").for_each(|name| fs::remove_file(folder.join(name)).unwrap());
        rustix::fs::mknodat(CWD, folder.join("fifo"), FileType::Fifo, 0o666.into(), 0).unwrap();
        symlink(elsewhere.join("file"), folder.join("link")).unwrap();
        fs::remove_dir_all(folder.join("deep")).unwrap();
        symlink(&elsewhere, folder.join("deep")).unwrap();
        let opened: Vec<_> = files.iter().map(|file| file.open().unwrap().is_some()).collect();
        assert_eq!(opened, [false, false, false, true, false]);
    }
}
