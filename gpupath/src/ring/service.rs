//! The daemon's end of all rings of a mount: one thread that takes submissions, begins them, and ends them when the device is done, on a queue of
//! its own. It never waits for a single transfer: what has to wait for something else than the device goes on elsewhere, and is completed from there.
//!
//! It guards fairness. Rings take turns, a few submissions each; and while several are busy, none may have more than its share under way, because what the device
//! has been given it serves in the order in which it came. As long as there is work the thread looks at the rings themselves; when there is none it
//! soon sleeps until the device answers, and says so in each ring, so that the next submission wakes it: a second thread hears the applications' signals,
//! and of their end.

use super::memory::RingMemory;
use super::queue_pair::{Broken, Ring};
use super::signal::Signal;
use crate::abi::ring::{self, Attach, Completion, Detach, ring_bytes};
use crate::abi::{Command, Reason, TransferRequest};
use crate::foreign;
use crate::process::Process;
use crate::registry::Buffer;
use crate::server::{Answer, Reply, Server};
use gpunvme_blockdev::{Io, OwnQueue, Wait, Waker};
use parking_lot::Mutex;
use rustix::event::{EventfdFlags, epoll};
use rustix::io::Errno;
use std::cell::Cell;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::os::fd::{AsFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
use std::sync::{Arc, OnceLock, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Submissions that a ring may have taken in one turn.
const TURN: u32 = 32;
/// What all rings together may have under way before they have to share: enough to keep any device busy.
const SHARED_TRANSFERS: u32 = 1024;
const SHARED_BYTES: u64 = 64 << 20;
/// How long the thread looks at rings in which nothing happens before it sleeps. Less than what being woken costs an application.
const LINGER: Duration = Duration::from_micros(50);
/// How often the thread looks, at the end, whether the last transfers are over.
const DRAIN: Duration = Duration::from_millis(1);
/// Rings of one process, and of all.
const RINGS_PER_PROCESS: usize = 64;
const RINGS: usize = 1024;
/// The end of the thread that listens.
const END: u64 = u64::MAX;
/// The event of an application's eventfd. Which one does not matter: all rings are looked at.
const SUBMITTED: u64 = u64::MAX - 1;

thread_local! {
    /// Whether this is the thread that serves.
    static SERVING: Cell<bool> = const { Cell::new(false) };
}

/// A file that was attached to a ring: what it was opened for goes with it.
pub trait AttachedFile: Send + Sync {
    /// Begins a `READ` or `WRITE` (which of the two, `command` says) between the file and a buffer that the ring's owner owns. `taken` gets the answer
    /// that the ioctl would have given. It must not wait for a device.
    fn transfer(&self, command: Command, request: TransferRequest, buffer: Arc<Buffer>, taken: Taken);
}

/// A submission that was taken from a ring, and has to be answered. Dropped without an answer it is answered with `EIO`: its ring's end would wait for it for ever.
pub struct Taken {
    shared: Arc<Shared>,
    ring: Arc<Ring>,
    user_data: u64,
    /// Bytes that it asks for.
    len: u64,
    answered: bool,
}

/// The rings of a mount.
pub struct Rings {
    shared: Arc<Shared>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

struct Shared {
    server: Arc<Server>,
    /// What the applications signal, and their ends.
    epoll: OwnedFd,
    end: OwnedFd,
    /// Wakes the thread that serves.
    waker: OnceLock<Waker>,
    /// It sleeps, or is about to.
    asleep: AtomicBool,
    ending: AtomicBool,
    last_id: AtomicU64,
    /// Replaced as a whole when one comes or goes.
    rings: Mutex<Arc<Vec<Arc<Ring>>>>,
}

impl Rings {
    /// No rings yet. They will have a queue of `io`'s device to themselves.
    ///
    /// # Errors
    /// When the kernel gives no epoll, eventfd or thread, or the device no queue.
    pub fn new(server: Arc<Server>, io: Arc<Io>) -> std::io::Result<Rings> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let end = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        epoll::add(&epoll, &end, epoll::EventData::new_u64(END), epoll::EventFlags::IN)?;
        let shared = Arc::new(Shared {
            server,
            epoll,
            end,
            waker: OnceLock::new(),
            asleep: AtomicBool::new(false),
            ending: AtomicBool::new(false),
            // As with buffers: one mount's name for a ring means nothing to another mount.
            last_id: AtomicU64::new(RandomState::new().build_hasher().finish() >> 1),
            rings: Mutex::default(),
        });
        let rings = Rings { shared: shared.clone(), threads: Mutex::default() };
        let (sender, began) = mpsc::sync_channel(1);
        let server = shared.clone();
        rings.start("rings", move || match io.own_queue() {
            Ok(queue) => {
                let _ = server.waker.set(queue.waker()); // nobody else sets it
                let _ = sender.send(Ok(())); // the receiver waits below
                server.serve(&queue);
            }
            Err(error) => {
                let _ = sender.send(Err(std::io::Error::other(error)));
            }
        })?;
        began.recv().map_err(std::io::Error::other)??;
        rings.start("ring-signals", move || shared.listen())?;
        Ok(rings)
    }

    fn start(&self, name: &str, run: impl FnOnce() + Send + 'static) -> std::io::Result<()> {
        let thread = std::thread::Builder::new().name(name.into()).spawn(move || {
            // What a thread that panics was doing to the volume is unknown.
            if catch_unwind(AssertUnwindSafe(run)).is_err() {
                std::process::abort();
            }
        })?;
        self.threads.lock().push(thread);
        Ok(())
    }

    /// `RING`. `thread` is the caller's id in a FUSE request that must not have been answered. It maps memory: not for the thread that everybody waits for.
    pub fn open(&self, thread: u32, request: &ring::Ring) -> Reply {
        let opened = self.shared.open(thread, request);
        self.shared.server.stats.call(Command::Ring, opened.is_err());
        match opened {
            Ok(ring) => Reply::new(0, &ring::Ring { ring, ..request.clone() }),
            Err(errno) => Reply::new(errno.raw_os_error(), request),
        }
    }

    /// `ATTACH`, of a file that `file` makes when it is certain that it may be attached. `thread` as in [`Rings::open`].
    pub fn attach(&self, thread: u32, request: &Attach, file: impl FnOnce() -> Arc<dyn AttachedFile>) -> Reply {
        let ring = self.shared.find(thread, request.ring);
        let attached = ring.ok_or(Errno::NOENT).and_then(|ring| ring.attach(file()).ok_or(Errno::NOSPC));
        self.shared.server.stats.call(Command::Attach, attached.is_err());
        match attached {
            Ok(file) => Reply::new(0, &Attach { file, ..request.clone() }),
            Err(errno) => Reply::new(errno.raw_os_error(), request),
        }
    }

    /// `DETACH`. `thread` as in [`Rings::open`].
    pub fn detach(&self, thread: u32, request: &Detach) -> Reply {
        let detached = self.shared.find(thread, request.ring).ok_or(Errno::NOENT).and_then(|ring| {
            if request.file == 0 {
                self.shared.remove(&ring);
                return Ok(());
            }
            ring.detach(request.file).map(drop).ok_or(Errno::NOENT)
        });
        self.shared.server.stats.call(Command::Detach, detached.is_err());
        Reply::new(detached.err().map_or(0, Errno::raw_os_error), request)
    }

    /// Ends all rings, after the transfers that are under way.
    pub fn end(&self) {
        self.shared.ending.store(true, Ordering::SeqCst);
        self.shared.wake_up();
        let _ = rustix::io::write(&self.shared.end, &1u64.to_ne_bytes()); // never full: it is written once
        for thread in self.threads.lock().drain(..) {
            let _ = thread.join(); // a panic there was reported there
        }
        for ring in self.shared.all().iter() {
            self.shared.remove(ring);
        }
    }
}

impl Drop for Rings {
    fn drop(&mut self) {
        self.end();
    }
}

impl Shared {
    fn all(&self) -> Arc<Vec<Arc<Ring>>> {
        self.rings.lock().clone()
    }

    /// The ring of this name, if it is that thread's process's.
    fn find(&self, thread: u32, id: u64) -> Option<Arc<Ring>> {
        let ring = self.all().iter().find(|ring| ring.id == id).cloned()?;
        ring.owner.has_thread(thread).then_some(ring)
    }

    fn open(&self, thread: u32, request: &ring::Ring) -> Result<u64, Errno> {
        let owner = Process::of_thread(thread)?;
        if !foreign::may_accept() {
            return Err(Errno::NOSPC);
        }
        let len = ring_bytes(request.entries) as u64;
        let memory = foreign::accept(owner.take_fd(request.memory)?, len, || false).map_err(|_| Errno::INVAL)?;
        if memory.kind != foreign::Kind::Host {
            // A device's memory may be gone at any time, and touching it then is a SIGBUS.
            return Err(Errno::INVAL);
        }
        let submitted = foreign::accept_eventfd(owner.take_fd(request.submitted)?).ok_or(Errno::INVAL)?;
        let completed = foreign::accept_eventfd(owner.take_fd(request.completed)?).ok_or(Errno::INVAL)?;
        let completed = Signal::new(completed).map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))?;
        let mapped = RingMemory::map(memory.fd.as_fd(), request.entries)?;
        // A hole in it would have this daemon wait for the owner, or get a SIGBUS.
        foreign::seal_mapped(memory.fd)?;
        let id = self.last_id.fetch_add(1, Ordering::Relaxed) + 1;
        let ring = Arc::new(Ring::new(id, owner, mapped, submitted, completed));
        let mut rings = self.rings.lock();
        let owned = rings.iter().filter(|other| other.owner.id == ring.owner.id && other.owner.is_alive()).count();
        if owned >= RINGS_PER_PROCESS || rings.len() >= RINGS || self.ending.load(Ordering::Acquire) {
            return Err(Errno::NOSPC);
        }
        // Edges only: nobody reads the counter, and each signal is a new edge.
        let edge = epoll::EventFlags::IN | epoll::EventFlags::ET;
        epoll::add(&self.epoll, &ring.submitted, epoll::EventData::new_u64(SUBMITTED), edge)?;
        epoll::add(&self.epoll, &ring.owner, epoll::EventData::new_u64(id), epoll::EventFlags::IN)
            .inspect_err(|_| forget(&self.epoll, &ring.submitted))?;
        let more = rings.iter().cloned().chain([ring]).collect();
        *rings = Arc::new(more);
        drop(rings);
        self.wake_up();
        Ok(id)
    }

    fn remove(&self, ring: &Arc<Ring>) {
        {
            let mut rings = self.rings.lock();
            if !rings.iter().any(|other| Arc::ptr_eq(other, ring)) {
                return;
            }
            let rest = rings.iter().filter(|other| !Arc::ptr_eq(other, ring)).cloned().collect();
            *rings = Arc::new(rest);
            forget(&self.epoll, &ring.submitted);
            forget(&self.epoll, &ring.owner);
        }
        ring.close();
    }

    fn wake_up(&self) {
        if let Some(waker) = self.waker.get() {
            waker.wake();
        }
    }

    /// The thread that serves.
    fn serve(self: &Arc<Self>, queue: &OwnQueue) {
        SERVING.set(true);
        let mut first = 0;
        let mut busy = Instant::now();
        while !self.ending.load(Ordering::Acquire) {
            let rings = self.all();
            first += 1;
            if self.turn(&rings, first, queue, Wait::No) {
                busy = Instant::now();
                continue;
            }
            if busy.elapsed() < LINGER && !rings.is_empty() {
                // On a machine with nothing to spare the device, or the application, may need this processor.
                std::thread::yield_now();
                continue;
            }
            self.asleep.store(true, Ordering::SeqCst);
            rings.iter().for_each(|ring| ring.set_asleep(true));
            // Whoever submitted before seeing that word did not signal, and whoever completed did not either: looks once more, then sleeps.
            fence(Ordering::SeqCst);
            // A wake for a new ring, or for the end, may have been taken by the turn before.
            if !self.ending.load(Ordering::SeqCst) && Arc::ptr_eq(&self.all(), &rings) {
                self.turn(&rings, first, queue, Wait::Forever);
            }
            self.asleep.store(false, Ordering::SeqCst);
            rings.iter().for_each(|ring| ring.set_asleep(false));
            busy = Instant::now();
        }
        // Once a ring says that it is closed its application may use the memory again. Transfers that went on elsewhere wake nobody here.
        while self.all().iter().any(|ring| ring.load().0 > 0) {
            queue.run(Wait::Timeout(DRAIN));
        }
    }

    /// The thread that listens.
    fn listen(&self) {
        let mut events = Vec::with_capacity(64);
        while !self.ending.load(Ordering::Acquire) {
            events.clear();
            match epoll::wait(&self.epoll, rustix::buffer::spare_capacity(&mut events), None) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(errno) => {
                    tracing::error!(%errno, "rings are not heard any more until the next mount");
                    return;
                }
            }
            let mut submitted = false;
            for event in &events {
                match event.data.u64() {
                    END => return,
                    SUBMITTED => submitted = true,
                    id => {
                        if let Some(ring) = self.all().iter().find(|ring| ring.id == id) {
                            tracing::debug!(process = ring.owner.id, "a process ended; its ring is gone");
                            self.remove(ring);
                        }
                    }
                }
            }
            if submitted {
                self.wake_up();
            }
        }
    }

    /// Takes from each ring what may be taken now, gives it to the device, and ends what the device has done, for which it waits where there was nothing to
    /// take. Returns whether anything happened.
    fn turn(self: &Arc<Self>, rings: &[Arc<Ring>], first: usize, queue: &OwnQueue, wait: Wait) -> bool {
        let taken = self.take(rings, first);
        let done = queue.run(if taken { Wait::No } else { wait });
        rings.iter().for_each(|ring| ring.wake_if_due());
        taken || done > 0
    }

    /// Takes from each ring what may be taken now. Returns whether anything was.
    fn take(self: &Arc<Self>, rings: &[Arc<Ring>], first: usize) -> bool {
        let mut ready = Vec::new();
        let mut active = 0;
        for at in 0..rings.len() {
            let ring = &rings[(first + at) % rings.len()];
            if ring.is_closed() {
                continue;
            }
            match ring.pending() {
                Ok(pending) => {
                    active += u32::from(pending > 0 || ring.load().0 > 0);
                    if pending > 0 {
                        ready.push((ring, pending));
                    }
                }
                Err(broken) => self.give_up(ring, &broken),
            }
        }
        let mut any = false;
        for (ring, pending) in ready {
            match ring.room() {
                Ok(room) => {
                    for _ in 0..pending.min(room).min(TURN) {
                        let (transfers, bytes) = ring.load();
                        let share = transfers < SHARED_TRANSFERS / active && bytes < SHARED_BYTES / u64::from(active);
                        if transfers > 0 && !share {
                            break;
                        }
                        self.begin(ring);
                        any = true;
                    }
                }
                Err(broken) => self.give_up(ring, &broken),
            }
        }
        any
    }

    fn give_up(&self, ring: &Arc<Ring>, broken: &Broken) {
        tracing::warn!(ring = ring.id, "{broken}; the ring is closed");
        self.remove(ring);
    }

    /// Takes one submission and begins it.
    fn begin(self: &Arc<Self>, ring: &Arc<Ring>) {
        let submission = ring.take();
        let taken = Taken {
            shared: self.clone(),
            ring: ring.clone(),
            user_data: submission.user_data,
            len: submission.len,
            answered: false,
        };
        let Some((command, request)) = submission.decode() else { return taken.refuse(libc::EINVAL, Reason::None) };
        let Some(file) = ring.file(submission.file) else { return taken.refuse(libc::EBADF, Reason::None) };
        match ring.buffer(request.buffer, || self.server.registry.lookup(ring.owner.id, request.buffer)) {
            Ok(buffer) => file.transfer(command, request, buffer, taken),
            Err(error) => taken.refuse(error.errno(), error.reason()),
        }
    }
}

impl Taken {
    /// Ends it with what the ioctl would have answered.
    pub fn answer(mut self, answer: Answer) {
        let Answer { errno, transfer } = answer;
        self.complete(Completion {
            user_data: self.user_data,
            status: if errno == 0 { transfer.status } else { errno },
            reason: transfer.reason,
            p2p: transfer.p2p,
            bounce: transfer.bounce,
            host: transfer.host,
            hole: transfer.hole,
            edge: transfer.edge,
            reserved: 0,
        });
    }

    fn refuse(mut self, errno: i32, reason: Reason) {
        self.complete(Completion { user_data: self.user_data, status: errno, reason: reason.code(), ..Completion::default() });
    }

    fn complete(&mut self, completion: Completion) {
        self.answered = true;
        let Taken { shared, ring, len, .. } = self;
        ring.complete(*len, &completion);
        if SERVING.get() {
            // The application is woken once for all that ends in this turn.
            return;
        }
        ring.wake_if_due();
        // The thread may have left submissions lying because too much was under way.
        fence(Ordering::SeqCst);
        if shared.asleep.load(Ordering::SeqCst) && ring.pending().is_ok_and(|pending| pending > 0) {
            shared.wake_up();
        }
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        if !self.answered {
            self.complete(Completion { user_data: self.user_data, status: libc::EIO, ..Completion::default() });
        }
    }
}

/// No longer watches a descriptor.
fn forget(epoll: &OwnedFd, what: impl AsFd) {
    if let Err(errno) = epoll::delete(epoll, what) {
        tracing::warn!(%errno, "cannot end the watch over a ring");
    }
}
