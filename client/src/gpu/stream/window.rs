//! The staging memory of one stream of the application.
//!
//! It guards that a stream never waits for a call of CUDA. Freeing memory waits for all streams,
//! and in the driver the calls of all other threads wait for that (seen on an H200, driver 580): a
//! thread that had to copy something so that a stream goes on would be one of them. So copies are
//! in the stream when the call returns, each between two words in this memory. By one the stream
//! gives a frame to the thread that serves its requests, by the other it gets it back. Between the
//! two that thread copies what lies in host memory: CUDA would do that in the call, after all that
//! is in the stream.
//!
//! A window is one stream's at a time, until the stream has passed all that was asked for in it.
//! Requests of one stream use it one after the other, as the stream comes to them, so none holds a
//! frame that another waits for, whatever streams wait for each other.
//!
//! Locks: `Windows::list` for look-ups, and while a window is made; `StreamWindow::next` while a
//! request is put into the stream, which may take long; inside of either `StreamWindow::owner`,
//! for moments. `Windows::contexts` stands alone. The thread that serves requests takes none.

use super::health::Health;
use super::late::moves;
use super::plan::{DEPTH, FRAME, MOVES, Planned};
use crate::buffer::Shared;
use crate::error::Result;
use crate::gpu::memory::staging::{Staging, ends};
use crate::mount::Mount;
use gpunvme_abi::Direction;
use gpunvme_cuda::{CudaError, Gpu, Move, Scatter, StreamId};
use parking_lot::{Mutex, MutexGuard};
use std::sync::atomic::{AtomicU32, Ordering, fence};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};
use zerocopy::IntoBytes;

/// Windows of a GPU at most, and so streams with requests at once.
const WINDOWS: usize = 8;
/// How long a thread of the application waits before it looks again whether it can go on.
pub const NAP: Duration = Duration::from_micros(200);
/// Bytes of the table of one frame.
const TABLE: usize = MOVES * size_of::<Move>();
/// Bytes of the words of one frame: two cache lines, because two sides write them.
const WORDS: usize = 128;
/// Of those, the word that the stream writes, and the one that it waits for.
const GIVEN: usize = 0;
const RETURNED: usize = 64;

/// Where a frame's table and its words are in a window, in bytes.
fn table(number: u32) -> usize {
    DEPTH * FRAME + number as usize % DEPTH * TABLE
}

fn words(number: u32) -> usize {
    DEPTH * (FRAME + TABLE) + number as usize % DEPTH * WORDS
}

/// The stream that a window is of.
#[derive(Clone)]
pub struct Owner {
    pub stream: StreamId,
    /// Its context, if that is looked after.
    pub context: Option<Arc<Health>>,
}

/// One window. Its steps are numbered through all requests, and wrap; step `n` is in frame `n %
/// DEPTH`.
pub struct StreamWindow {
    gpu: Gpu,
    /// None once it is lost.
    owner: Mutex<Option<Owner>>,
    /// The number of the step that is put into the stream next.
    pub next: Mutex<u32>,
    pub staging: Arc<Shared<Staging>>,
    /// The kernel that the stream may still run, which has to stay as long as the window.
    scatter: OnceLock<Arc<Scatter>>,
}

impl StreamWindow {
    fn new(mount: &Mount, gpu: Gpu, owner: Owner) -> Result<StreamWindow> {
        let staging = Staging::new(&mount.connection().path, &gpu, DEPTH * FRAME, DEPTH * (TABLE + WORDS))?;
        let staging = mount.register(staging)?.share();
        let (owner, next) = (Mutex::new(Some(owner)), Mutex::new(DEPTH as u32));
        let window = StreamWindow { gpu, owner, next, staging, scatter: OnceLock::new() };
        (0..DEPTH as u32).for_each(|number| window.word(number, GIVEN).store(number + 1, Ordering::Relaxed));
        Ok(window)
    }

    /// Whether the stream has given a step's frame.
    pub fn is_given(&self, number: u32) -> bool {
        // Numbers wrap.
        self.word(number, GIVEN).load(Ordering::Acquire).wrapping_sub(number).cast_signed() >= 0
    }

    /// Whether the stream has finished all its work of a step.
    pub fn is_passed(&self, number: u32) -> bool {
        self.word(number, GIVEN).load(Ordering::Acquire).wrapping_sub(number).cast_signed() > 0
    }

    /// Gives the frame back to the stream.
    pub fn give_back(&self, number: u32) {
        self.word(number, RETURNED).store(number, Ordering::Release);
    }

    /// Where a slot of a step is.
    pub fn slot(&self, number: u32, planned: &Planned) -> Option<usize> {
        Some(number as usize % DEPTH * FRAME + planned.slot?)
    }

    /// Writes what the kernel is to do for a piece, of which `len` bytes are there.
    pub fn set_move(&self, number: u32, entry: usize, direction: Direction, planned: &Planned, len: u64) {
        let slot = self.slot(number, planned).expect("what a kernel moves is staged") as u64 + planned.piece.skip;
        let slot = self.staging.memory().device_address + slot;
        let entry_at = table(number) + entry * size_of::<Move>();
        let (to, from) = ends(direction, planned.address, slot);
        let entry = Move { to, from, len };
        self.staging.memory().mapping.copy_in(entry_at, entry.as_bytes()).expect("a table holds all pieces of a step");
    }

    /// Writes what the kernel is to do for the pieces of a step, of each of which so many bytes are
    /// there, and nothing else.
    pub fn set_table<'a>(&self, number: u32, direction: Direction, pieces: impl Iterator<Item = (&'a Planned, u64)>) {
        let base = self.staging.memory().device_address;
        let slot = |planned| self.slot(number, planned).expect("what a kernel moves is staged") as u64;
        let moves = moves(direction, pieces.map(|(planned, len)| (planned, base + slot(planned) + planned.piece.skip, len)));
        self.staging.memory().mapping.copy_in(table(number), moves.as_bytes()).expect("a frame has a table");
    }

    /// Copies the first `len` bytes of a piece between its slot and the application's memory, if
    /// that is host memory.
    pub fn copy_on_host(&self, number: u32, direction: Direction, planned: &Planned, len: u64) {
        let Some(host) = planned.host else { return };
        let at = self.slot(number, planned).expect("it is staged") + planned.piece.skip as usize;
        // SAFETY: the application vouched for its memory from when the stream came to the request,
        // as it did, until it has passed it, for which this step's frame has to be back. Where the
        // stream does not wait for that, because CUDA took no words, the call waits that put the
        // request into it.
        unsafe { self.staging.memory().copy_on_host(direction, at, host, len as usize) };
        // Stores to write-combined memory are in no order with those to other memory: they are to
        // be there before the frame is back.
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

    /// Clears them, but for those before `arrived`: the stream copies all of them whatever became
    /// of the piece, and the slot has what another request left there.
    pub fn clear(&self, number: u32, planned: &Planned, arrived: u64) {
        let missing = planned.piece.wanted - arrived;
        if missing > 0 {
            self.put_back(number, planned, &vec![0; planned.piece.wanted as usize], arrived);
        }
    }

    /// Where a stream finds the word by which it gives a step's frame.
    pub fn given_address(&self, number: u32) -> u64 {
        self.staging.memory().device_address + (words(number) + GIVEN) as u64
    }

    /// Where a stream finds the word by which it gets a step's frame back.
    pub fn returned_address(&self, number: u32) -> u64 {
        self.staging.memory().device_address + (words(number) + RETURNED) as u64
    }

    /// Where the kernel finds what it is to do for a step.
    pub fn table_address(&self, number: u32) -> u64 {
        self.staging.memory().device_address + table(number) as u64
    }

    /// Where in this process's memory the application's bytes of a piece's slot are.
    pub fn slot_address(&self, number: u32, planned: &Planned) -> u64 {
        let slot = self.slot(number, planned).expect("what is copied is staged");
        self.staging.memory().mapping.as_ptr() as u64 + slot as u64 + planned.piece.skip
    }

    /// Keeps a kernel for as long as the window: the stream may still run it.
    pub fn keep_kernel(&self, scatter: &Arc<Scatter>) {
        self.scatter.get_or_init(|| scatter.clone());
    }

    fn word(&self, number: u32, which: usize) -> &AtomicU32 {
        self.staging.memory().mapping.word(words(number) + which)
    }

    /// Whether it is this stream's now.
    pub fn is_of(&self, stream: StreamId) -> bool {
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
}

/// The windows of all streams, and the contexts that are looked after.
pub struct Windows {
    mount: Mount,
    list: Mutex<Vec<Arc<StreamWindow>>>,
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

    /// Gives up a window whose words CUDA no longer takes. It is unknown what its stream still does
    /// to the memory, which stays as long as the process.
    pub fn lose(&self, window: &Arc<StreamWindow>, next: MutexGuard<'_, u32>) {
        // A call that waits for it looks for another.
        *window.owner.lock() = None;
        drop(next);
        self.list.lock().retain(|other| !Arc::ptr_eq(other, window));
        std::mem::forget(window.clone());
    }

    /// The window of a stream, near a GPU. Waits while all windows there are other streams'. It
    /// may have become another stream's until its `next` is locked.
    pub fn of(&self, gpu: Gpu, owner: &Owner) -> Result<Arc<StreamWindow>> {
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
                let window = Arc::new(StreamWindow::new(&self.mount, gpu, owner.clone())?);
                list.push(window.clone());
                return Ok(window);
            }
            drop(list);
            std::thread::sleep(NAP);
        }
    }
}

impl Drop for Windows {
    /// All requests are done, so streams pass soon, if they live. If it is not known that they do
    /// not, the memory is left to them.
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
