//! Devices below a device: one medium can have several names, and a lock on one name does not show
//! on another.
//!
//! A loop device has an image file or a block device below it, a partition its disk, a
//! device-mapper or RAID device the devices it is made of. The kernel keeps users of a disk and of
//! its partitions apart, and of what RAID and device-mapper have taken; it does not know that two
//! loop devices have the same image.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use gpunvme_blockdev::OpenMode;

/// Deepest stack of devices that is looked through.
const MAX_DEPTH: usize = 8;
/// Folder of sysfs with an entry for each block device, by its number.
const DEVICES: &str = "/sys/dev/block";
/// The unit of sizes in sysfs.
const SECTOR: u64 = 512;

/// Another name of the same medium.
#[derive(Debug, PartialEq, Eq)]
pub enum Rival {
    /// The image file is attached to this loop device.
    Attached(PathBuf),
    /// The same medium is in use through this device or file.
    InUse(PathBuf),
}

/// A range of a medium.
#[derive(Clone, Debug, PartialEq, Eq)]
struct MediumRange {
    medium: Medium,
    bytes: Range<u64>,
}

/// A medium that holds data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Medium {
    /// A file, by device and inode.
    File(u64, u64),
    /// A block device, by its number, with nothing below it that this module knows.
    Disk(u64),
}

/// A device and everything below it.
#[derive(Debug, Default)]
struct Stack {
    /// The numbers of the block devices in it.
    members: BTreeSet<u64>,
    /// Where the data lies in the end.
    ranges: Vec<MediumRange>,
    /// Block devices and files that a loop device has below it, which does not claim them.
    unclaimed: Vec<MediumRange>,
}

/// Another name under which the medium of `device` (a path) is in use. The caller has opened the
/// device in this mode. Having it open makes the answer reliable: of two programs that open two
/// names at once, at least one finds the other.
pub fn rival(device: &Path, mode: OpenMode) -> Option<Rival> {
    let own = Stack::of(device)?;
    let is_file = own.members.is_empty();
    for entry in fs::read_dir("/sys/block").ok()?.flatten() {
        if !entry.path().join("loop/backing_file").exists() {
            continue;
        }
        let Some(number) = number_of(&entry.path()).filter(|number| !own.members.contains(number)) else { continue };
        let mut other = Stack::default();
        other.add(Path::new(DEVICES), number, 0..u64::MAX, 0);
        if own.overlaps(&other) {
            let node = Path::new("/dev").join(entry.file_name());
            match is_file {
                true => return Some(Rival::Attached(node)),
                false if is_claimed(&node) => return Some(Rival::InUse(node)),
                false => {}
            }
        }
    }
    own.unclaimed.iter().find_map(|range| match range.medium {
        Medium::Disk(number) => node_of(&sysfs(number)).filter(|node| is_claimed(node)).map(Rival::InUse),
        Medium::File(..) => own.members.iter().find_map(|member| {
            let path = backing_path(&sysfs(*member))?;
            let file = open_as(&path, range.medium)?;
            is_locked(&file, mode, &range.bytes).then_some(Rival::InUse(path))
        }),
    })
}

/// The image file or block device below the loop device `path`, by the kernel's name for it.
pub fn backing_file(path: &Path) -> Option<PathBuf> {
    let status = fs::metadata(path).ok().filter(|status| status.file_type().is_block_device())?;
    backing_path(&sysfs(status.rdev()))
}

/// Whether a file or block device is locked by a reader or a writer.
pub fn has_users(path: &Path) -> bool {
    keeps_out(path, OpenMode::ReadWrite) == Some(true)
}

/// Whether a file or block device is locked by a writer. None: it cannot be looked at.
pub fn has_writer(path: &Path) -> Option<bool> {
    keeps_out(path, OpenMode::ReadOnly)
}

/// Whether a lock on a file or block device keeps out others that would lock it in this mode.
fn keeps_out(path: &Path, mode: OpenMode) -> Option<bool> {
    let can_be = |status: &fs::Metadata| status.is_file() || status.file_type().is_block_device();
    fs::metadata(path).ok().filter(can_be)?;
    let file = File::options().read(true).custom_flags(libc::O_NONBLOCK).open(path).ok()?;
    Some(is_locked(&file, mode, &(0..u64::MAX)))
}

impl Stack {
    fn of(path: &Path) -> Option<Stack> {
        let status = fs::metadata(path).ok()?;
        let mut stack = Stack::default();
        if status.file_type().is_block_device() {
            stack.add(Path::new(DEVICES), status.rdev(), 0..u64::MAX, 0);
        } else {
            let medium = Medium::File(status.dev(), status.ino());
            stack.ranges.push(MediumRange { medium, bytes: 0..u64::MAX });
        }
        Some(stack)
    }

    /// Adds a range of a block device, and what is below it. `devices` has a folder for each
    /// device.
    fn add(&mut self, devices: &Path, number: u64, bytes: Range<u64>, depth: usize) {
        self.members.insert(number);
        let sysfs = folder(devices, number);
        let attribute = |name: &str| fs::read_to_string(sysfs.join(name)).ok()?.trim().parse::<u64>().ok();
        if depth == MAX_DEPTH {
            return;
        }
        if let Some(start) = attribute("partition").and_then(|_| attribute("start"))
            && let Some(disk) = fs::canonicalize(&sysfs).ok().and_then(|path| number_of(path.parent()?))
        {
            let size = attribute("size").map_or(u64::MAX, |size| size.saturating_mul(SECTOR));
            return self.add(devices, disk, within(&bytes, start.saturating_mul(SECTOR), size), depth + 1);
        }
        if let Some(below) = LoopBacking::of(&sysfs) {
            let bytes = within(&bytes, below.offset, below.limit);
            self.unclaimed.push(MediumRange { medium: below.medium, bytes: bytes.clone() });
            return match below.medium {
                Medium::Disk(number) => self.add(devices, number, bytes, depth + 1),
                Medium::File(..) => self.ranges.push(MediumRange { medium: below.medium, bytes }),
            };
        }
        // Which range of which is used, sysfs does not say.
        let slaves = fs::read_dir(sysfs.join("slaves")).into_iter().flatten().flatten();
        let slaves: Vec<u64> = slaves.filter_map(|slave| number_of(&slave.path())).collect();
        if slaves.is_empty() {
            self.ranges.push(MediumRange { medium: Medium::Disk(number), bytes });
        }
        for slave in slaves {
            self.add(devices, slave, 0..u64::MAX, depth + 1);
        }
    }

    fn overlaps(&self, other: &Stack) -> bool {
        self.ranges.iter().any(|range| other.ranges.iter().any(|theirs| range.overlaps(theirs)))
    }
}

impl MediumRange {
    fn overlaps(&self, other: &MediumRange) -> bool {
        self.medium == other.medium && self.bytes.start < other.bytes.end && other.bytes.start < self.bytes.end
    }
}

impl Medium {
    fn of(file: &File) -> Option<Medium> {
        let status = file.metadata().ok()?;
        Some(match status.file_type().is_block_device() {
            true => Medium::Disk(status.rdev()),
            false => Medium::File(status.dev(), status.ino()),
        })
    }
}

/// A range of something that begins at `offset` of what is below, and has `size` bytes of it.
fn within(bytes: &Range<u64>, offset: u64, size: u64) -> Range<u64> {
    let shifted = |at: u64| offset.saturating_add(at.min(size));
    shifted(bytes.start)..shifted(bytes.end)
}

/// The file or device below a loop device.
struct LoopBacking {
    medium: Medium,
    offset: u64,
    /// `u64::MAX`: as far as that goes.
    limit: u64,
}

impl LoopBacking {
    /// `None` for what is no loop device, or one that has nothing.
    fn of(sysfs: &Path) -> Option<LoopBacking> {
        let attribute = |name: &str| fs::read_to_string(sysfs.join("loop").join(name)).ok()?.trim().parse::<u64>().ok();
        let path = backing_path(sysfs)?;
        let medium = match node_of(sysfs).and_then(|node| File::open(node).ok()).and_then(|device| loop_status(&device)) {
            Some(status) if status.rdev != 0 => Medium::Disk(status.rdev),
            Some(status) => Medium::File(status.device, status.inode),
            // Without the device, its name has to do.
            None => Medium::of(&look_at(&path)?)?,
        };
        let limit = attribute("sizelimit").filter(|limit| *limit > 0).unwrap_or(u64::MAX);
        Some(LoopBacking { medium, offset: attribute("offset").unwrap_or(0), limit })
    }
}

/// The beginning of `struct loop_info64` (linux/loop.h).
#[repr(C)]
#[derive(Default)]
struct LoopStatus {
    device: u64,
    inode: u64,
    rdev: u64,
    rest: [u64; 26],
}

const LOOP_GET_STATUS64: u32 = 0x4C05;
// The kernel writes 232 bytes.
const _: () = assert!(size_of::<LoopStatus>() == 232);

fn loop_status(device: &File) -> Option<LoopStatus> {
    let mut status = LoopStatus::default();
    // SAFETY: of a loop device the kernel writes one `struct loop_info64`, which is as long as
    // `status` and like it has no invalid values; other devices do not know the number, and write
    // nothing.
    #[allow(unsafe_code)]
    let result = unsafe { libc::ioctl(device.as_raw_fd(), LOOP_GET_STATUS64 as _, &mut status) };
    (result == 0).then_some(status)
}

/// Whether a lock keeps one who would lock that range in this mode out.
fn is_locked(file: &File, mode: OpenMode, bytes: &Range<u64>) -> bool {
    let kind = if mode == OpenMode::ReadOnly { libc::F_RDLCK } else { libc::F_WRLCK };
    // A length of 0 goes to the end, whatever that is.
    let len = if bytes.end > i64::MAX as u64 { 0 } else { bytes.end - bytes.start };
    let start = bytes.start.min(i64::MAX as u64);
    let mut lock =
        libc::flock { l_type: kind as _, l_whence: libc::SEEK_SET as _, l_start: start as _, l_len: len as _, l_pid: 0 };
    // SAFETY: the descriptor is open, and the kernel reads and writes the structure during the
    // call only.
    #[allow(unsafe_code)]
    let result = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_GETLK, &mut lock) };
    result == 0 && lock.l_type != libc::F_UNLCK as libc::c_short
}

/// Whether a block device has an exclusive user. One that cannot be looked at may have.
fn is_claimed(node: &Path) -> bool {
    File::options().read(true).custom_flags(libc::O_EXCL | libc::O_NONBLOCK).open(node).is_err()
}

fn sysfs(number: u64) -> PathBuf {
    folder(Path::new(DEVICES), number)
}

fn folder(devices: &Path, number: u64) -> PathBuf {
    devices.join(format!("{}:{}", rustix::fs::major(number), rustix::fs::minor(number)))
}

/// The number of the device that a folder of sysfs is about.
fn number_of(sysfs: &Path) -> Option<u64> {
    let text = fs::read_to_string(sysfs.join("dev")).ok()?;
    let (major, minor) = text.trim().split_once(':')?;
    Some(rustix::fs::makedev(major.parse().ok()?, minor.parse().ok()?))
}

/// The file of the device that a folder of sysfs is about.
fn node_of(sysfs: &Path) -> Option<PathBuf> {
    let event = fs::read_to_string(sysfs.join("uevent")).ok()?;
    let name = event.lines().find_map(|line| line.strip_prefix("DEVNAME="))?;
    Some(Path::new("/dev").join(name))
}

/// Opens what a path names for reading, if it is this medium. The path is the kernel's, of a file
/// that may have gone: what has that name now is its folder's owner's, and opening it may wait for
/// ever, or do something.
fn open_as(path: &Path, medium: Medium) -> Option<File> {
    let found = look_at(path).filter(|file| Medium::of(file) == Some(medium))?;
    File::options().read(true).custom_flags(libc::O_NONBLOCK).open(format!("/proc/self/fd/{}", found.as_raw_fd())).ok()
}

/// A descriptor by which a file can be told, and not used.
fn look_at(path: &Path) -> Option<File> {
    File::options().read(true).custom_flags(libc::O_PATH).open(path).ok()
}

fn backing_path(sysfs: &Path) -> Option<PathBuf> {
    let text = fs::read_to_string(sysfs.join("loop/backing_file")).ok()?;
    Some(PathBuf::from(text.trim_end_matches('\n')))
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    /// A loop device over a file, detached when it is dropped.
    struct Loop(PathBuf);

    impl Loop {
        /// `None`, said aloud, where none can be had.
        fn over(file: &Path, options: &[&str]) -> Option<Loop> {
            let output = Command::new("losetup").args(options).args(["--find", "--show"]).arg(file).output();
            match output.ok().filter(|output| output.status.success()) {
                Some(output) => Some(Loop(PathBuf::from(String::from_utf8(output.stdout).unwrap().trim()))),
                None => {
                    eprintln!("no loop device can be had here");
                    None
                }
            }
        }
    }

    impl Drop for Loop {
        fn drop(&mut self) {
            assert!(Command::new("losetup").arg("--detach").arg(&self.0).status().unwrap().success());
        }
    }

    fn image() -> tempfile::NamedTempFile {
        let image = tempfile::NamedTempFile::new().unwrap();
        image.as_file().set_len(4 << 20).unwrap();
        image
    }

    fn claim(node: &Path) -> File {
        File::options().read(true).custom_flags(libc::O_EXCL).open(node).unwrap()
    }

    #[test]
    fn a_file_and_its_loop_device_are_found_from_each_other() {
        let image = image();
        let path = image.path().canonicalize().unwrap();
        assert_eq!((rival(&path, OpenMode::ReadWrite), backing_file(&path)), (None, None));
        let Some(device) = Loop::over(&path, &[]) else { return };
        assert_eq!(rival(&path, OpenMode::ReadOnly), Some(Rival::Attached(device.0.clone())));
        assert_eq!(backing_file(&device.0), Some(path));
        assert_eq!(rival(&device.0, OpenMode::ReadWrite), None);
    }

    #[test]
    fn loop_devices_over_one_file_are_rivals_where_they_overlap() {
        let image = image();
        let other_name = image.path().with_extension("link");
        fs::hard_link(image.path(), &other_name).unwrap();
        let lower = Loop::over(image.path(), &["--sizelimit", "2097152"]);
        let upper = Loop::over(image.path(), &["--offset", "2097152"]);
        let whole = Loop::over(&other_name, &[]);
        fs::remove_file(&other_name).unwrap();
        let (Some(lower), Some(upper), Some(whole)) = (lower, upper, whole) else { return };
        assert_eq!(rival(&whole.0, OpenMode::ReadWrite), None, "none of them is in use");
        let used = claim(&lower.0);
        assert_eq!(rival(&whole.0, OpenMode::ReadWrite), Some(Rival::InUse(lower.0.clone())));
        assert_eq!(rival(&upper.0, OpenMode::ReadWrite), None);
        drop(used);
        let _used = claim(&whole.0);
        assert_eq!(rival(&lower.0, OpenMode::ReadOnly), Some(Rival::InUse(whole.0.clone())));
        assert_eq!(rival(&upper.0, OpenMode::ReadOnly), Some(Rival::InUse(whole.0.clone())));
    }

    #[test]
    fn a_loop_device_over_a_loop_device_is_seen_through() {
        let image = image();
        let Some(lower) = Loop::over(image.path(), &[]) else { return };
        let Some(upper) = Loop::over(&lower.0, &[]) else { return };
        let used = claim(&lower.0);
        assert_eq!(rival(&upper.0, OpenMode::ReadWrite), Some(Rival::InUse(lower.0.clone())));
        drop(used);
        let _used = claim(&upper.0);
        assert_eq!(rival(&lower.0, OpenMode::ReadWrite), Some(Rival::InUse(upper.0.clone())));
    }

    /// The kernel names a file that was removed by its old path, with an end to it.
    #[test]
    fn what_has_the_name_of_an_image_that_was_removed_is_not_opened() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("image");
        File::create(&path).unwrap().set_len(4 << 20).unwrap();
        let Some(device) = Loop::over(&path, &[]) else { return };
        fs::remove_file(&path).unwrap();
        let said = backing_file(&device.0).unwrap();
        assert!(Command::new("mkfifo").arg(&said).status().unwrap().success());
        let found = crate::limited::within(std::time::Duration::from_secs(10), move || rival(&device.0, OpenMode::ReadWrite));
        assert_eq!(found, Some(None), "it waits for the FIFO {}", said.display());
    }

    #[test]
    fn an_image_that_is_in_use_itself_is_no_loop_device_s() {
        let image = image();
        let device = gpunvme_blockdev::open(image.path().to_str().unwrap(), OpenMode::ReadOnly);
        // A file in memory may refuse direct I/O.
        let Ok(device) = device else { return };
        assert!(has_users(image.path()));
        assert_eq!(has_writer(image.path()), Some(false));
        let Some(over) = Loop::over(image.path(), &[]) else { return };
        assert_eq!(rival(&over.0, OpenMode::ReadWrite), Some(Rival::InUse(image.path().canonicalize().unwrap())));
        assert_eq!(rival(&over.0, OpenMode::ReadOnly), None);
        drop(device);
    }

    /// A partition of a loop device, taken away when it is dropped.
    struct Partition<'a> {
        disk: &'a Loop,
        node: PathBuf,
    }

    impl<'a> Partition<'a> {
        /// The first one, of these sectors. `None`, said aloud, where the kernel makes none.
        fn of(disk: &'a Loop, sectors: Range<u64>) -> Option<Partition<'a>> {
            let [first, count] = [sectors.start, sectors.end - sectors.start].map(|number| number.to_string());
            let made = Command::new("addpart").arg(&disk.0).args(["1", &first, &count]).status();
            let node = PathBuf::from(format!("{}p1", disk.0.display()));
            if !made.is_ok_and(|status| status.success()) {
                eprintln!("no partition of a loop device can be had here");
                return None;
            }
            Some(Partition { disk, node })
        }
    }

    impl Drop for Partition<'_> {
        fn drop(&mut self) {
            assert!(Command::new("delpart").arg(&self.disk.0).arg("1").status().unwrap().success());
        }
    }

    #[test]
    fn a_partition_is_the_part_of_its_disk_that_it_says() {
        let image = image();
        let Some(disk) = Loop::over(image.path(), &[]) else { return };
        let Some(partition) = Partition::of(&disk, 2048..4096) else { return };
        let same = Loop::over(image.path(), &["--offset", "1048576", "--sizelimit", "1048576"]);
        let behind = Loop::over(image.path(), &["--offset", "2097152"]);
        let (Some(same), Some(behind)) = (same, behind) else { return };
        assert_eq!(rival(&partition.node, OpenMode::ReadWrite), None, "no other is in use");
        let used = claim(&behind.0);
        assert_eq!(rival(&partition.node, OpenMode::ReadWrite), None, "what lies behind it is another's");
        drop(used);
        let used = claim(&same.0);
        assert_eq!(rival(&partition.node, OpenMode::ReadWrite), Some(Rival::InUse(same.0.clone())));
        drop(used);
        // The kernel takes a partition's user for its disk's.
        let _used = claim(&partition.node);
        assert_eq!(rival(&same.0, OpenMode::ReadWrite), Some(Rival::InUse(disk.0.clone())));
    }

    /// What the kernel shows of a RAID: md0 of dm-0, which has a partition of sda below it, and of
    /// sdb.
    #[test]
    fn what_device_mapper_and_raid_are_made_of_is_found_in_sysfs() {
        let tree = tempfile::tempdir().unwrap();
        let devices = tree.path().join("dev/block");
        fs::create_dir_all(&devices).unwrap();
        let make = |place: &str, number: (u32, u32), attributes: &[(&str, &str)], slaves: &[&str]| {
            let folder = tree.path().join("devices").join(place);
            fs::create_dir_all(folder.join("slaves")).unwrap();
            let name = format!("{}:{}", number.0, number.1);
            fs::write(folder.join("dev"), format!("{name}\n")).unwrap();
            attributes.iter().for_each(|(name, value)| fs::write(folder.join(name), format!("{value}\n")).unwrap());
            for slave in slaves {
                let target = tree.path().join("devices").join(slave);
                std::os::unix::fs::symlink(&target, folder.join("slaves").join(target.file_name().unwrap())).unwrap();
            }
            std::os::unix::fs::symlink(folder, devices.join(name)).unwrap();
            rustix::fs::makedev(number.0, number.1)
        };
        let sda = make("sda", (8, 0), &[("size", "1000000")], &[]);
        let sda1 = make("sda/sda1", (8, 1), &[("partition", "1"), ("start", "2048"), ("size", "4096")], &[]);
        let sda2 = make("sda/sda2", (8, 2), &[("partition", "2"), ("start", "6144"), ("size", "4096")], &[]);
        let sdb = make("sdb", (8, 16), &[("size", "1000000")], &[]);
        let mapped = make("virtual/dm-0", (253, 0), &[], &["sda/sda1"]);
        let raid = make("virtual/md0", (9, 0), &[], &["virtual/dm-0", "sdb"]);
        let stack = |number| {
            let mut stack = Stack::default();
            stack.add(&devices, number, 0..u64::MAX, 0);
            stack
        };
        let all = stack(raid);
        assert_eq!(all.members, BTreeSet::from([sda, sda1, sdb, mapped, raid]));
        let of_sda = MediumRange { medium: Medium::Disk(sda), bytes: 2048 * SECTOR..(2048 + 4096) * SECTOR };
        let of_sdb = MediumRange { medium: Medium::Disk(sdb), bytes: 0..u64::MAX };
        assert!(all.ranges.len() == 2 && [&of_sda, &of_sdb].iter().all(|range| all.ranges.contains(range)), "{:?}", all.ranges);
        assert_eq!(stack(mapped).ranges, [of_sda]);
        assert!(stack(sda2).overlaps(&stack(sda)) && all.overlaps(&stack(sda)));
        assert!(!stack(sda2).overlaps(&all), "another partition of the same disk");
    }
}
