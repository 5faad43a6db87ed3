//! Batches: requests that are begun together and collected as they end, of files and memory of any
//! kind beside each other.
//!
//! Locks: `Batches::table` for moments; `Batch::run` while requests are begun, and never together
//! with it; `Ends::list` for moments, innermost.
#![allow(unsafe_code)]

use crate::abi::{self, BatchEvent, BatchRequest};
use crate::driver::Open;
use crate::failure::{Code, Failure, Result};
use crate::files::{Direction, Registered, Server};
use crate::statistics::{self, Done, Ways};
use crate::transfer::{self, Outcome, Range};
use gpunvme::gpu::Cancel;
use parking_lot::{Condvar, Mutex, RwLock};
use rustix::io::Errno;
use std::collections::{HashMap, VecDeque};
use std::mem::MaybeUninit;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// How long a thread looks for requests that end before it sleeps, from when the last one did:
/// about what a small read takes.
const LOOK: Duration = Duration::from_micros(50);
/// Looks before the processor is offered to others, and the clock is asked.
const LOOKS: u32 = 16;
/// The lowest bits of a batch's number, as of a file's.
const TAG: usize = 0b0111;

/// The batches.
#[derive(Default)]
pub struct Batches {
    table: RwLock<HashMap<usize, Arc<Batch>>>,
}

/// A batch.
pub struct Batch {
    capacity: usize,
    /// What calls off the requests that are in flight.
    run: Mutex<Cancel>,
    ends: Arc<Ends>,
}

/// Where requests end.
#[derive(Default)]
struct Ends {
    list: Mutex<List>,
    changed: Condvar,
    /// Of those in the list, so that one can look without the lock.
    ended: AtomicUsize,
}

#[derive(Default)]
struct List {
    /// Nothing begins any more.
    closed: bool,
    in_flight: usize,
    ended: VecDeque<End>,
    /// The fewest that a thread waits for.
    wanted: Option<usize>,
}

/// How a request ended.
struct End {
    cookie: usize,
    status: u32,
    result: isize,
}

impl Ends {
    fn add(&self, end: End) {
        let mut list = self.list.lock();
        list.ended.push_back(end);
        list.in_flight -= 1;
        self.ended.store(list.ended.len(), Ordering::Release);
        if list.wanted.is_some_and(|wanted| list.ended.len() >= wanted) || list.in_flight == 0 {
            // Those that go on waiting say again for how many.
            list.wanted = None;
            self.changed.notify_all();
        }
    }
}

impl Ends {
    /// Looks until so many have ended, as long as that goes on and is expected soon.
    fn look(&self, least: usize, deadline: Option<Instant>) {
        let mut ended = self.ended.load(Ordering::Acquire);
        let in_flight = self.list.lock().in_flight;
        let least = least.min(ended + in_flight);
        let mut until = Instant::now() + LOOK;
        while ended < least {
            (0..LOOKS).for_each(|_| std::hint::spin_loop());
            std::thread::yield_now();
            let (now, there) = (Instant::now(), self.ended.load(Ordering::Acquire));
            if there != ended {
                (ended, until) = (there, now + LOOK);
            }
            if now >= until || deadline.is_some_and(|deadline| now >= deadline) {
                return;
            }
        }
    }
}

impl Batches {
    /// A batch of at most so many requests, as its number.
    ///
    /// # Errors
    /// [`Code::InvalidValue`] for none.
    pub fn add(&self, capacity: usize) -> Result<usize> {
        if capacity == 0 {
            return Err(Code::InvalidValue.into());
        }
        static NEXT: AtomicUsize = AtomicUsize::new(1);
        let number = NEXT.fetch_add(1, Ordering::Relaxed) << 4 | TAG;
        let batch = Batch { capacity, run: Mutex::default(), ends: Arc::default() };
        self.table.write().insert(number, Arc::new(batch));
        Ok(number)
    }

    /// # Errors
    /// [`Code::InvalidValue`] for what is no batch.
    pub fn get(&self, number: usize) -> Result<Arc<Batch>> {
        self.table.read().get(&number).cloned().ok_or(Code::InvalidValue.into())
    }

    /// Ends a batch: its requests are called off, and waited for, since their memory is in use.
    ///
    /// # Errors
    /// As [`Batches::get`].
    pub fn remove(&self, number: usize) -> Result<()> {
        let batch = self.table.write().remove(&number).ok_or(Code::InvalidValue)?;
        batch.close();
        batch.wait(usize::MAX, None);
        Ok(())
    }

    /// Calls off the requests of all batches, in which nothing begins any more.
    pub fn close_all(&self) {
        self.table.read().values().for_each(|batch| batch.close());
    }
}

/// A request, checked.
struct Checked {
    file: Arc<Registered>,
    direction: Direction,
    range: Range,
    cookie: usize,
}

impl Batch {
    /// Begins requests.
    ///
    /// # Errors
    /// [`Code::BatchFull`]; [`Code::InvalidValue`] and [`Code::HandleNotRegistered`] for a request
    /// that is wrong in itself; [`Code::InvalidValue`] where another thread has ended the batch.
    /// None is begun then.
    ///
    /// # Safety
    /// As cuFile asks of the memory: it is the application's, and nothing else uses it until the
    /// request has ended.
    pub unsafe fn submit(&self, open: &Arc<Open>, requests: &[BatchRequest]) -> Result<()> {
        let checked = requests.iter().map(|request| check(open, request)).collect::<Result<Vec<_>>>()?;
        let run = self.run.lock();
        {
            let mut list = self.ends.list.lock();
            if list.closed {
                return Err(Code::InvalidValue.into());
            }
            if list.in_flight + list.ended.len() + checked.len() > self.capacity {
                return Err(Code::BatchFull.into());
            }
            list.in_flight += checked.len();
        }
        statistics::batch_begins();
        let together = Arc::new(Together::new(checked.len()));
        for request in checked {
            // SAFETY: as the caller says.
            unsafe { self.begin(open, request, &run, &together) };
        }
        Ok(())
    }

    /// # Safety
    /// As [`Batch::submit`].
    unsafe fn begin(&self, open: &Arc<Open>, request: Checked, run: &Cancel, together: &Arc<Together>) {
        let started = Instant::now();
        let Checked { file, direction, range, cookie } = request;
        let (ends, together, by_calls) = (self.ends.clone(), together.clone(), false);
        let is_over = false;
        let end = Ending { ends, together, direction, range, cookie, started, by_calls, is_over, _open: open.clone() };
        if let (Server::Mount(on), true) = (&file.server, file.allows(direction)) {
            let transfers = match transfer::transfers(open, on, range) {
                Ok(transfers) => transfers,
                Err(failure) => return end.with(Err(failure)),
            };
            if let Some(transfers) = transfers {
                let transfers = transfers.cancellable(run);
                // Held by the callback and, if nothing is begun, by this function.
                let end = Arc::new(Mutex::new(Some(end)));
                let take = end.clone();
                let done = move |result| {
                    let Some(end) = take.lock().take() else { return };
                    match transfer::outcome(range, result) {
                        Outcome::Done(done) => end.with(done),
                        Outcome::Ordinary => end.with(Err(Code::PointerInvalid.into())),
                    }
                };
                let segments = [range.segment()];
                // SAFETY: as the caller says.
                let begun = unsafe {
                    match direction {
                        Direction::Read => transfers.read_then(&on.file, &segments, done),
                        Direction::Write => transfers.write_then(&on.file, &segments, done),
                    }
                };
                let Err(error) = begun else { return };
                let Some(end) = end.lock().take() else { return };
                match transfer::outcome(range, Err(error)) {
                    Outcome::Done(done) => end.with(done),
                    Outcome::Ordinary => wait_elsewhere(open, file, end, run),
                }
                return;
            }
        }
        wait_elsewhere(open, file, end, run);
    }

    /// Calls off what is in flight, and has nothing begin any more.
    fn close(&self) {
        self.ends.list.lock().closed = true;
        self.cancel();
    }

    /// Calls off what is in flight, which ends as cancelled, if it is not done before.
    pub fn cancel(&self) {
        std::mem::take(&mut *self.run.lock()).cancel();
    }

    /// Takes up to `events.len()` requests that ended, and returns how many. Waits for `least` of
    /// them, but for no more than there are, and not longer than `limit`.
    pub fn take(&self, least: usize, limit: Option<Duration>, events: &mut [MaybeUninit<BatchEvent>]) -> usize {
        let started = Instant::now();
        self.wait(least.min(events.len()), limit);
        let mut list = self.ends.list.lock();
        let count = list.ended.len().min(events.len());
        let failed = list.ended.iter().take(count).filter(|end| end.status == abi::EVENT_FAILED).count();
        for (event, End { cookie, status, result }) in events.iter_mut().zip(list.ended.drain(..count)) {
            event.write(BatchEvent { cookie: cookie as *mut _, status, result: result as usize });
        }
        self.ends.ended.store(list.ended.len(), Ordering::Release);
        drop(list);
        if count > 0 {
            statistics::batch_completed(started, count, failed);
        }
        count
    }

    fn wait(&self, least: usize, limit: Option<Duration>) {
        let deadline = limit.and_then(|limit| Instant::now().checked_add(limit));
        self.ends.look(least, deadline);
        let mut list = self.ends.list.lock();
        while list.ended.len() < least && list.in_flight > 0 {
            list.wanted = Some(list.wanted.map_or(least, |wanted| wanted.min(least)));
            match deadline {
                None => self.ends.changed.wait(&mut list),
                Some(deadline) if self.ends.changed.wait_until(&mut list, deadline).timed_out() => break,
                Some(_) => {}
            }
        }
    }
}

fn check(open: &Open, request: &BatchRequest) -> Result<Checked> {
    let BatchRequest { mode, memory, file_offset, memory_offset, size, file, opcode, cookie } = *request;
    let direction = match (mode, opcode) {
        (abi::MODE_BATCH, abi::OPCODE_READ) => Direction::Read,
        (abi::MODE_BATCH, abi::OPCODE_WRITE) => Direction::Write,
        _ => return Err(Code::InvalidValue.into()),
    };
    let range = Range::new(memory as usize, size, file_offset, memory_offset)?;
    Ok(Checked { file: open.files.get(file as usize)?, direction, range, cookie: cookie as usize })
}

/// Requests that were submitted together, for the statistics.
struct Together {
    /// How many are not done.
    left: AtomicUsize,
    ways: Ways,
}

impl Together {
    fn new(requests: usize) -> Together {
        Together { left: requests.into(), ways: Ways::default() }
    }

    /// One is done.
    fn ends(&self, done: &Result<Done>) {
        if let Ok(done) = done {
            self.ways.add(done.way);
        }
        if self.left.fetch_sub(1, Ordering::AcqRel) == 1 {
            statistics::batch_went(&self.ways);
        }
    }
}

/// A request in flight, which keeps the driver open. It ends as failed where it is dropped before
/// it has ended, as by a panic of what was to do it: a waiter would wait for it for ever.
struct Ending {
    ends: Arc<Ends>,
    together: Arc<Together>,
    direction: Direction,
    range: Range,
    cookie: usize,
    started: Instant,
    /// Whether system calls do it.
    by_calls: bool,
    is_over: bool,
    _open: Arc<Open>,
}

impl Ending {
    fn with(mut self, done: Result<Done>) {
        self.end(&done);
    }

    fn end(&mut self, done: &Result<Done>) {
        let Ending { direction, range, cookie, started, by_calls, .. } = *self;
        let cancelled = Err(Failure::System(Errno::CANCELED));
        let (status, result) = match done {
            Ok(done) => (abi::EVENT_COMPLETE, done.bytes as isize),
            Err(failure) if cancelled == Err::<(), _>(failure.clone()) => (abi::EVENT_CANCELED, failure.result()),
            Err(failure) => (abi::EVENT_FAILED, failure.result()),
        };
        statistics::record(direction, range, started, done);
        statistics::batch_done(direction, by_calls, done);
        self.together.ends(done);
        self.ends.add(End { cookie, status, result });
        self.is_over = true;
    }
}

impl Drop for Ending {
    fn drop(&mut self) {
        if !self.is_over {
            tracing::error!("a request of a batch was given up by what was to do it: an error of gpunvme");
            self.end(&Err(Code::Internal.into()));
        }
    }
}

/// Has another thread do it, by system calls or NVIDIA's library, and wait.
fn wait_elsewhere(open: &Arc<Open>, file: Arc<Registered>, mut end: Ending, run: &Cancel) {
    let (of_task, run) = (open.clone(), run.clone());
    end.by_calls = true;
    statistics::batch_by_calls();
    open.workers.run(move || {
        if run.is_cancelled() {
            return end.with(Err(Errno::CANCELED.into()));
        }
        // SAFETY: as for `Batch::submit`, whose caller vouched for the memory until the end.
        let done = unsafe { transfer::done(&of_task, &file, end.direction, end.range) };
        drop((of_task, file));
        end.with(done);
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::driver;

    /// By a thread that found the batch before another ended it.
    #[test]
    fn nothing_begins_in_a_batch_that_has_ended() {
        let open = driver::open_if_needed().unwrap();
        let number = open.batches.add(1).unwrap();
        let batch = open.batches.get(number).unwrap();
        open.batches.remove(number).unwrap();
        // SAFETY: it names no memory.
        assert_eq!(unsafe { batch.submit(&open, &[]) }, Err(Code::InvalidValue.into()));
    }

    /// Also when one thread after the other panics.
    #[test]
    fn requests_whose_thread_panics_end_as_failed() {
        let open = driver::open_if_needed().unwrap();
        let batch = open.batches.get(open.batches.add(100).unwrap()).unwrap();
        batch.ends.list.lock().in_flight = 100;
        let together = Arc::new(Together::new(100));
        let range = Range::new(4096, 1, 0, 0).unwrap();
        for cookie in 0..100 {
            let end = Ending {
                ends: batch.ends.clone(),
                together: together.clone(),
                direction: Direction::Read,
                range,
                cookie,
                started: Instant::now(),
                by_calls: true,
                is_over: false,
                _open: open.clone(),
            };
            open.workers.run(move || {
                let _end = end;
                panic!("as this test wants it");
            });
        }
        let mut events = [const { MaybeUninit::uninit() }; 100];
        assert_eq!(batch.take(100, Some(Duration::from_secs(20)), &mut events), 100);
        for event in events {
            // SAFETY: as many were written.
            let BatchEvent { status, result, .. } = unsafe { event.assume_init() };
            assert_eq!((status, result as isize), (abi::EVENT_FAILED, -5030));
        }
    }
}
