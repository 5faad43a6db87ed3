//! Threads for calls that may wait for another process: taking a descriptor from it, and closing
//! it.
//!
//! It guards the time of all other threads of the daemon. To close a foreign descriptor can take
//! for ever: a socket lingers until its peer takes what was sent, a file of a FUSE mount waits for
//! its server's answer. So there is a fixed number of threads for it, of which each user has a
//! quota; a user who has used it up is refused before anything more is taken in; and nothing
//! ever waits for these threads, the end of the mount included. One that is idle stays: where the
//! system gives no other, what comes is still answered.

use crate::quota::quota;
use crate::surplus::Surplus;
use parking_lot::{Condvar, Mutex, MutexGuard};
use rustc_hash::FxHashMap;
use std::collections::VecDeque;
use std::io;
use std::os::fd::OwnedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Threads at the most.
const THREADS: usize = 16;
/// Tasks of one user that may wait for a thread.
const WAITING: usize = 256;
/// Threads of a user of which none came to an end for so long are taken for stuck.
const STUCK: Duration = Duration::from_secs(2);
/// How long a thread waits for another task before it ends.
const IDLE_TIMEOUT: Duration = Duration::from_secs(3);
/// How often it is looked whether a task that waits has become hopeless.
const LOOK: Duration = Duration::from_millis(500);

/// Tells a task whether it is to be done or refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Turn {
    /// To be done.
    Taken,
    /// To be refused, without waiting for anything: the user's threads are stuck.
    Refused,
}

type Task = Box<dyn FnOnce(Turn) + Send>;

/// The threads. A clone is another handle to them; they end some time after the last.
#[derive(Clone)]
pub(crate) struct Intake(Arc<Handle>);

struct Handle(Arc<Shared>);

#[derive(Default)]
struct Shared {
    state: Mutex<ThreadPool>,
    work: Condvar,
}

#[derive(Default)]
struct ThreadPool {
    threads: usize,
    idle: usize,
    /// Tasks and descriptors that wait, of all users.
    waiting: usize,
    /// Threads at work, for all users.
    busy: usize,
    users: FxHashMap<u32, User>,
    /// Users for whom something waits, in the order of their turns.
    turns: VecDeque<u32>,
    surplus: Surplus,
    /// Nothing more will come.
    ending: bool,
}

#[derive(Default)]
struct User {
    busy: usize,
    /// When a thread last began or ended something for this user; before that, when the first task
    /// came.
    progress: Option<Instant>,
    /// Descriptors to be closed. They go first: as long as they are there nothing more is taken
    /// in.
    discarded: VecDeque<OwnedFd>,
    tasks: VecDeque<Task>,
}

/// What a thread does next.
enum Work {
    Close(OwnedFd),
    Run(Task, Turn),
}

impl Intake {
    /// # Errors
    /// If the system has no thread to give.
    pub fn new() -> io::Result<Intake> {
        let shared = Arc::new(Shared::default());
        shared.begin(&mut shared.state.lock())?;
        Ok(Intake(Arc::new(Handle(shared))))
    }

    fn shared(&self) -> &Arc<Shared> {
        &self.0.0
    }

    /// Runs a task for a user, on a thread of its own. It is called here and at once, with
    /// [`Turn::Refused`], where the threads of the quota are stuck or too much waits.
    pub fn run(&self, user: u32, task: impl FnOnce(Turn) + Send + 'static) {
        let mut state = self.shared().state.lock();
        let is_stuck = state.is_stuck(user);
        let of = state.users.entry(user).or_default();
        if is_stuck || of.tasks.len() >= WAITING {
            drop(state);
            return task(Turn::Refused);
        }
        of.progress.get_or_insert_with(Instant::now);
        of.tasks.push_back(Box::new(task));
        self.wake(state, user);
    }

    /// Closes a descriptor that came from a user's process, without waiting for it.
    pub fn discard(&self, user: u32, fd: OwnedFd) {
        let mut state = self.shared().state.lock();
        state.users.entry(user).or_default().discarded.push_back(fd);
        self.wake(state, user);
    }

    /// Descriptors that wait to be closed.
    pub fn discarded(&self) -> usize {
        self.shared().state.lock().users.values().map(|user| user.discarded.len()).sum()
    }

    /// Finds a thread for what was queued for a user.
    fn wake(&self, mut state: MutexGuard<'_, ThreadPool>, user: u32) {
        if !state.turns.contains(&user) {
            state.turns.push_back(user);
        }
        state.waiting += 1;
        self.shared().work.notify_one();
        self.shared().staff(&mut state, user);
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.0.state.lock().ending = true;
        self.0.work.notify_all();
    }
}

impl Shared {
    /// Begins a thread where one is missing: for what waits for a user who may have one more, and
    /// one that is idle as long as anything waits, because tasks that have become hopeless are
    /// refused by it.
    fn staff(self: &Arc<Self>, state: &mut ThreadPool, user: u32) {
        let missing = state.waiting > state.idle && (state.idle == 0 || state.has_room(user));
        if !missing || state.threads == THREADS {
            return;
        }
        if let Err(error) = self.begin(state) {
            // The threads there are will come to it.
            tracing::warn!(%error, "no further thread to take descriptors in on");
        }
    }

    /// Begins a thread.
    fn begin(self: &Arc<Self>, state: &mut ThreadPool) -> io::Result<()> {
        let shared = self.clone();
        std::thread::Builder::new().name("intake".into()).spawn(move || shared.work())?;
        state.threads += 1;
        Ok(())
    }

    fn work(self: &Arc<Self>) {
        let mut state = self.state.lock();
        loop {
            if let Some((user, work)) = state.next() {
                self.staff(&mut state, user);
                drop(state);
                let refused = matches!(work, Work::Run(_, Turn::Refused));
                match work {
                    Work::Close(fd) => drop(fd),
                    Work::Run(task, turn) => {
                        // As anywhere: what a thread that panics was doing is unknown.
                        if catch_unwind(AssertUnwindSafe(|| task(turn))).is_err() {
                            std::process::abort();
                        }
                    }
                }
                state = self.state.lock();
                state.ended(user, refused);
                continue;
            }
            let idle = state.idle;
            // One that is idle stays.
            if state.turns.is_empty() && (state.ending || state.surplus.ends(idle, IDLE_TIMEOUT, idle > 0)) {
                break;
            }
            state.idle += 1;
            let is_over = match (state.turns.is_empty(), state.idle) {
                (false, _) => self.work.wait_for(&mut state, LOOK).timed_out(),
                (true, 1) => {
                    self.work.wait(&mut state);
                    false
                }
                (true, _) => self.work.wait_for(&mut state, IDLE_TIMEOUT).timed_out(),
            };
            state.idle -= 1;
            let idle = state.idle;
            state.surplus.note(idle);
            // The others may be stuck.
            if is_over && state.turns.is_empty() && state.idle > 0 {
                break;
            }
        }
        state.threads -= 1;
    }
}

impl ThreadPool {
    /// The next work of the next user who may have a thread more, or whose tasks are hopeless.
    fn next(&mut self) -> Option<(u32, Work)> {
        for _ in 0..self.turns.len() {
            let user = self.turns.pop_front()?;
            let (has_room, is_stuck) = (self.has_room(user), self.is_stuck(user));
            let of = self.users.get_mut(&user).expect("something waits for this user");
            let task = |of: &mut User, turn| of.tasks.pop_front().map(|task| Work::Run(task, turn));
            let work = match (has_room, is_stuck) {
                (true, _) => of.discarded.pop_front().map(Work::Close).or_else(|| task(of, Turn::Taken)),
                (false, true) => task(of, Turn::Refused),
                (false, false) => None,
            };
            if !of.discarded.is_empty() || !of.tasks.is_empty() {
                self.turns.push_back(user);
            }
            if let Some(work) = work {
                if has_room {
                    of.progress = Some(Instant::now());
                }
                of.busy += 1;
                self.busy += 1;
                self.waiting -= 1;
                return Some((user, work));
            }
        }
        None
    }

    /// Counts that a thread is done with a task of a user. A refused task was no progress.
    fn ended(&mut self, user: u32, refused: bool) {
        self.busy -= 1;
        let of = self.users.get_mut(&user).expect("a user for whom a thread works is known");
        of.busy -= 1;
        if !refused {
            of.progress = Some(Instant::now());
        }
        if of.busy == 0 && of.discarded.is_empty() && of.tasks.is_empty() {
            self.users.remove(&user);
        }
    }

    fn has_room(&self, user: u32) -> bool {
        let busy = self.users.get(&user).map_or(0, |of| of.busy);
        (busy as u64) < quota(user, THREADS as u64, (self.busy - busy) as u64)
    }

    /// Whether a user has no thread to be had, and has had none for a while.
    fn is_stuck(&self, user: u32) -> bool {
        let progress = self.users.get(&user).and_then(|of| of.progress);
        !self.has_room(user) && progress.is_none_or(|progress| progress.elapsed() > STUCK)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::{Receiver, Sender, channel};

    /// Runs a task that sends what it was called for.
    fn ask(intake: &Intake, user: u32) -> Receiver<Turn> {
        let (sender, receiver) = channel();
        intake.run(user, move |turn| sender.send(turn).unwrap());
        receiver
    }

    /// Keeps as many threads of a user as it gets, until the sender is dropped.
    fn keep(intake: &Intake, user: u32) -> Sender<()> {
        let (sender, receiver) = channel();
        let receiver = Arc::new(Mutex::new(receiver));
        for _ in 0..THREADS {
            let receiver = receiver.clone();
            intake.run(user, move |turn| {
                if turn == Turn::Taken {
                    let _ = receiver.lock().recv(); // its sender goes, and says nothing
                }
            });
        }
        sender
    }

    #[test]
    fn a_user_whose_threads_are_stuck_is_refused_and_others_are_served() {
        const PATIENCE: Duration = Duration::from_secs(20);
        let intake = Intake::new().unwrap();
        let kept = [1000, 1001].map(|user| keep(&intake, user));
        // What waits when it becomes clear that the threads are stuck is refused, and what comes
        // later at once.
        assert_eq!(ask(&intake, 1000).recv_timeout(PATIENCE), Ok(Turn::Refused));
        assert_eq!(ask(&intake, 1000).try_recv(), Ok(Turn::Refused));
        for user in [1002, 0] {
            assert_eq!(ask(&intake, user).recv_timeout(PATIENCE), Ok(Turn::Taken), "{user}");
        }
        assert!(intake.shared().state.lock().threads <= THREADS);
        drop(kept);
        let since = Instant::now();
        while ask(&intake, 1000).recv_timeout(PATIENCE) != Ok(Turn::Taken) {
            assert!(since.elapsed() < PATIENCE, "a user is refused for ever");
        }
    }

    /// Where the system gives no further thread, what is queued is answered all the same.
    #[test]
    fn one_thread_is_there_until_the_last_handle_is_gone() {
        let intake = Intake::new().unwrap();
        let threads = |intake: &Intake| intake.shared().state.lock().threads;
        assert_eq!(threads(&intake), 1);
        let asked = [0, 1].map(|user| ask(&intake, user));
        asked.iter().for_each(|answer| assert_eq!(answer.recv(), Ok(Turn::Taken)));
        std::thread::sleep(IDLE_TIMEOUT + LOOK);
        assert_eq!(threads(&intake), 1);
        assert_eq!(ask(&intake, 0).recv(), Ok(Turn::Taken));
        // Nor does it go where another is stuck.
        let kept = keep(&intake, 1000);
        std::thread::sleep(IDLE_TIMEOUT + LOOK);
        assert!(intake.shared().state.lock().idle > 0);
        drop(kept);
        let (shared, since) = (Arc::downgrade(intake.shared()), Instant::now());
        drop(intake);
        while shared.strong_count() > 0 {
            assert!(since.elapsed() < IDLE_TIMEOUT + LOOK, "a thread stays for ever");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}
