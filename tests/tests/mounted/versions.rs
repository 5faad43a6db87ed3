//! Rings, and every other way to read, beside all that changes files, on many threads: every word
//! of a file says whose it is and how old, so that a read that brings another user's bytes, or
//! bytes that were overwritten before it began, is seen.
//!
//! `VERSIONS_SECONDS` has it go on for longer.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use gpunvme::{Attached, Mount, Operation, Ring, Shared};
use gpunvme_tests::direct::Buffer;
use gpunvme_tests::mounted::{Image, Mounted};
use gpunvme_tests::rings::{attach, bytes_of, shared, wait_for};
use gpunvme_tests::{needs_mount, tree};
use rustix::fs::FallocateFlags;
use rustix::mm::{MapFlags, MsyncFlags, ProtFlags};

const BLOCK: u64 = 4096;
/// Blocks of a file.
const BLOCKS: u64 = 64;
const FILES: u64 = 3;
/// Blocks that are written, or read in one piece, at the most.
const PIECE: u64 = 8;
/// Reads of a ring that are in flight at once.
const READS: u64 = 16;
/// What other users' files have in their words, as the number of the file.
const FOREIGN: u64 = 999;

struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 += 1;
        u64::from_le_bytes(tree::pattern(self.0, 8).try_into().unwrap()) % limit
    }

    /// Some blocks of a file: the first one, and how many.
    fn piece(&mut self) -> (u64, u64) {
        let from = self.below(BLOCKS);
        (from, self.below(PIECE.min(BLOCKS - from)) + 1)
    }
}

/// A file that is read while it changes.
struct Subject {
    path: PathBuf,
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

fn content(file: u64, from: u64, blocks: u64, version: u64) -> Vec<u8> {
    (from..from + blocks).flat_map(|block| (file << 48 | block << 32 | version).to_le_bytes().repeat(512)).collect()
}

/// Memory at an address that a direct transfer of the kernel can use.
struct Aligned(Vec<u8>, usize);

impl Aligned {
    fn new(bytes: &[u8]) -> Aligned {
        let mut memory = vec![0; bytes.len() + BLOCK as usize];
        let at = memory.as_ptr().align_offset(BLOCK as usize);
        memory[at..at + bytes.len()].copy_from_slice(bytes);
        Aligned(memory, at)
    }

    fn bytes(&mut self) -> &mut [u8] {
        let len = self.0.len() - BLOCK as usize;
        &mut self.0[self.1..self.1 + len]
    }
}

/// What a thread has open of a file.
struct Hands {
    file: File,
    direct: File,
    attached: Attached,
    ring: Ring,
    memory: Arc<Shared>,
    buffer: Buffer,
}

impl Hands {
    fn new(volume: &Mounted, subject: &Subject) -> Hands {
        let open = |flags| OpenOptions::new().read(true).write(true).custom_flags(flags).open(&subject.path).unwrap();
        let mount = Mount::open(volume.root()).unwrap();
        let ring = Ring::new(&mount, 64).unwrap();
        let len = READS * PIECE * BLOCK;
        let (file, direct) = (open(0), open(libc::O_DIRECT));
        let (attached, memory) = (attach(&ring, &subject.path), shared(&mount, len));
        Hands { buffer: Buffer::new(&file, PIECE * BLOCK), file, direct, attached, ring, memory }
    }
}

impl Subject {
    /// Changes a part of the file by one of many ways.
    fn change(&self, hands: &mut Hands, version: u64, random: &mut Random) {
        let (from, len) = random.piece();
        let way = random.below(10);
        let len = if way == 0 { BLOCKS - from } else { len };
        let changed = &self.blocks[from as usize..(from + len) as usize];
        changed.iter().for_each(|block| block.begun.store(version, Ordering::SeqCst));
        if way < 3 {
            changed.iter().for_each(|block| block.zeroed.store(version, Ordering::SeqCst));
        }
        let (at, bytes) = (from * BLOCK, content(self.number, from, len, version));
        let allocate = |flags| rustix::fs::fallocate(&hands.file, flags | FallocateFlags::KEEP_SIZE, at, len * BLOCK).unwrap();
        match way {
            0 => [at, BLOCKS * BLOCK].iter().for_each(|size| hands.file.set_len(*size).unwrap()),
            1 => allocate(FallocateFlags::PUNCH_HOLE),
            2 => allocate(FallocateFlags::ZERO_RANGE),
            3 => hands.file.write_all_at(&bytes, at).unwrap(),
            4 => {
                hands.file.write_all_at(&bytes, at).unwrap();
                hands.file.sync_data().unwrap();
            }
            5 => hands.direct.write_all_at(Aligned::new(&bytes).bytes(), at).unwrap(),
            6 => {
                hands.buffer.put(0, &bytes);
                hands.buffer.write(&hands.file, at, bytes.len() as u64).unwrap();
            }
            7 => store(&hands.file, at, &bytes, random.below(2) == 0),
            _ => {
                hands.memory.copy_in(0, &bytes);
                hands.ring.push(&Operation::write(&hands.attached, at, &hands.memory, 0, bytes.len() as u64)).unwrap();
                wait_for(&mut hands.ring, 1).remove(0).result.unwrap();
            }
        }
        changed.iter().for_each(|block| block.done.store(version, Ordering::SeqCst));
    }

    /// Versions of some blocks that a read that begins now must bring, or later ones.
    fn least(&self, from: u64, len: u64) -> Vec<u64> {
        self.blocks[from as usize..(from + len) as usize].iter().map(|block| block.done.load(Ordering::SeqCst)).collect()
    }

    /// Judges what a read brought that began when `least` was asked.
    fn judge(&self, way: &str, from: u64, least: &[u64], bytes: &[u8]) {
        for ((block, least), found) in (from..).zip(least).zip(bytes.chunks(BLOCK as usize)) {
            let versions = &self.blocks[block as usize];
            let mut last = None;
            for word in found.chunks_exact(8).map(|word| u64::from_le_bytes(word.try_into().unwrap())) {
                if last.replace(word) == Some(word) {
                    continue;
                }
                let version = word & 0xffff_ffff;
                let is_its = match word {
                    0 => versions.zeroed.load(Ordering::SeqCst) >= *least,
                    _ => {
                        word >> 32 == self.number << 16 | block
                            && (*least..=versions.begun.load(Ordering::SeqCst)).contains(&version)
                    }
                };
                assert!(is_its, "{way}: block {block} of file {}, version {least} or later: {word:#x}", self.number);
            }
        }
    }

    /// Reads by one of many ways.
    fn read(&self, hands: &mut Hands, random: &mut Random, only_by_ring: bool) {
        let (from, len) = random.piece();
        let (at, least, mut bytes) = (from * BLOCK, self.least(from, len), vec![0; (len * BLOCK) as usize]);
        match if only_by_ring { 9 } else { random.below(8) } {
            0 => {
                let count = hands.file.read_at(&mut bytes, at).unwrap();
                bytes.truncate(count);
            }
            1 => {
                let mut aligned = Aligned::new(&bytes);
                let count = hands.direct.read_at(aligned.bytes(), at).unwrap();
                bytes.copy_from_slice(aligned.bytes());
                bytes.truncate(count);
            }
            2 => {
                let moved = hands.buffer.read(&hands.file, at, len * BLOCK).unwrap();
                bytes = hands.buffer.get(0, (moved.host + moved.hole + moved.edge + moved.bounce) as usize);
            }
            _ => {
                let pieces: Vec<_> =
                    (0..READS).map(|_| random.piece()).map(|(from, len)| (from, len, self.least(from, len))).collect();
                for (number, (from, len, _)) in (0..).zip(&pieces) {
                    let to = number * PIECE * BLOCK;
                    let read = Operation::read(&hands.attached, from * BLOCK, &hands.memory, to, len * BLOCK);
                    hands.ring.push(&read.tagged(number)).unwrap();
                }
                for completed in wait_for(&mut hands.ring, pieces.len()) {
                    let (from, _, least) = &pieces[completed.user_data as usize];
                    let count = completed.result.unwrap().bytes();
                    let found = bytes_of(&hands.memory, completed.user_data * PIECE * BLOCK, count);
                    self.judge("ring", *from, least, &found);
                }
                return;
            }
        }
        self.judge("another way", from, &least, &bytes);
    }
}

/// Writes through a mapping.
fn store(file: &File, at: u64, bytes: &[u8], sync: bool) {
    let flags = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new mapping, which is unmapped below; the file is that long, and only the thread
    // that stores makes it shorter.
    unsafe {
        let mapped = rustix::mm::mmap(std::ptr::null_mut(), bytes.len(), flags, MapFlags::SHARED, file, at).unwrap();
        std::ptr::copy_nonoverlapping(bytes.as_ptr(), mapped.cast(), bytes.len());
        if sync {
            rustix::mm::msync(mapped, bytes.len(), MsyncFlags::SYNC).unwrap();
        }
        rustix::mm::munmap(mapped, bytes.len()).unwrap();
    }
}

/// Another user's file, which comes and goes: it gets the blocks that the subjects give up.
fn churn(volume: &Mounted, number: u64, random: &mut Random) {
    let path = volume.path(format!("churn {number}"));
    let file = File::create(&path).unwrap();
    let written = file.write_all_at(&content(FOREIGN, 0, random.below(200) + 1, 1), 0).and_then(|()| match random.below(2) {
        0 => file.sync_all(),
        _ => Ok(()),
    });
    drop(file);
    fs::remove_file(path).unwrap();
    assert!(written.is_ok() || written.unwrap_err().raw_os_error() == Some(libc::ENOSPC));
}

/// Has the other threads end where one fails.
struct End<'a>(&'a AtomicBool);

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

fn run(seed: u64, options: &str, seconds: u64) {
    let volume = Image::formatted_with(64 << 20).mount_with(options);
    let subject = |number| {
        let path = volume.path(format!("subject {number}"));
        File::create(&path).unwrap().set_len(BLOCKS * BLOCK).unwrap();
        Subject { path, number, blocks: (0..BLOCKS).map(|_| Versions::default()).collect() }
    };
    let subjects: Vec<Subject> = (1..=FILES).map(subject).collect();
    // Most of the rest is in use, so that blocks are used again soon.
    let filler = File::create(volume.path("filler")).unwrap();
    while rustix::fs::statvfs(volume.root()).unwrap().f_bavail > 1500 {
        filler.write_all_at(&[0xee; 1 << 20], filler.metadata().unwrap().len()).unwrap();
        filler.sync_all().unwrap();
    }
    let (end, over) = (Instant::now() + Duration::from_secs(seconds), AtomicBool::new(false));
    let until = |number: u64, act: &mut dyn FnMut(u64, &mut Random)| {
        let _end = End(&over);
        let mut random = Random(seed << 40 | number << 32);
        let mut rounds = 1..;
        while !over.load(Ordering::Relaxed) && Instant::now() < end {
            act(rounds.next().unwrap(), &mut random);
        }
    };
    let (volume, until) = (&volume, &until);
    std::thread::scope(|scope| {
        for subject in &subjects {
            scope.spawn(move || {
                let mut hands = Hands::new(volume, subject);
                until(subject.number, &mut |round, random| subject.change(&mut hands, round, random));
            });
            scope.spawn(move || {
                let mut hands = Hands::new(volume, subject);
                // The last one is read by rings alone: the kernel has no page of it but for writes.
                let only_by_ring = subject.number == FILES;
                until(subject.number + 10, &mut |_, random| subject.read(&mut hands, random, only_by_ring));
            });
        }
        for number in 20..22 {
            scope.spawn(move || until(number, &mut |_, random| churn(volume, number, random)));
        }
        let trim = |_, _: &mut Random| {
            let trimmed = gpunvme_tests::programs::command("gpunvme").arg("trim").arg(volume.root()).output().unwrap();
            assert!(trimmed.status.success(), "{trimmed:?}");
            std::thread::sleep(Duration::from_millis(100));
        };
        if options.contains("discard") {
            scope.spawn(move || until(30, &mut { trim }));
        }
    });
}

#[test]
fn no_way_to_read_brings_bytes_of_another_file_or_of_an_earlier_version() {
    needs_mount!();
    let seconds = std::env::var("VERSIONS_SECONDS").map_or(4u64, |seconds| seconds.parse().unwrap());
    let seed = std::env::var("VERSIONS_SEED").map_or(1u64, |seed| seed.parse().unwrap());
    run(seed, "commit=1", seconds.div_ceil(2));
    run(seed, "discard,commit=1", seconds.div_ceil(2));
}
