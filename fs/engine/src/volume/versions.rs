//! Versions of the mappings of files: a reader that remembers where a file lies learns without a
//! lock whether that still holds.
//!
//! It guards remembered mappings: an operation that changes an inode's size or extents changes its
//! version first, under the metadata lock.

use std::array;
use std::sync::atomic::{AtomicU64, Ordering};

/// Counters: inodes that share one only seem to change.
const COUNTERS: usize = 4096;

/// The versions of all inodes of a volume.
pub(crate) struct Versions(Box<[AtomicU64; COUNTERS]>);

impl Default for Versions {
    fn default() -> Versions {
        Versions(Box::new(array::from_fn(|_| AtomicU64::new(0))))
    }
}

impl Versions {
    /// The version of an inode's mappings. Mappings that were looked up under the metadata lock
    /// with this version under the same hold are the inode's as long as it stays.
    pub fn of(&self, ino: u64) -> u64 {
        self.counter(ino).load(Ordering::Acquire)
    }

    /// The inode's mappings change. Called under the metadata lock, before they do.
    pub fn change(&self, ino: u64) {
        self.counter(ino).fetch_add(1, Ordering::AcqRel);
    }

    fn counter(&self, ino: u64) -> &AtomicU64 {
        &self.0[ino as usize % COUNTERS]
    }
}
