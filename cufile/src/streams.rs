//! Requests in the order of a CUDA stream.
//!
//! What is asked for is looked at when the call is made, and again when the stream comes to it. In
//! a stream that was registered, all of it may change meanwhile but for what the flags say is
//! fixed: a kernel copies then, which finds what it is to do when the stream comes to it. Offsets
//! that may change need not be set at the call yet: the memory is known by its base then. In one
//! that was not registered copies are put into the stream when the call is made, so that a file
//! offset may change by whole blocks, and what else has changed is refused with
//! [`Code::AsyncNotSupported`], in the result. The same goes for managed memory, and memory that
//! the SSD itself reaches.
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
use gpunvme::gpu::{Observer, Segment};
use gpunvme_cuda::StreamId;
use parking_lot::Mutex;
use rustix::io::Errno;
use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::Arc;
use std::time::Instant;

/// Nothing changes after the call.
const ALL_FIXED: u32 = STREAM_FIXED_MEMORY_OFFSET | STREAM_FIXED_FILE_OFFSET | STREAM_FIXED_SIZE;

/// The streams that the application registered, with their flags.
#[derive(Default)]
pub struct Registrations {
    /// By handle: a stream may be destroyed before it is taken out.
    known: Mutex<HashMap<usize, Registration>>,
}

#[derive(Clone, Copy)]
struct Registration {
    flags: u32,
    /// Another stream may have its handle once it was destroyed. None for the default streams,
    /// which are not.
    id: Option<StreamId>,
}

impl Registrations {
    /// # Errors
    /// [`Code::InvalidValue`] for flags that there are not; what CUDA says.
    ///
    /// # Safety
    /// It is a stream of this process.
    pub unsafe fn add(&self, stream: usize, flags: u32) -> Result<()> {
        if flags & !STREAM_FLAGS != 0 {
            return Err(Code::InvalidValue.into());
        }
        // SAFETY: as the caller says.
        let id = unsafe { id_of(stream) }?;
        let mut known = self.known.lock();
        known.insert(stream, Registration { flags, id });
        if let Some(library) = Library::loaded() {
            library.stream(stream, Some(flags));
        }
        Ok(())
    }

    /// Tells NVIDIA's library of all of them.
    pub fn tell(&self, library: &Library) {
        self.known.lock().iter().for_each(|(&stream, known)| library.stream(stream, Some(known.flags)));
    }

    pub fn remove(&self, stream: usize) {
        let mut known = self.known.lock();
        known.remove(&stream);
        if let Some(library) = Library::loaded() {
            library.stream(stream, None);
        }
    }

    /// None for a stream that was not registered.
    ///
    /// # Errors
    /// What CUDA says.
    ///
    /// # Safety
    /// It is a stream of this process.
    unsafe fn of(&self, stream: usize) -> Result<Option<u32>> {
        let Some(known) = self.known.lock().get(&stream).copied() else { return Ok(None) };
        // SAFETY: as the caller says.
        Ok((unsafe { id_of(stream) }? == known.id).then_some(known.flags))
    }
}

/// CUDA's number of a stream, which no other stream has; None for the default streams.
///
/// # Safety
/// It is a stream of this process.
unsafe fn id_of(stream: usize) -> Result<Option<StreamId>> {
    let Some(cuda) = memory::cuda() else { return Ok(None) };
    // SAFETY: as the caller says.
    let stream = unsafe { cuda.application_stream(stream) }?;
    Ok(if stream.is_default() { None } else { Some(stream.id()?) })
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
    /// Its size, and the offsets in the file and in memory, as they are now.
    ///
    /// # Safety
    /// As [`submit`].
    unsafe fn numbers(&self) -> (usize, i64, i64) {
        // SAFETY: none is NULL, and the application vouches for them.
        unsafe { (self.size.read_volatile(), self.file_offset.read_volatile(), self.memory_offset.read_volatile()) }
    }

    /// What is asked for now.
    ///
    /// # Safety
    /// As [`submit`].
    unsafe fn range(&self) -> Result<Range> {
        // SAFETY: as the caller says.
        let (size, file, memory) = unsafe { self.numbers() };
        Range::new(self.memory as usize, size, file, memory)
    }

    /// What is asked for at the call, in a stream that was registered with `flags`, if it was. An
    /// offset that may change yet counts as 0 where it is no place now: whatever was in the
    /// application's variable.
    ///
    /// # Safety
    /// As [`submit`].
    unsafe fn submitted(&self, flags: Option<u32>) -> Result<Range> {
        // SAFETY: as the caller says.
        let (size, mut file, mut memory) = unsafe { self.numbers() };
        let base = self.memory as usize;
        let may_change = |flag| flags.is_some_and(|flags| flags & flag == 0);
        if may_change(STREAM_FIXED_FILE_OFFSET) && Range::new(base, size, file, 0).is_err() {
            file = 0;
        }
        if may_change(STREAM_FIXED_MEMORY_OFFSET) && memory != 0 {
            let is_known = |range: Range| memory::is_known(range.address, range.len as u64);
            if !Range::new(base, size, file, memory).and_then(is_known).unwrap_or(false) {
                memory = 0;
            }
        }
        Range::new(base, size, file, memory)
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
    let (flags, range) = unsafe {
        let flags = open.streams.of(request.stream as usize)?;
        (flags, request.submitted(flags)?)
    };
    if let Server::Mount(on) = &file.server {
        // SAFETY: as the caller says.
        let begun = unsafe { on_mount(open, on, direction, request, range, flags) };
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

/// None where system calls are to do it.
///
/// # Safety
/// As [`submit`].
unsafe fn on_mount(
    open: &Arc<Open>,
    on: &MountFile,
    direction: Direction,
    request: Request,
    range: Range,
    flags: Option<u32>,
) -> Option<Result<()>> {
    let transfers = match transfer::transfers(open, on, range) {
        Ok(transfers) => transfers?,
        Err(failure) => return Some(Err(failure)),
    };
    let (block, started) = (on.mount.block, Instant::now());
    let is_late = flags.is_some_and(|flags| flags & ALL_FIXED != ALL_FIXED);
    let flags = flags.unwrap_or(0);
    let gpu = statistics::gpu_of(range);
    let watch = Watch { request, direction, range, gpu, flags, block, refused: None, started, _open: open.clone() };
    let (segments, stream) = ([range.segment()], request.stream as usize);
    // SAFETY: the application vouches for memory and stream, as cuFile asks.
    let begun = unsafe {
        match (direction, is_late) {
            (Direction::Read, false) => transfers.read_on_stream_with(&on.file, &segments, stream, watch),
            (Direction::Write, false) => transfers.write_on_stream_with(&on.file, &segments, stream, watch),
            (Direction::Read, true) => transfers.read_on_stream_late(&on.file, segments[0], stream, watch),
            (Direction::Write, true) => transfers.write_on_stream_late(&on.file, segments[0], stream, watch),
        }
    };
    match begun {
        // The observer stores the result.
        Ok(pending) => {
            drop(pending);
            Some(Ok(()))
        }
        Err(error) => match transfer::outcome(range, Err(error)) {
            // Ordinary memory is known by its base: what lies past memory of CUDA's is none.
            Outcome::Ordinary => match memory::at(range.base) {
                Ok(None) => None,
                Ok(Some(_)) => Some(Err(Code::PointerRange.into())),
                Err(failure) => Some(Err(failure)),
            },
            Outcome::Done(done) => Some(done.map(|_| ())),
        },
    }
}

/// Watches a request of a stream: looks at what is asked for when the stream comes to it, and
/// stores the result before the stream goes on.
struct Watch {
    request: Request,
    direction: Direction,
    /// As it was when the call was made, or is since the stream came to it.
    range: Range,
    /// Whose memory it is, for the statistics: the stream's thread calls nothing of CUDA's.
    gpu: Option<usize>,
    flags: u32,
    block: u64,
    refused: Option<Failure>,
    started: Instant,
    _open: Arc<Open>,
}

impl Watch {
    /// What is asked for now, but for what the flags say is as it was.
    fn now(&self) -> Result<Range> {
        // SAFETY: the stream has not passed the request, so that the application keeps them.
        let (size, file, memory) = unsafe { self.request.numbers() };
        let is_fixed = |flag| self.flags & flag != 0;
        let size = if is_fixed(STREAM_FIXED_SIZE) { self.range.len } else { size };
        let file = if is_fixed(STREAM_FIXED_FILE_OFFSET) { self.range.file_offset as i64 } else { file };
        let (base, memory) = if is_fixed(STREAM_FIXED_MEMORY_OFFSET) {
            (self.range.address as usize, 0)
        } else {
            (self.request.memory as usize, memory)
        };
        Range::new(base, size, file, memory)
    }

    /// By how many bytes the file offset has changed, and nothing else.
    fn shift(&self) -> Result<i64> {
        let now = self.now()?;
        let shift = now.file_offset.wrapping_sub(self.range.file_offset) as i64;
        let is_same = (now.address, now.len) == (self.range.address, self.range.len);
        if is_same && shift.unsigned_abs().is_multiple_of(self.block) { Ok(shift) } else { Err(Code::AsyncNotSupported.into()) }
    }

    /// What is asked for now, of a size that is not larger than it was.
    fn late(&mut self) -> Result<Segment> {
        let now = self.now()?;
        if now.len > self.range.len {
            return Err(Code::InvalidValue.into());
        }
        self.range = now;
        Ok(now.segment())
    }

    fn refuse(&mut self, failure: Failure) -> Errno {
        self.refused = Some(failure);
        Errno::INVAL
    }

    /// The result, which is counted.
    fn counted(&mut self, outcome: &gpunvme::Result<Transfer>) -> isize {
        let done = match (self.refused.take(), outcome) {
            (Some(failure), _) => Err(failure),
            (None, Ok(done)) => Ok(statistics::Done::on_mount(done)),
            (None, Err(error)) => Err(of_change(error)),
        };
        statistics::record_on(self.gpu, self.direction, self.range, self.started, &done);
        match &done {
            Ok(done) => done.bytes as isize,
            Err(failure) => failure.count().0,
        }
    }
}

/// Why a request that is asked again when the stream comes to it could not be done as it is then.
fn of_change(error: &gpunvme::Error) -> Failure {
    match error {
        gpunvme::Error::Transfer { errno: Errno::FAULT, .. } => Code::PointerRange.into(),
        gpunvme::Error::Transfer { errno: Errno::OPNOTSUPP, .. } => Code::AsyncNotSupported.into(),
        other => other.into(),
    }
}

impl Observer for Watch {
    fn begins(&mut self) -> std::result::Result<i64, Errno> {
        self.started = Instant::now();
        self.shift().map_err(|failure| self.refuse(failure))
    }

    fn segment(&mut self, _most: Segment) -> std::result::Result<Segment, Errno> {
        self.started = Instant::now();
        self.late().map_err(|failure| self.refuse(failure))
    }

    fn ends(&mut self, outcome: &gpunvme::Result<Transfer>) {
        let result = self.counted(outcome);
        // SAFETY: the stream has not passed the request.
        unsafe { self.request.store(result) }
    }

    /// The application may have freed what the request points to. It learns from CUDA that the
    /// stream did not finish.
    fn abandoned(&mut self, outcome: &gpunvme::Result<Transfer>) {
        let result = self.counted(outcome);
        tracing::warn!(result, "the context of a stream died before a request in it was done");
    }
}
