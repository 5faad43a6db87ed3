//! The nodes of a new tree, made from the first key to the last: of each level there are only
//! those that have no parent yet.

use std::sync::Arc;

use gpunvme_layout::{Block, BlockKind, Key, node};

use crate::error::FsError;
use crate::volume::Volume;

/// Blocks that are looked at together.
pub(super) const BATCH: usize = 256;

/// Children that an inner node gets: it has room to grow.
const FILL: usize = node::INNER_MAX * 3 / 4;

/// A tree that is being made. Its nodes go straight home, to blocks that are free.
pub(super) struct NewTree<'v> {
    volume: &'v Volume,
    /// Address, sequence and content of nodes that have still to be written.
    done: Vec<(u64, u64, Arc<Block>)>,
    /// A leaf that has still room, and its first key.
    leaf: Option<(Key, Block)>,
    /// Nodes of each level that wait for a parent, with their first keys: at most [`FILL`].
    waiting: Vec<Vec<(Key, u64)>>,
}

impl<'v> NewTree<'v> {
    /// An empty tree.
    pub fn new(volume: &'v Volume) -> NewTree<'v> {
        NewTree { volume, done: Vec::with_capacity(BATCH), leaf: None, waiting: Vec::new() }
    }

    /// Adds a leaf that stays where it is.
    pub fn keep(&mut self, first: Key, address: u64) -> Result<(), FsError> {
        self.end_leaf()?;
        self.add_child(0, first, address)
    }

    /// Adds an item to the leaf that is being made; to the next one where that is full.
    pub fn item(&mut self, key: Key, value: &[u8]) -> Result<(), FsError> {
        if self.leaf.as_ref().is_some_and(|(_, leaf)| !node::leaf_fits(leaf, value.len())) {
            self.end_leaf()?;
        }
        let (_, leaf) = match &mut self.leaf {
            Some(leaf) => leaf,
            None => {
                let leaf = self.node(0)?;
                self.leaf.insert((key, leaf))
            }
        };
        let end = node::count(leaf);
        node::leaf_insert(leaf, end, key, value);
        Ok(())
    }

    /// Ends the tree, and writes what is not home yet. Returns its root, and the level of that.
    pub fn finish(mut self) -> Result<(u64, u8), FsError> {
        self.end_leaf()?;
        if self.waiting.is_empty() {
            let empty = self.node(0)?;
            self.end_node(0, Key::MIN, empty)?;
        }
        let mut level = 0;
        while level + 1 < self.waiting.len() || self.waiting[level].len() > 1 {
            self.add_parent(level)?;
            level += 1;
        }
        self.write()?;
        Ok((self.waiting[level][0].1, level as u8))
    }

    fn end_leaf(&mut self) -> Result<(), FsError> {
        self.leaf.take().map_or(Ok(()), |(first, leaf)| self.end_node(0, first, leaf))
    }

    /// Adds a node of a level that is written already.
    fn add_child(&mut self, level: usize, first: Key, address: u64) -> Result<(), FsError> {
        if self.waiting.len() == level {
            self.waiting.push(Vec::with_capacity(FILL));
        }
        if self.waiting[level].len() == FILL {
            self.add_parent(level)?;
        }
        self.waiting[level].push((first, address));
        Ok(())
    }

    /// Makes a parent of the nodes of a level that have none.
    fn add_parent(&mut self, level: usize) -> Result<(), FsError> {
        let mut parent = self.node(level as u8 + 1)?;
        let first = self.waiting[level][0].0;
        for (slot, (key, child)) in self.waiting[level].drain(..).enumerate() {
            node::inner_insert(&mut parent, slot, key, child);
        }
        self.end_node(level + 1, first, parent)
    }

    /// An empty node in a newly allocated block.
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

    /// Adds a node to which nothing is added any more.
    fn end_node(&mut self, level: usize, first: Key, mut block: Block) -> Result<(), FsError> {
        let (address, sequence) = (block.address(), self.volume.meta.read().sequence);
        block.seal(sequence);
        self.done.push((address, sequence, Arc::new(block)));
        if self.done.len() == BATCH {
            self.write()?;
        }
        self.add_child(level, first, address)
    }

    /// Writes the nodes home that are not there yet.
    fn write(&mut self) -> Result<(), FsError> {
        self.volume.write_home(&mut self.done)?;
        let mut meta = self.volume.meta.write();
        for (address, _, block) in self.done.drain(..) {
            // Replaces the old content of that address in the cache.
            meta.cache.put(address, block);
        }
        Ok(())
    }
}
