//! The ring of one executor, and the completions of the pieces that were pushed to it.
//!
//! It guards that each piece comes back once. When the ring ends, what is in it comes back as
//! failed, and what is pushed from then on is refused.

use crate::error::{Error, Result};
use crate::ring::{Completed, Operation, Ring, RingName};
use rustix::event::{PollFd, PollFlags, Timespec};
use smallvec::SmallVec;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

/// How long a thread sleeps at most while the daemon is busy. The daemon's death would not wake the
/// thread, so it then asks the ring whether the daemon lives.
const LOOK: Duration = Duration::from_secs(1);

pub struct PieceRing {
    ring: Ring,
    state: Phase,
    /// What came back and was not taken, the last first.
    back: Vec<Completed>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Phase {
    Open,
    /// It ended, and what is in it has still to come back.
    Ended,
    /// It ended, and everything is back.
    Over,
}

impl PieceRing {
    /// Makes one of a ring that nothing else uses.
    pub fn new(ring: Ring) -> PieceRing {
        PieceRing { ring, state: Phase::Open, back: Vec::new() }
    }

    /// What files are attached to.
    pub fn name(&self) -> &RingName {
        self.ring.name()
    }

    /// How many pieces can be in it at once.
    pub fn capacity(&self) -> usize {
        self.ring.room() + self.ring.in_flight()
    }

    /// How many pieces are in it.
    pub fn in_flight(&self) -> usize {
        self.ring.in_flight()
    }

    /// Whether a piece need not wait to be pushed: after the end it is refused at once.
    pub fn has_room(&self) -> bool {
        self.has_ended() || self.ring.room() > 0
    }

    /// Whether nothing more is transferred.
    pub fn has_ended(&self) -> bool {
        self.state != Phase::Open
    }

    /// Gives the ring up.
    pub fn end(&mut self) {
        if self.state == Phase::Open {
            self.state = Phase::Ended;
        }
    }

    /// Puts a piece in, whose operation carries the number that [`PieceRing::pop`] gives back.
    ///
    /// # Errors
    /// [`Error::RingClosed`] after the end; what else [`Ring::push`] says.
    pub fn push(&mut self, operation: &Operation<'_>) -> Result<()> {
        if self.has_ended() {
            return Err(Error::RingClosed { path: operation.path().to_owned() });
        }
        self.ring.push(operation)
    }

    /// Tells the daemon of what was pushed.
    pub fn submit(&mut self) {
        self.ring.submit();
    }

    /// Looks for pieces that are back, which [`PieceRing::pop`] gives then. False if there is
    /// nothing new.
    pub fn look(&mut self, now: Instant) -> bool {
        debug_assert!(self.back.is_empty(), "what came back before was taken");
        let mut any = false;
        if self.is_watched() {
            match self.ring.poll(now, &mut self.back) {
                Ok(taken) => any = taken > 0,
                // That is only told when nothing more comes.
                Err(_) => self.end(),
            }
        }
        if self.state == Phase::Ended {
            self.ring.lost(&mut self.back);
            self.state = Phase::Over;
            any = true;
        }
        self.back.reverse();
        any
    }

    /// The next of the pieces that are back, in the order in which they came.
    pub fn pop(&mut self) -> Option<Completed> {
        self.back.pop()
    }

    /// Asks to be woken when a piece is back. False if there is something to be looked at first.
    pub fn arm(&mut self) -> bool {
        if !self.is_watched() {
            return true;
        }
        self.ring.arm().unwrap_or_else(|_| {
            self.end();
            false
        })
    }

    /// After [`PieceRing::arm`]: sleeps until a piece is back, or `other` is readable, or the time
    /// `most` is over.
    pub fn wait(&self, other: Option<&OwnedFd>, most: Option<Duration>) {
        let watched = self.is_watched();
        let limit = most.or(watched.then_some(LOOK));
        let timeout = limit.map(|limit| Timespec { tv_sec: limit.as_secs() as i64, tv_nsec: limit.subsec_nanos().into() });
        // A ring that was not armed may hold an old signal.
        let ring = watched.then_some(self.ring.as_fd());
        let descriptors = other.map(AsFd::as_fd).into_iter().chain(ring);
        let mut events: SmallVec<[PollFd<'_>; 2]> = descriptors.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).collect();
        // Whatever it says, everything is looked at next.
        let _ = rustix::event::poll(&mut events, timeout.as_ref());
    }

    /// Whether pieces can come back.
    fn is_watched(&self) -> bool {
        self.state == Phase::Open && self.ring.in_flight() > 0
    }
}
