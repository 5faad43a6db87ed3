//! Memory for devices: regions of this process, regions of others, and recycled buffers.
use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use gpunvme_blockdev::{BlockDevice, BufferPool, Error, Io, OpenMode, Region, Request, open};
use gpunvme_blockdev_testing::MemoryDevice;
use rustix::fs::MemfdFlags;

fn memfd(len: u64) -> OwnedFd {
    let fd = rustix::fs::memfd_create("region", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).expect("a memfd");
    rustix::fs::ftruncate(&fd, len).expect("its length");
    fd
}

#[test]
fn allocated_memory_is_zeroed_and_copies_stay_inside() {
    for len in [1, 4096, 5000, 3 << 20] {
        let region = Region::allocate(len).expect("memory");
        assert_eq!(region.len(), len);
        let mut bytes = vec![1; len];
        region.read_at(0, &mut bytes).expect("inside");
        assert!(bytes.iter().all(|byte| *byte == 0));
        region.write_at(len - 1, &[5]).expect("inside");
        region.read_at(len - 1, &mut bytes[..1]).expect("inside");
        assert_eq!(bytes[0], 5);
        region.zero_at(0, len).expect("inside");
        region.read_at(len - 1, &mut bytes[..1]).expect("inside");
        assert_eq!(bytes[0], 0);
        assert!(matches!(region.write_at(len, &[1]), Err(Error::RegionRange { .. })));
        assert!(matches!(region.read_at(usize::MAX, &mut [0, 0]), Err(Error::RegionRange { .. })));
        assert!(matches!(region.zero_at(1, len), Err(Error::RegionRange { .. })));
    }
    Region::allocate(0).expect_err("no memory");
    Region::allocate(usize::MAX).expect_err("too much memory");
}

#[test]
fn a_device_and_the_owner_of_a_memfd_see_the_same_bytes() {
    let fd = memfd(8192);
    let region = Region::from_fd(fd.try_clone().expect("a second descriptor"), 8192, true).expect("mapped");
    region.write_at(4096, &[3; 4096]).expect("written");
    let directory = tempfile::tempdir_in("/dev/shm").expect("a temporary directory");
    let path = directory.path().join("image");
    File::create(&path).expect("an image").set_len(8192).expect("its length");
    let io = Io::inline(open(path.to_str().expect("UTF-8"), OpenMode::ReadWrite).expect("open")).expect("io");
    io.run(vec![Request::write(0, vec![region.span(4096..8192)], false)]).expect("written");
    io.run(vec![Request::read(0, vec![region.span(0..4096)])]).expect("read");
    let mut seen = [0; 8192];
    rustix::io::pread(&fd, &mut seen, 0).expect("read");
    assert!(seen == [3; 8192]);
}

#[test]
fn memory_that_its_owner_truncates_is_an_error_and_no_signal() {
    let fd = memfd(8192);
    let region = Region::from_fd(fd.try_clone().expect("a second descriptor"), 8192, true).expect("mapped");
    rustix::fs::ftruncate(&fd, 4096).expect("truncated");
    assert_eq!(region.read_at(4096, &mut [0; 10]), Err(Error::RegionShrunk));
    assert_eq!(region.write_at(4096, &[0; 10]), Err(Error::RegionShrunk));
    assert_eq!(region.zero_at(0, 8192), Err(Error::RegionShrunk));
    region.write_at(4000, &[7; 96]).expect("what is left is there");
    region.read_at(0, &mut [0; 4096]).expect("what is left is there");
    assert_eq!(rustix::fs::fstat(&fd).expect("stat").st_size, 4096, "it was not grown again");
    // The kernel finds it out, too.
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a temporary directory");
    let path = directory.path().join("image");
    File::create(&path).expect("an image").set_len(8192).expect("its length");
    let io = Io::inline(open(path.to_str().expect("UTF-8"), OpenMode::ReadWrite).expect("open")).expect("io");
    let result = io.run(vec![Request::read(0, vec![region.span(4096..8192)])]);
    assert!(matches!(result, Err(Error::Io { errno: libc::EFAULT, .. })), "{result:?}");
}

/// The memory stands in for a device's: it goes away as that would, and only the kernel's copies
/// survive that.
#[test]
fn memory_of_a_device_that_goes_away_is_an_error_and_no_signal() {
    let len = 300 << 10;
    let fd = memfd(len as u64);
    let region = Region::of_device(fd.try_clone().expect("a second descriptor"), len).expect("mapped");
    assert!(region.writable());
    let pattern: Vec<u8> = (0..len - 7).map(|at| (at * 31 % 251) as u8).collect();
    region.write_at(7, &pattern).expect("written");
    let mut seen = vec![0; len];
    rustix::io::pread(&fd, &mut seen, 0).expect("read");
    assert!(seen[..7] == [0; 7] && seen[7..] == pattern, "what was written is in the memory");
    let mut seen = vec![0; len - 1000];
    region.read_at(1000, &mut seen).expect("read");
    assert!(seen == pattern[993..], "what is in the memory was read");
    region.zero_at(100, 200 << 10).expect("zeroed");
    region.read_at(0, &mut seen).expect("read");
    assert!(seen[7..100] == pattern[..93] && seen[100..100 + (200 << 10)].iter().all(|byte| *byte == 0));
    assert!(seen[100 + (200 << 10)..] == pattern[93 + (200 << 10)..seen.len() - 7]);

    rustix::fs::ftruncate(&fd, 64 << 10).expect("gone");
    let gone = |result| matches!(result, Err(Error::Memory { errno: libc::EFAULT, .. }));
    assert!(gone(region.read_at(100 << 10, &mut [0; 10])));
    assert!(gone(region.write_at(100 << 10, &[0; 10])));
    assert!(gone(region.zero_at(0, len)));
    assert!(gone(region.read_at((64 << 10) - 1, &mut [0; 2])), "half there is not there");
    region.read_at(0, &mut [0; 64 << 10]).expect("what is left is there");
}

#[test]
fn memory_that_the_kernel_can_pin_is_no_devices() {
    let region = Region::of_device(memfd(4096), 4096).expect("mapped");
    assert!(region.is_host_memory());
}

#[test]
fn memory_registered_for_reading_is_not_written_to() {
    let fd = memfd(4096);
    let region = Region::from_fd(fd.as_fd().try_clone_to_owned().expect("clone"), 4096, false).expect("mapped");
    assert!(!region.writable());
    assert_eq!(region.write_at(0, &[1]), Err(Error::RegionReadOnly));
    let io = Io::inline(MemoryDevice::new(4096)).expect("io");
    assert_eq!(io.run(vec![Request::read(0, vec![region.span(0..4096)])]), Err(Error::RegionReadOnly));
    io.run(vec![Request::write(0, vec![region.span(0..4096)], false)]).expect("it may be read");
    assert!(matches!(Region::from_fd(fd, 8192, true), Err(Error::RegionRange { .. })), "longer than the file");
}

#[test]
fn buffers_are_lent_as_bytes_only_between_requests() {
    let device = MemoryDevice::new(1 << 20);
    let io = Io::threaded(device.clone(), 1).expect("io");
    let pool = BufferPool::new(device, 1 << 20);
    let mut buffer = pool.get(5000).expect("memory");
    assert_eq!(buffer.len(), 8192);
    buffer.bytes_mut().fill(6);
    io.run(vec![Request::write(4096, vec![buffer.span(0..8192)], false)]).expect("written");
    buffer.bytes_mut().fill(0);
    let span = buffer.span(0..4096);
    assert!(catch_unwind(AssertUnwindSafe(|| buffer.bytes().len())).is_err(), "a span is alive");
    assert!(catch_unwind(AssertUnwindSafe(|| buffer.bytes_mut().len())).is_err(), "a span is alive");
    io.run(vec![Request::read(4096, vec![span])]).expect("read");
    assert!(buffer.bytes()[..4096] == [6; 4096] && buffer.bytes()[4096..] == [0; 4096]);
    assert!(catch_unwind(AssertUnwindSafe(|| buffer.span(8000..8193))).is_err(), "beyond its end");
}

#[test]
fn buffers_are_recycled_up_to_a_limit_and_never_under_a_request() {
    let pool = BufferPool::new(MemoryDevice::new(4096), 8192);
    let address = |buffer: &gpunvme_blockdev::Buffer| buffer.bytes().as_ptr();
    let first = pool.get(1).expect("memory");
    let place = address(&first);
    drop(first);
    assert_eq!(address(&pool.get(4096).expect("memory")), place, "the returned one comes again");

    let mut in_use = pool.get(1).expect("memory");
    let span = in_use.span(0..4096);
    drop(in_use);
    let other = pool.get(1).expect("memory");
    assert_ne!(address(&other), place, "not while a span of it is alive");
    drop(span);
    drop(other); // sweeps up what became free
    let pair = [pool.get(1).expect("memory"), pool.get(1).expect("memory")];
    assert!(pair.iter().any(|buffer| address(buffer) == place), "afterwards it does");
    drop(pair);

    let many: Vec<_> = (0..4).map(|_| pool.get(4096).expect("memory")).collect();
    let places: Vec<_> = many.iter().map(address).collect();
    drop(many);
    // Two of the four fit the limit; the memory of the others went back to the kernel.
    let again: Vec<_> = (0..2).map(|_| pool.get(4096).expect("memory")).collect();
    assert!(again.iter().all(|buffer| places.contains(&address(buffer))));
    let huge = pool.get((4 << 20) + 1).expect("memory");
    assert_eq!(huge.len(), 8 << 20);
    assert_eq!(Arc::strong_count(&pool), 1 + again.len() + 1);
}

#[test]
fn parts_of_one_piece_of_memory_are_regions_of_their_own() {
    let mut parts = Region::allocate_parts(2 << 20, 512 << 10).expect("memory");
    for (number, part) in parts.iter().enumerate() {
        part.write_at(0, &vec![number as u8 + 1; part.len()]).expect("inside");
        assert!(matches!(part.write_at(part.len(), &[0]), Err(Error::RegionRange { .. })), "the next one's");
    }
    // The last one keeps the memory.
    let last = parts.pop().expect("four parts");
    drop(parts);
    let mut bytes = vec![0; last.len()];
    last.read_at(0, &mut bytes).expect("inside");
    assert!(bytes.iter().all(|byte| *byte == 4));
}

#[test]
fn buffers_that_share_huge_pages_lie_in_one_piece() {
    let pool = BufferPool::new(MemoryDevice::new(4096), 2 << 20);
    let mut buffers: Vec<_> = (0..2).map(|_| pool.get(1 << 20).expect("memory")).collect();
    buffers.sort_by_key(|buffer| buffer.bytes().as_ptr());
    let [first, second] = [0, 1].map(|n| buffers[n].bytes().as_ptr() as usize);
    assert_eq!((first % (2 << 20), second - first), (0, 1 << 20));
    for (number, buffer) in buffers.iter_mut().enumerate() {
        buffer.bytes_mut().fill(number as u8);
    }
    assert!(buffers.iter().enumerate().all(|(number, buffer)| buffer.bytes().iter().all(|byte| *byte == number as u8)));
}

#[test]
fn a_pool_maps_its_memory_for_the_device_and_unmaps_it() {
    use std::sync::atomic::{AtomicI64, Ordering};

    use gpunvme_blockdev::{Geometry, Queue, Result};

    /// Counts what is mapped.
    struct Mapping(Arc<MemoryDevice>, AtomicI64);

    impl BlockDevice for Mapping {
        fn name(&self) -> &str {
            self.0.name()
        }
        fn geometry(&self) -> &Geometry {
            self.0.geometry()
        }
        fn open_queue(&self) -> Result<Box<dyn Queue>> {
            self.0.open_queue()
        }
        fn map(&self, region: &Arc<Region>) -> Result<()> {
            self.1.fetch_add(region.len() as i64, Ordering::Relaxed);
            Ok(())
        }
        fn unmap(&self, region: &Region) {
            self.1.fetch_sub(region.len() as i64, Ordering::Relaxed);
        }
    }

    let device = Arc::new(Mapping(MemoryDevice::new(4096), AtomicI64::new(0)));
    let mapped = || device.1.load(Ordering::Relaxed);
    let pool = BufferPool::new(device.clone(), 4096);
    let pair = [pool.get(4096).expect("memory"), pool.get(4096).expect("memory")];
    assert_eq!(mapped(), 8192);
    drop(pair);
    assert_eq!(mapped(), 4096, "one is kept for later");
    drop(pool);
    assert_eq!(mapped(), 0);
}

/// A `write(2)` holds the file's lock while it waits for its source, and a hostile owner's source
/// never comes.
#[test]
fn an_owner_that_keeps_the_lock_of_a_memfd_stops_no_copy() {
    let fd = memfd(8192);
    let region = Region::from_fd(fd.try_clone().expect("a second descriptor"), 8192, true).expect("mapped");
    // A seal forbids what takes the lock, and not what goes through a mapping made before.
    rustix::fs::fcntl_add_seals(&fd, rustix::fs::SealFlags::FUTURE_WRITE).expect("sealed");
    region.write_at(1, &[9; 5000]).expect("written");
    let mut seen = [0; 5000];
    region.read_at(1, &mut seen).expect("read");
    assert!(seen == [9; 5000]);
}
