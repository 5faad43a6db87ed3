//! More and longer transfers by ioctl than a device can have in flight.

use std::fs::{self, File};
use std::os::unix::fs::PermissionsExt;
use std::thread;
use std::time::Duration;

use gpunvme_tests::attack::{self, Attack, Attacker, NOBODY, RunningAttack};
use gpunvme_tests::direct::Buffer;
use gpunvme_tests::{attacks, needs_mount, tree};

use crate::victim::{self, Latencies};

pub const ATTACKS: &[(&str, Attack)] = attacks![read_more_than_the_device_can];

const FILE: &str = "large";
const LEN: u64 = 64 << 20;
const PROCESSES: usize = 6;
const THREADS: usize = 16;

/// Has as many long reads in flight as it has threads, until it is killed.
fn read_more_than_the_device_can(attacker: &mut Attacker) {
    let file = File::open(attacker.path(FILE)).unwrap();
    let buffer = Buffer::new(&file, LEN);
    thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| {
                loop {
                    assert_eq!(buffer.read(&file, 0, LEN).unwrap().bytes, LEN);
                }
            });
        }
        attacker.say("begun");
    });
}

/// All those reads together take the device ten seconds and more; another user waits for a share of
/// it.
#[test]
fn users_take_turns_with_the_device() {
    needs_mount!();
    let volume = attack::volume("");
    fs::write(volume.path(FILE), tree::pattern(5, LEN as usize)).unwrap();
    fs::set_permissions(volume.path(FILE), PermissionsExt::from_mode(0o644)).unwrap();
    File::open(volume.path(FILE)).unwrap().sync_all().unwrap();
    let (mut victim, _) = victim::begin(&volume);
    let mut attacks: Vec<_> =
        (0..PROCESSES).map(|_| RunningAttack::begin(&volume, NOBODY, "read_more_than_the_device_can")).collect();
    attacks.iter_mut().for_each(|attack| attack.wait_for("begun"));
    thread::sleep(Duration::from_secs(4));
    victim.say("so far");
    let fares: Latencies = victim.hear().parse().unwrap();
    for attack in attacks {
        attack.kill();
    }
    eprintln!("a victim's {fares}");
    assert!(fares.longest() < Duration::from_secs(2), "a victim's {fares}");
    victim.say("end");
    victim.end();
    volume.unmount();
}
