//! Tests of requests in the order of an application's streams.

use super::super::application::{
    Memory, Pinned, allocated, begin_capture, current_context, end_capture, every_kind, green_stream, own_stream, write_combined,
};
use super::{MIB, Sample, Site, read, segment};
use crate::tree;
use gpunvme::gpu::{Observer, Pending, Segment, Transfers};
use gpunvme::{Error, Transfer};
use gpunvme_cuda::{Cuda, Gpu, Move, Stream};
use rustix::io::Errno;
use rustix::process::{Signal, kill_process};
use std::fs;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;
use zerocopy::IntoBytes;

/// A stream of the application that waits until it is let go.
struct Blocked {
    stream: usize,
    handle: Stream,
    word: Pinned,
}

impl Blocked {
    fn new(gpu: Gpu) -> Blocked {
        let stream = own_stream(gpu);
        // SAFETY: the stream is never destroyed.
        let handle = unsafe { Cuda::load().unwrap().application_stream(stream) }.unwrap();
        let word = Pinned::new(gpu, 4096);
        // SAFETY: the word stays until the stream was waited for.
        unsafe { handle.wait_value(word.address(), 1) }.unwrap();
        Blocked { stream, handle, word }
    }

    fn let_go(&self) {
        self.word.word(0).store(1, Ordering::Release);
    }
}

pub(super) fn streams_are_ordered(site: &Site) {
    let transfers = site.transfers();
    let sample = site.sample(8, 8 * MIB);
    let memory = allocated(site.gpu, 8 * MIB as usize);
    // What is set up at the first use of a GPU may wait for all that it is doing.
    read(&transfers, &sample.file, &[segment(0, memory.address(), MIB)]).unwrap();
    let (file, path) = site.empty("out");
    let (mut before, after) = (Pinned::new(site.gpu, 8 * MIB as usize), Pinned::new(site.gpu, 8 * MIB as usize));
    before.bytes().fill(0x11);
    let whole = [segment(0, memory.address(), 8 * MIB)];
    let blocked = Blocked::new(site.gpu);
    let (written, read) = {
        let copy = |to, from| {
            // SAFETY: all of it stays until the stream was waited for.
            unsafe { blocked.handle.copy(to, from, 8 * MIB as usize) }.unwrap();
        };
        // The file gets what the stream put into memory; then memory gets the sample, and the
        // stream copies that out.
        copy(memory.address(), before.address());
        // SAFETY: the stream orders what uses the memory.
        let written = unsafe { transfers.write_on_stream(&file, &whole, blocked.stream) }.unwrap();
        // SAFETY: as above.
        let read = unsafe { transfers.read_on_stream(&sample.file, &whole, blocked.stream) }.unwrap();
        copy(after.address(), memory.address());
        (written, read)
    };
    thread::sleep(Duration::from_millis(50));
    assert!(!written.is_done() && !read.is_done(), "the stream has not come to them");
    assert_eq!(fs::metadata(&path).unwrap().len(), 0);
    blocked.let_go();
    blocked.handle.synchronize().unwrap();
    let mut after = after;
    assert!(after.bytes() == &sample.bytes[..], "what comes after a read in a stream sees it");
    assert_eq!((written.wait().unwrap().bytes(), read.wait().unwrap().bytes()), (8 * MIB, 8 * MIB));
    assert!(fs::read(path).unwrap().iter().all(|byte| *byte == 0x11), "a write in a stream writes what was before it");
}

pub(super) fn every_kind_of_memory(site: &Site) {
    let transfers = site.transfers();
    let len = 5 * MIB + 1234;
    let sample = site.sample(24, len);
    let stream = own_stream(site.gpu);
    for Memory { kind, pieces, .. } in &every_kind(site.gpu, 8 * MIB as usize) {
        let start = pieces[0].0;
        // A long one past the end of the file, and many short ones, no two in one block, of which
        // the last ones reach past it or lie behind it.
        let long = vec![segment(513, start + 100, 7 * MIB)];
        let short: Vec<Segment> = (0..400).map(|n| segment(len - 380 * 9216 + n * 9216, start + n * 20_000 + 4, 4999)).collect();
        for segments in [long, short] {
            site.put(start, &vec![0xee; 8 * MIB as usize]);
            let mut expected = vec![0xee; 8 * MIB as usize];
            let mut bytes = 0;
            for s in &segments {
                let there = s.len.min(len.saturating_sub(s.file_offset)) as usize;
                let (at, from) = ((s.address - start) as usize, s.file_offset.min(len) as usize);
                expected[at..at + there].copy_from_slice(&sample.bytes[from..from + there]);
                bytes += there as u64;
            }
            // SAFETY: no other code uses the memory until the request was waited for.
            let read = unsafe { transfers.read_on_stream(&sample.file, &segments, stream) }.unwrap().wait().unwrap();
            assert_eq!(read.bytes(), bytes, "{kind}");
            assert!(site.look(start, 8 * MIB) == expected, "read into {kind}");
            let (file, path) = site.empty("out");
            // SAFETY: as above.
            let written = unsafe { transfers.write_on_stream(&file, &segments, stream) }.unwrap().wait().unwrap();
            assert_eq!(written.bytes(), segments.iter().map(|s| s.len).sum::<u64>(), "{kind}");
            let written = fs::read(path).unwrap();
            for s in &segments {
                let (at, from, len) = (s.file_offset as usize, (s.address - start) as usize, s.len as usize);
                assert!(written[at..at + len] == expected[from..from + len], "{s:?} written from {kind}");
            }
        }
    }
}

/// A kernel moves them, by a table that is this request's and not that of the one before it.
pub(super) fn few_small_segments(site: &Site) {
    let transfers = site.transfers();
    let sample = site.sample(26, 4 * MIB);
    let memory = allocated(site.gpu, 8 * MIB as usize);
    let stream = own_stream(site.gpu);
    let (here, elsewhere) = (memory.address(), memory.address() + 4 * MIB);
    let bytes = tree::pattern(27, 4 * MIB as usize);
    for count in [1, 3, 100, 130, 300, 500] {
        site.put(here, &bytes);
        let (file, path) = site.empty("out");
        let segments = |address| -> Vec<Segment> { (0..count).map(|n| segment(n * 8192, address + n * 8192, 4096)).collect() };
        // SAFETY: no other code uses the memory until both were waited for.
        let (read_in, written) = unsafe {
            let read_in = transfers.read_on_stream(&sample.file, &segments(elsewhere), stream).unwrap();
            (read_in, transfers.write_on_stream(&file, &segments(here), stream).unwrap())
        };
        assert_eq!((read_in.wait().unwrap().bytes(), written.wait().unwrap().bytes()), (count * 4096, count * 4096));
        let (there, written) = (site.look(elsewhere, 4 * MIB), fs::read(path).unwrap());
        for n in 0..count as usize {
            let range = n * 8192..n * 8192 + 4096;
            assert!(there[range.clone()] == sample.bytes[range.clone()], "segment {n} of {count} that were read");
            assert!(written[range.clone()] == bytes[range], "segment {n} of {count} that were written");
        }
        assert!(site.look(here, 4 * MIB) == bytes, "what {count} segments were written from changed");
    }
}

/// Says what a request is when its stream comes to it.
struct Says {
    segment: Segment,
    is_asked: mpsc::Sender<()>,
}

impl Observer for Says {
    fn segment(&mut self, _most: Segment) -> std::result::Result<Segment, Errno> {
        let _ = self.is_asked.send(()); // the check may have failed already
        Ok(self.segment)
    }

    fn ends(&mut self, _outcome: &gpunvme::Result<Transfer>) {}
}

pub(super) fn late_requests(site: &Site) {
    let transfers = site.transfers();
    let len = 5 * MIB + 1234;
    let sample = site.sample(25, len);
    let seen = allocated(site.gpu, 8 * MIB as usize);
    // What is set up at the first use of a GPU may wait for all that it is doing.
    read(&transfers, &sample.file, &[segment(0, seen.address(), MIB)]).unwrap();
    for Memory { kind, pieces, .. } in &every_kind(site.gpu, 8 * MIB as usize) {
        let start = pieces[0].0;
        // Of both pieces of memory that is mapped in several.
        let most = segment(513, start + 100, 6 * MIB);
        let requests = [
            segment(8192 + 513, start + 100, 6 * MIB - 8192),
            segment(77, start + 2 * MIB + 1, 3 * MIB + 17),
            segment(2 * MIB, start, MIB),
            segment(len - 100, start + 7, 5000),
            segment(4096, start + 16, 0),
        ];
        // A kernel does not reach managed memory without its pages following it.
        let requests: &[Segment] = if *kind == "cuMemAllocManaged" { &[most] } else { &requests };
        for &request in requests {
            let (at, from, length) = ((request.address - start) as usize, request.file_offset as usize, request.len as usize);
            site.put(start, &vec![0xee; 8 * MIB as usize]);
            let mut expected = vec![0xee; 8 * MIB as usize];
            let there = length.min((len as usize).saturating_sub(from));
            expected[at..at + there].copy_from_slice(&sample.bytes[from..from + there]);
            let (file, path) = site.empty("out");
            let blocked = Blocked::new(site.gpu);
            let (tell, asked) = mpsc::channel();
            let says = || Says { segment: request, is_asked: tell.clone() };
            // SAFETY: no other code uses the memory until the stream was waited for.
            let (read, written) = unsafe {
                let read = transfers.read_on_stream_late(&sample.file, most, blocked.stream, says()).unwrap();
                blocked.handle.copy(seen.address(), start, 8 * MIB as usize).unwrap();
                (read, transfers.write_on_stream_late(&file, most, blocked.stream, says()).unwrap())
            };
            assert!(asked.recv_timeout(Duration::from_millis(20)).is_err(), "{kind}: asked before the stream came to it");
            blocked.let_go();
            blocked.handle.synchronize().unwrap();
            assert_eq!((read.wait().unwrap().bytes(), written.wait().unwrap().bytes()), (there as u64, length as u64), "{kind}");
            assert!(site.look(seen.address(), 8 * MIB) == expected, "{request:?} read into {kind}, as the stream saw it");
            let written = fs::read(path).unwrap();
            assert!(length == 0 || written[from..] == expected[at..at + length], "{request:?} written from {kind}");
        }
    }
    // More than was said, and other memory.
    let (memory, other) = (allocated(site.gpu, MIB as usize), allocated(site.gpu, MIB as usize));
    let (start, stream) = (memory.address(), own_stream(site.gpu));
    let wrong = [
        (segment(0, start, 4097), Errno::INVAL),
        (segment(u64::MAX / 2, start, 1), Errno::INVAL),
        (segment(0, start + MIB - 1, 2), Errno::FAULT),
        (segment(0, other.address(), 1), Errno::FAULT),
    ];
    for (request, expected) in wrong {
        let says = Says { segment: request, is_asked: mpsc::channel().0 };
        // SAFETY: no other code uses the memory until the request was waited for.
        let read = unsafe { transfers.read_on_stream_late(&sample.file, segment(0, start, 4096), stream, says) }.unwrap();
        let answer = read.wait();
        assert!(matches!(&answer, Err(Error::Transfer { errno, .. }) if *errno == expected), "{request:?}: {answer:?}");
    }
}

/// Neither call may wait for the stream: only their caller lets it go.
pub(super) fn pinned_memory(site: &Site) {
    let transfers = site.transfers();
    let sample = site.sample(28, 2 * MIB);
    let (file, path) = site.empty("out");
    let (mut from, mut to) = (Pinned::new(site.gpu, 2 * MIB as usize), Pinned::new(site.gpu, 2 * MIB as usize));
    from.bytes().fill(0x2c);
    read(&transfers, &sample.file, &[segment(0, to.address(), MIB)]).unwrap();
    to.bytes().fill(0);
    let blocked = Blocked::new(site.gpu);
    let begin = |what, begin: &dyn Fn() -> gpunvme::Result<Pending>| within(Duration::from_secs(20), what, || begin().unwrap());
    // SAFETY: no other code uses the memory until both were waited for.
    let read_in = begin("the call that puts a read into pinned host memory into a held stream", &|| unsafe {
        transfers.read_on_stream(&sample.file, &[segment(0, to.address(), 2 * MIB)], blocked.stream)
    });
    // SAFETY: as above.
    let written = begin("the call that puts a write from pinned host memory into a held stream", &|| unsafe {
        transfers.write_on_stream(&file, &[segment(0, from.address(), 2 * MIB)], blocked.stream)
    });
    thread::sleep(Duration::from_millis(50));
    assert!(!read_in.is_done() && !written.is_done(), "the stream has not come to them");
    blocked.let_go();
    within(Duration::from_secs(20), "a read and a write of pinned host memory in a stream", || {
        assert_eq!((read_in.wait().unwrap().bytes(), written.wait().unwrap().bytes()), (2 * MIB, 2 * MIB));
    });
    assert!(to.bytes() == &sample.bytes[..], "what was read into pinned host memory");
    assert!(fs::read(path).unwrap().iter().all(|byte| *byte == 0x2c), "what was written from pinned host memory");
}

/// The processor's stores to it are in no order with those of words.
pub(super) fn write_combined_memory(site: &Site) {
    let transfers = site.transfers();
    let sample = site.sample(30, 2 * MIB);
    let memory = write_combined(site.gpu, 2 * MIB as usize);
    let (zeroes, seen) = (allocated(site.gpu, 2 * MIB as usize), allocated(site.gpu, 2 * MIB as usize));
    site.put(zeroes.address(), &vec![0; 2 * MIB as usize]);
    let stream = own_stream(site.gpu);
    // SAFETY: the stream is never destroyed.
    let handle = unsafe { Cuda::load().unwrap().application_stream(stream) }.unwrap();
    for round in 0..20 {
        // SAFETY: the stream orders what uses the memory, all of which stays until it was waited
        // for.
        let read = unsafe {
            handle.copy(memory.address(), zeroes.address(), 2 * MIB as usize).unwrap();
            let read = transfers.read_on_stream(&sample.file, &[segment(0, memory.address(), 2 * MIB)], stream).unwrap();
            handle.copy(seen.address(), memory.address(), 2 * MIB as usize).unwrap();
            read
        };
        assert_eq!(read.wait().unwrap().bytes(), 2 * MIB);
        handle.synchronize().unwrap();
        assert!(site.look(seen.address(), 2 * MIB) == sample.bytes, "what the stream saw in round {round}");
    }
}

pub(super) fn many_streams(site: &Site) {
    let transfers = site.transfers();
    let sample = site.sample(25, 4 * MIB);
    let memory = allocated(site.gpu, 24 * MIB as usize);
    read(&transfers, &sample.file, &[segment(0, memory.address(), MIB)]).unwrap();
    let streams: Vec<Blocked> = (0..12).map(|_| Blocked::new(site.gpu)).collect();
    let address = memory.address();
    let begin = |n: u64| {
        let part = segment(n % 4 * MIB, address + n * MIB, MIB);
        // SAFETY: each request has memory of its own until all were waited for.
        unsafe { transfers.read_on_stream(&sample.file, &[part], streams[n as usize % 12].stream) }.unwrap()
    };
    let pending = within(Duration::from_secs(20), "more streams than windows take turns", || {
        thread::scope(|scope| {
            // As many as there are windows; the others' calls wait.
            let mut pending: Vec<_> = (0..8).chain(12..20).map(begin).collect();
            let begin = &begin;
            let others: Vec<_> = (8..12).map(|n| scope.spawn(move || begin(n))).collect();
            thread::sleep(Duration::from_millis(50));
            assert!(others.iter().all(|other| !other.is_finished()), "there is no limit");
            streams.iter().for_each(Blocked::let_go);
            pending.extend(others.into_iter().map(|other| other.join().unwrap()));
            pending.extend((20..24).map(begin));
            pending
        })
    });
    assert!(pending.into_iter().all(|pending| pending.wait().unwrap().bytes() == MIB));
    let whole = site.look(memory.address(), 24 * MIB);
    assert!(whole.chunks(4 * MIB as usize).all(|chunk| chunk == sample.bytes));
}

pub(super) fn many_in_streams(site: &Site) {
    let transfers = site.transfers();
    let sample = site.sample(9, 8 * MIB);
    let memory = allocated(site.gpu, 8 * MIB as usize);
    read(&transfers, &sample.file, &[segment(0, memory.address(), MIB)]).unwrap();
    let streams: Vec<Blocked> = (0..3).map(|_| Blocked::new(site.gpu)).collect();
    let mut pending = Vec::new();
    for at in 0..60u64 {
        let part = segment(at % 8 * MIB, memory.address() + at % 8 * MIB, MIB);
        // SAFETY: requests that meet write the same bytes.
        pending.push(unsafe { transfers.read_on_stream(&sample.file, &[part], streams[at as usize % 3].stream) }.unwrap());
    }
    // Others pass meanwhile.
    assert_eq!(read(&transfers, &sample.file, &[segment(0, memory.address(), 8 * MIB)]).unwrap().bytes(), 8 * MIB);
    streams.iter().rev().for_each(Blocked::let_go);
    for pending in pending {
        assert_eq!(pending.wait().unwrap().bytes(), MIB);
    }
    streams.iter().for_each(|stream| stream.handle.synchronize().unwrap());
    assert!(site.look(memory.address(), 8 * MIB) == sample.bytes);
}

pub(super) fn streams_go_on(site: &Site) {
    let dying = Site::new(site.gpu);
    let (sample, dying_sample) = (site.sample(18, MIB), dying.sample(19, MIB));
    let (transfers, dying_transfers) = (site.transfers(), dying.transfers());
    let memory = allocated(site.gpu, MIB as usize);
    let whole = [segment(0, memory.address(), MIB)];
    read(&transfers, &sample.file, &whole).unwrap();
    // The file is known to the ring for streams: it has not to be asked for again.
    // SAFETY: what is in the memory does not matter.
    let first = unsafe { dying_transfers.read_on_stream(&dying_sample.file, &whole, own_stream(site.gpu)) };
    assert_eq!(first.unwrap().wait().unwrap().bytes(), MIB);
    // Nor its length: that read had the kernel drop what it had cached of the file.
    assert_eq!(dying_sample.file.size().unwrap(), MIB);

    let blocked = Blocked::new(site.gpu);
    // SAFETY: what is in the memory does not matter.
    let begin =
        |transfers: &Transfers, sample: &Sample| unsafe { transfers.read_on_stream(&sample.file, &whole, blocked.stream) };
    let pending: Vec<_> = (0..10).map(|_| begin(&transfers, &sample).unwrap()).collect();
    kill_process(dying.volume.daemon(), Signal::STOP).unwrap();
    let lost = begin(&dying_transfers, &dying_sample).unwrap();
    blocked.let_go();
    thread::sleep(Duration::from_millis(50));
    let Site { volume, .. } = dying;
    drop(volume.signal(Signal::KILL));
    blocked.handle.synchronize().unwrap();
    assert!(pending.into_iter().all(|pending| pending.wait().is_ok_and(|done| done.bytes() == MIB)));
    assert!(matches!(lost.wait(), Err(Error::RingClosed { .. })));
    begin(&transfers, &sample).unwrap().wait().unwrap();
}

/// Freeing waits for all streams, and in the driver the calls of all other threads wait for that:
/// nothing that a stream waits for may need such a call.
pub(super) fn memory_is_freed_meanwhile(site: &Site) {
    let transfers = site.transfers();
    let sample = site.sample(23, 8 * MIB);
    let (memory, other) = (allocated(site.gpu, 8 * MIB as usize), allocated(site.gpu, MIB as usize));
    let (file, path) = site.empty("out");
    let elsewhere = [segment(0, other.address(), MIB)];
    // In one piece, and in many that a kernel moves.
    let whole = vec![segment(0, memory.address(), 8 * MIB)];
    let small: Vec<Segment> = (0..500).map(|at| segment(at * 8192, memory.address() + at * 8192, 4096)).collect();
    read(&transfers, &sample.file, &whole).unwrap();
    for (segments, others) in [(&whole, false), (&small, false), (&whole, true), (&small, true)] {
        site.put(memory.address(), &vec![0; 8 * MIB as usize]);
        let spare = site.gpu.alloc(MIB as usize).unwrap();
        let blocked = Blocked::new(site.gpu);
        let over = AtomicBool::new(false);
        within(Duration::from_secs(20), "memory is freed while a stream waits for a request", || {
            thread::scope(|scope| {
                // SAFETY: the stream orders what uses the memory.
                let (read_in, written) = unsafe {
                    let read_in = transfers.read_on_stream(&sample.file, segments, blocked.stream).unwrap();
                    (read_in, transfers.write_on_stream(&file, segments, blocked.stream).unwrap())
                };
                for _ in 0..if others { 4 } else { 0 } {
                    scope.spawn(|| {
                        while !over.load(Ordering::Relaxed) {
                            read(&transfers, &sample.file, &elsewhere).unwrap();
                        }
                    });
                }
                let freed = scope.spawn(move || drop(spare));
                thread::sleep(Duration::from_millis(100));
                blocked.let_go();
                let bytes: u64 = segments.iter().map(|segment| segment.len).sum();
                assert_eq!((read_in.wait().unwrap().bytes(), written.wait().unwrap().bytes()), (bytes, bytes));
                freed.join().unwrap();
                over.store(true, Ordering::Relaxed);
            });
        });
        let (there, written) = (site.look(memory.address(), 8 * MIB), fs::read(&path).unwrap());
        for s in segments {
            let range = s.file_offset as usize..(s.file_offset + s.len) as usize;
            assert!(
                there[range.clone()] == sample.bytes[range.clone()] && written[range.clone()] == sample.bytes[range],
                "{s:?}"
            );
        }
    }
}

/// Ends the process where `body` does not end in time: in a driver that stands still nothing else
/// could be checked.
fn within<T>(limit: Duration, what: &str, body: impl FnOnce() -> T) -> T {
    let (running, over) = mpsc::channel::<()>();
    thread::scope(|scope| {
        scope.spawn(move || {
            if over.recv_timeout(limit) == Err(RecvTimeoutError::Timeout) {
                eprintln!("FAILED: {what}: it takes more than {limit:?}");
                std::process::exit(1);
            }
        });
        let _running = running;
        body()
    })
}

pub(super) fn crashed_context(site: &Site) {
    let transfers = site.transfers();
    let sample = site.sample(29, MIB);
    let memory = allocated(site.gpu, MIB as usize);
    let whole = [segment(0, memory.address(), MIB)];
    read(&transfers, &sample.file, &whole).unwrap();
    let (other, scatter) = (site.gpu.stream().unwrap(), site.gpu.scatter().unwrap());
    let mut table = Pinned::new(site.gpu, 4096);
    // SAFETY: the table stays until the end; zeroed, it moves nothing. Loading the kernel may wait
    // for all streams, so it is done now.
    unsafe { other.scatter(&scatter, table.address(), 1) }.unwrap();
    other.synchronize().unwrap();
    let nowhere = Move { to: 0, from: table.address() + 2048, len: 16 };
    table.bytes()[..size_of::<Move>()].copy_from_slice(nowhere.as_bytes());

    // As many as there are windows, and one for which there is none. A GPU has few queues, which
    // streams share: the first stream has to come to its kernel before any of the others.
    let mut streams = vec![Blocked::new(site.gpu)];
    // SAFETY: what it does wrong is the point.
    unsafe { streams[0].handle.scatter(&scatter, table.address(), 1) }.unwrap();
    streams.resize_with(9, || Blocked::new(site.gpu));
    let ended = |result: gpunvme::Result<()>, what: &str| {
        let error = result.expect_err(what);
        assert!(matches!(&error, Error::Cuda { error, .. } if error.name == "CUDA_ERROR_ILLEGAL_ADDRESS"), "{what}: {error}");
        assert!(error.to_string().contains("only a new process"), "{what}: {error}");
        error.to_string()
    };
    within(Duration::from_secs(20), "all requests are answered after a kernel crashed", || {
        // SAFETY: what is in the memory does not matter.
        let begin = |stream: &Blocked| unsafe { transfers.read_on_stream(&sample.file, &whole, stream.stream) };
        let mut pending: Vec<_> = (0..16).map(|n| begin(&streams[n % 8]).unwrap()).collect();
        let (polled, unwatched) = (pending.pop().unwrap(), pending.pop().unwrap());
        drop(unwatched);
        thread::scope(|scope| {
            let without = scope.spawn(|| begin(&streams[8]).map(drop));
            let waiting = scope.spawn(|| pending.into_iter().map(|pending| pending.wait().map(drop)).collect::<Vec<_>>());
            thread::sleep(Duration::from_millis(300));
            assert!(!polled.is_done() && !without.is_finished() && !waiting.is_finished(), "no stream has come to any");
            streams[0].let_go();
            for result in waiting.join().unwrap() {
                let text = ended(result, "a request that is waited for");
                assert!(text.contains("in stream 0x") && text.contains(&sample.path.display().to_string()), "{text}");
            }
            while !polled.is_done() {
                thread::sleep(Duration::from_millis(1));
            }
            ended(polled.wait().map(drop), "a request that is looked at");
            ended(without.join().unwrap(), "a request without a window");
        });
        ended(begin(&streams[0]).map(drop), "a request that comes afterwards");
        drop(transfers);
    });
    assert!(fs::read(&sample.path).unwrap() == sample.bytes, "the volume is as it was");
}

pub(super) fn captured_streams(site: &Site) {
    let transfers = site.transfers();
    let sample = site.sample(21, MIB);
    let memory = allocated(site.gpu, MIB as usize);
    let whole = [segment(0, memory.address(), MIB)];
    read(&transfers, &sample.file, &whole).unwrap();
    let stream = own_stream(site.gpu);
    begin_capture(site.gpu, stream);
    // SAFETY: no other code uses the memory.
    let refused = unsafe {
        [transfers.read_on_stream(&sample.file, &whole, stream), transfers.write_on_stream(&sample.file, &whole, stream)]
    };
    let nodes = end_capture(site.gpu, stream);
    for refused in refused {
        let error = refused.unwrap_err();
        assert!(matches!(error, Error::StreamCaptured { stream: captured, .. } if captured == stream), "{error}");
        assert!(error.to_string().contains(&sample.path.display().to_string()), "{error}");
    }
    assert_eq!(nodes, 0, "nothing was put into the stream");
    // SAFETY: no other code uses the memory until the read was waited for.
    let pending = unsafe { transfers.read_on_stream(&sample.file, &whole, stream) }.unwrap();
    assert_eq!(pending.wait().unwrap().bytes(), MIB);
}

/// Segments long enough to be copied, and short ones that a kernel moves: it was loaded in the
/// primary context.
pub(super) fn green_contexts(site: &Site) {
    let transfers = site.transfers();
    let sample = site.sample(61, MIB);
    let memory = allocated(site.gpu, MIB as usize);
    let stream = green_stream(site.gpu);
    // SAFETY: the stream is never destroyed.
    let handle = unsafe { Cuda::load().unwrap().application_stream(stream) }.unwrap();
    assert!(handle.is_of(&site.gpu).unwrap(), "its context is the primary one");
    let long = vec![segment(0, memory.address(), MIB)];
    let short: Vec<Segment> = (0..64).map(|n| segment(n * 8192, memory.address() + n * 8192, 512)).collect();
    for segments in [long, short] {
        site.put(memory.address(), &vec![0; MIB as usize]);
        thread::scope(|scope| {
            // SAFETY: no other code uses the memory until the requests were waited for. Any thread
            // may ask.
            let read = || unsafe { transfers.read_on_stream(&sample.file, &segments, stream) }.unwrap().wait().unwrap();
            scope.spawn(read);
            scope.spawn(read);
        });
        let there = site.look(memory.address(), MIB);
        for Segment { file_offset, len, .. } in segments {
            let range = file_offset as usize..(file_offset + len) as usize;
            assert!(there[range.clone()] == sample.bytes[range], "{file_offset}");
        }
    }
}

pub(super) fn default_streams(site: &Site) {
    let transfers = site.transfers();
    let sample = site.sample(62, MIB);
    let memory = allocated(site.gpu, MIB as usize);
    let whole = [segment(0, memory.address(), MIB)];
    for stream in 0..=2 {
        site.put(memory.address(), &vec![0; MIB as usize]);
        thread::scope(|scope| {
            let asked = scope.spawn(|| {
                assert!(current_context().is_null(), "a new thread has none");
                // SAFETY: no other code uses the memory until the request was waited for.
                let bytes = unsafe { transfers.read_on_stream(&sample.file, &whole, stream) }.unwrap().wait().unwrap().bytes();
                assert!(current_context().is_null(), "the thread is as it was");
                bytes
            });
            assert_eq!(asked.join().unwrap(), MIB);
        });
        assert!(site.look(memory.address(), MIB) == sample.bytes, "stream {stream}");
    }
}
