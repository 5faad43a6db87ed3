//! Checkpoints: write the durable images of the journal home, and free their part of the journal.

use std::sync::Arc;

use gpunvme_blockdev::{Region, Request, Span};
use gpunvme_layout::block::BLOCK_SIZE;
use gpunvme_layout::geometry::ANCHORS;
use gpunvme_layout::{Anchor, Block, Geometry};

use super::Anchors;
use super::recovery::SEQUENCE_GAP;
use crate::error::FsError;
use crate::volume::format::erase;
use crate::volume::open::Volume;

/// Images that are written home at once: a megabyte in flight keeps a device busy, and the buffer
/// stays small.
const HOME_PART: usize = 256;
/// Blocks of which the images are looked at, or forgotten, under one hold of the metadata lock.
const IMAGES_PART: usize = 256;

impl Volume {
    /// Writes all committed images home and frees their part of the journal.
    pub fn checkpoint(&self) -> Result<(), FsError> {
        let mut anchors = self.lock(&self.anchors);
        self.writable()?;
        self.checkpoint_locked(&mut anchors).map_err(|e| self.fail(e))
    }

    /// Begins the journal anew: empty, with sequences that do not continue any in it. Metadata may
    /// be written straight home then, to free blocks: no earlier image of those is ever taken for
    /// part of a later transaction.
    pub(crate) fn restart_journal(&self) -> Result<(), FsError> {
        self.commit()?;
        self.meta.write().sequence += SEQUENCE_GAP;
        self.checkpoint()
    }

    /// Erases the journal, of which nothing may be live: no image in it is ever taken for part of a
    /// later transaction.
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

    pub(super) fn checkpoint_locked(&self, anchors: &mut Anchors) -> Result<(), FsError> {
        let moved = self.move_tail(anchors)?;
        self.free_emptied_chunks(moved.sequence);
        Ok(())
    }

    /// Writes home the images of all durable transactions, and lets the journal begin behind them.
    /// Returns the anchor that says so, the later of two that differ in generation only: whichever
    /// of them is lost, recovery does not begin with images from before, of blocks that may be
    /// data's by then.
    fn move_tail(&self, anchors: &mut Anchors) -> Result<Anchor, FsError> {
        self.is_still_ours(anchors)?;
        let (mut images, sequence, head) = {
            // With the journal's lock nothing is frozen that is not durable, nor an image replaced
            // by a later one, except where a commit failed meanwhile.
            let journal = self.lock(&self.journal);
            self.writable()?;
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
        let mut anchor = Anchor { generation: anchors.generation, tail, sequence, clean: false };
        for _ in ANCHORS {
            anchor.generation += 1;
            self.write_anchor(anchors, &anchor)?;
        }
        for part in images.chunks(IMAGES_PART) {
            let mut meta = self.meta.write();
            for (address, sequence, _) in part {
                self.homes.change(*address);
                meta.cache.drop_image(*address, *sequence);
            }
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
