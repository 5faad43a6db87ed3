//! A budget for snapshots of where attached files lie. Each ring may have thousands of files, and a
//! file thousands of extents; a file without a snapshot is looked up for each read, which is right
//! too, and slower. A user has a quota, so that others keep their snapshots whatever one attaches.

use std::ops::Deref;
use std::sync::Arc;

use gpunvme_engine::data::Snapshot;
use gpunvme_gpupath::quota::{Limited, Portion};

/// Extents of all snapshots: 24 bytes each.
const ALL: u64 = 1 << 20;
/// Extents of one snapshot at the most.
const MOST: u64 = 4096;
/// What a snapshot counts beside its extents.
const SELF: u64 = 4;

/// The budget of one mount.
pub(crate) struct SnapshotBudget {
    extents: Arc<Limited>,
}

/// A snapshot within the budget, to which it is given back when this is dropped.
pub(crate) struct BudgetedSnapshot {
    snapshot: Snapshot,
    _portion: Portion,
}

impl Default for SnapshotBudget {
    fn default() -> SnapshotBudget {
        SnapshotBudget { extents: Limited::new(ALL) }
    }
}

impl SnapshotBudget {
    /// Extents that a user's next snapshot may have: less where much is taken.
    pub fn most(&self, user: u32) -> usize {
        (self.extents.left(user) / 16).min(MOST) as usize
    }

    /// Keeps a user's snapshot, if there is room for it.
    pub fn keep(&self, user: u32, snapshot: Snapshot) -> Option<BudgetedSnapshot> {
        let portion = self.extents.take(user, snapshot.extents() as u64 + SELF)?;
        Some(BudgetedSnapshot { snapshot, _portion: portion })
    }
}

impl Deref for BudgetedSnapshot {
    type Target = Snapshot;

    fn deref(&self) -> &Snapshot {
        &self.snapshot
    }
}
