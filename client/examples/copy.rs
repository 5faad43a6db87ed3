//! Copies a file of a gpunvme mount to another, through a registered buffer:
//!
//!     cargo run --example copy -- /data/from /data/to

use gpunvme::{Buffer, File, Segment};
use std::error::Error;

/// Bytes of a part.
const PART: u64 = 16 << 20;

fn main() -> Result<(), Box<dyn Error>> {
    let [from, to] = std::env::args().skip(1).collect::<Vec<_>>().try_into().map_err(|_| "usage: copy FROM TO")?;
    let (from, to) = (File::open(from)?, File::create(to)?);
    let mut buffer = from.mount()?.register(Buffer::memfd(PART as usize)?)?;
    let mut at = 0;
    loop {
        let part = Segment { file_offset: at, buffer_offset: 0, len: PART };
        // Fewer bytes than were asked for: the file ended.
        let len = from.read(&mut buffer, &[part])?.bytes();
        to.write(&buffer, &[Segment { len, ..part }])?;
        at += len;
        if len < PART {
            break;
        }
    }
    to.set_size(at)?;
    println!("{at} bytes by way of {} memory", buffer.route());
    Ok(())
}
