//! Accounts of registered memory, by process and by user, and their limits.
//!
//! It guards that nothing is forgotten: what a buffer holds is counted from before it is mapped
//! until it is truly gone, which can be long after it was unregistered, and given back by dropping
//! a [`Charge`].

use crate::process::Identity;
use crate::quota::quota;
use gpunvme_abi::Reason;
use parking_lot::Mutex;
use rustc_hash::FxHashMap;
use std::hash::Hash;
use std::ops::{Add, Sub};
use std::sync::Arc;

/// Amounts of what is registered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Amounts {
    /// Buffers: each costs the daemon a mapping and a descriptor.
    pub buffers: u64,
    /// Bytes in them: each page that is used costs the daemon an entry in its page tables.
    pub bytes: u64,
    /// Bytes of host memory in them: a device may have them pinned, and then the kernel cannot get
    /// at them however short memory becomes.
    pub host_bytes: u64,
}

/// How much may be registered. Of what all may have together a user may have half of what other
/// users left, and root's clients an eighth to themselves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// What one process may have.
    pub process: Amounts,
    /// What all processes may have together. [`super::Registry::new`] lowers the number of buffers
    /// to what the hard limit of descriptors allows.
    pub all: Amounts,
}

impl Default for Limits {
    /// Fractions of this machine's memory. Page tables for `all.bytes` take a 128th of it.
    fn default() -> Self {
        let sysinfo = rustix::system::sysinfo();
        let memory = sysinfo.totalram.saturating_mul(sysinfo.mem_unit.into());
        Limits {
            process: Amounts { buffers: 4096, bytes: memory.saturating_mul(2), host_bytes: memory / 4 },
            // The kernel allows a process 65,530 mappings (vm.max_map_count).
            all: Amounts { buffers: 32768, bytes: memory.saturating_mul(4), host_bytes: memory / 2 },
        }
    }
}

impl Amounts {
    fn each(self) -> [u64; 3] {
        [self.buffers, self.bytes, self.host_bytes]
    }

    /// Whether it is at most as much, in every respect.
    fn is_within(self, limit: Amounts) -> bool {
        self.each().into_iter().zip(limit.each()).all(|(amount, limit)| amount <= limit)
    }
}

impl Add for Amounts {
    type Output = Amounts;

    fn add(self, other: Amounts) -> Amounts {
        Amounts {
            buffers: self.buffers.saturating_add(other.buffers),
            bytes: self.bytes.saturating_add(other.bytes),
            host_bytes: self.host_bytes.saturating_add(other.host_bytes),
        }
    }
}

impl Sub for Amounts {
    type Output = Amounts;

    fn sub(self, other: Amounts) -> Amounts {
        Amounts {
            buffers: self.buffers - other.buffers,
            bytes: self.bytes - other.bytes,
            host_bytes: self.host_bytes - other.host_bytes,
        }
    }
}

/// The accounts of a registry.
pub(super) struct Accounts {
    limits: Limits,
    held: Mutex<Held>,
}

#[derive(Default)]
struct Held {
    all: Amounts,
    users: FxHashMap<u32, Amounts>,
    processes: FxHashMap<Identity, Amounts>,
}

/// An amount that is held by a user's process. Dropping it gives it back.
pub(super) struct Charge {
    accounts: Arc<Accounts>,
    user: u32,
    process: Identity,
    amounts: Amounts,
}

impl Accounts {
    pub fn new(limits: Limits) -> Arc<Accounts> {
        Arc::new(Accounts { limits, held: Mutex::default() })
    }

    pub fn limits(&self) -> Limits {
        self.limits
    }

    /// Charges an amount to a process of a user.
    ///
    /// # Errors
    /// Whose limit stands in the way.
    pub fn charge(self: &Arc<Accounts>, user: u32, process: Identity, amounts: Amounts) -> Result<Charge, Reason> {
        let mut held = self.held.lock();
        let of_process = held.processes.get(&process).copied().unwrap_or_default() + amounts;
        if !of_process.is_within(self.limits.process) {
            return Err(Reason::ProcessLimit);
        }
        let all = held.all + amounts;
        if !all.is_within(self.limits.all) {
            return Err(Reason::TotalLimit);
        }
        let before = held.users.get(&user).copied().unwrap_or_default();
        let (of_user, others) = (before + amounts, held.all - before);
        let each = of_user.each().into_iter().zip(amounts.each()).zip(self.limits.all.each().into_iter().zip(others.each()));
        // A user who has more than the quota by now may still have what costs nothing of it.
        if each.into_iter().any(|((of_user, more), (all, others))| more > 0 && of_user > quota(user, all, others)) {
            return Err(Reason::UserLimit);
        }
        held.all = all;
        held.users.insert(user, of_user);
        held.processes.insert(process, of_process);
        Ok(Charge { accounts: self.clone(), user, process, amounts })
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        let mut held = self.accounts.held.lock();
        held.all = held.all - self.amounts;
        give_back(&mut held.users, self.user, self.amounts);
        give_back(&mut held.processes, self.process, self.amounts);
    }
}

fn give_back<K: Hash + Eq>(held: &mut FxHashMap<K, Amounts>, key: K, amounts: Amounts) {
    let before = held.get(&key).copied().expect("what is given back was charged");
    match before - amounts {
        rest if rest == Amounts::default() => drop(held.remove(&key)),
        rest => drop(held.insert(key, rest)),
    }
}
