//! A device that executes its requests in any order: each piece by piece, at any time between its
//! submission and its completion, interleaved with others; and that fails at times. Its writes are
//! recorded, for power cuts.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use gpunvme_blockdev::{BlockDevice, Completion, Error, Geometry, Op, Queue, Region, Request, Result, Span, Spans, Wait};
use gpunvme_blockdev_testing::{Image, Recorder, SECTOR};
use parking_lot::Mutex;

use crate::common::Random;

/// Turns after which a batch that is due completes, whatever the seed says.
pub const LATE: u64 = 50;

/// How the device behaves.
#[derive(Debug, Clone, Copy)]
pub struct Habits {
    /// Of ten requests, how many it does as soon as they are submitted.
    pub prompt: u64,
    /// Of ten turns, how many complete something.
    pub quick: u64,
    /// Of a hundred batches, how many take long.
    pub slow: u64,
    /// For how many turns those stay in flight at least, and the others at most.
    pub patience: u64,
    /// Once in so many requests it fails one; never if 0.
    pub fails: u64,
}

/// The device.
pub struct Unruly {
    recorder: Arc<Recorder>,
    shared: Arc<Shared>,
    /// The next queue that is opened is for a batch that asks the device for nothing.
    idles: AtomicBool,
}

struct Shared {
    habits: Habits,
    state: Mutex<Backlog>,
}

struct Backlog {
    random: Random,
    /// In the order in which [`gpunvme_blockdev::Io::stepped`] has them.
    batches: Vec<Arc<Batch>>,
    /// Set when nothing is to fail any more.
    tame: bool,
    turn: u64,
    /// Requests that have failed.
    failures: u64,
}

struct Batch {
    inner: Box<dyn Queue>,
    idle: bool,
    /// It does not complete before, and not much later.
    until: u64,
    begun: u64,
    work: Mutex<Work>,
}

#[derive(Default)]
struct Work {
    /// Requests left to be done; whether each fails.
    left: Vec<(Request, bool)>,
    /// Pieces that were handed on.
    handed: usize,
    over: Vec<Completion>,
}

impl Unruly {
    /// A device with this content.
    pub fn new(image: Image, seed: u64, habits: Habits) -> Arc<Unruly> {
        let state = Backlog { random: Random(seed), batches: Vec::new(), tame: true, turn: 0, failures: 0 };
        let shared = Arc::new(Shared { habits, state: Mutex::new(state) });
        Arc::new(Unruly { recorder: Recorder::new(image), shared, idles: AtomicBool::new(false) })
    }

    /// The recorder of its writes.
    pub fn recorder(&self) -> &Arc<Recorder> {
        &self.recorder
    }

    /// Sets whether the device is tame: a tame device fails nothing.
    pub fn tame(&self, tame: bool) {
        self.shared.state.lock().tame = tame;
    }

    /// Announces that the next batch asks for nothing: it keeps at least one batch in flight.
    pub fn expect_idle(&self) {
        self.idles.store(true, Ordering::Relaxed);
    }

    /// Executes some pieces of a request, or none.
    pub fn work(&self, turn: u64) {
        let mut state = self.shared.state.lock();
        state.turn = turn;
        if state.random.below(3) > 0 {
            return;
        }
        let busy: Vec<_> = state.batches.iter().filter(|batch| !batch.work.lock().left.is_empty()).cloned().collect();
        if busy.is_empty() {
            return;
        }
        let batch = &busy[state.random.below(busy.len() as u64) as usize];
        batch.work.lock().some(&mut state.random, &*batch.inner);
    }

    /// Which batch completes now. The one that asks for nothing, if none is to.
    pub fn next(&self) -> usize {
        let mut state = self.shared.state.lock();
        let state = &mut *state;
        let idle = state.batches.iter().position(|batch| batch.idle).expect("there is always one");
        let overdue = |batch: &Batch| batch.until.max(batch.begun + self.shared.habits.patience) + LATE < state.turn;
        let chosen = match state.batches.iter().position(|batch| !batch.idle && overdue(batch)) {
            Some(late) => late,
            None if state.random.below(10) >= self.shared.habits.quick => idle,
            None => {
                let chosen = state.random.below(state.batches.len() as u64) as usize;
                if state.batches[chosen].until > state.turn { idle } else { chosen }
            }
        };
        state.batches.remove(chosen);
        chosen
    }

    /// Of so many batches, the last one completes: for who does nothing else meanwhile.
    pub fn last(&self, count: usize) -> usize {
        self.shared.state.lock().batches.pop();
        count - 1
    }

    /// Requests that have failed so far.
    pub fn failures(&self) -> u64 {
        self.shared.state.lock().failures
    }
}

impl Work {
    /// Does a part of one request.
    fn some(&mut self, random: &mut Random, inner: &dyn Queue) {
        let at = random.below(self.left.len() as u64) as usize;
        let (request, fails) = self.left.swap_remove(at);
        let sectors = request.len / SECTOR;
        if sectors > 1 && random.below(3) > 0 {
            let (first, rest) = cut(request, (1 + random.below(sectors - 1)) * SECTOR);
            self.hand_on(first, inner);
            self.left.push((rest, fails));
        } else if !fails {
            self.hand_on(request, inner);
        } else {
            self.left.push((request, true));
        }
    }

    fn hand_on(&mut self, request: Request, inner: &dyn Queue) {
        self.handed += 1;
        inner.submit(&mut vec![request]);
    }
}

/// Whether a request writes the content of a file: metadata says of itself what it is.
pub fn is_content(request: &Request) -> bool {
    let mut magic = [0; 4];
    let first = request.spans.first().filter(|_| matches!(request.op, Op::Write { .. }));
    first.is_some_and(|span| span.region.read_at(span.offset, &mut magic).is_ok() && magic != *b"gNVM")
}

/// Cuts a request in two behind so many bytes.
fn cut(request: Request, at: u64) -> (Request, Request) {
    let (mut before, mut behind) = (Spans::new(), Spans::new());
    let mut missing = at as usize;
    for span in &request.spans {
        let len = span.len.min(missing);
        missing -= len;
        let part = |offset, len| Span { region: span.region.clone(), offset, len };
        if len > 0 {
            before.push(part(span.offset, len));
        }
        if len < span.len {
            behind.push(part(span.offset + len, span.len - len));
        }
    }
    let rest = Request { op: request.op, offset: request.offset + at, len: request.len - at, spans: behind, tag: request.tag };
    (Request { len: at, spans: before, ..request }, rest)
}

struct Handle {
    batch: Arc<Batch>,
    shared: Arc<Shared>,
    name: Arc<str>,
}

impl Queue for Handle {
    fn submit(&self, requests: &mut Vec<Request>) {
        let mut state = self.shared.state.lock();
        let mut work = self.batch.work.lock();
        let work = &mut *work;
        for request in requests.drain(..) {
            let Request { op, offset, len, tag, .. } = request;
            let may_fail = !state.tame && self.shared.habits.fails > 0 && is_content(&request);
            let fails = may_fail && state.random.below(self.shared.habits.fails) == 0;
            let error = || Error::Io { device: self.name.clone(), op, offset, len, errno: libc::EIO };
            work.over.push(Completion { tag, result: if fails { Err(error()) } else { Ok(()) } });
            if self.batch.idle {
                continue;
            }
            // A flush covers what was over when it was submitted, and nothing that is later.
            let at_once = matches!(op, Op::Flush) || state.random.below(10) < self.shared.habits.prompt;
            if at_once && !fails {
                work.hand_on(request, &*self.batch.inner);
            } else {
                work.left.push((request, fails));
            }
        }
    }

    fn complete(&self, _: Wait, out: &mut Vec<Completion>) -> Result<usize> {
        let mut state = self.shared.state.lock();
        let mut work = self.batch.work.lock();
        work.left.retain(|(_, fails)| !fails);
        state.failures += work.over.iter().filter(|completion| completion.result.is_err()).count() as u64;
        while !work.left.is_empty() {
            work.some(&mut state.random, &*self.batch.inner);
        }
        let mut done = Vec::new();
        while done.len() < work.handed {
            self.batch.inner.complete(Wait::Forever, &mut done)?;
        }
        assert!(done.iter().all(|completion| completion.result.is_ok()));
        let count = work.over.len();
        out.append(&mut work.over);
        Ok(count)
    }

    fn wake(&self) {}
}

impl BlockDevice for Unruly {
    fn name(&self) -> &str {
        self.recorder.name()
    }

    fn geometry(&self) -> &Geometry {
        self.recorder.geometry()
    }

    fn open_queue(&self) -> Result<Box<dyn Queue>> {
        let idle = self.idles.swap(false, Ordering::Relaxed);
        let mut state = self.shared.state.lock();
        let begun = state.turn;
        let slow = state.random.below(100) < self.shared.habits.slow;
        let until = if slow { begun + 1 + state.random.below(self.shared.habits.patience) } else { 0 };
        let batch = Arc::new(Batch { inner: self.recorder.open_queue()?, idle, until, begun, work: Mutex::default() });
        state.batches.push(batch.clone());
        Ok(Box::new(Handle { batch, shared: self.shared.clone(), name: self.recorder.name().into() }))
    }

    fn map(&self, _: &Arc<Region>) -> Result<()> {
        Ok(())
    }

    fn unmap(&self, _: &Region) {}
}
