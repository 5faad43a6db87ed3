//! The ring of a GPU, as its kernels find it, and what it costs the daemon while they are idle.

use std::collections::HashMap;
use std::ffi::OsString;
use std::fs;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use gpunvme::gpu::{GpuRing, GpuRingSettings};
use gpunvme::{Error, File, Mount};
use gpunvme_abi::ring::{Submission, Word};
use gpunvme_cuda::{Cuda, Place, Which};
use gpunvme_tests::cuda::Pinned;
use gpunvme_tests::mounted::Mounted;
use gpunvme_tests::software_cuda::with_software_cuda;
use gpunvme_tests::{needs_mount, tree};
use zerocopy::{FromZeros, IntoBytes};

/// A ring as kernels use it: this thread submits and completes as a kernel would, and then does
/// nothing, as kernels do that have ended.
#[test]
fn an_idle_gpu_ring_costs_the_daemon_nothing_after_a_millisecond() {
    needs_mount!();
    with_software_cuda("", || {
        let volume = Mounted::new();
        fs::write(volume.path("file"), tree::pattern(1, 65536)).unwrap();
        let mount = Mount::open(volume.root()).unwrap();
        mount.sync().unwrap();
        let ring = GpuRing::on_gpu(&mount, 0, GpuRingSettings::default()).unwrap();
        let file = ring.attach(&File::open(volume.path("file")).unwrap()).unwrap();
        let mut kernel = Kernel::new(&ring);
        let mut spent = Vec::new();
        for round in 0..20 {
            for _ in 0..1 + round % 3 * 10 {
                kernel.read(file.name(), 4096);
            }
            let idle = Instant::now();
            while idle.elapsed() < Duration::from_millis(1) {
                std::hint::spin_loop();
            }
            let before = processor_times(&volume);
            thread::sleep(Duration::from_millis(100));
            let after = processor_times(&volume);
            spent.push(after.iter().map(|(thread, time)| time - before.get(thread).unwrap_or(&0)).sum::<u64>());
        }
        // Where the machine has other work, a thread that looks for more sleeps later.
        spent.sort();
        assert!(spent[0] == 0 && spent[spent.len() - 1] < 1_000_000, "{spent:?}");
    });
}

/// What each thread of the daemon has used of a processor, in nanoseconds.
fn processor_times(volume: &Mounted) -> HashMap<OsString, u64> {
    let tasks = fs::read_dir(format!("/proc/{}/task", volume.daemon().as_raw_nonzero())).unwrap();
    let time = |task: std::io::Result<fs::DirEntry>| {
        let task = task.ok()?;
        let scheduled = fs::read_to_string(task.path().join("schedstat")).ok()?;
        // The first of the numbers is what the scheduler gave it.
        Some((task.file_name(), scheduled.split(' ').next()?.parse().ok()?))
    };
    tasks.filter_map(time).collect()
}

/// A kernel's side of a GPU ring, as gpunvme_device.h has it: one request at a time.
struct Kernel {
    memory: u64,
    buffer: u64,
    entries: u32,
    position: u32,
}

impl Kernel {
    fn new(ring: &GpuRing) -> Kernel {
        let handed = ring.for_kernels();
        let field = |at: usize| u64::from_le_bytes(handed.as_bytes()[at..at + 8].try_into().unwrap());
        Kernel { memory: field(0), buffer: field(24), entries: field(40) as u32, position: 0 }
    }

    fn word(&self, word: Word) -> &AtomicU32 {
        // SAFETY: the ring outlives this, and its memory begins with these words, which all change
        // by atomics alone.
        unsafe { AtomicU32::from_ptr((self.memory as usize + word as usize) as *mut u32) }
    }

    fn read(&mut self, file: u64, len: u64) {
        let mut submission = Submission::new_zeroed();
        (submission.command, submission.file, submission.buffer, submission.len) =
            (gpunvme_abi::Command::Read as u32, file, self.buffer, len);
        let at = self.memory as usize + 4096 + (self.position % self.entries) as usize * size_of::<Submission>();
        // SAFETY: the entry is this side's until the tail moves over it: all before it completed.
        unsafe { (at as *mut Submission).write_volatile(submission) };
        self.position += 1;
        self.word(Word::SubmissionTail).store(self.position, Ordering::SeqCst);
        let begun = Instant::now();
        while self.word(Word::CompletionTail).load(Ordering::Acquire) != self.position {
            assert!(begun.elapsed() < Duration::from_secs(20), "no completion came");
            thread::yield_now();
        }
        self.word(Word::CompletionHead).store(self.position, Ordering::SeqCst);
    }
}

/// The software driver runs no kernels; what they would find is where the header says.
#[test]
fn a_ring_of_a_gpu_is_laid_out_for_its_kernels() {
    needs_mount!();
    with_software_cuda("", || {
        let (cuda, volume) = (Cuda::load().unwrap(), Mounted::new());
        let gpu = cuda.gpu(Which::Index(0)).unwrap();
        let mount = Mount::open(volume.root()).unwrap();
        let settings = GpuRingSettings { entries: 64, slot: 8192, ..GpuRingSettings::default() };
        let ring = GpuRing::on_gpu(&mount, 0, settings).unwrap();
        let handed = ring.for_kernels();
        let field = |at: usize| u64::from_le_bytes(handed.as_bytes()[at..at + 8].try_into().unwrap());
        let (memory, staging, state) = (field(0), field(8), field(16));
        assert_eq!((field(32), field(40)), (30_000_000_000, 12288 << 32 | 64), "patience, entries, bytes of a slot");
        for (address, len) in [(memory, 4096 + 64 * 128), (staging, 64 * 12288)] {
            let found = cuda.memory_at(address).unwrap().expect("registered with CUDA");
            assert!(found.place == Place::Host && found.base + found.len >= address + len, "{found:?}");
        }
        assert_eq!(cuda.memory_at(state).unwrap().unwrap().place, Place::Device(gpu));
        let mut pinned = Pinned::new(gpu, 8192);
        // Words and slots, a word for each entry, and a bit for each slot, set where it is free.
        let bytes = pinned.get(&gpu.stream().unwrap(), state, 2048 + 64 * (32 + 4) + 16).to_vec();
        let (before, free) = bytes.split_at(2048 + 64 * (32 + 4));
        assert!(before.iter().all(|byte| *byte == 0));
        assert_eq!(free, [[0xFF; 8], [0; 8]].concat());
        assert_eq!(mount.stats().unwrap().buffers, 1);

        drop(ring);
        assert_eq!(cuda.memory_at(state).unwrap(), None);
        assert_eq!(cuda.memory_at(staging).unwrap(), None);
        assert_eq!(mount.stats().unwrap().buffers, 0);
        let error = GpuRing::on_gpu(&mount, 1, settings).unwrap_err();
        assert!(matches!(error, Error::NoSuchGpu(_)) && error.to_string().starts_with("there is no GPU 1"), "{error}");
    });
}
