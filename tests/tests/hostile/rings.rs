//! Attacks by rings: a user makes as many rings as the daemon allows.

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use gpunvme_abi::Command;
use gpunvme_abi::ring::{self as abi, ring_bytes};
use gpunvme_tests::attack::{self, Attack, Attacker, NOBODY, RunningAttack, STRANGER};
use gpunvme_tests::direct::{call_plain, memfd};
use gpunvme_tests::{attacks, needs_mount};
use rustix::event::EventfdFlags;

pub const ATTACKS: &[(&str, Attack)] = attacks![make_all_rings];

/// Of the smallest rings, of 8, a user has fewer.
const ENTRIES: u32 = 16;

/// A ring, or the errno.
fn ring(directory: &File) -> Result<[OwnedFd; 2], i32> {
    let memory = memfd(ring_bytes(ENTRIES) as u64);
    let event = || rustix::event::eventfd(0, EventfdFlags::CLOEXEC).unwrap();
    let [submitted, completed] = [event(), event()];
    let mut request = abi::Ring {
        memory: memory.as_fd().as_raw_fd(),
        submitted: submitted.as_raw_fd(),
        completed: completed.as_raw_fd(),
        entries: ENTRIES,
        ..abi::Ring::default()
    };
    let made = call_plain(directory, Command::Ring, &mut request);
    made.map(|()| [submitted, completed]).map_err(|error| error.raw_os_error().unwrap())
}

/// Makes rings until there is no more, says how many, and keeps them.
fn make_all_rings(attacker: &mut Attacker) {
    let root = attacker.root();
    let mut rings = Vec::new();
    let errno = loop {
        match ring(&root) {
            Ok(ring) => rings.push(ring),
            Err(errno) => break errno,
        }
    };
    assert_eq!(errno, libc::ENOSPC);
    attacker.say(rings.len());
    attacker.wait_for("enough");
}

#[test]
fn a_user_who_makes_all_rings_leaves_some_to_others() {
    needs_mount!();
    let volume = attack::volume("");
    let begin = |user| {
        let mut attack = RunningAttack::begin(&volume, user, "make_all_rings");
        let made: usize = attack.hear().parse().unwrap();
        (attack, made)
    };
    // A process has 64 at the most.
    let mut attacks: Vec<_> = (0..8).map(|_| begin(NOBODY)).collect();
    let of_one: usize = attacks.iter().map(|(_, made)| made).sum();
    assert!(of_one <= 448 && attacks.last().unwrap().1 == 0, "a user has a share: {of_one}");
    let (stranger, made) = begin(STRANGER);
    assert!(made > 0 && made >= of_one.min(64), "another user got {made} after {of_one}");
    attacks.push((stranger, made));
    // Whatever all users took.
    attacks.extend((1..8).map(|other| begin(STRANGER - other)));
    ring(&File::open(volume.root()).unwrap()).expect("root always gets one");
    for (mut attack, _) in attacks {
        attack.say("enough");
        attack.end();
    }
}
