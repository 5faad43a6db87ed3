//! The C ABI: every documented function of cuFile up to 1.20.
//!
//! It guards the border. Pointers are checked for `NULL` and everything else is done behind it.
//! None of these functions unwinds into C: Rust ends the process at a panic in an `extern "C"`
//! function.
#![allow(unsafe_code)]

mod batch;
mod driver;
mod files;
mod parameters;
mod statistics;
mod streams;

use crate::abi::Status;
use crate::failure::{Code, Failure, Result};
use rustix::io::Errno;
use std::ffi::{c_int, c_void};

const OK: Status = Status { code: 0, cuda: 0 };

/// The answer to a call.
fn status(result: Result<()>) -> Status {
    match result {
        Ok(()) => OK,
        Err(failure) => failure.status(),
    }
}

/// The answer to a call that moves bytes.
fn count(result: Result<usize>) -> isize {
    match result {
        Ok(bytes) => bytes as isize,
        Err(failure) => {
            let (count, errno) = failure.count();
            if let Some(errno) = errno {
                set_errno(errno);
            }
            count
        }
    }
}

fn set_errno(errno: Errno) {
    // SAFETY: it is this thread's `errno`.
    unsafe { *libc::__errno_location() = errno.raw_os_error() }
}

/// Stores what a call found, where C wants it.
///
/// # Safety
/// `to` is NULL, or C has room for the value there.
unsafe fn store<T>(to: *mut T, find: impl FnOnce() -> Result<T>) -> Status {
    if to.is_null() {
        return Failure::from(Code::InvalidValue).status();
    }
    // SAFETY: it is not NULL, and the caller vouches for the room.
    status(find().map(|value| unsafe { to.write(value) }))
}

/// A list of C's; empty where there is none.
///
/// # Safety
/// `first` is NULL, or of `len` values that stay as they are.
unsafe fn list<'a, T>(first: *const T, len: usize) -> Result<&'a [T]> {
    match len {
        0 => Ok(&[]),
        _ if first.is_null() || len > isize::MAX as usize / size_of::<T>() => Err(Code::InvalidValue.into()),
        // SAFETY: the caller vouches for the values.
        _ => Ok(unsafe { std::slice::from_raw_parts(first, len) }),
    }
}

/// Calls a function at the end of the process.
pub fn at_exit(call: fn()) {
    use std::sync::OnceLock;
    static CALL: OnceLock<fn()> = OnceLock::new();
    extern "C" fn run() {
        if let Some(call) = CALL.get() {
            call();
        }
    }
    if CALL.set(call).is_ok() {
        // SAFETY: the function stays: this library is not unloaded.
        let _: c_int = unsafe { libc::atexit(run) }; // no room for it: no report
    }
}

/// A number that C knows as a pointer.
fn as_pointer(number: usize) -> *mut c_void {
    std::ptr::without_provenance_mut(number)
}
