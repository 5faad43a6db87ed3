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
        if touch(&ranges, address, len) {
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

    /// The memory around a range of which nothing is registered: the allocations that it lies in,
    /// which `find` finds by an address, and what it lies in of none. What has been registered
    /// with a mount is whole allocations, which other ranges in them go on using.
    pub fn unused_around(&self, address: u64, len: u64, find: impl Fn(u64) -> Option<(u64, u64)>) -> Vec<(u64, u64)> {
        let ranges = self.ranges.read();
        let (mut at, end) = (address, address.saturating_add(len));
        let mut unused = Vec::new();
        while at < end {
            let found = find(at).filter(|(base, len)| (*base..base.saturating_add(*len)).contains(&at));
            let (base, len) = found.unwrap_or((at, end - at));
            if !touch(&ranges, base, len) {
                unused.push((base, len));
            }
            at = base.saturating_add(len);
        }
        unused
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

/// Whether some of a range is in one of those.
fn touch(ranges: &BTreeMap<u64, u64>, address: u64, len: u64) -> bool {
    let before = ranges.range(..address.saturating_add(len)).next_back();
    before.is_some_and(|(&base, &its)| base + its > address)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_allocation_is_in_use_until_the_last_range_in_it_is_taken_out() {
        let buffers = Buffers::default();
        // Two allocations of 100 bytes side by side, and nothing behind them.
        let find = |at: u64| (1000..1200).contains(&at).then(|| (at / 100 * 100, 100));
        let ranges = [(1000, 50), (1050, 100), (1160, 90)];
        ranges.iter().for_each(|&(address, len)| buffers.add(address, len).unwrap());
        let take = |address| buffers.unused_around(address, buffers.remove(address).unwrap(), find);
        assert_eq!(take(1000), []);
        assert_eq!(take(1050), [(1000, 100)]);
        assert_eq!(take(1160), [(1100, 100), (1200, 50)]);
    }
}
