//! Rebuilds the inner nodes of a tree whose shape is damaged. Leaves hold everything: those that can be reached are kept where
//! they are, those that a damaged node hides are found by looking through the chunks of metadata, and new inner nodes are
//! built over them. The last operation makes them the tree; until it is durable, the old tree is what counts.

use std::collections::BTreeMap;
use std::sync::Arc;

use gpunvme_layout::geometry::CHUNK_BLOCKS;
use gpunvme_layout::group::{self, ChunkKind, Descriptor};
use gpunvme_layout::key::INO_NONE;
use gpunvme_layout::{Block, BlockKind, Extent, Key, Kind, node};
use rustc_hash::FxHashSet;

use super::items::Kept;
use super::walk::{Range, Reader, Visit, walk};
use crate::error::FsError;
use crate::volume::Volume;
use crate::volume::op::{Blocks, OP_BLOCKS_MAX};
use crate::volume::tree;

/// Blocks that are looked at together.
const BATCH: usize = 256;
/// Children that a new inner node gets: it has room to grow.
const FILL: usize = node::INNER_MAX * 3 / 4;
/// Items that are put back in one operation.
const ITEMS_PER_OP: usize = 16;

/// A leaf, and the keys in it.
#[derive(Debug, Clone, Copy)]
struct Leaf {
    address: u64,
    last: Key,
}

/// What a tree can be built of.
#[derive(Default)]
pub(crate) struct Survey {
    /// Sound leaves by their first key; no two cover each other.
    leaves: BTreeMap<Key, Leaf>,
    /// Blocks with items that do not fit between those: they are put back one by one.
    loose: Vec<u64>,
    /// Keys that nothing readable covers.
    holes: BTreeMap<Key, Option<Key>>,
    damaged: Vec<u64>,
}

impl Visit for Survey {
    fn node(&mut self, address: u64, block: &Block, _range: Range) -> Result<(), FsError> {
        if node::level(block) == 0 {
            self.add(address, block);
        }
        Ok(())
    }

    fn damaged(&mut self, address: u64, range: Range, _why: String) {
        self.holes.insert(range.lower, range.upper);
        self.damaged.push(address);
    }
}

impl Survey {
    /// Surveys the tree of a volume; `lost`: nothing is known of its root.
    pub fn new(volume: &Volume, reader: &Reader, lost: bool) -> Result<Survey, FsError> {
        let state = volume.meta.read().state;
        let mut survey = Survey::default();
        let reached = match lost {
            true => {
                survey.damaged(state.root, Range::ALL, String::new());
                Default::default()
            }
            false => walk(reader, state.root, state.level, &mut survey)?,
        };
        if !survey.holes.is_empty() {
            let mut candidates = Vec::new();
            let damaged: FxHashSet<u64> = survey.damaged.iter().copied().collect();
            scan(volume, reader, |address, block| {
                if !reached.contains(address) || damaged.contains(&address) {
                    candidates.push((block.sequence(), address));
                }
            })?;
            // Where two cover the same keys, the one that was written later is the one that counts.
            candidates.sort_unstable_by(|a, b| b.cmp(a));
            for part in candidates.chunks(BATCH) {
                let addresses: Vec<u64> = part.iter().map(|(_, address)| *address).collect();
                for (address, block) in addresses.iter().zip(reader.nodes(&addresses, 0)?) {
                    let Ok(block) = block else { continue };
                    if survey.fills_a_hole(&block) && survey.covering(&block).is_none() {
                        survey.add(*address, &block);
                    }
                }
            }
        }
        survey.salvage(volume, reader)?;
        Ok(survey)
    }

    fn add(&mut self, address: u64, block: &Block) {
        let Some(last) = node::count(block).checked_sub(1) else { return };
        if self.covering(block).is_some() {
            self.loose.push(address);
        } else {
            self.leaves.insert(node::key(block, 0), Leaf { address, last: node::key(block, last) });
        }
    }

    /// A leaf of the survey that covers some of the same keys.
    fn covering(&self, block: &Block) -> Option<&Leaf> {
        let (first, last) = (node::key(block, 0), node::key(block, node::count(block) - 1));
        self.leaves.range(..=last).next_back().map(|(_, leaf)| leaf).filter(|leaf| leaf.last >= first)
    }

    fn fills_a_hole(&self, block: &Block) -> bool {
        let (first, last) = (node::key(block, 0), node::key(block, node::count(block) - 1));
        let hole = self.holes.range(..=first).next_back();
        hole.is_some_and(|(lower, upper)| Range { lower: *lower, upper: *upper }.contains(last))
    }

    /// Leaves that verify, and whose slots make no sense as a whole, may have items that do.
    fn salvage(&mut self, volume: &Volume, reader: &Reader) -> Result<(), FsError> {
        let geometry = volume.superblock().geometry();
        // What a damaged state or a crafted node points to may be no block at all.
        self.damaged.retain(|address| geometry.contains_data(*address, 1));
        for part in std::mem::take(&mut self.damaged).chunks(BATCH) {
            for (address, block) in part.iter().zip(reader.read(part)?) {
                if block.is_ok_and(|b| b.expect(BlockKind::Node).is_ok() && node::level(&b) == 0 && node::check(&b).is_err()) {
                    self.loose.push(*address);
                }
            }
        }
        Ok(())
    }

    /// Notes the blocks that the new tree will use.
    pub fn note_used(&self, volume: &Volume, reader: &Reader, kept: &mut Kept) -> Result<(), FsError> {
        let geometry = volume.superblock().geometry();
        let addresses: Vec<u64> = self.leaves.values().map(|leaf| leaf.address).chain(self.loose.iter().copied()).collect();
        for part in addresses.chunks(BATCH) {
            for (address, block) in part.iter().zip(reader.read(part)?) {
                kept.use_blocks(&geometry, INO_NONE, *address, 1)?;
                let Ok(block) = block else { continue };
                for (key, value) in node::salvage(&block).filter(|(key, _)| key.kind() == Kind::Extent as u8) {
                    if let Ok(extent) = Extent::decode(key.ino(), key.offset(), value)
                        && geometry.contains_data(extent.block, extent.len.into())
                    {
                        kept.use_blocks(&geometry, key.ino(), extent.block, extent.len.into())?;
                    }
                }
            }
        }
        Ok(())
    }

    /// Builds the tree anew. The bitmaps have to mark everything that is in use.
    pub fn build(&self, volume: &Volume, reader: &Reader) -> Result<(), FsError> {
        let mut children: Vec<(Key, u64)> = self.leaves.iter().map(|(key, leaf)| (*key, leaf.address)).collect();
        let mut level = 0;
        if children.is_empty() {
            children.push((Key::MIN, new_node(volume, 0, &[])?));
        }
        while children.len() > 1 {
            level += 1;
            let mut parents = Vec::with_capacity(children.len() / FILL + 1);
            for part in children.chunks(FILL) {
                parents.push((part[0].0, new_node(volume, level, part)?));
            }
            children = parents;
        }
        // From here on the old tree must not be lost before all is in the new one.
        volume.commit()?;
        volume.checkpoint()?;
        if !self.fits(volume, reader, level)? {
            return Err(FsError::NoSpace);
        }
        volume.wait(|| {
            let mut op = volume.begin()?;
            (op.state_mut().root, op.state_mut().level) = (children[0].1, level);
            op.finish();
            Ok(())
        })?;
        for address in &self.loose {
            self.put_back(volume, reader, *address)?;
        }
        Ok(())
    }

    /// Whether what has to be put back is one transaction, which a lack of space leaves undone, or has room for sure.
    fn fits(&self, volume: &Volume, reader: &Reader, level: u8) -> Result<bool, FsError> {
        let mut missing = 0;
        for address in &self.loose {
            let Ok(block) = reader.read(&[*address])?.swap_remove(0) else { continue };
            for (key, _) in node::salvage(&block) {
                let there = match self.leaves.range(..=key).next_back() {
                    Some((_, leaf)) => reader.nodes(&[leaf.address], 0)?.swap_remove(0),
                    None => Err(String::new()),
                };
                missing += u64::from(!there.is_ok_and(|leaf| node::search(&leaf, key).is_ok()));
            }
        }
        // Each may split all nodes above it, and the root; a leaf may become three.
        let new = missing * (u64::from(level) + 3);
        let meta = volume.meta.read();
        Ok(2 * new + 2 * OP_BLOCKS_MAX as u64 <= meta.transaction_max as u64 || new <= meta.state.free_chunks * CHUNK_BLOCKS)
    }

    /// Puts the items of a block back into the tree, where there is none of that key.
    fn put_back(&self, volume: &Volume, reader: &Reader, address: u64) -> Result<(), FsError> {
        let Ok(block) = reader.read(&[address])?.swap_remove(0) else { return Ok(()) };
        let items: Vec<(Key, &[u8])> = node::salvage(&block).collect();
        for part in items.chunks(ITEMS_PER_OP) {
            volume.wait(|| {
                let mut op = volume.begin()?;
                for (key, value) in part {
                    tree::insert(&mut op, *key, value)?;
                }
                op.finish();
                Ok(())
            })?;
        }
        Ok(())
    }
}

/// Makes a node with these children.
fn new_node(volume: &Volume, level: u8, children: &[(Key, u64)]) -> Result<u64, FsError> {
    volume.wait(|| {
        let mut op = volume.begin()?;
        let address = op.allocate_node()?;
        let mut block = Block::new(BlockKind::Node, address, &op.meta().uuid);
        node::init(&mut block, level);
        for (slot, (key, child)) in children.iter().enumerate() {
            node::inner_insert(&mut block, slot, *key, *child);
        }
        op.create(block);
        op.finish();
        Ok(address)
    })
}

/// Looks at all leaves in chunks of metadata that are marked as in use, and at all in groups whose bitmap is damaged.
fn scan(volume: &Volume, reader: &Reader, mut found: impl FnMut(u64, &Block)) -> Result<(), FsError> {
    let geometry = volume.superblock().geometry();
    let mut wanted = Vec::new();
    let look = |wanted: &mut Vec<u64>, found: &mut dyn FnMut(u64, &Block)| -> Result<(), FsError> {
        for (address, block) in wanted.iter().zip(reader.nodes(wanted, 0)?) {
            if let Ok(block) = block
                && node::count(&block) > 0
            {
                found(*address, &block);
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
