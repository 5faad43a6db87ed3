//! The command `probe`: which volume a device carries, in the form in which udev imports the
//! properties of a device.
//!
//! It only reads, claims nothing, and knows a volume that is mounted, or newer than this program.

use std::fs::{File, OpenOptions};
use std::io::{Seek, SeekFrom};
use std::os::unix::fs::{FileExt, FileTypeExt, OpenOptionsExt};
use std::path::Path;

use gpunvme_layout::superblock::Identity;
use gpunvme_layout::{BLOCK_SIZE, Block, Member, Superblock, Uuid};
use serde_json::json;

use crate::report::{self, Failure, Report};

pub fn run(device: &Path) -> Result<Report, Failure> {
    let failed = |why: String| Failure(format!("{}: {why}", device.display()));
    let found = find(device).map_err(|error| failed(error.to_string()))?;
    let (found, member) = found.ok_or_else(|| failed("no gpunvme volume is here".to_owned()))?;
    let Identity { uuid, label, version } = found;
    let (uuid, member) = (report::uuid(&uuid), member.map(|uuid| report::uuid(&uuid)));
    let known = json!({ "type": "gpunvme", "uuid": uuid, "label": label, "version": version, "member_uuid": member });
    let mut report = Report::new(known);
    let mut property = |name: &str, value: &str| report.text += &format!("ID_FS_{name}={value}\n");
    property("TYPE", "gpunvme");
    property("USAGE", "filesystem");
    property("VERSION", &version.to_string());
    property("UUID", &uuid);
    property("UUID_ENC", &uuid);
    // As other filesystems of several devices call it.
    if let Some(member) = member {
        property("UUID_SUB", &member);
        property("UUID_SUB_ENC", &member);
    }
    if !label.is_empty() {
        property("LABEL", &plain(&label));
        property("LABEL_ENC", &encoded(&label));
    }
    Ok(report)
}

/// The volume of a device, and where it is one of several, the UUID of that one. The superblock is
/// the first block. Its copy in the last one counts where the first was wiped or
/// is damaged, and not where something else has taken its place.
fn find(device: &Path) -> std::io::Result<Option<(Identity, Option<Uuid>)>> {
    // A FIFO must not make it wait.
    let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(device)?;
    let kind = file.metadata()?.file_type();
    if !kind.is_file() && !kind.is_block_device() {
        return Err(std::io::Error::other("must be a block device or an image file"));
    }
    let blocks = (&file).seek(SeekFrom::End(0))? / BLOCK_SIZE as u64;
    if blocks < 2 {
        return Ok(None);
    }
    let first = read(&file, Superblock::ADDRESS)?;
    let identify = |block: &Block, address| Some((Superblock::identify(block, address)?, Member::uuid_of(block, address)));
    if let Some(found) = identify(&first, Superblock::ADDRESS) {
        return Ok(Some(found));
    }
    if !first.has_magic() && first.bytes().iter().any(|byte| *byte != 0) {
        return Ok(None);
    }
    Ok(identify(&read(&file, blocks - 1)?, blocks - 1))
}

fn read(file: &File, address: u64) -> std::io::Result<Block> {
    let mut bytes = [0; BLOCK_SIZE];
    file.read_exact_at(&mut bytes, address * BLOCK_SIZE as u64)?;
    Ok(Block::from_bytes(&bytes))
}

/// Characters that udev puts into names of links as they are (libblkid/src/encode.c).
fn is_plain(character: char) -> bool {
    character.is_ascii_alphanumeric() || "#+-.:=@_".contains(character) || !character.is_ascii()
}

/// A label to show: white space is `_`, and so is what could mean something to a shell.
fn plain(label: &str) -> String {
    let words: Vec<&str> = label.split_ascii_whitespace().collect();
    words.join("_").chars().map(|c| if is_plain(c) || "/$%?,".contains(c) { c } else { '_' }).collect()
}

/// A label as the name of a link in /dev/disk/by-label: what could mean something is `\xNN`.
fn encoded(label: &str) -> String {
    let mut text = String::new();
    for character in label.chars() {
        if is_plain(character) {
            text.push(character);
        } else {
            text += &format!("\\x{:02x}", character as u32);
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_are_written_as_udev_writes_them() {
        for (label, shown, link) in [
            ("data", "data", "data"),
            ("my data", "my_data", r"my\x20data"),
            (" a  b ", "a_b", r"\x20a\x20\x20b\x20"),
            ("a/b$(c)`\n\"'\\", "a/b$_c______", r"a\x2fb\x24\x28c\x29\x60\x0a\x22\x27\x5c"),
            ("Größe", "Größe", "Größe"),
        ] {
            assert_eq!((plain(label).as_str(), encoded(label).as_str()), (shown, link), "{label:?}");
        }
    }
}
