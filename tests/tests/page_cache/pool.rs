//! How much of the staging pool is used: by what comes from devices, and by what comes from the
//! page cache.

use super::{MIB, gpu, resident, transfers};
use gpunvme::gpu::{Caching, Segment, Settings, Transfers};
use gpunvme::{File, Mount, Moved};
use gpunvme_cuda::DeviceAllocation;
use gpunvme_tests::cuda::Pinned;
use gpunvme_tests::mounted::Mounted;
use gpunvme_tests::software_cuda::with_software_cuda;
use gpunvme_tests::{needs_mount, tree};
use rustix::fs::{Advice, fadvise};
use std::fs;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

/// Bytes of the pool (client/src/gpu/settings.rs), and of a chunk (client/src/gpu/memory/slots.rs).
const POOL: u64 = 16 * MIB;
const CHUNK: u64 = MIB;
/// What transfers of one device may use of it.
const OF_DEVICES: usize = 8;
/// Bytes of a file: more than the pool has, and than a thread does itself.
const LEN: u64 = 2 * POOL;

/// How many chunks of this process's one pool of the usual length were ever written to.
fn used_chunks() -> usize {
    let descriptors = fs::read_dir("/proc/self/fd").unwrap().map(|entry| entry.unwrap().path());
    let is_pool = |path: &PathBuf| {
        let name = fs::read_link(path).unwrap_or_default();
        name.to_string_lossy().contains("gpunvme-staging") && fs::metadata(path).is_ok_and(|found| found.len() > POOL)
    };
    let [pool] = descriptors.filter(is_pool).collect::<Vec<_>>().try_into().expect("one pool");
    let pool = fs::File::open(pool).unwrap();
    let mut chunk = vec![0; CHUNK as usize];
    let mut is_used = |number| {
        pool.read_exact_at(&mut chunk, number * CHUNK).unwrap();
        chunk.iter().any(|byte| *byte != 0)
    };
    (0..POOL / CHUNK).filter(|number| is_used(*number)).count()
}

/// A file of [`LEN`] bytes of which the page cache has nothing.
fn absent(volume: &Mounted) -> (File, Vec<u8>) {
    let (path, bytes) = (volume.path("absent"), tree::pattern(8, LEN as usize));
    fs::write(&path, &bytes).unwrap();
    fs::File::open(&path).unwrap().sync_all().unwrap();
    drop_pages(&path);
    (File::open(path).unwrap(), bytes)
}

fn drop_pages(path: &Path) {
    fadvise(fs::File::open(path).unwrap(), 0, None, Advice::DontNeed).unwrap();
}

/// Reads all of each file, by requests of so many bytes that all are begun at once, and returns
/// what of each came from the page cache, and what by way of the pool.
fn read_all(transfers: &Transfers, files: &[(&File, &[u8])], request: u64) -> Vec<Moved> {
    let memories: Vec<DeviceAllocation> = files.iter().map(|_| gpu().alloc(LEN as usize).unwrap()).collect();
    let (sender, receiver) = channel();
    for offset in (0..LEN).step_by(request as usize) {
        for (number, ((file, _), memory)) in files.iter().zip(&memories).enumerate() {
            let segment = Segment { file_offset: offset, address: memory.address() + offset, len: request.min(LEN - offset) };
            let sender = sender.clone();
            let done = move |result| sender.send((number, result)).unwrap();
            // SAFETY: the memory is this function's, and outlives what is read.
            unsafe { transfers.read_then(file, &[segment], done) }.unwrap();
        }
    }
    let mut moved = vec![Moved::default(); files.len()];
    for _ in 0..files.len() as u64 * LEN.div_ceil(request) {
        let (number, result) = receiver.recv_timeout(Duration::from_secs(60)).expect("no request is forgotten");
        let done = result.unwrap().moved;
        moved[number].cache += done.cache;
        moved[number].bounce += done.bounce;
    }
    let mut pinned = Pinned::new(gpu(), LEN as usize);
    for ((_, bytes), memory) in files.iter().zip(&memories) {
        assert!(pinned.get(&gpu().stream().unwrap(), memory.address(), LEN as usize) == *bytes);
    }
    moved
}

/// The page cache is asked for what is read, and has nothing: no more of the pool is used than with
/// caching forbidden. What it has may use all of it.
#[test]
fn what_the_page_cache_has_not_uses_the_devices_part_of_the_pool() {
    needs_mount!();
    with_software_cuda("", || {
        for caching in [Caching::Never, Caching::Resident] {
            let volume = Mounted::new();
            let (file, bytes) = absent(&volume);
            let transfers = transfers(&volume, caching, None);
            // Many at once, each of which has to find out; then one.
            for request in [MIB / 2, 2 * MIB, LEN] {
                drop_pages(file.path());
                let moved = read_all(&transfers, &[(&file, &bytes)], request)[0];
                assert_eq!((moved.cache, moved.bounce), (0, LEN), "{caching:?}, {request}");
                assert!(used_chunks() <= OF_DEVICES, "{caching:?}, {request}");
            }
            assert_eq!(used_chunks(), OF_DEVICES, "{caching:?}");
            let (file, bytes) = resident(&volume, LEN);
            let until = Instant::now() + Duration::from_secs(30);
            while caching == Caching::Resident && used_chunks() == OF_DEVICES {
                // Another test may just have had the kernel drop what it has.
                assert!(fs::read(file.path()).unwrap() == bytes);
                // Newly opened, so that no range of it is registered.
                let file = File::open(file.path()).unwrap();
                read_all(&transfers, &[(&file, &bytes)], LEN);
                assert!(Instant::now() < until, "what the page cache has uses no more");
            }
            assert_eq!(used_chunks() > OF_DEVICES, caching == Caching::Resident);
        }
    });
}

/// Reads of what the page cache has, and of what it has not, at once, through pools of the usual
/// length and through small ones: all are answered.
#[test]
fn reads_of_both_kinds_share_a_pool_of_any_length() {
    needs_mount!();
    with_software_cuda("", || {
        let volume = Mounted::new();
        let (hot, hot_bytes) = resident(&volume, LEN);
        let (cold, cold_bytes) = absent(&volume);
        for staging in [None, Some(1), Some(2 * MIB as usize), Some(9 * MIB as usize)] {
            let mut settings = Settings::default();
            settings.staging = staging;
            let transfers = Transfers::with(&Mount::open(volume.root()).unwrap(), settings).unwrap();
            for request in [4 * MIB, 100 << 10] {
                drop_pages(cold.path());
                assert!(fs::read(hot.path()).unwrap() == hot_bytes);
                let hot = File::open(hot.path()).unwrap();
                let files: [(&File, &[u8]); 3] = [(&hot, &hot_bytes), (&cold, &cold_bytes), (&hot, &hot_bytes)];
                let moved = read_all(&transfers, &files, request);
                assert_eq!((moved[1].cache, moved[1].bounce), (0, LEN), "{staging:?}, {request}");
                assert!([0, 2].iter().all(|number| moved[*number].cache + moved[*number].bounce == LEN));
            }
        }
    });
}
