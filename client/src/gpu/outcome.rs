//! How a request ends, as its pieces tell it: what they moved, and what became of the first that failed.

use crate::error::{Error, Result};
use crate::file::Transfer;
use crate::{Moved, Reason};
use gpunvme_abi::Direction;

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

    /// A piece failed, or all do from now on. The first failure is what the request is answered with.
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

/// What the ring said of a piece, with the segment that it is of, and where it lies in the file.
pub(super) fn at_place(error: Error, segment: u32, file_offset: u64) -> Error {
    match error {
        Error::Transfer { path, action, errno, reason, done, .. } => {
            Error::Transfer { path, action, errno, reason, segment: Some(segment), offset: Some(file_offset), done }
        }
        error => error,
    }
}

/// What errors call it.
pub(super) fn action(direction: Direction) -> &'static str {
    match direction {
        Direction::Read => "read",
        Direction::Write => "write",
    }
}

/// What a transfer that was rounded outwards moved for the application, `wanted` bytes, and why not faster.
pub(super) fn of_the_application(transfer: Transfer, wanted: u64, peer_to_peer: Reason) -> Transfer {
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
