//! Plans against a model that looks at every byte, and plans carried out on a device in memory.

use gpunvme_abi::{Direction, Register, Segment};
use gpunvme_blockdev::{BlockDevice, BufferPool, Error, Geometry, Io, Length, Region};
use gpunvme_blockdev_testing::{Faulty, Image, MemoryDevice, On, Rule};
use gpunvme_gpupath::outcome::Outcome;
use gpunvme_gpupath::planner::{self, Alignment, Bounds, Extent, Plan, Position};
use gpunvme_gpupath::registry::{Buffer, Caller, Limits, Registry};
use gpunvme_gpupath::transfer;
use proptest::prelude::*;
use std::convert::Infallible;
use std::ops::Range;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::mpsc;
use std::sync::{Arc, LazyLock};

const BLOCK: u64 = 4096;
const FILE_BLOCKS: u64 = 24;
const DEVICE: u64 = 4 << 20;
const BUFFER: u64 = 160 << 10;

#[derive(Clone, Debug)]
struct File {
    size: u64,
    /// By block of the file: where it lies on the device, and whether it was written.
    blocks: Vec<Option<(u64, bool)>>,
}

impl File {
    /// Neighbours on the device become one extent, as a filesystem would report them.
    fn extents(&self, range: Range<u64>) -> Vec<Extent> {
        let mut extents: Vec<Extent> = Vec::new();
        for (number, block) in self.blocks.iter().enumerate() {
            let Some((device_offset, written)) = *block else { continue };
            let file_offset = number as u64 * BLOCK;
            match extents.last_mut() {
                Some(last)
                    if last.written == written
                        && last.file_offset + last.len == file_offset
                        && last.device_offset + last.len == device_offset =>
                {
                    last.len += BLOCK;
                }
                _ => extents.push(Extent { file_offset, device_offset, len: BLOCK, written }),
            }
        }
        extents.retain(|extent| extent.file_offset < range.end && extent.file_offset + extent.len > range.start);
        extents
    }

    fn plan(&self, direction: Direction, segments: &[Segment], region: &Arc<Region>, alignment: Alignment) -> Plan {
        let extents = |range, found: &mut planner::Extents| -> Result<(), Infallible> {
            found.extend(self.extents(range));
            Ok(())
        };
        match planner::plan(direction, segments, self.size, region, alignment, extents) {
            Ok(plan) => plan,
            Err(never) => match never {},
        }
    }

    /// The segments as far as a read moves them.
    fn readable(&self, segments: &[Segment]) -> Vec<Segment> {
        let mut readable = Vec::new();
        for segment in segments {
            let len = segment.len.min(self.size.saturating_sub(segment.file_offset));
            readable.push(Segment { len, ..*segment });
            if len < segment.len {
                break;
            }
        }
        readable
    }
}

fn file() -> impl Strategy<Value = File> {
    let block = prop_oneof![
        2 => Just(0u8), // hole
        1 => Just(1),   // unwritten, next to the one before
        5 => Just(2),   // written, next to the one before
        2 => Just(3),   // written, elsewhere
    ];
    (proptest::collection::vec(block, FILE_BLOCKS as usize), 0..=FILE_BLOCKS * BLOCK).prop_map(|(kinds, size)| {
        let mut next = 0;
        let blocks = kinds
            .into_iter()
            .map(|kind| {
                next += if kind == 3 { 5 * BLOCK } else { BLOCK };
                (kind != 0).then_some((next, kind != 1))
            })
            .collect();
        File { size, blocks }
    })
}

fn segments() -> impl Strategy<Value = Vec<Segment>> {
    let offset =
        |end: u64| prop_oneof![0..end, (0..end / BLOCK).prop_map(|at| at * BLOCK), (0..end / 512).prop_map(|at| at * 512)];
    let len = prop_oneof![Just(0), 1..600u64, 1..40_000u64, (1..8u64).prop_map(|blocks| blocks * BLOCK)];
    let segment = (offset(FILE_BLOCKS * BLOCK), offset(BUFFER), len).prop_map(|(file_offset, buffer_offset, len)| Segment {
        file_offset,
        buffer_offset,
        len: len.min(BUFFER - buffer_offset),
    });
    proptest::collection::vec(segment, 0..6)
}

fn geometry() -> impl Strategy<Value = Geometry> {
    let sizes = prop_oneof![Just((512, 4)), Just((512, 512)), Just((4096, 4)), Just((4096, 4096)), Just((512, 4096))];
    sizes.prop_map(|(logical_block, memory_alignment)| Geometry {
        len: Length::new(DEVICE),
        logical_block,
        memory_alignment,
        max_transfer: 64 << 10,
        queue_depth: 32,
        max_queues: 1,
        volatile_cache: true,
        discard: true,
        write_zeroes: true,
        read_only: false,
    })
}

/// What a plan does to one byte of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Deed {
    Direct { device: u64 },
    Zero,
    Edge { device: Option<u64> },
}

/// All that a plan does, as (byte of the buffer, deed), in order of the buffer.
fn deeds(plan: &Plan, alignment: Alignment) -> Vec<(u64, Deed)> {
    let mut deeds = Vec::new();
    for request in &plan.requests {
        assert_eq!((request.offset % alignment.block, request.len % alignment.block), (0, 0));
        let mut device = request.offset;
        for span in &request.spans {
            assert_eq!((span.offset as u64 % alignment.memory, span.len as u64 % alignment.memory), (0, 0));
            deeds.extend((0..span.len as u64).map(|at| (span.offset as u64 + at, Deed::Direct { device: device + at })));
            device += span.len as u64;
        }
        assert_eq!(device, request.offset + request.len);
    }
    for zeroes in &plan.zeroes {
        deeds.extend((0..zeroes.len).map(|at| (zeroes.buffer_offset + at, Deed::Zero)));
    }
    for edge in &plan.edges {
        deeds.extend(
            (0..edge.len)
                .map(|at| (edge.buffer_offset + at, Deed::Edge { device: edge.device_offset.map(|device| device + at) })),
        );
    }
    deeds.sort_by_key(|(buffer, deed)| (*buffer, format!("{deed:?}")));
    deeds
}

static REGION: LazyLock<Arc<Region>> = LazyLock::new(|| Region::allocate(BUFFER as usize).unwrap());

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(300) })]

    /// Every byte of every segment is done once, from the right place, and directly whenever
    /// alignment allows.
    #[test]
    fn each_byte_is_planned_once(file in file(), segments in segments(), geometry in geometry(), write: bool) {
        let direction = if write { Direction::Write } else { Direction::Read };
        let alignment = if write { Alignment::for_writes(BLOCK as u32, &geometry) } else { Alignment::for_reads(&geometry) };
        let plan = file.plan(direction, &segments, &REGION, alignment);
        let mut expected = Vec::new();
        let moved = if write { segments.clone() } else { file.readable(&segments) };
        for segment in &moved {
            for at in 0..segment.len {
                let offset = segment.file_offset + at;
                let place = file.blocks.get((offset / BLOCK) as usize).copied().flatten();
                // The aligned block of the device that holds the byte lies in one extent, and as a
                // whole in the segment.
                let start = offset - offset % alignment.block;
                let whole = start >= segment.file_offset && start + alignment.block <= segment.file_offset + segment.len;
                let memory = segment.buffer_offset.wrapping_add(start.wrapping_sub(segment.file_offset)) % alignment.memory == 0;
                let deed = match place {
                    None if write => Deed::Edge { device: None },
                    None | Some((_, false)) if !write => Deed::Zero,
                    Some((device, _)) if whole && memory => Deed::Direct { device: device + offset % BLOCK },
                    Some((device, _)) => Deed::Edge { device: Some(device + offset % BLOCK) },
                    None => unreachable!(),
                };
                expected.push((segment.buffer_offset + at, deed));
            }
        }
        expected.sort_by_key(|(buffer, deed)| (*buffer, format!("{deed:?}")));
        prop_assert_eq!(deeds(&plan, alignment), expected);
        prop_assert_eq!(plan.bytes(), moved.iter().map(|segment| segment.len).sum::<u64>());
    }

    /// Parts put together do what one plan does, and none is larger than it may be.
    #[test]
    fn parts_of_a_read_are_the_whole(
        file in file(),
        segments in segments(),
        geometry in geometry(),
        pieces in prop_oneof![1..20usize, Just(usize::MAX)],
        bytes in prop_oneof![1..100_000u64, Just(u64::MAX)],
    ) {
        let alignment = Alignment::for_reads(&geometry);
        let bounds = Bounds { pieces, bytes };
        let (mut from, mut together) = (Position::default(), Vec::new());
        loop {
            let look_up = |range: Range<u64>, limit, found: &mut planner::Extents| -> Result<(), Infallible> {
                found.extend(file.extents(range).into_iter().take(limit));
                Ok(())
            };
            let Ok((plan, next)) = planner::plan_part(&segments, (from, bounds), file.size, &REGION, alignment, look_up);
            // An extent that is not aligned makes four.
            prop_assert!(plan.pieces() < pieces.saturating_mul(4).saturating_add(4));
            prop_assert!(plan.bytes() < bytes.saturating_add(2 << 20));
            together.extend(deeds(&plan, alignment));
            let Some(next) = next else { break };
            prop_assert!(plan.bytes() > 0 && (next.segment, next.done) > (from.segment, from.done), "it gets on");
            from = next;
        }
        together.sort_by_key(|(buffer, deed)| (*buffer, format!("{deed:?}")));
        let whole = file.plan(Direction::Read, &segments, &REGION, alignment);
        prop_assert_eq!(together, deeds(&whole, alignment));
    }

    /// Likewise of a write, whose parts have no edge that it would not have as a whole, and keep
    /// the order of segments that overlap.
    #[test]
    fn parts_of_a_write_are_the_whole(
        segments in proptest::collection::vec((0..16u64 << 20, 0..16u64 << 20, 0..8u64 << 20, any::<bool>()), 0..6),
        most in 1..8u64 << 20,
        geometry in geometry(),
    ) {
        let align = |at: u64, aligned| if aligned { at - at % BLOCK } else { at };
        let segments: Vec<Segment> = segments
            .into_iter()
            .map(|(file, buffer, len, aligned)| Segment {
                file_offset: align(file, aligned),
                buffer_offset: align(buffer, aligned),
                len: align(len, aligned),
            })
            .collect();
        let alignment = Alignment::for_writes(BLOCK as u32, &geometry);
        let direct = |segments: &[Segment]| -> u64 {
            segments.iter().map(|segment| planner::aligned_middle(segment, alignment)).map(|middle| middle.end - middle.start).sum()
        };
        let (mut at, mut parts) = (Position::default(), Vec::new());
        while at.segment < segments.len() {
            let (part, next) = planner::write_part(&segments, at, most);
            prop_assert_eq!(planner::disjoint(&part).len(), part.len());
            prop_assert!(part.iter().map(|segment| segment.len).sum::<u64>() <= most.max(1 << 20));
            prop_assert!((next.segment, next.done) > (at.segment, at.done), "it gets on");
            parts.extend(part);
            at = next;
        }
        prop_assert_eq!(direct(&parts), direct(&segments));
        prop_assert_eq!(planner::unaligned(&parts, alignment).is_some(), planner::unaligned(&segments, alignment).is_some());
        // The pieces of a segment, put together again.
        let mut rest = parts.iter().peekable();
        for segment in &segments {
            let mut at = 0;
            while let Some(piece) = rest.next_if(|piece| {
                piece.len > 0 && at < segment.len && (piece.file_offset, piece.buffer_offset) == (segment.file_offset + at, segment.buffer_offset + at)
            }) {
                at += piece.len;
            }
            prop_assert_eq!(at, segment.len);
            while rest.next_if(|piece| piece.len == 0).is_some() {}
        }
        prop_assert!(rest.next().is_none());
    }

    /// What a writer is told to allocate is what goes direct once it is allocated.
    #[test]
    fn allocating_the_aligned_middles_is_enough(segments in segments(), geometry in geometry()) {
        let alignment = Alignment::for_writes(BLOCK as u32, &geometry);
        let mut file = File { size: 0, blocks: vec![None; (FILE_BLOCKS + 64) as usize] };
        let mut expected = 0;
        for segment in &segments {
            let middle = planner::aligned_middle(segment, alignment);
            prop_assert!(middle.is_empty() || (middle.start.is_multiple_of(BLOCK) && middle.end.is_multiple_of(BLOCK)));
            prop_assert!(middle.start >= segment.file_offset && middle.end <= segment.file_offset + segment.len);
            for block in middle.start / BLOCK..middle.end / BLOCK {
                file.blocks[block as usize] = Some((block * BLOCK, false));
            }
            expected += middle.end - middle.start;
        }
        prop_assert_eq!(file.plan(Direction::Write, &segments, &REGION, alignment).direct, expected);
    }

    /// Groups put together are the segments; within one nothing overlaps, and one is closed only
    /// by a segment that does.
    #[test]
    fn groups_of_a_write_do_not_overlap(segments in segments()) {
        let overlap = |a: &Segment, b: &Segment| a.len > 0 && b.len > 0 && a.file_offset < b.file_offset + b.len && b.file_offset < a.file_offset + a.len;
        let mut rest = &segments[..];
        while !rest.is_empty() {
            let (group, next) = rest.split_at(planner::disjoint(rest).len());
            for (at, a) in group.iter().enumerate() {
                prop_assert!(!group[..at].iter().any(|b| overlap(a, b)));
            }
            if let Some(next) = next.first() {
                prop_assert!(group.iter().any(|a| overlap(a, next)));
            }
            rest = next;
        }
    }

    /// A plan to read, carried out: the buffer holds the file where segments are, and is otherwise
    /// untouched.
    #[test]
    fn reads_bring_the_file(file in file(), segments in segments(), geometry in geometry()) {
        let mut image = Image::new(DEVICE);
        let content: Vec<u8> = (0..DEVICE).map(|at| (at ^ (at >> 9)) as u8).collect();
        image.write_at(0, &content);
        let alignment = Alignment::for_reads(&geometry);
        let bench = Bench::new(MemoryDevice::with_geometry(image, geometry));
        let mut expected = vec![0xa5; BUFFER as usize];
        bench.buffer.region.write_at(0, &expected).unwrap();
        // Where segments overlap in the buffer their order is not defined: leave those cases to
        // the test above.
        prop_assume!(!overlap(&segments));
        for segment in file.readable(&segments) {
            for at in 0..segment.len {
                let offset = segment.file_offset + at;
                expected[(segment.buffer_offset + at) as usize] = match file.blocks[(offset / BLOCK) as usize] {
                    Some((device, true)) => content[(device + offset % BLOCK) as usize],
                    _ => 0,
                };
            }
        }
        let plan = file.plan(Direction::Read, &segments, &bench.buffer.region, alignment);
        let outcome = Outcome::done(&bench.buffer, &plan);
        prop_assert_eq!(outcome.moved.total(), file.readable(&segments).iter().map(|segment| segment.len).sum::<u64>());
        bench.read(alignment, plan).unwrap();
        let mut got = vec![0; BUFFER as usize];
        bench.buffer.region.read_at(0, &mut got).unwrap();
        prop_assert!(got == expected, "the buffer differs at {:?}", got.iter().zip(&expected).position(|(a, b)| a != b));
    }
}

fn overlap(segments: &[Segment]) -> bool {
    let ranges: Vec<_> = segments.iter().filter(|s| s.len > 0).map(|s| s.buffer_offset..s.buffer_offset + s.len).collect();
    ranges.iter().enumerate().any(|(at, a)| ranges[..at].iter().any(|b| a.start < b.end && b.start < a.end))
}

/// A registered buffer of this process and what it takes to read into it.
struct Bench {
    io: Arc<Io>,
    pool: Arc<BufferPool>,
    buffer: Arc<Buffer>,
    registry: Registry,
    memory: OwnedFd,
}

impl Bench {
    fn new(device: Arc<dyn BlockDevice>) -> Bench {
        let memory = rustix::fs::memfd_create("test", rustix::fs::MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::fallocate(&memory, rustix::fs::FallocateFlags::empty(), 0, 8 << 20).unwrap();
        rustix::fs::fcntl_add_seals(&memory, rustix::fs::SealFlags::SHRINK).unwrap();
        let registry = Registry::new(device.clone(), Limits::default()).unwrap();
        let request = Register { fd: memory.as_raw_fd(), len: 8 << 20, ..Register::default() };
        let buffer = registry.register(Caller { thread: std::process::id(), user: 0 }, &request).unwrap();
        Bench { io: Io::inline(device.clone()).unwrap(), pool: BufferPool::new(device, 4 << 20), buffer, registry, memory }
    }

    fn read(&self, alignment: Alignment, plan: Plan) -> Result<(), transfer::Failed> {
        let (sender, receiver) = mpsc::channel();
        transfer::read(&self.io, &self.pool, alignment, plan, self.buffer.clone(), move |result| sender.send(result).unwrap());
        receiver.recv().unwrap()
    }
}

/// A transfer whose memory is not aligned is all edge, and much larger than what goes through the
/// daemon at once.
#[test]
fn a_large_unaligned_read_arrives() {
    let content: Vec<u8> = (0..4u64 << 20).map(|at| (at * 7 + (at >> 12)) as u8).collect();
    let mut image = Image::new(4 << 20);
    image.write_at(0, &content);
    let device = MemoryDevice::from_image(image);
    let alignment = Alignment::for_reads(device.geometry());
    let bench = Bench::new(device);
    let segment = Segment { file_offset: 700, buffer_offset: 1001, len: (4 << 20) - 700 };
    let plan = planner::plan(Direction::Read, &[segment], 4 << 20, &bench.buffer.region, alignment, whole_device).unwrap();
    assert_eq!((plan.direct, plan.edge), (0, segment.len));
    bench.read(alignment, plan).unwrap();
    let mut got = vec![0; segment.len as usize];
    bench.buffer.region.read_at(1001, &mut got).unwrap();
    assert!(got == content[700..]);
}

/// All of the device, as one file.
fn whole_device(range: Range<u64>, found: &mut planner::Extents) -> Result<(), Infallible> {
    found.push(Extent { file_offset: range.start, device_offset: range.start, len: range.end - range.start, written: true });
    Ok(())
}

#[test]
fn a_device_error_names_its_segment() {
    let faulty = Faulty::new(MemoryDevice::new(DEVICE));
    let bench = Bench::new(faulty.clone());
    let alignment = Alignment::for_reads(faulty.geometry());
    let segments = [
        Segment { file_offset: 0, buffer_offset: 0, len: 8192 },
        Segment { file_offset: 100_000, buffer_offset: 100_000, len: 100 },
        Segment { file_offset: 1 << 20, buffer_offset: 512, len: 4096 },
    ];
    for (bad, segment) in [(4096..4608, 0), (99_840..100_352, 1), ((1 << 20)..(1 << 20) + 512, 2)] {
        faulty.clear();
        faulty.add(Rule::fail(On::Read, libc::EIO).within(bad));
        let plan = planner::plan(Direction::Read, &segments, DEVICE, &bench.buffer.region, alignment, whole_device).unwrap();
        let failed = bench.read(alignment, plan).unwrap_err();
        assert!(matches!(failed.error, Error::Io { errno: libc::EIO, .. }), "{failed}");
        assert_eq!(failed.segment, Some(segment));
        assert_eq!(Outcome::from(failed), Outcome::failed(libc::EIO, Some(segment)));
    }
}

/// Unregistering neither waits for a transfer nor takes the memory away under it.
#[test]
fn a_transfer_in_flight_outlives_its_registration() {
    let mut image = Image::new(DEVICE);
    image.write_at(0, &[7; 8192]);
    let faulty = Faulty::new(MemoryDevice::from_image(image));
    faulty.add(Rule::hold(On::Read));
    let mut bench = Bench::new(faulty.clone());
    bench.io = Io::threaded(faulty.clone(), 1).unwrap();
    let Bench { io, pool, buffer, registry, memory } = bench;
    let alignment = Alignment::for_reads(faulty.geometry());
    let segment = Segment { file_offset: 100, buffer_offset: 100, len: 8000 };
    let plan = planner::plan(Direction::Read, &[segment], DEVICE, &buffer.region, alignment, whole_device).unwrap();
    let (sender, receiver) = mpsc::channel();
    let id = buffer.id;
    transfer::read(&io, &pool, alignment, plan, buffer, move |result| sender.send(result).unwrap());
    registry.unregister(std::process::id(), id).unwrap();
    assert_eq!(registry.usage().buffers, 0);
    assert!(receiver.try_recv().is_err());
    faulty.clear();
    faulty.release();
    receiver.recv().unwrap().unwrap();
    let mut bytes = vec![0; 8192];
    rustix::io::pread(&memory, &mut bytes, 0).unwrap();
    assert!(bytes[..100].iter().chain(&bytes[8100..]).all(|&byte| byte == 0) && bytes[100..8100].iter().all(|&byte| byte == 7));
}

/// The planner asks its caller for extents in the order of the segments.
#[test]
fn extents_are_asked_for_segment_by_segment() {
    let segment = |file_offset, len| Segment { file_offset, buffer_offset: 0, len };
    let segments = [segment(0, 0), segment(8192, 4096), segment(4096, 0), segment(0, 4096)];
    let mut asked = Vec::new();
    let alignment = Alignment { block: BLOCK, memory: 512 };
    let plan = planner::plan(Direction::Write, &segments, 0, &REGION, alignment, |range, found| {
        asked.push(range.clone());
        whole_device(range, found)
    });
    assert_eq!(asked, [0..0, 8192..12288, 4096..4096, 0..4096]);
    assert_eq!(plan.unwrap().direct, 8192);
}

/// Neighbouring segments that are neighbours on the device too are one command.
#[test]
fn neighbours_are_merged() {
    let file = File { size: 8 * BLOCK, blocks: (0..8).map(|at| Some((at * BLOCK, true))).collect() };
    let alignment = Alignment { block: 512, memory: 512 };
    let segments: Vec<_> = (0..8).map(|at| Segment { file_offset: at * BLOCK, buffer_offset: at * BLOCK, len: BLOCK }).collect();
    let plan = file.plan(Direction::Read, &segments, &REGION, alignment);
    assert_eq!(plan.requests.len(), 1);
    assert_eq!(plan.requests[0].len, 8 * BLOCK);
}
