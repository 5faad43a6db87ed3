//! Sequences of operations on a sound volume, held to the model of a filesystem at every step, with
//! remounts. Each two bytes of the input are an operation: the seed of its choices. Zero is a
//! remount.
#![no_main]

#[allow(dead_code, reason = "of what the engine's tests share a target uses a part")]
#[path = "../../fs/engine/tests/common.rs"]
mod common;

use std::sync::{Arc, LazyLock};

use common::{Pair, Random, assert_sound, make, open};
use gpunvme_blockdev::BlockDevice;
use gpunvme_blockdev_testing::{Image, MemoryDevice};
use libfuzzer_sys::fuzz_target;

/// Small, so that it fills up.
const LEN: u64 = 24 << 20;
/// More only takes longer.
const STEPS: usize = 400;

static EMPTY: LazyLock<Image> = LazyLock::new(|| {
    let memory = MemoryDevice::new(LEN);
    make(&(memory.clone() as Arc<dyn BlockDevice>));
    memory.snapshot()
});

fuzz_target!(|bytes: &[u8]| {
    let device: Arc<dyn BlockDevice> = MemoryDevice::from_image(EMPTY.clone());
    let mut pair = Pair::new(open(&device).expect("a new volume can be opened"));
    for step in bytes.as_chunks().0.iter().take(STEPS) {
        match u16::from_le_bytes(*step) {
            0 => {
                pair.fs.close().expect("nothing fails");
                pair.fs = open(&device).expect("it was closed cleanly");
            }
            seed => pair.step(&mut Random(seed.into())),
        }
    }
    pair.compare();
    pair.fs.close().expect("nothing fails");
    pair.fs = open(&device).expect("it was closed cleanly");
    pair.compare();
    assert_sound(&pair.fs, "at the end");
});
