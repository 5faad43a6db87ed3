//! The outcome of a request, collected from its pieces: what they moved, and the error of the first
//! that failed.

use super::memory::pieces::PieceRange;
use super::request::{Request, SegmentPart};
use crate::error::{Error, Result};
use crate::transfer::{Moved, Transfer};
use gpunvme_abi::{Direction, Reason};
use rustix::io::Errno;
use std::path::Path;

/// What is known so far.
#[derive(Default)]
pub(super) struct Outcome {
    done: Transfer,
    failed: Option<Error>,
}

impl Outcome {
    /// Adds what a piece moved.
    pub fn add(&mut self, done: &Transfer) {
        self.done.add(done);
    }

    /// A piece failed, or all do from now on. The first failure is what the request is answered
    /// with.
    pub fn failed(&mut self, error: Error) {
        self.failed.get_or_insert(error);
    }

    pub fn is_failed(&self) -> bool {
        self.failed.is_some()
    }

    /// The answer, once nothing is in flight.
    pub fn result(self) -> Result<Transfer> {
        let done = self.done;
        match self.failed {
            None => Ok(done),
            Some(Error::Transfer { path, action, errno, reason, segment, offset, .. }) => {
                Err(Error::Transfer { path, action, errno, reason, segment, offset, done })
            }
            Some(Error::Copy { path, action, segment, offset, error, .. }) => {
                Err(Error::Copy { path, action, segment, offset, error, done })
            }
            Some(error) => Err(error),
        }
    }
}

/// What errors call it.
pub(super) fn action(direction: Direction) -> &'static str {
    match direction {
        Direction::Read => "read",
        Direction::Write => "write",
    }
}

/// What a ring said of a piece of a part: how many of the application's bytes arrived, and what
/// was moved for it.
///
/// # Errors
/// The piece failed: with the segment that it is of, and where it lies in the file.
pub(super) fn of_piece(
    direction: Direction,
    path: &Path,
    part: &SegmentPart,
    piece: &PieceRange,
    result: Result<Transfer>,
) -> Result<(u64, Transfer)> {
    let done = match result {
        Err(Error::Transfer { path, action, errno, reason, done, .. }) => {
            let (segment, offset) = (Some(part.segment), Some(piece.file_offset));
            return Err(Error::Transfer { path, action, errno, reason, segment, offset, done });
        }
        result => result?,
    };
    let arrived = piece.arrived(done.bytes());
    if direction == Direction::Write && arrived < piece.wanted {
        // The daemon owes a status for this; a file with a gap in it must not pass for written.
        return Err(Error::Path { path: path.to_owned(), action: action(direction), errno: Errno::IO });
    }
    let moved = match part.registered {
        Ok(_) => done,
        Err(reason) => of_the_application(done, arrived, reason),
    };
    Ok((arrived, moved))
}

/// What a transfer that was rounded outwards moved for the application, `wanted` bytes, and why
/// not faster.
fn of_the_application(transfer: Transfer, wanted: u64, peer_to_peer: Reason) -> Transfer {
    let Transfer { mut moved, reason } = transfer;
    let mut excess = moved.total() - wanted.min(moved.total());
    let Moved { bounce, host, hole, edge, .. } = &mut moved;
    for bytes in [bounce, host, hole, edge] {
        let less = excess.min(*bytes);
        *bytes -= less;
        excess -= less;
    }
    // To the daemon the pool is host memory; the application asked for a GPU's.
    let reason = if reason == Some(Reason::Unaligned) { reason } else { Some(peer_to_peer) };
    Transfer { moved, reason }
}

/// What a request is answered with that may be read from the page cache only.
pub(super) fn not_cached(request: &Request, segment: u32, offset: u64) -> Error {
    Error::Transfer {
        path: request.source.path().to_owned(),
        action: action(request.direction),
        errno: Errno::OPNOTSUPP,
        reason: Reason::NotCached,
        segment: Some(segment),
        offset: Some(offset),
        done: Transfer::default(),
    }
}

/// What a request is answered with that was called off.
pub(super) fn cancelled(request: &Request) -> Error {
    Error::Transfer {
        path: request.source.path().to_owned(),
        action: action(request.direction),
        errno: Errno::CANCELED,
        reason: Reason::None,
        segment: None,
        offset: None,
        done: Transfer::default(),
    }
}
