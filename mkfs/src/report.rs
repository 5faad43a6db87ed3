//! The report of mkfs.gpunvme on the volume that it made, or would make.

use std::fmt;

use gpunvme_layout::geometry::GROUP_BLOCKS;
use gpunvme_layout::{BLOCK_SIZE, Geometry, Striping};
use serde::Serialize;
use uuid::Uuid;

/// A volume, for people (`Display`) and programs (`Serialize`).
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    device: String,
    /// Of a volume of several devices: all of them.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    devices: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    unit_bytes: Option<u64>,
    uuid: Uuid,
    label: String,
    size_bytes: u64,
    block_bytes: u64,
    group_bytes: u64,
    groups: u64,
    journal_bytes: u64,
    data_bytes: u64,
    /// Whether this volume was only planned.
    dry_run: bool,
}

impl Report {
    /// The report on a volume of this geometry; of several devices, with how it lies on them.
    pub fn new(
        devices: &[&str],
        striping: Option<&Striping>,
        geometry: &Geometry,
        uuid: Uuid,
        label: &str,
        dry_run: bool,
    ) -> Self {
        let block = BLOCK_SIZE as u64;
        Self {
            device: devices.join("+"),
            devices: striping.map_or(Vec::new(), |_| devices.iter().map(ToString::to_string).collect()),
            unit_bytes: striping.map(|striping| u64::from(striping.unit) * block),
            uuid,
            label: label.to_owned(),
            size_bytes: geometry.total_blocks * block,
            block_bytes: block,
            group_bytes: GROUP_BLOCKS * block,
            groups: geometry.groups,
            journal_bytes: geometry.journal_blocks * block,
            data_bytes: geometry.data_blocks() * block,
            dry_run,
        }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let Self { device, size_bytes, block_bytes, groups, .. } = self;
        let done = if self.dry_run { "would be formatted (dry run, nothing was written)" } else { "formatted" };
        writeln!(f, "{device}: {done}")?;
        writeln!(f, "  label       {}", if self.label.is_empty() { "none" } else { &self.label })?;
        writeln!(f, "  UUID        {}", self.uuid)?;
        writeln!(f, "  size        {} ({size_bytes} bytes)", Binary(*size_bytes))?;
        let plural = if *groups == 1 { "group" } else { "groups" };
        writeln!(f, "  data area   {} in {groups} {plural} of up to {}", Binary(self.data_bytes), Binary(self.group_bytes))?;
        if let Some(unit) = self.unit_bytes {
            writeln!(f, "  devices     {}, in units of {}", self.devices.len(), Binary(unit))?;
        }
        writeln!(f, "  journal     {}", Binary(self.journal_bytes))?;
        write!(f, "  block size  {block_bytes} bytes")
    }
}

/// A number of bytes, shown in the largest binary unit that it fills.
pub struct Binary(pub u64);

impl fmt::Display for Binary {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        const UNITS: [&str; 7] = ["bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
        let exponent = self.0.checked_ilog2().map_or(0, |log| log / 10);
        let unit = UNITS[exponent as usize];
        let value = self.0 as f64 / (1_u64 << (10 * exponent)) as f64;
        if value.fract() == 0.0 { write!(f, "{value} {unit}") } else { write!(f, "{value:.1} {unit}") }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_read_well() {
        let text = |bytes: u64| Binary(bytes).to_string();
        assert_eq!(text(0), "0 bytes");
        assert_eq!(text(4096), "4 KiB");
        assert_eq!(text(16 << 20), "16 MiB");
        assert_eq!(text(3 << 29), "1.5 GiB");
        assert_eq!(text(960_197_124_096), "894.3 GiB");
        assert_eq!(text(1 << 44), "16 TiB");
        assert_eq!(text(u64::MAX), "16 EiB");
    }

    #[test]
    fn says_the_same_to_people_and_programs() {
        let geometry = Geometry::new((1 << 30) / 4096, 4096).unwrap();
        let report = Report::new(&["/dev/x"], None, &geometry, Uuid::nil(), "data", false);
        let text = report.to_string();
        assert!(text.starts_with("/dev/x: formatted\n  label       data\n"), "{text}");
        assert!(text.contains("size        1 GiB (1073741824 bytes)\n"), "{text}");
        assert!(text.contains("journal     16 MiB\n"), "{text}");
        let json = serde_json::to_value(&report).unwrap();
        assert_eq!(json["size_bytes"], 1 << 30);
        assert_eq!(json["journal_bytes"], 16 << 20);
        assert_eq!(json["uuid"], "00000000-0000-0000-0000-000000000000");
        assert_eq!(json["dry_run"], false);
    }
}
