//! An old volume: filled, and its files replaced again and again.

use std::sync::Arc;

use gpunvme_blockdev::BlockDevice;
use gpunvme_blockdev_testing::MemoryDevice;
use gpunvme_engine::data::Filesystem;
use gpunvme_engine::volume::{Context, NewNode};
use gpunvme_layout::Timestamp;
use gpunvme_layout::block::BLOCK_SIZE;

use crate::common::{ROOT, Random, assert_sound, make, open};

const WHO: Context = Context { uid: 0, gid: 0, now: Timestamp { seconds: 1, nanoseconds: 0 } };

fn write(fs: &Arc<Filesystem>, name: &str, len: u64) -> u64 {
    let new = NewNode { mode: 0o100644, umask: 0, rdev: 0, target: &[] };
    let ino = fs.wait(|| fs.create(&WHO, ROOT, name.as_bytes(), &new)).expect("there is room").ino;
    fs.hold_file(ino);
    for at in (0..len).step_by(1 << 20) {
        let piece = vec![1; (len - at).min(1 << 20) as usize];
        fs.wait(|| fs.write(ino, at, &piece, WHO.now)).expect("there is room");
    }
    fs.let_go_of_file(ino);
    ino
}

fn remove(fs: &Arc<Filesystem>, name: &str) {
    let ino = fs.wait(|| fs.unlink(&WHO, ROOT, name.as_bytes())).expect("it is there").expect("its last name");
    while fs.wait(|| fs.reap_step(ino)).expect("nothing fails") {}
}

fn used(fs: &Filesystem) -> f64 {
    let usage = fs.usage();
    1.0 - usage.available as f64 / usage.blocks as f64
}

#[test]
fn where_small_files_came_and_went_large_ones_find_large_extents() {
    let device: Arc<dyn BlockDevice> = MemoryDevice::new(256 << 20);
    make(&device);
    let fs = open(&device).expect("it can be opened");
    let mut random = Random(3);
    let (mut names, mut next) = (Vec::new(), 0);
    for _ in 0..6 {
        names.retain(|name: &String| {
            let stays = random.below(3) > 0;
            if !stays {
                remove(&fs, name);
            }
            stays
        });
        fs.commit().expect("nothing fails");
        while used(&fs) < 0.75 {
            let name = format!("file {next}");
            // Most are small, and most of the bytes are not in those.
            let largest = [16 << 10, 32 << 10, 64 << 10, 256 << 10, 1 << 20][random.below(5) as usize];
            write(&fs, &name, largest / 2 + random.below(largest / 2));
            names.push(name);
            next += 1;
        }
        fs.write_back().expect("nothing fails");
        fs.commit().expect("nothing fails");
    }
    let len = 24 << 20;
    let ino = write(&fs, "large", len);
    fs.sync_file(ino).expect("there is room");
    let (extents, _) = fs.wait(|| fs.resolve(ino, 0, len, usize::MAX)).expect("it is mapped");
    let blocks: u64 = extents.iter().map(|mapping| u64::from(mapping.extent.len)).sum();
    assert_eq!(blocks, len / BLOCK_SIZE as u64);
    assert!(extents.len() <= 6, "24 MiB lie in {} extents on a volume that has 60 MiB free", extents.len());
    assert_sound(&fs, "an old volume");
}

#[test]
fn files_are_removed_together_or_none_of_them_is() {
    let device: Arc<dyn BlockDevice> = MemoryDevice::new(64 << 20);
    make(&device);
    let fs = open(&device).expect("it can be opened");
    let before = fs.usage();
    let orphan = |name: &str, attributes: u32| {
        let ino = write(&fs, name, 100_000);
        fs.sync_file(ino).expect("nothing fails");
        for n in 0..attributes {
            let name = format!("user.{n}");
            fs.wait(|| fs.set_xattr(&WHO, ino, name.as_bytes(), b"value", true, false)).expect("there is room");
        }
        fs.wait(|| fs.unlink(&WHO, ROOT, name.as_bytes())).expect("it is there").expect("its last name")
    };
    let few: Vec<u64> = (0..3).map(|n| orphan(&format!("few {n}"), 1)).collect();
    // One operation does not remove all of it.
    let many = orphan("many", 100);
    let all: Vec<u64> = few.iter().copied().chain([many]).collect();
    let with_all = fs.usage();
    assert!(!fs.wait(|| fs.reap_together(&all)).expect("nothing fails"));
    assert_eq!(fs.usage(), with_all, "none is removed");
    assert!(fs.wait(|| fs.reap_together(&few)).expect("nothing fails"));
    assert_eq!(fs.usage().inodes, with_all.inodes - 3);
    assert!(fs.wait(|| fs.reap_together(&few)).expect("those that are gone are no error"));
    while fs.wait(|| fs.reap_step(many)).expect("nothing fails") {}
    fs.commit().expect("nothing fails");
    let after = fs.usage();
    assert_eq!((after.inodes, after.free), (before.inodes, before.free));
    assert_sound(&fs, "after removals");
}

#[test]
fn a_large_inode_that_a_crash_left_is_removed_by_parts() {
    let device: Arc<dyn BlockDevice> = MemoryDevice::new(64 << 20);
    make(&device);
    let fs = open(&device).expect("it can be opened");
    let before = fs.usage();
    let ino = write(&fs, "large", 100_000);
    for n in 0..100 {
        fs.wait(|| fs.set_xattr(&WHO, ino, format!("user.{n}").as_bytes(), b"value", true, false)).expect("there is room");
    }
    fs.wait(|| fs.unlink(&WHO, ROOT, b"large")).expect("it is there").expect("its last name");
    fs.commit().expect("nothing fails");
    drop(fs);
    let fs = open(&device).expect("it can be opened");
    assert!(!fs.finish_orphans(1).expect("nothing fails"), "one operation does not remove all of it");
    let others = (1..20).take_while(|_| !fs.finish_orphans(1).expect("nothing fails")).count();
    assert!((1..10).contains(&others), "{others}");
    assert_eq!(fs.usage().inodes, before.inodes);
    assert_sound(&fs, "after a removal by parts");
}
