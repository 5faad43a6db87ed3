//! Rebuilds the inner nodes of a tree whose shape is damaged. Leaves hold everything: those that can be reached are kept where
//! they are, those that a damaged node hides are found by looking through the chunks of metadata, and new inner nodes are
//! built over them. A leaf that items of damaged ones belong to is replaced by new leaves that have both.
//!
//! Nothing of the old tree is written over, so that it is what counts up to the last operation: new nodes go straight home, to
//! blocks that are free, as data does; and one transaction marks these blocks as in use and makes the new tree the one that
//! counts. Before it, nobody finds them: a repair that begins again sees what this one saw.

use std::collections::BTreeMap;
use std::sync::Arc;

use gpunvme_layout::geometry::CHUNK_BLOCKS;
use gpunvme_layout::group::{self, ChunkKind, Descriptor};
use gpunvme_layout::key::{INO_MAX, INO_NONE};
use gpunvme_layout::{Block, BlockKind, Corrupt, Extent, Key, Kind, node};
use rustc_hash::FxHashSet;

use super::items::Kept;
use super::spool::{Sorted, Spool};
use super::walk::{Range, Reader, Visit, walk};
use crate::error::FsError;
use crate::volume::Volume;

/// Blocks that are looked at together.
const BATCH: usize = 256;
/// Children that a new inner node gets: it has room to grow.
const FILL: usize = node::INNER_MAX * 3 / 4;

/// An item of a loose block: its key in two words, then which of those blocks has it, and which item of that block it is.
type LooseItem = [u64; 4];

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
    /// Blocks with items that do not fit between those: each item is put where it belongs.
    loose: Vec<u64>,
    /// Sound inner nodes of the old tree.
    inner: Vec<u64>,
    /// Keys that nothing readable covers.
    holes: BTreeMap<Key, Option<Key>>,
    /// What the old tree points to and cannot use.
    damaged: Vec<u64>,
}

impl Visit for Survey {
    fn node(&mut self, address: u64, block: &Block, _range: Range) -> Result<(), FsError> {
        match node::level(block) {
            0 => self.add(address, block),
            _ => self.inner.push(address),
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
        for part in self.damaged.chunks(BATCH) {
            for (address, block) in part.iter().zip(reader.read(part)?) {
                if block.is_ok_and(|b| b.expect(BlockKind::Node).is_ok() && node::level(&b) == 0 && node::check(&b).is_err()) {
                    self.loose.push(*address);
                }
            }
        }
        Ok(())
    }

    /// Notes the blocks that the old tree uses, and the new one will.
    pub fn note_used(&self, volume: &Volume, reader: &Reader, kept: &mut Kept) -> Result<(), FsError> {
        let geometry = volume.superblock().geometry();
        self.inner.iter().try_for_each(|address| kept.use_blocks(&geometry, INO_NONE, *address, 1))?;
        // What a damaged one really is, nobody knows. As data nothing is written over it, and its chunk becomes none of nodes.
        self.damaged.iter().try_for_each(|address| kept.use_blocks(&geometry, INO_MAX, *address, 1))?;
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

    /// Builds the tree anew; what does not fit into `memory` of the items that are put back goes to a temporary file. The
    /// bitmaps have to mark everything that is in use, and no image may be in the live journal. Nothing is durable before the
    /// next commit.
    pub fn build(&self, volume: &Volume, reader: &Reader, memory: usize) -> Result<(), FsError> {
        let mut nodes = NewNodes { volume, done: Vec::with_capacity(BATCH), leaf: None, leaves: Vec::new() };
        self.build_leaves(reader, &mut nodes, memory)?;
        let mut children = nodes.leaves()?;
        let mut level = 0;
        while children.len() > 1 {
            level += 1;
            let mut parents = Vec::with_capacity(children.len() / FILL + 1);
            for part in children.chunks(FILL) {
                parents.push((part[0].0, nodes.inner(level, part)?));
            }
            children = parents;
        }
        nodes.write()?;
        volume.wait(|| {
            let mut op = volume.begin()?;
            (op.state_mut().root, op.state_mut().level) = (children[0].1, level);
            op.finish();
            Ok(())
        })
    }

    /// Goes through the leaves of the survey and the loose items, both in the order of their keys.
    fn build_leaves(&self, reader: &Reader, nodes: &mut NewNodes, memory: usize) -> Result<(), FsError> {
        let mut loose = self.loose_items(reader, memory)?;
        let mut source = None;
        let kept = self.leaves.iter().map(|(first, leaf)| (*first, Some(leaf.address)));
        let mut parts = std::iter::once((Key::MIN, None)).chain(kept).peekable();
        while let Some((first, address)) = parts.next() {
            let end = parts.peek().map(|(key, _)| words(*key));
            let belongs = |item: &LooseItem| end.is_none_or(|end| item[..2] < end[..]);
            match (address, loose.peek().is_some_and(|item| belongs(&item))) {
                (Some(address), false) => {
                    nodes.keep(first, address)?;
                    continue;
                }
                (None, false) => continue,
                (_, true) => {}
            }
            let old = address.map(|address| sound(address, reader.nodes(&[address], 0)?.swap_remove(0))).transpose()?;
            let mut there = old.iter().flat_map(|leaf| node::salvage(leaf)).peekable();
            let mut last = None;
            while let Some(item) = loose.next_if(belongs)? {
                let [.., number, index] = item;
                if source.as_ref().is_none_or(|(of, _)| *of != number) {
                    let address = self.loose[number as usize];
                    source = Some((number, sound(address, reader.read(&[address])?.swap_remove(0))?));
                }
                let (_, block) = source.as_ref().expect("read above");
                let Some((key, value)) = node::salvage(block).nth(index as usize) else { continue };
                while let Some((key, value)) = there.next_if(|(before, _)| *before <= key) {
                    nodes.item(key, value)?;
                    last = Some(key);
                }
                // What is there counts more, and of loose ones the first.
                if last.replace(key) != Some(key) {
                    nodes.item(key, value)?;
                }
            }
            there.try_for_each(|(key, value)| nodes.item(key, value))?;
        }
        Ok(())
    }

    /// The items of all loose blocks, in the order of their keys.
    fn loose_items(&self, reader: &Reader, memory: usize) -> Result<Sorted<LooseItem>, FsError> {
        let mut items = Spool::new(memory);
        for (part, first) in self.loose.chunks(BATCH).zip((0..).step_by(BATCH)) {
            for (block, number) in reader.read(part)?.into_iter().zip(first..) {
                let Ok(block) = block else { continue };
                for ((key, _), index) in node::salvage(&block).zip(0..) {
                    let [object, offset] = words(key);
                    items.push([object, offset, number, index])?;
                }
            }
        }
        items.sorted()
    }
}

/// A key as two numbers that are ordered as keys are.
fn words(key: Key) -> [u64; 2] {
    [key.ino() << 8 | u64::from(key.kind()), key.offset()]
}

/// A block that was sound a moment ago.
fn sound(address: u64, read: Result<Arc<Block>, String>) -> Result<Arc<Block>, FsError> {
    read.map_err(|_| Corrupt::Field { address, what: "it could be read before, and cannot any more" }.into())
}

/// The nodes of a new tree.
struct NewNodes<'v> {
    volume: &'v Volume,
    /// Address, sequence and content of those that have still to be written.
    done: Vec<(u64, u64, Arc<Block>)>,
    /// A leaf that has still room.
    leaf: Option<Block>,
    /// The leaves so far, by the first key in each.
    leaves: Vec<(Key, u64)>,
}

impl NewNodes<'_> {
    /// Adds a leaf that stays where it is.
    fn keep(&mut self, first: Key, address: u64) -> Result<(), FsError> {
        self.end_leaf()?;
        self.leaves.push((first, address));
        Ok(())
    }

    /// Adds an item to the leaf that is being made; to the next one where that is full.
    fn item(&mut self, key: Key, value: &[u8]) -> Result<(), FsError> {
        if self.leaf.as_ref().is_some_and(|leaf| !node::leaf_fits(leaf, value.len())) {
            self.end_leaf()?;
        }
        let leaf = match &mut self.leaf {
            Some(leaf) => leaf,
            None => {
                let leaf = self.node(0)?;
                self.leaves.push((key, leaf.address()));
                self.leaf.insert(leaf)
            }
        };
        let end = node::count(leaf);
        node::leaf_insert(leaf, end, key, value);
        Ok(())
    }

    fn end_leaf(&mut self) -> Result<(), FsError> {
        self.leaf.take().map_or(Ok(()), |leaf| self.add(leaf))
    }

    /// Ends the leaves, of which there is one at least.
    fn leaves(&mut self) -> Result<Vec<(Key, u64)>, FsError> {
        self.end_leaf()?;
        if self.leaves.is_empty() {
            let empty = self.node(0)?;
            self.leaves.push((Key::MIN, empty.address()));
            self.add(empty)?;
        }
        Ok(std::mem::take(&mut self.leaves))
    }

    /// Adds an inner node with these children, and returns its address.
    fn inner(&mut self, level: u8, children: &[(Key, u64)]) -> Result<u64, FsError> {
        let mut block = self.node(level)?;
        for (slot, (key, child)) in children.iter().enumerate() {
            node::inner_insert(&mut block, slot, *key, *child);
        }
        let address = block.address();
        self.add(block)?;
        Ok(address)
    }

    /// An empty node, for a block that nobody uses.
    fn node(&self, level: u8) -> Result<Block, FsError> {
        let address = self.volume.wait(|| {
            let mut op = self.volume.begin()?;
            let address = op.allocate_node()?;
            op.finish();
            Ok(address)
        })?;
        let mut block = Block::new(BlockKind::Node, address, &self.volume.superblock().uuid);
        node::init(&mut block, level);
        Ok(block)
    }

    fn add(&mut self, mut block: Block) -> Result<(), FsError> {
        let sequence = self.volume.meta.read().sequence;
        block.seal(sequence);
        self.done.push((block.address(), sequence, Arc::new(block)));
        if self.done.len() == BATCH { self.write() } else { Ok(()) }
    }

    /// Writes the nodes home that are not there yet.
    fn write(&mut self) -> Result<(), FsError> {
        self.volume.write_home(&mut self.done)?;
        let mut meta = self.volume.meta.write();
        for (address, _, block) in self.done.drain(..) {
            // Whatever was known of that address is gone.
            meta.cache.put(address, block);
        }
        Ok(())
    }
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
