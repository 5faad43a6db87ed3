//! Measures what calls of CUDA cost, and prints what the driver says of memory. Figures are
//! printed, never judged.

use super::application::{Pinned, allocated, every_kind};
use cudarc::driver::sys::{self, CUpointer_attribute_enum as Attribute, CUresult};
use gpunvme_cuda::{Cuda, Gpu, HostRegistration, Move};
use std::hint::black_box;
use std::ptr::NonNull;
use std::time::{Duration, Instant};
use zerocopy::IntoBytes;

/// Prints what the driver answers for memory of each kind.
pub fn facts(gpu: Gpu) {
    const ATTRIBUTES: [Attribute; 14] = [
        Attribute::CU_POINTER_ATTRIBUTE_CONTEXT,
        Attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
        Attribute::CU_POINTER_ATTRIBUTE_IS_MANAGED,
        Attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
        Attribute::CU_POINTER_ATTRIBUTE_BUFFER_ID,
        Attribute::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR,
        Attribute::CU_POINTER_ATTRIBUTE_RANGE_SIZE,
        Attribute::CU_POINTER_ATTRIBUTE_MAPPED,
        Attribute::CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR,
        Attribute::CU_POINTER_ATTRIBUTE_MAPPING_SIZE,
        Attribute::CU_POINTER_ATTRIBUTE_MEMORY_BLOCK_ID,
        Attribute::CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE,
        Attribute::CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE,
        Attribute::CU_POINTER_ATTRIBUTE_SYNC_MEMOPS,
    ];
    for memory in every_kind(gpu, 4 << 20) {
        println!(
            "{} at {:#x}, exported as a dma-buf: {:?}",
            memory.kind,
            memory.address(),
            gpu.export_dma_buf(memory.address(), 2 << 20)
        );
        println!("  sync_memops: {:?}", gpu.sync_memops(memory.address()));
        for attribute in ATTRIBUTES {
            let mut value = 0u64;
            // SAFETY: no attribute is longer than 8 bytes.
            let result = unsafe { sys::cuPointerGetAttribute((&raw mut value).cast(), attribute, memory.address() + (1 << 20)) };
            let name = format!("{attribute:?}").replace("CU_POINTER_ATTRIBUTE_", "").to_lowercase();
            match result {
                CUresult::CUDA_SUCCESS => println!("  {name}: {value:#x}"),
                error => println!("  {name}: {error:?}"),
            }
        }
    }
}

/// Prints what calls cost.
pub fn measure(gpu: Gpu) {
    let cuda = Cuda::load().unwrap();
    let (stream, event, scatter) = (gpu.stream().unwrap(), gpu.event().unwrap(), gpu.scatter().unwrap());
    let len = 64 << 20;
    let (memory, pinned) = (allocated(gpu, len), Pinned::new(gpu, len));
    let (to, from) = (memory.address(), pinned.address());

    // SAFETY: here and below: both ranges stay until the stream is done.
    each("copy of 4 KiB, enqueued", 200, || unsafe { stream.copy(to, from, 4096) }.unwrap(), || stream.synchronize().unwrap());
    {
        let _entered = gpu.enter().unwrap();
        // SAFETY: as above.
        each(
            "the same, the context entered before",
            200,
            || unsafe { stream.copy(to, from, 4096) }.unwrap(),
            || stream.synchronize().unwrap(),
        );
        each(
            "event recorded, the context entered before",
            200,
            || stream.record(&event).unwrap(),
            || stream.synchronize().unwrap(),
        );
        each("event asked, the context entered before", 200, || event.done().unwrap(), || {});
    }
    each("event recorded", 200, || stream.record(&event).unwrap(), || stream.synchronize().unwrap());
    each("event asked", 200, || event.done().unwrap(), || {});
    // SAFETY: as above; no other code uses the word.
    each(
        "word written by the stream, enqueued",
        100,
        || unsafe { stream.write_value(from, 1) }.unwrap(),
        || stream.synchronize().unwrap(),
    );
    each("memory_at", 200, || cuda.memory_at(to + 4096).unwrap(), || {});
    each("buffer_id", 200, || cuda.buffer_id(to + 4096).unwrap(), || {});
    each("event made and destroyed", 20, || gpu.event().unwrap(), || {});
    each("stream made and destroyed", 5, || gpu.stream().unwrap(), || {});
    each("kernel loaded and unloaded", 2, || gpu.scatter().unwrap(), || {});
    each("dma-buf of 64 MiB exported and closed", 5, || gpu.export_dma_buf(to, len), || {});
    let mut buffer = gpunvme::Buffer::memfd(len).unwrap();
    buffer.fill(1);
    let address = NonNull::from(&mut buffer[..]).cast();
    // SAFETY: the buffer outlives what registers it.
    each("64 MiB registered and unregistered", 1, || unsafe { HostRegistration::new(&gpu, address, len) }.unwrap(), || {});

    let mut table = Pinned::new(gpu, 512 * size_of::<Move>());
    for (count, bytes) in [(1, 4096), (8, 4096), (64, 4096), (512, 4096), (512, 512), (64, 65536), (512, 65536)] {
        for (way, to, from) in [("to the GPU", to, from), ("from the GPU", from, to)] {
            let moves: Vec<Move> = (0..count).map(|i| Move { to: to + i * bytes, from: from + i * bytes, len: bytes }).collect();
            table.bytes()[..moves.as_bytes().len()].copy_from_slice(moves.as_bytes());
            let finish = || {
                stream.record(&event).unwrap();
                while !event.done().unwrap() {}
            };
            let kernel = best(|| {
                // SAFETY: as above, and the kernel reaches all of it.
                unsafe { stream.scatter(&scatter, table.address(), count as u32) }.unwrap();
                finish();
            });
            let copies = best(|| {
                for Move { to, from, len } in &moves {
                    // SAFETY: as above.
                    unsafe { stream.copy(*to, *from, *len as usize) }.unwrap();
                }
                finish();
            });
            let rate = |took: Duration| (count * bytes) as f64 / took.as_secs_f64() / 1e9;
            println!(
                "{count} x {bytes} bytes {way}: kernel {:.1} us ({:.1} GB/s), copies {:.1} us ({:.1} GB/s)",
                micros(kernel),
                rate(kernel),
                micros(copies),
                rate(copies)
            );
        }
    }
}

/// The best of some rounds of `calls` calls, in microseconds a call.
fn each<T>(what: &str, calls: u32, mut call: impl FnMut() -> T, mut settle: impl FnMut()) {
    let round = |_| {
        let begun = Instant::now();
        (0..calls).for_each(|_| drop(black_box(call())));
        let took = begun.elapsed();
        settle();
        took
    };
    let took = (0..10).map(round).min().expect("ten rounds");
    println!("{what}: {:.2} us", micros(took) / f64::from(calls));
}

fn best(mut round: impl FnMut()) -> Duration {
    (0..50)
        .map(|_| {
            let begun = Instant::now();
            round();
            begun.elapsed()
        })
        .min()
        .expect("fifty rounds")
}

fn micros(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}
