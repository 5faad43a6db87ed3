//! Threads for tasks that wait, which a loop of the transport must not do.
//!
//! There are four pools, so that no task waits for another of its own pool. Threads of a later one
//! may wait for those of an earlier one, never the other way round:
//! 1. *completions*: ends what I/O began. Waits for the journal, never for a file or for room in
//!    the write buffer.
//! 2. *general*: operations that stalled. May wait for anything inside the filesystem.
//! 3. *invalidations*: waits for the kernel, which may itself wait for the answer to a read or a
//!    write. Its threads submit no I/O that is not over when the call returns: io_uring has the
//!    thread that submitted complete it, and one that waits for a page in the kernel cannot.
//! 4. *transfers*: works for direct transfers that are long, in turns. Waits for nothing.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use super::turns::{Owner, Turns};
use crate::front::messages;
use gpunvme_engine::data::Spawn;

/// How long threads that have nothing to do stay.
const IDLE_TIMEOUT: Duration = Duration::from_secs(3);

type Task = Box<dyn FnOnce() + Send>;

/// A pool of threads: one always there, more while there is work for them.
pub struct Workers {
    shared: Arc<Shared>,
}

struct Shared {
    name: &'static str,
    limit: usize,
    state: Mutex<ThreadPool>,
    /// Signalled when there is a task, or the pool ends.
    work: Condvar,
    /// Signalled when a thread ends.
    left: Condvar,
}

#[derive(Default)]
struct ThreadPool {
    tasks: Turns<Task>,
    threads: usize,
    idle: usize,
    /// The lowest number of idle threads since `since`.
    least_idle: usize,
    since: Option<Instant>,
    /// Threads to end: so many had nothing to do for a while, whichever they were.
    surplus: usize,
    ending: bool,
}

impl Workers {
    /// A pool of at most `limit` threads.
    ///
    /// # Errors
    /// If the system has no thread to give.
    pub fn new(name: &'static str, limit: usize) -> io::Result<Arc<Workers>> {
        let shared = Shared { name, limit, state: Mutex::default(), work: Condvar::new(), left: Condvar::new() };
        let workers = Workers { shared: Arc::new(shared) };
        workers.shared.state.lock().threads = 1;
        Shared::start(&workers.shared)?;
        Ok(Arc::new(workers))
    }

    /// Runs a task on a thread of the pool, in the order in which tasks come as long as there are
    /// fewer threads than tasks.
    pub fn run(&self, task: impl FnOnce() + Send + 'static) {
        self.spawn(Box::new(task));
    }

    /// As [`Workers::run`], in turns with the tasks of others.
    pub(crate) fn run_for(&self, owner: Owner, task: impl FnOnce() + Send + 'static) {
        self.push(owner, Box::new(task));
    }

    /// Waits until all tasks are done, and ends the threads. Tasks that come later are dropped.
    pub fn end(&self) {
        let mut state = self.shared.state.lock();
        state.ending = true;
        self.shared.work.notify_all();
        while state.threads > 0 {
            self.shared.left.wait(&mut state);
        }
        state.tasks.clear();
    }
}

impl Spawn for Workers {
    fn spawn(&self, task: Task) {
        self.push(Owner::default(), task);
    }
}

impl Workers {
    fn push(&self, owner: Owner, task: Task) {
        let mut state = self.shared.state.lock();
        state.tasks.push(owner, task);
        let wanted = state.tasks.len() > state.idle && state.threads < self.shared.limit;
        state.threads += usize::from(wanted);
        drop(state);
        self.shared.work.notify_one();
        if wanted && let Err(error) = Shared::start(&self.shared) {
            // The threads there are will come to the task.
            self.shared.state.lock().threads -= 1;
            messages::no_thread(self.shared.name, &error);
        }
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        self.end();
    }
}

impl Shared {
    fn start(shared: &Arc<Shared>) -> io::Result<()> {
        let worker = shared.clone();
        thread::Builder::new().name(shared.name.into()).spawn(move || worker.work()).map(drop)
    }

    fn work(&self) {
        let mut state = self.state.lock();
        loop {
            if let Some(task) = state.tasks.pop() {
                drop(state);
                // It is unknown what the panicked task was doing to the volume: nothing of it may
                // reach the device.
                if catch_unwind(AssertUnwindSafe(task)).is_err() {
                    std::process::abort();
                }
                state = self.state.lock();
                continue;
            }
            if state.ending {
                break;
            }
            if state.is_surplus() {
                break;
            }
            state.idle += 1;
            self.work.wait_for(&mut state, IDLE_TIMEOUT);
            state.idle -= 1;
            state.least_idle = state.least_idle.min(state.idle);
        }
        state.threads -= 1;
        self.left.notify_all();
    }
}

impl ThreadPool {
    /// Whether a thread that has nothing to do ends. Threads take tasks in turns, so that none is
    /// idle for long where there is a task now and then: what counts is how many were not needed.
    fn is_surplus(&mut self) -> bool {
        let since = *self.since.get_or_insert_with(Instant::now);
        if since.elapsed() > IDLE_TIMEOUT {
            (self.surplus, self.least_idle, self.since) = (self.least_idle, self.idle, Some(Instant::now()));
        }
        let ends = self.surplus > 0 && self.threads > 1;
        self.surplus -= usize::from(ends);
        ends
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn tasks_that_wait_for_each_other_run_at_once_up_to_the_limit() {
        let workers = Workers::new("test", 3).unwrap();
        let barrier = Arc::new(std::sync::Barrier::new(3));
        let (sender, receiver) = mpsc::channel();
        for _ in 0..3 {
            let (barrier, sender) = (barrier.clone(), sender.clone());
            workers.run(move || {
                barrier.wait();
                sender.send(()).unwrap();
            });
        }
        for _ in 0..3 {
            receiver.recv_timeout(Duration::from_secs(10)).unwrap();
        }
    }

    /// A task now and then keeps one thread, and not all that there once were.
    #[test]
    fn threads_that_are_not_needed_end() {
        const MANY: usize = 20;
        let workers = Workers::new("test", MANY).unwrap();
        let barrier = Arc::new(std::sync::Barrier::new(MANY));
        for _ in 0..MANY {
            let barrier = barrier.clone();
            workers.run(move || {
                barrier.wait();
            });
        }
        let since = Instant::now();
        while workers.shared.state.lock().threads > 3 {
            assert!(since.elapsed() < 5 * IDLE_TIMEOUT, "{} threads stay", workers.shared.state.lock().threads);
            thread::sleep(Duration::from_millis(20));
            workers.run(|| {});
        }
    }

    #[test]
    fn the_end_waits_for_what_was_begun() {
        let workers = Workers::new("test", 2).unwrap();
        let done = Arc::new(AtomicUsize::new(0));
        for _ in 0..50 {
            let done = done.clone();
            workers.run(move || {
                thread::sleep(Duration::from_millis(1));
                done.fetch_add(1, Ordering::Relaxed);
            });
        }
        workers.end();
        assert_eq!(done.load(Ordering::Relaxed), 50);
    }
}
