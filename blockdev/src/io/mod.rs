//! Runs batches of requests on a device's queues. It guarantees that the `done` of every batch is
//! called exactly once, after every request of the batch is over: from then on the batch's memory
//! and blocks may be reused.
//!
//! Locks: a worker's `batches` is taken for moments only, never while the device is waited for or
//! a `done` runs.
use std::cell::{Cell, RefCell};
use std::marker::PhantomData;
use std::num::NonZero;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc;
use std::thread::{JoinHandle, Thread};
use std::time::Duration;

use parking_lot::Mutex;
use slab::Slab;

use gpunvme_metrics::{Begun, Ended, Meter};

use crate::{BlockDevice, Completion, Error, Op, Queue, Request, Result, Wait};

mod abort;
mod waiters;

use abort::AbortOnPanic;
use waiters::Waiters;

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

/// A queue and the batches in flight on it. One thread collects its completions: a reaper, or the
/// owner of an [`OwnQueue`].
struct QueueWorker {
    queue: Box<dyn Queue>,
    batches: Mutex<Batches>,
    /// Batches whose `done` was not called yet, and requests that are no batch's.
    in_flight: AtomicUsize,
    stopping: AtomicBool,
    meter: Arc<Meter>,
}

/// Batches by the key that is the tag of their requests.
#[derive(Default)]
struct Batches {
    pending: Slab<Batch>,
    /// Batches without any request, for the reaper to call.
    empty: Vec<Done>,
}

struct Batch {
    /// Requests not completed yet.
    remaining: usize,
    error: Option<Error>,
    done: Done,
    /// When it began, for the meter; of what kind its first request is, all are as a rule.
    begun: Begun,
    count: u64,
    bytes: u64,
}

thread_local! {
    /// Spreads threads over the workers; a thread keeps to one of them.
    static SUBMITTER: usize = {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        NEXT.fetch_add(1, Ordering::Relaxed)
    };
    static IS_REAPER: Cell<bool> = const { Cell::new(false) };
    /// Whether what this thread submitted may be in flight, without it waiting for that. The kernel
    /// hands a result of io_uring to the thread that submitted, which must not block for long in a
    /// call that no result interrupts.
    static HAS_LEFT: Cell<bool> = const { Cell::new(false) };
    /// What this thread has submitted to its own queue, if it has one.
    static OWN: RefCell<Option<Unsubmitted>> = const { RefCell::new(None) };
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

/// Marks the tags of requests that are no batch's.
const NO_BATCH: u64 = 1 << 63;

impl OwnQueue {
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
    /// below 2^63. Waits for the first completion as [`Queue::complete`] does. Returns how many
    /// requests were over.
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
        let own = OWN.with_borrow_mut(|own| {
            let own = own.as_mut().filter(|own| std::ptr::eq(&*own.io, self))?;
            Some((own.worker.clone(), std::mem::take(&mut own.requests)))
        });
        if let Some((worker, mut requests)) = own {
            worker.begin(batch.into_iter(), Box::new(done), &mut requests);
            return OWN.with_borrow_mut(|own| own.as_mut().expect("looked at above").requests = requests);
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

    /// Gives this thread a queue of its own, to which all that it submits goes from now on. On a
    /// device with a single queue it shares that.
    ///
    /// # Errors
    /// Those of [`BlockDevice::open_busy_queue`].
    ///
    /// # Panics
    /// If the thread has one already.
    pub fn own_queue(self: &Arc<Io>) -> Result<OwnQueue> {
        let worker = match self.device.geometry().max_queues {
            1 => None,
            _ => Some(Arc::new(QueueWorker::new(self.device.open_busy_queue(None)?, &self.meter))),
        };
        if let Some(worker) = &worker {
            let own = Unsubmitted { io: self.clone(), worker: worker.clone(), requests: Vec::new() };
            assert!(OWN.replace(Some(own)).is_none(), "a thread has one queue of its own");
            IS_REAPER.set(true);
        }
        Ok(OwnQueue { worker, reaped: RefCell::default(), _thread: PhantomData })
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

/// Runs a batch on a queue that has no other user.
fn run_inline(queue: &dyn Queue, mut batch: Vec<Request>) -> Result<()> {
    let requests = batch.len();
    queue.submit(&mut batch);
    drain(queue, requests)
}

/// Waits for all that is in flight on a queue, `remaining` requests. Returns the first error.
fn drain(queue: &dyn Queue, mut remaining: usize) -> Result<()> {
    let mut result = Ok(());
    let mut completions = Vec::new();
    while remaining > 0 {
        take_completions(queue, Wait::Forever, &mut completions);
        remaining -= completions.len();
        for completion in completions.drain(..) {
            result = result.and(completion.result);
        }
    }
    result
}

fn take_completions(queue: &dyn Queue, wait: Wait, completions: &mut Vec<Completion>) {
    if let Err(error) = queue.complete(wait, completions) {
        // Its requests may be in flight for ever: their callers could be told nothing true.
        panic!("an I/O queue broke: {error}");
    }
}

impl QueueWorker {
    fn new(queue: Box<dyn Queue>, meter: &Arc<Meter>) -> QueueWorker {
        let (in_flight, stopping) = (AtomicUsize::new(0), AtomicBool::new(false));
        QueueWorker { queue, batches: Mutex::default(), in_flight, stopping, meter: meter.clone() }
    }

    /// Takes a batch in. What it appends to `requests` has to be submitted to the queue.
    fn begin(&self, batch: impl ExactSizeIterator<Item = Request>, done: Done, requests: &mut Vec<Request>) {
        self.in_flight.fetch_add(1, Ordering::AcqRel);
        let Some(remaining) = NonZero::new(batch.len()) else {
            self.batches.lock().empty.push(done);
            return self.queue.wake();
        };
        let first = requests.len();
        requests.extend(batch);
        let (count, bytes) = (remaining.get() as u64, requests[first..].iter().map(|request| request.len).sum());
        let begun = self.meter.begin(requests[first].op.kind(), count);
        let batch = Batch { remaining: remaining.get(), error: None, done, begun, count, bytes };
        let tag = self.batches.lock().pending.insert(batch);
        requests[first..].iter_mut().for_each(|request| request.tag = tag as u64);
    }

    /// The reaper thread.
    fn reap(&self) {
        let _guard = AbortOnPanic::new();
        IS_REAPER.set(true);
        let mut reaped = Reaped::default();
        while !self.stopping.load(Ordering::Acquire) || self.in_flight.load(Ordering::Acquire) > 0 {
            self.collect(Wait::Forever, &mut reaped, &mut Vec::new());
        }
    }

    /// Collects completions, calls the `done` of batches that are over, and appends completions
    /// that are no batch's to `ended`. Returns how many requests were over.
    fn collect(&self, wait: Wait, reaped: &mut Reaped, ended: &mut Vec<Completion>) -> usize {
        let Reaped { completions, finished } = reaped;
        take_completions(&*self.queue, wait, completions);
        let count = completions.len();
        {
            let mut batches = self.batches.lock();
            finished.extend(batches.empty.drain(..).map(|done| (done, Ok(()))));
            let before = ended.len();
            for completion in completions.drain(..) {
                if completion.tag & NO_BATCH != 0 {
                    ended.push(Completion { tag: completion.tag ^ NO_BATCH, ..completion });
                } else {
                    finished.extend(batches.complete(completion, &self.meter));
                }
            }
            self.in_flight.fetch_sub(ended.len() - before, Ordering::AcqRel);
        }
        for (done, result) in finished.drain(..) {
            self.in_flight.fetch_sub(1, Ordering::AcqRel);
            done(result);
        }
        count
    }
}

/// What one [`QueueWorker::collect`] works on, in vectors that keep their memory.
#[derive(Default)]
struct Reaped {
    completions: Vec<Completion>,
    finished: Vec<(Done, Result<()>)>,
}

impl Batches {
    /// Counts a completion; gives the batch's `done` and result if it was the last.
    fn complete(&mut self, completion: Completion, meter: &Meter) -> Option<(Done, Result<()>)> {
        let key = completion.tag as usize;
        let batch = &mut self.pending[key];
        batch.remaining -= 1;
        if let Err(error) = completion.result {
            batch.error.get_or_insert(error);
        }
        if batch.remaining > 0 {
            return None;
        }
        let batch = self.pending.remove(key);
        meter.end(batch.begun, Ended { count: batch.count, bytes: batch.bytes, failed: batch.error.is_some() });
        Some((batch.done, batch.error.map_or(Ok(()), Err)))
    }
}
