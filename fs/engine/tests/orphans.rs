//! What earlier mounts left to do is done beside everything else, however much it is, and nobody
//! sees it meanwhile; and the end of a mount leaves it to the next one.

use std::sync::Arc;
use std::time::Duration;

use gpunvme_blockdev::{BlockDevice, Io, Region};
use gpunvme_blockdev_testing::{Faulty, Image, MemoryDevice, On, Rule};
use gpunvme_engine::VolumeOptions;
use gpunvme_engine::data::resize::Allocate;
use gpunvme_engine::data::{Filesystem, Inline, Options};
use gpunvme_engine::volume::{Context, NewNode, is_clean};
use gpunvme_layout::{Inode, Key, Kind, Timestamp};

use crate::common::{ROOT, assert_sound, make, open};
use crate::surgeon::Surgeon;

const NOW: Timestamp = Timestamp { seconds: 9, nanoseconds: 0 };
const WHO: Context = Context { uid: 0, gid: 0, now: NOW };
const BLOCK: u64 = 4096;
/// Size of a file whose truncation was cut short: in the middle of its first block.
const SIZE: u64 = 1000;
/// Extents of a file that no few operations free.
const MANY: u64 = 3000;

fn create(fs: &Arc<Filesystem>, name: &[u8]) -> u64 {
    let new = NewNode { mode: 0o100644, umask: 0, rdev: 0, target: &[] };
    fs.wait(|| fs.create(&WHO, ROOT, name, &new)).expect("there is room").ino
}

/// An open volume with a file of so many extents, and the file's inode.
fn scattered(extents: u64) -> (Arc<MemoryDevice>, Arc<Filesystem>, u64) {
    let memory = MemoryDevice::new(64 << 20);
    let device: Arc<dyn BlockDevice> = memory.clone();
    make(&device);
    let fs = open(&device).expect("a new volume can be opened");
    let ino = create(&fs, b"file");
    // Their entries lie before its extents, and leave room there for the item of an orphan.
    let spare = [[b'a'; 100], [b'b'; 100]];
    let spared = spare.map(|name| create(&fs, &name));
    for at in 0..extents {
        fs.wait(|| fs.write(ino, at * 2 * BLOCK, &[7; BLOCK as usize], NOW)).expect("there is room");
        fs.write_behind(ino);
    }
    fs.sync_file(ino).expect("nothing fails");
    for (name, ino) in spare.iter().zip(spared) {
        fs.wait(|| fs.unlink(&WHO, ROOT, name)).expect("it is there");
        while fs.wait(|| fs.reap_step(ino)).expect("nothing fails") {}
    }
    (memory, fs, ino)
}

/// A volume with a file of so many extents whose truncation to [`SIZE`] a crash cut short.
fn cut_short(extents: u64) -> (Image, u64) {
    let (memory, fs, ino) = scattered(extents);
    fs.close().expect("nothing fails");
    let mut surgeon = Surgeon::new(memory.snapshot());
    surgeon.edit_item(Key::inode(ino), |bytes| {
        let mut inode = Inode::decode(ino, bytes).expect("it is sound");
        inode.size = SIZE;
        bytes.copy_from_slice(&inode.encode());
    });
    surgeon.insert(Key::new(0, Kind::Orphan, ino), &[]);
    (surgeon.image, ino)
}

fn opened(image: &Image) -> (Arc<MemoryDevice>, Arc<Filesystem>) {
    let memory = MemoryDevice::from_image(image.clone());
    let fs = open(&(memory.clone() as Arc<dyn BlockDevice>)).expect("it is sound");
    (memory, fs)
}

/// How many orphans are noted, and how many extents a file has, in a closed volume.
fn left(memory: &MemoryDevice, ino: u64) -> (usize, usize) {
    let surgeon = Surgeon::new(memory.snapshot());
    let count = |ino, kind| surgeon.items(Key::new(ino, kind, 0), Key::new(ino, kind, u64::MAX)).len();
    (count(0, Kind::Orphan), count(ino, Kind::Extent))
}

/// A device that counts its requests as hits.
fn counting(image: &Image) -> (Arc<MemoryDevice>, Arc<Faulty>) {
    let memory = MemoryDevice::from_image(image.clone());
    let faulty = Faulty::new(memory.clone());
    faulty.add(Rule::delay(On::Any, Duration::ZERO));
    (memory, faulty)
}

#[test]
fn a_mount_takes_as_long_whatever_a_crash_left_to_free() {
    let opening = |extents| {
        let (_, faulty) = counting(&cut_short(extents).0);
        open(&(faulty.clone() as Arc<dyn BlockDevice>)).expect("it is sound");
        faulty.hits()
    };
    let (few, many) = (opening(20), opening(MANY));
    // The tree of many has a level more.
    assert!(many <= few + 2, "{many} requests, and {few} where there is little to free");
}

#[test]
fn a_truncation_that_a_crash_cut_short_is_ended_part_by_part() {
    let (image, ino) = cut_short(MANY);
    let (memory, fs) = opened(&image);
    let rounds = (1..).find(|_| fs.finish_orphans(8).expect("nothing fails")).expect("it ends");
    assert!(rounds > 10, "{rounds}");
    assert!(fs.finish_orphans(0).expect("there is nothing to do"));
    assert_sound(&fs, "ended");
    fs.close().expect("nothing fails");
    assert_eq!(left(&memory, ino), (0, 1));
}

/// A write, a new size, a preallocation and a direct write make a file longer, before anything was
/// freed and in the middle.
#[test]
fn nobody_sees_what_is_to_be_freed_beyond_the_end_of_a_file() {
    let grow = |fs: &Arc<Filesystem>, ino: u64, how: u32| {
        let to = 40 * BLOCK;
        match how {
            0 => fs.wait(|| fs.write(ino, to - BLOCK, &[1; BLOCK as usize], NOW)).expect("there is room"),
            1 => drop(fs.wait(|| fs.set_size(&WHO, ino, to)).expect("it grows")),
            2 => fs.allocate(&WHO, ino, to - BLOCK, BLOCK, Allocate::Reserve { grow: true }).expect("there is room"),
            _ => {
                let region = Region::allocate(BLOCK as usize).expect("there is memory");
                region.write_at(0, &[1; BLOCK as usize]).expect("it is inside");
                let segment = gpunvme_abi::Segment { buffer_offset: 0, file_offset: to - BLOCK, len: BLOCK };
                let write = fs.wait(|| fs.plan_direct_write(ino, &[segment], &region, NOW)).expect("there is room");
                fs.submit_direct_write(write, |written| _ = written.expect("nothing fails"));
            }
        }
        to
    };
    let (image, ino) = cut_short(MANY);
    for (how, before, crashes) in (0..4).flat_map(|how| [(how, 0, false), (how, 5, false), (how, 0, true), (how, 5, true)]) {
        let what = format!("grown by {how} after {before}, a crash between: {crashes}");
        let (mut memory, mut fs) = opened(&image);
        assert!(!fs.finish_orphans(before).expect("nothing fails"), "{what}: there is more");
        assert_eq!(fs.read(ino, 0, 1 << 20).expect("it can be read"), [7; SIZE as usize], "{what}");
        let (mappings, size) = fs.wait(|| fs.resolve(ino, 0, u64::MAX, usize::MAX)).expect("it is a file");
        assert_eq!((mappings.len(), size), (1, SIZE), "{what}");
        // What changes nothing of its length waits for nothing.
        fs.wait(|| fs.write(ino, 0, &[7; 500], NOW)).expect("it is there");
        fs.sync_file(ino).expect("nothing fails");
        if crashes {
            fs.commit().expect("nothing fails");
            (memory, fs) = opened(&memory.snapshot());
        }
        let to = grow(&fs, ino, how);
        let holds = |fs: &Arc<Filesystem>, what: &str| {
            let found = fs.read(ino, 0, 1 << 20).expect("it can be read");
            assert_eq!(found.len() as u64, to, "{what}");
            let (kept, behind) = found.split_at(SIZE as usize);
            let (gap, last) = behind.split_at(behind.len() - BLOCK as usize);
            assert!(kept.iter().all(|byte| *byte == 7), "{what}");
            assert!(gap.iter().all(|byte| *byte == 0), "{what}: old bytes");
            assert!(last.iter().all(|byte| *byte == u8::from(how % 3 == 0)), "{what}");
        };
        holds(&fs, &what);
        fs.sync_file(ino).expect("nothing fails");
        holds(&opened(&memory.snapshot()).1, &format!("{what}, and a crash"));
        assert_sound(&fs, &what);
        assert!(fs.finish_orphans(usize::MAX).expect("nothing fails"));
        fs.close().expect("nothing fails");
        holds(&opened(&memory.snapshot()).1, &format!("{what}, and a mount"));
    }
}

/// It has an item from the crash on, and has to be told from files that lost their name earlier.
#[test]
fn a_file_that_was_cut_short_and_is_open_without_a_name_stays_whole() {
    let (image, ino) = cut_short(MANY);
    let (memory, fs) = opened(&image);
    fs.wait(|| fs.unlink(&WHO, ROOT, b"file")).expect("it is there");
    let other = create(&fs, b"other");
    fs.wait(|| fs.write(other, 0, &[5; 9000], NOW)).expect("there is room");
    fs.wait(|| fs.unlink(&WHO, ROOT, b"other")).expect("it is there");
    assert!(fs.finish_orphans(usize::MAX).expect("nothing fails"));
    fs.flush_all().expect("nothing fails");
    assert_eq!(fs.read(ino, 0, 1 << 20).expect("it is open"), [7; SIZE as usize]);
    // Its end was freed with that, or never would be seen to be no part of it.
    fs.wait(|| fs.set_size(&WHO, ino, 40 * BLOCK)).expect("it grows");
    assert!(fs.read(ino, SIZE, 1 << 20).expect("it can be read").iter().all(|byte| *byte == 0), "old bytes");
    fs.wait(|| fs.set_size(&WHO, ino, SIZE)).expect("it shrinks");
    fs.flush_all().expect("nothing fails");
    assert_eq!(fs.read(other, 0, 1 << 20).expect("it is open"), [5; 9000]);
    fs.wait(|| fs.link(&WHO, ino, ROOT, b"again")).expect("it is open");
    fs.commit().expect("nothing fails");
    // The next mount ends the truncation of what has a name again, and removes what has none.
    let (_, fs) = opened(&memory.snapshot());
    fs.wait(|| fs.set_size(&WHO, ino, 40 * BLOCK)).expect("it grows");
    assert!(fs.read(ino, SIZE, 1 << 20).expect("it can be read").iter().all(|byte| *byte == 0), "old bytes");
    assert!(fs.finish_orphans(usize::MAX).expect("nothing fails"));
    assert!(fs.wait(|| fs.attributes(other)).is_err(), "it had no name");
    assert_eq!(fs.wait(|| fs.attributes(ino)).expect("it has a name").inode.nlink, 1);
    assert_sound(&fs, "finished");
}

/// Of a file without a name the item says that it is an orphan, and not that something lies beyond
/// its end: also where what an earlier mount left cannot be finished.
#[test]
fn a_file_without_a_name_grows_beside_what_an_earlier_mount_left() {
    let (image, ino) = cut_short(MANY);
    for is_ruined in [false, true] {
        let mut surgeon = Surgeon::new(image.clone());
        if is_ruined {
            // Of one that was removed.
            let ruined = ino + 1;
            surgeon.insert(Key::new(0, Kind::Orphan, ruined), &[]);
            surgeon.insert(Key::inode(ruined), &[1; 3]);
        }
        let (_, fs) = opened(&surgeon.image);
        if is_ruined {
            assert!(fs.finish_orphans(usize::MAX).is_err(), "one cannot be finished");
        }
        let new = NewNode { mode: 0o100600, umask: 0, rdev: 0, target: &[] };
        let unnamed = || fs.wait(|| fs.create_unnamed(&WHO, ROOT, &new)).expect("there is room").ino;
        let forgotten = |ino| {
            fs.sync_file(ino).expect("nothing fails");
            (0..3).for_each(|_| fs.write_back().expect("nothing fails"));
        };
        let (appended, grown, reserved, kept) = (unnamed(), unnamed(), unnamed(), unnamed());
        for ino in [appended, grown] {
            fs.wait(|| fs.write(ino, 0, &[5; 100], NOW)).expect("there is room");
            forgotten(ino);
        }
        let attempts = std::cell::Cell::new(0);
        let counted = || {
            attempts.set(attempts.get() + 1);
            assert!(attempts.get() < 20, "it never ends");
        };
        fs.wait(|| (counted(), fs.write(appended, 100, &[6; 100], NOW)).1).expect("there is room");
        fs.wait(|| (counted(), fs.set_size(&WHO, grown, 5000)).1).expect("it grows");
        assert_eq!(fs.read(appended, 0, 1 << 20).expect("it is open"), [[5; 100], [6; 100]].concat());
        let blocks = |ino| fs.wait(|| fs.attributes(ino)).expect("it is open").inode.blocks;
        fs.allocate(&WHO, reserved, 0, 100 * BLOCK, Allocate::Reserve { grow: true }).expect("there is room");
        fs.allocate(&WHO, kept, 0, 100 * BLOCK, Allocate::Reserve { grow: false }).expect("there is room");
        forgotten(kept);
        fs.wait(|| fs.write(kept, 0, &[5; BLOCK as usize], NOW)).expect("there is room");
        forgotten(kept);
        assert_eq!((blocks(reserved), blocks(kept)), (100, 100), "ruined: {is_ruined}");
        // With a name it is no orphan, whatever was preallocated.
        fs.wait(|| fs.link(&WHO, kept, ROOT, b"kept")).expect("it is open");
        fs.finish_orphans(usize::MAX).unwrap_or(true);
        assert_eq!(blocks(kept), 100, "ruined: {is_ruined}");
    }
}

/// Files that lose their name in this mount are none of what was left, however many there are.
#[test]
fn what_earlier_mounts_left_comes_to_an_end() {
    let (image, _) = cut_short(20);
    let (_, fs) = opened(&image);
    let new = NewNode { mode: 0o100600, umask: 0, rdev: 0, target: &[] };
    for _ in 0..100 {
        fs.wait(|| fs.create_unnamed(&WHO, ROOT, &new)).expect("there is room");
    }
    let rounds = (1..).find(|_| fs.finish_orphans(4).expect("nothing fails")).expect("it ends");
    assert!(rounds < 10, "{rounds}");
}

/// What an earlier mount left is freed for a write that finds no room.
#[test]
fn a_volume_that_is_full_of_what_is_to_be_freed_has_room() {
    let (image, ino) = cut_short(MANY);
    let (_, fs) = opened(&image);
    let free = fs.usage().available * BLOCK;
    let large = create(&fs, b"large");
    let mut at = 0;
    while at < free + MANY / 2 * BLOCK {
        fs.wait(|| fs.write(large, at, &[3; 1 << 20], NOW)).expect("there is room once more is freed");
        at += 1 << 20;
    }
    fs.sync_file(large).expect("nothing fails");
    let (_, fs) = opened(&image);
    // What the volume could never have takes nothing.
    fs.allocate(&WHO, ino, 0, 1 << 40, Allocate::Reserve { grow: true }).expect_err("there is no room");
    assert!(!fs.finish_orphans(0).expect("nothing was tried"), "it was freed in vain");
    fs.allocate(&WHO, ino, 0, free + MANY / 2 * BLOCK, Allocate::Reserve { grow: true }).expect("there is room");
    assert_sound(&fs, "full");
}

#[test]
fn a_mount_that_only_reads_shows_nothing_beyond_the_end_of_a_file() {
    let (image, ino) = cut_short(20);
    let device: Arc<dyn BlockDevice> = MemoryDevice::from_image(image);
    let options = Options { volume: VolumeOptions { read_only: true, cache: 1 << 20, discard: false }, write_buffer: 4 << 20 };
    let fs = Filesystem::open(Io::inline(device).expect("a queue"), options, Arc::new(Inline)).expect("it can be read");
    assert_eq!(fs.read(ino, 0, 1 << 20).expect("it can be read"), [7; SIZE as usize]);
    assert_eq!(fs.wait(|| fs.resolve(ino, 0, u64::MAX, usize::MAX)).expect("it is a file").0.len(), 1);
    assert!(fs.finish_orphans(1).expect("there is nothing to do"));
    fs.close().expect("nothing is written");
}

#[test]
fn the_end_of_a_mount_leaves_what_takes_long_to_the_next_one() {
    let closing = |extents| {
        let (memory, fs, ino) = scattered(extents);
        fs.close().expect("nothing fails");
        let (memory, faulty) = counting(&memory.snapshot());
        let device: Arc<dyn BlockDevice> = faulty.clone();
        let fs = open(&device).expect("it was closed");
        fs.wait(|| fs.unlink(&WHO, ROOT, b"file")).expect("it is there");
        create(&fs, b"last");
        let before = faulty.hits();
        fs.close_within(Duration::ZERO).expect("what is left is no error");
        assert!(fs.is_written_down());
        (faulty.hits() - before, memory.snapshot(), ino)
    };
    let (few, ..) = closing(20);
    let (many, image, ino) = closing(MANY);
    assert!(many <= few + 5, "{many} requests, and {few} where there was little to free");
    let memory = MemoryDevice::from_image(image);
    let device: Arc<dyn BlockDevice> = memory.clone();
    assert!(is_clean(&device).expect("it can be read"));
    assert_eq!(left(&memory, ino), (1, MANY as usize));
    let fs = open(&device).expect("it was closed");
    assert_sound(&fs, "with an orphan that is noted");
    assert!(!fs.finish_orphans(8).expect("nothing fails"), "there is more");
    // One with time enough does the rest.
    fs.close_within(Duration::from_secs(600)).expect("nothing fails");
    assert_eq!(left(&memory, ino), (0, 0));
    let fs = open(&device).expect("it was closed");
    fs.wait(|| fs.lookup(ROOT, b"last")).expect("it was made before the end");
    assert_sound(&fs, "finished");
}
