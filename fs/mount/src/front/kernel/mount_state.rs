//! The mount's read-only state: whether the kernel allows writes to the mount. `mount -o
//! remount,ro` tells a FUSE daemon nothing. The kernel then refuses the writes that come through
//! it; writes by a ring do not.
//!
//! It guards that a ring changes nothing once remount has returned. Before mount(2) returns, the
//! mount table reports a change to each process that polls it (proc_pid_mountinfo(5)); so polling
//! it is enough, and cheap.

use std::fs::File;
use std::io::{self, Read, Seek};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fs::{major, minor};

/// How long the table is believed without a sign of change: a remount in another mount namespace
/// gives none.
const BELIEVED: Duration = Duration::from_secs(1);

/// The kernel's permission to write to the mount.
pub(crate) struct MountState {
    table: Mutex<Table>,
    /// The device number that files on the mount show. None until the mount is there.
    dev: OnceLock<u64>,
    unseen: Mutex<Unseen>,
}

/// Writes that the kernel does not see.
#[derive(Default)]
struct Unseen {
    in_flight: u64,
    /// Tasks to run when none is in flight.
    then: Vec<Box<dyn FnOnce() + Send>>,
}

struct Table {
    file: File,
    read: Option<Instant>,
    is_read_only: bool,
}

impl MountState {
    /// State of a mount that does not exist yet.
    ///
    /// # Errors
    /// If `/proc` is not there to ask.
    pub fn new() -> io::Result<Arc<MountState>> {
        let file = File::open("/proc/self/mountinfo")?;
        let table = Table { file, read: None, is_read_only: false };
        let table = Mutex::new(table);
        Ok(Arc::new(MountState { table, dev: OnceLock::new(), unseen: Mutex::default() }))
    }

    /// Notes that the mount exists, and that files on it show this device number.
    pub fn mounted(&self, dev: u64) {
        let set = self.dev.set(dev);
        assert!(set.is_ok(), "a front end is mounted once");
    }

    /// Whether nothing may be written now: the kernel has the filesystem, or each mount of it in
    /// this process's namespace, read-only.
    pub fn is_read_only(&self) -> bool {
        let Some(dev) = self.dev.get() else { return false };
        let mut table = self.table.lock();
        if table.has_changed() {
            match table.look(*dev) {
                Ok(is_read_only) => (table.is_read_only, table.read) = (is_read_only, Some(Instant::now())),
                Err(error) => tracing::warn!(%error, "cannot look whether the mount is read-only"),
            }
        }
        table.is_read_only
    }

    /// Notes a write that the kernel does not see, until it is dropped. Before
    /// [`MountState::is_read_only`] is asked.
    pub fn unseen_write(self: &Arc<Self>) -> UnseenWrite {
        self.unseen.lock().in_flight += 1;
        UnseenWrite(self.clone())
    }

    /// Runs `then` when no write is in flight that the kernel does not see: here, or where the
    /// last one ends. Of a mount that is read-only none is added.
    pub fn after_unseen_writes(&self, then: impl FnOnce() + Send + 'static) {
        let mut unseen = self.unseen.lock();
        if unseen.in_flight > 0 {
            return unseen.then.push(Box::new(then));
        }
        drop(unseen);
        then();
    }
}

/// A write that the kernel does not see.
pub(crate) struct UnseenWrite(Arc<MountState>);

impl Drop for UnseenWrite {
    fn drop(&mut self) {
        let mut unseen = self.0.unseen.lock();
        unseen.in_flight -= 1;
        if unseen.in_flight == 0 {
            let then = std::mem::take(&mut unseen.then);
            drop(unseen);
            then.into_iter().for_each(|then| then());
        }
    }
}

impl Table {
    fn has_changed(&self) -> bool {
        let mut polled = [PollFd::new(&self.file, PollFlags::PRI)];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        let is_quiet = matches!(rustix::event::poll(&mut polled, Some(&now)), Ok(0));
        !is_quiet || self.read.is_none_or(|read| read.elapsed() > BELIEVED)
    }

    fn look(&mut self, dev: u64) -> io::Result<bool> {
        self.file.rewind()?;
        let mut table = Vec::new();
        self.file.read_to_end(&mut table)?;
        // Mount points need not be text; what is asked for is.
        Ok(is_read_only(&String::from_utf8_lossy(&table), dev))
    }
}

fn is_read_only(table: &str, dev: u64) -> bool {
    let number = format!("{}:{}", major(dev), minor(dev));
    let mounts = table.lines().filter(|line| line.split(' ').nth(2) == Some(&number));
    let has = |options: Option<&str>| options.is_some_and(|options| options.split(',').any(|option| option == "ro"));
    let is = |line: &str| {
        let of_filesystem = line.split_once(" - ").and_then(|(_, rest)| rest.split(' ').nth(2));
        has(line.split(' ').nth(5)) || has(of_filesystem)
    };
    let mut mounts = mounts.map(is).peekable();
    mounts.peek().is_some() && mounts.all(|is_read_only| is_read_only)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_filesystem_is_read_only_where_all_of_its_mounts_are() {
        let line = |dev: &str, mount: &str, filesystem: &str| {
            format!("36 35 {dev} / /mnt {mount},noatime master:1 - fuse.gpunvme /dev/x {filesystem},user_id=0\n")
        };
        let dev = rustix::fs::makedev(0, 77);
        let other = line("0:78", "ro", "ro");
        for (table, expected) in [
            (line("0:77", "rw", "rw"), false),
            (line("0:77", "ro", "ro"), true),
            (line("0:77", "rw", "ro"), true),
            (line("0:77", "ro", "rw") + &line("0:77", "rw", "rw"), false),
            (line("0:77", "ro", "rw") + &line("0:77", "ro", "rw"), true),
            (String::new(), false),
        ] {
            assert_eq!(is_read_only(&(other.clone() + &table), dev), expected, "{table}");
        }
    }
}
