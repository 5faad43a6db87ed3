//! The command `evict`: the sets that were not used for the longest time go, until the sets below a
//! folder keep a quota.
//!
//! A file goes only if `hydrate` brought it and it is as `hydrate` left it, so that the store has
//! each byte that goes; and only if no process has it open.

use crate::error::{Error, Result};
use crate::folder::Folder;
use crate::sets::{self, Inner, Status};
use gpunvme_programs::sets::Quota;
use std::path::{Path, PathBuf};

/// What is to be done.
#[derive(Debug)]
pub struct Eviction {
    pub root: PathBuf,
    pub quota: Quota,
    pub dry_run: bool,
}

/// What was done.
#[derive(Debug, Default, serde::Serialize)]
pub struct Done {
    /// Bytes that the sets may hold, and those that they hold now.
    pub quota: u64,
    pub bytes: u64,
    #[serde(flatten)]
    pub evicted: Evicted,
}

/// What went of sets.
#[derive(Debug, Default, serde::Serialize)]
pub struct Evicted {
    pub evicted_sets: usize,
    pub evicted_files: usize,
    pub evicted_bytes: u64,
}

impl Evicted {
    /// So much went of one more.
    pub fn add(&mut self, gone: &Gone) {
        self.evicted_sets += usize::from(gone.files > 0);
        self.evicted_files += gone.files;
        self.evicted_bytes += gone.bytes;
    }
}

impl std::fmt::Display for Evicted {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} files of {} sets, {} bytes", self.evicted_files, self.evicted_sets, self.evicted_bytes)
    }
}

/// Evicts sets until the quota is kept.
///
/// # Errors
/// [`Error::Quota`] where what is pinned, open or changed takes more; all that could go has gone
/// then. [`Error::Path`], [`Error::Manifest`].
pub fn evict(what: &Eviction) -> Result<Done> {
    let quota = Folder::bytes_of(what.quota, &what.root)?;
    let sets = sets::below(&what.root)?;
    let mut done = Done { quota, bytes: sets.iter().map(Status::held).sum(), ..Done::default() };
    for set in sets.iter().filter(|set| !set.pinned && set.files + usize::from(set.partial > 0) > 0) {
        if done.bytes <= quota {
            break;
        }
        let gone = match what.dry_run {
            true => Gone { files: set.files, bytes: set.bytes, partial: set.partial },
            // Another user's set is no reason to leave the others.
            false => empty(&what.root, &set.folder).unwrap_or_else(|error| {
                sets::pass_over(&error);
                Gone::default()
            }),
        };
        done.evicted.add(&gone);
        done.bytes -= (gone.bytes + gone.partial).min(done.bytes);
    }
    if done.bytes > quota {
        Err(Error::Quota { bytes: done.bytes, quota, evicted: done.evicted.evicted_bytes })
    } else {
        Ok(done)
    }
}

/// What went of a set: files, their bytes, and bytes of what was not whole.
#[derive(Default)]
pub struct Gone {
    pub files: usize,
    pub bytes: u64,
    pub partial: u64,
}

/// Evicts what may go of a set, and says what that was. A set that another process changes at the
/// moment stays.
///
/// # Errors
/// [`Error::Path`], [`Error::Manifest`].
pub fn empty(root: &Path, path: &Path) -> Result<Gone> {
    let folder = Folder::of(sets::open(root, path)?, path)?;
    let Some(_lock) = folder.try_lock()? else { return Ok(Gone::default()) };
    let mut manifest = folder.manifest()?;
    if manifest.set.as_ref().is_some_and(|set| set.pinned) {
        return Ok(Gone::default());
    }
    let mut gone = Gone::default();
    manifest.drop_parts_unless(|_| false)?;
    for (name, bytes) in folder.partials()? {
        folder.remove_partial(&name)?;
        gone.partial += bytes;
    }
    let mut inner = Inner::of(sets::open(root, path)?);
    let mut files: Vec<_> = manifest.files.clone().into_iter().filter(|(name, _)| !inner.has(name)).collect();
    files.sort_by(|a, b| a.0.cmp(&b.0));
    for (name, entry) in files {
        match folder.remove_unless_open(&name, &entry) {
            Ok(false) => {}
            Ok(true) => {
                manifest.evict(&name)?;
                gone.files += 1;
                gone.bytes += entry.size;
            }
            Err(error) => sets::pass_over(&error),
        }
    }
    manifest.compact(|_| false)?;
    Ok(gone)
}
