//! Commits: make operations durable, together with the data written before.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use gpunvme_blockdev::{Region, Request, Span};
use gpunvme_layout::block::BLOCK_SIZE;
use gpunvme_layout::geometry::STATE;
use gpunvme_layout::{Block, Geometry, journal};
use parking_lot::{Mutex, MutexGuard};

use super::group::{Goal, Leader};
use super::ring::{Journal, ring_parts};
use crate::error::FsError;
use crate::volume::meta::Meta;
use crate::volume::open::Volume;

impl Volume {
    /// Takes a lock that is held across I/O. Where batches complete only when a caller waits
    /// (`Io::stepped`), this thread completes batches meanwhile, so that the lock's holder goes on.
    pub(in crate::volume) fn lock<'a, T>(&self, lock: &'a Mutex<T>) -> MutexGuard<'a, T> {
        loop {
            match lock.try_lock() {
                Some(guard) => return guard,
                None if self.io.step() => {}
                None => return lock.lock(),
            }
        }
    }

    /// Makes every operation that was finished before the call durable, together with all data
    /// written so far. A caller that comes while a commit is in flight waits for it, and shares the
    /// next one with all others that came meanwhile.
    pub fn commit(&self) -> Result<(), FsError> {
        if self.read_only {
            return Ok(());
        }
        let written = self.unflushed.written();
        let wanted = {
            let meta = self.meta.read();
            if meta.running.is_empty() { meta.sequence - 1 } else { meta.sequence }
        };
        let needed = Goal { sequence: wanted, written };
        loop {
            self.writable()?;
            let is_durable = self.durable.load(Ordering::Acquire) >= wanted;
            if is_durable && self.is_flushed(written) {
                return Ok(());
            }
            let Some(leader) = self.group.lead(&needed, || self.io.step()) else { continue };
            let mut journal = self.lock(&self.journal);
            self.writable()?;
            if self.durable.load(Ordering::Acquire) >= wanted {
                leader.set_goal(Goal { sequence: wanted, written: self.unflushed.written() });
                return self.flush_data(written).map_err(|e| self.fail(e));
            }
            let has_room = self.write_transaction(&mut journal, &leader).map_err(|e| self.fail(e))?;
            if has_room {
                return Ok(());
            }
            let tail = journal.tail;
            drop((journal, leader));
            let mut anchors = self.lock(&self.anchors);
            // Of those that find no room, one makes it.
            if self.lock(&self.journal).tail == tail {
                self.writable()?;
                self.checkpoint_locked(&mut anchors).map_err(|e| self.fail(e))?;
            }
        }
    }

    /// Whether the running transaction is large enough for a commit to be due: operations wait for
    /// a commit once the transaction is full.
    pub fn wants_commit(&self) -> bool {
        let meta = self.meta.read();
        meta.running.len() > meta.transaction_max / 2
    }

    /// Whether the first `written` writes of data are durable.
    fn is_flushed(&self, written: u64) -> bool {
        !self.io.device().geometry().volatile_cache || self.unflushed.is_flushed(written)
    }

    /// Makes the first `written` writes of data durable. Called with the journal locked.
    fn flush_data(&self, written: u64) -> Result<(), FsError> {
        if self.is_flushed(written) {
            return Ok(());
        }
        let covered = self.unflushed.written();
        self.io.run([Request::flush()])?;
        self.unflushed.flushed(covered);
        Ok(())
    }

    /// Writes the running transaction. Returns whether the journal has room for it.
    fn write_transaction(&self, journal: &mut Journal, leader: &Leader) -> Result<bool, FsError> {
        let geometry = self.superblock.geometry();
        self.look()?;
        let (sequence, homes, images) = {
            let mut meta = self.meta.write();
            if meta.running.is_empty() {
                drop(meta);
                self.flush_data(self.unflushed.written())?;
                return Ok(true);
            }
            let blocks = journal::transaction_blocks(meta.running.len() as u64);
            if blocks > geometry.journal_blocks - (journal.head - journal.tail) {
                // Checked before the transaction is frozen: frozen images replace the committed
                // ones in memory, and a checkpoint could then not write those home to make room.
                return Ok(false);
            }
            freeze(&mut meta, journal)
        };
        let blocks = journal::transaction_blocks(images.len() as u64);
        let written = self.unflushed.written();
        leader.set_goal(Goal { sequence, written });
        self.flush_data(written)?;
        let descriptors = journal::encode_descriptors(&geometry, journal.head, sequence, &homes, &self.superblock.uuid);
        let region = journal_buffer(journal, blocks as usize * BLOCK_SIZE)?;
        let all = descriptors.iter().chain(images.iter().map(Arc::as_ref));
        for (i, block) in all.enumerate() {
            region.write_at(i * BLOCK_SIZE, block.bytes())?;
        }
        self.write_ring(&geometry, journal.head, blocks, &region)?;
        journal.head += blocks;
        self.epochs.retire(std::mem::take(&mut journal.freed));
        self.reuse_freed();
        // The last of it: who sees this waits for nothing else.
        self.durable.store(sequence, Ordering::Release);
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

    /// Lets the allocator have the freed blocks that nothing holds back any more, or first the
    /// device know of them.
    pub(crate) fn reuse_freed(&self) {
        let runs = self.epochs.reusable();
        if runs.is_empty() {
            return;
        }
        if self.discard { self.discards.lock().extend(runs) } else { self.free_busy(&runs) }
    }
}

/// Ends the running transaction: seals its blocks and shares them. Returns its sequence, the home
/// addresses and the images.
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

fn journal_buffer(journal: &mut Journal, len: usize) -> Result<Arc<Region>, FsError> {
    if let Some(region) = journal.buffer.as_ref().filter(|r| r.len() >= len) {
        return Ok(region.clone());
    }
    let region = Region::allocate(len.next_power_of_two())?;
    journal.buffer = Some(region.clone());
    Ok(region)
}
