//! One request, done by whoever serves its file, while the caller waits.

use crate::driver::Open;
use crate::failure::{Code, Failure, Result};
use crate::files::{Direction, MountFile, Registered, Server};
use crate::statistics::{self, Done, Way};
use crate::{memory, plain};
use gpunvme::gpu::{Segment, Transfers};
use gpunvme::{Error, Transfer};
use std::os::fd::AsFd;
use std::time::Instant;

/// A range of a file, and as long a range of memory.
#[derive(Clone, Copy, Debug)]
pub struct Range {
    /// As the application named the memory: the buffer that it registered, if it did.
    pub base: u64,
    /// Where in the memory the range begins.
    pub address: u64,
    pub len: usize,
    pub file_offset: u64,
}

impl Range {
    /// A range, as C names it.
    ///
    /// # Errors
    /// [`Code::InvalidValue`] for what is negative, too long, or `NULL`.
    pub fn new(base: usize, len: usize, file_offset: i64, memory_offset: i64) -> Result<Range> {
        let file_offset = u64::try_from(file_offset).map_err(|_| Code::InvalidValue)?;
        let memory_offset = u64::try_from(memory_offset).map_err(|_| Code::InvalidValue)?;
        let address = (base as u64).checked_add(memory_offset).ok_or(Code::InvalidValue)?;
        let fits = address.checked_add(len as u64).is_some()
            && file_offset.checked_add(len as u64).is_some_and(|end| end <= i64::MAX as u64);
        if base == 0 || !fits {
            return Err(Code::InvalidValue.into());
        }
        Ok(Range { base: base as u64, address, len, file_offset })
    }

    pub fn segment(&self) -> Segment {
        Segment { file_offset: self.file_offset, address: self.address, len: self.len as u64 }
    }
}

/// Moves the bytes, and returns how many: fewer than asked for only where the file ends.
///
/// # Safety
/// The range is memory of the application's that nothing else uses until this returns: it is
/// cuFile's promise.
#[allow(unsafe_code)]
pub unsafe fn perform(open: &Open, file: &Registered, direction: Direction, range: Range) -> Result<usize> {
    let started = Instant::now();
    // SAFETY: as the caller says.
    let done = unsafe { done(open, file, direction, range) };
    statistics::record(direction, range, started, &done);
    done.map(|done| done.bytes)
}

/// [`perform`], without counting it.
///
/// # Safety
/// As for [`perform`].
#[allow(unsafe_code)]
pub unsafe fn done(open: &Open, file: &Registered, direction: Direction, range: Range) -> Result<Done> {
    file.check(direction)?;
    match &file.server {
        // SAFETY: as the caller says.
        Server::Mount(file) => unsafe { on_mount(open, file, direction, range) },
        Server::Real(file) => {
            // SAFETY: as the caller says.
            let bytes = unsafe { file.transfer(direction, range) }?;
            Ok(Done { bytes, way: Way::Real })
        }
        Server::Plain(file) => {
            // SAFETY: as the caller says.
            let bytes = unsafe { plain::transfer(file.as_fd(), direction, range) }?;
            Ok(Done { bytes, way: Way::Plain })
        }
    }
}

#[allow(unsafe_code)]
unsafe fn on_mount(open: &Open, on: &MountFile, direction: Direction, range: Range) -> Result<Done> {
    if let Some(transfers) = transfers(open, on, range)? {
        let segments = [range.segment()];
        // SAFETY: as the caller says.
        let result = unsafe {
            match direction {
                Direction::Read => transfers.read(&on.file, &segments),
                Direction::Write => transfers.write(&on.file, &segments),
            }
        };
        match outcome(range, result) {
            Outcome::Done(done) => return done,
            Outcome::Ordinary => {}
        }
    }
    // SAFETY: as the caller says.
    unsafe { by_calls(on, direction, range) }
}

/// What moves bytes between a file of a mount and a range of memory. None where system calls do:
/// there is no CUDA; or there is nothing else to move them, and it is memory of the host.
pub fn transfers<'a>(open: &Open, on: &'a MountFile, range: Range) -> Result<Option<&'a Transfers>> {
    let registered = open.buffers.cover(range.address, range.len as u64);
    on.mount.transfers(registered).or_else(|failure| match memory::at(range.address) {
        Ok(found) if memory::is_on_host(found) => Ok(None),
        _ => Err(failure),
    })
}

/// Moves the bytes between a file of a mount and memory of the host by system calls.
///
/// # Safety
/// As for [`perform`].
#[allow(unsafe_code)]
pub unsafe fn by_calls(on: &MountFile, direction: Direction, range: Range) -> Result<Done> {
    let found = memory::at(range.address)?;
    let address = memory::on_host(found, range.address, range.len as u64)?.unwrap_or(range.address);
    // SAFETY: as the caller says; the processor finds the same memory there.
    let bytes = unsafe { plain::ordinary(on.file.as_fd(), direction, Range { address, ..range }) }?;
    Ok(Done { bytes, way: Way::MountByCall })
}

/// How a request to `Transfers` ended.
pub enum Outcome {
    Done(Result<Done>),
    /// It was not begun, because the memory is ordinary memory, which CUDA does not know.
    Ordinary,
}

/// Tells ordinary memory from an error.
pub fn outcome(range: Range, result: gpunvme::Result<Transfer>) -> Outcome {
    outcome_of_all(&[range], result)
}

/// The same, of a request of many ranges: some of them may be ordinary memory.
pub fn outcome_of_all(ranges: &[Range], result: gpunvme::Result<Transfer>) -> Outcome {
    Outcome::Done(match result {
        Ok(done) => Ok(Done::on_mount(&done)),
        Err(Error::UnknownMemory { address, .. }) if ranges.iter().any(|range| range.address == address) => {
            return Outcome::Ordinary;
        }
        Err(Error::UnknownMemory { .. }) => Err(Code::PointerRange.into()),
        Err(error) => {
            tracing::debug!(%error, "a transfer failed");
            Err(Failure::from(&error))
        }
    })
}
