//! The sets below a folder: what they are, how much they hold, when they were last used.

use crate::error::{Error, Result};
use crate::folder::Folder;
use crate::manifest::Manifest;
use crate::names::OWN;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

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
    /// When `hydrate` last ran for it, in seconds since 1970.
    pub used: f64,
    /// What was evicted.
    pub evicted: Vec<Evicted>,
}

/// A file that was evicted.
#[derive(Clone, Debug, serde::Serialize)]
pub struct Evicted {
    pub name: String,
    pub bytes: u64,
}

/// All sets below `root`, itself among them, the least recently used first. A set has none below
/// it.
///
/// # Errors
/// [`Error::Path`]; [`Error::Manifest`] for a folder whose manifest is none.
pub fn below(root: &Path) -> Result<Vec<Status>> {
    let mut sets = Vec::new();
    // The root's own absence is an error; what goes while this looks is none.
    std::fs::metadata(root).map_err(Error::path(root, "read it"))?;
    collect(root, &mut sets)?;
    sets.sort_by(|a: &Status, b| a.used.total_cmp(&b.used));
    Ok(sets)
}

fn collect(folder: &Path, sets: &mut Vec<Status>) -> Result<()> {
    if folder.join(OWN).join("manifest").exists() {
        sets.extend(status(folder)?);
        return Ok(());
    }
    let entries = match std::fs::read_dir(folder) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        entries => entries.map_err(Error::path(folder, "read it"))?,
    };
    for entry in entries {
        let entry = entry.map_err(Error::path(folder, "read it"))?;
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            collect(&entry.path(), sets)?;
        }
    }
    Ok(())
}

/// The set in `folder`; none where `hydrate` has not begun it yet.
fn status(folder: &Path) -> Result<Option<Status>> {
    let own = folder.join(OWN);
    let manifest = Manifest::read(&own.join("manifest"))?;
    let Some(set) = manifest.set else { return Ok(None) };
    let there = manifest.files.iter().filter(|(name, entry)| Folder::has(folder, name, entry));
    let (files, bytes) = there.fold((0, 0), |(files, bytes), (_, entry)| (files + 1, bytes + entry.size));
    let lock = own.join("lock");
    let used = std::fs::metadata(&lock).and_then(|found| found.modified()).map_err(Error::path(&lock, "ask its time"))?;
    let mut evicted: Vec<_> = manifest.evicted.into_iter().map(|(name, entry)| Evicted { name, bytes: entry.size }).collect();
    evicted.sort_by(|a, b| a.name.cmp(&b.name));
    let used = used.duration_since(UNIX_EPOCH).map_or(0.0, |time| time.as_secs_f64());
    Ok(Some(Status { folder: folder.into(), source: set.source, pinned: set.pinned, files, bytes, used, evicted }))
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
            set.bytes,
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
