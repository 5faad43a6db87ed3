//! Group commit: one caller at a time, the *leader*, writes the journal, for all whose operations
//! were finished before it froze the transaction. The others sleep meanwhile. When a commit ends,
//! those that it served are woken, and of those that came too late for it one: the next leader.
//!
//! Locks: `state`, for moments, under no other.

use parking_lot::{Condvar, Mutex, MutexGuard};

/// What is durable, or has to be: the transactions up to one, and writes of data
/// ([`crate::volume::unflushed`]).
#[derive(Clone, Copy)]
pub(super) struct Goal {
    pub sequence: u64,
    pub written: u64,
}

#[derive(Default)]
pub(crate) struct GroupCommit {
    state: Mutex<State>,
    /// Signalled at the end of a commit: those that sleep until an even one is over, or an odd one.
    ended: [Condvar; 2],
}

#[derive(Default)]
struct State {
    /// Number of the last commit that began.
    number: u64,
    is_in_flight: bool,
    /// What that one makes durable, once it is known.
    goal: Option<Goal>,
}

/// The right to commit, until it is dropped.
pub(super) struct Leader<'a>(&'a GroupCommit);

impl Goal {
    fn covers(&self, other: &Goal) -> bool {
        self.sequence >= other.sequence && self.written >= other.written
    }
}

impl GroupCommit {
    /// Makes the caller the leader; or waits for the end of a commit that serves it, or failed, and
    /// returns none. `step` is called before the caller sleeps, without the lock: whether it did
    /// something that may end a commit.
    pub(super) fn lead(&self, needed: &Goal, step: impl Fn() -> bool) -> Option<Leader<'_>> {
        let mut state = self.state.lock();
        let is_late = state.is_in_flight && state.goal.is_some_and(|goal| !goal.covers(needed));
        let number = state.number + u64::from(is_late || !state.is_in_flight);
        loop {
            if state.number < number && !state.is_in_flight {
                state.number += 1;
                state.is_in_flight = true;
                return Some(Leader(self));
            }
            if is_over(&state, number) {
                return None;
            }
            let stepped = MutexGuard::unlocked(&mut state, &step);
            if !stepped && state.is_in_flight && !is_over(&state, number) {
                self.ended[number as usize % 2].wait(&mut state);
            }
        }
    }
}

fn is_over(state: &State, number: u64) -> bool {
    state.number > number || state.number == number && !state.is_in_flight
}

impl Leader<'_> {
    /// From now on it is known what this commit makes durable.
    pub fn set_goal(&self, goal: Goal) {
        self.0.state.lock().goal = Some(goal);
    }
}

impl Drop for Leader<'_> {
    fn drop(&mut self) {
        let mut state = self.0.state.lock();
        state.is_in_flight = false;
        state.goal = None;
        let number = state.number as usize;
        drop(state);
        self.0.ended[number % 2].notify_all();
        self.0.ended[(number + 1) % 2].notify_one();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::thread;
    use std::time::Duration;

    use super::*;

    /// A journal whose transactions are numbers.
    #[derive(Default)]
    struct Numbers {
        group: GroupCommit,
        finished: AtomicU64,
        durable: AtomicU64,
        leaders: AtomicU64,
        commits: AtomicU64,
    }

    impl Numbers {
        fn commit(&self) {
            let needed = Goal { sequence: self.finished.fetch_add(1, Ordering::SeqCst) + 1, written: 0 };
            while self.durable.load(Ordering::SeqCst) < needed.sequence {
                let Some(leader) = self.group.lead(&needed, || false) else { continue };
                assert_eq!(self.leaders.fetch_add(1, Ordering::SeqCst), 0, "there is one leader at a time");
                let sequence = self.finished.load(Ordering::SeqCst);
                leader.set_goal(Goal { sequence, written: 0 });
                thread::sleep(Duration::from_micros(200));
                self.durable.store(sequence, Ordering::SeqCst);
                self.commits.fetch_add(1, Ordering::SeqCst);
                self.leaders.fetch_sub(1, Ordering::SeqCst);
            }
        }
    }

    #[test]
    fn callers_share_commits_and_none_sleeps_for_ever() {
        const CALLERS: u64 = 8;
        const CALLS: u64 = 200;
        let numbers = Numbers::default();
        thread::scope(|scope| {
            for _ in 0..CALLERS {
                scope.spawn(|| (0..CALLS).for_each(|_| numbers.commit()));
            }
        });
        let commits = numbers.commits.load(Ordering::SeqCst);
        assert!((1..=CALLERS * CALLS / 2).contains(&commits), "{commits} commits for {} calls", CALLERS * CALLS);
    }

    #[test]
    fn who_comes_too_late_for_a_commit_leads_the_next() {
        let group = GroupCommit::default();
        let goal = |sequence| Goal { sequence, written: 0 };
        let leader = group.lead(&goal(1), || false).expect("nobody else commits");
        leader.set_goal(goal(1));
        thread::scope(|scope| {
            let served = scope.spawn(|| group.lead(&goal(1), || false).is_none());
            let late = scope.spawn(|| group.lead(&goal(2), || false).is_some());
            thread::sleep(Duration::from_millis(20));
            assert!(!served.is_finished() && !late.is_finished());
            drop(leader);
            assert!(served.join().unwrap() && late.join().unwrap());
        });
    }

    #[test]
    fn a_commit_that_failed_wakes_all() {
        let group = GroupCommit::default();
        let leader = group.lead(&Goal { sequence: 1, written: 0 }, || false).expect("nobody else commits");
        thread::scope(|scope| {
            let waiting: Vec<_> =
                (0..4).map(|_| scope.spawn(|| group.lead(&Goal { sequence: 1, written: 0 }, || false).is_none())).collect();
            thread::sleep(Duration::from_millis(20));
            drop(leader);
            assert!(waiting.into_iter().all(|waiter| waiter.join().unwrap()));
        });
    }
}
