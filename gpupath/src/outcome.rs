//! How a transfer ended, and the answer that says so.

use crate::planner::Plan;
use crate::registry::Buffer;
use crate::transfer::Failed;
use gpunvme_abi::{Moved, Reason, Route, Transfer, TransferRequest};

/// The answer to a `READ` or `WRITE`, which a ring's completion carries as well as an ioctl's
/// reply.
pub(crate) struct Answer {
    /// 0, or a positive errno.
    pub errno: i32,
    /// What was done.
    pub transfer: Transfer,
}

impl Answer {
    /// The answer to a request that ended so. `errno`: 0 where a part was done.
    pub fn new(request: &TransferRequest, errno: i32, reason: Reason, outcome: &Outcome) -> Answer {
        let Outcome { moved, status, failed_segment } = outcome;
        let transfer = Transfer {
            flags: request.flags.bits(),
            buffer: request.buffer,
            segments: request.segments.len() as u32,
            bytes: moved.total(),
            p2p: moved.p2p,
            bounce: moved.bounce,
            host: moved.host,
            hole: moved.hole,
            edge: moved.edge,
            reason: reason.code(),
            status: *status,
            failed_segment: failed_segment.unwrap_or(u32::MAX),
            ..Transfer::default()
        };
        Answer { errno, transfer }
    }
}

/// How a transfer ended.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    /// What was moved, without a gap from the first byte of the first segment on.
    pub moved: Moved,
    /// Errno of what ended it early; 0 where nothing did.
    pub status: i32,
    /// The segment that `status` is about.
    pub failed_segment: Option<u32>,
}

impl Outcome {
    /// All that was planned has been done.
    pub fn done(buffer: &Buffer, plan: &Plan) -> Outcome {
        Outcome::moved(buffer, plan.direct, plan.hole, plan.edge)
    }

    /// These bytes have been moved.
    pub fn moved(buffer: &Buffer, direct: u64, hole: u64, edge: u64) -> Outcome {
        let mut moved = Moved { hole, edge, ..Moved::default() };
        match buffer.route {
            Route::P2p => moved.p2p = direct,
            Route::Bounce => moved.bounce = direct,
            // No buffer has the last one.
            Route::Host | Route::None | Route::Cache => moved.host = direct,
        }
        Outcome { moved, ..Outcome::default() }
    }

    /// Nothing counts as moved.
    pub fn failed(errno: i32, segment: Option<u32>) -> Outcome {
        Outcome { status: errno, failed_segment: segment, ..Outcome::default() }
    }

    /// This, and then what a later group of the same transfer's segments came to, of which `first`
    /// is the first.
    pub fn then(self, next: Outcome, first: u32) -> Outcome {
        let (a, b) = (self.moved, next.moved);
        Outcome {
            moved: Moved {
                p2p: a.p2p + b.p2p,
                bounce: a.bounce + b.bounce,
                host: a.host + b.host,
                hole: a.hole + b.hole,
                edge: a.edge + b.edge,
            },
            status: next.status,
            failed_segment: next.failed_segment.map(|segment| first + segment),
        }
    }
}

impl From<Failed> for Outcome {
    fn from(failed: Failed) -> Self {
        Outcome::failed(failed.error.errno(), failed.segment)
    }
}
