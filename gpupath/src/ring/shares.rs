//! How much each ring may have in flight. The device serves commands in the order in which they
//! came, so that an application with much in flight makes all others wait.
//!
//! It guards fairness: what all rings together may have is shared between the users that have busy
//! rings, a user's share between its processes, and a process's share between its rings. More
//! rings, or more processes, get a user no more. A share may be exceeded by one transfer, and by no
//! other while it is.

use super::groups::{Amount, Group, Member};
use super::queue_pair::Ring;
use parking_lot::Mutex;
use rustc_hash::FxHashMap;
use std::hash::Hash;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Instant;

/// What one process's rings may have in flight while no other process's rings are busy: enough to
/// keep any device busy.
const ALONE: Amount = Amount { transfers: 1024, bytes: 32 << 20 };
/// What all may have while several processes are busy: still enough for that, and no more, since
/// each waits for what the others have in flight.
const TOGETHER: Amount = Amount { transfers: 1024, bytes: 16 << 20 };
/// How long a ring counts as busy after it last was, in milliseconds: one that waits for each
/// answer before it asks again is not to find the device full each time.
const BUSY_FOR: u64 = 50;
/// Time between two counts of the busy rings, in milliseconds.
const LOOK: u64 = 5;

/// The shares of all rings of a mount, whichever threads serve them.
pub(super) struct Shares {
    begun: Instant,
    /// When the busy rings were last counted, in milliseconds since `begun`.
    looked: AtomicU64,
    /// Busy users, and busy processes of all.
    users: AtomicU32,
    processes: AtomicU32,
    known: Mutex<Known>,
}

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
        // The thread of one that has something in flight may sleep.
        let is_busy = |ring: &Arc<Ring>| ring.load().0 > 0 || ring.last_busy() + BUSY_FOR > now;
        for ring in known.rings.iter().filter_map(Weak::upgrade).filter(is_busy) {
            let of_process = processes.entry(Arc::as_ptr(&ring.member.process)).or_default();
            *of_process += 1;
            if *of_process == 1 {
                *users.entry(Arc::as_ptr(&ring.member.user)).or_default() += 1;
            }
        }
        set(&mut known.users, &users);
        set(&mut known.processes, &processes);
        self.users.store(users.len() as u32, Ordering::Relaxed);
        self.processes.store(processes.len() as u32, Ordering::Relaxed);
    }

    /// Whether a further transfer of a ring may begin.
    pub fn has_room(&self, ring: &Ring) -> bool {
        let Member { user, process } = &ring.member;
        let all = if self.processes.load(Ordering::Relaxed) > 1 { TOGETHER } else { ALONE };
        let of_user = all.divided(self.users.load(Ordering::Relaxed));
        let of_process = user.divide(of_user);
        let of_ring = process.divide(of_process);
        let (transfers, bytes) = ring.load();
        user.has_room(of_user) && process.has_room(of_process) && transfers < of_ring.transfers && bytes < of_ring.bytes
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
