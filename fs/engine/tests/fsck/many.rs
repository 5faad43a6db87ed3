//! Images that were made to cost a check much: a great many findings, names, or blocks.

use std::sync::Arc;
use std::time::Instant;

use gpunvme_blockdev::BlockDevice;
use gpunvme_blockdev_testing::MemoryDevice;
use gpunvme_engine::Filesystem;
use gpunvme_engine::check::Kind;
use gpunvme_engine::data::resize::Allocate;
use gpunvme_engine::volume::NewNode;
use gpunvme_layout::{Extent, Key, Kind as ItemKind};

use super::subject::{ROOT, WHO};
use super::{found, fsck, mend};
use crate::common::{make, open};
use crate::surgeon::Surgeon;

/// A closed volume of so many bytes that `fill` put something into.
fn volume(bytes: u64, fill: impl FnOnce(&Arc<Filesystem>)) -> Surgeon {
    let memory = MemoryDevice::new(bytes);
    let device: Arc<dyn BlockDevice> = memory.clone();
    make(&device);
    let fs = open(&device).expect("a new volume can be opened");
    fill(&fs);
    fs.close().expect("nothing fails");
    drop(fs);
    Surgeon::new(memory.snapshot())
}

fn create(fs: &Arc<Filesystem>, name: &str) -> u64 {
    let new = NewNode { mode: 0o100644, umask: 0, rdev: 0, target: &[] };
    fs.wait(|| fs.create(&WHO, ROOT, name.as_bytes(), &new)).expect("there is room").ino
}

#[test]
fn a_name_that_many_entries_want_costs_each_of_them_little_more_than_one_that_few_want() {
    const ENTRIES: u64 = 4000;
    let volume = volume(64 << 20, |fs| (0..ENTRIES).for_each(|n| _ = create(fs, &format!("{n:0100}"))));
    let entries = volume.items(Key::new(ROOT, ItemKind::Dirent, 0), Key::new(ROOT, ItemKind::Xattr, 0));
    assert_eq!(entries.len() as u64, ENTRIES);
    // Overwrites so many bytes of each name with what cannot be in a name.
    let repaired = |bytes: usize| {
        let mut surgeon = Surgeon::new(volume.image.clone());
        entries.iter().for_each(|(key, _)| surgeon.edit_item(*key, |value| value[9..][..bytes].fill(b'/')));
        let device: Arc<dyn BlockDevice> = MemoryDevice::from_image(surgeon.image);
        let begun = Instant::now();
        mend(&device, "names that cannot be");
        (device, begun.elapsed())
    };
    let (_, apart) = repaired(1);
    let (device, together) = repaired(100);
    eprintln!("{ENTRIES} names: {apart:?} where each is another, {together:?} where all are the same");
    assert!(together < 8 * apart, "{together:?}, and {apart:?} where each is another");
    let fs = open(&device).expect("the volume can be opened");
    let last = format!("{}~{}", "_".repeat(100), ENTRIES - 1);
    fs.wait(|| fs.lookup(ROOT, last.as_bytes())).expect("the numbers have no gaps");
}

#[test]
fn blocks_that_two_have_are_one_finding_however_many_groups_they_lie_in() {
    const EXTENTS: u64 = 60;
    let mut ino = 0;
    let mut surgeon = volume(1 << 40, |fs| {
        ino = create(fs, "file");
        (0..EXTENTS).for_each(|n| {
            fs.allocate(&WHO, ino, (n << 32) * 4096, 4096, Allocate::Reserve { grow: true }).expect("there is room");
        });
    });
    // Each has all blocks of the volume but those of the first group.
    let extents = surgeon.items(Key::new(ino, ItemKind::Extent, 0), Key::inode(ino + 1));
    assert_eq!(extents.len() as u64, EXTENTS);
    let block = surgeon.geometry.group_start(1);
    let len = (surgeon.geometry.data_end() - block) as u32;
    let all = Extent { block, len, unwritten: true, device: 0 }.encode();
    extents.iter().for_each(|(key, _)| surgeon.edit_item(*key, |value| value.copy_from_slice(&all)));
    assert!(surgeon.geometry.groups > 8000, "{}", surgeon.geometry.groups);
    let device: Arc<dyn BlockDevice> = MemoryDevice::from_image(surgeon.image);
    let findings = found(&device);
    assert_eq!(findings.counts.get(&Kind::Shared), Some(&(EXTENTS - 1)), "{:?}", findings.counts);
    let unmarked = findings.counts[&Kind::Unmarked];
    assert!(unmarked >= surgeon.geometry.groups - 1, "all of that is in use, and {unmarked} groups say otherwise");
}

#[test]
fn findings_beyond_the_list_are_counted_once_and_mended_all_the_same() {
    const NAMES: u64 = 110_000;
    const LISTED: usize = 100_000;
    let mut ino = 0;
    let mut surgeon = volume(256 << 20, |fs| {
        ino = create(fs, "0");
        (1..NAMES).for_each(|n| _ = fs.wait(|| fs.link(&WHO, ino, ROOT, n.to_string().as_bytes())).expect("there is room"));
    });
    surgeon.remove(Key::inode(ino));
    let device: Arc<dyn BlockDevice> = MemoryDevice::from_image(surgeon.image);
    let mut fsck = fsck(&device, false);
    let repaired = fsck.repair(&mut |_| true, &mut |_, _, _| ()).expect("the device works");
    assert_eq!(repaired.left.total(), 0, "{:?}", repaired.left.counts);
    fsck.close(true).expect("nothing fails");
    assert_eq!(repaired.found.counts.get(&Kind::EntryDangling), Some(&NAMES), "{:?}", repaired.found.counts);
    assert_eq!(repaired.found.list.len(), LISTED);
    assert_eq!(repaired.found.unlisted().values().sum::<u64>(), repaired.found.total() - LISTED as u64);
    assert_eq!(found(&device).total(), 0);
}
