//! Direct transfers, of ioctls and of rings: from an [`Admitted`] request to its answer. Both ways
//! in hand it to [`Front::transfer`].
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
use gpunvme_blockdev::Region;
use gpunvme_engine::BLOCK_SIZE;
use gpunvme_engine::Timestamp;
use gpunvme_gpupath::access::Access;
use gpunvme_gpupath::admission::Admitted;
use gpunvme_gpupath::outcome::Outcome;
use gpunvme_gpupath::planner::{self, Position};
use gpunvme_gpupath::transfer::{self, Failed};
use smallvec::SmallVec;

use crate::front::caller::Caller;
use crate::front::kernel::UnseenWrite;
use crate::front::messages;
use crate::front::resources::device_shares::InFlight;
use crate::front::resources::plan_budget::PlanPermit;
use crate::front::resources::turns::Owner;
use crate::front::shared::Front;
use gpunvme_engine::data::direct::{DirectRead, DirectWrite, WriteFailed, Written};
use gpunvme_engine::data::system_time;
use gpunvme_engine::error::FsError;

const BLOCK: u64 = BLOCK_SIZE as u64;
/// Bytes beyond which neither a loop of the transport nor a thread that serves rings fills with
/// zeros.
const QUICK_ZEROES: u64 = 256 << 10;
/// Bytes that are filled before another transfer gets a turn: less than a millisecond.
const FILL: u64 = 4 << 20;

/// An admitted transfer of an open file.
pub(super) struct Transfer {
    pub admitted: Admitted,
    /// The user and group that its writes count as.
    pub caller: Caller,
    pub ino: u64,
    /// What the file is open for.
    pub access: Access,
    /// Notes a write by a ring, which the kernel does not see.
    pub unseen: Option<UnseenWrite>,
}

/// A read in flight: everything before `at` is done, with the result `outcome`.
struct Read {
    transfer: Transfer,
    at: Position,
    outcome: Outcome,
    /// Share of the device that the part in flight holds.
    in_flight: Option<InFlight>,
}

/// A write in flight: everything before `at` is done, with the result `outcome` and the effects
/// `written` on the file.
struct Write {
    transfer: Transfer,
    at: Position,
    outcome: Outcome,
    written: Written,
    /// The segment in which the writer's limit of file sizes ends it.
    cut: Option<u32>,
    /// Share of the device that the part in flight holds.
    in_flight: Option<InFlight>,
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
    fn request(&self) -> &TransferRequest {
        self.admitted.request()
    }

    fn region(&self) -> &Arc<Region> {
        &self.admitted.buffer.region
    }

    fn owner(&self) -> Owner {
        Owner { user: self.admitted.user(), process: self.admitted.process() }
    }

    /// Bytes of it from a place on.
    fn bytes_from(&self, at: Position) -> u64 {
        let left = self.request().segments.iter().skip(at.segment).map(|segment| segment.len).sum::<u64>();
        left.saturating_sub(at.done)
    }

    /// The ranges of the file that it moves.
    fn ranges(&self) -> impl Iterator<Item = Range<u64>> + Clone {
        let segments = self.request().segments.iter().filter(|s| s.len > 0);
        segments.map(|s| s.file_offset..s.file_offset + s.len)
    }

    /// Answers a transfer that was begun.
    fn finish(self, outcome: &Outcome) {
        let Transfer { admitted, unseen, .. } = self;
        admitted.finish(outcome);
        drop(unseen);
    }

    /// Answers a transfer of which nothing was done.
    fn refuse(self, errno: i32) {
        self.admitted.refuse(errno, Reason::None, None);
    }
}

impl Front {
    /// Checks that the file is open for a transfer in this direction, and the volume ready for it.
    fn may_transfer(&self, Transfer { admitted, access, .. }: &Transfer) -> Result<(), FsError> {
        let direction = admitted.direction();
        let (needed, is_write) = match direction {
            Direction::Read => (Access::READ, false),
            Direction::Write => (Access::WRITE, true),
        };
        if !access.contains(needed) {
            return Err(FsError::BadAccess);
        }
        let is_permitted = || admitted.is_writing_permitted().unwrap_or_else(|| !self.mount_state.is_read_only());
        let is_read_only = is_write && (self.fs.volume().is_read_only() || !is_permitted());
        if is_read_only { Err(FsError::ReadOnly) } else { Ok(()) }
    }

    /// Carries out a transfer, or refuses it.
    pub(super) fn transfer(self: &Arc<Self>, mut transfer: Transfer) {
        if let Err(error) = self.may_transfer(&transfer) {
            return transfer.refuse(error.errno());
        }
        let admitted = &mut transfer.admitted;
        let is_write = admitted.direction() == Direction::Write;
        let limit = if is_write { admitted.file_size_limit() } else { u64::MAX };
        let cut = admitted.cut_at(limit);
        let ranges: SmallVec<[Range<u64>; 1]> = transfer.ranges().collect();
        if cut.is_some() && ranges.is_empty() {
            return transfer.admitted.refuse(libc::EFBIG, Reason::None, cut);
        }
        if is_write
            && transfer.request().flags.contains(TransferFlags::REQUIRE_DIRECT)
            && let Some(segment) = planner::unaligned(&transfer.request().segments, self.fs.write_alignment())
        {
            return transfer.admitted.refuse(libc::EOPNOTSUPP, Reason::Unaligned, Some(segment));
        }
        if ranges.is_empty() {
            // As with write(2), a transfer of no bytes changes nothing: no time, no bit of the
            // mode.
            return transfer.finish(&Outcome::default());
        }
        let front = self.clone();
        let is_written_back = transfer.request().flags.contains(TransferFlags::WRITTEN_BACK);
        self.written_back(transfer.owner(), transfer.ino, ranges.into_iter(), is_written_back, move || {
            let (at, outcome) = (Position::default(), Outcome::default());
            if is_write {
                let written = Written { in_place: true, shown: false };
                front.next_write(Write { transfer, at, outcome, written, cut, in_flight: None });
            } else {
                front.next_read(Read { transfer, at, outcome, in_flight: None });
            }
        });
    }

    /// Reads the next part once its user may have it in flight.
    fn next_read(self: &Arc<Self>, read: Read) {
        let (front, at, most) = (self.clone(), read.at, self.plan_budget.read_bounds().bytes);
        self.when_due(read, (|read| &read.transfer, at, most), move |read, in_flight| {
            front.direct_read(Read { in_flight, ..read });
        });
    }

    /// Writes the next part once its user may have it in flight.
    fn next_write(self: &Arc<Self>, write: Write) {
        let (front, at, most) = (self.clone(), write.at, self.plan_budget.write_bytes());
        self.when_due(write, (|write| &write.transfer, at, most), move |write, in_flight| {
            front.write_part(Write { in_flight, ..write });
        });
    }

    /// Goes on with the part of a transfer that begins at a place and has at most so many bytes,
    /// once its user may have it in flight.
    fn when_due<T: Send + 'static>(
        &self,
        part: T,
        (transfer, at, most): (fn(&T) -> &Transfer, Position, u64),
        begin: impl FnOnce(T, Option<InFlight>) + Send + 'static,
    ) {
        let of = transfer(&part);
        if of.admitted.is_by_ring() {
            return begin(part, None);
        }
        let (user, bytes) = (of.admitted.user(), of.bytes_from(at).min(most));
        let process = move |part: &T| transfer(part).admitted.process();
        self.device_shares.begin(user, bytes, part, process, |part, in_flight| begin(part, Some(in_flight)));
    }

    /// Reads a part, and goes on with the next.
    fn direct_read(self: &Arc<Self>, read: Read) {
        let plans = self.plan_budget.clone();
        self.attempt_for(
            read,
            |read| read.transfer.owner(),
            move |fs, Read { transfer, at, .. }| {
                let request = transfer.request();
                let plan = |from| {
                    let bounds = (from, plans.read_bounds());
                    fs.plan_direct_read(transfer.ino, &request.segments, bounds, transfer.region())
                };
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
            |front, read, part| match part {
                // Only the first part can be refused as if nothing had been asked.
                Err(error) if read.at == Position::default() => read.transfer.refuse(error.errno()),
                Err(error) => front.end_read(read, Outcome::failed(error.errno(), None), None),
                Ok(part) => match part.plan.edges.first() {
                    Some(edge) if read.transfer.request().flags.contains(TransferFlags::REQUIRE_DIRECT) => {
                        read.transfer.admitted.refuse(libc::EOPNOTSUPP, Reason::Unaligned, Some(edge.segment));
                    }
                    _ if part.plan.hole > QUICK_ZEROES => front.fill(part, read),
                    _ => front.begin_read(part, read),
                },
            },
        );
    }

    /// Fills the holes of a part in turns with other transfers', and then begins it.
    fn fill(self: &Arc<Self>, mut part: DirectRead, read: Read) {
        let front = self.clone();
        let hole = part.plan.hole;
        self.transfers.run_for(read.transfer.owner(), move || {
            debug_assert_eq!(part.plan.hole, hole, "what is filled still counts");
            match transfer::fill(&mut part.plan, &read.transfer.admitted.buffer, FILL) {
                Ok(true) => front.begin_read(part, read),
                Ok(false) => front.fill(part, read),
                Err(error) => {
                    let outcome = failed(&read.transfer, error);
                    front.end_read(read, outcome, None);
                }
            }
        });
    }

    fn begin_read(self: &Arc<Self>, part: DirectRead, read: Read) {
        let (front, next) = (self.clone(), part.next);
        let permit = self.plan_budget.take(part.plan.pieces());
        let complete = Outcome::done(&read.transfer.admitted.buffer, &part.plan);
        let buffer = read.transfer.admitted.buffer.clone();
        self.fs.submit_direct_read(part, buffer, move |result| {
            drop(permit);
            let outcome = result.map_or_else(|error| failed(&read.transfer, error), |()| complete);
            front.end_read(read, outcome, next);
        });
    }

    /// Ends a part of a read: continues with the one that begins at `next`, or answers.
    fn end_read(self: &Arc<Self>, read: Read, outcome: Outcome, next: Option<Position>) {
        let Read { transfer, outcome: before, in_flight, .. } = read;
        drop(in_flight);
        let outcome = before.then(outcome, 0);
        match next {
            Some(at) if outcome.status == 0 => {
                let front = self.clone();
                let read = Read { transfer, at, outcome, in_flight: None };
                self.transfers.run_for(read.transfer.owner(), move || front.next_read(read));
            }
            _ => transfer.finish(&outcome),
        }
    }

    /// Writes a part, and goes on with the next.
    fn write_part(self: &Arc<Self>, write: Write) {
        let (segments, next) = planner::write_part(&write.transfer.request().segments, write.at, self.plan_budget.write_bytes());
        // Each of its blocks may have to be written by a command of its own.
        let blocks: u64 = segments.iter().map(|segment| segment.len.div_ceil(BLOCK)).sum();
        let part = WritePart { segments, next, planned: self.plan_budget.take(blocks as usize) };
        let now = system_time();
        let front = self.clone();
        self.attempt_for(
            (write, part),
            |(write, _)| write.transfer.owner(),
            move |fs, (Write { transfer, .. }, part)| {
                // As for any other write: a user who changes a program must not thereby gain the
                // rights that it runs with.
                front.strip_unseen(&transfer.caller, transfer.ino)?;
                fs.plan_direct_write(transfer.ino, &part.segments, transfer.region(), now)
            },
            move |front, (write, part), planned| match planned {
                Ok(planned) if planned.plan.edges.is_empty() => front.begin_part(planned, write, part),
                // This plan only showed what is to be written: edges go first.
                Ok(planned) => {
                    drop(planned);
                    let (front, general) = (front.clone(), front.general.clone());
                    general.run_for(write.transfer.owner(), move || match front.write_edges(&write, &part, now) {
                        Ok(planned) => front.begin_part(planned, write, part),
                        Err(error) => front.end_part(write, part.next, Outcome::failed(error.errno(), None), None),
                    });
                }
                // Only the first part can be refused as if nothing had been asked.
                Err(error) if write.at == Position::default() => write.transfer.refuse(error.errno()),
                Err(error) => front.end_part(write, part.next, Outcome::failed(error.errno(), None), None),
            },
        );
    }

    /// Writes the edges of a part, and plans the rest of it.
    fn write_edges(&self, write: &Write, part: &WritePart, now: Timestamp) -> Result<DirectWrite, FsError> {
        let (ino, region) = (write.transfer.ino, write.transfer.region());
        self.fs.write_edges(ino, &part.segments, region, now)?;
        self.fs.wait(|| self.fs.plan_direct_write(ino, &part.segments, region, now))
    }

    fn begin_part(self: &Arc<Self>, planned: DirectWrite, write: Write, part: WritePart) {
        let front = self.clone();
        let complete = Outcome::done(&write.transfer.admitted.buffer, &planned.plan);
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
    fn end_part(self: &Arc<Self>, write: Write, next: Position, outcome: Outcome, written: Option<Written>) {
        let Write { transfer, at, outcome: before, written: Written { in_place, shown }, cut, in_flight } = write;
        drop(in_flight);
        let mut outcome = before.then(outcome, at.segment as u32);
        let written = Written {
            in_place: in_place && written.is_some_and(|w| w.in_place),
            shown: shown || written.is_none_or(|w| w.shown),
        };
        if outcome.status == 0 && next.segment < transfer.request().segments.len() {
            let front = self.clone();
            let write = Write { transfer, at: next, outcome, written, cut, in_flight: None };
            return self.transfers.run_for(write.transfer.owner(), move || front.next_write(write));
        }
        let is_whole = outcome.status == 0;
        if is_whole && cut.is_some() {
            (outcome.status, outcome.failed_segment) = (libc::EFBIG, cut);
        }
        self.end_write(transfer, outcome, is_whole, written);
    }

    /// Makes the kernel forget its pages of the written ranges, and answers. The bytes of the write
    /// are the file's by then, as far as they will be. `is_whole`: they are, all of them, up to the
    /// writer's limit.
    fn end_write(self: &Arc<Self>, transfer: Transfer, outcome: Outcome, is_whole: bool, written: Written) {
        let ends_inside = || {
            let end = transfer.ranges().map(|range| range.end).max().unwrap_or(0);
            matches!(self.fs.attributes(transfer.ino), Ok(now) if end < now.inode.size)
        };
        // Looked up when the device has the data: pages that the kernel reads from here on are new.
        let only_attributes = (written.in_place || ends_inside()) && !self.lookups.may_have(transfer.ino, transfer.ranges());
        // By a ring a thread is here that completes I/O. It must not tell the kernel anything: the
        // kernel may be evicting the inode, which only such a thread's answer to a write ends. The
        // caller of an ioctl has the file open.
        let may_tell = !written.shown || !transfer.admitted.is_by_ring();
        if only_attributes && may_tell && self.kernel.get().is_some() {
            if written.shown {
                self.attributes_change(transfer.ino);
            }
            return self.answer_write(transfer, outcome);
        }
        self.invalidate_with_size(transfer.owner(), transfer.ino, move |front, size| {
            let last = size.filter(|_| is_whole).and_then(|size| last_byte(&transfer, size));
            front.invalidate(transfer.ino, transfer.ranges().collect(), last);
            if only_attributes && written.shown {
                front.attributes_change(transfer.ino);
            }
            front.answer_write(transfer, outcome);
        });
    }

    /// Tells the kernel that the attributes that it may keep of a file are out of date.
    pub(super) fn attributes_change(&self, ino: u64) {
        let since = Instant::now();
        if self.kernel.get().is_some_and(|kernel| kernel.invalidate_attributes(ino)) {
            self.fs.take_attributes_back(ino, since);
        }
    }

    /// Answers a write. For a file that was opened with `O_DSYNC` or `O_SYNC` it first makes the
    /// write durable: the kernel does so after write(2), but not after a direct transfer.
    fn answer_write(self: &Arc<Self>, transfer: Transfer, outcome: Outcome) {
        if !transfer.access.contains(Access::SYNC) || outcome.moved.total() == 0 {
            return transfer.finish(&outcome);
        }
        self.sync(transfer.owner(), transfer.ino, move |synced| {
            let outcome = synced.map_or_else(|error| Outcome::failed(error.errno(), None), |()| outcome);
            transfer.finish(&outcome);
        });
    }
}

/// The last byte of a file of this size that a write may have extended, and its offset, from which
/// the kernel learns the length. The kernel asks for the length before it shows it, but not before
/// it appends; and it takes a length only with the bytes before it.
fn last_byte(transfer: &Transfer, size: u64) -> Option<(u64, u8)> {
    let segments = transfer.request().segments.iter().filter(|s| s.len > 0);
    let last = segments.max_by_key(|s| s.file_offset + s.len)?;
    let end = last.file_offset + last.len;
    let mut byte = [0];
    let read = transfer.region().read_at((last.buffer_offset + last.len - 1) as usize, &mut byte);
    (size == end && read.is_ok()).then_some((end - 1, byte[0]))
}

/// Outcome of a transfer when the device, or the buffer, failed: the application gets the errno,
/// and the log gets the cause.
fn failed(transfer: &Transfer, failed: Failed) -> Outcome {
    messages::transfer_failed(transfer.admitted.direction(), transfer.ino, &failed.error);
    failed.into()
}
