//! Short requests that their callers wait for: the thread that asks for one does it itself, at a desk with a ring, and pools, of its own. No other thread need be woken for it, or
//! has to wake it.
//!
//! It guards that nobody waits for a desk: a caller that finds none free gives its request to the worker.

use super::engine::Engine;
use super::memory::pieces::Blocks;
use super::memory::slots::CHUNK;
use super::request::Answer;
use crate::error::{Error, Result};
use crate::file::Transfer;
use crate::linger::Linger;
use crate::mount::Mount;
use crate::ring::Ring;
use parking_lot::{Mutex, MutexGuard};
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Bytes of the longest request: what is longer keeps a device busy only with more of it in flight than a desk has room for.
pub(super) const LONGEST: u64 = CHUNK as u64;
/// Bytes of a desk's pool on a GPU: the longest request has room, also where its pieces are rounded outwards.
pub(super) const POOL: usize = 2 * CHUNK;
/// Parts that a request may have, and entries of a desk's ring: a request of more is better off among the many that the library's thread has in flight.
pub(super) const PARTS: usize = 8;
/// How long a caller looks around before it sleeps: longer than an SSD takes for most requests. Being woken would take longer than the copy to the GPU.
const LINGER: Duration = Duration::from_micros(250);

/// The most desks: the daemon gives a process 64 rings, and the application and other threads of the library need some.
const MOST: usize = 32;

thread_local! {
    /// Which desk this thread had last: its files are attached there.
    static LAST: Cell<usize> = const { Cell::new(0) };
}

/// Desks: each comes into being when all others are in use.
#[derive(Default)]
pub(super) struct Desks {
    desks: Box<[OnceLock<Mutex<Engine>>]>,
    /// Held by who makes one.
    making: Mutex<()>,
    /// The mount, or a GPU, gave no more: those that there are have to do.
    full: AtomicBool,
}

impl Desks {
    /// At most so many.
    pub fn new(most: usize) -> Desks {
        Desks { desks: (0..most.min(MOST)).map(|_| OnceLock::new()).collect(), ..Desks::default() }
    }

    /// A free one, if there is one: when no more of anything is to be had, one that `has_all` a request needs.
    pub fn take(&self, mount: &Mount, blocks: Blocks, has_all: impl Fn(&Engine) -> bool) -> Option<MutexGuard<'_, Engine>> {
        let free = |at: usize| {
            let desk = self.desks.get(at)?.get()?.try_lock()?;
            (!self.is_full() || has_all(&desk)).then_some(desk)
        };
        if let Some(desk) = free(LAST.get()) {
            return Some(desk);
        }
        for at in 0..self.desks.len() {
            if self.desks[at].get().is_none() {
                self.make(at, mount, blocks)?;
            }
            if let Some(desk) = free(at) {
                LAST.set(at);
                return Some(desk);
            }
        }
        None
    }

    /// Makes the next one, if nobody else does.
    fn make(&self, at: usize, mount: &Mount, blocks: Blocks) -> Option<()> {
        let _making = self.making.try_lock()?;
        if self.is_full() {
            return None;
        }
        if self.desks[at].get().is_some() {
            return Some(());
        }
        match Ring::new(mount, PARTS as u32) {
            Ok(ring) => {
                self.desks[at].get_or_init(|| Mutex::new(Engine::new(ring, blocks)));
                Some(())
            }
            Err(error) => {
                self.fill(&error);
                None
            }
        }
    }

    /// No more of anything is asked for, because of this.
    pub fn fill(&self, error: &Error) {
        tracing::debug!(%error, "no further thread does its own requests");
        self.full.store(true, Ordering::Relaxed);
    }

    fn is_full(&self) -> bool {
        self.full.load(Ordering::Relaxed)
    }
}

/// Does a request, which `begin` gives the desk, and whose answer `answer` is to be.
pub(super) fn serve(desk: &mut Engine, begin: impl FnOnce(&mut Engine), answer: &Answer) -> Result<Transfer> {
    // After a panic nobody would know what memory the daemon and the GPUs still use.
    let served = catch_unwind(AssertUnwindSafe(|| {
        begin(desk);
        let mut linger = Linger::new();
        while !desk.is_idle() {
            if desk.turn(linger.now()) {
                linger.restart();
            } else if !linger.goes_on(LINGER) {
                if desk.arm() {
                    desk.wait(None);
                }
                linger.look_at_clock();
            }
        }
        answer.take()
    }));
    served.ok().flatten().unwrap_or_else(|| std::process::abort())
}
