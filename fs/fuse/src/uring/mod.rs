//! Requests through io_uring (`fs/fuse/dev_uring.c`, Linux 6.14).
//!
//! The kernel has a queue for each possible processor, and puts a request into that of the
//! processor on which it is made. A thread serves each queue, with a ring of its own and a few
//! *entries*: memory for one request and its reply. Committing a reply fetches the entry's next
//! request.
//!
//! An entry's memory belongs to the kernel from a submission to its completion; then to the
//! thread, until [`Handler::request`] has returned and the request is answered. Only the thread
//! submits: the kernel copies a request on the thread that submitted last for its entry, and
//! fails it where that has ended. So an answer from another thread is left with the entry, and
//! the thread is woken by an eventfd.
//!
//! - `size` bounds the memory of all entries.
//! - `entry` is one entry, and the list of those that are answered.
//! - `server` is the thread.

mod entry;
mod server;
mod size;

use std::io;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::mpsc;
use std::thread::{self, JoinHandle};

use io_uring::opcode;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use self::entry::{Answered, Entry};
use self::server::{Ring, Server, Shared};
pub(crate) use self::size::Size;
use crate::destroy::Destroyed;
use crate::device::Device;
use crate::handler::Handler;
use crate::request::Decoder;

/// What a thread does with its ring.
type Job = Box<dyn FnOnce(Ring, Arc<Answered>) -> io::Result<()> + Send>;

/// Threads with a ring each, one for each queue of a connection. They are made before it is
/// negotiated: where io_uring was agreed on and no queue registers, the kernel holds requests back
/// for ever. Dropped, they end.
pub(crate) struct Queues {
    size: Size,
    threads: Vec<Waiting>,
}

/// A thread that has its ring, and waits for what to do with it.
struct Waiting {
    job: mpsc::Sender<Job>,
    answered: Arc<Answered>,
    thread: JoinHandle<io::Result<()>>,
}

impl std::fmt::Debug for Queues {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Queues").field("size", &self.size).field("queues", &self.threads.len()).finish()
    }
}

impl Queues {
    /// For requests of at most `largest` bytes.
    ///
    /// # Errors
    /// The system refuses io_uring (`io_uring_disabled`, seccomp, its age), has not got this much
    /// of it, or may have so many processors that the entries would take too much memory.
    pub fn new(largest: usize) -> io::Result<Queues> {
        let queues = possible_processors()?;
        let too_many = || format!("{queues} possible processors are too many for {} bytes of memory", size::MOST_MEMORY);
        let size = Size::of(queues, largest).ok_or_else(|| io::Error::other(too_many()))?;
        let threads = (0..queues).map(|qid| Waiting::new(qid, size.depth)).collect::<io::Result<_>>()?;
        Ok(Queues { size, threads })
    }

    /// The same with entries of another size, for tests of what the kernel refuses.
    #[cfg(test)]
    pub fn with_payload(mut self, payload: usize) -> Queues {
        self.size.payload = payload;
        self
    }

    /// What is to be agreed on: no larger requests, and not more of them in the background.
    pub fn size(&self) -> Size {
        self.size
    }

    /// Begins to serve. Returns the threads, and whether all queues are registered: else the
    /// kernel sends all requests by `/dev/fuse`.
    ///
    /// # Errors
    /// There is no memory.
    pub fn serve(
        self,
        device: &Device,
        decoder: Decoder,
        handler: &Arc<impl Handler>,
        destroy: &Destroyed,
    ) -> io::Result<(Vec<JoinHandle<io::Result<()>>>, bool)> {
        let Queues { size: Size { depth, payload }, threads } = self;
        let lists: Vec<_> = threads.iter().map(|waiting| waiting.answered.clone()).collect();
        let entry = |number| {
            let qid = (number / depth) as u16;
            Entry::new(number, qid, &lists[number / depth], payload, device.shared_meter())
        };
        let entries = (0..lists.len() * depth).map(entry).collect::<io::Result<Vec<_>>>()?;
        let live = AtomicUsize::new(entries.len());
        let shared = Arc::new(Shared { device: device.descriptor().clone(), decoder, entries, live, lists });
        let (report, registered) = mpsc::channel();
        let begin = |(qid, waiting): (usize, Waiting)| {
            let (shared, handler, report) = (shared.clone(), handler.clone(), report.clone());
            let destroy = destroy.clone();
            let job = move |ring, answered| {
                let entries = shared.clone();
                let mut server = Server::new(ring, answered, shared, destroy);
                let result = server.register(&entries.entries[qid * depth..][..depth], qid * depth);
                let _ = report.send(result.is_ok());
                // The receiver waits until all queues have reported.
                drop(report);
                if let Err(error) = result {
                    tracing::debug!(qid, %error, "a queue was not registered");
                }
                server.serve(&*handler).inspect_err(|error| tracing::error!(qid, %error, "a ring cannot be used"))
            };
            // It waits for this.
            let _ = waiting.job.send(Box::new(job));
            waiting.thread
        };
        let count = threads.len();
        let threads = threads.into_iter().enumerate().map(begin).collect();
        drop(report);
        let all = registered.iter().filter(|registered| *registered).count() == count;
        Ok((threads, all))
    }
}

impl Waiting {
    /// A thread on the processor of that number, whose ring was tried.
    fn new(qid: usize, depth: usize) -> io::Result<Waiting> {
        let (job, jobs) = mpsc::channel::<Job>();
        let (report, made) = mpsc::channel();
        let answered = Arc::new(Answered::new()?);
        let its_own = answered.clone();
        let wait = move || {
            pin(qid);
            // A registration for each entry, and the wait for the eventfd.
            match ring(depth + 1) {
                Ok(ring) => {
                    let _ = report.send(Ok(()));
                    jobs.recv().map_or(Ok(()), |job| job(ring, its_own))
                }
                Err(error) => {
                    let _ = report.send(Err(error));
                    Ok(())
                }
            }
        };
        let thread = thread::Builder::new().name(format!("fuse-queue-{qid}")).spawn(wait)?;
        made.recv().unwrap_or_else(|_| Err(io::Error::other("a thread panicked")))?;
        Ok(Waiting { job, answered, thread })
    }
}

/// A ring of this thread, through which something went already.
#[allow(unsafe_code)]
fn ring(entries: usize) -> io::Result<Ring> {
    let mut ring = Ring::builder().setup_single_issuer().setup_defer_taskrun().build(entries as u32)?;
    // SAFETY: it names no memory.
    unsafe { ring.submission().push(&opcode::Nop::new().build().into()) }.map_err(io::Error::other)?;
    ring.submit_and_wait(1)?;
    ring.completion().for_each(drop);
    Ok(ring)
}

/// Number of processors that there may ever be: the kernel has a queue for each.
fn possible_processors() -> io::Result<usize> {
    let text = std::fs::read_to_string("/sys/devices/system/cpu/possible")?;
    let last = text.trim().rsplit([',', '-']).next().and_then(|last| last.parse::<usize>().ok());
    last.map(|last| last + 1).ok_or_else(|| io::Error::other(format!("possible processors: {text}")))
}

/// Keeps this thread on a processor, where it may be there: a client that waits for its answer
/// leaves that to the thread.
fn pin(processor: usize) {
    let may_be_there = sched_getaffinity(None).is_ok_and(|set| processor < CpuSet::MAX_CPU && set.is_set(processor));
    if may_be_there {
        let mut set = CpuSet::new();
        set.set(processor);
        if let Err(error) = sched_setaffinity(None, &set) {
            tracing::debug!(processor, %error, "a thread is not bound to its processor");
        }
    }
}
