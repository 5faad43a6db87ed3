//! Operations on names: create, link, unlink, rename. Each is one operation of one transaction:
//! after a crash it happened, or it did not.

use gpunvme_layout::item::{NAME_MAX, PIECE, SYMLINK_MAX};
use gpunvme_layout::key::INO_MAX;
use gpunvme_layout::{Corrupt, Dirent, FileType, Inode, Key, Kind};

use super::attr::Attributes;
use super::dir::{self, Found};
use super::io::blocks_of;
use super::meta::Blocks;
use super::op::Op;
use super::open::{Context, Volume};
use super::{extents, inode, orphan, permissions, tree};
use crate::error::{Attempt, FsError};

/// Names that an inode can have.
const LINK_MAX: u32 = i32::MAX as u32;
/// Directories between a directory and the root, at the most, that a rename looks at while it
/// holds the metadata.
const DEPTH_MAX: usize = 1 << 20;
const SETGID: u32 = 0o2000;

/// A node to be created.
#[derive(Debug, Clone, Copy)]
pub struct NewNode<'a> {
    /// Type and permission bits.
    pub mode: u32,
    /// Bits to take out of the mode where the directory has no default ACL.
    pub umask: u32,
    /// Device number of a device node.
    pub rdev: u32,
    /// Target of a symbolic link; empty for anything else.
    pub target: &'a [u8],
}

/// Behaviour of a rename when the new name is taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RenameMode {
    /// Replaces it.
    Replace,
    /// Fails (`RENAME_NOREPLACE`).
    NoReplace,
    /// Exchanges the two (`RENAME_EXCHANGE`).
    Exchange,
}

/// Result of a rename.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Renamed {
    /// It happened. Holds the inode that lost its last name, if one did.
    Done(Option<u64>),
    /// Nothing happened: this inode would take the name of another, and the caller did not say
    /// that it is settled.
    Replaces(u64),
}

impl Volume {
    /// Creates a node and its name. Also returns the sequence of the transaction.
    pub(crate) fn create(&self, context: &Context, parent: u64, name: &[u8], new: &NewNode) -> Attempt<(Attributes, u64)> {
        dir::check_name(name)?;
        let mut op = self.begin()?;
        let directory = living_directory(&op, parent)?;
        if dir::find(&op, parent, name)?.is_some() {
            return Err(FsError::Exists.into());
        }
        let (ino, inode) = new_inode(&mut op, context, parent, &directory, new)?;
        dir::add(&mut op, parent, &Dirent { ino, file_type: inode.file_type(), name })?;
        change_directory(&mut op, context, parent, 1, i32::from(inode.is_dir()))?;
        op.made = inode.is_dir().then_some(ino);
        Ok((Attributes { ino, inode }, op.finish()))
    }

    /// Creates a file without a name: an orphan, until it is given one. `new` has the type of a
    /// file.
    pub(crate) fn create_unnamed(&self, context: &Context, parent: u64, new: &NewNode) -> Attempt<Attributes> {
        let mut op = self.begin()?;
        let directory = living_directory(&op, parent)?;
        let (ino, _) = new_inode(&mut op, context, parent, &directory, new)?;
        let inode = inode::change(&mut op, ino, |inode| {
            inode.nlink = 0;
            *inode
        })?;
        orphan::add(&mut op, ino)?;
        op.finish();
        Ok(Attributes { ino, inode })
    }

    /// Gives an inode another name. `is_cut_short`: a truncation by this mount is not over.
    pub(crate) fn link(
        &self,
        context: &Context,
        ino: u64,
        is_cut_short: bool,
        parent: u64,
        name: &[u8],
    ) -> Attempt<(Attributes, u64)> {
        dir::check_name(name)?;
        let mut op = self.begin()?;
        op.room_for_names()?;
        living_directory(&op, parent)?;
        let mut inode = inode::load(&op, ino)?;
        if inode.is_dir() {
            return Err(FsError::NotPermitted("a directory cannot have a second name").into());
        }
        if inode.nlink >= LINK_MAX {
            return Err(FsError::TooManyLinks.into());
        }
        if dir::find(&op, parent, name)?.is_some() {
            return Err(FsError::Exists.into());
        }
        // linkat(2) may bring back a file that lost its last name while it was open. A truncation
        // of it that is not over stays noted.
        if inode.nlink == 0 {
            let is_cut_short = is_cut_short || orphan::is_cut_short(&op, ino)?;
            let remains = || extents::mappings(&op, ino, blocks_of(inode.size), u64::MAX, 1);
            if !is_cut_short || remains()?.is_empty() {
                orphan::remove(&mut op, ino)?;
            }
        }
        inode.nlink += 1;
        inode::changed(&mut inode, context.now);
        inode::store(&mut op, ino, &inode)?;
        dir::add(&mut op, parent, &Dirent { ino, file_type: inode.file_type(), name })?;
        change_directory(&mut op, context, parent, 1, 0)?;
        Ok((Attributes { ino, inode }, op.finish()))
    }

    /// Removes a name of anything but a directory. Returns the inode and how many names it has
    /// left.
    pub(crate) fn unlink(&self, context: &Context, parent: u64, name: &[u8]) -> Attempt<(u64, u32)> {
        let mut op = self.begin()?;
        dir::load(&op, parent)?;
        let found = dir::find(&op, parent, name)?.ok_or(FsError::NotFound)?;
        if found.file_type == FileType::Directory {
            return Err(FsError::IsDirectory.into());
        }
        dir::remove(&mut op, found.key)?;
        let nlink = drop_link(&mut op, context, found.ino)?;
        change_directory(&mut op, context, parent, -1, 0)?;
        op.finish();
        Ok((found.ino, nlink))
    }

    /// Removes an empty directory. Returns its inode.
    pub(crate) fn rmdir(&self, context: &Context, parent: u64, name: &[u8]) -> Attempt<u64> {
        let mut op = self.begin()?;
        dir::load(&op, parent)?;
        let found = dir::find(&op, parent, name)?.ok_or(FsError::NotFound)?;
        if found.file_type != FileType::Directory {
            return Err(FsError::NotDirectory.into());
        }
        if !dir::is_empty(&op, found.ino)? {
            return Err(FsError::NotEmpty.into());
        }
        dir::remove(&mut op, found.key)?;
        drop_link(&mut op, context, found.ino)?;
        change_directory(&mut op, context, parent, -1, -1)?;
        op.finish();
        self.directories.removed(found.ino);
        Ok(found.ino)
    }

    /// Renames. `settled`: the inode that may take the name of another.
    pub(crate) fn rename(
        &self,
        context: &Context,
        (parent, name): (u64, &[u8]),
        (new_parent, new_name): (u64, &[u8]),
        mode: RenameMode,
        settled: Option<u64>,
    ) -> Attempt<Renamed> {
        dir::check_name(new_name)?;
        let mut op = self.begin()?;
        dir::load(&op, parent)?;
        living_directory(&op, new_parent)?;
        let source = dir::find(&op, parent, name)?.ok_or(FsError::NotFound)?;
        let target = dir::find(&op, new_parent, new_name)?;
        if source.file_type == FileType::Directory && parent != new_parent && is_within(&op, new_parent, source.ino)? {
            return Err(FsError::Invalid("a directory cannot be moved into itself").into());
        }
        match (target, mode) {
            (Some(_), RenameMode::NoReplace) => return Err(FsError::Exists.into()),
            (None, RenameMode::Exchange) => return Err(FsError::NotFound.into()),
            // Two names of one inode: POSIX wants nothing to happen.
            (Some(target), _) if target.ino == source.ino => return Ok(Renamed::Done(None)),
            (Some(target), RenameMode::Exchange) => {
                exchange(&mut op, context, (parent, source), (new_parent, target))?;
                op.finish();
                return Ok(Renamed::Done(None));
            }
            (Some(_), RenameMode::Replace) if settled != Some(source.ino) => return Ok(Renamed::Replaces(source.ino)),
            _ => {}
        }
        let is_dir = source.file_type == FileType::Directory;
        let mut orphaned = None;
        if let Some(target) = target {
            if is_dir && target.file_type != FileType::Directory {
                return Err(FsError::NotDirectory.into());
            }
            if !is_dir && target.file_type == FileType::Directory {
                return Err(FsError::IsDirectory.into());
            }
            if is_dir && !dir::is_empty(&op, target.ino)? {
                return Err(FsError::NotEmpty.into());
            }
            dir::remove(&mut op, target.key)?;
            if drop_link(&mut op, context, target.ino)? == 0 {
                orphaned = Some(target.ino);
            }
            change_directory(&mut op, context, new_parent, -1, -i32::from(is_dir))?;
        }
        dir::remove(&mut op, source.key)?;
        dir::add(&mut op, new_parent, &Dirent { ino: source.ino, file_type: source.file_type, name: new_name })?;
        if parent == new_parent {
            change_directory(&mut op, context, parent, 0, 0)?;
        } else {
            change_directory(&mut op, context, parent, -1, -i32::from(is_dir))?;
            change_directory(&mut op, context, new_parent, 1, i32::from(is_dir))?;
        }
        moved(&mut op, context, source, new_parent)?;
        if op.nodes_taken > 0 {
            op.room_for_names()?;
        }
        op.finish();
        orphaned.into_iter().for_each(|ino| self.directories.removed(ino));
        Ok(Renamed::Done(orphaned))
    }

    /// Target of a symbolic link.
    pub(crate) fn read_link(&self, ino: u64) -> Attempt<Vec<u8>> {
        let meta = self.meta.read();
        let inode = inode::load(&*meta, ino)?;
        if inode.file_type() != FileType::Symlink {
            return Err(FsError::Invalid("not a symbolic link").into());
        }
        let mut target = Vec::new();
        while (target.len() as u64) < inode.size {
            let piece = (target.len() / PIECE) as u64;
            match tree::get(&*meta, Key::new(ino, Kind::Symlink, piece))? {
                Some(bytes) if !bytes.is_empty() && target.len() + bytes.len() <= SYMLINK_MAX => target.extend(bytes),
                _ => return Err(Corrupt::Item { ino, what: "target of the symbolic link is incomplete" }.into()),
            }
        }
        Ok(target)
    }
}

/// A directory that still has a name: nothing can be added to one that was removed.
fn living_directory(blocks: &impl Blocks, dir: u64) -> Attempt<Inode> {
    let inode = dir::load(blocks, dir)?;
    if inode.nlink == 0 {
        return Err(FsError::NotFound.into());
    }
    Ok(inode)
}

/// Makes the inode of a new node, with what it inherits from its directory.
fn new_inode(op: &mut Op, context: &Context, parent: u64, directory: &Inode, new: &NewNode) -> Attempt<(u64, Inode)> {
    op.room_for_names()?;
    let file_type = FileType::from_mode(new.mode).ok_or(FsError::Invalid("unknown file type"))?;
    let is_dir = file_type == FileType::Directory;
    if new.target.len() > SYMLINK_MAX {
        return Err(FsError::NameTooLong.into());
    }
    let ino = op.meta().state.next_ino;
    if ino >= INO_MAX {
        return Err(FsError::NoSpace.into());
    }
    op.state_mut().next_ino += 1;
    op.state_mut().inodes += 1;
    let mut inode = Inode {
        mode: new.mode,
        nlink: if is_dir { 2 } else { 1 },
        uid: context.uid,
        gid: context.gid,
        rdev: new.rdev,
        size: new.target.len() as u64,
        blocks: 0,
        parent: if is_dir { parent } else { 0 },
        atime: context.now,
        mtime: context.now,
        ctime: context.now,
        btime: context.now,
    };
    if directory.mode & SETGID != 0 {
        inode.gid = directory.gid;
        inode.mode |= if is_dir { SETGID } else { 0 };
    }
    inode.mode = permissions::inherit(op, parent, ino, inode.mode, new.umask)?;
    if !tree::insert(op, Key::inode(ino), &inode.encode())? {
        return Err(Corrupt::Item { ino, what: "exists, and its number was not given out yet" }.into());
    }
    for (i, piece) in new.target.chunks(PIECE).enumerate() {
        tree::insert(op, Key::new(ino, Kind::Symlink, i as u64), piece)?;
    }
    Ok((ino, inode))
}

/// Notes in a directory that entries came or went.
fn change_directory(op: &mut Op, context: &Context, dir: u64, entries: i64, subdirectories: i32) -> Attempt<()> {
    let changed = inode::change(op, dir, |inode| {
        inode.size = inode.size.saturating_add_signed(entries);
        inode.nlink = inode.nlink.saturating_add_signed(subdirectories);
        inode::entries_changed(inode, context.now);
        *inode
    })?;
    op.directory_is(dir, &changed);
    Ok(())
}

/// Takes one name from an inode; without names it becomes an orphan. Returns how many names are
/// left.
fn drop_link(op: &mut Op, context: &Context, ino: u64) -> Attempt<u32> {
    let nlink = inode::change(op, ino, |inode| {
        inode.nlink = if inode.is_dir() { 0 } else { inode.nlink.saturating_sub(1) };
        inode::changed(inode, context.now);
        inode.nlink
    })?;
    if nlink == 0 {
        orphan::add(op, ino)?;
    }
    Ok(nlink)
}

/// Notes in an inode that it has a new name in that directory.
fn moved(op: &mut Op, context: &Context, source: Found, parent: u64) -> Attempt<()> {
    inode::change(op, source.ino, |inode| {
        inode::changed(inode, context.now);
        if inode.is_dir() {
            inode.parent = parent;
        }
    })
}

/// Exchanges two entries; each is (directory, entry).
fn exchange(op: &mut Op, context: &Context, a: (u64, Found), b: (u64, Found)) -> Attempt<()> {
    if b.1.file_type == FileType::Directory && a.0 != b.0 && is_within(op, a.0, b.1.ino)? {
        return Err(FsError::Invalid("a directory cannot be moved into itself").into());
    }
    for (here, other) in [(a, b), (b, a)] {
        let mut name = [0; NAME_MAX];
        let value = tree::get(op, here.1.key)?.ok_or(FsError::NotFound)?;
        let entry = Dirent::decode(here.0, here.1.key.offset(), value)?;
        let name = &mut name[..entry.name.len()];
        name.copy_from_slice(entry.name);
        tree::put(op, here.1.key, &Dirent { ino: other.1.ino, file_type: other.1.file_type, name }.encode())?;
        let is_dir = |found: Found| i32::from(found.file_type == FileType::Directory);
        change_directory(op, context, here.0, 0, is_dir(other.1) - is_dir(here.1))?;
        moved(op, context, other.1, here.0)?;
    }
    Ok(())
}

/// Whether directory `dir` is `ancestor` or lies below it. On a damaged volume directories may lie
/// in one another: the way up is compared with a directory that it passed, a later one after each
/// power of two of steps (Brent's algorithm).
fn is_within(blocks: &impl Blocks, dir: u64, ancestor: u64) -> Attempt<bool> {
    let (mut at, mut passed) = (dir, None);
    for step in 1..=DEPTH_MAX {
        if at == ancestor {
            return Ok(true);
        }
        let parent = dir::load(blocks, at)?.parent;
        if parent == at {
            return Ok(false);
        }
        if passed == Some(parent) {
            break;
        }
        if step.is_power_of_two() {
            passed = Some(parent);
        }
        at = parent;
    }
    Err(Corrupt::Item { ino: dir, what: "directory has no way to the root" }.into())
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use gpunvme_layout::key::INO_ROOT;
    use gpunvme_layout::{Block, BlockKind, Timestamp};

    use super::*;
    use crate::error::Fail;
    use crate::volume::format::tests::volume;
    use crate::volume::meta::Meta;

    /// Counts the blocks that are looked at.
    struct Counted<'m>(&'m Meta, Cell<u64>);

    impl Blocks for Counted<'_> {
        fn meta(&self) -> &Meta {
            self.0
        }

        fn block(&self, address: u64, kind: BlockKind) -> Attempt<&Block> {
            self.1.set(self.1.get() + 1);
            self.0.block(address, kind)
        }
    }

    #[test]
    fn directories_that_lie_in_one_another_are_known_after_a_few_steps() {
        let volume = volume(32 << 20);
        let who = Context { uid: 0, gid: 0, now: Timestamp { seconds: 1, nanoseconds: 0 } };
        let new = NewNode { mode: FileType::Directory.mode() | 0o755, umask: 0, rdev: 0, target: &[] };
        let mut dirs = vec![INO_ROOT];
        for _ in 0..100 {
            let parent = dirs[dirs.len() - 1];
            dirs.push(volume.wait(|| volume.create(&who, parent, b"below", &new)).unwrap().0.ino);
        }
        let within = |dir: u64, ancestor: u64| {
            let meta = volume.meta.read();
            let blocks = Counted(&meta, Cell::new(0));
            (is_within(&blocks, dir, ancestor), blocks.1.get())
        };
        for at in [1, 2, 50, 100] {
            assert!(within(dirs[100], dirs[at]).0.unwrap());
            assert!(at == 100 || !within(dirs[at], dirs[100]).0.unwrap());
        }
        // The way up from the lowest leads through some others into a loop.
        for (first, last) in [(40, 40), (40, 41), (40, 80), (1, 100)] {
            volume
                .wait(|| {
                    let mut op = volume.begin()?;
                    inode::change(&mut op, dirs[first], |inode| inode.parent = dirs[last])?;
                    op.finish();
                    Ok(())
                })
                .unwrap();
            let (found, looked_at) = within(dirs[100], u64::MAX);
            assert!(matches!(found, Ok(false) | Err(Fail::Error(FsError::Corrupt(_)))), "{first} in {last}");
            assert!(looked_at < 1000, "{first} in {last}: {looked_at} blocks");
        }
    }
}
