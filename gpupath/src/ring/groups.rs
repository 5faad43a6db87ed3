//! Users and processes with rings: what each has in flight, and how its share is divided.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// An amount of transfers in flight.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Amount {
    pub transfers: u32,
    pub bytes: u64,
}

/// A user, or a process: what its rings have in flight.
#[derive(Default)]
pub(super) struct Group {
    transfers: AtomicU32,
    bytes: AtomicU64,
    /// Busy members: processes of a user, rings of a process.
    busy: AtomicU32,
}

impl Group {
    /// What is left of its share.
    pub fn room(&self, share: Amount) -> Amount {
        share.less(self.transfers.load(Ordering::Acquire), self.bytes.load(Ordering::Acquire))
    }

    /// What each of its busy members gets.
    pub fn divide(&self, share: Amount) -> Amount {
        share.divided(self.busy.load(Ordering::Relaxed))
    }

    /// So many of its members are busy.
    pub fn set_busy(&self, members: u32) {
        self.busy.store(members, Ordering::Relaxed);
    }

    fn begin(&self, amount: Amount) {
        self.bytes.fetch_add(amount.bytes, Ordering::AcqRel);
        self.transfers.fetch_add(amount.transfers, Ordering::AcqRel);
    }

    fn end(&self, amount: Amount) {
        self.bytes.fetch_sub(amount.bytes, Ordering::AcqRel);
        self.transfers.fetch_sub(amount.transfers, Ordering::AcqRel);
    }
}

impl Amount {
    /// What is left of it beside so much.
    pub fn less(self, transfers: u32, bytes: u64) -> Amount {
        Amount { transfers: self.transfers.saturating_sub(transfers), bytes: self.bytes.saturating_sub(bytes) }
    }

    /// What is in this and in another.
    pub fn min(self, other: Amount) -> Amount {
        Amount { transfers: self.transfers.min(other.transfers), bytes: self.bytes.min(other.bytes) }
    }

    /// The share of each of so many, at least of one.
    pub fn divided(self, by: u32) -> Amount {
        let by = by.max(1);
        Amount { transfers: (self.transfers / by).max(1), bytes: (self.bytes / u64::from(by)).max(1) }
    }
}

/// The process and the user that a ring belongs to.
#[derive(Clone)]
pub(super) struct Member {
    pub user: Arc<Group>,
    pub process: Arc<Group>,
}

impl Member {
    /// Transfers begin.
    pub fn begin(&self, amount: Amount) {
        self.user.begin(amount);
        self.process.begin(amount);
    }

    /// Transfers are over.
    pub fn end(&self, amount: Amount) {
        self.user.end(amount);
        self.process.end(amount);
    }
}
