//! Rebuilds the inner nodes of a tree whose shape is damaged. Leaves hold everything: leaves that
//! can be reached are kept where they are, leaves that a damaged node hides are found by searching
//! the chunks of metadata, and new inner nodes are built over both. A leaf whose key range also
//! covers items of damaged leaves is replaced by new leaves that hold all of them.
//!
//! The repair overwrites nothing of the old tree, which stays the valid one up to the last
//! operation: new nodes are written in place, to free blocks, as data is; and one transaction marks
//! these blocks as in use and makes the new tree the valid one. Before that transaction no metadata
//! refers to them: a repair that begins again sees what this one saw.
//!
//! Of each leaf and each item there is a record, which is sorted outside memory if need be.
//! Everything goes by in the order of its keys: the leaves, of which some cover the same keys
//! ([`overlap`]), the items that are put back, and the new nodes ([`tree`]).

mod overlap;
mod tree;

use std::sync::Arc;

use gpunvme_layout::geometry::CHUNK_BLOCKS;
use gpunvme_layout::group::{self, ChunkKind, Descriptor};
use gpunvme_layout::key::{INO_MAX, INO_NONE};
use gpunvme_layout::{Block, BlockKind, Corrupt, Extent, Geometry, Key, Kind, node};
use zerocopy::{FromBytes, Immutable, IntoBytes};

use super::items::Kept;
use super::spool::{Sorted, Spool};
use super::walk::{BlockSet, Range, Reader, Visit, walk};
use crate::error::FsError;
use crate::volume::Volume;

use overlap::{Candidate, Hole, Verdict, Words, judge, words};
use tree::{BATCH, NewTree};

/// A leaf of the old tree that is one of the new.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
struct Leaf {
    /// Its first key.
    first: Words,
    /// Address of its block.
    address: u64,
}

/// An item of a loose block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
struct LooseItem {
    key: Words,
    /// `u64::MAX` less the sequence of its block: of items with the same key, the one written last
    /// has the lowest rank and wins.
    rank: u64,
    /// Address of the block, and index of the item in it.
    address: u64,
    index: u64,
}

/// Parts of which the new tree is built.
pub(crate) struct Survey {
    /// Sound leaves in the order of their keys; no two cover each other.
    leaves: Spool<Leaf>,
    /// Items of blocks that do not fit between those: each is put where it belongs.
    loose: Spool<LooseItem>,
}

/// State of the survey of a tree. Each list keeps its part of the memory.
struct Surveyor<'k> {
    geometry: Geometry,
    /// Blocks that the old tree uses, and the new one will.
    kept: &'k mut Kept,
    candidates: Spool<Candidate>,
    /// Keys that nothing readable covers.
    holes: Spool<Hole>,
    /// Blocks that the old tree points to and cannot use.
    damaged: Spool<u64>,
    /// Blocks with items that do not fit between the leaves.
    loose: Spool<u64>,
}

impl Visit for Surveyor<'_> {
    fn node(&mut self, address: u64, block: &Block, _range: Range) -> Result<(), FsError> {
        match node::level(block) {
            0 => {
                note_leaf(&self.geometry, self.kept, address, block)?;
                let rank = self.candidates.len();
                self.add_candidate(address, block, 0, rank)
            }
            _ => self.kept.use_blocks(INO_NONE, address, 1),
        }
    }

    fn damaged(&mut self, address: u64, range: Range, _why: String) -> Result<(), FsError> {
        if let Some(hole) = Hole::new(range) {
            self.holes.push(hole)?;
        }
        // The address in a damaged state or a crafted node may be no block of the volume at all.
        if self.geometry.contains_data(address, 1) {
            self.damaged.push(address)?;
        }
        Ok(())
    }
}

impl Surveyor<'_> {
    fn add_candidate(&mut self, address: u64, leaf: &Block, found: u64, rank: u64) -> Result<(), FsError> {
        let Some(last) = node::count(leaf).checked_sub(1) else { return Ok(()) };
        let (first, last) = (words(node::key(leaf, 0)), words(node::key(leaf, last)));
        self.candidates.push(Candidate { first, last, found, rank, address })
    }

    /// Looks at what the old tree cannot use. Leaves that verify, and whose slots make no sense as
    /// a whole, may have items that do. What it points to rightly stays in `reached`.
    fn salvage(&mut self, reader: &Reader, reached: &mut BlockSet) -> Result<(), FsError> {
        let damaged = std::mem::replace(&mut self.damaged, Spool::new(0, &reader.stop));
        each_batch(damaged.sorted()?, |part| {
            for (address, block) in part.iter().zip(reader.read(part)?) {
                reached.remove(*address);
                // The block's true use is unknown. Counted as data, it is not overwritten, and its
                // chunk does not become a chunk of nodes.
                self.kept.use_blocks(INO_MAX, *address, 1)?;
                if let Ok(block) = block
                    && block.expect(BlockKind::Node).is_ok()
                    && node::level(&block) == 0
                    && node::check(&block).is_err()
                {
                    note_leaf(&self.geometry, self.kept, *address, &block)?;
                    self.loose.push(*address)?;
                }
            }
            Ok(())
        })
    }
}

impl Survey {
    /// Surveys the tree of a volume, within `memory` bytes, and notes in `kept` which blocks the
    /// old tree uses, and the new one will; `lost`: nothing is known of its root.
    pub fn new(volume: &Volume, reader: &Reader, lost: bool, memory: usize, kept: &mut Kept) -> Result<Survey, FsError> {
        let state = volume.meta.read().state;
        let (geometry, stop) = (volume.geometry(), &reader.stop);
        let mut surveyor = Surveyor {
            geometry,
            kept,
            candidates: Spool::new(memory / 4, stop),
            holes: Spool::new(memory / 16, stop),
            damaged: Spool::new(memory / 16, stop),
            loose: Spool::new(memory / 16, stop),
        };
        let mut reached = match lost {
            true => {
                surveyor.damaged(state.root, Range::ALL, String::new())?;
                BlockSet::default()
            }
            false => walk(reader, state.root, state.level, &mut surveyor)?,
        };
        surveyor.salvage(reader, &mut reached)?;
        if surveyor.holes.len() > 0 {
            scan(volume, reader, |address, block| match reached.contains(address) {
                true => Ok(()),
                // Where two cover the same keys, the one that was written later is the one that
                // counts.
                false => surveyor.add_candidate(address, block, 1, u64::MAX - block.sequence()),
            })?;
        }
        drop(reached);
        let Surveyor { candidates, holes, mut loose, kept, .. } = surveyor;
        let (mut leaves, mut found) = (Spool::new(memory / 16, stop), Spool::new(memory / 16, stop));
        judge(candidates.sorted()?, holes.sorted()?, |candidate, verdict| match (verdict, candidate.found) {
            (Verdict::Covered, 0) => loose.push(candidate.address),
            (Verdict::Covered, _) | (Verdict::Foreign, _) => Ok(()),
            (Verdict::Kept, is_found) => {
                if is_found > 0 {
                    found.push(candidate.address)?;
                }
                leaves.push(Leaf { first: candidate.first, address: candidate.address })
            }
        })?;
        each_batch(found.sorted()?, |part| {
            for (address, leaf) in part.iter().zip(reader.nodes(part, 0)?) {
                note_leaf(&geometry, kept, *address, &*sound(*address, leaf)?)?;
            }
            Ok(())
        })?;
        let mut items = Spool::new(memory / 4, stop);
        each_batch(loose.sorted()?, |part| {
            for (address, block) in part.iter().zip(reader.read(part)?) {
                let block = sound(*address, block)?;
                let rank = u64::MAX - block.sequence();
                for ((key, _), index) in node::salvage(&block).zip(0..) {
                    items.push(LooseItem { key: words(key), rank, address: *address, index })?;
                }
            }
            Ok(())
        })?;
        Ok(Survey { leaves, loose: items })
    }

    /// Builds the tree anew. The bitmaps have to mark everything that is in use, and no image may
    /// be in the live journal. Nothing is durable before the next commit.
    pub fn build(self, volume: &Volume, reader: &Reader) -> Result<(), FsError> {
        let mut tree = NewTree::new(volume);
        self.add_leaves(reader, &mut tree)?;
        let (root, level) = tree.finish()?;
        volume.wait(|| {
            let mut op = volume.begin()?;
            (op.state_mut().root, op.state_mut().level) = (root, level);
            op.finish();
            Ok(())
        })
    }

    /// Goes through the leaves and the loose items, both in the order of their keys.
    fn add_leaves(self, reader: &Reader, tree: &mut NewTree) -> Result<(), FsError> {
        let mut loose = self.loose.sorted()?;
        let mut source: Option<(u64, Arc<Block>)> = None;
        // Items that belong before the first leaf come first, with no leaf.
        let mut leaf = None;
        for next in 0..=self.leaves.len() {
            let next = (next < self.leaves.len()).then(|| self.leaves.get(next)).transpose()?;
            let belongs = |item: &LooseItem| next.is_none_or(|next: Leaf| item.key < next.first);
            let leaf = std::mem::replace(&mut leaf, next);
            if !loose.peek().is_some_and(|item| belongs(&item)) {
                if let Some(Leaf { first, address }) = leaf {
                    tree.keep(Key::from_words(first[0], first[1]), address)?;
                }
                continue;
            }
            let read = |Leaf { address, .. }| sound(address, reader.nodes(&[address], 0)?.swap_remove(0));
            let old = leaf.map(read).transpose()?;
            let mut there = old.iter().flat_map(|leaf| node::salvage(leaf)).peekable();
            let mut last = None;
            while let Some(LooseItem { key, address, index, .. }) = loose.next_if(belongs)? {
                let key = Key::from_words(key[0], key[1]);
                while let Some((key, value)) = there.next_if(|(before, _)| *before <= key) {
                    tree.item(key, value)?;
                    last = Some(key);
                }
                // An item of the leaf takes precedence over a loose one, and of loose ones the
                // first.
                if last.replace(key) == Some(key) {
                    continue;
                }
                if source.as_ref().is_none_or(|(of, _)| *of != address) {
                    source = Some((address, sound(address, reader.read(&[address])?.swap_remove(0))?));
                }
                let (_, block) = source.as_ref().expect("read above");
                if let Some((key, value)) = node::salvage(block).nth(index as usize) {
                    tree.item(key, value)?;
                }
            }
            there.try_for_each(|(key, value)| tree.item(key, value))?;
        }
        Ok(())
    }
}

/// Notes the blocks that are in use by a leaf and its items.
fn note_leaf(geometry: &Geometry, kept: &mut Kept, address: u64, leaf: &Block) -> Result<(), FsError> {
    kept.use_blocks(INO_NONE, address, 1)?;
    for (key, value) in node::salvage(leaf).filter(|(key, _)| key.kind() == Kind::Extent as u8) {
        if let Ok(extent) = Extent::decode(key.ino(), key.offset(), value)
            && geometry.contains_data(extent.block, extent.len.into())
        {
            kept.use_blocks(key.ino(), extent.block, extent.len.into())?;
        }
    }
    Ok(())
}

/// Hands out addresses, each once, as many as are looked at together.
fn each_batch(mut addresses: Sorted<u64>, mut act: impl FnMut(&[u64]) -> Result<(), FsError>) -> Result<(), FsError> {
    let mut part = Vec::with_capacity(BATCH);
    while let Some(address) = addresses.next()? {
        while addresses.next_if(|next| *next == address)?.is_some() {}
        part.push(address);
        if part.len() == BATCH {
            act(&part)?;
            part.clear();
        }
    }
    act(&part)
}

/// A block that was sound a moment ago.
fn sound(address: u64, read: Result<Arc<Block>, String>) -> Result<Arc<Block>, FsError> {
    read.map_err(|_| Corrupt::Field { address, what: "it could be read before, and cannot any more" }.into())
}

/// Looks at all leaves in chunks of metadata that are marked as in use, and at all in groups whose
/// bitmap is damaged.
fn scan(volume: &Volume, reader: &Reader, mut found: impl FnMut(u64, &Block) -> Result<(), FsError>) -> Result<(), FsError> {
    let geometry = volume.geometry();
    let mut wanted = Vec::new();
    let look = |wanted: &mut Vec<u64>, found: &mut dyn FnMut(u64, &Block) -> Result<(), FsError>| -> Result<(), FsError> {
        for (address, block) in wanted.iter().zip(reader.nodes(wanted, 0)?) {
            if let Ok(block) = block
                && node::count(&block) > 0
            {
                found(*address, &block)?;
            }
        }
        wanted.clear();
        Ok(())
    };
    let sound = |read: Result<Arc<Block>, String>, kind| read.ok().filter(|block| block.expect(kind).is_ok());
    let mut descriptors = None;
    for number in 0..geometry.groups {
        let (address, index) = geometry.descriptor(number);
        if index == 0 {
            descriptors = sound(reader.read(&[address])?.swap_remove(0), BlockKind::Descriptors);
        }
        let written = descriptors.as_ref().is_none_or(|block| Descriptor::load(block, index).initialized);
        if !written {
            continue;
        }
        let bitmap = sound(reader.read(&[geometry.bitmap(number)])?.swap_remove(0), BlockKind::Bitmap);
        let start = geometry.group_start(number);
        for chunk in 0..geometry.group_chunks(number) {
            if bitmap.as_ref().is_some_and(|bitmap| group::kind(bitmap, chunk) != ChunkKind::Metadata) {
                continue;
            }
            for at in chunk * CHUNK_BLOCKS..(chunk + 1) * CHUNK_BLOCKS {
                if bitmap.as_ref().is_none_or(|bitmap| group::is_used(bitmap, at)) {
                    wanted.push(start + at);
                }
                if wanted.len() == BATCH {
                    look(&mut wanted, &mut found)?;
                }
            }
        }
    }
    look(&mut wanted, &mut found)
}
