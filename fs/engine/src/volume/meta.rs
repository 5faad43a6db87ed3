//! Metadata in memory: everything that the volume's one metadata lock guards, and access to it.

use std::sync::Arc;

use gpunvme_layout::geometry::STATE;
use gpunvme_layout::key::NameHash;
use gpunvme_layout::{Block, BlockKind, Geometry, State, Superblock, Uuid};

use super::busy::Busy;
use super::cache::Cache;
use super::directories::Directories;
use super::known_orphans::KnownOrphans;
use super::place::Place;
use super::promised::Promised;
use super::reserved::ReservedChunks;
use super::run::Run;
use super::versions::Versions;
use crate::error::{Attempt, Fail, Stall};

/// Blocks that a transaction holds at the most: what a commit writes at once stays below 32 MiB.
pub(super) const TRANSACTION_MAX: u64 = 8000;

/// Everything that the metadata lock guards.
pub(crate) struct Meta {
    /// Layout of the volume.
    pub geometry: Geometry,
    /// UUID of the filesystem.
    pub uuid: Uuid,
    /// Where names are among the keys.
    pub names: NameHash,
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
    /// Busy blocks that will be free: those that were freed and may not be reused yet, by
    /// themselves; those that growing files have reserved ahead, when the files are asked for them.
    pub pending: u64,
    /// Blocks of these that are reserved ahead, which files give back at once.
    pub ahead: u64,
    /// The chunks with blocks that are busy because data is on its way to them.
    pub reserved: ReservedChunks,
    /// What is promised to data that waits in memory or is on its way: blocks, until the data has a
    /// place and is mapped; nodes for its mapping.
    pub promised: Promised,
    /// Metadata chunks that became empty, with the sequence of the transaction that emptied them.
    pub emptied: Vec<(u64, u64)>,
    /// The orphans that earlier mounts left.
    pub orphans: KnownOrphans,
    /// Free nodes in all chunks of metadata, once they were counted.
    pub free_nodes: Option<u64>,
    /// Those of them that are of the margin: in chunks of it that extents have made metadata's.
    pub margin_nodes: u64,
    /// Where the allocator looks first.
    pub hints: Hints,
    /// Operations begun so far.
    pub operations: u64,
    /// Versions of the mappings of files, also for readers without the lock.
    pub versions: Arc<Versions>,
    /// What is known of directories, also to readers without the lock.
    pub directories: Arc<Directories>,
}

/// Where the allocator looks first.
#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct Hints {
    /// The block behind the last small run.
    pub small: u64,
    /// Where the chunk goes on that was broken last.
    pub broken: Option<u64>,
    /// First group with a free chunk.
    pub first_chunk: u64,
    /// Groups behind the last one with a free chunk.
    pub full_behind: u64,
    /// Group of the last node.
    pub node: u64,
}

impl Meta {
    /// Metadata of a volume whose state block was read.
    pub fn new(superblock: &Superblock, state_block: Block, state: State, sequence: u64, cache: usize) -> Meta {
        let geometry = superblock.geometry();
        let versions = Arc::<Versions>::default();
        let directories = Arc::new(Directories::new(versions.clone(), cache));
        let mut cache = Cache::new(cache);
        cache.put(state_block.address(), Arc::new(state_block));
        Meta {
            geometry,
            uuid: superblock.uuid,
            names: superblock.name_hash(),
            state,
            cache,
            running: Vec::new(),
            sequence,
            transaction_max: (geometry.journal_blocks / 2 - 8).min(TRANSACTION_MAX) as usize,
            freed: Vec::new(),
            busy: Busy::default(),
            pending: 0,
            ahead: 0,
            reserved: ReservedChunks::default(),
            promised: Promised::default(),
            emptied: Vec::new(),
            orphans: KnownOrphans::default(),
            free_nodes: None,
            margin_nodes: 0,
            hints: Hints::default(),
            operations: 0,
            versions,
            directories,
        }
    }

    /// Adds the state block to the running transaction; it is encoded when the transaction is
    /// frozen.
    pub fn run_state(&mut self) {
        let entry = self.cache.get_mut(STATE).expect("the state block stays in memory");
        if !entry.running {
            entry.running = true;
            self.running.push(STATE);
        }
    }
}

/// Access to metadata blocks, for [`Meta`] itself and for an operation in flight.
pub(crate) trait Blocks {
    /// The metadata.
    fn meta(&self) -> &Meta;

    /// A block that is in memory, of the kind that the caller expects.
    fn block(&self, address: u64, kind: BlockKind) -> Attempt<&Block> {
        let Some(entry) = self.meta().cache.look_up(address) else {
            return Err(Fail::Stall(Stall::Load { address }));
        };
        entry.block.expect(kind)?;
        Ok(&entry.block)
    }

    /// Remembers a leaf that a search has descended to.
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
