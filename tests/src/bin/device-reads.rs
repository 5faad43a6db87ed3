//! What devices give together: io_uring with O_DIRECT reads them into host memory, by a thread for
//! each. `scripts/bench-stripe` runs it beside a volume that lies on them.

#![forbid(unsafe_code)]

use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Parser;
use gpunvme_tests::bare::{self, Work};

/// Reads devices at once, each from its beginning on, and prints GB/s of all together.
#[derive(Parser)]
struct Arguments {
    #[arg(required = true)]
    devices: Vec<PathBuf>,
    /// Bytes of a read.
    #[arg(long, default_value_t = 256 << 10)]
    size: u64,
    /// Reads in flight on each device.
    #[arg(long, default_value_t = 16)]
    depth: usize,
    /// Bytes of each device, from the beginning on, which are read again and again.
    #[arg(long)]
    len: Option<u64>,
    #[arg(long, default_value_t = 1.0)]
    seconds: f64,
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let Arguments { devices, size, depth, len, seconds } = Arguments::parse();
    let work = Work { write: false, size, random: false, threads: 1, depth, len };
    let paths: Vec<&Path> = devices.iter().map(PathBuf::as_path).collect();
    let rate = bare::measure(&paths, &work, Duration::from_secs_f64(seconds))?;
    println!("{:.1}", rate * size as f64 / 1e9);
    Ok(())
}
