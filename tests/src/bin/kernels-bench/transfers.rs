//! Random reads of 4 KiB by a thread of the library into memory of the GPU.

use crate::reads::{PAGE, check, next};
use gpunvme::gpu::{Segment, Transfers};
use gpunvme::{File, Mount, Wait};
use gpunvme_cuda::Gpu;
use gpunvme_tests::cuda::{get, holding};
use std::path::Path;
use std::time::{Duration, Instant};

/// How long it takes with so many in flight; then, to compare, the same reads once more.
pub fn measure(gpu: Gpu, (root, path): (&Path, &Path), len: u64, in_flight: u64, reads: u64, compare: bool) -> Duration {
    let transfers = Transfers::new(&Mount::open(root).unwrap()).unwrap();
    let file = File::open(path).unwrap();
    let memory = holding(gpu, &vec![0; (in_flight * PAGE) as usize]);
    let mut state = 0x9e37_79b9u64;
    let mut segment = |slot: u64| Segment {
        file_offset: next(&mut state) % (len / PAGE) * PAGE,
        address: memory.address() + slot * PAGE,
        len: PAGE,
    };
    let begun = Instant::now();
    if in_flight == 1 {
        // As a program with one read at a time calls it.
        for _ in 0..reads {
            // SAFETY: the memory is that long, and nothing else uses it.
            unsafe { transfers.read(&file, &[segment(0)]) }.unwrap();
        }
    } else {
        let (mut queue, mut done, mut left) = (transfers.queue().unwrap(), Vec::new(), reads);
        for slot in 0..in_flight {
            // SAFETY: the memory is that long, and each slot has one request at a time.
            unsafe { queue.read(&file, &[segment(slot)], slot) }.unwrap();
        }
        while left > 0 {
            queue.complete(Wait::Forever, &mut done).unwrap();
            for finished in done.drain(..) {
                assert_eq!(finished.result.unwrap().bytes(), PAGE);
                left -= 1;
                if left >= in_flight {
                    // SAFETY: as above; the slot's last request is done.
                    unsafe { queue.read(&file, &[segment(finished.user_data)], finished.user_data) }.unwrap();
                }
            }
        }
    }
    let took = begun.elapsed();
    if !compare {
        return took;
    }
    let mut state = 0x9e37_79b9u64;
    for _ in 0..reads / in_flight {
        let offsets: Vec<u64> = (0..in_flight).map(|_| next(&mut state) % (len / PAGE) * PAGE).collect();
        let places = offsets.iter().zip(0u64..);
        let segments: Vec<_> = places
            .map(|(offset, slot)| Segment { file_offset: *offset, address: memory.address() + slot * PAGE, len: PAGE })
            .collect();
        // SAFETY: the memory is that long, and nothing else uses it.
        unsafe { transfers.read(&file, &segments) }.unwrap();
        let bytes = get(gpu, &memory, (in_flight * PAGE) as usize);
        for (page, offset) in bytes.chunks(PAGE as usize).zip(offsets) {
            check(page, offset);
        }
    }
    took
}
