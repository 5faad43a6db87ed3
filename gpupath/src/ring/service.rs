//! A thread that serves rings: it takes submissions, begins them, and ends them when the device is
//! done, on a queue of its own. It never waits for a single transfer: what has to wait for
//! something else than the device goes on in another thread, and is completed from there.
//!
//! It guards fairness. Users take turns, and the processes of each, a few submissions each; and no
//! ring may have more than its share in flight ([`super::shares`]). As long as there is work the
//! thread looks at the rings themselves; when there is none it soon sleeps until the device
//! answers, and says so in each ring, so that the next submission wakes it.

use super::plain::{Plain, Turn};
use super::queue_pair::{Broken, Ring, Taken};
use super::shares::Shares;
use super::thread::ServingThread;
use super::turns::Turns;
use super::watch::Watch;
use crate::admission::{Asked, WritePermit};
use crate::planner::Alignment;
use crate::server::Server;
use gpunvme_abi::ring::Submission;
use gpunvme_abi::{Command, Direction, Reason};
use gpunvme_blockdev::{OwnQueue, Wait, Waker};
use parking_lot::Mutex;
use rustix::io::Errno;
use smallvec::SmallVec;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering, fence};
use std::time::{Duration, Instant};

/// How long the thread sleeps at the most while submissions are left lying because others have too
/// much in flight: transfers that end on another thread do not wake this one.
const BLOCKED: Duration = Duration::from_micros(500);
/// How long the thread looks at rings in which nothing happens before it sleeps. Less than what
/// being woken costs an application.
const SPIN_LIMIT: Duration = Duration::from_micros(50);
/// The same while something is in flight, which will end soon: about what a device takes for one
/// transfer of 1 MiB. To be woken from sleep when it ends would add up to a quarter of that.
const SPIN_LIMIT_IN_FLIGHT: Duration = Duration::from_micros(250);
/// How often the thread looks, at the end, whether the last transfers are over.
const DRAIN: Duration = Duration::from_millis(1);

/// What the thread works with.
struct Work<'q> {
    queue: &'q OwnQueue,
    plain: Plain,
    submissions: Vec<Submission>,
}

/// The result of a look at all rings.
struct Taking {
    /// Something was taken.
    taken: bool,
    /// Something was left lying, because too much is in flight.
    blocked: bool,
}

/// A thread that serves rings, and its rings.
pub(super) struct Service {
    number: usize,
    server: Arc<Server>,
    watch: Arc<Watch>,
    shares: Arc<Shares>,
    /// Its rings that have something in flight.
    in_flight: AtomicU32,
    thread: Arc<ServingThread>,
    ending: AtomicBool,
    /// Replaced as a whole when one comes or goes.
    rings: Mutex<Arc<Vec<Arc<Ring>>>>,
}

impl Service {
    /// Makes a service without rings. `waker` wakes the thread that will [`Service::serve`].
    pub fn new(number: usize, server: Arc<Server>, watch: Arc<Watch>, shares: Arc<Shares>, waker: Waker) -> Service {
        Service {
            number,
            server,
            watch,
            shares,
            in_flight: AtomicU32::new(0),
            thread: Arc::new(ServingThread::new(waker)),
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

    /// Wakes the thread to look at its rings.
    pub fn wake(&self) {
        self.thread.wake();
    }

    /// Ends the thread, after the transfers that are in flight.
    pub fn end(&self) {
        self.ending.store(true, Ordering::SeqCst);
        self.wake();
    }

    /// Runs the thread that serves the rings. `alignment` is that of the device, for reads.
    pub fn serve(self: &Arc<Self>, queue: &OwnQueue, alignment: Alignment) {
        self.thread.begin();
        let mut work = Work { queue, plain: Plain::new(self.server.clone(), alignment), submissions: Vec::new() };
        let mut first = 0;
        let mut busy = Instant::now();
        while !self.ending.load(Ordering::Acquire) {
            let rings = self.rings();
            first += 1;
            if self.turn(&rings, first, &mut work, Wait::No) {
                busy = Instant::now();
                continue;
            }
            let in_flight = self.in_flight.load(Ordering::Relaxed) > 0;
            if busy.elapsed() < if in_flight { SPIN_LIMIT_IN_FLIGHT } else { SPIN_LIMIT } && !rings.is_empty() {
                // On a machine with nothing to spare the device, or the application, may need this
                // processor.
                std::thread::yield_now();
                continue;
            }
            self.thread.set_asleep(true);
            rings.iter().for_each(|ring| ring.set_asleep(true));
            // An application that submitted before it saw that word did not signal, nor did a
            // thread that completed a transfer: look once more, then sleep.
            fence(Ordering::SeqCst);
            // A wake for a new ring, or for the end, may have been taken by the turn before.
            if !self.ending.load(Ordering::SeqCst) && Arc::ptr_eq(&self.rings(), &rings) {
                self.turn(&rings, first, &mut work, Wait::Forever);
            }
            self.thread.set_asleep(false);
            rings.iter().for_each(|ring| ring.set_asleep(false));
            busy = Instant::now();
        }
        // Once a ring says that it is closed its application may use the memory again. Transfers
        // that end on another thread do not wake this one. Those that the device has for rings that
        // were given up hold their memory, and their blocks, as long as `work` does.
        while !work.plain.is_idle() || self.rings().iter().any(|ring| ring.load().0 > 0) {
            self.run(&mut work, Wait::Timeout(DRAIN));
        }
    }

    /// Takes from each ring what may be taken now, gives it to the device, and ends what the
    /// device has done, for which it waits where there was nothing to take. Returns whether
    /// anything happened.
    fn turn(self: &Arc<Self>, rings: &[Arc<Ring>], first: usize, work: &mut Work<'_>, wait: Wait) -> bool {
        let Taking { taken, blocked } = self.take(rings, first, work);
        let wait = match wait {
            _ if taken => Wait::No,
            Wait::Forever if blocked => Wait::Timeout(BLOCKED),
            wait => wait,
        };
        let done = self.run(work, wait);
        rings.iter().for_each(|ring| ring.wake_if_due());
        taken || done > 0
    }

    /// Gives what was taken to the device, and ends what the device has done. Returns how many
    /// requests of the device are over.
    fn run(&self, work: &mut Work<'_>, wait: Wait) -> usize {
        let Work { queue, plain, .. } = work;
        plain.run((queue, &self.thread), wait, |ring, submission| self.begin(ring, &submission, &mut None))
    }

    /// Takes from each ring what may be taken now.
    fn take(self: &Arc<Self>, rings: &[Arc<Ring>], first: usize, work: &mut Work<'_>) -> Taking {
        let mut ready: SmallVec<[(&Arc<Ring>, u32); 16]> = SmallVec::new();
        let now = self.shares.now();
        let mut in_flight = 0;
        for at in 0..rings.len() {
            let ring = &rings[(first + at) % rings.len()];
            if ring.is_closed() {
                continue;
            }
            match ring.ready() {
                Ok(count) => {
                    let busy = ring.load().0 > 0;
                    in_flight += u32::from(busy || count > 0);
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
        self.in_flight.store(in_flight, Ordering::Relaxed);
        let mut taking = Taking { taken: false, blocked: false };
        if ready.is_empty() {
            return taking;
        }
        self.shares.look(now);
        let mut turns = Turns::of(ready.iter().map(|(ring, _)| &ring.member));
        for (ring, count) in ready {
            let left = turns.left(&ring.member.process);
            let most = count.min(*left);
            let taken = self.take_of(ring, most, work);
            *left -= taken;
            taking.taken |= taken > 0;
            taking.blocked |= taken < most;
        }
        taking
    }

    /// Takes submissions of a ring, `most` of them unless too much is in flight, and begins them.
    /// Returns how many.
    fn take_of(&self, ring: &Arc<Ring>, most: u32, work: &mut Work<'_>) -> u32 {
        let Work { queue, plain, submissions } = work;
        ring.take(most, &self.shares.limits(ring), submissions);
        let taken = submissions.len() as u32;
        let are_taken = plain.are_taken(queue);
        let mut turn = Turn::default();
        // Asked once for all writes of the turn: to ask is a call of the kernel.
        let mut permit = None;
        for submission in submissions.drain(..) {
            if !are_taken || !plain.take(&mut turn, ring, &submission) {
                self.begin(ring, &submission, &mut permit);
            }
        }
        drop(permit);
        plain.end_turn(&turn, queue);
        taken
    }

    fn give_up(&self, ring: &Arc<Ring>, broken: &Broken) {
        if let Some(left_out) = self.server.broken_rings.allow() {
            tracing::warn!(ring = ring.id, left_out, "{broken}; the ring is closed");
        }
        self.remove(ring);
    }

    /// Begins a submission that was taken, whatever it asks for. `permit` is that of the turn.
    fn begin(&self, ring: &Arc<Ring>, submission: &Submission, permit: &mut Option<WritePermit>) {
        let mut taken = Taken::new(self.thread.clone(), ring.clone(), submission);
        let Some((command, request)) = submission.decode() else { return taken.refuse(libc::EINVAL, Reason::None) };
        let Some(file) = ring.file(submission.file) else { return taken.refuse(libc::EBADF, Reason::None) };
        let direction = if command == Command::Write { Direction::Write } else { Direction::Read };
        if let (Direction::Read, Some(reader)) = (direction, &file.reader) {
            taken.set_common(reader.reads(submission.file_offset, submission.len));
        }
        let is_writing_permitted =
            (direction == Direction::Write).then(|| permit.get_or_insert_with(|| file.file.permit_writes()).is_given);
        let (stats, buffer) = (self.server.stats.clone(), request.buffer);
        let asked = Asked { stats, direction, request, requester: Box::new(taken), is_writing_permitted };
        asked.admit(&*file.file, || ring.buffer(buffer, || self.server.registry.lookup_of(&ring.owner, buffer)));
    }
}
