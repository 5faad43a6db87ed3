//! The FUSE front end: the kernel's requests become operations of a [`Filesystem`], and their ends become answers.
//!
//! - [`Session`] mounts, serves and ends.
//! - `fuse` is the adapter to the fuser library and the only module that knows its requests and replies. Another transport
//!   would stand beside it.
//! - `names`, `xattr` and `files` are the operations that it calls, `ioctl` and `rings` those of the direct path. Each takes a `done` that gets the
//!   result, on whatever thread it comes.
//! - `readers` says how many loops wait for requests, `nodes` and `cached` know what the kernel knows, `workers` are the threads that may wait, `housekeeping` is what nobody asks for,
//!   `room` and `plans` bound memory, `turns` are taken by what has to be fair, `mount_state` knows what the kernel does not say, `parts` puts what belongs together into its order.
//!
//! A loop of the transport never waits for a device. It tries an operation on what is in memory, which is almost always
//! enough; an operation that stalls goes to a thread that may wait and is answered from there.

use std::ops::Range;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

use rustix::thread::CapabilitySet;

use gpunvme_engine::data::{Filesystem, system_time};
use gpunvme_engine::error::{Attempt, Fail, FsError};
use gpunvme_engine::volume::Context;

mod attr;
mod cached;
mod files;
mod fuse;
mod handles;
mod housekeeping;
mod ioctl;
mod lengths;
mod messages;
mod mount_state;
mod names;
mod nodes;
mod parts;
mod plans;
mod readers;
mod rings;
mod room;
mod session;
mod sockets;
mod transfers;
mod turns;
mod workers;
mod xattr;

pub use rings::serving_threads;
pub use session::{Session, Settings};
pub use workers::Workers;

use ioctl::Direct;
use lengths::Lengths;
use mount_state::MountState;
use nodes::Nodes;
use parts::Parts;
use plans::Plans;
use room::Room;

/// Threads for operations that wait. Each may hold a device queue's worth of requests; more threads would only wait longer.
const GENERAL_THREADS: usize = 64;
/// Bytes of requests that wait or are under way: as much as the kernel has under way by itself at the most (`fuse.rs`, MAX_BACKGROUND).
const ROOM: usize = 256 << 20;
/// Of these, bytes of parts of appends that wait for something of which nobody knows whether it comes. Beyond them they wait for less long: the rest is for others.
const PARKED: usize = ROOM / 4;
/// Threads that work for long direct transfers. They wait for nothing, and fill memory as fast as it is.
const TRANSFER_THREADS: usize = 2;
/// Threads that wait for the kernel.
const INVALIDATION_THREADS: usize = 16;

/// What the kernel keeps of files and may be told to let go of.
trait KernelCache: Send + Sync {
    /// Has the kernel write back what is dirty of a range of a file, and forget the range and the file's attributes. Waits
    /// for both; must not be called where the kernel waits for an answer. Returns whether the kernel took it.
    fn invalidate(&self, ino: u64, range: Range<u64>) -> bool;

    /// Tells the kernel what a file holds at `offset`, and so that it is at least that long. Waits as [`KernelCache::invalidate`].
    fn store(&self, ino: u64, offset: u64, data: &[u8]);

    /// Has the kernel forget the attributes of a file. Does not wait. Returns whether the kernel took it.
    fn invalidate_attributes(&self, ino: u64) -> bool;
}

/// What the operations of one mount share.
struct Front {
    fs: Arc<Filesystem>,
    nodes: Nodes,
    lengths: Lengths,
    room: Arc<Room>,
    parts: Parts,
    general: Arc<Workers>,
    invalidations: Arc<Workers>,
    transfers: Arc<Workers>,
    plans: Arc<Plans>,
    direct: Direct,
    mount_state: Arc<MountState>,
    /// Set when the mount is there.
    kernel: OnceLock<Box<dyn KernelCache>>,
}

impl Front {
    /// Tries an operation here, and where it has to wait goes on with it on a thread that may. `done` is lent the front end: to count one
    /// more holder of what all threads hold takes as long as some operations.
    fn attempt<T>(
        self: &Arc<Self>,
        mut attempt: impl FnMut(&Arc<Filesystem>) -> Attempt<T> + Send + 'static,
        done: impl FnOnce(&Arc<Self>, Result<T, FsError>) + Send + 'static,
    ) {
        self.attempt_for((), move |fs, ()| attempt(fs), |front, (), result| done(front, result));
    }

    /// As [`Front::attempt`], for something that the operation and `done` both need.
    fn attempt_for<S: Send + 'static, T>(
        self: &Arc<Self>,
        subject: S,
        mut attempt: impl FnMut(&Arc<Filesystem>, &S) -> Attempt<T> + Send + 'static,
        done: impl FnOnce(&Arc<Self>, S, Result<T, FsError>) + Send + 'static,
    ) {
        match attempt(&self.fs, &subject) {
            Ok(result) => done(self, subject, Ok(result)),
            Err(Fail::Error(error)) => done(self, subject, Err(error)),
            Err(Fail::Stall(_)) => {
                let front = self.clone();
                self.general.run(move || {
                    let result = front.fs.wait(|| attempt(&front.fs, &subject));
                    done(&front, subject, result);
                });
            }
        }
    }

    /// Runs an operation on a thread that may wait.
    fn wait<T>(
        self: &Arc<Self>,
        operation: impl FnOnce(&Arc<Filesystem>) -> Result<T, FsError> + Send + 'static,
        done: impl FnOnce(Result<T, FsError>) + Send + 'static,
    ) {
        let fs = self.fs.clone();
        self.general.run(move || done(operation(&fs)));
    }

    /// Runs `then` when the kernel holds nothing of these ranges that the filesystem does not have. It does not run on a
    /// thread that the kernel waits for where the kernel has to be asked.
    fn written_back(
        self: &Arc<Self>,
        ino: u64,
        ranges: impl Iterator<Item = Range<u64>> + Clone,
        then: impl FnOnce() + Send + 'static,
    ) {
        if !self.fs.is_mappable(ino) || !self.nodes.may_have(ino, ranges.clone()) {
            return then();
        }
        let (front, ranges): (_, Vec<Range<u64>>) = (self.clone(), ranges.collect());
        self.invalidations.run(move || {
            front.invalidate(ino, ranges, || None);
            front.general.run(then);
        });
    }

    /// Has the kernel write back and forget what it has of these ranges of a file, and the file's attributes. `last`: before that,
    /// tells it how long the file is, by its last byte, which lies in one of the ranges; what is stored for it is then forgotten,
    /// and only the length stays.
    fn invalidate(&self, ino: u64, ranges: Vec<Range<u64>>, last: impl FnOnce() -> Option<(u64, u8)>) {
        let Some(kernel) = self.kernel.get() else { return };
        let telling = self.lengths.tell(ino);
        let last = last();
        let (number, ranges) = self.nodes.begin_invalidation(ino, ranges, last.map(|(offset, _)| offset..offset + 1));
        if let Some((offset, byte)) = last {
            kernel.store(ino, offset, &[byte]);
        }
        for answer in self.lengths.told(telling) {
            self.general.run(answer);
        }
        if ranges.is_empty() {
            kernel.invalidate_attributes(ino);
        }
        let refused = ranges.into_iter().filter(|range| !kernel.invalidate(ino, range.clone())).count();
        self.nodes.end_invalidation(ino, number, refused == 0);
    }

    /// Removes an inode that is an orphan nobody has.
    fn remove(self: &Arc<Self>, ino: u64) {
        match self.fs.reap_step(ino) {
            Ok(false) => self.removed(ino, Ok(())),
            Err(Fail::Error(error)) => self.removed(ino, Err(error)),
            Ok(true) | Err(Fail::Stall(_)) => {
                let front = self.clone();
                self.general.run(move || front.remove_waiting(ino));
            }
        }
    }

    /// As [`Front::remove`], on a thread that may wait.
    fn remove_waiting(&self, ino: u64) {
        let remove = || -> Result<(), FsError> {
            while self.fs.wait(|| self.fs.reap_step(ino))? {}
            Ok(())
        };
        self.removed(ino, remove());
    }

    fn removed(&self, ino: u64, result: Result<(), FsError>) {
        if let Err(error) = result {
            messages::not_removed(ino, &error);
        }
        self.nodes.removed(ino);
    }
}

/// Who asks, and when.
#[derive(Debug, Clone, Copy)]
struct Caller {
    context: Context,
    /// The thread that asks, as this process can see it; 0 if it cannot.
    thread: u32,
}

impl Caller {
    /// This thread of this user and group, now.
    fn now(uid: u32, gid: u32, thread: u32) -> Caller {
        Caller { context: Context { uid, gid, now: system_time() }, thread }
    }

    /// Whether the caller is in a group, or is root, who may do what members may. Requests name one group; the others are asked
    /// of `/proc`, so this is for what is rare.
    fn is_in_group(&self, gid: u32) -> bool {
        let Context { uid, gid: own, .. } = self.context;
        let has_group = |groups: String| groups.split_whitespace().any(|group| group.parse() == Ok(gid));
        uid == 0 || own == gid || status_of(self.thread, "Groups:").is_some_and(has_group)
    }

    /// Whether the caller has a capability, in this process's user namespace. Requests do not say; `/proc` is asked, so this is for what is rare. Root
    /// that cannot be asked has it.
    fn has(&self, capability: CapabilitySet) -> bool {
        let bits = |set: String| u64::from_str_radix(set.trim(), 16).ok();
        let effective = status_of(self.thread, "CapEff:").and_then(bits).map(CapabilitySet::from_bits_retain);
        match (effective, user_namespace(self.thread), user_namespace(std::process::id())) {
            (Some(effective), Some(theirs), Some(own)) => theirs == own && effective.contains(capability),
            _ => self.context.uid == 0,
        }
    }
}

/// The user namespace of a thread; none if it is not there to ask, or not this process's to ask.
fn user_namespace(thread: u32) -> Option<PathBuf> {
    std::fs::read_link(format!("/proc/{thread}/ns/user")).ok()
}

/// A field of `/proc/THREAD/status` (proc_pid_status(5)); none if the thread is not there to ask.
fn status_of(thread: u32, field: &str) -> Option<String> {
    let status = std::fs::read_to_string(format!("/proc/{thread}/status")).ok()?;
    status.lines().find_map(|line| line.strip_prefix(field)).map(str::to_owned)
}
