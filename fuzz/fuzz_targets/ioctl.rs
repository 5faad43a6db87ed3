//! The bytes of an ioctl from a hostile process: they become a request or are refused, and a
//! transfer that is asked for is planned. A plan stays within the buffer and the blocks of the
//! file, and its lengths add up. The input is the command, then a description of the file, then the
//! argument.
#![no_main]

use std::convert::Infallible;
use std::ops::Range;
use std::sync::{Arc, LazyLock};

use gpunvme_abi::{Command, Direction, Request, Segment, decode};
use gpunvme_blockdev::{BlockDevice, Region};
use gpunvme_blockdev_testing::MemoryDevice;
use gpunvme_gpupath::planner::{self, Alignment, Extent};
use libfuzzer_sys::fuzz_target;

/// Bytes of a block of the file.
const BLOCK: u32 = 4096;
/// Bytes of the buffer that transfers name.
const BUFFER: usize = 1 << 20;

static BUFFER_REGION: LazyLock<Arc<Region>> = LazyLock::new(|| Region::allocate(BUFFER).expect("there is memory"));
static DEVICE: LazyLock<Arc<MemoryDevice>> = LazyLock::new(|| MemoryDevice::new(1 << 20));

/// A file in which each run of blocks of a kind is `run` long: written, unwritten, and a hole, over
/// and over.
struct File {
    size: u64,
    run: u64,
    /// Neighbouring runs are neighbours on the device.
    dense: bool,
}

impl File {
    fn extents(&self, range: Range<u64>, found: &mut planner::Extents) {
        let len = self.run * u64::from(BLOCK);
        for number in range.start / len..range.end.div_ceil(len) {
            if number % 3 < 2 {
                let place = if self.dense { number } else { number * 2 + 1 };
                let file_offset = number * len;
                found.push(Extent { file_offset, device_offset: place % (1 << 20) * len, len, written: number % 3 == 0 });
            }
        }
    }

    fn plan(&self, direction: Direction, segments: &[Segment], alignment: Alignment) {
        let extents = |range, found: &mut planner::Extents| -> Result<(), Infallible> {
            self.extents(range, found);
            Ok(())
        };
        // What a writer makes sure of: all that can go direct has a place.
        let places = |range: Range<u64>, found: &mut planner::Extents| -> Result<(), Infallible> {
            let (first, last) = (range.start - range.start % alignment.block, range.end.next_multiple_of(alignment.block));
            found.push(Extent { file_offset: first, device_offset: first % (1 << 40), len: last - first, written: false });
            Ok(())
        };
        let Ok(plan) = match direction {
            Direction::Read => planner::plan(direction, segments, self.size, &BUFFER_REGION, alignment, extents),
            Direction::Write => planner::plan(direction, segments, self.size, &BUFFER_REGION, alignment, places),
        };
        let asked: u64 = segments.iter().map(|segment| segment.len).sum();
        assert!(plan.bytes() == asked || direction == Direction::Read && plan.bytes() < asked);
        let spans = plan.requests.iter().flat_map(|request| &request.spans);
        let direct: u64 = spans.clone().map(|span| span.len as u64).sum();
        assert_eq!((direct, plan.requests.iter().map(|request| request.len).sum()), (plan.direct, plan.direct));
        assert!(spans.clone().all(|span| span.offset + span.len <= BUFFER));
        assert!(plan.requests.iter().all(|request| request.offset % alignment.block == 0 && request.len % alignment.block == 0));
        assert!(plan.zeroes.iter().all(|zeroes| zeroes.buffer_offset + zeroes.len <= BUFFER as u64));
        assert!(plan.edges.iter().all(|edge| edge.buffer_offset + edge.len <= BUFFER as u64));
        assert_eq!(plan.zeroes.iter().map(|zeroes| zeroes.len).sum::<u64>(), plan.hole);
        assert_eq!(plan.edges.iter().map(|edge| edge.len).sum::<u64>(), plan.edge);
    }
}

fuzz_target!(|bytes: &[u8]| {
    let Some((head, argument)) = bytes.split_first_chunk::<14>() else { return };
    let word = |at: usize| u32::from_le_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
    // Half of the inputs name a command that exists and say its argument's length, or the fuzzer
    // would never get past them.
    let request = match Command::ALL.get(usize::from(head[0])) {
        Some(command) => command.request(0) & 0xc000_ffff | (argument.len() as u32 & 0x3fff) << 16,
        None => word(0),
    };
    let file = File { size: u64::from(word(4)) << (head[8] % 32), run: u64::from(head[9] % 64) + 1, dense: head[10] & 1 == 0 };
    let (direction, transfer) = match decode(request, argument) {
        Ok(Request::Read(transfer)) => (Direction::Read, transfer),
        Ok(Request::Write(transfer)) => (Direction::Write, transfer),
        _ => return,
    };
    if planner::outside(&transfer, BUFFER as u64).is_some() {
        return;
    }
    let geometry = DEVICE.geometry();
    match direction {
        Direction::Read => file.plan(direction, &transfer.segments, Alignment::for_reads(geometry)),
        Direction::Write => {
            let mut rest = &transfer.segments[..];
            while !rest.is_empty() {
                let (group, next) = rest.split_at(planner::disjoint(rest).len());
                file.plan(direction, group, Alignment::for_writes(BLOCK, geometry));
                rest = next;
            }
        }
    }
});
