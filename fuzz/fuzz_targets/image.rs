//! Images that an attacker wrote: whatever is in their metadata, opening, walking, reading,
//! changing and checking them ends, without a crash and within bounded memory. The input says what
//! is changed in which volume; see `attack`.
#![no_main]

#[path = "../../fs/engine/tests/attack.rs"]
mod attack;
#[allow(dead_code, reason = "of what the engine's tests share a target uses a part")]
#[path = "../../fs/engine/tests/common.rs"]
mod common;

use std::sync::LazyLock;

use attack::{Victim, attack};
use libfuzzer_sys::fuzz_target;

static VICTIMS: LazyLock<Vec<Victim>> = LazyLock::new(|| (0..4).map(Victim::new).collect());

fuzz_target!(|bytes: &[u8]| attack(&VICTIMS, bytes));
