//! A place where requests that are done are collected: for one thread with many in flight.

use super::request::End;
use super::{Segment, Transfers};
use crate::error::Result;
use crate::file::{File, Transfer};
use crate::linger::Linger;
use crate::ring::Wait;
use gpunvme_abi::Direction;
use parking_lot::Mutex;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// How long [`Queue::complete`] looks before it sleeps.
const LINGER: Duration = Duration::from_micros(50);

/// Requests in flight, and those that are done and were not taken.
///
/// ```no_run
/// # use gpunvme::{File, Mount, Wait, gpu::{Segment, Transfers}};
/// # let (transfers, gpu) = (Transfers::new(&Mount::open("/data")?)?, 0x7f00_0000_0000);
/// let file = File::open("/data/samples")?;
/// let mut queue = transfers.queue()?;
/// for sample in 0..256 {
///     // SAFETY: the memory at `gpu` is 1 MiB long, and nobody else uses it meanwhile.
///     unsafe { queue.read(&file, &[Segment { file_offset: sample << 20, address: gpu + (sample << 12), len: 4096 }], sample) }?;
/// }
/// let mut done = Vec::new();
/// while queue.in_flight() > 0 {
///     queue.complete(Wait::Forever, &mut done)?;
/// }
/// # Ok::<(), gpunvme::Error>(())
/// ```
#[derive(Debug)]
pub struct Queue {
    transfers: Transfers,
    shared: Arc<Shared>,
    in_flight: usize,
}

/// How one request ended.
#[derive(Debug)]
pub struct Finished {
    /// What it was begun with.
    pub user_data: u64,
    /// What it moved.
    pub result: Result<Transfer>,
}

#[derive(Debug)]
struct Shared {
    finished: Mutex<Vec<Finished>>,
    watched: Watched,
    event: OwnedFd,
}

/// What whoever waits looks at all the time, in a cache line that is written when there is something to see.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Watched {
    /// Of the requests that are done, so that one can look without a lock.
    count: AtomicUsize,
    asleep: AtomicBool,
}

/// Where the answer to one request goes.
pub(super) struct QueueEnd {
    shared: Arc<Shared>,
    user_data: u64,
}

/// Answers on their way to their queues: however many there are for a queue at a time, it is locked and woken once.
#[derive(Default)]
pub(super) struct Deliveries {
    queues: Vec<(Arc<Shared>, Vec<Finished>)>,
    /// Empty lists, for queues to come.
    spare: Vec<Vec<Finished>>,
}

impl Deliveries {
    /// Adds an answer.
    pub fn add(&mut self, end: QueueEnd, result: Result<Transfer>) {
        let QueueEnd { shared, user_data } = end;
        let finished = Finished { user_data, result };
        match self.queues.iter_mut().rev().find(|(queue, _)| Arc::ptr_eq(queue, &shared)) {
            Some((_, list)) => list.push(finished),
            None => {
                let mut list = self.spare.pop().unwrap_or_default();
                list.push(finished);
                self.queues.push((shared, list));
            }
        }
    }

    /// Hands over what was added.
    pub fn deliver(&mut self) {
        for (shared, mut list) in self.queues.drain(..) {
            {
                let mut finished = shared.finished.lock();
                if finished.is_empty() {
                    std::mem::swap(&mut *finished, &mut list);
                } else {
                    finished.append(&mut list);
                }
                shared.watched.count.store(finished.len(), Ordering::SeqCst);
            }
            self.spare.push(list);
            if shared.watched.asleep.load(Ordering::SeqCst) && shared.watched.asleep.swap(false, Ordering::SeqCst) {
                // A counter that is full has been signalled.
                let _ = rustix::io::write(&shared.event, &1u64.to_ne_bytes());
            }
        }
    }
}

impl Queue {
    pub(super) fn new(transfers: &Transfers) -> Result<Queue> {
        let event = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let event = event.map_err(|errno| transfers.failed("make a queue", errno))?;
        let shared = Shared { finished: Mutex::default(), watched: Watched::default(), event };
        Ok(Queue { transfers: transfers.clone(), shared: Arc::new(shared), in_flight: 0 })
    }

    /// Begins a read. `user_data` comes back when it is done.
    ///
    /// # Safety
    /// As for [`Transfers::read`], until the request was taken by [`Queue::complete`].
    ///
    /// # Errors
    /// As [`Transfers::read`], if nothing was begun; later ones come with the request.
    pub unsafe fn read(&mut self, file: &File, segments: &[Segment], user_data: u64) -> Result<()> {
        self.begin(Direction::Read, file, segments, user_data)
    }

    /// Begins a write. `user_data` comes back when it is done.
    ///
    /// # Safety
    /// As for [`Transfers::write`], until the request was taken by [`Queue::complete`].
    ///
    /// # Errors
    /// As [`Transfers::write`], if nothing was begun; later ones come with the request.
    pub unsafe fn write(&mut self, file: &File, segments: &[Segment], user_data: u64) -> Result<()> {
        self.begin(Direction::Write, file, segments, user_data)
    }

    fn begin(&mut self, direction: Direction, file: &File, segments: &[Segment], user_data: u64) -> Result<()> {
        let end = End::Queue(QueueEnd { shared: self.shared.clone(), user_data });
        self.transfers.begin(direction, file, segments, end)?;
        self.in_flight += 1;
        Ok(())
    }

    /// Requests begun and not taken.
    pub fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// Appends the requests that are done, in the order in which they became so, and returns how many; waits for the first if there is none, but not if none is in flight.
    ///
    /// # Errors
    /// [`Error::Path`] if the kernel does not let it wait.
    pub fn complete(&mut self, wait: Wait, out: &mut Vec<Finished>) -> Result<usize> {
        let mut linger = Linger::new();
        let deadline = wait.deadline(linger.now());
        loop {
            let taken = self.take(out);
            if taken > 0 || self.in_flight == 0 || deadline.is_some_and(|deadline| linger.now() >= deadline) {
                return Ok(taken);
            }
            if !linger.goes_on(LINGER) && self.arm() {
                self.sleep(deadline)?;
                linger.look_at_clock();
            }
        }
    }

    /// Asks to be signalled when the next request is done: the queue, as a descriptor, then becomes readable. False: there is one already, and no signal will come.
    pub fn arm(&mut self) -> bool {
        let _ = rustix::io::read(&self.shared.event, &mut [0u8; 8]); // nonblocking: an older signal, if any
        let watched = &self.shared.watched;
        watched.asleep.store(true, Ordering::SeqCst);
        if watched.count.load(Ordering::SeqCst) > 0 {
            watched.asleep.store(false, Ordering::SeqCst);
            return false;
        }
        true
    }

    fn sleep(&self, deadline: Option<Instant>) -> Result<()> {
        let timeout = deadline.map(|deadline| {
            let left: Duration = deadline.saturating_duration_since(Instant::now());
            Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() }
        });
        match rustix::event::poll(&mut [PollFd::new(&self.shared.event, PollFlags::IN)], timeout.as_ref()) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(errno) => Err(self.transfers.failed("wait for a transfer", errno)),
        }
    }

    fn take(&mut self, out: &mut Vec<Finished>) -> usize {
        if self.shared.watched.count.load(Ordering::Acquire) == 0 {
            return 0;
        }
        let mut finished = self.shared.finished.lock();
        let taken = finished.len();
        out.append(&mut finished);
        self.shared.watched.count.store(0, Ordering::SeqCst);
        self.in_flight -= taken;
        taken
    }
}

/// Becomes readable when a request is done after [`Queue::arm`] said yes: for poll(2), epoll(7) and the like.
impl AsFd for Queue {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.shared.event.as_fd()
    }
}
