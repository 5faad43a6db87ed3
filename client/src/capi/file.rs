//! Files, and what is moved between them and host memory.

use super::buffer::CBuffer;
use super::{CResult, clear, fail, free, null, path, store, store_handle, told};
use crate::error::{Error, Result};
use crate::file::File;
use gpunvme_abi::{Command, Extent, Segment, TransferFlags};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use std::ffi::{c_char, c_int, c_uint};
use std::os::fd::BorrowedFd;

/// See the header.
///
/// # Safety
/// Pointers are as the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpunvme_file_open(name: *const c_char, flags: c_int, mode: c_uint, file: *mut *mut File) -> c_int {
    if name.is_null() || file.is_null() {
        return null("path and file");
    }
    let flags = OFlags::from_bits_retain(flags as c_uint);
    // SAFETY: neither is NULL, and the header asks for a string and for room for a pointer.
    unsafe { store_handle(file, File::with_flags(path(name), flags, Mode::from_raw_mode(mode))) }
}

/// See the header.
///
/// # Safety
/// Pointers are as the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpunvme_file_from_fd(fd: c_int, file: *mut *mut File) -> c_int {
    if file.is_null() {
        return null("file");
    }
    let name = format!("/proc/self/fd/{fd}");
    let duplicate = || {
        if fd < 0 {
            return Err(Errno::BADF);
        }
        // SAFETY: it is borrowed for the next system call only, which finds out whether it is
        // open.
        rustix::io::fcntl_dupfd_cloexec(unsafe { BorrowedFd::borrow_raw(fd) }, 0)
    };
    let made = duplicate()
        .map_err(|errno| Error::Path { path: (&name).into(), action: "use it", errno })
        .and_then(|fd| File::of(fd, &name));
    // SAFETY: it is not NULL, and the header asks for room for a pointer.
    unsafe { store_handle(file, made) }
}

/// See the header.
///
/// # Safety
/// Pointers are as the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpunvme_file_close(file: *mut File) {
    // SAFETY: the header asks for NULL or an open handle.
    unsafe { free(file) }
}

/// See the header.
///
/// # Safety
/// Pointers are as the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpunvme_read(
    file: *const File,
    buffer: *mut CBuffer,
    segments: *const Segment,
    count: usize,
    flags: u32,
    result: *mut CResult,
) -> c_int {
    // SAFETY: the same is asked of the pointers.
    unsafe { transfer(Command::Read, file, buffer, segments, count, flags, result) }
}

/// See the header.
///
/// # Safety
/// Pointers are as the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpunvme_write(
    file: *const File,
    buffer: *const CBuffer,
    segments: *const Segment,
    count: usize,
    flags: u32,
    result: *mut CResult,
) -> c_int {
    // SAFETY: the same is asked of the pointers.
    unsafe { transfer(Command::Write, file, buffer, segments, count, flags, result) }
}

/// A read or write.
///
/// # Safety
/// Pointers are as the header says of `gpunvme_read`.
unsafe fn transfer(
    command: Command,
    file: *const File,
    buffer: *const CBuffer,
    segments: *const Segment,
    count: usize,
    flags: u32,
    result: *mut CResult,
) -> c_int {
    // SAFETY: the header asks for NULL or room for the structure.
    unsafe { clear(result) };
    let (file, buffer) = (get!(file), get!(buffer));
    if segments.is_null() && count > 0 {
        return null("segments");
    }
    // SAFETY: it is not NULL, and the header asks for `count` segments that no other thread changes
    // during the call.
    let segments = if count == 0 { &[] } else { unsafe { std::slice::from_raw_parts(segments, count) } };
    let outcome = buffer.transfer(command, file, segments, TransferFlags::from_bits_retain(flags));
    let (code, told) = told(&outcome);
    if !result.is_null() {
        // SAFETY: it is not NULL, and the header asks for room for the structure.
        unsafe { result.write(told) };
    }
    code
}

/// See the header.
///
/// # Safety
/// Pointers are as the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpunvme_resolve(
    file: *const File,
    offset: u64,
    len: u64,
    extents: *mut Extent,
    capacity: usize,
    count: *mut usize,
) -> c_int {
    let file = get!(file);
    if (extents.is_null() && capacity > 0) || count.is_null() {
        return null("extents and count");
    }
    let found: Result<Vec<Extent>> = file.resolve(offset, len).take(capacity).collect();
    match found {
        Ok(found) => {
            for (at, extent) in found.iter().enumerate() {
                // SAFETY: `take` made `at` less than the capacity that the header asks for room
                // for.
                unsafe { extents.add(at).write(*extent) };
            }
            // SAFETY: it is not NULL, and the header asks for room for a number.
            unsafe { store(count, Ok(found.len())) }
        }
        Err(error) => fail(&error),
    }
}
