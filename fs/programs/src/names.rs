//! Label and UUID of a volume on one device: reading them, and changing them so that a power cut at
//! any point leaves the old ones or the new ones.

use std::str::FromStr;
use std::sync::Arc;

use gpunvme_blockdev::{BlockDevice, Io, Region, Request};
use gpunvme_layout::features::READ_ONLY_COMPATIBLE;
use gpunvme_layout::superblock::{LABEL_MAX, Names};
use gpunvme_layout::{BLOCK_SIZE, Block, Corrupt, Geometry, Superblock, Uuid};

use crate::claim::reason;

/// A label from a command line.
///
/// # Errors
/// A text: it is too long, or has control characters.
pub fn label(text: &str) -> Result<String, String> {
    if text.len() > LABEL_MAX {
        Err(format!("{} bytes are too long: at most {LABEL_MAX} fit", text.len()))
    } else if text.chars().any(char::is_control) {
        Err("control characters would garble every listing".to_owned())
    } else {
        Ok(text.to_owned())
    }
}

/// A UUID for a volume, as a command line asks for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NewUuid {
    /// Another one.
    Random,
    /// The one that mkfs gave.
    Restore,
    /// This one.
    Given(uuid::Uuid),
}

impl NewUuid {
    /// What a volume stores that `original` was given by mkfs.
    pub fn stored(self, original: Uuid) -> Option<Uuid> {
        let uuid = match self {
            NewUuid::Restore => None,
            NewUuid::Random => Some(uuid::Uuid::new_v4().into_bytes()),
            NewUuid::Given(uuid) => Some(uuid.into_bytes()),
        };
        uuid.filter(|uuid| *uuid != original)
    }
}

impl FromStr for NewUuid {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "random" => Ok(NewUuid::Random),
            "restore" => Ok(NewUuid::Restore),
            text => uuid(text, "random, restore").map(NewUuid::Given),
        }
    }
}

/// A UUID that a volume may have, given in place of these words.
///
/// # Errors
/// A text: it is none, or of zeros.
pub fn uuid(text: &str, words: &str) -> Result<uuid::Uuid, String> {
    match text.parse::<uuid::Uuid>() {
        Ok(uuid) if uuid.is_nil() => Err("a UUID of zeros tells no volume from another".to_owned()),
        Ok(uuid) => Ok(uuid),
        Err(error) => Err(format!("{words} or a UUID is expected: {error}")),
    }
}

/// The superblocks of a volume that lies on one device, or on several that are open as one.
pub struct Superblocks {
    device: Arc<dyn BlockDevice>,
    io: Arc<Io>,
    /// The one that counts, at the address of the first.
    block: Block,
    superblock: Superblock,
    /// The first one is intact.
    first: bool,
}

impl Superblocks {
    /// Reads the superblock that counts for a mount, too: the first, else the one in the last block
    /// of the device.
    ///
    /// # Errors
    /// A text: there is no volume, or one that this program cannot write, or the device failed.
    pub fn read(device: &Arc<dyn BlockDevice>) -> Result<Superblocks, String> {
        let device_blocks = device.geometry().len.get() / BLOCK_SIZE as u64;
        let io = Io::inline(Arc::clone(device)).map_err(|error| reason(device.name(), &error))?;
        let decode = |address| {
            let block = read(&io, address).map_err(|error| reason(device.name(), &error))?;
            let superblock = Superblock::decode(&block, address, device_blocks).map_err(|error| match error {
                Corrupt::Superblock(why) => (why, Superblock::is_intact(&block, address)),
                error => (error.to_string(), false),
            });
            Ok::<_, String>(superblock.map(|superblock| (superblock, block)))
        };
        if device_blocks == 0 {
            return Err(format!("{} bytes are too few for a volume", device.geometry().len.get()));
        }
        let (first, (superblock, block)) = match decode(Superblock::ADDRESS)? {
            Ok(found) => (true, found),
            // An intact superblock that says something else is not overruled by a copy.
            Err((why, true)) => return Err(why),
            Err((why, false)) => (false, decode(device_blocks - 1)?.map_err(|_| why)?),
        };
        if superblock.unknown_ro_compat != 0 {
            let names = READ_ONLY_COMPATIBLE.names(superblock.unknown_ro_compat);
            return Err(format!("uses features that this program does not know, and must not write: {names}; use a newer one"));
        }
        Ok(Superblocks { device: Arc::clone(device), io, block: block.moved_to(Superblock::ADDRESS), superblock, first })
    }

    /// The superblock that counts.
    pub fn superblock(&self) -> &Superblock {
        &self.superblock
    }

    /// Gives the volume other names, durably.
    ///
    /// The first superblock is the one that counts and is written last: until it is, the volume has
    /// the old names, and while it is, the others, which have the new ones, are whole.
    ///
    /// # Errors
    /// A text: the device failed. The volume has the old names or the new ones then.
    pub fn rename(&mut self, names: &Names) -> Result<(), String> {
        if !self.first {
            self.write(&self.block)?; // else nothing would count while the others are written
            self.first = true;
        }
        let renamed = Superblock::renamed(&self.block, names);
        for address in self.superblock.geometry().superblocks().into_iter().rev() {
            self.write(&renamed.moved_to(address))?;
        }
        self.superblock.names = names.clone();
        self.block = renamed;
        Ok(())
    }

    /// Writes a superblock where it belongs, durably.
    fn write(&self, block: &Block) -> Result<(), String> {
        let write = || -> gpunvme_blockdev::Result<()> {
            let region = Region::allocate(BLOCK_SIZE)?;
            region.write_at(0, block.bytes())?;
            self.io.run([Request::write(Geometry::byte(block.address()), [region.span(0..BLOCK_SIZE)], false)])?;
            self.io.run([Request::flush()])
        };
        write().map_err(|error| reason(self.device.name(), &error))
    }
}

fn read(io: &Io, address: u64) -> gpunvme_blockdev::Result<Block> {
    let region = Region::allocate(BLOCK_SIZE)?;
    io.run([Request::read(Geometry::byte(address), [region.span(0..BLOCK_SIZE)])])?;
    let mut bytes = [0; BLOCK_SIZE];
    region.read_at(0, &mut bytes)?;
    Ok(Block::from_bytes(&bytes))
}
