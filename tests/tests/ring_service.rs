//! Several rings on a real mount, and several threads of the daemon that serve them: which thread
//! serves which ring, how much each ring gets, and how rings end.

use std::fs::{self, File, OpenOptions};
use std::io::{BufRead, BufReader};
use std::process::{Child, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use gpunvme::{Mount, Operation, Ring, Wait};
use gpunvme_abi::Command;
use gpunvme_abi::RingMemory;
use gpunvme_abi::ring::{CLOSED, Submission, Word};
use gpunvme_tests::direct::Buffer;
use gpunvme_tests::mounted::{Image, Mounted};
use gpunvme_tests::random::Random;
use gpunvme_tests::rings::{Bystander, Raw, attach, bytes_of, serving_threads, shared, wait_for};
use gpunvme_tests::{needs_mount, tree};
use rustix::process::Pid;
use zerocopy::FromZeros;

const MIB: u64 = 1 << 20;
/// Mount options for one thread that serves rings, and for three.
const ONE: &str = "threads=2";
const THREE: &str = "threads=12";

/// A volume with three serving threads at the most, and a file of 64 MiB, "big".
fn volume_with_three() -> Mounted {
    let volume = Image::formatted().mount_with(THREE);
    fs::write(volume.path("big"), tree::pattern(2, 64 << 20)).unwrap();
    volume
}

#[test]
fn a_further_thread_serves_what_is_too_much_for_those_there_are() {
    needs_mount!();
    let rings_and_threads = |options: &str, entries: &[u32]| -> Vec<usize> {
        let volume = Image::formatted().mount_with(options);
        let mount = Mount::open(volume.root()).unwrap();
        let mut rings = Vec::new();
        let mut threads = vec![serving_threads(volume.daemon()).len()];
        for &entries in entries {
            rings.push(Ring::new(&mount, entries).unwrap());
            threads.push(serving_threads(volume.daemon()).len());
        }
        threads
    };
    assert_eq!(rings_and_threads(THREE, &[64, 4096, 64, 64]), [1, 1, 2, 3, 3], "one for each that can be busy");
    assert_eq!(rings_and_threads(THREE, &[8; 17])[15..], [1, 1, 2], "small ones share");
    assert_eq!(rings_and_threads(THREE, &[8, 64, 8, 8, 8]), [1, 1, 2, 2, 2, 2], "small ones leave the big one alone");
    assert_eq!(rings_and_threads(ONE, &[64, 64, 8]), [1, 1, 1, 1]);
}

#[test]
fn a_thread_whose_rings_are_gone_serves_the_next() {
    needs_mount!();
    let volume = volume_with_three();
    let mount = Mount::open(volume.root()).unwrap();
    let buffer = shared(&mount, MIB);
    for _ in 0..20 {
        let mut rings: Vec<_> = (0..3).map(|_| Ring::new(&mount, 64).unwrap()).collect();
        for ring in &mut rings {
            let file = attach(ring, volume.path("big"));
            ring.push(&Operation::read(&file, 0, &buffer, 0, 4096)).unwrap();
            wait_for(ring, 1).remove(0).result.unwrap();
        }
        assert_eq!(serving_threads(volume.daemon()).len(), 3);
    }
}

#[test]
fn many_rings_are_served_at_once() {
    needs_mount!();
    let volume = volume_with_three();
    let data = tree::pattern(2, 64 << 20);
    let others: Vec<_> = (0..2).map(|_| start_other(&volume, 16, 65536)).collect();
    let before = serving_threads(volume.daemon());
    std::thread::scope(|scope| {
        for thread in 0..12u64 {
            let (volume, data) = (&volume, &data);
            scope.spawn(move || {
                let mount = Mount::open(volume.root()).unwrap();
                let entries = [8, 8, 64][thread as usize % 3];
                let mut ring = Ring::new(&mount, entries).unwrap();
                let buffer = shared(&mount, u64::from(entries) << 16);
                let (from, to) = (attach(&ring, volume.path("big")), attach(&ring, volume.path(format!("of-{thread}"))));
                let mut random = Random(thread);
                let mut done = Vec::new();
                for round in 0..64u64 {
                    let places: Vec<(u64, u64)> =
                        (0..entries).map(|_| (random.place(63 * MIB), 1 + random.below(1 << 16))).collect();
                    for (slot, &(at, len)) in places.iter().enumerate() {
                        ring.push(&Operation::read(&from, at, &buffer, (slot as u64) << 16, len).tagged(slot as u64)).unwrap();
                    }
                    while ring.in_flight() > 0 {
                        assert!(ring.complete(Wait::Timeout(Duration::from_secs(60)), &mut done).unwrap() > 0, "no completion");
                    }
                    for completed in done.drain(..) {
                        let (slot, (at, len)) = (completed.user_data, places[completed.user_data as usize]);
                        assert_eq!(completed.result.unwrap().bytes(), len);
                        assert!(bytes_of(&buffer, slot << 16, len) == data[at as usize..(at + len) as usize]);
                    }
                    ring.push(&Operation::write(&to, round << 16, &buffer, 0, 1 << 16)).unwrap();
                    wait_for(&mut ring, 1).remove(0).result.unwrap();
                    let mut written = vec![0; 1 << 16];
                    let file = File::open(volume.path(format!("of-{thread}"))).unwrap();
                    std::os::unix::fs::FileExt::read_exact_at(&file, &mut written, round << 16).unwrap();
                    assert!(written == bytes_of(&buffer, 0, 1 << 16));
                }
            });
        }
    });
    let after = serving_threads(volume.daemon());
    assert_eq!(after.len(), 3);
    for (number, time) in after.iter().enumerate() {
        assert!(*time > before.get(number).copied().unwrap_or_default(), "the serving thread {number} did nothing");
    }
    others.into_iter().for_each(kill);
}

/// Fills a ring with reads of 1 MiB, and says so.
fn fill(ring: &Raw, file: &File, buffer: &Buffer) {
    let file = ring.attach(file);
    for position in 0..ring.memory.entries() {
        let at = u64::from(position) % 64 * MIB;
        let submission = Submission {
            command: Command::Read as u32,
            file,
            buffer: buffer.id,
            file_offset: at,
            buffer_offset: at,
            len: MIB,
            ..Submission::new_zeroed()
        };
        ring.memory.put_submission(position, &submission);
    }
    ring.publish(ring.memory.entries());
}

/// Transfers that were in flight at a moment, or some that ended just after it fewer.
fn in_flight(memory: &RingMemory) -> u32 {
    let taken = memory.load(Word::SubmissionHead);
    taken.saturating_sub(memory.load(Word::CompletionTail))
}

/// How many transfers of a ring were in flight most of the time, until all had ended.
fn mostly_in_flight(ring: &Raw) -> u32 {
    let late = Instant::now() + Duration::from_secs(60);
    let mut seen = Vec::new();
    while ring.memory.load(Word::CompletionTail) < ring.memory.entries() {
        seen.push(in_flight(&ring.memory));
        std::thread::sleep(Duration::from_micros(100));
        assert!(Instant::now() < late, "not all of a ring was done");
    }
    seen.sort_unstable();
    seen[seen.len() / 2]
}

/// All rings of a process together have 32 MiB in flight at the most, whichever threads serve them.
#[test]
fn rings_of_different_threads_share_what_is_in_flight() {
    needs_mount!();
    let volume = volume_with_three();
    let file = File::open(volume.path("big")).unwrap();
    let buffer = Buffer::new(&file, 64 * MIB);
    let rings: Vec<_> = [4096, 256, 256].into_iter().map(|entries| Raw::new(&volume, entries)).collect();
    assert_eq!(serving_threads(volume.daemon()).len(), 3, "each has its own");
    fill(&rings[0], &file, &buffer);
    rings[0].wait_until("nothing was begun", |memory| memory.load(Word::CompletionTail) > 0);
    fill(&rings[1], &file, &buffer);
    let beside = mostly_in_flight(&rings[1]);
    assert!(rings[0].memory.load(Word::CompletionTail) < 4096, "the other was there all the time");
    assert!((2..=16).contains(&beside), "{beside} of 1 MiB each, beside another busy ring");
    // One that goes while it is busy leaves its share to the others.
    rings[0].detach().unwrap();
    rings[0].wait_until("it was not closed", |memory| memory.load(Word::Daemon) == CLOSED);
    rings[0].wait_until("what was in flight did not end", |memory| in_flight(memory) == 0);
    fill(&rings[2], &file, &buffer);
    let alone = mostly_in_flight(&rings[2]);
    assert!((17..=32).contains(&alone), "{alone} of 1 MiB each, alone");
}

#[test]
fn rings_come_and_go_while_others_are_busy() {
    needs_mount!();
    let volume = volume_with_three();
    let mut bystander = Bystander::new(&volume);
    let others: Vec<_> = (0..3).map(|_| start_other(&volume, 64, MIB)).collect();
    let before = descriptors(volume.daemon());
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            let (volume, stop) = (&volume, &stop);
            scope.spawn(move || {
                let file = File::open(volume.path("big")).unwrap();
                let buffer = Buffer::new(&file, 64 * MIB);
                while !stop.load(Ordering::Relaxed) {
                    let ring = Raw::new(volume, 32);
                    fill(&ring, &file, &buffer);
                    // Now and then before anything of it was done.
                    ring.detach().unwrap();
                    assert_eq!(ring.memory.load(Word::Daemon), CLOSED);
                }
            });
        }
        let end = Instant::now() + Duration::from_secs(3);
        while Instant::now() < end {
            bystander.check();
        }
        stop.store(true, Ordering::Relaxed);
    });
    others.into_iter().for_each(kill);
    bystander.check();
    let late = Instant::now() + Duration::from_secs(20);
    while descriptors(volume.daemon()) > before {
        assert!(Instant::now() < late, "the daemon still holds what is gone");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// A thread that sleeps has looked at its rings before.
#[test]
fn a_ring_that_is_given_up_while_its_thread_sleeps_is_gone() {
    needs_mount!();
    let volume = volume_with_three();
    let mount = Mount::open(volume.root()).unwrap();
    let before = descriptors(volume.daemon());
    let rings: Vec<_> = (0..3).map(|_| Ring::new(&mount, 64).unwrap()).collect();
    assert_eq!(serving_threads(volume.daemon()).len(), 3);
    std::thread::sleep(Duration::from_millis(100));
    assert!(descriptors(volume.daemon()) >= before + 3 * 4, "each ring costs some");
    drop(rings);
    // The queues of two more threads stay.
    let late = Instant::now() + Duration::from_secs(20);
    while descriptors(volume.daemon()) > before + 2 {
        assert!(Instant::now() < late, "the daemon still holds what is gone");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// A volume is unmounted while its rings are full and no program holds the mount: transfers in
/// flight end, and each ring reports its end.
#[test]
fn a_volume_is_unmounted_under_busy_rings() {
    needs_mount!();
    for options in [ONE, THREE] {
        let volume = Image::formatted().mount_with(options);
        fs::write(volume.path("big"), tree::pattern(2, 64 << 20)).unwrap();
        let file = OpenOptions::new().read(true).write(true).open(volume.path("big")).unwrap();
        let buffer = Buffer::new(&file, 64 * MIB);
        let mut rings: Vec<_> = [4096, 8, 4096, 4096].into_iter().map(|entries| Raw::new(&volume, entries)).collect();
        for ring in &mut rings {
            fill(ring, &file, &buffer);
            ring.let_go();
        }
        drop(file);
        volume.unmount();
        for ring in &rings {
            assert_eq!(ring.memory.load(Word::Daemon), CLOSED);
            assert_eq!(in_flight(&ring.memory), 0, "what was taken has ended");
        }
        let taken: u32 = rings.iter().map(|ring| ring.memory.load(Word::SubmissionHead)).sum();
        assert!(taken < 3 * 4096, "they were busy to the end");
    }
}

/// Starts a process that keeps a ring of so many entries full until it is killed: it writes and
/// reads so many bytes of the file "big" at a time, which does not change by that.
fn start_other(volume: &Mounted, entries: u32, len: u64) -> Child {
    let mut child = std::process::Command::new(env!("CARGO_BIN_EXE_ring-client"))
        .arg("busy")
        .arg(volume.root())
        .args([entries.to_string(), len.to_string()])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert_eq!(line, "busy\n", "the other process ended");
    child
}

fn kill(mut child: Child) {
    child.kill().unwrap();
    child.wait().unwrap();
}

fn descriptors(daemon: Pid) -> usize {
    fs::read_dir(format!("/proc/{}/fd", daemon.as_raw_nonzero())).unwrap().count()
}

#[test]
fn a_process_killed_in_mid_transfer_leaves_nothing_behind() {
    needs_mount!();
    for options in [ONE, THREE] {
        a_killed_process_leaves_nothing_behind(Image::formatted().mount_with(options));
    }
}

fn a_killed_process_leaves_nothing_behind(volume: Mounted) {
    fs::write(volume.path("big"), tree::pattern(2, 64 << 20)).unwrap();
    let mut bystander = Bystander::new(&volume);
    bystander.check();
    let before = descriptors(volume.daemon());
    for _ in 0..3 {
        let child = start_other(&volume, 64, MIB);
        bystander.check();
        kill(child);
        bystander.check();
    }
    let late = Instant::now() + Duration::from_secs(20);
    while descriptors(volume.daemon()) > before + 2 {
        assert!(Instant::now() < late, "the daemon still holds what the dead had");
        std::thread::sleep(Duration::from_millis(20));
    }
    let stats = Mount::open(volume.root()).unwrap().stats().unwrap();
    assert_eq!((stats.processes, stats.buffers), (1, 1), "only the bystander's");
    drop(bystander);
    volume.unmount().check();
}

/// While one process has the device full of large reads, another's small ones get through between
/// them.
#[test]
fn a_small_ring_is_served_beside_a_greedy_one() {
    needs_mount!();
    for options in [ONE, THREE] {
        a_small_ring_is_served(Image::formatted().mount_with(options));
    }
}

fn a_small_ring_is_served(volume: Mounted) {
    fs::write(volume.path("big"), tree::pattern(2, 64 << 20)).unwrap();
    let mut bystander = Bystander::new(&volume);
    let greedy: Vec<_> = (0..3).map(|_| start_other(&volume, 64, MIB)).collect();
    for _ in 0..10 {
        bystander.check();
    }
    greedy.into_iter().for_each(kill);
}
