//! Random workloads on the engine, compared with a model at every step, with remounts in between;
//! at the end the checker runs. A failure names its seed.

use std::sync::Arc;

use crate::common::{Pair, Random, assert_sound, make, open};
use gpunvme_blockdev::BlockDevice;
use gpunvme_blockdev_testing::MemoryDevice;

fn run(seed: u64, bytes: u64, steps: u32, reach: u64) {
    let device: Arc<dyn BlockDevice> = MemoryDevice::new(bytes);
    make(&device);
    let mut random = Random(seed);
    let mut pair = Pair::new(open(&device).expect("a new volume can be opened"));
    pair.reach = reach;
    for step in 0..steps {
        pair.step(&mut random);
        if random.below(200) == 0 {
            pair.compare();
            pair.fs.close().expect("nothing fails");
            pair.fs = open(&device).unwrap_or_else(|e| panic!("seed {seed} step {step}: {e}"));
            pair.compare();
            assert_sound(&pair.fs, &format!("seed {seed} step {step}"));
        }
    }
    pair.compare();
    pair.fs.close().expect("nothing fails");
    let fs = open(&device).expect("it was closed cleanly");
    assert_sound(&fs, &format!("seed {seed}, at the end"));
}

#[test]
fn random_workloads_do_what_the_model_does() {
    for seed in 0..12 {
        println!("seed {seed}");
        run(seed, 256 << 20, 1500, 3 << 20);
    }
}

#[test]
fn a_volume_that_is_full_most_of_the_time_loses_nothing() {
    for seed in 100..112 {
        println!("seed {seed}");
        run(seed, 24 << 20, 1500, 3 << 20);
    }
}
