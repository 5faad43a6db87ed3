//! The daemon's answers to commands, apart from those that need the filesystem.
//!
//! The FUSE front end decodes an ioctl with [`abi::decode`], hands `REGISTER`, `UNREGISTER` and
//! `STATS` to the [`Server`], and frames `READ` and `WRITE` with [`Server::admit`] and
//! [`Server::finish`]. Every answer is a [`Reply`], or becomes one, and every call is counted
//! once. The registration socket uses the same server.

use crate::foreign::Foreign;
use crate::intake::Turn;
use crate::planner::{self, Plan};
use crate::process::{Client, Process};
use crate::rate_limit::RateLimit;
use crate::registry::{Buffer, Caller, Registry, RegistryError};
use crate::stats::Stats;
use crate::transfer::Failed;
use gpunvme_abi::{
    self as abi, Command, Direction, Moved, Reason, Register, Route, Transfer, TransferFlags, TransferRequest, Unregister,
};
use std::sync::Arc;
use zerocopy::{Immutable, IntoBytes};

/// The answer to an ioctl: what FUSE's ioctl reply takes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reply {
    /// 0, or a negative errno. The kernel copies `data` out in either case.
    pub result: i32,
    /// What is copied back over the argument, from its beginning.
    pub data: Vec<u8>,
}

impl Reply {
    /// An answer with a structure; `errno` is 0 or positive.
    pub fn new<T: IntoBytes + Immutable>(errno: i32, value: &T) -> Reply {
        Reply { result: -errno, data: value.as_bytes().to_vec() }
    }

    /// An answer with a structure and the entries behind it.
    pub fn with_entries<T: IntoBytes + Immutable, E: IntoBytes + Immutable>(value: &T, entries: &[E]) -> Reply {
        let mut data = value.as_bytes().to_vec();
        data.extend_from_slice(entries.as_bytes());
        Reply { result: 0, data }
    }

    /// A failure that has nothing more to say.
    pub fn error(errno: i32) -> Reply {
        Reply { result: -errno, data: Vec::new() }
    }
}

/// The answer to a `READ` or `WRITE`, which a ring's completion carries as well as an ioctl's
/// reply.
#[derive(Clone, Debug)]
pub struct Answer {
    /// 0, or a positive errno.
    pub errno: i32,
    /// What was done.
    pub transfer: Transfer,
}

impl From<Answer> for Reply {
    fn from(answer: Answer) -> Reply {
        Reply::new(answer.errno, &answer.transfer)
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
            Route::Host | Route::None => moved.host = direct,
        }
        Outcome { moved, ..Outcome::default() }
    }

    /// Nothing counts as moved.
    pub fn failed(errno: i32, segment: Option<u32>) -> Outcome {
        Outcome { status: errno, failed_segment: segment, ..Outcome::default() }
    }
}

impl Outcome {
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

/// The daemon's end of the direct path for one mount.
pub struct Server {
    /// The buffers.
    pub registry: Registry,
    /// The counters.
    pub stats: Stats,
    /// Messages about rings whose applications broke them.
    pub(crate) broken_rings: RateLimit,
}

impl Server {
    /// A server that has counted nothing.
    pub fn new(registry: Registry) -> Server {
        Server { registry, stats: Stats::default(), broken_rings: RateLimit::default() }
    }

    /// `REGISTER` by ioctl, whose caller must not have been answered. It maps and pins: not for the
    /// thread that all clients wait for.
    pub fn register(&self, caller: Caller, request: &Register) -> Reply {
        self.registered(request, self.registry.register(caller, request))
    }

    /// `REGISTER` by socket.
    pub(crate) fn register_received(&self, client: Client, fd: Foreign, request: &Register) -> Reply {
        self.registered(request, self.registry.adopt(client, fd, request))
    }

    /// As [`Server::register`], on a thread of which the user has a quota.
    pub fn register_soon(self: &Arc<Self>, caller: Caller, request: Register, done: impl FnOnce(Reply) + Send + 'static) {
        let server = self.clone();
        self.take_in(caller.user, move |may| {
            done(match may {
                Ok(()) => server.register(caller, &request),
                Err(refusal) => server.registered(&request, Err(refusal)),
            });
        });
    }

    /// Calls `task` on a thread that may wait for a user's processes; here and at once, with an
    /// error, where the user has used up the quota of such threads.
    pub fn take_in(&self, user: u32, task: impl FnOnce(Result<(), RegistryError>) + Send + 'static) {
        self.registry.intake().run(user, |turn| match turn {
            Turn::Taken => task(Ok(())),
            Turn::Refused => task(Err(RegistryError::Refused(Reason::UserLimit))),
        });
    }

    fn registered(&self, request: &Register, result: Result<Arc<Buffer>, RegistryError>) -> Reply {
        self.stats.call(Command::Register, result.is_err());
        match result {
            Ok(buffer) => {
                let (route, reason) = (buffer.route.code(), buffer.reason.code());
                Reply::new(0, &Register { buffer: buffer.id, route, reason, ..request.clone() })
            }
            Err(error) => {
                tracing::debug!(%error, "REGISTER refused");
                let refusal = Register { buffer: 0, route: Route::None.code(), reason: error.reason().code(), ..request.clone() };
                Reply::new(error.errno(), &refusal)
            }
        }
    }

    /// `UNREGISTER`. `thread` is the caller's, which must not have been answered.
    pub fn unregister(&self, thread: u32, request: &Unregister) -> Reply {
        self.unregistered(request, self.registry.unregister(thread, request.buffer))
    }

    /// `UNREGISTER` by socket.
    pub(crate) fn unregister_of(&self, process: &Process, request: &Unregister) -> Reply {
        self.unregistered(request, self.registry.unregister_of(process, request.buffer))
    }

    fn unregistered(&self, request: &Unregister, result: Result<(), RegistryError>) -> Reply {
        self.stats.call(Command::Unregister, result.is_err());
        match result {
            Ok(()) => Reply::new(0, request),
            Err(error) => Reply::new(error.errno(), request),
        }
    }

    /// `STATS`.
    pub fn stats(&self) -> Reply {
        self.stats.call(Command::Stats, false);
        Reply::new(0, &self.stats.snapshot(self.registry.usage()))
    }

    /// The buffer of a `READ` or `WRITE`, if the caller owns it, every segment lies in it, and its
    /// route is the one required. `thread` is the caller's, which must not have been answered.
    ///
    /// # Errors
    /// The answer to give.
    pub fn admit(&self, thread: u32, direction: Direction, request: &TransferRequest) -> Result<Arc<Buffer>, Answer> {
        let buffer = self
            .registry
            .lookup(thread, request.buffer)
            .map_err(|error| self.refuse(direction, request, error.errno(), error.reason(), None))?;
        self.admit_buffer(direction, request, &buffer)?;
        Ok(buffer)
    }

    /// Whether every segment of a `READ` or `WRITE` lies in a buffer that the caller owns, and its
    /// route is the one required.
    ///
    /// # Errors
    /// The answer to give.
    pub fn admit_buffer(&self, direction: Direction, request: &TransferRequest, buffer: &Buffer) -> Result<(), Answer> {
        if let Some(segment) = planner::outside(request, buffer.region.len() as u64) {
            return Err(self.refuse(direction, request, libc::EINVAL, Reason::OutsideBuffer, Some(segment)));
        }
        if request.required_route().is_some_and(|route| route != buffer.route) {
            return Err(self.refuse(direction, request, libc::EOPNOTSUPP, Reason::RouteNotAvailable, None));
        }
        Ok(())
    }

    /// Whether a plan keeps to what the caller insists on. To be asked before anything of it is
    /// carried out.
    ///
    /// # Errors
    /// The answer to give.
    pub fn admit_plan(&self, direction: Direction, request: &TransferRequest, plan: &Plan) -> Result<(), Answer> {
        match plan.edges.first() {
            Some(edge) if request.flags.contains(TransferFlags::REQUIRE_DIRECT) => {
                Err(self.refuse(direction, request, libc::EOPNOTSUPP, Reason::Unaligned, Some(edge.segment)))
            }
            _ => Ok(()),
        }
    }

    /// The answer to a transfer that was begun.
    pub fn finish(&self, direction: Direction, request: &TransferRequest, buffer: &Buffer, outcome: &Outcome) -> Answer {
        let reason = if outcome.moved.edge > 0 { Reason::Unaligned } else { buffer.reason };
        self.stats.moved(direction, &outcome.moved, reason);
        // Where a part was done the caller must learn how much, which an errno alone would not
        // tell.
        let errno = if outcome.moved.total() == 0 { outcome.status } else { 0 };
        self.answer(direction, request, errno, reason, outcome)
    }

    /// The answer to a transfer that is refused.
    pub fn refuse(
        &self,
        direction: Direction,
        request: &TransferRequest,
        errno: i32,
        reason: Reason,
        segment: Option<u32>,
    ) -> Answer {
        self.answer(direction, request, errno, reason, &Outcome::failed(errno, segment))
    }

    fn answer(&self, direction: Direction, request: &TransferRequest, errno: i32, reason: Reason, outcome: &Outcome) -> Answer {
        let Outcome { moved, status, failed_segment } = outcome;
        let command = match direction {
            Direction::Read => Command::Read,
            Direction::Write => Command::Write,
        };
        self.stats.call(command, errno != 0);
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

/// The answer to an argument that [`abi::decode`] refused.
impl From<abi::DecodeError> for Reply {
    fn from(error: abi::DecodeError) -> Self {
        tracing::debug!(%error, "ioctl refused");
        Reply::error(error.errno())
    }
}
