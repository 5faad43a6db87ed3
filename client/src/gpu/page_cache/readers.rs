//! Threads that read what the page cache has into slots of staging pools, by read(2): what is read
//! for the first time, so that nothing of it is registered with CUDA, comes faster so than from a
//! device, and a copy by one processor would be slower than the link to a GPU.
//!
//! It guards that nothing else is read so: the kernel is asked first whether it has all of a piece.
//! If that leaves the page cache meanwhile, read(2) still reads the file's bytes.

use crate::buffer::Shared;
use crate::gpu::memory::staging::Staging;
use parking_lot::{Condvar, Mutex};
use rustix::io::Errno;
use std::collections::VecDeque;
use std::mem;
use std::num::NonZero;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};

/// More processors than this would take more from others than they give.
const MOST: usize = 8;

/// What is to be read.
pub struct PageRead {
    pub file: Arc<OwnedFd>,
    /// Where in the file, and how many bytes.
    pub offset: u64,
    pub len: usize,
    /// Where they go: a pool, and so far from its beginning.
    pub pool: Arc<Shared<Staging>>,
    pub at: usize,
    /// What the answer is for.
    pub piece: usize,
    pub answers: Arc<PageAnswers>,
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
    more: Condvar,
}

#[derive(Default)]
struct Queue {
    waiting: VecDeque<PageRead>,
    is_over: bool,
}

impl PageReaders {
    /// Has a piece read. It is answered, whatever comes.
    ///
    /// # Errors
    /// Nothing is read where no thread can be had.
    pub fn read(&self, read: PageRead) -> Result<(), PageRead> {
        if !self.has_threads() {
            return Err(read);
        }
        self.work.queue.lock().waiting.push_back(read);
        self.work.more.notify_one();
        Ok(())
    }

    fn has_threads(&self) -> bool {
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
        !threads.is_empty()
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
        loop {
            let mut queue = self.queue.lock();
            let read = loop {
                match queue.waiting.pop_front() {
                    Some(read) => break read,
                    None if queue.is_over => return,
                    None => self.more.wait(&mut queue),
                }
            };
            drop(queue);
            read.answers.put((read.piece, read.perform()));
        }
    }
}

impl PageRead {
    fn perform(&self) -> Result<u64, Errno> {
        let pool = &self.pool.memory().mapping;
        assert!(self.at.checked_add(self.len).is_some_and(|end| end <= pool.len()), "{} bytes at {}", self.len, self.at);
        let mut done = 0;
        while done < self.len {
            // SAFETY: the range lies in the mapping. It is the slot of this piece, which no other
            // code uses until the piece is answered.
            let slot = unsafe { std::slice::from_raw_parts_mut(pool.as_ptr().add(self.at + done), self.len - done) };
            match rustix::io::pread(&self.file, slot, self.offset + done as u64) {
                Ok(0) => break,
                Ok(more) => done += more,
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno),
            }
        }
        Ok(done as u64)
    }
}
