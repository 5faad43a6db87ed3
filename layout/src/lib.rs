//! The on-disk format of gpunvme.
//!
//! Types, encoding, checksums and the invariants that a block can be checked for on its own. No
//! I/O, no clocks, no threads: everything here is a function from bytes to values or back, so that
//! the engine, mkfs, fsck and the tests share one truth. `docs/reference/layout.md` describes the
//! same format byte by byte.
#![forbid(unsafe_code)]

pub mod anchor;
pub mod block;
pub mod features;
pub mod geometry;
pub mod group;
pub mod item;
pub mod journal;
pub mod key;
mod le;
pub mod member;
pub mod node;
pub mod state;
pub mod superblock;

pub use anchor::Anchor;
pub use block::{BLOCK_SIZE, Block, BlockKind, Uuid};
pub use geometry::Geometry;
pub use item::{Dirent, Extent, FileType, Inode, Timestamp, XattrHead};
pub use key::{Key, Kind};
pub use member::{Member, SetPlace, Striping};
pub use state::State;
pub use superblock::Superblock;

/// Sequences of transactions and generations of anchors beyond this are no count of anything that
/// happened: mkfs begins below half of it, and no device lasts for as many.
pub const COUNT_MAX: u64 = 1 << 61;

/// What is wrong with a block or an item that was read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Corrupt {
    /// The magic number is missing: not a gpunvme metadata block.
    #[error("block {address}: not a gpunvme metadata block (bad magic)")]
    Magic {
        /// Block that was read.
        address: u64,
    },
    /// The checksum does not match the content.
    #[error("block {address}: checksum mismatch")]
    Checksum {
        /// Block that was read.
        address: u64,
    },
    /// The block belongs to another filesystem.
    #[error("block {address}: belongs to another filesystem (UUID mismatch)")]
    Uuid {
        /// Block that was read.
        address: u64,
    },
    /// The block says that it lives elsewhere: a misdirected write, or a stale copy.
    #[error("block {address}: says it is block {found}")]
    Address {
        /// Block that was read.
        address: u64,
        /// Address in its header.
        found: u64,
    },
    /// The block is of another kind than the one that points to it expects.
    #[error("block {address}: is of kind {found}, expected {expected}")]
    Kind {
        /// Block that was read.
        address: u64,
        /// Kind in its header.
        found: u16,
        /// Kind that was expected.
        expected: u16,
    },
    /// A field inside the block is impossible.
    #[error("block {address}: {what}")]
    Field {
        /// Block that was read.
        address: u64,
        /// The field, and why it is impossible.
        what: &'static str,
    },
    /// An item of the tree is impossible.
    #[error("inode {ino}: {what}")]
    Item {
        /// Inode that the item belongs to.
        ino: u64,
        /// The item, and why it is impossible.
        what: &'static str,
    },
    /// The superblock is not usable, and why.
    #[error("superblock: {0}")]
    Superblock(String),
}
