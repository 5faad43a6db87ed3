//! Full volumes: a write that was accepted is written back, however many extents and nodes that
//! takes; else it is refused when it is made.

use std::collections::BTreeSet;
use std::sync::{Arc, mpsc};

use gpunvme_abi::Segment;
use gpunvme_blockdev::{BlockDevice, Io, Region};
use gpunvme_blockdev_testing::MemoryDevice;
use gpunvme_engine::VolumeOptions;
use gpunvme_engine::data::resize::Allocate;
use gpunvme_engine::data::{Filesystem, Options, Settling};
use gpunvme_engine::error::FsError;
use gpunvme_engine::volume::{Context, NewNode, RenameMode};
use gpunvme_layout::Timestamp;

use crate::common::{ROOT, Random, Worker, assert_sound, make, open, stepped_by};

const NOW: Timestamp = Timestamp { seconds: 9, nanoseconds: 0 };
const WHO: Context = Context { uid: 0, gid: 0, now: NOW };
const FILE: NewNode = NewNode { mode: 0o100644, umask: 0, rdev: 0, target: &[] };
const BLOCK: u64 = 4096;
/// Blocks of a chunk.
const CHUNK: u64 = 512;
/// The smallest volume that can be made, and others that have little room for metadata.
const VOLUMES: [u64; 3] = [16 << 20, 64 << 20, 250 << 20];

/// Orders in which blocks are written, none beside another one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Order {
    Up,
    Down,
    Random,
}

impl Order {
    /// Every other one of so many blocks.
    fn of(self, blocks: u64) -> Vec<u64> {
        let mut order: Vec<u64> = (0..blocks).step_by(2).collect();
        match self {
            Order::Up => {}
            Order::Down => order.reverse(),
            Order::Random => {
                let mut random = Random(blocks);
                (1..order.len()).rev().for_each(|i| order.swap(i, random.below(i as u64 + 1) as usize));
            }
        }
        order
    }
}

/// How blocks are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    Buffered,
    Direct,
    /// Buffered, and nothing reaches the device before a thread waits for it.
    Waiting,
}

fn file(fs: &Arc<Filesystem>, name: &[u8]) -> u64 {
    let ino = fs.wait(|| fs.create(&WHO, ROOT, name, &FILE)).expect("there is room").ino;
    fs.hold_file(ino);
    ino
}

/// Whether something was done; not where there was no room.
fn had_room<T>(result: Result<T, FsError>) -> bool {
    match result {
        Ok(_) => true,
        Err(FsError::NoSpace) => false,
        Err(error) => panic!("{error}"),
    }
}

/// Adds names until there is no room for more. The next one will have this number.
fn fill_with_names(fs: &Arc<Filesystem>, next: &mut u32) {
    while had_room(fs.wait(|| fs.create(&WHO, ROOT, format!("{next:0>250}").as_bytes(), &FILE))) {
        *next += 1;
    }
}

/// Gives a file all blocks that are left, unwritten. Returns how many.
fn fill_with_preallocated(fs: &Arc<Filesystem>, ino: u64) -> u64 {
    let mut blocks = 0;
    for step in [4096, 64, 1] {
        while had_room(fs.allocate(&WHO, ino, blocks * BLOCK, step * BLOCK, Allocate::Reserve { grow: true })) {
            blocks += step;
        }
    }
    blocks
}

/// Opens a volume anew, for writes of that kind.
fn reopened(device: &Arc<dyn BlockDevice>, fs: Arc<Filesystem>, way: Way) -> Arc<Filesystem> {
    fs.close().expect("nothing fails");
    drop(fs);
    if way == Way::Waiting { stepped_by(device, |_| 0) } else { open(device).expect("it was closed") }
}

/// Writes one block, and returns whether that was accepted.
fn write(fs: &Arc<Filesystem>, ino: u64, block: u64, way: Way) -> bool {
    if way != Way::Direct {
        let accepted = had_room(fs.wait(|| fs.write(ino, block * BLOCK, &[7; BLOCK as usize], NOW)));
        fs.write_behind(ino);
        return accepted;
    }
    let memory = Region::allocate(BLOCK as usize).expect("memory");
    memory.write_at(0, &[7; BLOCK as usize]).expect("inside");
    let segment = Segment { file_offset: block * BLOCK, buffer_offset: 0, len: BLOCK };
    match fs.wait(|| fs.plan_direct_write(ino, &[segment], &memory, NOW)) {
        Ok(planned) => {
            let (sender, receiver) = mpsc::channel();
            fs.submit_direct_write(planned, move |result| sender.send(result.map(drop)).expect("it is waited for"));
            receiver.recv().expect("a write is answered").expect("it was accepted");
            true
        }
        Err(FsError::NoSpace) => false,
        Err(error) => panic!("{error}"),
    }
}

/// Writes every other block of a file, and checks that it has what was accepted, and zeros
/// elsewhere. Returns how many were accepted.
fn write_all(device: &Arc<dyn BlockDevice>, fs: Arc<Filesystem>, ino: u64, blocks: u64, order: Order, way: Way) -> u64 {
    let what = format!("{order:?} {way:?}, {blocks} blocks");
    let accepted: BTreeSet<u64> = order.of(blocks).into_iter().filter(|block| write(&fs, ino, *block, way)).collect();
    fs.sync_file(ino).unwrap_or_else(|error| panic!("{what}: accepted, then lost: {error}"));
    fs.close().expect("nothing was lost");
    drop(fs);
    let fs = open(device).expect("it was closed");
    for block in 0..blocks {
        let byte = if accepted.contains(&block) { 7 } else { 0 };
        let found = fs.read(ino, block * BLOCK, BLOCK as usize).expect("it can be read");
        assert!(found.iter().all(|found| *found == byte), "{what}: block {block}");
    }
    assert_sound(&fs, &what);
    accepted.len() as u64
}

#[test]
fn what_is_written_into_preallocated_blocks_of_a_full_volume_is_not_lost() {
    for len in VOLUMES {
        for (order, way) in [(Order::Up, Way::Buffered), (Order::Down, Way::Direct), (Order::Random, Way::Waiting)] {
            let device: Arc<dyn BlockDevice> = MemoryDevice::new(len);
            make(&device);
            let fs = open(&device).expect("it was made");
            let ino = file(&fs, b"preallocated");
            let blocks = fill_with_preallocated(&fs, ino);
            fill_with_names(&fs, &mut 0);
            let fs = reopened(&device, fs, way);
            let accepted = write_all(&device, fs, ino, blocks, order, way);
            assert_eq!(accepted, blocks / 2, "{len} bytes, {order:?} {way:?}");
        }
    }
}

#[test]
fn names_leave_preallocated_blocks_the_nodes_that_these_need() {
    for len in [64 << 20, 250 << 20] {
        let device: Arc<dyn BlockDevice> = MemoryDevice::new(len);
        make(&device);
        let fs = open(&device).expect("it was made");
        let ino = file(&fs, b"preallocated");
        let blocks = fill_with_preallocated(&fs, ino);
        let mut next = 0;
        for (number, block) in Order::Random.of(blocks).into_iter().enumerate() {
            if number % 256 == 0 {
                fs.sync_file(ino).expect("nothing fails");
                fill_with_names(&fs, &mut next);
            }
            assert!(write(&fs, ino, block, Way::Buffered), "{len} bytes, {next} names: write {number} of {}", blocks / 2);
        }
        fs.close().expect("nothing was lost");
        drop(fs);
        assert_sound(&open(&device).expect("it was closed"), "names beside writes");
    }
}

/// Longer names take nodes, too.
#[test]
fn renames_leave_preallocated_blocks_the_nodes_that_these_need() {
    let device: Arc<dyn BlockDevice> = MemoryDevice::new(64 << 20);
    make(&device);
    let fs = open(&device).expect("it was made");
    let ino = file(&fs, b"preallocated");
    let short = |n: u32| format!("{n}");
    let mut names = 0;
    while names < 20_000 && had_room(fs.wait(|| fs.create(&WHO, ROOT, short(names).as_bytes(), &FILE))) {
        names += 1;
    }
    let blocks = fill_with_preallocated(&fs, ino);
    while had_room(fs.wait(|| fs.create(&WHO, ROOT, short(names).as_bytes(), &FILE))) {
        names += 1;
    }
    let renamed = |n: &u32| {
        let to = format!("{n:0>250}");
        let by = |settling: &mut Settling| {
            fs.rename(&WHO, (ROOT, short(*n).as_bytes()), (ROOT, to.as_bytes()), RenameMode::Replace, settling)
        };
        let mut settling = Settling::default();
        had_room(fs.wait(|| by(&mut settling)))
    };
    let count = (0..names).filter(renamed).count();
    assert!(count > 0 && count < names as usize, "{count} of {names} names became longer");
    for (number, block) in Order::Random.of(blocks).into_iter().enumerate() {
        assert!(write(&fs, ino, block, Way::Buffered), "write {number} of {}", blocks / 2);
    }
    fs.sync_file(ino).expect("what was accepted is not lost");
    fs.close().expect("nothing was lost");
}

#[test]
fn what_is_written_into_holes_between_blocks_of_others_is_not_lost() {
    for len in VOLUMES {
        for (order, way) in [(Order::Down, Way::Waiting), (Order::Random, Way::Direct)] {
            let device: Arc<dyn BlockDevice> = MemoryDevice::new(len);
            make(&device);
            let fs = open(&device).expect("it was made");
            let full = file(&fs, b"full");
            let blocks = fill_with_preallocated(&fs, full);
            let punch = |block: &u64| had_room(fs.allocate(&WHO, full, block * BLOCK, BLOCK, Allocate::Punch));
            let holes = (0..blocks).step_by(2).filter(punch).count() as u64;
            fs.commit().expect("nothing fails");
            let ino = file(&fs, b"sparse");
            fill_with_names(&fs, &mut 0);
            let left = fs.usage().available;
            let fs = reopened(&device, fs, way);
            let accepted = write_all(&device, fs, ino, blocks, order, way);
            // The extents themselves may have taken a chunk.
            assert!(accepted + CHUNK >= left.min(holes), "{len} bytes, {order:?} {way:?}: {accepted} of {left}");
        }
    }
}

/// The inodes of files that were made one after the other lie in full leaves. The first extent of a
/// file then makes two of its leaf.
#[test]
fn what_is_written_to_files_whose_leaves_are_full_is_not_lost() {
    const FILES: u64 = 9000;
    const APART: u64 = 30;
    let device: Arc<dyn BlockDevice> = MemoryDevice::new(64 << 20);
    make(&device);
    let fs = open(&device).expect("it was made");
    let full = file(&fs, b"full");
    let inos: Vec<u64> = (0..FILES).map(|n| file(&fs, n.to_string().as_bytes())).collect();
    let blocks = fill_with_preallocated(&fs, full);
    fill_with_names(&fs, &mut 0);
    fs.wait(|| fs.set_size(&WHO, full, (blocks - 2 * CHUNK) * BLOCK)).expect("it becomes shorter");
    let fs = reopened(&device, fs, Way::Waiting);
    let written: Vec<u64> = inos.into_iter().step_by(APART as usize).filter(|ino| write(&fs, *ino, 0, Way::Waiting)).collect();
    fs.close().expect("what was accepted is not lost");
    drop(fs);
    let fs = open(&device).expect("it was closed");
    assert!(written.iter().all(|ino| fs.read(*ino, 0, BLOCK as usize).expect("it can be read") == [7; BLOCK as usize]));
    assert_sound(&fs, "small files");
    assert_eq!(written.len() as u64, FILES / APART);
}

/// Threads fill the volume, each with files of its own, and punch holes into them.
#[test]
fn what_threads_have_written_beside_one_another_on_a_full_volume_is_not_lost() {
    const THREADS: u64 = 4;
    const SPAN: u64 = 4000;
    let device: Arc<dyn BlockDevice> = MemoryDevice::new(48 << 20);
    make(&device);
    let options = Options { volume: VolumeOptions { read_only: false, cache: 1 << 20, discard: false }, write_buffer: 8 << 20 };
    let fs = Filesystem::open(Io::threaded(device.clone(), 2).expect("queues"), options, Worker::start()).expect("it was made");
    let fill = |thread: u64| {
        let fs = fs.clone();
        let ino = file(&fs, format!("thread {thread}").as_bytes());
        let mut random = Random(thread);
        let mut content = vec![0; SPAN as usize];
        let mut refused = 0;
        for round in 0..12_000 {
            let (block, byte) = (random.below(SPAN), 1 + random.below(255) as u8);
            match random.below(100) {
                0..90 => match fs.wait(|| fs.write(ino, block * BLOCK, &[byte; BLOCK as usize], NOW)) {
                    Ok(()) => content[block as usize] = byte,
                    Err(FsError::NoSpace) => refused += 1,
                    Err(error) => panic!("{error}"),
                },
                90..95 => {
                    let len = 1 + random.below(40);
                    refused += u64::from(!had_room(fs.allocate(
                        &WHO,
                        ino,
                        block * BLOCK,
                        len * BLOCK,
                        Allocate::Reserve { grow: true },
                    )));
                }
                _ => {
                    if had_room(fs.allocate(&WHO, ino, block * BLOCK, 3 * BLOCK, Allocate::Punch)) {
                        content[block as usize..SPAN.min(block + 3) as usize].fill(0);
                    }
                }
            }
            fs.write_behind(ino);
            if round % 1000 == 0 {
                fs.sync_file(ino).expect("what was accepted is not lost");
            }
        }
        fs.sync_file(ino).expect("what was accepted is not lost");
        (ino, content, refused)
    };
    let fill = &fill;
    let filled: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS).map(|thread| scope.spawn(move || fill(thread))).collect();
        threads.into_iter().map(|thread| thread.join().expect("none panics")).collect()
    });
    assert!(filled.iter().map(|(_, _, refused)| refused).sum::<u64>() > 100, "it was not full");
    let left = fs.usage().available;
    let has_room = had_room(fs.wait(|| fs.write(filled[0].0, (SPAN + 7) * BLOCK, &[1; BLOCK as usize], NOW)));
    assert!(has_room || left == 0, "{left} blocks are left, and none can be written");
    fs.close().expect("nothing was lost");
    drop(fs);
    let fs = open(&device).expect("it was closed");
    for (ino, content, _) in filled {
        for (block, byte) in content.iter().enumerate() {
            let mut found = fs.read(ino, block as u64 * BLOCK, BLOCK as usize).expect("it can be read");
            found.resize(BLOCK as usize, 0);
            assert!(found.iter().all(|found| found == byte), "block {block} of {ino}");
        }
    }
    assert_sound(&fs, "after threads");
}

/// Blocks that a file has reserved ahead are given back when names need them.
#[test]
fn names_have_room_beside_a_file_that_grows() {
    let device: Arc<dyn BlockDevice> = MemoryDevice::new(250 << 20);
    make(&device);
    let fs = open(&device).expect("it was made");
    let (fixed, log) = (file(&fs, b"fixed"), file(&fs, b"log"));
    // The log lies behind all else, and before all that is free.
    let rest = fs.usage().available - 30 * CHUNK;
    fs.allocate(&WHO, fixed, 0, rest * BLOCK, Allocate::Reserve { grow: true }).expect("there is room");
    for mebibyte in 0..40 {
        fs.wait(|| fs.write(log, mebibyte << 20, &[1; 1 << 20], NOW)).expect("there is room");
        fs.sync_file(log).expect("nothing fails");
    }
    let (mut names, mut refused) = (0, false);
    while !refused && fs.usage().available > 2 * CHUNK {
        // It takes all that it can, again and again.
        let end = fs.wait(|| fs.attributes(log)).expect("it is there").inode.size;
        fs.wait(|| fs.write(log, end, &[1; 4096], NOW)).expect("there is room");
        fs.sync_file(log).expect("nothing fails");
        for _ in 0..200 {
            names += 1;
            refused |= !had_room(fs.wait(|| fs.create(&WHO, ROOT, format!("{names:0200}").as_bytes(), &FILE)));
        }
    }
    assert!(!refused, "{names} names, and {} blocks are left", fs.usage().available);
    fs.close().expect("nothing was lost");
}

#[test]
fn preallocating_more_than_there_is_takes_nothing() {
    let device: Arc<dyn BlockDevice> = MemoryDevice::new(64 << 20);
    make(&device);
    let fs = open(&device).expect("it was made");
    let ino = file(&fs, b"a");
    let before = fs.usage();
    for what in [Allocate::Reserve { grow: true }, Allocate::Reserve { grow: false }, Allocate::Zero { grow: true }] {
        assert!(!had_room(fs.allocate(&WHO, ino, 0, 1 << 30, what)));
        assert_eq!(fs.usage(), before, "{what:?}");
    }
    fs.allocate(&WHO, ino, 0, 20 << 20, Allocate::Reserve { grow: false }).expect("there is room");
    // What is there need not be had again.
    fs.allocate(&WHO, ino, 0, (before.available - 512) * BLOCK, Allocate::Reserve { grow: false }).expect("there is room");
    // A truncation to the size that it has gives back what lies behind.
    fs.set_size(&WHO, ino, 0).expect("nothing fails");
    fs.commit().expect("nothing fails");
    assert_eq!(fs.usage().free, before.free);
    assert_sound(&fs, "given back");
}
