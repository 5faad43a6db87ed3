//! Counts what there is, without a lock.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// How many there are.
#[derive(Clone, Default)]
pub(super) struct Count(Arc<AtomicUsize>);

/// One of them, until it is dropped.
pub(super) struct Counted(Count);

impl Count {
    pub fn get(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }

    /// Counts one more.
    pub fn one(&self) -> Counted {
        self.0.fetch_add(1, Ordering::Relaxed);
        Counted(self.clone())
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.0.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_dropped_no_longer_counts() {
        let count = Count::default();
        let [first, second] = [count.one(), count.one()];
        assert_eq!(count.get(), 2);
        drop(first);
        assert_eq!(count.get(), 1);
        drop(second);
        assert_eq!(count.get(), 0);
    }
}
