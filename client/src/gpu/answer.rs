//! Delivers the answer to a request: to a caller that waits, to a function that is called, or to a
//! queue.
//!
//! It guards that every request is answered once, whatever becomes of it.

use crate::error::Result;
use crate::spin::Spin;
use crate::transfer::Transfer;
use parking_lot::{Condvar, Mutex};
use rustix::event::EventfdFlags;
use rustix::io::Errno;
use std::os::fd::OwnedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

/// How long [`Pending::wait`] looks before it sleeps: about what a small read takes.
const SPIN_LIMIT: Duration = Duration::from_micros(50);

/// The destination of the answer to a request.
pub(super) enum End {
    Pending(Arc<Answer>),
    Callback(Box<dyn FnOnce(Result<Transfer>) + Send>),
    Queue(QueueEnd),
}

impl End {
    /// Answers the request. What goes to a queue arrives there with [`Deliveries::deliver`].
    pub fn answer(self, result: Result<Transfer>, deliveries: &mut Deliveries) {
        match self {
            End::Pending(answer) => answer.set(result),
            End::Callback(callback) => {
                // It is the application's, and no request of others' ends because of it.
                if catch_unwind(AssertUnwindSafe(|| callback(result))).is_err() {
                    tracing::error!("what was to be called when a request was done panicked");
                }
            }
            End::Queue(end) => deliveries.add(end, result),
        }
    }
}

/// A result that is waited for.
#[derive(Debug, Default)]
pub(super) struct Answer {
    /// So that a thread that waits can look without a lock.
    there: AtomicBool,
    result: Mutex<Option<Result<Transfer>>>,
    changed: Condvar,
}

impl Answer {
    pub fn set(&self, result: Result<Transfer>) {
        *self.result.lock() = Some(result);
        self.there.store(true, Ordering::Release);
        self.changed.notify_one();
    }

    /// The result, if it is there and was not taken.
    pub fn take(&self) -> Option<Result<Transfer>> {
        self.result.lock().take()
    }
}

/// A request that was begun. Dropping it neither ends the request nor waits for it: the memory is
/// still in use.
#[derive(Debug)]
#[must_use = "the memory is in use until it was waited for"]
pub struct Pending(pub(super) Arc<Answer>);

impl Pending {
    /// Whether [`Pending::wait`] would return at once.
    pub fn is_done(&self) -> bool {
        self.0.there.load(Ordering::Acquire)
    }

    /// Waits until the request is done.
    ///
    /// # Errors
    /// Those of [`super::Transfers::read`].
    pub fn wait(self) -> Result<Transfer> {
        let mut spin = Spin::new();
        while !self.is_done() && spin.goes_on(SPIN_LIMIT) {}
        let mut result = self.0.result.lock();
        loop {
            if let Some(result) = result.take() {
                return result;
            }
            self.0.changed.wait(&mut result);
        }
    }
}

/// How one request of a [`super::Queue`] ended.
#[derive(Debug)]
pub struct Finished {
    /// What it was begun with.
    pub user_data: u64,
    /// What it moved.
    pub result: Result<Transfer>,
}

/// Where the answers to the requests of one queue are collected.
#[derive(Debug)]
pub(super) struct Collection {
    finished: Mutex<Vec<Finished>>,
    watched: Watched,
    /// Readable when something was added after [`Collection::arm`] said yes.
    pub event: OwnedFd,
}

/// What a thread that waits looks at all the time, in a cache line that is written when there is
/// something to see.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Watched {
    /// Of the requests that are done, so that one can look without a lock.
    count: AtomicUsize,
    asleep: AtomicBool,
}

impl Collection {
    pub fn new() -> std::result::Result<Collection, Errno> {
        let event = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Collection { finished: Mutex::default(), watched: Watched::default(), event })
    }

    /// Appends what there is, and returns how many.
    pub fn take(&self, out: &mut Vec<Finished>) -> usize {
        if self.watched.count.load(Ordering::Acquire) == 0 {
            return 0;
        }
        let mut finished = self.finished.lock();
        let taken = finished.len();
        out.append(&mut finished);
        self.watched.count.store(0, Ordering::SeqCst);
        taken
    }

    /// Asks for a signal when something is added. False: there is something already, and no signal
    /// will come.
    pub fn arm(&self) -> bool {
        let _ = rustix::io::read(&self.event, &mut [0u8; 8]); // nonblocking: an older signal, if any
        self.watched.asleep.store(true, Ordering::SeqCst);
        if self.watched.count.load(Ordering::SeqCst) > 0 {
            self.watched.asleep.store(false, Ordering::SeqCst);
            return false;
        }
        true
    }

    /// Adds what is in `list`, which is empty afterwards.
    fn add(&self, list: &mut Vec<Finished>) {
        {
            let mut finished = self.finished.lock();
            if finished.is_empty() {
                std::mem::swap(&mut *finished, list);
            } else {
                finished.append(list);
            }
            self.watched.count.store(finished.len(), Ordering::SeqCst);
        }
        if self.watched.asleep.load(Ordering::SeqCst) && self.watched.asleep.swap(false, Ordering::SeqCst) {
            // A counter that is full has been signalled.
            let _ = rustix::io::write(&self.event, &1u64.to_ne_bytes());
        }
    }
}

/// Where the answer to one request of a queue goes.
pub(super) struct QueueEnd {
    pub collection: Arc<Collection>,
    pub user_data: u64,
}

/// Answers on their way to their queues: however many there are for a queue at a time, it is
/// locked and woken once.
#[derive(Default)]
pub(super) struct Deliveries {
    queues: Vec<(Arc<Collection>, Vec<Finished>)>,
    /// Empty lists, for queues to come.
    spare: Vec<Vec<Finished>>,
}

impl Deliveries {
    /// Adds an answer.
    fn add(&mut self, end: QueueEnd, result: Result<Transfer>) {
        let QueueEnd { collection, user_data } = end;
        let finished = Finished { user_data, result };
        match self.queues.iter_mut().rev().find(|(queue, _)| Arc::ptr_eq(queue, &collection)) {
            Some((_, list)) => list.push(finished),
            None => {
                let mut list = self.spare.pop().unwrap_or_default();
                list.push(finished);
                self.queues.push((collection, list));
            }
        }
    }

    /// Hands over what was added.
    pub fn deliver(&mut self) {
        for (collection, mut list) in self.queues.drain(..) {
            collection.add(&mut list);
            self.spare.push(list);
        }
    }
}
