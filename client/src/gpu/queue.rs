//! The completion queue of requests on GPU memory: for one thread with many in flight.

use super::answer::{Collection, End, Finished, QueueEnd};
use super::request::{Cancel, Segment};
use super::transfers::Transfers;
use crate::error::Result;
use crate::file::File;
use crate::ring::Wait;
use crate::spin::Spin;
use gpunvme_abi::Direction;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long [`Queue::complete`] looks before it sleeps.
const SPIN_LIMIT: Duration = Duration::from_micros(50);

/// Requests in flight, and those that are done and were not taken. One thread uses it at a time.
/// Dropping it ends no request: the memory of those in flight stays in use.
///
/// ```no_run
/// # use gpunvme::{File, Mount, Wait, gpu::{Segment, Transfers}};
/// # let (transfers, gpu) = (Transfers::new(&Mount::open("/data")?)?, 0x7f00_0000_0000);
/// let file = File::open("/data/samples")?;
/// let mut queue = transfers.queue()?;
/// for sample in 0..256 {
///     // SAFETY: the memory at `gpu` is 1 MiB long, and no other code uses it meanwhile.
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
    /// By which the application made it.
    made_by: Transfers,
    /// Those, with what calls off what is in flight now.
    transfers: Transfers,
    cancel: Cancel,
    collection: Arc<Collection>,
    in_flight: usize,
}

impl Transfers {
    /// A queue, for one thread that keeps many requests in flight.
    ///
    /// # Errors
    /// [`Error::Path`] if there are too many descriptors.
    ///
    /// [`Error::Path`]: crate::Error::Path
    pub fn queue(&self) -> Result<Queue> {
        let collection = Collection::new().map_err(|errno| self.failed("make a queue", errno))?;
        let cancel = Cancel::within(self.cancel());
        let transfers = self.cancellable(&cancel);
        Ok(Queue { made_by: self.clone(), transfers, cancel, collection: Arc::new(collection), in_flight: 0 })
    }
}

impl Queue {
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
        let end = End::Queue(QueueEnd { collection: self.collection.clone(), user_data });
        self.transfers.begin(direction, file, segments, end)?;
        self.in_flight += 1;
        Ok(())
    }

    /// How many requests were begun and not taken by [`Queue::complete`].
    pub fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// Calls off the requests in flight, as [`Cancel::cancel`] does; each is still to be taken by
    /// [`Queue::complete`]. Requests that are begun afterwards are not called off.
    pub fn cancel(&mut self) {
        self.cancel.cancel();
        self.cancel = Cancel::within(self.made_by.cancel());
        self.transfers = self.made_by.cancellable(&self.cancel);
    }

    /// Appends the requests that are done, in the order in which they became so, and returns how
    /// many; waits for the first if there is none, but not if none is in flight.
    ///
    /// # Errors
    /// [`crate::Error::Path`] if the kernel does not let it wait.
    pub fn complete(&mut self, wait: Wait, out: &mut Vec<Finished>) -> Result<usize> {
        self.complete_at_least(1, wait, out)
    }

    /// [`Queue::complete`], waiting for `least` requests: for all that are in flight, if they are
    /// fewer.
    ///
    /// # Errors
    /// As [`Queue::complete`]. What was appended by then is not lost.
    pub fn complete_at_least(&mut self, least: usize, wait: Wait, out: &mut Vec<Finished>) -> Result<usize> {
        let mut spin = Spin::new();
        let deadline = wait.deadline(spin.now());
        let mut taken = 0;
        loop {
            let more = self.take(out);
            taken += more;
            if taken >= least || self.in_flight == 0 || deadline.is_some_and(|deadline| spin.now() >= deadline) {
                return Ok(taken);
            }
            if more > 0 {
                spin.restart();
            } else if !spin.goes_on(SPIN_LIMIT) && self.arm() {
                self.sleep(deadline)?;
                spin.look_at_clock();
            }
        }
    }

    /// Asks to be signalled when the next request is done: the queue, as a descriptor, then
    /// becomes readable. False: there is one already, and no signal will come.
    pub fn arm(&mut self) -> bool {
        self.collection.arm()
    }

    fn sleep(&self, deadline: Option<Instant>) -> Result<()> {
        let timeout = deadline.map(|deadline| {
            let left: Duration = deadline.saturating_duration_since(Instant::now());
            Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() }
        });
        match rustix::event::poll(&mut [PollFd::new(&self.collection.event, PollFlags::IN)], timeout.as_ref()) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(errno) => Err(self.transfers.failed("wait for a transfer", errno)),
        }
    }

    fn take(&mut self, out: &mut Vec<Finished>) -> usize {
        let taken = self.collection.take(out);
        self.in_flight -= taken;
        taken
    }
}

/// Becomes readable when a request is done after [`Queue::arm`] said yes: for poll(2), epoll(7)
/// and the like.
impl AsFd for Queue {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.collection.event.as_fd()
    }
}
