//! The buffers that processes have registered.
//!
//! It guards three things: a buffer is used only by the process that registered it; its memory
//! stays mapped for as long as a transfer uses it; and it is gone when its process is, however
//! that ends. One thread watches the processes.
//!
//! Locks: `Tables`, and that of the accounts, each alone and held for map operations only. Nothing
//! is mapped, unmapped or closed under them.

mod accounts;
#[cfg(test)]
mod tests;

pub use accounts::{Amounts, Limits};

use crate::foreign::{Foreign, Kind, Memory};
use crate::intake::Intake;
use crate::process::{Client, Identity, Process};
use accounts::{Accounts, Charge};
use gpunvme_abi::{Reason, Register, RegisterFlags, Route};
use gpunvme_blockdev::{BlockDevice, NoPeerToPeer, Region};
use parking_lot::RwLock;
use rustc_hash::FxHashMap;
use rustix::event::{EventfdFlags, epoll};
use rustix::io::Errno;
use rustix::process::{Resource, Rlimit};
use std::collections::hash_map;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

/// Registered memory. A transfer holds it from before its first command until after its last
/// completion: dropping the last handle takes the memory out of the device's reach.
pub struct Buffer {
    /// Its name in the ABI.
    pub id: u64,
    /// The memory.
    pub region: Arc<Region>,
    /// The route of transfers to and from it.
    pub route: Route,
    /// Why that is not a faster one.
    pub reason: Reason,
    device: Arc<dyn BlockDevice>,
    revoked: AtomicBool,
    /// Goes last: what it counts is held until then.
    _charge: Charge,
}

impl Buffer {
    /// Whether it was unregistered, or its process ended: nothing may begin on it then.
    pub fn is_revoked(&self) -> bool {
        self.revoked.load(Ordering::Acquire)
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        self.device.unmap(&self.region);
    }
}

/// Why a buffer was not registered, not unregistered or not found.
#[derive(Debug, thiserror::Error)]
pub enum RegistryError {
    /// The calling process cannot be told from its thread id.
    #[error("the calling process is not visible from here ({0}); it can register over the socket")]
    UnknownCaller(Errno),
    /// The descriptor cannot be taken from the caller.
    #[error("may not take a descriptor from process {process} ({errno}); it can register over the socket")]
    NotReachable {
        /// The process.
        process: u32,
        /// What the kernel said.
        errno: Errno,
    },
    /// The caller has no such descriptor, or sent none.
    #[error("process {process} has no descriptor {fd}")]
    BadFd {
        /// The process.
        process: u32,
        /// The number it gave.
        fd: i32,
    },
    /// The descriptor, or the length, cannot be a buffer; or there are too many.
    #[error("refused: {}", .0.explain())]
    Refused(Reason),
    /// The daemon could not map it.
    #[error(transparent)]
    Device(#[from] gpunvme_blockdev::Error),
    /// The kernel refused what watching the process takes.
    #[error("cannot watch process {process}: {errno}")]
    Watch {
        /// The process.
        process: u32,
        /// What the kernel said.
        errno: Errno,
    },
}

impl RegistryError {
    /// The errno that the ioctl fails with.
    pub fn errno(&self) -> i32 {
        match self {
            RegistryError::UnknownCaller(errno)
            | RegistryError::NotReachable { errno, .. }
            | RegistryError::Watch { errno, .. } => errno.raw_os_error(),
            RegistryError::BadFd { .. } => libc::EBADF,
            RegistryError::Refused(reason) => match reason {
                Reason::ProcessLimit | Reason::UserLimit | Reason::TotalLimit => libc::ENOSPC,
                Reason::NoSuchBuffer => libc::ENOENT,
                Reason::DescriptorHidden => libc::EPERM,
                Reason::WrongDescriptor => libc::EBADF,
                Reason::NotWritable => libc::EACCES,
                Reason::NoVfio | Reason::IommufdCompat | Reason::MmapRefused | Reason::MapDmaRefused | Reason::NotGpuMemory => {
                    libc::EOPNOTSUPP
                }
                Reason::MemlockLimit => libc::ENOMEM,
                _ => libc::EINVAL,
            },
            RegistryError::Device(error) => error.errno(),
        }
    }

    /// The reason for [`Register::reason`].
    pub fn reason(&self) -> Reason {
        match self {
            RegistryError::UnknownCaller(_) | RegistryError::NotReachable { .. } => Reason::FdNotReachable,
            RegistryError::Refused(reason) => *reason,
            RegistryError::BadFd { .. } => Reason::NotABuffer,
            RegistryError::Device(_) | RegistryError::Watch { .. } => Reason::None,
        }
    }
}

/// Whether a device reaches the memory of other devices.
///
/// # Errors
/// The reason why it does not.
pub fn peer_to_peer(device: &dyn BlockDevice) -> Result<(), Reason> {
    device.peer_to_peer().map_err(|no| match no {
        NoPeerToPeer::KernelDriver => Reason::NoVfio,
        NoPeerToPeer::IommufdCompat => Reason::IommufdCompat,
    })
}

/// The caller of a FUSE request that has not been answered yet.
#[derive(Clone, Copy, Debug)]
pub struct Caller {
    /// The thread, by its id in this process's pid namespace.
    pub thread: u32,
    /// The user in whose name it acts.
    pub user: u32,
}

/// What is registered now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Buffers.
    pub buffers: u64,
    /// Bytes in them.
    pub bytes: u64,
    /// Processes that own them.
    pub processes: u64,
}

/// The buffers of all processes.
pub struct Registry {
    shared: Arc<Shared>,
    stop: OwnedFd,
    watcher: Option<JoinHandle<()>>,
}

struct Shared {
    device: Arc<dyn BlockDevice>,
    accounts: Arc<Accounts>,
    intake: Intake,
    epoll: OwnedFd,
    state: RwLock<Tables>,
}

#[derive(Default)]
struct Tables {
    owners: FxHashMap<u32, Owner>,
    buffers: FxHashMap<u64, Entry>,
    bytes: u64,
    last_id: u64,
}

struct Owner {
    process: Arc<Process>,
    buffers: u32,
}

struct Entry {
    buffer: Arc<Buffer>,
    owner: Arc<Process>,
}

/// The watcher's own event; no process has this id.
const STOP: u64 = u64::MAX;

impl Registry {
    /// A registry for a device, with a thread that watches its clients. Raises the process's limit
    /// of descriptors as far as it may.
    ///
    /// # Errors
    /// When the kernel gives no epoll, eventfd or thread.
    pub fn new(device: Arc<dyn BlockDevice>, limits: Limits) -> std::io::Result<Registry> {
        // A buffer takes a descriptor, and with its process two more. The soft limit is as low as
        // it usually is for the sake of select(), which is not used here. A quarter of the hard
        // one leaves the daemon enough for itself.
        let Rlimit { maximum, .. } = rustix::process::getrlimit(Resource::Nofile);
        let _ = rustix::process::setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }); // what it is, is asked for next
        let descriptors = rustix::process::getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
        let fewer = |amounts: Amounts| Amounts { buffers: amounts.buffers.min(descriptors / 4), ..amounts };
        let limits = Limits { process: fewer(limits.process), all: fewer(limits.all) };
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let stop = rustix::event::eventfd(0, EventfdFlags::CLOEXEC)?;
        epoll::add(&epoll, &stop, epoll::EventData::new_u64(STOP), epoll::EventFlags::IN)?;
        // Names begin anywhere, so that one mount's name for a buffer means nothing to another
        // mount.
        let last_id = RandomState::new().build_hasher().finish() >> 1;
        let state = RwLock::new(Tables { last_id, ..Tables::default() });
        let shared = Arc::new(Shared { device, accounts: Accounts::new(limits), intake: Intake::new()?, epoll, state });
        let watcher = std::thread::Builder::new().name("buffer-owners".into()).spawn({
            let shared = shared.clone();
            move || shared.watch()
        })?;
        Ok(Registry { shared, stop, watcher: Some(watcher) })
    }

    /// The limits in force.
    pub fn limits(&self) -> Limits {
        self.shared.accounts.limits()
    }

    /// The threads for calls that may wait for clients.
    pub(crate) fn intake(&self) -> &Intake {
        &self.shared.intake
    }

    /// What is registered now.
    pub fn usage(&self) -> Usage {
        let state = self.shared.state.read();
        Usage { buffers: state.buffers.len() as u64, bytes: state.bytes, processes: state.owners.len() as u64 }
    }

    /// Registers a descriptor that a process names by its number.
    ///
    /// # Errors
    /// See [`RegistryError`]. Nothing is kept of a buffer that was refused.
    pub fn register(&self, caller: Caller, request: &Register) -> Result<Arc<Buffer>, RegistryError> {
        let process = Process::of_thread(caller.thread).map_err(RegistryError::UnknownCaller)?;
        let taken = if request.fd < 0 { Err(Errno::BADF) } else { process.take_fd(request.fd) };
        let fd = taken.map_err(|errno| match errno {
            Errno::BADF => RegistryError::BadFd { process: process.id, fd: request.fd },
            errno => RegistryError::NotReachable { process: process.id, errno },
        })?;
        let fd = Foreign::new(fd, caller.user, &self.shared.intake);
        self.adopt(Client { process, user: caller.user }, fd, request)
    }

    /// Registers a descriptor that was received from a client.
    pub(crate) fn adopt(&self, client: Client, fd: Foreign, request: &Register) -> Result<Arc<Buffer>, RegistryError> {
        let memory = fd.memory(request.len, || client.is_root()).map_err(RegistryError::Refused)?;
        match memory.kind {
            Kind::Host => {
                let region = Region::from_fd(memory.fd, memory.len, true)?;
                // What its owner has not paid for would come out of the daemon's purse.
                if !region.is_allocated() {
                    return Err(RegistryError::Refused(Reason::NotAllocated));
                }
                // Of the two routes that end in host memory, only its owner knows which it is for.
                let staging = RegisterFlags::from_bits_retain(request.flags).contains(RegisterFlags::STAGING);
                self.enter(client, region, if staging { Route::Bounce } else { Route::Host })
            }
            Kind::Device => self.enter(client, self.device_region(memory)?, Route::P2p),
        }
    }

    /// The region of a device's memory, where the SSD can reach such memory at all.
    fn device_region(&self, memory: Memory) -> Result<Arc<Region>, RegistryError> {
        peer_to_peer(&*self.shared.device).map_err(RegistryError::Refused)?;
        let region = Region::of_device(memory.fd, memory.len).map_err(|error| {
            tracing::debug!(%error, "a device's memory cannot be mapped");
            match error.errno() {
                // It says nothing of the device: this process has too many mappings, or no memory.
                libc::ENOMEM => error.into(),
                _ => RegistryError::Refused(Reason::MmapRefused),
            }
        })?;
        // A dma-buf can be over anything. The IOMMU would take this, and the bytes would go to
        // host memory.
        if region.is_host_memory() {
            return Err(RegistryError::Refused(Reason::NotGpuMemory));
        }
        Ok(region)
    }

    /// Makes a region reachable for the device, and a buffer of it.
    fn enter(&self, client: Client, region: Arc<Region>, route: Route) -> Result<Arc<Buffer>, RegistryError> {
        let bytes = region.len() as u64;
        let amounts = Amounts { buffers: 1, bytes, host_bytes: if route == Route::P2p { 0 } else { bytes } };
        // Before it is mapped, so that what is refused is not pinned first.
        let charge = self.shared.accounts.charge(client.user, client.process.identity(), amounts);
        let charge = charge.map_err(RegistryError::Refused)?;
        self.shared.device.map(&region).map_err(|error| match route {
            Route::P2p => {
                tracing::warn!(process = client.process.id, %error, "the IOMMU did not take a device's memory");
                RegistryError::Refused(Reason::MapDmaRefused)
            }
            // vfio_iommu_type1's answer for what exceeds RLIMIT_MEMLOCK.
            _ if error.errno() == libc::ENOMEM => RegistryError::Refused(Reason::MemlockLimit),
            _ => error.into(),
        })?;
        let reason = if route == Route::P2p { Reason::None } else { Reason::NotGpuMemory };
        let (device, revoked) = (self.shared.device.clone(), AtomicBool::new(false));
        self.shared.insert(client.process, Buffer { id: 0, region, route, reason, device, revoked, _charge: charge })
    }

    /// Forgets a buffer: nothing begins on it any more. Transfers in flight on it keep its memory
    /// until they are done, and so long it counts.
    ///
    /// # Errors
    /// [`Reason::NoSuchBuffer`] where the caller owns no such buffer.
    pub fn unregister(&self, thread: u32, id: u64) -> Result<(), RegistryError> {
        self.lookup(thread, id)?;
        self.remove(id)
    }

    /// As [`Registry::unregister`], for a process that is known by more than its id.
    pub(crate) fn unregister_of(&self, process: &Process, id: u64) -> Result<(), RegistryError> {
        self.lookup_of(process, id)?;
        self.remove(id)
    }

    fn remove(&self, id: u64) -> Result<(), RegistryError> {
        let removed = self.shared.state.write().remove(id, &self.shared.epoll);
        removed.map(drop).ok_or(RegistryError::Refused(Reason::NoSuchBuffer))
    }

    /// A buffer that the process of this thread owns. The call that the thread makes must not have
    /// been answered yet.
    ///
    /// # Errors
    /// [`Reason::NoSuchBuffer`] where the caller owns no such buffer.
    pub fn lookup(&self, thread: u32, id: u64) -> Result<Arc<Buffer>, RegistryError> {
        self.lookup_with_owner(thread, id).map(|(buffer, _)| buffer)
    }

    /// As [`Registry::lookup`], with the process that owns it.
    pub(crate) fn lookup_with_owner(&self, thread: u32, id: u64) -> Result<(Arc<Buffer>, Identity), RegistryError> {
        self.find(id, |owner| owner.has_thread(thread))
    }

    /// A buffer that this process owns, which may have ended.
    pub(crate) fn lookup_of(&self, process: &Process, id: u64) -> Result<Arc<Buffer>, RegistryError> {
        self.find(id, |owner| owner.identity() == process.identity()).map(|(buffer, _)| buffer)
    }

    fn find(&self, id: u64, owns: impl FnOnce(&Process) -> bool) -> Result<(Arc<Buffer>, Identity), RegistryError> {
        let found = self.shared.state.read().buffers.get(&id).map(|entry| (entry.buffer.clone(), entry.owner.clone()));
        match found {
            Some((buffer, owner)) if owns(&owner) => Ok((buffer, owner.identity())),
            _ => Err(RegistryError::Refused(Reason::NoSuchBuffer)),
        }
    }
}

impl Drop for Registry {
    fn drop(&mut self) {
        let woken = rustix::io::write(&self.stop, &1u64.to_ne_bytes());
        if let (Ok(_), Some(watcher)) = (woken, self.watcher.take()) {
            let _ = watcher.join(); // a panic there was reported there
        }
    }
}

impl Shared {
    /// A buffer that is refused is dropped after the lock, because it was made before it.
    fn insert(&self, process: Process, mut buffer: Buffer) -> Result<Arc<Buffer>, RegistryError> {
        let (len, id) = (buffer.region.len() as u64, process.id);
        // Drops the buffers of the process that had this id before, if it is not the same one.
        self.reap(id);
        let mut state = self.state.write();
        let Tables { owners, last_id, .. } = &mut *state;
        let owner = match owners.entry(id) {
            // The process that asks has ended since, and another one has its id.
            hash_map::Entry::Occupied(owner) if owner.get().process.identity() != process.identity() => {
                return Err(RegistryError::UnknownCaller(Errno::SRCH));
            }
            hash_map::Entry::Occupied(owner) => owner.into_mut(),
            hash_map::Entry::Vacant(vacant) => {
                let data = epoll::EventData::new_u64(id.into());
                // Under the lock, so that the event of a process that dies now waits for the
                // entry.
                epoll::add(&self.epoll, &process, data, epoll::EventFlags::IN)
                    .map_err(|errno| RegistryError::Watch { process: id, errno })?;
                vacant.insert(Owner { process: Arc::new(process), buffers: 0 })
            }
        };
        owner.buffers += 1;
        *last_id += 1;
        buffer.id = *last_id;
        let buffer = Arc::new(buffer);
        let entry = Entry { buffer: buffer.clone(), owner: owner.process.clone() };
        state.bytes += len;
        state.buffers.insert(buffer.id, entry);
        Ok(buffer)
    }

    /// The watcher thread.
    fn watch(&self) {
        let mut events = Vec::with_capacity(64);
        loop {
            events.clear();
            match epoll::wait(&self.epoll, rustix::buffer::spare_capacity(&mut events), None) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(errno) => {
                    tracing::error!(%errno, "cannot watch the processes that own buffers; buffers of those that end stay until unmount");
                    return;
                }
            }
            for event in &events {
                let data = event.data.u64();
                if data == STOP {
                    return;
                }
                self.reap(data as u32);
            }
        }
    }

    /// Drops the buffers of the process with this id if it is dead. It need not be: the id may be
    /// another's by now.
    fn reap(&self, id: u32) {
        let mut state = self.state.write();
        if state.owners.get(&id).is_some_and(|owner| !owner.process.is_alive()) {
            let buffers = state.remove_owner(id, &self.epoll);
            drop(state);
            tracing::debug!(process = id, buffers = buffers.len(), "a process ended; its buffers are gone");
        }
    }
}

impl Tables {
    /// Removes a buffer, and its owner with the last one. What is returned must be dropped without
    /// the lock.
    fn remove(&mut self, id: u64, epoll: &OwnedFd) -> Option<Entry> {
        let entry = self.buffers.remove(&id)?;
        entry.buffer.revoked.store(true, Ordering::Release);
        self.bytes -= entry.buffer.region.len() as u64;
        let owner = self.owners.get_mut(&entry.owner.id).expect("a buffer's owner stays as long as it");
        owner.buffers -= 1;
        if owner.buffers == 0 {
            forget(epoll, &entry.owner);
            self.owners.remove(&entry.owner.id);
        }
        Some(entry)
    }

    /// Removes a process and all its buffers. What is returned must be dropped without the lock.
    fn remove_owner(&mut self, process: u32, epoll: &OwnedFd) -> Vec<Entry> {
        let ids: Vec<u64> =
            self.buffers.values().filter(|entry| entry.owner.id == process).map(|entry| entry.buffer.id).collect();
        ids.into_iter().filter_map(|id| self.remove(id, epoll)).collect()
    }
}

/// Ends the watch over a process. Closing the pidfd would not while a lookup still holds it.
fn forget(epoll: &OwnedFd, process: &Process) {
    if let Err(errno) = epoll::delete(epoll, process) {
        tracing::warn!(process = process.id, %errno, "cannot end the watch over a process");
    }
}
