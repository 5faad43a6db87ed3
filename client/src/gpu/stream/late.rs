//! Requests of which it is known only when the stream comes to them what they are to do, up to
//! what was said when they were made.
//!
//! Copies cannot be in the stream before it is known what they copy. So the processor moves host
//! memory, as it always does, and the kernel all other: in each step of the request the stream has
//! it once, with a table that the thread that serves the request fills when it knows what is to be
//! moved. What the device reaches itself is not served so: another place in memory would have to
//! be registered, and that thread makes no call of CUDA.

use super::plan::{Cut, DEPTH, FRAME, MOVES, Plan, Planned, Step, Terms};
use crate::gpu::memory::pieces::{self, Blocks};
use crate::gpu::request::{Allocation, Parts, Segment, SegmentPart};
use gpunvme_abi::{Direction, MAX_OFFSET, Reason};
use gpunvme_cuda::Move;
use rustix::io::Errno;

/// Bytes of a move at most. All of a frame's are half as many as its table has room for: the others
/// are for the ends of pieces.
const LONGEST: u64 = 2 * (FRAME / MOVES) as u64;
/// Pieces of a step at most.
const PIECES: usize = MOVES / 2;

/// What is known of such a request when it is made.
pub struct Late {
    most: Segment,
    /// The allocations that it may be done in.
    extents: Vec<Extent>,
    direction: Direction,
    blocks: Blocks,
    alignment: usize,
    /// Whether the kernel moves the bytes.
    by_kernel: bool,
    /// Steps that the stream gets for pieces.
    steps: usize,
}

#[derive(Clone, Copy)]
struct Extent {
    allocation: Allocation,
    /// Why its bytes are staged.
    reason: Reason,
}

impl Late {
    /// None where it has to be done as it was said when it was made.
    pub fn new(terms: &Terms, most: Segment, parts: &[SegmentPart]) -> Option<Late> {
        let by_kernel = parts.iter().all(|part| {
            let Allocation { gpu, by_kernel, host, .. } = part.allocation;
            host.is_none() && by_kernel && terms.kernels_of == Some(gpu)
        });
        if !by_kernel && !parts.iter().all(|part| part.allocation.host.is_some()) {
            return None;
        }
        let extent = |part: &SegmentPart| Some(Extent { allocation: part.allocation, reason: *part.registered.as_ref().err()? });
        let mut extents: Vec<Extent> = parts.iter().map(extent).collect::<Option<_>>()?;
        extents.dedup_by_key(|extent| extent.allocation.base);
        // Each allocation may begin in a frame of its own, and within a block: of the frames that
        // it takes, the last is not full, and the first has a block that another has too.
        let block = terms.blocks.read.max(terms.blocks.write);
        let steps = (most.len + block).div_ceil(FRAME as u64) as usize + 2 * (extents.len() - 1);
        let Terms { direction, blocks, alignment, .. } = *terms;
        Some(Late { most, extents, direction, blocks, alignment, by_kernel, steps })
    }

    /// What was said when it was made.
    pub fn most(&self) -> Segment {
        self.most
    }

    /// Whether each step has a table for the kernel, which has to be filled.
    pub fn has_tables(&self) -> bool {
        self.by_kernel
    }

    /// The steps that the stream gets, with nothing in them.
    pub fn empty(&self) -> Cut {
        let mut cut = Cut { plan: Plan { pieces: Vec::new(), steps: Vec::new() }, parts: Parts::new() };
        self.fill_up(&mut cut.plan);
        cut
    }

    /// Cuts what is to be done.
    ///
    /// # Errors
    /// `EINVAL` for more than was said, or beyond what a file may be; `EFAULT` for memory of
    /// another allocation; `EOPNOTSUPP` where it takes more steps than the stream has got.
    pub fn cut(&self, segment: Segment) -> Result<Cut, Errno> {
        let Segment { file_offset, address, len } = segment;
        let fits = file_offset.checked_add(len).is_some_and(|end| end <= MAX_OFFSET);
        if len > self.most.len || !fits {
            return Err(Errno::INVAL);
        }
        let (mut parts, mut within) = (Parts::new(), 0);
        while within < len {
            let at = address.checked_add(within).ok_or(Errno::FAULT)?;
            let inside = |extent: &&Extent| at.checked_sub(extent.allocation.base).is_some_and(|by| by < extent.allocation.len);
            let Extent { allocation, reason } = *self.extents.iter().find(inside).ok_or(Errno::FAULT)?;
            let part = (allocation.base + allocation.len - at).min(len - within);
            let file_offset = file_offset + within;
            parts.push(SegmentPart { file_offset, address: at, len: part, segment: 0, allocation, registered: Err(reason) });
            within += part;
        }
        let mut plan = self.plan(&parts);
        if plan.steps.len() > self.steps {
            return Err(Errno::OPNOTSUPP);
        }
        self.fill_up(&mut plan);
        Ok(Cut { plan, parts })
    }

    fn plan(&self, parts: &[SegmentPart]) -> Plan {
        let mut plan = Plan { pieces: Vec::new(), steps: Vec::new() };
        let (mut begun, mut used) = (0, 0);
        for (index, part) in parts.iter().enumerate() {
            let mut within = 0;
            while within < part.len {
                let (offset, rest) = (part.file_offset + within, part.len - within);
                let piece = pieces::first(self.direction, self.blocks, offset, rest, FRAME as u64);
                let taken = piece.slot_len().next_multiple_of(self.alignment);
                if used + taken > FRAME || plan.pieces.len() - begun == PIECES {
                    plan.steps.push(Step { pieces: begun..plan.pieces.len(), moves: self.moves() });
                    (begun, used) = (plan.pieces.len(), 0);
                }
                let address = part.address + within;
                let host = part.allocation.on_host(address);
                plan.pieces.push(Planned { part: index, address, slot: Some(used), piece, entry: None, host, keeps: false });
                used += taken;
                within += piece.wanted;
            }
        }
        if begun < plan.pieces.len() {
            plan.steps.push(Step { pieces: begun..plan.pieces.len(), moves: self.moves() });
        }
        plan
    }

    /// The kernel's moves of each step: as many as there may be, since the stream gets it before
    /// they are known.
    fn moves(&self) -> usize {
        if self.by_kernel { MOVES } else { 0 }
    }

    /// Adds the steps that have nothing to do, and before a write those that it is waited for by
    /// before its first table is needed ([`Plan::new`]).
    fn fill_up(&self, plan: &mut Plan) {
        plan.steps.resize_with(self.steps, || Step { pieces: 0..0, moves: self.moves() });
        if self.direction == Direction::Write && self.by_kernel {
            plan.steps.splice(0..0, (0..DEPTH).map(|_| Step { pieces: 0..0, moves: 0 }));
        }
    }
}

/// The moves of a step's pieces, of each of which `len` bytes are there, between the slot that it
/// has at `slot` and the application's memory. They fill a table.
pub fn moves<'a>(direction: Direction, pieces: impl Iterator<Item = (&'a Planned, u64, u64)>) -> [Move; MOVES] {
    let mut table = [Move { to: 0, from: 0, len: 0 }; MOVES];
    let mut entries = table.iter_mut();
    for (planned, slot, len) in pieces {
        for begin in (0..len).step_by(LONGEST as usize) {
            let (slot, address) = (slot + begin, planned.address + begin);
            let (to, from) = crate::gpu::memory::staging::ends(direction, address, slot);
            let entry = entries.next().expect("a table has room for all pieces of a step");
            *entry = Move { to, from, len: LONGEST.min(len - begin) };
        }
    }
    table
}
