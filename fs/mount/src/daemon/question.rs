//! Questions about mounts and devices that may never be answered, put by a process of its own.
//!
//! A thread that waits for a FUSE server, which any user may write, cannot be ended. It holds what
//! its process has open, and the process itself is not gone before it. So a child asks, which has
//! nothing open but its answer, and is left to itself where it gets none.
//!
//! It is forked, and executes nothing: in another mount namespace every program is that namespace's
//! owner's, and a daemon's capabilities end where it executes one.

use std::ffi::{CString, OsStr};
use std::io::{PipeReader, Read};
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use gpunvme_blockdev::OpenMode;
use gpunvme_programs::claim::{ClaimError, await_release, may_have_writer};
use gpunvme_programs::members;
use gpunvme_programs::mounts::{self, Mount};
use nix::sys::wait::waitpid;
use nix::unistd::{ForkResult, fork};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

/// How long the daemon of a mount that lives may take to answer.
const ANSWER_LIMIT: Duration = Duration::from_secs(1);
const YES: &[u8] = b"yes";
const NO: &[u8] = b"no";
const MOUNTED: &[u8] = b"mounted";
/// What is behind an answer.
const END: u8 = 0;

/// What is asked of a device. To be asked by a process of one thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Question {
    /// Whether a program may write to it.
    HasWriter,
    /// Whether its daemon has let go of it, which is waited for.
    IsReleased,
    /// Whether its volume was left with nothing in its journal.
    IsClean,
}

/// What a device's daemon, or its volume, turned out to be.
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
    pub fn ask(self, of: &OsStr, limit: Duration) -> Option<Found> {
        let device = of.to_string_lossy();
        let answer = apart(limit, |answer| {
            let found = self.answer(&device);
            answer(&found.bytes());
        });
        answer.map(|bytes| Found::parse(&bytes))
    }

    fn answer(self, device: &str) -> Found {
        let yes = |is: bool| if is { Found::Yes } else { Found::No };
        match self {
            Question::HasWriter => yes(may_have_writer(device)),
            Question::IsReleased => match await_release(device) {
                Ok(()) => Found::Yes,
                // It went on from what there was.
                Err(ClaimError::Mounted(_)) => Found::Mounted,
                Err(ClaimError::Held) => Found::No,
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
            _ => Found::Unknown(String::from_utf8_lossy(bytes).trim_start().to_owned()),
        }
    }
}

/// Whether the daemon of a mount has gone without unmounting it. One that was stopped has not;
/// while that one does not answer, umount(8) finds its mount in use.
pub fn is_dead(mount: &Mount) -> bool {
    let Ok(dir) = CString::new(mount.dir.as_os_str().as_bytes()) else { return false };
    // By system calls alone: this process may have further threads.
    let answer = apart(ANSWER_LIMIT, |answer| answer(if mounts::is_dead(&*dir) { YES } else { NO }));
    answer.is_some_and(|answer| answer == YES)
}

/// What `ask` passes to the function that it is given, in a child; `None` where there is nothing
/// within `limit`. Where this process has several threads, `ask` makes nothing but system calls.
#[allow(unsafe_code)]
fn apart(limit: Duration, ask: impl FnOnce(&dyn Fn(&[u8]))) -> Option<Vec<u8>> {
    let (reader, writer) = std::io::pipe().ok()?;
    // SAFETY: the child makes system calls alone until `ask`, which is as this function demands of
    // it: so nothing is used that another thread may have left in the middle of something.
    match unsafe { fork() }.ok()? {
        ForkResult::Parent { child } => {
            drop(writer);
            // It has begun the process that asks, and ended.
            let _ = waitpid(child, None);
            read_answer(reader, limit)
        }
        ForkResult::Child => {
            // SAFETY: as above. The second child has no parent that would have to wait for it.
            if matches!(unsafe { fork() }, Ok(ForkResult::Child)) {
                // What it holds could not be had by others for as long as it waits: files, locks,
                // the pipe behind standard output, the working directory.
                let has_answer = rustix::stdio::dup2_stdin(&writer).is_ok() && rustix::process::chdir("/").is_ok();
                // SAFETY: what this process has open is not used again but by number 0.
                unsafe { libc::close_range(1, libc::c_uint::MAX, 0) };
                let answer = |bytes: &[u8]| {
                    // SAFETY: it is the pipe.
                    let pipe = unsafe { std::os::fd::BorrowedFd::borrow_raw(0) };
                    // The process that asked may have gone.
                    let _ = rustix::io::write(pipe, bytes).and_then(|_| rustix::io::write(pipe, &[END]));
                };
                if has_answer {
                    let _ = catch_unwind(AssertUnwindSafe(|| ask(&answer)));
                }
            }
            // SAFETY: it ends this process, of which nothing else is left to do.
            unsafe { libc::_exit(0) }
        }
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
        for found in [Found::Yes, Found::No, Found::Mounted, Found::Unknown("it is\nno device".to_owned())] {
            assert_eq!(Found::parse(&found.bytes()), found);
        }
    }

    #[test]
    fn a_child_answers_or_is_left_to_itself() {
        assert_eq!(apart(Duration::from_secs(60), |answer| answer(b"7")), Some(b"7".to_vec()));
        assert_eq!(apart(Duration::from_secs(60), |_| ()), None);
        let begun = Instant::now();
        let silent = apart(Duration::from_millis(50), |_| {
            let _ = rustix::thread::nanosleep(&Timespec { tv_sec: 5, tv_nsec: 0 });
        });
        assert_eq!(silent, None);
        assert!(begun.elapsed() < Duration::from_secs(4));
    }
}
