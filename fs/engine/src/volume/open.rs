//! An open volume: opening and closing it, and resolving the stalls of operations.

use std::sync::Arc;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::time::{Duration, Instant};

use gpunvme_blockdev::{BlockDevice, Io};
use gpunvme_layout::features::READ_ONLY_COMPATIBLE;
use gpunvme_layout::geometry::STATE;
use gpunvme_layout::{Block, Corrupt, Geometry, State, Superblock, Timestamp};
use parking_lot::Mutex;

use super::cache::CacheUse;
use super::directories::Directories;
use super::epoch::Epochs;
use super::io::{check_block, read_blocks, read_scattered, read_superblock};
use super::journal::recovery::{self, Recovered};
use super::journal::{Anchors, GroupCommit, Journal};
use super::known_orphans::KnownOrphans;
use super::lock::MetaLock;
use super::meta::Meta;
use super::op::Op;
use super::run::Run;
use super::space_waits::{SpaceWaits, Waiting};
use super::unflushed::Unflushed;
use super::versions::Versions;
use crate::error::{Attempt, Fail, FsError, Stall};

/// How a volume is opened.
#[derive(Debug, Clone, Copy)]
pub struct VolumeOptions {
    /// Nothing is written, not even the journal's recovery.
    pub read_only: bool,
    /// Memory for clean metadata, in bytes.
    pub cache: usize,
    /// The device is told of blocks that files gave up, where it has a command for that.
    pub discard: bool,
}

/// Caller and time of an operation.
#[derive(Debug, Clone, Copy)]
pub struct Context {
    /// User of the caller.
    pub uid: u32,
    /// Group of the caller.
    pub gid: u32,
    /// The time that the operation stamps.
    pub now: Timestamp,
}

/// Counters of a volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Usage {
    /// Blocks that files can have, free or not.
    pub blocks: u64,
    /// Free blocks.
    pub free: u64,
    /// Free blocks that data can still get.
    pub available: u64,
    /// Inodes in use.
    pub inodes: u64,
}

/// Rounds in which an operation waits for freed blocks before it reports that there are none.
const REUSES_MAX: u32 = 100;
/// How long it waits for those that a transfer holds back. A device that does not answer has its
/// commands ended before.
const HELD_BACK_MAX: Duration = Duration::from_secs(120);
/// Checkpoints that an operation waits for before it reports that there is no space.
const CHECKPOINTS_MAX: u32 = 3;
/// Blocks of group descriptors that are read together: those of 16 TiB.
const NEIGHBOURS: u64 = 256;

/// How long the end of a mount tells the device of freed blocks: the rest is left to fstrim(8).
const LAST_DISCARDS: Duration = Duration::from_secs(1);

/// Record of what a waiting operation has waited for so far.
#[derive(Default)]
pub(crate) struct Waiter {
    /// Blocks loaded for it: they stay in memory until it is done, however small the cache.
    held: Vec<Arc<Block>>,
    /// Where it found no free block, and when.
    waiting: Option<(Waiting, Instant)>,
    /// The epoch of what had been freed then and was held back, if anything was.
    held_back: Option<Option<u64>>,
    reuses: u32,
    checkpoints: u32,
}

/// An open volume.
pub struct Volume {
    pub(crate) io: Arc<Io>,
    pub(super) superblock: Superblock,
    pub(super) read_only: bool,
    pub(crate) meta: MetaLock,
    pub(super) anchors: Mutex<Anchors>,
    pub(super) journal: Mutex<Journal>,
    /// Held by what makes the volume larger.
    pub(super) growth: Mutex<()>,
    /// The next commit checks whether the volume on the device is still this mount's.
    pub(super) look_again: AtomicBool,
    pub(super) group: GroupCommit,
    /// Sequence of the last durable transaction.
    pub(super) durable: AtomicU64,
    pub(crate) epochs: Arc<Epochs>,
    /// Of the mappings of files.
    pub(crate) versions: Arc<Versions>,
    /// Of the blocks of metadata that are home: they change when a checkpoint drops an image.
    pub(super) homes: Versions,
    /// Key of the hash of names.
    pub(super) name_key: [u8; 16],
    pub(super) directories: Arc<Directories>,
    /// Data that the device has, and may lose with power.
    pub(crate) unflushed: Unflushed,
    /// The error that stopped all writing.
    pub(super) failed: OnceLock<FsError>,
    /// Whether freed blocks go to `discards` before they are used again.
    pub(super) discard: bool,
    /// Blocks that are free and still busy: the device is told of them first.
    pub(super) discards: Mutex<Vec<Run>>,
    pub(super) space_waits: Arc<SpaceWaits>,
}

impl Volume {
    /// Opens the volume on a device, and recovers it when it was not closed cleanly.
    ///
    /// # Errors
    /// The volume is damaged or unknown to this program, or the device failed.
    pub fn open(io: Arc<Io>, options: VolumeOptions) -> Result<Volume, FsError> {
        let superblock = read_superblock(&io)?;
        let read_only = options.read_only || io.device().geometry().read_only;
        if superblock.unknown_ro_compat != 0 && !read_only {
            let what = format!(
                "uses features that this program does not know, and allow it to read only: {}; mount it with -o ro, or use a newer one",
                READ_ONLY_COMPATIBLE.names(superblock.unknown_ro_compat)
            );
            return Err(Corrupt::Superblock(what).into());
        }
        let recovered = recovery::recover(&io, &superblock)?;
        if recovered.transactions > 0 {
            tracing::info!(transactions = recovered.transactions, blocks = recovered.images.len(), "recovering from the journal");
        }
        let state_block = match recovered.images.get(&STATE) {
            Some(block) => block.clone(),
            None => read_blocks(&io, STATE, 1)?.swap_remove(0),
        };
        state_block.verify_any_kind(STATE, &superblock.uuid)?;
        let state = State::decode(&state_block, &superblock.geometry())?;
        for (address, block) in &recovered.images {
            check_block(block, *address, &superblock.uuid)?;
        }
        let mut volume = Volume::assemble(io, superblock, read_only, recovered, (state_block, state), options.cache);
        volume.discard = options.discard && !read_only && volume.can_discard();
        if !read_only {
            // Also marks the volume as not cleanly unmounted, before the first change.
            volume.checkpoint()?;
            if volume.meta.read().state != state {
                volume.meta.write().run_state();
            }
        }
        // Also meets a tree that cannot be read. What there is to finish, however much, waits.
        let first = || volume.wait(|| volume.next_orphan(0));
        let orphans = if read_only { KnownOrphans::unknown() } else { KnownOrphans::between(first()?, state.next_ino) };
        volume.meta.write().orphans = orphans;
        Ok(volume)
    }

    /// A volume of which everything is known that has to be: superblock, live part of the journal,
    /// and state. Nothing is written yet.
    pub(crate) fn assemble(
        io: Arc<Io>,
        superblock: Superblock,
        read_only: bool,
        recovered: Recovered,
        (state_block, state): (Block, State),
        cache: usize,
    ) -> Volume {
        // A growth that was cut short before the counters had it.
        let mut counted = state;
        counted.count_regions(&superblock.geometry());
        let mut meta = Meta::new(&superblock, state_block, counted, recovered.sequence, cache);
        for (address, block) in recovered.images {
            // A check may have begun the sequences anew: what is in the journal is before all that
            // comes.
            let sequence = block.sequence().min(recovered.sequence - 1);
            meta.cache.put(address, Arc::new(block));
            meta.cache.keep_image(address, sequence);
        }
        Volume {
            io,
            superblock,
            read_only,
            versions: meta.versions.clone(),
            homes: Versions::default(),
            name_key: meta.names.key,
            directories: meta.directories.clone(),
            meta: MetaLock::new(meta),
            anchors: Mutex::new(recovered.anchors),
            journal: Mutex::new(recovered.journal),
            growth: Mutex::default(),
            look_again: AtomicBool::new(true),
            group: GroupCommit::default(),
            durable: AtomicU64::new(recovered.sequence - 1),
            epochs: Arc::default(),
            unflushed: Unflushed::default(),
            failed: OnceLock::new(),
            discard: false,
            discards: Mutex::default(),
            space_waits: Arc::default(),
        }
    }

    /// Makes everything durable and leaves nothing to recover. Data has to be written before, and
    /// orphans to be finished: those that are left stay noted for the next mount.
    ///
    /// # Errors
    /// What the volume has failed with, now or before: what was not committed is lost.
    pub fn close(&self) -> Result<(), FsError> {
        if self.read_only {
            return Ok(());
        }
        self.writable()?;
        self.close_journal()?;
        let until = Instant::now() + LAST_DISCARDS;
        self.discard_freed(|| Instant::now() < until);
        Ok(())
    }

    /// The superblock, as it was when the volume was opened: growth changes it.
    pub fn superblock(&self) -> &Superblock {
        &self.superblock
    }

    /// Whether nothing can be written: mounted so, or after a failure.
    pub fn is_read_only(&self) -> bool {
        self.read_only || self.failed.get().is_some()
    }

    /// The device.
    pub fn device(&self) -> &Arc<dyn BlockDevice> {
        self.io.device()
    }

    /// The executor of the device's queues.
    pub fn io(&self) -> &Arc<Io> {
        &self.io
    }

    /// Counters of the volume.
    pub fn usage(&self) -> Usage {
        let meta = self.meta.read();
        let free = meta.state.free_blocks.saturating_sub(meta.promised.blocks);
        Usage { blocks: meta.geometry.data_blocks(), free, available: meta.available(), inodes: meta.state.inodes }
    }

    /// What the cache of metadata did, and what is in it.
    pub fn cache_use(&self) -> CacheUse {
        self.meta.read().cache.usage()
    }

    /// Others take so many bytes of the memory that is for metadata ([`VolumeOptions::cache`]):
    /// less of that is kept, down to a quarter.
    pub fn give_way(&self, bytes: usize) {
        let bytes = bytes + self.directories.memory();
        if self.meta.read().cache.has_to_give_way(bytes) {
            self.meta.write().cache.give_way(bytes);
        }
    }

    /// Where everything lies.
    pub fn geometry(&self) -> Geometry {
        self.meta.read().geometry
    }

    /// Runs an operation to its end: resolves what it stalls on, and tries again.
    ///
    /// # Errors
    /// The operation's own error, or that of resolving a stall.
    pub fn wait<T>(&self, mut attempt: impl FnMut() -> Attempt<T>) -> Result<T, FsError> {
        let mut waiter = Waiter::default();
        loop {
            match attempt() {
                Ok(result) => return Ok(result),
                Err(Fail::Error(error)) => return Err(error),
                Err(Fail::Stall(stall)) => self.resolve(stall, &mut waiter)?,
            }
        }
    }

    /// Waits for what an operation stalled on.
    ///
    /// # Errors
    /// The device failed, or what is waited for cannot come.
    pub(crate) fn resolve(&self, stall: Stall, waiter: &mut Waiter) -> Result<(), FsError> {
        match stall {
            Stall::Load { address } => waiter.held.extend(self.load_with_neighbours(address)?),
            Stall::Commit => self.commit()?,
            Stall::Reuse => {
                let (waiting, since) = waiter.waiting.get_or_insert_with(|| (self.space_waits.wait(), Instant::now()));
                self.commit()?;
                self.reuse_freed();
                self.use_undiscarded();
                if waiting.wait_for_discard() {
                    return Ok(());
                }
                // By transfers that end when the device answers; not by those that began later.
                let held_back = *waiter.held_back.get_or_insert_with(|| self.epochs.newest_held_back());
                let is_held_back = held_back.is_some_and(|until| self.epochs.hold_back(until)) && since.elapsed() < HELD_BACK_MAX;
                waiter.reuses += u32::from(!is_held_back);
                if waiter.reuses > REUSES_MAX {
                    return Err(FsError::NoSpace);
                }
                if waiter.reuses != 1 {
                    self.io.give_time();
                }
            }
            Stall::Checkpoint => {
                waiter.checkpoints += 1;
                if waiter.checkpoints > CHECKPOINTS_MAX {
                    return Err(FsError::NoSpace);
                }
                self.give_back()?;
            }
            // What frees them takes operations of its own: only those on data wait for that.
            Stall::Orphans => return Err(FsError::NoSpace),
            Stall::Memory
            | Stall::Nodes
            | Stall::Page { .. }
            | Stall::File { .. }
            | Stall::InFlight { .. }
            | Stall::Quiesced { .. } => {
                unreachable!("only operations on data stall so")
            }
        }
        Ok(())
    }

    /// Reads a metadata block into memory.
    pub(super) fn load(&self, address: u64) -> Result<Arc<Block>, FsError> {
        Ok(self.load_all(&[address])?.swap_remove(0))
    }

    /// Reads a metadata block into memory, and of group descriptors those beside it: a search for a
    /// group looks at many, and begins anew after each block that it waited for.
    fn load_with_neighbours(&self, address: u64) -> Result<Vec<Arc<Block>>, FsError> {
        if let Some(blocks) = self.geometry().descriptor_blocks_near(address, NEIGHBOURS) {
            let read = || read_blocks(&self.io, blocks.start, blocks.end - blocks.start);
            // A damaged neighbour fails only operations that need it.
            if let Ok(loaded) = self.load_by(&blocks.clone().collect::<Vec<_>>(), read) {
                return Ok(loaded);
            }
        }
        Ok(vec![self.load(address)?])
    }

    /// Reads metadata blocks into memory, all at once.
    pub(super) fn load_all(&self, addresses: &[u64]) -> Result<Vec<Arc<Block>>, FsError> {
        self.load_by(addresses, || read_scattered(&self.io, addresses))
    }

    fn load_by(&self, addresses: &[u64], read: impl FnOnce() -> Result<Vec<Block>, FsError>) -> Result<Vec<Arc<Block>>, FsError> {
        let before: Vec<u64> = addresses.iter().map(|address| self.homes.of(*address)).collect();
        let read = read()?;
        let mut meta = self.meta.write();
        let mut take = |(address, (block, before)): (&u64, (Block, u64))| match meta.cache.get(*address) {
            Some(entry) => Ok(Some(entry.block.clone())),
            // It may be older than what a checkpoint has written, and the cache dropped, meanwhile.
            None if self.homes.of(*address) != before => Ok(None),
            None => {
                check_block(&block, *address, &meta.uuid)?;
                Ok(Some(meta.cache.put_copy(*address, &block)))
            }
        };
        let taken = addresses.iter().zip(read.into_iter().zip(before)).map(&mut take);
        let mut loaded = taken.collect::<Result<Vec<Option<Arc<Block>>>, FsError>>()?;
        drop(meta);
        let late: Vec<u64> = addresses.iter().zip(&loaded).filter(|(_, block)| block.is_none()).map(|(at, _)| *at).collect();
        if !late.is_empty() {
            let again = self.load_all(&late)?;
            loaded.iter_mut().filter(|block| block.is_none()).zip(again).for_each(|(block, again)| *block = Some(again));
        }
        Ok(loaded.into_iter().flatten().collect())
    }

    /// Begins an operation that changes metadata.
    pub(crate) fn begin(&self) -> Attempt<Op<'_>> {
        self.writable()?;
        Op::begin(self.meta.write())
    }

    /// Fails when the volume cannot be written.
    pub(crate) fn writable(&self) -> Result<(), FsError> {
        match self.failed.get() {
            Some(error) => Err(error.clone()),
            None if self.read_only => Err(FsError::ReadOnly),
            None => Ok(()),
        }
    }

    /// Fails when another has the device: no data may be written then, nor what waits in memory.
    pub(crate) fn has_device(&self) -> Result<(), FsError> {
        match self.failed.get() {
            Some(taken @ FsError::Taken { .. }) => Err(taken.clone()),
            _ => Ok(()),
        }
    }

    /// Stops all writing: a device of the volume failed to make durable what was written to it.
    pub fn stop(&self, error: FsError) {
        self.fail(error);
    }

    /// Stops all writing after a failure that leaves memory and device apart.
    pub(super) fn fail(&self, error: FsError) -> FsError {
        if matches!(error, FsError::ReadOnly | FsError::Failed(_)) {
            return error;
        }
        if matches!(error, FsError::Taken { .. }) {
            if self.failed.set(error.clone()).is_ok() {
                tracing::error!(%error, "the volume is read-only from now on");
            }
        } else if self.failed.set(FsError::Failed(error.to_string())).is_ok() {
            tracing::error!(
                device = self.io.device().name(),
                %error,
                "metadata could not be written: the volume is read-only from now on; unmount it, repair the device, mount it again"
            );
        }
        error
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use crate::volume::format::tests::volume;
    use crate::volume::io::read_scattered;

    #[test]
    fn a_load_reads_again_only_what_a_checkpoint_wrote_meanwhile() {
        let volume = volume(64 << 40);
        let all = volume.superblock().geometry();
        let addresses: Vec<u64> = all.descriptor_blocks().map(|(address, _)| address).skip(100).take(8).collect();
        let reads = Cell::new(0);
        let loaded = volume.load_by(&addresses, || {
            reads.set(reads.get() + 1);
            let read = read_scattered(&volume.io, &addresses);
            // A checkpoint of one of them, and of others.
            (addresses[1]..addresses[1] + 3).for_each(|address| volume.homes.change(address));
            read
        });
        let loaded: Vec<u64> = loaded.unwrap().iter().map(|block| block.address()).collect();
        assert_eq!((loaded, reads.get()), (addresses, 1));
    }
}
