//! A user who works on a mount while others attack it: reads by ioctl and by a ring, a write that
//! is synced, and one by ioctl that makes a file longer, again and again.

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
/// What it appends.
const PIECE: u64 = 64 << 10;
/// How long a file of its own becomes before it begins anew.
const LONGEST: u64 = 16 << 20;

/// How often each of its calls was answered, and how long the longest took, in milliseconds.
#[derive(Clone, Copy, Debug, Default)]
pub struct Latencies([(u64, u64); 4]);

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
        let names = ["READ", "ring", "write+fsync", "WRITE"];
        names.iter().zip(self.0).try_for_each(|(name, (count, longest))| write!(out, "{name} {count} {longest} "))
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
    let growing = File::options().read(true).write(true).create_new(true).open(attacker.path("victims-growing")).unwrap();
    let piece = Buffer::new(&growing, PIECE);
    let mut end = 0;
    let by_append = Victim::begin(move || {
        assert_eq!(piece.write(&growing, end, PIECE).unwrap().bytes, PIECE);
        end += PIECE;
        if end == LONGEST {
            growing.set_len(0).unwrap();
            end = 0;
        }
    });
    let all = [by_ioctl, by_ring, by_write, by_append];
    while attacker.hear() == "so far" {
        let each = all.each_ref().map(|call| (call.count(), call.longest().as_millis() as u64));
        attacker.say(Latencies(each));
    }
    let _longest = all.map(Victim::end);
}
