//! The command `tune`: changes what people call a volume by, its label and its UUID.

use crate::report::{self, Failure, Report};
use gpunvme_layout::Superblock;
use gpunvme_layout::superblock::Names;
use gpunvme_programs::members;
use gpunvme_programs::names::{NewUuid, label};
use gpunvme_programs::tag;
use serde_json::{Value, json};
use std::path::Path;

#[derive(clap::Args)]
#[command(group(clap::ArgGroup::new("change").required(true).multiple(true).args(["label", "uuid"])))]
pub struct Tune {
    /// A block device, an image file, an NVMe controller, or LABEL=... or UUID=... of a volume on
    /// block devices, not mounted; of a volume on several devices any of them, or all
    #[arg(required = true, value_name = "DEVICE", value_parser = clap::builder::NonEmptyStringValueParser::new())]
    pub devices: Vec<String>,
    /// Name of the volume, at most 64 bytes; empty for none
    #[arg(short = 'L', long, value_parser = label)]
    pub label: Option<String>,
    /// UUID of the volume: one, or `random`, or `restore` for the one that mkfs gave
    #[arg(short = 'U', long)]
    pub uuid: Option<NewUuid>,
}

pub fn run(tune: &Tune) -> Result<Report, Failure> {
    let Some((device, others)) = tune.devices.split_first() else { return Err(Failure("no device".to_owned())) };
    if Path::new(device).is_dir() {
        let why = "is a directory: a volume is changed while it is not mounted, by the name of its device";
        return Err(Failure(format!("{device}: {why} (gpunvme info {device})")));
    }
    let device = &*tag::device_of(device).map_err(Failure)?;
    let change = |superblock: &Superblock| Names {
        label: tune.label.clone().unwrap_or_else(|| superblock.names.label.clone()),
        changed_uuid: match tune.uuid {
            Some(new) => new.stored(superblock.uuid),
            None => superblock.names.changed_uuid,
        },
    };
    let [before, after] =
        members::rename(device, others, change).map_err(|error| Failure(format!("{}: {error}", tune.devices.join("+"))))?;
    let mut report = Report::new(json!({
        "devices": tune.devices,
        "before": known(&before),
        "after": known(&after),
        "original_uuid": report::uuid(&after.uuid),
    }));
    report.line("label", if after.names.label.is_empty() { "none" } else { &after.names.label });
    report.line("uuid", report::uuid(&after.volume_uuid()));
    if after.names.changed_uuid.is_some() {
        let original = report::uuid(&after.uuid);
        report.line("original", format!("{original}; `gpunvme tune -U restore` gives it back, and older programs need it"));
    }
    Ok(report)
}

fn known(superblock: &Superblock) -> Value {
    json!({ "label": superblock.names.label, "uuid": report::uuid(&superblock.volume_uuid()) })
}
