//! The volume: metadata, its journal, and the operations on names and attributes. Data goes by [`crate::data`].
//!
//! Everything is an attempt: an operation runs on what is in memory, and ends with a [`Stall`] when it needs something else.
//! [`Volume::wait`] resolves stalls and tries again; it is for threads that may wait for the device. A front end tries once
//! where it must not wait, and hands the operation to such a thread when that stalls.
//!
//! The volume has no threads and no clock: whoever drives it calls [`Volume::commit`], [`Volume::checkpoint`] and
//! [`Volume::reap`], and passes the time in a [`Context`].
//!
//! Locks, in the order in which they are taken: a file's lock ([`crate::data`]), the anchors' lock, which a checkpoint holds, the
//! journal lock, which a commit holds, the metadata lock, the epochs' lock. The metadata lock is never held across I/O, and a
//! checkpoint holds the journal lock for moments only: commits go on beside it.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64};

use gpunvme_blockdev::{BlockDevice, Io, Region, Request, Span};
use gpunvme_layout::block::BLOCK_SIZE;
use gpunvme_layout::geometry::STATE;
use gpunvme_layout::{Block, BlockKind, Corrupt, Geometry, Key, State, Superblock, Timestamp, Uuid, group, node};
use parking_lot::Mutex;

use crate::error::{Attempt, Fail, FsError, Stall};

mod acl;
pub(crate) mod alloc;
pub(crate) mod attr;
mod busy;
mod cache;
pub(crate) mod dir;
pub(crate) mod epoch;
pub(crate) mod extents;
mod format;
pub(crate) mod journal;
mod lock;
mod namespace;
pub(crate) mod op;
pub(crate) mod orphan;
mod space;
pub(crate) mod tree;
mod undo;
pub(crate) mod xattr;

pub use acl::ACCESS as ACL_ACCESS;
pub use alloc::Run;
pub use attr::{Attributes, SetAttributes};
pub use dir::DirEntry;
pub use extents::Mapping;
pub(crate) use format::erase;
pub use format::{FormatOptions, FormatReport, format, probe};
pub(crate) use namespace::Renamed;
pub use namespace::{NewNode, RenameMode};
pub(crate) use space::{Piece, Stamp};
pub use xattr::check_name as check_xattr_name;

use epoch::Epochs;
use journal::{Anchors, Journal, Recovered};
use lock::MetaLock;
use op::{Meta, Op};

/// How a volume is opened.
#[derive(Debug, Clone, Copy)]
pub struct VolumeOptions {
    /// Nothing is written, not even the journal's recovery.
    pub read_only: bool,
    /// Memory for clean metadata, in bytes.
    pub cache: usize,
}

/// Who asks for an operation, and when.
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
/// Checkpoints that an operation waits for before it reports that there is no space.
const CHECKPOINTS_MAX: u32 = 3;

/// What an operation that waits has waited for so far.
#[derive(Default)]
pub(crate) struct Waiter {
    /// Blocks loaded for it: they stay in memory until it is done, however small the cache.
    held: Vec<Arc<Block>>,
    reuses: u32,
    checkpoints: u32,
}

/// An open volume.
pub struct Volume {
    pub(crate) io: Arc<Io>,
    superblock: Superblock,
    read_only: bool,
    pub(crate) meta: MetaLock,
    anchors: Mutex<Anchors>,
    journal: Mutex<Journal>,
    /// The next commit looks whether the volume on the device is still this mount's.
    look_again: AtomicBool,
    /// Sequence of the last durable transaction.
    durable: AtomicU64,
    pub(crate) epochs: Arc<Epochs>,
    /// Data was written since the device was last flushed.
    pub(crate) data_written: AtomicBool,
    /// Why nothing is written any more.
    failed: OnceLock<FsError>,
    /// Inodes that were without a name when the volume was opened.
    orphans: Mutex<Vec<u64>>,
}

impl Volume {
    /// Opens the volume on a device, and recovers it when it was not closed cleanly.
    ///
    /// # Errors
    /// Says what is wrong with the volume or the device.
    pub fn open(io: Arc<Io>, options: VolumeOptions) -> Result<Volume, FsError> {
        let superblock = read_superblock(&io)?;
        let read_only = options.read_only || io.device().geometry().read_only;
        if superblock.unknown_ro_compat != 0 && !read_only {
            let what = format!(
                "uses features that this program can only read (bits {:#x}): mount it with -o ro, or use a newer program",
                superblock.unknown_ro_compat
            );
            return Err(Corrupt::Superblock(what).into());
        }
        let recovered = journal::recover(&io, &superblock)?;
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
        let volume = Volume::assemble(io, superblock, read_only, recovered, (state_block, state), options.cache);
        if !read_only {
            // Also marks the volume as not cleanly unmounted, before the first change.
            volume.checkpoint()?;
            volume.finish_truncations()?;
        }
        Ok(volume)
    }

    /// A volume of which everything is known that has to be: superblock, live part of the journal, and state. Nothing is
    /// written yet.
    pub(crate) fn assemble(
        io: Arc<Io>,
        superblock: Superblock,
        read_only: bool,
        recovered: Recovered,
        (state_block, state): (Block, State),
        cache: usize,
    ) -> Volume {
        let mut meta = Meta::new(&superblock, state_block, state, recovered.sequence, cache);
        for (address, block) in recovered.images {
            // A check may have begun the sequences anew: what is in the journal is before all that comes.
            let sequence = block.sequence().min(recovered.sequence - 1);
            meta.cache.put(address, Arc::new(block));
            meta.cache.keep_image(address, sequence);
        }
        Volume {
            io,
            superblock,
            read_only,
            meta: MetaLock::new(meta),
            anchors: Mutex::new(recovered.anchors),
            journal: Mutex::new(recovered.journal),
            look_again: AtomicBool::new(true),
            durable: AtomicU64::new(recovered.sequence - 1),
            epochs: Arc::default(),
            data_written: AtomicBool::new(false),
            failed: OnceLock::new(),
            orphans: Mutex::default(),
        }
    }

    /// Makes everything durable and leaves nothing to recover. Data has to be written before.
    pub fn close(&self) -> Result<(), FsError> {
        if self.read_only || self.failed.get().is_some() {
            return Ok(());
        }
        self.finish_truncations()?;
        self.reap(usize::MAX)?;
        self.close_journal()
    }

    /// What the volume is.
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
        let free = meta.state.free_blocks.saturating_sub(meta.reserved);
        Usage { blocks: meta.geometry.data_blocks(), free, available: meta.available(), inodes: meta.state.inodes }
    }

    /// Others take so many bytes of the memory that is for metadata ([`VolumeOptions::cache`]): less of that is kept, down to a quarter.
    pub fn give_way(&self, bytes: usize) {
        if self.meta.read().cache.has_to_give_way(bytes) {
            self.meta.write().cache.give_way(bytes);
        }
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
            Stall::Load { address } => waiter.held.push(self.load(address)?),
            Stall::Commit => self.commit()?,
            Stall::Reuse => {
                waiter.reuses += 1;
                if waiter.reuses > REUSES_MAX {
                    return Err(FsError::NoSpace);
                }
                self.commit()?;
                self.reuse_freed();
                if waiter.reuses > 1 {
                    // A transfer still holds the blocks; it ends when the device answers.
                    std::thread::sleep(std::time::Duration::from_millis(5));
                }
            }
            Stall::Checkpoint => {
                waiter.checkpoints += 1;
                if waiter.checkpoints > CHECKPOINTS_MAX {
                    return Err(FsError::NoSpace);
                }
                self.give_back()?;
            }
            Stall::Memory | Stall::Page { .. } | Stall::File { .. } | Stall::Flights { .. } | Stall::Held { .. } => {
                unreachable!("only operations on data stall so")
            }
        }
        Ok(())
    }

    /// Reads a metadata block into memory.
    fn load(&self, address: u64) -> Result<Arc<Block>, FsError> {
        Ok(self.load_all(&[address])?.swap_remove(0))
    }

    /// Reads metadata blocks into memory, all at once.
    fn load_all(&self, addresses: &[u64]) -> Result<Vec<Arc<Block>>, FsError> {
        loop {
            let before = self.meta.read().checkpoints;
            let read = read_scattered(&self.io, addresses)?;
            let mut meta = self.meta.write();
            // What was read may be older than what a checkpoint has written, and the cache dropped, in the meantime.
            if meta.checkpoints != before {
                continue;
            }
            let take = |(address, block): (&u64, Block)| match meta.cache.get(*address) {
                Some(entry) => Ok(entry.block.clone()),
                None => {
                    check_block(&block, *address, &meta.uuid)?;
                    Ok(meta.cache.put_copy(*address, &block))
                }
            };
            return addresses.iter().zip(read).map(take).collect();
        }
    }

    /// Brings the nodes that lead to these items into memory, level by level, each level at once. They stay there as long as
    /// what is returned lives.
    pub(crate) fn preload(&self, keys: &[Key]) -> Result<Vec<Arc<Block>>, FsError> {
        let mut held = Vec::new();
        loop {
            let mut missing: Vec<u64> = Vec::new();
            let meta = self.meta.read();
            for key in keys {
                match tree::get(&*meta, *key) {
                    Err(Fail::Stall(Stall::Load { address })) => missing.push(address),
                    Err(Fail::Error(error)) => return Err(error),
                    _ => {}
                }
            }
            drop(meta);
            if missing.is_empty() {
                return Ok(held);
            }
            missing.sort_unstable();
            missing.dedup();
            held.extend(self.load_all(&missing)?);
        }
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

    /// Stops all writing after a failure that leaves memory and device apart.
    fn fail(&self, error: FsError) -> FsError {
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

/// Reads the superblock: the first copy, or another when that is damaged.
pub(crate) fn read_superblock(io: &Io) -> Result<Superblock, FsError> {
    let device_blocks = io.device().geometry().len / BLOCK_SIZE as u64;
    let short = || {
        let message = format!("{} bytes are too few for a gpunvme filesystem", io.device().geometry().len);
        FsError::from(Corrupt::Superblock(message))
    };
    if device_blocks == 0 {
        return Err(short());
    }
    let intact = Cell::new(false);
    let read = |address| -> Result<Superblock, FsError> {
        let block = read_blocks(io, address, 1)?.swap_remove(0);
        // An intact superblock that says something else is not overruled by a copy.
        intact.set(Superblock::is_intact(&block, address));
        Ok(Superblock::decode(&block, address, device_blocks)?)
    };
    match read(Superblock::ADDRESS) {
        Ok(superblock) => Ok(superblock),
        Err(error) if intact.get() => Err(error),
        // The last copy lies at the end of the device, unless the device grew.
        Err(error) => match read(device_blocks - 1) {
            Ok(superblock) => {
                tracing::warn!(%error, "the first superblock is damaged; using the copy at the end of the device");
                Ok(superblock)
            }
            Err(_) => Err(error),
        },
    }
}

/// Checks a block that was read from a device: its header, and what can be said of its content.
pub(crate) fn check_block(block: &Block, address: u64, uuid: &Uuid) -> Result<(), Corrupt> {
    block.verify_any_kind(address, uuid)?;
    if block.expect(BlockKind::Node).is_ok() {
        node::check(block)?;
    } else if block.expect(BlockKind::Bitmap).is_ok() {
        group::check_bitmap(block)?;
    }
    Ok(())
}

/// Reads blocks from anywhere, all at once; nothing is checked.
pub(crate) fn read_scattered(io: &Io, addresses: &[u64]) -> Result<Vec<Block>, FsError> {
    let region = Region::allocate(addresses.len() * BLOCK_SIZE)?;
    let request = |(i, address): (usize, &u64)| {
        Request::read(Geometry::byte(*address), vec![Span { region: region.clone(), offset: i * BLOCK_SIZE, len: BLOCK_SIZE }])
    };
    io.run(addresses.iter().enumerate().map(request))?;
    copy_out(&region, addresses.len())
}

/// Reads blocks that follow one another; nothing is checked.
pub(crate) fn read_blocks(io: &Io, address: u64, count: u64) -> Result<Vec<Block>, FsError> {
    let len = count as usize * BLOCK_SIZE;
    let region = Region::allocate(len)?;
    io.run(vec![Request::read(Geometry::byte(address), vec![Span { region: region.clone(), offset: 0, len }])])?;
    copy_out(&region, count as usize)
}

fn copy_out(region: &Region, count: usize) -> Result<Vec<Block>, FsError> {
    let mut bytes = [0; BLOCK_SIZE];
    let mut blocks = Vec::with_capacity(count);
    for i in 0..count {
        region.read_at(i * BLOCK_SIZE, &mut bytes)?;
        blocks.push(Block::from_bytes(&bytes));
    }
    Ok(blocks)
}

/// Rounds up to whole blocks.
pub(crate) fn blocks_of(bytes: u64) -> u64 {
    bytes.div_ceil(BLOCK_SIZE as u64)
}
