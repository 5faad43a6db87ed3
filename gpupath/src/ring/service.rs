//! A thread that serves rings: it takes submissions, begins them, and ends them when the device is done, on a queue of its own. It never waits for a single
//! transfer: what has to wait for something else than the device goes on elsewhere, and is completed from there.
//!
//! It guards fairness. Processes take turns, a few submissions each; and no ring may have more than its share under way ([`super::shares`]). As long as there is work the thread looks at the rings themselves; when
//! there is none it soon sleeps until the device answers, and says so in each ring, so that the next submission wakes it.

use super::queue_pair::{Broken, Ring};
use super::shares::{Group, Shares};
use super::watch::Watch;
use crate::registry::Buffer;
use crate::server::{Answer, Server};
use gpunvme_abi::ring::Completion;
use gpunvme_abi::{Command, Reason, TransferRequest};
use gpunvme_blockdev::{OwnQueue, Wait, Waker};
use parking_lot::Mutex;
use rustix::io::Errno;
use smallvec::SmallVec;
use std::cell::Cell;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering, fence};
use std::time::{Duration, Instant};

/// Submissions that the rings of a process may have taken in one turn.
const TURN: u32 = 32;
/// How long the thread sleeps at the most while submissions are left lying because others have too much under way: what ends elsewhere wakes nobody here.
const BLOCKED: Duration = Duration::from_micros(500);
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

/// A file that was attached to a ring: what it was opened for goes with it. It is dropped by a thread that may wait.
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

/// What came of a look at all rings.
struct Taking {
    /// Something was taken.
    taken: bool,
    /// Something was left lying, because too much is under way.
    blocked: bool,
}

/// A thread that serves rings, and these.
pub(super) struct Service {
    number: usize,
    server: Arc<Server>,
    watch: Arc<Watch>,
    shares: Arc<Shares>,
    /// Its rings that have something under way.
    under_way: AtomicU32,
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
    pub fn new(number: usize, server: Arc<Server>, watch: Arc<Watch>, shares: Arc<Shares>, waker: Waker) -> Service {
        Service {
            number,
            server,
            watch,
            shares,
            under_way: AtomicU32::new(0),
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
            let under_way = self.under_way.load(Ordering::Relaxed) > 0;
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
        let Taking { taken, blocked } = self.take(rings, first);
        let wait = match wait {
            _ if taken => Wait::No,
            Wait::Forever if blocked => Wait::Timeout(BLOCKED),
            wait => wait,
        };
        let done = queue.run(wait);
        rings.iter().for_each(|ring| ring.wake_if_due());
        taken || done > 0
    }

    /// Takes from each ring what may be taken now.
    fn take(self: &Arc<Self>, rings: &[Arc<Ring>], first: usize) -> Taking {
        let mut ready: SmallVec<[(&Arc<Ring>, u32); 16]> = SmallVec::new();
        let now = self.shares.now();
        let mut under_way = 0;
        for at in 0..rings.len() {
            let ring = &rings[(first + at) % rings.len()];
            if ring.is_closed() {
                continue;
            }
            match ring.ready() {
                Ok(count) => {
                    let busy = ring.load().0 > 0;
                    under_way += u32::from(busy || count > 0);
                    if busy || count > 0 {
                        ring.set_busy(now);
                    }
                    if count > 0 {
                        ready.push((ring, count));
                    }
                }
                Err(broken) => self.give_up(ring, &broken),
            }
        }
        self.under_way.store(under_way, Ordering::Relaxed);
        let mut taking = Taking { taken: false, blocked: false };
        if ready.is_empty() {
            return taking;
        }
        self.shares.look(now);
        // What is left of each process's turn.
        let mut turns: SmallVec<[(*const Group, u32); 8]> = SmallVec::new();
        for (ring, count) in ready {
            let process = Arc::as_ptr(&ring.member.process);
            let turn = turns.iter().position(|(of, _)| *of == process).unwrap_or_else(|| {
                turns.push((process, TURN));
                turns.len() - 1
            });
            for _ in 0..count.min(turns[turn].1) {
                if !self.shares.has_room(ring) {
                    taking.blocked = true;
                    break;
                }
                self.begin(ring);
                turns[turn].1 -= 1;
                taking.taken = true;
            }
        }
        taking
    }

    fn give_up(&self, ring: &Arc<Ring>, broken: &Broken) {
        if let Some(left_out) = self.server.broken_rings.now() {
            tracing::warn!(ring = ring.id, left_out, "{broken}; the ring is closed");
        }
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
        match ring.buffer(request.buffer, || self.server.registry.lookup_of(&ring.owner, request.buffer)) {
            Ok(buffer) => file.transfer(command, request, buffer, taken),
            Err(error) => taken.refuse(error.errno(), error.reason()),
        }
    }
}

impl Taken {
    /// The user that made the ring, and the process.
    pub fn owner(&self) -> (u32, u32) {
        (self.ring.user, self.ring.owner.id)
    }

    /// The longest that the ring's owner may make a file, in bytes (`RLIMIT_FSIZE`).
    pub fn file_size_limit(&self) -> u64 {
        self.ring.file_size_limit()
    }

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
