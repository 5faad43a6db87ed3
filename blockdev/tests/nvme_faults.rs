//! The NVMe driver on a controller that goes wrong. Whatever that does, every request ends, in
//! success or in an error that says what happened; what is read is right; no memory is used that
//! is not the controller's any more.
//!
//! `NVME_SECONDS` says how long the random campaign takes (2), `NVME_SEED` where it begins.
use std::sync::Arc;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use gpunvme_blockdev::sim::{Effect, Fault, On, SimController};
use gpunvme_blockdev::{BlockDevice, Error, Io, Op, OpenMode, Region, Request, Result};

/// A slot of the device, and of the memory: requests at once use one each.
const SLOT: usize = 256 << 10;
const SLOTS: usize = 8;
/// Nothing takes longer, on however busy a machine.
const PATIENCE: Duration = Duration::from_secs(60);
/// The driver's.
const QUICK: &str = "timeout=200ms,depth=16";

/// A driver on a controller, and what should be on that.
struct Bench {
    sim: Arc<SimController>,
    io: Arc<Io>,
    region: Arc<Region>,
    model: Vec<u8>,
}

impl Bench {
    /// A controller that has 1 in each byte of the slots.
    fn new(options: &str) -> Self {
        Self::with_driver(options, QUICK)
    }

    fn with_driver(options: &str, driver: &str) -> Self {
        let options = if options.is_empty() { String::new() } else { format!("{options},") };
        let sim = SimController::new(&format!("sim:test,{options}memory=4M"), OpenMode::ReadWrite).expect("a controller");
        let device = sim.attach(driver).expect("the driver comes up");
        let region = Region::allocate(SLOTS * SLOT).expect("memory");
        device.map(&region).expect("mapped");
        let io = Io::threaded(device, 1).expect("a queue");
        let bench = Self { sim, io, region, model: vec![1; SLOTS * SLOT] };
        bench.region.write_at(0, &bench.model).expect("inside");
        for result in bench.run((0..SLOTS).map(|slot| bench.write(slot, SLOT)).collect()) {
            result.expect("nothing goes wrong yet");
        }
        bench
    }

    fn write(&self, slot: usize, len: usize) -> Request {
        Request::write((slot * SLOT) as u64, vec![self.region.span(slot * SLOT..slot * SLOT + len)], false)
    }

    fn read(&self, slot: usize, len: usize) -> Request {
        Request::read((slot * SLOT) as u64, vec![self.region.span(slot * SLOT..slot * SLOT + len)])
    }

    /// Runs requests at once, and gives the result of each.
    fn run(&self, requests: Vec<Request>) -> Vec<Result<()>> {
        let (done, ends) = mpsc::channel();
        let count = requests.len();
        for (number, request) in requests.into_iter().enumerate() {
            let done = done.clone();
            self.io.submit(vec![request], move |result| done.send((number, result)).expect("the test listens"));
        }
        let mut results: Vec<Option<Result<()>>> = vec![None; count];
        let deadline = Instant::now() + PATIENCE;
        for _ in 0..count {
            let Ok((number, result)) = ends.recv_timeout(deadline.saturating_duration_since(Instant::now())) else {
                // Unwinding would wait for the request as well.
                eprintln!("a request hangs: {results:?}");
                std::process::abort();
            };
            assert!(results[number].replace(result).is_none(), "a request ended twice");
        }
        results.into_iter().map(|result| result.expect("every request ended")).collect()
    }

    /// A read and a write of several commands each, and a flush, with all that has to be true of
    /// them whatever happens.
    fn exercise(&mut self, byte: u8) -> Vec<Result<()>> {
        let fill = |slot: usize, byte: u8| self.region.write_at(slot * SLOT, &vec![byte; SLOT]).expect("inside");
        fill(0, 0xee);
        fill(1, byte);
        let results = self.run(vec![self.read(0, SLOT), self.write(1, SLOT), Request::flush()]);
        let mut bytes = vec![0; SLOT];
        self.region.read_at(0, &mut bytes).expect("inside");
        if results[0].is_ok() {
            assert!(bytes == self.model[..SLOT], "what was read is what is there");
        }
        // Whatever was stalled may go on now; it must not have these any more.
        fill(0, 0xdd);
        fill(1, 0xdd);
        self.sim.release();
        self.region.read_at(0, &mut bytes).expect("inside");
        assert!(bytes.iter().all(|byte| *byte == 0xdd), "memory changed after its request was over");
        let contents = self.sim.contents(1, false);
        if results[1].is_ok() {
            self.model[SLOT..2 * SLOT].fill(byte);
            assert!(contents[..2 * SLOT] == self.model[..2 * SLOT], "what was written is there");
        }
        assert_eq!((self.sim.dma_faults(), self.sim.unmapped_in_flight()), (vec![], 0));
        results
    }

    /// It goes on as if nothing had been.
    fn succeeds(mut self, faults: &[Fault]) {
        let hits = self.sim.hits();
        faults.iter().for_each(|fault| self.sim.inject(fault.clone()));
        for result in self.exercise(2) {
            result.unwrap_or_else(|error| panic!("{faults:?}: {error}"));
        }
        assert!(self.sim.hits() > hits, "{faults:?} hit nothing");
        self.sim.clear_faults();
        for result in self.exercise(3) {
            result.unwrap_or_else(|error| panic!("after {faults:?}: {error}"));
        }
    }

    /// Everything ends with errors, of this kind, and does so at once from then on.
    fn ends(mut self, faults: &[Fault], expected: fn(&Error) -> bool) {
        faults.iter().for_each(|fault| self.sim.inject(fault.clone()));
        let results = self.exercise(2);
        assert!(results.iter().any(Result::is_err), "{faults:?}");
        for error in results.into_iter().filter_map(Result::err) {
            assert!(expected(&error), "{faults:?}: {error:?}");
        }
        let started = Instant::now();
        for result in self.exercise(3) {
            let error = result.expect_err("the device is given up");
            assert!(expected(&error), "{faults:?}: {error:?}");
        }
        assert!(started.elapsed() < PATIENCE / 2, "nothing is waited for any more");
        assert!(self.io.device().open_queue().is_err());
    }
}

fn once(on: On, effect: Effect) -> Fault {
    Fault::new(on, effect).after(1).once()
}

#[test]
fn a_failed_command_fails_its_request_and_no_other() {
    for (kind, code, name, errno) in [(2, 0x81, "Unrecovered Read Error", libc::EIO), (0, 0x80, "LBA Out of Range", libc::ENXIO)]
    {
        let mut bench = Bench::new("mdts=3");
        bench.sim.inject(Fault::new(On::Read, Effect::Status(kind, code)).after(2).once());
        let mut results = bench.exercise(2).into_iter();
        let error = results.next().expect("three").expect_err("a part of the read failed");
        assert!(matches!(&error, Error::Command { op: Op::Read, offset, .. } if *offset < SLOT as u64), "{error:?}");
        assert!(error.to_string().contains(name) && error.errno() == errno, "{error}");
        results.for_each(|result| result.expect("the others are well"));
        bench.exercise(3).into_iter().for_each(|result| result.expect("and it was once"));
    }
}

#[test]
fn what_may_well_succeed_is_tried_again() {
    for status in [(0, 0x22), (0, 0x21), (0, 0x07)] {
        Bench::new("mdts=3").succeeds(&[Fault::new(On::Write, Effect::Status(status.0, status.1)).times(2)]);
    }
    let mut bench = Bench::new("");
    bench.sim.inject(Fault::new(On::Write, Effect::Status(0, 0x22)));
    let error = bench.exercise(2).remove(1).expect_err("but not for ever");
    assert!(matches!(error, Error::Command { .. }), "{error:?}");
}

#[test]
fn commands_that_do_not_come_back_are_aborted_or_sent_again_after_a_reset() {
    for on in [On::Read, On::Write, On::Flush] {
        for effect in [Effect::Hold, Effect::Lose, Effect::LoseCompletion, Effect::Delay(Duration::from_secs(5))] {
            let first = Fault::new(on, effect).once();
            Bench::new("mdts=4").succeeds(std::slice::from_ref(&first));
            if on == On::Read {
                Bench::new("mdts=4").succeeds(&[first.clone(), Fault::new(On::Abort, Effect::Lose).once()]);
                Bench::new("mdts=4").succeeds(&[first, Fault::new(On::Abort, Effect::Status(0, 6))]);
            }
        }
    }
}

#[test]
fn a_controller_that_loses_everything_is_given_up() {
    for on in [On::Io, On::Read] {
        let mut bench = Bench::new("");
        bench.sim.inject(Fault::new(on, Effect::Lose));
        let error = bench.exercise(2).remove(0).expect_err("it never comes");
        assert!(matches!(error, Error::TimedOut { .. } | Error::Controller { .. }), "{error:?}");
        assert_eq!(error.errno(), libc::EIO);
    }
}

#[test]
fn completions_that_lie_are_survived() {
    for effect in [Effect::Duplicate, Effect::Bogus, Effect::Reorder] {
        Bench::new("mdts=1").succeeds(&[Fault::new(On::Io, effect).one_in(3)]);
        Bench::new("mdts=1,inline=on").succeeds(&[Fault::new(On::Io, effect)]);
    }
    Bench::new("mdts=2").succeeds(&[Fault::new(On::Admin, Effect::Bogus), once(On::Write, Effect::Lose)]);
}

#[test]
fn slow_commands_are_waited_for() {
    let delay = Effect::Delay(Duration::from_millis(30));
    Bench::with_driver("mdts=3", "depth=4,timeout=5s").succeeds(&[Fault::new(On::Io, delay)]);
    Bench::with_driver("", "completion=poll,timeout=5s").succeeds(&[Fault::new(On::Io, delay).one_in(2)]);
}

#[test]
fn a_fatal_status_is_recovered_from_and_one_that_stays_is_the_end() {
    for on in [On::Read, On::Write, On::Flush] {
        Bench::new("mdts=4").succeeds(&[Fault::new(on, Effect::Fatal).once()]);
    }
    let broken = |error: &Error| matches!(error, Error::Controller { .. } | Error::TimedOut { .. });
    let fatal = Fault::new(On::Read, Effect::Fatal).once();
    Bench::new("").ends(&[fatal.clone(), Fault::new(On::Enable, Effect::Fatal)], broken);
    Bench::new("").ends(&[fatal.clone(), Fault::new(On::Enable, Effect::Lose)], broken);
    let refused = |error: &Error| matches!(error, Error::Controller { .. } | Error::Admin { .. });
    Bench::new("").ends(&[fatal.clone(), Fault::new(On::CreateQueue, Effect::Status(1, 1))], refused);
    Bench::new("").ends(&[fatal, Fault::new(On::SetFeatures, Effect::Lose)], refused);
}

/// No command is late within the patience of these tests, so what is found is found by looking.
const PATIENT: &str = "timeout=600s,depth=16";

#[test]
fn a_controller_that_something_else_reset_is_brought_up_again() {
    for on in [On::Read, On::Write, On::Flush] {
        Bench::with_driver("mdts=4", PATIENT).succeeds(&[Fault::new(on, Effect::Reset).once()]);
    }
}

#[test]
fn an_error_of_the_bus_is_recovered_from_whether_commands_are_in_flight_or_not() {
    let mut bench = Bench::with_driver("mdts=4", PATIENT);
    bench.sim.reset_function();
    bench.sim.report_bus_error();
    bench.exercise(2).into_iter().for_each(|result| result.expect("after an error while it was idle"));
    bench.sim.inject(Fault::new(On::Read, Effect::Hold).once());
    std::thread::scope(|scope| {
        let sim = bench.sim.clone();
        scope.spawn(move || {
            while sim.stalled() == 0 {
                std::thread::sleep(Duration::from_millis(1));
            }
            sim.reset_function();
            sim.report_bus_error();
        });
        bench.exercise(3).into_iter().for_each(|result| result.expect("after an error in mid-flight"));
    });
}

#[test]
fn a_controller_that_an_error_of_the_bus_takes_away_for_a_moment_is_waited_for() {
    let mut bench = Bench::with_driver("vwc=off", PATIENT);
    // The supervisor does not look any more: it does for a tick behind the last command.
    std::thread::sleep(Duration::from_millis(1200));
    let sim = bench.sim.clone();
    sim.power_cut();
    sim.report_bus_error();
    let back = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(300));
        sim.power_on();
    });
    bench.exercise(2).into_iter().for_each(|result| result.expect("it is back"));
    back.join().expect("power is on");
}

/// The link is down at once, and the host tells of it later. Meanwhile the supervisor looks.
#[test]
fn an_error_of_the_bus_that_is_told_late_is_waited_for_while_commands_are_in_flight() {
    let mut bench = Bench::with_driver("vwc=off", PATIENT);
    let sim = bench.sim.clone();
    sim.power_cut();
    let back = std::thread::spawn(move || {
        // It looks several times, for there are commands in flight.
        std::thread::sleep(Duration::from_millis(800));
        sim.report_bus_error();
        std::thread::sleep(Duration::from_millis(300));
        sim.power_on();
    });
    bench.exercise(2).into_iter().for_each(|result| result.expect("it is back"));
    back.join().expect("power is on");
}

#[test]
fn a_controller_that_does_not_stop_is_reset_from_outside() {
    let lost = once(On::Read, Effect::Lose);
    Bench::new("mdts=4").succeeds(&[lost, Fault::new(On::Disable, Effect::Lose).once()]);
}

#[test]
fn a_controller_that_vanishes_ends_everything() {
    let gone = |error: &Error| matches!(error, Error::Gone { .. });
    for (on, options) in [(On::Read, ""), (On::Flush, "inline=on"), (On::Write, "mdts=2")] {
        Bench::new(options).ends(&[Fault::new(on, Effect::Vanish).once()], gone);
    }
    let lost = once(On::Read, Effect::Lose);
    Bench::new("mdts=4").ends(&[lost.clone(), Fault::new(On::Disable, Effect::Vanish)], gone);
    Bench::new("mdts=4").ends(&[lost, Fault::new(On::Enable, Effect::Vanish)], gone);
}

#[test]
fn a_host_that_asks_for_the_device_gets_it() {
    let mut bench = Bench::new("");
    bench.sim.request_release();
    let deadline = Instant::now() + PATIENCE;
    while !bench.exercise(2).iter().all(|result| matches!(result, Err(Error::Gone { .. }))) {
        assert!(Instant::now() < deadline, "it goes on");
    }
}

#[test]
fn events_disturb_nothing() {
    let mut bench = Bench::new("");
    for kelvins in [400, 300, 410] {
        bench.sim.set_temperature(kelvins);
        bench.exercise(kelvins as u8).into_iter().for_each(|result| result.expect("it goes on"));
    }
}

#[test]
fn a_controller_that_does_not_come_up_says_how() {
    let quick = |fault: &str| {
        let sim = SimController::new(&format!("sim:test,memory=4M,fault={fault}"), OpenMode::ReadWrite).expect("a controller");
        let device = sim.attach("timeout=100ms");
        let error = device.and_then(|device| device.open_queue().map(drop)).expect_err(fault);
        assert_eq!((sim.dma_faults(), sim.mapped()), (vec![], 0), "{fault}");
        error
    };
    for fault in ["lose:on=enable", "fatal:on=enable", "lose:on=identify", "fatal:on=admin", "lose:on=create"] {
        let error = quick(fault);
        assert!(matches!(error, Error::Controller { .. }), "{fault}: {error:?}");
    }
    for fault in ["status=0x6:on=identify", "status=0x2:on=set-features:times=1", "status=0x101:on=create"] {
        let error = quick(fault);
        assert!(matches!(error, Error::Admin { .. }), "{fault}: {error:?}");
    }
    for fault in ["vanish:on=enable", "vanish:on=identify"] {
        let error = quick(fault);
        assert!(matches!(error, Error::Gone { .. }), "{fault}: {error:?}");
    }
}

#[test]
fn closing_ends_whatever_the_controller_does() {
    for fault in [
        Fault::new(On::Shutdown, Effect::Lose),
        Fault::new(On::Disable, Effect::Lose),
        Fault::new(On::Admin, Effect::Lose),
        Fault::new(On::Admin, Effect::Fatal),
        Fault::new(On::Admin, Effect::Vanish),
    ] {
        let Bench { sim, io, region, .. } = Bench::with_driver("", "timeout=50ms");
        sim.inject(fault.clone());
        let device = io.device().clone();
        drop(io);
        device.unmap(&region);
        let started = Instant::now();
        drop(device);
        assert!(started.elapsed() < PATIENCE, "{fault:?}");
        assert_eq!((sim.dma_faults(), sim.mapped()), (vec![], 0), "{fault:?}");
    }
}

#[test]
fn a_shutdown_that_never_ends_is_not_waited_for_as_long_as_the_controller_says() {
    // It says 71 minutes.
    let sim = SimController::new("sim:test,memory=1M,rtd3e=4294967295,fault=lose:on=shutdown", OpenMode::ReadWrite);
    let device = sim.expect("a controller").attach("timeout=50ms").expect("the driver comes up");
    let (closed, closes) = mpsc::channel();
    std::thread::spawn(move || {
        drop(device);
        closed.send(()).expect("the test listens");
    });
    closes.recv_timeout(PATIENCE).expect("it is closed");
}

#[test]
fn closing_a_device_that_is_gone_waits_for_nothing() {
    for effect in [Effect::Vanish, Effect::Fatal] {
        let Bench { sim, io, region, .. } = Bench::with_driver("", "timeout=120s");
        sim.inject(Fault::new(On::Admin, effect));
        let device = io.device().clone();
        let started = Instant::now();
        drop(io);
        device.unmap(&region);
        drop(device);
        assert!(started.elapsed() < PATIENCE, "{effect:?}");
        assert_eq!((sim.dma_faults(), sim.mapped()), (vec![], 0), "{effect:?}");
    }
}

/// Numbers from a seed.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) % bound
    }

    fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len() as u64) as usize]
    }
}

/// One run of the campaign: a random controller, random faults, random requests.
fn campaign(seed: u64) {
    let mut random = Random(seed);
    let options = [
        random.pick(&["lba=512", "lba=4096"]),
        random.pick(&["mdts=1", "mdts=3", "mdts=7", "mdts=0"]),
        random.pick(&["sgls=none", "sgls=dword", "sgls=byte"]),
        random.pick(&["dbbuf=on", "dbbuf=off"]),
        random.pick(&["inline=on", "inline=off"]),
        random.pick(&["entries=4", "entries=1024"]),
        random.pick(&["vectors=0", "vectors=1", "vectors=9"]),
    ];
    let driver = ["depth=2,", "depth=64,", "completion=poll,", "sgl=off,"];
    let driver = format!("{}timeout=50ms", random.pick(&driver));
    let mut bench = Bench::with_driver(&format!("seed={seed},{}", options.join(",")), &driver);
    let effects = [
        Effect::Status(2, 0x81),
        Effect::Status(0, 0x22),
        Effect::Delay(Duration::from_millis(1 + random.below(80))),
        Effect::Hold,
        Effect::Reset,
        Effect::Lose,
        Effect::LoseCompletion,
        Effect::Reorder,
        Effect::Duplicate,
        Effect::Bogus,
        Effect::Fatal,
        Effect::Vanish,
    ];
    let faults: Vec<Fault> = (0..1 + random.below(3))
        .map(|_| {
            let on = random.pick(&[On::Io, On::Read, On::Write, On::Flush, On::Admin, On::Abort, On::Enable, On::Disable]);
            let fault = Fault::new(on, random.pick(&effects)).after(random.below(10));
            if random.below(3) == 0 { fault.one_in(1 + random.below(30)) } else { fault.times(1 + random.below(3)) }
        })
        .collect();
    let said = format!("seed {seed}: {options:?} {driver} {faults:?}");
    faults.into_iter().for_each(|fault| bench.sim.inject(fault));
    let block = bench.io.device().geometry().logical_block as usize;
    // Slots that a failed write left as something in between.
    let mut unknown = [false; SLOTS];
    for round in 0..6u8 {
        let byte = round.wrapping_mul(16).wrapping_add(16 + seed as u8 % 16);
        let len = |random: &mut Random| block * (1 + random.below((SLOT / block) as u64) as usize);
        let plans: Vec<(bool, usize)> = (0..SLOTS).map(|_| (random.below(2) == 0, len(&mut random))).collect();
        let mut requests: Vec<Request> = Vec::new();
        for (slot, (write, len)) in plans.iter().enumerate() {
            bench.region.write_at(slot * SLOT, &vec![if *write { byte } else { 0xee }; SLOT]).expect("inside");
            requests.push(if *write { bench.write(slot, *len) } else { bench.read(slot, *len) });
        }
        requests.push(Request::flush());
        let results = bench.run(requests);
        for (slot, (write, len)) in plans.into_iter().enumerate() {
            let range = slot * SLOT..slot * SLOT + len;
            if write {
                unknown[slot] |= results[slot].is_err();
                bench.model[range].fill(byte);
            } else if results[slot].is_ok() && !unknown[slot] {
                let mut bytes = vec![0; len];
                bench.region.read_at(range.start, &mut bytes).expect("inside");
                assert!(bytes == bench.model[range], "{said}: slot {slot} was read wrong");
            }
        }
        bench.region.write_at(0, &vec![0xdd; SLOTS * SLOT]).expect("inside");
        bench.sim.release();
        let mut bytes = vec![0; SLOTS * SLOT];
        bench.region.read_at(0, &mut bytes).expect("inside");
        assert!(bytes.iter().all(|byte| *byte == 0xdd), "{said}: memory changed after its request was over");
        assert_eq!(bench.sim.dma_faults(), [], "{said}");
    }
    let Bench { sim, io, region, model } = bench;
    let device: Arc<dyn BlockDevice> = io.device().clone();
    drop(io);
    device.unmap(&region);
    drop(device);
    assert_eq!((sim.dma_faults(), sim.mapped()), (vec![], 0), "{said}");
    let contents = sim.contents(1, false);
    for slot in (0..SLOTS).filter(|slot| !unknown[*slot]) {
        let range = slot * SLOT..(slot + 1) * SLOT;
        assert!(contents[range.clone()] == model[range], "{said}: slot {slot} is wrong in the end");
    }
}

#[test]
fn whatever_goes_wrong_every_request_ends_and_nothing_is_corrupted() {
    let number = |name: &str, otherwise: u64| std::env::var(name).map_or(otherwise, |value| value.parse().expect("a number"));
    let started = Instant::now();
    let budget = Duration::from_secs(number("NVME_SECONDS", 2));
    let mut seed = number("NVME_SEED", 1);
    while started.elapsed() < budget {
        campaign(seed);
        seed += 1;
    }
    println!("{} runs", seed - number("NVME_SEED", 1));
}
