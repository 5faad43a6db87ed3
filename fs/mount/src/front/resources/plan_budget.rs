//! A budget for the plans of direct transfers. A transfer of 1 GiB can be a quarter of a million
//! commands; it is carried out in parts, and the less of the budget is left, the smaller the parts
//! are. So no transfer waits for memory, and many transfers at once take time and not memory.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use gpunvme_engine::BLOCK_SIZE;
use gpunvme_gpupath::planner::Bounds;

/// Pieces of all plans: about 350 bytes each, as long as their commands are in flight.
const ALL: usize = 64 << 10;
/// Pieces of one part at the most, and what each may have however many there are.
const MOST: usize = 4 << 10;
const LEAST: usize = 64;
/// Bytes of a part of a read: between parts a fast device has nothing to do for some 50 us, after
/// 2 ms of work. Another user's request may have to wait for a part.
const READ_BYTES: u64 = 16 << 20;
/// Blocks of a part of a write at the most and at the least. Each may be a piece; how many are, is
/// only known when it is planned.
const WRITE_BLOCKS: std::ops::RangeInclusive<usize> = 256..=4 << 10;

/// The budget for plans of one mount.
#[derive(Default)]
pub(crate) struct PlanBudget {
    taken: AtomicUsize,
}

/// Pieces that a plan has, given back when it is dropped.
pub(crate) struct PlanPermit {
    budget: Arc<PlanBudget>,
    pieces: usize,
}

impl PlanBudget {
    /// Bounds of the next part of a read.
    pub fn read_bounds(&self) -> Bounds {
        Bounds { pieces: self.allowance().clamp(LEAST, MOST), bytes: READ_BYTES }
    }

    /// Size of the next part of a write at the most, in bytes.
    pub fn write_bytes(&self) -> u64 {
        (self.allowance().clamp(*WRITE_BLOCKS.start(), *WRITE_BLOCKS.end()) * BLOCK_SIZE) as u64
    }

    /// Takes the pieces that a plan has, or may have.
    pub fn take(self: &Arc<Self>, pieces: usize) -> PlanPermit {
        self.taken.fetch_add(pieces, Ordering::Relaxed);
        PlanPermit { budget: self.clone(), pieces }
    }

    fn allowance(&self) -> usize {
        ALL.saturating_sub(self.taken.load(Ordering::Relaxed)) / 8
    }
}

impl PlanPermit {
    /// Sets the number of pieces that the plan has.
    pub fn set(&mut self, pieces: usize) {
        let before = std::mem::replace(&mut self.pieces, pieces);
        // Wraps around where it becomes less.
        self.budget.taken.fetch_add(pieces.wrapping_sub(before), Ordering::Relaxed);
    }
}

impl Drop for PlanPermit {
    fn drop(&mut self) {
        self.set(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn however_many_there_are_all_get_on_and_all_is_given_back() {
        let budget = Arc::new(PlanBudget::default());
        assert_eq!((budget.read_bounds().pieces, budget.write_bytes()), (MOST, 16 << 20));
        let mut parts: Vec<_> = (0..500).map(|_| budget.take(budget.read_bounds().pieces)).collect();
        assert!(budget.taken.load(Ordering::Relaxed) < ALL + 500 * LEAST);
        assert_eq!((budget.read_bounds().pieces, budget.write_bytes()), (LEAST, 1 << 20));
        parts.iter_mut().for_each(|part| part.set(7));
        assert_eq!(budget.taken.load(Ordering::Relaxed), 500 * 7);
        drop(parts);
        assert_eq!(budget.taken.load(Ordering::Relaxed), 0);
    }
}
