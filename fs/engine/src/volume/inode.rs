//! Inodes in the tree: reading, storing and changing them, and the order of their times.

use gpunvme_layout::{Inode, Key, Timestamp};

use super::meta::Blocks;
use super::op::Op;
use super::tree;
use crate::error::{Attempt, FsError};

/// The inode.
pub(crate) fn load(blocks: &impl Blocks, ino: u64) -> Attempt<Inode> {
    if ino == 0 || ino > gpunvme_layout::key::INO_MAX {
        return Err(FsError::NotFound.into());
    }
    decode(ino, tree::get(blocks, Key::inode(ino)))
}

pub(super) fn decode(ino: u64, found: Attempt<Option<&[u8]>>) -> Attempt<Inode> {
    match found? {
        Some(bytes) => Ok(Inode::decode(ino, bytes)?),
        None => Err(FsError::NotFound.into()),
    }
}

/// Seconds by which changes that are in flight together may be noted out of order. What is further
/// ahead is from a clock that was wrong.
const DISORDER: i64 = 60;

/// The time of a change that is noted after one of the time `before`. Changes may be noted in
/// another order than they were asked for: the later time counts.
pub(crate) fn in_order(before: Timestamp, at: Timestamp) -> Timestamp {
    if before.seconds.saturating_sub(at.seconds) <= DISORDER { at.max(before) } else { at }
}

/// Notes when the content of a file changed, and the inode with it. The file's own state puts
/// changes in order: this is the last.
pub(crate) fn content_changed(inode: &mut Inode, at: Timestamp) {
    inode.mtime = at;
    changed(inode, at);
}

/// Notes when the entries of a directory changed, and the inode with it.
pub(crate) fn entries_changed(inode: &mut Inode, at: Timestamp) {
    // A time of content that lies ahead of all changes was set, and the next change replaces it.
    let at = if inode.mtime <= inode.ctime { in_order(inode.mtime, at) } else { at };
    content_changed(inode, at);
}

/// Notes when the inode changed.
pub(crate) fn changed(inode: &mut Inode, at: Timestamp) {
    inode.ctime = inode.ctime.max(at);
}

/// Stores an inode that exists already.
pub(crate) fn store(op: &mut Op, ino: u64, inode: &Inode) -> Attempt<()> {
    tree::put(op, Key::inode(ino), &inode.encode())
}

/// Loads an inode, changes it and stores it.
pub(crate) fn change<T>(op: &mut Op, ino: u64, change: impl FnOnce(&mut Inode) -> T) -> Attempt<T> {
    let result = tree::update(op, Key::inode(ino), |bytes| {
        let mut inode = Inode::decode(ino, bytes)?;
        let result = change(&mut inode);
        bytes.copy_from_slice(&inode.encode());
        Ok(result)
    })?;
    result.ok_or_else(|| FsError::NotFound.into())
}
