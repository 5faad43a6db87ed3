//! Making a new volume, and recognizing one.

use std::sync::Arc;

use gpunvme_blockdev::{BlockDevice, Io, Region, Request, Span};
use gpunvme_layout::block::BLOCK_SIZE;
use gpunvme_layout::geometry::{CHUNK_BLOCKS, TOTAL_BLOCKS_MAX, TOTAL_BLOCKS_MIN};
use gpunvme_layout::group::{self, ChunkKind, Descriptor};
use gpunvme_layout::item::FileType;
use gpunvme_layout::key::INO_ROOT;
use gpunvme_layout::superblock::Names;
use gpunvme_layout::{Anchor, Block, BlockKind, Geometry, Inode, Key, State, Superblock, Timestamp, node};

use super::io::{read_blocks, read_superblock};
use super::journal::read_anchors;
use crate::error::FsError;

/// Blocks that are read, or written, at once where many follow one another.
const PIECE: u64 = 256;

/// Options of a new volume.
#[derive(Debug, Clone)]
pub struct FormatOptions {
    /// Label, at most 64 bytes of UTF-8.
    pub label: String,
    /// UUID of the filesystem.
    pub uuid: [u8; 16],
    /// Random key of the hash that orders names.
    pub hash_key: [u8; 16],
    /// Time of creation.
    pub now: Timestamp,
    /// Owner of the root directory: user and group.
    pub owner: (u32, u32),
}

/// Result of making a volume.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FormatReport {
    /// Its superblock.
    pub superblock: Superblock,
    /// Its layout.
    pub geometry: Geometry,
    /// Bytes that were written.
    pub written: u64,
}

/// Makes a new volume on a device; the device's former content is lost.
///
/// # Errors
/// The device is too small, or fails; the label is too long.
pub fn format(device: &Arc<dyn BlockDevice>, options: &FormatOptions) -> Result<FormatReport, FsError> {
    let io = Io::inline(device.clone())?;
    let total_blocks = (device.geometry().len.get() / BLOCK_SIZE as u64).min(TOTAL_BLOCKS_MAX);
    if total_blocks < TOTAL_BLOCKS_MIN {
        let (have, least) = (device.geometry().len.get(), TOTAL_BLOCKS_MIN * BLOCK_SIZE as u64);
        let message = format!("the device has {have} bytes; a filesystem needs at least {least}");
        return Err(gpunvme_layout::Corrupt::Superblock(message).into());
    }
    if options.label.len() > gpunvme_layout::superblock::LABEL_MAX {
        return Err(FsError::Invalid("the label has more than 64 bytes"));
    }
    let superblock = Superblock {
        uuid: options.uuid,
        names: Names { label: options.label.clone(), changed_uuid: None },
        total_blocks,
        grown: Vec::new(),
        journal_blocks: Geometry::default_journal_blocks(total_blocks),
        hash_key: options.hash_key,
        created: options.now,
        unknown_ro_compat: 0,
        replaced_names: false,
    };
    let geometry = superblock.geometry();
    let mut writer = Writer { io: &io, written: 0 };

    // From the end backwards: until the first superblock is there, nothing is; and what was there
    // before is not any more.
    writer.write(&[Block::from_bytes(&[0; BLOCK_SIZE])], Superblock::ADDRESS)?;
    writer.flush()?;
    // An earlier volume with the same UUID may have left transactions; to a check that goes by the
    // journal alone they are as good as ours.
    writer.written += erase(&io, geometry.journal, geometry.journal_blocks)?;
    let first_node = geometry.data;
    let uuid = &options.uuid;
    for (address, groups) in geometry.descriptor_blocks() {
        let mut block = group::new_descriptors(&geometry, address, groups.clone(), uuid);
        if groups.start == 0 {
            let mut descriptor = Descriptor::empty(&geometry, 0);
            descriptor.initialized = true;
            descriptor.free_chunks -= 1;
            descriptor.free_blocks -= CHUNK_BLOCKS as u16;
            descriptor.free_metadata = CHUNK_BLOCKS as u16 - 1;
            descriptor.store(&mut block, 0);
        }
        block.seal(0);
        writer.write(&[block], address)?;
    }
    let mut bitmap = group::new_bitmap(&geometry, 0, uuid);
    group::set_kind(&mut bitmap, 0, ChunkKind::Metadata);
    group::set(&mut bitmap, 0, 1, true);
    bitmap.seal(0);
    writer.write(&[bitmap], geometry.bitmap(0))?;

    let mut root = Block::new(BlockKind::Node, first_node, uuid);
    node::init(&mut root, 0);
    node::leaf_insert(&mut root, 0, Key::inode(INO_ROOT), &root_directory(options).encode());
    root.seal(0);
    writer.write(&[root], first_node)?;

    let state = State {
        root: first_node,
        level: 0,
        next_ino: INO_ROOT + 1,
        inodes: 1,
        free_blocks: geometry.data_blocks() - CHUNK_BLOCKS,
        free_chunks: geometry.chunks - 1,
        regions: 0,
    };
    let mut state = state.encode(uuid);
    state.seal(0);
    writer.write(&[state], gpunvme_layout::geometry::STATE)?;
    // Sequences begin anywhere, so that what an earlier volume with the same UUID left elsewhere
    // does not follow on these.
    let first = u64::from_le_bytes(*options.hash_key.first_chunk().expect("it has 16 bytes")) >> 4;
    for generation in [1, 2] {
        let anchor = Anchor { generation, tail: 0, sequence: first.max(1), clean: true };
        writer.write(&[anchor.encode(uuid)], anchor.address())?;
    }
    writer.flush()?;
    for address in geometry.superblocks().into_iter().rev() {
        writer.write(&[superblock.encode(address)], address)?;
    }
    writer.flush()?;
    Ok(FormatReport { written: writer.written, superblock, geometry })
}

/// The superblock of the volume on a device, if there is one that can be read.
///
/// # Errors
/// The device fails.
pub fn probe(device: &Arc<dyn BlockDevice>) -> Result<Option<Superblock>, FsError> {
    let io = Io::inline(device.clone())?;
    match read_superblock(&io) {
        Ok(superblock) => Ok(Some(superblock)),
        Err(FsError::Corrupt(_)) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Whether the volume on a device was closed, so that its journal is empty.
///
/// # Errors
/// There is no volume, or it is damaged, or the device failed.
pub fn is_clean(device: &Arc<dyn BlockDevice>) -> Result<bool, FsError> {
    let io = Io::inline(device.clone())?;
    let anchors = read_anchors(&io, &read_superblock(&io)?)?;
    Ok(Anchor::choose(anchors)?.clean)
}

fn root_directory(options: &FormatOptions) -> Inode {
    Inode {
        mode: FileType::Directory.mode() | 0o755,
        nlink: 2,
        uid: options.owner.0,
        gid: options.owner.1,
        rdev: 0,
        size: 0,
        blocks: 0,
        parent: INO_ROOT,
        atime: options.now,
        mtime: options.now,
        ctime: options.now,
        btime: options.now,
    }
}

struct Writer<'a> {
    io: &'a Io,
    written: u64,
}

impl Writer<'_> {
    fn write(&mut self, blocks: &[Block], address: u64) -> Result<(), FsError> {
        let len = blocks.len() * BLOCK_SIZE;
        let region = Region::allocate(len)?;
        for (i, block) in blocks.iter().enumerate() {
            region.write_at(i * BLOCK_SIZE, block.bytes())?;
        }
        self.io.run(vec![Request::write(Geometry::byte(address), vec![Span { region, offset: 0, len }], false)])?;
        self.written += len as u64;
        Ok(())
    }

    fn flush(&self) -> Result<(), FsError> {
        Ok(self.io.run(vec![Request::flush()])?)
    }
}

/// Makes blocks zeros where they are not. Returns how many bytes that took.
///
/// # Errors
/// The device fails.
pub(crate) fn erase(io: &Io, start: u64, count: u64) -> Result<u64, FsError> {
    let zeroes = vec![Block::from_bytes(&[0; BLOCK_SIZE]); PIECE as usize];
    let mut writer = Writer { io, written: 0 };
    for from in (start..start + count).step_by(PIECE as usize) {
        let piece = PIECE.min(start + count - from);
        let fresh = |block: &Block| block.bytes().iter().all(|byte| *byte == 0);
        // What cannot be read may be written all the same.
        if !read_blocks(io, from, piece).is_ok_and(|blocks| blocks.iter().all(fresh)) {
            writer.write(&zeroes[..piece as usize], from)?;
        }
    }
    Ok(writer.written)
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::volume::{Volume, VolumeOptions};

    /// A new volume in memory.
    pub fn volume(bytes: u64) -> Volume {
        let device: Arc<dyn BlockDevice> = gpunvme_blockdev_testing::MemoryDevice::new(bytes);
        let now = Timestamp { seconds: 1, nanoseconds: 0 };
        let options = FormatOptions { label: String::new(), uuid: [7; 16], hash_key: [9; 16], now, owner: (0, 0) };
        format(&device, &options).unwrap();
        Volume::open(Io::inline(device).unwrap(), VolumeOptions { read_only: false, cache: 1 << 20, discard: false }).unwrap()
    }
}
