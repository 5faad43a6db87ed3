//! The NVMe driver on the software controller: what the traits promise to callers, in every way of
//! waiting; and what never happens to memory.
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use gpunvme_blockdev::nvme::Erase;
use gpunvme_blockdev::sim::{Effect, Fault, On, SimController};
use gpunvme_blockdev::{BlockDevice, Completion, Error, Io, OpenMode, Queue, Region, Request, Wait, open_controller};

/// Nothing takes longer, on however busy a machine.
const PATIENCE: Duration = Duration::from_secs(60);

fn controller(options: &str) -> Arc<SimController> {
    SimController::new(&format!("sim:test,memory=32M{options}"), OpenMode::ReadWrite).expect("a controller")
}

fn eventually(what: &str, condition: impl Fn() -> bool) {
    let started = Instant::now();
    while !condition() {
        assert!(started.elapsed() < PATIENCE, "{what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Collects so many completions.
fn collect(queue: &dyn Queue, count: usize) -> Vec<Completion> {
    let (mut out, started) = (Vec::new(), Instant::now());
    while out.len() < count {
        queue.complete(Wait::Timeout(Duration::from_secs(1)), &mut out).expect("the queue works");
        assert!(started.elapsed() < PATIENCE, "{} of {count} came", out.len());
    }
    out
}

/// A region with a byte in it that depends on where it is.
fn patterned(len: usize) -> (Arc<Region>, Vec<u8>) {
    let region = Region::allocate(len).expect("memory");
    let bytes: Vec<u8> = (0..len).map(|at| (at / 512 + at) as u8).collect();
    region.write_at(0, &bytes).expect("inside");
    (region, bytes)
}

fn memfd(len: u64) -> OwnedFd {
    let memfd = rustix::fs::memfd_create("memory", rustix::fs::MemfdFlags::CLOEXEC).expect("a memfd");
    rustix::fs::ftruncate(&memfd, len).expect("its length");
    memfd
}

#[test]
fn a_wake_ends_a_wait_and_is_never_lost() {
    for (options, driver) in [
        ("", "completion=poll"),
        ("", "completion=interrupt"),
        ("", "completion=adaptive"),
        (",vectors=1", "completion=interrupt"),
        (",vectors=0", ""),
    ] {
        let sim = controller(options);
        let queue = sim.attach(driver).expect("the driver comes up").open_queue().expect("a queue");
        let mut out = Vec::new();
        let mut complete = |wait| queue.complete(wait, &mut out).expect("the queue works");
        queue.wake();
        assert_eq!(complete(Wait::No), 0);
        assert_eq!(complete(Wait::Forever), 0, "the wake was left to it");
        let started = Instant::now();
        assert_eq!(complete(Wait::Timeout(Duration::from_millis(30))), 0);
        assert!(started.elapsed() >= Duration::from_millis(30), "{driver}: the wake counts once");
        for _ in 0..50 {
            let returned = AtomicBool::new(false);
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    queue.complete(Wait::Forever, &mut Vec::new()).expect("the queue works");
                    returned.store(true, Ordering::Release);
                });
                queue.wake();
                eventually("the wait ends", || returned.load(Ordering::Acquire));
            });
        }
    }
}

#[test]
fn a_wait_ends_with_the_completion_however_it_waits() {
    for (options, driver) in [
        (",inline=on", "completion=poll"),
        ("", "completion=poll"),
        ("", "completion=interrupt"),
        ("", "completion=adaptive"),
        (",vectors=1", "completion=interrupt"),
        (",vectors=2,dbbuf=on", "completion=interrupt"),
        (",vectors=0", "completion=adaptive"),
    ] {
        let sim = controller(options);
        // No other thread wakes it before that.
        let queue = sim.attach(&format!("timeout=100s,{driver}")).expect("the driver comes up").open_queue().expect("a queue");
        let region = Region::allocate(4096).expect("memory");
        let started = Instant::now();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut out = Vec::new();
                while out.len() < 200 {
                    queue.complete(Wait::Forever, &mut out).expect("the queue works");
                }
            });
            for n in 0..200 {
                queue.submit(&mut vec![Request::read(0, vec![region.span(0..4096)])]);
                if n % 3 == 0 {
                    std::thread::sleep(Duration::from_micros(300));
                }
            }
        });
        assert!(started.elapsed() < PATIENCE, "{options} {driver}");
    }
}

#[test]
fn what_exceeds_the_depth_or_the_bounce_buffer_waits_inside() {
    for driver in ["depth=2", "depth=64", "depth=64,sgl=off"] {
        let sim = controller(",mdts=4");
        let device = sim.attach(driver).expect("the driver comes up");
        let queue = device.open_queue().expect("a queue");
        let (region, bytes) = patterned(8 << 20);
        // Of this nothing is mapped, so that all of it is copied.
        let span = |n: usize| region.span(n << 18..(n + 1) << 18);
        queue.submit(&mut (0..32).map(|n| Request::write((n as u64) << 18, vec![span(n)], false)).collect());
        assert!(collect(&*queue, 32).into_iter().all(|completion| completion.result.is_ok()));
        assert!(sim.contents(1, false)[..8 << 20] == bytes);
        region.zero_at(0, 8 << 20).expect("inside");
        queue.submit(&mut vec![Request::read(0, vec![region.span(0..8 << 20)])]);
        assert_eq!(collect(&*queue, 1)[0].result, Ok(()));
        let mut read = vec![0; 8 << 20];
        region.read_at(0, &mut read).expect("inside");
        assert!(read == bytes);
    }
}

#[test]
fn the_parts_of_a_request_are_in_flight_together_and_a_dropped_queue_waits_for_them() {
    let sim = controller(",mdts=5");
    let device = sim.attach("").expect("the driver comes up");
    let queue = device.open_queue().expect("a queue");
    let (region, _) = patterned(1 << 20);
    device.map(&region).expect("mapped");
    sim.inject(Fault::new(On::Io, Effect::Hold));
    queue.submit(&mut vec![Request::read(0, vec![region.span(0..1 << 20)])]);
    eventually("8 commands of 128 KiB", || sim.stalled() == 8);
    let dropping = std::thread::spawn(move || drop(queue));
    std::thread::sleep(Duration::from_millis(50));
    assert!(!dropping.is_finished(), "the controller still has commands");
    sim.clear_faults();
    sim.release();
    dropping.join().expect("it ends");
    device.unmap(&region);
    assert_eq!((sim.dma_faults(), sim.unmapped_in_flight()), (vec![], 0));
}

#[test]
fn memory_of_other_devices_is_reached_directly_or_not_at_all() {
    let sim = controller(",sgls=none");
    let device = sim.attach("").expect("the driver comes up");
    let io = Io::inline(device.clone()).expect("a queue");
    let (host, _) = patterned(4096);
    device.map(&host).expect("mapped");
    let region = Region::of_device(memfd(4096), 4096).expect("it can be mapped");
    let direct = || Request::read(0, vec![region.span(0..4096)]);
    let refused = |request| assert!(matches!(io.run(vec![request]), Err(Error::Unsupported { .. })));
    refused(direct());
    refused(Request::write(0, vec![region.span(0..4096)], false));
    device.map(&region).expect("mapped");
    io.run(vec![direct()]).expect("now it is reached");
    // Two memories that meet inside a block: PRPs cannot say that.
    refused(Request::read(0, vec![host.span(0..256), region.span(0..256)]));
    io.run(vec![Request::read(0, vec![host.span(0..512), region.span(0..512)])]).expect("between blocks they can meet");
    drop(io);
    device.unmap(&region);
    device.unmap(&host);
    assert_eq!(sim.dma_faults(), []);
}

#[test]
fn memory_for_reading_only_is_written_from_and_never_into() {
    let sim = controller("");
    let device = sim.attach("").expect("the driver comes up");
    let fd = memfd(8192);
    rustix::io::pwrite(&fd, &[7; 8192], 0).expect("written");
    let region = Region::from_fd(fd, 8192, false).expect("it can be mapped");
    device.map(&region).expect("mapped");
    let io = Io::inline(device.clone()).expect("a queue");
    io.run(vec![Request::write(0, vec![region.span(0..8192)], true)]).expect("written");
    assert!(sim.contents(1, true)[..8192] == [7; 8192]);
    assert_eq!(io.run(vec![Request::read(0, vec![region.span(0..8192)])]), Err(Error::RegionReadOnly));
    let odd = Request::write(0, vec![region.span(2..514)], false);
    assert!(matches!(io.run(vec![odd]), Err(Error::Alignment { required: 4, .. })));
    drop(io);
    device.unmap(&region);
    assert_eq!((sim.dma_faults(), sim.unmapped_in_flight()), (vec![], 0));
}

#[test]
fn after_a_subsystem_reset_no_flush_says_that_lost_writes_are_durable() {
    // The driver answers to an error of the bus with a reset of the function, which clears NSSRO.
    for bus_error in [false, true] {
        let sim = controller("");
        let device: Arc<dyn BlockDevice> = sim.attach("timeout=50ms").expect("the driver comes up");
        let io = Io::inline(device.clone()).expect("a queue");
        let (region, _) = patterned(4096);
        io.run(vec![Request::write(0, vec![region.span(0..4096)], false)]).expect("written, to the cache");
        sim.subsystem_reset();
        if bus_error {
            sim.report_bus_error();
        }
        let error = io.run(vec![Request::flush()]).expect_err("what it covers may be lost");
        assert!(matches!(error, Error::Controller { what, .. } if what.contains("NSSRO")), "{error}");
        drop(io);
        drop(device);
        let io = Io::inline(sim.attach("").expect("it comes up again")).expect("a queue");
        io.run(vec![Request::flush()]).expect("it works");
    }
}

#[test]
fn after_power_was_lost_no_flush_says_that_lost_writes_are_durable() {
    for seed in 0..8 {
        let sim = controller(&format!(",seed={seed}"));
        let device: Arc<dyn BlockDevice> = sim.attach("timeout=200ms").expect("the driver comes up");
        let io = Io::inline(device.clone()).expect("a queue");
        let (region, _) = patterned(1 << 20);
        io.run(vec![Request::write(0, vec![region.span(0..1 << 20)], false)]).expect("written, to the cache");
        sim.power_cut();
        sim.power_on();
        let error = io.run(vec![Request::flush()]).expect_err("what it covers may be lost");
        // The supervisor may look while power is off.
        assert!(matches!(error, Error::Controller { .. } | Error::Gone { .. }), "seed {seed}: {error}");
        drop(io);
        drop(device);
        let io = Io::inline(sim.attach("").expect("it comes up again")).expect("a queue");
        io.run(vec![Request::flush()]).expect("it works");
    }
}

#[test]
fn without_a_volatile_cache_a_loss_of_power_or_a_subsystem_reset_loses_nothing() {
    for lose in [SimController::subsystem_reset, |sim: &SimController| {
        sim.power_cut();
        sim.power_on();
    }] {
        let sim = controller(",vwc=off");
        let device: Arc<dyn BlockDevice> = sim.attach("timeout=5s").expect("the driver comes up");
        let io = Io::inline(device).expect("a queue");
        let (region, bytes) = patterned(4096);
        io.run(vec![Request::write(0, vec![region.span(0..4096)], false)]).expect("written");
        // Once the supervisor does not look any more: it does for a tick behind the last command.
        std::thread::sleep(Duration::from_secs(1));
        lose(&sim);
        region.zero_at(0, 4096).expect("inside");
        io.run(vec![Request::read(0, vec![region.span(0..4096)])]).expect("the controller is brought up again");
        let mut read = vec![0; 4096];
        region.read_at(0, &mut read).expect("inside");
        assert!(read == bytes);
    }
}

#[test]
fn where_the_controller_does_not_tell_of_lost_power_it_counts_as_lost_unless_the_driver_began_the_reset() {
    for (effect, answer, lost) in [
        (Effect::Reset, Effect::Status(0, 6), true),
        (Effect::Reset, Effect::Lose, true),
        (Effect::Fatal, Effect::Status(0, 6), false),
        // A controller that does not answer at all is not one that came back.
        (Effect::Fatal, Effect::Lose, true),
    ] {
        let sim = controller("");
        let device: Arc<dyn BlockDevice> = sim.attach("timeout=100ms").expect("the driver comes up");
        let io = Io::inline(device.clone()).expect("a queue");
        sim.inject(Fault::new(On::LogPage, answer));
        sim.inject(Fault::new(On::Flush, effect).once());
        let started = Instant::now();
        let flushed = io.run(vec![Request::flush()]);
        assert_eq!(flushed.is_err(), lost, "{effect:?}, {answer:?}: {flushed:?}");
        assert!(started.elapsed() < PATIENCE / 2, "{effect:?}, {answer:?}: {:?}", started.elapsed());
    }
}

#[test]
fn a_queue_that_cannot_be_deleted_holds_up_no_recovery() {
    let sim = controller("");
    let device = sim.attach("timeout=40s").expect("the driver comes up");
    let (first, second) = (device.open_queue().expect("a queue"), device.open_queue().expect("a second"));
    let (region, _) = patterned(4096);
    device.map(&region).expect("mapped");
    let (hits, hit) = (sim.hits(), |hits| eventually("the fault hits", || sim.hits() > hits));
    sim.inject(Fault::new(On::Admin, Effect::Lose).once());
    let closing = std::thread::spawn(move || drop(second));
    hit(hits);
    sim.inject(Fault::new(On::Read, Effect::Reset).once());
    let started = Instant::now();
    first.submit(&mut vec![Request::read(0, vec![region.span(0..4096)])]);
    assert!(collect(&*first, 1).remove(0).result.is_ok(), "after a reset by the supervisor");
    assert!(started.elapsed() < Duration::from_secs(20), "{:?}", started.elapsed());
    closing.join().expect("it ends");
    drop(first);
    device.unmap(&region);
}

#[test]
fn a_queue_that_could_not_be_deleted_is_there_again_after_a_reset() {
    let sim = controller("");
    let device = sim.attach("timeout=200ms,queues=2").expect("the driver comes up");
    let (first, second) = (device.open_queue().expect("a queue"), device.open_queue().expect("a second"));
    sim.inject(Fault::new(On::Admin, Effect::Status(0, 6)).once());
    drop(second);
    assert!(device.open_queue().is_err(), "the controller has it still");
    let (region, _) = patterned(4096);
    device.map(&region).expect("mapped");
    sim.inject(Fault::new(On::Read, Effect::Fatal).once());
    first.submit(&mut vec![Request::read(0, vec![region.span(0..4096)])]);
    assert!(collect(&*first, 1).remove(0).result.is_ok(), "after a reset by the supervisor");
    let third = device.open_queue().expect("the number of the second");
    drop((first, third));
    device.unmap(&region);
}

#[test]
fn however_many_commands_are_lost_one_unanswered_abort_is_enough() {
    let sim = controller("");
    let device = sim.attach("timeout=400ms,depth=256").expect("the driver comes up");
    let queue = device.open_queue().expect("a queue");
    let (region, _) = patterned(4096);
    device.map(&region).expect("mapped");
    sim.inject(Fault::new(On::Read, Effect::Lose).times(200));
    sim.inject(Fault::new(On::Abort, Effect::Lose).times(200));
    let started = Instant::now();
    queue.submit(&mut (0..200).map(|_| Request::read(0, vec![region.span(0..4096)])).collect());
    assert!(collect(&*queue, 200).into_iter().all(|completion| completion.result.is_ok()), "after a reset");
    // Each Abort would be waited for a tenth of a second.
    assert!(started.elapsed() < Duration::from_secs(10), "{:?}", started.elapsed());
    drop(queue);
    device.unmap(&region);
}

#[test]
fn a_controller_can_be_looked_after() {
    let device = "sim:test,memory=32M,namespaces=2";
    let controller = open_controller(device).expect("it opens");
    let register = |name: &str| controller.registers().expect("they are there").into_iter().find(|it| it.name == name);
    assert_eq!(register("CC").map(|cc| cc.value & 1), Some(0), "looking at registers brings nothing up");
    assert!(register("CAP").is_some_and(|cap| cap.size == 8 && cap.value != 0));
    let info = controller.identify().expect("it comes up");
    assert!(info.format && info.volatile_cache && !info.model.is_empty() && info.max_transfer == Some(512 << 10), "{info:?}");
    assert_eq!(register("CC").map(|cc| cc.value & 1), Some(1));
    controller.reset().expect("it comes back");
    let namespaces = controller.namespaces().expect("they are listed");
    assert_eq!(
        namespaces.iter().map(|it| (it.id, it.len, it.logical_block)).collect::<Vec<_>>(),
        [(1, 32 << 20, 512), (2, 32 << 20, 512)]
    );
    assert!(controller.smart().expect("it is kept").temperature > 200);
    controller.errors().expect("it is kept");
    controller.format(2, 4096, Erase::No).expect("it can be formatted");
    assert_eq!(controller.namespaces().expect("they are listed").iter().map(|it| it.logical_block).max(), Some(4096));
    let error = controller.format(3, 4096, Erase::No).expect_err("there is none").to_string();
    assert!(error.contains("namespace 3"), "{error}");
    let error = controller.format(1, 2048, Erase::No).expect_err("there is no such format").to_string();
    assert!(error.contains("2048"), "{error}");
    assert!(matches!(open_controller("/dev/null"), Err(Error::Unsupported { .. })));
}

/// A request that another thread has ended (its submitter, the supervisor) is collected also when
/// the wake for it was taken by a look whether to sleep: the reaper of a stripe looks so.
#[test]
fn what_is_over_without_a_command_is_collected_after_a_look_whether_to_sleep() {
    let device = controller("").attach("").expect("the driver comes up");
    let queue = device.open_queue().expect("a queue");
    let mut completions = Vec::new();
    assert_eq!(queue.complete(Wait::No, &mut completions).expect("nothing yet"), 0);
    queue.submit(&mut vec![Request { tag: 7, ..Request::read(0, Vec::new()) }]);
    assert!(queue.sleep_on(Instant::now()).expect("a descriptor, or none").is_none(), "there is something to collect");
    assert_eq!(queue.complete(Wait::No, &mut completions).expect("it is over"), 1);
    assert_eq!(completions[0].tag, 7);
}
