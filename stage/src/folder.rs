//! The folder that a set lies in: its lock, its partial files, and how a file gets its name.
//!
//! It guards two promises: a name in the folder is a whole file, and none leads out of it.

use crate::error::{Error, Result};
use crate::exclusive;
use crate::manifest::{Entry, Manifest};
use crate::memory::Data;
use crate::names::OWN;
use crate::own::{self, FOLDER, Own};
use gpunvme::Mount;
use gpunvme_programs::sets::Quota;
use rustix::fs::{AtFlags, Dir, FallocateFlags, FileType, FlockOperation, Mode, OFlags, RenameFlags, Stat, Timespec, Timestamps};
use rustix::io::Errno;
use std::collections::btree_map::Entry as Slot;
use std::collections::{BTreeMap, HashSet};
use std::fs::{File, Metadata};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

const NANOSECONDS: i128 = 1_000_000_000;

/// What a file is named among the partial files that is about to be removed.
const LEAVES: &str = "leaves";

/// A set's folder.
#[derive(Debug)]
pub struct Folder {
    path: PathBuf,
    root: OwnedFd,
    own: Arc<Own>,
    partial: OwnedFd,
    /// The mount that it lies on, where that is gpunvme's.
    pub mount: Option<Mount>,
}

/// While it lives, no other process changes the set.
#[derive(Debug)]
pub struct Lock(File);

impl Lock {
    /// The set is used now, which its eviction goes by.
    ///
    /// # Errors
    /// What the filesystem says.
    pub fn used(&self) -> std::result::Result<(), Errno> {
        let now = Timespec { tv_sec: 0, tv_nsec: rustix::fs::UTIME_NOW };
        rustix::fs::futimens(&self.0, &Timestamps { last_access: now, last_modification: now })
    }
}

impl Folder {
    /// The folder at `path`, made where there is none.
    ///
    /// # Errors
    /// [`Error::FileThere`], [`Error::Path`], and [`Error::Direct`] where the mount does not
    /// answer.
    pub fn create(path: &Path) -> Result<Folder> {
        std::fs::create_dir_all(path).map_err(|error| match error.raw_os_error() {
            Some(libc::EEXIST | libc::ENOTDIR) => Error::FileThere(path.into()),
            _ => Error::path(path, "make it")(error),
        })?;
        let flags = OFlags::DIRECTORY | OFlags::CLOEXEC;
        let root = rustix::fs::open(path, flags, Mode::empty()).map_err(Error::path(path, "open it"))?;
        let mount = match Mount::open(path) {
            Ok(mount) => Some(mount),
            Err(gpunvme::Error::NotGpunvme { .. }) => None,
            Err(error) => return Err(error.into()),
        };
        Ok(Folder { mount, ..Folder::of(root, path)? })
    }

    /// The folder that is open as `root`, and lies at `path`, without a mount.
    ///
    /// # Errors
    /// [`Error::Path`].
    pub fn of(root: OwnedFd, path: &Path) -> Result<Folder> {
        let own = Own::make(&root, path)?;
        let partial = own.folder("partial")?;
        Ok(Folder { path: path.into(), root, own: Arc::new(own), partial, mount: None })
    }

    /// What the program keeps for itself in it.
    pub fn own(&self) -> &Arc<Own> {
        &self.own
    }

    /// The manifest of the set, whose lock is held. It knows which files have their names, whenever
    /// an earlier process was killed.
    ///
    /// # Errors
    /// As [`Manifest::open`].
    pub fn manifest(&self) -> Result<Manifest> {
        let mut manifest = Manifest::open(&self.own)?;
        let has_name = |partial: &str, name: &str, entry: &Entry| {
            let found = rustix::fs::statat(&self.partial, partial, AtFlags::SYMLINK_NOFOLLOW);
            found.is_err_and(|errno| errno == Errno::NOENT) && self.has_file(name, entry)
        };
        manifest.recover(has_name)?;
        // Before a new partial file has the name of one that is gone.
        let is_there = |partial: &str| rustix::fs::statat(&self.partial, partial, AtFlags::SYMLINK_NOFOLLOW).is_ok();
        manifest.drop_parts_unless(is_there)?;
        Ok(manifest)
    }

    /// The lock of the set; waits for it where another process has it, after `wait` said so.
    ///
    /// # Errors
    /// [`Error::Path`].
    pub fn lock(&self, wait: impl FnOnce()) -> Result<Lock> {
        if let Some(lock) = self.try_lock()? {
            return Ok(lock);
        }
        wait();
        let file = self.lock_file()?;
        rustix::io::retry_on_intr(|| rustix::fs::flock(&file, FlockOperation::LockExclusive))
            .map_err(Error::path(self.own.path("lock"), "lock it"))?;
        Ok(Lock(file))
    }

    /// The lock of the set, unless another process has it.
    ///
    /// # Errors
    /// [`Error::Path`].
    pub fn try_lock(&self) -> Result<Option<Lock>> {
        let file = self.lock_file()?;
        match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Err(Errno::WOULDBLOCK) => Ok(None),
            locked => locked.map(|()| Some(Lock(file))).map_err(Error::path(self.own.path("lock"), "lock it")),
        }
    }

    fn lock_file(&self) -> Result<File> {
        // A user who may only read in the folder gets no descriptor by which to hold it.
        let flags = OFlags::CREATE | OFlags::APPEND | OFlags::WRONLY;
        self.own.file_for(own::WRITERS, "lock", flags)?.ok_or_else(|| Error::Foreign(self.own.path("lock")))
    }

    /// The path of a name of the set.
    pub fn path_of(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// Whether a file of the set in `folder` is as `hydrate` left it, by its length and time.
    pub fn has(folder: impl AsFd, name: &str, entry: &Entry) -> bool {
        rustix::fs::statat(folder, name, AtFlags::SYMLINK_NOFOLLOW).is_ok_and(|found| {
            let is_file = FileType::from_raw_mode(found.st_mode) == FileType::RegularFile;
            is_file && found.st_size as u64 == entry.size && time_of(&found) == entry.modified
        })
    }

    /// The same of this one.
    pub fn has_file(&self, name: &str, entry: &Entry) -> bool {
        Folder::has(&self.root, name, entry)
    }

    /// The bytes of a quota for the sets below a folder.
    ///
    /// # Errors
    /// [`Error::Path`].
    pub fn bytes_of(quota: Quota, folder: &Path) -> Result<u64> {
        match quota {
            Quota::Bytes(bytes) => Ok(bytes),
            Quota::Percent(percent) => {
                let found = rustix::fs::statvfs(folder).map_err(Error::path(folder, "ask how large its filesystem is"))?;
                Ok(found.f_blocks.saturating_mul(found.f_frsize) / 100 * percent)
            }
        }
    }

    /// Bytes that are free.
    ///
    /// # Errors
    /// [`Error::Path`].
    pub fn free(&self) -> Result<u64> {
        let found = rustix::fs::fstatvfs(&self.root).map_err(Error::path(&self.path, "ask what is free"))?;
        Ok(found.f_bavail.saturating_mul(found.f_frsize))
    }

    /// The partial files, with the bytes that each takes.
    ///
    /// # Errors
    /// [`Error::Path`].
    pub fn partials(&self) -> Result<Vec<(String, u64)>> {
        partials(&self.partial, &self.own.path("partial"))
    }

    /// Removes a partial file.
    ///
    /// # Errors
    /// [`Error::Path`].
    pub fn remove_partial(&self, partial: &str) -> Result<()> {
        match rustix::fs::unlinkat(&self.partial, partial, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => Ok(()),
            Err(errno) => Err(Error::path(self.own.path("partial").join(partial), "remove it")(errno)),
        }
    }

    /// Opens a partial file for `size` bytes, and makes it where there is none. Says whether it was
    /// there. A new one has room for them if `in_parts` they come; one write makes its own.
    ///
    /// # Errors
    /// [`Error::Path`], also where the filesystem is full.
    pub fn partial(&self, partial: &str, size: u64, in_parts: bool) -> Result<(Data, bool)> {
        let above = self.own.path("partial");
        let path = above.join(partial);
        let failed = |action| Error::path(&path, action);
        let open = |flags| own::open_file(self.partial.as_fd(), partial, OFlags::RDWR | flags, own::ALL, &above);
        // Most are new, and cost one look-up so.
        let (file, is_old) = match open(OFlags::CREATE | OFlags::EXCL) {
            Err(Error::Path { errno: Errno::EXIST, .. }) => (open(OFlags::empty())?, true),
            made => (made?, false),
        };
        let file = file.ok_or_else(|| Error::Foreign(path.clone()))?;
        let lengthen = || {
            if is_old || in_parts {
                rustix::fs::ftruncate(&file, size).map_err(failed("make it as long as the object"))?;
            }
            let reserved = if in_parts { rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, size) } else { Ok(()) };
            match reserved {
                Ok(()) | Err(Errno::OPNOTSUPP) => Ok(()),
                Err(errno) => Err(failed("reserve its space")(errno)),
            }
        };
        if let Err(error) = lengthen() {
            // What has no room is as if it had not begun.
            if !is_old {
                self.remove_partial(partial)?;
            }
            return Err(error);
        }
        Ok((Data::new(file.into(), &path, self.mount.is_some())?, is_old))
    }

    /// Gives a file, whose bytes are all there, its time of modification, in nanoseconds since
    /// 1970, and returns the one that it has then: a filesystem may not know the nanosecond, or the
    /// year. On other filesystems than gpunvme it is durable then; there, [`Folder::sync`] makes it
    /// so.
    ///
    /// # Errors
    /// [`Error::Path`].
    pub fn settle(&self, data: &Data, name: &str, modified: i128) -> Result<i128> {
        let failed = |action| Error::path(self.path_of(name), action);
        let time = Timespec { tv_sec: modified.div_euclid(NANOSECONDS) as i64, tv_nsec: modified.rem_euclid(NANOSECONDS) as i64 };
        let times = Timestamps { last_access: time, last_modification: time };
        rustix::fs::futimens(data.file(), &times).map_err(failed("give it its time"))?;
        if self.mount.is_none() {
            rustix::fs::fsync(data.file()).map_err(failed("make it durable"))?;
        }
        rustix::fs::fstat(data.file()).map(|found| time_of(&found)).map_err(failed("ask its time"))
    }

    /// Makes partial files that were settled durable: many by one sync of the mount, which costs as
    /// much as that of a file. What is left is to ask each whether its bytes were lost.
    ///
    /// # Errors
    /// [`Error::Path`].
    pub fn sync<'a>(&self, partials: impl ExactSizeIterator<Item = &'a str>) -> Result<()> {
        let Some(mount) = &self.mount else { return Ok(()) };
        if partials.len() > 1 {
            let _ = mount.sync(); // an error may be of other files, and may have been told to others before
        }
        let above = self.own.path("partial");
        for partial in partials {
            let file = own::open_file(self.partial.as_fd(), partial, OFlags::RDONLY, own::ALL, &above)?;
            let file = file.ok_or_else(|| Error::Foreign(above.join(partial)))?;
            rustix::fs::fsync(file).map_err(Error::path(above.join(partial), "make it durable"))?;
        }
        Ok(())
    }

    /// Gives partial files, which are durable, their names: pairs of both. The names are durable
    /// afterwards. They replace files of the same names. Says of each, in their order, whether it
    /// has its name: what is in the way of one is not in that of others.
    ///
    /// # Errors
    /// [`Error::Path`] where names may not be durable. Of a file, where it has not got its name; a
    /// folder of a name that is a symbolic link is a reason.
    pub fn appear<'a>(&self, files: impl Iterator<Item = (&'a str, &'a str)>) -> Result<Vec<Result<()>>> {
        let mut folders: BTreeMap<&str, OwnedFd> = BTreeMap::new();
        let mut appear = |partial, name: &'a str| {
            let folder = match folders.entry(folder_part(name)) {
                Slot::Occupied(known) => known.into_mut(),
                Slot::Vacant(slot) => slot.insert(self.folder_of(name, true)?),
            };
            let failed = Error::path(self.path_of(name), "give it its name");
            rustix::fs::renameat(&self.partial, partial, &*folder, last_part(name)).map_err(failed)
        };
        let appeared = files.map(|(partial, name)| appear(partial, name)).collect();
        for (above, folder) in folders {
            rustix::fs::fsync(folder).map_err(Error::path(self.path_of(above), "make its names durable"))?;
        }
        Ok(appeared)
    }

    /// Opens a file of the set to read. No symbolic link leads there.
    ///
    /// # Errors
    /// [`Error::Path`].
    pub fn open(&self, name: &str) -> Result<File> {
        let folder = self.folder_of(name, false)?;
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let open = rustix::fs::openat(&folder, last_part(name), flags, Mode::empty());
        open.map(File::from).map_err(Error::path(self.path_of(name), "open it"))
    }

    /// Removes a file of the set that is as `hydrate` left it, has no other name, and that no
    /// process has open. Says whether it did. A file that takes its name meanwhile stays.
    ///
    /// # Errors
    /// [`Error::Path`].
    pub fn remove_unless_open(&self, name: &str, entry: &Entry) -> Result<bool> {
        if !self.has_file(name, entry) {
            return Ok(false);
        }
        let path = self.path_of(name);
        let failed = |action| Error::path(&path, action);
        let folder = self.folder_of(name, false)?;
        let file = self.open(name)?;
        let is_same = file.metadata().map_err(Error::path(&path, "ask what it is")).map(|found| is_as_left(&found, entry))?;
        // The name goes while no process can open it.
        if !is_same || !exclusive::take(&file).map_err(failed("ask who has it open"))? {
            return Ok(false);
        }
        rustix::fs::renameat(&folder, last_part(name), &self.partial, LEAVES).map_err(failed("remove it"))?;
        let took = rustix::fs::statat(&self.partial, LEAVES, AtFlags::SYMLINK_NOFOLLOW).map_err(failed("ask what it is"))?;
        let left = rustix::fs::fstat(&file).map_err(failed("ask what it is"))?;
        if (took.st_dev, took.st_ino) == (left.st_dev, left.st_ino) && left.st_nlink == 1 {
            self.remove_partial(LEAVES)?;
            return Ok(true);
        }
        // Another one, which a process has just given that name, or one that has just got a
        // second. What came after it is newer.
        let back = RenameFlags::NOREPLACE;
        match rustix::fs::renameat_with(&self.partial, LEAVES, &folder, last_part(name), back) {
            Ok(()) => Ok(false),
            Err(Errno::EXIST) => self.remove_partial(LEAVES).map(|()| false),
            Err(errno) => Err(failed("leave it")(errno)),
        }
    }

    /// Removes a file of the set that is as `hydrate` left it, whatever process has it open, if
    /// there is one.
    ///
    /// # Errors
    /// [`Error::Path`].
    pub fn remove(&self, name: &str, entry: &Entry) -> Result<()> {
        if self.has_file(name, entry) {
            let folder = self.folder_of(name, false)?;
            let failed = Error::path(self.path_of(name), "remove it");
            rustix::fs::unlinkat(folder, last_part(name), AtFlags::empty()).map_err(failed)?;
        }
        Ok(())
    }

    /// Removes the folders that have one of these names, with the files in them that `entry`
    /// knows, if those are all there are and as `hydrate` left them. Returns the files' names.
    ///
    /// # Errors
    /// [`Error::FolderThere`] where something else is in one of them; nothing has gone then.
    /// [`Error::Path`].
    pub fn remove_folders<'a>(
        &self,
        names: impl Iterator<Item = &'a str>,
        entry: impl Fn(&str) -> Option<&'a Entry>,
    ) -> Result<Vec<String>> {
        let mut wanted: BTreeMap<&str, HashSet<&str>> = BTreeMap::new();
        for name in names {
            wanted.entry(folder_part(name)).or_default().insert(last_part(name));
        }
        let (mut folders, mut files) = (Vec::new(), Vec::new());
        for (above, wanted) in wanted {
            // Where there is no folder, or one that cannot be entered, no name is another's.
            let entries = self.entries(above).unwrap_or_default();
            let is_wanted = |(name, kind): &(String, FileType)| *kind == FileType::Directory && wanted.contains(last_part(name));
            folders.extend(entries.into_iter().filter(is_wanted).map(|(name, _)| (name.clone(), name)));
        }
        // Those in a folder come after it.
        let mut at = 0;
        while let Some((folder, root)) = folders.get(at).cloned() {
            for (name, kind) in self.entries(&folder)? {
                match entry(&name) {
                    _ if kind == FileType::Directory && last_part(&name) != OWN => folders.push((name, root.clone())),
                    Some(entry) if self.has_file(&name, entry) => files.push((name, entry)),
                    _ => return Err(Error::FolderThere(self.path_of(&root))),
                }
            }
            at += 1;
        }
        for (name, entry) in &files {
            self.remove(name, entry)?;
        }
        for (name, _) in folders.iter().rev() {
            let failed = Error::path(self.path_of(name), "remove the empty folder");
            rustix::fs::unlinkat(self.folder_of(name, false)?, last_part(name), AtFlags::REMOVEDIR).map_err(failed)?;
        }
        Ok(files.into_iter().map(|(name, _)| name).collect())
    }

    /// What is in a folder of the set, by the names that it would have in the set.
    ///
    /// # Errors
    /// [`Error::Path`]; a symbolic link on the way is one.
    fn entries(&self, folder: &str) -> Result<Vec<(String, FileType)>> {
        let prefix = if folder.is_empty() { String::new() } else { format!("{folder}/") };
        let failed = || Error::path(self.path_of(folder), "read it");
        let mut found = Vec::new();
        for entry in Dir::read_from(self.folder_of(&prefix, false)?).map_err(failed())? {
            let entry = entry.map_err(failed())?;
            // What is not UTF-8 is of no set, under any name.
            let last = entry.file_name().to_string_lossy();
            if !matches!(&*last, "." | "..") {
                found.push((format!("{prefix}{last}"), entry.file_type()));
            }
        }
        Ok(found)
    }

    /// The folder that a name of the set is in; no symbolic link leads there. With `make` the
    /// folders on the way that are not there are made, and durable.
    fn folder_of(&self, name: &str, make: bool) -> Result<OwnedFd> {
        let path = self.path_of(name);
        let failed = |action| Error::path(&path, action);
        let mut folder = rustix::io::fcntl_dupfd_cloexec(&self.root, 0).map_err(failed("open its folder"))?;
        for part in folder_part(name).split('/').filter(|part| !part.is_empty()) {
            if make {
                match rustix::fs::mkdirat(&folder, part, Mode::from_raw_mode(0o777)) {
                    Ok(()) => rustix::fs::fsync(&folder).map_err(failed("make its folder durable"))?,
                    Err(Errno::EXIST) => {}
                    Err(errno) => return Err(failed("make its folder")(errno)),
                }
            }
            folder = rustix::fs::openat(&folder, part, FOLDER, Mode::empty()).map_err(failed("open its folder"))?;
        }
        Ok(folder)
    }
}

/// The folders that a name is in.
fn folder_part(name: &str) -> &str {
    name.rsplit_once('/').map_or("", |(folders, _)| folders)
}

/// A name without the folders it is in.
fn last_part(name: &str) -> &str {
    name.rsplit_once('/').map_or(name, |(_, last)| last)
}

/// The time of modification in nanoseconds since 1970.
fn time_of(found: &Stat) -> i128 {
    i128::from(found.st_mtime) * NANOSECONDS + i128::from(found.st_mtime_nsec)
}

fn is_as_left(found: &Metadata, entry: &Entry) -> bool {
    let modified = i128::from(found.mtime()) * NANOSECONDS + i128::from(found.mtime_nsec());
    found.is_file() && found.nlink() == 1 && found.len() == entry.size && modified == entry.modified
}

/// The partial files in an open folder, which lies at `path`, with the bytes of its object that
/// each has room for.
///
/// # Errors
/// [`Error::Path`].
pub fn partials(folder: impl AsFd, path: &Path) -> Result<Vec<(String, u64)>> {
    let failed = || Error::path(path, "read it");
    let mut found = Vec::new();
    for entry in Dir::read_from(&folder).map_err(failed())? {
        let name = entry.map_err(failed())?.file_name().to_string_lossy().into_owned();
        if let Ok(stat) = rustix::fs::statat(&folder, &*name, AtFlags::SYMLINK_NOFOLLOW)
            && !matches!(&*name, "." | "..")
        {
            found.push((name, (stat.st_blocks as u64 * 512).min(stat.st_size as u64)));
        }
    }
    Ok(found)
}
