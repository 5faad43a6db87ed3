//! A user who works on a mount while others attack it: reads by ioctl and by a ring, and a write
//! that is synced, again and again.

use std::fmt;
use std::fs::{self, File};
use std::os::unix::fs::{FileExt, PermissionsExt, chown};
use std::str::FromStr;
use std::time::Duration;

use gpunvme::{Mount, Operation, Ring};
use gpunvme_tests::attack::{Attack, Attacker, RunningAttack, STRANGER};
use gpunvme_tests::direct::Buffer;
use gpunvme_tests::mounted::Mounted;
use gpunvme_tests::observe::Victim;
use gpunvme_tests::rings::{attach, bytes_of, shared, wait_for};
use gpunvme_tests::{attacks, tree};

pub const ATTACKS: &[(&str, Attack)] = attacks![be_a_victim];

/// The file that it reads, which others may read, and its length.
pub const FILE: &str = "victim";
const LEN: usize = 1 << 20;
const BLOCK: u64 = 4096;

/// How often each of its calls was answered, and how long the longest took, in milliseconds.
#[derive(Clone, Copy, Debug, Default)]
pub struct Latencies([(u64, u64); 3]);

impl Latencies {
    pub fn longest(&self) -> Duration {
        Duration::from_millis(self.0.iter().map(|(_, longest)| *longest).max().unwrap_or(0))
    }

    /// Of the call that was answered least often.
    pub fn count(&self) -> u64 {
        self.0.iter().map(|(count, _)| *count).min().unwrap_or(0)
    }
}

impl fmt::Display for Latencies {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [ioctl, ring, write] = self.0;
        write!(out, "READ {} {} ring {} {} write+fsync {} {}", ioctl.0, ioctl.1, ring.0, ring.1, write.0, write.1)
    }
}

impl FromStr for Latencies {
    type Err = std::num::ParseIntError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let numbers: Vec<u64> = text
            .split(' ')
            .filter(|word| word.starts_with(|first: char| first.is_ascii_digit()))
            .map(str::parse)
            .collect::<Result<_, _>>()?;
        Ok(Self(std::array::from_fn(|at| (numbers[2 * at], numbers[2 * at + 1]))))
    }
}

/// Begins one, which says how it fares whenever it is asked `so far`. Returns the name of its
/// buffer too.
pub fn begin(volume: &Mounted) -> (RunningAttack, String) {
    fs::write(volume.path(FILE), tree::pattern(1, LEN)).unwrap();
    chown(volume.path(FILE), Some(STRANGER), Some(STRANGER)).unwrap();
    fs::set_permissions(volume.path(FILE), PermissionsExt::from_mode(0o644)).unwrap();
    let mut victim = RunningAttack::begin(volume, STRANGER, "be_a_victim");
    let buffer = victim.hear();
    (victim, buffer)
}

fn be_a_victim(attacker: &mut Attacker) {
    let expected = tree::pattern(1, LEN);
    let expected_of = move |block: u64| expected[(block * BLOCK) as usize..][..BLOCK as usize].to_vec();
    let file = File::open(attacker.path(FILE)).unwrap();
    let buffer = Buffer::new(&file, BLOCK);
    attacker.say(buffer.id);

    let mount = Mount::open(attacker.path("")).unwrap();
    let mut ring = Ring::new(&mount, 16).unwrap();
    let attached = attach(&ring, attacker.path(FILE));
    let memory = shared(&mount, BLOCK);
    let own = File::create(attacker.path("victims-own")).unwrap();

    let mut next = (0..LEN as u64 / BLOCK).cycle();
    let by_ioctl = Victim::begin({
        let (expected_of, mut next) = (expected_of.clone(), next.clone());
        move || {
            let block = next.next().unwrap();
            assert_eq!(buffer.read(&file, block * BLOCK, BLOCK).unwrap().bytes, BLOCK);
            assert!(buffer.get(0, BLOCK as usize) == expected_of(block), "READ of block {block}");
        }
    });
    let by_ring = Victim::begin(move || {
        let block = next.next().unwrap();
        ring.push(&Operation::read(&attached, block * BLOCK, &memory, 0, BLOCK)).unwrap();
        assert_eq!(wait_for(&mut ring, 1).remove(0).result.unwrap().bytes(), BLOCK);
        assert!(bytes_of(&memory, 0, BLOCK) == expected_of(block), "a ring's READ of block {block}");
    });
    let by_write = Victim::begin(move || {
        own.write_all_at(&[7; BLOCK as usize], 0).unwrap();
        own.sync_all().unwrap();
    });
    let all = [by_ioctl, by_ring, by_write];
    while attacker.hear() == "so far" {
        let each = all.each_ref().map(|call| (call.count(), call.longest().as_millis() as u64));
        attacker.say(Latencies(each));
    }
    let _longest = all.map(Victim::end);
}
