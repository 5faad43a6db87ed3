//! Attributes of inodes, as callers see and change them.

use gpunvme_layout::{Inode, Key, Timestamp};

use super::inode::{changed, decode, load, store};
use super::open::{Context, Volume};
use super::{permissions, tree};
use crate::error::Attempt;

/// Permission bits that chmod can set.
const PERMISSIONS: u32 = 0o7777;
/// The bits of these that make a program run as its owner, or its group.
const SET_ID_BITS: u32 = 0o6000;

/// An inode and its number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Attributes {
    /// Inode number.
    pub ino: u64,
    /// Content of the inode.
    pub inode: Inode,
}

/// Attributes to change; those that are `None` stay.
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

impl Volume {
    /// Attributes as the tree has them; a file that is being written has newer ones in memory.
    pub fn stored_attributes(&self, ino: u64) -> Attempt<Attributes> {
        if let Some(inode) = self.directories.attributes(ino) {
            return Ok(Attributes { ino, inode });
        }
        let meta = self.meta.read();
        let inode = load(&*meta, ino)?;
        if inode.is_dir() {
            self.directories.keep(self.directories.now(ino, &inode));
        }
        Ok(Attributes { ino, inode })
    }

    /// The same of several inodes, whose numbers are possible ones; it takes less time than one by
    /// one.
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
            permissions::follow_mode(&mut op, ino, inode.mode)?;
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
