//! Finds out what a device holds already, so that a typing error destroys no data.
//!
//! Foreign filesystems and partition tables are recognised by libblkid, which knows all that Linux
//! knows, through blkid(8): util-linux has both on every system, and a program needs no C headers
//! to be built.

use std::fmt;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use gpunvme_blockdev::{BlockDevice, Io, Region, Request};
use gpunvme_layout::geometry::SUPERBLOCK;
use gpunvme_layout::{BLOCK_SIZE, Block, Geometry, Member, Superblock};
use rustix::fs::MemfdFlags;
use uuid::Uuid;

use crate::claim::reason;
use crate::wipe::ENDS_LEN;

/// blkid's exit code when it recognises nothing.
const BLKID_NOTHING: i32 = 2;
/// blkid's exit code when it recognises several things that exclude each other.
const BLKID_AMBIVALENT: i32 = 8;
/// blkid is in /usr/sbin, which is not in every user's PATH.
const SBIN: &str = "/usr/sbin:/sbin";

/// Something that formatting would destroy. Reads as an English noun phrase.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Contents {
    what: String,
    label: Option<String>,
    uuid: Option<String>,
}

impl fmt::Display for Contents {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(&self.what)?;
        match (&self.label, &self.uuid) {
            (Some(label), Some(uuid)) => write!(f, " ({label:?}, UUID {uuid})"),
            (Some(label), None) => write!(f, " ({label:?})"),
            (None, Some(uuid)) => write!(f, " (UUID {uuid})"),
            (None, None) => Ok(()),
        }
    }
}

/// What `device` carries, `None` if nothing is recognised.
///
/// # Errors
/// A text: the device cannot be read, or blkid cannot be run.
pub fn find(device: &Arc<dyn BlockDevice>) -> Result<Option<Contents>, String> {
    let own = find_own(device).map_err(|error| reason(device.name(), &error))?;
    let mut blkid = Command::new("blkid");
    blkid.args(["-p", "-o", "export", "--"]);
    let foreign = if Path::new(device.name()).exists() {
        find_foreign(blkid.arg(device.name()))?
    } else {
        // blkid knows files only: it gets one with what formats are recognised by.
        let ends = copy_of_ends(device).map_err(|error| reason(device.name(), &error))?;
        find_foreign(blkid.arg("/proc/self/fd/0").stdin(ends))?
    };
    Ok(own.or(foreign))
}

/// A volume of ours, even one that is damaged or newer than this program.
fn find_own(device: &Arc<dyn BlockDevice>) -> gpunvme_blockdev::Result<Option<Contents>> {
    let blocks = device.geometry().len.get() / BLOCK_SIZE as u64;
    if blocks == 0 {
        return Ok(None);
    }
    let io = Io::inline(Arc::clone(device))?;
    let region = Region::allocate(BLOCK_SIZE)?;
    let read = |address| {
        let mut bytes = [0; BLOCK_SIZE];
        io.run([Request::read(Geometry::byte(address), [region.span(0..BLOCK_SIZE)])])?;
        region.read_at(0, &mut bytes)?;
        gpunvme_blockdev::Result::Ok(Block::from_bytes(&bytes))
    };
    let (first, last) = (read(SUPERBLOCK)?, read(blocks - 1)?);
    // Where something else was made since, what lies in the middle is only a trace.
    let place = Geometry::middle_superblock(blocks).filter(|_| !Superblock::is_displaced(&first));
    let middle = place.and_then(|address| Some((read(address).ok()?, address)));
    let copies = [(&first, SUPERBLOCK), (&last, blocks - 1)].into_iter().chain(middle.as_ref().map(|(block, at)| (block, *at)));
    for (block, address) in copies {
        if let Some(identity) = Superblock::identify(block, address) {
            let is_member = Member::is_one(block, address);
            return Ok(Some(Contents {
                what: if is_member { "one of the devices of a gpunvme volume" } else { "a gpunvme volume" }.to_owned(),
                label: Some(identity.label).filter(|label| !label.is_empty()),
                uuid: Some(Uuid::from_bytes(identity.uuid).to_string()),
            }));
        }
    }
    let unreadable = "a gpunvme volume that is damaged or newer than this program";
    let contents = || Contents { what: unreadable.to_owned(), label: None, uuid: None };
    Ok(Superblock::recognize(first.bytes()).then(contents))
}

/// A file in memory, as long as the device, that holds what the device does at its ends.
fn copy_of_ends(device: &Arc<dyn BlockDevice>) -> Result<OwnedFd, String> {
    let len = device.geometry().len.get();
    let piece = ENDS_LEN.min(len);
    let file = rustix::fs::memfd_create("ends", MemfdFlags::CLOEXEC).map_err(|error| error.to_string())?;
    rustix::fs::ftruncate(&file, len).map_err(|error| error.to_string())?;
    let io = Io::inline(Arc::clone(device)).map_err(|error| error.to_string())?;
    let region = Region::allocate(piece as usize).map_err(|error| error.to_string())?;
    let mut bytes = vec![0; piece as usize];
    for offset in [0, len - piece] {
        let read = io.run(vec![Request::read(offset, vec![region.span(0..piece as usize)])]);
        read.and_then(|()| region.read_at(0, &mut bytes)).map_err(|error| error.to_string())?;
        rustix::io::pwrite(&file, &bytes, offset).map_err(|error| error.to_string())?;
    }
    Ok(file)
}

/// Anything that libblkid knows, which `blkid` asks for a file.
fn find_foreign(blkid: &mut Command) -> Result<Option<Contents>, String> {
    let path = std::env::var("PATH").map_or(SBIN.to_owned(), |path| format!("{path}:{SBIN}"));
    let output = blkid
        .env("PATH", path)
        .output()
        .map_err(|error| format!("blkid, of util-linux, cannot be run: {error}; --force does not look"))?;
    match output.status.code() {
        Some(0) => Ok(parse(&String::from_utf8_lossy(&output.stdout))),
        Some(BLKID_NOTHING) if output.stderr.is_empty() => Ok(None),
        Some(BLKID_AMBIVALENT) => {
            Ok(Some(Contents { what: "signatures of several filesystems".to_owned(), label: None, uuid: None }))
        }
        _ => {
            let why = String::from_utf8_lossy(&output.stderr);
            Err(format!("blkid failed ({}): {}; --force does not look", output.status, why.trim()))
        }
    }
}

/// Understands `blkid -p -o export`: lines of KEY=value, in which the shell's special characters
/// are escaped.
fn parse(export: &str) -> Option<Contents> {
    let value = |key: &str| {
        let line = export.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix('='))?;
        Some(line.replace('\\', ""))
    };
    let what = match (value("TYPE"), value("PTTYPE")) {
        (Some(name), _) => format!("a filesystem or volume of type {name}"),
        (None, Some(name)) => format!("a partition table of type {name}"),
        (None, None) => return None,
    };
    Some(Contents { what, label: value("LABEL"), uuid: value("UUID").or_else(|| value("PTUUID")) })
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::FileExt;

    use gpunvme_blockdev::OpenMode;
    use gpunvme_blockdev_testing::{Image, MemoryDevice};

    use super::*;

    #[test]
    fn reads_the_export_format() {
        let export = "DEVNAME=/dev/sdb1\nLABEL=my\\ data\nUUID=f254-1bc2\nTYPE=ext4\nUSAGE=filesystem\n";
        assert_eq!(parse(export).unwrap().to_string(), "a filesystem or volume of type ext4 (\"my data\", UUID f254-1bc2)");
        let table = "DEVNAME=/dev/sdb\nPTUUID=7ff9\nPTTYPE=gpt\n";
        assert_eq!(parse(table).unwrap().to_string(), "a partition table of type gpt (UUID 7ff9)");
        let bare_partition = "DEVNAME=/dev/sdb1\nPART_ENTRY_SCHEME=gpt\nPART_ENTRY_TYPE=0fc6\n";
        assert_eq!(parse(bare_partition), None);
    }

    #[test]
    fn blkid_recognises_real_signatures() {
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        let path = dir.path().join("image");
        let image = File::create(&path).unwrap();
        image.set_len(64 << 20).unwrap();
        // As an image file, and as a device without a path.
        let look = || {
            let as_file = find(&gpunvme_blockdev::open(path.to_str().unwrap(), OpenMode::ReadOnly).unwrap()).unwrap();
            let mut content = Image::new(64 << 20);
            content.write_at(0, &std::fs::read(&path).unwrap());
            let as_other: Arc<dyn BlockDevice> = MemoryDevice::from_image(content);
            assert_eq!(as_file, find(&as_other).unwrap());
            as_file.map(|contents| contents.to_string())
        };
        assert_eq!(look(), None);

        // A partition table in the style of DOS with one Linux partition.
        let mut sector = [0; 512];
        sector[446..462].copy_from_slice(&[0, 0, 2, 0, 0x83, 0, 0, 0, 0, 8, 0, 0, 0, 0, 1, 0]);
        sector[510..].copy_from_slice(&[0x55, 0xaa]);
        image.write_all_at(&sector, 0).unwrap();
        assert!(look().unwrap().starts_with("a partition table of type dos"), "{:?}", look());

        image.write_all_at(&[0; 512], 0).unwrap();
        let made =
            Command::new("mkswap").env("PATH", format!("/usr/bin:/bin:{SBIN}")).args(["-L", "my swap"]).arg(&path).output();
        assert!(made.unwrap().status.success());
        assert!(look().unwrap().starts_with("a filesystem or volume of type swap (\"my swap\", UUID "), "{:?}", look());
    }
}
