//! The command line of mkfs.gpunvme.

use clap::Parser;
use gpunvme_layout::superblock::LABEL_MAX;
use uuid::Uuid;

/// Formats a device as a gpunvme volume. Everything on the device is lost.
#[derive(Debug, Parser)]
#[command(name = "mkfs.gpunvme", bin_name = "mkfs.gpunvme", version)]
pub struct Arguments {
    /// A block device (/dev/nvme1n1), an image file, or an NVMe controller (vfio:0000:01:00.0)
    pub device: String,
    /// Name of the volume, at most 64 bytes
    #[arg(short = 'L', long, value_parser = label, default_value = "", hide_default_value = true)]
    pub label: String,
    /// UUID of the volume [default: random]
    #[arg(short = 'U', long)]
    pub uuid: Option<Uuid>,
    /// Format even if the device carries a filesystem or a partition table
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
}

fn label(text: &str) -> Result<String, String> {
    if text.len() > LABEL_MAX {
        Err(format!("{} bytes are too long: at most {LABEL_MAX} fit", text.len()))
    } else if text.chars().any(char::is_control) {
        Err("control characters would garble every listing".to_owned())
    } else {
        Ok(text.to_owned())
    }
}

#[cfg(test)]
mod tests {
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
            assert_eq!(arguments.device, "/dev/x");
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
        assert!(parse(&["/dev/x", "-q", "--json"]).unwrap_err().contains("cannot be used with"));
        assert!(parse(&[]).unwrap_err().contains("<DEVICE>"));
    }
}
