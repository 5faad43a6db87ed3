//! Files of a real mount in GPU memory, with the software CUDA driver.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::thread;
use std::time::Duration;

use gpunvme::gpu::{Segment, Transfers};
use gpunvme::{Error, File, Mount};
use gpunvme_gpupath::cuda::{Cuda, DeviceAllocation, Gpu, Which};
use gpunvme_tests::cuda::{Pinned, Site, TRANSFER_CHECKS};
use gpunvme_tests::mounted::{Mounted, text};
use gpunvme_tests::software_cuda::{self, with_software_cuda};
use gpunvme_tests::{needs_mount, programs, tree};

const MIB: u64 = 1 << 20;

fn gpu() -> Gpu {
    Cuda::load().unwrap().gpu(Which::Index(0)).unwrap()
}

/// A file of that many MiB on a volume, and as much memory.
fn sample(volume: &Mounted, mib: u64) -> (File, Vec<u8>, DeviceAllocation) {
    let bytes = tree::pattern(mib, (mib * MIB) as usize);
    fs::write(volume.path("sample"), &bytes).unwrap();
    (File::open(volume.path("sample")).unwrap(), bytes, gpu().alloc((mib * MIB) as usize).unwrap())
}

fn look(memory: &DeviceAllocation) -> Vec<u8> {
    Pinned::new(gpu(), memory.len()).get(&gpu().stream().unwrap(), memory.address(), memory.len()).to_vec()
}

fn whole(memory: &DeviceAllocation) -> [Segment; 1] {
    [Segment { file_offset: 0, address: memory.address(), len: memory.len() as u64 }]
}

#[test]
fn what_holds_on_a_gpu_holds_on_the_software_driver() {
    needs_mount!();
    with_software_cuda("gpus=2", || {
        let site = Site::new(gpu());
        for (name, check) in TRANSFER_CHECKS {
            println!("{name}");
            check(&site);
        }
    });
}

/// The sixth copy is one of those that empty the pool.
#[test]
fn a_copy_that_fails_is_named_with_its_file_and_offset() {
    needs_mount!();
    with_software_cuda("copy-fails=6", || {
        let volume = Mounted::new();
        let (file, bytes, memory) = sample(&volume, 16);
        let transfers = Transfers::new(&Mount::open(volume.root()).unwrap()).unwrap();
        // SAFETY: the memory is this test's.
        let error = unsafe { transfers.read(&file, &whole(&memory)) }.unwrap_err();
        let Error::Copy { path, error: Some(cuda), done, .. } = &error else { panic!("{error}") };
        assert_eq!(cuda.name, "CUDA_ERROR_ECC_UNCORRECTABLE");
        assert_eq!(Path::new(path), volume.path("sample"));
        assert!(error.to_string().contains(" at byte ") && error.to_string().contains(cuda.name), "{error}");
        assert!(done.bytes() >= 5 * MIB / 4 && done.bytes() < 16 * MIB, "{done:?}");
        // It was that one copy.
        // SAFETY: as above.
        assert_eq!(unsafe { transfers.read(&file, &whole(&memory)) }.unwrap().bytes(), 16 * MIB);
        assert!(look(&memory) == bytes);
    });
}

/// Processor time of this process's thread that serves requests, in clock ticks.
fn worker_ticks() -> u64 {
    let tasks = fs::read_dir("/proc/self/task").unwrap();
    let stat = tasks
        .map(|task| fs::read_to_string(task.unwrap().path().join("stat")).unwrap())
        .find(|stat| stat.contains("(gpunvme)"))
        .expect("a thread for requests");
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap().split_whitespace().collect();
    fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
}

#[test]
fn idle_transfers_cost_nothing_and_wake_up() {
    needs_mount!();
    with_software_cuda("", || {
        let volume = Mounted::new();
        let (file, _, memory) = sample(&volume, 1);
        let transfers = Transfers::new(&Mount::open(volume.root()).unwrap()).unwrap();
        for _ in 0..3 {
            // SAFETY: the memory is this test's.
            assert_eq!(unsafe { transfers.read(&file, &whole(&memory)) }.unwrap().bytes(), MIB);
            thread::sleep(Duration::from_millis(50));
            let before = worker_ticks();
            thread::sleep(Duration::from_millis(500));
            assert!(worker_ticks() - before <= 2, "the worker is spinning");
        }
    });
}

#[test]
fn a_c_program_moves_files_into_and_out_of_gpu_memory() {
    needs_mount!();
    let volume = Mounted::new();
    let bytes = tree::pattern(3, 16 << 20);
    fs::write(volume.path("from"), &bytes).unwrap();
    let program = volume.image().path().with_file_name("gpu");
    let (library, cuda) = (programs::folder(), software_cuda::folder());
    let output = Command::new("cc")
        .args(["-std=c11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", "-pedantic", "-O1"])
        .args([concat!(env!("CARGO_MANIFEST_DIR"), "/tests/c/gpu.c"), "-I"])
        .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/../client/include"))
        .args([Path::new("-L"), library, Path::new("-L"), cuda])
        .args(["-lgpunvme", "-lcuda", "-o"])
        .arg(&program)
        .output()
        .expect("cc runs");
    assert!(output.status.success(), "{}", text(&output));
    let output = Command::new("timeout")
        .args([Path::new("60"), &program, &volume.path("from"), &volume.path("to")])
        .arg(bytes.len().to_string())
        .env("LD_LIBRARY_PATH", format!("{}:{}", cuda.display(), library.display()))
        .output()
        .expect("timeout runs");
    assert!(output.status.success(), "{}", text(&output));
    assert!(fs::read(volume.path("to")).unwrap() == bytes);
}
