//! How fast a device reads through the executor: random 4 KiB blocks and large pieces, few and
//! many in flight. Reads only.
//!
//! ```text
//! cargo run --release -p gpunvme-blockdev --example device_speed -- DEVICE [SECONDS PER ROW]
//! ```
use std::sync::Arc;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use gpunvme_blockdev::{Io, OpenMode, Region, Request, Result, open};

/// Batches of `batch` requests each are kept in flight, `depth` requests in all, from one thread.
struct Row {
    size: usize,
    depth: usize,
    batch: usize,
}

fn main() -> std::result::Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let device = arguments.next().ok_or("which DEVICE?")?;
    let time = Duration::from_secs_f64(arguments.next().map_or(Ok(2.0), |seconds| seconds.parse())?);
    let device = open(&device, OpenMode::ReadOnly)?;
    println!("{}: {} MiB", device.name(), device.geometry().len.get() >> 20);
    println!("{:>10} {:>6} {:>6} {:>12} {:>10} {:>8}", "bytes", "depth", "batch", "ns/request", "k req/s", "GB/s");
    let io = Io::threaded(device, 1)?;
    for row in [
        Row { size: 4 << 10, depth: 1, batch: 1 },
        Row { size: 4 << 10, depth: 32, batch: 1 },
        Row { size: 4 << 10, depth: 32, batch: 8 },
        Row { size: 4 << 10, depth: 32, batch: 32 },
        Row { size: 4 << 10, depth: 256, batch: 32 },
        Row { size: 1 << 20, depth: 1, batch: 1 },
        Row { size: 1 << 20, depth: 16, batch: 1 },
        Row { size: 32 << 20, depth: 1, batch: 1 },
    ] {
        let (requests, elapsed) = measure(&io, &row, time)?;
        let seconds = elapsed.as_secs_f64() / requests as f64;
        println!(
            "{:>10} {:>6} {:>6} {:>12.0} {:>10.1} {:>8.2}",
            row.size,
            row.depth,
            row.batch,
            seconds * 1e9,
            1e-3 / seconds,
            row.size as f64 / seconds * 1e-9,
        );
    }
    Ok(())
}

fn measure(io: &Io, row: &Row, time: Duration) -> Result<(usize, Duration)> {
    let places = (io.device().geometry().len.get() / row.size as u64).max(1);
    let region = Region::allocate(row.size * row.depth)?;
    let (ended, ends) = mpsc::channel();
    let mut random = 0x9e37_79b9_7f4a_7c15u64;
    let mut submit = |slot: usize| {
        let batch = (0..row.batch).map(|n| {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            let start = (slot * row.batch + n) * row.size;
            Request::read(random % places * row.size as u64, [region.span(start..start + row.size)])
        });
        let ended = ended.clone();
        io.submit(batch, move |result| {
            let _ = ended.send((slot, result)); // the receiver is gone when the time is over
        });
    };
    let start = Instant::now();
    let slots = row.depth / row.batch;
    (0..slots).for_each(&mut submit);
    let mut batches = 0;
    while start.elapsed() < time {
        let (slot, result) = ends.recv().expect("every batch ends");
        result?;
        batches += 1;
        submit(slot);
    }
    let elapsed = start.elapsed();
    for (_, result) in ends.iter().take(slots) {
        result?;
    }
    debug_assert_eq!(Arc::strong_count(&region), 1);
    Ok((batches * row.batch, elapsed))
}
