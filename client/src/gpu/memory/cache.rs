//! The cache of a GPU's allocations that are registered with a mount: an allocation is registered
//! at its first use, and stays registered until room is short or it was freed.
//!
//! It guards three things. An allocation that was freed is never taken for the one that lies at
//! its address now. What a transfer uses stays registered until the transfer is over. And what was
//! refused is not asked for at every transfer again. It knows neither CUDA nor the daemon: a
//! [`Registrar`] does.
//!
//! Locks: `registering`, for as long as one allocation is registered, and in it `state`, for
//! look-ups only: a hit never waits for a registration of another thread. Nothing is registered or
//! unregistered under `state`.

#[cfg(test)]
mod tests;

use gpunvme_abi::Reason;
use lru::LruCache;
use parking_lot::Mutex;
use std::num::NonZeroUsize;
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Registrations begin and end at multiples of this: the page in which GPUs show their memory to
/// other devices.
pub const GRANULE: u64 = 64 << 10;
/// The longest registration. NVIDIA's driver counts in 32 bits what it maps of one export.
pub const MAX_EXPORT: u64 = 2 << 30;
/// Entries, refusals included: as many as a mount lets a process register.
const ENTRIES: NonZeroUsize = NonZeroUsize::new(4096).expect("it is more than none");
/// How long nothing is tried again for an allocation for which there was no room.
const PATIENCE: Duration = Duration::from_secs(1);

/// What registers memory of one GPU with one mount.
pub trait Registrar {
    /// Memory is registered for as long as this lives.
    type Registration;

    /// Exports and registers memory.
    ///
    /// # Errors
    /// The [`Refusal`] says for what else it holds.
    fn register(&self, export: Export) -> Result<Self::Registration, Refusal>;

    /// Whether the allocation was not freed yet.
    fn exists(&self, allocation: &Allocation) -> bool;
}

/// What is registered in one piece: an allocation, or a part of one that is longer than
/// [`MAX_EXPORT`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Export {
    /// The allocation.
    pub allocation: Allocation,
    /// The first byte, a multiple of [`GRANULE`]. It may lie before the allocation.
    pub address: u64,
    /// Length in bytes, likewise.
    pub len: u64,
}

/// Why memory was not registered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// Not now: there is no room, or another resource is short. There may be when something else
    /// was given up, or later.
    NoRoom(Reason),
    /// Not this allocation.
    Allocation(Reason),
    /// Not this GPU's memory.
    Gpu(Reason),
}

/// An allocation in a GPU's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Allocation {
    /// Its number, which no other allocation ever has.
    pub buffer_id: u64,
    /// Its first byte.
    pub base: u64,
    /// Its length in bytes.
    pub len: u64,
}

impl Allocation {
    /// The part to register for the sake of an address in it: whole granules.
    fn export(&self, address: u64) -> Export {
        let start = self.base - self.base % GRANULE;
        let end = (self.base + self.len).next_multiple_of(GRANULE);
        let part = start + (address - start) / MAX_EXPORT * MAX_EXPORT;
        Export { allocation: *self, address: part, len: (end - part).min(MAX_EXPORT) }
    }
}

/// A registration in use. To be held until the transfer is over: it is not given up before.
#[derive(Debug)]
pub struct Lease<T> {
    held: Arc<Held<T>>,
    /// Where the address that was asked for lies in the registered memory, in bytes.
    pub offset: u64,
    /// How much of the allocation is registered from there on, in bytes.
    pub len: u64,
}

impl<T> Deref for Lease<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.held.registration
    }
}

#[derive(Debug)]
struct Held<T> {
    registration: T,
    len: u64,
    /// Of the cache that it came from.
    bytes: Arc<AtomicU64>,
}

impl<T> Drop for Held<T> {
    fn drop(&mut self) {
        self.bytes.fetch_sub(self.len, Ordering::Relaxed);
    }
}

/// The registrations of one GPU's memory with one mount.
#[derive(Debug)]
pub struct Cache<R: Registrar> {
    registrar: R,
    budget: u64,
    /// Bytes that are registered, those of registrations included that are no longer in `state`
    /// and still in use.
    bytes: Arc<AtomicU64>,
    registering: Mutex<()>,
    state: Mutex<CacheEntries<R::Registration>>,
}

#[derive(Debug)]
struct CacheEntries<T> {
    entries: LruCache<Export, Entry<T>>,
    /// Memory of this GPU was registered before.
    accepted: bool,
    /// No memory of this GPU can ever be registered.
    refused: Option<Reason>,
}

#[derive(Debug)]
enum Entry<T> {
    Registered(Arc<Held<T>>),
    /// Refused for ever, or until this time.
    Refused(Reason, Option<Instant>),
}

impl<T> Entry<T> {
    fn is_idle(&self) -> bool {
        // Leases are made under the lock of `state`, so none can come into being while it is held.
        matches!(self, Entry::Registered(held) if Arc::strong_count(held) == 1)
    }
}

impl<R: Registrar> Cache<R> {
    /// An empty cache that never registers more than `budget` bytes: what the GPU's BAR has room
    /// for.
    pub fn new(registrar: R, budget: u64) -> Cache<R> {
        let state = CacheEntries { entries: LruCache::sparse(ENTRIES), accepted: false, refused: None };
        Cache { registrar, budget, bytes: Arc::default(), registering: Mutex::new(()), state: Mutex::new(state) }
    }

    /// The registration in which `address` lies, a byte of the allocation; made if there is none.
    /// `now` is the time.
    ///
    /// # Errors
    /// The reason why there is none.
    pub fn get(&self, allocation: &Allocation, address: u64, now: Instant) -> Result<Lease<R::Registration>, Reason> {
        let export = allocation.export(address);
        let lease = |held| {
            let end = (export.address + export.len).min(allocation.base + allocation.len);
            Lease { held, offset: address - export.address, len: end - address }
        };
        if let Some(known) = self.look_up(&export, now) {
            return known.map(lease);
        }
        let _registering = self.registering.lock();
        // Another thread may just have registered it.
        if let Some(known) = self.look_up(&export, now) {
            return known.map(lease);
        }
        self.drop_freed();
        self.register(export, now).map(lease)
    }

    /// Gives up what is registered of a range of addresses, as soon as no transfer uses it. What
    /// was registered keeps its memory, even memory that the application freed: until this is
    /// called, or until something else is registered.
    pub fn forget(&self, address: u64, len: u64) {
        let end = address.saturating_add(len);
        let touched = |export: &Export| export.address < end && address < export.address + export.len;
        self.remove(|export| touched(export));
    }

    /// Bytes that are registered.
    pub fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    /// What is known of an export.
    fn look_up(&self, export: &Export, now: Instant) -> Option<Result<Arc<Held<R::Registration>>, Reason>> {
        let mut state = self.state.lock();
        if let Some(reason) = state.refused {
            return Some(Err(reason));
        }
        match state.entries.get(export)? {
            Entry::Registered(held) => Some(Ok(held.clone())),
            Entry::Refused(_, Some(until)) if *until <= now => None,
            Entry::Refused(reason, _) => Some(Err(*reason)),
        }
    }

    /// Registers an export, gives up others as far as that is needed, and notes the result.
    fn register(&self, export: Export, now: Instant) -> Result<Arc<Held<R::Registration>>, Reason> {
        let made = loop {
            let short = if export.len > self.budget {
                break Err((Reason::NoRoom, None));
            } else if self.bytes() > self.budget - export.len {
                Reason::NoRoom
            } else {
                match self.registrar.register(export) {
                    Ok(registration) => break Ok(registration),
                    Err(Refusal::NoRoom(reason)) => reason,
                    // What a GPU once allowed it does not refuse on principle.
                    Err(Refusal::Gpu(reason)) if self.state.lock().accepted => reason,
                    Err(Refusal::Gpu(reason)) => {
                        self.state.lock().refused = Some(reason);
                        return Err(reason);
                    }
                    Err(Refusal::Allocation(reason)) => break Err((reason, None)),
                }
            };
            if !self.give_up_one() {
                break Err((short, Some(now + PATIENCE)));
            }
        };
        let (entry, result) = match made {
            Ok(registration) => {
                self.bytes.fetch_add(export.len, Ordering::Relaxed);
                let held = Arc::new(Held { registration, len: export.len, bytes: self.bytes.clone() });
                (Entry::Registered(held.clone()), Ok(held))
            }
            Err((reason, until)) => (Entry::Refused(reason, until), Err(reason)),
        };
        let mut state = self.state.lock();
        state.accepted |= result.is_ok();
        let replaced = state.entries.push(export, entry);
        drop(state);
        drop(replaced); // not under the lock
        result
    }

    /// Gives up the registration that was not used for longest, if there is one that no transfer
    /// uses.
    fn give_up_one(&self) -> bool {
        let mut state = self.state.lock();
        let oldest = state.entries.iter().rev().find(|(_, entry)| entry.is_idle()).map(|(export, _)| *export);
        let given_up = oldest.and_then(|export| state.entries.pop(&export));
        drop(state);
        given_up.is_some()
    }

    /// Drops the registrations of allocations that were freed.
    fn drop_freed(&self) {
        let known: Vec<Export> = self.state.lock().entries.iter().map(|(export, _)| *export).collect();
        let freed: Vec<Export> = known.into_iter().filter(|export| !self.registrar.exists(&export.allocation)).collect();
        self.remove(|export| freed.contains(export));
    }

    fn remove(&self, which: impl Fn(&Export) -> bool) {
        let mut state = self.state.lock();
        let matching: Vec<Export> = state.entries.iter().map(|(export, _)| *export).filter(which).collect();
        let removed: Vec<_> = matching.iter().filter_map(|export| state.entries.pop(export)).collect();
        drop(state);
        drop(removed); // not under the lock
    }
}
