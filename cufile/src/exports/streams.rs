//! Requests in the order of a stream.

use super::status;
use crate::abi::Status;
use crate::driver;
use crate::failure::{Code, Result};
use crate::files::Direction;
use crate::streams::{self, Request};
use std::ffi::{c_uint, c_void};

/// # Safety
/// As [`cuFileReadAsync`].
unsafe fn submit(direction: Direction, handle: *mut c_void, request: Request) -> Result<()> {
    let Request { memory, size, file_offset, memory_offset, done, .. } = request;
    if memory.is_null() || size.is_null() || file_offset.is_null() || memory_offset.is_null() || done.is_null() {
        return Err(Code::InvalidValue.into());
    }
    let open = driver::opened()?;
    let file = open.files.get(handle as usize)?;
    // SAFETY: none is NULL, and the caller vouches for the rest.
    unsafe { streams::submit(&open, file, direction, request) }
}

macro_rules! request {
    ($(#[$doc:meta])* $name:ident, $direction:expr) => {
        $(#[$doc])*
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(
            handle: *mut c_void,
            memory: *mut c_void,
            size: *mut usize,
            file_offset: *mut i64,
            memory_offset: *mut i64,
            done: *mut isize,
            stream: *mut c_void,
        ) -> Status {
            let request = Request { memory, size, file_offset, memory_offset, done, stream };
            // SAFETY: as the caller says.
            status(unsafe { submit($direction, handle, request) })
        }
    };
}

request! {
    /// Puts a read into the order of a stream. The result is there before the stream goes on.
    ///
    /// # Safety
    /// The memory, and what the pointers point to, are the application's until the stream has
    /// passed the read; the stream is one of this process.
    cuFileReadAsync, Direction::Read
}
request! {
    /// Puts a write into the order of a stream, as [`cuFileReadAsync`].
    ///
    /// # Safety
    /// As [`cuFileReadAsync`].
    cuFileWriteAsync, Direction::Write
}

/// Says which of a request's numbers do not change after the call, in this stream. Opens the
/// driver.
///
/// # Safety
/// It is a stream of this process.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFileStreamRegister(stream: *mut c_void, flags: c_uint) -> Status {
    // SAFETY: as the caller says.
    status(driver::open_if_needed().and_then(|open| unsafe { open.streams.add(stream as usize, flags) }))
}

/// Takes it back.
#[unsafe(no_mangle)]
pub extern "C" fn cuFileStreamDeregister(stream: *mut c_void) -> Status {
    status(driver::opened().map(|open| open.streams.remove(stream as usize)))
}
