//! fsck.gpunvme: checks a volume, and says what is wrong with it.
//!
//! It repairs one thing, by opening the volume as a mount would: what a crash left in the journal. Everything else it finds
//! it reports and leaves as it is.

use std::ffi::OsString;

use clap::Parser;
use gpunvme_blockdev::{Io, OpenMode};
use gpunvme_fs::check::{Finding, check};
use gpunvme_fs::daemon::claim::{claim, reason};
use gpunvme_fs::{FsError, Volume, VolumeOptions};
use serde::Serialize;
use uuid::Uuid;

/// Exit codes of fsck(8).
const CLEAN: u8 = 0;
const ERRORS_LEFT: u8 = 4;
const FAILED: u8 = 8;

/// Metadata kept in memory while it is checked, in bytes.
const CACHE: usize = 256 << 20;

/// Checks a gpunvme volume that is not mounted. Repairs what a crash left in the journal, and nothing else.
#[derive(Debug, Parser)]
#[command(name = "fsck.gpunvme", bin_name = "fsck.gpunvme", version)]
pub struct Arguments {
    /// A block device (/dev/nvme1n1) or an image file
    pub device: String,
    /// Write nothing, not even the journal's recovery
    #[arg(short = 'n', long)]
    pub no_change: bool,
    /// Repair without asking; as without it, that is the journal's recovery
    #[arg(short = 'p', short_alias = 'a', visible_alias = "preen", long = "automatic", conflicts_with = "no_change")]
    pub automatic: bool,
    /// As -p
    #[arg(short = 'y', long, conflicts_with = "no_change")]
    pub yes: bool,
    /// Say what was found as JSON
    #[arg(long)]
    pub json: bool,
}

/// What was found on a volume.
#[derive(Debug, Serialize)]
struct Report {
    device: String,
    label: String,
    uuid: Uuid,
    inodes: u64,
    blocks: u64,
    free_blocks: u64,
    findings: Vec<Line>,
}

#[derive(Debug, Serialize)]
struct Line {
    place: String,
    what: String,
}

/// Runs the program with `args`, the first being its name. Returns its exit code: 0 nothing found, 4 errors found and left,
/// 8 the volume could not be checked, 2 wrong command line (after clap has said why and ended the process).
pub fn run(args: impl IntoIterator<Item = OsString>) -> u8 {
    let arguments = Arguments::parse_from(args);
    let device = &arguments.device;
    match examine(&arguments) {
        Ok(report) => {
            if arguments.json {
                println!("{}", serde_json::to_string_pretty(&report).expect("strings and numbers"));
            } else {
                report.findings.iter().for_each(|line| println!("{device}: {}: {}", line.place, line.what));
                let (inodes, used) = (report.inodes, report.blocks - report.free_blocks);
                let verdict = match report.findings.len() {
                    0 => "clean".to_owned(),
                    n => format!("{n} errors, left as they are"),
                };
                println!("{device}: {verdict}, {inodes} inodes, {used}/{} blocks", report.blocks);
            }
            if report.findings.is_empty() { CLEAN } else { ERRORS_LEFT }
        }
        Err(error) => {
            eprintln!("fsck.gpunvme: {device}: {error}");
            FAILED
        }
    }
}

/// Checks the volume that the command line names.
fn examine(arguments: &Arguments) -> Result<Report, String> {
    let name = &arguments.device;
    let mode = if arguments.no_change { OpenMode::ReadOnly } else { OpenMode::ReadWrite };
    let device = claim(name, mode).map_err(|error| error.to_string())?;
    let text = |error: FsError| reason(name, &error);
    let io = Io::inline(device).map_err(|error| reason(name, &error))?;
    let volume = Volume::open(io, VolumeOptions { read_only: arguments.no_change, cache: CACHE }).map_err(text)?;
    let findings = check(&volume).map_err(text)?;
    if findings.is_empty() {
        volume.close().map_err(text)?;
    }
    let usage = volume.usage();
    let superblock = volume.superblock();
    Ok(Report {
        device: name.clone(),
        label: superblock.label.clone(),
        uuid: Uuid::from_bytes(superblock.uuid),
        inodes: usage.inodes,
        blocks: usage.blocks,
        free_blocks: usage.free,
        findings: findings.into_iter().map(|Finding { place, what }| Line { place, what }).collect(),
    })
}
