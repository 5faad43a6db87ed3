//! The journal: commits, checkpoints and recovery.
//!
//! Four rules hold, and everything in this file is there to keep them.
//!
//! 1. A metadata block is written home only after the transaction that holds its image is durable.
//! 2. New data is on the device, flushed, before the transaction that exposes it: an operation that maps data begins after
//!    its write completed, and a commit flushes the device first when data was written since the last flush.
//! 3. Freed blocks are not reused before the free is durable and no transfer touches them ([`super::epoch`]).
//! 4. A metadata block that was freed is not reused for data while an older image of it is in the live journal: a chunk of
//!    metadata goes back to all uses only after a checkpoint has passed the transaction that emptied it.
//!
//! A commit freezes the running transaction under the metadata lock (content is shared, and copied by whoever changes it
//! next), then writes it without holding that lock. Commits wait for each other; those who wait for the same one share it.
//! A checkpoint writes home what was durable when it began, while further commits go on.
//!
//! A mount remembers the superblock and the anchors as it read or wrote them. Before an anchor is written, and before commits
//! as often as [`Volume::look_again`] asks, the device is asked for them: where it has others, somebody else has formatted, mounted or
//! repaired the volume, and nothing more is written.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use gpunvme_blockdev::{Io, Region, Request, Span};
use gpunvme_layout::block::BLOCK_SIZE;
use gpunvme_layout::geometry::{ANCHORS, STATE, SUPERBLOCK};
use gpunvme_layout::{Anchor, Block, Corrupt, Geometry, Superblock, journal};
use parking_lot::{Mutex, MutexGuard};

use super::alloc::{self, Run};
use super::op::{Blocks, Meta, Op, TRANSACTION_MAX};
use super::{Volume, erase, read_blocks, read_scattered};
use crate::error::{Fail, FsError, Stall};

/// Images that are written home at once: a megabyte in flight keeps a device busy, and the buffer stays small.
const HOME_PART: usize = 256;
/// Blocks of which the images are looked at, or forgotten, under one hold of the metadata lock.
const IMAGES_PART: usize = 256;
/// Sequences that recovery leaves out, so that a torn transaction's images can never complete a later one.
pub(crate) const SEQUENCE_GAP: u64 = 1024;
/// Blocks that are read in one piece when the journal is searched.
const PIECE: u64 = 256;

/// The journal's own state, guarded by the journal lock. Positions count blocks and never wrap; their place on the device is
/// the position modulo the length of the journal.
pub(crate) struct Journal {
    /// Where the next transaction goes.
    head: u64,
    /// Where the oldest live transaction begins.
    tail: u64,
    /// Frees of transactions that are not durable.
    freed: Vec<Run>,
    /// Buffer that transactions are put together in.
    buffer: Option<Arc<Region>>,
}

/// The blocks at the start of the device that say which volume it is and who has it.
const FRONT: [u64; 3] = [SUPERBLOCK, ANCHORS[0], ANCHORS[1]];

/// The anchors, guarded by a lock that a checkpoint holds to its end.
pub(crate) struct Anchors {
    /// Generation of the last one written.
    generation: u64,
    /// What is in [`FRONT`], as this mount read or wrote it; none where the device could not read.
    front: [Option<Block>; 3],
}

impl Anchors {
    fn read(io: &Io, generation: u64) -> Anchors {
        Anchors { generation, front: FRONT.map(|address| Some(read_blocks(io, address, 1).ok()?.swap_remove(0))) }
    }

    /// Generation of the last one written.
    pub fn generation(&self) -> u64 {
        self.generation
    }
}

/// What recovery found.
pub(crate) struct Recovered {
    /// Journal to go on with.
    pub journal: Journal,
    /// Anchors to go on with.
    pub anchors: Anchors,
    /// Sequence of the next transaction.
    pub sequence: u64,
    /// The latest image of each block in the live journal.
    pub images: BTreeMap<u64, Block>,
    /// Transactions that were found.
    pub transactions: u64,
    /// A transaction that is all there and makes no sense: it and what follows was not read.
    pub stopped: Option<Corrupt>,
}

/// Reads the live transactions. Writes nothing: the images are put into the cache, and a checkpoint writes them home.
///
/// # Errors
/// A transaction makes no sense, or is missing although a later one is there: what was durable would be lost without a word.
pub(crate) fn recover(io: &Io, superblock: &Superblock) -> Result<Recovered, FsError> {
    let anchor = Anchor::choose(read_anchors(io, superblock)?)?;
    let recovered = recover_from(io, superblock, &anchor)?;
    if let Some(error) = recovered.stopped {
        return Err(error.into());
    }
    if !anchor.clean && has_hole(io, superblock, &recovered)? {
        let geometry = superblock.geometry();
        let address = geometry.journal + recovered.journal.head % geometry.journal_blocks;
        let what = "a transaction of the journal is damaged or gone, and the one after it is there";
        return Err(Corrupt::Field { address, what }.into());
    }
    Ok(recovered)
}

/// Whether the transaction after the one that recovery did not find is there. A commit begins when the one before is durable, so
/// that a power cut leaves none behind the end; and it begins no further away than the longest transaction reaches.
fn has_hole(io: &Io, superblock: &Superblock, recovered: &Recovered) -> Result<bool, FsError> {
    let geometry = superblock.geometry();
    let (head, after) = (recovered.journal.head, recovered.sequence - SEQUENCE_GAP + 1);
    let room = geometry.journal_blocks - (head - recovered.journal.tail);
    let end = head + room.min(journal::transaction_blocks(TRANSACTION_MAX) + 1);
    for start in (head..end).step_by(PIECE as usize) {
        for (position, block) in (start..).zip(read_ring(io, &geometry, start, PIECE.min(end - start))?) {
            if journal::decode_descriptor(&geometry, position, after, 0, &block, &superblock.uuid).is_ok() {
                return Ok(true);
            }
        }
    }
    Ok(false)
}

/// Reads both anchors.
pub(crate) fn read_anchors(io: &Io, superblock: &Superblock) -> Result<[Result<Anchor, Corrupt>; 2], FsError> {
    let [a, b] = gpunvme_layout::geometry::ANCHORS.map(|address| -> Result<_, FsError> {
        let block = &read_blocks(io, address, 1)?[0];
        Ok(Anchor::decode(block, address, &superblock.uuid, &superblock.geometry()))
    });
    Ok([a?, b?])
}

/// Reads the live transactions from where that anchor says.
pub(crate) fn recover_from(io: &Io, superblock: &Superblock, anchor: &Anchor) -> Result<Recovered, FsError> {
    let geometry = superblock.geometry();
    let (mut head, mut sequence) = (anchor.tail, anchor.sequence);
    let mut images = BTreeMap::new();
    let (mut transactions, mut stopped) = (0, None);
    while !anchor.clean && head - anchor.tail < geometry.journal_blocks {
        let room = geometry.journal_blocks - (head - anchor.tail);
        let found = match read_transaction(io, superblock, &geometry, head, sequence, room) {
            Ok(Some(found)) => found,
            Ok(None) => break,
            Err(FsError::Corrupt(error)) => {
                stopped = Some(error);
                break;
            }
            Err(error) => return Err(error),
        };
        images.extend(found.images);
        head += found.blocks;
        sequence += 1;
        transactions += 1;
    }
    let journal = Journal { head, tail: anchor.tail, freed: Vec::new(), buffer: None };
    let anchors = Anchors::read(io, anchor.generation);
    Ok(Recovered { journal, anchors, sequence: sequence + SEQUENCE_GAP, images, transactions, stopped })
}

/// A transaction that is all in the journal.
pub(crate) struct Found {
    /// Its length in the journal.
    pub blocks: u64,
    /// Home addresses and images.
    images: Vec<(u64, Block)>,
}

/// The transaction `sequence` at `position`. None when it is not all there.
pub(crate) fn read_transaction(
    io: &Io,
    superblock: &Superblock,
    geometry: &Geometry,
    position: u64,
    sequence: u64,
    room: u64,
) -> Result<Option<Found>, FsError> {
    let mut homes = Vec::new();
    let (mut images, mut descriptors) = (0, 0);
    while descriptors == 0 || descriptors < journal::descriptor_blocks(images) {
        let block = &read_ring(io, geometry, position + descriptors, 1)?[0];
        let decoded =
            journal::decode_descriptor(geometry, position + descriptors, sequence, descriptors, block, &superblock.uuid);
        let Ok((count, part)) = decoded else { return Ok(None) };
        if descriptors > 0 && count != images {
            return Ok(None);
        }
        images = count;
        homes.extend(part);
        descriptors += 1;
    }
    if journal::transaction_blocks(images) > room {
        return Ok(None);
    }
    let blocks = read_ring(io, geometry, position + descriptors, images)?;
    for (home, block) in homes.iter().zip(&blocks) {
        if block.sequence() != sequence || block.verify_any_kind(*home, &superblock.uuid).is_err() {
            return Ok(None);
        }
        let in_fixed_area = *home >= STATE && *home < geometry.bitmaps + geometry.groups;
        if !in_fixed_area && !geometry.contains_data(*home, 1) {
            return Err(Corrupt::Field { address: *home, what: "journal holds an image of a block that has none" }.into());
        }
    }
    Ok(Some(Found { blocks: descriptors + images, images: homes.into_iter().zip(blocks).collect() }))
}

fn read_ring(io: &Io, geometry: &Geometry, position: u64, count: u64) -> Result<Vec<Block>, FsError> {
    let mut blocks = Vec::with_capacity(count as usize);
    for (address, len) in ring_parts(geometry, position, count) {
        blocks.extend(read_blocks(io, address, len)?);
    }
    Ok(blocks)
}

/// The pieces of the device that `count` blocks from `position` on take: one, or two where the ring wraps.
fn ring_parts(geometry: &Geometry, position: u64, count: u64) -> impl Iterator<Item = (u64, u64)> {
    let at = position % geometry.journal_blocks;
    let first = count.min(geometry.journal_blocks - at);
    let parts = [(geometry.journal + at, first), (geometry.journal, count - first)];
    parts.into_iter().filter(|(_, len)| *len > 0)
}

impl Recovered {
    /// Lets sequences and generations begin anew. The journal has to be erased, and both anchors written, before anything is committed.
    pub fn begin_again(&mut self, sequence: u64) {
        self.sequence = sequence;
        self.anchors.generation = 0;
    }
}

impl Volume {
    /// Takes a lock that is held across I/O. Where batches complete only when a caller waits ([`Io::stepped`]), the thread that has
    /// it goes on while this one completes them.
    fn lock<'a, T>(&self, lock: &'a Mutex<T>) -> MutexGuard<'a, T> {
        loop {
            match lock.try_lock() {
                Some(guard) => return guard,
                None if self.io.step() => {}
                None => return lock.lock(),
            }
        }
    }

    /// Makes every operation that was finished before the call durable, together with all data written so far. Who calls
    /// while a commit is under way waits for it, and shares the next one with all others that do.
    pub fn commit(&self) -> Result<(), FsError> {
        if self.read_only {
            return Ok(());
        }
        let wanted = {
            let meta = self.meta.read();
            if meta.running.is_empty() { meta.sequence - 1 } else { meta.sequence }
        };
        loop {
            let mut journal = self.lock(&self.journal);
            self.writable()?;
            if self.durable.load(Ordering::Acquire) >= wanted {
                return self.flush_data().map_err(|e| self.fail(e));
            }
            let has_room = self.write_transaction(&mut journal).map_err(|e| self.fail(e))?;
            if has_room {
                return Ok(());
            }
            let tail = journal.tail;
            drop(journal);
            let mut anchors = self.lock(&self.anchors);
            // Of those that find no room, one makes it.
            if self.lock(&self.journal).tail == tail {
                self.writable()?;
                self.checkpoint_locked(&mut anchors).map_err(|e| self.fail(e))?;
            }
        }
    }

    /// Time has passed: has the next commit look whether the volume on the device is still this mount's.
    pub fn look_again(&self) {
        self.look_again.store(true, Ordering::Relaxed);
    }

    /// Looks whether the volume on the device is still this mount's, where something waits to be written.
    ///
    /// # Errors
    /// [`FsError::Taken`]: it is not, and nothing more is written.
    pub fn look_before_writing(&self) -> Result<(), FsError> {
        let waits = {
            let meta = self.meta.read();
            meta.reserved > 0 || !meta.running.is_empty()
        };
        if waits { self.look().map_err(|e| self.fail(e)) } else { Ok(()) }
    }

    /// Looks whether the volume on the device is still this mount's, if it is time to.
    fn look(&self) -> Result<(), FsError> {
        if self.look_again.load(Ordering::Relaxed)
            // A checkpoint that is under way looks itself.
            && let Some(anchors) = self.anchors.try_lock()
        {
            self.look_again.store(false, Ordering::Relaxed);
            self.is_still_ours(&anchors)?;
        }
        Ok(())
    }

    /// Fails when the superblock or an anchor on the device is another than this mount read or wrote there.
    fn is_still_ours(&self, anchors: &Anchors) -> Result<(), FsError> {
        // A device that cannot read is no proof of anything.
        let Ok(now) = read_scattered(&self.io, &FRONT) else { return Ok(()) };
        if anchors.front.iter().zip(&now).any(|(known, now)| known.as_ref().is_some_and(|known| known != now)) {
            return Err(FsError::Taken { device: self.io.device().name().to_owned() });
        }
        Ok(())
    }

    /// Takes for this mount's what is at the start of the device now: a repair has written superblocks.
    pub(crate) fn know_front(&self) {
        let mut anchors = self.lock(&self.anchors);
        *anchors = Anchors::read(&self.io, anchors.generation);
    }

    /// Whether the running transaction is large enough for a commit to be due: where it is full, operations wait for one.
    pub fn wants_commit(&self) -> bool {
        let meta = self.meta.read();
        meta.running.len() > meta.transaction_max / 2
    }

    /// Flushes the device when data was written since the last flush.
    fn flush_data(&self) -> Result<(), FsError> {
        let written = self.data_written.swap(false, Ordering::AcqRel);
        if written && self.io.device().geometry().volatile_cache {
            self.io.run(vec![Request::flush()])?;
        }
        Ok(())
    }

    /// Writes the running transaction. Returns whether the journal has room for it.
    fn write_transaction(&self, journal: &mut Journal) -> Result<bool, FsError> {
        let geometry = self.superblock.geometry();
        self.look()?;
        let (sequence, homes, images) = {
            let mut meta = self.meta.write();
            if meta.running.is_empty() {
                drop(meta);
                self.flush_data()?;
                return Ok(true);
            }
            let blocks = journal::transaction_blocks(meta.running.len() as u64);
            if blocks > geometry.journal_blocks - (journal.head - journal.tail) {
                // Before the transaction is frozen: afterwards its images would hide the committed ones.
                return Ok(false);
            }
            freeze(&mut meta, journal)
        };
        let blocks = journal::transaction_blocks(images.len() as u64);
        self.flush_data()?;
        let descriptors = journal::encode_descriptors(&geometry, journal.head, sequence, &homes, &self.superblock.uuid);
        let region = journal_buffer(journal, blocks as usize * BLOCK_SIZE)?;
        let all = descriptors.iter().chain(images.iter().map(Arc::as_ref));
        for (i, block) in all.enumerate() {
            region.write_at(i * BLOCK_SIZE, block.bytes())?;
        }
        self.write_ring(&geometry, journal.head, blocks, &region)?;
        journal.head += blocks;
        self.durable.store(sequence, Ordering::Release);
        self.epochs.retire(std::mem::take(&mut journal.freed));
        self.reuse_freed();
        Ok(true)
    }

    /// Writes blocks into the ring, durably.
    fn write_ring(&self, geometry: &Geometry, position: u64, blocks: u64, region: &Arc<Region>) -> Result<(), FsError> {
        let volatile = self.io.device().geometry().volatile_cache;
        let parts: Vec<_> = ring_parts(geometry, position, blocks).collect();
        let fua = volatile && parts.len() == 1;
        let mut at = 0;
        let requests = parts.iter().map(|(address, len)| {
            let len = *len as usize * BLOCK_SIZE;
            let span = Span { region: region.clone(), offset: at, len };
            at += len;
            Request::write(Geometry::byte(*address), vec![span], fua)
        });
        self.io.run(requests)?;
        if volatile && !fua {
            self.io.run(vec![Request::flush()])?;
        }
        Ok(())
    }

    /// Lets the allocator have the freed blocks that nothing holds back any more.
    pub(crate) fn reuse_freed(&self) {
        let runs = self.epochs.reusable();
        if runs.is_empty() {
            return;
        }
        let mut meta = self.meta.write();
        for run in &runs {
            meta.busy.remove(*run);
            meta.pending -= run.len;
        }
    }

    /// Writes all committed images home and frees their part of the journal.
    pub fn checkpoint(&self) -> Result<(), FsError> {
        let mut anchors = self.lock(&self.anchors);
        self.writable()?;
        self.checkpoint_locked(&mut anchors).map_err(|e| self.fail(e))
    }

    /// Gives the chunks of metadata that emptied back to all uses, if there are any: commits, and makes a checkpoint.
    ///
    /// # Errors
    /// As [`Volume::checkpoint`].
    pub fn give_back(&self) -> Result<(), FsError> {
        if self.meta.read().emptied.is_empty() {
            return Ok(());
        }
        self.commit()?;
        self.checkpoint()
    }

    /// Begins the journal anew, empty, with sequences that follow on none in it: metadata may be written straight home then, to
    /// blocks that are free, and no earlier image of those is ever taken for part of what follows.
    pub(crate) fn restart_journal(&self) -> Result<(), FsError> {
        self.commit()?;
        self.meta.write().sequence += SEQUENCE_GAP;
        self.checkpoint()
    }

    /// Erases the journal, of which nothing may be live: no image in it is ever taken for part of what follows.
    pub(crate) fn erase_journal(&self) -> Result<(), FsError> {
        let journal = self.lock(&self.journal);
        assert_eq!(journal.head, journal.tail, "a checkpoint was just made");
        let geometry = self.superblock.geometry();
        erase(&self.io, geometry.journal, geometry.journal_blocks)?;
        Ok(self.io.run(vec![Request::flush()])?)
    }

    /// Whether the journal is full enough for a checkpoint to be due.
    pub fn wants_checkpoint(&self) -> bool {
        let journal = self.lock(&self.journal);
        journal.head - journal.tail > self.superblock.geometry().journal_blocks / 2
    }

    fn checkpoint_locked(&self, anchors: &mut Anchors) -> Result<(), FsError> {
        let moved = self.move_tail(anchors)?;
        self.free_emptied_chunks(moved.sequence)
    }

    /// Writes home the images of all durable transactions, and lets the journal begin behind them. Returns the anchor that says so.
    fn move_tail(&self, anchors: &mut Anchors) -> Result<Anchor, FsError> {
        self.is_still_ours(anchors)?;
        let (mut images, sequence, head) = {
            // With the journal's lock nothing is frozen that is not durable, nor an image replaced by a later one.
            let journal = self.lock(&self.journal);
            let (imaged, sequence) = {
                let meta = self.meta.read();
                (meta.cache.imaged(), meta.sequence)
            };
            let mut images = Vec::with_capacity(imaged.len());
            for part in imaged.chunks(IMAGES_PART) {
                let meta = self.meta.read();
                let found = part.iter().filter_map(|address| Some((*address, meta.cache.image(*address)?)));
                images.extend(found.map(|(address, (sequence, block))| (address, *sequence, block.clone())));
            }
            (images, sequence, journal.head)
        };
        self.write_home(&mut images)?;
        let tail = head % self.superblock.geometry().journal_blocks;
        let anchor = Anchor { generation: anchors.generation + 1, tail, sequence, clean: false };
        self.write_anchor(anchors, &anchor)?;
        for part in images.chunks(IMAGES_PART) {
            let mut meta = self.meta.write();
            meta.checkpoints += 1;
            part.iter().for_each(|(address, sequence, _)| meta.cache.drop_image(*address, *sequence));
        }
        self.lock(&self.journal).tail = head;
        Ok(anchor)
    }

    /// Writes blocks home, durably: address, sequence and content of each.
    pub(crate) fn write_home(&self, images: &mut [(u64, u64, Arc<Block>)]) -> Result<(), FsError> {
        images.sort_unstable_by_key(|(address, _, _)| *address);
        // One buffer for all parts: the first use of memory costs more than the copies.
        let region = Region::allocate(images.len().clamp(1, HOME_PART) * BLOCK_SIZE)?;
        for part in images.chunks(HOME_PART) {
            let mut requests: Vec<Request> = Vec::new();
            for (i, (address, _, block)) in part.iter().enumerate() {
                region.write_at(i * BLOCK_SIZE, block.bytes())?;
                let (byte, offset) = (Geometry::byte(*address), i * BLOCK_SIZE);
                match requests.last_mut() {
                    Some(last) if last.offset + last.len == byte => {
                        last.len += BLOCK_SIZE as u64;
                        last.spans[0].len += BLOCK_SIZE;
                    }
                    _ => {
                        let span = Span { region: region.clone(), offset, len: BLOCK_SIZE };
                        requests.push(Request::write(byte, vec![span], false));
                    }
                }
            }
            self.io.run(requests)?;
        }
        if self.io.device().geometry().volatile_cache {
            self.io.run(vec![Request::flush()])?;
        }
        Ok(())
    }

    fn write_anchor(&self, anchors: &mut Anchors, anchor: &Anchor) -> Result<(), FsError> {
        self.is_still_ours(anchors)?;
        let (block, address) = (anchor.encode(&self.superblock.uuid), anchor.address());
        write_block(&self.io, &block, address)?;
        anchors.generation = anchor.generation;
        for (known, _) in anchors.front.iter_mut().zip(FRONT).filter(|(_, of)| *of == address) {
            *known = Some(block.clone());
        }
        Ok(())
    }

    /// Gives chunks back whose last node was freed by a transaction before `sequence`: no image of them is live any more.
    fn free_emptied_chunks(&self, sequence: u64) -> Result<(), FsError> {
        let mut meta = self.meta.write();
        let (due, later) = std::mem::take(&mut meta.emptied).into_iter().partition::<Vec<_>, _>(|(_, s)| *s < sequence);
        meta.emptied = later;
        drop(meta);
        for (chunk, emptied) in due {
            let attempt = || {
                let mut op = Op::begin(self.meta.write())?;
                if op.meta().emptied.iter().any(|(later, s)| *later == chunk && *s >= sequence) {
                    // Used and emptied again since: its images are live, and that entry's turn comes.
                    return Ok(());
                }
                op.free_metadata_chunk(chunk)?;
                op.finish();
                Ok(())
            };
            // What it needs stays in memory until it is done.
            let mut held = Vec::new();
            loop {
                match attempt() {
                    Err(Fail::Stall(Stall::Load { address })) => {
                        held.push(self.load(address)?);
                        continue;
                    }
                    // The running transaction is full: the next checkpoint comes by again.
                    Err(Fail::Stall(_)) => self.meta.write().emptied.push((chunk, emptied)),
                    Err(Fail::Error(error)) => return Err(error),
                    Ok(()) => {}
                }
                break;
            }
        }
        Ok(())
    }

    /// Finds the empty metadata chunks that a crash made everybody forget; later checkpoints give them back. Waits for the device,
    /// for a few blocks of each terabyte.
    ///
    /// # Errors
    /// The device failed, or the volume is damaged.
    pub fn find_emptied_chunks(&self) -> Result<(), FsError> {
        for group in 0..self.superblock.geometry().groups {
            let found = self.wait(|| alloc::empty_metadata_chunks(&*self.meta.read(), group))?;
            let mut meta = self.meta.write();
            // One that the running transaction has emptied is listed with its sequence already.
            let sequence = meta.sequence - 1;
            meta.emptied.extend(found.into_iter().map(|chunk| (chunk, sequence)));
        }
        Ok(())
    }

    /// Commits, writes everything home, and says in the anchor that nothing is left to recover.
    pub(crate) fn close_journal(&self) -> Result<(), FsError> {
        self.commit()?;
        self.checkpoint()?;
        // The checkpoint may have given chunks back.
        self.commit()?;
        let mut anchors = self.lock(&self.anchors);
        let last = self.move_tail(&mut anchors)?;
        self.write_anchor(&mut anchors, &Anchor { generation: last.generation + 1, clean: true, ..last })
    }
}

/// Ends the running transaction: seals its blocks and shares them. Returns its sequence, the home addresses and the images.
fn freeze(meta: &mut Meta, journal: &mut Journal) -> (u64, Vec<u64>, Vec<Arc<Block>>) {
    let sequence = meta.sequence;
    let mut homes = std::mem::take(&mut meta.running);
    homes.sort_unstable();
    let mut images = Vec::with_capacity(homes.len());
    for home in &homes {
        let entry = meta.cache.get_mut(*home).expect("blocks of the running transaction stay in memory");
        let block = Arc::make_mut(&mut entry.block);
        if *home == STATE {
            meta.state.store(block);
        }
        block.seal(sequence);
        entry.running = false;
        images.push(entry.block.clone());
        meta.cache.keep_image(*home, sequence);
    }
    meta.sequence += 1;
    journal.freed.append(&mut meta.freed);
    (sequence, homes, images)
}

/// Writes one block, durably.
pub(crate) fn write_block(io: &Io, block: &Block, address: u64) -> Result<(), FsError> {
    let region = Region::allocate(BLOCK_SIZE)?;
    region.write_at(0, block.bytes())?;
    let span = Span { region, offset: 0, len: BLOCK_SIZE };
    Ok(io.run(vec![Request::write(Geometry::byte(address), vec![span], true)])?)
}

fn journal_buffer(journal: &mut Journal, len: usize) -> Result<Arc<Region>, FsError> {
    if let Some(region) = journal.buffer.as_ref().filter(|r| r.len() >= len) {
        return Ok(region.clone());
    }
    let region = Region::allocate(len.next_power_of_two())?;
    journal.buffer = Some(region.clone());
    Ok(region)
}
