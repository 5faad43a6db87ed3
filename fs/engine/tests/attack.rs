//! An attacker: volumes with items of every kind and dumps of such, changes of their metadata with
//! checksums put right, and a user of the result. The test `hostile` draws the changes from a seed,
//! the fuzz targets `image` and `dump` take them from their input.

use std::sync::Arc;

use gpunvme_blockdev::{BlockDevice, Io, OpenMode};
use gpunvme_blockdev_testing::{Image, MemoryDevice};
use gpunvme_engine::Filesystem;
use gpunvme_engine::check::{CheckOptions, Fsck, Kind, Stop, check};
use gpunvme_engine::data::Settling;
use gpunvme_engine::data::resize::Allocate;
use gpunvme_engine::error::FsError;
use gpunvme_engine::volume::{Context, NewNode, RenameMode, SetAttributes};
use gpunvme_layout::block::BLOCK_SIZE;
use gpunvme_layout::{Block, Timestamp};
use gpunvme_programs::dump::{Names, Summary, dump};

use crate::common::{Pair, ROOT, Random, assert_sound, make, open};

const NOW: Timestamp = Timestamp { seconds: 9, nanoseconds: 0 };
const WHO: Context = Context { uid: 0, gid: 0, now: NOW };
/// Bytes of the head of a block that say what it is and carry its checksum.
const HEADER: usize = 48;

/// A change of a number in a block of metadata.
#[derive(Debug, Clone, Copy)]
pub struct Change {
    /// Which of the blocks of metadata; those beyond the last begin again at the first.
    pub block: usize,
    /// Where in it, from the end of its header on.
    pub at: usize,
    /// Length of the number: 1, 2, 4 or 8 bytes.
    pub len: usize,
    /// Add `value` to what is there, rather than put it there.
    pub add: bool,
    /// The new number, or the difference.
    pub value: u64,
    /// Put the checksum right.
    pub seal: bool,
}

/// Bytes that say what to change.
pub const CHANGE: usize = 13;

impl Change {
    /// A change that is written down in bytes. Every content of them is one.
    #[allow(dead_code, reason = "only the fuzz targets have changes in bytes")]
    pub fn decode(bytes: &[u8; CHANGE]) -> Change {
        let word = |at: usize| usize::from(u16::from_le_bytes([bytes[at], bytes[at + 1]]));
        let how = bytes[4];
        Change {
            block: word(0),
            at: word(2),
            len: 1 << (how & 3),
            add: how & 4 != 0,
            seal: how & 0x18 != 0x18,
            value: u64::from_le_bytes(bytes[5..].try_into().expect("eight bytes are left")),
        }
    }
}

/// Four volumes that were made for it, a dump of one of them, and the metadata of the image, or of
/// the dump, whose path `HOSTILE_IMAGE` is.
pub fn victims() -> Vec<Victim> {
    let mut victims: Vec<Victim> = (0..4).map(Victim::new).collect();
    victims.push(Victim::of_dump(&victims[1].changed(&[]), Names::Replaced));
    if let Ok(path) = std::env::var("HOSTILE_IMAGE") {
        let device = gpunvme_blockdev::open(&path, OpenMode::ReadOnly).unwrap_or_else(|error| panic!("HOSTILE_IMAGE: {error}"));
        victims.push(Victim::of_dump(&device, Names::Kept));
    }
    victims
}

/// A volume that is going to be changed.
pub struct Victim {
    image: Image,
    /// Its blocks of metadata, in the journal as well.
    metadata: Vec<u64>,
}

impl Victim {
    /// A volume with a bit of everything; with some seeds a part of it is only in the journal.
    fn new(seed: u64) -> Victim {
        let memory = MemoryDevice::new(24 << 20);
        let device: Arc<dyn BlockDevice> = memory.clone();
        make(&device);
        let mut random = Random(seed);
        let fs = open(&device).expect("a new volume can be opened");
        let mut pair = Pair::new(fs.clone());
        pair.reach = 300_000;
        for _ in 0..300 {
            pair.step(&mut random);
        }
        fs.flush_all().expect("nothing fails");
        if random.below(2) == 0 {
            fs.close().expect("nothing fails");
        } else {
            fs.commit().expect("nothing fails");
        }
        let image = memory.snapshot();
        let uuid = fs.volume().superblock().uuid;
        let blocks = 0..image.len() / BLOCK_SIZE as u64;
        let metadata = blocks.filter(|address| read(&image, *address).verify_any_kind(*address, &uuid).is_ok()).collect();
        Victim { image, metadata }
    }

    /// The metadata of the volume on a device.
    fn of_dump(device: &Arc<dyn BlockDevice>, names: Names) -> Victim {
        let (image, summary) = dumped(device, names).expect("there is a volume");
        assert!(summary.blocks > 0);
        let is_there = |address: &u64| read(&image, *address).has_magic();
        let metadata = (0..image.len() / BLOCK_SIZE as u64).filter(is_there).collect();
        Victim { image, metadata }
    }

    /// A copy of it with these changes.
    pub fn changed(&self, changes: &[Change]) -> Arc<dyn BlockDevice> {
        let mut image = self.image.clone();
        for change in changes {
            let address = self.metadata[change.block % self.metadata.len()];
            let mut block = read(&image, address);
            let sequence = block.sequence();
            let at = HEADER + change.at % (BLOCK_SIZE - HEADER - change.len + 1);
            let place = &mut block.bytes_mut()[at..at + change.len];
            let mut number = [0; 8];
            number[..change.len].copy_from_slice(place);
            let base = if change.add { u64::from_le_bytes(number) } else { 0 };
            place.copy_from_slice(&base.wrapping_add(change.value).to_le_bytes()[..change.len]);
            if change.seal {
                block.seal(sequence);
            }
            image.write_at(address * BLOCK_SIZE as u64, block.bytes());
        }
        MemoryDevice::from_image(image)
    }
}

fn read(image: &Image, address: u64) -> Block {
    let mut bytes = [0; BLOCK_SIZE];
    image.read_at(address * BLOCK_SIZE as u64, &mut bytes);
    Block::from_bytes(&bytes)
}

/// Does a bit of everything with whatever is there. Errors are fine.
pub fn use_it(fs: &Arc<Filesystem>, random: &mut Random) -> Result<(), FsError> {
    let mut dirs = vec![ROOT];
    let mut seen = Vec::new();
    while let Some(dir) = dirs.pop()
        && seen.len() < 500
    {
        let mut cookie = 0;
        for _ in 0..20 {
            let Ok(entries) = fs.wait(|| fs.read_dir(dir, cookie, 50)) else { break };
            let Some(last) = entries.last() else { break };
            // A reader goes on behind the last entry until none comes: if the cookies do not grow,
            // it never ends.
            assert!(
                entries.is_sorted_by(|a, b| a.cookie < b.cookie) && entries[0].cookie > cookie,
                "directory {dir} does not end"
            );
            cookie = last.cookie;
            // As readdirplus does.
            let _ = fs.all_attributes(&entries.iter().map(|entry| entry.ino).collect::<Vec<_>>());
            for entry in entries {
                let _ = fs.wait(|| fs.lookup(dir, &entry.name));
                seen.push((dir, entry.ino, entry.name));
                if entry.cookie > 2 && random.below(3) == 0 {
                    dirs.push(entry.ino);
                }
            }
        }
    }
    for (dir, ino, name) in seen {
        let ino = if random.below(10) == 0 { random.below(400) } else { ino };
        let _ = fs.wait(|| fs.attributes(ino));
        let _ = fs.wait(|| fs.read_link(ino));
        let _ = fs.wait(|| fs.list_xattrs(ino));
        let _ = fs.wait(|| fs.get_xattr(ino, b"user.1"));
        let _ = fs.read(ino, random.below(200_000), 70_000);
        let _ = fs.wait(|| fs.resolve(ino, 0, u64::MAX, 100));
        let (offset, len) = (random.below(300_000), random.below(60_000));
        let new = NewNode { mode: 0o100644, umask: 0, rdev: 0, target: &[] };
        match random.below(10) {
            0 => drop(fs.wait(|| fs.write(ino, offset, &vec![3; len as usize], NOW))),
            1 => drop(fs.wait(|| fs.set_size(&WHO, ino, offset))),
            2 => drop(fs.allocate(&WHO, ino, offset, len + 1, Allocate::Punch)),
            3 => drop(fs.allocate(&WHO, ino, offset, len + 1, Allocate::Zero { grow: true })),
            4 => drop(fs.wait(|| fs.unlink(&WHO, dir, &name)).map(|gone| gone.map(|ino| reap(fs, ino)))),
            5 => {
                drop(fs.wait(|| fs.rename(&WHO, (dir, &name), (ROOT, b"moved"), RenameMode::Exchange, &mut Settling::default())))
            }
            6 => drop(fs.wait(|| fs.create(&WHO, ino, b"new", &new))),
            7 => drop(fs.wait(|| fs.set_xattr(&WHO, ino, b"user.1", &vec![1; len as usize], false, false))),
            8 => drop(fs.wait(|| fs.set_attributes(&WHO, ino, &SetAttributes { mode: Some(0o600), ..Default::default() }))),
            _ => drop(fs.sync_file(ino)),
        }
    }
    let _ = fs.flush_all();
    let _ = fs.volume().find_emptied_chunks();
    let _ = fs.commit();
    let _ = fs.volume().checkpoint();
    let _ = check(fs.volume())?;
    fs.close()
}

fn reap(fs: &Arc<Filesystem>, ino: u64) {
    for _ in 0..100 {
        if !matches!(fs.wait(|| fs.reap_step(ino)), Ok(true)) {
            return;
        }
    }
}

/// Repairs what is on a device. What a repair calls mended has to be sound, and a repair that ends
/// without an error has to mend everything. Returns whether it mended the volume.
pub fn repair_it(device: &Arc<dyn BlockDevice>) -> bool {
    let options = CheckOptions { read_only: false, memory: 64 << 20, now: NOW, stop: Stop::default() };
    let Ok(mut fsck) = Fsck::open(Io::inline(device.clone()).expect("a queue"), options) else { return false };
    let Ok(repaired) = fsck.repair(&mut |_| true, &mut |_, _, _| ()) else { return false };
    assert_eq!(repaired.left.total(), 0, "not mended: {:#?}", repaired.left.list);
    fsck.close(true).expect("a mended volume can be closed");
    assert_sound(&open(device).expect("a mended volume can be opened"), "mended");
    true
}

/// The dump of what is on a device.
fn dumped(device: &Arc<dyn BlockDevice>, names: Names) -> Result<(Image, Summary), String> {
    let mut image = Image::new(device.geometry().len.get());
    let summary = dump(device, names, &mut |_, _, _| {}, |address, block| {
        image.write_at(address * BLOCK_SIZE as u64, block.bytes());
        Ok(())
    })?;
    Ok((image, summary))
}

/// Dumps what is on a device, in both ways. A check finds in the dumps what it finds in the volume,
/// but for names under another one's hash, which a dump with other names counts. Returns whether
/// there is a volume.
pub fn dump_it(device: &Arc<dyn BlockDevice>) -> bool {
    let right = found(device);
    for names in [Names::Kept, Names::Replaced] {
        let Ok((image, _)) = dumped(device, names) else { return false };
        let is_told = |(kind, _): &(Kind, String)| names == Names::Kept || !matches!(kind, Kind::EntryHash | Kind::XattrHash);
        let told = |places: Option<Vec<(Kind, String)>>| Some(places?.into_iter().filter(is_told).collect::<Vec<_>>());
        assert_eq!(told(found(&(MemoryDevice::from_image(image) as _))), told(right.clone()), "{names:?}");
    }
    true
}

/// Kind and place of what a check finds, where it comes to its end.
fn found(device: &Arc<dyn BlockDevice>) -> Option<Vec<(Kind, String)>> {
    let options = CheckOptions { read_only: true, memory: 64 << 20, now: NOW, stop: Stop::default() };
    let findings = Fsck::open(Io::inline(device.clone()).expect("a queue"), options).ok()?.check(&mut |_, _, _| ()).ok()?;
    Some(findings.list.iter().map(|finding| (finding.kind, format!("{:?}", finding.place))).collect())
}
