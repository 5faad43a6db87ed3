//! The commands `warm`, `cool` and `map --resident`: what the kernel has of files in its page
//! cache.

use crate::found::{self, Files, Opened};
use crate::report::{self, Failure, Report};
use gpunvme::File;
use indicatif::{ProgressBar, ProgressStyle};
use rustix::fs::{Advice, SeekFrom, fadvise, seek};
use rustix::io::Errno;
use serde_json::{Value, json};
use std::fs;
use std::io::{self, IsTerminal};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// How much is read at once, in bytes: the kernel's own requests are no longer.
const STEP: usize = 1 << 20;
/// How long the parts are that `map --resident` tells of, in bytes: those of which GPUs read all or
/// nothing.
const PART: u64 = 16 << 20;

/// Reads files into the page cache.
pub fn warm(paths: &[PathBuf]) -> Result<Report, Failure> {
    let files = found::files(paths)?;
    let bar = bar(&files);
    let mut buffer = vec![0; STEP];
    for found in &files.found {
        let failed = |error| Failure(format!("{}: {error}", found.path.display()));
        let Opened::There(file) = found.open()? else { continue };
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

/// Where a file next has data, from a place on. It may become shorter between the two questions.
fn next_data(file: &fs::File, from: u64) -> io::Result<Option<Range<u64>>> {
    let ends = seek(file, SeekFrom::Data(from)).and_then(|start| Ok(start..seek(file, SeekFrom::Hole(start))?));
    match ends {
        Err(Errno::NXIO) => Ok(None),
        data => Ok(Some(data?)),
    }
}

/// Has the page cache drop files: what is dirty is written first.
pub fn cool(paths: &[PathBuf]) -> Result<Report, Failure> {
    let files = found::files(paths)?;
    let bar = bar(&files);
    for found in &files.found {
        let failed = |error| Failure(format!("{}: {error}", found.path.display()));
        let Opened::There(file) = found.open()? else { continue };
        file.sync_data().map_err(failed)?;
        fadvise(&file, 0, None, Advice::DontNeed).map_err(|errno| failed(errno.into()))?;
        bar.inc(found.size);
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

fn bar(files: &Files) -> ProgressBar {
    if !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let style = ProgressStyle::with_template("{wide_bar} {bytes}/{total_bytes}  {bytes_per_sec}  {eta}");
    let size = files.found.iter().map(|found| found.size).sum();
    ProgressBar::new(size).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
}

/// What the page cache has now of those files that are there still, and how many this user may not
/// read.
fn told(files: &Files) -> Result<Report, Failure> {
    let (mut count, mut size, mut resident, mut unreadable) = (0, 0, 0, files.unreadable);
    for found in &files.found {
        match found.open()? {
            Opened::There(file) => {
                count += 1;
                size += found.size;
                resident += File::of(file, &found.path)?.resident(0, found.size)?.min(found.size);
            }
            Opened::Gone => {}
            Opened::Unreadable => unreadable += 1,
        }
    }
    let facts = json!({ "files": count, "size": size, "resident": resident, "unreadable": unreadable });
    let mut report = Report::new(facts);
    let noun = if count == 1 { "file" } else { "files" };
    report.text = format!("{count} {noun}, {}: {} of it in the page cache\n", report::size(size), report::size(resident));
    if unreadable > 0 {
        report.text += &format!("files and folders that could not be read, for want of permission: {unreadable}\n");
        report.code = 1;
    }
    Ok(report)
}
