//! The outcome of a request, collected from its pieces: what they moved, and the error of the first
//! that failed.
//!
//! It guards what a number of bytes means: of each segment, so many from its beginning on. Pieces
//! are read side by side, and a file may become shorter and longer meanwhile: then one is short,
//! and what those behind it brought does not count.

use super::memory::pieces::PieceRange;
use super::request::{Request, SegmentPart};
use crate::error::{Error, Result};
use crate::transfer::{Moved, Transfer};
use gpunvme_abi::{Direction, Reason};
use rustix::io::Errno;
use std::ops::Range;
use std::path::Path;

/// What is known so far.
#[derive(Default)]
pub(super) struct Outcome {
    done: Transfer,
    failed: Option<Error>,
    /// Segments of a read that ended early, and how: a number of a segment, and an offset in the
    /// file.
    ends: Vec<(u32, u64)>,
}

impl Outcome {
    /// Adds what a piece moved.
    pub fn add(&mut self, done: &Transfer) {
        self.done.add(done);
    }

    /// A piece of a read does not come from the page cache, for this reason.
    pub fn passes_cache(&mut self, cache_reason: Reason) {
        self.add(&Transfer { cache_reason: Some(cache_reason), ..Transfer::default() });
    }

    /// A piece failed, or all do from now on. The first failure is what the request is answered
    /// with.
    pub fn failed(&mut self, error: Error) {
        self.failed.get_or_insert(error);
    }

    /// A piece of a read ended early: in this segment, the file ended at this offset.
    pub fn ended(&mut self, segment: u32, offset: u64) {
        self.ends.push((segment, offset));
    }

    pub fn is_failed(&self) -> bool {
        self.failed.is_some()
    }

    /// The answer, once nothing is in flight, to a request for `parts`: of a segment, by its
    /// number, a range of the file.
    pub fn result(self, parts: impl Iterator<Item = (u32, Range<u64>)>) -> Result<Transfer> {
        let mut done = self.done;
        match self.failed {
            None if self.ends.is_empty() => Ok(done),
            None => {
                let end = |of: u32| self.ends.iter().filter(|(segment, _)| *segment == of).map(|(_, end)| *end).min();
                let counts = |(segment, range): (u32, Range<u64>)| {
                    let end = end(segment).map_or(range.end, |end| end.min(range.end));
                    end.saturating_sub(range.start)
                };
                let counted: u64 = parts.map(counts).sum();
                let excess = done.moved.total().saturating_sub(counted);
                take_off(&mut done.moved, excess);
                Ok(done)
            }
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
    let Transfer { mut moved, reason, .. } = transfer;
    let excess = moved.total() - wanted.min(moved.total());
    take_off(&mut moved, excess);
    // To the daemon the pool is host memory; the application asked for a GPU's.
    let reason = if reason == Some(Reason::Unaligned) { reason } else { Some(peer_to_peer) };
    Transfer { moved, reason, ..Transfer::default() }
}

/// Takes off so many bytes, of whichever route.
fn take_off(moved: &mut Moved, mut excess: u64) {
    let Moved { p2p, bounce, host, hole, edge, cache } = moved;
    for bytes in [p2p, bounce, host, hole, edge, cache] {
        let less = excess.min(*bytes);
        *bytes -= less;
        excess -= less;
    }
}

/// What came from the page cache.
pub(super) fn from_cache(bytes: u64) -> Transfer {
    let moved = Moved { cache: bytes, ..Moved::default() };
    Transfer { moved, reason: Some(Reason::None), cache_reason: Some(Reason::None) }
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

#[cfg(test)]
mod tests {
    use super::*;

    fn hole(bytes: u64) -> Transfer {
        Transfer { moved: Moved { hole: bytes, ..Moved::default() }, reason: Some(Reason::None), ..Transfer::default() }
    }

    #[test]
    fn what_comes_behind_the_end_of_a_segment_does_not_count() {
        // Two segments, the first in two parts.
        let parts = || [(0, 0..100), (0, 100..200), (1, 1000..1050)].into_iter();
        let bytes = |outcome: Outcome| outcome.result(parts()).unwrap().bytes();
        let all = || {
            let mut outcome = Outcome::default();
            outcome.add(&hole(250));
            outcome
        };
        assert_eq!(bytes(all()), 250);
        // Pieces of 20 bytes: the second brings 5, and those behind it all of theirs.
        let mut outcome = Outcome::default();
        outcome.add(&hole(20 + 5 + 160 + 50));
        outcome.ended(0, 25);
        assert_eq!(bytes(outcome), 25 + 50);
        // The file ends in both, twice in the first.
        let mut outcome = Outcome::default();
        outcome.add(&hole(100 + 10 + 20 + 7));
        [(0, 160), (0, 110), (1, 1007)].into_iter().for_each(|(segment, offset)| outcome.ended(segment, offset));
        assert_eq!(bytes(outcome), 110 + 7);
        // Where it stays as short as it is there is nothing to take off.
        let mut outcome = Outcome::default();
        outcome.add(&hole(130));
        [(0, 130), (0, 140), (1, 130)].into_iter().for_each(|(segment, offset)| outcome.ended(segment, offset));
        assert_eq!(bytes(outcome), 130);
    }
}
