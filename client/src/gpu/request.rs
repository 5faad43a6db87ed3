//! What an application asks for, and how it learns that it is done.
//!
//! It guards that every request is answered once, whatever becomes of it.

use super::memory::pieces::Piece;
use super::queue::{Deliveries, QueueEnd};
use super::registered::Lease;
use crate::Reason;
use crate::buffer::{Memory, Shared};
use crate::error::Result;
use crate::file::{Require, Transfer};
use crate::linger::Linger;
use crate::ring::{Attached, Operation};
use gpunvme_abi::Direction;
use gpunvme_cuda::Gpu;
use parking_lot::{Condvar, Mutex};
use smallvec::SmallVec;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// How long [`Pending::wait`] looks before it sleeps: about what a small read takes.
const LINGER: Duration = Duration::from_micros(50);

/// A range of a file and as long a range of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Segment {
    /// Where in the file it begins, in bytes.
    pub file_offset: u64,
    /// Where in memory it begins: a `CUdeviceptr`, or a pointer of the CUDA runtime.
    pub address: u64,
    /// How long it is, in bytes.
    pub len: u64,
}

/// A part of a segment, in one allocation.
#[derive(Debug)]
pub(super) struct Part {
    pub file_offset: u64,
    pub address: u64,
    pub len: u64,
    /// Of the segment, in the call.
    pub segment: u32,
    pub allocation: Allocation,
    /// What the device reaches it by, or why it goes through the staging pool.
    pub registered: std::result::Result<Lease, Reason>,
}

/// The parts of a request: mostly one, which then needs no memory of its own.
pub(super) type Parts = SmallVec<[Part; 1]>;

/// What the memory of a part was when it was asked for.
#[derive(Clone, Copy, Debug)]
pub(super) struct Allocation {
    /// The GPU whose copies reach it.
    pub gpu: Gpu,
    /// Whether that GPU's kernels do.
    pub by_kernel: bool,
    /// Where the processor finds its first byte, if it is host memory. Then the processor copies it: CUDA does that in its caller, and lets the caller wait for the stream.
    pub host: Option<u64>,
    pub base: u64,
    pub buffer_id: u64,
}

impl Allocation {
    /// Where the processor finds what lies at an address of it, if it is host memory.
    pub fn on_host(&self, address: u64) -> Option<u64> {
        Some(self.host?.wrapping_add(address - self.base))
    }
}

/// A read or write, looked up and ready to be done.
pub(super) struct Request {
    pub direction: Direction,
    pub source: Source,
    pub parts: Parts,
    pub require: Require,
    /// How long its pieces are.
    pub piece_len: u64,
    pub end: End,
}

/// The file of a request.
pub(super) enum Source {
    /// As a ring knows it.
    Ring(Attached),
    /// By its path: its bytes were brought by a call.
    Call(PathBuf),
}

impl Source {
    /// The path that the file was opened by.
    pub fn path(&self) -> &Path {
        match self {
            Source::Ring(file) => file.path(),
            Source::Call(path) => path,
        }
    }
}

/// A transfer of the ring between a piece of a file and `at` in a buffer.
pub(super) fn operation<'a, M: Memory>(
    direction: Direction,
    file: &'a Attached,
    piece: &Piece,
    buffer: &'a Arc<Shared<M>>,
    at: u64,
) -> Operation<'a> {
    match direction {
        Direction::Read => Operation::read(file, piece.file_offset, buffer, at, piece.len),
        Direction::Write => Operation::write(file, piece.file_offset, buffer, at, piece.len),
    }
}

/// Where the answer goes.
pub(super) enum End {
    Pending(Arc<Answer>),
    Callback(Box<dyn FnOnce(Result<Transfer>) + Send>),
    Queue(QueueEnd),
}

impl End {
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
    /// So that whoever waits can look without a lock.
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

/// A request that was begun. Dropping it neither ends the request nor waits for it: the memory is still in use.
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
        let mut linger = Linger::new();
        while !self.is_done() && linger.goes_on(LINGER) {}
        let mut result = self.0.result.lock();
        loop {
            if let Some(result) = result.take() {
                return result;
            }
            self.0.changed.wait(&mut result);
        }
    }
}
