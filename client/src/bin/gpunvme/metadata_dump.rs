//! The command `metadata-dump`: an image of a volume's metadata, for those who look for a fault in
//! it, without what people keep in the volume.

use std::fs::File;
use std::io::{ErrorKind, IsTerminal};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use gpunvme_blockdev::{Error, OpenMode};
use gpunvme_layout::{BLOCK_SIZE, Geometry};
use gpunvme_programs::dump::{Names, Stage, Summary, dump};
use gpunvme_programs::members;
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::json;

use crate::report::{Failure, Report, size};

/// Addresses that people are shown.
const SHOWN: usize = 8;

#[derive(clap::Args)]
pub struct MetadataDump {
    /// A block device, an image file or an NVMe controller, not mounted; of a volume on several
    /// any of them
    #[arg(value_parser = clap::builder::NonEmptyStringValueParser::new())]
    pub device: String,
    /// The image to make: a sparse file, as long as the volume
    pub file: PathBuf,
    /// Keep the names of files, directories and attributes, and the label
    #[arg(long)]
    pub names: bool,
    /// Replace the file if there is one
    #[arg(long)]
    pub force: bool,
}

pub fn run(command: &MetadataDump) -> Result<Report, Failure> {
    let MetadataDump { device: name, file: path, names, force } = command;
    if Path::new(name).is_dir() {
        let why = "is a directory: a volume is dumped while it is not mounted, by the name of its device";
        return Err(Failure(format!("{name}: {why} (gpunvme info {name})")));
    }
    let failed = |why: String| Failure(format!("{}: {why}", path.display()));
    may_be_made(path, *force).map_err(failed)?;
    let of_device = |why: String| Failure(format!("{name}: {why}"));
    let device = members::open(name, &[], OpenMode::ReadOnly).map_err(|error| of_device(error.to_string()))?;
    // Now that the volume is claimed, a part of it is found in use.
    if *force
        && matches!(path.to_str().map(|path| gpunvme_blockdev::open(path, OpenMode::ReadWrite)), Some(Err(Error::Busy { .. })))
    {
        return Err(failed("is in use; it may be the volume, or a part of it".to_owned()));
    }
    // Until it is whole, it has another name, and none but the caller can read it.
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let new = tempfile::Builder::new().prefix(".gpunvme-").tempfile_in(folder);
    // The error's own text has a name that the caller never gave.
    let new = new.map_err(|error| match error.kind() {
        ErrorKind::NotFound => failed(format!("there is no folder {}", folder.display())),
        kind => failed(format!("cannot be made in {}: {kind}", folder.display())),
    })?;
    let summary = fill(new.as_file(), &device, if *names { Names::Kept } else { Names::Replaced }).map_err(of_device)?;
    let kept = if *force { new.persist(path) } else { new.persist_noclobber(path) };
    kept.map_err(|error| failed(error.error.to_string()))?;
    Ok(report(command, &summary, device.geometry().len.get()))
}

/// Whether the file may be made, or replaced.
fn may_be_made(path: &Path, force: bool) -> Result<(), String> {
    match path.symlink_metadata() {
        Ok(there) if !there.is_file() => Err("is there, and is no file that could be replaced".to_owned()),
        Ok(_) if !force => Err("is there already; --force replaces it".to_owned()),
        _ => Ok(()),
    }
}

fn fill(file: &File, device: &std::sync::Arc<dyn gpunvme_blockdev::BlockDevice>, names: Names) -> Result<Summary, String> {
    let failed = |error: std::io::Error| format!("the dump cannot be written: {error}");
    file.set_len(device.geometry().len.get() / BLOCK_SIZE as u64 * BLOCK_SIZE as u64).map_err(failed)?;
    let bar = bar();
    let mut show = |stage, done, of| {
        bar.set_message(match stage {
            Stage::Journal => "journal",
            Stage::Groups => "groups",
            Stage::Nodes => "nodes",
        });
        bar.set_length(of);
        bar.set_position(done);
    };
    let dumped = dump(device, names, &mut show, |address, block| file.write_all_at(block.bytes(), Geometry::byte(address)));
    bar.finish_and_clear();
    let summary = dumped?;
    file.sync_all().map_err(failed)?;
    Ok(summary)
}

/// Shows where the command is, on a terminal.
fn bar() -> ProgressBar {
    if !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let style = ProgressStyle::with_template("{msg} {wide_bar} {percent}% of {len}, {elapsed}, {eta} left");
    ProgressBar::no_length().with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
}

fn report(command: &MetadataDump, summary: &Summary, len: u64) -> Report {
    let Summary { blocks, damaged, unreadable, unreadable_at, misplaced_names } = summary;
    let bytes = blocks * BLOCK_SIZE as u64;
    let mut report = Report::new(json!({
        "device": command.device,
        "file": command.file,
        "names": if command.names { "kept" } else { "replaced" },
        "blocks": blocks,
        "bytes": bytes,
        "volume_bytes": len,
        "damaged": damaged,
        "unreadable": unreadable,
        "unreadable_at": unreadable_at,
        "misplaced_names": misplaced_names,
    }));
    report.line("dump", format!("{} of metadata, of {}", size(bytes), size(len)));
    let names = if command.names { "as they are" } else { "replaced by others of the same length" };
    report.line("names", format!("{names}; no content of files, values of attributes or targets of links"));
    if *damaged > 0 {
        report.line("damaged", format!("blocks: {damaged}; those of the dump fail in the same way"));
    }
    if *unreadable > 0 {
        let shown: Vec<String> = unreadable_at.iter().take(SHOWN).map(u64::to_string).collect();
        let more = if *unreadable > SHOWN as u64 { ", ..." } else { "" };
        let blocks = format!("blocks: {unreadable} that the device cannot read ({}{more})", shown.join(", "));
        report.line("missing", format!("{blocks}; zeros in the dump"));
    }
    if *misplaced_names > 0 {
        let what = format!("names: {misplaced_names} lie under another name's hash, which a check of the dump does not find");
        report.line("differs", format!("{what}; with --names it does"));
    }
    report.line("next", format!("fsck.gpunvme -n {file}; tar -cSzf {file}.tar.gz {file}", file = command.file.display()));
    report
}
