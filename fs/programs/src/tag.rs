//! Volumes by what they say of themselves: the identity that a device carries, and the device that
//! `LABEL=` or `UUID=` names. Nothing is claimed: an open of the device reads again.

use std::borrow::Cow;
use std::fs::{File, OpenOptions};
use std::io::{self, Seek, SeekFrom};
use std::os::unix::fs::{FileExt, FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use gpunvme_layout::superblock::Identity;
use gpunvme_layout::{BLOCK_SIZE, Block, Member, Superblock, Uuid};

use crate::members::block_devices;

/// The volume of a block device or image file, and where that is one of several devices, the UUID
/// of that one. It may be mounted, or newer than this program. The superblock is the first block.
/// Its copy in the last one counts where the first was wiped or is damaged, and not where something
/// else has taken its place.
///
/// # Errors
/// It cannot be read, or is neither a block device nor a file.
pub fn identify(device: &Path) -> io::Result<Option<(Identity, Option<Uuid>)>> {
    // A FIFO must not make it wait.
    let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY).open(device)?;
    let kind = file.metadata()?.file_type();
    if !kind.is_file() && !kind.is_block_device() {
        return Err(io::Error::other("must be a block device or an image file"));
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
    if Superblock::is_displaced(&first) {
        return Ok(None);
    }
    Ok(identify(&read(&file, blocks - 1)?, blocks - 1))
}

fn read(file: &File, address: u64) -> io::Result<Block> {
    let mut bytes = [0; BLOCK_SIZE];
    file.read_exact_at(&mut bytes, address * BLOCK_SIZE as u64)?;
    Ok(Block::from_bytes(&bytes))
}

/// The device that `name` means: `LABEL=data` and `UUID=...` mean a block device of the volume of
/// that label or UUID, the first where it has several; anything else means itself.
///
/// # Errors
/// A text: there is no such volume, or more than one.
pub fn device_of(name: &str) -> Result<Cow<'_, str>, String> {
    let Some(wanted) = Tag::parse(name)? else { return Ok(name.into()) };
    let volumes = block_devices().into_iter().filter_map(|path| {
        let (identity, member) = identify(&path).ok().flatten()?;
        wanted.is_of(&identity).then_some(Found { path, uuid: identity.uuid, member })
    });
    one_of(name, volumes.collect()).map(|path| path.to_string_lossy().into_owned().into())
}

/// A device that carries a volume which a name may mean.
struct Found {
    path: PathBuf,
    uuid: Uuid,
    /// Of one of several devices of a volume, its own.
    member: Option<Uuid>,
}

/// The first device of the only volume among these. A copy of a volume, which has its UUID too, is
/// another one: which of them is meant cannot be known.
fn one_of(name: &str, mut found: Vec<Found>) -> Result<PathBuf, String> {
    found.sort_by(|one, other| one.path.cmp(&other.path));
    let Some(first) = found.first() else {
        return Err(format!(
            "no block device that can be read here has a gpunvme volume of {name}; `gpunvme probe DEVICE` shows what one has, and image files are not looked at"
        ));
    };
    let are_of_two = |(one, other): &(&Found, &Found)| {
        one.uuid != other.uuid || one.member.is_none() || other.member.is_none() || one.member == other.member
    };
    let mut pairs = found.iter().enumerate().flat_map(|(at, other)| found[..at].iter().map(move |one| (one, other)));
    match pairs.find(are_of_two) {
        Some((one, other)) => {
            Err(format!("{name} is of two volumes, on {} and on {}: name the device", one.path.display(), other.path.display()))
        }
        None => Ok(first.path.clone()),
    }
}

/// What names a volume without its device.
#[derive(Debug, PartialEq, Eq)]
enum Tag<'a> {
    Label(&'a str),
    Uuid(Uuid),
}

impl<'a> Tag<'a> {
    /// What `name` is in the notation of fstab(5). None: the name of a device, or of a file.
    fn parse(name: &'a str) -> Result<Option<Tag<'a>>, String> {
        match name.split_once('=') {
            Some(("LABEL", "")) => Err("LABEL= without a label names no volume".to_owned()),
            Some(("LABEL", label)) => Ok(Some(Tag::Label(label))),
            Some(("UUID", uuid)) => match uuid.parse::<uuid::Uuid>() {
                Ok(uuid) => Ok(Some(Tag::Uuid(uuid.into_bytes()))),
                Err(_) => Err(format!("{uuid} is no UUID, such as 6bf5c1f4-27b3-46a8-9d5a-1c5f5c8b7a10")),
            },
            _ => Ok(None),
        }
    }

    fn is_of(&self, identity: &Identity) -> bool {
        match self {
            Tag::Label(label) => identity.label == *label,
            Tag::Uuid(uuid) => identity.uuid == *uuid,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_and_uuids_are_told_from_names_of_devices() {
        assert_eq!(Tag::parse("LABEL=my data=1"), Ok(Some(Tag::Label("my data=1"))));
        assert_eq!(
            Tag::parse("UUID=00000000-0000-0000-0000-00000000000A"),
            Ok(Some(Tag::Uuid([0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 10])))
        );
        for device in ["/dev/nvme1n1", "./LABEL=data", "vfio:0000:01:00.0", "sim:/image,ns=2", "label=data"] {
            assert_eq!(Tag::parse(device), Ok(None), "{device}");
        }
        assert!(Tag::parse("LABEL=").is_err() && Tag::parse("UUID=data").is_err());
    }

    #[test]
    fn one_volume_has_several_devices_and_two_volumes_are_not_guessed_between() {
        let of = |uuid: u8, member: Option<u8>, path: &str| Found {
            path: path.into(),
            uuid: [uuid; 16],
            member: member.map(|member| [member; 16]),
        };
        assert_eq!(one_of("LABEL=a", vec![of(1, Some(2), "/dev/b"), of(1, Some(3), "/dev/a")]), Ok("/dev/a".into()));
        assert_eq!(one_of("LABEL=a", vec![of(1, None, "/dev/a")]), Ok("/dev/a".into()));
        // Others of the same label, and copies of a volume and of a member.
        for (one, other) in
            [((1, None), (2, None)), ((1, None), (1, None)), ((1, Some(3)), (1, Some(3))), ((1, None), (1, Some(3)))]
        {
            for (one, other) in [(one, other), (other, one)] {
                let found = vec![of(other.0, other.1, "/dev/b"), of(one.0, one.1, "/dev/a")];
                let two = one_of("LABEL=a", found).unwrap_err();
                assert!(two.contains("/dev/a and on /dev/b"), "{two}");
            }
        }
        let three = vec![of(1, Some(2), "/dev/a"), of(1, Some(3), "/dev/b"), of(1, Some(3), "/dev/c")];
        assert!(one_of("LABEL=a", three).unwrap_err().contains("/dev/b and on /dev/c"));
        assert!(one_of("LABEL=a", vec![]).unwrap_err().contains("LABEL=a"));
    }
}
