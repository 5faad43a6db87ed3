//! Growth: makes the volume as large as its device has become, while it is in use.
//!
//! What comes behind is a *region* with groups of its own; nothing that lies on the volume moves.
//! The order makes a crash leave the old size or the new one:
//!
//! 1. The group descriptors of the region are written, where no file and no metadata is.
//! 2. The superblocks are, each durably, from the last to the first. The first is the one that
//!    counts: with it the volume has the region.
//! 3. The counters count the region, in a transaction. A mount that finds one that they do not
//!    count yet makes up for that.

use gpunvme_blockdev::Request;
use gpunvme_layout::block::BLOCK_SIZE;
use gpunvme_layout::geometry::{REGIONS_MAX, TOTAL_BLOCKS_MAX};
use gpunvme_layout::{Block, Geometry, Superblock, group};

use super::io::{read_blocks, write_block, write_run};
use super::open::Volume;
use crate::error::FsError;

impl Volume {
    /// Makes the volume as large as the device is now, which has said so before
    /// ([`gpunvme_blockdev::BlockDevice::look_again`]). Returns the blocks that files could have
    /// before, and can have now: as many where the device is as large as the volume.
    ///
    /// # Errors
    /// [`FsError::CannotGrow`] says why; [`FsError::ReadOnly`], [`FsError::Taken`], and errors of
    /// the device: the volume has the old size then, or gets the new one at the next mount. It is
    /// read-only from then on where the device failed to write a superblock, or a flush.
    pub fn grow(&self) -> Result<[u64; 2], FsError> {
        let _one_at_a_time = self.growth.lock();
        self.writable()?;
        self.is_ours()?;
        let old = self.geometry();
        let len = self.device().geometry().len.get();
        if blocks_in(len) == old.total_blocks {
            return Ok([old.data_blocks(); 2]);
        }
        let new = self.larger(&old, len)?;
        self.add_region(&new)?;
        self.wait(|| {
            let mut op = self.begin()?;
            op.grow(&new);
            op.finish();
            Ok(())
        })?;
        self.commit()?;
        tracing::info!(from = old.total_blocks, to = new.total_blocks, "the volume has grown");
        Ok([old.data_blocks(), new.data_blocks()])
    }

    /// Whether the volume is still this mount's, and has grown less often than it can.
    ///
    /// # Errors
    /// [`FsError::CannotGrow`], [`FsError::ReadOnly`] and [`FsError::Taken`].
    pub fn may_grow(&self) -> Result<(), FsError> {
        self.writable()?;
        self.is_ours()?;
        self.has_regions_left(&self.geometry())
    }

    /// Whether the volume can grow to the end of a device of so many bytes.
    ///
    /// # Errors
    /// [`FsError::CannotGrow`].
    pub fn may_grow_to(&self, bytes: u64) -> Result<(), FsError> {
        self.larger(&self.geometry(), bytes).map(drop)
    }

    fn has_regions_left(&self, old: &Geometry) -> Result<(), FsError> {
        let times = REGIONS_MAX - 1;
        match old.regions().len() == REGIONS_MAX {
            true => {
                Err(self.cannot_grow(format!("the volume has grown {times} times, and cannot once more: copy it to a new one")))
            }
            false => Ok(()),
        }
    }

    /// The volume with all of a device of so many bytes.
    fn larger(&self, old: &Geometry, bytes: u64) -> Result<Geometry, FsError> {
        self.has_regions_left(old)?;
        old.grown(blocks_in(bytes)).ok_or_else(|| {
            let (has, least) = (old.total_blocks * BLOCK_SIZE as u64, 8 << 20);
            let why = format!("has {bytes} bytes, and the volume {has}: it grows by {least} at the least, and never shrinks");
            self.cannot_grow(why)
        })
    }

    fn cannot_grow(&self, why: String) -> FsError {
        let names = self.device().member_names();
        let device = match names.len() {
            0 | 1 => self.device().name().to_owned(),
            count => format!("{} and {} more", names[0], count - 1),
        };
        FsError::CannotGrow { device, why }
    }

    /// Writes the last region, and the superblocks that name it. After a write of a superblock, or
    /// a flush, that may not be durable nobody knows what else is not: the volume stops.
    fn add_region(&self, new: &Geometry) -> Result<(), FsError> {
        let region = new.regions().last().expect("it has grown");
        let descriptors = region.descriptor_blocks().map(|(address, groups)| {
            let mut block = group::new_descriptors(new, address, groups, &self.superblock.uuid);
            block.seal(0);
            block
        });
        // Nothing of the volume is there yet.
        write_run(&self.io, region.descriptors, descriptors)?;
        if self.device().geometry().volatile_cache {
            self.io.run(vec![Request::flush()]).map_err(|error| self.fail(error.into()))?;
        }
        // Nothing writes an anchor meanwhile, nor takes the new superblock for another's.
        let mut anchors = self.lock(&self.anchors);
        self.is_still_ours(&anchors).map_err(|e| self.fail(e))?;
        let first: Block = read_blocks(&self.io, Superblock::ADDRESS, 1)?.swap_remove(0);
        if !Superblock::is_intact(&first, Superblock::ADDRESS) {
            return Err(self.cannot_grow("the first superblock is damaged; unmount the volume and run fsck.gpunvme".to_owned()));
        }
        let ends: Vec<u64> = new.regions().skip(1).map(|region| region.end).collect();
        let grown = Superblock::grown(&first, &ends);
        for address in new.superblocks().into_iter().rev() {
            write_block(&self.io, &grown.moved_to(address), address).map_err(|error| self.fail(error))?;
        }
        anchors.know_superblock(grown);
        Ok(())
    }
}

/// Blocks that a volume has on a device of so many bytes.
fn blocks_in(bytes: u64) -> u64 {
    (bytes / BLOCK_SIZE as u64).min(TOTAL_BLOCKS_MAX)
}
