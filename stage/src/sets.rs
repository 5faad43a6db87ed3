//! The sets below a folder: what they are, how much they hold, when they were last used.

use crate::error::{Error, Result, printable};
use crate::folder::{self, Folder};
use crate::manifest::Manifest;
use crate::names::OWN;
use crate::own::{FOLDER, Own};
use gpunvme_programs::terminal::complain;
use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags};
use rustix::io::Errno;
use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

/// How deep sets are looked for below a folder.
const DEEPEST: usize = 100;

/// A set that was hydrated, as it lies in its folder.
#[derive(Clone, Debug, serde::Serialize)]
pub struct Status {
    pub folder: PathBuf,
    /// Where it comes from.
    pub source: String,
    /// Whether it is never evicted.
    pub pinned: bool,
    /// Files that are there, and their bytes.
    pub files: usize,
    pub bytes: u64,
    /// Bytes of what is not whole yet.
    pub partial: u64,
    /// When `hydrate` last ran for it, in seconds since 1970.
    pub used: f64,
    /// What was evicted.
    pub evicted: Vec<Evicted>,
}

impl Status {
    /// All bytes of it.
    pub fn held(&self) -> u64 {
        self.bytes.saturating_add(self.partial)
    }
}

/// A file that was evicted.
#[derive(Clone, Debug, serde::Serialize)]
pub struct Evicted {
    pub name: String,
    pub bytes: u64,
}

/// The sets that lie in the folder of a set, which are sets of their own: `m` and `m/part` were
/// both brought in.
#[derive(Debug)]
pub struct Inner {
    folder: OwnedFd,
    /// Folders of names, and whether each is a set's.
    known: HashMap<String, bool>,
}

impl Inner {
    /// Those in the open folder of a set.
    pub fn of(folder: OwnedFd) -> Inner {
        Inner { folder, known: HashMap::new() }
    }

    /// Whether a file of the outer set lies in one of them, by its name.
    pub fn has(&mut self, name: &str) -> bool {
        name.match_indices('/').any(|(at, _)| self.is_set(&name[..at]))
    }

    fn is_set(&mut self, folder: &str) -> bool {
        if let Some(known) = self.known.get(folder) {
            return *known;
        }
        let is_set = rustix::fs::statat(&self.folder, format!("{folder}/{OWN}"), AtFlags::SYMLINK_NOFOLLOW).is_ok();
        self.known.insert(folder.into(), is_set);
        is_set
    }
}

/// All sets below `root`, itself among them, the least recently used first. What another user made
/// of a folder is told, and passed over: the others count.
///
/// # Errors
/// [`Error::Path`] where `root` itself cannot be read.
pub fn below(root: &Path) -> Result<Vec<Status>> {
    let mut sets = Vec::new();
    let flags = OFlags::DIRECTORY | OFlags::CLOEXEC;
    let open = rustix::fs::open(root, flags, Mode::empty()).map_err(Error::path(root, "read it"))?;
    collect(open, root, 0, &mut sets);
    sets.sort_by(|a: &Status, b| a.used.total_cmp(&b.used));
    Ok(sets)
}

/// Opens the folder of a set that [`below`] found. No symbolic link leads there.
///
/// # Errors
/// [`Error::Path`].
pub fn open(root: &Path, set: &Path) -> Result<OwnedFd> {
    let flags = OFlags::DIRECTORY | OFlags::CLOEXEC;
    let mut folder = rustix::fs::open(root, flags, Mode::empty()).map_err(Error::path(root, "open it"))?;
    for part in set.strip_prefix(root).into_iter().flatten() {
        folder = rustix::fs::openat(&folder, part, FOLDER, Mode::empty()).map_err(Error::path(set, "open it"))?;
    }
    Ok(folder)
}

/// Tells that there is something below a folder that does not count.
pub fn pass_over(error: &Error) {
    complain(format_args!("gpunvme: passed over: {}", printable(error)));
}

fn collect(folder: OwnedFd, path: &Path, depth: usize, sets: &mut Vec<Status>) {
    match status(&folder, path) {
        Ok(found) => sets.extend(found),
        Err(error) => return pass_over(&error),
    }
    if depth == DEEPEST {
        return;
    }
    let entries = match Dir::read_from(&folder).and_then(Iterator::collect::<std::result::Result<Vec<_>, _>>) {
        Ok(entries) => entries,
        Err(errno) => return pass_over(&Error::path(path, "read it")(errno)),
    };
    for entry in entries.iter().filter(|entry| entry.file_type() == FileType::Directory) {
        let name = std::ffi::OsStr::from_bytes(entry.file_name().to_bytes());
        if name == "." || name == ".." || name == OWN {
            continue;
        }
        let path = path.join(name);
        match rustix::fs::openat(&folder, name, FOLDER, Mode::empty()) {
            Ok(below) => collect(below, &path, depth + 1, sets),
            // It went meanwhile.
            Err(Errno::NOENT) => {}
            Err(errno) => pass_over(&Error::path(path, "read it")(errno)),
        }
    }
}

/// The set in a folder, where there is one that `hydrate` has begun.
fn status(folder: &OwnedFd, path: &Path) -> Result<Option<Status>> {
    let Some(own) = Own::open(folder, path)?.map(Arc::new) else { return Ok(None) };
    let Some(manifest) = Manifest::read(&own)? else { return Ok(None) };
    let Some(set) = manifest.set.clone() else { return Ok(None) };
    let mut inner = Inner::of(rustix::io::fcntl_dupfd_cloexec(folder, 0).map_err(Error::path(path, "read it"))?);
    let there = manifest.there().filter(|(name, entry)| !inner.has(name) && Folder::has(folder, name, entry));
    let (files, bytes) = there.fold((0, 0_u64), |(files, bytes), (_, entry)| (files + 1, bytes.saturating_add(entry.size)));
    let partial = match own.folder_there("partial")? {
        Some(partial) => folder::partials(partial, &own.path("partial"))?.iter().map(|(_, bytes)| bytes).sum(),
        None => 0,
    };
    let used = own.changed("lock")?.unwrap_or(UNIX_EPOCH);
    let mut evicted: Vec<_> = manifest.evicted.into_iter().map(|(name, entry)| Evicted { name, bytes: entry.size }).collect();
    evicted.sort_by(|a, b| a.name.cmp(&b.name));
    let used = used.duration_since(UNIX_EPOCH).map_or(0.0, |time| time.as_secs_f64());
    let set = Status { folder: path.into(), source: set.source, pinned: set.pinned, files, bytes, partial, used, evicted };
    Ok(Some(set))
}

/// Sets as a table for people, with the names of what was evicted where they are wanted.
pub fn table(sets: &[Status], with_names: bool) -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |time| time.as_secs_f64());
    let mut text = format!("{:>14} {:>9} {:>9} {:>10}  {:<6} FOLDER  (SOURCE)", "BYTES", "FILES", "EVICTED", "USED AGO", "");
    for set in sets {
        let pinned = if set.pinned { "pinned" } else { "" };
        let ago = format!("{:.0} s", now - set.used);
        text += &format!(
            "\n{:>14} {:>9} {:>9} {ago:>10}  {pinned:<6} {}  ({})",
            set.held(),
            set.files,
            set.evicted.len(),
            set.folder.display(),
            set.source
        );
        for file in set.evicted.iter().filter(|_| with_names) {
            text += &format!("\n{:>14} {:>9} evicted: {}", file.bytes, "", file.name);
        }
    }
    text
}
