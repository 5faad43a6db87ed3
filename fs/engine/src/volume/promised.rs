//! What is promised to writes before they are accepted: by [`Meta::promise`].
//!
//! [`Meta::promise`]: super::meta::Meta::promise

/// Promised nodes are counted in such parts: items that make one node of a leaf two at the least,
/// however they lie.
pub(crate) const NODE_PARTS: u64 = 40;

/// The most that mapping a write changes in the tree.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Splits {
    /// Ranges of a file, far from one another: each may find two full leaves at its ends.
    pub runs: u64,
    /// Items in these ranges that are added, or may be cut in two, and those between them: full
    /// leaves of these are split by what is added.
    pub items: u64,
}

impl Splits {
    /// Adds a write of a range with so many blocks of holes, extents of preallocated blocks, and
    /// extents that were written before.
    pub fn add_write(&mut self, holes: u64, unwritten: u64, written: u64) {
        if holes + unwritten > 0 {
            self.runs += 1;
            // A preallocated extent may become three.
            self.items += holes + 3 * unwritten + written;
        }
    }
}

/// What is promised to a write, or to all of them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Promised {
    /// Blocks for data.
    pub blocks: u64,
    /// Nodes for the mapping, in parts ([`NODE_PARTS`]).
    pub parts: u64,
}

impl Promised {
    /// Takes one promise out of many.
    pub fn forget(&mut self, one: Promised) {
        self.blocks -= one.blocks;
        self.parts -= one.parts;
    }
}
