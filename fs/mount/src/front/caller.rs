//! The caller of an operation.

use std::path::PathBuf;

use gpunvme_engine::data::{Asker, system_time};
use gpunvme_engine::volume::Context;
use rustix::thread::CapabilitySet;

use super::resources::turns::Owner;

/// The caller of an operation, and the time of its request.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Caller {
    /// User, group and time of the request.
    pub(crate) context: Context,
    /// The thread that asks, as this process can see it; 0 if it cannot.
    pub(crate) thread: u32,
}

impl Caller {
    /// This thread of this user and group, now.
    pub(crate) fn now(uid: u32, gid: u32, thread: u32) -> Caller {
        Caller { context: Context { uid, gid, now: system_time() }, thread }
    }

    /// For whom tasks of this request are done. Requests name a thread, not its process.
    pub(crate) fn owner(&self) -> Owner {
        Owner { user: self.context.uid, process: self.thread }
    }

    /// Whether the caller is a member of a group, or is root, which may do what members may. A
    /// request names one group; the others are looked up in `/proc`, so this is for rare cases.
    pub(crate) fn is_in_group(&self, gid: u32) -> bool {
        let Context { uid, gid: own, .. } = self.context;
        let has_group = |groups: String| groups.split_whitespace().any(|group| group.parse() == Ok(gid));
        uid == 0 || own == gid || status_of(self.thread, "Groups:").is_some_and(has_group)
    }

    /// Whether the caller administers the mount: may do what mounting takes, or is the user, not
    /// root, whose daemon this is. Root of a container that this process does not see does not.
    pub(crate) fn administers(&self) -> bool {
        let own = rustix::process::geteuid().as_raw();
        own != 0 && self.context.uid == own || self.thread != 0 && self.has(CapabilitySet::SYS_ADMIN)
    }

    /// Whether the caller has a capability, in this process's user namespace. Requests do not say;
    /// `/proc` is asked, so this is for what is rare. Root that cannot be asked has it.
    pub(crate) fn has(&self, capability: CapabilitySet) -> bool {
        let bits = |set: String| u64::from_str_radix(set.trim(), 16).ok();
        let effective = status_of(self.thread, "CapEff:").and_then(bits).map(CapabilitySet::from_bits_retain);
        match (effective, user_namespace(self.thread), user_namespace(std::process::id())) {
            (Some(effective), Some(theirs), Some(own)) => theirs == own && effective.contains(capability),
            _ => self.context.uid == 0,
        }
    }
}

/// Thread of the kernel (`include/linux/sched.h`, `PF_KTHREAD`).
const KERNEL_THREAD: u64 = 0x0020_0000;
/// Bits of an [`Asker`]'s number for the time when the process began: 1,300 years of them.
const TIME_BITS: u32 = 42;

/// The process of a thread, as one that asks whether data was lost. `/proc` is asked several times,
/// so this is for when data was lost.
pub(crate) fn asker(thread: u32) -> Asker {
    process(thread).unwrap_or(Asker::Unknown)
}

fn process(thread: u32) -> Option<Asker> {
    let id: u64 = status_of(thread, "Tgid:")?.trim().parse().ok()?;
    let stat = std::fs::read(format!("/proc/{id}/stat")).ok()?;
    // The name may hold anything (proc_pid_stat(5)); behind it are the fields from the third on.
    let behind_name = stat.iter().rposition(|&byte| byte == b')')? + 1;
    let field = |number: usize| str::from_utf8(&stat[behind_name..]).ok()?.split_whitespace().nth(number - 3)?.parse().ok();
    let (flags, began): (u64, u64) = (field(9)?, field(22)?);
    let uptime: f64 = std::fs::read_to_string("/proc/uptime").ok()?.split_whitespace().next()?.parse().ok()?;
    // It has two digits behind the point, of which a product may fall a little short.
    let now = (uptime * rustix::param::clock_ticks_per_second() as f64).round() as u64;
    // One of the kernel works for any process.
    (flags & KERNEL_THREAD == 0).then_some(Asker::Process { id: id << TIME_BITS | began, began, now })
}

/// The user namespace of a thread; none if it is not there to ask, or not this process's to ask.
pub(crate) fn user_namespace(thread: u32) -> Option<PathBuf> {
    std::fs::read_link(format!("/proc/{thread}/ns/user")).ok()
}

/// A field of `/proc/THREAD/status` (proc_pid_status(5)); none if the thread is not there to ask.
pub(crate) fn status_of(thread: u32, field: &str) -> Option<String> {
    let status = std::fs::read_to_string(format!("/proc/{thread}/status")).ok()?;
    status.lines().find_map(|line| line.strip_prefix(field)).map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_asks_as_one_whichever_of_its_threads_asks() {
        let here = || asker(rustix::thread::gettid().as_raw_nonzero().get() as u32);
        let (of_this, of_another) = (here(), std::thread::spawn(here).join().unwrap());
        let parts = |asker| match asker {
            Asker::Process { id, began, now } => (id, began, now),
            Asker::Unknown => panic!("it is a process"),
        };
        let ((id, began, now), (same, ..)) = (parts(of_this), parts(of_another));
        assert_eq!(id, same);
        assert!(began <= now);
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let (other, later, _) = parts(asker(child.id()));
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(other != id && later >= began && later <= parts(here()).2);
    }

    #[test]
    fn one_that_cannot_be_seen_and_the_kernel_are_unknown() {
        // Number 2 is kthreadd, where it is to be seen.
        let kernel = std::fs::read_to_string("/proc/2/comm").is_ok_and(|name| name.trim() == "kthreadd");
        for thread in [0, u32::MAX].into_iter().chain(kernel.then_some(2)) {
            assert_eq!(asker(thread), Asker::Unknown, "{thread}");
        }
    }

    #[test]
    fn root_of_a_container_that_is_not_seen_administers_nothing() {
        assert!(Caller::now(0, 0, 0).has(CapabilitySet::FSETID), "nobody is asked, and root it is");
        let is_root = rustix::process::geteuid().is_root();
        assert!(!is_root || !Caller::now(0, 0, 0).administers());
    }
}
