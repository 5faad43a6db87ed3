//! Extended attributes: small items, long values in several of them.

use std::ops::ControlFlow;

use gpunvme_layout::item::{PIECE, XATTR_MAX};
use gpunvme_layout::key::{XATTR_PIECES, XATTR_SLOTS, xattr_offset};
use gpunvme_layout::{Corrupt, Key, Kind, XattrHead};

use super::meta::Blocks;
use super::op::Op;
use super::open::{Context, Volume};
use super::{acl, inode, tree};
use crate::error::{Attempt, FsError};

/// Longest name of an extended attribute in bytes (`XATTR_NAME_MAX` of linux/limits.h).
const XATTR_NAME_MAX: usize = 255;
/// Bytes of all names of an inode together, each with a zero byte after it: more listxattr(2) does
/// not give (`XATTR_LIST_MAX`).
const XATTR_LIST_MAX: usize = 65536;
/// Attributes that a search looks at, where names were replaced and it could be any: more than
/// [`XATTR_LIST_MAX`] has names for.
const SEARCHED_MAX: usize = 16384;
/// Attributes with long values that are listed at once: each takes a descent of the tree.
const LISTED_AT_ONCE: usize = 128;
/// Prefixes of attribute names, except those of ACLs.
const PREFIXES: [&[u8]; 3] = [b"user.", b"trusted.", b"security."];

/// Whether a volume has attributes of this name: as filesystems of the kernel, so that they can be
/// copied there.
///
/// # Errors
/// [`FsError::NotSupported`], and [`FsError::Invalid`] where nothing follows the prefix.
pub fn check_name(name: &[u8]) -> Result<(), FsError> {
    match PREFIXES.iter().find_map(|prefix| name.strip_prefix(*prefix)) {
        Some([]) => Err(FsError::Invalid("an attribute's name that is only a prefix")),
        Some(_) => Ok(()),
        None if acl::is_acl(name) => Ok(()),
        None => Err(FsError::NotSupported),
    }
}

/// Offset of the first piece of an attribute. The other pieces of those with the same hash are
/// stepped over.
fn find(blocks: &impl Blocks, ino: u64, name: &[u8]) -> Attempt<Option<u64>> {
    let offsets = blocks.meta().names.xattr_offsets(name);
    let (mut from, mut searched) = (Some(*offsets.start()), 0);
    while let Some(offset) = from.take() {
        let found = tree::scan(blocks, Key::new(ino, Kind::Xattr, offset), |key, value| {
            let offset = key.offset();
            if !key.is(ino, Kind::Xattr) || offset > *offsets.end() {
                return Ok(ControlFlow::Break(None));
            }
            if offset % XATTR_PIECES != 0 {
                from = (offset - offset % XATTR_PIECES).checked_add(XATTR_PIECES);
                return Ok(ControlFlow::Break(None));
            }
            searched += 1;
            if searched > SEARCHED_MAX {
                return Err(FsError::NotSupported.into());
            }
            let is_it = XattrHead::decode(ino, value)?.name == name;
            Ok(if is_it { ControlFlow::Break(Some(offset)) } else { ControlFlow::Continue(()) })
        })?;
        if let Some(Some(offset)) = found {
            return Ok(Some(offset));
        }
    }
    Ok(None)
}

/// The value of an attribute.
pub(crate) fn get(blocks: &impl Blocks, ino: u64, name: &[u8]) -> Attempt<Option<Vec<u8>>> {
    let Some(offset) = find(blocks, ino, name)? else { return Ok(None) };
    let head = tree::get(blocks, Key::new(ino, Kind::Xattr, offset))?.expect("found above");
    let head = XattrHead::decode(ino, head)?;
    let len = head.value_len as usize;
    let mut value = head.start.to_vec();
    let mut piece = 1;
    while value.len() < len {
        match tree::get(blocks, Key::new(ino, Kind::Xattr, offset + piece))? {
            Some(bytes) if !bytes.is_empty() && value.len() + bytes.len() <= len => value.extend(bytes),
            _ => return Err(Corrupt::Item { ino, what: "value of an extended attribute is incomplete" }.into()),
        }
        piece += 1;
    }
    Ok(Some(value))
}

/// Removes an attribute. Returns whether it was there.
pub(crate) fn remove(op: &mut Op, ino: u64, name: &[u8]) -> Attempt<bool> {
    let Some(offset) = find(op, ino, name)? else { return Ok(false) };
    let head = tree::get(op, Key::new(ino, Kind::Xattr, offset))?.expect("found above");
    let rest = (XattrHead::decode(ino, head)?.value_len as usize).saturating_sub(XattrHead::room(name));
    for piece in 0..=rest.div_ceil(PIECE) as u64 {
        tree::remove(op, Key::new(ino, Kind::Xattr, offset + piece))?;
    }
    Ok(true)
}

/// Sets an attribute.
pub(crate) fn set(op: &mut Op, ino: u64, name: &[u8], value: &[u8]) -> Attempt<()> {
    remove(op, ino, name)?;
    let first = xattr_offset(&op.meta().names.key, name);
    let (start, rest) = value.split_at(value.len().min(XattrHead::room(name)));
    let head = XattrHead { value_len: value.len() as u32, name, start }.encode();
    for slot in 0..XATTR_SLOTS {
        let offset = first + slot * XATTR_PIECES;
        if !tree::insert(op, Key::new(ino, Kind::Xattr, offset), &head)? {
            continue;
        }
        for (i, piece) in rest.chunks(PIECE).enumerate() {
            tree::insert(op, Key::new(ino, Kind::Xattr, offset + 1 + i as u64), piece)?;
        }
        return Ok(());
    }
    Err(FsError::NoSpace.into())
}

/// Adds names of attributes from an offset on, each with a zero byte after it, up to
/// [`XATTR_LIST_MAX`]. Their values are stepped over. Returns where others are: the caller holds
/// the metadata lock.
fn list_some(blocks: &impl Blocks, ino: u64, from: u64, names: &mut Vec<u8>) -> Attempt<Option<u64>> {
    let (mut next, mut descents) = (Some(from), 0);
    while let Some(offset) = next.take() {
        if descents == LISTED_AT_ONCE {
            return Ok(Some(offset));
        }
        descents += 1;
        tree::scan(blocks, Key::new(ino, Kind::Xattr, offset), |key, value| {
            if !key.is(ino, Kind::Xattr) {
                return Ok(ControlFlow::Break(()));
            }
            if key.offset() % XATTR_PIECES != 0 {
                next = (key.offset() - key.offset() % XATTR_PIECES).checked_add(XATTR_PIECES);
                return Ok(ControlFlow::Break(()));
            }
            let name = XattrHead::decode(ino, value)?.name;
            if names.len() + name.len() + 1 > XATTR_LIST_MAX {
                return Ok(ControlFlow::Break(()));
            }
            names.extend(name);
            names.push(0);
            Ok(ControlFlow::Continue(()))
        })?;
    }
    Ok(None)
}

impl Volume {
    /// The value of an extended attribute.
    pub(crate) fn get_xattr(&self, ino: u64, name: &[u8]) -> Attempt<Vec<u8>> {
        Ok(get(&*self.meta.read(), ino, name)?.ok_or(FsError::NoData)?)
    }

    /// The names of the extended attributes, each with a zero byte after it, as many as
    /// listxattr(2) can give.
    pub(crate) fn list_xattrs(&self, ino: u64) -> Attempt<Vec<u8>> {
        let (mut names, mut from) = (Vec::new(), Some(0));
        while let Some(offset) = from {
            from = list_some(&*self.meta.read(), ino, offset, &mut names)?;
        }
        Ok(names)
    }

    /// Sets an extended attribute. `create`: it must not exist; `replace`: it must. An ACL changes
    /// the permission bits, too.
    pub(crate) fn set_xattr(
        &self,
        context: &Context,
        ino: u64,
        name: &[u8],
        value: &[u8],
        create: bool,
        replace: bool,
    ) -> Attempt<()> {
        if name.is_empty() || name.len() > XATTR_NAME_MAX {
            return Err(FsError::Range.into());
        }
        check_name(name)?;
        if value.len() > XATTR_MAX {
            return Err(FsError::TooBig.into());
        }
        // Before the metadata is this operation's alone.
        let is_new = find(&*self.meta.read(), ino, name)?.is_none();
        let listed = if is_new { self.list_xattrs(ino)?.len() } else { 0 };
        let mut op = self.begin()?;
        op.room_for_names()?;
        let mut inode = inode::load(&op, ino)?;
        match find(&op, ino, name)? {
            Some(_) if create => return Err(FsError::Exists.into()),
            None if replace => return Err(FsError::NoData.into()),
            None if listed + name.len() + 1 > XATTR_LIST_MAX => return Err(FsError::NoSpace.into()),
            _ => {}
        }
        let (mode, store) = match acl::mode_of(name, value, inode.mode, inode.is_dir())? {
            acl::Effect::None => (inode.mode, true),
            acl::Effect::Mode { mode, store } => (mode, store),
        };
        // As on ext4, what is set to what it was moves no time.
        if mode == inode.mode && get(&op, ino, name)?.as_deref() == store.then_some(value) {
            return Ok(());
        }
        inode.mode = mode;
        if store {
            set(&mut op, ino, name, value)?;
        } else {
            remove(&mut op, ino, name)?;
        }
        inode::changed(&mut inode, context.now);
        inode::store(&mut op, ino, &inode)?;
        op.finish();
        Ok(())
    }

    /// Removes an extended attribute. An inode without an ACL is as one that has lost it.
    pub(crate) fn remove_xattr(&self, context: &Context, ino: u64, name: &[u8]) -> Attempt<()> {
        let mut op = self.begin()?;
        if !remove(&mut op, ino, name)? {
            return if acl::is_acl(name) { Ok(()) } else { Err(FsError::NoData.into()) };
        }
        inode::change(&mut op, ino, |inode| inode::changed(inode, context.now))?;
        op.finish();
        Ok(())
    }
}
