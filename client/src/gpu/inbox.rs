//! How application threads hand their requests to the worker.
//!
//! It guards that none is overlooked, and that a worker which is awake costs whoever sends no system call.

use super::lane::Lane;
use super::request::Request;
use parking_lot::Mutex;
use rustix::event::EventfdFlags;
use rustix::io::Errno;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};

/// What application threads tell the worker.
#[derive(Default)]
pub(super) struct Mail {
    /// GPUs that are used for the first time. They come before the requests that use them.
    pub lanes: Vec<(u32, Box<Lane>)>,
    pub requests: Vec<Request>,
    /// It is to end when everything is done.
    pub end: bool,
}

/// How they tell it.
pub(super) struct Inbox {
    mail: Mutex<Mail>,
    watched: Watched,
    /// Readable when the worker was woken.
    pub event: OwnedFd,
}

/// What the worker looks at all the time, in a cache line that is written when there is something to see.
#[derive(Default)]
#[repr(align(128))]
struct Watched {
    /// There is mail.
    mail: AtomicBool,
    asleep: AtomicBool,
}

impl Inbox {
    pub fn new() -> Result<Inbox, Errno> {
        let event = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Inbox { mail: Mutex::default(), watched: Watched::default(), event })
    }

    pub fn send(&self, write: impl FnOnce(&mut Mail)) {
        let Watched { mail, asleep } = &self.watched;
        write(&mut self.mail.lock());
        mail.store(true, Ordering::SeqCst);
        if asleep.load(Ordering::SeqCst) && asleep.swap(false, Ordering::SeqCst) {
            // A counter that is full has been signalled.
            let _ = rustix::io::write(&self.event, &1u64.to_ne_bytes());
        }
    }

    /// Exchanges the mail for what is empty. False if there is none.
    pub fn take(&self, empty: &mut Mail) -> bool {
        let any = self.watched.mail.load(Ordering::Acquire);
        if any {
            // Before the mail itself: what comes later is seen later.
            self.watched.mail.store(false, Ordering::SeqCst);
            std::mem::swap(&mut *self.mail.lock(), empty);
        }
        any
    }

    /// Whether the worker may sleep; whoever sends something from now on wakes it.
    pub fn fall_asleep(&self) -> bool {
        self.watched.asleep.store(true, Ordering::SeqCst);
        !self.watched.mail.load(Ordering::SeqCst)
    }

    /// Says that it need not be woken.
    pub fn wake_up(&self) {
        self.watched.asleep.store(false, Ordering::SeqCst);
    }
}
