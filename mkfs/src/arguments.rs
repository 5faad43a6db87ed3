//! The command line of mkfs.gpunvme.

use clap::Parser;
use gpunvme_layout::BLOCK_SIZE;
use gpunvme_layout::member::{MEMBERS_MAX, UNIT_RANGE};
use gpunvme_programs::completions::{Completions, Printed};
use gpunvme_programs::names::{self, label};
use uuid::Uuid;

/// Formats a device as a gpunvme volume, or several as one. Everything on them is lost.
#[derive(Debug, Parser)]
#[command(name = "mkfs.gpunvme", bin_name = "mkfs.gpunvme", version)]
pub struct Arguments {
    /// A block device (/dev/nvme1n1), an image file, or an NVMe controller (vfio:0000:01:00.0);
    /// of several, up to 16, one volume is made
    #[arg(required = true, num_args = 1..=usize::from(MEMBERS_MAX), value_name = "DEVICE", value_parser = clap::builder::NonEmptyStringValueParser::new())]
    pub devices: Vec<String>,
    /// Name of the volume, at most 64 bytes
    #[arg(short = 'L', long, value_parser = label, default_value = "", hide_default_value = true)]
    pub label: String,
    /// UUID of the volume; `random`, which is the default, is a new one
    #[arg(short = 'U', long, value_parser = uuid)]
    pub uuid: Option<Uuid>,
    /// What lies on one of several devices before the next: 64K to 16M, a power of two; 128K unless
    /// given
    #[arg(long, value_parser = unit, value_name = "SIZE")]
    pub unit: Option<u32>,
    /// Make a volume that can be given further devices while it is mounted, as one of several can,
    /// of one device
    #[arg(long)]
    pub growable: bool,
    /// Format even if a device carries a filesystem or a partition table
    #[arg(short, long)]
    pub force: bool,
    /// Say what would be made, and write nothing
    #[arg(short = 'n', long)]
    pub dry_run: bool,
    /// Say nothing but errors
    #[arg(short, long, conflicts_with = "json")]
    pub quiet: bool,
    /// Say what was made as JSON
    #[arg(long)]
    pub json: bool,
    /// Print what a shell needs to complete this command line
    #[arg(long, value_name = "SHELL", value_parser = Completions)]
    pub completions: Option<Printed>,
}

/// A size in blocks.
fn unit(text: &str) -> Result<u32, String> {
    let (digits, shift) = match text.trim_end_matches("iB").split_at(text.trim_end_matches("iB").len().saturating_sub(1)) {
        (digits, "k" | "K") => (digits, 10),
        (digits, "m" | "M") => (digits, 20),
        _ => (text, 0),
    };
    let bytes = digits.parse::<u64>().ok().and_then(|number| number.checked_mul(1 << shift));
    let blocks = bytes.filter(|bytes| bytes.is_power_of_two()).and_then(|bytes| u32::try_from(bytes / BLOCK_SIZE as u64).ok());
    let fits = |blocks: &u32| (UNIT_RANGE[0]..=UNIT_RANGE[1]).contains(blocks);
    blocks.filter(fits).ok_or_else(|| "a unit is 64K, 128K, 256K and so on, up to 16M".to_owned())
}

fn uuid(text: &str) -> Result<Uuid, String> {
    if text == "random" { Ok(Uuid::new_v4()) } else { names::uuid(text, "random") }
}

#[cfg(test)]
mod tests {
    use gpunvme_layout::superblock::LABEL_MAX;

    use super::*;

    fn parse(args: &[&str]) -> Result<Arguments, String> {
        Arguments::try_parse_from(["mkfs.gpunvme"].iter().chain(args)).map_err(|error| error.to_string())
    }

    #[test]
    fn short_and_long_options_say_the_same() {
        let uuid = "6bf5c1f4-27b3-46a8-9d5a-1c5f5c8b7a10";
        let short = parse(&["-L", "data", "-U", uuid, "-f", "-n", "-q", "/dev/x"]).unwrap();
        let long = parse(&["/dev/x", "--label", "data", "--uuid", uuid, "--force", "--dry-run", "--quiet"]).unwrap();
        for arguments in [short, long] {
            assert_eq!((&arguments.devices[..], arguments.unit), (&["/dev/x".to_owned()][..], None));
            assert_eq!(arguments.label, "data");
            assert_eq!(arguments.uuid.unwrap().to_string(), uuid);
            assert!(arguments.force && arguments.dry_run && arguments.quiet && !arguments.json);
        }
    }

    #[test]
    fn wrong_values_are_refused() {
        assert!(parse(&["/dev/x", "-L", &"x".repeat(LABEL_MAX)]).is_ok());
        assert!(parse(&["/dev/x", "-L", &"x".repeat(LABEL_MAX + 1)]).unwrap_err().contains("at most 64 fit"));
        assert!(parse(&["/dev/x", "-L", "a\nb"]).unwrap_err().contains("control characters"));
        assert!(parse(&["/dev/x", "-U", "no"]).unwrap_err().contains("uuid"));
        assert!(parse(&["/dev/x", "-U", "00000000-0000-0000-0000-000000000000"]).unwrap_err().contains("zeros"));
        assert!(parse(&["/dev/x", "-U", "random"]).unwrap().uuid.is_some_and(|uuid| !uuid.is_nil()));
        assert!(parse(&["/dev/x", "-q", "--json"]).unwrap_err().contains("cannot be used with"));
        assert!(parse(&[]).unwrap_err().contains("<DEVICE>"));
        assert!(parse(&["/dev/x"; 17]).unwrap_err().contains("no more were expected"));
        for wrong in ["32K", "300K", "32M", "x", "", "1G", "99999999999999999999M"] {
            assert!(parse(&["/dev/x", "--unit", wrong]).unwrap_err().contains("a unit is 64K"), "{wrong}");
        }
        for (text, blocks) in [("64K", 16), ("256KiB", 64), ("1m", 256), ("16M", 4096), ("65536", 16)] {
            assert_eq!(parse(&["/dev/x", "--unit", text]).unwrap().unit, Some(blocks));
        }
    }
}
