//! Signalling an eventfd that belongs to somebody else. `write(2)` on it can wait for ever: its owner fills the counter and clears `O_NONBLOCK`, and a thread
//! that others depend on hangs. The kernel's own signal never waits, and an io_uring gives it for each completion (`IORING_REGISTER_EVENTFD`): so
//! each ring has a tiny one, on which a no-operation is completed whenever its owner is to be woken.

use io_uring::{IoUring, opcode};
use parking_lot::Mutex;
use std::os::fd::{AsRawFd, OwnedFd};

/// An eventfd to signal.
pub(super) struct Signal(Mutex<IoUring>);

impl Signal {
    /// # Errors
    /// `EINVAL` where the descriptor is no eventfd (fs/eventfd.c, `eventfd_ctx_fdget`), and those of a new io_uring.
    pub fn new(eventfd: OwnedFd) -> std::io::Result<Signal> {
        let ring = IoUring::new(2)?;
        // The kernel holds the eventfd from here on; the descriptor may go.
        ring.submitter().register_eventfd(eventfd.as_raw_fd())?;
        Ok(Signal(Mutex::new(ring)))
    }

    /// Signals. Never waits.
    pub fn send(&self) {
        let mut ring = self.0.lock();
        let _ = ring.completion().count(); // of earlier signals
        // SAFETY: a no-operation refers to no memory.
        let pushed = unsafe { ring.submission().push(&opcode::Nop::new().build()) };
        if pushed.is_err() || ring.submit().is_err() {
            tracing::warn!("an application could not be woken; it will see its completions when it looks");
        }
    }
}
