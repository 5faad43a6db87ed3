//! Copies from and to memory that may stop answering: that of another device, which goes when that
//! device goes, and that of another process, which that process may truncate.
//!
//! It guards this process against SIGBUS and SIGSEGV. The kernel does the copying, between the
//! memory and a pipe, and where the memory faults it stops with EFAULT (fs/pipe.c:
//! `copy_page_from_iter`, `copy_page_to_iter`). Only bytes whose alignment rules out direct I/O
//! are copied this way, so that a pipe for each copy is cheap enough.
use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::LazyLock;
use std::sync::atomic::{Ordering, fence};

use rustix::io::Errno;
use rustix::pipe::PipeFlags;

/// Bytes that a pipe holds by default (pipe(7)).
const STEP: usize = 64 << 10;

/// Copies `out.len()` bytes from `from`, wherever that is.
///
/// # Errors
/// `EFAULT` where the memory does not answer.
pub(crate) fn copy_out(from: *const u8, out: &mut [u8]) -> Result<(), Errno> {
    let (reader, writer) = pipe()?;
    let mut done = 0;
    while done < out.len() {
        let step = STEP.min(out.len() - done);
        // SAFETY: the kernel checks the address, and only reads there.
        let moved = check(unsafe { libc::write(writer.as_raw_fd(), from.wrapping_add(done).cast(), step) })?;
        let end = done + moved;
        while done < end {
            done += rustix::io::retry_on_intr(|| rustix::io::read(&reader, &mut out[done..end]))?;
        }
    }
    Ok(())
}

/// Copies `data` to `to`. The bytes have left the CPU when it returns, also where the memory is
/// write-combining.
///
/// # Safety
///
/// If there is memory at `to`, for `data.len()` bytes, it must be such that may change at any
/// time.
///
/// # Errors
/// `EFAULT` where the memory does not answer.
pub(crate) unsafe fn copy_in(data: &[u8], to: *mut u8) -> Result<(), Errno> {
    let (reader, writer) = pipe()?;
    let mut done = 0;
    while done < data.len() {
        let end = done + rustix::io::retry_on_intr(|| rustix::io::write(&writer, &data[done..data.len().min(done + STEP)]))?;
        while done < end {
            // SAFETY: the kernel checks the address; the caller allows that what is there changes.
            done += check(unsafe { libc::read(reader.as_raw_fd(), to.wrapping_add(done).cast(), end - done) })?;
        }
    }
    fence(Ordering::SeqCst);
    Ok(())
}

/// Fills `len` bytes at `to` with zeroes, at the speed of memory: the kernel clears what it reads
/// a file of zeroes into (drivers/char/mem.c, `read_iter_zero`).
///
/// # Safety
///
/// As of [`copy_in`].
///
/// # Errors
/// `EFAULT` where the memory does not answer.
pub(crate) unsafe fn zero(to: *mut u8, len: usize) -> Result<(), Errno> {
    static ZEROES: LazyLock<Result<File, Errno>> =
        LazyLock::new(|| File::open("/dev/zero").map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO)));
    let zeroes = ZEROES.as_ref().map_err(|errno| *errno)?;
    let mut done = 0;
    while done < len {
        // SAFETY: the kernel checks the address; the caller allows that what is there changes.
        done += check(unsafe { libc::read(zeroes.as_raw_fd(), to.wrapping_add(done).cast(), len - done) })?;
    }
    fence(Ordering::SeqCst);
    Ok(())
}

/// Not blocking, so that a pipe which holds less than [`STEP`] takes what it can.
fn pipe() -> Result<(OwnedFd, OwnedFd), Errno> {
    rustix::pipe::pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK)
}

/// What a system call moved: 0 where a signal came first.
fn check(moved: isize) -> Result<usize, Errno> {
    usize::try_from(moved).or_else(|_| match Errno::from_io_error(&std::io::Error::last_os_error()) {
        Some(Errno::INTR) => Ok(0),
        errno => Err(errno.unwrap_or(Errno::FAULT)),
    })
}
