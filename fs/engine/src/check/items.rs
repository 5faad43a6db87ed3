//! Checks the items of the tree as they come, in the order of their keys. All items of an inode lie
//! side by side, so an inode is judged and forgotten when the next one begins. Only what concerns
//! several inodes is kept, in records of a fixed size: names, the facts that each inode's item
//! states, and the blocks in use.

use gpunvme_layout::block::BLOCK_SIZE;
use gpunvme_layout::item::{FILE_SIZE_MAX, PIECE, SYMLINK_MAX};
use gpunvme_layout::key::{INO_MAX, INO_NONE, NameHash, XATTR_PIECES, XATTR_SLOTS};
use gpunvme_layout::{Block, Dirent, Extent, FileType, Geometry, Inode, Key, Kind as ItemKind, XattrHead, node};
use zerocopy::{FromBytes, Immutable, IntoBytes};

use super::finding::{Findings, Fix, Kind, Place};
use super::spool::Spool;
use super::stop::Stop;
use super::walk::{Range, Visit, reason};
use crate::error::FsError;
use crate::volume::dir::check_name;

/// Facts that an inode's item states, kept for comparison.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
pub(crate) struct InodeRecord {
    /// Its number.
    pub ino: u64,
    /// Directory that it says it is in.
    pub parent: u64,
    /// Its link count.
    pub nlink: u32,
    /// Subdirectories that a directory has.
    pub subdirectories: u32,
    /// Number of its type; 0 when nothing tells.
    pub file_type: u32,
    /// [`UNUSABLE`], [`BEYOND`].
    pub flags: u32,
}

/// Flag: there is no inode item, or it makes no sense.
pub(crate) const UNUSABLE: u32 = 1;
/// Flag: written blocks lie beyond the end of the file.
pub(crate) const BEYOND: u32 = 2;

/// An entry of a directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
pub(crate) struct NameRecord {
    /// Inode that it names.
    pub target: u64,
    /// The directory; number of the type that the entry says in the highest byte.
    dir_and_type: u64,
    /// Its offset in the directory.
    pub offset: u64,
}

impl NameRecord {
    /// The directory.
    pub fn dir(&self) -> u64 {
        self.dir_and_type & INO_MAX
    }

    /// Type that the entry says.
    pub fn file_type(&self) -> u32 {
        (self.dir_and_type >> 56) as u32
    }
}

/// Blocks in use: a record for each node and each extent, however many groups it reaches over, so
/// that all of them are no more than what the tree itself takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
pub(crate) struct UseRecord {
    /// First block.
    pub start: u64,
    /// Inode that has them; [`INO_NONE`] for a node of the tree.
    pub ino: u64,
    /// Number of blocks.
    pub len: u64,
}

impl UseRecord {
    /// First block behind it.
    pub fn end(&self) -> u64 {
        self.start + self.len
    }
}

/// Records of all inodes, names and blocks, kept until the walk is done.
pub(crate) struct Kept {
    /// Each inode, ascending.
    pub inodes: Spool<InodeRecord>,
    /// Each name.
    pub names: Spool<NameRecord>,
    /// Inodes with an orphan item, ascending.
    pub orphans: Spool<u64>,
    /// Each run of blocks in use.
    pub used: Spool<UseRecord>,
}

impl Kept {
    /// Keeps at most `memory` bytes in memory.
    pub fn new(memory: usize, stop: &Stop) -> Kept {
        Kept {
            inodes: Spool::new(memory / 4, stop),
            names: Spool::new(memory / 4, stop),
            orphans: Spool::new(memory / 16, stop),
            used: Spool::new(memory / 4, stop),
        }
    }

    /// Notes blocks in use, which lie in one data area.
    pub fn use_blocks(&mut self, ino: u64, start: u64, len: u64) -> Result<(), FsError> {
        self.used.push(UseRecord { start, ino, len })
    }
}

/// An inode whose items are coming by.
#[derive(Default)]
struct Current {
    ino: u64,
    inode: Option<Inode>,
    has_reserved: bool,
    entries: u64,
    subdirectories: u32,
    /// Entries that name something, for their names: those of the hash that is coming by.
    same_hash: Vec<Vec<u8>>,
    hash: u64,
    pieces: u64,
    symlink: u64,
    symlink_whole: bool,
    /// The attribute whose pieces are coming by: offset of the first, bytes missing, next piece.
    xattr: Option<(u64, u64, u64)>,
    xattr_names: Vec<Vec<u8>>,
    xattr_hash: u64,
    blocks: u64,
    /// First block beyond the last extent, and beyond the last written one.
    end: u64,
    written_end: u64,
    /// First key of items that only a directory, a symbolic link, a regular file has.
    of_type: [Vec<Key>; 3],
}

/// Items of a type that an inode does not have, which are listed one by one.
const FOREIGN_MAX: usize = 1000;

/// Checks items, and keeps what concerns several inodes.
pub(crate) struct Items<'c> {
    geometry: Geometry,
    name_hash: NameHash,
    findings: &'c mut Findings,
    /// Records that concern several inodes.
    pub kept: Kept,
    current: Option<Current>,
    /// Lowest key that may come next.
    next: Key,
    progress: &'c mut dyn FnMut(u64),
    count: u64,
}

impl Visit for Items<'_> {
    fn node(&mut self, address: u64, block: &Block, range: Range) -> Result<(), FsError> {
        self.kept.use_blocks(INO_NONE, address, 1)?;
        for slot in 0..node::count(block) {
            let key = node::key(block, slot);
            let first_inner = node::level(block) > 0 && slot == 0;
            if !first_inner && (!range.contains(key) || key < self.next) {
                let what = || format!("key {key:?} does not belong there");
                self.findings.add(Kind::Order, Place::Block(address), Fix::Elsewhere, what);
            } else if node::level(block) == 0 {
                self.next = key.successor();
                self.item(key, node::value(block, slot))?;
            }
        }
        Ok(())
    }

    fn damaged(&mut self, address: u64, _range: Range, why: String) -> Result<(), FsError> {
        self.findings.add(Kind::Node, Place::Block(address), Fix::Elsewhere, || why);
        Ok(())
    }
}

impl<'c> Items<'c> {
    /// Begins a check that tells `progress` how many inodes went by.
    pub fn new(
        geometry: Geometry,
        name_hash: NameHash,
        kept: Kept,
        findings: &'c mut Findings,
        progress: &'c mut dyn FnMut(u64),
    ) -> Items<'c> {
        Items { geometry, name_hash, findings, kept, current: None, next: Key::MIN, progress, count: 0 }
    }

    /// Judges the last inode, and gives what was kept.
    pub fn finish(mut self) -> Result<Kept, FsError> {
        self.judge()?;
        Ok(self.kept)
    }

    fn report(&mut self, kind: Kind, place: Place, fix: Fix, what: impl FnOnce() -> String) {
        self.findings.add(kind, place, fix, what);
    }

    fn item(&mut self, key: Key, value: &[u8]) -> Result<(), FsError> {
        let (ino, offset) = (key.ino(), key.offset());
        let kinds = [ItemKind::Inode, ItemKind::Symlink, ItemKind::Dirent, ItemKind::Xattr, ItemKind::Extent, ItemKind::Orphan];
        let kind = kinds.into_iter().find(|k| *k as u8 == key.kind());
        let why = match kind {
            None => Some("item of unknown kind"),
            Some(ItemKind::Orphan) if ino != INO_NONE => Some("orphan item under an inode"),
            Some(ItemKind::Orphan) if offset == INO_NONE || offset > INO_MAX || !value.is_empty() => {
                Some("impossible orphan item")
            }
            Some(kind) if kind != ItemKind::Orphan && ino == INO_NONE => Some("item under no inode"),
            Some(ItemKind::Inode) if offset != 0 => Some("second item of an inode"),
            // The highest number is never given out.
            Some(_) if ino == INO_MAX => Some("impossible inode number"),
            _ => None,
        };
        if let Some(why) = why {
            self.report(Kind::Item, Place::Inode(ino), Fix::Remove(key), || format!("{why} ({key:?})"));
            return Ok(());
        }
        let kind = kind.expect("told above");
        if kind == ItemKind::Orphan {
            return self.kept.orphans.push(offset);
        }
        if self.current.as_ref().is_none_or(|c| c.ino != ino) {
            self.judge()?;
            self.current = Some(Current { ino, symlink_whole: true, ..Current::default() });
        }
        if kind != ItemKind::Xattr {
            self.end_xattr();
        }
        match kind {
            ItemKind::Inode => self.inode(ino, value),
            ItemKind::Symlink => self.symlink(key, value),
            ItemKind::Dirent => return self.entry(key, value),
            ItemKind::Xattr => self.xattr(key, value),
            ItemKind::Extent => return self.extent(key, value),
            ItemKind::Orphan => unreachable!("handled above"),
        }
        Ok(())
    }

    fn current(&mut self) -> &mut Current {
        self.current.as_mut().expect("begun before its items are looked at")
    }

    fn of_type(&mut self, which: usize, key: Key) {
        let keys = &mut self.current().of_type[which];
        if keys.len() < FOREIGN_MAX {
            keys.push(key);
        }
    }

    fn inode(&mut self, ino: u64, value: &[u8]) {
        let current = self.current();
        current.inode = Inode::decode(ino, value).ok();
        current.has_reserved = current.inode.is_some_and(|inode| inode.encode() != value);
    }

    fn symlink(&mut self, key: Key, value: &[u8]) {
        self.of_type(1, key);
        let current = self.current();
        // Every piece but the last is full, and none is missing.
        let expected = current.pieces == key.offset() && current.symlink == key.offset() * PIECE as u64;
        current.symlink_whole &= expected && !value.is_empty() && value.len() <= PIECE;
        current.symlink_whole &= current.symlink + value.len() as u64 <= SYMLINK_MAX as u64;
        if current.symlink_whole {
            current.symlink += value.len() as u64;
            current.pieces += 1;
        }
    }

    fn entry(&mut self, key: Key, value: &[u8]) -> Result<(), FsError> {
        self.of_type(0, key);
        let (dir, offset) = (key.ino(), key.offset());
        let place = Place::Entry(dir, offset);
        self.current().entries += 1;
        let entry = match Dirent::decode(dir, offset, value) {
            Ok(entry) => entry,
            Err(error) => {
                self.report(Kind::Entry, place, Fix::MendEntry(key), || reason(&error));
                return Ok(());
            }
        };
        let shown = || String::from_utf8_lossy(entry.name).into_owned();
        let right = self.name_hash.dirent_offsets(entry.name);
        let hash = offset & !0xff;
        let current = self.current();
        if current.hash != hash {
            current.hash = hash;
            current.same_hash.clear();
        }
        let duplicate = current.same_hash.iter().any(|name| name == entry.name);
        current.same_hash.push(entry.name.to_vec());
        current.subdirectories += u32::from(entry.file_type == FileType::Directory);
        if check_name(entry.name).is_err() {
            self.report(Kind::Entry, place, Fix::MendEntry(key), || format!("{:?} cannot be a name", shown()));
        } else if !right.contains(&offset) {
            let what = || format!("{:?} lies under another name's hash", shown());
            self.report(Kind::EntryHash, place, Fix::RehashEntry(key), what);
        } else if duplicate {
            self.report(Kind::EntryDuplicate, place, Fix::RenameEntry(key), || format!("{:?} is there twice", shown()));
        }
        let dir_and_type = dir | (entry.file_type as u64) << 56;
        self.kept.names.push(NameRecord { target: entry.ino, dir_and_type, offset })
    }

    fn xattr(&mut self, key: Key, value: &[u8]) {
        let (ino, offset) = (key.ino(), key.offset());
        let (first, piece) = (offset & !(XATTR_PIECES - 1), offset % XATTR_PIECES);
        if piece == 0 {
            self.end_xattr();
            let head = match XattrHead::decode(ino, value) {
                Ok(head) => head,
                Err(error) => {
                    self.report(Kind::Xattr, Place::Inode(ino), Fix::RemoveXattr(ino, first), || reason(&error));
                    // Its other pieces go with it.
                    self.current().xattr = Some((first, u64::MAX, u64::MAX));
                    return;
                }
            };
            let hash = first & !(XATTR_SLOTS * XATTR_PIECES - 1);
            let right = self.name_hash.xattr_offsets(head.name);
            let current = self.current();
            if current.xattr_hash != hash {
                current.xattr_hash = hash;
                current.xattr_names.clear();
            }
            let duplicate = current.xattr_names.iter().any(|name| name == head.name);
            current.xattr_names.push(head.name.to_vec());
            current.xattr = Some((first, (head.value_len as usize - head.start.len()) as u64, 1));
            let shown = || String::from_utf8_lossy(head.name).into_owned();
            if duplicate {
                let what = || format!("extended attribute {:?} is there twice", shown());
                self.report(Kind::Xattr, Place::Inode(ino), Fix::RemoveXattr(ino, first), what);
            } else if !right.contains(&offset) {
                let what = || format!("extended attribute {:?} lies under another name's hash", shown());
                self.report(Kind::XattrHash, Place::Inode(ino), Fix::RehashXattr(ino, first), what);
            }
            return;
        }
        match self.current().xattr {
            Some((of, _, u64::MAX)) if of == first => {}
            Some((of, missing, next)) if of == first && piece == next && value.len() as u64 == missing.min(PIECE as u64) => {
                self.current().xattr = Some((of, missing - value.len() as u64, next + 1));
            }
            Some((of, ..)) if of == first => self.broken_xattr(ino, first),
            _ => {
                self.end_xattr();
                self.broken_xattr(ino, first);
            }
        }
    }

    fn broken_xattr(&mut self, ino: u64, first: u64) {
        self.current().xattr = Some((first, u64::MAX, u64::MAX));
        let what = || "value of an extended attribute is not all there".to_owned();
        self.report(Kind::Xattr, Place::Inode(ino), Fix::RemoveXattr(ino, first), what);
    }

    fn end_xattr(&mut self) {
        let current = self.current();
        if let Some((first, missing, _)) = current.xattr.take()
            && missing > 0
            && missing < u64::MAX
        {
            let ino = current.ino;
            self.broken_xattr(ino, first);
            self.current().xattr = None;
        }
    }

    fn extent(&mut self, key: Key, value: &[u8]) -> Result<(), FsError> {
        self.of_type(2, key);
        let (ino, offset) = (key.ino(), key.offset());
        let extent = match Extent::decode(ino, offset, value) {
            Ok(extent) => extent,
            Err(error) => {
                self.report(Kind::Extent, Place::Inode(ino), Fix::Remove(key), || reason(&error));
                return Ok(());
            }
        };
        let (len, geometry) = (u64::from(extent.len), self.geometry);
        let end = offset + len;
        if !geometry.contains_data(extent.block, len) || end > FILE_SIZE_MAX.div_ceil(BLOCK_SIZE as u64) {
            let what = || format!("extent at block {offset} lies outside the data area, or beyond what a file can have");
            self.report(Kind::Extent, Place::Inode(ino), Fix::Remove(key), what);
            return Ok(());
        }
        let current = self.current();
        let covered = current.end;
        current.blocks += len;
        current.end = covered.max(end);
        if !extent.unwritten {
            current.written_end = current.written_end.max(end);
        }
        if offset < covered {
            let what = || format!("extents cover block {offset} of the file twice");
            self.report(Kind::ExtentOverlap, Place::Inode(ino), Fix::CutExtent(ino, offset, covered), what);
        }
        self.kept.use_blocks(ino, extent.block, len)
    }

    /// Judges the inode whose items have all come by.
    fn judge(&mut self) -> Result<(), FsError> {
        if self.current.is_none() {
            return Ok(());
        }
        self.end_xattr();
        let current = self.current.take().expect("told above");
        let ino = current.ino;
        let place = Place::Inode(ino);
        let types = [FileType::Directory, FileType::Symlink, FileType::Regular];
        let mut implied = (0..3).filter(|i| !current.of_type[*i].is_empty()).map(|i| types[i]);
        let implied = implied.next().filter(|_| implied.next().is_none());
        let mut record = InodeRecord {
            ino,
            parent: 0,
            nlink: 0,
            subdirectories: current.subdirectories,
            file_type: implied.map_or(0, |t| t as u32),
            flags: UNUSABLE,
        };
        if let Some(inode) = &current.inode {
            let file_type = inode.file_type();
            record.file_type = file_type as u32;
            record.flags = 0;
            record.nlink = inode.nlink;
            record.parent = inode.parent;
            let own = types.iter().position(|t| *t == file_type);
            let has_own = own.is_some_and(|i| !current.of_type[i].is_empty());
            match implied.filter(|t| !has_own && *t != file_type) {
                Some(implied) => {
                    record.file_type = implied as u32;
                    let what = || format!("says that it is {}, holds what {} has", article(file_type), article(implied));
                    self.report(Kind::FileType, place, Fix::FileType(ino, implied), what);
                }
                None => {
                    for key in (0..3).filter(|i| Some(*i) != own).flat_map(|i| &current.of_type[i]) {
                        let what = || format!("item {key:?} is nothing that {} has", article(file_type));
                        self.report(Kind::Item, place, Fix::Remove(*key), what);
                    }
                    self.judge_content(&current, inode, &mut record);
                }
            }
        }
        self.count += 1;
        if self.count.is_multiple_of(1024) {
            (self.progress)(self.count);
        }
        self.kept.inodes.push(record)
    }

    /// Judges what an inode says of its content.
    fn judge_content(&mut self, current: &Current, inode: &Inode, record: &mut InodeRecord) {
        let (ino, place, file_type) = (current.ino, Place::Inode(current.ino), inode.file_type());
        let directory = file_type == FileType::Directory;
        if current.has_reserved || (!directory && inode.parent != 0) {
            self.report(Kind::Reserved, place, Fix::Store(ino), || "has bits in fields that have to be zero".into());
        }
        if directory && inode.size != current.entries {
            let what = || format!("directory counts {} entries, has {}", inode.size, current.entries);
            self.report(Kind::DirectorySize, place, Fix::Entries(ino, current.entries), what);
        }
        if file_type == FileType::Symlink && (!current.symlink_whole || inode.size != current.symlink) {
            let what = || "target of the symbolic link is not all there, or has another length".into();
            self.report(Kind::Symlink, place, Fix::Symlink(ino), what);
        }
        let blocks = if file_type == FileType::Regular { current.blocks } else { 0 };
        if inode.blocks != blocks {
            let what = || format!("counts {} blocks, has {blocks}", inode.blocks);
            self.report(Kind::Blocks, place, Fix::Blocks(ino, blocks), what);
        }
        if file_type == FileType::Regular && current.written_end > inode.size.div_ceil(BLOCK_SIZE as u64) {
            record.flags |= BEYOND;
        }
    }
}

/// A file type with its article.
pub(crate) fn article(file_type: FileType) -> &'static str {
    match file_type {
        FileType::Fifo => "a FIFO",
        FileType::CharDevice => "a character device",
        FileType::Directory => "a directory",
        FileType::BlockDevice => "a block device",
        FileType::Regular => "a file",
        FileType::Symlink => "a symbolic link",
        FileType::Socket => "a socket",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_extent_is_one_record_however_long_it_is() {
        let mut kept = Kept::new(1 << 20, &Stop::default());
        kept.use_blocks(7, 512, 1 << 40).unwrap();
        assert_eq!(kept.used.len(), 1);
    }
}
