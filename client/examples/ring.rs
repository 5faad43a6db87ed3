//! Reads a file of a gpunvme mount in blocks of 4 KiB, 64 of them in flight from one thread, and
//! adds their bytes:
//!
//!     cargo run --example ring -- /data/file

use gpunvme::{Buffer, Completed, File, Operation, Ring, Wait};
use std::error::Error;

/// Bytes of a block.
const BLOCK: u64 = 4096;
/// Blocks in flight at once, each with a place of its own in the buffer.
const DEPTH: u64 = 64;

fn main() -> Result<(), Box<dyn Error>> {
    let path = std::env::args().nth(1).ok_or("usage: ring FILE")?;
    let file = File::open(path)?;
    let mount = file.mount()?;
    let buffer = mount.register(Buffer::memfd((DEPTH * BLOCK) as usize)?)?.share();
    let mut ring = Ring::new(&mount, DEPTH as u32)?;
    let attached = ring.attach(&file)?;

    let blocks = file.size()?.div_ceil(BLOCK);
    let (mut next, mut bytes, mut sum) = (0, 0, 0u64);
    let mut free: Vec<u64> = (0..DEPTH).collect();
    let mut done = Vec::new();
    while next < blocks || ring.in_flight() > 0 {
        while next < blocks
            && let Some(place) = free.pop()
        {
            ring.push(&Operation::read(&attached, next * BLOCK, &buffer, place * BLOCK, BLOCK).tagged(place))?;
            next += 1;
        }
        ring.complete(Wait::Forever, &mut done)?;
        for Completed { user_data: place, result, .. } in done.drain(..) {
            let mut block = vec![0; result?.bytes() as usize];
            buffer.copy_out((place * BLOCK) as usize, &mut block);
            bytes += block.len();
            sum += block.iter().map(|&byte| u64::from(byte)).sum::<u64>();
            free.push(place);
        }
    }
    println!("{bytes} bytes, sum {sum}");
    Ok(())
}
