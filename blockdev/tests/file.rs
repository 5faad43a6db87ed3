//! The io_uring backend on real files, on the disk that the tests run on and in memory (tmpfs).
use std::collections::HashSet;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use gpunvme_blockdev::{BlockDevice, Completion, Error, Io, Op, OpenMode, Queue, Region, Request, Span, Wait, open};
use proptest::prelude::*;

const MIB: usize = 1 << 20;

/// An image file that is deleted with its directory.
struct TestImage {
    _directory: tempfile::TempDir,
    path: PathBuf,
}

impl TestImage {
    fn new(on: &Path, len: u64) -> Self {
        let directory = tempfile::tempdir_in(on).expect("a temporary directory");
        let path = directory.path().join("image");
        File::create(&path).expect("an image").set_len(len).expect("its length");
        Self { _directory: directory, path }
    }

    fn name(&self) -> &str {
        self.path.to_str().expect("an UTF-8 path")
    }

    fn open(&self, mode: OpenMode) -> Arc<dyn BlockDevice> {
        open(self.name(), mode).expect("the image opens")
    }
}

/// The build directory is on a disk's filesystem, /dev/shm is a tmpfs.
fn places() -> [PathBuf; 2] {
    [env!("CARGO_TARGET_TMPDIR").into(), "/dev/shm".into()]
}

fn on_each_place(len: u64, test: impl Fn(&TestImage)) {
    for place in places() {
        test(&TestImage::new(&place, len));
    }
}

/// Bytes that tell each position and each seed apart.
fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut bytes = Vec::with_capacity(len + 8);
    while bytes.len() < len {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend_from_slice(&state.to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}

fn region_with(data: &[u8]) -> Arc<Region> {
    let region = Region::allocate(data.len()).expect("memory");
    region.write_at(0, data).expect("inside");
    region
}

fn bytes_of(region: &Region) -> Vec<u8> {
    let mut bytes = vec![0; region.len()];
    region.read_at(0, &mut bytes).expect("inside");
    bytes
}

fn whole(region: &Arc<Region>) -> Vec<Span> {
    vec![region.span(0..region.len())]
}

/// Collects this many completions.
fn collect(queue: &dyn Queue, count: usize) -> Vec<Completion> {
    let mut completions = Vec::new();
    while completions.len() < count {
        queue.complete(Wait::Timeout(Duration::from_secs(20)), &mut completions).expect("the queue works");
    }
    completions
}

#[test]
fn geometry_tells_what_the_file_can_do() {
    on_each_place(MIB as u64 + 700, |image| {
        let device = image.open(OpenMode::ReadWrite);
        let geometry = device.geometry();
        assert_eq!(device.name(), image.name());
        assert_eq!(geometry.len.get(), MIB as u64 + 700 - 700 % u64::from(geometry.logical_block));
        assert!(geometry.logical_block >= 512 && geometry.memory_alignment >= geometry.logical_block);
        assert!(geometry.volatile_cache && geometry.discard && geometry.write_zeroes && !geometry.read_only);
    });
}

#[test]
fn data_survives_reopening_and_is_what_others_read() {
    on_each_place(4 * MIB as u64, |image| {
        let data = pattern(1, 64 << 10);
        let io = Io::inline(image.open(OpenMode::ReadWrite)).expect("io");
        io.run(vec![Request::write(MIB as u64, whole(&region_with(&data)), true)]).expect("written");
        drop(io);
        let mut seen = vec![0; data.len()];
        File::open(&image.path).expect("open").read_exact_at(&mut seen, MIB as u64).expect("read");
        assert!(seen == data);
        let io = Io::inline(image.open(OpenMode::ReadOnly)).expect("io");
        let region = Region::allocate(data.len()).expect("memory");
        io.run(vec![Request::read(MIB as u64, whole(&region))]).expect("read");
        assert!(bytes_of(&region) == data);
    });
}

#[test]
fn one_request_may_have_more_pieces_and_bytes_than_a_command() {
    on_each_place(64 * MIB as u64, |image| {
        let device = image.open(OpenMode::ReadWrite);
        let io = Io::threaded(device.clone(), 1).expect("io");
        // Every other 4 KiB of a region: nothing to merge, 5000 pieces for commands of at most
        // 1024.
        let data = pattern(2, 10_000 * 4096);
        let scattered = region_with(&data);
        let spans: Vec<Span> = (0..5000).map(|n| scattered.span(n * 8192..n * 8192 + 4096)).collect();
        io.run(vec![Request::write(8192, spans, false)]).expect("written");
        // One piece, larger than any command, and of many adjacent spans.
        let len = device.geometry().max_transfer as usize * 2 + 4096;
        let joined = Region::allocate(len).expect("memory");
        let spans: Vec<Span> = (0..len / 4096).map(|n| joined.span(n * 4096..(n + 1) * 4096)).collect();
        io.run(vec![Request::read(8192, spans)]).expect("read");
        let expected: Vec<u8> = data.chunks(8192).flat_map(|pair| pair[..4096].to_vec()).take(len).collect();
        assert!(bytes_of(&joined) == expected);
    });
}

#[test]
fn thousands_of_requests_wait_for_room_and_all_complete_once() {
    on_each_place(8 * MIB as u64, |image| {
        const COUNT: usize = 5000;
        let device = image.open(OpenMode::ReadWrite);
        assert!((device.geometry().queue_depth as usize) < COUNT);
        let queue = device.open_queue().expect("a queue");
        let data = pattern(3, COUNT * 512);
        let source = region_with(&data);
        let mut requests: Vec<Request> = (0..COUNT)
            .map(|n| Request {
                tag: 7000 + n as u64,
                ..Request::write(n as u64 * 512, vec![source.span(n * 512..(n + 1) * 512)], false)
            })
            .collect();
        queue.submit(&mut requests);
        assert!(requests.is_empty());
        let completions = collect(&*queue, COUNT);
        assert!(completions.iter().all(|completion| completion.result.is_ok()));
        let tags: HashSet<u64> = completions.iter().map(|completion| completion.tag).collect();
        assert_eq!((completions.len(), tags.len()), (COUNT, COUNT));
        assert_eq!(Arc::strong_count(&source), 1, "spans are dropped with their completion");
        let copy = Region::allocate(data.len()).expect("memory");
        queue.submit(&mut vec![Request::read(0, whole(&copy))]);
        collect(&*queue, 1).remove(0).result.expect("read");
        assert!(bytes_of(&copy) == data);
    });
}

#[test]
fn a_dropped_queue_waits_for_what_the_kernel_does_to_memory() {
    on_each_place(64 * MIB as u64, |image| {
        std::fs::write(&image.path, vec![5; 64 * MIB]).expect("contents");
        let device = image.open(OpenMode::ReadWrite);
        let queue = device.open_queue().expect("a queue");
        let region = Region::allocate(64 * MIB).expect("memory");
        let piece = |n: usize| region.span(n * MIB..(n + 1) * MIB);
        queue.submit(&mut (0..64).map(|n| Request::read((n * MIB) as u64, vec![piece(n)])).collect());
        drop(queue);
        // Nothing is in flight any more: all of it is there.
        assert!(bytes_of(&region).iter().all(|byte| *byte == 5));
        assert_eq!(Arc::strong_count(&region), 1);
    });
}

#[test]
fn submitters_on_many_threads_share_a_queue() {
    on_each_place(16 * MIB as u64, |image| {
        let io = Io::threaded(image.open(OpenMode::ReadWrite), 2).expect("io");
        std::thread::scope(|scope| {
            for thread in 0..4u64 {
                let io = &io;
                scope.spawn(move || {
                    for round in 0..100u64 {
                        let data = pattern(thread * 1000 + round, 16 << 10);
                        let offset = thread * 4 * MIB as u64 + round * (16 << 10);
                        io.run(vec![Request::write(offset, whole(&region_with(&data)), false)]).expect("written");
                        let copy = Region::allocate(data.len()).expect("memory");
                        io.run(vec![Request::flush(), Request::read(offset, whole(&copy))]).expect("read");
                        assert!(bytes_of(&copy) == data);
                    }
                });
            }
        });
        assert_eq!(io.in_flight(), 0);
    });
}

#[test]
fn requests_outlive_the_thread_that_submitted_them() {
    // Flushes and hole punches start late, in a worker that the kernel keeps for the thread that
    // submitted them.
    on_each_place(16 * MIB as u64, |image| {
        let device = image.open(OpenMode::ReadWrite);
        let queue: Arc<dyn Queue> = device.open_queue().expect("a queue").into();
        for _ in 0..50 {
            let submitter = queue.clone();
            std::thread::spawn(move || {
                let mut requests: Vec<Request> = (0..16).map(|n| Request::write_zeroes(n << 20, 1 << 20)).collect();
                requests.extend((0..16).map(|_| Request::flush()));
                submitter.submit(&mut requests);
            })
            .join()
            .expect("the submitter does not panic");
            for completion in collect(&*queue, 32) {
                completion.result.expect("no command is lost");
            }
        }
    });
}

#[test]
fn waits_end_by_timeout_and_by_wake() {
    let image = TestImage::new(&places()[1], 4096);
    let device = image.open(OpenMode::ReadWrite);
    let queue = device.open_queue().expect("a queue");
    let mut out = Vec::new();
    assert_eq!(queue.complete(Wait::No, &mut out), Ok(0));
    assert_eq!(queue.complete(Wait::Timeout(Duration::from_millis(5)), &mut out), Ok(0));
    queue.wake();
    queue.wake();
    assert_eq!(queue.complete(Wait::Forever, &mut out), Ok(0), "a wake is remembered");
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| queue.complete(Wait::Forever, &mut Vec::new()));
        std::thread::sleep(Duration::from_millis(20));
        queue.wake();
        assert_eq!(waiter.join().expect("no panic"), Ok(0));
    });
}

#[test]
fn what_the_geometry_forbids_is_refused_with_a_reason() {
    on_each_place(MIB as u64, |image| {
        let io = Io::inline(image.open(OpenMode::ReadWrite)).expect("io");
        let region = Region::allocate(8192).expect("memory");
        let run = |request| io.run(vec![request]);
        assert!(matches!(run(Request::read(100, vec![region.span(0..4096)])), Err(Error::Alignment { required: 512, .. })));
        assert!(matches!(run(Request::read(0, vec![region.span(0..100)])), Err(Error::Alignment { .. })));
        assert!(matches!(
            run(Request::read(0, vec![region.span(8..520)])),
            Err(Error::Alignment { what: "the memory's addresses and lengths", .. })
        ));
        assert!(matches!(run(Request::read(MIB as u64 - 512, vec![region.span(0..1024)])), Err(Error::OutOfRange { .. })));
        assert!(matches!(run(Request::discard(u64::MAX - 511, 512)), Err(Error::OutOfRange { .. })));
        assert!(matches!(run(Request::read(0, vec![region.span(4096..12288)])), Err(Error::RegionRange { .. })));
        let short = Request { len: 8192, ..Request::read(0, vec![region.span(0..4096)]) };
        assert!(matches!(run(short), Err(Error::SpanLength { spanned: 4096, .. })));
        assert_eq!(run(Request::read(MIB as u64, vec![])), Ok(()), "nothing of nothing");
    });
}

#[test]
fn a_file_cut_short_while_open_is_an_error_and_not_zeroes() {
    on_each_place(MIB as u64, |image| {
        let io = Io::inline(image.open(OpenMode::ReadWrite)).expect("io");
        File::options().write(true).open(&image.path).expect("open").set_len(4096).expect("cut");
        let region = Region::allocate(8192).expect("memory");
        let result = io.run(vec![Request::read(0, whole(&region))]);
        assert!(matches!(result, Err(Error::Io { op: Op::Read, errno: libc::EIO, .. })), "{result:?}");
    });
}

#[test]
fn read_only_devices_refuse_changes() {
    let image = TestImage::new(&places()[0], MIB as u64);
    let io = Io::inline(image.open(OpenMode::ReadOnly)).expect("io");
    let region = Region::allocate(4096).expect("memory");
    let result = io.run(vec![Request::write(0, whole(&region), false)]);
    assert!(matches!(result, Err(Error::ReadOnly { .. })));
    assert!(matches!(io.run(vec![Request::discard(0, 4096)]), Err(Error::ReadOnly { .. })));
    assert_eq!(io.run(vec![Request::flush(), Request::read(0, whole(&region))]), Ok(()));
}

#[test]
fn a_writer_keeps_everybody_else_out_and_readers_share() {
    on_each_place(MIB as u64, |image| {
        let busy = |mode| matches!(open(image.name(), mode), Err(Error::Busy { .. }));
        let writer = image.open(OpenMode::ReadWrite);
        assert!(busy(OpenMode::ReadWrite) && busy(OpenMode::ReadOnly));
        let queue = writer.open_queue().expect("a queue");
        drop(writer);
        assert!(busy(OpenMode::ReadWrite), "the queue still holds the device");
        drop(queue);
        let reader = image.open(OpenMode::ReadOnly);
        let other = image.open(OpenMode::ReadOnly);
        assert!(busy(OpenMode::ReadWrite));
        drop((reader, other));
        image.open(OpenMode::ReadWrite);
    });
}

#[test]
fn another_process_is_kept_out_while_the_device_is_open() {
    const IMAGE: &str = "GPUNVME_TEST_LOCKED_IMAGE";
    if let Ok(name) = std::env::var(IMAGE) {
        // This is the other process.
        let busy = matches!(open(&name, OpenMode::ReadWrite), Err(Error::Busy { .. }));
        std::process::exit(if busy { 42 } else { 43 });
    }
    on_each_place(MIB as u64, |image| {
        let other_process = || {
            std::process::Command::new(std::env::current_exe().expect("this program"))
                .args(["--exact", "another_process_is_kept_out_while_the_device_is_open"])
                .env(IMAGE, image.name())
                .status()
                .expect("it runs")
                .code()
        };
        let device = image.open(OpenMode::ReadWrite);
        assert_eq!(other_process(), Some(42));
        drop(device);
        assert_eq!(other_process(), Some(43));
    });
}

#[test]
fn names_that_cannot_be_opened_say_why() {
    let error = |device: &str| open(device, OpenMode::ReadWrite).err().expect("it is refused");
    assert!(matches!(error("/nonexistent/disk"), Error::NotFound { .. }));
    assert!(matches!(error("/dev/null"), Error::NotABlockDevice { .. }));
    assert!(matches!(error("/"), Error::NotABlockDevice { .. }));
    assert!(matches!(error("/proc/version"), Error::Permission { .. } | Error::Unsupported { .. }));
    assert!(matches!(error("vfio:ffff:ff:1f.7"), Error::NotFound { .. }));
    for name in ["vfio:/dev/null", "vfio:0000:01:00.0,colour=red", "sim:/tmp/x,colour=red"] {
        let error = error(name);
        assert!(matches!(&error, Error::Unsupported { .. }) && error.to_string().starts_with(name), "{error}");
    }
}

#[derive(Debug, Clone)]
enum Step {
    Write { block: usize, blocks: usize, seed: u64, fua: bool },
    Read { block: usize, blocks: usize },
    Zeroes { block: usize, blocks: usize },
    Discard { block: usize, blocks: usize },
    Flush,
}

const MODEL_BLOCKS: usize = 256;

fn step() -> impl Strategy<Value = Step> {
    let range = (0..MODEL_BLOCKS, 1..40usize).prop_map(|(block, blocks)| (block, blocks.min(MODEL_BLOCKS - block)));
    prop_oneof![
        4 => (range.clone(), any::<u64>(), any::<bool>())
            .prop_map(|((block, blocks), seed, fua)| Step::Write { block, blocks, seed, fua }),
        4 => range.clone().prop_map(|(block, blocks)| Step::Read { block, blocks }),
        1 => range.clone().prop_map(|(block, blocks)| Step::Zeroes { block, blocks }),
        1 => range.prop_map(|(block, blocks)| Step::Discard { block, blocks }),
        1 => Just(Step::Flush),
    ]
}

/// Cuts a region's first `len` bytes into spans of pseudo-random sizes, listed in order.
fn spans(region: &Arc<Region>, len: usize, seed: u64) -> Vec<Span> {
    let mut spans = Vec::new();
    let mut at = 0;
    for size in pattern(seed, len / 512) {
        if at < len {
            let piece = (usize::from(size % 7) + 1) * 512;
            let end = len.min(at + piece);
            spans.push(region.span(at..end));
            at = end;
        }
    }
    spans
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn a_device_is_an_array_of_bytes(steps in proptest::collection::vec(step(), 1..60)) {
        for place in places() {
            let image = TestImage::new(&place, (MODEL_BLOCKS * 512) as u64);
            let io = Io::inline(image.open(OpenMode::ReadWrite)).expect("io");
            let mut model = vec![0u8; MODEL_BLOCKS * 512];
            for step in &steps {
                match *step {
                    Step::Write { block, blocks, seed, fua } => {
                        let data = pattern(seed, blocks * 512);
                        let region = region_with(&data);
                        let request = Request::write(block as u64 * 512, spans(&region, data.len(), seed), fua);
                        io.run(vec![request]).expect("written");
                        model[block * 512..][..data.len()].copy_from_slice(&data);
                    }
                    Step::Read { block, blocks } => {
                        let region = Region::allocate(blocks * 512).expect("memory");
                        let request = Request::read(block as u64 * 512, spans(&region, region.len(), block as u64));
                        io.run(vec![request]).expect("read");
                        prop_assert!(bytes_of(&region) == model[block * 512..][..blocks * 512]);
                    }
                    // A file's discarded range reads as zeroes.
                    Step::Zeroes { block, blocks } | Step::Discard { block, blocks } => {
                        let (offset, len) = (block as u64 * 512, blocks as u64 * 512);
                        let discards = matches!(step, Step::Discard { .. });
                        let request = if discards { Request::discard(offset, len) } else { Request::write_zeroes(offset, len) };
                        io.run(vec![request]).expect("zeroed");
                        model[block * 512..][..blocks * 512].fill(0);
                    }
                    Step::Flush => io.run(vec![Request::flush()]).expect("flushed"),
                }
            }
            drop(io);
            prop_assert!(std::fs::read(&image.path).expect("the image") == model);
        }
    }
}
