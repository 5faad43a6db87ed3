//! A repair of many blocks that one file has twice.

use std::sync::Arc;

use gpunvme_blockdev::{BlockDevice, Io};
use gpunvme_blockdev_testing::MemoryDevice;
use gpunvme_engine::check::{CheckOptions, Fsck, Kind, Stop};
use gpunvme_engine::data::resize::Allocate;
use gpunvme_engine::volume::NewNode;
use gpunvme_layout::{Extent, Key, Kind as ItemKind};

use super::found;
use super::subject::{NOW, ROOT, WHO};
use crate::common::{make, open};
use crate::surgeon::Surgeon;

const BLOCK: u64 = 4096;
/// Extents of the file. Their leaves are more than the repair may keep in memory.
const EXTENTS: u64 = 30_000;
const MEMORY: usize = 1 << 20;
/// Every so many extents have the block of the next one.
const EVERY: usize = 30;

#[test]
fn a_repair_reads_a_file_of_many_shared_blocks_once_and_not_once_for_each() {
    let memory = MemoryDevice::new(512 << 20);
    let device: Arc<dyn BlockDevice> = memory.clone();
    make(&device);
    let fs = open(&device).expect("a new volume can be opened");
    let new = NewNode { mode: 0o100644, umask: 0, rdev: 0, target: &[] };
    let ino = fs.wait(|| fs.create(&WHO, ROOT, b"file", &new)).expect("there is room").ino;
    for extent in 0..EXTENTS {
        fs.allocate(&WHO, ino, 2 * extent * BLOCK, BLOCK, Allocate::Reserve { grow: true }).expect("there is room");
    }
    fs.close().expect("nothing fails");
    drop(fs);

    let mut surgeon = Surgeon::new(memory.snapshot());
    let extents = surgeon.items(Key::new(ino, ItemKind::Extent, 0), Key::inode(ino + 1));
    assert_eq!(extents.len() as u64, EXTENTS);
    for pair in extents.windows(2).step_by(EVERY) {
        let (key, next) = (pair[0].0, Extent::decode(ino, pair[1].0.offset(), &pair[1].1).expect("it is sound"));
        surgeon.edit_item(key, |value| value.copy_from_slice(&next.encode()));
    }
    let leaves = surgeon.leaves().len() as u64;
    let shared = EXTENTS / EVERY as u64;

    let memory = MemoryDevice::from_image(surgeon.image);
    let device: Arc<dyn BlockDevice> = memory.clone();
    let options = CheckOptions { read_only: false, memory: MEMORY, now: NOW, stop: Stop::default() };
    let mut fsck = Fsck::open(Io::inline(device.clone()).expect("a queue"), options).expect("there is a superblock");
    let first = fsck.check(&mut |_, _, _| ()).expect("the device can be read");
    assert_eq!(first.counts.get(&Kind::Shared), Some(&shared), "{:?}", first.counts);
    let of_check = memory.reads();
    let repaired = fsck.repair(&mut |_| true, &mut |_, _, _| ()).expect("the device works");
    assert_eq!(repaired.left.total(), 0, "{:#?}", repaired.left.list);
    let of_repair = memory.reads() - of_check;
    eprintln!("{leaves} leaves, {shared} shared blocks: a check reads {of_check} blocks, the repair {of_repair}");
    assert!(of_repair < 8 * of_check, "{of_repair} reads, where a check takes {of_check}");
    fsck.close(true).expect("nothing fails");
    assert_eq!(found(&device).total(), 0);
}
