//! The commands `warm`, `cool` and `map --resident`: what the kernel has of files in its page
//! cache.

use crate::report::{self, Failure, Report};
use gpunvme::File;
use indicatif::{ProgressBar, ProgressStyle};
use rustix::fs::{Advice, SeekFrom, fadvise, seek};
use rustix::io::Errno;
use serde_json::{Value, json};
use std::fs;
use std::io::{self, IsTerminal};
use std::ops::Range;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

/// How much is read at once, in bytes: the kernel's own requests are no longer.
const STEP: usize = 1 << 20;
/// How long the parts are that `map --resident` tells of, in bytes: those of which GPUs read all or
/// nothing.
const PART: u64 = 16 << 20;

/// Reads files into the page cache.
pub fn warm(paths: &[PathBuf]) -> Result<Report, Failure> {
    let files = all_files(paths)?;
    let bar = bar(&files);
    let mut buffer = vec![0; STEP];
    for (path, _) in &files {
        let failed = |error| Failure(format!("{}: {error}", path.display()));
        let file = fs::File::open(path).map_err(failed)?;
        let mut at = 0;
        // Holes would fill the page cache with zeros.
        while let Some(data) = next_data(&file, at).map_err(failed)? {
            bar.inc(data.start - at);
            at = data.start;
            while at < data.end {
                let most = STEP.min((data.end - at) as usize);
                let count = file.read_at(&mut buffer[..most], at).map_err(failed)?;
                if count == 0 {
                    break;
                }
                bar.inc(count as u64);
                at += count as u64;
            }
            at = data.end;
        }
    }
    bar.finish_and_clear();
    told(&files)
}

/// Where a file next has data, from a place on.
fn next_data(file: &fs::File, from: u64) -> io::Result<Option<Range<u64>>> {
    let start = match seek(file, SeekFrom::Data(from)) {
        Err(Errno::NXIO) => return Ok(None),
        found => found?,
    };
    Ok(Some(start..seek(file, SeekFrom::Hole(start))?))
}

/// Has the page cache drop files: what is dirty is written first.
pub fn cool(paths: &[PathBuf]) -> Result<Report, Failure> {
    let files = all_files(paths)?;
    let bar = bar(&files);
    for (path, size) in &files {
        let failed = |error| Failure(format!("{}: {error}", path.display()));
        let file = fs::File::open(path).map_err(failed)?;
        file.sync_data().map_err(failed)?;
        fadvise(&file, 0, None, Advice::DontNeed).map_err(|errno| failed(errno.into()))?;
        bar.inc(*size);
    }
    bar.finish_and_clear();
    told(&files)
}

/// Tells which parts of a file the page cache has.
pub fn map(path: &Path) -> Result<Report, Failure> {
    let file = File::open(path)?;
    let size = file.size()?;
    let resident = file.resident(0, size)?.min(size);
    let mut parts: Vec<Value> = Vec::new();
    let mut report = Report::new(json!({ "file": path.to_string_lossy(), "size": size, "resident": resident }));
    report.text = format!("{}: {} of {size} bytes are in the page cache\n", path.display(), resident);
    report.text += &format!("{:>16} {:>16} {:>16}\n", "file offset", "length", "resident");
    for offset in (0..size).step_by(PART as usize) {
        let len = PART.min(size - offset);
        let resident = file.resident(offset, len)?.min(len);
        report.text += &format!("{offset:>16} {len:>16} {resident:>16}\n");
        parts.push(json!({ "file_offset": offset, "length": len, "resident": resident }));
    }
    report.json["parts"] = parts.into();
    Ok(report)
}

/// Regular files with their sizes, those in folders among them; links are not followed, and other
/// filesystems not entered.
fn all_files(paths: &[PathBuf]) -> Result<Vec<(PathBuf, u64)>, Failure> {
    let mut files = Vec::new();
    for path in paths {
        // What is named must lie on a mount.
        let named = fs::metadata(path).map_err(|error| Failure(format!("{}: {error}", path.display())))?;
        if named.is_dir() {
            gpunvme::Mount::open(path)?;
        } else {
            File::open(path)?;
        }
        let mut rest = vec![(path.clone(), named.clone())];
        while let Some((path, found)) = rest.pop() {
            let failed = |error| Failure(format!("{}: {error}", path.display()));
            if found.is_file() {
                files.push((path, found.len()));
            } else if found.is_dir() && found.dev() == named.dev() {
                for entry in fs::read_dir(&path).map_err(failed)? {
                    let entry = entry.map_err(failed)?;
                    rest.push((entry.path(), entry.metadata().map_err(failed)?));
                }
            }
        }
    }
    files.sort();
    Ok(files)
}

fn bar(files: &[(PathBuf, u64)]) -> ProgressBar {
    if !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let style = ProgressStyle::with_template("{wide_bar} {bytes}/{total_bytes}  {bytes_per_sec}  {eta}");
    ProgressBar::new(files.iter().map(|(_, size)| size).sum()).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
}

/// What the page cache has of the files now.
fn told(files: &[(PathBuf, u64)]) -> Result<Report, Failure> {
    let size: u64 = files.iter().map(|(_, size)| size).sum();
    let mut resident = 0;
    for (path, size) in files {
        resident += File::open(path)?.resident(0, *size)?.min(*size);
    }
    let mut report = Report::new(json!({ "files": files.len(), "size": size, "resident": resident }));
    let noun = if files.len() == 1 { "file" } else { "files" };
    report.text = format!("{} {noun}, {}: {} of it in the page cache\n", files.len(), report::size(size), report::size(resident));
    Ok(report)
}
