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
    /// Takes up to `most` transfers of what is left of its share, and says how many. Threads that
    /// serve several of its rings get no more together than there is.
    fn reserve(&self, share: u32, most: u32) -> u32 {
        let mut granted = 0;
        let _ = self.transfers.fetch_update(Ordering::AcqRel, Ordering::Acquire, |in_flight| {
            granted = share.saturating_sub(in_flight).min(most);
            (granted > 0).then(|| in_flight + granted)
        });
        granted
    }

    /// Gives back what was reserved and not taken.
    fn give_back(&self, transfers: u32) {
        self.transfers.fetch_sub(transfers, Ordering::AcqRel);
    }

    /// Bytes that are left of its share.
    fn bytes_left(&self, share: u64) -> u64 {
        share.saturating_sub(self.bytes.load(Ordering::Acquire))
    }

    /// What each of its busy members gets.
    pub fn divide(&self, share: Amount) -> Amount {
        share.divided(self.busy.load(Ordering::Relaxed))
    }

    /// So many of its members are busy.
    pub fn set_busy(&self, members: u32) {
        self.busy.store(members, Ordering::Relaxed);
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

    /// The share of each of so many, at least of one.
    pub fn divided(self, by: u32) -> Amount {
        let by = by.max(1);
        Amount { transfers: (self.transfers / by).max(1), bytes: (self.bytes / u64::from(by)).max(1) }
    }
}

/// What a ring, its process and its user may have in flight.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    pub user: Amount,
    pub process: Amount,
    pub ring: Amount,
}

/// The process and the user that a ring belongs to.
#[derive(Clone)]
pub(super) struct Member {
    pub user: Arc<Group>,
    pub process: Arc<Group>,
}

impl Member {
    /// Takes up to `most` transfers of what is left for both, and says how many, and how many bytes
    /// are left. [`Member::begin`] has to follow.
    pub fn reserve(&self, limits: &Limits, most: u32) -> Amount {
        let of_user = self.user.reserve(limits.user.transfers, most);
        let transfers = self.process.reserve(limits.process.transfers, of_user);
        self.user.give_back(of_user - transfers);
        let bytes = self.user.bytes_left(limits.user.bytes).min(self.process.bytes_left(limits.process.bytes));
        Amount { transfers, bytes }
    }

    /// Transfers begin, of as many as were reserved.
    pub fn begin(&self, reserved: u32, amount: Amount) {
        for group in [&self.user, &self.process] {
            group.bytes.fetch_add(amount.bytes, Ordering::AcqRel);
            group.give_back(reserved - amount.transfers);
        }
    }

    /// Transfers are over.
    pub fn end(&self, amount: Amount) {
        self.user.end(amount);
        self.process.end(amount);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_together_get_no_more_than_a_share() {
        let group = Group::default();
        let most = AtomicU32::new(0);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for round in 0..20_000u32 {
                        let granted = group.reserve(100, 1 + round % 90);
                        most.fetch_max(group.transfers.load(Ordering::Acquire), Ordering::AcqRel);
                        group.give_back(granted);
                    }
                });
            }
        });
        assert_eq!((group.transfers.load(Ordering::Acquire), most.load(Ordering::Acquire) <= 100), (0, true));
        assert_eq!((group.reserve(100, 1000), group.reserve(100, 1), group.reserve(50, 1)), (100, 0, 0));
    }
}
