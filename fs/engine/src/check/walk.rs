//! Going through the tree in the order of its keys, with the reads of all children of a node in
//! flight at once. Nothing is trusted: a node that cannot be read, lies elsewhere or is pointed to
//! twice is told to the visitor, and left out.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use gpunvme_layout::geometry::CHUNK_BLOCKS;
use gpunvme_layout::{Block, BlockKind, Corrupt, Key, node};
use rustc_hash::FxHashMap;

use super::stop::Stop;
use crate::error::FsError;
use crate::volume::Volume;
use crate::volume::io::{UNREADABLE_MAX, read_scattered};

/// Nodes that are read at once.
const BATCH: usize = 256;

/// Reads metadata blocks through the volume's cache, so that the journal's images count.
pub(crate) struct Reader<'v> {
    volume: &'v Volume,
    /// What reads no more when it is asked for.
    pub stop: Stop,
    device_errors: AtomicU64,
}

impl<'v> Reader<'v> {
    /// A reader of that volume's metadata.
    pub fn new(volume: &'v Volume, stop: &Stop) -> Reader<'v> {
        Reader { volume, stop: stop.clone(), device_errors: AtomicU64::new(0) }
    }

    /// The blocks at these addresses, or why one cannot be used.
    ///
    /// # Errors
    /// The device fails again and again, or the end was asked for.
    pub fn read(&self, addresses: &[u64]) -> Result<Vec<Result<Arc<Block>, String>>, FsError> {
        self.stop.check()?;
        let meta = self.volume.meta.read();
        let mut blocks: Vec<_> = addresses.iter().map(|a| meta.cache.get(*a).map(|e| Ok(e.block.clone()))).collect();
        drop(meta);
        let missing: Vec<usize> = (0..addresses.len()).filter(|i| blocks[*i].is_none()).collect();
        let wanted: Vec<u64> = missing.iter().map(|i| addresses[*i]).collect();
        if wanted.is_empty() {
            return Ok(blocks.into_iter().flatten().collect());
        }
        let uuid = self.volume.superblock().uuid;
        let check = |address: u64, block: Block| match block.verify_any_kind(address, &uuid) {
            Ok(()) => Ok(Arc::new(block)),
            Err(error) => Err(reason(&error)),
        };
        match read_scattered(self.volume.io(), &wanted) {
            Ok(read) => {
                for (i, block) in missing.into_iter().zip(read) {
                    blocks[i] = Some(check(addresses[i], block));
                }
            }
            // One of them cannot be read: which one shows when each is read alone.
            Err(FsError::Device(_)) => {
                for i in missing {
                    blocks[i] = Some(match read_scattered(self.volume.io(), &addresses[i..=i]) {
                        Ok(mut read) => check(addresses[i], read.swap_remove(0)),
                        Err(error) if self.device_errors.fetch_add(1, Ordering::Relaxed) < UNREADABLE_MAX => {
                            Err(error.to_string())
                        }
                        Err(error) => return Err(error),
                    });
                }
            }
            Err(error) => return Err(error),
        }
        Ok(blocks.into_iter().flatten().collect())
    }

    /// As [`Reader::read`], for nodes of one level.
    pub fn nodes(&self, addresses: &[u64], level: u8) -> Result<Vec<Result<Arc<Block>, String>>, FsError> {
        let check = |read: Result<Arc<Block>, String>| {
            let block = read?;
            block.expect(BlockKind::Node).map_err(|e| reason(&e))?;
            if node::level(&block) != level {
                return Err(format!("is of level {}, its parent expects {level}", node::level(&block)));
            }
            node::check(&block).map_err(|e| reason(&e))?;
            Ok(block)
        };
        Ok(self.read(addresses)?.into_iter().map(check).collect())
    }
}

/// The text of an error without the block that it names first: the place of a finding says that.
pub(crate) fn reason(error: &Corrupt) -> String {
    let text = error.to_string();
    let named = text.starts_with("block ") || text.starts_with("inode ");
    text.split_once(": ").filter(|_| named).map(|(_, rest)| rest.to_owned()).unwrap_or(text)
}

/// A set of blocks; a few bytes for each chunk that has one of them.
#[derive(Default)]
pub(crate) struct BlockSet(FxHashMap<u64, [u64; CHUNK_BLOCKS as usize / 64]>);

impl BlockSet {
    /// Adds a block. Returns whether it is new.
    pub fn insert(&mut self, block: u64) -> bool {
        let word = &mut self.0.entry(block / CHUNK_BLOCKS).or_default()[(block % CHUNK_BLOCKS / 64) as usize];
        let mask = 1 << (block % 64);
        let new = *word & mask == 0;
        *word |= mask;
        new
    }

    /// Takes a block out.
    pub fn remove(&mut self, block: u64) {
        if let Some(words) = self.0.get_mut(&(block / CHUNK_BLOCKS)) {
            words[(block % CHUNK_BLOCKS / 64) as usize] &= !(1 << (block % 64));
        }
    }

    /// Whether the block is in the set.
    pub fn contains(&self, block: u64) -> bool {
        let words = self.0.get(&(block / CHUNK_BLOCKS));
        words.is_some_and(|w| w[(block % CHUNK_BLOCKS / 64) as usize] >> (block % 64) & 1 == 1)
    }
}

/// Keys that a part of the tree covers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Range {
    /// The lowest.
    pub lower: Key,
    /// The first one beyond; none for the end of the tree.
    pub upper: Option<Key>,
}

impl Range {
    /// All keys.
    pub const ALL: Range = Range { lower: Key::MIN, upper: None };

    /// Whether a key lies in it.
    pub fn contains(&self, key: Key) -> bool {
        key >= self.lower && self.upper.is_none_or(|upper| key < upper)
    }
}

/// Visitor of the nodes of a tree.
pub(crate) trait Visit {
    /// A sound node, before what is below it.
    fn node(&mut self, address: u64, block: &Block, range: Range) -> Result<(), FsError>;
    /// A node that is pointed to and cannot be used; `range` is what it would cover.
    fn damaged(&mut self, address: u64, range: Range, why: String) -> Result<(), FsError>;
}

struct Child {
    address: u64,
    range: Range,
    /// The root, which alone may be empty.
    is_root: bool,
}

/// Visits the tree below `root`, nodes before their children, leaves in the order of their keys.
///
/// # Errors
/// The device failed, or the visitor did.
pub(crate) fn walk(reader: &Reader, root: u64, level: u8, visitor: &mut impl Visit) -> Result<BlockSet, FsError> {
    let mut seen = BlockSet::default();
    below(reader, vec![Child { address: root, range: Range::ALL, is_root: true }], level, visitor, &mut seen)?;
    Ok(seen)
}

fn below(reader: &Reader, children: Vec<Child>, level: u8, visitor: &mut impl Visit, seen: &mut BlockSet) -> Result<(), FsError> {
    let geometry = reader.volume.geometry();
    for part in children.chunks(BATCH) {
        let mut wanted: Vec<&Child> = Vec::with_capacity(part.len());
        for child in part {
            if !geometry.contains_data(child.address, 1) {
                visitor.damaged(child.address, child.range, "tree points outside the data area".into())?;
            } else if !seen.insert(child.address) {
                visitor.damaged(child.address, child.range, "node is pointed to twice".into())?;
            } else {
                wanted.push(child);
            }
        }
        let addresses: Vec<u64> = wanted.iter().map(|c| c.address).collect();
        for (child, read) in wanted.into_iter().zip(reader.nodes(&addresses, level)?) {
            let block = match read {
                Ok(block) if node::count(&block) == 0 && !child.is_root => {
                    visitor.damaged(child.address, child.range, node::EMPTY.into())?;
                    continue;
                }
                Ok(block) => block,
                Err(why) => {
                    visitor.damaged(child.address, child.range, why)?;
                    continue;
                }
            };
            visitor.node(child.address, &block, child.range)?;
            if level > 0 {
                below(reader, children_of(&block, child.range), level - 1, visitor, seen)?;
            }
        }
    }
    Ok(())
}

fn children_of(block: &Block, range: Range) -> Vec<Child> {
    let count = node::count(block);
    let bound = |slot: usize| match slot {
        0 => Some(range.lower),
        slot if slot < count => Some(node::key(block, slot)),
        _ => range.upper,
    };
    let child = |slot| {
        let range = Range { lower: bound(slot).expect("only the end has none"), upper: bound(slot + 1) };
        Child { address: node::child(block, slot), range, is_root: false }
    };
    (0..count).map(child).collect()
}
