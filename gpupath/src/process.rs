//! Identifies the process that calls, from the thread id in a FUSE request or the credentials of a
//! socket, so that it cannot be mistaken for another.
//!
//! It guards ownership of buffers against process ids being used again. While a thread waits for
//! the answer to its FUSE request it cannot be reaped, so its id names this thread and no other
//! until the daemon answers; everything here that starts from an id happens before that. What
//! outlives the request holds a pidfd and a directory of `/proc`, which refer to the process
//! itself.

use crate::quota::ROOT;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fs::{AtFlags, Mode, OFlags};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags};
use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// The identity of a process among all others, dead ones included: its id, when it began, in ticks
/// of the clock since boot, and from Linux 6.9 on the number that the kernel gives each process but
/// once (the inode of its pidfds).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Identity {
    id: u32,
    started: u64,
    inode: u64,
}

/// A process, held so that its id cannot deceive.
#[derive(Debug)]
pub(crate) struct Process {
    /// Its id (that of its thread group) in this process's pid namespace.
    pub id: u32,
    identity: Identity,
    /// Readable once the whole process is dead.
    pidfd: OwnedFd,
    /// `/proc/ID/task`: has an entry for each thread, and none once the process is dead.
    threads: OwnedFd,
}

impl Process {
    /// The process that a live thread belongs to.
    ///
    /// # Errors
    /// `ESRCH` where the id is 0 (the caller is in a pid namespace that is not visible here) or
    /// names nothing.
    pub fn of_thread(thread: u32) -> Result<Process, Errno> {
        let status = std::fs::read_to_string(format!("/proc/{thread}/status")).map_err(|_| Errno::SRCH)?;
        let id = status
            .lines()
            .find_map(|line| line.strip_prefix("Tgid:"))
            .and_then(|id| id.trim().parse().ok())
            .ok_or(Errno::SRCH)?;
        Process::open(id)
    }

    /// The process with this id, which must be known to be alive and not yet reaped, or is taken
    /// for whichever has the id now.
    pub fn open(id: u32) -> Result<Process, Errno> {
        let pid = i32::try_from(id).ok().and_then(Pid::from_raw).ok_or(Errno::SRCH)?;
        Process::with_pidfd(id, rustix::process::pidfd_open(pid, PidfdFlags::empty())?)
    }

    /// The process of a pidfd, whose id this is or was.
    pub fn with_pidfd(id: u32, pidfd: OwnedFd) -> Result<Process, Errno> {
        let directory = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let threads = rustix::fs::open(format!("/proc/{id}/task"), directory, Mode::empty())?;
        let (started, inode) = (started(id).ok_or(Errno::SRCH)?, rustix::fs::fstat(&pidfd)?.st_ino);
        let process = Process { id, identity: Identity { id, started, inode }, pidfd, threads };
        // Alive now, so the id was its own when the directory was opened.
        if process.is_alive() { Ok(process) } else { Err(Errno::SRCH) }
    }

    /// Its identity among all processes.
    pub fn identity(&self) -> Identity {
        self.identity
    }

    /// The process as it would be if it were another one with the same id, that began then.
    #[cfg(test)]
    pub fn another(mut self, started: u64) -> Process {
        self.identity.started = started;
        self
    }

    /// Whether any of its threads is alive.
    pub fn is_alive(&self) -> bool {
        let mut polled = [PollFd::new(&self.pidfd, PollFlags::IN)];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        matches!(rustix::event::poll(&mut polled, Some(&now)), Ok(0))
    }

    /// Whether a live thread belongs to it. One system call: it is on the way of every transfer.
    pub fn has_thread(&self, thread: u32) -> bool {
        rustix::fs::statat(&self.threads, thread.to_string(), AtFlags::SYMLINK_NOFOLLOW).is_ok()
    }

    /// Whether it is root's now: of the user namespace that this process is in.
    pub fn is_root(&self) -> bool {
        let path = format!("{}/status", self.id);
        let status = rustix::fs::openat(&self.threads, path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).map(File::from);
        // Real, effective, saved and filesystem user.
        let text = status.ok().and_then(|file| std::io::read_to_string(file).ok()).unwrap_or_default();
        text.lines().find_map(|line| line.strip_prefix("Uid:")).and_then(|ids| ids.split_whitespace().nth(1)) == Some("0")
    }

    /// A copy of one of its descriptors.
    ///
    /// # Errors
    /// `EBADF` where it has no such descriptor; `EPERM` where this process may not trace it
    /// (another user, Yama, a user namespace).
    pub fn take_fd(&self, number: i32) -> Result<OwnedFd, Errno> {
        rustix::process::pidfd_getfd(&self.pidfd, number, PidfdGetfdFlags::empty())
    }
}

/// When the process with this id began: the 22nd field, counted behind the name, which may hold
/// anything (proc_pid_stat(5)).
fn started(id: u32) -> Option<u64> {
    let stat = std::fs::read(format!("/proc/{id}/stat")).ok()?;
    let behind_name = stat.iter().rposition(|&byte| byte == b')')? + 1;
    str::from_utf8(&stat[behind_name..]).ok()?.split_whitespace().nth(19)?.parse().ok()
}

/// A process that asks for something, and the user in whose name: the one of its request, or of
/// the moment when it connected.
#[derive(Debug)]
pub(crate) struct Client {
    pub process: Process,
    pub user: u32,
}

impl Client {
    /// Whether it is root's: it was when it asked, and it is one of root's processes. Neither a
    /// connection that another program inherited nor a program that has become root since makes it
    /// so.
    pub fn is_root(&self) -> bool {
        self.user == ROOT && self.process.is_root()
    }
}

impl AsFd for Process {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }
}
