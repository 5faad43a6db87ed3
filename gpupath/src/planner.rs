//! Plans device commands from segments and extents. Pure: no I/O, no locks, no clock.
//!
//! It guards two promises: what is aligned goes between device and buffer without a copy, and what
//! is not is neither skipped nor written around, but handed back as an *edge* and counted. A
//! property test compares it with a byte-by-byte model.

use gpunvme_abi::{Direction, Segment, TransferRequest};
use gpunvme_blockdev::{Geometry, Region, Request};
use smallvec::SmallVec;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

/// A part of a file that has a place on the device. What no extent covers is a hole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Where it begins in the file, in bytes.
    pub file_offset: u64,
    /// Where it begins on the device, in bytes.
    pub device_offset: u64,
    /// Its length in bytes.
    pub len: u64,
    /// Whether it has been written. One that has not reads as zeros, and can be written to.
    pub written: bool,
}

/// Extents of a range: often one, and then no memory is allocated for it.
pub type Extents = SmallVec<[Extent; 2]>;

/// The alignment that lets bytes go direct. All are powers of two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Alignment {
    /// Of file offsets, device offsets and lengths, in bytes. Reads: the device's logical block.
    /// Writes: the filesystem's block, so that a fresh block is never written in part.
    pub block: u64,
    /// Of offsets in the buffer, in bytes ([`gpunvme_blockdev::Geometry::memory_alignment`]).
    pub memory: u64,
}

impl Alignment {
    /// For reads from a device.
    pub fn for_reads(geometry: &Geometry) -> Self {
        Self::of_blocks(geometry.logical_block, geometry)
    }

    /// For writes to a filesystem of blocks of `block` bytes on a device.
    pub fn for_writes(block: u32, geometry: &Geometry) -> Self {
        Self::of_blocks(block, geometry)
    }

    /// Lengths are lengths of memory too.
    fn of_blocks(block: u32, geometry: &Geometry) -> Self {
        Self { block: block.max(geometry.memory_alignment).into(), memory: geometry.memory_alignment.into() }
    }
}

/// Part of the buffer to fill with zeros.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Zeroes {
    /// Where in the buffer, in bytes.
    pub buffer_offset: u64,
    /// How much, in bytes.
    pub len: u64,
}

/// A range that the CPU has to copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Edge {
    /// Index of the segment it belongs to.
    pub segment: u32,
    /// Where in the file, in bytes.
    pub file_offset: u64,
    /// Where in the buffer, in bytes.
    pub buffer_offset: u64,
    /// How much, in bytes.
    pub len: u64,
    /// Where on the device, in bytes. `None` only in a plan to write, for a range that has no
    /// place yet; whatever this says, the edges of a write go the way of an ordinary write, which
    /// allocates blocks and completes them.
    pub device_offset: Option<u64>,
}

/// The work for a transfer. Nothing in it depends on an order.
#[derive(Debug, Default)]
pub struct Plan {
    /// Commands between device and buffer.
    pub requests: SmallVec<[Request; 1]>,
    /// Where the bytes of each request belong.
    origins: SmallVec<[Origin; 1]>,
    /// The [`Alignment::block`] it was made for.
    block: u64,
    /// Parts of the buffer to be filled.
    pub zeroes: Vec<Zeroes>,
    /// Ranges for the CPU.
    pub edges: Vec<Edge>,
    /// Bytes in `requests`.
    pub direct: u64,
    /// Bytes in `zeroes`.
    pub hole: u64,
    /// Bytes in `edges`.
    pub edge: u64,
}

/// What became one request: a range of the device, as long a range of the buffer, and the first
/// segment that they are for.
#[derive(Debug)]
struct Origin {
    device: Range<u64>,
    buffer: Range<u64>,
    segment: u32,
}

impl Plan {
    /// Bytes that the plan moves.
    pub fn bytes(&self) -> u64 {
        self.direct + self.hole + self.edge
    }

    /// The number of parts that take memory: commands, and ranges for the CPU.
    pub fn pieces(&self) -> usize {
        self.origins.len() + self.zeroes.len() + self.edges.len()
    }

    /// The first segment that touches the device at this offset: the one that a device's error is
    /// about.
    pub fn segment_at(&self, device_offset: u64) -> Option<u32> {
        let direct = self.origins.iter().find(|origin| origin.device.contains(&device_offset)).map(|origin| origin.segment);
        let edge = self.edges.iter().find(|edge| {
            // The command for an edge begins on the block that it begins in.
            edge.device_offset
                .is_some_and(|start| start - start % self.block <= device_offset && device_offset < start + edge.len)
        });
        direct.or(edge.map(|edge| edge.segment))
    }
}

/// The part of a segment that can go direct, as a range of file offsets; empty where none can.
///
/// A write needs it before planning, to know where blocks must be allocated.
pub fn aligned_middle(segment: &Segment, alignment: Alignment) -> Range<u64> {
    let end = segment.file_offset + segment.len;
    let first = segment.file_offset.next_multiple_of(alignment.block);
    let last = end - end % alignment.block;
    let address = segment.buffer_offset.wrapping_add(first.wrapping_sub(segment.file_offset));
    if first < last && address.is_multiple_of(alignment.memory) { first..last } else { segment.file_offset..segment.file_offset }
}

/// Plans a transfer between a file and a buffer.
///
/// `extents` appends what the file has in the range of offsets it is given: sorted, not
/// overlapping, possibly reaching out of the range on both sides. It is asked once for each
/// segment, in order, also where the range is empty. Reads end at `file_size`, and the segments
/// behind the one that it cuts short are not looked at. In a plan to write it must know a place
/// for all of each segment's [`aligned_middle`].
///
/// # Errors
/// Those of `extents`.
///
/// # Panics
/// When a segment reaches out of the region: see [`outside`].
pub fn plan<E>(
    direction: Direction,
    segments: &[Segment],
    file_size: u64,
    region: &Arc<Region>,
    alignment: Alignment,
    mut extents: impl FnMut(Range<u64>, &mut Extents) -> Result<(), E>,
) -> Result<Plan, E> {
    let mut builder = Builder { direction, alignment, plan: Plan { block: alignment.block, ..Plan::default() } };
    let mut found = Extents::new();
    for (index, segment) in segments.iter().enumerate() {
        assert!(segment.buffer_offset + segment.len <= region.len() as u64, "segment {index} reaches out of the buffer");
        let len = match direction {
            Direction::Read => segment.len.min(file_size.saturating_sub(segment.file_offset)),
            Direction::Write => segment.len,
        };
        let cut = Segment { len, ..*segment };
        found.clear();
        extents(cut.file_offset..cut.file_offset + len, &mut found)?;
        builder.segment(index as u32, &cut, &found);
        if len < segment.len {
            break;
        }
    }
    Ok(builder.finish(region))
}

/// How much one part of a transfer may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bounds {
    /// Pieces of its plan ([`Plan::pieces`]), at least 1. It may be a few times as many: a piece
    /// is cut where it is not aligned.
    pub pieces: usize,
    /// Bytes that it moves, at least 1.
    pub bytes: u64,
}

impl Bounds {
    /// All of a transfer in one part.
    pub const NONE: Bounds = Bounds { pieces: usize::MAX, bytes: u64::MAX };
}

/// A place in a transfer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Position {
    /// Index of a segment.
    pub segment: usize,
    /// Bytes of it that lie before the place.
    pub done: u64,
}

/// Parts end at multiples of this in the file, or where extents do, so that no part has an edge
/// that the whole would not have.
const CUT: u64 = 1 << 20;

/// Where a part that begins at `start` and may move `most` bytes of what lies before `end` ends,
/// in the file.
fn cut(start: u64, end: u64, most: u64) -> u64 {
    if end - start <= most {
        return end;
    }
    let last = start + most - (start + most) % CUT;
    if last > start { last } else { (start - start % CUT + CUT).min(end) }
}

/// Plans a part of a read, from a place on. Also returns where the next one begins. `extents` as
/// for [`plan`], but it is asked for at most so many extents, and as often as it takes.
///
/// # Errors
/// Those of `extents`.
///
/// # Panics
/// When a segment reaches out of the region: see [`outside`].
pub fn plan_part<E>(
    segments: &[Segment],
    (from, bounds): (Position, Bounds),
    file_size: u64,
    region: &Arc<Region>,
    alignment: Alignment,
    mut extents: impl FnMut(Range<u64>, usize, &mut Extents) -> Result<(), E>,
) -> Result<(Plan, Option<Position>), E> {
    let mut builder = Builder { direction: Direction::Read, alignment, plan: Plan { block: alignment.block, ..Plan::default() } };
    let mut found = Extents::new();
    for (index, segment) in segments.iter().enumerate().skip(from.segment) {
        assert!(segment.buffer_offset + segment.len <= region.len() as u64, "segment {index} reaches out of the buffer");
        let len = segment.len.min(file_size.saturating_sub(segment.file_offset));
        let mut done = if index == from.segment { from.done } else { 0 };
        while done < len {
            let (pieces, bytes) = (builder.plan.pieces(), builder.plan.bytes());
            if pieces >= bounds.pieces || bytes >= bounds.bytes {
                return Ok((builder.finish(region), Some(Position { segment: index, done })));
            }
            // An extent often comes with a hole.
            let limit = (bounds.pieces - pieces).div_ceil(2);
            let start = segment.file_offset + done;
            let end = cut(start, segment.file_offset + len, bounds.bytes - bytes);
            found.clear();
            extents(start..end, limit, &mut found)?;
            let end = match found.last() {
                Some(last) if found.len() >= limit => end.min(last.file_offset + last.len),
                _ => end,
            };
            let part = Segment { file_offset: start, buffer_offset: segment.buffer_offset + done, len: end - start };
            builder.segment(index as u32, &part, &found);
            done += part.len;
        }
        if len < segment.len {
            break;
        }
    }
    Ok((builder.finish(region), None))
}

/// The first segment of a write of which not every byte can go direct.
pub fn unaligned(segments: &[Segment], alignment: Alignment) -> Option<u32> {
    let is_direct = |segment: &Segment| {
        let middle = aligned_middle(segment, alignment);
        middle.end - middle.start == segment.len
    };
    segments.iter().position(|segment| !is_direct(segment)).map(|index| index as u32)
}

/// A part of a write: its segments, of which the first is the one of `from`, and where the next
/// part begins. No two overlap in the file ([`disjoint`]).
pub fn write_part(segments: &[Segment], from: Position, most: u64) -> (SmallVec<[Segment; 1]>, Position) {
    let mut part: SmallVec<[Segment; 1]> = segments[from.segment..].into();
    if let Some(first) = part.first_mut() {
        first.file_offset += from.done;
        first.buffer_offset += from.done;
        first.len -= from.done;
    }
    part.truncate(disjoint(&part).len());
    let mut room = most;
    for index in 0..part.len() {
        let Segment { file_offset, len, .. } = part[index];
        if len > room {
            let done = if room == most || room >= CUT { cut(file_offset, file_offset + len, room) - file_offset } else { 0 };
            part[index].len = done;
            part.truncate(index + usize::from(done > 0));
            let before = if index == 0 { from.done } else { 0 };
            let next = from.segment + index;
            let next = if done < len {
                Position { segment: next, done: before + done }
            } else {
                Position { segment: next + 1, done: 0 }
            };
            return (part, next);
        }
        room -= len;
    }
    let next = Position { segment: from.segment + part.len(), done: 0 };
    (part, next)
}

/// The first segment that reaches out of a buffer of `len` bytes.
pub fn outside(request: &TransferRequest, len: u64) -> Option<u32> {
    request.segments.iter().position(|segment| segment.buffer_offset + segment.len > len).map(|index| index as u32)
}

/// The segments of a write from the first on, as many as do not overlap in the file. Almost always
/// all of them.
///
/// What a plan does has no order, so a write is planned and carried out group by group: then
/// segments that overlap leave behind what they would one after the other.
pub fn disjoint(segments: &[Segment]) -> &[Segment] {
    if let [_] = segments {
        return segments;
    }
    // Ends by starts.
    let mut taken = BTreeMap::new();
    for (index, segment) in segments.iter().enumerate().filter(|(_, segment)| segment.len > 0) {
        let end = segment.file_offset + segment.len;
        if taken.range(..end).next_back().is_some_and(|(_, &taken_end)| taken_end > segment.file_offset) {
            return &segments[..index];
        }
        taken.insert(segment.file_offset, end);
    }
    segments
}

struct Builder {
    direction: Direction,
    alignment: Alignment,
    plan: Plan,
}

impl Builder {
    fn segment(&mut self, index: u32, segment: &Segment, extents: &[Extent]) {
        let end = segment.file_offset + segment.len;
        let mut at = segment.file_offset;
        for extent in extents {
            let start = extent.file_offset.max(at);
            let stop = (extent.file_offset + extent.len).min(end);
            if start >= stop {
                continue;
            }
            self.hole(index, segment, at..start);
            let device_offset = extent.device_offset + (start - extent.file_offset);
            if extent.written || self.direction == Direction::Write {
                self.mapped(index, segment, start..stop, device_offset);
            } else {
                self.hole(index, segment, start..stop);
            }
            at = stop;
        }
        self.hole(index, segment, at..end);
    }

    fn hole(&mut self, index: u32, segment: &Segment, file: Range<u64>) {
        let len = file.end.saturating_sub(file.start);
        if len == 0 {
            return;
        }
        if self.direction == Direction::Write {
            return self.edge(index, segment, file, None);
        }
        let buffer_offset = segment.buffer_offset + (file.start - segment.file_offset);
        self.plan.hole += len;
        match self.plan.zeroes.last_mut() {
            Some(last) if last.buffer_offset + last.len == buffer_offset => last.len += len,
            _ => self.plan.zeroes.push(Zeroes { buffer_offset, len }),
        }
    }

    /// A range with a place on the device: an edge at each end where it is not aligned, and the
    /// rest direct.
    fn mapped(&mut self, index: u32, segment: &Segment, file: Range<u64>, device_offset: u64) {
        let block = self.alignment.block;
        let device_end = device_offset + (file.end - file.start);
        let first = device_offset.next_multiple_of(block);
        let last = device_end - device_end % block;
        let buffer_at = |device: u64| segment.buffer_offset + (file.start - segment.file_offset) + (device - device_offset);
        // A write's alignment is that of blocks in the file, and those lie on blocks of the
        // device.
        if first >= last || !buffer_at(first).is_multiple_of(self.alignment.memory) {
            return self.edge(index, segment, file, Some(device_offset));
        }
        let file_at = |device: u64| file.start + (device - device_offset);
        self.edge(index, segment, file.start..file_at(first), Some(device_offset));
        self.direct(index, first..last, buffer_at(first));
        self.edge(index, segment, file_at(last)..file.end, Some(last));
    }

    fn direct(&mut self, index: u32, device: Range<u64>, buffer_offset: u64) {
        let len = device.end - device.start;
        self.plan.direct += len;
        match self.plan.origins.last_mut() {
            Some(last) if last.device.end == device.start && last.buffer.end == buffer_offset => {
                last.device.end += len;
                last.buffer.end += len;
            }
            _ => self.plan.origins.push(Origin { device, buffer: buffer_offset..buffer_offset + len, segment: index }),
        }
    }

    fn edge(&mut self, index: u32, segment: &Segment, file: Range<u64>, device_offset: Option<u64>) {
        let len = file.end - file.start;
        if len == 0 {
            return;
        }
        let buffer_offset = segment.buffer_offset + (file.start - segment.file_offset);
        self.plan.edge += len;
        self.plan.edges.push(Edge { segment: index, file_offset: file.start, buffer_offset, len, device_offset });
    }

    fn finish(mut self, region: &Arc<Region>) -> Plan {
        let direction = self.direction;
        let request = |origin: &Origin| {
            let span = [region.span(origin.buffer.start as usize..origin.buffer.end as usize)];
            match direction {
                Direction::Read => Request::read(origin.device.start, span),
                Direction::Write => Request::write(origin.device.start, span, false),
            }
        };
        self.plan.requests = self.plan.origins.iter().map(request).collect();
        self.plan
    }
}
