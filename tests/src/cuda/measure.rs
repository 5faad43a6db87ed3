//! Measures what calls of CUDA cost, and prints what the driver says of memory. Figures are
//! printed, never judged.

use super::application::{Pinned, allocated, every_kind};
use cudarc::driver::sys::{self, CUpointer_attribute_enum as Attribute, CUresult};
use gpunvme_cuda::{Cuda, Gpu, HostRegistration, Move};
use rustix::mm::{Advice, MapFlags, ProtFlags};
use std::fs::File;
use std::hint::black_box;
use std::io;
use std::path::Path;
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

/// Prints what it takes to have the GPU read a file's pages in the page cache, by how long a range
/// is registered at once: the file is mapped twice, both mappings get all pages, one is registered,
/// and a GPU copies all of it.
pub fn measure_page_cache(gpu: Gpu, path: &Path) {
    const WHOLE: usize = 1 << 30;
    let file = File::open(path).unwrap();
    assert!(file.metadata().unwrap().len() >= WHOLE as u64, "{} needs {WHOLE} bytes", path.display());
    io::copy(&mut &file, &mut io::sink()).unwrap();
    let (stream, memory) = (gpu.stream().unwrap(), allocated(gpu, 256 << 20));
    for len in [2 << 20, 16 << 20, 64 << 20, 256 << 20] {
        // Mapping, first and second look-up of pages, registering, copying, unregistering.
        let mut times = [Duration::ZERO; 6];
        let mut begun = Instant::now();
        let mut took = |what: usize| {
            times[what] += begun.elapsed();
            begun = Instant::now();
        };
        for offset in (0..WHOLE).step_by(len) {
            took(0);
            // SAFETY: new mappings overlap nothing, and are unmapped below.
            let [first, second] = [(); 2].map(|()| unsafe {
                let flags = MapFlags::SHARED;
                rustix::mm::mmap(std::ptr::null_mut(), len, ProtFlags::READ, flags, &file, offset as u64).unwrap()
            });
            took(0);
            for (what, mapping) in [(1, first), (2, second)] {
                // SAFETY: nothing is changed by it.
                unsafe { rustix::mm::madvise(mapping, len, Advice::LinuxPopulateRead) }.unwrap();
                took(what);
            }
            // SAFETY: the mapping outlives what registers it.
            let registration = unsafe { HostRegistration::read_only(&gpu, NonNull::new(second).unwrap().cast(), len) }.unwrap();
            took(3);
            // SAFETY: both ranges stay until the stream is done.
            unsafe { stream.copy(memory.address(), second as u64, len) }.unwrap();
            stream.synchronize().unwrap();
            took(4);
            drop(registration);
            took(5);
            for mapping in [first, second] {
                // SAFETY: nothing points there any more.
                unsafe { rustix::mm::munmap(mapping, len) }.unwrap();
            }
        }
        let rates = times.map(|time| format!("{:.1}", WHOLE as f64 / time.as_secs_f64() / 1e9));
        let [mapped, first, second, registered, copied, unregistered] = rates;
        println!(
            "ranges of {} MiB, GB/s: mapped {mapped}, pages {first}, again {second}, registered {registered}, copied {copied}, unregistered {unregistered}",
            len >> 20
        );
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
