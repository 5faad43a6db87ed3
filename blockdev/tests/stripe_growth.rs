//! A stripe that is given further members while it is used.
use std::fs::File;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use gpunvme_blockdev::sim::SimController;
use gpunvme_blockdev::{
    BlockDevice, BufferPool, Error, Io, OpenMode, Region, Request, StripeDevice, StripeMap, StripeSet, Wait, open,
};
use gpunvme_blockdev_testing::{Faulty, MemoryDevice, On, Recorder, Rule};

const UNIT: u64 = 64 << 10;
const DATA: u64 = 8 << 10;
/// Units of data on each member.
const ROWS: u64 = 8;
const MEMBER: u64 = DATA + ROWS * UNIT;

/// Sets of so many members.
fn map(sets: &[usize]) -> StripeMap {
    let set = |&members: &usize| StripeSet { members, unit: UNIT, data: DATA, data_len: ROWS * UNIT };
    StripeMap::new(&sets.iter().map(set).collect::<Vec<_>>())
}

fn len(sets: &[usize]) -> u64 {
    sets.iter().map(|members| *members as u64 * ROWS * UNIT).sum()
}

fn stripe(members: Vec<Arc<dyn BlockDevice>>) -> Arc<StripeDevice> {
    let sets = [members.len()];
    StripeDevice::new(members, map(&sets), len(&sets)).expect("a stripe")
}

/// Gives a stripe a further set of so many members behind `before`.
fn add(stripe: &StripeDevice, before: &[usize], members: &[Arc<dyn BlockDevice>]) -> gpunvme_blockdev::Result<()> {
    let sets = [before, &[members.len()]].concat();
    stripe.add_set(members, map(&sets), len(&sets), &mut || Ok(()))
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

fn controller() -> Arc<dyn BlockDevice> {
    let controller = SimController::new("sim:test,memory=2M,vwc=on", OpenMode::ReadWrite);
    controller.expect("a controller").attach("").expect("the driver runs")
}

/// Bytes that no two units have in common.
fn content(from: u64, len: u64) -> Vec<u8> {
    (from..from + len).map(|at| (at / UNIT * 7 + at % 251) as u8).collect()
}

fn write(io: &Io, from: u64, len: u64) {
    let region = Region::allocate(len as usize).expect("memory");
    region.write_at(0, &content(from, len)).expect("inside");
    io.run([Request::write(from, [region.span(0..len as usize)], false)]).expect("written");
}

fn holds(io: &Io, from: u64, len: u64) -> bool {
    let region = Region::allocate(len as usize).expect("memory");
    io.run([Request::read(from, [region.span(0..len as usize)])]).expect("read");
    let mut bytes = vec![0; len as usize];
    region.read_at(0, &mut bytes).expect("inside");
    bytes == content(from, len)
}

/// A member that joins may take long. The process's own memory does without it.
#[test]
fn buffers_come_and_go_while_a_member_joins() {
    let device = stripe(vec![memory(), memory()]);
    let pool = BufferPool::new(device.clone(), 0);
    let held = pool.get(4096).expect("memory");
    let (joins, is_joining) = mpsc::channel();
    let (goes_on, may_go_on) = mpsc::channel();
    std::thread::scope(|scope| {
        let device = &device;
        let joined = scope.spawn(move || {
            let mut begin = || {
                joins.send(()).expect("it is waited for");
                may_go_on.recv_timeout(Duration::from_secs(20)).map_err(|_| Error::RegionReadOnly)
            };
            device.add_set(&[memory()], map(&[2, 1]), len(&[2, 1]), &mut begin)
        });
        is_joining.recv().expect("it begins");
        drop(held);
        drop(pool.get(8 << 20).expect("memory"));
        goes_on.send(()).expect("it waits");
        joined.join().expect("it does not panic").expect("it was not waited for");
    });
}

#[test]
fn queues_that_are_there_reach_further_members() {
    for kind in [memory as fn() -> Arc<dyn BlockDevice>, file, controller] {
        let device = stripe(vec![kind(), kind()]);
        let dynamic: Arc<dyn BlockDevice> = device.clone();
        let (io, busy) = (Io::threaded(dynamic.clone(), 2).expect("queues"), device.open_busy_queue(None).expect("a queue"));
        write(&io, 0, len(&[2]));
        let over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let reads = scope.spawn(|| {
                let mut reads = 0;
                while !over.load(Ordering::Relaxed) {
                    assert!(holds(&io, 3 * UNIT, 5 * UNIT));
                    reads += 1;
                }
                reads
            });
            add(&device, &[2], &[kind()]).expect("one more");
            add(&device, &[2, 1], &[kind(), kind(), kind()]).expect("three more");
            over.store(true, Ordering::Relaxed);
            reads.join().expect("they go on");
        });
        assert_eq!((device.geometry().len.get(), device.members().len()), (len(&[2, 1, 3]), 6));
        assert_eq!((device.name().matches('+').count(), device.stripe().map(StripeMap::sets)), (5, Some(3)));
        write(&io, len(&[2]) - UNIT, len(&[1, 3]) + UNIT);
        for io in [io, Io::inline(dynamic).expect("a queue")] {
            assert!(holds(&io, 0, len(&[2, 1, 3])));
            io.run([Request::flush()]).expect("flushed");
        }
        // One request over all three sets, on a queue that is older than two of them.
        let region = Region::allocate(len(&[2, 1, 3]) as usize).expect("memory");
        busy.submit(&mut vec![Request::read(0, [region.span(0..region.len())])]);
        let mut out = Vec::new();
        while out.is_empty() {
            busy.complete(Wait::Forever, &mut out).expect("the queue works");
        }
        assert!(out[0].result.is_ok());
    }
}

/// A thread that waits for a queue's completions learns of members that come meanwhile.
#[test]
fn who_waits_sees_what_a_further_member_completes() {
    for kind in [memory as fn() -> Arc<dyn BlockDevice>, file, controller] {
        let device = stripe(vec![kind(), kind()]);
        let queue = device.open_queue().expect("a queue");
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| {
                let (mut out, begun) = (Vec::new(), Instant::now());
                while out.is_empty() && begun.elapsed() < Duration::from_secs(20) {
                    queue.complete(Wait::Timeout(Duration::from_secs(20)), &mut out).expect("the queue works");
                }
                (out, begun.elapsed())
            });
            std::thread::sleep(Duration::from_millis(50));
            let slow = Faulty::new(kind());
            slow.add(Rule::delay(On::Read, Duration::from_millis(50)));
            add(&device, &[2], &[slow]).expect("one more");
            let region = Region::allocate(UNIT as usize).expect("memory");
            let read = Request { tag: 5, ..Request::read(len(&[2]), [region.span(0..region.len())]) };
            queue.submit(&mut vec![read]);
            let (out, waited) = waits.join().expect("it goes on");
            assert!(out.len() == 1 && out[0].tag == 5 && out[0].result.is_ok(), "{out:?}");
            assert!(waited < Duration::from_secs(10), "{waited:?}");
        });
    }
}

#[test]
fn what_was_written_to_a_further_member_is_flushed_there() {
    let recorders = [0, 1, 2].map(|_| Recorder::new(gpunvme_blockdev_testing::Image::new(MEMBER)));
    let member = |number: usize| recorders[number].clone() as Arc<dyn BlockDevice>;
    let device = stripe(vec![member(0), member(1)]);
    let io = Io::inline(device.clone()).expect("a queue");
    io.run([Request::flush()]).expect("flushed");
    add(&device, &[2], &[member(2)]).expect("one more");
    let before = recorders.each_ref().map(|recorder| recorder.position());
    write(&io, len(&[2]), UNIT);
    io.run([Request::flush()]).expect("flushed");
    let after = recorders.each_ref().map(|recorder| recorder.position());
    assert_eq!([after[0], after[1]], [before[0], before[1]], "the others have nothing to flush");
    assert_eq!(after[2] - before[2], 4, "a write and a flush, begun and done");
}

#[test]
fn what_cannot_join_is_refused_and_the_stripe_goes_on() {
    let device = stripe(vec![file(), file()]);
    let io = Io::inline(device.clone()).expect("a queue");
    write(&io, 0, len(&[2]));
    let refused = |members: &[Arc<dyn BlockDevice>]| add(&device, &[2], members).expect_err("refused").to_string();
    let many: Vec<_> = (0..15).map(|_| memory()).collect();
    assert!(refused(&many).contains("17 devices cannot be one: 16 can"));
    assert!(refused(&[controller()]).contains("is run by another driver"), "{}", refused(&[controller()]));
    let short: Arc<dyn BlockDevice> = MemoryDevice::new(DATA);
    assert!(refused(&[short]).contains("are needed of each device"));
    let failed = device.add_set(&[file()], map(&[2, 1]), len(&[2, 1]), &mut || Err(Error::RegionReadOnly));
    assert!(matches!(failed, Err(Error::RegionReadOnly)), "{failed:?}");
    assert_eq!((device.members().len(), device.name().matches('+').count()), (2, 1));
    add(&device, &[2], &[file()]).expect("the next try is one");
    assert!(holds(&io, 0, len(&[2])));
    assert!(memory().add_set(&[memory()], map(&[1, 1]), 0, &mut || Ok(())).is_err(), "it is no stripe");
    let cached = SimController::new("sim:test,memory=2M,vwc=on", OpenMode::ReadWrite).expect("a controller");
    let without = || SimController::new("sim:test,memory=2M,vwc=off", OpenMode::ReadWrite).expect("a controller").attach("");
    let driven = stripe(vec![without().expect("it runs"), without().expect("it runs")]);
    let why = add(&driven, &[2], &[cached.attach("").expect("it runs")]).expect_err("refused").to_string();
    assert!(why.contains("has a cache that loses what it holds"), "{why}");
}

/// Memory of other processes, mapped before, is mapped for what comes; and for none of it, where
/// the growth fails.
#[test]
fn memory_is_mapped_for_further_members() {
    let device = stripe(vec![controller(), controller()]);
    let shared = rustix::fs::memfd_create("shared", rustix::fs::MemfdFlags::CLOEXEC).expect("memory");
    rustix::fs::ftruncate(&shared, 1 << 20).expect("its length");
    rustix::fs::fallocate(&shared, rustix::fs::FallocateFlags::empty(), 0, 1 << 20).expect("its pages");
    let region = Region::from_fd(shared, 1 << 20, true).expect("mapped");
    device.map(&region).expect("mapped for DMA");
    let simulated = SimController::new("sim:test,memory=2M,vwc=on", OpenMode::ReadWrite).expect("a controller");
    let third: Arc<dyn BlockDevice> = simulated.clone().attach("").expect("the driver runs");
    let own = simulated.mapped();
    let failed = device.add_set(std::slice::from_ref(&third), map(&[2, 1]), len(&[2, 1]), &mut || Err(Error::RegionReadOnly));
    assert!(failed.is_err());
    assert_eq!(simulated.mapped(), own);
    add(&device, &[2], std::slice::from_ref(&third)).expect("one more");
    assert_eq!(simulated.mapped(), own + 1);
    device.unmap(&region);
    assert_eq!(simulated.mapped(), own);
}

/// A device that maps large regions slowly, as one does that pins gigabytes.
struct Slow(Arc<dyn BlockDevice>);

const LARGE: usize = 1 << 20;
const LONG: Duration = Duration::from_millis(600);

impl BlockDevice for Slow {
    fn name(&self) -> &str {
        self.0.name()
    }

    fn geometry(&self) -> &gpunvme_blockdev::Geometry {
        self.0.geometry()
    }

    fn open_queue(&self) -> gpunvme_blockdev::Result<Box<dyn gpunvme_blockdev::Queue>> {
        self.0.open_queue()
    }

    fn map(&self, region: &Arc<Region>) -> gpunvme_blockdev::Result<()> {
        if region.len() >= LARGE {
            std::thread::sleep(LONG);
        }
        self.0.map(region)
    }

    fn unmap(&self, region: &Region) {
        self.0.unmap(region);
    }
}

/// What one client registers holds up neither other mappings nor new queues, and a member that
/// joins maps it before it takes its turn.
#[test]
fn a_large_mapping_holds_up_no_other() {
    let device = stripe(vec![Arc::new(Slow(memory())), memory()]);
    let small = Region::allocate(4096).expect("memory");
    let quick = |what: &str| {
        let begun = Instant::now();
        device.map(&small).expect("mapped");
        device.unmap(&small);
        drop(device.open_queue().expect("a queue"));
        assert!(begun.elapsed() < LONG / 2, "{what}: {:?}", begun.elapsed());
    };
    let shared = rustix::fs::memfd_create("shared", rustix::fs::MemfdFlags::CLOEXEC).expect("memory");
    rustix::fs::ftruncate(&shared, LARGE as u64).expect("its length");
    let large = Region::from_fd(shared, LARGE, true).expect("mapped");
    std::thread::scope(|scope| {
        scope.spawn(|| device.map(&large).expect("mapped"));
        std::thread::sleep(LONG / 4);
        quick("beside a mapping");
    });
    std::thread::scope(|scope| {
        scope.spawn(|| add(&device, &[2], &[Arc::new(Slow(memory()))]).expect("one more"));
        std::thread::sleep(LONG / 4);
        quick("beside a member that joins");
    });
    assert_eq!(device.members().len(), 3);
}
