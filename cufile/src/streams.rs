//! Requests in the order of a CUDA stream.
//!
//! What is asked for is looked at when the call is made, because copies are put into the stream
//! then, and again when the stream comes to it. A file offset that has changed by whole blocks is
//! followed; a size or a place in memory that has changed is refused with
//! [`Code::AsyncNotSupported`], in the result. A stream that was registered with the flag that says
//! so is not asked again.
//!
//! Memory that CUDA does not know, and files that are read by the processor, have the call wait for
//! the stream.
#![allow(unsafe_code)]

use crate::abi::{STREAM_FIXED_FILE_OFFSET, STREAM_FIXED_MEMORY_OFFSET, STREAM_FIXED_SIZE, STREAM_FLAGS};
use crate::driver::Open;
use crate::failure::{Code, Failure, Result};
use crate::files::{Direction, MountFile, Registered, Server};
use crate::real::Library;
use crate::statistics;
use crate::transfer::{self, Outcome, Range};
use crate::{memory, plain};
use gpunvme::Transfer;
use gpunvme::gpu::Observer;
use parking_lot::Mutex;
use rustix::io::Errno;
use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::Arc;
use std::time::Instant;

/// The streams that the application registered, with their flags.
#[derive(Default)]
pub struct Registrations {
    flags: Mutex<HashMap<usize, u32>>,
}

impl Registrations {
    /// # Errors
    /// [`Code::InvalidValue`] for flags that there are not.
    pub fn add(&self, stream: usize, flags: u32) -> Result<()> {
        if flags & !STREAM_FLAGS != 0 {
            return Err(Code::InvalidValue.into());
        }
        self.flags.lock().insert(stream, flags);
        if let Some(library) = Library::loaded() {
            library.stream(stream, Some(flags));
        }
        Ok(())
    }

    pub fn remove(&self, stream: usize) {
        self.flags.lock().remove(&stream);
        if let Some(library) = Library::loaded() {
            library.stream(stream, None);
        }
    }

    fn of(&self, stream: usize) -> u32 {
        self.flags.lock().get(&stream).copied().unwrap_or(0)
    }
}

/// What `cuFileReadAsync` is called with.
#[derive(Clone, Copy)]
pub struct Request {
    pub memory: *mut c_void,
    pub size: *mut usize,
    pub file_offset: *mut i64,
    pub memory_offset: *mut i64,
    pub done: *mut isize,
    pub stream: *mut c_void,
}

// SAFETY: the application vouches for what it points to until the stream has passed the request.
unsafe impl Send for Request {}

impl Request {
    /// # Safety
    /// As [`submit`].
    unsafe fn range(&self) -> Result<Range> {
        // SAFETY: none is NULL, and the application vouches for them.
        let (size, file, memory) =
            unsafe { (self.size.read_volatile(), self.file_offset.read_volatile(), self.memory_offset.read_volatile()) };
        Range::new(self.memory as usize, size, file, memory)
    }

    /// # Safety
    /// As [`submit`].
    unsafe fn store(&self, result: isize) {
        // SAFETY: it is not NULL, and the application vouches for it.
        unsafe { self.done.write_volatile(result) }
    }
}

/// Puts a request into a stream.
///
/// # Errors
/// Those that are known at once. Later ones are stored as the result.
///
/// # Safety
/// No pointer is NULL, and all stay valid until the stream has passed the request, as cuFile asks.
pub unsafe fn submit(open: &Arc<Open>, file: Arc<Registered>, direction: Direction, request: Request) -> Result<()> {
    if !file.allows(direction) {
        return Err(Code::InvalidOpenFlag.into());
    }
    if let Server::Real(real) = &file.server {
        // SAFETY: as the caller says.
        return unsafe { real.in_stream(direction, &request) };
    }
    // SAFETY: as the caller says.
    let range = unsafe { request.range() }?;
    if let Server::Mount(on) = &file.server {
        // SAFETY: as the caller says.
        let begun = unsafe { on_mount(open, on, direction, request, range) };
        if let Some(begun) = begun {
            return begun;
        }
    }
    if let Some(cuda) = memory::cuda() {
        // SAFETY: as the caller says.
        unsafe { plain::wait_for(cuda, request.stream as usize) }?;
    }
    // SAFETY: as the caller says; the stream has come to the request.
    unsafe {
        let moved = request.range().and_then(|range| transfer::perform(open, &file, direction, range));
        request.store(moved.map_or_else(|failure| failure.count().0, |moved| moved as isize));
    }
    Ok(())
}

/// None where the memory is ordinary memory, or there is no CUDA.
///
/// # Safety
/// As [`submit`].
unsafe fn on_mount(open: &Arc<Open>, on: &MountFile, direction: Direction, request: Request, range: Range) -> Option<Result<()>> {
    let registered = open.buffers.cover(range.address, range.len as u64);
    let transfers = match on.mount.transfers(registered) {
        Ok(transfers) => transfers?,
        Err(failure) => return Some(Err(failure)),
    };
    let flags = open.streams.of(request.stream as usize);
    let (block, started) = (on.mount.block, Instant::now());
    let watch = Watch { request, direction, range, flags, block, refused: None, started, _open: open.clone() };
    let (segments, stream) = ([range.segment()], request.stream as usize);
    // SAFETY: the application vouches for memory and stream, as cuFile asks.
    let begun = unsafe {
        match direction {
            Direction::Read => transfers.read_on_stream_with(&on.file, &segments, stream, watch),
            Direction::Write => transfers.write_on_stream_with(&on.file, &segments, stream, watch),
        }
    };
    match begun {
        // The observer stores the result.
        Ok(pending) => {
            drop(pending);
            Some(Ok(()))
        }
        Err(error) => match transfer::outcome(range, Err(error)) {
            Outcome::Ordinary => None,
            Outcome::Done(done) => Some(done.map(|_| ())),
        },
    }
}

/// Watches a request of a stream: looks at what is asked for when the stream comes to it, and
/// stores the result before the stream goes on.
struct Watch {
    request: Request,
    direction: Direction,
    /// As it was when the call was made.
    range: Range,
    flags: u32,
    block: u64,
    refused: Option<Failure>,
    started: Instant,
    _open: Arc<Open>,
}

impl Watch {
    /// By how many bytes the file offset has changed.
    fn shift(&self) -> Result<i64> {
        // SAFETY: the stream has not passed the request, so that the application keeps them.
        let (size, file, memory) = unsafe {
            let Request { size, file_offset, memory_offset, .. } = self.request;
            (size.read_volatile(), file_offset.read_volatile(), memory_offset.read_volatile())
        };
        let is_fixed = |flag| self.flags & flag != 0;
        let address = (self.request.memory as u64).wrapping_add_signed(memory);
        let same_size = is_fixed(STREAM_FIXED_SIZE) || size == self.range.len;
        let same_place = is_fixed(STREAM_FIXED_MEMORY_OFFSET) || address == self.range.address;
        if !same_size || !same_place {
            return Err(Code::AsyncNotSupported.into());
        }
        if is_fixed(STREAM_FIXED_FILE_OFFSET) {
            return Ok(0);
        }
        let shift = file.wrapping_sub(self.range.file_offset as i64);
        if file < 0 {
            Err(Code::InvalidValue.into())
        } else if shift.unsigned_abs().is_multiple_of(self.block) {
            Ok(shift)
        } else {
            Err(Code::AsyncNotSupported.into())
        }
    }
}

impl Observer for Watch {
    fn begins(&mut self) -> std::result::Result<i64, Errno> {
        self.started = Instant::now();
        self.shift().map_err(|failure| {
            self.refused = Some(failure);
            Errno::INVAL
        })
    }

    fn ends(&mut self, outcome: &gpunvme::Result<Transfer>) {
        let done = match (self.refused.take(), outcome) {
            (Some(failure), _) => Err(failure),
            (None, Ok(done)) => Ok(statistics::Done::on_mount(done)),
            (None, Err(error)) => Err(error.into()),
        };
        statistics::record(self.direction, self.range, self.started, &done);
        let result = match &done {
            Ok(done) => done.bytes as isize,
            Err(failure) => failure.count().0,
        };
        // SAFETY: the stream has not passed the request.
        unsafe { self.request.store(result) }
    }
}
