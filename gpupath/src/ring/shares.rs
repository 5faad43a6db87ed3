//! How much each ring may have in flight. The device serves commands in the order in which they
//! came, so that an application with much in flight makes all others wait.
//!
//! It guards fairness: what all rings together may have is shared between the users that have busy
//! rings, a user's share between its processes, and a process's share between its rings. More
//! rings, or more processes, get a user no more. A share of bytes may be exceeded by one transfer,
//! and by no other while it is; where several threads serve rings that have it together, by what
//! each of them takes at the same moment. A user whose work reaches the device another way than by
//! rings has a share too, which stays free: with less in flight ahead of it, that work waits less.

use super::groups::{Amount, Group, Limits, Member};
use super::queue_pair::Ring;
use parking_lot::Mutex;
use rustc_hash::{FxHashMap, FxHashSet};
use std::hash::Hash;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Instant;

/// What one process's rings may have in flight while no other process's rings are busy: enough to
/// keep any device busy.
const ALONE: Amount = Amount { transfers: 1024, bytes: 32 << 20 };
/// What all may have while several processes are busy, or another user without busy rings: still
/// enough for that, and no more, since each waits for what the others have in flight.
const TOGETHER: Amount = Amount { transfers: 1024, bytes: 16 << 20 };
/// How long a ring, or a user with other work, counts as busy after it last was, in milliseconds:
/// one that waits for each answer before it asks again is not to find the device full each time.
const BUSY_FOR: u64 = 50;
/// Time between two counts of the busy rings, in milliseconds.
const LOOK: u64 = 5;

/// The shares of all rings of a mount, whichever threads serve them.
pub(super) struct Shares {
    begun: Instant,
    /// When the busy rings were last counted, in milliseconds since `begun`.
    looked: AtomicU64,
    /// Busy users: those with busy rings, and those with other work only.
    users: AtomicU32,
    /// Processes with busy rings.
    processes: AtomicU32,
    /// Users with other work only.
    others: AtomicU32,
    /// Users with other work, locked after `known`.
    other_work: Mutex<FxHashMap<u32, OtherWork>>,
    known: Mutex<Known>,
}

/// What a user has in flight by other ways than rings.
struct OtherWork {
    in_flight: u32,
    /// When some of it last began or ended ([`Shares::now`]).
    last_busy: u64,
}

impl OtherWork {
    fn is_busy(&self, now: u64) -> bool {
        self.in_flight > 0 || self.last_busy + BUSY_FOR > now
    }
}

/// Work of a user that rings leave room for; dropping this ends it.
pub struct WorkBesideRings(Option<(Arc<Shares>, u32)>);

#[derive(Default)]
struct Known {
    rings: Vec<Weak<Ring>>,
    users: FxHashMap<u32, Weak<Group>>,
    /// By user and process.
    processes: FxHashMap<(u32, u32), Weak<Group>>,
}

impl Shares {
    /// Makes the shares of a mount without rings.
    pub fn new() -> Shares {
        Shares {
            begun: Instant::now(),
            looked: AtomicU64::new(0),
            users: AtomicU32::new(0),
            processes: AtomicU32::new(0),
            others: AtomicU32::new(0),
            other_work: Mutex::default(),
            known: Mutex::default(),
        }
    }

    /// The member that a ring of this process of this user belongs to.
    pub fn member(&self, user: u32, process: u32) -> Member {
        let mut known = self.known.lock();
        Member { user: group(&mut known.users, user), process: group(&mut known.processes, (user, process)) }
    }

    /// Adds a ring.
    pub fn add(&self, ring: &Arc<Ring>) {
        let mut known = self.known.lock();
        known.rings.retain(|ring| ring.strong_count() > 0);
        known.rings.push(Arc::downgrade(ring));
    }

    /// Begins work of `user` beside the rings. It counts only where rings were busy when they were
    /// last counted: else this takes no lock.
    pub fn begin_beside(self: &Arc<Self>, user: u32) -> WorkBesideRings {
        if self.processes.load(Ordering::Relaxed) == 0 {
            return WorkBesideRings(None);
        }
        let now = self.now();
        let mut works = self.other_work.lock();
        if !works.contains_key(&user) {
            works.retain(|_, work| work.is_busy(now));
        }
        let work = works.entry(user).or_insert(OtherWork { in_flight: 0, last_busy: now });
        work.in_flight += 1;
        WorkBesideRings(Some((self.clone(), user)))
    }

    /// The time in milliseconds, as [`Ring::last_busy`] has it.
    pub fn now(&self) -> u64 {
        self.begun.elapsed().as_millis() as u64 + BUSY_FOR
    }

    /// Looks which rings are busy, if it is time for that.
    pub fn look(&self, now: u64) {
        let looked = self.looked.load(Ordering::Relaxed);
        let is_due = now >= looked + LOOK;
        if !is_due || self.looked.compare_exchange(looked, now, Ordering::Relaxed, Ordering::Relaxed).is_err() {
            return;
        }
        let mut known = self.known.lock();
        let (mut users, mut processes): (FxHashMap<_, u32>, FxHashMap<_, u32>) = Default::default();
        let mut ids = FxHashSet::default();
        // The thread of one that has something in flight may sleep.
        let is_busy = |ring: &Arc<Ring>| ring.load().0 > 0 || ring.last_busy() + BUSY_FOR > now;
        for ring in known.rings.iter().filter_map(Weak::upgrade).filter(is_busy) {
            ids.insert(ring.user);
            let of_process = processes.entry(Arc::as_ptr(&ring.member.process)).or_default();
            *of_process += 1;
            if *of_process == 1 {
                *users.entry(Arc::as_ptr(&ring.member.user)).or_default() += 1;
            }
        }
        set(&mut known.users, &users);
        set(&mut known.processes, &processes);
        let is_other = |(user, work): &(&u32, &OtherWork)| work.is_busy(now) && !ids.contains(*user);
        let others = self.other_work.lock().iter().filter(is_other).count() as u32;
        self.others.store(others, Ordering::Relaxed);
        self.users.store(users.len() as u32 + others, Ordering::Relaxed);
        self.processes.store(processes.len() as u32, Ordering::Relaxed);
    }

    /// What a ring may have in flight, with all others of its process and its user: a transfer may
    /// begin as long as there is room for a transfer and a byte.
    pub fn limits(&self, ring: &Ring) -> Limits {
        let Member { user, process } = &ring.member;
        let busy = self.processes.load(Ordering::Relaxed) + self.others.load(Ordering::Relaxed);
        let all = if busy > 1 { TOGETHER } else { ALONE };
        let of_user = all.divided(self.users.load(Ordering::Relaxed));
        let of_process = user.divide(of_user);
        Limits { user: of_user, process: of_process, ring: process.divide(of_process) }
    }
}

impl Drop for WorkBesideRings {
    fn drop(&mut self) {
        if let Some((shares, user)) = self.0.take() {
            let now = shares.now();
            let mut works = shares.other_work.lock();
            let work = works.get_mut(&user).expect("what is in flight is not forgotten");
            work.in_flight -= 1;
            work.last_busy = now;
        }
    }
}

fn group<K: Eq + Hash>(groups: &mut FxHashMap<K, Weak<Group>>, id: K) -> Arc<Group> {
    groups.retain(|_, group| group.strong_count() > 0);
    groups.get(&id).and_then(Weak::upgrade).unwrap_or_else(|| {
        let group = Arc::new(Group::default());
        groups.insert(id, Arc::downgrade(&group));
        group
    })
}

fn set<K>(groups: &mut FxHashMap<K, Weak<Group>>, busy: &FxHashMap<*const Group, u32>) {
    for group in groups.values().filter_map(Weak::upgrade) {
        group.set_busy(busy.get(&Arc::as_ptr(&group)).copied().unwrap_or(0));
    }
}
