//! The metadata lock: a thread that waits for it spins for a moment before falling asleep.
//!
//! An operation holds the lock for a microsecond or two, which is less than it takes to fall
//! asleep and be woken. By itself `parking_lot` gives the processor away after some hundred
//! nanoseconds, and where the two processors of a small machine serve two clients, the client that
//! gets it then stands before the loop that is to answer it.

use std::hint::spin_loop;

use parking_lot::{RwLock, RwLockReadGuard, RwLockWriteGuard};

use super::meta::Meta;

/// Times that a waiting thread looks at the lock before it may sleep: a few microseconds.
const LOOKS: usize = 100;

/// Metadata and its lock.
pub(crate) struct MetaLock(RwLock<Meta>);

impl MetaLock {
    /// A lock on `meta` that no thread holds.
    pub fn new(meta: Meta) -> MetaLock {
        MetaLock(RwLock::new(meta))
    }

    /// Waits until no thread changes the metadata.
    pub fn read(&self) -> RwLockReadGuard<'_, Meta> {
        spin(|| if self.0.is_locked_exclusive() { None } else { self.0.try_read() }).unwrap_or_else(|| self.0.read())
    }

    /// Waits until no other thread reads or changes the metadata.
    pub fn write(&self) -> RwLockWriteGuard<'_, Meta> {
        spin(|| if self.0.is_locked() { None } else { self.0.try_write() }).unwrap_or_else(|| self.0.write())
    }

    /// Lets the threads that wait for the lock by now have it before the caller has it again.
    pub fn let_others_in(&self) {
        RwLockWriteGuard::bump(&mut self.0.write());
    }
}

/// Tries until it succeeds, for a while.
fn spin<G>(attempt: impl Fn() -> Option<G>) -> Option<G> {
    (0..LOOKS).find_map(|_| {
        let guard = attempt();
        if guard.is_none() {
            spin_loop();
        }
        guard
    })
}
