//! The checks of CUDA itself: memory, streams, events and contexts.

use super::application::{self, Memory, Pinned, allocated, every_kind};
use gpunvme_cuda::{Cuda, CudaError, Event, Gpu, HostRegistration, Move, Place, Stream, WritesOrdering};
use rustix::fs::SeekFrom;
use std::ptr::NonNull;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};
use zerocopy::IntoBytes;

/// A check, by its name. It panics where something is not as it should be.
pub type Check = (&'static str, fn(Gpu));

/// What holds on every driver.
pub const CHECKS: &[Check] = &[
    ("memory of every kind is recognised", memory_is_recognised),
    ("bytes go in and out of every kind of memory", bytes_go_in_and_out),
    ("the kernel moves bytes to and from every kind of memory", the_kernel_moves_bytes),
    ("freed memory is noticed", freed_memory_is_noticed),
    ("memory is freed after what uses it", memory_is_freed_late),
    ("memory that CUDA does not know is told apart", unknown_memory),
    ("an event is reached when what was before it is done", events),
    ("streams wait for words and write them", words),
    ("work is ordered with the application's streams", application_streams),
    ("a thread keeps the context that it had", contexts),
    ("host memory is registered once, and again after that", registration),
    ("memory is exported as a dma-buf that outlives it", dma_buf),
    ("memory is prepared for PCIe devices", pcie_devices),
    ("bytes go from one GPU to the other", two_gpus),
];

/// What the software driver knows nothing of.
pub const HARDWARE_CHECKS: &[Check] = &[("a graph capture of the application goes on", captures)];

const MIB: usize = 1 << 20;

fn cuda() -> &'static Cuda {
    Cuda::load().unwrap()
}

fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    (0..len.div_ceil(8)).flat_map(|_| next().to_le_bytes()).take(len).collect()
}

fn until(what: &str, condition: impl Fn() -> bool) {
    let begun = Instant::now();
    while !condition() {
        assert!(begun.elapsed() < Duration::from_secs(10), "{what} does not come");
        thread::sleep(Duration::from_micros(50));
    }
}

fn memory_is_recognised(gpu: Gpu) {
    for memory in every_kind(gpu, 4 * MIB) {
        let kind = memory.kind;
        let place = match kind {
            "cuMemAllocManaged" => Place::Managed,
            "cuMemHostAlloc" | "registered" => Place::Host,
            _ => Place::Device(gpu),
        };
        for &(base, len) in &memory.pieces {
            let at = base + len / 2 + 77;
            let found = cuda().memory_at(at).unwrap().unwrap_or_else(|| panic!("{kind}: not known"));
            assert_eq!((found.place, found.primary), (place, true), "{kind}: {found:?}");
            assert_eq!(found.by_kernel, matches!(place, Place::Device(_)), "{kind}: {found:?}");
            assert_eq!((found.base, found.len), (base, len), "{kind}: its bounds");
            let reached = if let Place::Managed = place { found.host } else { (place == Place::Host).then_some(base) };
            assert_eq!(found.host, reached, "{kind}: where the processor finds it");
            assert_eq!(cuda().buffer_id(at).unwrap(), Some(found.buffer_id), "{kind}: its number");
            assert_eq!(cuda().buffer_id(base).unwrap(), Some(found.buffer_id), "{kind}: its number at another address");
        }
    }
}

fn bytes_go_in_and_out(gpu: Gpu) {
    let len = 4 * MIB;
    let (stream, mut pinned) = (gpu.stream().unwrap(), Pinned::new(gpu, len));
    for (seed, memory) in every_kind(gpu, len).into_iter().enumerate() {
        let mut expected = pattern(seed as u64, len);
        pinned.put(&stream, memory.address(), &expected);
        // Odd ends, in the middle, where pieces meet.
        let part = pattern(100 + seed as u64, 5001);
        let at = len / 2 - 2503;
        pinned.put(&stream, memory.address() + at as u64, &part);
        expected[at..at + part.len()].copy_from_slice(&part);
        pinned.bytes().fill(0);
        assert!(pinned.get(&stream, memory.address(), len) == expected, "{}: other bytes came back", memory.kind);
    }
}

fn the_kernel_moves_bytes(gpu: Gpu) {
    const SLOT: usize = 8192;
    const MOVES: usize = 500;
    let (stream, scatter) = (gpu.stream().unwrap(), gpu.scatter().unwrap());
    let len = 4 * MIB;
    assert!(MOVES * SLOT <= len);
    let (mut pinned, mut table) = (Pinned::new(gpu, len), Pinned::new(gpu, MOVES * size_of::<Move>()));
    for (seed, memory) in every_kind(gpu, len).into_iter().enumerate() {
        let (before, source) = (pattern(seed as u64, len), pattern(50 + seed as u64, len));
        let mut expected = before.clone();
        pinned.put(&stream, memory.address(), &before);
        pinned.bytes().copy_from_slice(&source);
        // Lengths from nothing on, common alignment and none, whole pages too.
        let moves: Vec<Move> = (0..MOVES)
            .map(|i| {
                let (to, from) =
                    if i % 4 == 0 { (0, 0) } else { (i * 7 % 64, if i % 4 == 1 { i * 7 % 64 } else { i * 13 % 64 }) };
                let bytes = if i % 4 == 0 { 4096 } else { i * i * 11 % 5000 };
                let (to, from) = (i * SLOT + to, (MOVES - 1 - i) * SLOT + from);
                expected[to..to + bytes].copy_from_slice(&source[from..from + bytes]);
                Move { to: memory.address() + to as u64, from: pinned.address() + from as u64, len: bytes as u64 }
            })
            .collect();
        run(&stream, &scatter, &mut table, &moves);
        assert!(pinned.get(&stream, memory.address(), len) == expected, "{}: to it", memory.kind);

        // And back, every move the other way.
        pinned.bytes().fill(0xEE);
        let back: Vec<Move> = moves.iter().map(|forth| Move { to: forth.from, from: forth.to, len: forth.len }).collect();
        run(&stream, &scatter, &mut table, &back);
        let mut returned = vec![0xEE; len];
        for Move { to, len, .. } in &back {
            let at = (to - pinned.address()) as usize;
            returned[at..at + *len as usize].copy_from_slice(&source[at..at + *len as usize]);
        }
        assert!(pinned.bytes() == returned, "{}: from it", memory.kind);
    }
}

fn run(stream: &Stream, scatter: &gpunvme_cuda::Scatter, table: &mut Pinned, moves: &[Move]) {
    table.bytes().copy_from_slice(moves.as_bytes());
    // SAFETY: table and memory stay until the stream is done, and are what the kernel reaches.
    unsafe { stream.scatter(scatter, table.address(), moves.len() as u32) }.unwrap();
    stream.synchronize().unwrap();
}

fn freed_memory_is_noticed(gpu: Gpu) {
    let (stream, pinned) = (gpu.stream().unwrap(), Pinned::new(gpu, MIB));
    let allocate: [fn(Gpu) -> Memory; 2] = [|gpu| allocated(gpu, 4 * MIB), |gpu| application::mapped(gpu, &[4 * MIB])];
    for allocate in allocate {
        let memory = allocate(gpu);
        let (kind, address) = (memory.kind, memory.address());
        let number = cuda().buffer_id(address).unwrap().expect("memory that was just allocated");
        drop(memory);
        assert_eq!(cuda().buffer_id(address).unwrap(), None, "{kind}");
        assert_eq!(cuda().memory_at(address).unwrap(), None, "{kind}");
        // SAFETY: CUDA is to refuse it.
        let refused = unsafe { stream.copy_in(address, pinned.address(), MIB) }.expect_err("a copy to freed memory");
        assert_eq!((refused.call, refused.code), ("cuMemcpyHtoDAsync_v2", CudaError::INVALID_VALUE), "{kind}: {refused}");
        // SAFETY: as above.
        let refused = unsafe { stream.copy_out(pinned.address(), address, MIB) }.expect_err("a copy of freed memory");
        assert_eq!((refused.call, refused.code), ("cuMemcpyDtoHAsync_v2", CudaError::INVALID_VALUE), "{kind}: {refused}");
        let again = allocate(gpu);
        assert_ne!(cuda().buffer_id(again.address()).unwrap(), Some(number), "{kind}: the number is used again");
    }
    stream.synchronize().expect("a refused copy breaks nothing");
}

fn memory_is_freed_late(gpu: Gpu) {
    let (stream, mut pinned, words) = (gpu.stream().unwrap(), Pinned::new(gpu, MIB), Pinned::new(gpu, 4096));
    let memory = allocated(gpu, MIB);
    pinned.put(&stream, memory.address(), &pattern(5, MIB));
    pinned.bytes().fill(0);
    hold(&stream, &words, 0, 1);
    // SAFETY: that the memory is freed only then is the point; the rest stays until the end.
    unsafe { stream.copy(pinned.address(), memory.address(), MIB) }.unwrap();
    drop(stream);
    thread::scope(|scope| {
        scope.spawn(|| {
            thread::sleep(Duration::from_millis(20));
            words.word(0).store(1, Ordering::Release);
        });
        drop(memory);
        assert!(pinned.bytes() == pattern(5, MIB));
    });
}

fn unknown_memory(gpu: Gpu) {
    let _retained = gpu.enter().unwrap();
    let mut host = vec![1u8; MIB];
    for address in [host.as_mut_ptr() as u64, 0, 1, u64::MAX, 0x7000_0000_0000] {
        assert_eq!(cuda().memory_at(address).unwrap(), None, "{address:#x}");
        assert_eq!(cuda().buffer_id(address).unwrap(), None, "{address:#x}");
    }
    // It can be copied from all the same; when the call returns that is over.
    let (stream, memory) = (gpu.stream().unwrap(), allocated(gpu, MIB));
    // SAFETY: both stay until the stream is done.
    unsafe { stream.copy(memory.address(), host.as_ptr() as u64, MIB) }.unwrap();
    host.fill(2);
    let mut pinned = Pinned::new(gpu, MIB);
    assert!(pinned.get(&stream, memory.address(), MIB) == [1; MIB]);
}

/// Streams that are held by a word in `pinned` until it is written.
fn hold(stream: &Stream, pinned: &Pinned, offset: usize, value: u32) {
    // SAFETY: the word stays registered while the check runs, and is written by it.
    unsafe { stream.wait_value(pinned.address() + offset as u64, value) }.unwrap();
}

fn stays_undone(event: &Event) {
    thread::sleep(Duration::from_millis(10));
    assert!(!event.done().unwrap(), "an event is reached too early");
}

fn events(gpu: Gpu) {
    let (first, second, pinned) = (gpu.stream().unwrap(), gpu.stream().unwrap(), Pinned::new(gpu, 4096));
    let (before, after) = (gpu.event().unwrap(), gpu.event().unwrap());
    assert!(before.done().unwrap(), "an event that was not recorded");
    hold(&first, &pinned, 0, 1);
    first.record(&before).unwrap();
    second.wait(&before).unwrap();
    second.record(&after).unwrap();
    stays_undone(&before);
    stays_undone(&after);
    pinned.word(0).store(1, Ordering::Release);
    until("the second stream's event", || after.done().unwrap());
    assert!(before.done().unwrap());
    // Used again.
    hold(&first, &pinned, 0, 2);
    first.record(&before).unwrap();
    stays_undone(&before);
    pinned.word(0).store(2, Ordering::Release);
    until("the event, recorded again", || before.done().unwrap());
}

fn words(gpu: Gpu) {
    let (stream, event, pinned) = (gpu.stream().unwrap(), gpu.event().unwrap(), Pinned::new(gpu, 4096));
    // It counts as sequence numbers do: 3 is past u32::MAX.
    pinned.word(0).store(3, Ordering::Release);
    hold(&stream, &pinned, 0, u32::MAX);
    stream.synchronize().unwrap();
    hold(&stream, &pinned, 0, 4);
    // SAFETY: the word stays registered while the check runs.
    unsafe { stream.write_value(pinned.address() + 64, 77) }.unwrap();
    stream.record(&event).unwrap();
    stays_undone(&event);
    assert_eq!(pinned.word(64).load(Ordering::Acquire), 0);
    pinned.word(0).store(4, Ordering::Release);
    until("the word", || pinned.word(64).load(Ordering::Acquire) == 77);
    stream.synchronize().unwrap();
}

fn application_streams(gpu: Gpu) {
    let (ours, event) = (gpu.stream().unwrap(), gpu.event().unwrap());
    let (memory, mut pinned, words) = (allocated(gpu, MIB), Pinned::new(gpu, 2 * MIB), Pinned::new(gpu, 4096));
    let _entered = gpu.enter().unwrap();
    for (round, raw) in [application::own_stream(gpu), 0, 1, 2].into_iter().enumerate() {
        // SAFETY: the stream is never destroyed.
        let theirs = unsafe { cuda().application_stream(raw) }.unwrap();
        pinned.bytes()[..MIB].fill(round as u8 + 1);
        let (first, last) = (2 * round as u32 + 1, 2 * round as u32 + 2);
        hold(&theirs, &words, 0, first);
        theirs.record(&event).unwrap();
        ours.wait(&event).unwrap();
        // SAFETY: all of it stays until both streams are done.
        unsafe {
            ours.copy(memory.address(), pinned.address(), MIB).unwrap();
            ours.write_value(words.address() + 64, last).unwrap();
            theirs.wait_value(words.address() + 64, last).unwrap();
            theirs.copy(pinned.address() + MIB as u64, memory.address(), MIB).unwrap();
        }
        words.word(0).store(first, Ordering::Release);
        theirs.synchronize().unwrap();
        assert!(pinned.bytes()[MIB..].iter().all(|byte| *byte == round as u8 + 1), "stream {raw:#x}");
    }
}

fn contexts(gpu: Gpu) {
    thread::spawn(move || {
        assert!(application::current_context().is_null());
        let (stream, event, mut pinned) = (gpu.stream().unwrap(), gpu.event().unwrap(), Pinned::new(gpu, 4096));
        let memory = allocated(gpu, 4096);
        pinned.put(&stream, memory.address(), &[1; 4096]);
        stream.record(&event).unwrap();
        event.done().unwrap();
        drop((stream, event, memory));
        assert!(application::current_context().is_null());
        {
            let _entered = gpu.enter().unwrap();
            let entered = application::current_context();
            assert!(!entered.is_null());
            let _again = gpu.enter().unwrap();
            assert_eq!(application::current_context(), entered);
        }
        assert!(application::current_context().is_null());

        // In a context of its own.
        // SAFETY: default streams are never destroyed.
        let default_stream = || unsafe { cuda().application_stream(0) }.unwrap();
        let primary = {
            let _entered = gpu.enter().unwrap();
            default_stream().id().unwrap()
        };
        let (own, address) = application::own_context(gpu, 4096);
        assert_ne!(default_stream().id().unwrap(), primary, "two streams with one number");
        assert_eq!(cuda().gpu_of(&default_stream()).unwrap(), gpu);
        assert!(!default_stream().is_of(&gpu).unwrap());
        let found = cuda().memory_at(address).unwrap().unwrap();
        assert_eq!((found.place, found.primary), (Place::Device(gpu), false));
        let stream = gpu.stream().unwrap();
        pinned.put(&stream, address, &pattern(1, 4096));
        assert!(pinned.get(&stream, address, 4096) == pattern(1, 4096));
        assert_eq!(application::current_context(), own);
        application::destroy_context(own);
    })
    .join()
    .unwrap();
}

fn registration(gpu: Gpu) {
    let mut buffer = gpunvme::Buffer::memfd(MIB).unwrap();
    let address = NonNull::from(&mut buffer[..]).cast::<u8>();
    // SAFETY: the buffer outlives what registers it.
    let register = || unsafe { HostRegistration::new(&gpu, address, MIB) };
    let registered = register().unwrap();
    assert_eq!(register().expect_err("registered twice").name, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED");
    assert_eq!(cuda().memory_at(address.as_ptr() as u64).unwrap().map(|found| found.place), Some(Place::Host));
    drop(registered);
    assert_eq!(cuda().memory_at(address.as_ptr() as u64).unwrap(), None);
    let again = register().unwrap();
    for gpu in cuda().gpus() {
        let at = again.device_address(&gpu).unwrap();
        assert_eq!(cuda().memory_at(at).unwrap().map(|found| found.place), Some(Place::Host), "on {gpu}");
    }
}

fn dma_buf(gpu: Gpu) {
    assert!(gpu.dma_buf_supported(), "this driver exports no memory");
    for memory in [allocated(gpu, 4 * MIB), application::mapped(gpu, &[4 * MIB])] {
        let exported = gpu.export_dma_buf(memory.address(), 4 * MIB).unwrap_or_else(|error| panic!("{}: {error}", memory.kind));
        let kind = memory.kind;
        drop(memory);
        let len = rustix::fs::seek(&exported, SeekFrom::End(0)).unwrap();
        assert_eq!(len, 4 * MIB as u64, "{kind}");
    }
    let memory = allocated(gpu, 4 * MIB);
    assert_eq!(gpu.export_dma_buf(memory.address(), 100).expect_err("a part of a page").code, CudaError::INVALID_VALUE);
}

fn pcie_devices(gpu: Gpu) {
    let memory = allocated(gpu, MIB);
    gpu.sync_memops(memory.address() + 4096).unwrap();
    assert!(gpu.sync_memops(0x10).is_err(), "no memory");
    gpu.flush_remote_writes().unwrap();
    assert!(gpu.writes_ordering() >= WritesOrdering::None);
}

fn two_gpus(gpu: Gpu) {
    let Some(other) = cuda().gpus().find(|other| *other != gpu) else { return };
    let bytes = pattern(3, MIB);
    let (here, there, mut pinned) = (allocated(gpu, MIB), allocated(other, MIB), Pinned::new(gpu, MIB));
    let (stream, theirs) = (gpu.stream().unwrap(), other.stream().unwrap());
    let event = gpu.event().unwrap();
    pinned.put(&stream, here.address(), &bytes);
    // SAFETY: both stay until the streams are done.
    unsafe { stream.copy(there.address(), here.address(), MIB) }.unwrap();
    stream.record(&event).unwrap();
    theirs.wait(&event).unwrap();
    pinned.bytes().fill(0);
    assert!(pinned.get(&theirs, there.address(), MIB) == bytes);
    assert_eq!(cuda().memory_at(there.address()).unwrap().unwrap().place, Place::Device(other));
}

fn captures(gpu: Gpu) {
    let stream = application::own_stream(gpu);
    let event = gpu.event().unwrap();
    application::begin_capture(gpu, stream);
    thread::spawn(move || {
        let _alone = cuda().leave_captures_alone().unwrap();
        event.done().unwrap();
        let (memory, mut pinned, stream) = (allocated(gpu, MIB), Pinned::new(gpu, MIB), gpu.stream().unwrap());
        pinned.put(&stream, memory.address(), &pattern(4, MIB));
    })
    .join()
    .unwrap();
    application::end_capture(gpu, stream);
}
