//! Images that an attacker wrote: whatever is in their metadata, opening, walking, reading,
//! changing and checking them ends, without a crash and within bounded memory. `HOSTILE_IMAGE` is
//! the path of a volume, or of a dump that somebody sent, which is attacked besides those made for
//! it.
#![no_main]

#[allow(dead_code, reason = "of what the engine's tests share a target uses a part")]
#[path = "../../fs/engine/tests/attack.rs"]
mod attack;
#[allow(dead_code, reason = "of what the engine's tests share a target uses a part")]
#[path = "../../fs/engine/tests/common.rs"]
mod common;

use std::sync::LazyLock;

use attack::{Change, Victim, repair_it, use_it, victims};
use common::{Random, open};
use libfuzzer_sys::fuzz_target;

static VICTIMS: LazyLock<Vec<Victim>> = LazyLock::new(victims);

// Changes one of the victims as the input says, then opens and uses it, and repairs another copy.
// The first byte chooses the victim, the next eight how it is used, and the others what is changed.
fuzz_target!(|bytes: &[u8]| {
    let Some(([victim, seed @ ..], changes)) = bytes.split_first_chunk::<9>() else { return };
    let changes: Vec<Change> = changes.as_chunks().0.iter().map(Change::decode).collect();
    let victim = &VICTIMS[usize::from(*victim) % VICTIMS.len()];
    if let Ok(fs) = open(&victim.changed(&changes)) {
        let _ = use_it(&fs, &mut Random(u64::from_le_bytes(*seed)));
    }
    repair_it(&victim.changed(&changes));
});
