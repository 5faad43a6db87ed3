//! Queues that threads have for themselves.
use std::cell::RefCell;
use std::marker::PhantomData;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::Thread;

use gpunvme_metrics::{Begun, Ended, Meter};

use super::worker::{IS_REAPER, NO_BATCH, QueueWorker, Reaped};
use super::{Done, Io};
use crate::{Completion, Op, Request, Result, Wait};

thread_local! {
    /// What this thread has submitted to its own queue, if it has one.
    static OWN: RefCell<Option<Unsubmitted>> = const { RefCell::new(None) };
}

/// Whether the calling thread has a queue of its own for what it submits to `io`.
pub(super) fn is_of(io: &Io) -> bool {
    OWN.with_borrow(|own| own.as_ref().is_some_and(|own| std::ptr::eq(&*own.io, io)))
}

/// Holds a batch back until [`OwnQueue::run`]. The calling thread has a queue of its own.
pub(super) fn hold_back(batch: impl ExactSizeIterator<Item = Request>, done: Done) {
    const HAS: &str = "the caller looked";
    let (worker, mut requests) = OWN.with_borrow_mut(|own| {
        let own = own.as_mut().expect(HAS);
        (own.worker.clone(), std::mem::take(&mut own.requests))
    });
    worker.begin(batch, done, &mut requests);
    OWN.with_borrow_mut(|own| own.as_mut().expect(HAS).requests = requests);
}

/// Requests of a thread with an [`OwnQueue`], which [`OwnQueue::run`] will submit at once.
struct Unsubmitted {
    io: Arc<Io>,
    worker: Arc<QueueWorker>,
    requests: Vec<Request>,
}

/// A queue of one thread's own. What the thread submits to the [`Io`] is held back until it calls
/// [`OwnQueue::run`], which gives all of it to the device at once and collects what is over,
/// without any other thread. Requests whose ends the thread keeps track of by itself are given to
/// [`OwnQueue::run`]. Dropping it waits for the batches in flight.
pub struct OwnQueue {
    /// None where the device has a single queue: then the reaper of that one does the work.
    worker: Option<Arc<QueueWorker>>,
    reaped: RefCell<Reaped>,
    /// Belongs to its thread.
    _thread: PhantomData<*const ()>,
}

/// Wakes the thread of an [`OwnQueue`]: the call of [`OwnQueue::run`] that waits, or the next one
/// that would. It may be used from any thread.
pub struct Waker {
    worker: Option<Arc<QueueWorker>>,
    thread: Thread,
}

impl Waker {
    /// Wakes the thread.
    pub fn wake(&self) {
        match &self.worker {
            Some(worker) => worker.queue.wake(),
            None => self.thread.unpark(),
        }
    }
}

impl OwnQueue {
    /// One of the calling thread.
    pub(super) fn new(io: &Arc<Io>) -> Result<OwnQueue> {
        let worker = match io.device.geometry().max_queues {
            1 => None,
            _ => Some(Arc::new(QueueWorker::new(io.device.open_busy_queue(None)?, &io.meter))),
        };
        if let Some(worker) = &worker {
            let own = Unsubmitted { io: io.clone(), worker: worker.clone(), requests: Vec::new() };
            assert!(OWN.replace(Some(own)).is_none(), "a thread has one queue of its own");
            IS_REAPER.set(true);
        }
        Ok(OwnQueue { worker, reaped: RefCell::default(), _thread: PhantomData })
    }

    /// Whether [`OwnQueue::run`] takes requests: not where the device has a single queue.
    pub fn takes_requests(&self) -> bool {
        self.worker.is_some()
    }

    /// Counts `count` requests of a kind that are about to be given to [`OwnQueue::run`], as
    /// [`Io::meter`] does. Their end is told by [`OwnQueue::end`].
    ///
    /// # Panics
    /// Unless it [takes requests](OwnQueue::takes_requests).
    pub fn begin(&self, op: Op, count: u64) -> Begun {
        self.meter().begin(op.kind(), count)
    }

    /// Counts the end of requests that were counted together when they began.
    ///
    /// # Panics
    /// As [`OwnQueue::begin`].
    pub fn end(&self, begun: Begun, ended: Ended) {
        self.meter().end(begun, ended);
    }

    fn meter(&self) -> &Meter {
        &self.worker.as_ref().expect("it takes requests").meter
    }

    /// Submits `requests`, which is left empty, and what the thread has submitted to the [`Io`]
    /// since the last call. Calls the `done` of batches that are over, on this thread, and appends
    /// the ends of requests that were given to it to `ended`, under the tags that the caller chose,
    /// below 2^63. Waits for the first completion as [`crate::Queue::complete`] does. Returns how
    /// many requests were over.
    ///
    /// # Panics
    /// If the queue broke for good, or is given requests and does not
    /// [take](OwnQueue::takes_requests) them.
    pub fn run(&self, requests: &mut Vec<Request>, wait: Wait, ended: &mut Vec<Completion>) -> usize {
        let Some(worker) = &self.worker else {
            assert!(requests.is_empty(), "a single queue takes batches only");
            match wait {
                Wait::No => {}
                Wait::Timeout(timeout) => std::thread::park_timeout(timeout),
                Wait::Forever => std::thread::park(),
            }
            return 0;
        };
        if !requests.is_empty() {
            worker.in_flight.fetch_add(requests.len(), Ordering::AcqRel);
            requests.iter_mut().for_each(|request| request.tag |= NO_BATCH);
        }
        let mut of_batches = OWN.with_borrow_mut(|own| std::mem::take(&mut own.as_mut().expect("set with the queue").requests));
        if !of_batches.is_empty() {
            requests.append(&mut of_batches);
        }
        if !requests.is_empty() {
            worker.queue.submit(requests);
        }
        // It keeps its memory.
        OWN.with_borrow_mut(|own| own.as_mut().expect("set with the queue").requests = of_batches);
        worker.collect(wait, &mut self.reaped.borrow_mut(), ended)
    }

    /// A handle for other threads to wake this one.
    pub fn waker(&self) -> Waker {
        Waker { worker: self.worker.clone(), thread: std::thread::current() }
    }
}

impl Drop for OwnQueue {
    fn drop(&mut self) {
        if let Some(worker) = &self.worker {
            while worker.in_flight.load(Ordering::Acquire) > 0 {
                self.run(&mut Vec::new(), Wait::Forever, &mut Vec::new());
            }
            OWN.take();
            IS_REAPER.set(false);
        }
    }
}
