//! The allocator of a staging pool's slots.
//!
//! It guards the pool's bound, and that of each taker: what does not fit has to wait for something
//! to be given back. The pool is cut into chunks; slots are taken one behind the other from an open
//! chunk, and a chunk is free again when the last slot in it is. So taking and giving back cost
//! next to nothing, and neighbours that are taken one after the other are neighbours in memory, and
//! can be copied on as one. The chunk that became free last is taken first: a pool of which little
//! is in use at once touches little of its memory.

/// Bytes of a chunk, and the most of a slot. A copy engine needs about as many at once to be
/// fast: an H200's moves 49 GB/s in copies of 1 MiB, 37 in copies of 256 KiB, and 55 at best.
pub const CHUNK: usize = 1 << 20;

/// The slots of one pool.
#[derive(Debug)]
pub struct Slots {
    /// Slots in use, by chunk.
    used: Vec<u32>,
    /// Chunks without slots, but for the open one.
    free: Vec<usize>,
    open: Open,
    /// What slots begin at a multiple of.
    alignment: usize,
}

/// The chunk that slots are taken from.
#[derive(Clone, Copy, Debug)]
struct Open {
    chunk: usize,
    /// Bytes of it that were taken.
    end: usize,
}

impl Slots {
    /// A pool of `chunks` chunks, of which there is at least one. Slots begin at multiples of
    /// `alignment`, which divides [`CHUNK`].
    ///
    /// # Panics
    /// Where that is not so.
    pub fn new(chunks: usize, alignment: usize) -> Slots {
        assert!(chunks > 0 && CHUNK.is_multiple_of(alignment), "{chunks} chunks of slots aligned to {alignment}");
        Slots { used: vec![0; chunks], free: (1..chunks).rev().collect(), open: Open { chunk: 0, end: 0 }, alignment }
    }

    /// How many chunks there are.
    pub fn chunks(&self) -> usize {
        self.used.len()
    }

    /// Takes `len` bytes, at least 1 and at most [`CHUNK`], and returns where in the pool they
    /// begin; `None` while there is no room, or where another chunk would be needed, and `most` of
    /// them, at least 1, are in use, by slots of whatever bound. So a slot waits at most until all
    /// that were taken before it are given back, if none is taken meanwhile.
    pub fn take(&mut self, len: usize, most: usize) -> Option<usize> {
        debug_assert!((1..=CHUNK).contains(&len) && most > 0, "a slot of {len} bytes, of {most} chunks");
        let len = len.next_multiple_of(self.alignment);
        let Open { chunk, end } = self.open;
        if end + len <= CHUNK {
            self.open.end += len;
            self.used[chunk] += 1;
            return Some(chunk * CHUNK + end);
        }
        if self.in_use() >= most {
            return None;
        }
        let chunk = self.free.pop()?;
        self.used[chunk] = 1;
        // The roomier one stays open: a large slot between small ones does not cost them their
        // chunk.
        if len < end {
            self.open = Open { chunk, end: len };
        }
        Some(chunk * CHUNK)
    }

    /// Gives back what [`Slots::take`] returned, once.
    pub fn give_back(&mut self, slot: usize) {
        let chunk = slot / CHUNK;
        self.used[chunk] -= 1;
        if self.used[chunk] > 0 {
            return;
        }
        if self.open.chunk == chunk {
            self.open.end = 0;
        } else {
            self.free.push(chunk);
        }
    }

    /// How many chunks have slots, and the open one.
    fn in_use(&self) -> usize {
        self.used.len() - self.free.len()
    }

    /// Whether nothing is taken.
    #[cfg(test)]
    fn is_unused(&self) -> bool {
        self.free.len() + 1 == self.used.len() && self.open.end == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Whatever is taken and given back in whatever order, and by whatever bounds: slots never
        /// overlap, lie in the pool, are aligned, need no more chunks than their bound, and all of
        /// it is there again in the end.
        #[test]
        fn slots_are_their_takers(
            chunks in 1..5usize,
            alignment in prop::sample::select(vec![512, 4096]),
            steps in prop::collection::vec((prop::sample::select(vec![1, 512, 4096, 5000, 65536, CHUNK / 2 + 1, CHUNK]), any::<prop::sample::Index>(), any::<bool>(), 1..5usize), 1..200),
        ) {
            let mut slots = Slots::new(chunks, alignment);
            let mut taken: Vec<(usize, usize)> = Vec::new();
            for (len, which, give_back, most) in steps {
                let before = slots.in_use();
                if give_back && !taken.is_empty() {
                    slots.give_back(taken.swap_remove(which.index(taken.len())).0);
                } else if let Some(at) = slots.take(len, most) {
                    prop_assert!(slots.in_use() == before || before < most);
                    prop_assert!(at.is_multiple_of(alignment) && at + len <= chunks * CHUNK);
                    prop_assert!(at / CHUNK == (at + len - 1) / CHUNK, "a slot lies in one chunk");
                    prop_assert!(taken.iter().all(|&(other, other_len)| at + len <= other || other + other_len <= at));
                    taken.push((at, len));
                } else {
                    prop_assert!(!taken.is_empty(), "an empty pool has room for any slot");
                }
            }
            taken.iter().for_each(|&(at, _)| slots.give_back(at));
            prop_assert!(slots.is_unused());
            for _ in 0..chunks {
                prop_assert!(slots.take(CHUNK, chunks).is_some());
            }
            prop_assert!(slots.take(1, chunks).is_none());
        }

        /// Two kinds of takers take turns, as requests do: one that finds no room is the next, and
        /// all others wait behind it. Whatever their bounds, the lengths of slots, and the order
        /// in which they come back, each kind gets as many as the other.
        #[test]
        fn neither_kind_keeps_the_other_from_its_turn(
            chunks in 1..17usize,
            of_devices in 1..17usize,
            lens in prop::array::uniform2(prop::sample::select(vec![4096, 65536, CHUNK / 2 + 1, CHUNK])),
            returned in prop::collection::vec(any::<prop::sample::Index>(), 300),
        ) {
            let mut slots = Slots::new(chunks, 4096);
            let most = [of_devices.min(chunks), chunks];
            let (mut taken, mut turn, mut count) = (Vec::new(), 0, [0; 2]);
            for which in returned {
                while let Some(at) = slots.take(lens[turn], most[turn]) {
                    taken.push(at);
                    count[turn] += 1;
                    turn = 1 - turn;
                }
                prop_assert!(!taken.is_empty(), "an unused pool has room for any slot");
                slots.give_back(taken.swap_remove(which.index(taken.len())));
            }
            prop_assert!(count.iter().all(|count| *count >= 300 / 2), "{count:?}");
        }
    }

    /// Two bounds: what is in use by the wide one counts for the narrow one.
    #[test]
    fn a_narrow_bound_leaves_the_rest_to_others() {
        let mut slots = Slots::new(4, 4096);
        let narrow = [CHUNK, CHUNK].map(|len| slots.take(len, 2).unwrap());
        assert_eq!(slots.take(CHUNK, 2), None);
        let wide = [CHUNK, CHUNK].map(|len| slots.take(len, 4).unwrap());
        assert_eq!(slots.take(CHUNK, 4), None);
        slots.give_back(narrow[0]);
        slots.give_back(narrow[1]);
        assert_eq!(slots.take(CHUNK, 2), Some(0), "in the chunk that is open");
        assert_eq!(slots.take(CHUNK, 2), None, "others use as many as it may");
        slots.give_back(wide[0]);
        assert_eq!(slots.take(1, 2), None);
        slots.give_back(wide[1]);
        assert_eq!(slots.take(1, 2), Some(wide[1]));
    }

    /// However often slots are taken and given back: so that they stay in the processor's cache.
    #[test]
    fn what_is_taken_by_a_narrow_bound_lies_in_few_chunks() {
        let mut slots = Slots::new(16, 4096);
        let (mut taken, mut touched) = (std::collections::VecDeque::new(), std::collections::BTreeSet::new());
        for number in 0..1000 {
            let len = if number % 3 == 0 { CHUNK } else { CHUNK / 2 };
            let slot = loop {
                match slots.take(len, 8) {
                    Some(slot) => break slot,
                    None => slots.give_back(taken.pop_front().unwrap()),
                }
            };
            touched.insert(slot / CHUNK);
            taken.push_back(slot);
        }
        assert_eq!(touched.len(), 8);
    }

    /// Small slots that a large one came between still share a chunk.
    #[test]
    fn large_slots_leave_small_ones_their_chunk() {
        let mut slots = Slots::new(4, 4096);
        let small: Vec<usize> = (0..3)
            .map(|_| {
                let small = slots.take(4096, 4).unwrap();
                slots.take(CHUNK, 4).unwrap();
                small
            })
            .collect();
        assert_eq!(small, [0, 4096, 8192]);
    }
}
