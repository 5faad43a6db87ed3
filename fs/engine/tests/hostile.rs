//! Images that an attacker made: metadata is changed at random and its checksums are put right, so
//! that everything behind them is reached. Whatever is in an image, opening, walking, reading,
//! changing, checking, repairing and dumping it ends, with an error or without one, and neither
//! ends the process nor uses up its memory. What was repaired is sound, and a dump has the same
//! faults.
//!
//! `HOSTILE_SECONDS` sets the time budget (15 by default), `HOSTILE_SEED` replays one seed, and
//! `HOSTILE_IMAGE` names a volume, or a dump of one, that is attacked besides.

use std::time::{Duration, Instant};

use crate::attack::{Change, dump_it, repair_it, use_it, victims};
use crate::common::{Random, open};

/// A few changes of one block.
fn changes(random: &mut Random) -> Vec<Change> {
    let block = random.below(1 << 20) as usize;
    let seal = random.below(20) != 0;
    (0..=random.below(4))
        .map(|_| {
            // The head of a node matters most, and so do whole numbers.
            let at = if random.below(2) == 0 { random.below(200) } else { random.below(4040) } as usize;
            let (add, value) = match random.below(4) {
                0 => (false, 0),
                1 => (false, u64::MAX),
                2 => (true, 1),
                _ => (false, random.below(256) * 0x0101_0101_0101_0101),
            };
            Change { block, at, len: 1 << random.below(4), add, value, seal }
        })
        .collect()
}

#[test]
fn no_image_takes_the_process_down() {
    let number = |name: &str| std::env::var(name).ok().map(|v| v.parse::<u64>().expect("a number"));
    let deadline = Instant::now() + Duration::from_secs(number("HOSTILE_SECONDS").unwrap_or(15));
    let mut images = 0;
    let (mut opened, mut repaired, mut dumped) = (0, 0, 0);
    let victims = victims();
    for seed in number("HOSTILE_SEED").unwrap_or(0).. {
        let mut random = Random(seed);
        let victim = &victims[random.below(victims.len() as u64) as usize];
        let changes: Vec<Change> = (0..=random.below(3)).flat_map(|_| changes(&mut random)).collect();
        // Printed by the harness when it fails, and only then.
        println!("HOSTILE_SEED={seed}");
        dumped += u32::from(dump_it(&victim.changed(&changes)));
        repaired += u32::from(repair_it(&victim.changed(&changes)));
        if let Ok(fs) = open(&victim.changed(&changes)) {
            opened += 1;
            let _ = use_it(&fs, &mut random);
        }
        images += 1;
        // However slow the machine is, some images are tried.
        if (Instant::now() > deadline && images >= 50) || number("HOSTILE_SEED").is_some() {
            break;
        }
    }
    println!("{images} images, {opened} of them opened, {repaired} of them repaired, {dumped} of them dumped");
    assert!(number("HOSTILE_SEED").is_some() || (opened > 0 && repaired > 0 && dumped > 0));
}
