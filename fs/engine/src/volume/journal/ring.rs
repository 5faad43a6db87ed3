//! The journal's ring: positions in it, and their places on the device.

use std::sync::Arc;

use gpunvme_blockdev::{Io, Region};
use gpunvme_layout::{Block, Corrupt, Geometry};

use crate::error::FsError;
use crate::volume::io::read_each;
use crate::volume::run::Run;

/// The journal's own state, guarded by the journal lock. Positions count blocks and never wrap;
/// their place on the device is the position modulo the length of the journal.
pub(crate) struct Journal {
    /// Position of the next transaction.
    pub(super) head: u64,
    /// Position of the oldest live transaction.
    pub(super) tail: u64,
    /// Frees of transactions that are not durable.
    pub(super) freed: Vec<Run>,
    /// Buffer in which transactions are assembled.
    pub(super) buffer: Option<Arc<Region>>,
}

/// The blocks from `position` on, as [`read_each`] has them.
pub(super) fn read_ring(io: &Io, geometry: &Geometry, position: u64, count: u64) -> Result<Vec<Result<Block, Corrupt>>, FsError> {
    let mut blocks = Vec::with_capacity(count as usize);
    for (address, len) in ring_parts(geometry, position, count) {
        blocks.extend(read_each(io, address, len)?);
    }
    Ok(blocks)
}

/// The pieces of the device that `count` blocks from `position` on take: one, or two where the
/// ring wraps.
pub(super) fn ring_parts(geometry: &Geometry, position: u64, count: u64) -> impl Iterator<Item = (u64, u64)> {
    let at = position % geometry.journal_blocks;
    let first = count.min(geometry.journal_blocks - at);
    let parts = [(geometry.journal + at, first), (geometry.journal, count - first)];
    parts.into_iter().filter(|(_, len)| *len > 0)
}
