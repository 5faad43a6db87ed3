//! Versions of the mappings of files, and of blocks of metadata at home: who remembers where a file
//! lies, or reads a block without a lock, learns whether that still holds.
//!
//! It guards remembered mappings: an operation that changes an inode's size or extents changes its
//! version first, under the metadata lock. And blocks that are read: a checkpoint changes a block's
//! version under that lock, when it has written it and the cache may drop it.

use std::array;
use std::sync::atomic::{AtomicU64, Ordering};

/// Counters: inodes, or blocks, that share one only seem to change.
const COUNTERS: usize = 4096;

/// The versions of all inodes of a volume, or of all blocks of metadata.
pub(crate) struct Versions(Box<[AtomicU64; COUNTERS]>);

impl Default for Versions {
    fn default() -> Versions {
        Versions(Box::new(array::from_fn(|_| AtomicU64::new(0))))
    }
}

impl Versions {
    /// The version of an inode's mappings, or of a block. Mappings that were looked up under the
    /// metadata lock with this version under the same hold are the inode's as long as it stays.
    pub fn of(&self, number: u64) -> u64 {
        self.counter(number).load(Ordering::Acquire)
    }

    /// The inode's mappings change, before they do, or the block. Called under the metadata lock.
    pub fn change(&self, number: u64) {
        self.counter(number).fetch_add(1, Ordering::AcqRel);
    }

    fn counter(&self, number: u64) -> &AtomicU64 {
        &self.0[number as usize % COUNTERS]
    }
}
