//! Puts a request into an application's stream, all of it before the call returns.
//!
//! It guards that the stream goes on whatever becomes of the request.

use super::job::{Asks, Job, Progress};
use super::late::Late;
use super::observer::Watch;
use super::plan::{Cut, DEPTH, Plan, Planned, Terms};
use super::service::{ENTRIES, Mail, Service};
use super::window::{Owner, StreamWindow, Windows};
use crate::error::{Error, Result};
use crate::file::File;
use crate::gpu::answer::Answer;
use crate::gpu::attachments::in_ring;
use crate::gpu::memory::pieces::Blocks;
use crate::gpu::memory::staging::ends;
use crate::gpu::outcome::action;
use crate::gpu::page_cache::PageCache;
use crate::gpu::page_cache::cached_file::CachedFile;
use crate::gpu::pipeline::mailbox::Mailbox;
use crate::gpu::request::{Parts, Segment};
use crate::mount::Mount;
use crate::ring::{Ring, RingName};
use crate::transfer::{Require, Transfer};
use gpunvme_abi::{Direction, Reason};
use gpunvme_cuda::{CudaError, Gpu, Scatter, Stream};
use rustix::io::Errno;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::thread::JoinHandle;

/// What is asked for: looked up, and not in the stream yet.
pub struct Submission<'a> {
    pub direction: Direction,
    pub file: &'a File,
    pub resident: std::result::Result<(Arc<CachedFile>, Arc<OwnedFd>), Reason>,
    pub parts: Parts,
    pub require: Require,
    /// Of all parts.
    pub bytes: u64,
    /// The stream, as the application names it.
    pub name: usize,
    pub stream: Stream,
    /// The GPU that it is of.
    pub of: Gpu,
    /// The kernel of the first part's GPU, if anything is staged for it.
    pub scatter: Option<Arc<Scatter>>,
    pub watch: Watch,
    /// The most that it may be, where that is known only when the stream comes to it.
    pub most: Option<Segment>,
}

/// The thread that serves requests in streams, its ring, and the windows of the streams.
pub struct Streams {
    mailbox: Arc<Mailbox<Mail>>,
    windows: Arc<Windows>,
    ring: RingName,
    blocks: Blocks,
    alignment: usize,
    thread: JoinHandle<()>,
}

impl Streams {
    /// Starts the thread. Slots are aligned to `alignment`.
    pub fn start(mount: &Mount, blocks: Blocks, alignment: usize, page_cache: Arc<PageCache>) -> Result<Streams> {
        let ring = Ring::new(mount, ENTRIES)?;
        let name = ring.name().clone();
        let path = &mount.connection().path;
        let failed = |errno| Error::Path { path: path.clone(), action: "start a thread for transfers in streams", errno };
        let mailbox = Arc::new(Mailbox::new().map_err(failed)?);
        let windows = Arc::new(Windows::new(mount));
        let service = Service::new(ring, mailbox.clone(), windows.clone(), page_cache);
        let thread = std::thread::Builder::new().name("gpunvme-stream".into());
        let thread =
            thread.spawn(move || service.run()).map_err(|error| failed(Errno::from_io_error(&error).unwrap_or(Errno::AGAIN)))?;
        Ok(Streams { mailbox, windows, ring: name, blocks, alignment, thread })
    }

    /// Puts a request into its stream.
    pub fn submit(&self, submission: Submission<'_>) -> Result<Arc<Answer>> {
        let Submission { direction, file, resident, parts, require, bytes, name, stream, of, scatter, watch, most } = submission;
        let failed = |error| Error::in_stream(file.path(), action(direction), name, error);
        let answer = Arc::new(Answer::default());
        let Some(gpu) = parts.first().map(|part| part.allocation.gpu) else {
            let nothing = Ok(Transfer::default());
            watch.ends(&nothing);
            answer.set(nothing);
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
        let flushes =
            direction == Direction::Read && parts.iter().any(|part| part.registered.as_ref().is_ok_and(|l| l.flushes()));
        let attached = in_ring(file, &self.ring)?;
        let owner = Owner { stream: stream.id().map_err(failed)?, context: context.clone() };
        let (cut, asks) = match most.map(|most| Late::new(&terms, most, &parts).ok_or(most)) {
            None => (Cut { plan: Plan::new(&terms, &parts), parts }, Asks::Shift),
            Some(Err(most)) => (Cut { plan: Plan::new(&terms, &parts), parts }, Asks::Segment(most)),
            Some(Ok(late)) => (late.empty(), Asks::Late(late)),
        };
        let begin = |window, first| {
            let progress = Progress::new(cut.plan.steps.len());
            let job = Arc::new(Job {
                direction,
                file: attached,
                resident,
                require,
                cut: Arc::new(cut),
                asks,
                window,
                stream: name,
                context,
                first,
                flushes,
                block: self.blocks.read.max(self.blocks.write),
                watch: watch.clone(),
                progress,
            });
            self.mailbox.send(|mail| mail.jobs.push((job.clone(), answer.clone())));
            job
        };
        let put = put(&self.windows, gpu, owner, &stream, scatter.as_ref(), begin, failed);
        if put.is_err() {
            watch.forget();
            self.mailbox.send(|_| {}); // so that it looks
        }
        put.map(|()| answer)
    }

    /// Has the thread end when it is done with all requests.
    pub fn end(self) -> JoinHandle<()> {
        // The thread's are the last then.
        drop(self.windows);
        self.mailbox.send(|mail| mail.end = true);
        self.thread
    }
}

/// Puts a job into a stream, in a window near `gpu`. `begin` makes it, with the window and the
/// number of its first step, and hands it to the thread that serves it. Waits while all windows
/// are of other streams.
///
/// Where CUDA refuses something, the job is cancelled, and the stream goes on; nothing but the
/// stream touches the application's memory for it afterwards.
fn put(
    windows: &Windows,
    gpu: Gpu,
    owner: Owner,
    stream: &Stream,
    scatter: Option<&Arc<Scatter>>,
    begin: impl FnOnce(Arc<StreamWindow>, u32) -> Arc<Job>,
    failed: impl Fn(CudaError) -> Error,
) -> Result<()> {
    loop {
        let window = windows.of(gpu, &owner)?;
        let mut next = window.next.lock();
        if !window.is_of(owner.stream) {
            continue; // it became another's before it was used
        }
        if let Some(scatter) = scatter {
            window.keep_kernel(scatter);
        }
        let job = begin(window.clone(), *next);
        *next = job.number(job.cut.plan.steps.len());
        let putting = Putting { window: &window, stream, scatter: scatter.map(Arc::as_ref), job: &job };
        return putting.all().map_err(|Refused { error, lost }| {
            if lost {
                windows.lose(&window, next);
                // The stream does not wait for steps that have begun.
                job.wait_until_closed();
            }
            failed(error)
        });
    }
}

/// What CUDA refused, and whether the window is lost.
struct Refused {
    error: CudaError,
    lost: bool,
}

/// A job on its way into its stream.
struct Putting<'a> {
    window: &'a StreamWindow,
    stream: &'a Stream,
    scatter: Option<&'a Scatter>,
    job: &'a Job,
}

impl Putting<'_> {
    /// Puts all steps in. The thread that serves them knows them already: where CUDA has no room
    /// for more in the stream, this waits.
    ///
    /// Of a copy that CUDA refuses nothing is left but the words around it, and what follows goes
    /// the same way. Where it takes no words either, the window is lost.
    fn all(&self) -> std::result::Result<(), Refused> {
        let mut refused = Ok(());
        for at in 0..self.job.cut.plan.steps.len() + DEPTH {
            self.step(at, &mut refused).map_err(|error| {
                self.job.cut(at);
                Refused { error, lost: true }
            })?;
        }
        refused.map_err(|error| Refused { error, lost: false })
    }

    /// Puts in what the frame of step `at` has to do before it, and the step.
    fn step(&self, at: usize, refused: &mut std::result::Result<(), CudaError>) -> std::result::Result<(), CudaError> {
        let Putting { window, stream, job, .. } = *self;
        // The copies of a step in one direction, and the kernel's moves.
        let mut copy = |step: usize, direction: Direction, which: fn(&Planned) -> bool| {
            let number = job.number(step);
            let mut copied = job.cut.pieces(step).filter(|planned| which(planned));
            if refused.is_ok() {
                *refused = copied.try_for_each(|planned| self.copy(number, planned, direction));
            }
            if refused.is_ok() && direction == job.direction {
                *refused = self.moves(number, job.cut.plan.steps[step].moves);
            }
            if refused.is_err() {
                job.cancel();
            }
        };
        let before = at.checked_sub(DEPTH);
        let mut given = before.map(|before| job.number(before).wrapping_add(1));
        if let Some(before) = before {
            let number = job.number(before);
            let returned = window.returned_address(number);
            // SAFETY: the words are registered with CUDA, and stay so until the stream has passed
            // them all: see `Windows::drop`. The thread that writes this one waits for no stream
            // to do so, and makes no call that would.
            unsafe {
                if job.flushes { stream.wait_value_and_flush(returned, number) } else { stream.wait_value(returned, number) }
            }?;
            if job.direction == Direction::Read {
                copy(before, Direction::Read, Planned::is_copied);
            }
        }
        if at < job.cut.plan.steps.len() {
            match job.direction {
                Direction::Read => copy(at, Direction::Write, |planned| planned.keeps),
                Direction::Write => copy(at, Direction::Write, Planned::is_copied),
            }
            given = Some(job.number(at));
        }
        if let Some(given) = given {
            // SAFETY: as above.
            unsafe { stream.write_value(window.given_address(job.number(at)), given) }?;
        }
        Ok(())
    }

    /// Copies a piece between its slot and the application's memory.
    fn copy(&self, number: u32, planned: &Planned, direction: Direction) -> std::result::Result<(), CudaError> {
        let slot = self.window.slot_address(number, planned);
        let ((to, from), len) = (ends(direction, planned.address, slot), planned.piece.wanted as usize);
        // SAFETY: one side is the application's memory, which it vouched for until the stream has
        // passed the request; the other is a slot that is this piece's until then.
        unsafe {
            match direction {
                Direction::Read => self.stream.copy_in(to, from, len),
                Direction::Write => self.stream.copy_out(to, from, len),
            }
        }
    }

    /// Has the kernel make the moves of a step.
    fn moves(&self, number: u32, moves: usize) -> std::result::Result<(), CudaError> {
        let Some(scatter) = self.scatter.filter(|_| moves > 0) else { return Ok(()) };
        // SAFETY: as for copies. When the stream comes to it, the thread that serves the request
        // has filled the table with moves of this step, of memory that this GPU's kernels reach.
        unsafe { self.stream.scatter(scatter, self.window.table_address(number), moves as u32) }
    }
}
