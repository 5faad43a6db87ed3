//! Rings on a real mount: many transfers in flight from one thread, and owners who attack the
//! daemon through their own rings.

use std::fs::{self, File, OpenOptions};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use gpunvme::{Completed, Error, Mount, Operation, Require, Ring, Route, Wait};
use gpunvme_abi::Command;
use gpunvme_abi::ring::{self as abi, Submission, Word, ring_bytes};
use gpunvme_tests::direct::{call_plain, memfd};
use gpunvme_tests::mounted::{Image, Mounted};
use gpunvme_tests::rings::{Bystander, Raw, attach, bytes_of, serving_threads, shared, wait_for};
use gpunvme_tests::{needs_mount, tree};
use rustix::event::EventfdFlags;
use rustix::fs::SealFlags;
use rustix::process::Signal;
use zerocopy::FromZeros;

const MIB: u64 = 1 << 20;

fn random(seed: u64, below: u64) -> u64 {
    u64::from_le_bytes(tree::pattern(seed, 8).try_into().unwrap()) % below
}

#[test]
fn a_thread_keeps_many_transfers_of_any_size_in_flight() {
    needs_mount!();
    let volume = Mounted::new();
    let data = tree::pattern(3, 24 << 20);
    fs::write(volume.path("from"), &data).unwrap();
    let mount = Mount::open(volume.root()).unwrap();
    let (source, target) = (shared(&mount, 24 * MIB), shared(&mount, 24 * MIB));
    let mut ring = Ring::new(&mount, 128).unwrap();
    let from = attach(&ring, volume.path("from"));
    // Pieces of any length, one behind the other, aligned and not.
    let (mut at, mut pushed, mut sizes, mut done) = (0, 0u64, Vec::new(), Vec::new());
    while at < 24 * MIB {
        let len = [4096, 300 << 10, 1 + random(pushed, 9000), 2 * MIB][pushed as usize % 4].min(24 * MIB - at);
        if ring.room() == 0 {
            ring.complete(Wait::Forever, &mut done).unwrap();
        }
        ring.push(&Operation::read(&from, at, &source, at, len).tagged(pushed)).unwrap();
        sizes.push(len);
        (at, pushed) = (at + len, pushed + 1);
    }
    let left = ring.in_flight();
    done.extend(wait_for(&mut ring, left));
    assert_eq!(done.len() as u64, pushed);
    for completed in done {
        let moved = completed.result.unwrap().moved;
        assert_eq!(moved.total(), sizes[completed.user_data as usize]);
    }
    assert!(bytes_of(&source, 0, 24 * MIB) == data);

    // Written back through the ring, it is what read(2) sees.
    let to = attach(&ring, volume.path("to"));
    for piece in 0..24 {
        ring.push(&Operation::write(&to, piece * MIB, &source, piece * MIB, MIB)).unwrap();
    }
    for completed in wait_for(&mut ring, 24) {
        assert_eq!(completed.result.unwrap().moved.host, MIB, "aligned pieces go direct");
    }
    assert!(fs::read(volume.path("to")).unwrap() == data);
    drop((source, target));
}

#[test]
fn what_cannot_be_done_is_said_of_the_one_operation() {
    needs_mount!();
    let volume = Mounted::new();
    fs::write(volume.path("file"), tree::pattern(1, 10_000)).unwrap();
    let mount = Mount::open(volume.root()).unwrap();
    let buffer = shared(&mount, MIB);
    let mut ring = Ring::new(&mount, 8).unwrap();
    let reader = ring.attach(&gpunvme::File::open(volume.path("file")).unwrap()).unwrap();
    let only_p2p = Require { route: Some(Route::P2p), direct: false };
    ring.push(&Operation::write(&reader, 0, &buffer, 0, 4096).tagged(0)).unwrap();
    ring.push(&Operation::read(&reader, 0, &buffer, 0, 4096).requiring(only_p2p).tagged(1)).unwrap();
    ring.push(&Operation::read(&reader, 8192, &buffer, 0, 65536).tagged(2)).unwrap();
    let mut done = wait_for(&mut ring, 3);
    done.sort_by_key(|completed| completed.user_data);
    let errno = |completed: &Completed| completed.result.as_ref().unwrap_err().errno().raw_os_error();
    assert_eq!((errno(&done[0]), errno(&done[1])), (libc::EBADF, libc::EOPNOTSUPP));
    assert_eq!(done[2].result.as_ref().unwrap().bytes(), 10_000 - 8192, "it ends where the file does");
    // The library refuses a range outside the buffer.
    assert!(matches!(ring.push(&Operation::read(&reader, 0, &buffer, MIB, 1)), Err(Error::OutsideBuffer { .. })));
    for _ in 0..8 {
        ring.push(&Operation::read(&reader, 0, &buffer, 0, 512)).unwrap();
    }
    assert!(matches!(ring.push(&Operation::read(&reader, 0, &buffer, 0, 512)), Err(Error::RingFull { entries: 8 })));
    wait_for(&mut ring, 8);
    // A file of another mount, a folder, and another ring's file.
    let elsewhere = Mounted::new();
    fs::write(elsewhere.path("file"), "x").unwrap();
    assert!(ring.attach(&gpunvme::File::open(elsewhere.path("file")).unwrap()).is_err());
    let other = Ring::new(&mount, 8).unwrap();
    let foreign = attach(&other, volume.path("file"));
    assert!(matches!(ring.push(&Operation::read(&foreign, 0, &buffer, 0, 1)), Err(Error::WrongRing { .. })));
}

/// After each kind of change a ring that has read the file often enough to know where it lies reads
/// what read(2) reads.
#[test]
fn rings_read_what_a_file_has_after_each_change() {
    needs_mount!();
    const LEN: u64 = 2 * MIB;
    let volume = Mounted::new();
    let path = volume.path("file");
    fs::write(&path, tree::pattern(1, LEN as usize)).unwrap();
    fs::write(volume.path("other"), tree::pattern(2, LEN as usize)).unwrap();
    let open = |flags: i32| OpenOptions::new().read(true).write(true).custom_flags(flags).open(&path).unwrap();
    let (file, direct, other) = (open(0), open(libc::O_DIRECT), File::open(volume.path("other")).unwrap());
    file.sync_all().unwrap();
    let mount = Mount::open(volume.root()).unwrap();
    let (buffer, mut ring) = (shared(&mount, 2 * LEN), Ring::new(&mount, 64).unwrap());
    let mut writing = Ring::new(&mount, 8).unwrap();
    let reader = ring.attach(&gpunvme::File::open(&path).unwrap()).unwrap();
    let writer = attach(&writing, &path);
    let allocate = |mode, at, len| {
        // SAFETY: a call on an open file.
        assert_eq!(unsafe { libc::fallocate64(file.as_raw_fd(), mode, at, len) }, 0);
    };
    let (punch, keep) = (libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE, libc::FALLOC_FL_KEEP_SIZE);
    for round in 0..36u64 {
        let at = (round * 37 % 100) * 4096 * 4;
        let what = ["write", "O_DIRECT", "shorter", "longer", "punch", "zero", "copy", "ring", "append"][round as usize % 9];
        match what {
            "write" => file.write_all_at(&tree::pattern(round, 10_000), at + 100).unwrap(),
            "O_DIRECT" => direct.write_all_at(&tree::pattern(round, 64 << 10), at).unwrap(),
            "shorter" => file.set_len(LEN - at).unwrap(),
            "longer" => file.set_len(LEN + 5000).unwrap(),
            "punch" => allocate(punch, at as i64, 50_000),
            "zero" => allocate(libc::FALLOC_FL_ZERO_RANGE | keep, at as i64, 50_000),
            "copy" => {
                let mut to = at + 8192;
                rustix::fs::copy_file_range(&other, Some(&mut 4096), &file, Some(&mut to), 60_000).unwrap();
            }
            "ring" => {
                writing.push(&Operation::write(&writer, at, &buffer, LEN, 64 << 10)).unwrap();
                wait_for(&mut writing, 1).remove(0).result.unwrap();
            }
            _ => file.write_all_at(&tree::pattern(round, 9000), file.metadata().unwrap().len()).unwrap(),
        }
        let expected = fs::read(&path).unwrap();
        // Before and after it knows anew where the file lies.
        for again in 0..3 {
            let pieces: Vec<u64> = (0..20).map(|piece| (at + piece * 4096 * (1 + again * 5)) % LEN).collect();
            for (piece, &from) in pieces.iter().enumerate() {
                ring.push(&Operation::read(&reader, from, &buffer, piece as u64 * 4096, 4096).tagged(piece as u64)).unwrap();
            }
            for completed in wait_for(&mut ring, pieces.len()) {
                let (piece, from) = (completed.user_data, pieces[completed.user_data as usize] as usize);
                let bytes = &expected[from.min(expected.len())..(from + 4096).min(expected.len())];
                assert_eq!(completed.result.unwrap().bytes(), bytes.len() as u64, "{what}, {from}");
                assert!(bytes_of(&buffer, piece * 4096, bytes.len() as u64) == bytes, "after {what} in round {round}: {from}");
            }
        }
    }
}

/// Once a write by a ring is answered, read(2), a mapping and fstat(2) show it: also where other
/// threads have the kernel read the same pages all the time, and the ring has written the file so
/// often that it knows where it lies.
#[test]
fn what_a_ring_has_written_is_seen_by_those_who_read_all_the_time() {
    needs_mount!();
    const BLOCKS: u64 = 16;
    let volume = Mounted::new();
    let path = volume.path("file");
    fs::write(&path, vec![0; BLOCKS as usize * 4096]).unwrap();
    let file = File::open(&path).unwrap();
    file.sync_all().unwrap();
    let mount = Mount::open(volume.root()).unwrap();
    let (memory, mut ring) = (shared(&mount, MIB), Ring::new(&mount, 64).unwrap());
    let attached = attach(&ring, &path);
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                let mut block = [0; 4096];
                while !is_over.load(Ordering::Relaxed) {
                    (0..BLOCKS).for_each(|number| file.read_exact_at(&mut block, number * 4096).unwrap());
                }
            });
        }
        let _ends_them = Raised(&is_over);
        let mut before = file.metadata().unwrap().modified().unwrap();
        for round in 1..=2000u64 {
            let at = random(round, BLOCKS) * 4096;
            memory.copy_in(0, &round.to_le_bytes());
            // With reads of the same ring on their way. No page is dirty.
            let is_written_back = round % 2 == 0;
            ring.push(&Operation::read(&attached, at, &memory, 8192, 4096).written_back(is_written_back)).unwrap();
            ring.push(&Operation::write(&attached, at, &memory, 0, 4096).written_back(is_written_back)).unwrap();
            wait_for(&mut ring, 2).into_iter().for_each(|completed| assert_eq!(completed.result.unwrap().bytes(), 4096));
            let mut found = [0; 8];
            file.read_exact_at(&mut found, at).unwrap();
            assert_eq!(u64::from_le_bytes(found), round, "at {at}");
            if round % 100 == 0 {
                let now = file.metadata().unwrap().modified().unwrap();
                assert!(now > before, "round {round}: its time of change has not changed");
                before = now;
            }
        }
    });
}

/// A flag that is set when this goes, also by a failed assertion.
struct Raised<'a>(&'a AtomicBool);

impl Drop for Raised<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn an_attached_file_lives_until_it_is_detached() {
    needs_mount!();
    let volume = Mounted::new();
    let data = tree::pattern(5, 4 << 20);
    fs::write(volume.path("file"), &data).unwrap();
    File::open(volume.path("file")).unwrap().sync_all().unwrap();
    let mount = Mount::open(volume.root()).unwrap();
    let free = || mount.info().unwrap().free;
    let with_file = free();
    let buffer = shared(&mount, 4 * MIB);
    let mut ring = Ring::new(&mount, 8).unwrap();
    let file = attach(&ring, volume.path("file"));
    fs::remove_file(volume.path("file")).unwrap();
    ring.push(&Operation::read(&file, 0, &buffer, 0, 4 * MIB)).unwrap();
    assert_eq!(wait_for(&mut ring, 1)[0].result.as_ref().unwrap().bytes(), 4 * MIB);
    assert!(bytes_of(&buffer, 0, 4 * MIB) == data, "it was closed and unlinked, and read all the same");
    assert!(free() <= with_file, "its blocks are its own");
    drop(file);
    let late = Instant::now() + Duration::from_secs(20);
    while free() < with_file + 4 * MIB {
        assert!(Instant::now() < late, "the blocks of a detached file did not come back");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn an_idle_ring_costs_nothing_and_wakes_up() {
    needs_mount!();
    let volume = Mounted::new();
    fs::write(volume.path("file"), tree::pattern(1, 65536)).unwrap();
    let mount = Mount::open(volume.root()).unwrap();
    let buffer = shared(&mount, 65536);
    let mut ring = Ring::new(&mount, 8).unwrap();
    let file = attach(&ring, volume.path("file"));
    for _ in 0..3 {
        std::thread::sleep(Duration::from_millis(50));
        let before = serving_threads(volume.daemon());
        std::thread::sleep(Duration::from_millis(500));
        assert!(serving_threads(volume.daemon())[0] - before[0] < Duration::from_millis(20), "the daemon is spinning");
        ring.push(&Operation::read(&file, 0, &buffer, 0, 65536)).unwrap();
        assert_eq!(wait_for(&mut ring, 1)[0].result.as_ref().unwrap().bytes(), 65536);
    }
    // An application that waits by itself.
    ring.push(&Operation::read(&file, 0, &buffer, 0, 65536)).unwrap();
    ring.submit();
    if ring.arm().unwrap() {
        let mut polled = [rustix::event::PollFd::new(&ring, rustix::event::PollFlags::IN)];
        let timeout = rustix::event::Timespec { tv_sec: 20, tv_nsec: 0 };
        assert_eq!(rustix::event::poll(&mut polled, Some(&timeout)).unwrap(), 1, "no signal came");
    }
    let mut done = Vec::new();
    assert_eq!(ring.complete(Wait::No, &mut done).unwrap(), 1);
}

#[test]
fn words_that_run_away_cost_their_owner_the_ring() {
    needs_mount!();
    let volume = Mounted::new();
    let mut bystander = Bystander::new(&volume);
    for word in [9, u32::MAX, 1 << 31] {
        let raw = Raw::new(&volume, 8);
        raw.publish(word);
        raw.wait_until("a tail that ran away was taken", |memory| memory.load(Word::Daemon) == abi::CLOSED);
        bystander.check();
        assert_eq!(raw.detach().unwrap_err().raw_os_error(), Some(libc::ENOENT));
    }
    let raw = Raw::new(&volume, 8);
    raw.memory.store(Word::CompletionHead, 5);
    raw.publish(1);
    raw.wait_until("a head that ran away was taken", |memory| memory.load(Word::Daemon) == abi::CLOSED);
    bystander.check();
}

#[test]
fn entries_that_mean_nothing_are_refused_one_by_one() {
    needs_mount!();
    let volume = Mounted::new();
    fs::write(volume.path("file"), tree::pattern(1, 8192)).unwrap();
    let raw = Raw::new(&volume, 16);
    let file = raw.attach(&File::open(volume.path("file")).unwrap());
    let good = Submission { command: Command::Read as u32, file, len: 4096, ..Submission::new_zeroed() };
    let wrong = [
        (Submission { command: 6, ..good }, libc::EINVAL),
        (Submission { file: file + 1, ..good }, libc::EBADF),
        (Submission { file: 0, ..good }, libc::EBADF),
        (Submission { buffer: u64::MAX, ..good }, libc::ENOENT),
        (Submission { len: u64::MAX, ..good }, libc::EINVAL),
        (Submission { file_offset: u64::MAX - 100, ..good }, libc::EINVAL),
    ];
    for (at, (submission, _)) in wrong.iter().enumerate() {
        raw.memory.put_submission(at as u32, &Submission { user_data: at as u64, ..*submission });
    }
    raw.publish(wrong.len() as u32);
    raw.wait_until("not all were answered", |memory| memory.load(Word::CompletionTail) == wrong.len() as u32);
    for (at, (submission, errno)) in wrong.iter().enumerate() {
        let completion = raw.memory.completion(at as u32);
        assert_eq!((completion.user_data, completion.status), (at as u64, *errno), "{submission:?}");
    }
    // No process can use, or end, another process's ring: here, one that does not exist.
    let mut detach = abi::Detach { ring: raw.id + 1, ..abi::Detach::default() };
    assert!(call_plain(File::open(volume.root()).unwrap(), Command::Detach, &mut detach).is_err());
}

#[test]
fn memory_that_changes_while_it_is_read_harms_nobody_else() {
    needs_mount!();
    // Enough for three threads that serve rings.
    let volume = Image::formatted().mount_with("threads=12");
    let data = tree::pattern(9, 1 << 20);
    fs::write(volume.path("file"), &data).unwrap();
    let mut bystander = Bystander::new(&volume);
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for seed in 0..2 {
            let (stop, volume) = (&stop, &volume);
            scope.spawn(move || {
                let file = File::open(volume.path("file")).unwrap();
                let words = [
                    Word::SubmissionTail,
                    Word::SubmissionHead,
                    Word::CompletionTail,
                    Word::CompletionHead,
                    Word::Daemon,
                    Word::Application,
                ];
                let mut round = seed << 32;
                while !stop.load(Ordering::Relaxed) {
                    let raw = Raw::new(volume, 32);
                    let name = raw.attach(&file);
                    let mut tail = 0u32;
                    for _ in 0..200 {
                        round += 1;
                        let mut words_of = [0u64; 8];
                        for (at, word) in words_of.iter_mut().enumerate() {
                            *word = random(round * 8 + at as u64, u64::MAX);
                        }
                        let mut submission: Submission = zerocopy::transmute!(words_of);
                        if round % 2 == 0 {
                            // One that gets further.
                            submission = Submission {
                                command: 4 + (round as u32 / 2) % 2,
                                flags: 0,
                                file: name,
                                reserved: 0,
                                ..submission
                            };
                            submission.len %= 2 * MIB;
                        }
                        raw.memory.put_submission(tail.wrapping_add(random(round, 3) as u32), &submission);
                        tail = tail.wrapping_add(random(round + 5, 3) as u32);
                        raw.publish(tail);
                        if round % 7 == 0 {
                            raw.memory.store(
                                words[random(round, 6) as usize],
                                random(round + 1, 1 << 32) as u32 >> random(round + 2, 32),
                            );
                        }
                    }
                }
            });
        }
        let end = Instant::now() + Duration::from_secs(3);
        while Instant::now() < end {
            bystander.check();
        }
        stop.store(true, Ordering::Relaxed);
    });
    bystander.check();
    assert!(fs::read(volume.path("file")).unwrap() == data, "it was attached for reading only");
}

/// The counter of the daemon's eventfd is full and a write to it waits: only its owner waits, no
/// other application.
#[test]
fn an_eventfd_that_takes_no_signal_holds_nobody_up() {
    needs_mount!();
    let volume = Mounted::new();
    fs::write(volume.path("file"), tree::pattern(1, 8192)).unwrap();
    let mut bystander = Bystander::new(&volume);
    let raw = Raw::new(&volume, 8);
    let file = raw.attach(&File::open(volume.path("file")).unwrap());
    rustix::io::write(&raw.completed, &(u64::MAX - 1).to_ne_bytes()).unwrap();
    for position in 0..64u32 {
        raw.memory.swap(Word::Application, abi::ASLEEP);
        let submission = Submission { command: Command::Read as u32, file, len: 4096, ..Submission::new_zeroed() };
        raw.memory.put_submission(position, &submission);
        raw.publish(position + 1);
        raw.wait_until("no completion", |memory| memory.load(Word::CompletionTail) == position + 1);
        raw.memory.store(Word::CompletionHead, position + 1);
    }
    bystander.check();
}

#[test]
fn what_is_no_eventfd_or_not_sealed_is_refused() {
    needs_mount!();
    let volume = Mounted::new();
    let directory = File::open(volume.root()).unwrap();
    let event = rustix::event::eventfd(0, EventfdFlags::CLOEXEC).unwrap();
    let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(volume.path("file")).unwrap();
    let good = memfd(ring_bytes(8) as u64);
    let short = memfd(ring_bytes(8) as u64 - 1);
    let open = rustix::fs::memfd_create("open", rustix::fs::MemfdFlags::ALLOW_SEALING).unwrap();
    rustix::fs::ftruncate(&open, 1 << 20).unwrap();
    rustix::fs::fcntl_add_seals(&open, SealFlags::GROW).unwrap();
    let (event, file, good) = (event.as_raw_fd(), file.as_raw_fd(), good.as_raw_fd());
    for (memory, submitted, completed, errno) in [
        (file, event, event, libc::EINVAL),
        (short.as_raw_fd(), event, event, libc::EINVAL),
        (open.as_raw_fd(), event, event, libc::EINVAL),
        (good, file, event, libc::EINVAL),
        (good, event, file, libc::EINVAL),
        (good, event, good, libc::EINVAL),
        (9999, event, event, libc::EBADF),
    ] {
        let mut request = abi::Ring { memory, submitted, completed, entries: 8, ..abi::Ring::default() };
        let error = call_plain(&directory, Command::Ring, &mut request).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(errno), "{request:?}");
    }
    let mut many = Vec::new();
    for (entries, most) in [(8, 48), (16, 64)] {
        many.resize_with(most, || Raw::new(&volume, entries));
        let memory = memfd(ring_bytes(entries) as u64);
        let mut request =
            abi::Ring { memory: memory.as_raw_fd(), submitted: event, completed: event, entries, ..abi::Ring::default() };
        let error = call_plain(&directory, Command::Ring, &mut request).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::ENOSPC), "a process has a share of rings");
    }
    drop(many);
}

#[test]
fn a_ring_learns_that_its_daemon_is_dead() {
    needs_mount!();
    let volume = Mounted::new();
    fs::write(volume.path("file"), tree::pattern(1, 8192)).unwrap();
    let file = OpenOptions::new().read(true).open(volume.path("file")).unwrap();
    file.sync_all().unwrap();
    let mount = Mount::open(volume.root()).unwrap();
    let buffer = shared(&mount, 65536);
    let mut ring = Ring::new(&mount, 8).unwrap();
    let attached = ring.attach(&gpunvme::File::of(file.try_clone().unwrap(), "file").unwrap()).unwrap();
    let (_, image) = volume.signal(Signal::KILL);
    ring.push(&Operation::read(&attached, 0, &buffer, 0, 4096)).unwrap();
    let error = ring.complete(Wait::Forever, &mut Vec::new()).unwrap_err();
    assert!(matches!(error, Error::RingClosed { .. }), "{error}");
    drop((ring, attached, buffer, file));
    let again = image.mount();
    assert_eq!(fs::read(again.path("file")).unwrap(), tree::pattern(1, 8192));
}

/// Whatever the order in which they come, writes that extend a file make it whole, and a program
/// that then reads it sees all of it.
#[test]
fn writes_extend_a_file_in_any_order() {
    needs_mount!();
    let volume = Mounted::new();
    let mount = Mount::open(volume.root()).unwrap();
    let data = tree::pattern(21, 8 << 20);
    let source = shared(&mount, 8 * MIB);
    source.copy_in(0, &data);
    let mut ring = Ring::new(&mount, 64).unwrap();
    for round in 0..100 {
        let path = volume.path(format!("out{round}"));
        let file = attach(&ring, &path);
        let len = [MIB, 256 << 10, 64 << 10][round as usize % 3];
        let mut order: Vec<u64> = (0..8 * MIB / len).collect();
        order.sort_by_key(|at| random(round * 128 + at, 1 << 30));
        let mut done = Vec::new();
        for &at in &order {
            while ring.room() == 0 {
                ring.complete(Wait::Forever, &mut done).unwrap();
            }
            ring.push(&Operation::write(&file, at * len, &source, at * len, len)).unwrap();
            ring.submit();
            if random(round + at, 10) == 0 {
                fs::metadata(&path).unwrap();
            }
        }
        let left = ring.in_flight();
        done.extend(wait_for(&mut ring, left));
        assert!(done.into_iter().all(|completed| completed.result.unwrap().bytes() == len));
        let read = fs::read(&path).unwrap();
        assert_eq!(read.len(), data.len(), "round {round}");
        let wrong = read.iter().zip(&data).position(|(read, written)| read != written);
        assert_eq!(wrong, None, "round {round}");
        fs::remove_file(&path).unwrap();
    }
}
