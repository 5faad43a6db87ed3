//! What our NVMe driver costs: time and instructions of a 4 KiB request on one core, polling,
//! against a software controller that keeps nothing. Controller and driver run in this one thread,
//! so that both are in each number: it is an upper bound of what the driver costs.
//!
//! ```text
//! cargo run --release -p gpunvme-blockdev --example driver_cost -- [SECONDS PER ROW]
//! ```
use std::time::{Duration, Instant};

use gpunvme_blockdev::{BlockDevice, OpenMode, Queue, Region, Request, Result, Wait, open};

const BLOCK: usize = 4096;
const DEVICE: &str = "sim:cost,null=8G,inline=on,lba=4096,completion=poll,queues=1";

fn main() -> std::result::Result<(), Box<dyn std::error::Error>> {
    let seconds = std::env::args().nth(1).map_or(Ok(2.0), |seconds| seconds.parse())?;
    let device = open(DEVICE, OpenMode::ReadWrite)?;
    let queue = device.open_queue()?;
    let mut counter = instructions::Counter::new();
    if let Err(error) = &counter {
        println!("instructions cannot be counted here: {error}");
    }
    println!("{DEVICE}");
    println!("{:>6} {:>6} {:>10} {:>14} {:>10}", "", "depth", "ns/request", "instructions", "k req/s");
    for (write, depth) in [(false, 1), (false, 32), (false, 128), (true, 1), (true, 32), (true, 128)] {
        let before = counter.as_mut().map_or(0, |counter| counter.read());
        let (requests, elapsed) = measure(&*device, &*queue, write, depth, Duration::from_secs_f64(seconds))?;
        let counted = counter.as_mut().map(|counter| (counter.read() - before) / requests);
        println!(
            "{:>6} {depth:>6} {:>10.0} {:>14} {:>10.0}",
            if write { "write" } else { "read" },
            elapsed.as_secs_f64() / requests as f64 * 1e9,
            counted.map_or("-".into(), |counted| counted.to_string()),
            requests as f64 / elapsed.as_secs_f64() * 1e-3,
        );
    }
    Ok(())
}

/// Keeps `depth` requests in flight, submitted as one batch whenever all of the last are over.
fn measure(device: &dyn BlockDevice, queue: &dyn Queue, write: bool, depth: usize, time: Duration) -> Result<(u64, Duration)> {
    let region = Region::allocate(BLOCK * depth)?;
    device.map(&region)?;
    let (mut requests, mut completions) = (Vec::new(), Vec::new());
    let mut done = 0u64;
    let start = Instant::now();
    while start.elapsed() < time {
        for _ in 0..64usize.div_ceil(depth) {
            for slot in 0..depth {
                let offset = (done + slot as u64) * BLOCK as u64 % device.geometry().len.get();
                let spans = vec![region.span(slot * BLOCK..(slot + 1) * BLOCK)];
                requests.push(if write { Request::write(offset, spans, false) } else { Request::read(offset, spans) });
            }
            queue.submit(&mut requests);
            while completions.len() < depth {
                queue.complete(Wait::Forever, &mut completions)?;
            }
            completions.drain(..).try_for_each(|completion| completion.result)?;
            done += depth as u64;
        }
    }
    let elapsed = start.elapsed();
    device.unmap(&region);
    Ok((done, elapsed))
}

/// Instructions of this thread in user space (perf_event_open(2)).
mod instructions {
    use std::fs::File;
    use std::io::{Error, Read, Result};
    use std::os::fd::FromRawFd;

    pub struct Counter(File);

    impl Counter {
        pub fn new() -> Result<Self> {
            // struct perf_event_attr of its first version: type, size, config, and the flags
            // behind read_format.
            const HARDWARE: u32 = 0;
            const SIZE: u32 = 64;
            const INSTRUCTIONS: u64 = 1;
            const EXCLUDE_KERNEL_AND_HYPERVISOR: u64 = 1 << 5 | 1 << 6;
            let attributes: [u64; 8] =
                [u64::from(SIZE) << 32 | u64::from(HARDWARE), INSTRUCTIONS, 0, 0, 0, EXCLUDE_KERNEL_AND_HYPERVISOR, 0, 0];
            // SAFETY: the kernel reads the 64 bytes of the structure, whose size is in it; the
            // other arguments are numbers.
            let fd = unsafe { libc::syscall(libc::SYS_perf_event_open, &attributes, 0, -1, -1, 0) };
            if fd < 0 {
                return Err(Error::last_os_error());
            }
            // SAFETY: the kernel just made this descriptor for us.
            Ok(Self(unsafe { File::from_raw_fd(fd as i32) }))
        }

        pub fn read(&mut self) -> u64 {
            let mut bytes = [0; 8];
            self.0.read_exact(&mut bytes).expect("a counter can be read");
            u64::from_ne_bytes(bytes)
        }
    }
}
