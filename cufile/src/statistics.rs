//! What was done, counted: by route since the process began, and as `cuFileGetStats` tells it,
//! since the counters were last reset.
//!
//! Locks: `COUNTERS`, for moments.

use crate::abi::{Counter, GPUS, GpuStatistics, Level1, PerGpu, Sizes, Vectored};
use crate::failure::{Code, Failure, Result};
use crate::files::Direction;
use crate::fork;
use crate::transfer::Range;
use crate::{memory, version};
use gpunvme::{Moved, Reason, Transfer};
use parking_lot::Mutex;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU8, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// What a request did.
#[derive(Clone, Copy, Debug)]
pub struct Done {
    pub bytes: usize,
    pub way: Way,
}

impl Done {
    /// What gpunvme's transfer did.
    pub fn on_mount(done: &Transfer) -> Done {
        Done { bytes: done.bytes() as usize, way: Way::Mount(done.moved, done.reason) }
    }
}

/// Which way bytes went.
#[derive(Clone, Copy, Debug)]
pub enum Way {
    /// Between a gpunvme mount and memory that CUDA knows, by routes; and why not a faster way.
    Mount(Moved, Option<Reason>),
    /// Between a gpunvme mount and ordinary memory, by pread and pwrite.
    MountByCall,
    /// By NVIDIA's library.
    Real,
    /// By pread and pwrite, elsewhere.
    Plain,
}

impl Way {
    /// Whether the device reached the memory itself.
    pub fn is_p2p(self) -> bool {
        matches!(self, Way::Mount(moved, _) if moved.p2p > 0)
    }

    /// Whether system calls moved the bytes: `posix`, as cuFile says.
    pub fn is_by_calls(self) -> bool {
        matches!(self, Way::MountByCall | Way::Plain | Way::Real)
    }
}

/// Numbers of reasons are smaller.
pub const REASONS: usize = 64;

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
    /// Requests that did not go the fastest way, by the number of the reason.
    pub reasons: [AtomicU64; REASONS],
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
            reasons: [const { AtomicU64::new(0) }; REASONS],
        }
    }

    /// Adds a request, and what it did.
    fn add(&self, done: std::result::Result<&[Done], &Failure>) {
        let add = |counter: &AtomicU64, bytes: u64| {
            if bytes > 0 {
                counter.fetch_add(bytes, Ordering::Relaxed);
            }
        };
        add(&self.requests, 1);
        let Ok(done) = done else { return add(&self.failed, 1) };
        let mut reasons = 0u64;
        for done in done {
            let bytes = done.bytes as u64;
            let reason = match done.way {
                Way::Mount(moved, reason) => {
                    let Moved { p2p, bounce, cache, host, hole, edge } = moved;
                    add(&self.p2p, p2p);
                    add(&self.bounce, bounce);
                    add(&self.cache, cache);
                    add(&self.host, host);
                    add(&self.hole, hole);
                    add(&self.edge, edge);
                    reason
                }
                Way::MountByCall => {
                    add(&self.call, bytes);
                    Some(Reason::NotGpuMemory)
                }
                Way::Real => {
                    add(&self.real, bytes);
                    None
                }
                Way::Plain => {
                    add(&self.plain, bytes);
                    None
                }
            };
            reasons |= reason.filter(|&reason| reason != Reason::None).map_or(0, |reason| 1 << reason.code());
        }
        (0..REASONS).filter(|code| reasons >> code & 1 == 1).for_each(|code| add(&self.reasons[code], 1));
    }
}

/// The level at which counters are kept for `cuFileGetStats`: 0 for none, to 3.
static LEVEL: AtomicI32 = AtomicI32::new(0);

/// Whether counting was stopped.
static STOPPED: AtomicBool = AtomicBool::new(false);

struct Counters {
    /// Since when it is counted, and for how long it was before it was stopped.
    since: Option<Instant>,
    before: Duration,
    basic: Level1,
    vectored: Vectored,
    sizes: Sizes,
    gpus: [GpuStatistics; GPUS],
}

static COUNTERS: Mutex<Option<Counters>> = Mutex::new(None);

fn with(use_them: impl FnOnce(&mut Counters)) {
    use_them(COUNTERS.lock().get_or_insert_with(|| Counters {
        since: (!STOPPED.load(Ordering::Relaxed)).then(Instant::now),
        before: Duration::ZERO,
        basic: Level1::default(),
        vectored: Vectored::default(),
        sizes: Sizes::default(),
        gpus: [GpuStatistics::default(); GPUS],
    }));
}

/// The level.
pub fn level() -> i32 {
    if fork::is_forked() { 0 } else { LEVEL.load(Ordering::Relaxed) }
}

/// The level at which is counted now.
fn counted() -> i32 {
    if STOPPED.load(Ordering::Relaxed) { 0 } else { level() }
}

/// Counts again, from where it was stopped.
pub fn start() {
    STOPPED.store(false, Ordering::Relaxed);
    with(|counters| {
        counters.since.get_or_insert_with(Instant::now);
    });
}

/// Counts no more. What was counted stays.
pub fn stop() {
    STOPPED.store(true, Ordering::Relaxed);
    with(|counters| counters.before += counters.since.take().map_or(Duration::ZERO, |since| since.elapsed()));
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

fn count<T, E>(counter: &mut Counter, result: &std::result::Result<T, E>) {
    if result.is_ok() { counter.ok += 1 } else { counter.failed += 1 }
}

/// A read or write is done, which began then.
pub fn record(direction: Direction, range: Range, started: Instant, done: &Result<Done>) {
    record_on(gpu_of(range), direction, range, started, done);
}

/// The same of a request whose GPU was asked for before, by [`gpu_of`]: on a thread that may not
/// call CUDA.
pub fn record_on(gpu: Option<usize>, direction: Direction, range: Range, started: Instant, done: &Result<Done>) {
    count_request(gpu, direction, range, started, done.as_ref().map(std::slice::from_ref), false);
}

/// The GPU whose memory a range is, where that is counted.
pub fn gpu_of(range: Range) -> Option<usize> {
    if counted() < 3 { None } else { memory::gpu_of(range.address).filter(|&gpu| gpu < GPUS) }
}

/// A read or write of many ranges of memory is done, the first of which this one begins with, and
/// whose length it has. Versions of cuFile that have counters for it do not count it as a read or
/// write besides.
pub fn record_vectored(direction: Direction, range: Range, started: Instant, done: std::result::Result<&[Done], &Failure>) {
    count_request(gpu_of(range), direction, range, started, done, version::counts_vectors());
}

fn count_request(
    gpu: Option<usize>,
    direction: Direction,
    range: Range,
    started: Instant,
    done: std::result::Result<&[Done], &Failure>,
    vectored: bool,
) {
    TOTALS[direction as usize].add(done);
    let level = counted();
    if level == 0 {
        return;
    }
    let us = started.elapsed().as_micros() as u64;
    let bytes = done.map_or(0, |done| done.iter().map(|done| done.bytes as u64).sum());
    let size = (64 - ((range.len as u64).div_ceil(1024)).saturating_sub(1).leading_zeros() as usize).min(31);
    let unaligned = !(range.address | range.file_offset | range.len as u64).is_multiple_of(4096);
    with(|Counters { basic, vectored: of_vectors, sizes, gpus, .. }| {
        let (counter, sum, sum_us, sizes) = match (direction, vectored) {
            (Direction::Read, false) => (&mut basic.read, &mut basic.read_bytes, &mut basic.read_sum_us, &mut sizes.read),
            (Direction::Write, false) => (&mut basic.write, &mut basic.write_bytes, &mut basic.write_sum_us, &mut sizes.write),
            (Direction::Read, true) => {
                (&mut of_vectors.read, &mut of_vectors.read_bytes, &mut of_vectors.read_sum_us, &mut sizes.read)
            }
            (Direction::Write, true) => {
                (&mut of_vectors.write, &mut of_vectors.write_bytes, &mut of_vectors.write_sum_us, &mut sizes.write)
            }
        };
        count(counter, &done);
        (*sum, *sum_us) = (*sum + bytes, *sum_us + us);
        if level >= 2 {
            sizes[size] += 1;
        }
        let Some(of) = gpu.map(|gpu| &mut gpus[gpu]) else { return };
        let peer = done.is_ok_and(|done| done.iter().any(|done| done.way.is_p2p()));
        let (p2p, posix, failed) = (u64::from(peer), u64::from(!peer), u64::from(done.is_err()));
        match direction {
            Direction::Read => {
                (of.reads, of.read_bytes, of.read_us) = (of.reads + 1, of.read_bytes + bytes, of.read_us + us);
                (of.p2p_reads, of.posix_reads) = (of.p2p_reads + p2p, of.posix_reads + posix);
                (of.unaligned_reads, of.failed_reads) = (of.unaligned_reads + u64::from(unaligned), of.failed_reads + failed);
            }
            Direction::Write => {
                (of.writes, of.write_bytes, of.write_us) = (of.writes + 1, of.write_bytes + bytes, of.write_us + us);
                (of.p2p_writes, of.posix_writes) = (of.p2p_writes + p2p, of.posix_writes + posix);
                (of.unaligned_writes, of.failed_writes) = (of.unaligned_writes + u64::from(unaligned), of.failed_writes + failed);
            }
        }
    });
}

/// What else is counted.
#[derive(Clone, Copy)]
pub enum Event {
    HandleRegister,
    HandleDeregister,
    BatchSetup,
    BatchCancel,
    BatchDestroy,
}

/// Counts it.
pub fn event<T>(which: Event, result: &Result<T>) {
    if counted() == 0 {
        return;
    }
    with(|Counters { basic, .. }| {
        let counter = match which {
            Event::HandleRegister => &mut basic.handle_register,
            Event::HandleDeregister => &mut basic.handle_deregister,
            Event::BatchSetup => &mut basic.batch_setup,
            Event::BatchCancel => &mut basic.batch_cancel,
            Event::BatchDestroy => &mut basic.batch_destroy,
        };
        count(counter, result);
    });
}

/// Counts memory that was registered.
pub fn buffer_added(address: u64, len: u64, result: &Result<()>) {
    buffer(address, |basic, of| {
        count(&mut basic.buffer_register, result);
        let Some(of) = of else { return };
        of.buffers += 1;
        match result {
            Ok(()) => (of.buffers_ok, of.buffer_bytes) = (of.buffers_ok + 1, of.buffer_bytes + len),
            Err(_) => of.buffers_failed += 1,
        }
    });
}

/// Counts memory that was taken back.
pub fn buffer_removed(address: u64, result: &Result<()>) {
    buffer(address, |basic, of| {
        count(&mut basic.buffer_deregister, result);
        if let (Some(of), Ok(())) = (of, result) {
            of.buffers_freed += 1;
        }
    });
}

/// Counts something about memory, also with what is counted of its GPU.
fn buffer(address: u64, add: impl FnOnce(&mut Level1, Option<&mut GpuStatistics>)) {
    let level = counted();
    if level == 0 {
        return;
    }
    let gpu = if level < 3 { None } else { memory::gpu_of(address).filter(|&gpu| gpu < GPUS) };
    with(|Counters { basic, gpus, .. }| add(basic, gpu.map(|gpu| &mut gpus[gpu])));
}

/// Counts a call that began requests of a batch, or began none; it began then.
pub fn batch_submitted<T>(started: Instant, requests: usize, result: &Result<T>) {
    if counted() == 0 {
        return;
    }
    let us = started.elapsed().as_micros() as u64;
    with(|Counters { basic, .. }| {
        count(&mut basic.batch_submit, result);
        count(&mut basic.batch_total, result);
        count_many(&mut basic.batch_enqueued, requests, result.is_ok());
        if result.is_ok() {
            basic.batch_submit_sum_us += us;
        }
    });
}

/// The bytes of the last batch are those of requests that are begun from now on.
pub fn batch_begins() {
    if counted() > 0 {
        with(|Counters { basic, .. }| (basic.last_batch_read_bytes, basic.last_batch_write_bytes) = (0, 0));
    }
}

/// Counts a call that collected requests of a batch, of which so many had failed; it began then.
pub fn batch_completed(started: Instant, requests: usize, failed: usize) {
    if counted() == 0 {
        return;
    }
    let us = started.elapsed().as_micros() as u64;
    with(|Counters { basic, .. }| {
        basic.batch_complete.ok += 1;
        count_many(&mut basic.batch_processed, requests - failed, true);
        count_many(&mut basic.batch_processed, failed, false);
        basic.batch_complete_sum_us += us;
    });
}

fn count_many(counter: &mut Counter, count: usize, are_ok: bool) {
    let to = if are_ok { &mut counter.ok } else { &mut counter.failed };
    *to += count as u64;
}

/// A request of a batch is begun that system calls do.
pub fn batch_by_calls() {
    if counted() > 0 {
        with(|Counters { basic, .. }| basic.batch_posix_enqueued.ok += 1);
    }
}

/// The ways of requests that were submitted together.
#[derive(Default)]
pub struct Ways(AtomicU8);

impl Ways {
    const P2P: u8 = 1;
    const BY_CALLS: u8 = 2;
    const OTHER: u8 = 4;

    /// Adds a request's.
    pub fn add(&self, way: Way) {
        let kind = match way {
            way if way.is_p2p() => Ways::P2P,
            way if way.is_by_calls() => Ways::BY_CALLS,
            _ => Ways::OTHER,
        };
        self.0.fetch_or(kind, Ordering::Relaxed);
    }
}

/// Counts requests that were submitted together and are all done. cuFile's other kinds (nvidia-fs,
/// libaio, io_uring) are no ways of this library's.
pub fn batch_went(ways: &Ways) {
    if counted() == 0 {
        return;
    }
    let ways = ways.0.load(Ordering::Relaxed);
    with(|Counters { basic, .. }| match ways {
        0 => {}
        Ways::P2P => basic.batch_p2p.ok += 1,
        one if one.is_power_of_two() => {}
        _ => basic.batch_mixed.ok += 1,
    });
}

/// Counts a request of a batch that is done; `by_calls` says that system calls did it.
pub fn batch_done(direction: Direction, by_calls: bool, done: &Result<Done>) {
    if counted() == 0 {
        return;
    }
    let bytes = done.as_ref().map_or(0, |done| done.bytes as u64);
    with(|Counters { basic, .. }| {
        let (sum, last) = match direction {
            Direction::Read => (&mut basic.batch_read_bytes, &mut basic.last_batch_read_bytes),
            Direction::Write => (&mut basic.batch_write_bytes, &mut basic.last_batch_write_bytes),
        };
        (*sum, *last) = (*sum + bytes, *last + bytes);
        if by_calls {
            count(&mut basic.batch_posix_processed, done);
        }
    });
}

/// All that there is to tell.
#[derive(Default)]
pub struct Told {
    pub basic: Level1,
    pub vectored: Vectored,
    pub sizes: Sizes,
    pub gpus: PerGpu,
}

/// Bytes a second, of any number of bytes in any time.
fn per_second(bytes: u64, us: u64) -> u64 {
    let rate = (u128::from(bytes) * 1_000_000).checked_div(us.into()).unwrap_or(0);
    rate.try_into().unwrap_or(u64::MAX)
}

/// All that there is to tell, with rates and averages.
pub fn told() -> Told {
    let mut found = Told::default();
    with(|counters| {
        let running = counters.since.map_or(Duration::ZERO, |since| since.elapsed());
        let seconds = (counters.before + running).as_secs_f64().max(1e-6);
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
        let mut vectored = counters.vectored;
        vectored.read_bytes_per_second = rate(vectored.read_bytes);
        vectored.write_bytes_per_second = rate(vectored.write_bytes);
        vectored.reads_per_second = rate(vectored.read.ok);
        vectored.writes_per_second = rate(vectored.write.ok);
        vectored.read_average_us = average(vectored.read_sum_us, vectored.read);
        vectored.write_average_us = average(vectored.write_sum_us, vectored.write);
        let mut gpus = PerGpu { gpus: 0, gpu: counters.gpus };
        for gpu in &mut gpus.gpu {
            gpu.read_bytes_per_second = per_second(gpu.read_bytes, gpu.read_us);
            gpu.write_bytes_per_second = per_second(gpu.write_bytes, gpu.write_us);
        }
        found = Told { basic, vectored, sizes: counters.sizes, gpus };
    });
    for gpu in memory::cuda().into_iter().flat_map(|cuda| cuda.gpus()).take(GPUS) {
        found.gpus.gpu[found.gpus.gpus as usize].uuid = gpu.uuid().into_bytes().map(|byte| byte as _);
        found.gpus.gpus += 1;
    }
    found
}
