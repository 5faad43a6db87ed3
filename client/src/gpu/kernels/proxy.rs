//! The thread that does for kernels what a GPU cannot: it signals a daemon that sleeps while there
//! are submissions, and it says that the ring is over when the daemon closed it, or is gone.
//!
//! It naps for a sixteenth of the time since the last submission came, from 20 us to 10 ms: the
//! first after a silence waits little longer for a daemon that sleeps, and a ring that no kernel
//! uses costs little.

use crate::error::{Error, Result};
use crate::ring::Ring;
use gpunvme_abi::ring::{ASLEEP, CLOSED, Word};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use smallvec::SmallVec;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

const SHORTEST: Duration = Duration::from_micros(20);
const LONGEST: Duration = Duration::from_millis(10);
/// How often it looks whether the daemon lives, where no descriptor tells.
const LOOK: Duration = Duration::from_secs(1);

/// The thread. Dropping it ends the ring for kernels.
#[derive(Debug)]
pub struct Proxy {
    stop: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

impl Proxy {
    /// Begins it.
    ///
    /// # Errors
    /// [`Error::Path`] where there is no thread or no descriptor for it.
    pub fn new(ring: Arc<Ring>) -> Result<Proxy> {
        let path = ring.path().to_owned();
        let failed = |errno| Error::Path { path: path.clone(), action: "start a thread for kernels", errno };
        let stop = Arc::new(rustix::event::eventfd(0, EventfdFlags::CLOEXEC).map_err(failed)?);
        let (thread, stopped) = (std::thread::Builder::new().name("gpunvme-proxy".into()), stop.clone());
        let thread = thread.spawn(move || {
            watch(&ring, &stopped);
            ring.memory().store(Word::Over, Errno::NODEV.raw_os_error() as u32);
        });
        let thread = thread.map_err(|error| failed(Errno::from_io_error(&error).unwrap_or(Errno::AGAIN)))?;
        Ok(Proxy { stop, thread: Some(thread) })
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        let _ = rustix::io::write(&self.stop, &1u64.to_ne_bytes()); // the first, so there is room
        if let Some(thread) = self.thread.take() {
            let _ = thread.join(); // a panic there was reported there
        }
    }
}

/// Until the ring is over, or given up.
fn watch(ring: &Ring, stop: &OwnedFd) {
    let memory = ring.memory();
    let (mut seen, mut last, mut looked) = (0, Instant::now(), Instant::now());
    loop {
        let (tail, now) = (memory.load(Word::SubmissionTail), Instant::now());
        if tail != seen {
            (seen, last) = (tail, now);
        }
        match memory.load(Word::Daemon) {
            CLOSED => return,
            ASLEEP if tail != memory.load(Word::SubmissionHead) => ring.wake_daemon(),
            _ => {}
        }
        let nap = (now.duration_since(last) / 16).clamp(SHORTEST, LONGEST);
        let timeout = Timespec { tv_sec: 0, tv_nsec: nap.subsec_nanos().into() };
        let mut watched: SmallVec<[PollFd<'_>; 2]> = SmallVec::new();
        watched.push(PollFd::new(stop, PollFlags::IN));
        watched.extend(ring.daemon().map(|daemon| PollFd::from_borrowed_fd(daemon, PollFlags::IN)));
        if !matches!(rustix::event::poll(&mut watched, Some(&timeout)), Ok(0) | Err(Errno::INTR)) {
            return;
        }
        if now.duration_since(looked) >= LOOK {
            if ring.is_over() {
                return;
            }
            looked = now;
        }
    }
}
