//! Several threads at once on a real file through io_uring, each below a directory of its own and
//! compared with its own model, with commits, checkpoints and write-back by all of them in between.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use crate::common::{Pair, ROOT, Random, Worker, assert_sound, make};
use gpunvme_blockdev::{BlockDevice, Io, OpenMode};
use gpunvme_blockdev_testing::MemoryDevice;
use gpunvme_engine::data::{Filesystem, Options};
use gpunvme_engine::volume::{Context, NewNode};
use gpunvme_engine::{VolumeOptions, error::FsError};
use gpunvme_layout::Timestamp;

fn open(path: &str) -> Result<Arc<Filesystem>, FsError> {
    let io = Io::threaded(gpunvme_blockdev::open(path, OpenMode::ReadWrite)?, 2)?;
    // Little memory: blocks are evicted and pages run short all the time.
    let options = Options { volume: VolumeOptions { read_only: false, cache: 1 << 20, discard: false }, write_buffer: 4 << 20 };
    Filesystem::open(io, options, Worker::start())
}

fn run(seed: u64, bytes: u64) {
    let image = tempfile::NamedTempFile::new_in(env!("CARGO_TARGET_TMPDIR")).expect("there is room on the disk");
    image.as_file().set_len(bytes).expect("the size is possible");
    let path = image.path().to_str().expect("the path is UTF-8");
    make(&gpunvme_blockdev::open(path, OpenMode::ReadWrite).expect("no other process has it"));
    let fs = open(path).expect("a new volume can be opened");
    let context = Context { uid: 0, gid: 0, now: Timestamp { seconds: 1, nanoseconds: 0 } };
    let pairs: Vec<Pair> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..4u64)
            .map(|thread| {
                let fs = fs.clone();
                scope.spawn(move || {
                    let new = NewNode { mode: 0o040755, umask: 0, rdev: 0, target: &[] };
                    let name = thread.to_string();
                    let dir = fs.wait(|| fs.create(&context, ROOT, name.as_bytes(), &new)).expect("there is room").ino;
                    let mut pair = Pair::below(fs, dir);
                    let mut random = Random(seed * 100 + thread);
                    for _ in 0..700 {
                        pair.step(&mut random);
                    }
                    pair.compare();
                    pair
                })
            })
            .collect();
        threads.into_iter().map(|t| t.join().expect("no thread fails")).collect()
    });
    fs.close().expect("nothing fails");
    drop(fs);
    let models: Vec<_> = pairs.into_iter().map(|pair| pair.model).collect();
    let fs = open(path).expect("it was closed cleanly");
    for model in models {
        let dir = *model.nodes.keys().min().expect("its own directory");
        let mut pair = Pair::below(fs.clone(), dir);
        pair.model = model;
        pair.compare();
    }
    assert_sound(&fs, &format!("seed {seed}"));
}

#[test]
fn threads_that_work_side_by_side_do_not_disturb_each_other() {
    for seed in 0..3 {
        println!("seed {seed}");
        run(seed, 512 << 20);
    }
}

#[test]
fn threads_that_share_too_little_space_lose_nothing() {
    for seed in 10..13 {
        println!("seed {seed}");
        run(seed, 32 << 20);
    }
}

#[test]
fn a_listing_shows_no_file_as_it_was_before_it_was_written_back() {
    const OTHERS: u64 = 1000;
    const ROUNDS: u64 = 300;
    let device: Arc<dyn BlockDevice> = MemoryDevice::new(64 << 20);
    make(&device);
    let fs = crate::common::open(&device).expect("a new volume can be opened");
    let context = Context { uid: 0, gid: 0, now: Timestamp { seconds: 1, nanoseconds: 0 } };
    let new = NewNode { mode: 0o100644, umask: 0, rdev: 0, target: &[] };
    let create = |n: u64| fs.wait(|| fs.create(&context, ROOT, n.to_string().as_bytes(), &new)).expect("there is room").ino;
    let inos: Vec<u64> = (0..=OTHERS).map(create).collect();
    // Of the last it is seen long after it was looked up whether it is in memory.
    let ino = inos[OTHERS as usize];
    let (written, over) = (AtomicU64::new(0), AtomicBool::new(false));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for round in 0..ROUNDS {
                fs.wait(|| fs.write(ino, round * 100, &[1; 100], context.now)).expect("there is room");
                written.store((round + 1) * 100, Ordering::Release);
                // Listings begin while it is in memory, and end when it is not any more.
                std::thread::sleep(Duration::from_micros(500));
                fs.sync_file(ino).expect("nothing fails");
                std::thread::sleep(Duration::from_micros(500));
            }
            over.store(true, Ordering::Release);
        });
        while !over.load(Ordering::Acquire) {
            let least = written.load(Ordering::Acquire);
            let listed = fs.wait(|| fs.all_attributes(&inos).into_iter().collect::<Result<Vec<_>, _>>());
            let size = listed.expect("nothing fails")[OTHERS as usize].inode.size;
            assert!(size >= least, "{size} bytes are listed, {least} were there before");
        }
    });
}

#[test]
fn neighbours_in_a_block_that_is_written_back_meanwhile_keep_their_bytes() {
    const THREADS: u64 = 4;
    const PIECES: u64 = 400;
    const LEN: u64 = 1000;
    let image = tempfile::NamedTempFile::new_in(env!("CARGO_TARGET_TMPDIR")).expect("there is room on the disk");
    image.as_file().set_len(64 << 20).expect("the size is possible");
    let path = image.path().to_str().expect("the path is UTF-8");
    make(&gpunvme_blockdev::open(path, OpenMode::ReadWrite).expect("no other process has it"));
    let fs = open(path).expect("a new volume can be opened");
    let context = Context { uid: 0, gid: 0, now: Timestamp { seconds: 1, nanoseconds: 0 } };
    let new = NewNode { mode: 0o100644, umask: 0, rdev: 0, target: &[] };
    for round in 0..40u64 {
        let ino = fs.wait(|| fs.create(&context, ROOT, round.to_string().as_bytes(), &new)).expect("there is room").ino;
        fs.hold_file(ino);
        let piece = |n: u64| vec![1 + (n % 250) as u8; LEN as usize];
        std::thread::scope(|scope| {
            for thread in 0..THREADS {
                let fs = &fs;
                scope.spawn(move || {
                    for n in (thread..PIECES).step_by(THREADS as usize) {
                        fs.wait(|| fs.write(ino, n * LEN, &piece(n), context.now)).expect("there is room");
                        if n % 3 == 0 {
                            fs.flush_file(ino).expect("nothing fails");
                        }
                    }
                });
            }
        });
        for n in 0..PIECES {
            let read = fs.read(ino, n * LEN, LEN as usize).expect("nothing fails");
            assert!(read == piece(n), "round {round}: piece {n} is not what was written");
        }
        fs.let_go_of_file(ino);
    }
}
