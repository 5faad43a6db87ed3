//! Counts writes of data, so that one flush serves all callers whose data was written before it
//! began.

use std::sync::atomic::{AtomicU64, Ordering};

/// Writes of data that are over, and how many of them a flush has made durable.
#[derive(Default)]
pub(crate) struct Unflushed {
    written: AtomicU64,
    flushed: AtomicU64,
}

impl Unflushed {
    /// A write of data is over. Called before anything maps it.
    pub fn add(&self) {
        self.written.fetch_add(1, Ordering::Release);
    }

    /// Writes that are over. A flush that begins from now on makes them durable.
    pub fn written(&self) -> u64 {
        self.written.load(Ordering::Acquire)
    }

    /// Whether the first `written` writes are durable.
    pub fn is_flushed(&self, written: u64) -> bool {
        self.flushed.load(Ordering::Acquire) >= written
    }

    /// A flush is over before which `written` writes were.
    pub fn flushed(&self, written: u64) {
        self.flushed.fetch_max(written, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flush_covers_what_was_written_before_it_began() {
        let unflushed = Unflushed::default();
        assert!(unflushed.is_flushed(unflushed.written()));
        unflushed.add();
        let mine = unflushed.written();
        assert!(!unflushed.is_flushed(mine));
        let covered = unflushed.written();
        unflushed.add();
        unflushed.flushed(covered);
        assert!(unflushed.is_flushed(mine) && !unflushed.is_flushed(unflushed.written()));
        // One that began earlier ends later.
        unflushed.flushed(0);
        assert!(unflushed.is_flushed(mine));
    }
}
