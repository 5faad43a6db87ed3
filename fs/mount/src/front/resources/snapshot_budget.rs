//! A budget for snapshots of where attached files lie. Each ring may have thousands of files, and a
//! file thousands of extents; a file without a snapshot is looked up for each read, which is right
//! too, and slower.

use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use gpunvme_engine::data::Snapshot;

/// Extents of all snapshots: 24 bytes each.
const ALL: usize = 1 << 20;
/// Extents of one snapshot at the most.
const MOST: usize = 4096;
/// What a snapshot counts beside its extents.
const SELF: usize = 4;

/// The budget of one mount.
#[derive(Default)]
pub(crate) struct SnapshotBudget {
    taken: AtomicUsize,
}

/// A snapshot within the budget, to which it is given back when this is dropped.
pub(crate) struct BudgetedSnapshot {
    snapshot: Snapshot,
    budget: Arc<SnapshotBudget>,
}

impl SnapshotBudget {
    /// Extents that the next snapshot may have: less where much is taken.
    pub fn most(&self) -> usize {
        (ALL.saturating_sub(self.taken.load(Ordering::Relaxed)) / 16).min(MOST)
    }

    /// Keeps a snapshot, if there is room for it.
    pub fn keep(self: &Arc<Self>, snapshot: Snapshot) -> Option<BudgetedSnapshot> {
        let weight = snapshot.extents() + SELF;
        let kept = BudgetedSnapshot { snapshot, budget: self.clone() };
        (self.taken.fetch_add(weight, Ordering::Relaxed) + weight <= ALL).then_some(kept)
    }
}

impl Deref for BudgetedSnapshot {
    type Target = Snapshot;

    fn deref(&self) -> &Snapshot {
        &self.snapshot
    }
}

impl Drop for BudgetedSnapshot {
    fn drop(&mut self) {
        self.budget.taken.fetch_sub(self.snapshot.extents() + SELF, Ordering::Relaxed);
    }
}
