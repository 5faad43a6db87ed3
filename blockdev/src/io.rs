//! Runs batches of requests on a device's queues. It guards the promise that `done` of every batch is called exactly once,
//! after every request of it is over: whoever waits for a batch may reuse its memory and its blocks.
//!
//! Locks: a lane's `batches` is taken for moments only, never while the device is waited for or a `done` runs.
use std::cell::Cell;
use std::num::NonZero;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc;
use std::thread::JoinHandle;

use parking_lot::Mutex;
use slab::Slab;

use crate::{BlockDevice, Completion, Error, Queue, Request, Result, Wait};

type Done = Box<dyn FnOnce(Result<()>) + Send>;

/// Runs batches on a device's queues: [`Io::threaded`] with a reaper thread a queue, [`Io::inline`] without any thread.
///
/// Dropping it waits for the batches in flight. Dropped from inside a `done` it cannot wait for the thread that it is on:
/// that thread then ends by itself.
pub struct Io {
    device: Arc<dyn BlockDevice>,
    mode: Mode,
}

enum Mode {
    Inline(Mutex<Box<dyn Queue>>),
    Threaded { lanes: Vec<Arc<Lane>>, reapers: Vec<JoinHandle<()>> },
}

/// A queue and the batches in flight on it.
struct Lane {
    queue: Box<dyn Queue>,
    batches: Mutex<Batches>,
    /// Batches whose `done` was not called yet.
    in_flight: AtomicUsize,
    stopping: AtomicBool,
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
}

thread_local! {
    /// Spreads threads over lanes: a thread stays on its own.
    static SUBMITTER: usize = {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        NEXT.fetch_add(1, Ordering::Relaxed)
    };
    static IS_REAPER: Cell<bool> = const { Cell::new(false) };
}

impl Io {
    /// Opens `queues` queues (at least 1, at most what the device has), each with a thread that collects its completions and
    /// runs the `done` of batches. A thread that submits keeps to one queue.
    ///
    /// A `done` that panics aborts the process: the batches behind it would never end.
    pub fn threaded(device: Arc<dyn BlockDevice>, queues: usize) -> Result<Arc<Io>> {
        let queues = queues.clamp(1, device.geometry().max_queues as usize);
        let mut lanes = Vec::with_capacity(queues);
        for _ in 0..queues {
            lanes.push(Arc::new(Lane {
                queue: device.open_queue()?,
                batches: Mutex::default(),
                in_flight: AtomicUsize::new(0),
                stopping: AtomicBool::new(false),
            }));
        }
        // Built before the threads: should one fail to start, dropping it stops those that did.
        let mut io = Io { device, mode: Mode::Threaded { lanes: lanes.clone(), reapers: Vec::with_capacity(queues) } };
        for (number, lane) in lanes.into_iter().enumerate() {
            let reaper =
                std::thread::Builder::new().name(format!("io-{number}")).spawn(move || lane.reap()).map_err(|error| {
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

    /// No thread: [`Io::submit`] runs a batch to its end, and its `done`, before it returns. The order of everything is then
    /// the caller's, as deterministic tests need it.
    pub fn inline(device: Arc<dyn BlockDevice>) -> Result<Arc<Io>> {
        let queue = device.open_queue()?;
        Ok(Arc::new(Io { device, mode: Mode::Inline(Mutex::new(queue)) }))
    }

    /// The device that the batches go to.
    pub fn device(&self) -> &Arc<dyn BlockDevice> {
        &self.device
    }

    /// Batches submitted whose `done` was not called yet.
    pub fn in_flight(&self) -> usize {
        match &self.mode {
            Mode::Inline(_) => 0,
            Mode::Threaded { lanes, .. } => lanes.iter().map(|lane| lane.in_flight.load(Ordering::Acquire)).sum(),
        }
    }

    /// Puts all requests of the batch in flight at once, in no particular order: a flush in it does not cover the writes
    /// beside it. `done` is called once with the first error, if any, after all of them are over and their spans dropped;
    /// from a reaper thread (of [`Io::inline`]: from this one), which it must not block. It may submit.
    pub fn submit(&self, batch: Vec<Request>, done: impl FnOnce(Result<()>) + Send + 'static) {
        match &self.mode {
            Mode::Inline(queue) => {
                let result = run_inline(&**queue.lock(), batch);
                done(result);
            }
            Mode::Threaded { lanes, .. } => {
                let lane = SUBMITTER.with(|number| number % lanes.len());
                lanes[lane].submit(batch, Box::new(done));
            }
        }
    }

    /// Submits the batch and waits for it.
    ///
    /// # Panics
    ///
    /// On a reaper thread, that is, from inside a `done`: it would wait for itself.
    pub fn run(&self, batch: Vec<Request>) -> Result<()> {
        assert!(!IS_REAPER.get(), "Io::run called from the completion of a batch");
        let (sender, receiver) = mpsc::sync_channel(1);
        self.submit(batch, move |result| {
            let _ = sender.send(result); // the receiver waits below
        });
        receiver.recv().expect("every batch is completed")
    }
}

impl Drop for Io {
    fn drop(&mut self) {
        let Mode::Threaded { lanes, reapers } = &mut self.mode else { return };
        for lane in lanes {
            lane.stopping.store(true, Ordering::Release);
            lane.queue.wake();
        }
        for reaper in reapers.drain(..) {
            if reaper.thread().id() != std::thread::current().id() {
                reaper.join().expect("a reaper that panics aborts the process");
            }
        }
    }
}

/// Runs a batch on a queue that nobody else uses.
fn run_inline(queue: &dyn Queue, mut batch: Vec<Request>) -> Result<()> {
    let mut remaining = batch.len();
    let mut result = Ok(());
    let mut completions = Vec::new();
    queue.submit(&mut batch);
    while remaining > 0 {
        collect(queue, &mut completions);
        remaining -= completions.len();
        for completion in completions.drain(..) {
            result = result.and(completion.result);
        }
    }
    result
}

/// Waits for completions.
fn collect(queue: &dyn Queue, completions: &mut Vec<Completion>) {
    if let Err(error) = queue.complete(Wait::Forever, completions) {
        // Its requests may be in flight for ever, so that nobody could be told anything true about them.
        panic!("an I/O queue broke: {error}");
    }
}

impl Lane {
    fn submit(&self, mut batch: Vec<Request>, done: Done) {
        self.in_flight.fetch_add(1, Ordering::AcqRel);
        let Some(remaining) = NonZero::new(batch.len()) else {
            self.batches.lock().empty.push(done);
            self.queue.wake();
            return;
        };
        let tag = self.batches.lock().pending.insert(Batch { remaining: remaining.get(), error: None, done });
        for request in &mut batch {
            request.tag = tag as u64;
        }
        self.queue.submit(&mut batch);
    }

    /// The reaper thread.
    fn reap(&self) {
        let _guard = AbortOnPanic;
        IS_REAPER.set(true);
        let mut completions = Vec::new();
        let mut finished: Vec<(Done, Result<()>)> = Vec::new();
        while !self.stopping.load(Ordering::Acquire) || self.in_flight.load(Ordering::Acquire) > 0 {
            collect(&*self.queue, &mut completions);
            let mut batches = self.batches.lock();
            finished.extend(batches.empty.drain(..).map(|done| (done, Ok(()))));
            finished.extend(completions.drain(..).filter_map(|completion| batches.complete(completion)));
            drop(batches);
            for (done, result) in finished.drain(..) {
                self.in_flight.fetch_sub(1, Ordering::AcqRel);
                done(result);
            }
        }
    }
}

impl Batches {
    /// Counts a completion; gives the batch's `done` and result if it was the last.
    fn complete(&mut self, completion: Completion) -> Option<(Done, Result<()>)> {
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
        Some((batch.done, batch.error.map_or(Ok(()), Err)))
    }
}

/// A reaper that unwinds leaves batches that nobody would ever complete, and their waiters hanging.
struct AbortOnPanic;

impl Drop for AbortOnPanic {
    fn drop(&mut self) {
        if std::thread::panicking() {
            tracing::error!(
                "panic on an I/O thread (message above): aborting, because the requests behind it would never complete"
            );
            std::process::abort();
        }
    }
}
