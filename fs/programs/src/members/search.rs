//! Finds the other members of a volume: of a block device among all block devices, of an image
//! file among the files of its folder. What it reads may be another program's, and change: whoever
//! claims the devices reads again.

use std::fs::{self, File, OpenOptions};
use std::io::{Seek, SeekFrom};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use gpunvme_blockdev::{path_of, without_options};

use super::copies::Copies;
use super::set;

/// Folder of sysfs with an entry for each block device, partitions as well.
const DEVICES: &str = "/sys/class/block";

/// The names of the other members of the volume that `device`, which says `own` of itself, is a
/// member of.
///
/// # Errors
/// A text: a member is missing or there twice, or the others know nothing of `device`.
pub(super) fn others(device: &str, copies: &Copies) -> Result<Vec<String>, String> {
    let own = copies.any();
    let path = path_of(device).filter(|_| without_options(device) == device && !device.contains(':'));
    let Some(path) = path.and_then(|path| path.canonicalize().ok()) else {
        let (number, count) = (own.number() + 1, own.place.members);
        return Err(format!("member {number} of the {count} of a volume; name all of them, with + between their names"));
    };
    let mut found = vec![(device.to_owned(), copies.clone())];
    let mut unusable = Vec::new();
    for candidate in candidates(&path) {
        match glance(&candidate) {
            Ok(Some(other)) if other.is_of_volume_of(copies) => {
                found.push((candidate.to_string_lossy().into_owned(), other));
            }
            Ok(_) => {}
            Err(why) => unusable.push(format!("{}: {why}", candidate.display())),
        }
    }
    let current = set::current(found.iter().map(|(_, copies)| copies));
    let (count, generation) = (current.place.members, current.generation);
    let mut members: Vec<Option<&(String, Copies)>> = vec![None; count.into()];
    for one in &found {
        let member = one.1.any();
        let Some(place) = members.get_mut(usize::from(member.number())) else { continue };
        // What was being added when the power failed, and was not, gives way. No member of the
        // first set ever was: another one is a copy.
        let counts = |copies: &Copies| (copies.of(generation).is_some(), copies.first.is_some());
        match place {
            Some(other) if member.place.number == 0 || counts(&other.1) == counts(&one.1) => {
                return Err(set::twice(member, &other.0, &one.0));
            }
            Some(other) if counts(&other.1) > counts(&one.1) => {}
            _ => *place = Some(one),
        }
    }
    // Named, it has to be one of them: what it knows of is not to be left out without a word.
    match members.get(usize::from(own.number())) {
        Some(Some(one)) if std::ptr::eq(*one, &found[0]) => {}
        Some(Some(other)) => return Err(set::twice(own, &other.0, device)),
        _ => {
            let newest = found.iter().find(|(_, copies)| copies.of(generation).is_some());
            return Err(set::unknown(own, device, newest.map_or("the others", |(name, _)| name)));
        }
    }
    let there: Vec<(u16, &str)> = (0..).zip(&members).filter_map(|(n, one)| one.map(|(name, _)| (n, &name[..]))).collect();
    if let Some(lacks) = set::lacks(own, count, &there) {
        return Err(match &unusable[..] {
            [] => lacks,
            unusable => format!("{lacks}. Members of this or another volume that cannot be used: {}", unusable.join("; ")),
        });
    }
    Ok(members.into_iter().flatten().map(|(name, _)| name.clone()).filter(|name| name != device).collect())
}

/// What may be a member beside the device at `path`, which is left out.
fn candidates(path: &Path) -> Vec<PathBuf> {
    let Ok(own) = fs::metadata(path) else { return Vec::new() };
    let names = |folder: &Path| fs::read_dir(folder).into_iter().flatten().flatten();
    let mut found: Vec<PathBuf> = if own.file_type().is_block_device() {
        block_devices()
    } else {
        // What else lies there may be the mount of a server that does not answer.
        let is_file = |entry: &fs::DirEntry| entry.file_type().is_ok_and(|kind| kind.is_file());
        names(path.parent().unwrap_or(Path::new("."))).filter(is_file).map(|entry| entry.path()).collect()
    };
    let is_own = |other: &fs::Metadata| match own.file_type().is_block_device() {
        true => other.rdev() == own.rdev(),
        false => (other.dev(), other.ino()) == (own.dev(), own.ino()),
    };
    // A link beside the file it leads to is not a second one.
    found.retain(|path| {
        fs::symlink_metadata(path).is_ok_and(|status| {
            status.file_type().is_block_device() == own.file_type().is_block_device()
                && (status.is_file() || status.file_type().is_block_device())
                && !is_own(&status)
        })
    });
    found.sort();
    found
}

/// All block devices that hold something and that no other block device is made of.
pub(crate) fn block_devices() -> Vec<PathBuf> {
    let folders = fs::read_dir(DEVICES).into_iter().flatten().flatten();
    folders.filter_map(|entry| block_device(&entry.path())).collect()
}

/// The file of the block device that a folder of sysfs is about, where it holds something and no
/// other block device (device mapper, RAID) is made of it.
fn block_device(sysfs: &Path) -> Option<PathBuf> {
    let is_used = fs::read_dir(sysfs.join("holders")).is_ok_and(|mut holders| holders.next().is_some());
    let is_empty = fs::read_to_string(sysfs.join("size")).is_ok_and(|size| size.trim() == "0");
    let event = fs::read_to_string(sysfs.join("uevent")).ok().filter(|_| !is_used && !is_empty)?;
    let name = event.lines().find_map(|line| line.strip_prefix("DEVNAME="))?;
    Some(Path::new("/dev").join(name))
}

/// What a file or block device says of itself, where it is a member and can be read.
///
/// # Errors
/// A text: it is a member that this program cannot use.
pub(super) fn glance(path: &Path) -> Result<Option<Copies>, String> {
    let open = || {
        let file: File = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY).open(path).ok()?;
        let len = (&file).seek(SeekFrom::End(0)).ok()?;
        Some((file, len))
    };
    open().map_or(Ok(None), |(file, len)| Copies::glance(&file, len))
}
