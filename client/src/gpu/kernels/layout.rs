//! What the host lays out for `include/gpunvme_device.h` and `gpunvme_array.h`, which say what each
//! field means and assert the sizes.

use std::ops::Range;
use zerocopy::{Immutable, IntoBytes};

/// Bytes of the words that submitters share (`struct state`), each of them alone in a cache line.
const STATE: usize = 2048;
/// Bytes of a slot (`struct slot`).
const SLOT: usize = 32;
/// Bytes for each entry behind the slots (`ready`).
const OF_ENTRY: usize = 4;
/// Slots for whose bits there is room at least: those of two words, which are looked at together.
const PAIR: usize = 128;

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
    pub(crate) const VERSION: u32 = 3;
}

/// What submitters share before the first of them begins: the words, the slots, for each entry what
/// was last written to it, and a bit for each slot. All slots are free.
pub fn state(entries: u32) -> Vec<u8> {
    let count = entries as usize;
    let free = STATE + count * (SLOT + OF_ENTRY);
    let mut state = vec![0; free + count.next_multiple_of(PAIR) / 8];
    state[free..free + count / 8].fill(0xFF);
    state
}

/// What a kernel gets as its `gpunvme::array`: a parameter of 128 bytes, passed by value.
#[repr(C)]
#[derive(Clone, Copy, Debug, IntoBytes, Immutable)]
pub struct KernelArray {
    pub(super) ring: KernelRing,
    pub(super) file: u64,
    pub(super) bytes: u64,
    pub(super) words: u64,
    pub(super) sets: u64,
    pub(super) frames: u64,
    pub(super) counters: u64,
    pub(super) ways: u32,
    pub(super) sets_count: u32,
    pub(super) page_bits: u32,
    pub(super) writable: u32,
}

impl KernelArray {
    /// `GPUNVME_ARRAY_VERSION` of the header that it is for.
    pub(crate) const VERSION: u32 = 2;
}

/// Where in an array's state things lie; it begins as zeros. The counters come first.
#[derive(Clone, Copy, Debug)]
pub struct ArrayState {
    /// How many frames there are.
    pub frames: u32,
    /// Their words, of 8 bytes each.
    pub words: usize,
    /// The sets, of 8 bytes each.
    pub sets: usize,
    /// All of it.
    pub bytes: usize,
}

impl ArrayState {
    /// Bytes of one multiprocessor's counters (`struct counters`).
    pub const COUNTER: usize = 128;
    /// Bytes of the counters of all.
    pub const COUNTERS: usize = 128 * Self::COUNTER;

    /// Of an array with so many sets.
    pub fn new(sets: u32, ways: u32) -> ArrayState {
        let (frames, words) = (sets * ways, Self::COUNTERS);
        let behind = words + frames as usize * 8;
        ArrayState { frames, words, sets: behind, bytes: behind + sets as usize * 8 }
    }
}

/// A frame's word, as far as the host looks at it.
#[derive(Clone, Copy, Debug)]
pub struct Word(pub u64);

impl Word {
    const BUSY: u64 = 1 << 20;
    const VALID: u64 = 1 << 21;
    const CHANGED: u64 = 1 << 22;

    /// The page in it.
    pub fn page(self) -> u64 {
        self.0 >> 24
    }

    /// Whether a kernel gave up its write of the page, which may still happen.
    pub fn is_being_written(self) -> bool {
        self.0 & (Self::BUSY | Self::CHANGED) == Self::BUSY | Self::CHANGED
    }

    /// Whether the page was changed; from now on it was not.
    pub fn take_change(&mut self) -> bool {
        let was = self.0 & (Self::VALID | Self::CHANGED) == Self::VALID | Self::CHANGED;
        if was {
            self.0 &= !Self::CHANGED;
        }
        was
    }

    /// The words of an array's frames.
    pub fn all_of(bytes: &[u8]) -> Vec<Word> {
        bytes.chunks(8).map(|word| Word(u64::from_le_bytes(word.try_into().expect("eight bytes")))).collect()
    }
}

/// What the host takes from an array to write it to the file.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Changes {
    /// The frames whose pages were changed.
    pub frames: Vec<usize>,
    /// Frames whose words are to be put back. None of them is one whose write a kernel gave up: its
    /// word may change at any time.
    pub words: Vec<Range<usize>>,
    /// Whether there are such frames.
    pub is_unsettled: bool,
}

impl Changes {
    /// Takes the changes out of the words of all frames.
    pub fn take(words: &mut [Word]) -> Changes {
        let (mut changes, mut settled_from) = (Changes::default(), 0);
        for (frame, word) in words.iter_mut().enumerate() {
            if word.is_being_written() {
                (changes.is_unsettled, settled_from) = (true, frame + 1);
            } else if word.take_change() {
                changes.frames.push(frame);
                match changes.words.last_mut() {
                    Some(words) if words.start >= settled_from => words.end = frame + 1,
                    _ => changes.words.push(frame..frame + 1),
                }
            }
        }
        changes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_of_writes_that_were_given_up_are_not_put_back() {
        let (valid, changed, busy) = (Word::VALID, Word::VALID | Word::CHANGED, Word::BUSY | Word::CHANGED);
        let mut words = [changed, valid, changed, busy, valid, changed, 0, busy, busy, valid].map(Word);
        let changes = Changes::take(&mut words);
        assert_eq!(changes, Changes { frames: vec![0, 2, 5], words: vec![0..3, 5..6], is_unsettled: true });
        assert_eq!(words.map(|word| word.0), [valid, valid, valid, busy, valid, valid, 0, busy, busy, valid]);
        assert_eq!(Changes::take(&mut words[4..7]), Changes::default());
    }
}
