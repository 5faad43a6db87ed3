//! A device whose commands fail or stall on demand, so that errors and slow media can be tested.
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use gpunvme_blockdev::{BlockDevice, Completion, Error, Geometry, NoPeerToPeer, Op, Queue, Region, Request, Result, Wait};
use parking_lot::Mutex;

/// Which commands a [`Rule`] is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum On {
    /// Reads.
    Read,
    /// Writes, durable or not.
    Write,
    /// Flushes.
    Flush,
    /// Discards.
    Discard,
    /// Fills with zeroes.
    WriteZeroes,
    /// Every command.
    Any,
}

impl On {
    fn matches(self, op: Op) -> bool {
        match op {
            Op::Read => matches!(self, On::Read | On::Any),
            Op::Write { .. } => matches!(self, On::Write | On::Any),
            Op::Flush => matches!(self, On::Flush | On::Any),
            Op::Discard => matches!(self, On::Discard | On::Any),
            Op::WriteZeroes => matches!(self, On::WriteZeroes | On::Any),
        }
    }
}

/// When to do what. The first rule that matches a command decides. As made, a rule matches every
/// command of its kind, from the first, for ever.
#[derive(Debug, Clone)]
pub struct Rule {
    on: On,
    range: Range<u64>,
    skip: u64,
    /// How often it still matches.
    times: u64,
    effect: Effect,
}

#[derive(Debug, Clone, Copy)]
enum Effect {
    Fail(i32),
    Delay(Duration),
    Hold,
}

impl Rule {
    /// The command does nothing and fails with this errno.
    pub fn fail(on: On, errno: i32) -> Self {
        Self::new(on, Effect::Fail(errno))
    }

    /// The command reaches the device this much later.
    pub fn delay(on: On, delay: Duration) -> Self {
        Self::new(on, Effect::Delay(delay))
    }

    /// The command reaches the device when [`Faulty::release`] is called. An
    /// [`gpunvme_blockdev::Io`] that is dropped before waits for it for ever, as it would for a
    /// device that never answers.
    pub fn hold(on: On) -> Self {
        Self::new(on, Effect::Hold)
    }

    /// Only commands that touch these bytes. A flush touches none.
    pub fn within(self, range: Range<u64>) -> Self {
        Self { range, ..self }
    }

    /// Lets this many matching commands pass first.
    pub fn after(self, skip: u64) -> Self {
        Self { skip, ..self }
    }

    /// Only the first command it would match.
    pub fn once(self) -> Self {
        Self { times: 1, ..self }
    }

    fn new(on: On, effect: Effect) -> Self {
        Self { on, range: 0..u64::MAX, skip: 0, times: u64::MAX, effect }
    }

    /// What the rule wants done with the request, if it is the one that it waited for.
    fn hit(&mut self, request: &Request) -> Option<Effect> {
        let everywhere = self.range == (0..u64::MAX);
        let touches = everywhere || request.offset < self.range.end && self.range.start < request.offset + request.len;
        if self.times == 0 || !self.on.matches(request.op) || !touches {
            return None;
        }
        if self.skip > 0 {
            self.skip -= 1;
            return None;
        }
        self.times -= 1;
        Some(self.effect)
    }
}

/// Any device, with faults. Rules may be added and cleared while it is in use.
pub struct Faulty {
    inner: Arc<dyn BlockDevice>,
    shared: Arc<Mutex<Shared>>,
}

#[derive(Default)]
struct Shared {
    rules: Vec<Rule>,
    /// Commands that a rule hit.
    hits: u64,
    /// How often [`Faulty::release`] was called.
    releases: u64,
    queues: Vec<Weak<FaultyQueue>>,
}

impl Faulty {
    /// The device as it is, until a rule is added.
    pub fn new(inner: Arc<dyn BlockDevice>) -> Arc<Self> {
        Arc::new(Self { inner, shared: Arc::default() })
    }

    /// Adds a rule behind those there are.
    pub fn add(&self, rule: Rule) {
        self.shared.lock().rules.push(rule);
    }

    /// Removes all rules. What is delayed or held stays so.
    pub fn clear(&self) {
        self.shared.lock().rules.clear();
    }

    /// How many commands a rule hit so far.
    pub fn hits(&self) -> u64 {
        self.shared.lock().hits
    }

    /// Lets the commands go that are held now.
    pub fn release(&self) {
        let mut shared = self.shared.lock();
        shared.releases += 1;
        let queues: Vec<_> = shared.queues.iter().filter_map(Weak::upgrade).collect();
        drop(shared);
        for queue in queues {
            queue.inner.wake();
        }
    }
}

impl BlockDevice for Faulty {
    fn name(&self) -> &str {
        self.inner.name()
    }

    fn geometry(&self) -> &Geometry {
        self.inner.geometry()
    }

    fn open_queue(&self) -> Result<Box<dyn Queue>> {
        let queue = Arc::new(FaultyQueue {
            name: self.inner.name().into(),
            inner: self.inner.open_queue()?,
            shared: self.shared.clone(),
            held: Mutex::default(),
        });
        let mut shared = self.shared.lock();
        shared.queues.retain(|queue| queue.strong_count() > 0);
        shared.queues.push(Arc::downgrade(&queue));
        Ok(Box::new(QueueHandle(queue)))
    }

    fn map(&self, region: &Arc<Region>) -> Result<()> {
        self.inner.map(region)
    }

    fn unmap(&self, region: &Region) {
        self.inner.unmap(region);
    }

    fn peer_to_peer(&self) -> std::result::Result<(), NoPeerToPeer> {
        self.inner.peer_to_peer()
    }

    fn pins(&self) -> bool {
        self.inner.pins()
    }

    fn look_again(&self) -> Result<u64> {
        self.inner.look_again()
    }
}

struct FaultyQueue {
    name: Arc<str>,
    inner: Box<dyn Queue>,
    shared: Arc<Mutex<Shared>>,
    held: Mutex<Held>,
}

#[derive(Default)]
/// Requests that a rule stopped.
struct Held {
    stalled: Vec<(Until, Request)>,
    failed: Vec<Completion>,
}

#[derive(Clone, Copy)]
enum Until {
    Time(Instant),
    /// Until there have been more releases than this.
    Released(u64),
}

impl FaultyQueue {
    fn submit(&self, requests: &mut Vec<Request>) {
        let mut passed = Vec::with_capacity(requests.len());
        let mut stopped = false;
        {
            let mut shared = self.shared.lock();
            let mut held = self.held.lock();
            for request in requests.drain(..) {
                let effect = shared.rules.iter_mut().find_map(|rule| rule.hit(&request));
                shared.hits += u64::from(effect.is_some());
                stopped |= effect.is_some();
                match effect {
                    None => passed.push(request),
                    Some(Effect::Fail(errno)) => {
                        let Request { op, offset, len, tag, .. } = request;
                        let error = Error::Io { device: self.name.clone(), op, offset, len, errno };
                        held.failed.push(Completion { tag, result: Err(error) });
                    }
                    Some(Effect::Delay(delay)) => held.stalled.push((Until::Time(Instant::now() + delay), request)),
                    Some(Effect::Hold) => held.stalled.push((Until::Released(shared.releases), request)),
                }
            }
        }
        self.inner.submit(&mut passed);
        if stopped {
            // A waiting thread has to learn of the failure, or to wait for the delay.
            self.inner.wake();
        }
    }

    /// Passes on what is due, takes out what failed, and says for how long nothing else becomes
    /// due.
    fn release_due(&self, out: &mut Vec<Completion>) -> Option<Duration> {
        let releases = self.shared.lock().releases;
        let now = Instant::now();
        let mut due = Vec::new();
        let mut next = None;
        {
            let mut held = self.held.lock();
            out.append(&mut held.failed);
            for (until, request) in std::mem::take(&mut held.stalled) {
                match until {
                    Until::Time(time) if time > now => {
                        next = Some(next.map_or(time - now, |next: Duration| next.min(time - now)));
                        held.stalled.push((until, request));
                    }
                    Until::Released(at) if at == releases => held.stalled.push((until, request)),
                    Until::Time(_) | Until::Released(_) => due.push(request),
                }
            }
        }
        self.inner.submit(&mut due);
        next
    }

    fn complete(&self, wait: Wait, out: &mut Vec<Completion>) -> Result<usize> {
        let before = out.len();
        let next = self.release_due(out);
        let wait = match (wait, next) {
            _ if out.len() > before => Wait::No,
            (Wait::Forever, Some(next)) => Wait::Timeout(next),
            (Wait::Timeout(timeout), Some(next)) => Wait::Timeout(timeout.min(next)),
            (wait, _) => wait,
        };
        self.inner.complete(wait, out)?;
        Ok(out.len() - before)
    }

    /// As [`Queue::sleep_on`]. While a delay runs it has to be looked at again.
    fn sleep_on(&self, since: Instant) -> Result<Option<BorrowedFd<'_>>> {
        let releases = self.shared.lock().releases;
        let is_due = {
            let held = self.held.lock();
            let waits = |until: &Until| matches!(until, Until::Released(at) if *at == releases);
            !held.failed.is_empty() || !held.stalled.iter().all(|(until, _)| waits(until))
        };
        if is_due { Ok(None) } else { self.inner.sleep_on(since) }
    }
}

/// The queue as its user holds it; the device keeps a weak handle, to wake it.
struct QueueHandle(Arc<FaultyQueue>);

impl Queue for QueueHandle {
    fn submit(&self, requests: &mut Vec<Request>) {
        self.0.submit(requests);
    }

    fn complete(&self, wait: Wait, out: &mut Vec<Completion>) -> Result<usize> {
        self.0.complete(wait, out)
    }

    fn wake(&self) {
        self.0.inner.wake();
    }

    fn sleep_on(&self, since: Instant) -> Result<Option<BorrowedFd<'_>>> {
        self.0.sleep_on(since)
    }
}
