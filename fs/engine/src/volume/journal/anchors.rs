//! The anchors, and a mount's memory of the blocks at the start of the device.

use gpunvme_blockdev::Io;
use gpunvme_layout::geometry::{ANCHORS, SUPERBLOCK};
use gpunvme_layout::{Anchor, Block, Corrupt, Superblock};

use crate::error::FsError;
use crate::volume::io::{read_blocks, read_each};

/// The blocks at the start of the device that identify the volume and its user.
pub(super) const FRONT: [u64; 3] = [SUPERBLOCK, ANCHORS[0], ANCHORS[1]];

/// The anchors, guarded by a lock that a checkpoint holds to its end.
pub(crate) struct Anchors {
    /// Generation of the last one written.
    pub(super) generation: u64,
    /// Content of [`FRONT`], as this mount read or wrote it; none where the device could not read.
    pub(super) front: [Option<Block>; 3],
}

impl Anchors {
    /// Reads the blocks at the start of the device, and takes them for this mount's.
    pub(super) fn read(io: &Io, generation: u64) -> Anchors {
        Anchors { generation, front: FRONT.map(|address| Some(read_blocks(io, address, 1).ok()?.swap_remove(0))) }
    }

    /// The first superblock is this one from now on.
    pub(in crate::volume) fn know_superblock(&mut self, block: Block) {
        self.front[0] = Some(block);
    }

    /// Generation of the last one written.
    pub fn generation(&self) -> u64 {
        self.generation
    }
}

/// Reads both anchors. One that the device cannot read is as good as damaged.
pub(crate) fn read_anchors(io: &Io, superblock: &Superblock) -> Result<[Result<Anchor, Corrupt>; 2], FsError> {
    let [a, b] = gpunvme_layout::geometry::ANCHORS.map(|address| -> Result<_, FsError> {
        let block = read_each(io, address, 1)?.swap_remove(0);
        Ok(block.and_then(|block| Anchor::decode(&block, address, &superblock.uuid, &superblock.geometry())))
    });
    Ok([a?, b?])
}
