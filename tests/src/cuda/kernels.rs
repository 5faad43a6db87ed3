//! Kernels that read and write files themselves, on a GPU: the checks of `tests/tests/kernels/`
//! where they are meant for. The kernels are in `tests/kernels`.

use super::application::{Memory, Pinned, allocated, ok};
use crate::mounted::Mounted;
use crate::tree;
use cudarc::driver::sys::{self, CUfunction, CUmodule};
use gpunvme::gpu::{GpuRing, GpuRingSettings, KernelRing};
use gpunvme::{Attached, File, Mount};
use gpunvme_cuda::Gpu;
use rustix::process::{Signal, kill_process};
use std::ffi::{CString, c_void};
use std::fs;
use std::path::Path;
use std::process::Command;
use std::ptr;
use std::thread;
use std::time::{Duration, Instant};

/// A check, by its name. It panics where something is not as it should be.
pub type KernelCheck = (&'static str, fn(Gpu));

/// What needs a GPU that runs kernels.
pub const KERNEL_CHECKS: &[KernelCheck] = &[
    ("threads, warps and blocks read ranges of a file", groups_read),
    ("blocks write a file that becomes longer", blocks_write),
    ("requests are waited for in any order", requests),
    ("random pages are the file's, word by word", random_pages),
    ("pages are the file's where they lie, in slots that are lent", lent_pages),
    ("kernels end when the daemon dies, and the GPU goes on", a_dying_daemon),
    ("kernels end when the daemon ends", an_ending_daemon),
    ("kernels end when the daemon is silent", a_silent_daemon),
    ("kernels end when their host gives the ring up", a_ring_given_up),
    ("a process that dies under its kernels leaves nothing behind", a_dying_process),
    ("a kernel that crashes leaves its process a ring to drop, and others theirs", a_crashing_kernel),
];

const PTX: &str = concat!(include_str!("../../kernels/kernels.ptx"), "\0");
const MIB: usize = 1 << 20;
const PAGE: usize = 4096;
/// Reads of a block that is to read until it is stopped: some minutes of them.
const ENDLESS: u64 = 300_000;

/// How one group's work ended, as `struct report` of the kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Report {
    status: i32,
    bytes: u64,
    wrong: u64,
    reads: u64,
}

/// A file of a volume, with kernels that use it: they end before the volume does.
struct Site {
    kernels: Kernels,
    volume: Mounted,
    bytes: Vec<u8>,
}

/// Kernels of a GPU, with a ring and a file.
struct Kernels {
    gpu: Gpu,
    ring: GpuRing,
    file: Attached,
    module: CUmodule,
}

impl Kernels {
    fn new(gpu: Gpu, path: &Path, settings: GpuRingSettings) -> Kernels {
        let file = File::create(path).unwrap();
        let ring = GpuRing::on_gpu(&file.mount().unwrap(), gpu.index(), settings).unwrap();
        let file = ring.attach(&file).unwrap();
        let _entered = gpu.enter().unwrap();
        let mut module = ptr::null_mut();
        // SAFETY: the image is text with a zero at its end.
        unsafe { ok(sys::cuModuleLoadData(&mut module, PTX.as_ptr().cast())) };
        Kernels { gpu, ring, file, module }
    }

    /// Begins a kernel, whose parameters after ring and file are `rest`.
    fn launch(&self, name: &str, blocks: u32, threads: u32, rest: &[u64]) {
        let (mut ring, mut file, mut rest): (KernelRing, _, _) = (self.ring.for_kernels(), self.file.name(), rest.to_vec());
        let mut parameters = vec![(&raw mut ring).cast::<c_void>(), (&raw mut file).cast()];
        parameters.extend(rest.iter_mut().map(|parameter| ptr::from_mut(parameter).cast::<c_void>()));
        let _entered = self.gpu.enter().unwrap();
        let (mut function, name): (CUfunction, _) = (ptr::null_mut(), CString::new(name).unwrap());
        // SAFETY: the parameters are those of the kernel, and are copied before the call returns.
        unsafe {
            ok(sys::cuModuleGetFunction(&mut function, self.module, name.as_ptr()));
            let none = ptr::null_mut();
            ok(sys::cuLaunchKernel(function, blocks, 1, 1, threads, 1, 1, 0, none, parameters.as_mut_ptr(), none.cast()));
        }
    }

    /// Waits for kernels.
    fn wait(&self) {
        let _entered = self.gpu.enter().unwrap();
        // SAFETY: it is the default stream.
        unsafe { ok(sys::cuStreamSynchronize(ptr::null_mut())) };
    }

    /// Begins blocks that read pages until they fail.
    fn launch_endless(&self, pages: u64) -> Reports {
        let reports = Reports::new(self.gpu, 64);
        self.launch("random_reads", 64, 128, &[pages, ENDLESS, reports.memory.address()]);
        reports
    }
}

impl Drop for Kernels {
    fn drop(&mut self) {
        let _entered = self.gpu.enter().unwrap();
        // SAFETY: it was loaded in this context, and its kernels have ended. Where one crashed, the
        // module went with the context.
        let _ = unsafe { sys::cuModuleUnload(self.module) };
    }
}

impl Site {
    fn new(gpu: Gpu, len: usize, settings: GpuRingSettings) -> Site {
        let volume = Mounted::new();
        // What `word_at` of the kernels says.
        let word = |n: u64| ((n + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32) as u32;
        let bytes: Vec<u8> = (0..len as u64 / 4).flat_map(|n| word(n).to_le_bytes()).collect();
        fs::write(volume.path("file"), &bytes).unwrap();
        Mount::open(volume.root()).unwrap().sync().unwrap();
        let kernels = Kernels::new(gpu, &volume.path("file"), settings);
        Site { kernels, volume, bytes }
    }

    /// Reads `parts` parts of `len` bytes by a kernel with so many blocks and threads, and compares
    /// them.
    fn read_parts(&self, name: &str, (blocks, threads): (u32, u32), parts: usize, from: usize, len: usize) {
        let gpu = self.kernels.gpu;
        let (memory, reports) = (allocated(gpu, parts * len), Reports::new(gpu, parts));
        self.kernels.launch(name, blocks, threads, &[from as u64, memory.address(), len as u64, reports.memory.address()]);
        self.kernels.wait();
        for (n, report) in reports.get().into_iter().enumerate() {
            assert_eq!((report.status, report.bytes), (0, len as u64), "{name}: part {n}");
        }
        let mut pinned = Pinned::new(gpu, parts * len);
        let read = pinned.get(&gpu.stream().unwrap(), memory.address(), parts * len);
        assert!(read == &self.bytes[from..from + parts * len], "{name}: other bytes");
    }

    /// Begins blocks that read pages until they fail, and waits until they are at it. No memory is
    /// allocated or registered until they ended: that may wait for them.
    fn begin_endless(&self) -> Reports {
        let before = self.moved();
        let reports = self.kernels.launch_endless(self.pages());
        self.wait_for_reads(before);
        reports
    }

    fn wait_for_reads(&self, before: u64) {
        let begun = Instant::now();
        while self.moved() < before + MIB as u64 {
            assert!(begun.elapsed() < Duration::from_secs(20), "kernels read nothing");
            thread::sleep(Duration::from_millis(5));
        }
    }

    fn pages(&self) -> u64 {
        (self.bytes.len() / PAGE) as u64
    }

    fn moved(&self) -> u64 {
        Mount::open(self.volume.root()).unwrap().stats().unwrap().read.total()
    }
}

/// The reports of groups, in memory of the GPU.
struct Reports {
    gpu: Gpu,
    memory: Memory,
    count: usize,
}

impl Reports {
    const LEN: usize = 32;

    fn new(gpu: Gpu, count: usize) -> Reports {
        let reports = Reports { gpu, memory: allocated(gpu, count * Self::LEN), count };
        let stream = gpu.stream().unwrap();
        Pinned::new(gpu, count * Self::LEN).put(&stream, reports.memory.address(), &vec![0; count * Self::LEN]);
        reports
    }

    fn get(&self) -> Vec<Report> {
        let mut pinned = Pinned::new(self.gpu, self.count * Self::LEN);
        let bytes = pinned.get(&self.gpu.stream().unwrap(), self.memory.address(), self.count * Self::LEN);
        let report = |bytes: &[u8]| {
            let word = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
            Report { status: word(0) as u32 as i32, bytes: word(8), wrong: word(16), reads: word(24) }
        };
        bytes.chunks(Self::LEN).map(report).collect()
    }

    /// That all ended with this status, and read nothing wrong before.
    fn check(&self, status: i32) {
        for (block, report) in self.get().into_iter().enumerate() {
            assert_eq!((report.status, report.wrong), (status, 0), "block {block}: {report:?}");
        }
    }
}

fn groups_read(gpu: Gpu) {
    let site = Site::new(gpu, 16 * MIB, GpuRingSettings::default());
    site.read_parts("read_by_threads", (4, 64), 256, 77, 3001);
    site.read_parts("read_by_warps", (4, 128), 16, 5, 100_003);
    site.read_parts("read_by_blocks", (16, 256), 16, 1, 300_000);
    site.read_parts("read_by_blocks", (4, 1024), 4, 0, 4 * MIB);
    // Far more at once than there are slots.
    let small = Site::new(gpu, 16 * MIB, GpuRingSettings { entries: 32, slot: 8192, ..GpuRingSettings::default() });
    small.read_parts("read_by_threads", (16, 128), 2048, 0, 8000);
    small.read_parts("read_by_blocks", (200, 64), 200, 3, 50_000);
}

fn blocks_write(gpu: Gpu) {
    let site = Site::new(gpu, MIB, GpuRingSettings::default());
    let (parts, len) = (32, 123_457);
    let (data, memory) = (tree::pattern(5, parts * len), allocated(gpu, parts * len));
    Pinned::new(gpu, parts * len).put(&gpu.stream().unwrap(), memory.address(), &data);
    let reports = Reports::new(gpu, parts);
    site.kernels.launch("write_by_blocks", parts as u32, 256, &[9, memory.address(), len as u64, reports.memory.address()]);
    site.kernels.wait();
    reports.check(0);
    let written = fs::read(site.volume.path("file")).unwrap();
    assert!(written[..9] == site.bytes[..9] && written[9..] == data, "other bytes are in the file");
}

fn requests(gpu: Gpu) {
    let site = Site::new(gpu, 16 * MIB, GpuRingSettings::default());
    site.read_parts("read_async", (32, 128), 256, 0, PAGE);
    site.read_parts("read_async", (8, 32), 64, 4096, 60_000);
}

fn random_pages(gpu: Gpu) {
    check_pages(gpu, "random_reads");
}

fn lent_pages(gpu: Gpu) {
    check_pages(gpu, "lent_reads");
}

/// Has blocks of a kernel compare random pages.
fn check_pages(gpu: Gpu, kernel: &str) {
    let site = Site::new(gpu, 64 * MIB, GpuRingSettings::default());
    for (blocks, threads) in [(1, 32), (64, 128), (512, 64)] {
        let reports = Reports::new(gpu, blocks);
        let rest = [site.pages(), 20_000 / blocks as u64, reports.memory.address()];
        site.kernels.launch(kernel, blocks as u32, threads, &rest);
        site.kernels.wait();
        reports.check(0);
    }
}

fn a_dying_daemon(gpu: Gpu) {
    let site = Site::new(gpu, 16 * MIB, GpuRingSettings::default());
    let reports = site.begin_endless();
    let Site { volume, kernels, .. } = site;
    drop(volume.signal(Signal::KILL));
    kernels.wait();
    reports.check(libc::ENODEV);
    groups_read(gpu);
}

fn an_ending_daemon(gpu: Gpu) {
    let site = Site::new(gpu, 16 * MIB, GpuRingSettings::default());
    let reports = site.begin_endless();
    let Site { volume, kernels, .. } = site;
    // The ring is in use: after a while the daemon cuts it off.
    drop(volume.signal(Signal::TERM));
    kernels.wait();
    reports.check(libc::ENODEV);
}

fn a_silent_daemon(gpu: Gpu) {
    let patience = Duration::from_millis(500);
    let site = Site::new(gpu, 16 * MIB, GpuRingSettings { patience, ..GpuRingSettings::default() });
    let reports = site.begin_endless();
    kill_process(site.volume.daemon(), Signal::STOP).unwrap();
    site.kernels.wait();
    kill_process(site.volume.daemon(), Signal::CONT).unwrap();
    reports.check(libc::ETIMEDOUT);
    // What was not waited for ends, and its slots are used again.
    site.read_parts("read_by_blocks", (64, 64), 64, 0, 100_000);
}

fn a_ring_given_up(gpu: Gpu) {
    let mut site = Site::new(gpu, 16 * MIB, GpuRingSettings::default());
    let mount = Mount::open(site.volume.root()).unwrap();
    let other = GpuRing::on_gpu(&mount, gpu.index(), GpuRingSettings::default()).unwrap();
    let reports = site.begin_endless();
    drop(std::mem::replace(&mut site.kernels.ring, other));
    site.kernels.wait();
    reports.check(libc::ENODEV);
}

/// Has kernels read a file of whole pages until this process is killed: the other half of a check.
pub fn read_endlessly(gpu: Gpu, path: &Path) {
    let kernels = Kernels::new(gpu, path, GpuRingSettings::default());
    kernels.launch_endless(fs::metadata(path).unwrap().len() / PAGE as u64);
    kernels.wait();
}

fn a_dying_process(gpu: Gpu) {
    let site = Site::new(gpu, 16 * MIB, GpuRingSettings::default());
    let mount = Mount::open(site.volume.root()).unwrap();
    let (before, buffers) = (site.moved(), mount.stats().unwrap().buffers);
    let mut other = Command::new(std::env::current_exe().unwrap());
    other.args(["--gpu", &gpu.index().to_string(), "--read-endlessly"]).arg(site.volume.path("file"));
    let mut other = other.spawn().unwrap();
    site.wait_for_reads(before);
    other.kill().unwrap();
    other.wait().unwrap();
    let begun = Instant::now();
    while mount.stats().unwrap().buffers > buffers {
        assert!(begun.elapsed() < Duration::from_secs(40), "its buffer stays");
        thread::sleep(Duration::from_millis(5));
    }
    site.read_parts("read_by_blocks", (64, 64), 64, 0, 100_000);
}

/// Has kernels read a file of whole pages until one crashes, and drops their ring: the other half
/// of a check.
pub fn read_and_crash(gpu: Gpu, path: &Path) {
    let kernels = Kernels::new(gpu, path, GpuRingSettings::default());
    kernels.launch("crashing_reads", 64, 128, &[fs::metadata(path).unwrap().len() / PAGE as u64, ENDLESS]);
    {
        let _entered = gpu.enter().unwrap();
        // SAFETY: it is the default stream.
        let ended = unsafe { sys::cuStreamSynchronize(ptr::null_mut()) };
        assert_ne!(ended, sys::CUresult::CUDA_SUCCESS, "a kernel that crashed ended well");
    }
    drop(kernels);
}

fn a_crashing_kernel(gpu: Gpu) {
    let site = Site::new(gpu, 16 * MIB, GpuRingSettings::default());
    let mount = Mount::open(site.volume.root()).unwrap();
    let buffers = mount.stats().unwrap().buffers;
    let begun = Instant::now();
    let mut other = Command::new(std::env::current_exe().unwrap());
    other.args(["--gpu", &gpu.index().to_string(), "--read-and-crash"]).arg(site.volume.path("file"));
    assert!(other.status().unwrap().success(), "the process of a kernel that crashed");
    assert!(begun.elapsed() < Duration::from_secs(20), "its ring was dropped after {:?}", begun.elapsed());
    assert_eq!(mount.stats().unwrap().buffers, buffers);
    site.read_parts("read_by_blocks", (64, 64), 64, 0, 100_000);
}

/// Blocks of a kernel that read random pages of a file, for a bench.
pub struct KernelReads(Kernels);

impl KernelReads {
    /// Of a file of words that are what `word_at` says.
    pub fn new(gpu: Gpu, path: &Path, settings: GpuRingSettings) -> KernelReads {
        KernelReads(Kernels::new(gpu, path, settings))
    }

    /// How long it takes until each of so many blocks has read `count` of the first `pages` pages,
    /// and compared each word.
    pub fn run(&self, blocks: u32, pages: u64, count: u64) -> Duration {
        let reports = Reports::new(self.0.gpu, blocks as usize);
        let begun = Instant::now();
        self.0.launch("random_reads", blocks, 128, &[pages, count, reports.memory.address()]);
        self.0.wait();
        let took = begun.elapsed();
        reports.check(0);
        took
    }
}
