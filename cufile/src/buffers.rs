//! The memory that the application registered.

use crate::failure::{Code, Result};
use parking_lot::RwLock;
use std::collections::BTreeMap;

/// Ranges of memory that do not overlap.
#[derive(Default)]
pub struct Buffers {
    /// Length by first address.
    ranges: RwLock<BTreeMap<u64, u64>>,
}

impl Buffers {
    /// Adds a range.
    ///
    /// # Errors
    /// [`Code::AlreadyRegistered`] where some of it is there.
    pub fn add(&self, address: u64, len: u64) -> Result<()> {
        let mut ranges = self.ranges.write();
        let before = ranges.range(..address.saturating_add(len)).next_back();
        if before.is_some_and(|(&base, &its)| base + its > address) {
            return Err(Code::AlreadyRegistered.into());
        }
        ranges.insert(address, len);
        Ok(())
    }

    /// Takes the range that begins at an address out, and returns its length.
    ///
    /// # Errors
    /// [`Code::NotRegistered`] where there is none.
    pub fn remove(&self, address: u64) -> Result<u64> {
        self.ranges.write().remove(&address).ok_or(Code::NotRegistered.into())
    }

    /// Whether a range lies in one of them.
    pub fn cover(&self, address: u64, len: u64) -> bool {
        let ranges = self.ranges.read();
        let before = ranges.range(..=address).next_back();
        before.is_some_and(|(&base, &its)| address.saturating_add(len) <= base + its)
    }

    /// All of them, by address and length.
    pub fn all(&self) -> Vec<(u64, u64)> {
        self.ranges.read().iter().map(|(&address, &len)| (address, len)).collect()
    }
}
