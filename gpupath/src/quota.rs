//! A user's quota: the most that one user may hold of a limited resource.

use parking_lot::Mutex;
use rustc_hash::FxHashMap;
use std::sync::Arc;

/// The user who administers the machine.
pub(crate) const ROOT: u32 = 0;

/// The most that a user may have of a resource of which there is `total`, where all others together
/// have `others`.
///
/// An eighth is root's alone. Of the rest a user may have half of what the others left: one alone
/// gets far, and however many came before, there is something left for the next.
pub fn quota(user: u32, total: u64, others: u64) -> u64 {
    let left = |total: u64| total.saturating_sub(others);
    if user == ROOT { left(total) } else { left(total - total / 8).div_ceil(2) }
}

/// A resource of which each user has a quota, counted.
pub struct Limited {
    total: u64,
    held: Mutex<Held>,
}

#[derive(Default)]
struct Held {
    all: u64,
    by_user: FxHashMap<u32, u64>,
}

/// What a user holds of a [`Limited`] resource. Dropping it gives it back.
pub struct Portion {
    of: Arc<Limited>,
    user: u32,
    amount: u64,
}

impl Limited {
    /// A resource of which there is `total`, all of it free.
    pub fn new(total: u64) -> Arc<Limited> {
        Arc::new(Limited { total, held: Mutex::default() })
    }

    /// How much more a user may have now.
    pub fn left(&self, user: u32) -> u64 {
        self.held.lock().left(user, self.total)
    }

    /// Gives a user an amount. None where that is more than is left of the user's quota.
    pub fn take(self: &Arc<Self>, user: u32, amount: u64) -> Option<Portion> {
        let mut held = self.held.lock();
        if amount > held.left(user, self.total) {
            return None;
        }
        held.all += amount;
        *held.by_user.entry(user).or_default() += amount;
        Some(Portion { of: self.clone(), user, amount })
    }
}

impl Held {
    fn left(&self, user: u32, total: u64) -> u64 {
        let of_user = self.by_user.get(&user).copied().unwrap_or_default();
        quota(user, total, self.all - of_user).saturating_sub(of_user)
    }
}

impl Drop for Portion {
    fn drop(&mut self) {
        let mut held = self.of.held.lock();
        held.all -= self.amount;
        let of_user = held.by_user.get_mut(&self.user).expect("counted when it was taken");
        *of_user -= self.amount;
        if *of_user == 0 {
            held.by_user.remove(&self.user);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_user_who_takes_all_that_may_be_had_leaves_as_much_to_the_next_and_an_eighth_to_root() {
        assert_eq!(quota(1000, 800, 0), 350);
        assert_eq!(quota(1001, 800, 350), 175);
        assert_eq!(quota(1002, 800, 350 + 175), 88);
        let mut others = 0;
        for user in 1000.. {
            match quota(user, 800, others) {
                0 => break,
                quota => others += quota,
            }
        }
        assert_eq!(others, 700);
        assert_eq!(quota(ROOT, 800, others), 100);
    }

    #[test]
    fn what_users_hold_is_within_their_quotas_and_comes_back() {
        let limited = Limited::new(800);
        assert!(limited.take(1000, 351).is_none());
        let first = limited.take(1000, 350).expect("that is the quota");
        assert_eq!((limited.left(1000), limited.left(1001), limited.left(ROOT)), (0, 175, 450));
        let of_root = limited.take(ROOT, 450).expect("root may have all that is left");
        assert!(limited.take(1001, 1).is_none());
        drop(of_root);
        assert!(limited.take(1000, 1).is_none() && limited.take(1001, 175).is_some());
        drop(first);
        assert_eq!(limited.left(1000), 350);
        assert!(limited.held.lock().by_user.is_empty());
    }
}
