//! A stripe against one device of the same size: whatever is asked of both, both answer alike. And
//! what only a stripe has: flushes that go where they are needed, errors that name a member,
//! memory that is mapped for all, one wait for all queues.
use std::fs::File;
use std::sync::Arc;
use std::time::{Duration, Instant};

use gpunvme_blockdev::sim::SimController;
use gpunvme_blockdev::{
    BlockDevice, Error, Io, Op, OpenMode, Region, Request, Span, StripeDevice, StripeMap, StripeSet, Wait, open,
};
use gpunvme_blockdev_testing::{Event, Faulty, Image, MemoryDevice, On, Recorder, Rule};
use proptest::prelude::*;

const UNIT: u64 = 64 << 10;
const DATA: u64 = 8 << 10;
/// Units of data on each member.
const ROWS: u64 = 8;
const MEMBER: u64 = DATA + ROWS * UNIT;

fn stripe(members: Vec<Arc<dyn BlockDevice>>) -> Arc<StripeDevice> {
    let len = ROWS * UNIT * members.len() as u64;
    StripeDevice::new(members.clone(), map(&[members.len()]), len).expect("a stripe")
}

/// Sets of so many members.
fn map(sets: &[usize]) -> StripeMap {
    let set = |&members: &usize| StripeSet { members, unit: UNIT, data: DATA, data_len: ROWS * UNIT };
    StripeMap::new(&sets.iter().map(set).collect::<Vec<_>>())
}

fn memory() -> Arc<dyn BlockDevice> {
    MemoryDevice::new(MEMBER)
}

fn file() -> Arc<dyn BlockDevice> {
    let directory = tempfile::tempdir_in("/dev/shm").expect("a temporary directory");
    let path = directory.path().join("image");
    File::create(&path).expect("an image").set_len(MEMBER).expect("its length");
    open(path.to_str().expect("an UTF-8 path"), OpenMode::ReadWrite).expect("the image opens")
}

/// A controller, with the driver's options.
fn controller(options: &str) -> Arc<dyn BlockDevice> {
    let controller = SimController::new("sim:test,memory=2M,vwc=on", OpenMode::ReadWrite);
    controller.expect("a controller").attach(options).expect("the driver runs")
}

/// A step of a sequence of requests, in sectors of 4 KiB.
#[derive(Debug, Clone)]
enum Step {
    Read { at: u64, lens: Vec<usize> },
    Write { at: u64, lens: Vec<usize>, fua: bool, byte: u8 },
    Discard { at: u64, len: u64 },
    Zero { at: u64, len: u64 },
    Flush,
}

const SECTOR: u64 = 4096;
const SECTORS: u64 = 2 * ROWS * UNIT / SECTOR;

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let at = 0..SECTORS;
    let lens = || proptest::collection::vec(1usize..24, 1..5);
    let step = prop_oneof![
        3 => (at.clone(), lens()).prop_map(|(at, lens)| Step::Read { at, lens }),
        4 => (at.clone(), lens(), any::<bool>(), any::<u8>()).prop_map(|(at, lens, fua, byte)| Step::Write { at, lens, fua, byte }),
        1 => (at.clone(), 1..100u64).prop_map(|(at, len)| Step::Discard { at, len }),
        1 => (at, 1..100u64).prop_map(|(at, len)| Step::Zero { at, len }),
        1 => Just(Step::Flush),
    ];
    proptest::collection::vec(step, 1..40)
}

/// Spans of a region, with gaps between them, as long as `lens` in sectors.
fn spans(region: &Arc<Region>, lens: &[usize]) -> Vec<Span> {
    let mut at = 0;
    let span = |len: &usize| {
        let span = region.span(at..at + len * SECTOR as usize);
        at += (len + 1) * SECTOR as usize;
        span
    };
    lens.iter().map(span).collect()
}

/// Runs the step, and gives what it read, or the errno.
fn run(io: &Io, step: &Step) -> Result<Vec<u8>, i32> {
    let region = Region::allocate(128 * SECTOR as usize).expect("memory");
    let request = match step {
        Step::Read { at, lens } => Request::read(at * SECTOR, spans(&region, lens)),
        Step::Write { at, lens, fua, byte } => {
            let bytes: Vec<u8> = (0..region.len()).map(|n| byte.wrapping_add((n / 1000) as u8)).collect();
            region.write_at(0, &bytes).expect("inside");
            Request::write(at * SECTOR, spans(&region, lens), *fua)
        }
        Step::Discard { at, len } => Request::discard(at * SECTOR, len * SECTOR),
        Step::Zero { at, len } => Request::write_zeroes(at * SECTOR, len * SECTOR),
        Step::Flush => Request::flush(),
    };
    io.run(vec![request]).map_err(|error| error.errno())?;
    let mut bytes = vec![0; region.len()];
    region.read_at(0, &mut bytes).expect("inside");
    Ok(bytes)
}

fn contents(io: &Io) -> Vec<u8> {
    let len = io.device().geometry().len.get() as usize;
    let region = Region::allocate(len).expect("memory");
    io.run(vec![Request::read(0, [region.span(0..len)])]).expect("read");
    let mut bytes = vec![0; len];
    region.read_at(0, &mut bytes).expect("inside");
    bytes
}

/// Compares a stripe of two with a flat device.
fn compare(members: Vec<Arc<dyn BlockDevice>>, steps: &[Step]) {
    let stripe = Io::threaded(stripe(members), 1).expect("queues");
    let flat = Io::inline(MemoryDevice::new(SECTORS * SECTOR)).expect("a queue");
    assert_eq!(stripe.device().geometry().len.get(), flat.device().geometry().len.get());
    for step in steps {
        assert_eq!(run(&stripe, step), run(&flat, step), "{step:?}");
    }
    assert!(contents(&stripe) == contents(&flat), "after {steps:?}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn a_stripe_is_equal_to_one_device_whatever_is_asked(steps in steps()) {
        compare(vec![memory(), memory()], &steps);
    }

    #[test]
    fn also_over_the_kernel_the_driver_and_both(steps in steps()) {
        compare(vec![file(), file()], &steps);
        compare(vec![controller(""), controller("sgl=off")], &steps);
        compare(vec![file(), controller("completion=interrupt")], &steps);
    }
}

#[test]
fn many_requests_of_several_threads_end_once_each_on_every_kind_of_member() {
    let kinds: [fn() -> Arc<dyn BlockDevice>; 3] = [memory, file, || controller("completion=poll")];
    for members in [1, 2, 3].map(|n| (0..4).map(|i| kinds[(n * i) % 3]()).collect::<Vec<_>>()) {
        let io = Io::threaded(stripe(members), 2).expect("queues");
        std::thread::scope(|scope| {
            for thread in 0..4u64 {
                let io = io.clone();
                scope.spawn(move || {
                    let region = Region::allocate(4 * UNIT as usize).expect("memory");
                    for round in 0..100 {
                        // Each thread has eight units of its own, which lie on all members.
                        let at = (8 * thread + round % 4) * UNIT;
                        let bytes = vec![(thread * 50 + round) as u8; region.len()];
                        region.write_at(0, &bytes).expect("inside");
                        let span = || [region.span(0..region.len())];
                        io.run(vec![Request::write(at, span(), false)]).expect("written");
                        region.zero_at(0, region.len()).expect("inside");
                        io.run(vec![Request::read(at, span())]).expect("read");
                        let mut read = vec![0; region.len()];
                        region.read_at(0, &mut read).expect("inside");
                        assert!(read == bytes, "thread {thread}, round {round}");
                    }
                });
            }
        });
    }
}

fn write(at: u64, len: u64, fua: bool) -> Request {
    let region = Region::allocate(len as usize).expect("memory");
    Request::write(at, [region.span(0..len as usize)], fua)
}

#[test]
fn a_flush_goes_to_the_members_that_were_written_since_their_last() {
    let recorders: Vec<_> = (0..3).map(|_| Recorder::new(Image::new(MEMBER))).collect();
    let members = recorders.iter().map(|recorder| recorder.clone() as Arc<dyn BlockDevice>).collect();
    let io = Io::inline(stripe(members)).expect("a queue");
    let flushes = || -> Vec<usize> {
        let count = |recorder: &Arc<Recorder>| recorder.log().events().iter().filter(|e| matches!(e, Event::Flush(_))).count();
        recorders.iter().map(count).collect()
    };
    let after = |request: Option<Request>| {
        io.run(request).expect("done");
        io.run(vec![Request::flush()]).expect("flushed");
        flushes()
    };
    assert_eq!(after(None), [1, 1, 1], "what was written before it was opened may not be durable");
    assert_eq!(after(None), [1, 1, 1]);
    assert_eq!(after(Some(write(UNIT, 4096, false))), [1, 2, 1]);
    assert_eq!(after(Some(write(2 * UNIT - 4096, 8192, false))), [1, 3, 2]);
    assert_eq!(after(Some(write(0, 3 * UNIT, true))), [1, 3, 2], "a durable write needs no flush");
    assert_eq!(after(Some(Request::discard(0, 4096))), [2, 3, 2]);
}

#[test]
fn a_flush_that_failed_is_made_again() {
    let faulty = Faulty::new(memory());
    let io = Io::inline(stripe(vec![memory(), faulty.clone()])).expect("a queue");
    io.run(vec![write(UNIT, 4096, false)]).expect("written");
    faulty.add(Rule::fail(On::Flush, libc::EIO).once());
    faulty.add(Rule::fail(On::Flush, libc::EIO).once());
    for _ in 0..2 {
        assert_eq!(io.run(vec![Request::flush()]).map_err(|error| error.errno()), Err(libc::EIO));
    }
    let before = faulty.hits();
    io.run(vec![Request::flush()]).expect("flushed");
    assert_eq!(faulty.hits(), before);
}

#[test]
fn an_error_names_the_member_and_has_the_place_on_the_stripe() {
    let members: Vec<Arc<dyn BlockDevice>> = vec![file(), file(), file()];
    let broken = Faulty::new(members[1].clone());
    broken.add(Rule::fail(On::Read, libc::EIO).within(DATA + UNIT..DATA + 2 * UNIT));
    let name = broken.name().to_owned();
    let io = Io::inline(stripe(vec![members[0].clone(), broken, members[2].clone()])).expect("a queue");
    let region = Region::allocate(3 * UNIT as usize).expect("memory");
    let error = io.run(vec![Request::read(3 * UNIT, [region.span(0..region.len())])]).expect_err("it fails");
    assert_eq!((error.offset(), error.errno()), (Some(4 * UNIT), libc::EIO));
    assert!(matches!(&error, Error::Member { error, .. } if matches!(**error, Error::Io { op: Op::Read, .. })), "{error:?}");
    assert!(error.to_string().starts_with(&format!("{name}: read of {UNIT} bytes at {}", DATA + UNIT)), "{error}");
}

#[test]
fn a_region_is_mapped_for_all_members_or_none() {
    let members: Vec<_> = (0..8).map(|_| controller("")).collect();
    let device = stripe(members);
    assert!(device.pins() && device.peer_to_peer().is_ok());
    let region = Region::allocate(8 * UNIT as usize).expect("memory");
    device.map(&region).expect("mapped");
    let io = Io::threaded(device.clone(), 2).expect("queues");
    region.write_at(0, &vec![7; region.len()]).expect("inside");
    io.run(vec![Request::write(0, [region.span(0..region.len())], false)]).expect("written");
    region.zero_at(0, region.len()).expect("inside");
    io.run(vec![Request::read(0, [region.span(0..region.len())])]).expect("read");
    let mut bytes = vec![0; region.len()];
    region.read_at(0, &mut bytes).expect("inside");
    assert!(bytes.iter().all(|byte| *byte == 7));
    device.unmap(&region);
    let mixed = stripe(vec![controller(""), file()]);
    assert!(mixed.pins() && mixed.peer_to_peer().is_err(), "one that the kernel drives reaches no other device's memory");
}

#[test]
fn a_wait_ends_by_a_wake_by_time_and_by_what_a_slow_member_ends() {
    let kinds: [fn() -> Arc<dyn BlockDevice>; 3] = [memory, file, || controller("completion=interrupt")];
    for kind in kinds {
        let slow = Faulty::new(kind());
        let delay = Duration::from_millis(50);
        slow.add(Rule::delay(On::Read, delay));
        let device = stripe(vec![kind(), slow]);
        let queue = device.open_queue().expect("a queue");
        let mut out = Vec::new();
        assert_eq!(queue.complete(Wait::Timeout(Duration::from_millis(5)), &mut out), Ok(0));
        queue.wake();
        assert_eq!(queue.complete(Wait::No, &mut out), Ok(0));
        assert_eq!(queue.complete(Wait::Forever, &mut out), Ok(0), "the wake was left to it");
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(Duration::from_millis(5));
                queue.wake();
            });
            while queue.complete(Wait::Timeout(Duration::from_secs(20)), &mut out) != Ok(0) {}
        });
        let region = Region::allocate(2 * UNIT as usize).expect("memory");
        let started = Instant::now();
        queue.submit(&mut vec![Request { tag: 77, ..Request::read(0, [region.span(0..region.len())]) }]);
        while out.is_empty() {
            queue.complete(Wait::Forever, &mut out).expect("the queue works");
        }
        assert!(started.elapsed() >= delay && out.len() == 1 && out[0].tag == 77 && out[0].result.is_ok());
    }
}

#[test]
fn what_a_stripe_cannot_be_made_of_is_refused() {
    let refused = |members: Vec<Arc<dyn BlockDevice>>, map: StripeMap, len: u64| {
        StripeDevice::new(members, map, len).err().expect("refused").to_string()
    };
    let short: Arc<dyn BlockDevice> = MemoryDevice::new(MEMBER - 512);
    let text = refused(vec![memory(), short], map(&[2]), 2 * ROWS * UNIT);
    assert!(text.contains(&format!("has {} bytes, and {MEMBER} are needed", MEMBER - 512)), "{text}");
    let text = refused((0..17).map(|_| memory()).collect(), map(&[17]), UNIT);
    assert!(text.contains("17 devices cannot be one"), "{text}");
    let text =
        refused(vec![memory(), memory()], StripeMap::new(&[StripeSet { members: 2, unit: 256, data: 0, data_len: 4096 }]), 4096);
    assert!(text.contains("has blocks of 512 bytes in a unit of 256"), "{text}");
}
