//! The direct path and ordinary reads, writes and mappings of the same file see each other's bytes,
//! in every order.

use std::fs::{self, File, OpenOptions};
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use gpunvme_abi::{Command, Extent, Resolve};
use gpunvme_tests::differential::call::Engine;
use gpunvme_tests::differential::raw::{self, Aligned, Flight};
use gpunvme_tests::direct::{self, Buffer};
use gpunvme_tests::mounted::Mounted;
use gpunvme_tests::requests::Requests;
use gpunvme_tests::sys::Mapping;
use gpunvme_tests::{needs_mount, tree};
use rustix::fs::{AtFlags, StatxFlags};
use zerocopy::FromZeros;

const LEN: usize = 1 << 20;

fn volume_with_file() -> (Mounted, File, Vec<u8>) {
    let volume = Mounted::new();
    let data = tree::pattern(21, LEN);
    fs::write(volume.path("file"), &data).unwrap();
    let file = OpenOptions::new().read(true).write(true).open(volume.path("file")).unwrap();
    (volume, file, data)
}

#[test]
fn a_direct_read_sees_a_write_that_was_not_synced() {
    needs_mount!();
    let (_volume, file, mut data) = volume_with_file();
    let buffer = Buffer::new(&file, LEN as u64);
    for round in 0..50 {
        let offset = round * 20_011;
        let piece = tree::pattern(round as u64, 1 + round * 97);
        file.write_all_at(&piece, offset as u64).unwrap();
        data[offset..offset + piece.len()].copy_from_slice(&piece);
        assert_eq!(buffer.read(&file, 0, LEN as u64).unwrap().bytes, LEN as u64);
        assert!(buffer.get(0, LEN) == data, "round {round}");
    }
}

#[test]
fn a_direct_read_sees_a_dirty_page_of_a_mapping() {
    needs_mount!();
    let (_volume, file, mut data) = volume_with_file();
    let buffer = Buffer::new(&file, LEN as u64);
    let mapping = Mapping::shared(&file, LEN).unwrap();
    for round in 0..20 {
        let piece = tree::pattern(round, 5000);
        let offset = round as usize * 50_001;
        mapping.write(offset, &piece);
        data[offset..offset + 5000].copy_from_slice(&piece);
        buffer.read(&file, 0, LEN as u64).unwrap();
        assert!(buffer.get(0, LEN) == data, "round {round}");
    }
}

/// Unlike the daemon, which could only have the kernel drop them, the library has the kernel write
/// its dirty pages back.
#[test]
fn a_read_by_the_library_sees_dirty_pages_and_leaves_the_kernel_all_of_them() {
    needs_mount!();
    let (volume, file, mut data) = volume_with_file();
    let mut buffer = gpunvme::Mount::open(volume.root()).unwrap().register(gpunvme::Buffer::memfd(LEN).unwrap()).unwrap();
    let reader = gpunvme::File::open(volume.path("file")).unwrap();
    let mapping = Mapping::shared(&file, LEN).unwrap();
    let whole = [gpunvme_abi::Segment { file_offset: 0, buffer_offset: 0, len: LEN as u64 }];
    let by_the_daemon = gpunvme::Require { route: Some(gpunvme::Route::Host), direct: false };
    assert_eq!(fs::read(volume.path("file")).unwrap(), data);
    let requests = Requests::to(&volume.root());
    for round in 0..20 {
        let piece = tree::pattern(round, 5000);
        let offset = round as usize * 50_001;
        mapping.write(offset, &piece);
        data[offset..offset + 5000].copy_from_slice(&piece);
        assert_eq!(reader.read_requiring(&mut buffer, &whole, by_the_daemon).unwrap().bytes(), LEN as u64);
        assert!(buffer[..] == data, "round {round}");
    }
    if let Some(requests) = requests {
        let counts = requests.of(|| assert_eq!(fs::read(volume.path("file")).unwrap(), data));
        assert_eq!(counts.get("FUSE_READ"), None, "{counts:?}");
    }
}

#[test]
fn a_copy_sees_a_dirty_page_of_a_mapping() {
    needs_mount!();
    let (volume, file, mut data) = volume_with_file();
    let mapping = Mapping::shared(&file, LEN).unwrap();
    for round in 0..10 {
        let piece = tree::pattern(round, 5000);
        mapping.write(round as usize * 100_001, &piece);
        data[round as usize * 100_001..][..5000].copy_from_slice(&piece);
        let copy = File::create(volume.path("copy")).unwrap();
        let mut from = 0;
        assert_eq!(rustix::fs::copy_file_range(&file, Some(&mut from), &copy, None, LEN).unwrap(), LEN);
        assert!(fs::read(volume.path("copy")).unwrap() == data, "round {round}");
    }
}

#[test]
fn a_direct_read_sees_the_first_dirty_page_of_a_file_that_no_page_was_cached_of() {
    needs_mount!();
    let volume = Mounted::new();
    // A page that is missing is read with the flags of the mapped file: O_DIRECT does not say that
    // it goes past the cache.
    for flags in [0, libc::O_DIRECT] {
        let path = volume.path(format!("file{flags}"));
        let file = OpenOptions::new().read(true).write(true).create_new(true).custom_flags(flags).open(path).unwrap();
        let mut data = tree::pattern(22, LEN);
        let buffer = Buffer::new(&file, LEN as u64);
        buffer.put(0, &data);
        assert_eq!(buffer.write(&file, 0, LEN as u64).unwrap().bytes, LEN as u64);
        let mapping = Mapping::shared(&file, LEN).unwrap();
        for round in 0..20 {
            let piece = tree::pattern(round, 5000);
            let offset = round as usize * 50_001;
            mapping.write(offset, &piece);
            data[offset..offset + 5000].copy_from_slice(&piece);
            buffer.read(&file, 0, LEN as u64).unwrap();
            assert!(buffer.get(0, LEN) == data, "flags {flags:#o}, round {round}");
        }
    }
}

#[test]
fn an_ordinary_read_sees_a_direct_write_in_place_of_what_was_cached() {
    needs_mount!();
    let (volume, file, mut data) = volume_with_file();
    let other = File::open(volume.path("file")).unwrap();
    let buffer = Buffer::new(&file, LEN as u64);
    for round in 0..50 {
        // Everything is in the kernel's cache now.
        assert!(fs::read(volume.path("file")).unwrap() == data, "round {round}");
        let offset = round * 19_997;
        let piece = tree::pattern(100 + round as u64, 1 + round * 113);
        buffer.put(0, &piece);
        buffer.write(&file, offset as u64, piece.len() as u64).unwrap();
        data[offset..offset + piece.len()].copy_from_slice(&piece);
        let mut read = vec![0; piece.len()];
        other.read_exact_at(&mut read, offset as u64).unwrap();
        assert!(read == piece, "round {round}");
    }
}

#[test]
fn a_mapping_sees_a_direct_write() {
    needs_mount!();
    let (_volume, file, data) = volume_with_file();
    let buffer = Buffer::new(&file, LEN as u64);
    let mapping = Mapping::shared(&file, LEN).unwrap();
    let mut mapped = vec![0; LEN];
    mapping.read(0, &mut mapped);
    assert!(mapped == data);
    let piece = tree::pattern(22, 100_000);
    buffer.put(0, &piece);
    buffer.write(&file, 300_000, 100_000).unwrap();
    mapping.read(0, &mut mapped);
    assert!(mapped[300_000..400_000] == piece);
    assert!(mapped[..300_000] == data[..300_000]);
}

#[test]
fn a_direct_write_keeps_what_a_mapping_dirtied_beside_it() {
    needs_mount!();
    let (volume, file, mut data) = volume_with_file();
    let buffer = Buffer::new(&file, LEN as u64);
    let mapping = Mapping::shared(&file, LEN).unwrap();
    // In the same page, before and after what the direct write covers, and in pages around it.
    for offset in [8192, 8192 + 4000, 4000, 16_384] {
        mapping.write(offset, b"mapped");
        data[offset..offset + 6].copy_from_slice(b"mapped");
    }
    buffer.put(0, &tree::pattern(23, 1000));
    buffer.write(&file, 8192 + 1000, 1000).unwrap();
    data[9192..10_192].copy_from_slice(&tree::pattern(23, 1000));
    mapping.sync().unwrap();
    assert!(fs::read(volume.path("file")).unwrap() == data);
    drop((mapping, file));
    let volume = volume.remount();
    assert!(fs::read(volume.path("file")).unwrap() == data);
}

#[test]
fn the_length_after_a_direct_write_is_everybodys() {
    needs_mount!();
    let (volume, file, _) = volume_with_file();
    let other = File::open(volume.path("file")).unwrap();
    assert_eq!(other.metadata().unwrap().len(), LEN as u64);
    let buffer = Buffer::new(&file, LEN as u64);
    buffer.put(0, &tree::pattern(24, LEN));
    buffer.write(&file, LEN as u64 + 5, 1000).unwrap();
    assert_eq!(other.metadata().unwrap().len(), LEN as u64 + 1005);
    assert_eq!(fs::metadata(volume.path("file")).unwrap().len(), LEN as u64 + 1005);
    let mut read = [1; 1005];
    other.read_exact_at(&mut read, LEN as u64).unwrap();
    assert!(read[..5] == [0; 5] && read[5..] == tree::pattern(24, LEN)[..1000]);
}

#[test]
fn the_time_of_a_direct_write_in_place_shows_whenever_somebody_looks() {
    needs_mount!();
    let (_volume, file, _) = volume_with_file();
    let buffer = Buffer::new(&file, LEN as u64);
    let write = || assert_eq!(buffer.write(&file, 4096, 4096).unwrap().bytes, 4096);
    let time = || file.metadata().unwrap().modified().unwrap();
    write();
    let mut last = time();
    for round in 0..300 {
        // At first one look right after the other, then looks that come after a pause.
        let quiet = Instant::now() + Duration::from_millis(if round < 295 { round % 3 } else { 200 });
        while Instant::now() < quiet {
            write();
        }
        for look in 0..3 {
            write();
            let now = time();
            assert!(now > last, "round {round}, look {look}: {last:?}, and then {now:?}");
            last = now;
        }
    }
}

#[test]
fn truncation_and_punching_are_seen_by_direct_reads() {
    needs_mount!();
    let (_volume, file, data) = volume_with_file();
    let buffer = Buffer::new(&file, LEN as u64);
    let punch = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
    rustix::fs::fallocate(&file, punch, 100_000, 50_000).unwrap();
    buffer.read(&file, 0, LEN as u64).unwrap();
    assert!(buffer.get(100_000, 50_000).iter().all(|&byte| byte == 0));
    assert!(buffer.get(0, 100_000) == data[..100_000]);
    file.set_len(5000).unwrap();
    assert_eq!(buffer.read(&file, 0, LEN as u64).unwrap().bytes, 5000);
    file.set_len(LEN as u64).unwrap();
    assert_eq!(buffer.read(&file, 0, LEN as u64).unwrap().bytes, LEN as u64);
    assert!(buffer.get(5000, LEN - 5000).iter().all(|&byte| byte == 0), "what was cut does not come back");
}

#[test]
fn readers_beside_a_direct_writer_see_old_or_new_blocks_and_nothing_else() {
    needs_mount!();
    let (volume, file, _) = volume_with_file();
    let buffer = Buffer::new(&file, LEN as u64);
    let fill = |value: u8| {
        buffer.put(0, &vec![value; LEN]);
        assert_eq!(buffer.write(&file, 0, LEN as u64).unwrap().bytes, LEN as u64);
    };
    fill(0);
    let done = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                let file = File::open(volume.path("file")).unwrap();
                let mut block = vec![0; 4096];
                let mut at = 0;
                while !done.load(std::sync::atomic::Ordering::Relaxed) {
                    file.read_exact_at(&mut block, at).unwrap();
                    assert!(block.iter().all(|&byte| byte <= 60), "a byte that was never written");
                    at = (at + 36_864) % LEN as u64;
                }
            });
        }
        for value in 1..=60 {
            fill(value);
        }
        done.store(true, std::sync::atomic::Ordering::Relaxed);
    });
    assert!(fs::read(volume.path("file")).unwrap().iter().all(|&byte| byte == 60));
}

#[test]
fn a_direct_write_that_is_over_is_what_everybody_reads_however_many_read_around_it() {
    needs_mount!();
    const PAGES: u64 = 64;
    const WRITERS: u64 = 3;
    let (volume, ..) = volume_with_file();
    let done = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        for reader in 0..2 {
            let (volume, done) = (&volume, &done);
            scope.spawn(move || {
                let file = File::open(volume.path("file")).unwrap();
                let mut bytes = vec![0; 64 << 10];
                for round in 0_u64.. {
                    if done.load(std::sync::atomic::Ordering::Relaxed) {
                        break;
                    }
                    let (page, len) = (round * 29 % PAGES, 1 + round as usize * (4099 + reader) % bytes.len());
                    file.read_at(&mut bytes[..len], page * 4096).unwrap();
                }
            });
        }
        let writers: Vec<_> = (0..WRITERS)
            .map(|writer| {
                let volume = &volume;
                scope.spawn(move || {
                    let file = OpenOptions::new().read(true).write(true).open(volume.path("file")).unwrap();
                    let buffer = Buffer::new(&file, 4096);
                    let mut read = vec![0; 4096];
                    for round in 0..700_u64 {
                        let page = (round * 31 % PAGES) / WRITERS * WRITERS + writer;
                        let data = tree::pattern(round * WRITERS + writer, 4096);
                        buffer.put(0, &data);
                        buffer.write(&file, page * 4096, 4096).unwrap();
                        file.read_exact_at(&mut read, page * 4096).unwrap();
                        assert!(read == data, "writer {writer}, round {round}, page {page}");
                    }
                })
            })
            .collect();
        let ends: Vec<_> = writers.into_iter().map(std::thread::ScopedJoinHandle::join).collect();
        done.store(true, std::sync::atomic::Ordering::Relaxed);
        ends.into_iter().for_each(|end| end.unwrap());
    });
}

#[test]
fn what_is_appended_never_lies_over_what_direct_writes_put_behind_the_end() {
    needs_mount!();
    const ROUNDS: u64 = 400;
    let volume = Mounted::new();
    fs::write(volume.path("file"), b"").unwrap();
    let done = std::sync::atomic::AtomicBool::new(false);
    let (direct, appended) = std::thread::scope(|scope| {
        let appending = scope.spawn(|| {
            use std::io::Write;
            let mut file = OpenOptions::new().append(true).open(volume.path("file")).unwrap();
            let mut appended = 0_u64;
            while !done.load(std::sync::atomic::Ordering::Relaxed) {
                file.write_all(&[0xaa; 1000]).unwrap();
                appended += 1;
            }
            appended
        });
        let file = OpenOptions::new().read(true).write(true).open(volume.path("file")).unwrap();
        let buffer = Buffer::new(&file, 4096);
        let direct: Vec<u64> = (0..ROUNDS)
            .map(|round| {
                let offset = file.metadata().unwrap().len().next_multiple_of(4096);
                buffer.put(0, &[1 + (round % 100) as u8; 4096]);
                buffer.write(&file, offset, 4096).unwrap();
                offset
            })
            .collect();
        done.store(true, std::sync::atomic::Ordering::Relaxed);
        (direct, appending.join().unwrap())
    });
    let check = |found: &[u8]| {
        for (round, offset) in (0..ROUNDS).zip(&direct) {
            let page = &found[*offset as usize..][..4096];
            assert!(page.iter().all(|byte| *byte == 1 + (round % 100) as u8), "round {round}, at {offset}");
        }
    };
    assert!(appended > 0);
    check(&fs::read(volume.path("file")).unwrap());
    let volume = volume.remount();
    check(&fs::read(volume.path("file")).unwrap());
}

/// The kernel forgets attributes when it sends such a write, and another process may ask for them
/// before the write is done.
#[test]
fn the_times_of_a_write_that_its_process_does_not_wait_for_are_seen() {
    needs_mount!();
    let (volume, _, _) = volume_with_file();
    let file = OpenOptions::new().write(true).custom_flags(libc::O_DIRECT).open(volume.path("file")).unwrap();
    let modified = |flags| {
        let found = rustix::fs::statx(&file, "", AtFlags::EMPTY_PATH | flags, StatxFlags::MTIME).unwrap().stx_mtime;
        (found.tv_sec, found.tv_nsec)
    };
    for round in 0..60 {
        let memory = Aligned::new(if round % 2 == 0 { 4096 } else { 512 });
        let mut flights = [Flight { write: true, at: 0, memory, result: 0 }];
        std::thread::scope(|scope| {
            scope.spawn(|| modified(AtFlags::STATX_FORCE_SYNC));
            raw::fly(file.as_fd(), Engine::Aio, &mut flights).unwrap();
        });
        assert!(flights[0].result > 0);
        assert_eq!(modified(AtFlags::empty()), modified(AtFlags::STATX_FORCE_SYNC), "round {round}");
    }
}

/// The kernel forgets pages when it sends such a write, and another process may read them anew
/// before the write is done.
#[test]
fn pages_that_are_read_beside_a_write_that_its_process_does_not_wait_for_are_not_older_than_it() {
    needs_mount!();
    let (volume, ..) = volume_with_file();
    let path = volume.path("file");
    let direct = OpenOptions::new().write(true).custom_flags(libc::O_DIRECT).open(&path).unwrap();
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                let (file, mut bytes) = (File::open(&path).unwrap(), vec![0; LEN]);
                while !over.load(Ordering::Relaxed) {
                    file.read_exact_at(&mut bytes, 0).unwrap();
                }
            });
        }
        let wrong = (0..60u8).find(|round| {
            let (at, len) = if round % 2 == 0 { (0, LEN) } else { (512, LEN - 1024) };
            let memory = Aligned::holding(&vec![*round; len]);
            let mut flights = [Flight { write: true, at: at as u64, memory, result: 0 }];
            raw::fly(direct.as_fd(), Engine::Aio, &mut flights).unwrap();
            assert_eq!(flights[0].result, len as i64);
            fs::read(&path).unwrap()[at..at + len].iter().any(|byte| byte != round)
        });
        over.store(true, Ordering::Relaxed);
        assert_eq!(wrong, None, "what is read is older than what was written");
    });
}

/// Of more runs of pages than the mount tells apart, the gaps count as pages too.
#[test]
fn all_of_a_huge_file_is_resolved_at_once_wherever_pages_may_be_cached() {
    needs_mount!();
    let (volume, ..) = volume_with_file();
    let file = OpenOptions::new().read(true).write(true).open(volume.path("file")).unwrap();
    const HUGE: u64 = (1 << 62) - 4096;
    file.set_len(HUGE).unwrap();
    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::Random).unwrap();
    let mut byte = [0];
    (0..3000).for_each(|n| assert_eq!(file.read_at(&mut byte, HUGE / 3000 * n).unwrap(), 1));
    let (answered, answer) = std::sync::mpsc::channel();
    let ioctl = std::thread::spawn(move || {
        let mut resolve = Resolve { len: u64::MAX, capacity: 1, ..Resolve::default() };
        let called = direct::call(&file, Command::Resolve, &mut resolve, &mut [Extent::new_zeroed()]);
        answered.send(called.map(|()| resolve.file_size)).unwrap();
    });
    // Steps of one length would take weeks.
    let size = answer.recv_timeout(Duration::from_secs(60)).expect("it is answered").unwrap();
    assert_eq!(size, HUGE);
    ioctl.join().unwrap();
}

#[test]
fn a_range_that_has_no_room_for_zeros_keeps_what_it_has() {
    needs_mount!();
    let (volume, file, data) = volume_with_file();
    file.sync_all().unwrap();
    let zero = rustix::fs::FallocateFlags::ZERO_RANGE;
    assert_eq!(rustix::fs::fallocate(&file, zero, 0, 64 << 30).unwrap_err(), rustix::io::Errno::NOSPC);
    drop(file);
    assert!(fs::read(volume.path("file")).unwrap() == data);
    let volume = volume.remount();
    assert!(fs::read(volume.path("file")).unwrap() == data);
}
