//! All kinds of access at once on the same few files: a read, by whichever way, sees bytes of that
//! file at that place, or zeros, and never those of another file or place. Blocks that are freed
//! and used again under a transfer would break this.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};

use gpunvme_abi::Command;
use gpunvme_tests::direct::Buffer;
use gpunvme_tests::mounted::{Image, Mounted};
use gpunvme_tests::{needs_mount, tree};
use rustix::fs::FallocateFlags;

const FILES: u64 = 4;
const LEN: u64 = 4 << 20;
const SECTOR: u64 = 512;
/// The largest piece that is moved at once.
const PIECE: u64 = 512 << 10;
const ROUNDS: u64 = 250;

/// One thing to do on a volume, with a buffer to do it with; the seed decides where.
type Work = fn(&Mounted, &Buffer, u64);

/// What any part of a file holds, if it holds anything: each 8 bytes say where they belong.
fn stamp(file: u64, offset: u64, len: u64) -> Vec<u8> {
    (offset / 8..(offset + len) / 8).flat_map(|word| (file << 56 | 1 << 48 | word).to_le_bytes()).collect()
}

fn assert_in_place(who: &str, file: u64, offset: u64, bytes: &[u8]) {
    for (word, bytes) in (offset / 8..).zip(bytes.chunks_exact(8)) {
        let found = u64::from_le_bytes(bytes.try_into().unwrap());
        let right = file << 56 | 1 << 48 | word;
        assert!(
            found == 0 || found == right,
            "{who}: at {} of file {file} lies what belongs to {} of file {}",
            word * 8,
            (found & 0xffff_ffff_ffff) * 8,
            found >> 56
        );
    }
}

/// A place in a file, in sectors, that a seed decides.
fn place(seed: u64) -> (u64, u64, u64) {
    let bytes = tree::pattern(seed, 24);
    let number = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
    let offset = number(8) % (LEN / SECTOR) * SECTOR;
    let len = (1 + number(16) % (PIECE / SECTOR)) * SECTOR;
    (number(0) % FILES, offset, len.min(LEN - offset))
}

/// Opens a file that another thread may have unlinked a moment ago.
fn open(volume: &Mounted, file: u64, flags: i32) -> File {
    let path = volume.path(format!("{file}"));
    OpenOptions::new().read(true).write(true).create(true).truncate(false).custom_flags(flags).open(path).unwrap()
}

#[test]
fn every_way_in_at_once_mixes_nothing_up() {
    needs_mount!();
    // More loops than wait at once: some stand aside.
    let volume = Image::formatted_with(64 << 20).mount_with("threads=16");
    let workers: [(&str, Work); 9] = [
        ("read", |volume, _, seed| {
            let (file, offset, len) = place(seed);
            let mut bytes = vec![0; len as usize];
            let len = open(volume, file, 0).read_at(&mut bytes, offset).unwrap();
            assert_in_place("read", file, offset, &bytes[..len]);
        }),
        ("write", |volume, _, seed| {
            let (file, offset, len) = place(seed);
            open(volume, file, 0).write_all_at(&stamp(file, offset, len), offset).unwrap();
        }),
        ("READ", direct_read),
        ("READ too", direct_read),
        ("WRITE", direct_write),
        ("WRITE too", direct_write),
        ("punch and zero", |volume, _, seed| {
            let (file, offset, len) = place(seed);
            let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            let mode = if seed.is_multiple_of(2) { punch } else { FallocateFlags::ZERO_RANGE };
            rustix::fs::fallocate(open(volume, file, 0), mode, offset, len).unwrap();
        }),
        ("truncate and unlink", |volume, _, seed| {
            let (file, offset, _) = place(seed);
            match seed % 3 {
                0 => open(volume, file, 0).set_len(offset).unwrap(),
                1 => drop(fs::remove_file(volume.path(format!("{file}")))),
                _ => drop(open(volume, file, libc::O_TRUNC)),
            }
        }),
        ("fsync", |volume, _, seed| open(volume, seed % FILES, 0).sync_all().unwrap()),
    ];
    std::thread::scope(|scope| {
        for (number, (name, work)) in workers.into_iter().enumerate() {
            let volume = &volume;
            std::thread::Builder::new()
                .name(name.to_owned())
                .spawn_scoped(scope, move || {
                    let buffer = Buffer::new(File::open(volume.root()).unwrap(), PIECE);
                    for round in 0..ROUNDS {
                        work(volume, &buffer, number as u64 * ROUNDS + round);
                    }
                })
                .unwrap();
        }
    });
    // What is left is right as well, now and after a remount.
    let check = |volume: &Mounted| {
        for file in 0..FILES {
            let bytes = fs::read(volume.path(format!("{file}"))).unwrap_or_default();
            assert_in_place("the end", file, 0, &bytes);
        }
    };
    check(&volume);
    check(&volume.remount());
}

fn direct_read(volume: &Mounted, buffer: &Buffer, seed: u64) {
    let (file, offset, len) = place(seed);
    let opened = open(volume, file, 0);
    // Whatever lies in the buffer already must not be taken for what was read.
    buffer.put(0, &vec![0xff; len as usize]);
    let done = buffer.transfer(Command::Read, &opened, &[(offset, 0, len)]).unwrap();
    assert_in_place("READ", file, offset, &buffer.get(0, done.bytes as usize));
}

fn direct_write(volume: &Mounted, buffer: &Buffer, seed: u64) {
    let (file, offset, len) = place(seed);
    buffer.put(0, &stamp(file, offset, len));
    let done = buffer.transfer(Command::Write, open(volume, file, 0), &[(offset, 0, len)]).unwrap();
    assert_eq!(done.bytes, len);
}
