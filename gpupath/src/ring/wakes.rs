//! Wakes applications that wait for completions. A signal to an eventfd takes as long as what
//! waits for it is long, on the thread that signals; its owner can have hundreds of thousands wait.
//!
//! It guards the threads that many depend on. Each user has a small share of a thread for what the
//! signals take beyond what one usually takes. A user who has used it up is signalled by a thread
//! apart, where users take turns.

use super::signal::Signal;
use parking_lot::{Condvar, Mutex};
use rustc_hash::FxHashMap;
use rustix::time::ClockId;
use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// What one signal usually takes at the most, of a processor's time.
const USUAL: Duration = Duration::from_micros(20);
/// One part of so many of a thread's time is each user's for what signals take beyond that.
const SHARE: u64 = 20;
/// How much of it a user may have at once.
const BURST: Duration = Duration::from_millis(1);
/// The longest that a user is signalled by the thread apart for what was before.
const REMEMBERED: Duration = Duration::from_secs(60);
/// How long the thread apart goes on at the end.
const END: Duration = Duration::from_secs(2);

/// What wakes the applications of a mount.
pub(super) struct Wakes {
    begun: Instant,
    accounts: Mutex<FxHashMap<u32, Arc<Account>>>,
    late: Mutex<Late>,
    /// Something is late, or it is the end.
    is_due: Condvar,
}

/// What a user's signals took.
#[derive(Default)]
struct Account {
    /// When the user's share will have made up for all that was taken, in nanoseconds.
    even: AtomicU64,
}

/// Signals that the thread apart has to give.
#[derive(Default)]
struct Late {
    /// By user. Each user has at least one here, or is not here.
    signals: FxHashMap<u32, VecDeque<Arc<Wake>>>,
    /// Those users, in the order of their turns.
    turns: VecDeque<u32>,
    /// When the thread has to end.
    end: Option<Instant>,
}

/// Wakes the application of one ring.
pub(super) struct Wake {
    user: u32,
    account: Arc<Account>,
    signal: Signal,
    /// The thread apart will signal.
    is_late: AtomicBool,
    wakes: Arc<Wakes>,
}

impl Wakes {
    /// Starts the thread apart, which runs until [`Wakes::end`].
    ///
    /// # Errors
    /// If the system has no thread to give.
    pub fn new(
        spawn: impl FnOnce(String, Box<dyn FnOnce() + Send>) -> io::Result<JoinHandle<()>>,
    ) -> io::Result<(Arc<Wakes>, JoinHandle<()>)> {
        let wakes =
            Arc::new(Wakes { begun: Instant::now(), accounts: Mutex::default(), late: Mutex::default(), is_due: Condvar::new() });
        let by_thread = wakes.clone();
        let thread = spawn("ring-wakes".into(), Box::new(move || by_thread.run()))?;
        Ok((wakes, thread))
    }

    /// What wakes the application of a ring of `user`.
    pub fn wake(self: &Arc<Self>, user: u32, signal: Signal) -> Arc<Wake> {
        let account = {
            let now = self.now();
            let mut accounts = self.accounts.lock();
            // A user without rings is remembered for what was.
            accounts.retain(|_, account| Arc::strong_count(account) > 1 || account.even.load(Ordering::Relaxed) > now);
            accounts.entry(user).or_default().clone()
        };
        Arc::new(Wake { user, account, signal, is_late: AtomicBool::new(false), wakes: self.clone() })
    }

    /// Ends the thread, after what is late, for which it takes no longer than a few seconds.
    pub fn end(&self) {
        self.late.lock().end = Some(Instant::now() + END);
        self.is_due.notify_all();
    }

    fn now(&self) -> u64 {
        self.begun.elapsed().as_nanos() as u64
    }

    fn run(&self) {
        while let Some(wake) = self.next() {
            // Before it signals: what is completed from here on needs another.
            wake.is_late.store(false, Ordering::SeqCst);
            wake.signal();
        }
    }

    /// Waits for what is late. None at the end.
    fn next(&self) -> Option<Arc<Wake>> {
        let mut late = self.late.lock();
        loop {
            if late.end.is_some_and(|end| Instant::now() > end) {
                late.signals.clear();
                return None;
            }
            if let Some(wake) = late.take() {
                return Some(wake);
            }
            if late.end.is_some() {
                return None;
            }
            self.is_due.wait(&mut late);
        }
    }
}

impl Late {
    /// Takes the next one of the user whose turn it is.
    fn take(&mut self) -> Option<Arc<Wake>> {
        let user = self.turns.pop_front()?;
        let signals = self.signals.get_mut(&user).expect("a user who has a turn has something");
        let wake = signals.pop_front().expect("a user that is here has something");
        if signals.is_empty() {
            self.signals.remove(&user);
        } else {
            self.turns.push_back(user);
        }
        Some(wake)
    }

    fn put(&mut self, wake: Arc<Wake>) {
        let user = wake.user;
        let signals = self.signals.entry(user).or_default();
        signals.push_back(wake);
        if signals.len() == 1 {
            self.turns.push_back(user);
        }
    }
}

impl Account {
    /// Whether the user has used up the share.
    fn is_used_up(&self, now: u64) -> bool {
        self.even.load(Ordering::Relaxed).saturating_sub(now) > BURST.as_nanos() as u64 * SHARE
    }

    /// One signal took so long.
    fn charge(&self, now: u64, taken: Duration) {
        let beyond = taken.saturating_sub(USUAL).as_nanos() as u64;
        if beyond == 0 {
            return;
        }
        let latest = now + REMEMBERED.as_nanos() as u64;
        let later = |even: u64| Some((even.max(now) + beyond * SHARE).min(latest));
        let _ = self.even.fetch_update(Ordering::Relaxed, Ordering::Relaxed, later); // never refused
    }
}

impl Wake {
    /// Wakes the application. It never waits, and returns soon however many wait for the eventfd,
    /// except for the first of a user.
    pub fn send(self: &Arc<Self>) {
        if !self.account.is_used_up(self.wakes.now()) {
            return self.signal();
        }
        if self.is_late.swap(true, Ordering::SeqCst) {
            return;
        }
        let mut late = self.wakes.late.lock();
        if late.end.is_some() {
            drop(late);
            return self.signal();
        }
        late.put(self.clone());
        drop(late);
        self.wakes.is_due.notify_one();
    }

    fn signal(&self) {
        let before = processor_time();
        self.signal.send();
        self.account.charge(self.wakes.now(), processor_time().saturating_sub(before));
    }
}

/// How long this thread has had a processor: that others had it meanwhile is not a signal's fault.
fn processor_time() -> Duration {
    let time = rustix::time::clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec.cast_unsigned(), time.tv_nsec.cast_unsigned() as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_is_used_up_by_long_signals_and_comes_back() {
        let account = Account::default();
        let mut now = 1_000_000_000;
        // As many usual ones as there may be.
        for _ in 0..1_000_000 {
            account.charge(now, USUAL);
        }
        assert!(!account.is_used_up(now));
        account.charge(now, USUAL + BURST);
        assert!(!account.is_used_up(now), "no more than may be at once");
        account.charge(now, USUAL + BURST);
        assert!(account.is_used_up(now));
        now += 19_000_000;
        assert!(account.is_used_up(now));
        now += 2_000_000;
        assert!(!account.is_used_up(now), "the share of twenty milliseconds is one");
        account.charge(now, Duration::from_secs(1000));
        now += REMEMBERED.as_nanos() as u64 - 21_000_000;
        assert!(account.is_used_up(now));
        now += 2_000_000;
        assert!(!account.is_used_up(now));
    }

    #[test]
    fn users_take_turns_and_each_signal_is_given_once() {
        let mut threads = Vec::new();
        let (wakes, thread) = Wakes::new(|_, run| {
            threads.push(run); // run below
            Ok(std::thread::spawn(|| ()))
        })
        .unwrap();
        thread.join().unwrap();
        let eventfd = || rustix::event::eventfd(0, rustix::event::EventfdFlags::NONBLOCK).unwrap();
        let count = |fd: &std::os::fd::OwnedFd| {
            let mut count = [0; 8];
            rustix::io::read(fd, &mut count).map_or(0, |_| u64::from_ne_bytes(count))
        };
        let fds: Vec<_> = (0..5).map(|_| eventfd()).collect();
        let users = [1, 1, 1, 2, 1];
        let all: Vec<_> =
            fds.iter().zip(users).map(|(fd, user)| wakes.wake(user, Signal::new(fd.try_clone().unwrap()).unwrap())).collect();
        all.iter().for_each(|wake| wake.account.charge(wakes.now(), REMEMBERED));
        for _ in 0..3 {
            all.iter().for_each(Wake::send);
        }
        assert!(fds.iter().all(|fd| count(fd) == 0), "given at once");
        let order: Vec<_> = std::iter::from_fn(|| wakes.late.lock().take())
            .map(|wake| all.iter().position(|other| Arc::ptr_eq(other, &wake)).unwrap())
            .collect();
        assert_eq!(order, [0, 3, 1, 2, 4]);
        all.iter().for_each(|wake| wake.is_late.store(false, Ordering::Relaxed));
        for _ in 0..3 {
            all.iter().for_each(Wake::send);
        }
        wakes.end();
        threads.pop().unwrap()();
        assert!(fds.iter().all(|fd| count(fd) == 1));
        // What ends after the thread is signalled by who ends it.
        all[0].send();
        all[0].send();
        assert_eq!(count(&fds[0]), 1);
    }
}
