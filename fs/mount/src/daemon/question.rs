//! Questions about mounts and devices that may never be answered, put by a process of its own.
//!
//! A thread that waits for a FUSE server, which any user may write, cannot be ended. It holds what
//! its process has open, and the process itself is not gone before it. So a child asks, which has
//! no descriptor but that of its answer.
//!
//! It is forked, and executes nothing: in another mount namespace every program is that namespace's
//! owner's, and a daemon's capabilities end where it executes one.

use std::ffi::CString;
use std::io::{self, PipeReader, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use gpunvme_blockdev::{OpenMode, path_of, split_names};
use gpunvme_programs::claim::{ClaimError, await_release, has_writer};
use gpunvme_programs::members;
use gpunvme_programs::mounts::{self, Mount};
use nix::sys::signal::{SigSet, Signal, kill};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::{ForkResult, Pid, fork, getgrouplist};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::process::{Gid, Uid, geteuid};
use rustix::thread::{
    CapabilitySet, CapabilitySets, set_capabilities, set_thread_groups, set_thread_res_gid, set_thread_res_uid,
};

/// How long a child that has answered, or was killed, may take to end.
const END_LIMIT: Duration = Duration::from_millis(100);
const YES: &[u8] = b"yes";
const NO: &[u8] = b"no";
const MOUNTED: &[u8] = b"mounted";
/// What is behind an answer.
const END: u8 = 0;

/// What becomes of a child that has no answer in time.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Late {
    /// It is killed, so that it keeps no device from others that it gets after all. One that the
    /// kernel has waiting for a server ends with that.
    IsKilled,
    /// It goes on, and has the mount in use that it asks.
    IsLeft,
}

/// What is asked of the devices that a mount has as its source. To be asked by a process of one
/// thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Question {
    /// Whether a program has it for writing.
    HasWriter,
    /// Whether its daemon has let go of it, which is waited for.
    IsReleased,
    /// Whether its volume was left with nothing in its journal.
    IsClean,
}

/// What a mount's daemon, its device, or the volume turned out to be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Found {
    /// As was asked.
    Yes,
    /// Not so.
    No,
    /// It is mounted again.
    Mounted,
    /// It cannot be told, for this reason.
    Unknown(String),
}

impl Question {
    /// The answer; `None` where there is none within `limit`.
    ///
    /// A user may have given any source to a mount. So of another user's mount it is asked with no
    /// more rights than that user has, and not of a controller, which opening takes away.
    pub fn ask(self, of: &Mount, limit: Duration) -> Option<Found> {
        let device = of.source.to_string_lossy();
        let user = of.user.filter(|user| *user != geteuid().as_raw());
        if user.is_some() && split_names(&device).into_iter().any(|name| path_of(name).is_none()) {
            return Some(Found::Unknown(format!("{device} is opened for its own user alone")));
        }
        found(apart(limit, Late::IsKilled, |answer| {
            let rights = user.map_or(Ok(()), |user| take_rights(user, of.group.unwrap_or(user)));
            let found = match rights {
                Ok(()) => self.answer(&device),
                Err(errno) => Found::Unknown(format!("{device}: the rights of its user cannot be had: {errno}")),
            };
            answer(&found.bytes());
        }))
    }

    fn answer(self, device: &str) -> Found {
        let yes = |is: bool| if is { Found::Yes } else { Found::No };
        match self {
            Question::HasWriter => {
                has_writer(device).map_or_else(|| Found::Unknown(format!("{device} cannot be looked at")), yes)
            }
            Question::IsReleased => match await_release(device) {
                Ok(()) => Found::Yes,
                // It went on from what there was.
                Err(ClaimError::Mounted(_)) => Found::Mounted,
                Err(ClaimError::Held(_)) => Found::No,
                Err(error) => Found::Unknown(format!("{device}: {error}")),
            },
            Question::IsClean => {
                let opened = members::open(device, &[], OpenMode::ReadOnly).map_err(|error| format!("{device}: {error}"));
                let is_clean = opened.and_then(|device| gpunvme_engine::is_clean(&device).map_err(|error| error.to_string()));
                is_clean.map_or_else(Found::Unknown, yes)
            }
        }
    }
}

impl Found {
    fn bytes(&self) -> Vec<u8> {
        match self {
            Found::Yes => YES.to_vec(),
            Found::No => NO.to_vec(),
            Found::Mounted => MOUNTED.to_vec(),
            Found::Unknown(why) => [b" ", why.as_bytes()].concat(),
        }
    }

    fn parse(bytes: &[u8]) -> Found {
        match bytes {
            YES => Found::Yes,
            NO => Found::No,
            MOUNTED => Found::Mounted,
            // What a user named is in it: nothing of that steers a terminal.
            _ => {
                let why = String::from_utf8_lossy(bytes);
                Found::Unknown(why.trim_start().replace(char::is_control, " "))
            }
        }
    }
}

/// Whether the daemon of a mount has gone without unmounting it; `None` where it does not answer
/// within `limit`, as one that was stopped. While that one does not, its mount is in use: umount(8)
/// refuses, and `umount -l` is not the one that waits for its end.
pub fn is_dead(mount: &Mount, limit: Duration) -> Option<Found> {
    let dir = CString::new(mount.dir.as_os_str().as_bytes()).ok()?;
    // By system calls alone: this process may have further threads.
    found(apart(limit, Late::IsLeft, |answer| answer(if mounts::is_dead(&*dir) { YES } else { NO })))
}

fn found(answer: io::Result<Option<Vec<u8>>>) -> Option<Found> {
    match answer {
        Ok(answer) => answer.map(|bytes| Found::parse(&bytes)),
        Err(error) => Some(Found::Unknown(format!("no process can be had that would ask: {error}"))),
    }
}

/// Gives this process the rights of a user, with the groups that the system says, and no other, for
/// good.
fn take_rights(user: u32, group: u32) -> rustix::io::Result<()> {
    let known = nix::unistd::User::from_uid(user.into()).ok().flatten();
    let name = known.and_then(|user| CString::new(user.name).ok());
    let groups = name.and_then(|name| getgrouplist(&name, group.into()).ok()).unwrap_or_default();
    let groups: Vec<Gid> = groups.into_iter().map(|group| Gid::from_raw(group.as_raw())).collect();
    let (user, group) = (Uid::from_raw(user), Gid::from_raw(group));
    set_thread_groups(&groups)?;
    set_thread_res_gid(group, group, group)?;
    set_thread_res_uid(user, user, user)?;
    // The kernel has done so already, unless a container told it not to.
    let none = CapabilitySet::empty();
    set_capabilities(None, CapabilitySets { effective: none, permitted: none, inheritable: none })
}

/// What `ask` passes to the function that it is given, in a child; `None` where there is nothing
/// within `limit`, and `late` says what follows. Where this process has several threads, `ask`
/// makes nothing but system calls.
///
/// # Errors
/// The system has no pipe or no process to give.
#[allow(unsafe_code)]
fn apart(limit: Duration, late: Late, ask: impl FnOnce(&dyn Fn(&[u8]))) -> io::Result<Option<Vec<u8>>> {
    let (reader, writer) = io::pipe()?;
    // SAFETY: the child makes system calls alone until `ask`, which is as this function demands of
    // it: so nothing is used that another thread may have left in the middle of something.
    match unsafe { fork() }? {
        ForkResult::Parent { child } => {
            drop(writer);
            let answer = read_answer(reader, limit);
            let is_killed = answer.is_none() && late == Late::IsKilled && kill(child, Signal::SIGKILL).is_ok();
            reap(child, if answer.is_some() || is_killed { END_LIMIT } else { Duration::ZERO });
            Ok(answer)
        }
        ForkResult::Child => {
            // A daemon has signals blocked that its own thread takes.
            let _ = SigSet::empty().thread_set_mask();
            // What it holds could not be had by others for as long as it waits: files, locks, the
            // pipe behind standard output, the working directory.
            let has_answer = rustix::stdio::dup2_stdin(&writer).is_ok() && rustix::process::chdir("/").is_ok();
            // So that a panic's message goes into nothing that is opened from here on.
            let null = rustix::fs::open(c"/dev/null", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty());
            let is_put =
                |null: &OwnedFd| rustix::stdio::dup2_stdout(null).and_then(|()| rustix::stdio::dup2_stderr(null)).is_ok();
            let first = if null.is_ok_and(|null| is_put(&null)) { 3 } else { 1 };
            // SAFETY: what this process has open is not used again but by numbers 0 to 2.
            unsafe { libc::close_range(first, libc::c_uint::MAX, 0) };
            let answer = |bytes: &[u8]| {
                // SAFETY: it is the pipe.
                let pipe = unsafe { std::os::fd::BorrowedFd::borrow_raw(0) };
                // The process that asked may have gone.
                let _ = rustix::io::write(pipe, bytes).and_then(|_| rustix::io::write(pipe, &[END]));
            };
            if has_answer {
                let _ = catch_unwind(AssertUnwindSafe(|| ask(&answer)));
            }
            // SAFETY: it ends this process, of which nothing else is left to do.
            unsafe { libc::_exit(0) }
        }
    }
}

/// Takes note of a child's end, if that comes within `limit`: not every machine or container has
/// somebody who does it later.
fn reap(child: Pid, limit: Duration) {
    let until = Instant::now() + limit;
    while matches!(waitpid(child, Some(WaitPidFlag::WNOHANG)), Ok(WaitStatus::StillAlive)) && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// What comes before [`END`], in time.
fn read_answer(mut reader: PipeReader, limit: Duration) -> Option<Vec<u8>> {
    let (until, mut answer) = (Instant::now() + limit, Vec::new());
    loop {
        let left = Timespec::try_from(until.saturating_duration_since(Instant::now())).ok()?;
        match poll(&mut [PollFd::from_borrowed_fd(reader.as_fd(), PollFlags::IN)], Some(&left)) {
            // A signal came.
            Err(Errno::INTR) => continue,
            Ok(0) | Err(_) => return None,
            Ok(_) => {}
        }
        let mut bytes = [0; 4096];
        let len = reader.read(&mut bytes).ok().filter(|len| *len > 0)?;
        answer.extend_from_slice(&bytes[..len]);
        if answer.last() == Some(&END) {
            answer.pop();
            return Some(answer);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_arrive_as_they_were_given() {
        for found in [Found::Yes, Found::No, Found::Mounted, Found::Unknown("it is no device".to_owned())] {
            assert_eq!(Found::parse(&found.bytes()), found);
        }
    }

    #[test]
    fn a_child_answers_or_is_killed() {
        assert_eq!(apart(Duration::from_secs(60), Late::IsKilled, |answer| answer(b"7")).unwrap(), Some(b"7".to_vec()));
        assert_eq!(apart(Duration::from_secs(60), Late::IsKilled, |_| ()).unwrap(), None);
        let begun = Instant::now();
        let (alive, its_end) = io::pipe().unwrap();
        let silent = apart(Duration::from_millis(50), Late::IsKilled, |_| {
            // The pipe has an end in this process as long as that lives.
            let _kept = rustix::stdio::dup2_stdout(&its_end);
            let _ = rustix::thread::nanosleep(&Timespec { tv_sec: 20, tv_nsec: 0 });
        });
        assert_eq!(silent.unwrap(), None);
        drop(its_end);
        assert_eq!((&alive).read(&mut [0; 1]).unwrap(), 0, "the child is gone");
        assert!(begun.elapsed() < Duration::from_secs(10));
    }
}
