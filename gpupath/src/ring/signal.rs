//! Signalling an eventfd that belongs to an application. `write(2)` on it can wait for ever: its
//! owner fills the counter and clears `O_NONBLOCK`, and a thread that others depend on hangs. The
//! kernel's own signal never waits, and it gives one for each completion of an io_uring
//! (`IORING_REGISTER_EVENTFD`) and, where io_uring is switched off, of the asynchronous I/O that
//! was there before (`IOCB_FLAG_RESFD`, io_submit(2)).

use io_uring::{IoUring, opcode};
use parking_lot::Mutex;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::{Arc, LazyLock};

/// An eventfd to signal.
pub(super) enum Signal {
    /// A tiny ring on which a no-operation is completed for each signal.
    Uring(Box<Mutex<IoUring>>),
    /// A read of nothing is completed for each signal.
    Aio { eventfd: OwnedFd, aio: Arc<Aio> },
}

impl Signal {
    /// For an eventfd.
    ///
    /// # Errors
    /// Where the kernel has neither to give.
    pub fn new(eventfd: OwnedFd) -> io::Result<Signal> {
        match by_uring(&eventfd) {
            // The kernel holds the eventfd from here on; the descriptor may go.
            Ok(ring) => Ok(Signal::Uring(Box::new(Mutex::new(ring)))),
            Err(refused) => Signal::by_aio(eventfd).map_err(|_| refused),
        }
    }

    fn by_aio(eventfd: OwnedFd) -> io::Result<Signal> {
        static AIO: LazyLock<Result<Arc<Aio>, i32>> =
            LazyLock::new(|| Aio::new().map(Arc::new).map_err(|error| error.raw_os_error().unwrap_or(libc::EIO)));
        let aio = AIO.clone().map_err(io::Error::from_raw_os_error)?;
        Ok(Signal::Aio { eventfd, aio })
    }

    /// Signals. Never waits.
    pub fn send(&self) {
        let sent = match self {
            Signal::Uring(ring) => {
                let mut ring = ring.lock();
                let _ = ring.completion().count(); // of earlier signals
                // SAFETY: a no-operation refers to no memory.
                let pushed = unsafe { ring.submission().push(&opcode::Nop::new().build()) };
                pushed.is_ok() && ring.submit().is_ok()
            }
            Signal::Aio { eventfd, aio } => aio.signal(eventfd).is_ok(),
        };
        if !sent {
            tracing::warn!("an application could not be woken; it will see its completions when it looks");
        }
    }
}

fn by_uring(eventfd: &OwnedFd) -> io::Result<IoUring> {
    let ring = IoUring::new(2)?;
    ring.submitter().register_eventfd(eventfd.as_raw_fd())?;
    Ok(ring)
}

/// A context of asynchronous I/O, and a file that has nothing to read. One is enough for all
/// signals.
pub(super) struct Aio {
    context: libc::c_ulong,
    nothing: File,
}

/// Completions that it has room for, and takes off when there is none.
const EVENTS: usize = 128;

/// `struct iocb` (linux/aio_abi.h) on little-endian machines.
#[repr(C)]
#[derive(Default)]
struct Command {
    data: u64,
    key: u32,
    rw_flags: i32,
    opcode: u16,
    priority: i16,
    file: u32,
    memory: u64,
    len: u64,
    offset: i64,
    reserved: u64,
    flags: u32,
    eventfd: u32,
}

/// `IOCB_CMD_PREAD`.
const PREAD: u16 = 0;
/// `IOCB_FLAG_RESFD`.
const SIGNALS: u32 = 1;

impl Aio {
    fn new() -> io::Result<Aio> {
        let nothing = File::open("/dev/null")?;
        let mut context: libc::c_ulong = 0;
        // SAFETY: the kernel writes the context's number where it is told to.
        check(unsafe { libc::syscall(libc::SYS_io_setup, EVENTS as libc::c_ulong, &raw mut context) })?;
        Ok(Aio { context, nothing })
    }

    fn signal(&self, eventfd: &OwnedFd) -> io::Result<()> {
        let mut byte = 0u8;
        let mut command = Command {
            opcode: PREAD,
            file: self.nothing.as_raw_fd() as u32,
            memory: (&raw mut byte) as u64,
            len: 1,
            flags: SIGNALS,
            eventfd: eventfd.as_raw_fd() as u32,
            ..Command::default()
        };
        let mut submit = || {
            let mut list = [&raw mut command];
            // SAFETY: the kernel reads the list and the command before it returns. A read of
            // /dev/null is over by then, so that the byte is not used later.
            check(unsafe { libc::syscall(libc::SYS_io_submit, self.context, 1 as libc::c_long, list.as_mut_ptr()) })
        };
        match submit() {
            Err(error) if error.raw_os_error() == Some(libc::EAGAIN) => {
                self.take_off()?;
                submit().map(drop)
            }
            submitted => submitted.map(drop),
        }
    }

    /// Takes completions of earlier signals off.
    fn take_off(&self) -> io::Result<()> {
        // `struct io_event` is four 64-bit words.
        let mut events = [[0u64; 4]; EVENTS];
        let now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: the kernel writes at most as many events as it is told there is room for.
        let taken = unsafe {
            let (least, most): (libc::c_long, libc::c_long) = (0, EVENTS as libc::c_long);
            libc::syscall(libc::SYS_io_getevents, self.context, least, most, events.as_mut_ptr(), &raw const now)
        };
        check(taken).map(drop)
    }
}

fn check(result: libc::c_long) -> io::Result<libc::c_long> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::EventfdFlags;

    fn both(eventfd: &OwnedFd) -> [Signal; 2] {
        let copy = || eventfd.try_clone().unwrap();
        [Signal::Uring(Box::new(Mutex::new(by_uring(eventfd).unwrap()))), Signal::by_aio(copy()).unwrap()]
    }

    #[test]
    fn each_signal_is_counted() {
        let eventfd = rustix::event::eventfd(0, EventfdFlags::NONBLOCK).unwrap();
        for signal in both(&eventfd) {
            // More than there is room for at once.
            (0..5000).for_each(|_| signal.send());
            let mut count = [0; 8];
            rustix::io::read(&eventfd, &mut count).unwrap();
            assert_eq!(u64::from_ne_bytes(count), 5000);
        }
    }

    /// A write would wait for ever.
    #[test]
    fn a_counter_that_is_full_holds_nobody_up() {
        let eventfd = rustix::event::eventfd(0, EventfdFlags::empty()).unwrap();
        rustix::io::write(&eventfd, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        for signal in both(&eventfd) {
            (0..10).for_each(|_| signal.send());
        }
    }
}
