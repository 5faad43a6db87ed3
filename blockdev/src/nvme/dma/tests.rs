//! Mapping over a transport that a test can hold up, and whose calls it sees. What is mapped goes
//! to a software controller.
use std::ops::RangeInclusive;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::mpsc;
use std::time::Duration;

use rustix::fs::{MemfdFlags, SealFlags};

use super::*;
use crate::sim::SimController;
use crate::transport::event::Event;
use crate::{NoPeerToPeer, OpenMode};

const MIB: usize = 1 << 20;
/// How long a test waits for what has to happen.
const PATIENCE: Duration = Duration::from_secs(20);
/// The large region of these tests: two steps and a part.
const LARGE: usize = 2 * HOST_STEP as usize + 12 * MIB;

/// A transport whose calls to map wait for a permit, for regions of more than a MiB.
struct Held {
    sim: Arc<SimController>,
    /// Each permit lets one large mapping begin; a closed channel lets all.
    permits: Mutex<mpsc::Receiver<()>>,
    /// Told of each large mapping that asks.
    asks: Mutex<mpsc::Sender<u64>>,
    lens: Mutex<Vec<usize>>,
    failing: AtomicBool,
    /// Whether nothing can be unmapped.
    stuck: AtomicBool,
}

struct Bench {
    dma: Arc<Dma>,
    held: Arc<Held>,
    permit: mpsc::Sender<()>,
    asked: mpsc::Receiver<u64>,
}

fn bench() -> Bench {
    let sim = SimController::new("sim:test,memory=1M", OpenMode::ReadWrite).unwrap();
    let (permit, permits) = mpsc::channel();
    let (asks, asked) = mpsc::channel();
    let held = Arc::new(Held {
        sim,
        permits: Mutex::new(permits),
        asks: Mutex::new(asks),
        lens: Mutex::default(),
        failing: AtomicBool::new(false),
        stuck: AtomicBool::new(false),
    });
    Bench { dma: Dma::new(held.clone(), 4096), held, permit, asked }
}

/// Memory that is never touched, so that its size costs nothing.
fn region(len: usize) -> Arc<Region> {
    let fd: OwnedFd = rustix::fs::memfd_create("test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    rustix::fs::ftruncate(&fd, len as u64).unwrap();
    rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK).unwrap();
    Region::from_fd(fd, len, true).unwrap()
}

#[test]
fn a_large_region_is_mapped_in_steps_and_unmapped_whole() {
    let Bench { dma, held, permit, .. } = bench();
    drop(permit);
    let large = region(LARGE);
    dma.map(&large).unwrap();
    dma.map(&large).unwrap(); // is mapped already
    assert_eq!(*held.lens.lock(), [HOST_STEP as usize, HOST_STEP as usize, 12 * MIB]);
    assert_eq!(held.sim.mapped(), 3);
    let iova = dma.address(&large).unwrap();
    assert!(iova.is_multiple_of(2 << 20), "aligned for the IOMMU's large pages");
    dma.unmap(&large).unwrap();
    assert_eq!((held.sim.mapped(), dma.address(&large)), (0, None));
    let again = region(LARGE);
    dma.map(&again).unwrap();
    assert_eq!(dma.address(&again), Some(iova), "its IOVAs are free again");
}

#[test]
fn while_a_large_region_is_mapped_others_are_mapped_and_unmapped() {
    let Bench { dma, held, permit, asked } = bench();
    let large = region(LARGE);
    std::thread::scope(|scope| {
        let mapping = scope.spawn(|| dma.map(&large));
        asked.recv_timeout(PATIENCE).unwrap();
        // On a thread of its own, so that a hang is a failure.
        let (done, finished) = mpsc::channel();
        let (dma, held) = (&dma, &held);
        scope.spawn(move || {
            let small = region(MIB);
            dma.map(&small).unwrap();
            let memory = dma.allocate(4096).unwrap();
            assert_eq!(held.sim.mapped(), 2);
            dma.unmap(&small).unwrap();
            drop(memory);
            done.send(()).unwrap();
        });
        let finished = finished.recv_timeout(PATIENCE);
        drop(permit);
        mapping.join().unwrap().unwrap();
        finished.expect("a large mapping holds up no small one");
    });
    assert_eq!(held.sim.mapped(), 3);
}

#[test]
fn two_threads_that_map_a_region_map_it_once() {
    let Bench { dma, held, permit, asked } = bench();
    let large = region(LARGE);
    std::thread::scope(|scope| {
        let threads = [(); 2].map(|()| scope.spawn(|| dma.map(&large)));
        asked.recv_timeout(PATIENCE).unwrap();
        drop(permit);
        threads.into_iter().for_each(|thread| thread.join().unwrap().unwrap());
    });
    assert_eq!(held.sim.mapped(), 3);
}

#[test]
fn a_fence_ends_a_mapping_that_is_in_flight() {
    let Bench { dma, held, permit, asked } = bench();
    let (large, small) = (region(LARGE), region(MIB));
    dma.map(&small).unwrap();
    std::thread::scope(|scope| {
        let mapping = scope.spawn(|| dma.map(&large));
        asked.recv_timeout(PATIENCE).unwrap();
        let fence = scope.spawn(|| dma.fence());
        while !dma.fenced.load(Ordering::Acquire) {
            std::thread::yield_now();
        }
        permit.send(()).unwrap(); // for the step in flight: there is no second
        assert!(matches!(mapping.join().unwrap(), Err(Error::Gone { .. })));
        fence.join().unwrap().unwrap();
    });
    assert_eq!(held.sim.mapped(), 0, "the controller reaches nothing");
    dma.unmap(&small).unwrap(); // is not mapped any more, which is no error
}

#[test]
fn what_cannot_be_mapped_whole_is_not_mapped_at_all() {
    let Bench { dma, held, permit, asked } = bench();
    let large = region(LARGE);
    std::thread::scope(|scope| {
        let mapping = scope.spawn(|| dma.map(&large));
        asked.recv_timeout(PATIENCE).unwrap();
        permit.send(()).unwrap();
        asked.recv_timeout(PATIENCE).unwrap();
        held.failing.store(true, Ordering::Release);
        drop(permit);
        assert!(mapping.join().unwrap().is_err());
    });
    assert_eq!((held.sim.mapped(), dma.address(&large)), (0, None));
    held.failing.store(false, Ordering::Release);
    dma.map(&large).unwrap();
}

#[test]
fn with_a_controller_page_above_the_hosts_no_memory_behind_a_region_is_mapped() {
    let Bench { held, permit, .. } = bench();
    drop(permit);
    let page = 64 << 10;
    let dma = Dma::new(held.clone(), page);
    let host_page = rustix::param::page_size();
    let regions = [region(MIB + 100), region(MIB + 100)];
    regions.iter().for_each(|region| dma.map(region).unwrap());
    assert_eq!(*held.lens.lock(), [MIB + host_page; 2]);
    let iovas = regions.each_ref().map(|region| dma.address(region).unwrap());
    assert!(iovas.iter().all(|iova| iova.is_multiple_of(page)));
    assert!(iovas[1] >= iovas[0] + MIB as u64 + page, "no two share a page of the controller");
    regions.iter().for_each(|region| dma.unmap(region).unwrap());
    assert_eq!(held.sim.mapped(), 0);
    dma.map(&regions[1]).unwrap();
    assert_eq!(dma.address(&regions[1]), Some(iovas[0]), "its IOVAs are free again");
}

#[test]
fn memory_of_a_device_that_cannot_be_unmapped_is_never_given_back() {
    let Bench { dma, held, .. } = bench();
    let memory = || rustix::fs::memfd_create("test", MemfdFlags::CLOEXEC).unwrap();
    let of_device = || {
        let fd = memory();
        rustix::fs::ftruncate(&fd, MIB as u64).unwrap();
        Region::of_device(fd, MIB).unwrap()
    };
    let (kept, given_back) = (of_device(), of_device());
    let handles = [&kept, &given_back].map(Arc::downgrade);
    dma.map(&kept).unwrap();
    dma.map(&given_back).unwrap();
    dma.unmap(&given_back).unwrap();
    held.stuck.store(true, Ordering::Release);
    dma.unmap(&kept).unwrap_err();
    drop((kept, given_back, dma));
    assert_eq!(handles.map(|handle| handle.upgrade().is_some()), [true, false]);
}

impl Transport for Held {
    #[allow(unsafe_code)] // the trait's promise is passed on
    unsafe fn map(&self, address: *mut u8, len: usize, iova: u64, writable: bool) -> Result<()> {
        if len > MIB {
            self.asks.lock().send(iova).ok();
            self.permits.lock().recv().ok();
            self.lens.lock().push(len);
            if self.failing.load(Ordering::Acquire) {
                return Err(Error::Gone { device: "test".into() });
            }
        }
        // SAFETY: as the caller promised.
        unsafe { self.sim.map(address, len, iova, writable) }
    }

    fn unmap(&self, iova: u64, len: usize) -> Result<()> {
        if self.stuck.load(Ordering::Acquire) {
            return Err(Error::Gone { device: "test".into() });
        }
        self.sim.unmap(iova, len)
    }

    fn name(&self) -> &str {
        self.sim.name()
    }

    fn registers_len(&self) -> usize {
        self.sim.registers_len()
    }

    fn read32(&self, offset: usize) -> u32 {
        self.sim.read32(offset)
    }

    fn write32(&self, offset: usize, value: u32) {
        self.sim.write32(offset, value);
    }

    fn read64(&self, offset: usize) -> u64 {
        self.sim.read64(offset)
    }

    fn write64(&self, offset: usize, value: u64) {
        self.sim.write64(offset, value);
    }

    fn iova_ranges(&self) -> Vec<RangeInclusive<u64>> {
        self.sim.iova_ranges()
    }

    fn peer_to_peer(&self) -> std::result::Result<(), NoPeerToPeer> {
        self.sim.peer_to_peer()
    }

    fn max_interrupts(&self) -> u32 {
        self.sim.max_interrupts()
    }

    fn set_interrupts(&self, events: &[BorrowedFd<'_>]) -> Result<()> {
        self.sim.set_interrupts(events)
    }

    fn release_requested(&self) -> Option<BorrowedFd<'_>> {
        self.sim.release_requested()
    }

    fn bus_error(&self) -> Option<&Event> {
        self.sim.bus_error()
    }

    fn reset(&self) -> Result<()> {
        self.sim.reset()
    }
}
