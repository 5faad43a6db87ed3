//! The regular files that a command line names, those in folders among them. Folders may be other
//! users', who make, remove and swap files meanwhile: what is opened in a folder lies on its mount,
//! and no link, FIFO or device is. What is named itself is opened by its name, and used as long as
//! it is the same file.

use crate::report::Failure;
use gpunvme::{File, Mount};
use rustix::fs::{AtFlags, CWD, Dir, FileType, Mode, OFlags, ResolveFlags, fstat, openat, openat2, statat};
use rustix::io::Errno;
use std::ffi::{OsStr, OsString};
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
    place: Place,
}

enum Place {
    /// It was named itself: the numbers of its filesystem and inode.
    Named(u64, u64),
    /// The folder that was named, and the path in it.
    Inside(Rc<OwnedFd>, PathBuf),
}

/// What a command line names.
#[derive(Default)]
pub struct Files {
    /// The files, in the order of their names.
    pub found: Vec<Found>,
    /// How many files and folders besides may not be looked at by this user.
    pub unreadable: u64,
}

/// What has become of something that there was.
pub enum Opened<T> {
    /// It is there.
    There(T),
    /// It is not there any more, or something else is.
    Gone,
    /// This user may not read it.
    Unreadable,
}

impl Found {
    /// Opens it.
    pub fn open(&self) -> Result<Opened<fs::File>, Failure> {
        let opened = match &self.place {
            Place::Inside(folder, inside) => open_inside(folder, inside, FLAGS),
            Place::Named(..) => openat(CWD, &self.path, FLAGS, Mode::empty()),
        };
        let (opened, stat) = match sorted(&self.path, opened.and_then(|opened| fstat(&opened).map(|stat| (opened, stat))))? {
            Opened::There(opened) => opened,
            Opened::Gone => return Ok(Opened::Gone),
            Opened::Unreadable => return Ok(Opened::Unreadable),
        };
        let is_file = FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile;
        let is_it = match self.place {
            Place::Named(dev, ino) => (stat.st_dev, stat.st_ino) == (dev, ino),
            Place::Inside(..) => true,
        };
        Ok(if is_file && is_it { Opened::There(opened.into()) } else { Opened::Gone })
    }
}

/// The files of these paths. Links in folders are not followed, and other mounts not entered.
pub fn files(paths: &[PathBuf]) -> Result<Files, Failure> {
    let mut files = Files::default();
    for path in paths {
        // What is named must lie on a mount.
        let named = fs::metadata(path).map_err(|error| Failure(format!("{}: {error}", path.display())))?;
        if named.is_dir() {
            Mount::open(path)?;
            let flags = FLAGS | OFlags::DIRECTORY;
            let folder = openat(CWD, path, flags, Mode::empty()).map_err(|errno| failed(path, errno))?;
            add_folder(path, &Rc::new(folder), &mut files)?;
        } else {
            let stat = fstat(File::open(path)?).map_err(|errno| failed(path, errno))?;
            let place = Place::Named(stat.st_dev, stat.st_ino);
            files.found.push(Found { path: path.clone(), size: stat.st_size as u64, place });
        }
    }
    files.found.sort_by(|one, other| one.path.cmp(&other.path));
    Ok(files)
}

fn add_folder(path: &Path, named: &Rc<OwnedFd>, files: &mut Files) -> Result<(), Failure> {
    let mut rest = vec![PathBuf::new()];
    while let Some(inside) = rest.pop() {
        match sorted(&path.join(&inside), entries(named, &inside))? {
            Opened::There(entries) => {
                rest.extend(entries.folders.into_iter().map(|name| inside.join(name)));
                files.found.extend(entries.files.into_iter().map(|(name, size)| {
                    let inside = inside.join(name);
                    Found { path: path.join(&inside), size, place: Place::Inside(named.clone(), inside) }
                }));
            }
            Opened::Gone => {}
            Opened::Unreadable => files.unreadable += 1,
        }
    }
    Ok(())
}

/// What is in a folder.
#[derive(Default)]
struct Entries {
    files: Vec<(OsString, u64)>,
    folders: Vec<OsString>,
}

/// What is in the folder `inside` of one that was named.
fn entries(named: &OwnedFd, inside: &Path) -> rustix::io::Result<Entries> {
    let mut entries = Entries::default();
    let this = if inside.as_os_str().is_empty() { Path::new(".") } else { inside };
    let folder = open_inside(named, this, FLAGS | OFlags::DIRECTORY)?;
    for entry in Dir::read_from(&folder)? {
        let entry = entry?;
        let name = OsStr::from_bytes(entry.file_name().to_bytes());
        if name == "." || name == ".." {
            continue;
        }
        let stat = match statat(&folder, name, AtFlags::SYMLINK_NOFOLLOW) {
            Err(errno) if is_gone(errno) => continue,
            found => found?,
        };
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::RegularFile => entries.files.push((name.to_owned(), stat.st_size as u64)),
            FileType::Directory => entries.folders.push(name.to_owned()),
            _ => {}
        }
    }
    Ok(entries)
}

/// Opens what lies below a folder and nothing else.
fn open_inside(folder: &OwnedFd, inside: &Path, flags: OFlags) -> rustix::io::Result<OwnedFd> {
    openat2(folder, inside, flags, Mode::empty(), INSIDE)
}

/// Sorts the errors of what other users may do to a path from those that end the command.
fn sorted<T>(path: &Path, opened: rustix::io::Result<T>) -> Result<Opened<T>, Failure> {
    match opened {
        Ok(opened) => Ok(Opened::There(opened)),
        Err(errno) if is_gone(errno) => Ok(Opened::Gone),
        Err(Errno::ACCESS) => Ok(Opened::Unreadable),
        // Only openat2(2) has these: of an older kernel, and of a filter of system calls.
        Err(errno @ (Errno::NOSYS | Errno::PERM)) => Err(Failure(format!(
            "{}: folders are read by openat2(2), and that is refused ({}); it takes Linux 5.6, and in a container a runtime \
             whose seccomp profile knows it",
            path.display(),
            std::io::Error::from(errno)
        ))),
        Err(errno) => Err(failed(path, errno)),
    }
}

/// Whether a name has gone, has become that of something else, or has come to lie too deep to be
/// named.
fn is_gone(errno: Errno) -> bool {
    [Errno::NOENT, Errno::NOTDIR, Errno::LOOP, Errno::XDEV, Errno::NXIO, Errno::STALE, Errno::NAMETOOLONG].contains(&errno)
}

fn failed(path: &Path, errno: Errno) -> Failure {
    Failure(format!("{}: {}", path.display(), std::io::Error::from(errno)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{MetadataExt, symlink};

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
        let mut files = listed(&folder).found;
        files.sort_by(|one, other| one.path.cmp(&other.path));
        let found: Vec<_> =
            files.iter().map(|file| (file.path.strip_prefix(&folder).unwrap().to_str().unwrap(), file.size)).collect();
        assert_eq!(found, names.map(|name| (name, name.len() as u64)));
        names.iter().skip(1).filter(|name| **name != "kept").for_each(|name| fs::remove_file(folder.join(name)).unwrap());
        rustix::fs::mknodat(CWD, folder.join("fifo"), FileType::Fifo, 0o666.into(), 0).unwrap();
        symlink(elsewhere.join("file"), folder.join("link")).unwrap();
        fs::remove_dir_all(folder.join("deep")).unwrap();
        symlink(&elsewhere, folder.join("deep")).unwrap();
        let opened: Vec<_> = files.iter().map(is_there).collect();
        assert_eq!(opened, [false, false, false, true, false]);
    }

    /// A name is as long as names may be here, and a path longer than those that may be opened.
    #[test]
    fn what_lies_too_deep_is_passed_over() {
        let scratch = tempfile::tempdir().unwrap();
        fs::write(scratch.path().join("kept"), b"kept").unwrap();
        let mut folder: OwnedFd = fs::File::open(scratch.path()).unwrap().into();
        let name = "x".repeat(255);
        for _ in 0..17 {
            rustix::fs::mkdirat(&folder, &name, Mode::RWXU).unwrap();
            folder = openat(&folder, &name, FLAGS | OFlags::DIRECTORY, Mode::empty()).unwrap();
        }
        let files = listed(scratch.path());
        assert_eq!((files.found.len(), files.unreadable), (1, 0));
    }

    #[test]
    fn another_file_by_a_name_that_was_named_is_passed_over() {
        let scratch = tempfile::tempdir().unwrap();
        let [path, other] = ["file", "other"].map(|name| scratch.path().join(name));
        fs::write(&path, b"").unwrap();
        fs::write(&other, b"").unwrap();
        let stat = fs::metadata(&path).unwrap();
        let found = Found { path: path.clone(), size: 0, place: Place::Named(stat.dev(), stat.ino()) };
        assert!(is_there(&found));
        fs::remove_file(&path).unwrap();
        symlink(&other, &path).unwrap();
        assert!(!is_there(&found));
    }

    #[test]
    fn what_may_not_be_read_does_not_end_the_others() {
        let of = |errno: Errno| sorted(Path::new("folder"), Err::<(), _>(errno));
        assert!(matches!(of(Errno::ACCESS), Ok(Opened::Unreadable)));
        assert!([Errno::STALE, Errno::NAMETOOLONG].into_iter().all(|errno| matches!(of(errno), Ok(Opened::Gone))));
        assert!(of(Errno::IO).is_err_and(|failure| failure.0 == "folder: Input/output error (os error 5)"));
        for errno in [Errno::NOSYS, Errno::PERM] {
            assert!(of(errno).is_err_and(|failure| failure.0.contains("openat2(2)")), "{errno}");
        }
    }

    fn listed(folder: &Path) -> Files {
        let mut files = Files::default();
        add_folder(folder, &Rc::new(fs::File::open(folder).unwrap().into()), &mut files).unwrap();
        files
    }

    fn is_there(found: &Found) -> bool {
        matches!(found.open().unwrap(), Opened::There(_))
    }
}
