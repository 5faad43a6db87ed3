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

use super::io::{read_blocks, write_block};
use super::open::Volume;
use crate::error::FsError;

impl Volume {
    /// Makes the volume as large as the device is now, which has said so before
    /// ([`gpunvme_blockdev::BlockDevice::look_again`]). Returns the blocks that files could have
    /// before, and can have now.
    ///
    /// # Errors
    /// [`FsError::CannotGrow`] says why; [`FsError::ReadOnly`], [`FsError::Taken`], and errors of
    /// the device: the volume has the old size then, or gets the new one at the next mount. It is
    /// read-only from then on where a write of the device failed.
    pub fn grow(&self) -> Result<[u64; 2], FsError> {
        let _one_at_a_time = self.growth.lock();
        self.writable()?;
        let old = self.geometry();
        let new = self.larger(&old)?;
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

    /// Whether the volume has grown less often than it can.
    ///
    /// # Errors
    /// [`FsError::CannotGrow`], [`FsError::ReadOnly`] and [`FsError::Taken`].
    pub fn may_grow(&self) -> Result<(), FsError> {
        self.writable()?;
        self.has_regions_left(&self.geometry())
    }

    fn has_regions_left(&self, old: &Geometry) -> Result<(), FsError> {
        let times = REGIONS_MAX - 1;
        match old.regions().len() == REGIONS_MAX {
            true => Err(FsError::CannotGrow {
                device: self.device().name().to_owned(),
                why: format!("the volume has grown {times} times, and cannot once more: copy it to a new one"),
            }),
            false => Ok(()),
        }
    }

    /// The volume with all of the device.
    fn larger(&self, old: &Geometry) -> Result<Geometry, FsError> {
        self.has_regions_left(old)?;
        let device = self.device().geometry().len.get();
        let total = (device / BLOCK_SIZE as u64).min(TOTAL_BLOCKS_MAX);
        let cannot = |why: String| FsError::CannotGrow { device: self.device().name().to_owned(), why };
        old.grown(total).ok_or_else(|| {
            let (has, least) = (old.total_blocks * BLOCK_SIZE as u64, 8 << 20);
            cannot(format!("has {device} bytes, and the volume {has}: it grows by {least} at the least, and never shrinks"))
        })
    }

    /// Writes the last region, and the superblocks that name it. After a write that may not be
    /// durable nobody knows what else is not: the volume stops.
    fn add_region(&self, new: &Geometry) -> Result<(), FsError> {
        let region = new.regions().last().expect("it has grown");
        for (address, groups) in region.descriptor_blocks() {
            let mut block = group::new_descriptors(new, address, groups, &self.superblock.uuid);
            block.seal(0);
            write_block(&self.io, &block, address).map_err(|error| self.fail(error))?;
        }
        if self.device().geometry().volatile_cache {
            self.io.run(vec![Request::flush()]).map_err(|error| self.fail(error.into()))?;
        }
        // Nothing writes an anchor meanwhile, nor takes the new superblock for another's.
        let mut anchors = self.lock(&self.anchors);
        self.is_still_ours(&anchors).map_err(|e| self.fail(e))?;
        let first: Block = read_blocks(&self.io, Superblock::ADDRESS, 1)?.swap_remove(0);
        if !Superblock::is_intact(&first, Superblock::ADDRESS) {
            let why = "the first superblock is damaged; unmount the volume and run fsck.gpunvme".to_owned();
            return Err(FsError::CannotGrow { device: self.device().name().to_owned(), why });
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
