//! Kernels that use arrays over files, on a GPU: the checks of `tests/tests/kernels/` where they
//! are meant for, and the kernels for programs without a compiler. The kernels are in
//! `tests/kernels` and `client/kernels`.

use super::application::{Memory, allocated};
use super::kernels::KernelCheck;
use super::launch::{Module, get, holding};
use crate::mounted::Mounted;
use crate::tree;
use gpunvme::gpu::{GpuArray, GpuArraySettings, GpuRing, GpuRingSettings};
use gpunvme::{File, Mount};
use gpunvme_cuda::Gpu;
use rustix::process::{Signal, kill_process};
use std::fs;
use std::thread;
use std::time::Duration;
use zerocopy::IntoBytes;

/// What needs a GPU that runs kernels.
pub const ARRAY_CHECKS: &[KernelCheck] = &[
    ("threads get words of an array of short pages, hits and misses", |gpu| words_of(gpu, 4 * MIB, (512, 4), 132)),
    ("threads get words of an array of pages of a block, hits and misses", |gpu| words_of(gpu, 16 * MIB, (4096, 8), 132)),
    ("threads get words of an array of long pages, hits and misses", |gpu| words_of(gpu, 16 * MIB, (65536, 4), 132)),
    // A miss reads a whole page: more blocks would not end under a checker of memory.
    ("a few blocks get words of an array of long pages", |gpu| words_of(gpu, 16 * MIB, (65536, 4), 8)),
    ("threads of a warp that go different ways get words of an array", diverged),
    ("each page of an array is read once where all have room", each_page_once),
    ("what kernels set is in the file", sets),
    ("warps hold pages and change them", holds),
    ("kernels that use an array end when the daemon dies, ends or is silent", a_daemon_that_goes),
    ("kernels without a compiler read, write, gather, scatter and flush", without_a_compiler),
];

/// The kernels that use arrays, as PTX.
pub const ARRAYS: &str = include_str!("../../kernels/arrays.ptx");
const SHIPPED: &str = include_str!("../../../client/kernels/gpunvme_kernels.ptx");
const MIB: usize = 1 << 20;

/// A file of words on a volume, a ring, and the kernels.
struct Site {
    module: Module,
    ring: GpuRing,
    volume: Mounted,
    words: u64,
}

/// What `word_at` of the kernels says.
pub fn word_at(n: u64) -> u32 {
    ((n + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32) as u32
}

impl Site {
    fn new(gpu: Gpu, len: usize, settings: GpuRingSettings) -> Site {
        let volume = Mounted::new();
        let words = len as u64 / 4;
        fs::write(volume.path("file"), (0..words).flat_map(|n| word_at(n).to_le_bytes()).collect::<Vec<_>>()).unwrap();
        let mount = Mount::open(volume.root()).unwrap();
        mount.sync().unwrap();
        let ring = GpuRing::on_gpu(&mount, gpu.index(), settings).unwrap();
        Site { module: Module::new(gpu, ARRAYS), ring, volume, words }
    }

    fn file(&self) -> File {
        File::create(self.volume.path("file")).unwrap()
    }

    fn array(&self, settings: GpuArraySettings) -> GpuArray {
        self.ring.array(&self.file(), settings).unwrap()
    }

    /// Runs a kernel over an array to its end.
    fn run(&self, name: &str, (blocks, threads): (u32, u32), array: &GpuArray, rest: &[u64]) -> Vec<Report> {
        let reports = Reports::new(self.module.gpu, blocks);
        reports.launch(&self.module, name, threads, &[array.for_kernels().as_bytes()], rest);
        self.module.wait();
        reports.get()
    }
}

/// How one block's work ended.
#[derive(Clone, Copy, Debug)]
pub struct Report {
    /// 0, or the errno of a thread that failed.
    pub status: u64,
    /// Words that were not the file's.
    pub wrong: u64,
    /// Accesses.
    pub done: u64,
}

/// Room for the reports of blocks.
pub struct Reports {
    gpu: Gpu,
    blocks: u32,
    memory: Memory,
}

impl Reports {
    const LEN: usize = 32;

    /// Of so many blocks.
    pub fn new(gpu: Gpu, blocks: u32) -> Reports {
        Reports { gpu, blocks, memory: holding(gpu, &vec![0; blocks as usize * Self::LEN]) }
    }

    /// Begins a kernel whose last parameter they are.
    pub fn launch(&self, module: &Module, name: &str, threads: u32, first: &[&[u8]], rest: &[u64]) {
        let mut parameters = first.to_vec();
        parameters.extend(rest.iter().map(IntoBytes::as_bytes));
        let address = self.memory.address();
        parameters.push(address.as_bytes());
        module.launch(name, self.blocks, threads, &parameters);
    }

    /// What they say, when the kernel has ended.
    pub fn get(&self) -> Vec<Report> {
        let word = |bytes: &[u8], at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
        let bytes = get(self.gpu, &self.memory, self.blocks as usize * Self::LEN);
        bytes.chunks(Self::LEN).map(|one| Report { status: word(one, 0), wrong: word(one, 8), done: word(one, 16) }).collect()
    }
}

/// How much was done.
///
/// # Panics
/// Unless all went well.
pub fn good(reports: &[Report]) -> u64 {
    for (block, report) in reports.iter().enumerate() {
        assert_eq!((report.status, report.wrong), (0, 0), "block {block}: {report:?}");
    }
    reports.iter().map(|report| report.done).sum()
}

/// Words of a file of `len` bytes, by pages of so many bytes and ways, and so many blocks.
fn words_of(gpu: Gpu, len: usize, (page, ways): (usize, u32), blocks: u32) {
    let site = Site::new(gpu, len, GpuRingSettings::default());
    // Of a cache that holds a quarter, and of one that holds all.
    for cache in [len / 4, 2 * len] {
        let array = site.array(GpuArraySettings { page, ways, cache, ..GpuArraySettings::default() });
        for seed in 1..3 {
            let done = good(&site.run("get_random", (blocks, 256), &array, &[site.words, 20, seed]));
            assert_eq!(done, u64::from(blocks) * 256 * 20);
        }
        good(&site.run("get_in_order", (64, 128), &array, &[site.words]));
        let found = array.stats().unwrap();
        assert!(found.hits > 0 && found.misses >= (site.words * 4).div_ceil(page as u64), "{found:?}");
    }
}

fn diverged(gpu: Gpu) {
    let site = Site::new(gpu, 4 * MIB, GpuRingSettings { entries: 64, slot: 4096, ..GpuRingSettings::default() });
    let array = site.array(GpuArraySettings { cache: MIB, ways: 4, ..GpuArraySettings::default() });
    good(&site.run("get_diverged", (64, 128), &array, &[site.words, 20, 5]));
    // Of a cache with one set of four pages all want something else.
    let array = site.array(GpuArraySettings { cache: 4 * 4096, ways: 4, ..GpuArraySettings::default() });
    good(&site.run("get_diverged", (8, 64), &array, &[site.words, 5, 6]));
}

fn each_page_once(gpu: Gpu) {
    let site = Site::new(gpu, 8 * MIB, GpuRingSettings::default());
    let array = site.array(GpuArraySettings::default());
    assert_eq!(array.cache(), 8 * MIB, "no more than the file needs");
    for seed in 1..4 {
        good(&site.run("get_random", (264, 256), &array, &[site.words, 50, seed]));
    }
    good(&site.run("get_in_order", (64, 256), &array, &[site.words]));
    assert_eq!(array.stats().unwrap().misses, 2048);
}

fn sets(gpu: Gpu) {
    let site = Site::new(gpu, 8 * MIB, GpuRingSettings::default());
    let len = Some(site.words * 4 + 40_000);
    let words = site.words + 10_000;
    let mut array = site.array(GpuArraySettings { cache: MIB, ways: 4, len, writable: true, ..GpuArraySettings::default() });
    assert_eq!(good(&site.run("set_all", (64, 256), &array, &[words])), words);
    let flushed = array.flush(&site.file()).unwrap();
    assert!(flushed > 0 && array.flush(&site.file()).unwrap() == 0, "{flushed} bytes");
    let expected: Vec<u8> = (0..words).flat_map(|n| (3 * n as u32 + 1).to_le_bytes()).collect();
    assert!(fs::read(site.volume.path("file")).unwrap() == expected, "other words are in the file");
}

fn holds(gpu: Gpu) {
    let site = Site::new(gpu, MIB, GpuRingSettings::default());
    let mut array = site.array(GpuArraySettings { cache: MIB / 2, ways: 4, writable: true, ..GpuArraySettings::default() });
    let done = good(&site.run("hold_and_add", (64, 128), &array, &[256, 1024, 100]));
    assert_eq!(done, 64 * 4 * 100);
    array.flush(&site.file()).unwrap();
    let bytes = fs::read(site.volume.path("file")).unwrap();
    let word = |n: u64| u32::from_le_bytes(bytes[n as usize * 4..][..4].try_into().unwrap());
    let added: u64 = (0..256).map(|page| u64::from(word(page * 1024).wrapping_sub(word_at(page * 1024)))).sum();
    assert_eq!(added, done, "each addition is in the file, once");
    assert!((0..site.words).all(|n| n % 1024 == 0 || word(n) == word_at(n)));
}

fn a_daemon_that_goes(gpu: Gpu) {
    for signal in [Signal::KILL, Signal::TERM, Signal::STOP] {
        let patience = if signal == Signal::STOP { Duration::from_millis(300) } else { Duration::from_secs(30) };
        let site = Site::new(gpu, 16 * MIB, GpuRingSettings { patience, ..GpuRingSettings::default() });
        let array = site.array(GpuArraySettings { cache: MIB, ..GpuArraySettings::default() });
        let reports = Reports::new(gpu, 64);
        reports.launch(&site.module, "get_random", 128, &[array.for_kernels().as_bytes()], &[site.words, 1 << 40, 1]);
        thread::sleep(Duration::from_millis(300));
        let daemon = site.volume.daemon();
        let Site { module, ring, volume, .. } = site;
        if signal == Signal::STOP {
            kill_process(daemon, signal).unwrap();
            module.wait();
            kill_process(daemon, Signal::CONT).unwrap();
        } else {
            drop(volume.signal(signal));
            module.wait();
        }
        let expected = if signal == Signal::STOP { libc::ETIMEDOUT } else { libc::ENODEV } as u64;
        for (block, report) in reports.get().into_iter().enumerate() {
            assert_eq!((report.status, report.wrong), (expected, 0), "block {block} after {signal:?}: {report:?}");
        }
        drop((array, ring));
    }
    // Few, so that this ends under a checker of memory, too.
    words_of(gpu, MIB, (4096, 8), 16);
}

fn without_a_compiler(gpu: Gpu) {
    let site = Site::new(gpu, 4 * MIB, GpuRingSettings::default());
    let module = Module::new(gpu, SHIPPED);
    let attached = site.ring.attach(&site.file()).unwrap();
    let (pieces, len) = (40, 70_001u64);
    let to = allocated(gpu, pieces * len as usize);
    let list = |offset: &dyn Fn(u64) -> u64| -> Vec<u8> {
        let piece = |n: u64| [attached.name(), offset(n), to.address() + n * len, len, 0, 0];
        (0..pieces as u64).flat_map(|n| piece(n).map(u64::to_le_bytes)).flatten().collect()
    };
    let run = |name: &str, pieces_of: &Memory| {
        let ring = site.ring.for_kernels();
        module.launch(name, 16, 128, &[ring.as_bytes(), pieces_of.address().as_bytes(), (pieces as u64).as_bytes()]);
        module.wait();
        for piece in get(gpu, pieces_of, pieces * 48).chunks(48) {
            let word = |at: usize| u64::from_le_bytes(piece[at..at + 8].try_into().unwrap());
            // The reason why it was no faster route is the machine's.
            assert_eq!((word(32), word(40) as u32), (len, 0), "bytes and status");
        }
    };
    run("gpunvme_read_list", &holding(gpu, &list(&|n| n * 90_001)));
    let bytes = fs::read(site.volume.path("file")).unwrap();
    let read = get(gpu, &to, pieces * len as usize);
    for (n, part) in read.chunks(len as usize).enumerate() {
        assert!(part == &bytes[n * 90_001..][..len as usize], "part {n}");
    }
    run("gpunvme_write_list", &holding(gpu, &list(&|n| 4 * MIB as u64 + n * len)));
    assert!(fs::read(site.volume.path("file")).unwrap()[4 * MIB..] == read, "what was written");

    let (rows, row) = (500u64, 1000u64);
    let numbers: Vec<u8> = (0..rows).flat_map(|n| (n * 7 % rows).to_le_bytes()).collect();
    let (numbers, data) = (holding(gpu, &numbers), allocated(gpu, (rows * row) as usize));
    let status = holding(gpu, &[0; 4]);
    let mut array = site.array(GpuArraySettings { cache: MIB, writable: true, ..GpuArraySettings::default() });
    let parameters = |data: &Memory| [numbers.address(), rows, row, data.address(), status.address()];
    let over_rows = |name: &str, data: &Memory| {
        let (array, words) = (array.for_kernels(), parameters(data));
        let mut all = vec![array.as_bytes()];
        all.extend(words.iter().map(IntoBytes::as_bytes));
        module.launch(name, 32, 128, &all);
        module.wait();
        assert_eq!(get(gpu, &status, 4), [0; 4], "{name}");
    };
    over_rows("gpunvme_gather", &data);
    let gathered = get(gpu, &data, (rows * row) as usize);
    for (n, part) in gathered.chunks(row as usize).enumerate() {
        assert!(part == &bytes[n * 7 % rows as usize * row as usize..][..row as usize], "row {n}");
    }
    let new = tree::pattern(3, (rows * row) as usize);
    over_rows("gpunvme_scatter", &holding(gpu, &new));
    module.launch("gpunvme_flush", 32, 128, &[array.for_kernels().as_bytes(), status.address().as_bytes()]);
    module.wait();
    assert_eq!(get(gpu, &status, 4), [0; 4], "gpunvme_flush");
    assert_eq!(array.flush(&site.file()).unwrap(), 0, "kernels had flushed");
    let written = fs::read(site.volume.path("file")).unwrap();
    for (n, part) in new.chunks(row as usize).enumerate() {
        assert!(part == &written[n * 7 % rows as usize * row as usize..][..row as usize], "row {n} written");
    }
}
