//! Transfers of host memory. What is registered with the mount ([`crate::buffer`]) the device
//! reaches; other memory is copied between it and staging memory.

use crate::buffer::HostMemory;
use crate::request::Direction;
use crate::session::Session;
use crate::staging::PIECE;
use gpunvme::gpu::Segment;
use gpunvme::{Buffer, Error, File, Reason, Registered, Require, Result, Transfer};
use rustix::io::Errno;

/// What the places of segments in staging memory are aligned to, as their places in the file are.
const BLOCK: u64 = 4096;

/// Moves segments between a file and host memory, and waits for it. A segment that reaches past
/// the end of the file is read as far as the file goes.
///
/// # Safety
/// The memory of the segments is the caller's to read or write until this returns.
///
/// # Errors
/// As [`File::read_requiring`]; memory that is not registered is refused where no byte may be
/// copied.
pub unsafe fn transfer(
    session: &Session,
    file: &File,
    direction: Direction,
    segments: &[Segment],
    require: Require,
) -> Result<Transfer> {
    let (indices, mut left): (Vec<usize>, Vec<Segment>) = match direction {
        Direction::Read => clipped(segments, file.size()?).unzip(),
        Direction::Write => segments.iter().copied().enumerate().unzip(),
    };
    left.reverse(); // the next one is the last
    let mut done = Transfer::default();
    while let Some(&next) = left.last() {
        let first = indices.len() - left.len();
        let moved = match session.registered(next.address, next.len) {
            Some(memory) => {
                left.pop();
                registered(&memory, file, direction, &next, require)
            }
            None if require.direct => Err(refused(file, direction)),
            None => {
                // SAFETY: the caller vouches for the memory.
                let work = |stage: &mut _| unsafe { staged(stage, file, direction, &mut left, require) };
                session.staging()?.with(session.mount()?, work).map_err(|error| of_daemon(error, file, direction))
            }
        };
        match moved {
            Ok(moved) => done.add(&moved),
            Err(error) => return Err(after(error, done, &indices[first..])),
        }
    }
    Ok(done)
}

/// The parts of segments that lie before the end of a file, with the segments' indices.
fn clipped(segments: &[Segment], size: u64) -> impl Iterator<Item = (usize, Segment)> {
    segments.iter().enumerate().filter_map(move |(index, segment)| {
        let len = segment.len.min(size.saturating_sub(segment.file_offset));
        (len > 0).then_some((index, Segment { len, ..*segment }))
    })
}

/// Moves one segment that lies in registered memory.
fn registered(memory: &HostMemory, file: &File, direction: Direction, segment: &Segment, require: Require) -> Result<Transfer> {
    let buffer_offset = memory.offset(segment.address);
    let segment = [gpunvme::Segment { file_offset: segment.file_offset, buffer_offset, len: segment.len }];
    match direction {
        Direction::Read => file.read_requiring(&mut memory.registered().write(), &segment, require),
        Direction::Write => file.write_requiring(&memory.registered().read(), &segment, require),
    }
}

/// Moves as much as fits into a piece of staging memory, and takes it off the end of `left`.
///
/// # Safety
/// As for [`transfer`].
unsafe fn staged(
    stage: &mut Registered<Buffer>,
    file: &File,
    direction: Direction,
    left: &mut Vec<Segment>,
    require: Require,
) -> Result<Transfer> {
    let (mut pieces, mut copies) = (Vec::new(), Vec::new());
    let mut end = 0u64;
    while let Some(segment) = left.last_mut() {
        // Where it is aligned in the file it is aligned in memory.
        let at = end.next_multiple_of(BLOCK) + segment.file_offset % BLOCK;
        let len = segment.len.min((PIECE as u64).saturating_sub(at));
        if len == 0 {
            break;
        }
        pieces.push(gpunvme::Segment { file_offset: segment.file_offset, buffer_offset: at, len });
        copies.push(segment.address);
        end = at + len;
        *segment = Segment { file_offset: segment.file_offset + len, address: segment.address + len, len: segment.len - len };
        if segment.len > 0 {
            break;
        }
        left.pop();
    }
    if direction == Direction::Write {
        for (piece, address) in pieces.iter().zip(&copies) {
            // SAFETY: the caller vouches for the memory, which is as long as its piece.
            let from = unsafe { std::slice::from_raw_parts(*address as *const u8, piece.len as usize) };
            stage[piece.buffer_offset as usize..][..from.len()].copy_from_slice(from);
        }
        return file.write_requiring(stage, &pieces, require);
    }
    let done = file.read_requiring(stage, &pieces, require)?;
    let mut arrived = done.bytes();
    for (piece, address) in pieces.iter().zip(&copies) {
        let len = piece.len.min(arrived) as usize;
        arrived -= len as u64;
        let from = &stage[piece.buffer_offset as usize..][..len];
        // SAFETY: the caller vouches for the memory, which is as long as its piece; staging memory
        // is no part of it.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), *address as *mut u8, len) };
    }
    Ok(done)
}

/// An error, with what had been moved before it. `indices` are those of the segments that it
/// counts.
fn after(error: Error, before: Transfer, indices: &[usize]) -> Error {
    match error {
        Error::Transfer { path, action, errno, reason, segment, offset, mut done } => {
            done.add(&before);
            let segment = segment.and_then(|at| indices.get(at as usize)).map(|index| *index as u32);
            Error::Transfer { path, action, errno, reason, segment, offset, done }
        }
        error => error,
    }
}

/// An error of staging memory, of which the caller knows nothing: the daemon ended.
fn of_daemon(error: Error, file: &File, direction: Direction) -> Error {
    match error {
        Error::LostBuffer { .. } => Error::Path { path: file.path().to_owned(), action: name(direction), errno: Errno::NOTCONN },
        error => error,
    }
}

fn name(direction: Direction) -> &'static str {
    if direction == Direction::Read { "read" } else { "write" }
}

fn refused(file: &File, direction: Direction) -> Error {
    let action = name(direction);
    let (path, errno, reason) = (file.path().to_owned(), Errno::OPNOTSUPP, Reason::RouteNotAvailable);
    Error::Transfer { path, action, errno, reason, segment: Some(0), offset: None, done: Transfer::default() }
}
