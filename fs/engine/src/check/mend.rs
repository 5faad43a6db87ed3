//! Mends findings that concern items of a sound tree: each is one operation of the engine, so that
//! a power cut leaves it done or not done. Bitmaps are left alone, except for extents that get
//! blocks of their own: the comparison of the next round settles them.

use std::collections::BTreeMap;
use std::ops::ControlFlow;

use gpunvme_layout::block::BLOCK_SIZE;
use gpunvme_layout::item::{NAME_MAX, PIECE};
use gpunvme_layout::key::{INO_MAX, INO_ROOT, XATTR_PIECES};
use gpunvme_layout::{Dirent, Extent, FileType, Inode, Key, Kind as ItemKind, Timestamp, XattrHead};

use super::finding::Fix;
use super::stop::Stop;
use super::unshare::Shared;
use crate::error::{Attempt, Fail, FsError};
use crate::volume::extents::Mapping;
use crate::volume::meta::Blocks;
use crate::volume::op::Op;
use crate::volume::{Run, Volume, dir, inode, orphan, tree, xattr};

/// Items that one operation removes at the most.
const ITEMS_PER_OP: usize = 32;
/// Extents that are looked at together: the leaves that hold them are in memory at once.
const EXTENTS_PER_LOOK: u32 = 256;
/// Names tried for the lost+found directory.
const LOST_NAMES: usize = 100;

/// Mends findings of one volume.
pub(crate) struct Mender<'v> {
    pub(super) volume: &'v Volume,
    /// Time that is stamped on new items.
    now: Timestamp,
    /// What begins no further operation when it is asked for.
    pub(super) stop: &'v Stop,
    /// Blocks that files get copies of at the end: those of one file all together.
    shared: BTreeMap<u64, Vec<Shared>>,
}

/// A step that runs in one operation, and may be tried several times.
type Step<'a> = &'a mut dyn FnMut(&mut Op) -> Attempt<()>;

impl<'v> Mender<'v> {
    /// A mender of that volume.
    pub fn new(volume: &'v Volume, now: Timestamp, stop: &'v Stop) -> Mender<'v> {
        Mender { volume, now, stop, shared: BTreeMap::new() }
    }

    /// Mends one finding, some only with [`Mender::finish`]. What cannot be mended now is left to
    /// the next round.
    pub fn mend(&mut self, fix: Fix) -> Result<(), FsError> {
        let done = match fix {
            Fix::Elsewhere => Ok(()),
            Fix::Remove(key) if key.kind() == ItemKind::Dirent as u8 => self.op(&mut |op| remove_entry(op, key).map(|_| ())),
            Fix::Remove(key) => self.op(&mut |op| tree::remove(op, key).map(|_| ())),
            Fix::RemoveAll(ino) => self.remove_range(Key::inode(ino), Key::new(ino, ItemKind::Orphan, 0)),
            Fix::RemoveXattr(ino, first) => self.remove_xattr(ino, first),
            Fix::RehashXattr(ino, first) => self.rehash_xattr(ino, first),
            Fix::Links(ino, links) => self.change(ino, &|inode| inode.nlink = links),
            Fix::Entries(ino, entries) => self.change(ino, &|inode| inode.size = entries),
            Fix::Blocks(ino, blocks) => self.change(ino, &|inode| inode.blocks = blocks),
            Fix::Parent(ino, parent) => self.change(ino, &|inode| inode.parent = parent),
            Fix::Store(ino) => self.change(ino, &|inode| inode.parent = if inode.is_dir() { inode.parent } else { 0 }),
            Fix::FileType(ino, file_type) => self.change(ino, &|inode| inode.mode = inode.mode & 0o7777 | file_type.mode()),
            Fix::Grow(ino) => self.grow(ino),
            Fix::Rebuild(ino, file_type) => self.rebuild(ino, file_type),
            Fix::Symlink(ino) => self.symlink(ino),
            Fix::CutExtent(ino, offset, to) => self.op(&mut |op| cut_extent(op, ino, offset, to)),
            Fix::Unshare { ino, block, len, copy, second } => {
                self.shared.entry(ino).or_default().push(Shared { run: Run { start: block, len }, copy, second });
                Ok(())
            }
            Fix::MendEntry(key) => self.op(&mut |op| mend_entry(op, key)),
            Fix::EntryType(key, file_type) => self.op(&mut |op| change_type(op, key, file_type)),
            Fix::RehashEntry(key) | Fix::RenameEntry(key) => self.op(&mut |op| move_entry(op, key)),
            Fix::Connect(ino, links) => self.connect(ino, links),
            Fix::Inodes(inodes) => self.op(&mut |op| {
                op.state_mut().inodes = inodes;
                Ok(())
            }),
            Fix::NextInode(next) => self.op(&mut |op| {
                op.state_mut().next_ino = next.min(INO_MAX);
                Ok(())
            }),
        };
        as_far_as_possible(done)
    }

    /// Mends what was put off: files get blocks of their own.
    pub fn finish(self) -> Result<(), FsError> {
        self.shared.iter().try_for_each(|(ino, shared)| as_far_as_possible(self.unshare(*ino, shared)))
    }

    pub(super) fn op(&self, step: Step) -> Result<(), FsError> {
        self.stop.check()?;
        self.volume.wait(|| {
            let mut op = self.volume.begin()?;
            step(&mut op)?;
            op.finish();
            Ok(())
        })
    }

    fn change(&self, ino: u64, change: &dyn Fn(&mut Inode)) -> Result<(), FsError> {
        self.op(&mut |op| inode::change(op, ino, change))
    }

    /// Removes all items from `from` to before `to`.
    fn remove_range(&self, from: Key, to: Key) -> Result<(), FsError> {
        let mut more = true;
        while more {
            self.op(&mut |op| {
                let mut keys = Vec::new();
                let rest = tree::scan(op, from, |key, _| {
                    if key >= to {
                        return Ok(ControlFlow::Break(false));
                    }
                    if keys.len() == ITEMS_PER_OP {
                        return Ok(ControlFlow::Break(true));
                    }
                    keys.push(key);
                    Ok(ControlFlow::Continue(()))
                })?;
                keys.into_iter().try_for_each(|key| tree::remove(op, key).map(|_| ()))?;
                more = rest == Some(true);
                Ok(())
            })?;
        }
        Ok(())
    }

    fn remove_xattr(&self, ino: u64, first: u64) -> Result<(), FsError> {
        let last = Key::new(ino, ItemKind::Xattr, first + (XATTR_PIECES - 1));
        self.remove_range(Key::new(ino, ItemKind::Xattr, first), last.successor())
    }

    fn rehash_xattr(&self, ino: u64, first: u64) -> Result<(), FsError> {
        self.op(&mut |op| {
            let key = |piece| Key::new(ino, ItemKind::Xattr, first + piece);
            let head = tree::get(op, key(0))?.ok_or(FsError::NotFound)?;
            let head = XattrHead::decode(ino, head)?;
            let (name, mut value) = (head.name.to_vec(), head.start.to_vec());
            let len = head.value_len as usize;
            let mut pieces = 1;
            while value.len() < len {
                value.extend(tree::get(op, key(pieces))?.ok_or(FsError::NotFound)?);
                pieces += 1;
            }
            for piece in 0..pieces {
                tree::remove(op, key(piece))?;
            }
            // A value stored under the right hash was set last: it stays.
            if xattr::get(op, ino, &name)?.is_none() {
                xattr::set(op, ino, &name, &value)?;
            }
            Ok(())
        })
    }

    fn grow(&self, ino: u64) -> Result<(), FsError> {
        let end = self.written_end(ino)? * BLOCK_SIZE as u64;
        self.change(ino, &|inode| inode.size = inode.size.max(end))
    }

    /// Makes the inode of items that have none, or none that makes sense. What it counts, the next
    /// round knows.
    fn rebuild(&self, ino: u64, file_type: FileType) -> Result<(), FsError> {
        let end = if file_type == FileType::Regular { self.written_end(ino)? } else { 0 };
        self.op(&mut |op| {
            let stored = tree::get(op, Key::inode(ino))?.and_then(|bytes| Inode::salvage(bytes, file_type));
            let directory = file_type == FileType::Directory;
            let mut inode = stored.unwrap_or(Inode {
                mode: file_type.mode() | if directory { 0o700 } else { 0o600 },
                nlink: 1,
                uid: 0,
                gid: 0,
                rdev: 0,
                size: end * BLOCK_SIZE as u64,
                blocks: 0,
                parent: 0,
                atime: self.now,
                mtime: self.now,
                ctime: self.now,
                btime: self.now,
            });
            if ino == INO_ROOT {
                inode.parent = INO_ROOT;
            }
            tree::put(op, Key::inode(ino), &inode.encode())
        })
    }

    /// Makes the pieces that are in a row the target of a symbolic link.
    fn symlink(&self, ino: u64) -> Result<(), FsError> {
        let (mut size, mut pieces) = (0, 0);
        self.op(&mut |op| {
            (size, pieces) = (0, 0);
            while let Some(piece) = tree::get(op, Key::new(ino, ItemKind::Symlink, pieces))? {
                if size != pieces * PIECE as u64 || piece.is_empty() || size as usize + piece.len() > 4095 {
                    break;
                }
                size += piece.len() as u64;
                pieces += 1;
            }
            inode::change(op, ino, |inode| inode.size = size)
        })?;
        self.remove_range(Key::new(ino, ItemKind::Symlink, pieces), Key::new(ino, ItemKind::Dirent, 0))
    }

    /// First block beyond the last one of a file that was written.
    fn written_end(&self, ino: u64) -> Result<u64, FsError> {
        let mut last = Key::new(ino, ItemKind::Extent, u64::MAX);
        loop {
            self.stop.check()?;
            match self.volume.wait(|| written_end(&*self.volume.meta.read(), last))? {
                ControlFlow::Break(end) => return Ok(end),
                ControlFlow::Continue(before) => last = before,
            }
        }
    }

    /// Gives an inode without a name one in lost+found.
    fn connect(&self, ino: u64, links: u32) -> Result<(), FsError> {
        self.op(&mut |op| {
            let mut inode = inode::load(op, ino)?;
            let lost = lost_and_found(op, self.now)?;
            let name = free_name(op, lost, format!("#{ino}").as_bytes())?;
            dir::add(op, lost, &Dirent { ino, file_type: inode.file_type(), name: &name })?;
            let directory = inode.is_dir();
            count_entry(op, lost, 1, i32::from(directory))?;
            inode.nlink = links;
            if directory {
                inode.parent = lost;
            }
            orphan::remove(op, ino)?;
            inode::store(op, ino, &inode)
        })
    }
}

/// Passes over what another finding's mending took away, or made another, and that there is no
/// room: the next round tells.
fn as_far_as_possible(done: Result<(), FsError>) -> Result<(), FsError> {
    match done {
        Err(
            FsError::NotFound
            | FsError::NotDirectory
            | FsError::Corrupt(_)
            | FsError::NoSpace
            | FsError::Invalid(_)
            | FsError::NameTooLong,
        ) => Ok(()),
        done => done,
    }
}

/// The directory for what has no name; made when there is none.
fn lost_and_found(op: &mut Op, now: Timestamp) -> Attempt<u64> {
    for number in 0..LOST_NAMES {
        let name = if number == 0 { "lost+found".to_owned() } else { format!("lost+found.{number}") };
        match dir::find(op, INO_ROOT, name.as_bytes())? {
            Some(found) if dir::load(op, found.ino).is_ok_and(|d| d.nlink > 0 && d.parent == INO_ROOT) => return Ok(found.ino),
            Some(_) => {}
            None => {
                let ino = unused_number(op)?;
                op.state_mut().inodes += 1;
                let inode = Inode {
                    mode: FileType::Directory.mode() | 0o700,
                    nlink: 2,
                    uid: 0,
                    gid: 0,
                    rdev: 0,
                    size: 0,
                    blocks: 0,
                    parent: INO_ROOT,
                    atime: now,
                    mtime: now,
                    ctime: now,
                    btime: now,
                };
                if !tree::insert(op, Key::inode(ino), &inode.encode())? {
                    return Err(FsError::Invalid("the number that would be given out next is taken").into());
                }
                dir::add(op, INO_ROOT, &Dirent { ino, file_type: FileType::Directory, name: name.as_bytes() })?;
                count_entry(op, INO_ROOT, 1, 1)?;
                return Ok(ino);
            }
        }
    }
    Err(FsError::NoSpace.into())
}

/// A number for a new inode: the next one, or, where damage has given the last number to an inode,
/// the highest that no item has.
fn unused_number(op: &mut Op) -> Attempt<u64> {
    let next = op.meta().state.next_ino;
    if next < INO_MAX {
        op.state_mut().next_ino += 1;
        return Ok(next);
    }
    let last_item_up_to = |ino: u64| tree::floor(op, Key::from_words(ino << 8 | 0xff, u64::MAX));
    let mut ino = INO_MAX - 1;
    while last_item_up_to(ino)?.is_some_and(|(key, _)| key.ino() == ino) {
        ino -= 1;
    }
    if ino > INO_ROOT { Ok(ino) } else { Err(FsError::NoSpace.into()) }
}

/// Notes in a directory that entries came or went. A directory that is not there is another
/// finding's concern.
fn count_entry(op: &mut Op, dir: u64, entries: i64, subdirectories: i32) -> Attempt<()> {
    let changed = inode::change(op, dir, |inode| {
        inode.size = inode.size.saturating_add_signed(entries);
        inode.nlink = inode.nlink.saturating_add_signed(subdirectories);
    });
    match changed {
        Err(Fail::Error(FsError::NotFound | FsError::Corrupt(_))) => Ok(()),
        changed => changed,
    }
}

/// Removes an entry. Returns what was stored.
fn remove_entry(op: &mut Op, key: Key) -> Attempt<Vec<u8>> {
    let value = tree::get(op, key)?.ok_or(FsError::NotFound)?.to_vec();
    tree::remove(op, key)?;
    let directory = value.get(8) == Some(&(FileType::Directory as u8));
    count_entry(op, key.ino(), -1, -i32::from(directory))?;
    Ok(value)
}

/// A name like the wanted one that is not taken: the wanted one, or that with a number. Numbers are
/// mostly taken in a row from 1 on, so its end is found by doubling and halving: a name that many
/// entries want costs each of them few looks.
fn free_name(op: &Op, dir: u64, wanted: &[u8]) -> Attempt<Vec<u8>> {
    let plain = &wanted[..wanted.len().min(NAME_MAX)];
    let numbered = |number: u64| {
        let end = format!("~{number}");
        [&plain[..plain.len().min(NAME_MAX - end.len())], end.as_bytes()].concat()
    };
    let is_free = |name: &[u8]| Ok::<_, Fail>(dir::find(op, dir, name)?.is_none());
    if is_free(plain)? {
        return Ok(plain.to_vec());
    }
    let (mut taken, mut free) = (0, 1u64);
    while !is_free(&numbered(free))? {
        taken = free;
        free = free.checked_mul(2).ok_or(FsError::NoSpace)?;
    }
    while free - taken > 1 {
        let middle = taken + (free - taken) / 2;
        *(if is_free(&numbered(middle))? { &mut free } else { &mut taken }) = middle;
    }
    Ok(numbered(free))
}

/// Stores an entry again under the hash of its name; under another name, if that is taken by
/// another inode.
fn move_entry(op: &mut Op, key: Key) -> Attempt<()> {
    let value = remove_entry(op, key)?;
    let entry = Dirent::decode(key.ino(), key.offset(), &value)?;
    let name = match dir::find(op, key.ino(), entry.name)? {
        Some(found) if found.ino == entry.ino => return Ok(()),
        _ => free_name(op, key.ino(), entry.name)?,
    };
    dir::add(op, key.ino(), &Dirent { name: &name, ..entry })?;
    count_entry(op, key.ino(), 1, i32::from(entry.file_type == FileType::Directory))
}

/// Makes sense of an entry, if what it names is there; else removes it.
fn mend_entry(op: &mut Op, key: Key) -> Attempt<()> {
    let value = remove_entry(op, key)?;
    let Some((ino, rest)) = value.split_first_chunk::<8>() else { return Ok(()) };
    let ino = u64::from_le_bytes(*ino);
    let inode = match inode::load(op, ino) {
        Ok(inode) => inode,
        Err(Fail::Error(FsError::NotFound | FsError::Corrupt(_))) => return Ok(()),
        Err(error) => return Err(error),
    };
    let mut name: Vec<u8> = rest.iter().skip(1).map(|b| if matches!(b, 0 | b'/') { b'_' } else { *b }).collect();
    name.truncate(NAME_MAX);
    if dir::check_name(&name).is_err() {
        name = format!("#{ino}").into_bytes();
    }
    let name = free_name(op, key.ino(), &name)?;
    let file_type = inode.file_type();
    dir::add(op, key.ino(), &Dirent { ino, file_type, name: &name })?;
    count_entry(op, key.ino(), 1, i32::from(file_type == FileType::Directory))
}

fn change_type(op: &mut Op, key: Key, file_type: FileType) -> Attempt<()> {
    let old = tree::update(op, key, |bytes| Ok(bytes.get_mut(8).map(|byte| std::mem::replace(byte, file_type as u8))))?;
    let old = old.flatten().unwrap_or(0);
    let directory = |number: u8| i32::from(number == FileType::Directory as u8);
    count_entry(op, key.ino(), 0, directory(file_type as u8) - directory(old))
}

/// First block beyond the last one of a file that was written, of its extents up to the key
/// `last`; or the key up to which there are more to look at.
fn written_end(blocks: &impl Blocks, last: Key) -> Attempt<ControlFlow<u64, Key>> {
    let (ino, mut at) = (last.ino(), last);
    for _ in 0..EXTENTS_PER_LOOK {
        let Some((key, value)) = tree::floor(blocks, at)?.filter(|(key, _)| key.is(ino, ItemKind::Extent)) else {
            return Ok(ControlFlow::Break(0));
        };
        let extent = Extent::decode(ino, key.offset(), value)?;
        if !extent.unwritten {
            return Ok(ControlFlow::Break(key.offset() + u64::from(extent.len)));
        }
        let Some(before) = key.predecessor() else { return Ok(ControlFlow::Break(0)) };
        at = before;
    }
    Ok(ControlFlow::Continue(at))
}

/// Cuts the front of an extent off, which another one of the file covers.
fn cut_extent(op: &mut Op, ino: u64, offset: u64, to: u64) -> Attempt<()> {
    let key = Key::new(ino, ItemKind::Extent, offset);
    let extent = Extent::decode(ino, offset, tree::get(op, key)?.ok_or(FsError::NotFound)?)?;
    tree::remove(op, key)?;
    let mapping = Mapping { offset, extent };
    if mapping.end() > to {
        let rest = mapping.clip(to, mapping.end());
        // Where another one begins just there, that one counts.
        tree::insert(op, Key::new(ino, ItemKind::Extent, to), &rest.extent.encode())?;
    }
    Ok(())
}
