//! mkfs.gpunvme: formats a device as a gpunvme volume; and fsck.gpunvme, which checks one
//! ([`fsck`]).
//!
//! The format itself is written by `gpunvme_engine::format`. This crate is what stands around it:
//! it looks before it leaps ([`contents`]), clears what the device was recognised by before
//! ([`wipe`]), and says what it made ([`report`]).

#![forbid(unsafe_code)]

pub mod arguments;
pub mod contents;
pub mod fsck;
mod meter;
pub mod report;
pub mod wipe;

use std::ffi::OsString;
use std::fmt::Display;
use std::io;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use clap::Parser;
use gpunvme_blockdev::{BlockDevice, OpenMode};
use gpunvme_engine::FormatOptions;
use gpunvme_layout::geometry::TOTAL_BLOCKS_MIN;
use gpunvme_layout::{BLOCK_SIZE, Geometry, Timestamp};
use gpunvme_programs::claim::{claim, reason};
use gpunvme_programs::terminal::{complain, print};
use serde::Serialize;
use uuid::Uuid;

use arguments::Arguments;
use report::{Binary, Report};

/// Exit code when the device was not formatted, or it could not be said that it was.
const FAILED: u8 = 1;

/// Runs the program with `args`, the first being its name. Returns its exit code: 0 formatted, 1
/// not formatted or the report could not be written, 2 wrong command line (after clap has said why
/// and ended the process).
pub fn run(args: impl IntoIterator<Item = OsString>) -> u8 {
    let arguments = Arguments::parse_from(args);
    let failed = |error: &dyn Display| {
        complain(format_args!("mkfs.gpunvme: {}: {error}", arguments.device));
        FAILED
    };
    let printed = match make(&arguments) {
        Ok(report) if arguments.json => print(format_args!("{}\n", json(&report))),
        Ok(_) if arguments.quiet => Ok(()),
        Ok(report) => print(format_args!("{report}\n")),
        Err(error) => return failed(&error),
    };
    match printed {
        Ok(()) => 0,
        Err(error) if arguments.dry_run => failed(&format_args!("standard output: {error}")),
        Err(error) => failed(&format_args!("formatted, but the report could not be written: {error}")),
    }
}

/// A report for programs.
fn json(report: &impl Serialize) -> String {
    serde_json::to_string_pretty(report).expect("strings and numbers")
}

/// Does what the command line asks for.
///
/// # Errors
/// A text that says why the device was not formatted. It does not repeat the device's name.
pub fn make(arguments: &Arguments) -> Result<Report, String> {
    let name = &arguments.device;
    let device = open(name, arguments.dry_run)?;
    let geometry = plan(device.geometry().len)?;
    if !arguments.force
        && let Some(found) = contents::find(&device)?
    {
        return Err(format!("carries {found}; --force formats it all the same, and that is lost"));
    }
    let uuid = arguments.uuid.unwrap_or_else(Uuid::new_v4);
    let report = Report::new(name, &geometry, uuid, &arguments.label, arguments.dry_run);
    if arguments.dry_run {
        return Ok(report);
    }
    let failed = |error: &dyn ToString| reason(name, &error.to_string());
    let options = FormatOptions {
        label: arguments.label.clone(),
        uuid: uuid.into_bytes(),
        hash_key: random()?,
        now: now(),
        owner: (rustix::process::getuid().as_raw(), rustix::process::getgid().as_raw()),
    };
    wipe::wipe(&device).map_err(|error| failed(&error))?;
    gpunvme_engine::format(&device, &options).map_err(|error| failed(&error))?;
    Ok(report)
}

fn open(name: &str, dry_run: bool) -> Result<Arc<dyn BlockDevice>, String> {
    if let Err(error) = std::fs::metadata(name)
        && error.kind() == io::ErrorKind::NotFound
        && !name.contains(':')
        && !name.starts_with("/dev/")
    {
        return Err(format!("no such file; `truncate -s 10G {name}` makes an image file of 10 GiB"));
    }
    claim(name, if dry_run { OpenMode::ReadOnly } else { OpenMode::ReadWrite }).map_err(|error| error.to_string())
}

/// Where everything will lie on a device of `len` bytes.
fn plan(len: u64) -> Result<Geometry, String> {
    let blocks = len / BLOCK_SIZE as u64;
    Geometry::new(blocks, Geometry::default_journal_blocks(blocks)).ok_or_else(|| {
        let min = TOTAL_BLOCKS_MIN * BLOCK_SIZE as u64;
        format!("too small: a volume needs {} at the least, and this has {}", Binary(min), Binary(len))
    })
}

fn random() -> Result<[u8; 16], String> {
    let mut key = [0; 16];
    match rustix::rand::getrandom(&mut key, rustix::rand::GetRandomFlags::empty()) {
        Ok(16) => Ok(key),
        Ok(_) => Err("the system gave too few random bytes".to_owned()),
        Err(error) => Err(format!("random bytes: {error}")),
    }
}

fn now() -> Timestamp {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    Timestamp { seconds: now.as_secs() as i64, nanoseconds: now.subsec_nanos() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_below_the_minimum_is_refused_with_both_sizes() {
        assert_eq!(plan(1 << 20).unwrap_err(), "too small: a volume needs 16 MiB at the least, and this has 1 MiB");
        assert!(plan((16 << 20) - 1).is_err());
        assert!(plan(16 << 20).is_ok());
        assert!(plan(16 << 40).is_ok());
    }
}
