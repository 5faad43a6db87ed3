//! The workload: files 1, 2, 3, ..., each written under another name, fsynced, renamed, and its
//! directory fsynced, while the file [`KEPT`] numbers back is removed. One after the other, so that
//! the first write of a file's content shows, in a log of the device, that all the files before it
//! had been promised.

use std::fs::{self, File};
use std::io::Write;
use std::path::Path;

/// Files kept at a time.
pub const KEPT: u64 = 12;
/// What sectors of content begin with.
const MAGIC: &[u8; 8] = b"powercut";
/// Bytes of a sector.
pub const SECTOR: usize = 512;

/// Works until it is killed.
///
/// # Panics
/// If the filesystem refuses something.
pub fn run(dir: &Path) -> ! {
    let directory = File::open(dir).expect("the directory");
    for number in 1u64.. {
        if let Some(old) = number.checked_sub(KEPT).filter(|old| *old > 0) {
            fs::remove_file(dir.join(final_name(old))).expect("to remove an old file");
        }
        let new = dir.join(first_name(number));
        let mut file = File::create(&new).expect("a new file");
        let content = content(number);
        // In pieces, so that a file is several requests.
        for piece in content.chunks(100_000) {
            file.write_all(piece).expect("to write");
        }
        file.sync_all().expect("to fsync");
        fs::rename(&new, dir.join(final_name(number))).expect("to rename");
        directory.sync_all().expect("to fsync the directory");
        println!("{number}");
    }
    unreachable!("numbers do not end")
}

/// What a file is called until its content is durable.
pub fn first_name(number: u64) -> String {
    format!("{number}.new")
}

/// What a file is called from then on.
pub fn final_name(number: u64) -> String {
    format!("{number}")
}

/// Content of a file, whole sectors but for the last.
pub fn content(number: u64) -> Vec<u8> {
    let len = (number * 7919 % 3000 * 100 + 1) as usize;
    let mut content: Vec<u8> = (0..len.div_ceil(SECTOR) as u64).flat_map(|sector| sector_of(number, sector)).collect();
    content.truncate(len);
    content
}

fn sector_of(number: u64, sector: u64) -> [u8; SECTOR] {
    let mut bytes = [0; SECTOR];
    bytes[..8].copy_from_slice(MAGIC);
    let mut word = number << 32 | sector;
    for field in bytes[8..].chunks_exact_mut(8) {
        field.copy_from_slice(&word.to_le_bytes());
        word = word.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29);
    }
    bytes
}

/// The highest number of a file of which the data holds a sector, 0 for none.
pub fn highest(data: &[u8]) -> u64 {
    let numbers = data.chunks_exact(SECTOR).filter(|sector| sector.starts_with(MAGIC)).map(|sector| {
        let word = sector[8..16].try_into().expect("8 bytes");
        u64::from_le_bytes(word) >> 32
    });
    numbers.max().unwrap_or(0)
}
