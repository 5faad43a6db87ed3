//! The staging memory of one stream of the application, and how a request is put into that stream.
//!
//! It guards that a stream never waits for a call of CUDA. Freeing memory waits for all streams, and in the driver everybody else's calls wait for that (seen on an H200, driver
//! 580): a thread that had to copy something so that a stream goes on would be one of them. So copies are in the stream when the call returns, each between two words in
//! this memory. By one the stream gives a room to whoever serves its requests, by the other it gets it back. Between the two whoever serves them copies what lies in host memory:
//! CUDA would do that in the call, after all that is in the stream.
//!
//! A window is one stream's at a time, until the stream has passed all that was asked for in it. Requests of one stream use it one after the other, as the stream comes to
//! them, so none holds a room that another waits for, whatever streams wait for each other.
//!
//! Locks: `Windows::list` for look-ups, and while a window is made; `Window::next` while a request is put into the stream, which may take long; inside of either `Window::owner`,
//! for moments. `Windows::contexts` stands alone. Who serves requests takes none.

use super::health::Health;
use super::ordered::Job;
use super::plan::{DEPTH, MOVES, Planned, ROOM};
use super::staging::Staging;
use crate::buffer::Shared;
use crate::error::{Error, Result};
use crate::mount::Mount;
use gpunvme_abi::Direction;
use gpunvme_cuda::{CudaError, Gpu, Move, Scatter, Stream, StreamId};
use parking_lot::Mutex;
use std::sync::atomic::{AtomicU32, Ordering, fence};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};
use zerocopy::IntoBytes;

/// Windows of a GPU at most, and so streams with requests at once.
const WINDOWS: usize = 8;
/// How long a thread of the application waits before it looks again whether it can go on.
pub(super) const NAP: Duration = Duration::from_micros(200);
/// Bytes of the table of one room.
const TABLE: usize = MOVES * size_of::<Move>();
/// Bytes of the words of one room: two cache lines, because two sides write them.
const WORDS: usize = 128;
/// Of those, the word that the stream writes, and the one that it waits for.
const GIVEN: usize = 0;
const RETURNED: usize = 64;

/// Where a room's table and its words are in a window, in bytes.
fn table(number: u32) -> usize {
    DEPTH * ROOM + number as usize % DEPTH * TABLE
}

fn words(number: u32) -> usize {
    DEPTH * (ROOM + TABLE) + number as usize % DEPTH * WORDS
}

/// What CUDA refused, and whether the window is lost.
struct Refused {
    error: CudaError,
    lost: bool,
}

/// The stream that a window is of.
#[derive(Clone)]
pub(super) struct Owner {
    pub stream: StreamId,
    /// Its context, if that is looked after.
    pub context: Option<Arc<Health>>,
}

/// One window. Its steps are numbered through all requests, and wrap; step `n` is in room `n % DEPTH`.
pub(super) struct Window {
    gpu: Gpu,
    /// None once it is lost.
    owner: Mutex<Option<Owner>>,
    /// The number of the step that is put into the stream next.
    next: Mutex<u32>,
    pub staging: Arc<Shared<Staging>>,
    /// The kernel that the stream may still run, which has to stay as long as the window.
    scatter: OnceLock<Arc<Scatter>>,
}

impl Window {
    fn new(mount: &Mount, gpu: Gpu, owner: Owner) -> Result<Window> {
        let staging = Staging::new(&mount.connection().path, &gpu, DEPTH * ROOM, DEPTH * (TABLE + WORDS))?;
        let staging = mount.register(staging)?.share();
        let (owner, next) = (Mutex::new(Some(owner)), Mutex::new(DEPTH as u32));
        let window = Window { gpu, owner, next, staging, scatter: OnceLock::new() };
        (0..DEPTH as u32).for_each(|number| window.word(number, GIVEN).store(number + 1, Ordering::Relaxed));
        Ok(window)
    }

    /// Whether the stream has given a step's room.
    pub fn is_given(&self, number: u32) -> bool {
        // Numbers wrap.
        self.word(number, GIVEN).load(Ordering::Acquire).wrapping_sub(number).cast_signed() >= 0
    }

    /// Whether the stream has done with it what there was to do.
    pub fn is_passed(&self, number: u32) -> bool {
        self.word(number, GIVEN).load(Ordering::Acquire).wrapping_sub(number).cast_signed() > 0
    }

    /// Gives the room back to the stream.
    pub fn give_back(&self, number: u32) {
        self.word(number, RETURNED).store(number, Ordering::Release);
    }

    /// Where a slot of a step is.
    pub fn slot(&self, number: u32, planned: &Planned) -> Option<usize> {
        Some(number as usize % DEPTH * ROOM + planned.slot?)
    }

    /// Writes what the kernel is to do for a piece, of which `len` bytes are there.
    pub fn set_move(&self, number: u32, entry: usize, direction: Direction, planned: &Planned, len: u64) {
        let slot = self.slot(number, planned).expect("what a kernel moves is staged") as u64 + planned.piece.skip;
        let slot = self.staging.memory().device_address + slot;
        let entry_at = table(number) + entry * size_of::<Move>();
        let (to, from) = ends(direction, planned.address, slot);
        let entry = Move { to, from, len };
        self.staging.memory().mapping.copy_in(entry_at, entry.as_bytes()).expect("a table has room for all pieces of a step");
    }

    /// Copies the first `len` bytes of a piece between its slot and the application's memory, if that is host memory.
    pub fn copy_on_host(&self, number: u32, direction: Direction, planned: &Planned, len: u64) {
        let Some(host) = planned.host else { return };
        let at = self.slot(number, planned).expect("it is staged") + planned.piece.skip as usize;
        // SAFETY: the application vouched for its memory from when the stream came to the request, as it did, until it has passed it, for which this step's room has to be back.
        // Where the stream does not wait for that, because CUDA took no words, the call waits that put the request into it.
        unsafe { self.staging.memory().copy_on_host(direction, at, host, len as usize) };
        // Stores to write-combined memory are in no order with those to other memory: they are to be there before the room is back.
        fence(Ordering::SeqCst);
    }

    /// The bytes of a slot that are the application's.
    pub fn keep(&self, number: u32, planned: &Planned) -> Vec<u8> {
        let mut kept = vec![0; planned.piece.wanted as usize];
        let at = self.slot(number, planned).expect("it is staged") + planned.piece.skip as usize;
        self.staging.memory().mapping.copy_out(at, &mut kept).expect("slots lie in the window");
        kept
    }

    /// Puts them back, but for those before `arrived`.
    pub fn put_back(&self, number: u32, planned: &Planned, kept: &[u8], arrived: u64) {
        let at = self.slot(number, planned).expect("it is staged") + (planned.piece.skip + arrived) as usize;
        self.staging.memory().mapping.copy_in(at, &kept[arrived as usize..]).expect("slots lie in the window");
    }

    fn word(&self, number: u32, which: usize) -> &AtomicU32 {
        self.staging.memory().mapping.word(words(number) + which)
    }

    fn is_of(&self, stream: StreamId) -> bool {
        self.owner.lock().as_ref().is_some_and(|owner| owner.stream == stream)
    }

    /// Whether its stream does nothing more.
    fn is_dead(&self) -> bool {
        let owner = self.owner.lock();
        let context = owner.as_ref().and_then(|owner| owner.context.as_ref());
        context.is_some_and(|context| context.ended().is_some())
    }

    fn is_free(&self, next: u32) -> bool {
        (1..=DEPTH as u32).all(|back| self.is_passed(next.wrapping_sub(back)))
    }

    /// Puts all steps of a job into its stream. Whoever serves it knows it already: where CUDA has no room for more in the stream, the caller waits.
    ///
    /// Of a copy that CUDA refuses nothing is left but the words around it, and what follows goes the same way. Where it takes no words either, the window is lost.
    fn put(&self, stream: &Stream, scatter: Option<&Scatter>, job: &Job) -> std::result::Result<(), Refused> {
        let mut refused = Ok(());
        for at in 0..job.plan.steps.len() + DEPTH {
            self.put_step(stream, scatter, job, at, &mut refused).map_err(|error| {
                job.cut(at);
                Refused { error, lost: true }
            })?;
        }
        refused.map_err(|error| Refused { error, lost: false })
    }

    /// Puts into a stream what its room has to do before step `at`, and the step.
    fn put_step(
        &self,
        stream: &Stream,
        scatter: Option<&Scatter>,
        job: &Job,
        at: usize,
        refused: &mut std::result::Result<(), CudaError>,
    ) -> std::result::Result<(), CudaError> {
        let word = |number, which| self.staging.memory().device_address + (words(number) + which) as u64;
        // The copies of a step in one direction, and the kernel's moves.
        let mut copy = |step: usize, direction: Direction, which: fn(&Planned) -> bool| {
            let number = job.number(step);
            let mut copied = job.pieces(step).filter(|planned| which(planned));
            if refused.is_ok() {
                *refused = copied.try_for_each(|planned| self.copy(stream, number, planned, direction));
            }
            if refused.is_ok() && direction == job.direction {
                *refused = self.scatter(stream, scatter, number, job.plan.steps[step].moves);
            }
            if refused.is_err() {
                job.cancel();
            }
        };
        let before = at.checked_sub(DEPTH);
        let mut given = before.map(|before| job.number(before).wrapping_add(1));
        if let Some(before) = before {
            let number = job.number(before);
            let returned = word(number, RETURNED);
            // SAFETY: the words are registered with CUDA, and stay so until the stream has passed them all: see `Windows::drop`. Whoever writes this one waits for
            // no stream to do so, and makes no call that would.
            unsafe {
                if job.flushes { stream.wait_value_and_flush(returned, number) } else { stream.wait_value(returned, number) }
            }?;
            if job.direction == Direction::Read {
                copy(before, Direction::Read, Planned::is_copied);
            }
        }
        if at < job.plan.steps.len() {
            match job.direction {
                Direction::Read => copy(at, Direction::Write, |planned| planned.keeps),
                Direction::Write => copy(at, Direction::Write, Planned::is_copied),
            }
            given = Some(job.number(at));
        }
        if let Some(given) = given {
            // SAFETY: as above.
            unsafe { stream.write_value(word(job.number(at), GIVEN), given) }?;
        }
        Ok(())
    }

    /// Copies a piece between its slot and the application's memory.
    fn copy(&self, stream: &Stream, number: u32, planned: &Planned, direction: Direction) -> std::result::Result<(), CudaError> {
        let slot = self.slot(number, planned).expect("what a stream copies is staged");
        let slot = self.staging.memory().mapping.as_ptr() as u64 + slot as u64 + planned.piece.skip;
        let ((to, from), len) = (ends(direction, planned.address, slot), planned.piece.wanted as usize);
        // SAFETY: one side is the application's memory, which it vouched for until the stream has passed the request; the other is a slot that is this piece's until then.
        unsafe {
            match direction {
                Direction::Read => stream.copy_in(to, from, len),
                Direction::Write => stream.copy_out(to, from, len),
            }
        }
    }

    /// Has the kernel make the moves of a step.
    fn scatter(
        &self,
        stream: &Stream,
        scatter: Option<&Scatter>,
        number: u32,
        moves: usize,
    ) -> std::result::Result<(), CudaError> {
        let Some(scatter) = scatter.filter(|_| moves > 0) else { return Ok(()) };
        let table = self.staging.memory().device_address + table(number) as u64;
        // SAFETY: as for copies. When the stream comes to it, whoever serves the request has filled the table with moves of this step, of memory that this GPU's kernels reach.
        unsafe { stream.scatter(scatter, table, moves as u32) }
    }
}

/// Where to and where from.
fn ends(direction: Direction, address: u64, slot: u64) -> (u64, u64) {
    match direction {
        Direction::Read => (address, slot),
        Direction::Write => (slot, address),
    }
}

/// The windows of all streams, and the contexts that are looked after.
pub(super) struct Windows {
    mount: Mount,
    list: Mutex<Vec<Arc<Window>>>,
    contexts: Mutex<Vec<Arc<Health>>>,
}

impl Windows {
    pub fn new(mount: &Mount) -> Windows {
        Windows { mount: mount.clone(), list: Mutex::default(), contexts: Mutex::default() }
    }

    /// The primary context of a GPU.
    pub fn context(&self, gpu: Gpu) -> std::result::Result<Arc<Health>, CudaError> {
        let mut contexts = self.contexts.lock();
        if let Some(context) = contexts.iter().find(|context| context.gpu == gpu) {
            return Ok(context.clone());
        }
        let context = Arc::new(Health::new(gpu)?);
        contexts.push(context.clone());
        Ok(context)
    }

    /// Puts a job into a stream, in a window near `gpu`. `begin` makes it, with the window and the number of its first step, and hands it to whoever serves it. Waits while all
    /// windows are of other streams.
    ///
    /// Where CUDA refuses something, the job is cancelled, and the stream goes on; nothing but the stream touches the application's memory for it afterwards.
    pub fn put(
        &self,
        gpu: Gpu,
        owner: Owner,
        stream: &Stream,
        scatter: Option<&Arc<Scatter>>,
        begin: impl FnOnce(Arc<Window>, u32) -> Arc<Job>,
        failed: impl Fn(CudaError) -> Error,
    ) -> Result<()> {
        loop {
            let window = self.of(gpu, &owner)?;
            let mut next = window.next.lock();
            if !window.is_of(owner.stream) {
                continue; // it became another's before it was used
            }
            if let Some(scatter) = scatter {
                window.scatter.get_or_init(|| scatter.clone());
            }
            let job = begin(window.clone(), *next);
            *next = job.number(job.plan.steps.len());
            return window.put(stream, scatter.map(Arc::as_ref), &job).map_err(|Refused { error, lost }| {
                if lost {
                    // Whoever waits for it looks for another.
                    *window.owner.lock() = None;
                    drop(next);
                    // What the stream still does to the memory nobody knows: it stays as long as the process.
                    self.list.lock().retain(|other| !Arc::ptr_eq(other, &window));
                    std::mem::forget(window.clone());
                    // The stream does not wait for steps that have begun.
                    job.wait_until_closed();
                }
                failed(error)
            });
        }
    }

    /// The window of a stream.
    fn of(&self, gpu: Gpu, owner: &Owner) -> Result<Arc<Window>> {
        loop {
            let mut list = self.list.lock();
            let near = || list.iter().filter(|window| window.gpu == gpu && !window.is_dead());
            if let Some(window) = near().find(|window| window.is_of(owner.stream)) {
                return Ok(window.clone());
            }
            for window in near() {
                if let Some(next) = window.next.try_lock()
                    && window.is_free(*next)
                {
                    *window.owner.lock() = Some(owner.clone());
                    return Ok(window.clone());
                }
            }
            if near().count() < WINDOWS {
                let window = Arc::new(Window::new(&self.mount, gpu, owner.clone())?);
                list.push(window.clone());
                return Ok(window);
            }
            drop(list);
            std::thread::sleep(NAP);
        }
    }
}

impl Drop for Windows {
    /// All requests are done, so streams pass soon, if they live. If it is not known that they do not, the memory is left to them.
    fn drop(&mut self) {
        let start = Instant::now();
        for window in self.list.get_mut().drain(..) {
            let next = *window.next.lock();
            while !window.is_free(next) && !window.is_dead() {
                if start.elapsed() > Duration::from_secs(1) {
                    std::mem::forget(window.clone());
                    break;
                }
                std::thread::yield_now();
            }
        }
    }
}
