//! Short requests that their callers wait for: the thread that asks for one does it itself, with
//! an executor of its own, which has a ring and pools. No other thread need be woken for it, or
//! has to wake it.
//!
//! It guards that no caller waits for such an executor: a caller that finds none free gives its
//! request to the worker.

use super::executor::Executor;
use crate::error::{Error, Result};
use crate::gpu::answer::Answer;
use crate::gpu::memory::pieces::Blocks;
use crate::gpu::memory::slots::CHUNK;
use crate::gpu::page_cache::PageCache;
use crate::gpu::settings::Pool;
use crate::mount::Mount;
use crate::ring::Ring;
use crate::spin::Spin;
use crate::transfer::Transfer;
use parking_lot::{Mutex, MutexGuard};
use std::cell::Cell;
use std::ops::{Deref, DerefMut};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

/// Bytes of a short request.
const SHORT: u64 = CHUNK as u64;
/// Bytes of a request of which as many as there are callers may be done at once. Of larger ones
/// two are: many pools, each with pieces on their way, would not stay in the processor's cache, and
/// their callers would take processors from what serves the device.
const SMALL: u64 = 256 << 10;
const LARGE_AT_ONCE: usize = 2;
/// Bytes of the longest request, where the volume has one device. Of those that are not short one
/// is done at a time, for a caller that is alone with it. What is longer still has more in flight,
/// by the worker, than such an executor has room for; and so has what is not short where several
/// devices are to be kept busy.
const LONGEST: u64 = 16 << 20;
/// Such an executor's pool on a GPU: a short request has room, also where its pieces are rounded
/// outwards, and devices may use all of it.
pub const POOL: Pool = Pool { len: 2 * CHUNK, of_devices: 2 * CHUNK };
/// Bytes of the longest piece: four of them are in flight at once.
pub const PIECE: u64 = (POOL.len / 4) as u64;
/// Parts that a request may have, and entries of its ring: a request of more is better off among
/// the many that the library's thread has in flight.
const PARTS: usize = 8;
/// How long a caller looks for completions before it sleeps: longer than an SSD takes for most
/// requests. Being woken would take longer than the copy to the GPU.
const SPIN_LIMIT: Duration = Duration::from_micros(250);

/// The most of these executors: the daemon gives a process 64 rings, and the application and other
/// threads of the library need some.
const MOST: usize = 32;
/// How long no further one is made where one was refused: descriptors may be short for a moment.
const PATIENCE: Duration = Duration::from_secs(1);

thread_local! {
    /// Which of the executors this thread had last: its files are attached there.
    static LAST: Cell<usize> = const { Cell::new(0) };
}

/// InlineExecutors: each comes into being when all others are in use.
pub struct InlineExecutors {
    executors: Box<[OnceLock<Mutex<Executor>>]>,
    /// Bytes of the longest request.
    longest: u64,
    /// Held by the thread that makes an executor.
    making: Mutex<()>,
    /// Held by the threads whose requests are not small; only the first by one whose is not short.
    large: [Mutex<()>; LARGE_AT_ONCE],
    page_cache: Arc<PageCache>,
    /// The mount, a GPU or the system refused a further executor: until then the existing ones have
    /// to do. In milliseconds since `begun`; 0 before that happened.
    full_until: AtomicU64,
    begun: Instant,
}

/// An executor that a caller has to itself.
pub struct InlineExecutor<'a> {
    executor: MutexGuard<'a, Executor>,
    _large: Option<MutexGuard<'a, ()>>,
}

impl Deref for InlineExecutor<'_> {
    type Target = Executor;

    fn deref(&self) -> &Executor {
        &self.executor
    }
}

impl DerefMut for InlineExecutor<'_> {
    fn deref_mut(&mut self) -> &mut Executor {
        &mut self.executor
    }
}

impl InlineExecutors {
    /// Has at most `most` executors, and none yet, for a volume of so many devices.
    pub fn new(most: usize, devices: u32, page_cache: Arc<PageCache>) -> InlineExecutors {
        let executors = (0..most.min(MOST)).map(|_| OnceLock::new()).collect();
        let longest = if devices > 1 { SHORT } else { LONGEST };
        InlineExecutors {
            executors,
            longest,
            making: Mutex::default(),
            large: Default::default(),
            page_cache,
            full_until: 0.into(),
            begun: Instant::now(),
        }
    }

    /// A free one for a request of so many bytes in so many parts, if there is one: when no more of
    /// anything is to be had, one that `has_all` a request needs.
    pub fn take(
        &self,
        mount: &Mount,
        blocks: Blocks,
        (bytes, parts): (u64, usize),
        has_all: impl Fn(&Executor) -> bool,
    ) -> Option<InlineExecutor<'_>> {
        if bytes > self.longest || parts > PARTS {
            return None;
        }
        let large = if bytes <= SMALL {
            None
        } else {
            let places = if bytes <= SHORT { LARGE_AT_ONCE } else { 1 };
            // From the last on: the first is left to a longer one.
            Some(self.large[..places].iter().rev().find_map(Mutex::try_lock)?)
        };
        let executor = self.free(mount, blocks, has_all)?;
        Some(InlineExecutor { executor, _large: large })
    }

    fn free(&self, mount: &Mount, blocks: Blocks, has_all: impl Fn(&Executor) -> bool) -> Option<MutexGuard<'_, Executor>> {
        let free = |at: usize| {
            let executor = self.executors.get(at)?.get()?.try_lock()?;
            (!self.is_full() || has_all(&executor)).then_some(executor)
        };
        if let Some(executor) = free(LAST.get()) {
            return Some(executor);
        }
        for at in 0..self.executors.len() {
            if self.executors[at].get().is_none() {
                self.make(at, mount, blocks)?;
            }
            if let Some(executor) = free(at) {
                LAST.set(at);
                return Some(executor);
            }
        }
        None
    }

    /// Makes the next executor, if no other thread is making it.
    fn make(&self, at: usize, mount: &Mount, blocks: Blocks) -> Option<()> {
        let _making = self.making.try_lock()?;
        if self.is_full() {
            return None;
        }
        if self.executors[at].get().is_some() {
            return Some(());
        }
        match Ring::new(mount, PARTS as u32) {
            Ok(ring) => {
                self.executors[at].get_or_init(|| Mutex::new(Executor::new(ring, blocks, self.page_cache.clone())));
                Some(())
            }
            Err(error) => {
                self.fill(&error);
                None
            }
        }
    }

    /// Makes no further executors for a while, because of this error.
    pub fn fill(&self, error: &Error) {
        tracing::debug!(%error, "no further thread does its own requests for now");
        self.full_until.store((self.begun.elapsed() + PATIENCE).as_millis() as u64, Ordering::Relaxed);
    }

    fn is_full(&self) -> bool {
        let until = self.full_until.load(Ordering::Relaxed);
        until != 0 && self.begun.elapsed() < Duration::from_millis(until)
    }
}

/// Does a request, which `begin` gives the executor, and whose answer `answer` is to be.
pub fn serve(executor: &mut Executor, begin: impl FnOnce(&mut Executor), answer: &Answer) -> Result<Transfer> {
    // After a panic it would be unknown which memory the daemon and the GPUs still use.
    let served = catch_unwind(AssertUnwindSafe(|| {
        begin(executor);
        let mut spin = Spin::new();
        while !executor.is_idle() {
            if executor.turn(spin.now()) {
                spin.restart();
            } else if !spin.goes_on(SPIN_LIMIT) {
                if executor.arm() {
                    executor.wait(None);
                }
                spin.look_at_clock();
            }
        }
        answer.take()
    }));
    served.ok().flatten().unwrap_or_else(|| std::process::abort())
}
