//! Everything that users can send a daemon, at random: ioctls, messages with descriptors, and the
//! memory of rings. Meanwhile another user works on the same mount, and must be served as before.

mod descriptors;
mod ioctls;
mod messages;
mod ring_memory;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use gpunvme_tests::attack::{self, Attack, Attacker, NOBODY, RunningAttack};
use gpunvme_tests::observe::Figures;
use gpunvme_tests::random::Random;
use gpunvme_tests::{attacks, needs_mount};

use ioctls::fuzz_ioctls;
use messages::fuzz_messages;
use ring_memory::fuzz_ring_memory;

use crate::victim::{self, Latencies};

pub const ATTACKS: &[(&str, Attack)] = attacks![fuzz_ioctls, fuzz_messages, fuzz_ring_memory];

/// How long any call may take, a victim's or an attacker's own. One that hangs takes for ever.
const PATIENCE: Duration = Duration::from_secs(20);
/// How long the daemon has to let go of what attackers left: threads without work stay for 10
/// seconds.
const SETTLING: Duration = Duration::from_secs(40);
/// How long attackers live.
const ROUND: Duration = Duration::from_secs(8);
const MIB: u64 = 1 << 20;

/// Numbers near which mistakes are made, and others.
fn number(random: &mut Random) -> u64 {
    let edges = [0, 1, 512, 4096, 64 << 10, MIB, 1 << 30, 1 << 31, 1 << 32, 1 << 43, 1 << 62, 1 << 63, u64::MAX];
    let near = edges[random.below(edges.len() as u64) as usize];
    match random.below(8) {
        0 => any(random),
        1..3 => near.wrapping_add(random.below(8192)).wrapping_sub(4096),
        3 => near.wrapping_sub(1),
        4 => near.wrapping_add(1),
        _ => near,
    }
}

/// Any number.
fn any(random: &mut Random) -> u64 {
    random.below(1 << 31) << 33 ^ random.below(1 << 31) << 16 ^ random.below(1 << 31)
}

/// One of these.
fn one<'a, T>(random: &mut Random, choices: &'a [T]) -> &'a T {
    &choices[random.below(choices.len() as u64) as usize]
}

/// Bytes without any meaning.
fn noise(random: &mut Random, len: usize) -> Vec<u8> {
    match random.below(3) {
        0 => vec![0; len],
        1 => vec![0xff; len],
        _ => (0..len).map(|_| random.below(256) as u8).collect(),
    }
}

/// What an attacker does: it hears a seed and how many milliseconds it has, attacks, says how
/// often, and keeps what it has until it is told to go on. A call that does not come back is its
/// end.
fn carry_on(attacker: &mut Attacker, mut step: impl FnMut(&mut Random)) {
    let told: Vec<u64> = attacker.hear().split(' ').map(|word| word.parse().unwrap()).collect();
    let (seed, lasting) = (told[0], Duration::from_millis(told[1]));
    let count = Arc::new(AtomicU64::new(0));
    thread::spawn({
        let count = count.clone();
        move || loop {
            let before = count.load(Ordering::Relaxed);
            thread::sleep(PATIENCE);
            if count.load(Ordering::Relaxed) == before {
                eprintln!("call {before} of seed {seed} has not come back for {PATIENCE:?}");
                std::process::abort();
            }
        }
    });
    let (begun, mut random) = (Instant::now(), Random(seed));
    while begun.elapsed() < lasting {
        step(&mut random);
        count.fetch_add(1, Ordering::Relaxed);
    }
    attacker.say(count.swap(u64::MAX >> 1, Ordering::Relaxed));
    let keep_counting = count;
    thread::spawn(move || {
        loop {
            keep_counting.fetch_add(1, Ordering::Relaxed);
            thread::sleep(Duration::from_secs(1));
        }
    });
    attacker.wait_for("go on");
}

fn variable(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().unwrap_or_else(|_| panic!("{name} has to be a number")))
}

/// Waits until the daemon holds no more than before, except for what it keeps on purpose: caches,
/// and the allocator's free memory.
fn settle(daemon: rustix::process::Pid, before: Figures) -> Figures {
    let is_settled = |now: Figures| {
        now.threads <= before.threads + 8
            && now.descriptors <= before.descriptors + 4
            && now.anonymous <= before.anonymous + 96 * MIB
            && now.shared <= before.shared + MIB
    };
    let since = Instant::now();
    loop {
        let now = Figures::of(daemon);
        if is_settled(now) {
            return now;
        }
        assert!(since.elapsed() < SETTLING, "{before:?} became {now:?}, and stays so");
        thread::sleep(Duration::from_millis(100));
    }
}

/// `ABI_SEED` repeats what the attackers of one round send; `ABI_SECONDS` goes on for as long, from
/// a seed of its own.
#[test]
fn whatever_users_send_the_daemon_lives_and_others_are_served() {
    needs_mount!();
    let (only, seconds) = (variable("ABI_SEED"), variable("ABI_SECONDS"));
    let since_1970 = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
    let first = only.unwrap_or(if seconds.is_some() { since_1970.as_millis() as u64 } else { 1 });
    let end = Instant::now() + Duration::from_secs(seconds.unwrap_or(0));

    let volume = attack::volume("");
    let (mut victim, names) = victim::begin(&volume);
    thread::sleep(Duration::from_secs(1));
    let before = Figures::of(volume.daemon());
    let mut longest = Latencies::default();

    for (round, seed) in (first..).enumerate() {
        eprintln!("ABI_SEED={seed}");
        let kinds = ["fuzz_ioctls", "fuzz_messages", "fuzz_ring_memory", "fuzz_ioctls", "fuzz_ring_memory"];
        let mut attacks: Vec<_> = kinds.iter().map(|kind| RunningAttack::begin(&volume, NOBODY, kind)).collect();
        for (number, attack) in attacks.iter_mut().enumerate() {
            attack.say(&names);
            attack.say(format!("{} {}", seed * 16 + number as u64, ROUND.as_millis()));
        }
        let (since, mut most) = (Instant::now(), before);
        while since.elapsed() < ROUND {
            thread::sleep(Duration::from_millis(50));
            let now = Figures::of(volume.daemon());
            most.anonymous = most.anonymous.max(now.anonymous);
            most.threads = most.threads.max(now.threads);
            most.descriptors = most.descriptors.max(now.descriptors);
        }
        let calls: Vec<_> = attacks.iter_mut().map(RunningAttack::hear).collect();
        // One ends as programs do, the next amid what it does.
        for (number, mut attack) in attacks.into_iter().enumerate() {
            if (number + round).is_multiple_of(2) {
                attack.say("go on");
                attack.end();
            } else {
                attack.kill();
            }
        }
        victim.say("so far");
        longest = victim.hear().parse().unwrap();
        let after = settle(volume.daemon(), before);
        eprintln!("calls {calls:?}, a victim's {longest}\n  {before:?} became\n  {most:?} and\n  {after:?}");
        // All that its pools may have.
        assert!(most.threads < before.threads + 200, "{before:?} became {most:?}");
        assert!(most.descriptors < before.descriptors + 20_000, "{before:?} became {most:?}");
        assert!(most.anonymous < before.anonymous + 768 * MIB, "{before:?} became {most:?}");
        assert!(longest.longest() < PATIENCE, "a victim's {longest}");
        if Instant::now() >= end || only.is_some() {
            break;
        }
    }
    victim.say("end");
    victim.end();
    assert!(longest.count() > 100, "a victim's {longest}");
    volume.unmount();
}
