//! Power cuts in a repair that builds most of the tree anew, item by item.

use std::sync::Arc;

use gpunvme_blockdev::BlockDevice;
use gpunvme_blockdev_testing::{MemoryDevice, Recorder};
use gpunvme_engine::volume::NewNode;

use super::subject::{ROOT, WHO, contents};
use super::{found, mend};
use crate::common::{Random, make, open};
use crate::surgeon::Surgeon;

/// Their leaves are more than two transactions take.
const FILES: u64 = 14_000;
/// Power cuts that are gone through.
const CUTS: u64 = 12;

#[test]
fn a_power_cut_loses_none_of_the_items_that_a_repair_puts_back_one_by_one() {
    let memory = MemoryDevice::new(256 << 20);
    let device: Arc<dyn BlockDevice> = memory.clone();
    make(&device);
    let fs = open(&device).expect("a new volume can be opened");
    let new = NewNode { mode: 0o100644, umask: 0, rdev: 0, target: &[] };
    for n in 0..FILES {
        fs.wait(|| fs.create(&WHO, ROOT, format!("{n:0200}").as_bytes(), &new)).expect("there is room");
    }
    fs.close().expect("nothing fails");
    let before = contents(&fs);
    drop(fs);

    // In every third leaf, the account of its space is wrong: the leaf as a whole is of no use, its
    // items are.
    let mut surgeon = Surgeon::new(memory.snapshot());
    let leaves = surgeon.leaves();
    assert!(leaves.len() > 1200, "{}", leaves.len());
    leaves.iter().step_by(3).for_each(|leaf| surgeon.edit(*leaf, |leaf| leaf.bytes_mut()[54] ^= 4));
    let recorder = Recorder::new(surgeon.image);
    let device: Arc<dyn BlockDevice> = recorder.clone();
    mend(&device, "a third of all leaves");
    assert!(contents(&open(&device).expect("the volume can be opened")) == before, "something is another, or gone");

    let log = recorder.log();
    let mut random = Random(17);
    let cuts: Vec<usize> = log.cuts().collect();
    let mut power_cuts = log.power_cuts();
    for cut in cuts.iter().copied() {
        if random.below(cuts.len() as u64) >= CUTS {
            continue;
        }
        let mode = random.below(3);
        let image = power_cuts.image(cut, |_, sector| match mode {
            0 => false,
            1 => true,
            _ => (sector / 8).is_multiple_of(2) || random.below(3) == 0,
        });
        let what = format!("power cut at {cut} of {} in mode {mode}", cuts.len());
        let device: Arc<dyn BlockDevice> = MemoryDevice::from_image(image);
        mend(&device, &what);
        assert_eq!(found(&device).total(), 0, "{what}");
        let after = contents(&open(&device).unwrap_or_else(|error| panic!("{what}: {error}")));
        let lost = before.keys().filter(|path| !after.contains_key(*path)).count();
        assert!(after == before, "{what}: {lost} of {} are gone", before.len());
    }
}
