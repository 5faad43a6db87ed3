//! Checks what must hold after a power cut: the volume recovers, the checker finds nothing, every
//! file whose name was durable is there with its content, and a file that was being written holds
//! nothing but what was written to it.

use std::collections::BTreeMap;
use std::sync::Arc;

use gpunvme_blockdev::{BlockDevice, Io};
use gpunvme_blockdev_testing::{Event, Image, Log, MemoryDevice};
use gpunvme_engine::check::check;
use gpunvme_engine::data::{Filesystem, Inline, Options};
use gpunvme_engine::{FsError, VolumeOptions};
use gpunvme_layout::FileType;
use gpunvme_layout::key::INO_ROOT;

use crate::workload::{self, KEPT, SECTOR};

/// The fate of the writes that no flush had made durable.
#[derive(Debug, Clone, Copy)]
enum Fate {
    AllLost,
    AllKept,
    /// Each write lost, kept or torn, by chance.
    Mixed,
}

/// Tries `count` cuts in the part of the log where files are written. Returns a line about what was
/// done.
///
/// # Errors
/// What did not hold, and where.
pub fn judge(log: &Log, count: usize) -> Result<String, Box<dyn std::error::Error>> {
    let mut written = 0;
    // The highest file of which the device had seen content, after each event.
    let seen: Vec<u64> = log
        .events()
        .iter()
        .map(|event| {
            if let Event::Write { data, .. } = event {
                written = workload::highest(data).max(written);
            }
            written
        })
        .collect();
    let cuts: Vec<usize> = log.cuts().filter(|cut| *cut > 0 && seen[cut - 1] > 0).collect();
    if written < 2 * KEPT {
        return Err(format!("the log ends with file {written}: too early for files to have been removed").into());
    }
    let mut builder = log.power_cuts();
    let (mut states, mut pending) = (0, 0);
    for cut in cuts.iter().copied().step_by(cuts.len().div_ceil(count)) {
        pending += builder.pending(cut).len();
        for fate in [Fate::AllLost, Fate::AllKept, Fate::Mixed] {
            let image = builder.image(cut, |event, sector| survives(fate, cut, event, sector));
            verify(image, seen[cut - 1]).map_err(|what| {
                format!("power cut after event {cut} of {}, {fate:?}, file {} being written: {what}", seen.len(), seen[cut - 1])
            })?;
            states += 1;
        }
    }
    Ok(format!(
        "{written} files, {} events, {} places to cut at, {states} states recovered, {pending} writes at stake",
        seen.len(),
        cuts.len()
    ))
}

fn survives(fate: Fate, cut: usize, event: usize, sector: u64) -> bool {
    match fate {
        Fate::AllLost => false,
        Fate::AllKept => true,
        // A third of the events each.
        Fate::Mixed => match chance(cut as u64, event as u64) % 3 {
            0 => false,
            1 => true,
            _ => chance(event as u64, sector).is_multiple_of(2),
        },
    }
}

/// A number that looks random and depends on nothing else (splitmix64's last steps).
fn chance(a: u64, b: u64) -> u64 {
    let mut z = a.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(b).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z ^ (z >> 31)
}

/// Recovers an image, checks it, and compares the files with those that were promised when content
/// of file `written` had reached the device.
fn verify(image: Image, written: u64) -> Result<(), String> {
    let device: Arc<dyn BlockDevice> = MemoryDevice::from_image(image);
    let text = |error: FsError| error.to_string();
    let io = Io::inline(device).map_err(|error| error.to_string())?;
    let options = Options { volume: VolumeOptions { read_only: false, cache: 4 << 20, discard: false }, write_buffer: 4 << 20 };
    let fs = Filesystem::open(io, options, Arc::new(Inline)).map_err(text)?;
    let findings = check(fs.volume()).map_err(text)?;
    if let Some(finding) = findings.first() {
        return Err(format!("the checker finds {} faults: {finding}", findings.len()));
    }
    let mut files = files(&fs).map_err(text)?;
    // The next file may have been begun: what it removes first may be gone.
    let oldest = (written + 1).saturating_sub(KEPT);
    for number in oldest + 1..written {
        let found = files.remove(&workload::final_name(number)).ok_or(format!("file {number} was fsynced and is gone"))?;
        if found != workload::content(number) {
            return Err(format!("file {number} was fsynced and has other content"));
        }
    }
    for number in [oldest.saturating_sub(1), oldest, written, written + 1] {
        // Under its final name a file is complete; before it may be as long as anything that was
        // written.
        if files.remove(&workload::final_name(number)).is_some_and(|found| found != workload::content(number)) {
            return Err(format!("file {number} has its name without its content"));
        }
        if let Some(found) = files.remove(&workload::first_name(number)) {
            is_partial(&found, &workload::content(number)).map_err(|what| format!("file {number} {what}"))?;
        }
    }
    if let Some((name, _)) = files.first_key_value() {
        return Err(format!("there is a file {name}, which should have been removed"));
    }
    fs.close().map_err(text)
}

/// Whether `found` holds nothing but parts of `content`, and zeroes.
fn is_partial(found: &[u8], content: &[u8]) -> Result<(), String> {
    if found.len() > content.len() {
        return Err(format!("is {} bytes long, longer than what was written", found.len()));
    }
    let mut sectors = found.chunks(SECTOR).zip(content.chunks(SECTOR));
    match sectors.position(|(found, content)| !content.starts_with(found) && found.iter().any(|byte| *byte != 0)) {
        Some(sector) => Err(format!("exposes in sector {sector} what was never written to it")),
        None => Ok(()),
    }
}

/// The content of all files in the root directory, by name.
fn files(fs: &Arc<Filesystem>) -> Result<BTreeMap<String, Vec<u8>>, FsError> {
    let mut files = BTreeMap::new();
    let mut cookie = 0;
    loop {
        let entries = fs.wait(|| fs.read_dir(INO_ROOT, cookie, 100))?;
        let Some(last) = entries.last() else { return Ok(files) };
        cookie = last.cookie;
        for entry in entries.into_iter().filter(|entry| entry.file_type == FileType::Regular) {
            let len = fs.wait(|| fs.attributes(entry.ino))?.inode.size;
            let content = fs.read(entry.ino, 0, len as usize)?;
            files.insert(String::from_utf8_lossy(&entry.name).into_owned(), content);
        }
    }
}
