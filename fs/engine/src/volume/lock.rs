//! The metadata lock: a thread that waits for it spins before falling asleep.
//!
//! An operation holds the lock for a microsecond or two, which is less than it takes to fall
//! asleep and be woken. By itself `parking_lot` gives the processor away after some hundred
//! nanoseconds, and where the two processors of a small machine serve two clients, the client that
//! gets it then stands before the loop that is to answer it.
//!
//! On a machine with many processors a thread that falls asleep holds up all others: from time to
//! time `parking_lot` hands the lock to a sleeping thread, so that none starves, and until that is
//! awake the rest fall asleep as well.

use std::hint::spin_loop;
use std::thread::available_parallelism;

use parking_lot::{RwLock, RwLockReadGuard, RwLockWriteGuard};

use super::meta::Meta;

/// Times that a waiting thread looks at the lock before it may sleep: a few microseconds.
const LOOKS: usize = 100;
/// As [`LOOKS`], with [`MANY`] processors or more: about a millisecond, in which hundreds of
/// threads have had the lock.
const LOOKS_OF_MANY: usize = 20_000;
/// Processors of which some can wait without keeping the thread that has the lock from its own.
const MANY: usize = 8;

/// Metadata and its lock.
pub(crate) struct MetaLock {
    meta: RwLock<Meta>,
    looks: usize,
}

impl MetaLock {
    /// A lock on `meta` that no thread holds.
    pub fn new(meta: Meta) -> MetaLock {
        let processors = available_parallelism().map_or(1, usize::from);
        MetaLock { meta: RwLock::new(meta), looks: if processors < MANY { LOOKS } else { LOOKS_OF_MANY } }
    }

    /// Waits until no thread changes the metadata.
    pub fn read(&self) -> RwLockReadGuard<'_, Meta> {
        let free = || if self.meta.is_locked_exclusive() { None } else { self.meta.try_read() };
        self.spin(free).unwrap_or_else(|| self.meta.read())
    }

    /// Waits until no other thread reads or changes the metadata.
    pub fn write(&self) -> RwLockWriteGuard<'_, Meta> {
        let free = || if self.meta.is_locked() { None } else { self.meta.try_write() };
        self.spin(free).unwrap_or_else(|| self.meta.write())
    }

    /// Lets the threads that wait for the lock by now have it before the caller has it again: those
    /// that sleep, and those that spin, which look for it all the time.
    pub fn let_others_in(&self) {
        if self.looks == LOOKS_OF_MANY {
            (0..LOOKS).for_each(|_| spin_loop());
        }
        RwLockWriteGuard::bump(&mut self.meta.write());
    }

    /// Tries until it succeeds, for a while.
    fn spin<G>(&self, attempt: impl Fn() -> Option<G>) -> Option<G> {
        (0..self.looks).find_map(|_| {
            let guard = attempt();
            if guard.is_none() {
                spin_loop();
            }
            guard
        })
    }
}
