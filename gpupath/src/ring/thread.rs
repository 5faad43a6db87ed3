//! The handle of a thread that serves rings, for the threads that end transfers of its rings:
//! whether it sleeps, and how it is woken.

use gpunvme_blockdev::Waker;
use std::cell::Cell;
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};

thread_local! {
    /// Which of them this thread is.
    static THIS: Cell<*const ServingThread> = const { Cell::new(ptr::null()) };
}

pub(super) struct ServingThread {
    waker: Waker,
    /// It sleeps, or is about to.
    asleep: AtomicBool,
}

impl ServingThread {
    /// The thread that will call [`ServingThread::begin`], and that `waker` wakes.
    pub fn new(waker: Waker) -> ServingThread {
        ServingThread { waker, asleep: AtomicBool::new(false) }
    }

    /// Makes the calling thread the one that serves.
    pub fn begin(&self) {
        THIS.set(self);
    }

    /// Whether the calling thread is the one that serves.
    pub fn is_this(&self) -> bool {
        ptr::eq(THIS.get(), self)
    }

    /// Says whether it sleeps, or is about to.
    pub fn set_asleep(&self, asleep: bool) {
        self.asleep.store(asleep, Ordering::SeqCst);
    }

    pub fn is_asleep(&self) -> bool {
        self.asleep.load(Ordering::SeqCst)
    }

    /// Wakes the thread to look at its rings.
    pub fn wake(&self) {
        self.waker.wake();
    }
}
