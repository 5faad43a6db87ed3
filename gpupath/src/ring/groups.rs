//! Users and processes with rings: what each has in flight, and how its share is divided.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// An amount of transfers in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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
    /// Whether it has less in flight than its share.
    pub fn has_room(&self, share: Amount) -> bool {
        self.transfers.load(Ordering::Acquire) < share.transfers && self.bytes.load(Ordering::Acquire) < share.bytes
    }

    /// What each of its busy members gets.
    pub fn divide(&self, share: Amount) -> Amount {
        share.divided(self.busy.load(Ordering::Relaxed))
    }

    /// So many of its members are busy.
    pub fn set_busy(&self, members: u32) {
        self.busy.store(members, Ordering::Relaxed);
    }

    fn begin(&self, bytes: u64) {
        self.bytes.fetch_add(bytes, Ordering::AcqRel);
        self.transfers.fetch_add(1, Ordering::AcqRel);
    }

    fn end(&self, bytes: u64) {
        self.bytes.fetch_sub(bytes, Ordering::AcqRel);
        self.transfers.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Amount {
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
    /// A transfer begins.
    pub fn begin(&self, bytes: u64) {
        self.user.begin(bytes);
        self.process.begin(bytes);
    }

    /// A transfer is over.
    pub fn end(&self, bytes: u64) {
        self.user.end(bytes);
        self.process.end(bytes);
    }
}
