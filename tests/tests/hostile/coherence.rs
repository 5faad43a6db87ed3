//! Attacks by pages of the kernel that the daemon has to ask for: long files that are mapped and
//! changed all the time, and pages that are read, written, shortened and asked for at once.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use gpunvme_abi::{Command, Extent, Resolve, Segment, Transfer, TransferFlags};
use gpunvme_tests::attack::{self, Attack, Attacker, NOBODY, RunningAttack};
use gpunvme_tests::direct::{Buffer, call};
use gpunvme_tests::sys::Mapping;
use gpunvme_tests::{attacks, needs_mount};
use zerocopy::FromZeros;

use crate::victim::{self, Latencies};

pub const ATTACKS: &[(&str, Attack)] =
    attacks![resolve_a_file_that_is_changed, resolve_a_page_that_is_written, shorten_a_page_that_is_mapped];

const LEN: usize = 256 << 20;
const MIB: usize = 1 << 20;
const PAGE: usize = 4096;
/// Calls in flight: more than the daemon has threads for them, and many times more.
const CALLS: usize = 64;
const MANY_CALLS: usize = 256;

/// A new file, open for reading and writing.
fn create(path: &Path) -> File {
    File::options().read(true).write(true).create_new(true).open(path).unwrap()
}

/// Has all of a file written back.
fn resolve(file: &File) {
    let mut one = [Extent::new_zeroed()];
    let mut resolve = Resolve { len: u64::MAX, capacity: 1, ..Resolve::default() };
    call(file, Command::Resolve, &mut resolve, &mut one).unwrap();
}

/// Changes all pages of a long file by a mapping again and again, and has them written back by many
/// calls at once, until it is killed.
fn resolve_a_file_that_is_changed(attacker: &mut Attacker) {
    let file = create(&attacker.path("changed"));
    (0..LEN).step_by(MIB).for_each(|at| file.write_all_at(&[5; MIB], at as u64).unwrap());
    file.sync_all().unwrap();
    let mapping = Mapping::shared(&file, LEN).unwrap();
    thread::scope(|scope| {
        for _ in 0..MANY_CALLS {
            scope.spawn(|| {
                loop {
                    resolve(&file);
                }
            });
        }
        attacker.say("begun");
        for round in 0..=u8::MAX {
            (0..LEN).step_by(PAGE).for_each(|at| mapping.write(at, &[round]));
        }
    });
}

/// Reads and writes a part of a page, which the kernel keeps locked until the write is answered,
/// while many calls have it written back; for a few seconds.
fn resolve_a_page_that_is_written(attacker: &mut Attacker) {
    const ROUNDS: usize = 2000;
    let file = create(&attacker.path("page"));
    file.write_all_at(&[5; 2 * PAGE], 0).unwrap();
    thread::scope(|scope| {
        for number in 0..CALLS {
            let file = &file;
            scope.spawn(move || {
                for _ in 0..ROUNDS {
                    match number % 4 {
                        0 => file.write_all_at(&[7; PAGE + 100], 0).unwrap(),
                        1 => file.read_exact_at(&mut [0; PAGE], PAGE as u64).unwrap(),
                        _ => resolve(file),
                    }
                }
            });
        }
    });
    attacker.say("done");
}

/// Changes a page by a mapping, has it moved both ways directly, and shortens the file, all at
/// once; for a few seconds.
fn shorten_a_page_that_is_mapped(attacker: &mut Attacker) {
    let file = create(&attacker.path("mapped"));
    file.set_len(PAGE as u64).unwrap();
    let buffer = Buffer::new(&file, PAGE as u64);
    let mapping = Mapping::shared(&file, PAGE).unwrap();
    let end = Instant::now() + Duration::from_secs(3);
    let until_end = |what: &dyn Fn()| {
        while Instant::now() < end {
            what();
        }
    };
    let move_it = |command, flags: TransferFlags| {
        let mut whole = [Segment { file_offset: 0, buffer_offset: 0, len: PAGE as u64 }];
        let descriptor = file.as_raw_fd();
        let (flags, buffer) = (flags.bits(), buffer.id);
        let mut transfer = Transfer { flags, buffer, segments: 1, descriptor, ..Transfer::default() };
        call(&file, command, &mut transfer, &mut whole).unwrap();
    };
    thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| until_end(&|| move_it(Command::Read, TransferFlags::empty())));
            scope.spawn(|| until_end(&|| move_it(Command::Write, TransferFlags::WRITTEN_BACK)));
        }
        scope.spawn(|| until_end(&|| file.set_len(100).unwrap()));
        until_end(&|| mapping.write(1, &[7]));
    });
    attacker.say("done");
}

fn attacked(attack: &str, until: &str, more: Duration) -> Latencies {
    let volume = attack::volume("");
    let (mut victim, _) = victim::begin(&volume);
    let mut attack = RunningAttack::begin(&volume, NOBODY, attack);
    attack.wait_for(until);
    thread::sleep(more);
    victim.say("so far");
    let fares: Latencies = victim.hear().parse().unwrap();
    eprintln!("a victim's {fares}");
    attack.kill();
    victim.say("end");
    victim.end();
    volume.unmount();
    fares
}

#[test]
fn a_user_whose_pages_take_long_to_write_back_holds_no_other_up() {
    needs_mount!();
    let fares = attacked("resolve_a_file_that_is_changed", "begun", Duration::from_secs(8));
    assert!(fares.longest() < Duration::from_secs(2), "a victim's {fares}");
}

/// The threads that wait for a page wait for the answer to its write; which must not wait for one
/// of them.
#[test]
fn a_page_that_is_written_and_asked_for_at_once_is_answered() {
    needs_mount!();
    let fares = attacked("resolve_a_page_that_is_written", "done", Duration::ZERO);
    assert!(fares.longest() < Duration::from_secs(2), "a victim's {fares}");
}

/// What shortens a file is answered before the kernel writes its pages back, so that the answer
/// must not wait for one of them.
#[test]
fn a_page_that_is_mapped_moved_and_cut_off_at_once_is_answered() {
    needs_mount!();
    let fares = attacked("shorten_a_page_that_is_mapped", "done", Duration::ZERO);
    assert!(fares.longest() < Duration::from_secs(2), "a victim's {fares}");
}
