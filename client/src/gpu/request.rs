//! A request of an application, its memory looked up, ready to be done.

use super::answer::End;
use super::memory::pieces::{Blocks, PieceRange, first, piece_len};
use super::memory::registrations::Lease;
use super::memory::staging::Staging;
use super::page_cache::cached_file::CachedFile;
use super::page_cache::cached_range::Missing;
use crate::buffer::{Memory, Shared};
use crate::ring::{Attached, Operation};
use crate::transfer::Require;
use gpunvme_abi::{Direction, Reason};
use gpunvme_cuda::Gpu;
use smallvec::SmallVec;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// A range of a file and as long a range of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Segment {
    /// Where in the file it begins, in bytes.
    pub file_offset: u64,
    /// Where in memory it begins: a `CUdeviceptr`, or a pointer of the CUDA runtime.
    pub address: u64,
    /// How long it is, in bytes.
    pub len: u64,
}

/// A part of a segment, in one allocation.
#[derive(Debug)]
pub(super) struct SegmentPart {
    pub file_offset: u64,
    pub address: u64,
    pub len: u64,
    /// Of the segment, in the call.
    pub segment: u32,
    pub allocation: Allocation,
    /// What the device reaches it by, or why it goes through the staging pool.
    pub registered: std::result::Result<Lease, Reason>,
}

/// The parts of a request: mostly one, which then needs no memory of its own.
pub(super) type Parts = SmallVec<[SegmentPart; 1]>;

/// What lies at the addresses of a request.
pub(super) struct Found {
    pub parts: Parts,
    /// Of all of it.
    pub bytes: u64,
}

impl Found {
    /// Whether a read of it is one piece that goes through a staging pool.
    pub fn is_one_piece(&self, blocks: Blocks) -> bool {
        let [SegmentPart { file_offset, len, registered: Err(_), .. }] = self.parts[..] else { return false };
        first(Direction::Read, blocks, file_offset, len, piece_len(self.bytes)).wanted == len
    }

    /// The GPUs whose copies it needs, one again and again where it has many parts.
    pub fn gpus(&self) -> impl Iterator<Item = Gpu> {
        self.parts.iter().filter(|part| part.registered.is_err()).map(|part| part.allocation.gpu)
    }
}

/// The allocation that a part lay in when the request was made.
#[derive(Clone, Copy, Debug)]
pub(super) struct Allocation {
    /// The GPU whose copies reach it.
    pub gpu: Gpu,
    /// Whether that GPU's kernels do.
    pub by_kernel: bool,
    /// Where the processor finds its first byte, if it is host memory. Then the processor copies
    /// it: CUDA does that in its caller, and lets the caller wait for the stream.
    pub host: Option<u64>,
    pub base: u64,
    pub len: u64,
    pub buffer_id: u64,
}

impl Allocation {
    /// Where the processor finds what lies at an address of it, if it is host memory.
    pub fn on_host(&self, address: u64) -> Option<u64> {
        Some(self.host?.wrapping_add(address - self.base))
    }
}

/// Calls off requests ([`super::Transfers::cancellable`]). Copies of it call off the same requests.
#[derive(Clone, Debug, Default)]
pub struct Cancel(Arc<Flag>);

#[derive(Debug, Default)]
struct Flag {
    set: AtomicBool,
    /// What calls off more than this does.
    wider: Option<Cancel>,
}

impl Cancel {
    /// One that calls off some of the requests that `wider` does.
    pub(super) fn within(wider: Option<&Cancel>) -> Cancel {
        Cancel(Arc::new(Flag { set: AtomicBool::new(false), wider: wider.cloned() }))
    }

    /// Calls off those of its requests of which anything is still to be begun. Each is answered
    /// with an [`crate::Error::Transfer`] of `ECANCELED` when what was begun of it is done, and its
    /// memory is no longer in use then; what is in the memory of a read, or in the file of a write,
    /// may have changed in part. Requests that are made afterwards are called off as well.
    pub fn cancel(&self) {
        self.0.set.store(true, Ordering::Release);
    }

    /// Whether [`Cancel::cancel`] was called.
    pub fn is_cancelled(&self) -> bool {
        self.0.set.load(Ordering::Acquire) || self.0.wider.as_ref().is_some_and(Cancel::is_cancelled)
    }
}

impl SegmentPart {
    /// The number of its segment, and its range of the file.
    pub fn range(&self) -> (u32, Range<u64>) {
        (self.segment, self.file_offset..self.file_offset + self.len)
    }

    /// Whether a GPU copies what is read to it: from a staging pool, or the page cache.
    pub fn is_copied_to(&self) -> bool {
        self.registered.is_err() && self.allocation.host.is_none()
    }
}

/// A read or write, looked up and ready to be done.
pub(super) struct Request {
    pub direction: Direction,
    pub source: Source,
    pub parts: Parts,
    pub require: Require,
    /// Whether the kernel has written back what it had of the file's ranges.
    pub is_written_back: bool,
    /// How long its pieces are.
    pub piece_len: u64,
    /// The cached ranges of the file that it may read, and the time by which they are used.
    pub cached: Option<(Arc<CachedFile>, u64)>,
    /// If what the page cache has is read from there although it is in no cached range, and else
    /// why not.
    pub resident: std::result::Result<Resident, Reason>,
    /// What calls it off.
    pub cancel: Option<Cancel>,
    pub end: End,
}

/// A file whose pages are read out of the page cache.
pub(super) struct Resident {
    pub file: Arc<OwnedFd>,
    /// What becomes of pages that are missing where a cached range is to be made.
    pub missing: Missing,
}

/// The file of a request.
pub(super) enum Source {
    /// As a ring knows it.
    Ring(Attached),
    /// By its path: its bytes were brought by a call.
    Call(PathBuf),
}

impl Source {
    /// The path that the file was opened by.
    pub fn path(&self) -> &Path {
        match self {
            Source::Ring(file) => file.path(),
            Source::Call(path) => path,
        }
    }
}

/// The transfer of a piece by a ring. `slot` is the piece's slot of a staging pool; none where the
/// device reaches the memory of its part itself.
pub(super) fn operation<'a>(
    direction: Direction,
    file: &'a Attached,
    part: &'a SegmentPart,
    piece: &PieceRange,
    address: u64,
    slot: Option<(&'a Arc<Shared<Staging>>, usize)>,
) -> Operation<'a> {
    match (&part.registered, slot) {
        (Ok(lease), _) => between(direction, file, piece, &lease.buffer, lease.offset + (address - part.address)),
        (Err(_), slot) => {
            let (staging, slot) = slot.expect("what is staged has a slot");
            between(direction, file, piece, staging, slot as u64 + piece.slot_offset)
        }
    }
}

/// A transfer between a piece of a file and `at` in a buffer.
fn between<'a, M: Memory>(
    direction: Direction,
    file: &'a Attached,
    piece: &PieceRange,
    buffer: &'a Arc<Shared<M>>,
    at: u64,
) -> Operation<'a> {
    match direction {
        Direction::Read => Operation::read(file, piece.file_offset, buffer, at, piece.len),
        Direction::Write => Operation::write(file, piece.file_offset, buffer, at, piece.len),
    }
}
