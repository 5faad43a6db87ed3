//! The kernel's knowledge of the filesystem: inodes, pages of files, and whether the mount is
//! writable.

mod lookups;
mod mount_state;
mod page_cache;

use std::ops::Range;

pub(crate) use lookups::Lookups;
pub(crate) use mount_state::{MountState, UnseenWrite};
pub(crate) use page_cache::PAGE;

/// The kernel's caches of files, which it can be told to drop.
pub(crate) trait KernelCache: Send + Sync {
    /// Has the kernel write back what is dirty of a range of a file, and forget the range and the
    /// file's attributes. Waits for both; must not be called where the kernel waits for an answer.
    /// Returns whether the kernel took it.
    fn invalidate(&self, ino: u64, range: Range<u64>) -> bool;

    /// Tells the kernel the bytes of a file at `offset`, and thereby that the file is at least that
    /// long. Waits as [`KernelCache::invalidate`] does.
    fn store(&self, ino: u64, offset: u64, data: &[u8]);

    /// Has the kernel forget the attributes of a file. Does not wait. Returns whether the kernel
    /// took it.
    fn invalidate_attributes(&self, ino: u64) -> bool;
}
