//! The copy stream of an executor for one GPU: a staging pool, and a CUDA stream that copies
//! between the pool and the application's memory.
//!
//! It guards the application's context. What waits to be copied is copied together: neighbours as
//! one, and many small pieces by one kernel. A kernel that meets an address which is no longer
//! mapped would end everything that the application does on this GPU, so each allocation is looked
//! at once more just before. While a few batches are on their way nothing more is given to the
//! stream, so batches grow by themselves under load.

use crate::buffer::Shared;
use crate::error::{Error, Result};
use crate::gpu::memory::slots::{CHUNK, Slots};
use crate::gpu::memory::staging::{Staging, ends};
use crate::gpu::page_cache::gpu_reads::BY_KERNEL;
use crate::gpu::request::Allocation;
use crate::gpu::settings::Pool;
use crate::mount::Mount;
use gpunvme_abi::Direction;
use gpunvme_cuda::{Cuda, CudaError, Entered, Event, Gpu, Move, Scatter, Stream};
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use zerocopy::IntoBytes;

/// Batches on their way at most: while one is copied others wait behind it, and the stream never
/// runs dry.
const BATCHES: usize = 4;
/// Copies that a batch may have at most.
pub const BATCH: usize = 1024;
/// Bytes of the table of one batch.
const TABLE: usize = BATCH * size_of::<Move>();
/// Up to this many bytes the kernel may move: a copy engine takes about as long for any copy
/// that is shorter than 64 KiB.
pub const SMALL: u64 = 32 << 10;
/// From this many small copies on the kernel makes them: launching it costs about as much as two
/// copies.
pub const MANY: usize = 3;
/// Copies are made when they are this part of all that is in flight, and together then: each batch
/// costs the processor some microseconds, however little is in it. What waits for the others so is
/// late by a few hundredths of the time that the device takes.
const SHARE: usize = 8;
/// Or when they are this many bytes, which keep a copy engine busy.
const ENOUGH: u64 = 64 << 10;
/// Or when the first has waited this long: about as long as the copy itself takes.
const HOLD: Duration = Duration::from_micros(20);
/// Bytes that copy engines copy in one batch, or one copy: all of a batch is known to be done when
/// its last copy is, and a device that writes what was copied would wait for it. Of reads it may be
/// half of what waits, where that is more, up to [`MOST_OF_READS`]: nothing is copied while the
/// word behind a batch is written.
const TOGETHER: u64 = 4 * ENOUGH;
/// As [`TOGETHER`], of reads alone, however much waits.
const MOST_OF_READS: u64 = 4 << 20;
/// Bytes of a cached range that the kernel moves in one batch.
const TOGETHER_BY_KERNEL: u64 = 1 << 20;
/// Up to this many bytes of a cached range the kernel moves where there are [`MANY`] such copies:
/// the calls for as many copies would take longer than they do.
const SMALL_CACHED: u64 = 64 << 10;
/// Bytes of a move of the kernel out of a cached range: each block of the kernel makes one at a
/// time.
const MOVE: u64 = 16 << 10;
/// Bytes of the word that the stream writes, in a cache line of its own.
const WORD: usize = 64;

/// The side of a copy that is not the application's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Other {
    /// In the pool, so far from its beginning.
    Slot(usize),
    /// An address in a cached range of the page cache. Up to [`BY_KERNEL`] bytes are moved by the
    /// kernel, which has to reach the other side.
    Cached(u64),
}

/// The other user of a slot, beside the copy stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SlotUser {
    /// A device. Its transfers have a part of the pool, so that they stay in the processor's cache.
    Device,
    /// Processors that copy what the page cache has. They may use all of it: there are many.
    PageCache,
}

/// A copy that is to be made.
#[derive(Clone, Copy, Debug)]
pub struct Copy {
    pub direction: Direction,
    /// In the application's memory.
    pub address: u64,
    pub other: Other,
    pub len: u64,
    pub allocation: Allocation,
    /// The piece that it belongs to.
    pub piece: usize,
}

/// Why a copy was not made: what CUDA said, or `None` where the memory is gone.
pub type NotCopied = Option<CudaError>;

/// Copies that are made as one.
struct Run {
    /// In the copy stream's list of copies.
    copies: Range<usize>,
    /// In the application's memory.
    address: u64,
    other: Other,
    len: u64,
    direction: Direction,
    kernel: Kernel,
    /// Where the processor finds it, if the processor copies it.
    host: Option<u64>,
}

/// Whether the kernel moves a run.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kernel {
    /// It does not reach it, or a copy engine is as good.
    Never,
    /// If there are [`MANY`] of them.
    AmongMany,
    /// CUDA would copy it by the processor.
    Always,
}

impl Copy {
    /// Whether the kernel moves it, as far as that is known of one copy.
    fn kernel(&self) -> Kernel {
        let reached = self.allocation.by_kernel;
        match self.other {
            Other::Cached(_) if self.len <= BY_KERNEL => Kernel::Always,
            Other::Cached(_) if self.len <= SMALL_CACHED && reached => Kernel::AmongMany,
            Other::Slot(_) if self.len <= SMALL && reached => Kernel::AmongMany,
            _ => Kernel::Never,
        }
    }
}

impl Run {
    /// Where to and where from, in a pool that begins at `pool`.
    fn ends(&self, pool: u64) -> (u64, u64) {
        let other = match self.other {
            Other::Slot(slot) => pool + slot as u64,
            Other::Cached(address) => address,
        };
        ends(self.direction, self.address, other)
    }
}

struct Batch {
    /// The number that the stream writes behind the batch.
    number: u32,
    pieces: Vec<usize>,
}

pub struct CopyStream {
    cuda: &'static Cuda,
    gpu: Gpu,
    stream: Stream,
    /// Shared with the GPU's other copy streams, and with requests in streams.
    pub scatter: Arc<Scatter>,
    /// To ask whether the stream still works.
    probe: Event,
    pub staging: Arc<Shared<Staging>>,
    slots: Slots,
    /// Chunks of the pool that transfers of devices may use.
    of_devices: usize,
    waiting: Vec<Copy>,
    /// Bytes of those.
    waiting_bytes: u64,
    /// When the first of them may have come.
    since: Instant,
    runs: Vec<Run>,
    batches: VecDeque<Batch>,
    /// Lists of pieces for batches to come.
    spare: Vec<Vec<usize>>,
    last: u32,
    /// The error that ended the copy stream.
    broken: Option<CudaError>,
}

impl CopyStream {
    /// With such a pool, and the GPU's kernel if there is one already.
    pub fn new(
        cuda: &'static Cuda,
        gpu: Gpu,
        mount: &Mount,
        pool: Pool,
        alignment: usize,
        kernel: Option<Arc<Scatter>>,
    ) -> Result<CopyStream> {
        let path = &mount.connection().path;
        let failed = |error| Error::on_gpu(path, "prepare", &gpu, error);
        let [chunks, of_devices] = [pool.len, pool.of_devices].map(|len| len.div_ceil(CHUNK).max(1));
        let staging = Staging::new(path, &gpu, chunks * CHUNK, BATCHES * TABLE + WORD)?;
        let stream = gpu.stream().map_err(failed)?;
        let scatter = match kernel {
            Some(kernel) => kernel,
            None => {
                let kernel = gpu.scatter().map_err(failed)?;
                // CUDA loads a kernel when it is first launched, and may wait for the whole GPU to
                // do so: for a stream, too, that waits for this very copy stream.
                // SAFETY: the pool is zeroed, so that the first entry of the table moves nothing.
                unsafe { stream.scatter(&kernel, staging.device_address + (chunks * CHUNK) as u64, 1) }.map_err(failed)?;
                stream.synchronize().map_err(failed)?;
                Arc::new(kernel)
            }
        };
        let staging = mount.register(staging)?.share();
        Ok(CopyStream {
            cuda,
            stream,
            scatter,
            probe: gpu.event().map_err(failed)?,
            staging,
            slots: Slots::new(chunks, alignment),
            of_devices,
            waiting: Vec::new(),
            waiting_bytes: 0,
            since: Instant::now(),
            runs: Vec::new(),
            batches: VecDeque::new(),
            spare: Vec::new(),
            last: 0,
            broken: None,
            gpu,
        })
    }

    /// Takes a slot of so many bytes, at most [`CHUNK`]. `None` while there is no room: a slot that
    /// waits gets it in the end if no other is taken before it.
    pub fn take_slot(&mut self, len: usize, user: SlotUser) -> Option<usize> {
        let most = match user {
            SlotUser::Device => self.of_devices,
            SlotUser::PageCache => self.slots.chunks(),
        };
        self.slots.take(len, most)
    }

    /// Chunks of the pool that transfers of devices may use.
    pub fn chunks_of_devices(&self) -> usize {
        self.of_devices
    }

    /// Gives back what [`CopyStream::take_slot`] returned, once.
    pub fn give_back_slot(&mut self, slot: usize) {
        self.slots.give_back(slot);
    }

    /// Adds a copy to those that wait.
    pub fn copy(&mut self, copy: Copy) {
        self.waiting_bytes += copy.len;
        self.waiting.push(copy);
    }

    /// Whether copies are in flight, or wait to be issued.
    pub fn is_busy(&self) -> bool {
        !self.batches.is_empty() || !self.waiting.is_empty()
    }

    /// Whether copies are in flight.
    pub fn is_copying(&self) -> bool {
        !self.batches.is_empty()
    }

    /// Makes the GPU's context current on this thread until the guard is dropped.
    pub fn enter(&self) -> std::result::Result<Entered, CudaError> {
        self.gpu.enter()
    }

    /// Appends the pieces whose copies are done.
    pub fn finished(&mut self, pieces: &mut Vec<usize>) {
        if self.batches.is_empty() {
            return;
        }
        let reached = self.staging.memory().mapping.word(word(&self.staging)).load(Ordering::Acquire);
        // Numbers wrap.
        let is_done = |batch: &Batch| reached.wrapping_sub(batch.number).cast_signed() >= 0;
        while self.batches.front().is_some_and(is_done) {
            let batch = self.batches.pop_front().expect("there is a first one");
            self.retire(batch, |piece| pieces.push(piece));
        }
    }

    fn retire(&mut self, mut batch: Batch, with: impl FnMut(usize)) {
        batch.pieces.drain(..).for_each(with);
        self.spare.push(batch.pieces);
    }

    /// Checks whether copies that take long will ever be done. Those that will not are appended to
    /// `failed`.
    pub fn probe(&mut self, failed: &mut Vec<(usize, NotCopied)>) {
        // One event at a time: a stream that stands still has room for so many only, and then
        // blocks the thread that adds one.
        let asked = self.probe.done().and_then(|done| if done { self.stream.record(&self.probe) } else { Ok(()) });
        if let Err(error) = asked {
            self.give_up(error, failed);
        }
    }

    /// The context is gone, and with it whatever was still being copied.
    fn give_up(&mut self, error: CudaError, failed: &mut Vec<(usize, NotCopied)>) {
        let _ = self.stream.synchronize(); // in case it lives still
        while let Some(batch) = self.batches.pop_front() {
            self.retire(batch, |piece| failed.push((piece, Some(error.clone()))));
        }
        self.broken = Some(error);
    }

    /// Issues the waiting copies to the stream, if it is not too busy, and if it is not better to
    /// wait for more: `coming` pieces are on their way through the ring. Pieces that the processor
    /// copied are appended to `copied`, and those that could not be to `failed`. Returns whether
    /// anything was done.
    pub fn issue(&mut self, coming: usize, now: Instant, copied: &mut Vec<usize>, failed: &mut Vec<(usize, NotCopied)>) -> bool {
        if self.waiting.is_empty() {
            self.since = now;
            return false;
        }
        let few = self.waiting.len() * SHARE < coming && self.waiting_bytes < ENOUGH;
        if self.batches.len() == BATCHES || few && now.saturating_duration_since(self.since) < HOLD {
            return false;
        }
        self.since = now;
        let later = self.waiting.split_off(self.next_batch());
        if let Err(error) = self.broken.clone().map_or_else(|| self.issue_all(copied, failed), Err) {
            failed.extend(self.waiting.drain(..).map(|copy| (copy.piece, Some(error.clone()))));
            self.give_up(error, failed);
        }
        self.waiting.clear();
        self.waiting_bytes = later.iter().map(|copy| copy.len).sum();
        self.waiting.extend(later);
        true
    }

    /// How many of the copies that wait are one batch, the first at least. The kernel makes any
    /// number of small ones at once.
    fn next_batch(&self) -> usize {
        let (mut bytes, mut by_kernel, mut moves) = (0, 0, 0);
        let mut most = (self.waiting_bytes / 2).clamp(TOGETHER, MOST_OF_READS);
        let is_one_more = |copy: &Copy| {
            if copy.direction == Direction::Write {
                most = TOGETHER;
            }
            let full = bytes >= most && copy.len > SMALL || by_kernel >= TOGETHER_BY_KERNEL;
            if matches!(copy.other, Other::Cached(_)) && copy.kernel() != Kernel::Never {
                by_kernel += copy.len;
                moves += copy.len.div_ceil(MOVE) as usize;
            } else {
                bytes += if copy.len > SMALL { copy.len } else { 0 };
                moves += 1;
            }
            full || moves > BATCH
        };
        self.waiting.iter().position(is_one_more).unwrap_or(self.waiting.len())
    }

    fn issue_all(
        &mut self,
        on_host: &mut Vec<usize>,
        failed: &mut Vec<(usize, NotCopied)>,
    ) -> std::result::Result<(), CudaError> {
        let _entered = self.gpu.enter()?;
        self.drop_freed(failed)?;
        self.join();
        // Only a batch that the stream gets takes a number, so that those on their way have tables
        // of their own.
        let number = self.last.wrapping_add(1);
        let mut batch = Batch { number, pieces: self.spare.pop().unwrap_or_default() };
        let many = self.runs.iter().filter(|run| run.kernel == Kernel::AmongMany).count() >= MANY;
        let by_kernel = |run: &Run| run.kernel == Kernel::Always || many && run.kernel == Kernel::AmongMany;
        let table = self.staging.len() + number as usize % BATCHES * TABLE;
        let mut moves = 0;
        for run in &self.runs {
            if by_kernel(run) {
                let (to, from) = run.ends(self.staging.memory().device_address);
                let step = if matches!(run.other, Other::Cached(_)) { MOVE } else { run.len };
                for done in (0..run.len).step_by(step as usize) {
                    let entry = Move { to: to + done, from: from + done, len: step.min(run.len - done) };
                    let at = table + moves * size_of::<Move>();
                    self.staging.memory().mapping.copy_in(at, entry.as_bytes()).expect("a table has room for all moves");
                    moves += 1;
                }
                continue;
            }
            let copies = self.waiting[run.copies.clone()].iter();
            if let (Some(host), Other::Slot(slot)) = (run.host, run.other) {
                // SAFETY: as below. It was there a moment ago.
                unsafe { self.staging.memory().copy_on_host(run.direction, slot, host, run.len as usize) };
                on_host.extend(copies.map(|copy| copy.piece));
                continue;
            }
            let (to, from) = run.ends(self.staging.memory().mapping.as_ptr() as u64);
            // SAFETY: one side is the application's memory, which it vouched for until its request
            // is answered; the other is a slot that is this piece's, or a cached range that it
            // holds. Both stay until the batch is done: pieces are answered, slots given back, and
            // cached ranges let go, only then.
            let copied = unsafe {
                match run.direction {
                    // These notice memory that was freed since it was looked at.
                    Direction::Read => self.stream.copy_in(to, from, run.len as usize),
                    Direction::Write => self.stream.copy_out(to, from, run.len as usize),
                }
            };
            match copied {
                Ok(()) => batch.pieces.extend(copies.map(|copy| copy.piece)),
                Err(error) => failed.extend(copies.map(|copy| (copy.piece, Some(error.clone())))),
            }
        }
        if moves > 0 {
            let table = self.staging.memory().device_address + table as u64;
            // SAFETY: as above. The table is this batch's until it is done; each range was found
            // to lie in an allocation that this GPU reaches, and that was still there a moment
            // ago.
            let launched = unsafe { self.stream.scatter(&self.scatter, table, moves as u32) };
            let runs = self.runs.iter().filter(|run| by_kernel(run));
            let copies = runs.flat_map(|run| &self.waiting[run.copies.clone()]);
            match launched {
                Ok(()) => batch.pieces.extend(copies.map(|copy| copy.piece)),
                Err(error) => failed.extend(copies.map(|copy| (copy.piece, Some(error.clone())))),
            }
        }
        self.waiting.clear();
        if batch.pieces.is_empty() {
            self.spare.push(batch.pieces);
            return Ok(());
        }
        self.last = number;
        self.batches.push_back(batch);
        let word = self.staging.memory().device_address + word(&self.staging) as u64;
        // SAFETY: the word is registered with CUDA until this copy stream ends, and it ends when
        // nothing is on its way.
        unsafe { self.stream.write_value(word, number) }
    }

    /// Takes out copies to or from memory that was freed since, and sorts the rest by address.
    fn drop_freed(&mut self, failed: &mut Vec<(usize, NotCopied)>) -> std::result::Result<(), CudaError> {
        if self.waiting.len() > 1 {
            self.waiting.sort_unstable_by_key(|copy| copy.address);
        }
        let mut last = None;
        let mut outcome = Ok(());
        self.waiting.retain(|copy| {
            let Allocation { base, buffer_id, .. } = copy.allocation;
            let there = match last {
                Some((known, there)) if known == (base, buffer_id) => there,
                _ => match self.cuda.buffer_id(base) {
                    Ok(found) => found == Some(buffer_id),
                    Err(error) => {
                        outcome = Err(error);
                        true
                    }
                },
            };
            last = Some(((base, buffer_id), there));
            if !there {
                failed.push((copy.piece, None));
            }
            there
        });
        outcome
    }

    /// Makes runs of neighbours.
    fn join(&mut self) {
        self.runs.clear();
        for (at, copy) in self.waiting.iter().enumerate() {
            if let Some(run) = self.runs.last_mut()
                && let (Other::Slot(before), Other::Slot(slot)) = (run.other, copy.other)
                && (run.address + run.len, before as u64 + run.len) == (copy.address, slot as u64)
                && self.waiting[run.copies.start].allocation.base == copy.allocation.base
                && run.direction == copy.direction
            {
                run.len += copy.len;
                run.copies.end = at + 1;
                continue;
            }
            let Copy { direction, address, other, len, allocation, .. } = *copy;
            let (kernel, host) = (copy.kernel(), allocation.on_host(address));
            self.runs.push(Run { copies: at..at + 1, address, other, len, direction, kernel, host });
        }
        // Neighbours together may be too long for it.
        for run in self.runs.iter_mut().filter(|run| matches!(run.other, Other::Slot(_)) && run.len > SMALL) {
            run.kernel = Kernel::Never;
        }
    }
}

/// Where in a pool's memory the word is that the stream writes.
fn word(staging: &Shared<Staging>) -> usize {
    staging.len() + BATCHES * TABLE
}

impl Drop for CopyStream {
    fn drop(&mut self) {
        // What is still on its way uses the pool.
        if !self.batches.is_empty() {
            let _ = self.stream.synchronize(); // a context that is gone copies nothing
        }
    }
}
