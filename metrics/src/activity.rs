//! What each thread does with each file, kept only while it is watched.
//!
//! It guards the operations' speed: while it is not watched, an operation costs one load of a word
//! that does not change; and the daemon's memory: of so many that come, [`MOST`] are kept, and the
//! rest is counted as one.

use std::collections::HashMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use crate::shard;

/// How long it is kept after the last look.
pub const LEASE: Duration = Duration::from_secs(10);
/// The most actors that are kept, each with each of its files.
pub const MOST: usize = SHARDS * MOST_OF_SHARD;

const SHARDS: usize = 16;
const MOST_OF_SHARD: usize = 512;

/// A thread of a user, with a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Actor {
    /// The user.
    pub user: u32,
    /// The thread, or the process where the thread is not known.
    pub thread: u32,
    /// The file; 0 where it is none.
    pub ino: u64,
}

/// What an actor did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Done {
    /// Operations that ended.
    pub operations: u64,
    /// Bytes that they read.
    pub read: u64,
    /// Bytes that they wrote.
    pub written: u64,
    /// How long they took, added up, in nanoseconds.
    pub nanoseconds: u64,
}

/// What all actors did since the first look.
#[derive(Debug)]
pub struct Activity {
    since: Instant,
    /// When it is no longer watched, in milliseconds from `since` on; 0 while it is not.
    until: AtomicU64,
    shards: Vec<Mutex<HashMap<Actor, Done>>>,
}

/// What is there to be seen.
#[derive(Debug, Default)]
pub struct Seen {
    /// Each actor once, in no order.
    pub actors: Vec<(Actor, Done)>,
    /// What others did, of whom there were too many.
    pub others: Done,
}

/// Stands for those of whom there were too many.
const OTHERS: Actor = Actor { user: u32::MAX, thread: u32::MAX, ino: u64::MAX };

impl Default for Activity {
    fn default() -> Activity {
        let shards = (0..SHARDS).map(|_| Mutex::default()).collect();
        Activity { since: Instant::now(), until: AtomicU64::new(0), shards }
    }
}

impl Done {
    fn add(&mut self, more: Done) {
        self.operations += more.operations;
        self.read = self.read.saturating_add(more.read);
        self.written = self.written.saturating_add(more.written);
        self.nanoseconds = self.nanoseconds.saturating_add(more.nanoseconds);
    }
}

impl Activity {
    /// Whether it is watched: the last look was at most about [`LEASE`] ago.
    pub fn is_watched(&self) -> bool {
        self.until.load(Relaxed) != 0
    }

    /// Adds what an actor did, while it is watched.
    pub fn add(&self, actor: Actor, done: Done) {
        let until = self.until.load(Relaxed);
        if until == 0 {
            return;
        }
        if self.now() > until {
            // The first that comes too late clears it away, unless there is another look just now.
            if self.until.compare_exchange(until, 0, Relaxed, Relaxed).is_ok() {
                self.clear();
            }
            return;
        }
        let mut kept = lock(shard(&self.shards));
        let actor = if kept.len() < MOST_OF_SHARD || kept.contains_key(&actor) { actor } else { OTHERS };
        kept.entry(actor).or_default().add(done);
    }

    /// Looks: what was done since the first look, where the last one is at most [`LEASE`] ago; else
    /// nothing, and this is the first. `is_shown` chooses users.
    pub fn look(&self, is_shown: impl Fn(u32) -> bool) -> Seen {
        let now = self.now();
        let until = now + LEASE.as_millis() as u64;
        if self.until.swap(until, Relaxed) < now {
            self.clear();
        }
        let mut sums: HashMap<Actor, Done> = HashMap::new();
        let mut others = Done::default();
        for kept in &self.shards {
            for (actor, done) in lock(kept).iter() {
                match *actor {
                    OTHERS => others.add(*done),
                    actor if is_shown(actor.user) => sums.entry(actor).or_default().add(*done),
                    _ => {}
                }
            }
        }
        Seen { actors: sums.into_iter().collect(), others }
    }

    fn clear(&self) {
        self.shards.iter().for_each(|kept| *lock(kept) = HashMap::new());
    }

    fn now(&self) -> u64 {
        // 0 means that it is not watched.
        self.since.elapsed().as_millis() as u64 + 1
    }
}

/// A thread that panicked has left sums as they were.
fn lock(kept: &Mutex<HashMap<Actor, Done>>) -> std::sync::MutexGuard<'_, HashMap<Actor, Done>> {
    kept.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: Done = Done { operations: 1, read: 10, written: 2, nanoseconds: 100 };

    fn actor(user: u32, ino: u64) -> Actor {
        Actor { user, thread: 7, ino }
    }

    #[test]
    fn what_is_done_while_somebody_looks_is_kept_for_its_users() {
        let activity = Activity::default();
        activity.add(actor(1, 1), ONE);
        assert!(!activity.is_watched());
        assert!(activity.look(|_| true).actors.is_empty(), "before the first look");
        std::thread::scope(|threads| {
            for _ in 0..20 {
                threads.spawn(|| (0..50).for_each(|n| activity.add(actor(1 + n % 2, 1), ONE)));
            }
        });
        let mut seen = activity.look(|_| true).actors;
        seen.sort_by_key(|(actor, _)| *actor);
        let sum = Done { operations: 500, read: 5000, written: 1000, nanoseconds: 50_000 };
        assert_eq!(seen, [(actor(1, 1), sum), (actor(2, 1), sum)]);
        assert_eq!(activity.look(|user| user == 2).actors, [(actor(2, 1), sum)]);
    }

    #[test]
    fn too_many_are_counted_as_one() {
        let activity = Activity::default();
        activity.look(|_| true);
        for ino in 0..2 * MOST as u64 {
            activity.add(actor(1, ino), ONE);
        }
        let Seen { actors, others } = activity.look(|_| true);
        assert!(actors.len() <= MOST, "{}", actors.len());
        assert_eq!(actors.len() as u64 + others.operations, 2 * MOST as u64);
    }

    #[test]
    fn nothing_is_kept_when_nobody_looks_any_more() {
        let activity = Activity::default();
        activity.look(|_| true);
        activity.add(actor(1, 1), ONE);
        activity.until.store(1, Relaxed);
        std::thread::sleep(Duration::from_millis(5));
        activity.add(actor(1, 1), ONE);
        assert!(!activity.is_watched());
        assert!(activity.shards.iter().all(|kept| lock(kept).is_empty()));
        assert!(activity.look(|_| true).actors.is_empty());
    }
}
