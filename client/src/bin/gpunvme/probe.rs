//! The command `probe`: which volume a device carries, in the form in which udev imports the
//! properties of a device.
//!
//! It only reads, claims nothing, and knows a volume that is mounted, or newer than this program.

use std::path::Path;

use gpunvme_layout::superblock::Identity;
use gpunvme_programs::tag;
use serde_json::json;

use crate::report::{self, Failure, Report};

pub fn run(device: &Path) -> Result<Report, Failure> {
    let failed = |why: String| Failure(format!("{}: {why}", device.display()));
    let found = tag::identify(device).map_err(|error| failed(error.to_string()))?;
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
