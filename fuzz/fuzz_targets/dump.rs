//! Dumps of images that an attacker wrote: whatever is in their metadata, the dump ends, without a
//! crash and within bounded memory, and a check finds in it what it finds in the image.
#![no_main]

#[allow(dead_code, reason = "of what the engine's tests share a target uses a part")]
#[path = "../../fs/engine/tests/attack.rs"]
mod attack;
#[allow(dead_code, reason = "of what the engine's tests share a target uses a part")]
#[path = "../../fs/engine/tests/common.rs"]
mod common;

use std::sync::LazyLock;

use attack::{Change, Victim, dump_it, victims};
use libfuzzer_sys::fuzz_target;

static VICTIMS: LazyLock<Vec<Victim>> = LazyLock::new(victims);

// Changes one of the victims as the input says, and dumps it. The first byte chooses the victim,
// the others are what is changed.
fuzz_target!(|bytes: &[u8]| {
    let Some((victim, changes)) = bytes.split_first() else { return };
    let changes: Vec<Change> = changes.as_chunks().0.iter().map(Change::decode).collect();
    dump_it(&VICTIMS[usize::from(*victim) % VICTIMS.len()].changed(&changes));
});
