//! The command `grow`: makes a mounted volume as large as its devices have become, or gives it
//! further ones.
//!
//! A new device is looked at and cleared here, where the caller's rights are; the daemon takes only
//! what carries nothing.

use crate::report::{self, Failure, Report};
use gpunvme::Mount;
use gpunvme_blockdev::{OpenMode, path_of, split_names};
use gpunvme_programs::{contents, members, wipe};
use serde_json::json;
use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

#[derive(clap::Args)]
pub struct Grow {
    /// The mount, or anything in it
    pub mount: PathBuf,
    /// Devices that a volume of several is to have, too: what they hold is lost. They become one
    /// more set: a file that lies there is striped over all of them
    #[arg(value_name = "DEVICE", value_parser = clap::builder::NonEmptyStringValueParser::new())]
    pub devices: Vec<String>,
    /// Take devices even if they carry a filesystem or a partition table
    #[arg(short, long, requires = "devices")]
    pub force: bool,
}

pub fn run(grow: &Grow) -> Result<Report, Failure> {
    let mount = Mount::open(&grow.mount)?;
    let names = grow.devices.iter().flat_map(|device| split_names(device)).map(absolute).collect::<Result<Vec<_>, _>>()?;
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    for (number, name) in names.iter().enumerate() {
        if names[..number].contains(name) {
            return Err(Failure(format!("{name}: is named twice")));
        }
    }
    let own = fs::metadata(&grow.mount).map_err(|error| Failure(format!("{}: {error}", grow.mount.display())))?.dev();
    for name in &names {
        if path_of(name).is_some_and(|path| lies_on(path, own)) {
            return Err(Failure(format!("{name}: lies on the volume itself, which could never be mounted again")));
        }
    }
    if !names.is_empty() {
        // Before anything of theirs is lost.
        mount.may_grow(&names)?;
        prepare(&names, grow.force)?;
    }
    let [before, capacity] = mount.grow(&names)?;
    let mut report = Report::new(json!({ "before": before, "capacity": capacity, "added": names }));
    report.line("before", report::size(before));
    report.line("capacity", report::size(capacity));
    if before == capacity {
        report.line("grown", "nothing to do: the volume is as large as its devices");
    }
    Ok(report)
}

/// Whether a file, or the one that a loop device is of, lies on the filesystem of this number.
fn lies_on(path: &Path, filesystem: u64) -> bool {
    let Ok(found) = fs::metadata(path) else { return false };
    if !found.file_type().is_block_device() {
        return found.dev() == filesystem;
    }
    let (major, minor) = (rustix::fs::major(found.rdev()), rustix::fs::minor(found.rdev()));
    let backing = fs::read_to_string(format!("/sys/dev/block/{major}:{minor}/loop/backing_file"));
    backing.is_ok_and(|backing| fs::metadata(backing.trim_end()).is_ok_and(|file| file.dev() == filesystem))
}

/// The name by which the daemon, which has another working directory, finds the same device.
fn absolute(name: &str) -> Result<String, Failure> {
    // What says by which driver is a name of its own.
    let Some(path) = path_of(name).filter(|_| !name.contains(':')) else { return Ok(name.to_owned()) };
    let found = path.canonicalize().map_err(|error| Failure(format!("{name}: {error}")))?;
    found.into_os_string().into_string().map_err(|_| Failure(format!("{name}: the name is not UTF-8")))
}

/// Clears devices by which they are recognised, all of which may be taken.
fn prepare(names: &[&str], force: bool) -> Result<(), Failure> {
    let fail = |name: &str, why: String| Failure(format!("{name}: {why}"));
    let claim = |name: &&str| members::claim(name, OpenMode::ReadWrite).map_err(|error| fail(name, error.to_string()));
    let devices = names.iter().map(claim).collect::<Result<Vec<_>, _>>()?;
    for device in devices.iter().filter(|_| !force) {
        if let Some(found) = contents::find(device).map_err(|why| fail(device.name(), why))? {
            let why = format!("carries {found}; --force takes it all the same, and that is lost");
            return Err(fail(device.name(), why));
        }
    }
    devices.iter().try_for_each(|device| wipe::wipe(device).map_err(|error| Failure(error.to_string())))
}
