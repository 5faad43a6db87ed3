//! Requests in the order of an application's streams: how they begin, and what whoever serves them knows of each.
//!
//! It guards that all of a request is in its stream when the call returns, and that the stream goes on whatever becomes of it.

use super::health::Health;
use super::inbox::Inbox;
use super::memory::pieces::Blocks;
use super::outcome::action;
use super::plan::{Plan, Planned, Terms};
use super::request::{Answer, Parts};
use super::server::{ENTRIES, Mail, Server};
use super::window::{NAP, Owner, Window, Windows};
use crate::error::{Error, Result};
use crate::file::{File, Require};
use crate::mount::Mount;
use crate::ring::{Attached, Ring, RingName};
use gpunvme_abi::Direction;
use gpunvme_cuda::{Gpu, Scatter, Stream};
use rustix::io::Errno;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;

/// A request in a stream.
pub(super) struct Job {
    pub direction: Direction,
    pub file: Attached,
    pub parts: Parts,
    pub require: Require,
    pub plan: Plan,
    pub window: Arc<Window>,
    /// The stream, as the application names it.
    pub stream: usize,
    /// Its context, if that is looked after.
    pub context: Option<Arc<Health>>,
    /// The window's number for the first step.
    first: u32,
    /// What the device wrote to GPU memory itself is there for the stream only after a flush.
    pub flushes: bool,
    /// Of its steps, those that the stream gets.
    steps: AtomicUsize,
    /// The stream does not get all that belongs to those either.
    cut: AtomicBool,
    /// Nothing of it is to be transferred any more.
    cancelled: AtomicBool,
    /// Steps that were begun, and of which some pieces are not back: as long as there are any, the application's memory may be in use.
    open: AtomicUsize,
}

impl Job {
    /// The window's number for a step.
    pub fn number(&self, step: usize) -> u32 {
        self.first.wrapping_add(step as u32)
    }

    /// The pieces of a step.
    pub fn pieces(&self, step: usize) -> impl Iterator<Item = &Planned> {
        self.plan.pieces[self.plan.steps[step].pieces.clone()].iter()
    }

    /// How many steps there are.
    pub fn steps(&self) -> usize {
        self.steps.load(Ordering::Acquire)
    }

    /// Whether the stream does not get all of it, and so never passes it.
    pub fn is_cut(&self) -> bool {
        self.cut.load(Ordering::Acquire)
    }

    /// Only the steps before this one are in the stream, and no others will be. It may be one after the last: what is missing then is what follows the steps.
    pub fn cut(&self, step: usize) {
        self.cancel();
        self.steps.fetch_min(step, Ordering::AcqRel);
        self.cut.store(true, Ordering::Release);
    }

    /// Steps that begin from now on only give their rooms back.
    pub fn cancel(&self) {
        self.cancelled.store(true, Ordering::SeqCst);
    }

    pub fn is_cancelled(&self) -> bool {
        self.cancelled.load(Ordering::SeqCst)
    }

    /// A step begins. What follows sees that it was cancelled, or whoever cancelled it sees the step.
    pub fn open_step(&self) {
        self.open.fetch_add(1, Ordering::SeqCst);
    }

    /// All pieces of a step are back.
    pub fn close_step(&self) {
        self.open.fetch_sub(1, Ordering::SeqCst);
    }

    /// Whether steps are open.
    pub fn is_open(&self) -> bool {
        self.open.load(Ordering::SeqCst) > 0
    }

    /// Waits until nothing touches the application's memory for it any more, once it was cancelled. That takes as long as the device does, and no call of CUDA.
    pub fn wait_until_closed(&self) {
        while self.is_open() {
            std::thread::sleep(NAP);
        }
    }
}

/// What is asked for: looked up, and not in the stream yet.
pub(super) struct Ask<'a> {
    pub direction: Direction,
    pub file: &'a File,
    pub parts: Parts,
    pub require: Require,
    pub bytes: u64,
    /// The stream, as the application names it.
    pub name: usize,
    pub stream: Stream,
    /// The GPU that it is of.
    pub of: Gpu,
    /// The kernel of the first part's GPU, if anything is staged for it.
    pub scatter: Option<Arc<Scatter>>,
}

/// The thread that serves them, its ring, and the windows of their streams.
pub(super) struct Ordered {
    inbox: Arc<Inbox<Mail>>,
    windows: Arc<Windows>,
    ring: RingName,
    blocks: Blocks,
    alignment: usize,
    thread: JoinHandle<()>,
}

impl Ordered {
    /// Starts the thread. Slots are aligned to `alignment`.
    pub fn start(mount: &Mount, blocks: Blocks, alignment: usize) -> Result<Ordered> {
        let ring = Ring::new(mount, ENTRIES)?;
        let name = ring.name().clone();
        let path = &mount.connection().path;
        let failed = |errno| Error::Path { path: path.clone(), action: "start a thread for transfers in streams", errno };
        let inbox = Arc::new(Inbox::new().map_err(failed)?);
        let windows = Arc::new(Windows::new(mount));
        let server = Server::new(ring, inbox.clone(), windows.clone());
        let thread = std::thread::Builder::new().name("gpunvme-stream".into());
        let thread =
            thread.spawn(move || server.run()).map_err(|error| failed(Errno::from_io_error(&error).unwrap_or(Errno::AGAIN)))?;
        Ok(Ordered { inbox, windows, ring: name, blocks, alignment, thread })
    }

    /// Puts a request into its stream.
    pub fn begin(&self, ask: Ask<'_>) -> Result<Arc<Answer>> {
        let Ask { direction, file, parts, require, bytes, name, stream, of, scatter } = ask;
        let failed = |error| Error::in_stream(file.path(), action(direction), name, error);
        let answer = Arc::new(Answer::default());
        let Some(gpu) = parts.first().map(|part| part.allocation.gpu) else {
            answer.set(Ok(crate::file::Transfer::default()));
            return Ok(answer);
        };
        let primary = stream.is_of(&of).map_err(failed)?;
        let scatter = scatter.filter(|_| primary && of == gpu);
        let context = primary.then(|| self.windows.context(of)).transpose().map_err(failed)?;
        let terms = Terms {
            direction,
            blocks: self.blocks,
            alignment: self.alignment,
            bytes,
            file_size: file.size()?,
            kernels_of: scatter.as_ref().map(|_| gpu),
        };
        let plan = Plan::new(&terms, &parts);
        let flushes =
            direction == Direction::Read && parts.iter().any(|part| part.registered.as_ref().is_ok_and(|l| l.flushes()));
        let attached = file.in_ring(&self.ring)?;
        let owner = Owner { stream: stream.id().map_err(failed)?, context: context.clone() };
        let begin = |window, first| {
            let job = Arc::new(Job {
                direction,
                file: attached,
                parts,
                require,
                steps: plan.steps.len().into(),
                plan,
                window,
                stream: name,
                context,
                first,
                flushes,
                cut: AtomicBool::new(false),
                cancelled: AtomicBool::new(false),
                open: AtomicUsize::new(0),
            });
            self.inbox.send(|mail| mail.jobs.push((job.clone(), answer.clone())));
            job
        };
        let put = self.windows.put(gpu, owner, &stream, scatter.as_ref(), begin, failed);
        if put.is_err() {
            self.inbox.send(|_| {}); // so that it looks
        }
        put.map(|()| answer)
    }

    /// Ends the thread when it is done with all requests, and waits for that if `wait` says so.
    pub fn end(self, wait: bool) {
        // The thread's are the last then.
        drop(self.windows);
        self.inbox.send(|mail| mail.end = true);
        if wait && self.thread.thread().id() != std::thread::current().id() {
            let _ = self.thread.join(); // a panic there was reported there
        }
    }
}
