//! A thread that serves rings: it takes submissions, begins them, and ends them when the device is done, on a queue of its own. It never waits for a single
//! transfer: what has to wait for something else than the device goes on elsewhere, and is completed from there.
//!
//! It guards fairness. Rings take turns, a few submissions each; and while several are busy, whoever serves them, none may have more than its share under way,
//! because what the device has been given it serves in the order in which it came. As long as there is work the thread looks at the rings themselves; when
//! there is none it soon sleeps until the device answers, and says so in each ring, so that the next submission wakes it.

use super::queue_pair::{Broken, Ring};
use super::watch::Watch;
use crate::abi::ring::Completion;
use crate::abi::{Command, Reason, TransferRequest};
use crate::registry::Buffer;
use crate::server::{Answer, Server};
use gpunvme_blockdev::{OwnQueue, Wait, Waker};
use parking_lot::Mutex;
use rustix::io::Errno;
use smallvec::SmallVec;
use std::cell::Cell;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering, fence};
use std::time::{Duration, Instant};

/// Submissions that a ring may have taken in one turn.
const TURN: u32 = 32;
/// What all rings together may have under way before they have to share: enough to keep any device busy.
const SHARED_TRANSFERS: u32 = 1024;
const SHARED_BYTES: u64 = 64 << 20;
/// How long the thread looks at rings in which nothing happens before it sleeps. Less than what being woken costs an application.
const LINGER: Duration = Duration::from_micros(50);
/// The same while something is under way, which will end soon: about what a device takes for one transfer of 1 MiB. To be woken from sleep when it ends would
/// add up to a quarter of that.
const LINGER_UNDER_WAY: Duration = Duration::from_micros(250);
/// How often the thread looks, at the end, whether the last transfers are over.
const DRAIN: Duration = Duration::from_millis(1);

thread_local! {
    /// Whose thread this is.
    static SERVING: Cell<*const Service> = const { Cell::new(ptr::null()) };
}

/// A file that was attached to a ring: what it was opened for goes with it.
pub trait AttachedFile: Send + Sync {
    /// Begins a `READ` or `WRITE` (which of the two, `command` says) between the file and a buffer that the ring's owner owns. `taken` gets the answer
    /// that the ioctl would have given. It must not wait for a device.
    fn transfer(&self, command: Command, request: TransferRequest, buffer: Arc<Buffer>, taken: Taken);
}

/// A submission that was taken from a ring, and has to be answered. Dropped without an answer it is answered with `EIO`: its ring's end would wait for it for ever.
pub struct Taken {
    service: Arc<Service>,
    ring: Arc<Ring>,
    user_data: u64,
    /// Bytes that it asks for.
    len: u64,
    answered: bool,
}

/// How many rings of a mount have something to do or under way, by the number of the thread that serves them, which counts them.
pub(super) struct Active(Box<[ActiveOf]>);

/// Of one thread. One that counts does not take the next one's memory from another processor.
#[derive(Default)]
#[repr(align(64))]
struct ActiveOf(AtomicU32);

impl Active {
    /// None yet, of so many threads.
    pub fn new(services: usize) -> Active {
        Active((0..services).map(|_| ActiveOf::default()).collect())
    }

    fn of(&self, service: usize) -> u32 {
        self.0[service].0.load(Ordering::Relaxed)
    }

    fn set(&self, service: usize, count: u32) {
        // Others have the number at hand as long as nobody writes it.
        if self.of(service) != count {
            self.0[service].0.store(count, Ordering::Relaxed);
        }
    }

    fn all(&self) -> u32 {
        self.0.iter().map(|of| of.0.load(Ordering::Relaxed)).sum()
    }
}

/// A thread that serves rings, and these.
pub(super) struct Service {
    number: usize,
    server: Arc<Server>,
    watch: Arc<Watch>,
    active: Arc<Active>,
    /// Wakes the thread.
    waker: Waker,
    /// It sleeps, or is about to.
    asleep: AtomicBool,
    ending: AtomicBool,
    /// Replaced as a whole when one comes or goes.
    rings: Mutex<Arc<Vec<Arc<Ring>>>>,
}

impl Service {
    /// No rings yet. `waker` wakes the thread that will [`Service::serve`].
    pub fn new(number: usize, server: Arc<Server>, watch: Arc<Watch>, active: Arc<Active>, waker: Waker) -> Service {
        Service {
            number,
            server,
            watch,
            active,
            waker,
            asleep: AtomicBool::new(false),
            ending: AtomicBool::new(false),
            rings: Mutex::default(),
        }
    }

    /// Its rings.
    pub fn rings(&self) -> Arc<Vec<Arc<Ring>>> {
        self.rings.lock().clone()
    }

    /// Serves a ring from now on.
    pub fn add(&self, ring: Arc<Ring>) -> Result<(), Errno> {
        {
            let mut rings = self.rings.lock();
            self.watch.add(&ring, self.number)?;
            let more = rings.iter().cloned().chain([ring]).collect();
            *rings = Arc::new(more);
        }
        self.wake();
        Ok(())
    }

    /// Ends a ring, if it is still there.
    pub fn remove(&self, ring: &Arc<Ring>) {
        {
            let mut rings = self.rings.lock();
            if !rings.iter().any(|other| Arc::ptr_eq(other, ring)) {
                return;
            }
            let rest = rings.iter().filter(|other| !Arc::ptr_eq(other, ring)).cloned().collect();
            *rings = Arc::new(rest);
            self.watch.remove(ring);
        }
        ring.close();
        // What it last looked at still has the ring.
        self.wake();
    }

    /// Has the thread look at its rings.
    pub fn wake(&self) {
        self.waker.wake();
    }

    /// Ends the thread, after the transfers that are under way.
    pub fn end(&self) {
        self.ending.store(true, Ordering::SeqCst);
        self.wake();
    }

    /// What the thread does.
    pub fn serve(self: &Arc<Self>, queue: &OwnQueue) {
        SERVING.set(Arc::as_ptr(self));
        let mut first = 0;
        let mut busy = Instant::now();
        while !self.ending.load(Ordering::Acquire) {
            let rings = self.rings();
            first += 1;
            if self.turn(&rings, first, queue, Wait::No) {
                busy = Instant::now();
                continue;
            }
            let under_way = self.active.of(self.number) > 0;
            if busy.elapsed() < if under_way { LINGER_UNDER_WAY } else { LINGER } && !rings.is_empty() {
                // On a machine with nothing to spare the device, or the application, may need this processor.
                std::thread::yield_now();
                continue;
            }
            self.asleep.store(true, Ordering::SeqCst);
            rings.iter().for_each(|ring| ring.set_asleep(true));
            // Whoever submitted before seeing that word did not signal, and whoever completed did not either: looks once more, then sleeps.
            fence(Ordering::SeqCst);
            // A wake for a new ring, or for the end, may have been taken by the turn before.
            if !self.ending.load(Ordering::SeqCst) && Arc::ptr_eq(&self.rings(), &rings) {
                self.turn(&rings, first, queue, Wait::Forever);
            }
            self.asleep.store(false, Ordering::SeqCst);
            rings.iter().for_each(|ring| ring.set_asleep(false));
            busy = Instant::now();
        }
        // Once a ring says that it is closed its application may use the memory again. Transfers that went on elsewhere wake nobody here.
        while self.rings().iter().any(|ring| ring.load().0 > 0) {
            queue.run(Wait::Timeout(DRAIN));
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
        let mut ready: SmallVec<[(&Arc<Ring>, u32); 16]> = SmallVec::new();
        let mut active = 0;
        for at in 0..rings.len() {
            let ring = &rings[(first + at) % rings.len()];
            if ring.is_closed() {
                continue;
            }
            match ring.ready() {
                Ok(count) => {
                    active += u32::from(count > 0 || ring.load().0 > 0);
                    if count > 0 {
                        ready.push((ring, count));
                    }
                }
                Err(broken) => self.give_up(ring, &broken),
            }
        }
        self.active.set(self.number, active);
        if ready.is_empty() {
            return false;
        }
        let active = self.active.all();
        let mut any = false;
        for (ring, count) in ready {
            for _ in 0..count.min(TURN) {
                let (transfers, bytes) = ring.load();
                let share = transfers < SHARED_TRANSFERS / active && bytes < SHARED_BYTES / u64::from(active);
                if transfers > 0 && !share {
                    break;
                }
                self.begin(ring);
                any = true;
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
            service: self.clone(),
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
        let Taken { service, ring, len, .. } = self;
        ring.complete(*len, &completion);
        if SERVING.get() == Arc::as_ptr(service) {
            // The application is woken once for all that ends in this turn.
            return;
        }
        // Another thread may end it, one that serves other rings too: what this transfer waited for may have ended there.
        ring.wake_if_due();
        // The ring's thread may have left submissions lying because too much was under way, and counts the ring while something is.
        fence(Ordering::SeqCst);
        if service.asleep.load(Ordering::SeqCst) && (ring.load().0 == 0 || ring.pending().is_ok_and(|pending| pending > 0)) {
            service.wake();
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
