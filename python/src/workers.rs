//! Threads that serve their callers: with jobs that nobody waits for, or with work on many things,
//! for a caller that waits for all of it.

use gpunvme::Result;
use parking_lot::{Condvar, Mutex};
use rustix::io::Errno;
use std::iter::Enumerate;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::vec::IntoIter;

type Job = Box<dyn FnOnce() + Send>;

/// Threads that do what they are given, in order, started with the first of it.
pub struct Workers {
    count: usize,
    name: &'static str,
    jobs: Mutex<Option<Sender<Job>>>,
}

impl Workers {
    /// So many threads of that name, none of which is started yet.
    pub fn new(count: usize, name: &'static str) -> Workers {
        Workers { count, name, jobs: Mutex::default() }
    }

    /// Has a thread do something.
    ///
    /// # Errors
    /// `EAGAIN` where there can be no thread.
    pub fn run(&self, job: Job) -> std::result::Result<(), Errno> {
        let mut jobs = self.jobs.lock();
        if jobs.is_none() {
            let (sender, receiver) = channel::<Job>();
            let receiver = Arc::new(Mutex::new(receiver));
            for _ in 0..self.count {
                let receiver = receiver.clone();
                let thread = std::thread::Builder::new().name(self.name.into());
                thread.spawn(move || serve(&receiver)).map_err(|_| Errno::AGAIN)?;
            }
            *jobs = Some(sender);
        }
        let sender = jobs.as_ref().expect("it was just made");
        sender.send(job).map_err(|_| Errno::AGAIN)
    }

    /// Does `work` on each of many things by all threads, and returns what came of each. When it
    /// returns no thread is at any of them. After the first error no further one is begun.
    ///
    /// # Errors
    /// That of the first thing in order that had one; what `lost` makes of `EAGAIN` where there can
    /// be no thread.
    ///
    /// # Panics
    /// If `work` did.
    pub fn each<T: Send + 'static, R: Send + 'static>(
        &self,
        things: Vec<T>,
        work: impl Fn(T) -> Result<R> + Send + Sync + 'static,
        lost: impl FnOnce(Errno) -> gpunvme::Error,
    ) -> Result<Vec<R>> {
        let count = self.count.min(things.len());
        let state = State { left: things.into_iter().enumerate(), at: 0, done: Vec::new() };
        let all = Arc::new(All { state: Mutex::new(state), changed: Condvar::new(), work });
        for at in 0..count {
            let all = all.clone();
            let begun = self.run(Box::new(move || all.serve()));
            if let (Err(errno), 0) = (begun, at) {
                return Err(lost(errno));
            }
        }
        let mut done = all.wait();
        done.sort_unstable_by_key(|(index, _)| *index);
        done.into_iter().map(|(_, result)| result.unwrap_or_else(|panic| resume_unwind(panic))).collect()
    }
}

fn serve(jobs: &Mutex<Receiver<Job>>) {
    loop {
        let job = jobs.lock().recv();
        match job {
            Ok(job) => job(),
            Err(_) => return,
        }
    }
}

/// Work on many things.
struct All<T, R, W> {
    state: Mutex<State<T, R>>,
    changed: Condvar,
    work: W,
}

struct State<T, R> {
    /// Those that are not begun.
    left: Enumerate<IntoIter<T>>,
    /// How many threads are at one now.
    at: usize,
    /// What came of the others, with their numbers.
    done: Vec<(usize, Came<R>)>,
}

/// What came of a thing, or what the work panicked with.
type Came<R> = std::thread::Result<Result<R>>;

impl<T, R, W: Fn(T) -> Result<R>> All<T, R, W> {
    /// Works until nothing is left to be begun.
    fn serve(&self) {
        let mut state = self.state.lock();
        while let Some((index, thing)) = state.left.next() {
            state.at += 1;
            drop(state);
            // A caller whose thing was lost would wait without end.
            let result = catch_unwind(AssertUnwindSafe(|| (self.work)(thing)));
            if !matches!(result, Ok(Ok(_))) {
                let given_up = std::mem::replace(&mut self.state.lock().left, Vec::new().into_iter().enumerate());
                // Not under the lock: things may take a while to go.
                drop(given_up);
            }
            state = self.state.lock();
            state.done.push((index, result));
            state.at -= 1;
            if state.at == 0 && state.left.len() == 0 {
                self.changed.notify_all();
            }
        }
    }

    /// Waits until nothing is left, and no thread is at anything.
    fn wait(&self) -> Vec<(usize, Came<R>)> {
        let mut state = self.state.lock();
        while state.at > 0 || state.left.len() > 0 {
            self.changed.wait(&mut state);
        }
        std::mem::take(&mut state.done)
    }
}
