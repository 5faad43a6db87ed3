//! QEMU's blklogwrites, in the format of the kernel's dm-log-writes
//! (Documentation/admin-guide/device-mapper/log-writes.rst): a superblock, then for each write,
//! flush and discard a sector that describes it, and its data.
//!
//! QEMU's controller neither honours nor records FUA. The engine uses it for writes to the journal
//! only, so these count as durable from when they are done. Any write may reach the medium early,
//! so that this blames no correct engine; whether the engine asks for FUA where it must is for the
//! engine's own crash tests.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use gpunvme_blockdev_testing::{Event, Image, Log, MemoryDevice};
use gpunvme_layout::BLOCK_SIZE;

const MAGIC: u64 = 0x006a_7366_7773_6872;
const SECTOR: u64 = 512;
const FLUSH: u64 = 1;
const DISCARD: u64 = 4;
/// QEMU writes entries in the order of their places, but many at a time: the last ones may be there
/// in part when it is killed.
const LAST_ENTRIES: usize = 64;

/// Reads the log of a device of `len` bytes that began with zeroes.
///
/// # Errors
/// It cannot be read, is no such log, or holds no volume.
pub fn read(path: &Path, len: u64) -> Result<Log, Box<dyn std::error::Error>> {
    let file = File::open(path)?;
    let mut events = Vec::new();
    let mut place = SECTOR;
    let header: [u64; 4] = fields(&file, 0)?;
    if header[0] != MAGIC || header[3] & 0xffff_ffff != SECTOR {
        return Err("this is no log of writes with sectors of 512 bytes".into());
    }
    // The superblock's count is stale when QEMU was killed.
    let end = file.metadata()?.len();
    while place + SECTOR <= end {
        let [sector, sectors, flags, _] = fields(&file, place)?;
        if sectors == 0 && flags == 0 {
            break;
        }
        place += SECTOR;
        let (offset, bytes) = (sector * SECTOR, sectors * SECTOR);
        if flags & DISCARD != 0 {
            events.push(Event::Discard { offset, len: bytes });
            continue;
        }
        if bytes > 0 {
            if place + bytes > end {
                break;
            }
            let mut data = vec![0; bytes as usize];
            file.read_exact_at(&mut data, place)?;
            events.push(Event::Write { offset, data: data.into(), fua: false });
            place += bytes;
        }
        if flags & FLUSH != 0 {
            events.push(Event::Flush(0..u64::MAX));
        }
    }
    events.truncate(events.len().saturating_sub(LAST_ENTRIES));
    let journal = journal(&events, len)?;
    for event in &mut events {
        if let Event::Write { offset, fua, .. } = event {
            *fua = journal.contains(offset);
        }
    }
    Ok(Log::new(Image::new(len), events))
}

fn fields(file: &File, place: u64) -> io::Result<[u64; 4]> {
    let mut bytes = [0; 32];
    file.read_exact_at(&mut bytes, place)?;
    Ok(std::array::from_fn(|field| u64::from_le_bytes(bytes[field * 8..][..8].try_into().expect("8 bytes"))))
}

/// The bytes of the device that are the volume's journal.
fn journal(events: &[Event], len: u64) -> Result<std::ops::Range<u64>, Box<dyn std::error::Error>> {
    let mut image = Image::new(len);
    for event in events {
        if let Event::Write { offset, data, .. } = event {
            image.write_at(*offset, data);
        }
    }
    let device: std::sync::Arc<dyn gpunvme_blockdev::BlockDevice> = MemoryDevice::from_image(image);
    let superblock = gpunvme_engine::probe(&device)?.ok_or("the log holds no volume")?;
    let geometry = superblock.geometry();
    let start = geometry.journal * BLOCK_SIZE as u64;
    Ok(start..start + geometry.journal_blocks * BLOCK_SIZE as u64)
}
