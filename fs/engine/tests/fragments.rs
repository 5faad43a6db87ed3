//! Writes that meet many extents when they are mapped: they become part of the file piece by piece,
//! and completely.

use std::sync::{Arc, OnceLock, mpsc};

use gpunvme_abi::Segment;
use gpunvme_blockdev::{BlockDevice, Io, Region};
use gpunvme_blockdev_testing::MemoryDevice;
use gpunvme_engine::VolumeOptions;
use gpunvme_engine::data::direct::DirectWrite;
use gpunvme_engine::data::resize::Allocate;
use gpunvme_engine::data::{Filesystem, Inline, Options};
use gpunvme_engine::volume::{Context, NewNode};
use gpunvme_layout::Timestamp;
use parking_lot::Mutex;

use crate::common::{ROOT, assert_sound, make, open, stepped_by};

const NOW: Timestamp = Timestamp { seconds: 1, nanoseconds: 0 };
const WHO: Context = Context { uid: 0, gid: 0, now: NOW };
const BLOCK: u64 = 4096;

fn device(len: u64) -> Arc<dyn BlockDevice> {
    let device: Arc<dyn BlockDevice> = MemoryDevice::new(len);
    make(&device);
    device
}

/// Opens a volume with as much memory for metadata as a long file needs.
fn roomy(device: &Arc<dyn BlockDevice>) -> Arc<Filesystem> {
    let options = Options { volume: VolumeOptions { read_only: false, cache: 32 << 20, discard: false }, write_buffer: 4 << 20 };
    Filesystem::open(Io::inline(device.clone()).expect("a queue"), options, Arc::new(Inline)).expect("it was just made")
}

fn file(fs: &Arc<Filesystem>, name: &[u8]) -> u64 {
    let new = NewNode { mode: 0o100644, umask: 0, rdev: 0, target: &[] };
    let ino = fs.wait(|| fs.create(&WHO, ROOT, name, &new)).expect("there is room").ino;
    fs.hold_file(ino);
    ino
}

fn filled(len: u64, byte: u8) -> Arc<Region> {
    let region = Region::allocate(len as usize).expect("memory");
    region.write_at(0, &vec![byte; len as usize]).expect("inside");
    region
}

fn plan(fs: &Arc<Filesystem>, ino: u64, offset: u64, memory: &Arc<Region>) -> DirectWrite {
    let segment = Segment { file_offset: offset, buffer_offset: 0, len: memory.len() as u64 };
    fs.wait(|| fs.plan_direct_write(ino, &[segment], memory, NOW)).expect("there is room")
}

fn submit(fs: &Arc<Filesystem>, write: DirectWrite) {
    let (sender, receiver) = mpsc::channel();
    fs.submit_direct_write(write, move |result| sender.send(result.map(drop)).expect("it is waited for"));
    receiver.recv().expect("a write is answered").expect("the device works");
}

#[test]
fn a_long_write_to_preallocated_blocks_replaces_what_thousands_of_small_ones_left_of_them() {
    const PIECES: u64 = 16_000;
    let device = device(256 << 20);
    let fs = roomy(&device);
    let ino = file(&fs, b"a");
    let len = PIECES * 2 * BLOCK;
    fs.allocate(&WHO, ino, 0, len, Allocate::Reserve { grow: true }).unwrap();
    let long = filled(len, 1);
    let write = plan(&fs, ino, 0, &long);
    let small = filled(BLOCK, 2);
    for piece in 0..PIECES {
        submit(&fs, plan(&fs, ino, piece * 2 * BLOCK, &small));
    }
    submit(&fs, write);
    assert!(fs.read(ino, 0, len as usize).unwrap().iter().all(|byte| matches!(byte, 1 | 2)));
    let (mappings, _) = fs.wait(|| fs.resolve(ino, 0, len, usize::MAX)).unwrap();
    assert!(mappings.iter().all(|mapping| !mapping.extent.unwritten), "blocks of the long one read as zeros later");
    fs.close().unwrap();
    assert_sound(&open(&device).unwrap(), "after a long write");
}

#[test]
fn a_long_write_into_a_hole_replaces_what_small_ones_mapped_there_meanwhile() {
    const LEN: u64 = 1 << 20;
    let device = device(64 << 20);
    let fs = open(&device).unwrap();
    let ino = file(&fs, b"a");
    fs.wait(|| fs.set_size(&WHO, ino, 2 * LEN)).unwrap();
    let (long, small) = (filled(LEN, 1), filled(BLOCK, 2));
    let used = fs.usage().free;
    let write = plan(&fs, ino, 0, &long);
    for piece in 0..64 {
        submit(&fs, plan(&fs, ino, piece * 4 * BLOCK, &small));
    }
    submit(&fs, write);
    assert!(fs.read(ino, 0, LEN as usize).unwrap().iter().all(|byte| *byte == 1), "the last that was mapped counts");
    assert_eq!(used - fs.usage().free, LEN / BLOCK, "what it replaced is free");
    fs.close().unwrap();
    assert_sound(&open(&device).unwrap(), "after overlapping writes");
}

#[test]
fn a_batch_replaces_the_many_extents_that_were_preallocated_for_its_blocks_meanwhile() {
    const LEN: u64 = 2 << 20;
    let device = device(32 << 20);
    {
        // Nothing is free but every other block, and a chunk.
        let fs = open(&device).unwrap();
        let ino = file(&fs, b"full");
        let mut len = 0;
        while fs.wait(|| fs.write(ino, len, &[9; BLOCK as usize], NOW)).is_ok() {
            len += BLOCK;
        }
        fs.sync_file(ino).unwrap();
        for block in (0..len / BLOCK).step_by(2) {
            fs.allocate(&WHO, ino, block * BLOCK, BLOCK, Allocate::Punch).unwrap();
        }
        fs.let_go_of_file(ino);
        fs.close().unwrap();
    }
    let shared: Arc<OnceLock<(Arc<Filesystem>, u64)>> = Arc::default();
    let rounds = Mutex::new(0);
    let writer = {
        let shared = shared.clone();
        move |_: usize| {
            // Of the two rounds of a flush, the first writes a byte, for the second to have
            // something to wait for. The second writes the batch, for which no flush waits any
            // more.
            if let Some((fs, ino)) = shared.get()
                && let Some(mut round) = rounds.try_lock()
            {
                *round += 1;
                match *round {
                    1 => fs.wait(|| fs.write(*ino, 8 << 20, &[3; 1], NOW)).unwrap(),
                    2 => {
                        fs.wait(|| fs.write(*ino, LEN, &vec![1; LEN as usize], NOW)).unwrap();
                        fs.write_behind(*ino);
                    }
                    _ => {}
                }
            }
            0
        }
    };
    let fs = stepped_by(&device, writer);
    let ino = file(&fs, b"a");
    fs.wait(|| fs.write(ino, 8 << 20, &[3; 1], NOW)).unwrap();
    assert!(shared.set((fs.clone(), ino)).is_ok());
    fs.allocate(&WHO, ino, 0, 2 * LEN, Allocate::Reserve { grow: false }).unwrap();
    fs.sync_file(ino).expect("nothing is lost");
    let (mappings, _) = fs.wait(|| fs.resolve(ino, LEN / BLOCK, 2 * LEN / BLOCK, usize::MAX)).unwrap();
    assert!(mappings.iter().all(|mapping| !mapping.extent.unwritten));
    assert!(fs.read(ino, LEN, LEN as usize).unwrap().iter().all(|byte| *byte == 1));
    fs.close().unwrap();
    assert_sound(&open(&device).unwrap(), "after a batch over preallocated blocks");
}

#[test]
fn fallocate_waits_for_the_direct_writes_to_its_blocks_that_are_in_flight() {
    let grow = false;
    for (what, preallocated) in [(Allocate::Punch, true), (Allocate::Zero { grow }, true), (Allocate::Reserve { grow }, false)] {
        let device = device(32 << 20);
        let shared: Arc<OnceLock<(Arc<Filesystem>, u64)>> = Arc::default();
        let (rounds, over) = (Mutex::new(0), Arc::new(OnceLock::new()));
        let writer = {
            let (shared, over) = (shared.clone(), over.clone());
            move |_: usize| {
                // As above, in the second round of the flush that it begins with: so this thread is
                // not the one that waits for the write.
                if let Some((fs, ino)) = shared.get()
                    && let Some(mut round) = rounds.try_lock()
                {
                    *round += 1;
                    match *round {
                        1 => fs.wait(|| fs.write(*ino, 8 << 20, &[3; 1], NOW)).unwrap(),
                        2 => {
                            let over = over.clone();
                            let write = plan(fs, *ino, 0, &filled(4 * BLOCK, 2));
                            fs.submit_direct_write(write, move |result| {
                                over.set(result.is_ok()).expect("it ends once");
                            });
                        }
                        _ => {}
                    }
                }
                0
            }
        };
        let fs = stepped_by(&device, writer);
        let ino = file(&fs, b"a");
        if preallocated {
            fs.allocate(&WHO, ino, 0, 4 * BLOCK, Allocate::Reserve { grow: true }).unwrap();
        }
        fs.wait(|| fs.write(ino, 8 << 20, &[3; 1], NOW)).unwrap();
        assert!(shared.set((fs.clone(), ino)).is_ok());
        fs.allocate(&WHO, ino, 0, 4 * BLOCK, what).unwrap();
        // Else its blocks could be another file's by the time when it maps them.
        assert_eq!(over.get(), Some(&true), "{what:?}: the write is in flight");
        let found = fs.read(ino, 0, 4 * BLOCK as usize).unwrap();
        let expected = if what == (Allocate::Reserve { grow }) { 2 } else { 0 };
        assert!(found.iter().all(|byte| *byte == expected), "{what:?}");
        fs.close().unwrap();
        assert_sound(&open(&device).unwrap(), "after fallocate beside a write");
    }
}
