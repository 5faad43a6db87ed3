//! Operations that change metadata: all or nothing. An operation that ends before [`Op::finish`]
//! (by an error, a block that has to be loaded first, a panic) puts every block back as it was; so
//! operations are written straight down, without planning what they may need.

use std::cell::Cell;
use std::sync::Arc;

use gpunvme_layout::{Block, BlockKind, Geometry, Inode, Key, Kind, State, node};
use parking_lot::RwLockWriteGuard;
use smallvec::SmallVec;

use super::cache::Entry;
use super::directories::Known;
use super::known_orphans;
use super::meta::{Blocks, Hints, Meta};
use super::place::Place;
use super::promised::{NODE_PARTS, Promised};
use super::run::Run;
use super::undo::{Change, Changes, OP_BLOCKS_MAX};
use crate::error::{Attempt, Fail, FsError, Stall};

/// Number of leaves whose place an operation remembers: most operations go back to a few.
const PLACES: usize = 4;
/// Directories whose entries an operation changes at the most, and entries that it removes.
const ENTRIES: usize = 2;

/// One operation that changes metadata.
pub(crate) struct Op<'a> {
    meta: RwLockWriteGuard<'a, Meta>,
    changes: Changes,
    places: Cell<[Option<Place>; PLACES]>,
    state: State,
    running: usize,
    /// Data blocks that the operation frees.
    pub freed: Vec<Run>,
    /// Busy blocks that the operation adds to a file.
    pub claimed: Vec<Run>,
    /// Metadata chunks that the operation emptied.
    pub emptied: Vec<u64>,
    /// Nodes that the operation freed in all; those that it took count against them.
    nodes_freed: i64,
    /// Nodes that the operation took for the tree, less those that it gave back.
    pub nodes_taken: i64,
    /// Chunks of the margin that the operation made metadata's.
    pub margin_chunks: u64,
    /// Promised blocks that the operation redeems.
    pub redeemed: u64,
    /// Promised nodes that the operation may redeem, in parts, as far as it took some.
    pub promised_parts: u64,
    /// Directories that the operation has changed.
    directories: [Option<Known>; ENTRIES],
    /// Entries that it has removed.
    gone: [Option<Key>; ENTRIES],
    /// The directory that it makes.
    pub made: Option<u64>,
    /// What it does to inodes that are orphans, or were.
    pub orphans: SmallVec<[(u64, known_orphans::Change); 1]>,
    finished: bool,
}

impl Blocks for Op<'_> {
    fn meta(&self) -> &Meta {
        &self.meta
    }

    fn remember(&self, place: Place) {
        let mut places = self.places.get();
        places.rotate_right(1);
        places[0] = Some(place);
        self.places.set(places);
    }

    fn recall(&self, covers: impl Fn(&Place) -> bool) -> Option<Place> {
        self.places.get().into_iter().flatten().find(covers)
    }
}

impl<'a> Op<'a> {
    /// Begins an operation.
    ///
    /// # Errors
    /// [`Stall::Commit`] when the running transaction is full.
    pub fn begin(mut meta: RwLockWriteGuard<'a, Meta>) -> Attempt<Op<'a>> {
        if meta.running.len() + OP_BLOCKS_MAX > meta.transaction_max {
            return Err(Fail::Stall(Stall::Commit));
        }
        let (state, running) = (meta.state, meta.running.len());
        meta.operations += 1;
        let changes = Changes::new(meta.operations);
        Ok(Op {
            meta,
            changes,
            places: Cell::default(),
            state,
            running,
            freed: Vec::new(),
            claimed: Vec::new(),
            emptied: Vec::new(),
            nodes_freed: 0,
            nodes_taken: 0,
            margin_chunks: 0,
            redeemed: 0,
            promised_parts: 0,
            directories: [None; ENTRIES],
            gone: [None; ENTRIES],
            made: None,
            orphans: SmallVec::new(),
            finished: false,
        })
    }

    /// Notes that the item of a key changes, before it does.
    pub fn changes(&mut self, key: Key) {
        let ino = key.ino();
        if key.is(ino, Kind::Extent) || key.is(ino, Kind::Inode) {
            self.meta.versions.change(ino);
        } else if key.is(ino, Kind::Dirent) {
            self.meta.directories.may_have(ino, key.offset());
            self.gone.iter_mut().filter(|gone| **gone == Some(key)).for_each(|gone| *gone = None);
        }
    }

    /// Notes what a directory has become.
    pub fn directory_is(&mut self, ino: u64, inode: &Inode) {
        let known = Some(self.meta.directories.now(ino, inode));
        // One that changes twice is out of date in the first place, and is not kept.
        self.directories = [known, self.directories[0]];
    }

    /// Notes that an entry was removed.
    pub fn is_gone(&mut self, key: Key) {
        debug_assert!(self.gone[1].is_none(), "no operation removes more entries");
        self.gone = [Some(key), self.gone[0]];
    }

    /// Root and counters, for a change.
    pub fn state_mut(&mut self) -> &mut State {
        &mut self.meta.state
    }

    /// Sets the number of free nodes in all chunks of metadata; none when they have to be counted
    /// again.
    pub fn set_free_nodes(&mut self, nodes: Option<u64>) {
        self.meta.free_nodes = nodes;
    }

    /// Notes that so many nodes more are free, or fewer.
    pub fn nodes_freed(&mut self, nodes: i64) {
        self.nodes_freed += nodes;
        self.meta.free_nodes = self.meta.free_nodes.map(|free| free.wrapping_add_signed(nodes));
    }

    /// Gives the volume another region, and counts it.
    pub fn grow(&mut self, geometry: &Geometry) {
        self.meta.geometry = *geometry;
        self.meta.state.count_regions(geometry);
        // It is wholly free, and behind all others.
        self.meta.hints.full_behind = 0;
    }

    /// Number of blocks that it has changed so far.
    pub fn changed_blocks(&self) -> usize {
        self.changes.blocks()
    }

    /// Where the allocator looks first; a wrong hint only costs time, so it is not put back.
    pub fn hints(&mut self) -> &mut Hints {
        &mut self.meta.hints
    }

    /// A block that is in memory, for a change.
    ///
    /// # Errors
    /// [`FsError::TooManyBlocks`] where the operation has already changed as many blocks as it may;
    /// the other functions that change a block fail likewise.
    pub fn block_mut(&mut self, address: u64, kind: BlockKind) -> Attempt<&mut Block> {
        let (entry, running) = entry(&mut self.meta, &self.changes, address, kind)?;
        Ok(self.changes.block(address, entry, running))
    }

    /// Inserts an item into a leaf that is in memory. It must fit.
    pub fn leaf_insert(&mut self, address: u64, slot: usize, key: Key, value: &[u8]) -> Attempt<()> {
        let (entry, running) = entry(&mut self.meta, &self.changes, address, BlockKind::Node)?;
        node::leaf_insert(self.changes.leaf(address, entry, running, Change::Insert(slot)), slot, key, value);
        Ok(())
    }

    /// Removes an item from a leaf that is in memory. Returns the leaf.
    pub fn leaf_remove(&mut self, address: u64, slot: usize) -> Attempt<&Block> {
        let (entry, running) = entry(&mut self.meta, &self.changes, address, BlockKind::Node)?;
        let leaf = self.changes.leaf(address, entry, running, Change::Remove(slot));
        node::remove(leaf, slot);
        Ok(leaf)
    }

    /// The value of an item in a leaf that is in memory, for a change.
    pub fn leaf_value(&mut self, address: u64, slot: usize) -> Attempt<&mut [u8]> {
        let (entry, running) = entry(&mut self.meta, &self.changes, address, BlockKind::Node)?;
        Ok(node::value_mut(self.changes.leaf(address, entry, running, Change::Value(slot)), slot))
    }

    /// A new block; it replaces the cached content of that address.
    pub fn create(&mut self, block: Block) -> Attempt<()> {
        let address = block.address();
        let meta = &mut *self.meta;
        if self.changes.are_full(meta.cache.get(address)) {
            return Err(FsError::TooManyBlocks.into());
        }
        let old = meta.cache.get(address).map(|entry| entry.block.clone());
        let entry = meta.cache.put(address, Arc::new(block));
        self.changes.created(address, entry, &mut meta.running, old);
        self.forget_places();
        Ok(())
    }

    /// Forgets the places of leaves: the tree takes another shape.
    pub fn forget_places(&mut self) {
        self.places = Cell::default();
    }

    /// Promised nodes that the operation redeems, in parts.
    pub fn redeemed_parts(&self) -> u64 {
        (self.nodes_taken.max(0) as u64 * NODE_PARTS).min(self.promised_parts)
    }

    /// Makes the changes part of the running transaction, and returns its sequence.
    pub fn finish(mut self) -> u64 {
        if self.meta.state != self.state {
            self.meta.run_state();
        }
        for run in std::mem::take(&mut self.claimed) {
            self.meta.busy.remove(run);
            self.meta.reserved.remove(run, true);
        }
        for run in std::mem::take(&mut self.freed) {
            self.meta.busy.insert(run);
            self.meta.pending += run.len;
            self.meta.note_freed(run);
            self.meta.freed.push(run);
        }
        let redeemed = Promised { blocks: self.redeemed, parts: self.redeemed_parts() };
        self.meta.promised.forget(redeemed);
        let taken = if self.promised_parts > 0 { self.nodes_taken.max(0) as u64 } else { 0 };
        self.meta.margin_changes(self.margin_chunks, taken);
        let sequence = self.meta.sequence;
        for chunk in std::mem::take(&mut self.emptied) {
            self.meta.emptied.push((chunk, sequence));
        }
        let directories = &self.meta.directories;
        self.directories.into_iter().flatten().for_each(|known| directories.keep(known));
        self.gone.into_iter().flatten().for_each(|key| directories.gone(key.ino(), key.offset()));
        self.made.into_iter().for_each(|dir| directories.made(dir));
        for (ino, change) in std::mem::take(&mut self.orphans) {
            self.meta.orphans.change(ino, change);
        }
        self.finished = true;
        sequence
    }
}

/// A block that is in memory and may change, of the kind that the caller expects, and the list of
/// those that the running transaction changes.
fn entry<'m>(meta: &'m mut Meta, changes: &Changes, address: u64, kind: BlockKind) -> Attempt<(&'m mut Entry, &'m mut Vec<u64>)> {
    let Some(entry) = meta.cache.get_mut(address) else { return Err(Fail::Stall(Stall::Load { address })) };
    entry.block.expect(kind)?;
    if changes.are_full(Some(entry)) {
        return Err(FsError::TooManyBlocks.into());
    }
    Ok((entry, &mut meta.running))
}

impl Drop for Op<'_> {
    fn drop(&mut self) {
        if self.finished {
            return;
        }
        let meta = &mut *self.meta;
        meta.state = self.state;
        meta.free_nodes = meta.free_nodes.map(|free| free.wrapping_add_signed(-self.nodes_freed));
        meta.running.truncate(self.running);
        self.changes.take_back(&mut meta.cache);
    }
}
