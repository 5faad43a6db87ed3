//! An eventfd: interrupts and other threads wake a sleeping thread with it.
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec};
use rustix::io::Errno;

/// A counter that can be slept on. A signal is never lost: it stays until [`Event::drain`].
pub(crate) struct Event(OwnedFd);

impl Event {
    pub(crate) fn new() -> Result<Self, Errno> {
        rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map(Self)
    }

    /// Wakes the sleeper, or the next one.
    pub(crate) fn signal(&self) {
        // It can only fail when the counter is full, and then it is signalled already.
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }

    /// Takes all signals.
    pub(crate) fn drain(&self) {
        // Nothing to take is what the caller wants.
        let _ = rustix::io::read(&self.0, &mut [0; 8]);
    }

    /// Sleeps until a signal comes, `None` without end, and takes it. It may return for no reason.
    pub(crate) fn wait(&self, timeout: Option<Duration>) {
        wait_any(&[self.as_fd()], timeout);
        self.drain();
    }
}

impl AsFd for Event {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Sleeps until one of the descriptors can be read. It may return for no reason.
pub(crate) fn wait_any(fds: &[BorrowedFd<'_>], timeout: Option<Duration>) {
    let mut fds: Vec<PollFd<'_>> = fds.iter().map(|fd| PollFd::from_borrowed_fd(*fd, PollFlags::IN)).collect();
    let timeout = timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
    // An interrupted wait is one that returned for no reason.
    let _ = rustix::event::poll(&mut fds, timeout.as_ref());
}

/// Whether a descriptor can be read now.
pub(crate) fn is_signalled(fd: BorrowedFd<'_>) -> bool {
    let mut fds = [PollFd::from_borrowed_fd(fd, PollFlags::IN)];
    rustix::event::poll(&mut fds, Some(&Timespec::default())).is_ok_and(|ready| ready > 0)
}
