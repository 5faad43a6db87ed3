//! Going to the background: the caller waits until the mount is live or has failed, and the daemon
//! goes on without it.
//!
//! The process forks before it has a second thread, since threads do not survive a fork. The
//! daemon, the child, reports once over a pipe: a byte with the exit code, then the text of the
//! error. A pipe that ends without a report means that the daemon died.

use std::io::{self, PipeReader, PipeWriter, Read, Write};
use std::os::fd::AsFd;

use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::{ForkResult, Pid, fork};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Mode, OFlags};

use super::error::MountError;
use gpunvme_programs::terminal::complain;

/// Which of the two processes this is, after [`split`].
pub enum Side {
    /// The process that the user waits for.
    Caller(Caller),
    /// The process that serves the mount.
    Daemon(Report),
}

/// The caller's end.
pub struct Caller {
    daemon: Pid,
    pipe: PipeReader,
}

/// The daemon's end: whom to tell that the mount is live, or why it is not.
pub enum Report {
    /// The caller waits at the other end.
    ToCaller(PipeWriter),
    /// The program stays in the foreground and prints by itself.
    InForeground,
}

/// Has signals do what the program expects, whatever its caller left: children can be waited for,
/// and a file that may not grow is an error, not the end.
pub fn reset_signals() {
    // SAFETY: neither makes a function of this program a handler.
    #[allow(unsafe_code)]
    unsafe {
        libc::signal(libc::SIGCHLD, libc::SIG_DFL);
        libc::signal(libc::SIGXFSZ, libc::SIG_IGN);
    }
}

/// Closes what the program inherited beyond stdin, stdout and stderr, so that the daemon does not
/// keep another program's pipe, lock or directory for as long as it lives. Called before the
/// program opens anything.
pub fn close_inherited() {
    // SAFETY: nothing in this process owns a descriptor yet, so none is closed under its owner. On
    // a kernel without the call (before 5.9) it fails and nothing is closed, which costs what the
    // comment above says and no more.
    #[allow(unsafe_code)]
    unsafe {
        libc::close_range(3, libc::c_uint::MAX, 0);
    }
}

/// Forks. Must be called while the process has a single thread.
///
/// # Errors
/// If the system has no pipe or process to give.
pub fn split() -> io::Result<Side> {
    let (reader, writer) = io::pipe()?;
    // SAFETY: the process has one thread (the module's rule), so the child's copy of memory is not
    // left in the middle of something that another thread did, and the child may run any code.
    #[allow(unsafe_code)]
    match unsafe { fork() }? {
        ForkResult::Parent { child } => Ok(Side::Caller(Caller { daemon: child, pipe: reader })),
        ForkResult::Child => Ok(Side::Daemon(Report::ToCaller(writer))),
    }
}

/// Does `work` in a process that nobody waits for, and that has nothing of this one's caller. Must
/// be called while the process has a single thread. Where the system has no process to give, it is
/// not done.
pub fn leave_behind(work: impl FnOnce()) {
    // SAFETY: as in [`split`].
    #[allow(unsafe_code)]
    if let Ok(ForkResult::Child) = unsafe { fork() } {
        if let_go().is_ok() {
            work();
        }
        std::process::exit(0);
    }
}

/// Lets go of the terminal, the session and the working directory.
fn let_go() -> io::Result<()> {
    rustix::process::setsid()?;
    rustix::process::chdir("/")?;
    let null = rustix::fs::open("/dev/null", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
    rustix::stdio::dup2_stdin(&null)?;
    rustix::stdio::dup2_stdout(&null)?;
    rustix::stdio::dup2_stderr(&null)?;
    Ok(())
}

impl Caller {
    /// Waits for the daemon's report: the exit code and the text for stderr, 0 and nothing for a
    /// live mount.
    pub fn wait(mut self) -> (u8, String) {
        let mut report = Vec::new();
        match self.pipe.read_to_end(&mut report) {
            Ok(_) if !report.is_empty() => (report[0], String::from_utf8_lossy(&report[1..]).into_owned()),
            _ => {
                let how = match waitpid(self.daemon, None) {
                    Ok(WaitStatus::Signaled(_, signal, _)) => format!(" of {signal}"),
                    Ok(WaitStatus::Exited(_, code)) => format!(" with exit code {code}"),
                    _ => String::new(),
                };
                let error = MountError::Internal(format!("the daemon died{how} before the mount was live"));
                (error.exit_code(), error.to_string())
            }
        }
    }
}

impl Report {
    /// Whether the caller has gone, which means that no mount is wanted any more.
    pub fn is_unwanted(&self) -> bool {
        let Self::ToCaller(pipe) = self else { return false };
        let mut pipe = [PollFd::from_borrowed_fd(pipe.as_fd(), PollFlags::empty())];
        poll(&mut pipe, Some(&Timespec::default())).is_ok() && pipe[0].revents().contains(PollFlags::ERR)
    }

    /// The mount is live: lets go of the terminal, the session and the working directory, and
    /// releases the caller.
    ///
    /// # Errors
    /// If the caller is gone, which means that the mount is no longer wanted.
    pub fn live(self) -> io::Result<()> {
        let Self::ToCaller(mut pipe) = self else { return Ok(()) };
        let_go()?;
        pipe.write_all(&[0])
    }

    /// Reports why there will be no mount. Without a caller the reason goes to stderr, after
    /// `device`.
    pub fn failed(self, device: &str, error: &MountError) {
        match self {
            // A caller that has ended cannot be told.
            Self::ToCaller(mut pipe) => {
                let _ = pipe.write_all(&[&[error.exit_code()], error.to_string().as_bytes()].concat());
            }
            Self::InForeground => complain(format_args!("mount.gpunvme: {device}: {error}")),
        }
    }
}
