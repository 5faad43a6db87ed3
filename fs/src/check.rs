//! Checking a volume: everything that the format promises, in one pass over its metadata.
//!
//! It reads the volume through the engine's own cache, so that the journal's images count, and reports; it repairs nothing.

use std::collections::BTreeMap;

use gpunvme_layout::geometry::{CHUNK_BLOCKS, GROUP_BLOCKS};
use gpunvme_layout::group::{self, ChunkKind, Descriptor};
use gpunvme_layout::item::PIECE;
use gpunvme_layout::key::{INO_NONE, INO_ROOT, XATTR_PIECES, dirent_offset};
use gpunvme_layout::{BlockKind, Dirent, Extent, FileType, Inode, Key, Kind, XattrHead, node};

use crate::error::{Attempt, FsError};
use crate::volume::Volume;
use crate::volume::op::Blocks;
use crate::volume::tree;

/// Something that is not as the format promises: where, and what.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// The inode, or the block, by name.
    pub place: String,
    /// What is wrong.
    pub what: String,
}

impl std::fmt::Display for Finding {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}", self.place, self.what)
    }
}

#[derive(Default)]
struct Seen {
    inode: Option<Inode>,
    /// Entries that name it.
    names: u32,
    /// Type that those entries say it is.
    named_as: Option<FileType>,
    /// Directories that have it as a subdirectory.
    parents: Vec<u64>,
    /// Entries of a directory, and those of them that are directories.
    entries: u64,
    subdirectories: u32,
    blocks: u64,
    symlink: u64,
    orphan: bool,
    /// First block beyond its last extent that was written.
    written_end: u64,
}

struct Check<'v> {
    volume: &'v Volume,
    findings: Vec<Finding>,
    inodes: BTreeMap<u64, Seen>,
    /// Runs of blocks in use: start, length, what for.
    used: Vec<(u64, u64, ChunkKind)>,
}

/// Checks an open volume that nobody uses. Returns what is wrong with it.
///
/// # Errors
/// The device failed.
pub fn check(volume: &Volume) -> Result<Vec<Finding>, FsError> {
    let mut check = Check { volume, findings: Vec::new(), inodes: BTreeMap::new(), used: Vec::new() };
    let state = volume.meta.read().state;
    if check.node(state.root, state.level, Key::MIN, None)? {
        check.inodes();
    }
    check.space()?;
    Ok(check.findings)
}

impl Check<'_> {
    fn report(&mut self, place: impl Into<String>, what: impl Into<String>) {
        self.findings.push(Finding { place: place.into(), what: what.into() });
    }

    /// Checks a node and all below it. Returns whether all of it could be read.
    fn node(&mut self, address: u64, level: u8, lower: Key, upper: Option<Key>) -> Result<bool, FsError> {
        let block = match self.volume.wait(|| Ok(tree::load(&*self.volume.meta.read(), address, level)?.clone())) {
            Ok(block) => block,
            Err(FsError::Corrupt(error)) => {
                self.report("tree", error.to_string());
                return Ok(false);
            }
            Err(error) => return Err(error),
        };
        self.used.push((address, 1, ChunkKind::Metadata));
        let count = node::count(&block);
        let mut whole = true;
        for slot in 0..count {
            let key = node::key(&block, slot);
            let first_inner = level > 0 && slot == 0;
            if (key < lower && !first_inner) || upper.is_some_and(|upper| key >= upper) {
                self.report(format!("block {address}"), format!("key {key:?} does not belong there"));
            }
            if level == 0 {
                self.item(key, node::value(&block, slot));
                continue;
            }
            let child_lower = if slot == 0 { lower } else { key };
            let child_upper = if slot + 1 < count { Some(node::key(&block, slot + 1)) } else { upper };
            whole &= self.node(node::child(&block, slot), level - 1, child_lower, child_upper)?;
        }
        Ok(whole)
    }

    fn item(&mut self, key: Key, value: &[u8]) {
        if let Err(what) = self.try_item(key, value) {
            self.report(format!("inode {}", key.ino()), what);
        }
    }

    fn try_item(&mut self, key: Key, value: &[u8]) -> Result<(), String> {
        let (ino, offset) = (key.ino(), key.offset());
        let kinds = [Kind::Inode, Kind::Symlink, Kind::Dirent, Kind::Xattr, Kind::Extent, Kind::Orphan];
        let Some(kind) = kinds.into_iter().find(|k| *k as u8 == key.kind()) else {
            return Err(format!("item of unknown kind {}", key.kind()));
        };
        if kind == Kind::Orphan {
            self.inodes.entry(offset).or_default().orphan = true;
            return if ino == INO_NONE { Ok(()) } else { Err("orphan item under an inode".into()) };
        }
        let geometry = self.volume.superblock().geometry();
        let hash_key = self.volume.superblock().hash_key;
        let seen = self.inodes.entry(ino).or_default();
        match kind {
            Kind::Inode => seen.inode = Some(Inode::decode(ino, value).map_err(|e| e.to_string())?),
            Kind::Symlink => seen.symlink += value.len() as u64,
            Kind::Dirent => {
                let entry = Dirent::decode(ino, value).map_err(|e| e.to_string())?;
                if dirent_offset(&hash_key, entry.name) != offset & !0xff {
                    return Err(format!("entry {:?} lies under another name's hash", String::from_utf8_lossy(entry.name)));
                }
                seen.entries += 1;
                seen.subdirectories += u32::from(entry.file_type == FileType::Directory);
                let target = self.inodes.entry(entry.ino).or_default();
                target.names += 1;
                target.named_as = Some(entry.file_type);
                if entry.file_type == FileType::Directory {
                    target.parents.push(ino);
                }
            }
            Kind::Xattr if offset % XATTR_PIECES == 0 => {
                XattrHead::decode(ino, value).map_err(|e| e.to_string())?;
            }
            Kind::Xattr => {
                if value.is_empty() || value.len() > PIECE {
                    return Err("piece of an extended attribute has an impossible length".into());
                }
            }
            Kind::Extent => {
                let extent = Extent::decode(ino, offset, value).map_err(|e| e.to_string())?;
                let len = u64::from(extent.len);
                if !geometry.contains_data(extent.block, len) {
                    return Err(format!("extent at block {offset} lies outside the data area"));
                }
                seen.blocks += len;
                if !extent.unwritten {
                    seen.written_end = offset + len;
                }
                self.used.push((extent.block, len, ChunkKind::Data));
            }
            Kind::Orphan => unreachable!("handled above"),
        }
        Ok(())
    }

    fn inodes(&mut self) {
        let state = self.volume.meta.read().state;
        let mut wrong = Vec::new();
        let mut count = 0;
        for (ino, seen) in &self.inodes {
            let mut say = |what: String| wrong.push((*ino, what));
            let Some(inode) = &seen.inode else {
                say("items without an inode".into());
                continue;
            };
            count += 1;
            let file_type = inode.file_type();
            let is_dir = file_type == FileType::Directory;
            if *ino >= state.next_ino {
                say("number was never given out".into());
            }
            let expected = match (is_dir, *ino == INO_ROOT || seen.names > 0) {
                (true, true) => 2 + seen.subdirectories,
                (true, false) => 0,
                (false, _) => seen.names,
            };
            if inode.nlink != expected {
                say(format!("link count is {}, should be {expected}", inode.nlink));
            }
            if is_dir && *ino != INO_ROOT && seen.names > 1 {
                say("directory has more than one name".into());
            }
            if is_dir && seen.parents.first().is_some_and(|parent| *parent != inode.parent) {
                say(format!("parent is {}, should be {}", inode.parent, seen.parents[0]));
            }
            if inode.nlink == 0 && !seen.orphan {
                say("has no name and is no orphan".into());
            }
            if seen.named_as.is_some_and(|t| t != file_type) {
                say("its directory entry says another type".into());
            }
            if is_dir && inode.size != seen.entries {
                say(format!("directory counts {} entries, has {}", inode.size, seen.entries));
            }
            if file_type == FileType::Symlink && inode.size != seen.symlink {
                say("target of the symbolic link has another length".into());
            }
            if inode.blocks != seen.blocks {
                say(format!("counts {} blocks, has {}", inode.blocks, seen.blocks));
            }
            if file_type == FileType::Regular && !seen.orphan && seen.written_end > inode.size.div_ceil(4096) {
                say("has written blocks beyond its end".into());
            }
        }
        for (ino, what) in wrong {
            self.report(format!("inode {ino}"), what);
        }
        if count != state.inodes {
            self.report("state", format!("counts {} inodes, there are {count}", state.inodes));
        }
    }

    /// Compares what is in use with bitmaps, descriptors and counters.
    fn space(&mut self) -> Result<(), FsError> {
        let geometry = self.volume.superblock().geometry();
        self.used.sort_unstable_by_key(|(start, _, _)| *start);
        let overlaps: Vec<u64> = self.used.windows(2).filter(|w| w[0].0 + w[0].1 > w[1].0).map(|w| w[1].0).collect();
        for block in overlaps {
            self.report(format!("block {block}"), "is in use twice");
        }
        let mut used = std::mem::take(&mut self.used).into_iter().peekable();
        let (mut free_blocks, mut free_chunks) = (0, 0);
        for number in 0..geometry.groups {
            let (start, end) = (geometry.group_start(number), geometry.group_start(number) + GROUP_BLOCKS);
            let mut expected = group::new_bitmap(&geometry, number, &self.volume.superblock().uuid);
            while let Some((at, len, kind)) = used.next_if(|(at, _, _)| *at < end) {
                let (from, to) = (at.max(start) - start, (at + len).min(end) - start);
                group::set(&mut expected, from, to - from, true);
                for chunk in from / CHUNK_BLOCKS..to.div_ceil(CHUNK_BLOCKS) {
                    group::set_kind(&mut expected, chunk, kind);
                }
                if at + len > end {
                    // The rest lies in the next group.
                    let rest: Vec<_> = std::iter::once((end, at + len - end, kind)).chain(used).collect();
                    used = rest.into_iter().peekable();
                    break;
                }
            }
            let (descriptor, bitmap) = match self.volume.wait(|| self.group(number)) {
                Ok(found) => found,
                Err(FsError::Corrupt(error)) => {
                    self.report(format!("group {number}"), error.to_string());
                    continue;
                }
                Err(error) => return Err(error),
            };
            let bitmap = bitmap.unwrap_or_else(|| group::new_bitmap(&geometry, number, &self.volume.superblock().uuid));
            let mut counted =
                Descriptor { free_blocks: 0, free_metadata: 0, free_chunks: 0, initialized: descriptor.initialized };
            for chunk in 0..geometry.group_chunks(number) {
                let kind = group::kind(&bitmap, chunk);
                let free = (CHUNK_BLOCKS - group::chunk_used(&bitmap, chunk)) as u16;
                match kind {
                    ChunkKind::Metadata => counted.free_metadata += free,
                    _ => counted.free_blocks += free,
                }
                counted.free_chunks += u16::from(kind == ChunkKind::Free);
                // An empty chunk of metadata stays one until a checkpoint.
                let empty = free == CHUNK_BLOCKS as u16;
                if kind != group::kind(&expected, chunk) && !(kind == ChunkKind::Metadata && empty) {
                    self.report(
                        format!("group {number}"),
                        format!("chunk {chunk} is {kind:?}, holds {:?}", group::kind(&expected, chunk)),
                    );
                }
            }
            for at in 0..geometry.group_chunks(number) * CHUNK_BLOCKS {
                if group::is_used(&bitmap, at) != group::is_used(&expected, at) {
                    let what =
                        if group::is_used(&bitmap, at) { "is marked in use, and is not" } else { "is in use, and marked free" };
                    self.report(format!("block {}", start + at), what);
                }
            }
            if counted != descriptor {
                self.report(format!("group {number}"), format!("descriptor says {descriptor:?}, the bitmap {counted:?}"));
            }
            free_blocks += u64::from(counted.free_blocks);
            free_chunks += u64::from(counted.free_chunks);
        }
        let state = self.volume.meta.read().state;
        if (state.free_blocks, state.free_chunks) != (free_blocks, free_chunks) {
            let found = format!("{free_blocks} blocks and {free_chunks} chunks are free");
            self.report("state", format!("counts {} and {}; {found}", state.free_blocks, state.free_chunks));
        }
        Ok(())
    }

    fn group(&self, number: u64) -> Attempt<(Descriptor, Option<gpunvme_layout::Block>)> {
        let meta = self.volume.meta.read();
        let (address, index) = meta.geometry.descriptor(number);
        let descriptor = Descriptor::load(meta.block(address, BlockKind::Descriptors)?, index);
        if !descriptor.initialized {
            return Ok((descriptor, None));
        }
        Ok((descriptor, Some(meta.block(meta.geometry.bitmap(number), BlockKind::Bitmap)?.clone())))
    }
}
