//! The memory that the application registered.
//!
//! Locks: `Buffers::ranges`, also while NVIDIA's library is told: it knows what is in there, and
//! never memory that was taken out.

use crate::failure::{Code, Result};
use crate::real::Library;
use parking_lot::RwLock;
use std::collections::BTreeMap;

/// Ranges of memory that do not overlap.
#[derive(Default)]
pub struct Buffers {
    /// Length by first address.
    ranges: RwLock<BTreeMap<u64, u64>>,
}

impl Buffers {
    /// Adds a range, and tells NVIDIA's library if it is in use.
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
        if let Some(library) = Library::loaded() {
            library.add_buffer(address, len);
        }
        Ok(())
    }

    /// Takes the range that begins at an address out, and returns its length. NVIDIA's library is
    /// told.
    ///
    /// # Errors
    /// [`Code::NotRegistered`] where there is none.
    pub fn remove(&self, address: u64) -> Result<u64> {
        let mut ranges = self.ranges.write();
        let len = ranges.remove(&address).ok_or(Code::NotRegistered)?;
        if let Some(library) = Library::loaded() {
            library.remove_buffer(address);
        }
        Ok(len)
    }

    /// Whether a range lies in one of them.
    pub fn cover(&self, address: u64, len: u64) -> bool {
        let ranges = self.ranges.read();
        let before = ranges.range(..=address).next_back();
        before.is_some_and(|(&base, &its)| address.saturating_add(len) <= base + its)
    }

    /// Tells NVIDIA's library of all of them.
    pub fn tell(&self, library: &Library) {
        self.ranges.read().iter().for_each(|(&address, &len)| library.add_buffer(address, len));
    }

    /// Tells it that none of them is registered any more.
    pub fn take_back(&self, library: &Library) {
        self.ranges.read().keys().for_each(|&address| library.remove_buffer(address));
    }
}
