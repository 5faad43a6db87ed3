//! Threads for tasks that wait, where the loop of the transport to which a request came may not.
//!
//! There are five pools, so that no task waits for another of its own pool. Threads of a later one
//! may wait for those of an earlier one, never the other way round:
//! 1. *completions*: ends what I/O began. Waits for the journal, never for a file or for room in
//!    the write buffer.
//! 2. *general*: operations that stalled. May wait for anything inside the filesystem.
//! 3. *overtaken*: has the kernel forget pages, before it answers a write. Waits for the kernel,
//!    which may itself wait for the answer to a read.
//! 4. *invalidations*: waits for the kernel, which may itself wait for the answer to a read or a
//!    write. Its threads submit no I/O: io_uring has the thread that submitted complete it, also
//!    what it took along of others, and one that waits for a page in the kernel cannot.
//! 5. *transfers*: works for direct transfers that are long, in turns. Waits for nothing.
//!
//! Users take turns with the threads of a pool, and where a task of one may take long no user has
//! all of them ([`Workers::with_quotas`]).

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};
use rustc_hash::FxHashMap;

use super::turns::{Owner, Turns};
use crate::front::messages;
use gpunvme_engine::data::Spawn;
use gpunvme_gpupath::quota::quota;
use gpunvme_gpupath::surplus::Surplus;

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
    /// Whether a user may have but a quota of the threads.
    has_quotas: bool,
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
    /// Tasks that are being done, where there are quotas, and of whom.
    busy: usize,
    busy_of: FxHashMap<u32, usize>,
    surplus: Surplus,
    ending: bool,
}

impl Workers {
    /// A pool of at most `limit` threads.
    ///
    /// # Errors
    /// If the system has no thread to give.
    pub fn new(name: &'static str, limit: usize) -> io::Result<Arc<Workers>> {
        Workers::begin(name, limit, false)
    }

    /// As [`Workers::new`], where the tasks of one user have half of the threads that those of
    /// others leave, at the most ([`quota`]). Tasks that are no user's count as root's.
    ///
    /// # Errors
    /// As for [`Workers::new`].
    pub fn with_quotas(name: &'static str, limit: usize) -> io::Result<Arc<Workers>> {
        Workers::begin(name, limit, true)
    }

    fn begin(name: &'static str, limit: usize, has_quotas: bool) -> io::Result<Arc<Workers>> {
        let (work, left) = (Condvar::new(), Condvar::new());
        let shared = Shared { name, limit, has_quotas, state: Mutex::default(), work, left };
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

    /// Whether the end is waited for: a task that lasts ends itself then.
    pub fn is_ending(&self) -> bool {
        self.shared.state.lock().ending
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
            if let Some((user, task)) = self.next(&mut state) {
                // What ended last may have left room for the tasks of others, too.
                if self.has_quotas && state.idle > 0 && !state.tasks.is_empty() {
                    self.work.notify_one();
                }
                drop(state);
                // It is unknown what the panicked task was doing to the volume: nothing of it may
                // reach the device.
                if catch_unwind(AssertUnwindSafe(task)).is_err() {
                    std::process::abort();
                }
                state = self.state.lock();
                if self.has_quotas {
                    state.is_done(user);
                }
                continue;
            }
            if state.ending {
                break;
            }
            let (idle, may_lose) = (state.idle, state.threads > 1);
            if state.surplus.ends(idle, IDLE_TIMEOUT, may_lose) {
                break;
            }
            state.idle += 1;
            self.work.wait_for(&mut state, IDLE_TIMEOUT);
            state.idle -= 1;
            let idle = state.idle;
            state.surplus.note(idle);
        }
        state.threads -= 1;
        self.left.notify_all();
    }
}

impl Shared {
    /// Takes the next task that may be done now, and counts it.
    fn next(&self, state: &mut ThreadPool) -> Option<(u32, Task)> {
        if !self.has_quotas {
            return state.tasks.pop_of(|_| true);
        }
        let ThreadPool { tasks, busy, busy_of, .. } = state;
        let next = tasks.pop_of(|user| {
            let of_user = busy_of.get(&user).copied().unwrap_or(0);
            (of_user as u64) < quota(user, self.limit as u64, (*busy - of_user) as u64)
        })?;
        *busy += 1;
        *busy_of.entry(next.0).or_default() += 1;
        Some(next)
    }
}

impl ThreadPool {
    /// A task of this user was done.
    fn is_done(&mut self, user: u32) {
        self.busy -= 1;
        let of_user = self.busy_of.get_mut(&user).expect("counted when it began");
        *of_user -= 1;
        if *of_user == 0 {
            self.busy_of.remove(&user);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::mpsc;
    use std::time::Instant;

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

    /// Tasks of one user that wait, more than there are threads, leave some to another user, to a
    /// third, and to what is no user's.
    #[test]
    fn no_user_has_all_threads_where_there_are_quotas() {
        let workers = Workers::with_quotas("test", 16).unwrap();
        let (sender, begun) = mpsc::channel();
        let (release, held) = mpsc::channel::<()>();
        let held = Arc::new(Mutex::new(held));
        let begin = |user, count| {
            for _ in 0..count {
                let (sender, held) = (sender.clone(), held.clone());
                workers.run_for(Owner { user, process: 1 }, move || {
                    sender.send(user).unwrap();
                    let _ = held.lock().recv(); // the end of the test
                });
            }
        };
        let count = |user, expected| {
            for _ in 0..expected {
                assert_eq!(begun.recv_timeout(Duration::from_secs(10)), Ok(user));
            }
            let more = begun.recv_timeout(Duration::from_millis(50));
            assert!(more.is_err(), "a further task of {more:?} began");
        };
        begin(1000, 100);
        count(1000, 7);
        begin(1001, 100);
        count(1001, 4);
        begin(1002, 100);
        count(1002, 2);
        let of_root = sender.clone();
        workers.run(move || of_root.send(0).unwrap());
        count(0, 1);
        drop(release);
        workers.end();
        assert_eq!(begun.try_iter().count(), 300 - 13);
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
