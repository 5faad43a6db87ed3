//! The place of a leaf in the tree.

use gpunvme_layout::{Block, Corrupt, Key, node};

/// Where a leaf is, and the keys that may be in it.
#[derive(Clone, Copy)]
pub(crate) struct Place {
    /// Address of the leaf.
    pub address: u64,
    /// Lowest key.
    pub lower: Key,
    /// First key beyond it.
    pub upper: Option<Key>,
}

impl Place {
    /// Whether the leaf is where `key` is, or would be.
    pub fn covers(&self, key: Key) -> bool {
        self.lower <= key && self.upper.is_none_or(|upper| key < upper)
    }

    /// Fails when the node that is here has keys, from slot `first` on, that it cannot have.
    pub fn check(&self, block: &Block, first: usize) -> Result<(), Corrupt> {
        let count = node::count(block);
        let beyond = |upper| node::key(block, count - 1) >= upper;
        if count > first && (node::key(block, first) < self.lower || self.upper.is_some_and(beyond)) {
            return Err(Corrupt::Field { address: self.address, what: "node has keys that do not belong there" });
        }
        Ok(())
    }
}
