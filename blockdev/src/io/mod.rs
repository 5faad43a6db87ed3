//! Runs batches of requests on a device's queues. It guarantees that the `done` of every batch is
//! called exactly once, after every request of the batch is over: from then on the batch's memory
//! and blocks may be reused.
//!
//! Locks: a worker's `batches` is taken for moments only, never while the device is waited for or
//! a `done` runs.
use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::Mutex;

use gpunvme_metrics::Meter;

use crate::{BlockDevice, Error, Op, Queue, Request, Result};

mod abort;
mod own_queue;
mod waiters;
mod worker;

pub use own_queue::{OwnQueue, Waker};

use abort::AbortOnPanic;
use waiters::Waiters;
use worker::{IS_REAPER, QueueWorker, drain, run_inline};

type Done = Box<dyn FnOnce(Result<()>) + Send>;
type Choose = dyn Fn(usize) -> usize + Send + Sync;

/// How long the `done` of a batch of [`Io::stepped`] may run on another thread.
const STEPPED: Duration = Duration::from_secs(60);

/// How long [`Io::give_time`] waits: several times as long as a device needs for a request.
const MOMENT: Duration = Duration::from_millis(5);

/// Runs batches on a device's queues: [`Io::threaded`] with a reaper thread for each queue,
/// [`Io::inline`] and [`Io::stepped`] without any thread. With any of them a thread can have an
/// [`OwnQueue`].
///
/// Dropping it waits for the batches in flight. If a `done` drops it on a reaper thread, that
/// thread is not waited for, and ends by itself.
pub struct Io {
    device: Arc<dyn BlockDevice>,
    mode: Mode,
    meter: Arc<Meter>,
}

enum Mode {
    Inline(Mutex<Box<dyn Queue>>),
    Stepped { choose: Box<Choose>, in_flight: Mutex<Vec<Stepped>> },
    Threaded { workers: Vec<Arc<QueueWorker>>, reapers: Vec<JoinHandle<()>>, waiters: Waiters },
}

/// A batch in flight, with a queue of its own, so that it completes when it is asked to.
struct Stepped {
    queue: Box<dyn Queue>,
    requests: usize,
    done: Done,
}

thread_local! {
    /// Spreads threads over the workers; a thread keeps to one of them.
    static SUBMITTER: usize = {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        NEXT.fetch_add(1, Ordering::Relaxed)
    };
    /// Whether what this thread submitted may be in flight, without it waiting for that. The kernel
    /// hands a result of io_uring to the thread that submitted, which must not block for long in a
    /// call that no result interrupts.
    static HAS_LEFT: Cell<bool> = const { Cell::new(false) };
}

impl Io {
    /// Opens `queues` queues, each with a thread that collects its completions and calls the
    /// `done` of batches. The number is raised to 1, and lowered to
    /// [`crate::Geometry::max_queues`] less one that is left for [`Io::own_queue`]. A thread that
    /// submits keeps to one queue. Of further queues that the device has, some are opened, too,
    /// and lent to threads that wait in [`Io::run`].
    ///
    /// A `done` that panics aborts the process: the batches behind it would never end.
    ///
    /// # Errors
    /// Those of [`BlockDevice::open_queue`]; [`Error::System`] when a thread cannot be started.
    pub fn threaded(device: Arc<dyn BlockDevice>, queues: usize) -> Result<Arc<Io>> {
        let queues = queues.clamp(1, (device.geometry().max_queues as usize - 1).max(1));
        let meter = Arc::new(Meter::new(Op::KINDS));
        let mut workers = Vec::with_capacity(queues);
        for _ in 0..queues {
            workers.push(Arc::new(QueueWorker::new(device.open_queue()?, &meter)));
        }
        // Built before the threads: should one fail to start, dropping it stops those that did.
        let waiters = Waiters::open(&*device, queues);
        let mode = Mode::Threaded { workers: workers.clone(), reapers: Vec::with_capacity(queues), waiters };
        let mut io = Io { device, mode, meter };
        for (number, worker) in workers.into_iter().enumerate() {
            let reaper =
                std::thread::Builder::new().name(format!("io-{number}")).spawn(move || worker.reap()).map_err(|error| {
                    Error::System {
                        device: io.device.name().into(),
                        action: "starting an I/O thread",
                        errno: error.raw_os_error().unwrap_or(libc::EAGAIN),
                    }
                })?;
            let Mode::Threaded { reapers, .. } = &mut io.mode else { unreachable!("it was built as threaded above") };
            reapers.push(reaper);
        }
        Ok(Arc::new(io))
    }

    /// No thread: [`Io::submit`] runs a batch to its end, and its `done`, before it returns. The
    /// order of everything is then the caller's, as deterministic tests need it. One batch runs at
    /// a time.
    ///
    /// # Errors
    /// Those of [`BlockDevice::open_queue`].
    pub fn inline(device: Arc<dyn BlockDevice>) -> Result<Arc<Io>> {
        let queue = device.open_queue()?;
        Ok(Arc::new(Io { device, mode: Mode::Inline(Mutex::new(queue)), meter: Arc::new(Meter::new(Op::KINDS)) }))
    }

    /// No thread, and batches that complete when and in the order that the caller wants, for
    /// deterministic tests. A thread that waits in [`Io::run`] completes batches one by one until
    /// its own is over; `choose` is given the number of batches in flight, and says which of them.
    /// The others stay in flight until [`Io::step`] or another wait. `choose` may submit and do
    /// other things before it answers: tests put there what happens while a device is at work.
    pub fn stepped(device: Arc<dyn BlockDevice>, choose: impl Fn(usize) -> usize + Send + Sync + 'static) -> Arc<Io> {
        let mode = Mode::Stepped { choose: Box::new(choose), in_flight: Mutex::default() };
        Arc::new(Io { device, mode, meter: Arc::new(Meter::new(Op::KINDS)) })
    }

    /// Completes one batch, where [`Io::stepped`] has any in flight. Returns whether there was
    /// one.
    pub fn step(&self) -> bool {
        let Mode::Stepped { choose, in_flight } = &self.mode else { return false };
        let count = in_flight.lock().len();
        if count == 0 {
            return false;
        }
        let chosen = choose(count);
        let mut in_flight = in_flight.lock();
        // What it did may have waited for other batches, and completed them.
        if let Some(last) = in_flight.len().checked_sub(1) {
            let Stepped { queue, requests, done } = in_flight.remove(chosen.min(last));
            drop(in_flight);
            done(drain(&*queue, requests));
        }
        true
    }

    /// Waits a moment (5 ms), in which batches in flight may complete: for a caller that waits for
    /// what other threads have submitted.
    pub fn give_time(&self) {
        std::thread::sleep(MOMENT);
    }

    /// The device that the batches go to.
    pub fn device(&self) -> &Arc<dyn BlockDevice> {
        &self.device
    }

    /// Counts of the requests by [`Op::kind`], and how long their batches took, where threads
    /// collect completions ([`Io::threaded`], [`OwnQueue`]).
    pub fn meter(&self) -> &Meter {
        &self.meter
    }

    /// The number of batches submitted whose `done` was not called yet, without those of
    /// [`OwnQueue`]s and of threads that wait on a queue that they were lent.
    pub fn in_flight(&self) -> usize {
        match &self.mode {
            Mode::Inline(_) => 0,
            Mode::Stepped { in_flight, .. } => in_flight.lock().len(),
            Mode::Threaded { workers, .. } => workers.iter().map(|worker| worker.in_flight.load(Ordering::Acquire)).sum(),
        }
    }

    /// Puts all requests of the batch in flight at once, in no particular order: a flush in it
    /// does not cover the writes beside it. `done` is called once, with the first error if any,
    /// after all of them are over and their spans dropped. It runs on a reaper thread (of
    /// [`Io::inline`]: on this one), which it must not block. It may submit.
    pub fn submit(
        &self,
        batch: impl IntoIterator<Item = Request, IntoIter: ExactSizeIterator>,
        done: impl FnOnce(Result<()>) + Send + 'static,
    ) {
        if own_queue::is_of(self) {
            return own_queue::hold_back(batch.into_iter(), Box::new(done));
        }
        match &self.mode {
            Mode::Inline(queue) => {
                let result = run_inline(&**queue.lock(), batch.into_iter().collect());
                done(result);
            }
            Mode::Stepped { in_flight, .. } => match self.device.open_queue() {
                Ok(queue) => {
                    let mut batch: Vec<Request> = batch.into_iter().collect();
                    let requests = batch.len();
                    queue.submit(&mut batch);
                    in_flight.lock().push(Stepped { queue, requests, done: Box::new(done) });
                }
                Err(error) => done(Err(error)),
            },
            Mode::Threaded { workers, .. } => {
                HAS_LEFT.set(true);
                let worker = SUBMITTER.with(|number| number % workers.len());
                let mut requests = Vec::new();
                workers[worker].begin(batch.into_iter(), Box::new(done), &mut requests);
                workers[worker].queue.submit(&mut requests);
            }
        }
    }

    /// As [`Io::submit`], for a thread that may wait until the batch is over: where nothing else is
    /// in flight, it does, and `done` runs on it. The device's answer then wakes this thread, and
    /// not first others. Where more is in flight, a reaper that collects many at once costs less.
    ///
    /// # Panics
    /// As [`Io::run`].
    pub fn submit_or_run(
        &self,
        batch: impl IntoIterator<Item = Request, IntoIter: ExactSizeIterator>,
        done: impl FnOnce(Result<()>) + Send + 'static,
    ) {
        if self.in_flight() == 0
            && let Some(waiters) = self.waiters()
            && let Some(queue) = waiters.lend()
        {
            let result = waiters.run(queue, &self.meter, batch.into_iter().collect(), self.may_block());
            let _guard = AbortOnPanic::new();
            return done(result);
        }
        self.submit(batch, done);
    }

    /// Gives this thread a queue of its own, to which all that it submits goes from now on. On a
    /// device with a single queue it shares that.
    ///
    /// # Errors
    /// Those of [`BlockDevice::open_busy_queue`].
    ///
    /// # Panics
    /// If the thread has one already.
    pub fn own_queue(self: &Arc<Io>) -> Result<OwnQueue> {
        OwnQueue::new(self)
    }

    /// Submits the batch and waits for it.
    ///
    /// # Errors
    /// The first error of a request, when all of them are over.
    ///
    /// # Panics
    /// On a reaper thread, which means inside a `done`, and on one with an [`OwnQueue`]: it would
    /// wait for itself.
    pub fn run(&self, batch: impl IntoIterator<Item = Request, IntoIter: ExactSizeIterator>) -> Result<()> {
        let batch = batch.into_iter();
        if let Some(waiters) = self.waiters()
            && let Some(queue) = waiters.lend()
        {
            return waiters.run(queue, &self.meter, batch.collect(), self.may_block());
        }
        let (sender, receiver) = mpsc::sync_channel(1);
        self.submit(batch, move |result| {
            let _ = sender.send(result); // the receiver waits below
        });
        self.receive(&receiver)
    }

    /// As [`Io::submit`], and waits until `done` has returned, which may run on this thread.
    ///
    /// # Panics
    /// As [`Io::run`].
    pub fn run_then(
        &self,
        batch: impl IntoIterator<Item = Request, IntoIter: ExactSizeIterator>,
        done: impl FnOnce(Result<()>) + Send + 'static,
    ) {
        let batch = batch.into_iter();
        if let Some(waiters) = self.waiters()
            && let Some(queue) = waiters.lend()
        {
            let result = waiters.run(queue, &self.meter, batch.collect(), self.may_block());
            let _guard = AbortOnPanic::new();
            return done(result);
        }
        let (sender, receiver) = mpsc::sync_channel(1);
        self.submit(batch, move |result| {
            done(result);
            let _ = sender.send(()); // the receiver waits below
        });
        self.receive(&receiver);
    }

    /// The queues of threads that wait, where there are such; sees to it that this one may.
    fn waiters(&self) -> Option<&Waiters> {
        assert!(!IS_REAPER.get(), "Io::run called from the completion of a batch, or by a thread with a queue of its own");
        match &self.mode {
            Mode::Threaded { waiters, .. } => Some(waiters),
            Mode::Inline(_) | Mode::Stepped { .. } => None,
        }
    }

    /// Whether this thread may block although it has submitted: nothing of it is in flight.
    fn may_block(&self) -> bool {
        if HAS_LEFT.get() && self.in_flight() == 0 {
            HAS_LEFT.set(false);
        }
        !HAS_LEFT.get()
    }

    /// Waits for what the `done` of a batch sends, which is in flight or runs on another thread.
    fn receive<T>(&self, receiver: &mpsc::Receiver<T>) -> T {
        while let Mode::Stepped { .. } = self.mode {
            match receiver.try_recv() {
                Ok(result) => return result,
                Err(_) if self.step() => {}
                Err(_) => return receiver.recv_timeout(STEPPED).expect("the batch is in flight, or its `done` runs"),
            }
        }
        receiver.recv().expect("every batch is completed")
    }
}

impl Drop for Io {
    fn drop(&mut self) {
        let Mode::Threaded { workers, reapers, .. } = &mut self.mode else { return };
        for worker in workers {
            worker.stopping.store(true, Ordering::Release);
            worker.queue.wake();
        }
        for reaper in reapers.drain(..) {
            if reaper.thread().id() != std::thread::current().id() {
                reaper.join().expect("a reaper that panics aborts the process");
            }
        }
    }
}
