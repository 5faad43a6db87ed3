//! Images that an attacker wrote: whatever is in their metadata, opening, walking, reading,
//! changing and checking them ends, without a crash and within bounded memory.
#![no_main]

#[path = "../../fs/engine/tests/attack.rs"]
mod attack;
#[allow(dead_code, reason = "of what the engine's tests share a target uses a part")]
#[path = "../../fs/engine/tests/common.rs"]
mod common;

use std::sync::LazyLock;

use attack::{Change, Victim, repair_it, use_it};
use common::{Random, open};
use libfuzzer_sys::fuzz_target;

static VICTIMS: LazyLock<Vec<Victim>> = LazyLock::new(|| (0..4).map(Victim::new).collect());

/// Bytes that say what to change.
const CHANGE: usize = 13;

/// A change that is written down in bytes. Every content of them is one.
fn decode(bytes: &[u8; CHANGE]) -> Change {
    let word = |at: usize| usize::from(u16::from_le_bytes([bytes[at], bytes[at + 1]]));
    let how = bytes[4];
    Change {
        block: word(0),
        at: word(2),
        len: 1 << (how & 3),
        add: how & 4 != 0,
        seal: how & 0x18 != 0x18,
        value: u64::from_le_bytes(bytes[5..].try_into().expect("eight bytes are left")),
    }
}

// Changes one of the victims as the input says, then opens and uses it, and repairs another copy.
// The first byte chooses the victim, the next eight how it is used, and the others what is changed.
fuzz_target!(|bytes: &[u8]| {
    let Some(([victim, seed @ ..], changes)) = bytes.split_first_chunk::<9>() else { return };
    let changes: Vec<Change> = changes.as_chunks().0.iter().map(decode).collect();
    let victim = &VICTIMS[usize::from(*victim) % VICTIMS.len()];
    if let Ok(fs) = open(&victim.changed(&changes)) {
        let _ = use_it(&fs, &mut Random(u64::from_le_bytes(*seed)));
    }
    repair_it(&victim.changed(&changes));
});
