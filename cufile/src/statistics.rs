//! What was done, counted: by route since the process began, and as `cuFileGetStats` tells it,
//! since the counters were last reset.
//!
//! Locks: `COUNTERS`, for moments.

use crate::abi::{Counter, GPUS, GpuStatistics, Level1, PerGpu, Sizes};
use crate::failure::{Code, Result};
use crate::files::Direction;
use crate::fork;
use crate::memory;
use crate::transfer::Range;
use gpunvme::{Moved, Transfer};
use parking_lot::Mutex;
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};
use std::time::Instant;

/// What a request did.
#[derive(Clone, Copy, Debug)]
pub struct Done {
    pub bytes: usize,
    pub way: Way,
}

impl Done {
    /// What gpunvme's transfer did.
    pub fn on_mount(done: &Transfer) -> Done {
        Done { bytes: done.bytes() as usize, way: Way::Mount(done.moved) }
    }
}

/// Which way bytes went.
#[derive(Clone, Copy, Debug)]
pub enum Way {
    /// Between a gpunvme mount and memory that CUDA knows, by routes.
    Mount(Moved),
    /// Between a gpunvme mount and ordinary memory, by pread and pwrite.
    MountByCall,
    /// By NVIDIA's library.
    Real,
    /// By pread and pwrite, elsewhere.
    Plain,
}

/// Bytes since the process began, for the report.
pub struct Totals {
    pub p2p: AtomicU64,
    pub bounce: AtomicU64,
    pub cache: AtomicU64,
    pub host: AtomicU64,
    pub hole: AtomicU64,
    pub edge: AtomicU64,
    pub call: AtomicU64,
    pub real: AtomicU64,
    pub plain: AtomicU64,
    pub requests: AtomicU64,
    pub failed: AtomicU64,
}

/// Of reads, and of writes.
pub static TOTALS: [Totals; 2] = [const { Totals::new() }; 2];

impl Totals {
    const fn new() -> Totals {
        Totals {
            p2p: AtomicU64::new(0),
            bounce: AtomicU64::new(0),
            cache: AtomicU64::new(0),
            host: AtomicU64::new(0),
            hole: AtomicU64::new(0),
            edge: AtomicU64::new(0),
            call: AtomicU64::new(0),
            real: AtomicU64::new(0),
            plain: AtomicU64::new(0),
            requests: AtomicU64::new(0),
            failed: AtomicU64::new(0),
        }
    }

    fn add(&self, done: &Result<Done>) {
        let add = |counter: &AtomicU64, bytes: u64| {
            if bytes > 0 {
                counter.fetch_add(bytes, Ordering::Relaxed);
            }
        };
        add(&self.requests, 1);
        match done {
            Ok(Done { way: Way::Mount(moved), .. }) => {
                let Moved { p2p, bounce, cache, host, hole, edge } = *moved;
                add(&self.p2p, p2p);
                add(&self.bounce, bounce);
                add(&self.cache, cache);
                add(&self.host, host);
                add(&self.hole, hole);
                add(&self.edge, edge);
            }
            Ok(Done { way: Way::MountByCall, bytes }) => add(&self.call, *bytes as u64),
            Ok(Done { way: Way::Real, bytes }) => add(&self.real, *bytes as u64),
            Ok(Done { way: Way::Plain, bytes }) => add(&self.plain, *bytes as u64),
            Err(_) => add(&self.failed, 1),
        }
    }
}

/// The level at which counters are kept for `cuFileGetStats`: 0 for none, to 3.
static LEVEL: AtomicI32 = AtomicI32::new(0);

struct Counters {
    since: Instant,
    basic: Level1,
    sizes: Sizes,
    gpus: [GpuStatistics; GPUS],
}

static COUNTERS: Mutex<Option<Counters>> = Mutex::new(None);

fn with(use_them: impl FnOnce(&mut Counters)) {
    use_them(COUNTERS.lock().get_or_insert_with(|| Counters {
        since: Instant::now(),
        basic: Level1::default(),
        sizes: Sizes::default(),
        gpus: [GpuStatistics::default(); GPUS],
    }));
}

/// The level.
pub fn level() -> i32 {
    if fork::is_forked() { 0 } else { LEVEL.load(Ordering::Relaxed) }
}

/// Sets the level.
///
/// # Errors
/// [`Code::InvalidValue`].
pub fn set_level(level: i32) -> Result<()> {
    if !(0..=3).contains(&level) {
        return Err(Code::InvalidValue.into());
    }
    LEVEL.store(level, Ordering::Relaxed);
    Ok(())
}

/// Sets all counters of `cuFileGetStats` to zero.
pub fn reset() {
    COUNTERS.lock().take();
}

fn count<T>(counter: &mut Counter, result: &Result<T>) {
    if result.is_ok() { counter.ok += 1 } else { counter.failed += 1 }
}

/// A read or write is done, which began then.
pub fn record(direction: Direction, range: Range, started: Instant, done: &Result<Done>) {
    TOTALS[direction as usize].add(done);
    let level = level();
    if level == 0 {
        return;
    }
    let us = started.elapsed().as_micros() as u64;
    let bytes = done.as_ref().map_or(0, |done| done.bytes as u64);
    let gpu = if level < 3 { None } else { memory::gpu_of(range.address).filter(|&gpu| gpu < GPUS) };
    let size = (64 - ((range.len as u64).div_ceil(1024)).saturating_sub(1).leading_zeros() as usize).min(31);
    let unaligned = !(range.address | range.file_offset | range.len as u64).is_multiple_of(4096);
    with(|counters| {
        let basic = &mut counters.basic;
        match direction {
            Direction::Read => {
                count(&mut basic.read, done);
                basic.read_bytes += bytes;
                basic.read_sum_us += us;
                counters.sizes.read[size] += 1;
            }
            Direction::Write => {
                count(&mut basic.write, done);
                basic.write_bytes += bytes;
                basic.write_sum_us += us;
                counters.sizes.write[size] += 1;
            }
        }
        let Some(of) = gpu.map(|gpu| &mut counters.gpus[gpu]) else { return };
        let peer = matches!(done, Ok(Done { way: Way::Mount(moved), .. }) if moved.p2p > 0);
        let (p2p, posix) = (u64::from(peer), u64::from(!peer));
        match direction {
            Direction::Read => {
                (of.reads, of.read_bytes, of.read_us) = (of.reads + 1, of.read_bytes + bytes, of.read_us + us);
                (of.p2p_reads, of.posix_reads) = (of.p2p_reads + p2p, of.posix_reads + posix);
                of.unaligned_reads += u64::from(unaligned);
                of.failed_reads += u64::from(done.is_err());
            }
            Direction::Write => {
                (of.writes, of.write_bytes, of.write_us) = (of.writes + 1, of.write_bytes + bytes, of.write_us + us);
                (of.p2p_writes, of.posix_writes) = (of.p2p_writes + p2p, of.posix_writes + posix);
                of.unaligned_writes += u64::from(unaligned);
                of.failed_writes += u64::from(done.is_err());
            }
        }
    });
}

/// What else is counted.
#[derive(Clone, Copy)]
pub enum Event {
    HandleRegister,
    HandleDeregister,
    BufferDeregister,
    BatchSetup,
    BatchCancel,
    BatchDestroy,
}

/// Counts it.
pub fn event<T>(which: Event, result: &Result<T>) {
    if level() == 0 {
        return;
    }
    with(|Counters { basic, .. }| {
        let counter = match which {
            Event::HandleRegister => &mut basic.handle_register,
            Event::HandleDeregister => &mut basic.handle_deregister,
            Event::BufferDeregister => &mut basic.buffer_deregister,
            Event::BatchSetup => &mut basic.batch_setup,
            Event::BatchCancel => &mut basic.batch_cancel,
            Event::BatchDestroy => &mut basic.batch_destroy,
        };
        count(counter, result);
    });
}

/// Counts memory that was registered.
pub fn buffer(address: u64, len: u64, result: &Result<()>) {
    let level = level();
    if level == 0 {
        return;
    }
    let gpu = if level < 3 { None } else { memory::gpu_of(address).filter(|&gpu| gpu < GPUS) };
    with(|counters| {
        count(&mut counters.basic.buffer_register, result);
        let Some(of) = gpu.map(|gpu| &mut counters.gpus[gpu]) else { return };
        of.buffers += 1;
        match result {
            Ok(()) => (of.buffers_ok, of.buffer_bytes) = (of.buffers_ok + 1, of.buffer_bytes + len),
            Err(_) => of.buffers_failed += 1,
        }
    });
}

/// What became of requests of a batch.
#[derive(Clone, Copy)]
pub enum Batched {
    Submitted,
    Completed,
}

/// Counts requests that were begun, or collected, by a call that began then.
pub fn batch(which: Batched, started: Instant, requests: usize) {
    if level() == 0 {
        return;
    }
    let (us, requests) = (started.elapsed().as_micros() as u64, requests as u64);
    with(|Counters { basic, .. }| match which {
        Batched::Submitted => {
            basic.batch_submit.ok += 1;
            basic.batch_total.ok += 1;
            basic.batch_enqueued.ok += requests;
            basic.batch_submit_sum_us += us;
            (basic.last_batch_read_bytes, basic.last_batch_write_bytes) = (0, 0);
        }
        Batched::Completed => {
            basic.batch_complete.ok += 1;
            basic.batch_processed.ok += requests;
            basic.batch_complete_sum_us += us;
        }
    });
}

/// Counts the bytes of a request of a batch.
pub fn batch_bytes(direction: Direction, done: &Result<Done>) {
    if level() == 0 {
        return;
    }
    let bytes = done.as_ref().map_or(0, |done| done.bytes as u64);
    with(|Counters { basic, .. }| {
        let (sum, last) = match direction {
            Direction::Read => (&mut basic.batch_read_bytes, &mut basic.last_batch_read_bytes),
            Direction::Write => (&mut basic.batch_write_bytes, &mut basic.last_batch_write_bytes),
        };
        (*sum, *last) = (*sum + bytes, *last + bytes);
    });
}

/// All that there is to tell, with rates and averages.
pub fn told() -> (Level1, Sizes, PerGpu) {
    let mut found = (Level1::default(), Sizes::default(), PerGpu::default());
    with(|counters| {
        let seconds = counters.since.elapsed().as_secs_f64().max(1e-6);
        let rate = |count: u64| (count as f64 / seconds) as u64;
        let average = |sum: u64, counter: Counter| sum.checked_div(counter.ok).unwrap_or(0);
        let mut basic = counters.basic;
        basic.read_bytes_per_second = rate(basic.read_bytes);
        basic.write_bytes_per_second = rate(basic.write_bytes);
        basic.reads_per_second = rate(basic.read.ok);
        basic.writes_per_second = rate(basic.write.ok);
        basic.read_average_us = average(basic.read_sum_us, basic.read);
        basic.write_average_us = average(basic.write_sum_us, basic.write);
        basic.batch_read_bytes_per_second = rate(basic.batch_read_bytes);
        basic.batch_write_bytes_per_second = rate(basic.batch_write_bytes);
        basic.batch_submit_average_us = average(basic.batch_submit_sum_us, basic.batch_submit);
        basic.batch_complete_average_us = average(basic.batch_complete_sum_us, basic.batch_complete);
        basic.batch_submits_per_second = rate(basic.batch_submit.ok);
        basic.batch_completes_per_second = rate(basic.batch_complete.ok);
        found = (basic, counters.sizes, PerGpu { gpus: 0, gpu: counters.gpus });
        for gpu in &mut found.2.gpu {
            gpu.read_bytes_per_second = (gpu.read_bytes * 1_000_000).checked_div(gpu.read_us).unwrap_or(0);
            gpu.write_bytes_per_second = (gpu.write_bytes * 1_000_000).checked_div(gpu.write_us).unwrap_or(0);
        }
    });
    for gpu in memory::cuda().into_iter().flat_map(|cuda| cuda.gpus()).take(GPUS) {
        found.2.gpu[found.2.gpus as usize].uuid = gpu.uuid().into_bytes().map(|byte| byte as _);
        found.2.gpus += 1;
    }
    found
}
