//! Directories: entries by the hash of their name, and reading them in a stable order.

use std::ops::ControlFlow;

use gpunvme_layout::item::NAME_MAX;
use gpunvme_layout::key::{DIRENT_SLOTS, dirent_offset};
use gpunvme_layout::{Dirent, FileType, Inode, Key, Kind};

use super::meta::Blocks;
use super::op::Op;
use super::open::Volume;
use super::{inode, tree};
use crate::error::{Attempt, FsError};

/// Cookies of the two entries that no directory stores.
const DOT: u64 = 1;
const DOTDOT: u64 = 2;

/// Entries that a search looks at, where names were replaced and it could be any: the leaves that
/// it waits for stay in memory until it is done.
const SEARCHED_MAX: usize = 1 << 16;

/// An entry, as a reader gets it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DirEntry {
    /// Inode.
    pub ino: u64,
    /// Type of the inode.
    pub file_type: FileType,
    /// Name.
    pub name: Vec<u8>,
    /// Cookie: reading goes on behind this entry with it. It stays valid whatever happens to other
    /// entries.
    pub cookie: u64,
}

/// An entry that was found.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Found {
    /// Its key.
    pub key: Key,
    /// Inode.
    pub ino: u64,
    /// Type of the inode.
    pub file_type: FileType,
}

/// Checks a name for a new entry.
pub(crate) fn check_name(name: &[u8]) -> Result<(), FsError> {
    if name.len() > NAME_MAX {
        return Err(FsError::NameTooLong);
    }
    if name.is_empty() || name == b"." || name == b".." || name.contains(&b'/') || name.contains(&0) {
        return Err(FsError::Invalid("not a possible file name"));
    }
    Ok(())
}

/// The inode of a directory.
pub(crate) fn load(blocks: &impl Blocks, dir: u64) -> Attempt<Inode> {
    let inode = inode::load(blocks, dir)?;
    if !inode.is_dir() {
        return Err(FsError::NotDirectory.into());
    }
    Ok(inode)
}

/// The entry of that name.
///
/// # Errors
/// [`FsError::NotSupported`] in a dump of metadata, where the directory is too large to be
/// searched.
pub(crate) fn find(blocks: &impl Blocks, dir: u64, name: &[u8]) -> Attempt<Option<Found>> {
    if name.len() > NAME_MAX {
        return Err(FsError::NameTooLong.into());
    }
    let offsets = blocks.meta().names.dirent_offsets(name);
    let mut searched = 0;
    tree::scan(blocks, Key::new(dir, Kind::Dirent, *offsets.start()), |key, value| {
        if !key.is(dir, Kind::Dirent) || key.offset() > *offsets.end() {
            return Ok(ControlFlow::Break(None));
        }
        let entry = Dirent::decode(dir, key.offset(), value)?;
        if entry.name == name {
            return Ok(ControlFlow::Break(Some(Found { key, ino: entry.ino, file_type: entry.file_type })));
        }
        searched += 1;
        if searched == SEARCHED_MAX {
            return Err(FsError::NotSupported.into());
        }
        Ok(ControlFlow::Continue(()))
    })
    .map(Option::flatten)
}

/// Adds an entry. The name must not be there.
pub(crate) fn add(op: &mut Op, dir: u64, entry: &Dirent) -> Attempt<()> {
    let first = dirent_offset(&op.meta().names.key, entry.name);
    let value = entry.encode();
    for slot in 0..DIRENT_SLOTS {
        if tree::insert(op, Key::new(dir, Kind::Dirent, first + slot), &value)? {
            return Ok(());
        }
    }
    // 256 names with the same 55 bits of a keyed hash: only an attacker who knows the key can make
    // them.
    Err(FsError::NoSpace.into())
}

/// Removes an entry.
pub(crate) fn remove(op: &mut Op, key: Key) -> Attempt<()> {
    tree::remove(op, key)?;
    op.is_gone(key);
    Ok(())
}

/// Whether the directory has no entries.
pub(crate) fn is_empty(blocks: &impl Blocks, dir: u64) -> Attempt<bool> {
    let first = tree::scan(blocks, Key::new(dir, Kind::Dirent, 0), |key, _| Ok(ControlFlow::Break(key)))?;
    Ok(!first.is_some_and(|key| key.is(dir, Kind::Dirent)))
}

impl Volume {
    /// Inode behind a name.
    pub(crate) fn lookup(&self, dir: u64, name: &[u8]) -> Attempt<u64> {
        if name.len() <= NAME_MAX && self.directories.lacks(dir, dirent_offset(&self.name_key, name)) {
            return Err(FsError::NotFound.into());
        }
        let meta = self.meta.read();
        match find(&*meta, dir, name)? {
            Some(found) => Ok(found.ino),
            // Only a directory has entries: whether it is one has to be asked where there is none.
            None => load(&*meta, dir).and(Err(FsError::NotFound.into())),
        }
    }

    /// Entries after `cookie` (0: from the beginning), at most `limit`, in the order of their
    /// cookies.
    pub(crate) fn read_dir(&self, dir: u64, cookie: u64, limit: usize) -> Attempt<Vec<DirEntry>> {
        entries(&*self.meta.read(), dir, cookie, limit)
    }
}

/// The next `limit` entries of a directory after `cookie`.
pub(super) fn entries(blocks: &impl Blocks, dir: u64, cookie: u64, limit: usize) -> Attempt<Vec<DirEntry>> {
    let inode = load(blocks, dir)?;
    let mut entries = Vec::new();
    let own = [(DOT, dir, &b"."[..]), (DOTDOT, inode.parent, b"..")];
    for (own_cookie, ino, name) in own.into_iter().filter(|(c, _, _)| *c > cookie) {
        entries.push(DirEntry { ino, file_type: FileType::Directory, name: name.to_vec(), cookie: own_cookie });
    }
    let from = Key::new(dir, Kind::Dirent, cookie.saturating_add(1).max(DIRENT_SLOTS));
    tree::scan(blocks, from, |key, value| {
        if !key.is(dir, Kind::Dirent) || entries.len() >= limit {
            return Ok(ControlFlow::Break(()));
        }
        let entry = Dirent::decode(dir, key.offset(), value)?;
        let (ino, file_type, name) = (entry.ino, entry.file_type, entry.name.to_vec());
        entries.push(DirEntry { ino, file_type, name, cookie: key.offset() });
        Ok(ControlFlow::Continue(()))
    })?;
    Ok(entries)
}
