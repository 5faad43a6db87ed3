//! Metadata in memory, and the operations that change it.
//!
//! [`Meta`] is everything that the volume's one metadata lock guards. An [`Op`] is one operation that changes it: all or
//! nothing. Whatever ends it before [`Op::finish`] (an error, a block that has to be loaded first, a panic) puts every block
//! back as it was; so operations are written straight down, without planning what they may need.

use std::cell::{Cell, RefCell};
use std::sync::Arc;

use gpunvme_layout::geometry::STATE;
use gpunvme_layout::{Block, BlockKind, Geometry, State, Superblock, Uuid};
use parking_lot::RwLockWriteGuard;

use super::alloc::{Hints, Run};
use super::busy::Busy;
use super::cache::{Cache, Entry};
use super::tree::Place;
use crate::error::{Attempt, Fail, Stall};

/// Everything that the metadata lock guards.
pub(crate) struct Meta {
    /// Layout of the volume.
    pub geometry: Geometry,
    /// UUID of the filesystem.
    pub uuid: Uuid,
    /// Key of the name hash.
    pub hash_key: [u8; 16],
    /// Root and counters, as the latest operation left them.
    pub state: State,
    /// Blocks in memory.
    pub cache: Cache,
    /// Addresses that the running transaction has changed.
    pub running: Vec<u64>,
    /// Sequence of the running transaction.
    pub sequence: u64,
    /// Blocks that the running transaction may change at the most.
    pub transaction_max: usize,
    /// Data blocks freed by the running transaction.
    pub freed: Vec<Run>,
    /// Blocks that are not to be allocated although their bits say that they are free.
    pub busy: Busy,
    /// Busy blocks that become free by waiting or asking: freed ones that may not be reused yet, and windows of growing files.
    pub pending: u64,
    /// Blocks promised to data that waits in memory for its place on the device.
    pub reserved: u64,
    /// Metadata chunks that became empty, with the sequence of the transaction that emptied them.
    pub emptied: Vec<(u64, u64)>,
    /// Where the allocator looks first.
    pub hints: Hints,
    /// Times that images were written home; tells a load that what it read may be out of date.
    pub checkpoints: u64,
    /// Operations begun so far.
    operations: u64,
}

/// What a thread's operations leave to its next one, so that as a rule an operation allocates nothing. Not shared like [`Meta`]: to write
/// memory that another core has just written takes as long as the rest of an operation.
#[derive(Default)]
struct Leftovers {
    /// Blocks that nobody needs any more, for copies.
    blocks: Vec<Arc<Block>>,
    /// A list, empty.
    undo: Vec<Undo>,
}

thread_local! {
    static LEFTOVERS: RefCell<Leftovers> = RefCell::default();
}

/// Blocks that one operation may change at the most; all of them are bounded by the depth of the tree.
pub(crate) const OP_BLOCKS_MAX: usize = 160;
/// Blocks that a thread keeps for the copies of later operations. Most operations change fewer.
const SPARE_MAX: usize = 16;
/// Leaves whose place an operation remembers: what most operations go back to.
const PLACES: usize = 4;
/// Blocks that a transaction holds at the most: what a commit writes at once stays below 32 MiB.
pub(super) const TRANSACTION_MAX: u64 = 8000;

/// Whoever can look at metadata blocks: [`Meta`] itself, or an operation under way.
pub(crate) trait Blocks {
    /// The metadata.
    fn meta(&self) -> &Meta;

    /// A block that is in memory, of the kind that the caller expects.
    fn block(&self, address: u64, kind: BlockKind) -> Attempt<&Block> {
        let Some(entry) = self.meta().cache.get(address) else {
            return Err(Fail::Stall(Stall::Load { address }));
        };
        entry.block.expect(kind)?;
        Ok(&entry.block)
    }

    /// Remembers a leaf that was gone down to.
    fn remember(&self, _place: Place) {}

    /// A remembered leaf that satisfies `covers`.
    fn recall(&self, _covers: impl Fn(&Place) -> bool) -> Option<Place> {
        None
    }
}

impl Blocks for Meta {
    fn meta(&self) -> &Meta {
        self
    }
}

impl Meta {
    /// Metadata of a volume whose state block was read.
    pub fn new(superblock: &Superblock, state_block: Block, state: State, sequence: u64, cache: usize) -> Meta {
        let geometry = superblock.geometry();
        let mut cache = Cache::new(cache);
        cache.put(state_block.address(), Arc::new(state_block));
        Meta {
            geometry,
            uuid: superblock.uuid,
            hash_key: superblock.hash_key,
            state,
            cache,
            running: Vec::new(),
            sequence,
            transaction_max: (geometry.journal_blocks / 2 - 8).min(TRANSACTION_MAX) as usize,
            freed: Vec::new(),
            busy: Busy::default(),
            pending: 0,
            reserved: 0,
            emptied: Vec::new(),
            hints: Hints::default(),
            checkpoints: 0,
            operations: 0,
        }
    }

    /// Makes the state block part of the running transaction; what it says is written into it when that is frozen.
    fn run_state(&mut self) {
        let entry = self.cache.get_mut(STATE).expect("the state block stays in memory");
        if !entry.running {
            entry.running = true;
            self.running.push(STATE);
        }
    }
}

impl Leftovers {
    /// A copy of a block, made of a spare one where there is one.
    fn copy(&mut self, block: &Block) -> Arc<Block> {
        let Some(mut copy) = self.blocks.pop() else { return Arc::new(block.clone()) };
        Arc::get_mut(&mut copy).expect("a spare block is nobody else's").clone_from(block);
        copy
    }

    /// Takes the list of an operation that is over, and the blocks that it needs no more.
    fn take(&mut self, mut undo: Vec<Undo>) {
        for mut block in undo.drain(..).filter_map(|undo| undo.block) {
            if self.blocks.len() < SPARE_MAX && Arc::get_mut(&mut block).is_some() {
                self.blocks.push(block);
            }
        }
        self.undo = undo;
    }
}

struct Undo {
    address: u64,
    /// Content before the operation; none for a block that was not in memory.
    block: Option<Arc<Block>>,
    running: bool,
}

/// One operation that changes metadata.
pub(crate) struct Op<'a> {
    meta: RwLockWriteGuard<'a, Meta>,
    undo: Vec<Undo>,
    /// Its number: marks the blocks that it has changed.
    number: u64,
    places: Cell<[Option<Place>; PLACES]>,
    state: State,
    running: usize,
    /// Data blocks that the operation frees.
    pub freed: Vec<Run>,
    /// Busy blocks that the operation makes a file's.
    pub claimed: Vec<Run>,
    /// Metadata chunks that the operation emptied.
    pub emptied: Vec<u64>,
    /// Promised blocks that the operation redeems.
    pub redeemed: u64,
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
        let (number, undo) = (meta.operations, LEFTOVERS.with_borrow_mut(|left| std::mem::take(&mut left.undo)));
        Ok(Op {
            meta,
            undo,
            number,
            places: Cell::default(),
            state,
            running,
            freed: Vec::new(),
            claimed: Vec::new(),
            emptied: Vec::new(),
            redeemed: 0,
            finished: false,
        })
    }

    /// Root and counters, to change.
    pub fn state_mut(&mut self) -> &mut State {
        &mut self.meta.state
    }

    /// Blocks that it has changed so far.
    pub fn changed_blocks(&self) -> usize {
        self.undo.len()
    }

    /// Where the allocator looks first; a wrong hint only costs time, so it is not put back.
    pub fn hints(&mut self) -> &mut Hints {
        &mut self.meta.hints
    }

    /// A block that is in memory, to change.
    pub fn block_mut(&mut self, address: u64, kind: BlockKind) -> Attempt<&mut Block> {
        let meta = &mut *self.meta;
        let Some(entry) = meta.cache.get_mut(address) else { return Err(Fail::Stall(Stall::Load { address })) };
        entry.block.expect(kind)?;
        if entry.operation != self.number {
            entry.operation = self.number;
            let copy = LEFTOVERS.with_borrow_mut(|left| left.copy(&entry.block));
            // Images share a block's content: then it is the copy that changes.
            let before = if Arc::get_mut(&mut entry.block).is_some() { copy } else { std::mem::replace(&mut entry.block, copy) };
            note(&mut self.undo, &mut meta.running, entry, Undo { address, block: Some(before), running: entry.running });
        }
        Ok(Arc::get_mut(&mut entry.block).expect("made its own above"))
    }

    /// A new block; whatever was known of that address is gone.
    pub fn create(&mut self, block: Block) {
        let address = block.address();
        let meta = &mut *self.meta;
        let old = meta.cache.get(address).map(|entry| (entry.block.clone(), entry.running, entry.operation));
        let entry = meta.cache.put(address, Arc::new(block));
        if old.as_ref().is_none_or(|(_, _, operation)| *operation != self.number) {
            entry.operation = self.number;
            let running = old.as_ref().is_some_and(|(_, running, _)| *running);
            note(&mut self.undo, &mut meta.running, entry, Undo { address, block: old.map(|(block, _, _)| block), running });
        }
        self.forget_places();
    }

    /// Forgets the places of leaves: the tree takes another shape.
    pub fn forget_places(&mut self) {
        self.places = Cell::default();
    }

    /// Makes the changes part of the running transaction, and returns its sequence.
    pub fn finish(mut self) -> u64 {
        if self.meta.state != self.state {
            self.meta.run_state();
        }
        for run in std::mem::take(&mut self.claimed) {
            self.meta.busy.remove(run);
        }
        for run in std::mem::take(&mut self.freed) {
            self.meta.busy.insert(run);
            self.meta.pending += run.len;
            self.meta.freed.push(run);
        }
        self.meta.reserved -= self.redeemed;
        let sequence = self.meta.sequence;
        for chunk in std::mem::take(&mut self.emptied) {
            self.meta.emptied.push((chunk, sequence));
        }
        self.finished = true;
        sequence
    }
}

/// Notes a block as changed, and how it was.
fn note(undo: &mut Vec<Undo>, running: &mut Vec<u64>, entry: &mut Entry, before: Undo) {
    if !entry.running {
        running.push(before.address);
        entry.running = true;
    }
    undo.push(before);
    // One more is the state block.
    assert!(undo.len() < OP_BLOCKS_MAX, "an operation changes a bounded number of blocks");
}

impl Drop for Op<'_> {
    fn drop(&mut self) {
        if self.finished {
            return LEFTOVERS.with_borrow_mut(|left| left.take(std::mem::take(&mut self.undo)));
        }
        let meta = &mut *self.meta;
        meta.state = self.state;
        meta.running.truncate(self.running);
        for undo in self.undo.drain(..).rev() {
            match undo.block {
                Some(block) => {
                    let entry = meta.cache.get_mut(undo.address).expect("changed blocks stay in memory");
                    entry.block = block;
                    entry.running = undo.running;
                }
                None => meta.cache.remove(undo.address),
            }
        }
    }
}
