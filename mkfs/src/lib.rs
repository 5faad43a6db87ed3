//! mkfs.gpunvme: formats a device as a gpunvme volume; and fsck.gpunvme, which checks one
//! ([`fsck`]).
//!
//! The format itself is written by `gpunvme_engine::format`. This crate is what stands around it:
//! it looks before it leaps ([`gpunvme_programs::contents`]), clears what the device was recognised
//! by before ([`gpunvme_programs::wipe`]), and says what it made ([`report`]).

#![forbid(unsafe_code)]

pub mod arguments;
pub mod fsck;
mod meter;
pub mod report;

use std::ffi::OsString;
use std::fmt::Display;
use std::io;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use clap::Parser;
use gpunvme_blockdev::{BlockDevice, OpenMode, path_of, split_names};
use gpunvme_engine::FormatOptions;
use gpunvme_layout::geometry::TOTAL_BLOCKS_MIN;
use gpunvme_layout::member::UNIT_DEFAULT;
use gpunvme_layout::superblock::Names;
use gpunvme_layout::{BLOCK_SIZE, Geometry, Member, SetPlace, Striping, Timestamp};
use gpunvme_programs::claim::reason;
use gpunvme_programs::terminal::{complain, print};
use gpunvme_programs::{contents, members, wipe};
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
        complain(format_args!("mkfs.gpunvme: {}: {error}", arguments.devices.join("+")));
        FAILED
    };
    let printed = match make(&arguments) {
        Ok(report) if arguments.json => print(format_args!("{}\n", json(&report))),
        Ok(_) if arguments.quiet => Ok(()),
        Ok(report) => print(format_args!("{report}\n")),
        Err(Refusal { device, why }) => {
            complain(format_args!("mkfs.gpunvme: {device}: {why}"));
            return FAILED;
        }
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

/// Why nothing was formatted.
pub struct Refusal {
    /// The device that it is about; of several that are meant, the names with `+` between them.
    device: String,
    /// The reason, without the device's name.
    why: String,
}

impl Refusal {
    fn new(device: &str, why: impl ToString) -> Refusal {
        Refusal { device: device.to_owned(), why: reason(device, &why) }
    }
}

/// Does what the command line asks for.
///
/// # Errors
/// Why no device was formatted.
pub fn make(arguments: &Arguments) -> Result<Report, Refusal> {
    let names: Vec<&str> = arguments.devices.iter().flat_map(|device| split_names(device)).collect();
    let devices = claim_all(&names, arguments.dry_run)?;
    // Of one device the volume is all, unless others may come.
    let is_striped = names.len() > 1 || arguments.growable;
    if arguments.unit.is_some() && !is_striped {
        return Err(Refusal::new(names[0], "--unit is for several devices, or one with --growable"));
    }
    let striping = if is_striped { Some(striping(&devices, arguments.unit.unwrap_or(UNIT_DEFAULT))?) } else { None };
    let volume = match &striping {
        Some(striping) => {
            members::stripe(devices.clone(), std::slice::from_ref(striping)).map_err(|why| Refusal::new(&names.join("+"), why))?
        }
        None => Arc::clone(&devices[0]),
    };
    let failed = |error: &dyn ToString| Refusal::new(volume.name(), error.to_string());
    let geometry = plan(volume.geometry().len.get()).map_err(|why| failed(&why))?;
    for device in devices.iter().filter(|_| !arguments.force) {
        let refused = |why: String| Refusal::new(device.name(), why);
        if let Some(found) = contents::find(device).map_err(refused)? {
            return Err(refused(format!("carries {found}; --force formats it all the same, and that is lost")));
        }
    }
    let uuid = arguments.uuid.unwrap_or_else(Uuid::new_v4);
    let report = Report::new(&names, striping.as_ref(), &geometry, uuid, &arguments.label, arguments.dry_run);
    if arguments.dry_run {
        return Ok(report);
    }
    let options = FormatOptions {
        label: arguments.label.clone(),
        uuid: uuid.into_bytes(),
        hash_key: random().map_err(|why| failed(&why))?,
        now: now(),
        owner: (rustix::process::getuid().as_raw(), rustix::process::getgid().as_raw()),
    };
    for device in &devices {
        wipe::wipe(device).map_err(|error| Refusal::new(device.name(), error))?;
    }
    gpunvme_engine::format(&volume, &options).map_err(|error| failed(&error))?;
    if let Some(striping) = striping {
        make_members(&devices, striping, &options).map_err(|why| failed(&why))?;
    }
    Ok(report)
}

/// Makes the devices members, when the volume is on them.
fn make_members(devices: &[Arc<dyn BlockDevice>], striping: Striping, options: &FormatOptions) -> Result<(), String> {
    let member = Member {
        volume: options.uuid,
        names: Names { label: options.label.clone(), changed_uuid: None },
        uuid: [0; 16],
        index: 0,
        place: SetPlace::all(&[striping])[0],
        striping,
        blocks: 0,
        generation: members::generation(1)?,
    };
    let uuids: Vec<_> = devices.iter().map(|_| Uuid::new_v4().into_bytes()).collect();
    members::format(devices, &member, &uuids)
}

fn claim_all(names: &[&str], dry_run: bool) -> Result<Vec<Arc<dyn BlockDevice>>, Refusal> {
    let identity = |name: &str| path_of(name).and_then(|path| std::fs::canonicalize(path).ok());
    for (number, name) in names.iter().enumerate() {
        let is_same = |other: &&&str| *other == name || identity(name).is_some_and(|path| identity(other) == Some(path));
        if names[..number].iter().any(|other| is_same(&other)) {
            return Err(Refusal::new(name, "is named twice"));
        }
    }
    names.iter().map(|name| open(name, dry_run).map_err(|why| Refusal::new(name, why))).collect()
}

/// How a volume lies on these devices.
fn striping(devices: &[Arc<dyn BlockDevice>], unit: u32) -> Result<Striping, Refusal> {
    let blocks: Vec<u64> = devices.iter().map(|device| device.geometry().len.get() / BLOCK_SIZE as u64).collect();
    Striping::new(&blocks, unit).ok_or_else(|| {
        let smallest = devices.iter().min_by_key(|device| device.geometry().len.get()).expect("there are several");
        let len = smallest.geometry().len.get();
        Refusal::new(smallest.name(), format!("too small for a member of a volume: this has {}", Binary(len)))
    })
}

fn open(name: &str, dry_run: bool) -> Result<Arc<dyn BlockDevice>, String> {
    if let Err(error) = std::fs::metadata(name)
        && error.kind() == io::ErrorKind::NotFound
        && !name.contains(':')
        && !name.starts_with("/dev/")
    {
        return Err(format!("no such file; `truncate -s 10G {name}` makes an image file of 10 GiB"));
    }
    members::claim(name, if dry_run { OpenMode::ReadOnly } else { OpenMode::ReadWrite }).map_err(|error| error.to_string())
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
