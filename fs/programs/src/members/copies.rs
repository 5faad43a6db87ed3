//! The two superblocks of a member, in its first and its last block.
//!
//! A generation is written to the last blocks of all members, then to the first ones: so each
//! member has at least one whole superblock at any time, and a generation in a first block says
//! that all members know of it.

use std::os::unix::fs::FileExt;
use std::sync::Arc;

use gpunvme_blockdev::{BlockDevice, Error, Io, Region, Request};
use gpunvme_layout::geometry::SUPERBLOCK;
use gpunvme_layout::member::Generation;
use gpunvme_layout::{BLOCK_SIZE, Block, Corrupt, Geometry, Member, Superblock};

use crate::claim::reason;

/// What a member says of itself: in its first block and in its last one, where they are intact.
#[derive(Clone, Debug)]
pub(super) struct Copies {
    pub first: Option<Member>,
    pub last: Option<Member>,
}

impl Copies {
    /// The superblocks of a device, where it is a member.
    ///
    /// # Errors
    /// A text: it cannot be used at all, or is a member that this program cannot use.
    pub fn read(device: &Arc<dyn BlockDevice>) -> Result<Option<Copies>, String> {
        let text = |error: gpunvme_blockdev::Error| reason(device.name(), &error);
        let io = Io::inline(Arc::clone(device)).map_err(text)?;
        let region = Region::allocate(BLOCK_SIZE).map_err(text)?;
        Copies::find(blocks_of(device), |address| {
            let mut bytes = [0; BLOCK_SIZE];
            io.run([Request::read(Geometry::byte(address), [region.span(0..BLOCK_SIZE)])]).map_err(text)?;
            region.read_at(0, &mut bytes).map_err(text)?;
            Ok(Block::from_bytes(&bytes))
        })
    }

    /// The same of a file or block device that is open, and is perhaps another's.
    pub fn glance(file: &std::fs::File, len: u64) -> Result<Option<Copies>, String> {
        Copies::find(len / BLOCK_SIZE as u64, |address| {
            let mut bytes = [0; BLOCK_SIZE];
            file.read_exact_at(&mut bytes, Geometry::byte(address)).map_err(|error| error.to_string())?;
            Ok(Block::from_bytes(&bytes))
        })
    }

    fn find(blocks: u64, read: impl Fn(u64) -> Result<Block, String>) -> Result<Option<Copies>, String> {
        if blocks < 2 {
            return Ok(None);
        }
        let decode = |block: &Block, address| {
            Member::decode(block, address, blocks).map_err(|error| match error {
                Corrupt::Superblock(why) => why,
                error => error.to_string(),
            })
        };
        // What cannot be read is as good as damaged.
        let block = read(SUPERBLOCK).ok();
        let first = block.as_ref().map(|block| decode(block, SUPERBLOCK)).transpose()?.flatten();
        let last_of = |at: u64| read(at).ok().map(|block| decode(&block, at)).transpose().map(Option::flatten);
        if let Some(first) = first {
            // One that is damaged is written anew.
            let mut last = last_of(first.blocks - 1).unwrap_or(None);
            // Where the device became larger, a growth may have been cut short between the two.
            let behind = if blocks > first.blocks { last_of(blocks - 1).unwrap_or(None) } else { None };
            let number = |member: &Option<Member>| member.as_ref().map(|member| member.generation.number);
            let is_newer = number(&behind) > number(&last).max(Some(first.generation.number));
            if is_newer && behind.as_ref().is_some_and(|behind| behind.uuid == first.uuid) {
                last = behind;
            }
            return Ok(Some(Copies { first: Some(first), last }));
        }
        // The copy counts where the first was wiped or is damaged, and not where something else
        // has taken its place.
        let is_another = |block: &Block| {
            let is_wiped = block.bytes().iter().all(|byte| *byte == 0);
            Superblock::is_intact(block, SUPERBLOCK) || !(is_wiped || block.has_magic())
        };
        if block.as_ref().is_some_and(is_another) {
            return Ok(None);
        }
        let last = last_of(blocks - 1)?;
        Ok(last.map(|last| Copies { first: None, last: Some(last) }))
    }

    /// Whether both belong to one volume. A change of its UUID that was cut short is in one of the
    /// two superblocks of some members, so that one in common is enough.
    pub fn is_of_volume_of(&self, other: &Copies) -> bool {
        let ids =
            |copies: &Copies| [&copies.first, &copies.last].map(|member| member.as_ref().map(|m| (m.volume, m.volume_uuid())));
        let others = ids(other);
        ids(self).into_iter().flatten().any(|id| others.contains(&Some(id)))
    }

    /// The one of that generation, if there is one.
    pub fn of(&self, generation: Generation) -> Option<&Member> {
        [&self.first, &self.last].into_iter().flatten().find(|member| member.generation == generation)
    }

    /// One of them: they differ in nothing but the generation, and what that may have changed: the
    /// names, the size of the member, and how much of it the volume has.
    pub fn any(&self) -> &Member {
        self.first.as_ref().or(self.last.as_ref()).expect("one of them was found")
    }
}

/// Size of a device in blocks.
pub(super) fn blocks_of(device: &Arc<dyn BlockDevice>) -> u64 {
    device.geometry().len.get() / BLOCK_SIZE as u64
}

/// Why a member's superblock is not on the device.
pub(super) enum WriteFailed<'a> {
    /// It could not be written.
    Write(Error),
    /// This device failed to make it durable, and with it perhaps what was written before.
    Flush(&'a Arc<dyn BlockDevice>, Error),
}

impl WriteFailed<'_> {
    /// A text with the device's name.
    pub fn into_text(self) -> String {
        let (WriteFailed::Write(error) | WriteFailed::Flush(_, error)) = self;
        error.to_string()
    }
}

/// Writes the superblocks of members, durably: with `copy` 0 those in their first blocks, with 1
/// those in their last.
///
/// # Errors
/// A device failed.
pub(super) fn write_all<'a>(
    mut members: impl Iterator<Item = (&'a Arc<dyn BlockDevice>, &'a Member)>,
    copy: usize,
) -> Result<(), WriteFailed<'a>> {
    members.try_for_each(|(device, member)| {
        let io = write(device, member, copy).map_err(WriteFailed::Write)?;
        io.run([Request::flush()]).map_err(|error| WriteFailed::Flush(device, error))
    })
}

fn write(device: &Arc<dyn BlockDevice>, member: &Member, copy: usize) -> gpunvme_blockdev::Result<Arc<Io>> {
    let address = member.addresses()[copy];
    let region = Region::allocate(BLOCK_SIZE)?;
    region.write_at(0, member.encode(address).bytes())?;
    let io = Io::inline(Arc::clone(device))?;
    io.run([Request::write(Geometry::byte(address), [region.span(0..BLOCK_SIZE)], false)])?;
    Ok(io)
}
