//! What the host lays out for `include/gpunvme_device.h`, which says what each field means and
//! asserts the sizes.

use zerocopy::{Immutable, IntoBytes};

/// Bytes of the words that submitters share (`struct state`), each of them alone in a cache line.
const STATE: usize = 1024;
/// Bytes of a slot (`struct slot`).
const SLOT: usize = 32;
/// Where in a slot the number of the next free one is.
const NEXT: usize = 4;

/// What a kernel gets as its `gpunvme::ring`: a parameter of 64 bytes, passed by value.
#[repr(C)]
#[derive(Clone, Copy, Debug, IntoBytes, Immutable)]
pub struct KernelRing {
    pub(super) memory: u64,
    pub(super) staging: u64,
    pub(super) state: u64,
    pub(super) buffer: u64,
    pub(super) patience: u64,
    pub(super) entries: u32,
    pub(super) slot_bytes: u32,
    pub(super) unused: [u64; 2],
}

impl KernelRing {
    /// `GPUNVME_DEVICE_VERSION` of the header that it is for.
    pub(crate) const VERSION: u32 = 1;
}

/// What submitters share before the first of them begins: the words, the slots, all free and in a
/// list, and for each entry the position behind what was last written to it.
pub fn state(entries: u32) -> Vec<u8> {
    let entries = entries as usize;
    let mut state = vec![0; STATE + entries * (SLOT + size_of::<u32>())];
    let mut put = |at: usize, number: usize| state[at..at + 4].copy_from_slice(&(number as u32).to_le_bytes());
    // Numbers count from 1, and the last slot has 0 behind it. The first word is the list's head.
    put(0, 1);
    (1..entries).for_each(|number| put(STATE + (number - 1) * SLOT + NEXT, number + 1));
    state
}
