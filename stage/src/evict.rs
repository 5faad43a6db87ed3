//! The command `evict`: the sets that were not used for the longest time go, until the sets below a
//! folder keep a quota.
//!
//! A file goes only if `hydrate` brought it and it is as `hydrate` left it, so that the store has
//! each byte that goes; and only if no process has it open.

use crate::error::{Error, Result};
use crate::folder::Folder;
use crate::manifest::Manifest;
use crate::sets;
use std::path::{Path, PathBuf};

/// How many bytes the sets may hold together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Quota {
    Bytes(u64),
    /// Of the filesystem that the folder is on.
    Percent(u64),
}

impl std::str::FromStr for Quota {
    type Err = &'static str;

    fn from_str(text: &str) -> std::result::Result<Quota, Self::Err> {
        const WRONG: &str = "a quota is a number of bytes, with K, M, G or T, or a percentage such as 80%";
        if let Some(percent) = text.strip_suffix('%') {
            return percent.parse().ok().filter(|&percent| percent <= 100).map(Quota::Percent).ok_or(WRONG);
        }
        let power = text.chars().last().and_then(|unit| "KMGT".find(unit));
        let number = if power.is_some() { &text[..text.len() - 1] } else { text };
        let factor = power.map_or(1, |power| 1024_u64.pow(power as u32 + 1));
        number.parse::<u64>().ok().and_then(|number| number.checked_mul(factor)).map(Quota::Bytes).ok_or(WRONG)
    }
}

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
    pub evicted_sets: usize,
    pub evicted_files: usize,
    pub evicted_bytes: u64,
}

/// Evicts sets until the quota is kept.
///
/// # Errors
/// [`Error::Quota`] where what is pinned, open or changed takes more; all that could go has gone
/// then. [`Error::Path`], [`Error::Manifest`].
pub fn evict(what: &Eviction) -> Result<Done> {
    let quota = match what.quota {
        Quota::Bytes(bytes) => bytes,
        Quota::Percent(percent) => Folder::capacity(&what.root)? / 100 * percent,
    };
    let sets = sets::below(&what.root)?;
    let mut done = Done { quota, bytes: sets.iter().map(|set| set.bytes + set.partial).sum(), ..Done::default() };
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
        done.evicted_sets += usize::from(gone.files > 0);
        done.evicted_files += gone.files;
        done.evicted_bytes += gone.bytes;
        done.bytes -= (gone.bytes + gone.partial).min(done.bytes);
    }
    if done.bytes > quota { Err(Error::Quota { bytes: done.bytes, quota, evicted: done.evicted_bytes }) } else { Ok(done) }
}

/// What went of a set: files, their bytes, and bytes of what was not whole.
#[derive(Default)]
struct Gone {
    files: usize,
    bytes: u64,
    partial: u64,
}

/// Evicts what may go of a set, and says what that was. A set that another process changes at the
/// moment stays.
fn empty(root: &Path, path: &Path) -> Result<Gone> {
    let folder = Folder::of(sets::open(root, path)?, path)?;
    let Some(_lock) = folder.try_lock()? else { return Ok(Gone::default()) };
    let mut manifest = Manifest::open(folder.own())?;
    if manifest.set.as_ref().is_some_and(|set| set.pinned) {
        return Ok(Gone::default());
    }
    let mut gone = Gone { partial: folder.clean(|_| true)?, ..Gone::default() };
    folder.clean(|_| false)?;
    let mut files: Vec<_> = manifest.files.clone().into_iter().collect();
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
    manifest.compact()?;
    Ok(gone)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quotas_are_bytes_or_a_percentage() {
        for (text, quota) in
            [("0", Quota::Bytes(0)), ("3K", Quota::Bytes(3072)), ("2T", Quota::Bytes(2 << 40)), ("80%", Quota::Percent(80))]
        {
            assert_eq!(text.parse(), Ok(quota));
        }
        for wrong in ["", "K", "%", "101%", "-1", "1.5G", "1k", "99999999999T", "ü"] {
            assert!(wrong.parse::<Quota>().is_err(), "{wrong}");
        }
    }
}
