//! Attacks through the memory of a ring: random entries, positions that jump, completions that the
//! application never takes, pages that are removed.

use std::fs::{File, OpenOptions};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use gpunvme_abi::Command;
use gpunvme_abi::RingMemory;
use gpunvme_abi::ring::{ASLEEP, Attach, Detach, Ring, Submission, Word, ring_bytes};
use gpunvme_tests::attack::Attacker;
use gpunvme_tests::direct::{Buffer, call_plain, memfd};
use gpunvme_tests::random::Random;
use parking_lot::Mutex;
use rustix::fs::FallocateFlags;

use super::{MIB, any, carry_on, descriptors, number, one};

const WORDS: [Word; 6] =
    [Word::SubmissionTail, Word::SubmissionHead, Word::CompletionTail, Word::CompletionHead, Word::Daemon, Word::Application];
/// Rings that are kept at a time.
const RINGS: usize = 12;

/// A ring, as far as it came about.
struct Made {
    name: u64,
    memory: Arc<RingMemory>,
    fd: OwnedFd,
    submitted: OwnedFd,
    _completed: OwnedFd,
    files: Vec<u64>,
}

pub fn fuzz_ring_memory(attacker: &mut Attacker) {
    let theirs: u64 = attacker.hear().parse().unwrap();
    let path = attacker.path(format!("ring-{}", std::process::id()));
    let own = OpenOptions::new().read(true).write(true).create(true).truncate(true).open(path).unwrap();
    own.set_len(MIB).unwrap();
    let files = [own.try_clone().unwrap(), File::open(attacker.path(crate::victim::FILE)).unwrap(), attacker.root()];
    let buffer = Buffer::of(memfd(MIB), &own, MIB).expect("a user has a share");
    let mut rings: Vec<Made> = Vec::new();
    let scribbled = begin_scribbling();
    let mut steps = 0u64;
    carry_on(attacker, |random| {
        steps += 1;
        if steps.is_multiple_of(256) {
            own.set_len(MIB).unwrap();
        }
        if rings.is_empty() || random.below(24) == 0 {
            if rings.len() == RINGS {
                let ring = rings.swap_remove(random.below(RINGS as u64) as usize);
                if random.below(2) == 0 {
                    let _ = call_plain(&own, Command::Detach, &mut Detach { ring: ring.name, ..Detach::default() });
                }
            }
            rings.extend(make(random, &own));
            return;
        }
        let at = random.below(rings.len() as u64) as usize;
        let ring = &mut rings[at];
        match random.below(16) {
            0 => {
                let file = one(random, &files);
                let shown = if random.below(8) == 0 { one(random, &files) } else { file };
                let mut attach = Attach { ring: ring.name, descriptor: shown.as_raw_fd(), ..Attach::default() };
                if call_plain(file, Command::Attach, &mut attach).is_ok() {
                    ring.files.push(attach.file);
                }
            }
            1 => {
                let file = if random.below(4) == 0 { number(random) } else { ring.files.pop().unwrap_or(1) };
                if file != 0 {
                    let _ = call_plain(&own, Command::Detach, &mut Detach { ring: ring.name, file, ..Detach::default() });
                }
            }
            2 => {
                // Words that are not this side's to write, too.
                let word = *one(random, &WORDS);
                let value = match random.below(3) {
                    0 => ring.memory.load(word).wrapping_add(random.below(9) as u32).wrapping_sub(4),
                    1 => random.below(3) as u32,
                    _ => any(random) as u32,
                };
                ring.memory.store(word, value);
            }
            3 => {
                let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
                let target = if random.below(2) == 0 { ring.fd.as_fd() } else { buffer.memory.as_fd() };
                let _ = rustix::fs::fallocate(target, punch, random.place(MIB), 4096 << random.below(8));
                let _ = rustix::fs::ftruncate(&ring.fd, random.below(8192));
            }
            4 => *scribbled.lock() = Some(ring.memory.clone()),
            // Takes completions, or says that it did.
            5 => ring.memory.store(Word::CompletionHead, ring.memory.load(Word::CompletionTail)),
            6 => ring.memory.store(Word::Application, ASLEEP),
            _ => submit(random, ring, buffer.id, theirs),
        }
    });
}

/// Submits some entries that are nearly right, or not at all.
fn submit(random: &mut Random, ring: &Made, buffer: u64, theirs: u64) {
    let tail = ring.memory.load(Word::SubmissionTail);
    let count = 1 + random.below(u64::from(ring.memory.entries())) as u32;
    for position in 0..count {
        let wild = random.below(8) == 0;
        let len = if wild { number(random) } else { random.place(MIB) };
        let submission = Submission {
            command: if wild { number(random) as u32 } else { 4 + random.below(2) as u32 },
            flags: if random.below(8) == 0 { random.below(40) as u32 } else { 0 },
            file: if random.below(8) == 0 { number(random) } else { 1 + random.below(1 + ring.files.len() as u64) },
            buffer: match random.below(10) {
                0 => theirs,
                1 => number(random),
                _ => buffer,
            },
            file_offset: if wild { number(random) } else { random.place(2 * MIB) },
            buffer_offset: if random.below(8) == 0 { number(random) } else { random.place(MIB - len.min(MIB - 1)) },
            len,
            user_data: any(random),
            reserved: u64::from(random.below(64) == 0),
        };
        ring.memory.put_submission(tail.wrapping_add(position), &submission);
    }
    ring.memory.swap(Word::SubmissionTail, tail.wrapping_add(count));
    // One that is full takes no more, and would wait.
    let _ = rustix::fs::fcntl_setfl(&ring.submitted, rustix::fs::OFlags::NONBLOCK);
    let _ = rustix::io::write(&ring.submitted, &1u64.to_ne_bytes());
}

/// A ring of what may be right.
fn make(random: &mut Random, file: &File) -> Option<Made> {
    let entries = match random.below(8) {
        0 => number(random) as u32,
        1 => 4096,
        _ => 8 << random.below(4),
    };
    let usual = entries.is_power_of_two() && entries <= 4096;
    let fd = match random.below(8) {
        0 => descriptors::memory(random),
        _ => memfd(ring_bytes(if usual { entries } else { 8 }) as u64).into(),
    };
    // A mapping must be there before the daemon seals the memory; what it touches is there,
    // whatever else the memory is.
    let seals = rustix::fs::fcntl_get_seals(&fd).unwrap_or(rustix::fs::SealFlags::empty());
    let long_enough = rustix::fs::fstat(&fd).is_ok_and(|stat| stat.st_size as u64 >= ring_bytes(4096.min(entries)) as u64);
    let safe = usual && long_enough && seals.contains(rustix::fs::SealFlags::SHRINK);
    let memory = if safe { RingMemory::map(fd.as_fd(), entries).ok().map(Arc::new) } else { None };
    let (submitted, completed) = (descriptors::eventfd(random), descriptors::eventfd(random));
    let other = descriptors::memory(random);
    let mut request = Ring {
        memory: fd.as_raw_fd(),
        submitted: if random.below(16) == 0 { other.as_raw_fd() } else { submitted.as_raw_fd() },
        completed: if random.below(16) == 0 { submitted.as_raw_fd() } else { completed.as_raw_fd() },
        entries,
        ..Ring::default()
    };
    if let (Some(memory), true) = (&memory, random.below(4) == 0) {
        // It need not begin with zeros.
        WORDS.iter().for_each(|word| memory.store(*word, any(random) as u32));
    }
    call_plain(file, Command::Ring, &mut request).ok()?;
    Some(Made { name: request.ring, memory: memory?, fd, submitted, _completed: completed, files: Vec::new() })
}

/// Begins a thread that changes entries and words of a ring, whichever it is given, while the
/// daemon looks at them.
fn begin_scribbling() -> Arc<Mutex<Option<Arc<RingMemory>>>> {
    let target: Arc<Mutex<Option<Arc<RingMemory>>>> = Arc::default();
    let given = target.clone();
    thread::spawn(move || {
        let mut random = Random(7);
        loop {
            let Some(ring) = given.lock().take() else {
                thread::sleep(Duration::from_millis(1));
                continue;
            };
            for _ in 0..2000 {
                let position = random.below(u64::from(ring.entries())) as u32;
                let mut submission = ring.submission(position);
                match random.below(3) {
                    0 => submission.len = number(&mut random),
                    1 => submission.file_offset = number(&mut random),
                    _ => submission.buffer_offset = number(&mut random),
                }
                ring.put_submission(position, &submission);
            }
            ring.store(Word::CompletionTail, any(&mut random) as u32);
        }
    });
    target
}
