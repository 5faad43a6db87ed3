//! Snapshots beside all that moves a file's blocks, on many threads: every block says which file it
//! is of and which of its versions it is, so that a read that brings another file's bytes, bytes of
//! no file, or bytes that were overwritten before the read began, is seen.
//!
//! `SNAPSHOT_SECONDS` has it go on for longer.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use gpunvme_abi::Segment;
use gpunvme_blockdev::{BlockDevice, Io, Region, Request};
use gpunvme_blockdev_testing::MemoryDevice;
use gpunvme_engine::data::resize::Allocate;
use gpunvme_engine::data::{Filesystem, Options, Snapshot};
use gpunvme_engine::error::FsError;
use gpunvme_engine::volume::{Context, NewNode};
use gpunvme_engine::{BLOCK_SIZE, VolumeOptions};
use gpunvme_layout::Timestamp;

use crate::common::{ROOT, Random, Worker, assert_sound, difference, make};

const NOW: Timestamp = Timestamp { seconds: 9, nanoseconds: 0 };
const WHO: Context = Context { uid: 0, gid: 0, now: NOW };
const BLOCK: u64 = BLOCK_SIZE as u64;
/// Blocks of a file.
const BLOCKS: u64 = 64;
const FILES: u64 = 3;
/// What other users' files have in their blocks, as the number of the file.
const FOREIGN: u64 = 999;
/// The file that several threads change at the same time.
const UNRULY: u64 = 888;

/// A file that is read while it changes.
struct Subject {
    ino: u64,
    number: u64,
    blocks: Vec<Versions>,
}

/// Versions of a block, which one thread changes.
#[derive(Default)]
struct Versions {
    /// The last one that was begun.
    begun: AtomicU64,
    /// The last one that was begun and makes it zeros.
    zeroed: AtomicU64,
    /// The last one that is over.
    done: AtomicU64,
}

fn word(file: u64, block: u64, version: u64) -> u64 {
    file << 48 | block << 32 | version
}

fn content(file: u64, from: u64, blocks: u64, version: u64) -> Vec<u8> {
    (from..from + blocks).flat_map(|block| word(file, block, version).to_le_bytes().repeat(BLOCK_SIZE / 8)).collect()
}

/// Writes by one of the ways that there are.
fn write(fs: &Arc<Filesystem>, ino: u64, block: u64, bytes: &[u8], random: &mut Random) -> Result<(), FsError> {
    let way = random.below(4);
    if way == 0 {
        let region = Region::allocate(bytes.len())?;
        region.write_at(0, bytes)?;
        let segments = [Segment { file_offset: block * BLOCK, buffer_offset: 0, len: bytes.len() as u64 }];
        let write = fs.wait(|| fs.plan_direct_write(ino, &segments, &region, NOW))?;
        let (sender, receiver) = channel();
        fs.submit_direct_write(write, move |result| sender.send(result).expect("the receiver waits"));
        receiver.recv().expect("a write is answered")?;
        return Ok(());
    }
    fs.wait(|| fs.write(ino, block * BLOCK, bytes, NOW))?;
    if way > 1 { fs.sync_file(ino) } else { Ok(()) }
}

impl Subject {
    /// Changes a part of the file in one of many ways.
    fn change(&self, fs: &Arc<Filesystem>, version: u64, random: &mut Random) -> Result<(), FsError> {
        let from = random.below(BLOCKS);
        let len = random.below(8.min(BLOCKS - from)) + 1;
        let way = random.below(8);
        let len = if way == 0 { BLOCKS - from } else { len };
        let changed = &self.blocks[from as usize..(from + len) as usize];
        changed.iter().for_each(|block| block.begun.store(version, Ordering::SeqCst));
        if way < 3 {
            changed.iter().for_each(|block| block.zeroed.store(version, Ordering::SeqCst));
        }
        match way {
            0 => {
                fs.wait(|| fs.set_size(&WHO, self.ino, from * BLOCK))?;
                fs.wait(|| fs.set_size(&WHO, self.ino, BLOCKS * BLOCK))?;
            }
            1 => fs.allocate(&WHO, self.ino, from * BLOCK, len * BLOCK, Allocate::Punch)?,
            2 => fs.allocate(&WHO, self.ino, from * BLOCK, len * BLOCK, Allocate::Zero { grow: false })?,
            _ => write(fs, self.ino, from, &content(self.number, from, len, version), random)?,
        }
        changed.iter().for_each(|block| block.done.store(version, Ordering::SeqCst));
        Ok(())
    }

    /// Reads by the snapshot, if it is current, and judges what came. Returns whether it did.
    fn read(&self, fs: &Arc<Filesystem>, kept: &mut Option<Snapshot>, random: &mut Random) -> bool {
        let from = random.below(BLOCKS);
        let len = random.below(8.min(BLOCKS - from)) + 1;
        let blocks = &self.blocks[from as usize..(from + len) as usize];
        let before: Vec<u64> = blocks.iter().map(|block| block.done.load(Ordering::SeqCst)).collect();
        let guard = fs.guard();
        if !kept.as_ref().is_some_and(|snapshot| fs.is_current(snapshot)) {
            *kept = fs.wait(|| fs.snapshot(self.ino, 4096)).expect("it is a file");
        }
        let place = kept.as_ref().and_then(|snapshot| snapshot.find(from * BLOCK..(from + len) * BLOCK));
        let bytes = match place {
            Some(place) => {
                // What it meets on the way to the device.
                if random.below(8) == 0 {
                    std::thread::sleep(Duration::from_micros(random.below(3000)));
                }
                let region = Region::allocate((len * BLOCK) as usize).expect("there is memory");
                let whole = region.span(0..region.len());
                fs.volume().io().run([Request::read(place, [whole])]).expect("the device works");
                let mut bytes = vec![0; region.len()];
                region.read_at(0, &mut bytes).expect("it is ours");
                bytes
            }
            None => fs.read(self.ino, from * BLOCK, (len * BLOCK) as usize).expect("it can be read"),
        };
        drop(guard);
        for (at, found) in bytes.chunks(BLOCK_SIZE).enumerate() {
            let (block, way) = (from + at as u64, if place.is_some() { "by snapshot" } else { "by look-up" });
            let first = u64::from_le_bytes(found[..8].try_into().expect("8 bytes"));
            let is_whole = found.chunks(8).all(|word| word == first.to_le_bytes());
            let (least, versions) = (before[at], &blocks[at]);
            let version = first & 0xffff_ffff;
            let is_its = match first {
                0 => versions.zeroed.load(Ordering::SeqCst) >= least,
                _ => {
                    first == word(self.number, block, version)
                        && (least..=versions.begun.load(Ordering::SeqCst)).contains(&version)
                }
            };
            assert!(is_whole && is_its, "{way}: block {block} of file {}, version {least} or later: {first:#x}", self.number);
        }
        place.is_some()
    }
}

/// Writes in place by the snapshot, if it can be used, while other threads change the file. Returns
/// whether it was.
fn write_in_place(fs: &Arc<Filesystem>, ino: u64, kept: &mut Option<Snapshot>, version: u64, random: &mut Random) -> bool {
    let from = random.below(BLOCKS);
    let len = random.below(8.min(BLOCKS - from)) + 1;
    let _guard = fs.guard();
    if !kept.as_ref().is_some_and(|snapshot| fs.is_current(snapshot)) {
        *kept = fs.wait(|| fs.snapshot(ino, 4096)).expect("it is a file");
    }
    let Some(snapshot) = kept else { return false };
    if random.below(4) == 0 {
        std::thread::sleep(Duration::from_micros(random.below(500)));
    }
    let Some(write) = fs.begin_in_place(snapshot, from * BLOCK..(from + len) * BLOCK, NOW) else { return false };
    if random.below(4) == 0 {
        std::thread::sleep(Duration::from_micros(random.below(3000)));
    }
    let region = Region::allocate((len * BLOCK) as usize).expect("there is memory");
    region.write_at(0, &content(UNRULY, from, len, version)).expect("it is ours");
    let whole = region.span(0..region.len());
    fs.volume().io().run([Request::write(write.device_offset, [whole], false)]).expect("the device works");
    fs.end_in_place(write);
    true
}

fn create(fs: &Arc<Filesystem>, name: &str) -> Result<u64, FsError> {
    let new = NewNode { mode: 0o100644, umask: 0, rdev: 0, target: &[] };
    let ino = fs.wait(|| fs.create(&WHO, ROOT, name.as_bytes(), &new))?.ino;
    fs.hold_file(ino);
    Ok(ino)
}

/// Another user's files, which come and go: they get the blocks that the subjects give up.
fn churn(fs: &Arc<Filesystem>, name: &str, random: &mut Random) -> Result<(), FsError> {
    let ino = create(fs, name)?;
    let blocks = random.below(200) + 1;
    let bytes = content(FOREIGN, 0, blocks, 1);
    let written = write(fs, ino, 0, &bytes, random);
    if written.is_ok() {
        let found = fs.read(ino, 0, bytes.len()).expect("it can be read");
        let differs = difference(&found, &bytes);
        assert!(differs.is_none(), "another's bytes are in {name}, from {differs:?} on");
    }
    fs.let_go_of_file(ino);
    fs.wait(|| fs.unlink(&WHO, ROOT, name.as_bytes()))?;
    while fs.wait(|| fs.reap_step(ino))? {}
    written
}

/// Has the other threads end where one fails.
struct End<'a>(&'a AtomicBool);

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

fn run(seed: u64, discard: bool, seconds: u64) {
    let device: Arc<dyn BlockDevice> = MemoryDevice::new(24 << 20);
    make(&device);
    let options = Options { volume: VolumeOptions { read_only: false, cache: 1 << 20, discard }, write_buffer: 4 << 20 };
    let io = Io::threaded(device.clone(), 2).expect("it has queues");
    let fs = Filesystem::open(io, options, Worker::start()).expect("a new volume can be opened");
    let subject = |number| {
        let ino = create(&fs, &format!("subject {number}")).expect("there is room");
        fs.wait(|| fs.set_size(&WHO, ino, BLOCKS * BLOCK)).expect("it is a file");
        Subject { ino, number, blocks: (0..BLOCKS).map(|_| Versions::default()).collect() }
    };
    let subjects: Vec<Subject> = (1..=FILES).map(subject).collect();
    let unruly = subject(UNRULY);
    // Most of the rest is in use, so that blocks are used again soon.
    let filler = create(&fs, "filler").expect("there is room");
    while fs.volume().usage().available > 900 {
        let size = fs.wait(|| fs.attributes(filler)).expect("it is there").inode.size;
        fs.wait(|| fs.write(filler, size, &[0xee; 1 << 20], NOW)).expect("there is room");
        fs.sync_file(filler).expect("nothing fails");
    }
    fs.let_go_of_file(filler);
    let in_place = AtomicU64::new(0);
    let (end, over, by_snapshot) = (Instant::now() + Duration::from_secs(seconds), AtomicBool::new(false), AtomicU64::new(0));
    let full = |result: Result<(), FsError>| assert!(matches!(result, Ok(()) | Err(FsError::NoSpace)), "{result:?}");
    let until = |act: &mut dyn FnMut(u64, &mut Random), number: u64| {
        let _end = End(&over);
        let mut random = Random(seed << 8 | number);
        let mut rounds = 1..;
        while !over.load(Ordering::Relaxed) && Instant::now() < end {
            act(rounds.next().expect("it counts on"), &mut random);
        }
    };
    let (fs, by_snapshot, in_place, full, until) = (&fs, &by_snapshot, &in_place, &full, &until);
    std::thread::scope(|scope| {
        for subject in subjects.iter().chain([&unruly]) {
            scope.spawn(|| until(&mut |round, random| full(subject.change(fs, round, random)), subject.number));
        }
        for number in 10..12 {
            scope.spawn(move || until(&mut |_, random| full(churn(fs, &format!("churn {number}"), random)), number));
        }
        for number in 20..22 {
            let subjects = &subjects;
            scope.spawn(move || {
                let mut kept: Vec<Option<Snapshot>> = subjects.iter().map(|_| None).collect();
                let mut read = |_, random: &mut Random| {
                    let at = random.below(FILES) as usize;
                    by_snapshot.fetch_add(subjects[at].read(fs, &mut kept[at], random).into(), Ordering::Relaxed);
                };
                until(&mut read, number);
            });
        }
        for number in 24..26 {
            let ino = unruly.ino;
            scope.spawn(move || {
                let mut kept = None;
                let mut write = |round, random: &mut Random| {
                    in_place.fetch_add(write_in_place(fs, ino, &mut kept, round, random).into(), Ordering::Relaxed);
                };
                until(&mut write, number);
            });
        }
        let keep = move |round, _: &mut Random| {
            fs.commit().expect("nothing fails");
            fs.volume().discard_freed(|| true);
            match round % 16 {
                0 => fs.write_back().expect("nothing fails"),
                1 => fs.volume().checkpoint().expect("nothing fails"),
                2 if discard => drop(fs.volume().trim(0, u64::MAX, 0).expect("nothing fails")),
                _ => std::thread::sleep(Duration::from_millis(1)),
            }
        };
        scope.spawn(move || until(&mut { keep }, 30));
    });
    let found = by_snapshot.load(Ordering::Relaxed);
    let in_place = in_place.load(Ordering::Relaxed);
    println!("seed {seed}, discard {discard}: {found} reads and {in_place} writes by snapshot");
    assert!(found > 100 && in_place > 30, "{found} reads and {in_place} writes by snapshot");
    let bytes = fs.read(unruly.ino, 0, (BLOCKS * BLOCK) as usize).expect("it can be read");
    for (block, found) in bytes.chunks(BLOCK_SIZE).enumerate() {
        let first = u64::from_le_bytes(found[..8].try_into().expect("8 bytes"));
        assert!(first == 0 || first >> 32 == word(UNRULY, block as u64, 0) >> 32, "block {block} is another's: {first:#x}");
    }
    fs.let_go_of_file(unruly.ino);
    subjects.iter().for_each(|subject| fs.let_go_of_file(subject.ino));
    fs.write_back().expect("nothing fails");
    assert_sound(fs, &format!("seed {seed}"));
}

#[test]
fn a_snapshot_never_brings_bytes_of_another_file_or_of_an_earlier_version() {
    let seconds = std::env::var("SNAPSHOT_SECONDS").map_or(2u64, |seconds| seconds.parse().expect("a number"));
    let seed = std::env::var("SNAPSHOT_SEED").map_or(1u64, |seed| seed.parse().expect("a number"));
    run(seed, false, seconds.div_ceil(2));
    run(seed, true, seconds.div_ceil(2));
}
