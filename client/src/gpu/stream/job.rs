//! A request in a stream, as the thread that serves it and the call that puts it into the stream
//! share it.
//!
//! It guards that the application's memory is known to be untouched after a request was cancelled.

use super::health::Health;
use super::late::Late;
use super::observer::Watch;
use super::plan::Cut;
use super::window::{NAP, StreamWindow};
use crate::gpu::page_cache::cached_file::CachedFile;
use crate::gpu::request::Segment;
use crate::ring::Attached;
use crate::transfer::Require;
use gpunvme_abi::{Direction, Reason};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// A request in a stream.
pub struct Job {
    pub direction: Direction,
    pub file: Attached,
    /// If what the page cache has is read from there, and else why not.
    pub resident: std::result::Result<(Arc<CachedFile>, Arc<OwnedFd>), Reason>,
    pub require: Require,
    /// As it was cut when it was put into the stream.
    pub cut: Arc<Cut>,
    pub asks: Asks,
    pub window: Arc<StreamWindow>,
    /// The stream, as the application names it.
    pub stream: usize,
    /// Its context, if that is looked after.
    pub context: Option<Arc<Health>>,
    /// The window's number for the first step.
    pub first: u32,
    /// What the device wrote to GPU memory itself is there for the stream only after a flush.
    pub flushes: bool,
    /// What file offsets may be moved by a multiple of, in bytes.
    pub block: u64,
    pub watch: Watch,
    pub progress: Progress,
}

/// What the observer is asked when the stream comes to a request.
pub enum Asks {
    /// By how many bytes file offsets are moved.
    Shift,
    /// What is to be done, instead of this. It is followed where that is a shift.
    Segment(Segment),
    /// What is to be done, up to what was said.
    Late(Late),
}

/// How far a request has come, and how far it may go.
pub struct Progress {
    /// Of its steps, those that the stream gets.
    steps: AtomicUsize,
    /// The stream does not get all that belongs to those either.
    cut: AtomicBool,
    /// Nothing of it is to be transferred any more.
    cancelled: AtomicBool,
    /// Steps that were begun, and of which some pieces are not back: as long as there are any, the
    /// application's memory may be in use.
    open: AtomicUsize,
}

impl Progress {
    /// Nothing was begun, and the stream gets so many steps.
    pub fn new(steps: usize) -> Progress {
        let no = || AtomicBool::new(false);
        Progress { steps: steps.into(), cut: no(), cancelled: no(), open: AtomicUsize::new(0) }
    }
}

impl Job {
    /// The window's number for a step.
    pub fn number(&self, step: usize) -> u32 {
        self.first.wrapping_add(step as u32)
    }

    /// How many steps there are.
    pub fn steps(&self) -> usize {
        self.progress.steps.load(Ordering::Acquire)
    }

    /// Whether the stream does not get all of it, and so never passes it.
    pub fn is_cut(&self) -> bool {
        self.progress.cut.load(Ordering::Acquire)
    }

    /// Only the steps before this one are in the stream, and no others will be. It may be one
    /// after the last: what is missing then is what follows the steps.
    pub fn cut(&self, step: usize) {
        self.cancel();
        self.progress.steps.fetch_min(step, Ordering::AcqRel);
        self.progress.cut.store(true, Ordering::Release);
    }

    /// Steps that begin from now on only give their frames back.
    pub fn cancel(&self) {
        self.progress.cancelled.store(true, Ordering::SeqCst);
    }

    /// Whether its stream is known to do nothing more, because the context died.
    pub fn is_abandoned(&self) -> bool {
        self.context.as_ref().is_some_and(|context| context.ended().is_some())
    }

    /// Whether nothing may touch the application's memory for it any more: it was cancelled, or the
    /// application knows that its context died, and may have freed the memory.
    pub fn is_given_up(&self) -> bool {
        self.progress.cancelled.load(Ordering::SeqCst) || self.is_abandoned()
    }

    /// Begins a step. What follows sees that the job was cancelled, or the thread that cancelled it
    /// sees the step.
    pub fn open_step(&self) {
        self.progress.open.fetch_add(1, Ordering::SeqCst);
    }

    /// All pieces of a step are back.
    pub fn close_step(&self) {
        self.progress.open.fetch_sub(1, Ordering::SeqCst);
    }

    /// Whether steps are open.
    pub fn is_open(&self) -> bool {
        self.progress.open.load(Ordering::SeqCst) > 0
    }

    /// Waits until nothing touches the application's memory for it any more, once it was
    /// cancelled. That takes as long as the device does, and no call of CUDA.
    pub fn wait_until_closed(&self) {
        while self.is_open() {
            std::thread::sleep(NAP);
        }
    }
}
