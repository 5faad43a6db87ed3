//! Inodes: reading, storing and changing their attributes.

use gpunvme_layout::{Inode, Key, Timestamp};

use super::op::{Blocks, Op};
use super::{Context, Volume, acl, tree};
use crate::error::{Attempt, FsError};

/// Permission bits that chmod can set.
const PERMISSIONS: u32 = 0o7777;
/// Those that have a program run as its owner, or its group.
const SET_ID_BITS: u32 = 0o6000;

/// An inode and its number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Attributes {
    /// Inode number.
    pub ino: u64,
    /// Content of the inode.
    pub inode: Inode,
}

/// Attributes to change; what is none stays.
#[derive(Debug, Clone, Copy, Default)]
pub struct SetAttributes {
    /// Permission bits; the type bits are ignored.
    pub mode: Option<u32>,
    /// Set-user-id and set-group-id bits that go, whatever the mode is by then.
    pub bits_gone: u32,
    /// Owner.
    pub uid: Option<u32>,
    /// Group.
    pub gid: Option<u32>,
    /// Last access.
    pub atime: Option<Timestamp>,
    /// Last change of content.
    pub mtime: Option<Timestamp>,
}

impl SetAttributes {
    /// Whether it changes nothing.
    pub fn is_empty(&self) -> bool {
        let SetAttributes { mode, bits_gone, uid, gid, atime, mtime } = self;
        mode.or(*uid).or(*gid).is_none() && *bits_gone == 0 && atime.or(*mtime).is_none()
    }
}

/// The inode.
pub(crate) fn load(blocks: &impl Blocks, ino: u64) -> Attempt<Inode> {
    if ino == 0 || ino > gpunvme_layout::key::INO_MAX {
        return Err(FsError::NotFound.into());
    }
    decode(ino, tree::get(blocks, Key::inode(ino)))
}

fn decode(ino: u64, found: Attempt<Option<&[u8]>>) -> Attempt<Inode> {
    match found? {
        Some(bytes) => Ok(Inode::decode(ino, bytes)?),
        None => Err(FsError::NotFound.into()),
    }
}

/// Seconds by which changes that are under way together may be noted out of order. What is further ahead is from a clock that was wrong.
const DISORDER: i64 = 60;

/// The time of a change that is noted after one of the time `before`. Changes may be noted in another order than they were asked for:
/// the later time counts.
pub(crate) fn in_order(before: Timestamp, at: Timestamp) -> Timestamp {
    if before.seconds.saturating_sub(at.seconds) <= DISORDER { at.max(before) } else { at }
}

/// Notes when the content of a file changed, and the inode with it. The file's own state puts changes in order: this is the last.
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

impl Volume {
    /// Attributes as the tree has them; a file that is being written has newer ones in memory.
    pub fn stored_attributes(&self, ino: u64) -> Attempt<Attributes> {
        Ok(Attributes { ino, inode: load(&*self.meta.read(), ino)? })
    }

    /// The same of several inodes, whose numbers are possible ones; it takes less time than one by one.
    pub(crate) fn all_stored_attributes(&self, inos: &[u64]) -> Vec<Attempt<Attributes>> {
        let meta = self.meta.read();
        let found = tree::get_all(&*meta, inos.iter().map(|ino| Key::inode(*ino)));
        inos.iter().zip(found).map(|(&ino, found)| Ok(Attributes { ino, inode: decode(ino, found)? })).collect()
    }

    /// Changes attributes. The permission bits and an access ACL are kept in step.
    pub(crate) fn set_attributes(&self, context: &Context, ino: u64, set: &SetAttributes) -> Attempt<(Attributes, u64)> {
        let mut op = self.begin()?;
        let mut inode = load(&op, ino)?;
        if let Some(mode) = set.mode {
            inode.mode = inode.mode & !PERMISSIONS | mode & PERMISSIONS;
            acl::follow_mode(&mut op, ino, inode.mode)?;
        }
        inode.mode &= !(set.bits_gone & SET_ID_BITS);
        inode.uid = set.uid.unwrap_or(inode.uid);
        inode.gid = set.gid.unwrap_or(inode.gid);
        inode.atime = set.atime.unwrap_or(inode.atime);
        inode.mtime = set.mtime.unwrap_or(inode.mtime);
        changed(&mut inode, context.now);
        store(&mut op, ino, &inode)?;
        Ok((Attributes { ino, inode }, op.finish()))
    }
}
