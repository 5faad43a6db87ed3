//! Cuts a request in the order of a stream into steps: all of it when it is asked for, because
//! addresses are put into the stream then.
//!
//! It guards the bound of a stream's window: whatever a request asks for, what is in flight at
//! once fits into its frames. Each step has one frame to itself; steps that are [`DEPTH`] apart
//! have the same, one after the other.

use crate::gpu::memory::pieces::{self, Blocks, PieceRange};
use crate::gpu::pipeline::copy_stream::{MANY, SMALL};
use crate::gpu::request::{Parts, SegmentPart};
use gpunvme_abi::Direction;
use gpunvme_cuda::Gpu;
use std::ops::Range;

/// Frames of a window, and so steps of a request in flight at once.
pub const DEPTH: usize = 4;
/// Bytes of a frame: an H200's copy engine moves about 43 GB/s in copies of this length, and four
/// of them in flight keep an SSD busy.
pub const FRAME: usize = 512 << 10;
/// Pieces of a step at most, and moves that a frame has a table for.
pub const MOVES: usize = 128;

/// A piece of a request.
pub struct Planned {
    /// Which part of the request it is of.
    pub part: usize,
    /// In the application's memory.
    pub address: u64,
    /// Where in its frame it has its slot; none for what the device moves itself.
    pub slot: Option<usize>,
    pub piece: PieceRange,
    /// Which move of the kernel's table it is, if the kernel moves it.
    pub entry: Option<usize>,
    /// Where the processor finds it, if the processor moves it.
    pub host: Option<u64>,
    /// The file may end in it: what is in memory behind the end has to stay.
    pub keeps: bool,
}

impl Planned {
    /// Whether the stream copies it.
    pub fn is_copied(&self) -> bool {
        self.slot.is_some() && self.entry.is_none() && self.host.is_none()
    }
}

/// Pieces that are transferred together, and copied together.
pub struct Step {
    /// Of the plan's pieces.
    pub pieces: Range<usize>,
    /// How many of them the kernel moves.
    pub moves: usize,
}

pub struct Plan {
    pub pieces: Vec<Planned>,
    pub steps: Vec<Step>,
}

/// A request and how it is cut.
pub struct Cut {
    pub plan: Plan,
    pub parts: Parts,
}

impl Cut {
    /// The pieces of a step.
    pub fn pieces(&self, step: usize) -> impl Iterator<Item = &Planned> {
        self.plan.pieces[self.plan.steps[step].pieces.clone()].iter()
    }
}

/// The parameters by which a request is cut.
pub struct Terms {
    pub direction: Direction,
    pub blocks: Blocks,
    /// What slots are aligned to.
    pub alignment: usize,
    /// Of the request, in bytes.
    pub bytes: u64,
    /// How long the file is, as far as is known.
    pub file_size: u64,
    /// The GPU whose kernels the stream runs.
    pub kernels_of: Option<Gpu>,
}

impl Plan {
    pub fn new(terms: &Terms, parts: &[SegmentPart]) -> Plan {
        let Terms { direction, blocks, alignment, .. } = *terms;
        let piece_len = pieces::piece_len(terms.bytes);
        let frame = piece_len.min(FRAME as u64);
        let mut plan = Plan { pieces: Vec::new(), steps: Vec::new() };
        let (mut begun, mut used) = (0, 0);
        for (index, part) in parts.iter().enumerate() {
            let mut within = 0;
            while within < part.len {
                let (offset, rest) = (part.file_offset + within, part.len - within);
                let staged = part.registered.is_err();
                let piece = if staged {
                    pieces::first(direction, blocks, offset, rest, frame)
                } else {
                    pieces::first_unstaged(blocks, offset, rest, piece_len)
                };
                let taken = if staged { piece.slot_len().next_multiple_of(alignment) } else { 0 };
                if used + taken > frame as usize || plan.pieces.len() - begun == MOVES {
                    plan.end_step(begun);
                    (begun, used) = (plan.pieces.len(), 0);
                }
                let small = staged && piece.wanted <= SMALL && part.allocation.by_kernel;
                let by_kernel = small && terms.kernels_of == Some(part.allocation.gpu);
                let address = part.address + within;
                let host = part.allocation.on_host(address).filter(|_| staged);
                plan.pieces.push(Planned {
                    part: index,
                    address,
                    slot: staged.then_some(used),
                    piece,
                    entry: by_kernel.then_some(0),
                    host,
                    keeps: staged && host.is_none() && direction == Direction::Read && offset + piece.wanted > terms.file_size,
                });
                used += taken;
                within += piece.wanted;
            }
        }
        plan.end_step(begun);
        // The service thread fills the table of a write's step when the step before it in its frame
        // ends: so each step must have one before it.
        if direction == Direction::Write && plan.steps.iter().any(|step| step.moves > 0) {
            let none = (0..DEPTH).map(|_| Step { pieces: 0..0, moves: 0 });
            plan.steps.splice(0..0, none);
        }
        plan
    }

    /// How many pieces each step has.
    pub fn pieces_of_steps(&self) -> Vec<usize> {
        self.steps.iter().map(|step| step.pieces.len()).collect()
    }

    /// Makes a step of the pieces from `begun` on, if there are any.
    fn end_step(&mut self, begun: usize) {
        let pieces = begun..self.pieces.len();
        if pieces.is_empty() {
            return;
        }
        let step = &mut self.pieces[pieces.clone()];
        let small = step.iter().filter(|planned| planned.entry.is_some()).count();
        let moves = if small >= MANY { small } else { 0 };
        let mut entries = 0..moves;
        for planned in step.iter_mut().filter(|planned| planned.entry.is_some()) {
            planned.entry = entries.next();
            // The kernel moves what arrived and nothing more.
            planned.keeps &= planned.entry.is_none();
        }
        self.steps.push(Step { pieces, moves });
    }
}
