//! The route `cache`: what a GPU's copies get out of the kernel's page cache is what read(2) gets.
//! The software driver holds registered pages themselves, as a GPU's does, so that pages that are
//! no longer the file's show.

use super::super::application::{Memory, Pinned, allocated, own_stream};
use super::{MIB, Site, TransferCheck, segment};
use crate::random::Random;
use crate::tree;
use gpunvme::gpu::{Caching, Settings, Transfers};
use gpunvme::{Buffer, File, Operation, Registered, Require, Ring, Route, Shared, Transfer, Wait};
use parking_lot::RwLock;
use rustix::fs::{Advice, FallocateFlags, fadvise, fallocate};
use std::fs::{self, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

const BLOCK: usize = 4096;

/// What holds on every driver.
pub const CHECKS: &[TransferCheck] = &[
    ("every change of a file is seen beside the page cache", every_change_is_seen),
    ("readers by all routes see what is there", readers_by_all_routes_see_what_is_there),
];

/// How a file is read.
#[derive(Clone, Copy, Debug, PartialEq)]
enum How {
    /// What is read again is registered.
    ReadAgain,
    /// What the page cache has anyway comes from there.
    Resident,
    /// The page cache is left alone.
    Never,
    /// No route but the daemon's staging memory will do.
    Bounce,
    InStream,
    /// Into host memory that CUDA knows.
    ToHost,
    /// By a call, into a registered buffer.
    ToBuffer,
    /// By a ring, into a registered buffer.
    Ring,
}

impl How {
    const COUNT: usize = 8;

    fn caching(self) -> Caching {
        match self {
            How::ReadAgain => Caching::ReadAgain,
            How::Never => Caching::Never,
            _ => Caching::Resident,
        }
    }

    /// Whether it may take bytes out of the page cache.
    fn is_cached(self) -> bool {
        !matches!(self, How::Never | How::Bounce | How::Ring)
    }
}

/// Memory of a GPU, and what reads of a file bring into it.
struct Reader<'a> {
    site: &'a Site,
    transfers: Transfers,
    memory: Memory,
    stream: usize,
    host: Pinned,
    buffer: Registered,
    ring: Ring,
    shared: Arc<Shared>,
}

impl<'a> Reader<'a> {
    fn new(site: &'a Site, caching: Caching, len: u64) -> Reader<'a> {
        let mut settings = Settings::default();
        settings.caching = caching;
        let transfers = Transfers::with(&site.mount(), settings).unwrap();
        let (memory, host) = (allocated(site.gpu, len as usize), Pinned::new(site.gpu, len as usize));
        let registered = || site.mount().register(Buffer::memfd(len as usize).unwrap()).unwrap();
        let (ring, shared) = (Ring::new(&site.mount(), 8).unwrap(), registered().share());
        Reader { site, transfers, memory, stream: own_stream(site.gpu), host, buffer: registered(), ring, shared }
    }

    fn read_by(&mut self, how: How, file: &File, offset: u64, len: u64) -> (Transfer, Vec<u8>) {
        let done = match how {
            How::ReadAgain | How::Resident | How::Never | How::Bounce => return self.read(file, offset, len),
            // SAFETY: the memory is this reader's, and the stream is never destroyed.
            How::InStream => unsafe {
                self.transfers.read_on_stream(file, &[segment(offset, self.memory.address(), len)], self.stream).unwrap().wait()
            },
            How::ToHost => {
                let to = segment(offset, self.host.address(), len);
                // SAFETY: the memory is this reader's.
                let done = unsafe { self.transfers.read(file, &[to]) }.unwrap();
                return (done, self.host.bytes()[..done.bytes() as usize].to_vec());
            }
            How::ToBuffer => {
                let to = gpunvme::Segment { file_offset: offset, buffer_offset: 0, len };
                let done = file.read(&mut self.buffer, &[to]).unwrap();
                return (done, self.buffer[..done.bytes() as usize].to_vec());
            }
            How::Ring => {
                let attached = self.ring.attach(file).unwrap();
                self.ring.push(&Operation::read(&attached, offset, &self.shared, 0, len)).unwrap();
                let mut completed = Vec::new();
                self.ring.complete(Wait::Forever, &mut completed).unwrap();
                let done = completed.pop().unwrap().result.unwrap();
                let mut bytes = vec![0; done.bytes() as usize];
                self.shared.copy_out(0, &mut bytes);
                return (done, bytes);
            }
        };
        let done = done.unwrap();
        let bytes = if done.bytes() > 0 { self.site.look(self.memory.address(), done.bytes()) } else { Vec::new() };
        (done, bytes)
    }

    /// From now on it takes this route, or fails.
    fn require(&mut self, route: Route) {
        self.transfers = self.transfers.requiring(Require { route: Some(route), direct: false });
    }

    fn read(&self, file: &File, offset: u64, len: u64) -> (Transfer, Vec<u8>) {
        // SAFETY: the memory is this reader's.
        let done = unsafe { self.transfers.read(file, &[segment(offset, self.memory.address(), len)]) }.unwrap();
        let bytes = if done.bytes() > 0 { self.site.look(self.memory.address(), done.bytes()) } else { Vec::new() };
        (done, bytes)
    }
}

/// What may happen to a file of `len` bytes.
type Change = (&'static str, fn(&Site, &Path, u64));

fn opened(path: &Path) -> fs::File {
    OpenOptions::new().read(true).write(true).open(path).unwrap()
}

const CHANGES: &[Change] = &[
    ("write(2) of 1 MiB", |_, path, _| opened(path).write_all_at(&tree::pattern(7, MIB as usize), 3 * MIB + 11).unwrap()),
    ("write(2) of a byte", |_, path, _| opened(path).write_all_at(b"!", 4097).unwrap()),
    ("an append", |_, path, len| opened(path).write_all_at(b"more", len).unwrap()),
    ("a store through a mapping", |_, path, _| {
        let file = opened(path);
        let (flags, access) = (rustix::mm::MapFlags::SHARED, rustix::mm::ProtFlags::WRITE | rustix::mm::ProtFlags::READ);
        // SAFETY: a new mapping, of pages that exist.
        unsafe {
            let at = rustix::mm::mmap(std::ptr::null_mut(), BLOCK, access, flags, &file, MIB).unwrap();
            at.cast::<u8>().write_bytes(0x5a, 100);
            rustix::mm::munmap(at, BLOCK).unwrap();
        }
    }),
    ("posix_fadvise(DONTNEED)", |_, path, _| fadvise(opened(path), 0, None, Advice::DontNeed).unwrap()),
    ("drop_caches", |_, _, _| fs::write("/proc/sys/vm/drop_caches", "3").unwrap()),
    ("a direct write(2)", |_, path, _| {
        let file = OpenOptions::new().write(true).custom_flags(libc::O_DIRECT).open(path).unwrap();
        #[repr(align(4096))]
        struct Aligned([u8; 2 * BLOCK]);
        file.write_all_at(&Aligned([0xd1; 2 * BLOCK]).0, 2 * MIB).unwrap();
    }),
    ("the ioctl WRITE", |_, path, _| {
        let file = File::create(path).unwrap();
        let mut buffer = Buffer::memfd(MIB as usize).unwrap();
        buffer.fill(0x10);
        let buffer = file.mount().unwrap().register(buffer).unwrap();
        let segment = gpunvme::Segment { file_offset: MIB + 5, buffer_offset: 0, len: 77_777 };
        file.write(&buffer, &[segment]).unwrap();
    }),
    ("a write from a GPU", |site, path, _| {
        let file = File::create(path).unwrap();
        let memory = allocated(site.gpu, MIB as usize);
        // SAFETY: the memory is this check's.
        unsafe { site.transfers().write(&file, &[segment(5 * MIB, memory.address(), MIB)]) }.unwrap();
    }),
    ("a punched hole", |_, path, _| {
        fallocate(opened(path), FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, MIB, 3 * MIB).unwrap();
    }),
    ("a range that is zeroed", |_, path, _| fallocate(opened(path), FallocateFlags::ZERO_RANGE, MIB + 3, 3 * MIB).unwrap()),
    ("a truncate down and up", |_, path, len| {
        opened(path).set_len(3 * MIB + 5).unwrap();
        opened(path).set_len(len).unwrap();
    }),
    ("a truncate within the last page", |_, path, len| opened(path).set_len(len - 1).unwrap()),
    ("a truncate within the last page, and up again", |_, path, len| {
        opened(path).set_len(len - 20).unwrap();
        opened(path).set_len(len + 20).unwrap();
    }),
    ("a truncate to nothing", |_, path, _| opened(path).set_len(0).unwrap()),
    ("O_TRUNC", |_, path, _| drop(fs::File::create(path).unwrap())),
    ("copy_file_range", |_, path, _| {
        let file = opened(path);
        let (mut from, mut to) = (0, 4 * MIB);
        rustix::fs::copy_file_range(&file, Some(&mut from), &file, Some(&mut to), MIB as usize).unwrap();
    }),
    ("a file in its place", |_, path, _| {
        let other = path.with_extension("new");
        fs::write(&other, "other").unwrap();
        fs::rename(&other, path).unwrap();
    }),
    ("an unlink", |_, path, _| fs::remove_file(path).unwrap()),
];

/// What is read after a change of the file is what read(2) reads, whether its pages stayed in the
/// page cache or left it.
fn every_change_is_seen(site: &Site) {
    let len = 8 * MIB + 100;
    let reader = Reader::new(site, Caching::Never, len + MIB);
    for (name, change) in CHANGES {
        let path = site.volume.path("changed");
        fs::write(&path, tree::pattern(len, len as usize)).unwrap();
        let (file, plain) = (File::open(&path).unwrap(), fs::File::open(&path).unwrap());
        // Twice: the second time with what the first one left.
        for round in 0..2 {
            let size = file.size().unwrap();
            assert_eq!(reader.transfers.prepare(&file, 0, u64::MAX).unwrap(), size, "{name}, {round}");
            change(site, &path, len);
            let mut expected = vec![0; (len + MIB) as usize];
            let count = read_whole(&plain, &mut expected);
            let (done, read) = reader.read(&file, 0, len + MIB);
            assert_eq!(read.len(), count, "{name}, {round}: {:?}", done.moved);
            let wrong = read.iter().zip(&expected).position(|(read, expected)| read != expected);
            assert!(wrong.is_none(), "{name}, {round}: wrong at {wrong:?}; {:?}", done.moved);
            if !path.exists() {
                break;
            }
        }
    }
}

/// Reads from the beginning on, as far as the file goes, and returns how far that was.
fn read_whole(file: &fs::File, bytes: &mut [u8]) -> usize {
    let mut at = 0;
    while at < bytes.len() {
        match file.read_at(&mut bytes[at..], at as u64).unwrap() {
            0 => break,
            count => at += count,
        }
    }
    at
}

/// What each block of a file held and holds: every change has a number, odd ones leave zeros, and
/// the others fill the block with their number.
struct Versions {
    begun: Vec<AtomicU64>,
    done: Vec<AtomicU64>,
    /// The last that leaves zeros, of those that were begun.
    zeros: Vec<AtomicU64>,
}

impl Versions {
    fn new(blocks: usize) -> Versions {
        let zero = || (0..blocks).map(|_| AtomicU64::new(0)).collect();
        Versions { begun: zero(), done: zero(), zeros: zero() }
    }

    /// Begins the next change of a block, to zeros or not, which only one thread changes.
    fn begin(&self, block: usize, zeros: bool) -> u64 {
        let next = self.done[block].load(Ordering::SeqCst) + 1;
        let number = if (next % 2 == 1) == zeros { next } else { next + 1 };
        if zeros {
            self.zeros[block].store(number, Ordering::SeqCst);
        }
        self.begun[block].store(number, Ordering::SeqCst);
        number
    }

    fn end(&self, block: usize, number: u64) {
        self.done[block].store(number, Ordering::SeqCst);
    }

    /// Checks what was read of a block between two looks at the versions: `low` were done before,
    /// and `high` begun afterwards.
    fn check(&self, block: usize, low: u64, bytes: &[u8], by: &str) {
        let high = self.begun[block].load(Ordering::SeqCst);
        let zeros = self.zeros[block].load(Ordering::SeqCst);
        for word in bytes.as_chunks::<8>().0 {
            let found = u64::from_le_bytes(*word);
            let allowed = if found == 0 { zeros >= low } else { found % 2 == 0 && (low..=high).contains(&found) };
            assert!(allowed, "{by}: block {block} has {found}, which is not in {low} to {high}");
        }
    }
}

/// Readers by all routes beside writers, truncates, punched holes, direct writes and reclaim: what
/// was replaced before a read began is not read. `CACHE_SECONDS` makes it longer.
fn readers_by_all_routes_see_what_is_there(site: &Site) {
    let seconds = std::env::var("CACHE_SECONDS").ok().and_then(|text| text.parse().ok()).unwrap_or(4);
    const BLOCKS: usize = 512;
    const WRITERS: usize = 2;
    let len = (BLOCKS * BLOCK) as u64;
    let path = site.volume.path("versions");
    fs::write(&path, vec![0; len as usize]).unwrap();
    let versions = Versions::new(BLOCKS);
    // Held by writers shared, and alone by the one that truncates.
    let whole = RwLock::new(());
    let over = AtomicBool::new(false);
    let other_ways = [How::Resident, How::Never, How::Bounce, How::InStream, How::ToHost, How::ToBuffer, How::Ring];
    let drops = AtomicU64::new(0);
    let (cached, moved) = ([const { AtomicU64::new(0) }; How::COUNT], [const { AtomicU64::new(0) }; How::COUNT]);
    let until = Instant::now() + Duration::from_secs(seconds);
    let goes_on = || Instant::now() < until && !over.load(Ordering::Relaxed);
    // A panic in one ends all.
    let guarded = |work: &(dyn Fn() + Sync)| {
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
        if let Err(panic) = result {
            over.store(true, Ordering::Relaxed);
            std::panic::resume_unwind(panic);
        }
    };
    let write = |writer: usize| {
        let mut random = Random(writer as u64 + 1);
        let plain = opened(&path);
        let direct = OpenOptions::new().write(true).custom_flags(libc::O_DIRECT).open(&path).unwrap();
        let file = File::create(&path).unwrap();
        let mut buffer = file.mount().unwrap().register(Buffer::memfd(BLOCK).unwrap()).unwrap();
        #[repr(align(4096))]
        struct Aligned([u8; BLOCK]);
        while goes_on() {
            let block = random.below(BLOCKS as u64 / WRITERS as u64) as usize * WRITERS + writer;
            let at = (block * BLOCK) as u64;
            let how = random.below(8);
            let _shared = whole.read();
            let number = versions.begin(block, how == 0);
            let mut filled = Aligned([0; BLOCK]);
            filled.0.as_chunks_mut::<8>().0.iter_mut().for_each(|word| *word = number.to_le_bytes());
            match how {
                0 => fallocate(&plain, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, at, BLOCK as u64).unwrap(),
                1 | 2 => direct.write_all_at(&filled.0, at).unwrap(),
                3 | 4 => {
                    buffer.copy_from_slice(&filled.0);
                    let segment = gpunvme::Segment { file_offset: at, buffer_offset: 0, len: BLOCK as u64 };
                    file.write(&buffer, &[segment]).unwrap();
                }
                _ => plain.write_all_at(&filled.0, at).unwrap(),
            }
            versions.end(block, number);
        }
    };
    let truncate = || {
        let mut random = Random(99);
        while goes_on() {
            thread::sleep(Duration::from_millis(20 + random.below(30)));
            let from = random.below(BLOCKS as u64) as usize;
            let _alone = whole.write();
            let numbers: Vec<u64> = (from..BLOCKS).map(|block| versions.begin(block, true)).collect();
            let file = opened(&path);
            file.set_len((from * BLOCK) as u64).unwrap();
            file.set_len(len).unwrap();
            (from..BLOCKS).zip(numbers).for_each(|(block, number)| versions.end(block, number));
        }
    };
    let reclaim = || {
        for round in 0.. {
            if !goes_on() {
                break;
            }
            thread::sleep(Duration::from_millis(15));
            if round % 64 == 32 {
                // All that the machine has, so not often; a container may not do it.
                let dropped = fs::write("/proc/sys/vm/drop_caches", "3");
                drops.fetch_add(u64::from(dropped.is_ok()), Ordering::Relaxed);
            } else {
                fadvise(opened(&path), 0, None, Advice::DontNeed).unwrap();
            }
        }
    };
    let read_by_gpu = |seed: u64, how: How| {
        let file = File::open(&path).unwrap();
        let mut reader = Reader::new(site, how.caching(), len);
        if how == How::Bounce {
            reader.require(Route::Bounce);
        }
        let mut random = Random(seed);
        while goes_on() {
            match (random.below(3), how) {
                (0, How::ReadAgain) => drop(reader.transfers.prepare(&file, 0, len).unwrap()),
                // Only a part reads in what it finds missing: the others need it there.
                (1, _) if how != How::ReadAgain => drop(fs::read(&path).unwrap()),
                _ => {}
            }
            let first = random.below(BLOCKS as u64) as usize;
            let count = 1 + random.below((BLOCKS - first) as u64).min(random.below(64)) as usize;
            let low: Vec<u64> = versions.done[first..first + count].iter().map(|done| done.load(Ordering::SeqCst)).collect();
            let (done, bytes) = reader.read_by(how, &file, (first * BLOCK) as u64, (count * BLOCK) as u64);
            for (number, bytes) in bytes.chunks_exact(BLOCK).enumerate() {
                versions.check(first + number, low[number], bytes, &format!("{how:?}: {:?}", done.moved));
            }
            assert!(how.is_cached() || done.moved.cache == 0, "{how:?}: {:?}", done.moved);
            assert!(how != How::Bounce || done.moved.bounce + done.moved.hole == done.bytes(), "{:?}", done.moved);
            cached[how as usize].fetch_add(done.moved.cache, Ordering::Relaxed);
            moved[how as usize].fetch_add(done.bytes(), Ordering::Relaxed);
        }
    };
    let read_plainly = || {
        let mut random = Random(7);
        let plain = opened(&path);
        let mut bytes = vec![0; BLOCK];
        while goes_on() {
            let block = random.below(BLOCKS as u64) as usize;
            let low = versions.done[block].load(Ordering::SeqCst);
            // The file may end before it just now.
            let count = plain.read_at(&mut bytes, (block * BLOCK) as u64).unwrap();
            versions.check(block, low, &bytes[..count - count % 8], "read(2)");
            thread::yield_now();
        }
    };
    thread::scope(|scope| {
        for writer in 0..WRITERS {
            let write = &write;
            let guarded = &guarded;
            scope.spawn(move || guarded(&|| write(writer)));
        }
        scope.spawn(|| guarded(&truncate));
        scope.spawn(|| guarded(&reclaim));
        scope.spawn(|| guarded(&read_plainly));
        scope.spawn(|| guarded(&|| read_by_gpu(3, How::ReadAgain)));
        for (seed, how) in (5..).zip(other_ways) {
            let (read_by_gpu, guarded) = (&read_by_gpu, &guarded);
            scope.spawn(move || guarded(&|| read_by_gpu(seed, how)));
        }
        guarded(&|| read_by_gpu(4, How::ReadAgain));
    });
    let of = |how: How, bytes: &[AtomicU64]| bytes[how as usize].load(Ordering::Relaxed);
    for how in other_ways.into_iter().chain([How::ReadAgain]) {
        let (moved, cached) = (of(how, &moved), of(how, &cached));
        println!("{how:?}: {moved} bytes, {cached} of them out of the page cache");
        assert!(moved > 0 && (cached > 0) == how.is_cached(), "{how:?}: {cached} of {moved}");
    }
    println!("all that the machine had cached was dropped {} times", drops.into_inner());
}
