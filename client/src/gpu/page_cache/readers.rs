//! Threads that read what the page cache has, by read(2), into slots of staging pools, or where it
//! belongs in host memory: what is read for the first time, so that nothing of it is registered
//! with CUDA, comes faster so than from a device, and a copy by one processor would be slower than
//! the link to a GPU.
//!
//! It guards that nothing else is read so: the kernel is asked first whether it has all of a piece.
//! If that leaves the page cache meanwhile, read(2) still reads the file's bytes.

use super::view::PAGE;
use crate::buffer::Shared;
use crate::gpu::memory::staging::Staging;
use crate::spin::Spin;
use parking_lot::{Condvar, Mutex};
use rustix::io::Errno;
use std::collections::VecDeque;
use std::io;
use std::mem;
use std::num::NonZero;
use std::ops::Range;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::{self, JoinHandle};
use std::time::Duration;

/// More processors than this would take more from others than they give: beside an H200 8 threads
/// read 20 GB/s, and 12 or 16 no more.
const MOST: usize = 8;
/// Bytes of a part that one thread reads, where threads have nothing to do: one thread reads about
/// 6 GB/s, and all of them share the shortest pieces of long requests, 512 KiB.
const PART: usize = 64 << 10;
/// How long a thread without work looks for more before it sleeps: a caller that reads one piece
/// after the other asks for the next as soon as a GPU has this one. Waking eight threads takes as
/// long as they read.
const SPIN_LIMIT: Duration = Duration::from_micros(60);

/// What is to be read.
pub struct PageRead {
    pub file: Arc<OwnedFd>,
    /// Where in the file, and how many bytes.
    pub offset: u64,
    pub len: usize,
    pub to: To,
    /// What the answer is for.
    pub piece: usize,
    pub answers: Arc<PageAnswers>,
}

/// Where bytes go.
pub enum To {
    /// To a slot: a pool, and how far from its beginning.
    Slot(Arc<Shared<Staging>>, usize),
    /// To host memory of the application, at an address.
    Host(u64),
}

/// How many bytes there are up to the end of the file or of what was asked for, or why they could
/// not be read.
pub type PageAnswer = (usize, Result<u64, Errno>);

/// What the threads have read for one executor.
#[derive(Default)]
pub struct PageAnswers {
    answers: Mutex<Vec<PageAnswer>>,
    any: AtomicBool,
}

impl PageAnswers {
    /// Takes the answers that there are, to `into`, which is empty.
    pub fn take(&self, into: &mut Vec<PageAnswer>) {
        if self.any.load(Ordering::Acquire) {
            let mut answers = self.answers.lock();
            mem::swap(&mut *answers, into);
            self.any.store(false, Ordering::Release);
        }
    }

    fn put(&self, answer: PageAnswer) {
        let mut answers = self.answers.lock();
        answers.push(answer);
        self.any.store(true, Ordering::Release);
    }
}

/// The threads. They come into being with the first read.
#[derive(Default)]
pub struct PageReaders {
    work: Arc<Work>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

#[derive(Default)]
struct Work {
    queue: Mutex<Queue>,
    /// How many parts wait, for threads that look without the lock.
    waiting: AtomicUsize,
    more: Condvar,
}

#[derive(Default)]
struct Queue {
    waiting: VecDeque<Part>,
    is_over: bool,
}

/// A part of a piece, for one thread.
struct Part {
    whole: Arc<Whole>,
    /// Of the piece's bytes.
    range: Range<usize>,
}

/// A piece that several threads read. The last of them answers it.
struct Whole {
    read: PageRead,
    /// Up to where the file's bytes are known to go.
    end: AtomicUsize,
    failed: OnceLock<Errno>,
}

impl PageReaders {
    /// Has a piece read, which is answered, whatever comes. False where no thread can be had:
    /// nothing is read then.
    pub fn read(&self, read: PageRead) -> bool {
        debug_assert!(read.len > 0, "it would not be answered");
        let threads = self.threads();
        if threads == 0 {
            return false;
        }
        let mut queue = self.work.queue.lock();
        let idle = threads.saturating_sub(queue.waiting.len()).max(1);
        let len = read.len.div_ceil(idle).max(PART).next_multiple_of(PAGE);
        let whole = Arc::new(Whole { end: read.len.into(), read, failed: OnceLock::new() });
        let starts = (0..whole.read.len).step_by(len);
        let parts = starts.len();
        queue.waiting.extend(starts.map(|start| Part { whole: whole.clone(), range: start..(start + len).min(whole.read.len) }));
        self.work.waiting.store(queue.waiting.len(), Ordering::Release);
        // Of those who have it, only threads that read a part may be the last.
        drop(whole);
        drop(queue);
        for _ in 0..parts {
            self.work.more.notify_one();
        }
        true
    }

    /// How many threads there are, once they were begun.
    fn threads(&self) -> usize {
        let mut threads = self.threads.lock();
        if threads.is_empty() {
            let processors = thread::available_parallelism().map_or(1, NonZero::get);
            let start = |_| {
                let work = self.work.clone();
                let started = thread::Builder::new().name("gpunvme-read".into()).spawn(move || work.run());
                started.inspect_err(|error| tracing::debug!(%error, "no thread for the page cache")).ok()
            };
            threads.extend((0..(processors / 2).clamp(1, MOST)).filter_map(start));
        }
        threads.len()
    }
}

impl Drop for PageReaders {
    fn drop(&mut self) {
        self.work.queue.lock().is_over = true;
        self.work.more.notify_all();
        for thread in self.threads.get_mut().drain(..) {
            let _ = thread.join(); // a panic there was reported there
        }
    }
}

impl Work {
    fn run(&self) {
        while let Some(part) = self.next() {
            part.read();
            self.look_for_more();
        }
    }

    /// The next part, for which this sleeps. None at the end.
    fn next(&self) -> Option<Part> {
        let mut queue = self.queue.lock();
        loop {
            match queue.waiting.pop_front() {
                Some(part) => {
                    self.waiting.store(queue.waiting.len(), Ordering::Release);
                    return Some(part);
                }
                None if queue.is_over => return None,
                None => self.more.wait(&mut queue),
            }
        }
    }

    /// Returns when there is a part, or after a while.
    fn look_for_more(&self) {
        let mut spin = Spin::new();
        while self.waiting.load(Ordering::Acquire) == 0 && spin.goes_on(SPIN_LIMIT) {}
    }
}

impl Part {
    fn read(self) {
        let Part { whole, range } = self;
        match whole.read.perform(range.clone()) {
            Ok(done) if done < range.len() => drop(whole.end.fetch_min(range.start + done, Ordering::Relaxed)),
            Ok(_) => {}
            Err(errno) => drop(whole.failed.set(errno)), // any of the errors will do
        }
        if let Some(Whole { read, end, failed }) = Arc::into_inner(whole) {
            read.answer(failed.into_inner().map_or(Ok(end.into_inner()), Err));
        }
    }
}

impl PageRead {
    /// Reads it on this thread, and answers it.
    pub fn read_here(self) {
        let result = self.perform(0..self.len);
        self.answer(result);
    }

    fn answer(self, result: Result<usize, Errno>) {
        let PageRead { to, piece, answers, .. } = self;
        // Before the answer, for which the pool's owner waits: a pool ends by calls of CUDA.
        drop(to);
        answers.put((piece, result.map(|done| done as u64)));
    }

    /// Reads a range of it, and returns how many bytes of it the file has.
    fn perform(&self, range: Range<usize>) -> Result<usize, Errno> {
        let to = match &self.to {
            To::Slot(pool, at) => {
                let pool = &pool.memory().mapping;
                assert!(at.checked_add(self.len).is_some_and(|end| end <= pool.len()), "{} bytes at {at}", self.len);
                pool.as_ptr().wrapping_add(*at)
            }
            To::Host(address) => *address as *mut u8,
        };
        let (start, len) = (range.start, range.len());
        let mut done = 0;
        while done < len {
            let offset = (self.offset + (start + done) as u64) as libc::off_t;
            // SAFETY: the kernel alone writes, and it refuses what is not mapped. A slot is this
            // piece's, and lies in the mapping; no other code uses it until the piece is answered.
            // Host memory is the application's, which vouched for it until then.
            match unsafe { libc::pread(self.file.as_raw_fd(), to.add(start + done).cast(), len - done, offset) } {
                0 => break,
                more @ 1.. => done += more as usize,
                _ => match Errno::from_io_error(&io::Error::last_os_error()) {
                    Some(Errno::INTR) => {}
                    error => return Err(error.unwrap_or(Errno::IO)),
                },
            }
        }
        Ok(done)
    }
}
