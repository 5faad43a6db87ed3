//! Device memory on the software controller, whose IOMMU tells what is mapped and what was touched
//! without being so. The memory is a memfd's: that only devices' memory gets so far is tried where
//! there is some, in the laboratory.

use super::*;
use crate::outcome::Outcome;
use crate::planner::{self, Alignment, Extent};
use crate::transfer;
use gpunvme_abi::{Direction, Segment};
use gpunvme_blockdev::sim::{Effect, Fault, On, SimController};
use gpunvme_blockdev::{BufferPool, Error, Io, OpenMode, Request};
use std::convert::Infallible;
use std::ops::Range;
use std::process::Child;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

const LEN: usize = 1 << 20;

/// A process of root's.
fn client(id: u32) -> Client {
    Client { process: Process::open(id).unwrap(), user: 0 }
}

fn by(thread: u32) -> Caller {
    Caller { thread, user: 0 }
}

struct Bench {
    controller: Arc<SimController>,
    io: Arc<Io>,
    pool: Arc<BufferPool>,
    registry: Registry,
    memory: OwnedFd,
}

impl Bench {
    fn new() -> Bench {
        let controller = SimController::new("sim:,memory=16M", OpenMode::ReadWrite).unwrap();
        let device = controller.attach("").unwrap();
        let memory = rustix::fs::memfd_create("test", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&memory, LEN as u64).unwrap();
        Bench {
            controller,
            io: Io::threaded(device.clone(), 1).unwrap(),
            pool: BufferPool::new(device.clone(), 4 << 20),
            registry: Registry::new(device, Limits::default()).unwrap(),
            memory,
        }
    }

    fn register(&self, owner: u32) -> Arc<Buffer> {
        let region = Region::of_device(self.memory.try_clone().unwrap(), LEN).unwrap();
        self.registry.enter(client(owner), region, Route::P2p).unwrap()
    }

    fn memory(&self) -> Vec<u8> {
        let mut bytes = vec![0; LEN];
        assert_eq!(rustix::io::pread(&self.memory, &mut bytes, 0).unwrap(), LEN);
        bytes
    }

    /// Writes to the device, past everything that is tested.
    fn fill(&self, data: &[u8]) {
        let region = Region::allocate(data.len()).unwrap();
        region.write_at(0, data).unwrap();
        self.io.run(vec![Request::write(0, vec![region.span(0..data.len())], false)]).unwrap();
    }

    /// Begins to read segments of a file that lies on the device as it is, but for a hole.
    fn read(&self, buffer: &Arc<Buffer>, segments: &[Segment]) -> (Outcome, Receiver<Result<(), transfer::Failed>>) {
        let alignment = Alignment::for_reads(self.io.device().geometry());
        let plan = planner::plan(Direction::Read, segments, 1 << 30, &buffer.region, alignment, around_a_hole).unwrap();
        let done = Outcome::done(buffer, &plan);
        let (sender, receiver) = channel();
        transfer::read(&self.io, &self.pool, alignment, plan, buffer.clone(), move |result| sender.send(result).unwrap());
        (done, receiver)
    }
}

const HOLE: Range<u64> = 256 << 10..260 << 10;

fn around_a_hole(_: Range<u64>, extents: &mut planner::Extents) -> Result<(), Infallible> {
    let extent = |file: Range<u64>| Extent {
        file_offset: file.start,
        device_offset: file.start,
        len: file.end - file.start,
        written: true,
    };
    extents.extend([extent(0..HOLE.start), extent(HOLE.end..16 << 20)]);
    Ok(())
}

fn pattern() -> Vec<u8> {
    (0..LEN as u32).map(|at| (at.wrapping_mul(2_654_435_761) >> 24) as u8).collect()
}

fn wait_for(what: &str, condition: impl Fn() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < Duration::from_secs(10), "waited 10 s for {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A process that owns buffers and does nothing else.
struct Owner(Child);

impl Owner {
    fn start() -> Owner {
        Owner(std::process::Command::new("sleep").arg("1000").spawn().unwrap())
    }

    fn end(&mut self) {
        let _ = self.0.kill(); // it may have ended before
        let _ = self.0.wait();
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        self.end();
    }
}

/// A process ends while its buffer is mapped, and its id becomes another's, which has buffers.
#[test]
fn a_buffer_of_a_process_that_ended_is_not_given_to_the_next_with_its_id() {
    let bench = Bench::new();
    let owner = Owner::start();
    let buffer = bench.register(owner.0.id());
    let Client { process, user } = client(owner.0.id());
    let region = Region::of_device(bench.memory.try_clone().unwrap(), LEN).unwrap();
    let late = bench.registry.enter(Client { process: process.another(1), user }, region, Route::P2p);
    assert_eq!(late.err().map(|error| error.errno()), Some(libc::ESRCH));
    assert_eq!(bench.registry.usage(), Usage { buffers: 1, bytes: LEN as u64, processes: 1 });
    assert!(!buffer.is_revoked());
}

#[test]
fn aligned_middles_go_direct_and_the_rest_is_copied() {
    let bench = Bench::new();
    let mut expected = pattern();
    bench.fill(&expected);
    let buffer = bench.register(std::process::id());
    assert_eq!((buffer.route, buffer.reason), (Route::P2p, Reason::None));
    // Its place in the memory is aligned as the commands of the driver need it, and no better.
    let (outcome, done) = bench.read(&buffer, &[Segment { file_offset: 100, buffer_offset: 1000, len: 500_000 }]);
    done.recv().unwrap().unwrap();
    let hole = HOLE.end - HOLE.start;
    assert_eq!((outcome.moved.hole, outcome.moved.edge), (hole, (512 - 100) + (500_100 % 512)));
    assert_eq!((outcome.moved.p2p, outcome.moved.total()), (500_000 - hole - outcome.moved.edge, 500_000));
    expected[HOLE.start as usize..HOLE.end as usize].fill(0);
    let memory = bench.memory();
    assert!(memory[1000..501_000] == expected[100..500_100]);
    assert!(memory[..1000].iter().chain(&memory[501_000..]).all(|byte| *byte == 0), "nothing beside it was touched");

    let alignment = Alignment::for_writes(4096, bench.io.device().geometry());
    let segment = Segment { file_offset: 8 << 20, buffer_offset: 4096, len: 65536 };
    let plan = planner::plan(Direction::Write, &[segment], 0, &buffer.region, alignment, around_a_hole).unwrap();
    assert_eq!(Outcome::done(&buffer, &plan).moved.p2p, 65536);
    bench.io.run(plan.requests).unwrap();
    assert!(bench.controller.contents(1, false)[8 << 20..][..65536] == memory[4096..4096 + 65536]);
    assert_eq!(bench.controller.dma_faults(), []);
}

#[test]
fn registering_costs_nothing_for_each_transfer() {
    let bench = Bench::new();
    bench.fill(&pattern());
    let buffer = bench.register(std::process::id());
    let mapped = bench.controller.mapped();
    for _ in 0..3 {
        let (_, done) = bench.read(&buffer, &[Segment { file_offset: 0, buffer_offset: 0, len: HOLE.start }]);
        done.recv().unwrap().unwrap();
        assert_eq!(bench.controller.mapped(), mapped);
    }
}

/// However a buffer goes, its memory stays within reach of the device until the transfers on it
/// are over, and no longer.
#[test]
fn memory_stays_mapped_while_transfers_are_in_flight() {
    for owner_dies in [false, true] {
        let bench = Bench::new();
        bench.fill(&pattern());
        let mut owner = Owner::start();
        let free = bench.controller.mapped();
        let buffer = bench.register(owner.0.id());
        assert_eq!(bench.controller.mapped(), free + 1);
        bench.controller.inject(Fault::new(On::Read, Effect::Hold));
        let (_, done) = bench.read(&buffer, &[Segment { file_offset: 0, buffer_offset: 4096, len: HOLE.start }]);
        wait_for("the command to arrive", || bench.controller.stalled() > 0);
        if owner_dies {
            owner.end();
            wait_for("the watcher to see it", || bench.registry.usage().buffers == 0);
        } else {
            bench.registry.unregister(owner.0.id(), buffer.id).unwrap();
        }
        drop(buffer);
        assert_eq!(bench.controller.mapped(), free + 1, "it is in use");
        bench.controller.clear_faults();
        bench.controller.release();
        done.recv().unwrap().unwrap();
        assert!(bench.memory()[4096..][..HOLE.start as usize] == pattern()[..HOLE.start as usize]);
        wait_for("it to be unmapped", || bench.controller.mapped() == free);
        assert_eq!((bench.controller.unmapped_in_flight(), bench.controller.dma_faults()), (0, vec![]));
    }
}

#[test]
fn a_controllers_error_names_the_segment() {
    let bench = Bench::new();
    bench.fill(&pattern());
    let buffer = bench.register(std::process::id());
    let segment = |number: u64| Segment { file_offset: number * 65536, buffer_offset: number * 65536, len: 4096 };
    bench.controller.inject(Fault::new(On::Read, Effect::Status(2, 0x81)).within(2 * 128..=2 * 128));
    let (_, done) = bench.read(&buffer, &[segment(0), segment(1), segment(2), segment(3)]);
    let failed = done.recv().unwrap().unwrap_err();
    assert!(matches!(failed.error, Error::Command { .. }), "{failed}");
    assert_eq!(Outcome::from(failed), Outcome::failed(libc::EIO, Some(2)));
}

#[test]
fn host_memory_was_paid_for_and_is_limited() {
    let bench = Bench::new();
    let Limits { process, all } = Limits::default();
    let limits = Limits { process: Amounts { host_bytes: 2 * LEN as u64, ..process }, all };
    let registry = Registry::new(bench.io.device().clone(), limits).unwrap();
    let me = std::process::id();
    let flags = rustix::fs::MemfdFlags::CLOEXEC | rustix::fs::MemfdFlags::ALLOW_SEALING;
    let memory = rustix::fs::memfd_create("test", flags).unwrap();
    rustix::fs::ftruncate(&memory, LEN as u64).unwrap();
    rustix::fs::fcntl_add_seals(&memory, rustix::fs::SealFlags::SHRINK).unwrap();
    let request = Register { fd: std::os::fd::AsRawFd::as_raw_fd(&memory), len: LEN as u64, ..Register::default() };
    let refused = |reason| move |error: RegistryError| assert_eq!((error.reason(), reason), (reason, reason), "{error}");
    rustix::fs::fallocate(&memory, rustix::fs::FallocateFlags::empty(), 0, LEN as u64 - 4096).unwrap();
    registry.register(by(me), &request).map(drop).map_err(refused(Reason::NotAllocated)).unwrap_err();
    rustix::fs::fallocate(&memory, rustix::fs::FallocateFlags::empty(), 0, LEN as u64).unwrap();
    let first = registry.register(by(me), &request).unwrap().id;
    registry.register(by(me), &request).unwrap();
    registry.register(by(me), &request).map(drop).map_err(refused(Reason::ProcessLimit)).unwrap_err();
    // Device memory costs the machine none of its own.
    let device = Region::of_device(bench.memory.try_clone().unwrap(), LEN).unwrap();
    registry.enter(client(me), device, Route::P2p).unwrap();
    registry.unregister(me, first).unwrap();
    registry.register(by(me), &request).unwrap();
}

/// A process is root's where it asks as root and is root's: each can be had without the other.
#[test]
fn neither_an_inherited_connection_nor_a_program_that_became_root_is_roots() {
    let me = || Process::open(std::process::id()).unwrap();
    let is_roots = rustix::process::geteuid().is_root();
    assert_eq!(Client { process: me(), user: 0 }.is_root(), is_roots);
    assert!(!Client { process: me(), user: 65534 }.is_root());
    let other = std::os::unix::process::CommandExt::uid(&mut std::process::Command::new("sleep"), 65534).arg("1000").spawn();
    // Only root can start a process of another user.
    if let Ok(other) = other {
        let other = Owner(other);
        assert!(!client(other.0.id()).is_root());
    }
}

/// A process that has ended is not taken for one that got its number.
#[test]
fn the_number_of_a_process_is_not_the_process() {
    let bench = Bench::new();
    let mut first = Owner::start();
    let number = first.0.id();
    let (ended, same) = (Process::open(number).unwrap(), Process::open(number).unwrap());
    assert_eq!(ended.identity(), same.identity());
    first.end();
    let next_number = |number: u32| std::fs::write("/proc/sys/kernel/ns_last_pid", (number - 1).to_string());
    let again = (0..200).find_map(|_| {
        next_number(number).ok()?;
        Some(Owner::start()).filter(|owner| owner.0.id() == number)
    });
    // Only root can choose numbers, and others may be faster.
    if let Some(again) = again {
        let buffer = bench.register(again.0.id());
        assert!(bench.registry.lookup_of(&client(number).process, buffer.id).is_ok());
        assert!(bench.registry.lookup_of(&ended, buffer.id).is_err());
    }
}
