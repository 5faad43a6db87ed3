//! A mailbox through which application threads hand their requests to a thread of the library.
//!
//! It guards that no request is overlooked, and that a sender makes no system call while the
//! receiving thread is awake.

use parking_lot::Mutex;
use rustix::event::EventfdFlags;
use rustix::io::Errno;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};

/// What application threads tell a thread, in an `M` that is empty by default.
pub struct Mailbox<M> {
    mail: Mutex<M>,
    watched: Watched,
    /// Readable when the thread was woken.
    pub event: OwnedFd,
}

/// What the thread looks at all the time, in a cache line that is written when there is something
/// to see.
#[derive(Default)]
#[repr(align(128))]
struct Watched {
    /// There is mail.
    mail: AtomicBool,
    asleep: AtomicBool,
}

impl<M: Default> Mailbox<M> {
    pub fn new() -> Result<Mailbox<M>, Errno> {
        let event = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Mailbox { mail: Mutex::default(), watched: Watched::default(), event })
    }

    pub fn send(&self, write: impl FnOnce(&mut M)) {
        let Watched { mail, asleep } = &self.watched;
        write(&mut self.mail.lock());
        mail.store(true, Ordering::SeqCst);
        if asleep.load(Ordering::SeqCst) && asleep.swap(false, Ordering::SeqCst) {
            // A counter that is full has been signalled.
            let _ = rustix::io::write(&self.event, &1u64.to_ne_bytes());
        }
    }

    /// Exchanges the mail for what is empty. False if there is none.
    pub fn take(&self, empty: &mut M) -> bool {
        let any = self.watched.mail.load(Ordering::Acquire);
        if any {
            // Before the mail itself: what comes later is seen later.
            self.watched.mail.store(false, Ordering::SeqCst);
            std::mem::swap(&mut *self.mail.lock(), empty);
        }
        any
    }

    /// Whether the receiving thread may sleep. A sender that sends something from now on wakes it.
    pub fn fall_asleep(&self) -> bool {
        self.watched.asleep.store(true, Ordering::SeqCst);
        !self.watched.mail.load(Ordering::SeqCst)
    }

    /// Says that it need not be woken, and takes the signal, if any.
    pub fn wake_up(&self) {
        let _ = rustix::io::read(&self.event, &mut [0u8; 8]); // nonblocking
        self.watched.asleep.store(false, Ordering::SeqCst);
    }
}
