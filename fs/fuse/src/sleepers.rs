//! Loops that sleep in read(2) for the kernel's next request, and how they are roused.
//!
//! The kernel wakes a sleeping loop for each request, also for one that a loop which looks has
//! taken before: in vain, and at the client's expense. A loop that was woken in vain goes on
//! sleeping inside of the call. So it is roused by a signal, once, when others look.
#![allow(unsafe_code)]

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Once};

use parking_lot::Mutex;
use rustix::fs::OFlags;
use rustix::thread::gettid;

/// The loops of one mount.
#[derive(Default)]
pub(crate) struct Sleepers {
    asleep: AtomicUsize,
    loops: Mutex<Vec<Arc<Shared>>>,
}

/// What is known of a loop.
struct Shared {
    descriptor: Arc<OwnedFd>,
    thread: rustix::thread::Pid,
    /// Its descriptor waits in read(2), which the loop calls or is about to call.
    sleeps: AtomicBool,
}

/// A loop, on its own thread.
pub(crate) struct Sleeper {
    all: Arc<Sleepers>,
    this: Arc<Shared>,
}

impl Sleepers {
    /// Makes one of the calling thread, with an open `/dev/fuse` that no other thread reads.
    pub fn register(self: &Arc<Self>, descriptor: &Arc<OwnedFd>) -> Sleeper {
        static HANDLER: Once = Once::new();
        HANDLER.call_once(handle_signal);
        let this = Arc::new(Shared { descriptor: descriptor.clone(), thread: gettid(), sleeps: AtomicBool::new(true) });
        self.asleep.fetch_add(1, Ordering::SeqCst);
        self.loops.lock().push(this.clone());
        Sleeper { all: self.clone(), this }
    }

    /// Rouses all loops that sleep: their read(2) ends with `EAGAIN`.
    pub fn rouse(&self) {
        if self.asleep.load(Ordering::Relaxed) == 0 {
            return;
        }
        for sleeper in &*self.loops.lock() {
            if sleeper.sleeps.swap(false, Ordering::SeqCst) {
                self.asleep.fetch_sub(1, Ordering::SeqCst);
                set_waiting(sleeper.descriptor.as_fd(), false);
                signal(sleeper.thread);
            }
        }
    }
}

impl Sleeper {
    /// From now on read(2) waits for a request, until the loop is roused.
    pub fn sleep(&self) {
        set_waiting(self.this.descriptor.as_fd(), true);
        self.all.asleep.fetch_add(1, Ordering::SeqCst);
        self.this.sleeps.store(true, Ordering::SeqCst);
    }

    /// From now on read(2) does not wait.
    pub fn wake(&self) {
        if self.this.sleeps.swap(false, Ordering::SeqCst) {
            self.all.asleep.fetch_sub(1, Ordering::SeqCst);
            set_waiting(self.this.descriptor.as_fd(), false);
        }
    }

    /// Whether read(2) waits.
    pub fn sleeps(&self) -> bool {
        self.this.sleeps.load(Ordering::SeqCst)
    }
}

impl Drop for Sleeper {
    fn drop(&mut self) {
        self.all.loops.lock().retain(|other| !Arc::ptr_eq(other, &self.this));
        if self.this.sleeps.swap(false, Ordering::SeqCst) {
            self.all.asleep.fetch_sub(1, Ordering::SeqCst);
        }
    }
}

/// Whether read(2) waits. The kernel looks at it each time that it finds no request
/// (`fuse_dev_do_read`).
fn set_waiting(descriptor: BorrowedFd<'_>, waits: bool) {
    let flags = if waits { OFlags::RDWR } else { OFlags::RDWR | OFlags::NONBLOCK };
    // It fails for no open file of this kind; and a loop that does not wait looks again.
    let _ = rustix::fs::fcntl_setfl(descriptor, flags);
}

/// Has the signal end sleep, and nothing else. Calls that it finds elsewhere are restarted.
fn handle_signal() {
    extern "C" fn nothing(_: libc::c_int) {}
    // SAFETY: a zeroed `sigaction` is one with no flags and an empty mask; the handler does
    // nothing, so it may run anywhere.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = nothing as extern "C" fn(libc::c_int) as libc::sighandler_t;
        action.sa_flags = libc::SA_RESTART;
        // It fails for numbers that are no signal's.
        libc::sigaction(libc::SIGURG, &raw const action, std::ptr::null_mut());
    }
}

fn signal(thread: rustix::thread::Pid) {
    // SAFETY: takes numbers; a thread that has ended meanwhile, or another one with its number, of
    // this process gets a signal that does nothing.
    unsafe {
        libc::syscall(libc::SYS_tgkill, libc::getpid(), thread.as_raw_nonzero().get(), libc::SIGURG);
    }
}
