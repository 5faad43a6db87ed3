//! Compares a tree on a gpunvme mount with the originals that it was copied from, twice over:
//! through ordinary reads, and through the ioctl into registered memory. `scripts/quickstart` runs
//! it before and after a remount.

#![forbid(unsafe_code)]

use std::error::Error;
use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::{Parser, Subcommand};
use gpunvme::gpu::Caching;
use gpunvme::{Buffer, File, Mount, Registered, Segment, Transfer};
use gpunvme_tests::tree;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

/// Bytes of the registered buffer. A file is read in pieces of this size.
const BUFFER: usize = 32 << 20;
/// Bytes of an ordinary read.
const READ: usize = 1 << 20;
/// Bytes of a file that is called large.
const LARGE: u64 = 16 << 20;

#[derive(Parser)]
struct Arguments {
    #[command(subcommand)]
    action: Action,
}

#[derive(Subcommand)]
enum Action {
    /// Compares copies with their originals: that of /usr/include is MOUNT/usr/include
    Compare {
        /// The mount
        mount: PathBuf,
        /// What was found is added to this file
        results: PathBuf,
        /// The originals: absolute paths of folders and files
        originals: Vec<PathBuf>,
    },
    /// Prints one line on all that was compared; exit code 1 if anything was different
    Verdict {
        /// The file that `compare` wrote
        results: PathBuf,
    },
}

/// What one comparison found.
#[derive(Default, Serialize, Deserialize)]
struct Results {
    files: u64,
    bytes: u64,
    /// Time inside read(2), and inside the ioctl. Opening and hashing are not in it.
    read: Duration,
    ioctl: Duration,
    /// The part of all three that is files of [`LARGE`] and more: in small ones there is more to be
    /// asked than to be moved.
    large_bytes: u64,
    large_read: Duration,
    large_ioctl: Duration,
    p2p: u64,
    bounce: u64,
    host: u64,
    hole: u64,
    edge: u64,
    different: Vec<String>,
}

fn main() -> Result<ExitCode, Box<dyn Error>> {
    match Arguments::parse().action {
        Action::Compare { mount, results, originals } => {
            let found = compare(&mount, &originals)?;
            let mut file = fs::OpenOptions::new().append(true).create(true).open(results)?;
            writeln!(file, "{}", serde_json::to_string(&found)?)?;
            Ok(ExitCode::SUCCESS)
        }
        Action::Verdict { results } => {
            let text = fs::read_to_string(results)?;
            let runs = text.lines().map(serde_json::from_str).collect::<Result<Vec<Results>, _>>()?;
            Ok(verdict(&runs))
        }
    }
}

fn compare(mount: &Path, originals: &[PathBuf]) -> Result<Results, Box<dyn Error>> {
    let mut results = Results::default();
    let mut buffer = Mount::open(mount)?.register(Buffer::memfd(BUFFER)?)?;
    for original in originals {
        let entries =
            if original.is_dir() { tree::walk(original)? } else { vec![(PathBuf::new(), original.symlink_metadata()?)] };
        for (relative, metadata) in entries {
            // Joining an empty path would add a slash.
            let path = if relative.as_os_str().is_empty() { original.clone() } else { original.join(&relative) };
            let copy = mount.join(path.strip_prefix("/")?);
            if let Err(difference) = compare_entry(&path, &metadata, &copy, &mut buffer, &mut results) {
                results.different.push(format!("{}: {difference}", path.display()));
            }
        }
    }
    Ok(results)
}

fn compare_entry(
    original: &Path,
    metadata: &fs::Metadata,
    copy: &Path,
    buffer: &mut Registered,
    results: &mut Results,
) -> Result<(), Box<dyn Error>> {
    let found = copy.symlink_metadata()?;
    let seen = |m: &fs::Metadata| (m.mode(), m.uid(), m.gid(), m.mtime(), m.mtime_nsec());
    if seen(&found) != seen(metadata) {
        return Err(format!("mode, owner or time is {:?}, not {:?}", seen(&found), seen(metadata)).into());
    }
    if metadata.is_symlink() && fs::read_link(copy)? != fs::read_link(original)? {
        return Err("the link leads elsewhere".into());
    }
    if !metadata.is_file() {
        return Ok(());
    }
    let expected = tree::digest(fs::File::open(original)?)?;
    results.files += 1;
    results.bytes += metadata.len();
    let (digest, read) = through_read(copy)?;
    if digest != expected {
        return Err("read() brings other bytes".into());
    }
    let (digest, moved, ioctl) = through_ioctl(copy, buffer)?;
    results.read += read;
    results.ioctl += ioctl;
    if metadata.len() >= LARGE {
        results.large_bytes += metadata.len();
        results.large_read += read;
        results.large_ioctl += ioctl;
    }
    results.p2p += moved.moved.p2p;
    results.bounce += moved.moved.bounce;
    results.host += moved.moved.host;
    results.hole += moved.moved.hole;
    results.edge += moved.moved.edge;
    if digest != expected {
        return Err("the ioctl brings other bytes".into());
    }
    Ok(())
}

fn through_read(path: &Path) -> Result<([u8; 32], Duration), Box<dyn Error>> {
    let mut file = fs::File::open(path)?;
    let mut hash = Sha256::new();
    let mut bytes = vec![0; (file.metadata()?.len() as usize + 1).min(BUFFER)];
    let mut time = Duration::ZERO;
    loop {
        // As much at a time as the ioctl moves: hashing after each read would hide the read-ahead
        // that goes on meanwhile.
        let start = Instant::now();
        let mut len = 0;
        while len < bytes.len() {
            let end = bytes.len().min(len + READ);
            match file.read(&mut bytes[len..end])? {
                0 => break,
                n => len += n,
            }
        }
        time += start.elapsed();
        hash.update(&bytes[..len]);
        if len < bytes.len() {
            return Ok((hash.finalize().into(), time));
        }
    }
}

fn through_ioctl(path: &Path, buffer: &mut Registered) -> Result<([u8; 32], Transfer, Duration), Box<dyn Error>> {
    let file = File::open(path)?;
    file.set_caching(Some(Caching::Never)); // read(2) has just filled the page cache
    let size = file.size()?;
    let mut hash = Sha256::new();
    let mut sum = Transfer::default();
    let mut time = Duration::ZERO;
    for offset in (0..size).step_by(BUFFER) {
        let len = (size - offset).min(BUFFER as u64);
        let start = Instant::now();
        let done = file.read(buffer, &[Segment { file_offset: offset, buffer_offset: 0, len }])?;
        time += start.elapsed();
        hash.update(&buffer[..done.bytes() as usize]);
        sum.add(&done);
    }
    Ok((hash.finalize().into(), sum, time))
}

fn verdict(runs: &[Results]) -> ExitCode {
    // The last run is the one on a fresh mount, where nothing was cached.
    let (Some(last), false) = (runs.last(), runs.iter().any(|run| run.files == 0)) else {
        println!("quickstart: FAILED: nothing was compared");
        return ExitCode::FAILURE;
    };
    let gigabytes = |bytes: u64| bytes as f64 / 1e9;
    let rate = |bytes: u64, time: Duration| gigabytes(bytes) / time.as_secs_f64();
    let different: Vec<_> = runs.iter().flat_map(|run| &run.different).collect();
    for difference in different.iter().take(20) {
        println!("{difference}");
    }
    let verdict = match different.len() {
        0 => format!("OK, the same in each of {} comparisons", runs.len()),
        n => format!("FAILED, {n} different"),
    };
    println!(
        "quickstart: {} files, {:.2} GB; read() {:.2} GB/s, ioctl {:.2} GB/s (files of 16 MiB and more: {:.2} and {:.2}); \
         bytes by route: p2p {}, bounce {}, host {}, holes {}, edges {}; {verdict}",
        last.files,
        gigabytes(last.bytes),
        rate(last.bytes, last.read),
        rate(last.bytes, last.ioctl),
        rate(last.large_bytes, last.large_read),
        rate(last.large_bytes, last.large_ioctl),
        last.p2p,
        last.bounce,
        last.host,
        last.hole,
        last.edge,
    );
    if different.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
