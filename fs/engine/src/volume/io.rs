//! Reading and writing blocks of a volume's device, past the cache.

use std::cell::Cell;

use gpunvme_blockdev::{Io, Region, Request, Span};
use gpunvme_layout::block::BLOCK_SIZE;
use gpunvme_layout::{Block, BlockKind, Corrupt, Geometry, Superblock, Uuid, group, node};

use crate::error::FsError;

/// Blocks that may be unreadable because of the device; with more than these, it is the device
/// that has to be mended.
pub(crate) const UNREADABLE_MAX: u64 = 100;

/// What is said of a volume of which only that copy of the superblock is left.
const ONLY_A_COPY: &str = "the superblock and its copy at the end are damaged, and the one before the journal is there: \
                           fsck.gpunvme -p mends the others";
/// What is said of one of which another copy is left, where another filesystem may have been made.
const DISPLACED: &str = "something else lies where the superblock was, and a copy of it is left: if another filesystem \
                         was made here since, this volume is gone; else copy the device, then fsck.gpunvme -y mends it";

/// Blocks that [`write_run`] writes at a time.
const RUN: usize = 64;

/// Reads the superblock: the first copy, or another when that is damaged.
pub(crate) fn read_superblock(io: &Io) -> Result<Superblock, FsError> {
    let device_blocks = io.device().geometry().len.get() / BLOCK_SIZE as u64;
    let short = || {
        let message = format!("{} bytes are too few for a gpunvme filesystem", io.device().geometry().len.get());
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
            Ok(_) if is_displaced(io) => Err(Corrupt::Superblock(DISPLACED.into()).into()),
            Ok(superblock) => {
                tracing::warn!(%error, "the first superblock is damaged; using the copy at the end of the device");
                Ok(superblock)
            }
            // Where something else was made since, what lies in the middle is only a trace.
            Err(_) if is_displaced(io) => Err(error),
            Err(_) => match Geometry::middle_superblock(device_blocks).map(read) {
                Some(Ok(_)) => Err(Corrupt::Superblock(ONLY_A_COPY.into()).into()),
                _ => Err(error),
            },
        },
    }
}

/// Whether something else lies where the first superblock belongs.
fn is_displaced(io: &Io) -> bool {
    read_blocks(io, Superblock::ADDRESS, 1).is_ok_and(|first| Superblock::is_displaced(&first[0]))
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

/// As [`read_blocks`], but blocks that the device cannot read are as good as damaged ones. Of a
/// device that cannot read many it is an error.
pub(crate) fn read_each(io: &Io, address: u64, count: u64) -> Result<Vec<Result<Block, Corrupt>>, FsError> {
    match read_blocks(io, address, count) {
        Err(FsError::Device(_)) => {}
        read => return Ok(read?.into_iter().map(Ok).collect()),
    }
    // Which one it is shows when each is read alone.
    let mut unreadable = 0;
    let mut read = |address| match read_blocks(io, address, 1) {
        Ok(mut block) => Ok(Ok(block.swap_remove(0))),
        Err(FsError::Device(error)) if unreadable < UNREADABLE_MAX => {
            tracing::warn!(block = address, %error, "a block of metadata cannot be read");
            unreadable += 1;
            Ok(Err(Corrupt::Field { address, what: "the device cannot read it" }))
        }
        Err(error) => Err(error),
    };
    (address..address + count).map(&mut read).collect()
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

/// Writes one block, durably.
pub(crate) fn write_block(io: &Io, block: &Block, address: u64) -> Result<(), FsError> {
    let region = Region::allocate(BLOCK_SIZE)?;
    region.write_at(0, block.bytes())?;
    let span = Span { region, offset: 0, len: BLOCK_SIZE };
    Ok(io.run(vec![Request::write(Geometry::byte(address), vec![span], true)])?)
}

/// Writes blocks that follow one another, some at a time. They are durable after a flush.
pub(crate) fn write_run(io: &Io, mut address: u64, blocks: impl Iterator<Item = Block>) -> Result<(), FsError> {
    let region = Region::allocate(RUN * BLOCK_SIZE)?;
    let mut blocks = blocks.peekable();
    while blocks.peek().is_some() {
        let mut len = 0;
        for block in blocks.by_ref().take(RUN) {
            region.write_at(len, block.bytes())?;
            len += BLOCK_SIZE;
        }
        io.run([Request::write(Geometry::byte(address), [region.span(0..len)], false)])?;
        address += (len / BLOCK_SIZE) as u64;
    }
    Ok(())
}

/// Rounds up to whole blocks.
pub(crate) fn blocks_of(bytes: u64) -> u64 {
    bytes.div_ceil(BLOCK_SIZE as u64)
}
