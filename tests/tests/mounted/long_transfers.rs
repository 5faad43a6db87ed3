//! Direct transfers of many bytes, of many pieces, and many at once: they move the right bytes, the
//! daemon's memory stays bounded, and other users are served in turn.

use std::fs::{self, File, OpenOptions};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use gpunvme_abi::{Command, Register, Segment, Transfer, TransferFlags, Unregister};
use gpunvme_tests::direct::{Buffer, call, call_plain, memfd};
use gpunvme_tests::mounted::Mounted;
use gpunvme_tests::{needs_mount, tree};
use rustix::process::Pid;

const MIB: u64 = 1 << 20;

/// Memory that the daemon has for itself, in bytes.
fn own_memory(daemon: Pid) -> u64 {
    let status = fs::read_to_string(format!("/proc/{}/status", daemon.as_raw_nonzero())).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
    line.split_whitespace().next().unwrap().parse::<u64>().unwrap() << 10
}

/// Every other block a hole, but for some longer stretches of both.
fn alternating(volume: &Mounted, len: u64) -> (File, Vec<u8>) {
    let file = OpenOptions::new().read(true).write(true).create_new(true).open(volume.path("alternating")).unwrap();
    let mut data = tree::pattern(11, len as usize);
    for (block, bytes) in data.chunks_mut(4096).enumerate() {
        if block % 2 == 1 && block % 4096 < 4000 {
            bytes.fill(0);
        } else {
            file.write_all_at(bytes, block as u64 * 4096).unwrap();
        }
    }
    file.sync_all().unwrap();
    (file, data)
}

#[test]
fn reads_of_many_pieces_share_a_bounded_memory() {
    needs_mount!();
    const LEN: u64 = 128 * MIB;
    let volume = Mounted::new();
    let (file, data) = alternating(&volume, LEN);
    let buffer = Buffer::new(&file, LEN);
    buffer.read(&file, 0, MIB).unwrap();
    let before = own_memory(volume.daemon());
    let (stop, most) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        let watcher = scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                most.fetch_max(own_memory(volume.daemon()), Ordering::Relaxed);
                std::thread::sleep(Duration::from_micros(500));
            }
        });
        let readers: Vec<_> = (0..8).map(|_| scope.spawn(|| buffer.read(&file, 0, LEN).unwrap())).collect();
        for reader in readers {
            let done = reader.join().unwrap();
            assert_eq!((done.bytes, done.status), (LEN, 0));
            assert_eq!((done.host + done.hole, done.edge), (LEN, 0));
        }
        stop.store(true, Ordering::Relaxed);
        watcher.join().unwrap();
    });
    assert!(buffer.get(0, LEN as usize) == data);
    let more = most.load(Ordering::Relaxed).saturating_sub(before);
    assert!(more < 28 * MIB, "{} KiB more", more >> 10);
}

/// Over a segment's middle, and with ends that are not aligned.
#[test]
fn long_transfers_in_parts_are_what_they_are_as_a_whole() {
    needs_mount!();
    const LEN: u64 = 100 * MIB;
    let volume = Mounted::new();
    let file = OpenOptions::new().read(true).write(true).create_new(true).open(volume.path("file")).unwrap();
    let buffer = Buffer::new(&file, LEN + 20 * MIB);
    let data = tree::pattern(12, LEN as usize);
    buffer.put(0, &data);
    // Overlapping segments keep their order, however they are cut.
    let (end, tail) = (LEN - 5000, 5000);
    let done = buffer.transfer(Command::Write, &file, &[(0, 0, end), (MIB, 3 * MIB, 40 * MIB), (end, end, tail)]).unwrap();
    assert_eq!((done.bytes, done.status), (LEN + 40 * MIB, 0));
    let mut expected = data.clone();
    expected.copy_within(3 * MIB as usize..43 * MIB as usize, MIB as usize);
    // The last segment was not touched by the second, which overlaps the first only.
    let written = fs::read(volume.path("file")).unwrap();
    assert!(written == expected);
    buffer.put(0, &vec![0; LEN as usize]);
    let done = buffer.transfer(Command::Read, &file, &[(777, 0, 70 * MIB), (70 * MIB, 70 * MIB, 50 * MIB)]).unwrap();
    assert_eq!((done.bytes, done.status), (70 * MIB + 30 * MIB, 0), "it ends where the file does");
    assert!(buffer.get(0, 70 << 20) == expected[777..777 + (70 << 20)]);
    assert!(buffer.get(70 * MIB, 30 << 20) == expected[70 << 20..]);
}

/// Known before anything moves, however far behind the byte is that would have to be copied.
#[test]
fn what_must_be_direct_is_looked_at_as_a_whole() {
    needs_mount!();
    const LEN: u64 = 128 * MIB;
    let volume = Mounted::new();
    let (file, _) = alternating(&volume, LEN);
    let buffer = Buffer::new(&file, LEN);
    buffer.put(0, &[7; 1 << 20]);
    for command in [Command::Read, Command::Write] {
        let before = fs::read(volume.path("alternating")).unwrap();
        let segment = Segment { file_offset: 0, buffer_offset: 0, len: LEN - 8192 + 100 };
        let flags = TransferFlags::REQUIRE_DIRECT.bits();
        let mut transfer =
            Transfer { flags, buffer: buffer.id, descriptor: file.as_raw_fd(), segments: 1, ..Transfer::default() };
        let error = call(&file, command, &mut transfer, &mut [segment]).unwrap_err();
        assert_eq!((error.raw_os_error(), transfer.failed_segment), (Some(libc::EOPNOTSUPP), 0), "{command:?}");
        assert!(buffer.get(0, 1 << 20).iter().all(|byte| *byte == 7));
        assert!(fs::read(volume.path("alternating")).unwrap() == before);
    }
}

#[test]
fn many_long_holes_hold_up_no_registration() {
    needs_mount!();
    const LEN: u64 = 32 * MIB;
    let volume = Mounted::new();
    let file = OpenOptions::new().read(true).write(true).create_new(true).open(volume.path("hole")).unwrap();
    file.set_len(LEN).unwrap();
    let buffer = Buffer::new(&file, LEN);
    // Pages that are there, and have to be cleared.
    buffer.put(0, &vec![1; LEN as usize]);
    let (filled, is_over, end) = (AtomicU64::new(0), AtomicBool::new(false), Instant::now() + Duration::from_secs(60));
    std::thread::scope(|scope| {
        for _ in 0..150 {
            scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) && Instant::now() < end {
                    assert_eq!(buffer.read(&file, 0, LEN).unwrap().hole, LEN);
                    filled.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        let (mut slowest, mut registered) = (Duration::ZERO, 0);
        while registered < 20 || filled.load(Ordering::Relaxed) < 150 {
            let memory = memfd(4096);
            let mut register = Register { fd: memory.as_raw_fd(), len: 4096, ..Register::default() };
            let begun = Instant::now();
            call_plain(&file, Command::Register, &mut register).unwrap();
            slowest = slowest.max(begun.elapsed());
            registered += 1;
            call_plain(&file, Command::Unregister, &mut Unregister { buffer: register.buffer, ..Unregister::default() }).unwrap();
        }
        is_over.store(true, Ordering::Relaxed);
        assert!(slowest < Duration::from_secs(2), "{slowest:?}");
    });
    assert!(buffer.get(0, LEN as usize).iter().all(|byte| *byte == 0));
}
