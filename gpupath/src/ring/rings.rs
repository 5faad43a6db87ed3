//! All rings of a mount, and the threads that serve them: a few at the most, each begun when there
//! is a ring for it. A ring keeps to one of them.
//!
//! It guards that a busy ring finds a thread with time for it, while rings that may be idle do not
//! each have one. The load of a ring is unknown when it is made, but never more transfers at a time
//! than it has entries.

use super::count::Count;
use super::deferred_drop::DeferredDrop;
use super::queue_pair::Ring;
use super::readers::Readers;
use super::service::Service;
use super::shares::{Shares, WorkBesideRings};
use super::signal::Signal;
use super::wakes::Wakes;
use super::watch::{Heard, Watch};
use crate::access::Access;
use crate::admission::OpenFile;
use crate::foreign::{Foreign, Kind};
use crate::planner::Alignment;
use crate::process::Process;
use crate::quota::{Limited, quota};
use crate::registry::{Caller, RegistryError};
use crate::server::{Reply, Server};
use gpunvme_abi::Command;
use gpunvme_abi::RingMemory;
use gpunvme_abi::ring::{self, Attach, Detach, RING_ENTRIES, ring_bytes};
use gpunvme_blockdev::Io;
use parking_lot::Mutex;
use rustix::fs::SealFlags;
use rustix::io::Errno;
use rustix::process::Resource;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io;
use std::os::fd::AsFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, OnceLock, Weak, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Rings of one process.
const RINGS_PER_PROCESS: usize = 64;
/// Rings of one process, those included that it gave up and whose transfers are still in flight.
const LIVING_PER_PROCESS: usize = 128;
/// Rings of all.
const RINGS: usize = 1024;
/// Files of all rings: some hundred bytes of the daemon each.
const FILES: u64 = 1 << 20;
/// Descriptors of the daemon that a ring takes: what each side signals the other by, and the owner
/// by two names.
const DESCRIPTORS: usize = 4;
/// About so many small transfers in flight keep a serving thread busy: 100 us each, 3 us of the
/// thread. What a ring can have in flight beyond them makes no difference.
const BUSY: u32 = 32;
/// What the smallest ring counts as: it is that of a thread that waits for what it asks for, with
/// a transfer at a time, or a few long ones. Sixteen such rings on a machine with 16 processors
/// were served as fast by one thread as by four (230 to 260 thousand 4 KiB reads a second, and 200
/// to 220), which took eight processors with those of the kernel.
const WAITING: u32 = 2;

/// How long no further service is asked for where there was none: to ask may take the device's
/// time.
const PAUSE: Duration = Duration::from_secs(10);

/// How many rings there may be at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Limits {
    all: usize,
}

impl Limits {
    /// As many as [`RINGS`], if they take no more than a quarter of this many descriptors.
    fn within(descriptors: u64) -> Limits {
        let descriptors = usize::try_from(descriptors).unwrap_or(usize::MAX);
        Limits { all: RINGS.min(descriptors / 4 / DESCRIPTORS) }
    }

    /// Whether a user who has so many, of so many, may have another.
    fn admit(self, user: u32, of_user: usize, made: usize, entries: u32) -> bool {
        of_user < part(quota(user, self.all as u64, (made - of_user) as u64) as usize, entries)
    }
}

/// The part of a limit up to which rings of so many entries are given: threads that wait for what
/// they ask for can do without the smallest, by a larger ring that they share, and are to leave
/// room for it.
fn part(limit: usize, entries: u32) -> usize {
    if entries == *RING_ENTRIES.start() { limit - limit / 4 } else { limit }
}

/// The rings of a mount.
pub struct Rings {
    limits: Limits,
    server: Arc<Server>,
    io: Arc<Io>,
    watch: Arc<Watch>,
    shares: Arc<Shares>,
    deferred_drop: DeferredDrop,
    wakes: Arc<Wakes>,
    /// The threads of `deferred_drop` and `wakes`.
    helpers: Mutex<Vec<JoinHandle<()>>>,
    /// Filled from the front.
    services: Arc<[OnceLock<Arc<Service>>]>,
    opening: Mutex<Opening>,
    /// Who reads which file.
    readers: Readers,
    files: Arc<Limited>,
    count: Count,
}

/// What making a ring changes. It is locked before a service's rings are.
struct Opening {
    last_id: u64,
    /// The most services that there may be: none after the end.
    services: usize,
    threads: Vec<JoinHandle<()>>,
    /// When a further service was last not to be had.
    refused: Option<Instant>,
    /// All rings that were made; those that are gone leave at the next one.
    made: Vec<Weak<Ring>>,
}

impl Rings {
    /// How many there are. It waits for nothing.
    pub fn count(&self) -> usize {
        self.count.get()
    }

    /// No rings yet. Up to `services` threads, at least one, will serve them, each with a queue of
    /// `io`'s device to itself. Where the device has fewer, those that there are serve.
    ///
    /// # Errors
    /// When the kernel gives no epoll, eventfd or thread, or the device no queue.
    pub fn new(server: Arc<Server>, io: Arc<Io>, services: usize) -> io::Result<Rings> {
        let services = services.max(1);
        let (deferred_drop, dropping) = DeferredDrop::new(spawn)?;
        let (wakes, waking) = Wakes::new(spawn).inspect_err(|_| deferred_drop.end())?;
        let descriptors = rustix::process::getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
        let rings = Rings {
            limits: Limits::within(descriptors),
            server,
            io,
            watch: Arc::new(Watch::new()?),
            shares: Arc::new(Shares::new()),
            deferred_drop,
            wakes,
            readers: Readers::default(),
            files: Limited::new(FILES),
            count: Count::default(),
            helpers: Mutex::new(vec![waking, dropping]),
            services: (0..services).map(|_| OnceLock::new()).collect(),
            opening: Mutex::new(Opening {
                // As with buffers: one mount's name for a ring means nothing to another mount.
                last_id: RandomState::new().build_hasher().finish() >> 2,
                services,
                threads: Vec::new(),
                refused: None,
                made: Vec::new(),
            }),
        };
        {
            let mut opening = rings.opening.lock();
            rings.begin(&mut opening)?;
            let (watch, services) = (rings.watch.clone(), rings.services.clone());
            opening.threads.push(spawn("ring-signals".into(), move || watch.listen(|heard| hear(&services, heard)))?);
        }
        Ok(rings)
    }

    /// `RING`, whose caller must not have been answered. It maps memory, waits for the lock of a
    /// file that its owner may hold, and for the device where that has to give a queue: to be
    /// called by [`Server::take_in`].
    pub fn open(&self, caller: Caller, request: &ring::Ring) -> Reply {
        let opened = self.make(caller, request);
        self.server.stats.call(Command::Ring, opened.is_err());
        match opened {
            Ok(ring) => Reply::new(0, &ring::Ring { ring, ..request.clone() }),
            Err(errno) => Reply::new(errno.raw_os_error(), request),
        }
    }

    /// `ATTACH`, of the file of an inode, which `file` makes, open for the access that the caller
    /// has shown, when it is certain that it may be attached. `thread` is the caller's, which must
    /// not have been answered. To be called by [`Server::take_in`].
    pub fn attach(&self, thread: u32, request: &Attach, ino: u64, file: impl FnOnce(Access) -> Arc<dyn OpenFile>) -> Reply {
        let find = || self.find(thread, request.ring).map(|(_, ring)| (ring.clone(), ring.owner.identity()));
        let attached = match self.server.show(thread, request.claim(), ino, find) {
            Ok(Some((ring, access, grant))) => {
                let only_reads = access.contains(Access::READ) && !access.contains(Access::WRITE);
                let reader = only_reads.then(|| self.readers.add(ino, ring.owner.id));
                let portion = self.files.take(ring.user, 1);
                let name = portion.and_then(|portion| ring.attach(file(access), reader, portion));
                name.map(|file| (file, grant)).ok_or(libc::ENOSPC)
            }
            Ok(None) => Err(libc::ENOENT),
            Err(reason) => Err(RegistryError::Refused(reason).errno()),
        };
        self.server.stats.call(Command::Attach, attached.is_err());
        match attached {
            Ok((file, grant)) => Reply::new(0, &Attach { file, grant, ..request.clone() }),
            Err(errno) => Reply::new(errno, request),
        }
    }

    /// `DETACH`. `thread` is the caller's, which must not have been answered.
    pub fn detach(&self, thread: u32, request: &Detach) -> Reply {
        let detached = self.find(thread, request.ring).ok_or(Errno::NOENT).and_then(|(service, ring)| {
            if request.file == 0 {
                service.remove(&ring);
                return Ok(());
            }
            ring.detach(request.file).then_some(()).ok_or(Errno::NOENT)
        });
        self.server.stats.call(Command::Detach, detached.is_err());
        Reply::new(detached.err().map_or(0, Errno::raw_os_error), request)
    }

    /// Begins work of `user` that reaches the device by other ways than rings, and waits there for
    /// what rings have in flight. Until it is dropped, and for 50 ms after, the rings of other
    /// users leave the user's share free. Work that begins before a ring was ever busy does not
    /// count. It takes a short lock, and never waits for a transfer.
    pub fn begin_beside(&self, user: u32) -> WorkBesideRings {
        self.shares.begin_beside(user)
    }

    /// Ends all rings, after the transfers that are in flight.
    pub fn end(&self) {
        let threads = {
            let mut opening = self.opening.lock();
            opening.services = 0;
            std::mem::take(&mut opening.threads)
        };
        begun(&self.services).for_each(|service| service.end());
        self.watch.end();
        for thread in threads {
            let _ = thread.join(); // a panic there was reported there
        }
        for service in begun(&self.services) {
            service.rings().iter().for_each(|ring| service.remove(ring));
        }
        self.wakes.end();
        self.deferred_drop.end();
        for helper in std::mem::take(&mut *self.helpers.lock()) {
            let _ = helper.join(); // as above
        }
    }

    /// The ring of this name, if it is that thread's process's, and the service that it has.
    fn find(&self, thread: u32, id: u64) -> Option<(&Arc<Service>, Arc<Ring>)> {
        let (service, ring) = find(&self.services, id)?;
        ring.owner.has_thread(thread).then_some((service, ring))
    }

    fn make(&self, caller: Caller, request: &ring::Ring) -> Result<u64, Errno> {
        let owner = Process::of_thread(caller.thread)?;
        let take = |number| Ok(Foreign::new(owner.take_fd(number)?, caller.user, self.server.registry.intake()));
        let len = ring_bytes(request.entries) as u64;
        let memory = take(request.memory)?.memory(len, || false).map_err(|_| Errno::INVAL)?;
        if memory.kind != Kind::Host {
            // A device's memory may be gone at any time, and touching it then is a SIGBUS.
            return Err(Errno::INVAL);
        }
        let submitted = take(request.submitted)?.eventfd().ok_or(Errno::INVAL)?;
        let completed = take(request.completed)?.eventfd().ok_or(Errno::INVAL)?;
        let completed = Signal::new(completed).map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))?;
        let mapped = RingMemory::map(memory.fd.as_fd(), request.entries)?;
        // A hole in it would have this daemon wait for the owner, or get a SIGBUS. No other
        // mapping can be made to write after this.
        rustix::fs::fcntl_add_seals(&memory.fd, SealFlags::FUTURE_WRITE).map_err(|_| Errno::INVAL)?;
        let mut opening = self.opening.lock();
        opening.made.retain(|ring| ring.strong_count() > 0);
        let of_owner = |ring: &Arc<Ring>| ring.owner.id == owner.id && ring.owner.is_alive();
        let open =
            begun(&self.services).map(|service| service.rings().iter().filter(|ring| of_owner(ring)).count()).sum::<usize>();
        let living = opening.made.iter().filter_map(Weak::upgrade).filter(of_owner).count();
        let of_user = opening.made.iter().filter_map(Weak::upgrade).filter(|ring| ring.user == caller.user).count();
        let too_many = open >= part(RINGS_PER_PROCESS, request.entries)
            || living >= LIVING_PER_PROCESS
            || !self.limits.admit(caller.user, of_user, opening.made.len(), request.entries);
        if too_many || opening.services == 0 {
            return Err(Errno::NOSPC);
        }
        opening.last_id += 1;
        let id = opening.last_id;
        let member = self.shares.member(caller.user, owner.id);
        let (deferred_drop, counted) = (self.deferred_drop.clone(), self.count.one());
        let completed = self.wakes.wake(caller.user, completed);
        let ring = Arc::new(Ring::new(id, (caller.user, owner), member, mapped, submitted, completed, (deferred_drop, counted)));
        opening.made.push(Arc::downgrade(&ring));
        self.shares.add(&ring);
        self.service_for(&mut opening, weight(&ring)).add(ring)?;
        Ok(id)
    }

    /// The service for a further ring: the one with the least load, or a new one where this ring
    /// would be too much for every one that exists.
    fn service_for(&self, opening: &mut Opening, weight_of_it: u32) -> Arc<Service> {
        let load = |service: &Service| service.rings().iter().map(|ring| weight(ring)).sum::<u32>();
        let (load, least) = begun(&self.services)
            .map(|service| (load(service), service))
            .min_by_key(|(load, _)| *load)
            .expect("one is always there");
        let refused = opening.refused.is_some_and(|refused| refused.elapsed() < PAUSE);
        if load + weight_of_it > BUSY && begun(&self.services).count() < opening.services && !refused {
            match self.begin(opening) {
                Ok(service) => return service,
                Err(error) => {
                    tracing::info!(%error, "no further thread serves rings for now");
                    opening.refused = Some(Instant::now());
                }
            }
        }
        least.clone()
    }

    /// Begins the next service.
    fn begin(&self, opening: &mut Opening) -> io::Result<Arc<Service>> {
        let number = begun(&self.services).count();
        let (io, server, watch, shares) = (self.io.clone(), self.server.clone(), self.watch.clone(), self.shares.clone());
        let (sender, receiver) = mpsc::sync_channel(1);
        // The queue belongs to its thread.
        let thread = spawn(format!("rings-{number}"), move || {
            let queue = match io.own_queue() {
                Ok(queue) => queue,
                Err(error) => return drop(sender.send(Err(io::Error::other(error)))), // the receiver waits below
            };
            let service = Arc::new(Service::new(number, server, watch, shares, queue.waker()));
            let _ = sender.send(Ok(service.clone())); // as above
            service.serve(&queue, Alignment::for_reads(io.device().geometry()));
        })?;
        let service = receiver.recv().map_err(io::Error::other).and_then(|service| service);
        let service = match service {
            Ok(service) => service,
            Err(error) => {
                let _ = thread.join(); // it has no queue, and ends
                return Err(error);
            }
        };
        opening.threads.push(thread);
        Ok(self.services[number].get_or_init(|| service).clone())
    }
}

impl Drop for Rings {
    fn drop(&mut self) {
        self.end();
    }
}

/// The services that were begun.
fn begun(services: &[OnceLock<Arc<Service>>]) -> impl Iterator<Item = &Arc<Service>> {
    services.iter().map_while(OnceLock::get)
}

/// How much a ring can give its service to do.
fn weight(ring: &Ring) -> u32 {
    match ring.entries() {
        entries if entries == *RING_ENTRIES.start() => WAITING,
        entries => entries.min(BUSY),
    }
}

fn find(services: &[OnceLock<Arc<Service>>], id: u64) -> Option<(&Arc<Service>, Arc<Ring>)> {
    begun(services).find_map(|service| {
        let ring = service.rings().iter().find(|ring| ring.id == id).cloned()?;
        Some((service, ring))
    })
}

/// On the thread that listens.
fn hear(services: &[OnceLock<Arc<Service>>], heard: Heard) {
    match heard {
        Heard::Submitted(number) => services[number].get().expect("it has the ring that was signalled").wake(),
        Heard::Ended(id) => {
            if let Some((service, ring)) = find(services, id) {
                tracing::debug!(process = ring.owner.id, "a process ended; its ring is gone");
                service.remove(&ring);
            }
        }
    }
}

fn spawn(name: String, run: impl FnOnce() + Send + 'static) -> io::Result<JoinHandle<()>> {
    std::thread::Builder::new().name(name).spawn(move || {
        // What a thread that panics was doing to the volume is unknown.
        if catch_unwind(AssertUnwindSafe(run)).is_err() {
            std::process::abort();
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Any number of users that take all they get leave room for root.
    #[test]
    fn no_user_has_all_rings_and_root_always_gets_one() {
        for (descriptors, all) in [(1024, 64), (4096, 256), (1 << 20, RINGS), (u64::MAX, RINGS)] {
            let limits = Limits::within(descriptors);
            assert_eq!(limits.all, all);
            let mut made = 0;
            let of_users: Vec<usize> = (1000..1010)
                .map(|user| {
                    let mut of_user = 0;
                    while limits.admit(user, of_user, made, 16) {
                        (of_user, made) = (of_user + 1, made + 1);
                    }
                    of_user
                })
                .collect();
            assert!(of_users[0] == all * 7 / 16 && of_users[1] == all * 7 / 32, "{of_users:?}");
            assert!(made < all && limits.admit(0, 0, made, 8));
        }
    }
}
