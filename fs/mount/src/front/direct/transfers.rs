//! Direct transfers, of ioctls and of rings: from an admitted request to its answer.
//!
//! A transfer is carried out in parts, one after the other. For a read, each part is planned, its
//! holes are filled, and the device does the rest; for a write, the edges of each part are written
//! first. Ordinary and direct access to a file see each other's bytes: the kernel's dirty pages are
//! written back before a transfer looks, and the kernel's pages of a range are dropped after a
//! write to it. Both steps wait for the kernel, so they never run where the kernel waits for an
//! answer.

use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use gpunvme_abi::{Direction, Reason, Segment, TransferFlags, TransferRequest};
use gpunvme_engine::BLOCK_SIZE;
use gpunvme_engine::Timestamp;
use gpunvme_gpupath::calling_thread;
use gpunvme_gpupath::planner::{self, Plan, Position};
use gpunvme_gpupath::registry::Buffer;
use gpunvme_gpupath::server::{Answer, Outcome};
use gpunvme_gpupath::transfer::{self, Failed};
use smallvec::SmallVec;

use crate::front::caller::Caller;
use crate::front::handles::Handle;
use crate::front::messages;
use crate::front::operations::files::strip_unless_privileged;
use crate::front::resources::device_shares::InFlight;
use crate::front::resources::plan_budget::PlanPermit;
use crate::front::resources::turns::Owner;
use crate::front::shared::Front;
use gpunvme_engine::data::direct::{DirectRead, DirectWrite, WriteFailed, Written};
use gpunvme_engine::data::{Filesystem, system_time};
use gpunvme_engine::error::{Attempt, Fail, FsError};

const BLOCK: u64 = BLOCK_SIZE as u64;
/// The capabilities that a program has when it is executed.
const CAPABILITY: &[u8] = b"security.capability";
/// Bytes beyond which neither a loop of the transport nor a thread that serves rings fills with
/// zeros.
const QUICK_ZEROES: u64 = 256 << 10;
/// Bytes that are filled before another transfer gets a turn: less than a millisecond.
const FILL: u64 = 4 << 20;

/// A requested transfer.
pub(crate) struct Asked {
    pub direction: Direction,
    pub caller: Caller,
    pub ino: u64,
    pub handle: Handle,
    pub request: TransferRequest,
    pub way: Way,
}

/// The way in which a transfer came.
pub(crate) enum Way {
    /// By an ioctl. Its caller must not have been answered yet: it identifies the buffer, the
    /// process and the limits.
    Ioctl,
    /// By a ring.
    Ring {
        /// The buffer, which the ring's owner owns.
        buffer: Arc<Buffer>,
        /// Owner of the ring.
        owner: Owner,
        /// Limit of file sizes for the ring's owner, in bytes: a write must not reach beyond it.
        limit: u64,
    },
}

/// A transfer that was admitted.
struct Transfer {
    direction: Direction,
    caller: Caller,
    ino: u64,
    handle: Handle,
    request: TransferRequest,
    buffer: Arc<Buffer>,
    /// Owner of the ring; none for an ioctl, whose owner is its caller.
    owner: Option<Owner>,
}

/// A read in flight: everything before `at` is done, with the result `outcome`.
struct Read<D> {
    transfer: Transfer,
    at: Position,
    outcome: Outcome,
    /// Share of the device that the part in flight holds.
    in_flight: Option<InFlight>,
    done: D,
}

/// A write in flight: everything before `at` is done, with the result `outcome` and the effects
/// `written` on the file.
struct Write<D> {
    transfer: Transfer,
    at: Position,
    outcome: Outcome,
    written: Written,
    /// The segment in which the writer's limit of file sizes ends it.
    cut: Option<u32>,
    /// Share of the device that the part in flight holds.
    in_flight: Option<InFlight>,
    done: D,
}

/// A part of a write. Its segments do not overlap: overlapping segments have an order, and requests
/// that are in flight together have none.
struct WritePart {
    segments: SmallVec<[Segment; 1]>,
    /// Where the next part begins.
    next: Position,
    planned: PlanPermit,
}

impl Transfer {
    /// Owner of the transfer. The caller of an ioctl waits for it, so its process can be looked up.
    fn owner(&self) -> Owner {
        let of_caller = || Owner { user: self.caller.context.uid, process: calling_thread::process_of(self.caller.thread) };
        self.owner.unwrap_or_else(of_caller)
    }

    /// The user and the thread of an ioctl; none for rings, whose share is dealt where they are
    /// served.
    fn caller_of_ioctl(&self) -> Option<(u32, u32)> {
        self.owner.is_none().then_some((self.caller.context.uid, self.caller.thread))
    }

    /// Bytes of it from a place on.
    fn bytes_from(&self, at: Position) -> u64 {
        let left = self.request.segments.iter().skip(at.segment).map(|segment| segment.len).sum::<u64>();
        left.saturating_sub(at.done)
    }

    /// The ranges of the file that it moves.
    fn ranges(&self) -> impl Iterator<Item = Range<u64>> + Clone {
        let segments = self.request.segments.iter().filter(|s| s.len > 0);
        segments.map(|s| s.file_offset..s.file_offset + s.len)
    }
}

impl Front {
    /// Checks that the file is open for a transfer in this direction, and the volume ready for it.
    fn may_transfer(&self, direction: Direction, handle: Handle, request: &TransferRequest) -> Result<(), Answer> {
        let access = match direction {
            Direction::Read => handle.readable(),
            Direction::Write => {
                let is_read_only = self.fs.volume().is_read_only() || self.mount_state.is_read_only();
                handle.writable().and(if is_read_only { Err(FsError::ReadOnly) } else { Ok(()) })
            }
        };
        access.map_err(|error| self.direct.server.refuse(direction, request, error.errno(), Reason::None, None))
    }

    /// Carries out a transfer, or refuses it.
    pub(crate) fn transfer(self: &Arc<Self>, asked: Asked, done: impl FnOnce(Answer) + Send + 'static) {
        match self.admit(asked) {
            Ok((transfer, limit)) => self.begin_transfer(transfer, limit, done),
            Err(refusal) => done(refusal),
        }
    }

    /// Admits a transfer, or gives the answer that refuses it. Also returns the offset in files
    /// from which on its writer may write nothing.
    fn admit(&self, asked: Asked) -> Result<(Transfer, u64), Answer> {
        let Asked { direction, caller, ino, handle, request, way } = asked;
        self.may_transfer(direction, handle, &request)?;
        let server = &self.direct.server;
        let (buffer, owner, limit) = match way {
            Way::Ioctl => {
                let buffer = server.admit(caller.thread, direction, &request)?;
                let limit = if direction == Direction::Write { calling_thread::file_size_limit(caller.thread) } else { u64::MAX };
                (buffer, None, limit)
            }
            Way::Ring { buffer, owner, limit } => {
                server.admit_buffer(direction, &request, &buffer)?;
                (buffer, Some(owner), limit)
            }
        };
        Ok((Transfer { direction, caller, ino, handle, request, buffer, owner }, limit))
    }

    /// Begins a transfer that was admitted. `limit`: the offset in files from which on its writer
    /// may write nothing.
    fn begin_transfer(self: &Arc<Self>, mut transfer: Transfer, limit: u64, done: impl FnOnce(Answer) + Send + 'static) {
        let cut = if transfer.direction == Direction::Write { cut_at(&mut transfer.request, limit) } else { None };
        let Transfer { direction, request, .. } = &transfer;
        let refuse = |errno, reason, segment| self.direct.server.refuse(*direction, request, errno, reason, segment);
        if cut.is_some() && transfer.ranges().next().is_none() {
            return done(refuse(libc::EFBIG, Reason::None, cut));
        }
        if *direction == Direction::Write
            && request.flags.contains(TransferFlags::REQUIRE_DIRECT)
            && let Some(segment) = planner::unaligned(&request.segments, self.fs.write_alignment())
        {
            return done(refuse(libc::EOPNOTSUPP, Reason::Unaligned, Some(segment)));
        }
        let front = self.clone();
        let ranges: SmallVec<[Range<u64>; 1]> = transfer.ranges().collect();
        if ranges.is_empty() {
            // As with write(2), a transfer of no bytes changes nothing: no time, no bit of the
            // mode.
            return self.answer(transfer, &Outcome::default(), done);
        }
        self.written_back(transfer.ino, ranges.into_iter(), move || match transfer.direction {
            Direction::Read => {
                let (at, outcome) = (Position::default(), Outcome::default());
                front.next_read(Read { transfer, at, outcome, in_flight: None, done });
            }
            Direction::Write => {
                let (at, outcome) = (Position::default(), Outcome::default());
                let written = Written { in_place: true, shown: false };
                front.next_write(Write { transfer, at, outcome, written, cut, in_flight: None, done });
            }
        });
    }

    /// Reads the next part once its user may have it in flight.
    fn next_read<D: FnOnce(Answer) + Send + 'static>(self: &Arc<Self>, mut read: Read<D>) {
        let Some((user, thread)) = read.transfer.caller_of_ioctl() else { return self.direct_read(read) };
        let bytes = read.transfer.bytes_from(read.at).min(self.plan_budget.read_bounds().bytes);
        let front = self.clone();
        self.device_shares.begin(
            user,
            || calling_thread::process_of(thread),
            bytes,
            move |in_flight| {
                read.in_flight = Some(in_flight);
                front.direct_read(read);
            },
        );
    }

    /// As [`Front::next_read`], for a write.
    fn next_write<D: FnOnce(Answer) + Send + 'static>(self: &Arc<Self>, mut write: Write<D>) {
        let Some((user, thread)) = write.transfer.caller_of_ioctl() else { return self.write_part(write) };
        let bytes = write.transfer.bytes_from(write.at).min(self.plan_budget.write_bytes());
        let front = self.clone();
        self.device_shares.begin(
            user,
            || calling_thread::process_of(thread),
            bytes,
            move |in_flight| {
                write.in_flight = Some(in_flight);
                front.write_part(write);
            },
        );
    }

    /// Reads a part, and goes on with the next.
    fn direct_read<D: FnOnce(Answer) + Send + 'static>(self: &Arc<Self>, read: Read<D>) {
        let plans = self.plan_budget.clone();
        self.attempt_for(
            read,
            move |fs, Read { transfer, at, .. }| {
                let Transfer { ino, request, buffer, .. } = transfer;
                let plan = |from| fs.plan_direct_read(*ino, &request.segments, (from, plans.read_bounds()), &buffer.region);
                let part = plan(*at)?;
                if *at == Position::default() && request.flags.contains(TransferFlags::REQUIRE_DIRECT) {
                    // Before a byte moves, all parts have to be checked.
                    let mut next = part.next;
                    while let Some(from) = next {
                        let later = plan(from)?;
                        if !later.plan.edges.is_empty() {
                            return Ok(later);
                        }
                        next = later.next;
                    }
                }
                Ok(part)
            },
            |front, read, part| {
                let part = match part {
                    // Only the first part can be refused as if nothing had been asked.
                    Err(error) if read.at != Position::default() => {
                        return front.end_read(read, Outcome::failed(error.errno(), None), None);
                    }
                    part => front.admitted(&read.transfer, part, |part| &part.plan),
                };
                match part {
                    Ok(part) if part.plan.hole > QUICK_ZEROES => front.fill(part, read),
                    Ok(part) => front.begin_read(part, read),
                    Err(refusal) => (read.done)(refusal),
                }
            },
        );
    }

    /// Fills the holes of a part in turns with other transfers', and then begins it.
    fn fill<D: FnOnce(Answer) + Send + 'static>(self: &Arc<Self>, mut part: DirectRead, read: Read<D>) {
        let front = self.clone();
        let hole = part.plan.hole;
        self.transfers.run_for(read.transfer.owner(), move || {
            debug_assert_eq!(part.plan.hole, hole, "what is filled still counts");
            match transfer::fill(&mut part.plan, &read.transfer.buffer, FILL) {
                Ok(true) => front.begin_read(part, read),
                Ok(false) => front.fill(part, read),
                Err(error) => {
                    let outcome = failed(&read.transfer, error);
                    front.end_read(read, outcome, None);
                }
            }
        });
    }

    fn begin_read<D: FnOnce(Answer) + Send + 'static>(self: &Arc<Self>, part: DirectRead, read: Read<D>) {
        let (front, next) = (self.clone(), part.next);
        let permit = self.plan_budget.take(part.plan.pieces());
        let complete = Outcome::done(&read.transfer.buffer, &part.plan);
        let buffer = read.transfer.buffer.clone();
        self.fs.submit_direct_read(part, buffer, move |result| {
            drop(permit);
            let outcome = result.map_or_else(|error| failed(&read.transfer, error), |()| complete);
            front.end_read(read, outcome, next);
        });
    }

    /// Ends a part of a read: continues with the one that begins at `next`, or answers.
    fn end_read<D: FnOnce(Answer) + Send + 'static>(self: &Arc<Self>, read: Read<D>, outcome: Outcome, next: Option<Position>) {
        let Read { transfer, outcome: before, in_flight, done, .. } = read;
        drop(in_flight);
        let outcome = before.then(outcome, 0);
        match next {
            Some(at) if outcome.status == 0 => {
                let front = self.clone();
                let read = Read { transfer, at, outcome, in_flight: None, done };
                self.transfers.run_for(read.transfer.owner(), move || front.next_read(read));
            }
            _ => self.answer(transfer, &outcome, done),
        }
    }

    /// Writes a part, and goes on with the next.
    fn write_part<D: FnOnce(Answer) + Send + 'static>(self: &Arc<Self>, write: Write<D>) {
        let (segments, next) = planner::write_part(&write.transfer.request.segments, write.at, self.plan_budget.write_bytes());
        // Each of its blocks may have to be written by a command of its own.
        let blocks: u64 = segments.iter().map(|segment| segment.len.div_ceil(BLOCK)).sum();
        let part = WritePart { segments, next, planned: self.plan_budget.take(blocks as usize) };
        let now = system_time();
        self.attempt_for(
            (write, part),
            move |fs, (Write { transfer, .. }, part)| {
                // As for any other write: a user who changes a program must not thereby gain the
                // rights that it runs with.
                strip_unseen(fs, &transfer.caller, transfer.ino)?;
                fs.plan_direct_write(transfer.ino, &part.segments, &transfer.buffer.region, now)
            },
            move |front, (write, part), planned| match planned {
                Ok(planned) if planned.plan.edges.is_empty() => front.begin_part(planned, write, part),
                // This plan only showed what is to be written: edges go first.
                Ok(planned) => {
                    drop(planned);
                    let (front, general) = (front.clone(), front.general.clone());
                    general.run(move || match front.write_edges(&write, &part, now) {
                        Ok(planned) => front.begin_part(planned, write, part),
                        Err(error) => front.end_part(write, part.next, Outcome::failed(error.errno(), None), None),
                    });
                }
                // Only the first part can be refused as if nothing had been asked.
                Err(error) if write.at == Position::default() => {
                    let Transfer { direction, request, .. } = &write.transfer;
                    let refusal = front.direct.server.refuse(*direction, request, error.errno(), Reason::None, None);
                    (write.done)(refusal);
                }
                Err(error) => front.end_part(write, part.next, Outcome::failed(error.errno(), None), None),
            },
        );
    }

    /// Writes the edges of a part, and plans the rest of it.
    fn write_edges<D>(&self, write: &Write<D>, part: &WritePart, now: Timestamp) -> Result<DirectWrite, FsError> {
        let Transfer { ino, buffer, .. } = &write.transfer;
        self.fs.write_edges(*ino, &part.segments, &buffer.region, now)?;
        self.fs.wait(|| self.fs.plan_direct_write(*ino, &part.segments, &buffer.region, now))
    }

    fn begin_part<D: FnOnce(Answer) + Send + 'static>(self: &Arc<Self>, planned: DirectWrite, write: Write<D>, part: WritePart) {
        let front = self.clone();
        let complete = Outcome::done(&write.transfer.buffer, &planned.plan);
        let WritePart { next, planned: mut pieces, .. } = part;
        pieces.set(planned.plan.pieces());
        self.fs.submit_direct_write(planned, move |result| {
            drop(pieces);
            let (outcome, written) = match result {
                Ok(written) => (complete, Some(written)),
                Err(WriteFailed::Device(error)) => (failed(&write.transfer, error), None),
                Err(WriteFailed::Mapping(error)) => (Outcome::failed(error.errno(), None), None),
            };
            front.end_part(write, next, outcome, written);
        });
    }

    /// Ends a part of a write: continues with the one that begins at `next`, or answers. `written`:
    /// its effects on the file, if it was written.
    fn end_part<D: FnOnce(Answer) + Send + 'static>(
        self: &Arc<Self>,
        write: Write<D>,
        next: Position,
        outcome: Outcome,
        written: Option<Written>,
    ) {
        let Write { transfer, at, outcome: before, written: Written { in_place, shown }, cut, in_flight, done } = write;
        drop(in_flight);
        let mut outcome = before.then(outcome, at.segment as u32);
        let written = Written {
            in_place: in_place && written.is_some_and(|w| w.in_place),
            shown: shown || written.is_none_or(|w| w.shown),
        };
        if outcome.status == 0 && next.segment < transfer.request.segments.len() {
            let front = self.clone();
            let write = Write { transfer, at: next, outcome, written, cut, in_flight: None, done };
            return self.transfers.run_for(write.transfer.owner(), move || front.next_write(write));
        }
        let is_whole = outcome.status == 0;
        if is_whole && cut.is_some() {
            (outcome.status, outcome.failed_segment) = (libc::EFBIG, cut);
        }
        self.end_write(transfer, outcome, is_whole, written, done);
    }

    /// Makes the kernel forget its pages of the written ranges, and answers. The bytes of the write
    /// are the file's by then, as far as they will be. `is_whole`: they are, all of them, up to the
    /// writer's limit.
    fn end_write(
        self: &Arc<Self>,
        transfer: Transfer,
        outcome: Outcome,
        is_whole: bool,
        written: Written,
        done: impl FnOnce(Answer) + Send + 'static,
    ) {
        let ends_inside = || {
            let end = transfer.ranges().map(|range| range.end).max().unwrap_or(0);
            matches!(self.fs.attributes(transfer.ino), Ok(now) if end < now.inode.size)
        };
        // Looked up when the device has the data: pages that the kernel reads from here on are new.
        let only_attributes = (written.in_place || ends_inside()) && !self.lookups.may_have(transfer.ino, transfer.ranges());
        if only_attributes && let Some(kernel) = self.kernel.get() {
            if written.shown {
                let since = Instant::now();
                if kernel.invalidate_attributes(transfer.ino) {
                    self.fs.take_attributes_back(transfer.ino, since);
                }
            }
            return self.answer_write(transfer, outcome, done);
        }
        let front = self.clone();
        self.invalidations.run(move || {
            let last = || if is_whole { front.last_byte(&transfer) } else { None };
            front.invalidate(transfer.ino, transfer.ranges().collect(), last);
            front.answer_write(transfer, outcome, done);
        });
    }

    /// Answers a write. For a file that was opened with `O_DSYNC` or `O_SYNC` it first makes the
    /// write durable: the kernel does so after write(2), but not after a direct transfer.
    fn answer_write(self: &Arc<Self>, transfer: Transfer, outcome: Outcome, done: impl FnOnce(Answer) + Send + 'static) {
        if !transfer.handle.is_sync() || outcome.moved.total() == 0 {
            return self.answer(transfer, &outcome, done);
        }
        let front = self.clone();
        self.sync(transfer.ino, transfer.handle, move |synced| {
            let outcome = synced.map_or_else(|error| Outcome::failed(error.errno(), None), |()| outcome);
            front.answer(transfer, &outcome, done);
        });
    }

    /// The last byte of a file that a write may have extended, and its offset, from which the
    /// kernel learns the length. The kernel asks for the length before it shows it, but not before
    /// it appends; and it takes a length only with the bytes before it.
    fn last_byte(&self, transfer: &Transfer) -> Option<(u64, u8)> {
        let segments = transfer.request.segments.iter().filter(|s| s.len > 0);
        let last = segments.max_by_key(|s| s.file_offset + s.len)?;
        let end = last.file_offset + last.len;
        let reaches_end = self.fs.wait(|| self.fs.attributes(transfer.ino)).is_ok_and(|now| now.inode.size == end);
        let mut byte = [0];
        let read = transfer.buffer.region.read_at((last.buffer_offset + last.len - 1) as usize, &mut byte);
        (reaches_end && read.is_ok()).then_some((end - 1, byte[0]))
    }

    /// Checks whether a planned transfer may begin; else returns the answer that refuses it.
    fn admitted<P>(&self, transfer: &Transfer, planned: Result<P, FsError>, plan: impl FnOnce(&P) -> &Plan) -> Result<P, Answer> {
        let Transfer { direction, request, .. } = transfer;
        let server = &self.direct.server;
        let planned = planned.map_err(|error| server.refuse(*direction, request, error.errno(), Reason::None, None))?;
        server.admit_plan(*direction, request, plan(&planned))?;
        Ok(planned)
    }

    /// Answers a transfer that was begun. It lets go of the buffer first: a caller that unregisters
    /// the buffer after the answer finds the memory free.
    fn answer(&self, transfer: Transfer, outcome: &Outcome, done: impl FnOnce(Answer)) {
        let answer = self.direct.server.finish(transfer.direction, &transfer.request, &transfer.buffer, outcome);
        drop(transfer);
        done(answer);
    }
}

/// Strips from a file what a write strips and the kernel does not see: its capabilities, which the
/// kernel removes ahead of every write(2), and the set-user-id bits, unless the writer has the
/// privilege to keep them.
fn strip_unseen(fs: &Filesystem, caller: &Caller, ino: u64) -> Attempt<()> {
    match fs.get_xattr(ino, CAPABILITY) {
        // An empty value gives nothing, and the kernel leaves it (`cap_inode_need_killpriv`).
        Ok(value) if value.is_empty() => {}
        Ok(_) => match fs.remove_xattr(&caller.context, ino, CAPABILITY) {
            Ok(()) | Err(Fail::Error(FsError::NoData)) => {}
            Err(fail) => return Err(fail),
        },
        Err(Fail::Error(FsError::NoData)) => {}
        Err(fail) => return Err(fail),
    }
    strip_unless_privileged(fs, caller, ino).map(drop)
}

/// Cuts a write at the offset from which on its writer may write nothing. Returns the first segment
/// that is cut.
fn cut_at(request: &mut TransferRequest, limit: u64) -> Option<u32> {
    let cut = request.segments.iter().position(|s| s.len > 0 && s.file_offset.saturating_add(s.len) > limit)?;
    let (first, behind) = request.segments[cut..].split_first_mut().expect("it is one of them");
    first.len = limit.saturating_sub(first.file_offset);
    behind.iter_mut().for_each(|segment| segment.len = 0);
    Some(cut as u32)
}

/// Outcome of a transfer when the device, or the buffer, failed: the application gets the errno,
/// and the log gets the cause.
fn failed(transfer: &Transfer, failed: Failed) -> Outcome {
    messages::transfer_failed(transfer.direction, transfer.ino, &failed.error);
    failed.into()
}
