//! Places in the directory tree: what is mounted there, and what is to be.
//!
//! Of a path every folder may be replaced by a link meanwhile, by the user whose folder it lies in.
//! So a place is looked up once, and held by descriptors: what is seen there is what is unmounted,
//! and what was named is what is mounted on.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, Mode, OFlags, ResolveFlags, StatxFlags, openat, openat2, statx};
use rustix::io::Errno;
use rustix::mount::{UnmountFlags, unmount};

use super::error::MountError;
use gpunvme_programs::mounts::Mount;

/// `STATX_MNT_ID_UNIQUE` (linux/stat.h, since 6.8): an identity that no later mount gets again.
const MNT_ID_UNIQUE: StatxFlags = StatxFlags::from_bits_retain(0x4000);
/// A descriptor of a directory that may not be read, and of no more than that.
const DIRECTORY: OFlags = OFlags::PATH.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);

/// The place of a mount: the directory above it, and its name there, which the kernel lets no
/// program rename as long as something is mounted on it.
#[derive(Debug)]
pub struct Place {
    dir: PathBuf,
    parent: OwnedFd,
    name: OsString,
}

/// A mount in this process's mount namespace: the kernel's number for it, and that of its
/// filesystem.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity {
    id: u64,
    dev: u64,
}

impl Place {
    /// Looks up a real path.
    ///
    /// # Errors
    /// It is none, or none any more.
    pub fn of(dir: &Path) -> rustix::io::Result<Place> {
        let (parent, name) = match (dir.parent(), dir.file_name()) {
            (Some(parent), Some(name)) => (parent, name),
            _ => (dir, OsStr::new(".")),
        };
        let parent = match openat2(CWD, parent, DIRECTORY, Mode::empty(), ResolveFlags::NO_SYMLINKS) {
            // A kernel before 5.6, or a container's filter, does not know the call.
            Err(Errno::NOSYS | Errno::PERM) => openat(CWD, parent, DIRECTORY, Mode::empty())?,
            parent => parent?,
        };
        Ok(Place { dir: dir.to_owned(), parent, name: name.to_owned() })
    }

    /// Its path when it was looked up.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The mount that it shows, of several the uppermost.
    pub fn identity(&self) -> Option<Identity> {
        self.identity_by(MNT_ID_UNIQUE)
    }

    /// Whether it shows a mount that the mount table lists.
    pub fn shows(&self, mount: &Mount) -> bool {
        // The mount table has the other number.
        self.identity_by(StatxFlags::empty()) == Some(Identity { id: mount.id, dev: mount.dev })
    }

    /// Asks the kernel and not the filesystem, which may not answer; of a mount that root may not
    /// enter it is told only where nothing else is asked.
    fn identity_by(&self, kind: StatxFlags) -> Option<Identity> {
        let flags = AtFlags::STATX_DONT_SYNC | AtFlags::SYMLINK_NOFOLLOW | AtFlags::NO_AUTOMOUNT;
        let found = statx(&self.parent, &self.name, flags, kind).ok()?;
        Some(Identity { id: found.stx_mnt_id, dev: rustix::fs::makedev(found.stx_dev_major, found.stx_dev_minor) })
    }

    /// Unmounts what it shows.
    ///
    /// # Errors
    /// Those of umount2(2).
    pub fn unmount(&self, flags: UnmountFlags) -> rustix::io::Result<()> {
        unmount(by_descriptor(&self.parent).join(&self.name), flags | UnmountFlags::NOFOLLOW)
    }

    /// Opens the root of what it shows.
    ///
    /// # Errors
    /// Those of openat(2).
    pub fn open(&self) -> rustix::io::Result<OwnedFd> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        openat(&self.parent, &self.name, flags, Mode::empty())
    }
}

/// A directory to mount on.
#[derive(Debug)]
pub struct MountPoint {
    dir: PathBuf,
    directory: OwnedFd,
}

impl MountPoint {
    /// The directory of this path.
    ///
    /// # Errors
    /// There is none, or no `/proc`, which tells what is mounted where.
    pub fn of(dir: &Path) -> Result<MountPoint, MountError> {
        let failed = |why: &dyn std::fmt::Display| MountError::Failed(format!("mount point {}: {why}", dir.display()));
        let directory = rustix::fs::open(dir, DIRECTORY, Mode::empty()).map_err(|errno| match errno {
            Errno::NOENT => failed(&format_args!("no such directory; `mkdir -p {}` makes it", dir.display())),
            Errno::NOTDIR => failed(&"not a directory"),
            errno => failed(&io::Error::from(errno)),
        })?;
        let dir = path_of(&directory).map_err(|error| failed(&format_args!("/proc does not tell where it is: {error}")))?;
        Ok(MountPoint { dir, directory })
    }

    /// Its real path when it was looked up.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Its real path now.
    ///
    /// # Errors
    /// `/proc` is not there to ask.
    pub fn dir_now(&self) -> io::Result<PathBuf> {
        path_of(&self.directory)
    }

    /// A path that leads to it whatever its own has become.
    pub fn path(&self) -> PathBuf {
        by_descriptor(&self.directory)
    }
}

impl AsFd for MountPoint {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.directory.as_fd()
    }
}

fn path_of(directory: &OwnedFd) -> io::Result<PathBuf> {
    std::fs::read_link(by_descriptor(directory))
}

fn by_descriptor(directory: &OwnedFd) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", directory.as_raw_fd()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mount_is_told_from_its_parent() {
        let identity = |dir: &str| Place::of(Path::new(dir)).unwrap().identity().unwrap();
        assert_eq!(identity("/"), identity("/"));
        assert_ne!(identity("/proc"), identity("/"));
        let listed = Mount::on(Path::new("/proc")).unwrap();
        assert!(Place::of(Path::new("/proc")).unwrap().shows(&listed));
        assert!(!Place::of(Path::new("/")).unwrap().shows(&listed));
    }

    #[test]
    fn a_folder_that_became_a_link_leads_nowhere() {
        let root = tempfile::tempdir().unwrap();
        let root = root.path().canonicalize().unwrap();
        let (folder, dir) = (root.join("folder"), root.join("folder/dir"));
        std::fs::create_dir_all(&dir).unwrap();
        let (place, point) = (Place::of(&dir).unwrap(), MountPoint::of(&dir).unwrap());
        let before = place.identity();
        std::fs::rename(&folder, root.join("moved")).unwrap();
        std::os::unix::fs::symlink("/", &folder).unwrap();
        assert!(Place::of(&root.join("folder/proc")).is_err());
        assert_eq!((place.identity(), point.dir_now().unwrap()), (before, root.join("moved/dir")));
        assert!(MountPoint::of(&root.join("none")).is_err_and(|error| error.to_string().contains("mkdir -p")));
    }
}
