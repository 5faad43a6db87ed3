//! Files of a mount in GPU memory, checked with real CUDA memory of every kind: on the software
//! driver by `cargo test`, on a GPU by the program `cuda-checks`.

mod endings;
mod page_cache;
mod streams;

pub use page_cache::CHECKS as PAGE_CACHE_CHECKS;

use super::application::{Memory, Pinned, allocated, every_kind, own_stream};
use crate::mounted::Mounted;
use crate::tree;
use gpunvme::gpu::{Caching, Cancel, Queue, Segment, Settings, Transfers};
use gpunvme::{Error, File, Mount, Require, Route, Wait};
use gpunvme_cuda::{Cuda, Gpu};
use std::fs::{self, OpenOptions};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

/// A check, by its name. It panics where something is not as it should be.
pub type TransferCheck = (&'static str, fn(&Site));

/// What holds on every driver.
pub const TRANSFER_CHECKS: &[TransferCheck] = &[
    ("files go into and out of every kind of memory", every_kind_of_memory),
    ("ranges of any offset and length are the file's", any_range),
    ("thousands of small segments are one request", many_small_segments),
    ("a pool that is smaller than a request is enough", a_small_pool),
    ("a thread keeps many requests in flight", many_in_flight),
    ("a thread waits for several requests, and calls off those in flight", waiting_for_several),
    ("a read ends where the file does, also where that becomes shorter and longer meanwhile", short_and_long),
    ("requests call back", callbacks),
    ("threads do not disturb each other", many_threads),
    ("a file that is read once is asked for once", read_once),
    ("short requests that are waited for are done by the waiting thread, as far as there is room", callers),
    ("what a stream does before and after a read or write is in order with it", streams::streams_are_ordered),
    ("streams move files into and out of every kind of memory, to their ends", streams::every_kind_of_memory),
    ("a stream's small segments are those of their request, however few", streams::few_small_segments),
    ("what a request is may be said when its stream comes to it", streams::late_requests),
    ("more streams than windows take turns", streams::many_streams),
    ("requests in streams do not wait for each other", streams::many_in_streams),
    ("a stream goes on when its request fails", streams::streams_go_on),
    ("memory is freed while a stream waits for a request", streams::memory_is_freed_meanwhile),
    ("a stream that is being captured is refused", streams::captured_streams),
    ("streams of green contexts are served as others of their GPU", streams::green_contexts),
    ("a thread without a context means the first GPU by a default stream", streams::default_streams),
    ("a file forgets the rings that are over", rings_that_are_over),
    ("memory that was freed too early is an error, and hurts nothing else", endings::freed_too_early),
    ("memory that was freed while a caller waits for its bytes is an error too", endings::freed_before_its_caller_copies),
    ("a daemon that dies ends its requests and no others", endings::a_dying_daemon),
    ("a daemon that dies in the first read of a file ends it", endings::a_daemon_dies_in_a_first_read),
    ("a daemon that ends in order leaves no request behind", endings::an_ending_daemon),
    ("an application that dies in the middle leaves nothing behind", endings::a_dying_application),
    ("memory that CUDA does not know is refused", unknown_memory),
    ("what is required is done or refused", requirements),
    ("a request may be for several GPUs", several_gpus),
    ("pinned host memory is read and written in a stream that has not come to it", streams::pinned_memory),
    ("write-combined memory has all of a read when its stream goes on", streams::write_combined_memory),
];

/// What holds on every driver, and leaves the process without its GPU: it needs one of its own.
pub const CRASH_CHECK: TransferCheck =
    ("requests are answered whose streams a kernel that crashes ended", streams::crashed_context);

const MIB: u64 = 1 << 20;

/// Where checks are made.
pub struct Site {
    gpu: Gpu,
    volume: Mounted,
}

/// A file and what is in it.
struct Sample {
    file: File,
    path: PathBuf,
    bytes: Vec<u8>,
}

/// Transfers whose reads come from the device, whatever the page cache has.
pub fn from_the_device(mount: &Mount) -> Transfers {
    let mut settings = Settings::default();
    settings.caching = Caching::Never;
    Transfers::with(mount, settings).unwrap()
}

impl Site {
    /// On this GPU, with a volume of its own.
    pub fn new(gpu: Gpu) -> Site {
        Site { gpu, volume: Mounted::new() }
    }

    fn transfers(&self) -> Transfers {
        from_the_device(&self.mount())
    }

    fn mount(&self) -> Mount {
        Mount::open(self.volume.root()).unwrap()
    }

    fn sample(&self, seed: u64, len: u64) -> Sample {
        let (path, bytes) = (self.volume.path(format!("sample-{seed}")), tree::pattern(seed, len as usize));
        fs::write(&path, &bytes).unwrap();
        Sample { file: File::open(&path).unwrap(), path, bytes }
    }

    fn empty(&self, name: &str) -> (File, PathBuf) {
        let path = self.volume.path(name);
        let _ = fs::remove_file(&path);
        (File::create(&path).unwrap(), path)
    }

    fn look(&self, address: u64, len: u64) -> Vec<u8> {
        look(self.gpu, address, len)
    }

    fn put(&self, address: u64, bytes: &[u8]) {
        let stream = self.gpu.stream().unwrap();
        Pinned::new(self.gpu, bytes.len().next_multiple_of(4096)).put(&stream, address, bytes);
    }
}

/// What is in memory.
fn look(gpu: Gpu, address: u64, len: u64) -> Vec<u8> {
    let stream = gpu.stream().unwrap();
    Pinned::new(gpu, (len as usize).next_multiple_of(4096)).get(&stream, address, len as usize).to_vec()
}

fn segment(file_offset: u64, address: u64, len: u64) -> Segment {
    Segment { file_offset, address, len }
}

fn random(seed: u64, below: u64) -> u64 {
    u64::from_le_bytes(tree::pattern(seed, 8).try_into().unwrap()) % below
}

fn read(transfers: &Transfers, file: &File, segments: &[Segment]) -> gpunvme::Result<gpunvme::Transfer> {
    // SAFETY: the checks own the memory, and do nothing with it meanwhile.
    unsafe { transfers.read(file, segments) }
}

fn write(transfers: &Transfers, file: &File, segments: &[Segment]) -> gpunvme::Result<gpunvme::Transfer> {
    // SAFETY: as above.
    unsafe { transfers.write(file, segments) }
}

fn every_kind_of_memory(site: &Site) {
    let transfers = site.transfers();
    let sample = site.sample(1, 8 * MIB);
    for Memory { kind, pieces, .. } in &every_kind(site.gpu, 8 * MIB as usize) {
        let start = pieces[0].0;
        // As a tensor lies: somewhere in the memory, and over the bounds of its pieces.
        let (at, len) = (4096 + 512, 8 * MIB - 8192);
        let done = read(&transfers, &sample.file, &[segment(at, start + at, len)]).unwrap();
        assert_eq!((done.bytes(), done.moved.edge), (len, 0), "{kind}");
        assert!(site.look(start + at, len) == sample.bytes[at as usize..][..len as usize], "read into {kind}");
        let (file, path) = site.empty("out");
        let done = write(&transfers, &file, &[segment(0, start + at, len)]).unwrap();
        assert_eq!(done.bytes(), len, "{kind}");
        assert!(fs::read(path).unwrap() == sample.bytes[at as usize..][..len as usize], "written from {kind}");
    }
}

fn any_range(site: &Site) {
    let transfers = site.transfers();
    let len = 3 * MIB + 1234;
    let sample = site.sample(2, len);
    let memory = allocated(site.gpu, 4 * MIB as usize);
    let (file, path) = site.empty("out");
    file.set_size(len).unwrap();
    let mut expected = vec![0; len as usize];
    for round in 0..60 {
        let offset = random(3 * round, len + 100);
        let wanted = 1 + random(3 * round + 1, [100, 5000, 300_000, 2 * MIB][round as usize % 4]);
        let address = memory.address() + random(3 * round + 2, MIB);
        let there = wanted.min(len.saturating_sub(offset));
        site.put(address, &vec![0xee; wanted as usize]);
        let done = read(&transfers, &sample.file, &[segment(offset, address, wanted)]).unwrap();
        assert_eq!(done.bytes(), there, "{wanted} bytes at {offset}");
        let got = site.look(address, wanted);
        let at = offset.min(len) as usize;
        assert!(got[..there as usize] == sample.bytes[at..at + there as usize], "{wanted} bytes at {offset}");
        assert!(got[there as usize..].iter().all(|byte| *byte == 0xee), "nothing was written past the end of the file");
        let done = write(&transfers, &file, &[segment(offset, address, there.max(1))]).unwrap();
        assert_eq!(done.bytes(), there.max(1));
        let end = offset as usize + there.max(1) as usize;
        expected.resize(expected.len().max(end), 0);
        expected[offset as usize..end].copy_from_slice(&got[..there.max(1) as usize]);
    }
    assert!(fs::read(path).unwrap() == expected);
    // Nothing, and nothing of a file that is empty.
    assert_eq!(read(&transfers, &sample.file, &[]).unwrap().bytes(), 0);
    assert_eq!(read(&transfers, &site.empty("none").0, &[segment(0, memory.address(), MIB)]).unwrap().bytes(), 0);
}

fn many_small_segments(site: &Site) {
    let transfers = site.transfers();
    let sample = site.sample(3, 16 * MIB);
    let memory = allocated(site.gpu, 16 * MIB as usize);
    for len in [4096, 512, 100] {
        let places = 16 * MIB / 4096;
        // Every place once, in no order.
        let segments: Vec<Segment> = (0..places)
            .map(|at| (at * 2731) % places)
            .map(|place| segment(place * 4096, memory.address() + (places - 1 - place) * 4096, len))
            .collect();
        let done = read(&transfers, &sample.file, &segments).unwrap();
        assert_eq!((done.bytes(), done.moved.edge), (places * len, 0));
        let got = site.look(memory.address(), 16 * MIB);
        for s in &segments {
            let at = (s.address - memory.address()) as usize;
            assert!(got[at..at + len as usize] == sample.bytes[s.file_offset as usize..][..len as usize], "{s:?}");
        }
        let (file, path) = site.empty("out");
        assert_eq!(write(&transfers, &file, &segments).unwrap().bytes(), places * len);
        let written = fs::read(path).unwrap();
        for s in &segments {
            let at = s.file_offset as usize;
            assert!(written[at..at + len as usize] == sample.bytes[at..at + len as usize], "{s:?}");
        }
    }
}

fn a_small_pool(site: &Site) {
    let mut settings = Settings::default();
    settings.staging = Some(1);
    let transfers = Transfers::with(&site.mount(), settings).unwrap();
    let sample = site.sample(4, 20 * MIB);
    let memory = allocated(site.gpu, 20 * MIB as usize);
    let small: Vec<Segment> = (0..1000).map(|at| segment(at * 4096, memory.address() + at * 4096, 4096)).collect();
    let large = segment(4 * MIB, memory.address() + 4 * MIB, 16 * MIB);
    thread::scope(|scope| {
        scope.spawn(|| assert_eq!(read(&transfers, &sample.file, &[large]).unwrap().bytes(), large.len));
        assert_eq!(read(&transfers, &sample.file, &small).unwrap().bytes(), 1000 * 4096);
    });
    assert!(site.look(memory.address() + 4 * MIB, 16 * MIB) == sample.bytes[4 * MIB as usize..]);
    assert!(site.look(memory.address(), 1000 * 4096) == sample.bytes[..1000 * 4096]);
}

fn many_in_flight(site: &Site) {
    let transfers = site.transfers();
    let sample = site.sample(5, 16 * MIB);
    let memory = allocated(site.gpu, 16 * MIB as usize);
    let mut queue = transfers.queue().unwrap();
    let sizes = [4096, 100, 65536, MIB];
    let (mut at, mut lens) = (0, Vec::new());
    while at < 16 * MIB {
        let len = sizes[lens.len() % 4].min(16 * MIB - at);
        // SAFETY: no other code uses the memory until all is done.
        unsafe { queue.read(&sample.file, &[segment(at, memory.address() + at, len)], lens.len() as u64) }.unwrap();
        (at, lens) = (at + len, [lens, vec![len]].concat());
    }
    assert_eq!(queue.in_flight(), lens.len());
    let mut done = Vec::new();
    while queue.in_flight() > 0 {
        assert!(queue.complete(Wait::Timeout(Duration::from_secs(20)), &mut done).unwrap() > 0, "a request is lost");
    }
    assert_eq!(queue.complete(Wait::Forever, &mut done).unwrap(), 0, "there is nothing to wait for");
    for finished in &done {
        assert_eq!(finished.result.as_ref().unwrap().bytes(), lens[finished.user_data as usize]);
    }
    assert_eq!(done.len(), lens.len());
    assert!(site.look(memory.address(), 16 * MIB) == sample.bytes);
    // For an application that waits by itself.
    // SAFETY: as above.
    unsafe { queue.read(&sample.file, &[segment(0, memory.address(), MIB)], 7) }.unwrap();
    if queue.arm() {
        let mut polled = [rustix::event::PollFd::new(&queue, rustix::event::PollFlags::IN)];
        let timeout = rustix::event::Timespec { tv_sec: 20, tv_nsec: 0 };
        assert_eq!(rustix::event::poll(&mut polled, Some(&timeout)).unwrap(), 1, "no signal came");
    }
    assert_eq!(queue.complete(Wait::No, &mut done).unwrap(), 1);
}

fn waiting_for_several(site: &Site) {
    let transfers = site.transfers();
    let sample = site.sample(26, 4 * MIB);
    let memory = allocated(site.gpu, 4 * MIB as usize);
    let mut queue = transfers.queue().unwrap();
    let begin = |queue: &mut Queue, count: u64, len: u64| {
        for at in 0..count {
            // SAFETY: no other code uses the memory until all is done.
            unsafe { queue.read(&sample.file, &[segment(at * len, memory.address() + at * len, len)], at) }.unwrap();
        }
    };
    let mut done = Vec::new();
    begin(&mut queue, 64, 65536);
    assert!(queue.complete_at_least(60, Wait::Forever, &mut done).unwrap() >= 60);
    let rest = queue.in_flight();
    assert_eq!(queue.complete_at_least(60, Wait::Forever, &mut done).unwrap(), rest, "all there were");
    assert_eq!(queue.complete_at_least(1, Wait::Forever, &mut done).unwrap(), 0, "there is nothing to wait for");
    assert!(done.iter().all(|finished| finished.result.as_ref().unwrap().bytes() == 65536));
    assert!(site.look(memory.address(), 4 * MIB) == sample.bytes);

    // What is called off ends, and what follows it is done.
    done.clear();
    begin(&mut queue, 4, MIB);
    queue.cancel();
    begin(&mut queue, 1, MIB);
    queue.complete_at_least(usize::MAX, Wait::Forever, &mut done).unwrap();
    assert_eq!(done.len(), 5);
    let is_cancelled = |error: &Error| matches!(error, Error::Transfer { errno: rustix::io::Errno::CANCELED, .. });
    assert!(done.iter().all(|finished| finished.result.as_ref().map_or_else(is_cancelled, |done| done.bytes() == MIB)));
    let last = done.iter().rev().find(|finished| finished.user_data == 0).unwrap();
    assert!(last.result.is_ok(), "what was begun after the cancellation was called off: {last:?}");

    // What calls off all requests of its maker calls off a queue's as well, later ones too.
    let all = Cancel::default();
    let mut queue = transfers.cancellable(&all).queue().unwrap();
    queue.cancel();
    all.cancel();
    begin(&mut queue, 1, MIB);
    done.clear();
    queue.complete(Wait::Forever, &mut done).unwrap();
    assert!(done[0].result.as_ref().is_err_and(is_cancelled), "{done:?}");
}

/// What a read says to have brought is there, so many bytes from the beginning on: a file of
/// zeros, read into memory that has none.
fn short_and_long(site: &Site) {
    let (file, path) = site.empty("short-and-long");
    let len = MIB;
    let plain = OpenOptions::new().write(true).open(&path).unwrap();
    plain.set_len(len).unwrap();
    drop(file);
    let (file, transfers) = (File::open(&path).unwrap(), site.transfers());
    let memory = allocated(site.gpu, len as usize);
    let stream = own_stream(site.gpu);
    let ones = vec![0xff; len as usize];
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            for number in 0.. {
                if is_over.load(Ordering::Relaxed) {
                    break;
                }
                plain.set_len(random(number, len)).unwrap();
                plain.set_len(len).unwrap();
            }
        });
        let mut short = 0;
        let until = Instant::now() + Duration::from_secs(1);
        while Instant::now() < until {
            site.put(memory.address(), &ones);
            let segments = [segment(0, memory.address(), len)];
            // SAFETY: the memory is this check's, and the stream is never destroyed.
            let in_stream = unsafe { transfers.read_on_stream(&file, &segments, stream).unwrap().wait() };
            let by_call = |_| {
                site.put(memory.address(), &ones);
                read(&transfers, &file, &segments).unwrap()
            };
            for done in [in_stream.unwrap()].into_iter().chain((0..3).map(by_call)) {
                let found = site.look(memory.address(), len);
                let there = found.iter().take_while(|byte| **byte == 0).count() as u64;
                assert!(done.bytes() <= there, "{done:?}, and {there} bytes are there");
                short += u32::from(done.bytes() < len);
            }
        }
        is_over.store(true, Ordering::Relaxed);
        assert!(short > 0, "no read was short");
    });
}

fn callbacks(site: &Site) {
    let transfers = site.transfers();
    let sample = site.sample(6, 8 * MIB);
    let memory = allocated(site.gpu, 8 * MIB as usize);
    let (file, path) = site.empty("out");
    let ((was_read, reads), (was_written, writes)) = (mpsc::channel(), mpsc::channel());
    // One that panics is the only one that does.
    // SAFETY: no other code uses the memory until all is done.
    unsafe { transfers.read_then(&sample.file, &[segment(0, memory.address(), MIB)], |_| panic!("as it should")) }.unwrap();
    for at in 0..8 {
        let was_read = was_read.clone();
        let part = segment(at * MIB, memory.address() + at * MIB, MIB);
        // SAFETY: no other code uses the memory until all is done.
        unsafe { transfers.read_then(&sample.file, &[part], move |done| was_read.send((at, done)).unwrap()) }.unwrap();
    }
    for _ in 0..8 {
        let (at, done) = reads.recv_timeout(Duration::from_secs(20)).unwrap();
        assert_eq!(done.unwrap().bytes(), MIB);
        let was_written = was_written.clone();
        let part = segment(at * MIB, memory.address() + at * MIB, MIB);
        // SAFETY: as above.
        unsafe { transfers.write_then(&file, &[part], move |done| was_written.send(done).unwrap()) }.unwrap();
    }
    // It ends when everything is done.
    drop(transfers);
    assert_eq!(writes.try_iter().map(|done| done.unwrap().bytes()).sum::<u64>(), 8 * MIB);
    assert!(fs::read(path).unwrap() == sample.bytes);
    // The last copy may be a callback's; other requests are done all the same.
    let last = site.transfers();
    assert_eq!(read(&last, &sample.file, &[segment(0, memory.address(), MIB)]).unwrap().bytes(), MIB);
    let ((go, wait), (was_read, reads)) = (mpsc::channel(), mpsc::channel());
    let (copy, first, second) = (last.clone(), was_read.clone(), was_read);
    let dropping = move |done| {
        wait.recv().unwrap();
        drop(copy);
        first.send(done).unwrap();
    };
    // SAFETY: as above.
    unsafe { last.read_then(&sample.file, &[segment(0, memory.address(), MIB)], dropping) }.unwrap();
    let part = segment(MIB, memory.address() + MIB, 7 * MIB);
    // SAFETY: as above.
    unsafe { last.read_then(&sample.file, &[part], move |done| second.send(done).unwrap()) }.unwrap();
    drop(last);
    go.send(()).unwrap();
    let bytes: u64 = (0..2).map(|_| reads.recv_timeout(Duration::from_secs(20)).unwrap().unwrap().bytes()).sum();
    assert_eq!(bytes, 8 * MIB);
}

fn many_threads(site: &Site) {
    let transfers = site.transfers();
    let sample = site.sample(7, 4 * MIB);
    thread::scope(|scope| {
        for number in 0..6 {
            let (transfers, sample) = (&transfers, &sample);
            scope.spawn(move || {
                let memory = allocated(site.gpu, MIB as usize);
                for round in 0..50 {
                    let len = 1 + random(number * 1000 + round, if round % 5 == 0 { MIB } else { 8192 });
                    let offset = random(number * 2000 + round, 4 * MIB - len);
                    assert_eq!(read(transfers, &sample.file, &[segment(offset, memory.address(), len)]).unwrap().bytes(), len);
                    let got = site.look(memory.address(), len);
                    assert!(got == sample.bytes[offset as usize..][..len as usize], "{len} bytes at {offset}");
                }
            });
        }
    });
}

fn read_once(site: &Site) {
    let sample = site.sample(26, MIB);
    // Memory that the device reaches has no need of it.
    let by_bounce = Require { route: Some(Route::Bounce), ..Require::default() };
    let (transfers, mount) = (site.transfers().requiring(by_bounce), site.mount());
    let calls = |command| mount.stats().unwrap().calls.iter().find(|(name, _)| *name == command).unwrap().1;
    let memory = allocated(site.gpu, MIB as usize);
    for (offset, len, arrives) in [(0, 4096, 4096), (5, 200_000, 200_000), (MIB - 100, 5000, 100), (2 * MIB, 10, 0), (7, 1, 1)] {
        let before = ["info", "attach", "read"].map(calls);
        let file = File::open(&sample.path).unwrap();
        let part = [segment(offset, memory.address() + 3, len)];
        let done = read(&transfers, &file, &part).unwrap();
        assert_eq!(done.bytes(), arrives, "{len} bytes at {offset}");
        let from = sample.bytes.len().min(offset as usize);
        let there = arrives == 0 || site.look(memory.address() + 3, arrives) == sample.bytes[from..][..arrives as usize];
        assert!(there, "{len} bytes at {offset}");
        let calls_of = |more: [u64; 3]| std::array::from_fn(|at| before[at] + more[at]);
        assert_eq!(["info", "attach", "read"].map(calls), calls_of([0, 0, 1]), "one call");
        // Who reads again may do so often.
        for _ in 0..3 {
            assert_eq!(read(&transfers, &file, &part).unwrap().bytes(), arrives);
        }
        assert_eq!(["info", "attach", "read"].map(calls)[..2], calls_of([0, 1, 0])[..2], "a ring");
    }
}

fn callers(site: &Site) {
    let sample = site.sample(24, 20 * MIB);
    let mount = site.mount();
    let rings = || mount.stats().unwrap().calls.iter().find(|(name, _)| *name == "ring").unwrap().1;
    for most in [0, 1, 3] {
        let mut settings = Settings::default();
        settings.callers = most;
        let before = rings();
        let transfers = Transfers::with(&mount, settings).unwrap();
        assert_eq!(rings() - before, 1, "the library's thread has a ring");
        let memory = allocated(site.gpu, 17 * MIB as usize);
        let read_at = |address: u64, offset: u64, len: u64| {
            assert_eq!(read(&transfers, &sample.file, &[segment(offset, address, len)]).unwrap().bytes(), len);
            assert!(site.look(address, len) == sample.bytes[offset as usize..][..len as usize], "{len} bytes at {offset}");
        };
        read_at(memory.address(), MIB, 17 * MIB);
        assert_eq!(rings() - before, 1, "a long request is the library's");
        read_at(memory.address(), 5, 16 * MIB);
        assert_eq!(rings() - before, 1 + most.min(1) as u64, "a caller who is alone does what is not short, too");
        read_at(memory.address(), 5, MIB);
        read_at(memory.address(), 4096, 4096);
        assert_eq!(rings() - before, 1 + most.min(1) as u64, "one caller needs one ring");
        thread::scope(|scope| {
            for number in 0..8 {
                let read_at = &read_at;
                scope.spawn(move || {
                    let memory = allocated(site.gpu, 3 * MIB as usize);
                    for round in 0..40 {
                        let len = 1 + random(number * 3000 + round, if round % 8 == 0 { 3 * MIB } else { 20_000 });
                        read_at(memory.address(), random(number * 5000 + round, 4 * MIB - len), len);
                    }
                });
            }
        });
        assert!(rings() - before <= 1 + most as u64, "{most} callers with rings of their own");
    }
}

fn rings_that_are_over(site: &Site) {
    let sample = site.sample(22, MIB);
    let memory = allocated(site.gpu, MIB as usize);
    let mount = site.mount();
    let detached = || mount.stats().unwrap().calls.iter().find(|(name, _)| *name == "detach").unwrap().1;
    let before = detached();
    for _ in 0..4 {
        assert_eq!(read(&site.transfers(), &sample.file, &[segment(0, memory.address(), MIB)]).unwrap().bytes(), MIB);
    }
    drop(sample);
    assert_eq!(detached() - before, 2 * 4, "a ring takes what it knows with it: the caller's and the library's");
}

fn unknown_memory(site: &Site) {
    let transfers = site.transfers();
    let sample = site.sample(11, MIB);
    let memory = allocated(site.gpu, MIB as usize);
    let mut bytes = vec![0u8; 4096];
    let host = bytes.as_mut_ptr() as u64;
    let beyond = memory.address() + MIB - 4096;
    for (segments, at) in [
        (vec![segment(0, host, 4096)], 0),
        (vec![segment(0, memory.address(), 4096), segment(0, 0, 4096)], 1),
        (vec![segment(0, memory.address(), 4096), segment(0, u64::MAX - 100, 4096)], 1),
        (vec![segment(0, beyond, 1 << 40)], 0),
    ] {
        let error = read(&transfers, &sample.file, &segments).unwrap_err();
        assert!(matches!(error, Error::UnknownMemory { segment, .. } if segment == at), "{error}");
        assert!(error.to_string().contains(&sample.path.display().to_string()), "{error}");
    }
    let error = read(&transfers, &sample.file, &[segment(u64::MAX - 10, memory.address(), 100)]).unwrap_err();
    assert_eq!(error.errno().raw_os_error(), libc::EINVAL, "{error}");
    // A file that is not open for it.
    let error = write(&transfers, &sample.file, &[segment(0, memory.address(), MIB)]).unwrap_err();
    assert_eq!(error.errno().raw_os_error(), libc::EBADF, "{error}");
}

fn requirements(site: &Site) {
    let transfers = site.transfers();
    let sample = site.sample(12, MIB);
    let memory = allocated(site.gpu, MIB as usize);
    let whole = [segment(0, memory.address(), MIB)];
    let requiring = |route, direct| transfers.requiring(Require { route, direct });
    let done = read(&requiring(Some(Route::Bounce), true), &sample.file, &whole).unwrap();
    assert_eq!(done.moved.bounce, MIB);
    let error = read(&requiring(Some(Route::Host), false), &sample.file, &whole).unwrap_err();
    assert_eq!(error.errno().raw_os_error(), libc::EOPNOTSUPP, "{error}");
    let (route, reason) = transfers.route(memory.address()).unwrap();
    match (route, read(&requiring(Some(Route::P2p), false), &sample.file, &whole)) {
        (Route::P2p, done) => assert_eq!(done.unwrap().moved.p2p, MIB),
        (_, Err(error)) => assert!(error.to_string().contains(reason.explain()), "{error}"),
        (_, Ok(done)) => panic!("what is not there was used: {done:?}"),
    }
}

fn several_gpus(site: &Site) {
    let transfers = site.transfers();
    let gpus: Vec<Gpu> = Cuda::load().unwrap().gpus().collect();
    let sample = site.sample(13, gpus.len() as u64 * MIB);
    let memory: Vec<Memory> = gpus.iter().map(|gpu| allocated(*gpu, MIB as usize)).collect();
    // A long request, and a short one.
    for each in [MIB, MIB / gpus.len() as u64] {
        let part = |at: u64, memory: &Memory| segment(at * each, memory.address(), each);
        let segments: Vec<Segment> = (0..).zip(&memory).map(|(at, memory)| part(at, memory)).collect();
        assert_eq!(read(&transfers, &sample.file, &segments).unwrap().bytes(), gpus.len() as u64 * each);
        for ((gpu, memory), expected) in gpus.iter().zip(&memory).zip(sample.bytes.chunks(each as usize)) {
            assert!(look(*gpu, memory.address(), each) == expected, "on GPU {gpu}");
        }
    }
}
