//! What a crash left to do is done by a check that ends well, and ends when it is asked to.

use std::sync::Arc;

use gpunvme_blockdev::BlockDevice;
use gpunvme_blockdev_testing::{Image, MemoryDevice};
use gpunvme_engine::check::Stop;
use gpunvme_engine::error::FsError;
use gpunvme_engine::volume::NewNode;
use gpunvme_layout::{Inode, Key, Kind as ItemKind};

use super::subject::{NOW, ROOT, WHO};
use super::{found, fsck_until};
use crate::common::{make, open};
use crate::surgeon::Surgeon;

/// Extents of each of two files: more than one operation frees.
const PIECES: u64 = 50;

/// A volume with two files that lie in pieces, after what `last` did, and their inodes.
fn volume(last: impl FnOnce(&Arc<gpunvme_engine::Filesystem>)) -> (Image, [u64; 2]) {
    let memory = MemoryDevice::new(32 << 20);
    let device: Arc<dyn BlockDevice> = memory.clone();
    make(&device);
    let fs = open(&device).expect("a new volume can be opened");
    let new = NewNode { mode: 0o100644, umask: 0, rdev: 0, target: &[] };
    let inodes =
        ["left", "right"].map(|name| fs.wait(|| fs.create(&WHO, ROOT, name.as_bytes(), &new)).expect("there is room").ino);
    for at in 0..PIECES {
        for ino in inodes {
            fs.wait(|| fs.write(ino, at * 8192, &[1; 4096], NOW)).expect("there is room");
            fs.sync_file(ino).expect("nothing fails");
        }
    }
    last(&fs);
    (memory.snapshot(), inodes)
}

/// How many inodes are noted, and how many extents the two files have.
fn left(memory: &MemoryDevice, inodes: [u64; 2]) -> (usize, usize) {
    let surgeon = Surgeon::new(memory.snapshot());
    let count = |ino, kind| surgeon.items(Key::new(ino, kind, 0), Key::new(ino, kind, u64::MAX)).len();
    (count(0, ItemKind::Orphan), inodes.iter().map(|ino| count(*ino, ItemKind::Extent)).sum())
}

fn ends_when_asked_and_else_finishes(image: Image, inodes: [u64; 2], extents: usize) {
    let memory = MemoryDevice::from_image(image);
    let device: Arc<dyn BlockDevice> = memory.clone();
    let close = |ends: bool| {
        let stop = Stop::default();
        let mut fsck = fsck_until(&device, false, stop.clone());
        let repaired = fsck.repair(&mut |_| true, &mut |_, _, _| ()).expect("the device works");
        assert_eq!(repaired.found.total(), 0, "{:#?}", repaired.found.list);
        if ends {
            stop.ask();
        }
        fsck.close(true)
    };
    assert!(matches!(close(true), Err(FsError::Cancelled)));
    assert_eq!(left(&memory, inodes), (1, 2 * PIECES as usize), "nothing was begun");
    assert_eq!(found(&device).total(), 0);
    close(false).expect("the device works");
    assert_eq!(left(&memory, inodes), (0, extents));
    assert_eq!(found(&device).total(), 0);
}

#[test]
fn an_inode_without_a_name_is_removed_unless_the_end_is_asked_for() {
    let (image, inodes) = volume(|fs| {
        fs.wait(|| fs.unlink(&WHO, ROOT, b"left")).expect("it is there");
        fs.commit().expect("nothing fails");
    });
    ends_when_asked_and_else_finishes(image, inodes, PIECES as usize);
}

#[test]
fn a_truncation_is_ended_unless_the_end_is_asked_for() {
    let (image, inodes) = volume(|fs| fs.close().expect("nothing fails"));
    let mut surgeon = Surgeon::new(image);
    surgeon.edit_item(Key::inode(inodes[0]), |bytes| {
        let mut inode = Inode::decode(inodes[0], bytes).expect("it is sound");
        inode.size = 4096;
        bytes.copy_from_slice(&inode.encode());
    });
    surgeon.insert(Key::new(0, ItemKind::Orphan, inodes[0]), &[]);
    ends_when_asked_and_else_finishes(surgeon.image, inodes, PIECES as usize + 1);
}
