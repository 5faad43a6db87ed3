//! Checks on a GPU what the library takes for granted about CUDA, and prints what its calls cost
//! there.
//!
//! The last line is "N passed, N failed"; the exit code is 0 if nothing failed.

use clap::Parser;
use gpunvme_cuda::{Cuda, Which};
use gpunvme_tests::cuda::{
    ARRAY_CHECKS, CHECKS, CRASH_CHECK, HARDWARE_CHECKS, KERNEL_CHECKS, LAYER_CHECK, PAGE_CACHE_CHECKS, Site, TRANSFER_CHECKS,
    facts, measure, measure_page_cache, read_and_crash, read_endlessly,
};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::process::{Command, ExitCode};
use std::time::Instant;

#[derive(Parser)]
struct Arguments {
    /// The GPU, by its number or UUID.
    #[arg(long, default_value = "0")]
    gpu: Which,
    /// Check transfers too, on a volume that is made for it. The project's programs are found in
    /// the folder that GPUNVME_BIN names.
    #[arg(long)]
    transfers: bool,
    /// Only check kernels that read and write files themselves, and layers that are loaded while
    /// others are computed, on volumes that are made for it. (kernels-bench says how fast.)
    #[arg(long)]
    kernels: bool,
    /// Only what a check of kernels kills.
    #[arg(long, hide = true)]
    read_endlessly: Option<PathBuf>,
    /// Only the kernel of a check that crashes.
    #[arg(long, hide = true)]
    read_and_crash: Option<PathBuf>,
    /// Only the check of transfers that leaves this process without its GPU.
    #[arg(long, hide = true)]
    crash: bool,
    /// Only checks whose names have this in them.
    #[arg(long)]
    only: Option<String>,
    /// Print what the driver says of memory of each kind.
    #[arg(long)]
    facts: bool,
    /// Print what calls cost.
    #[arg(long)]
    measure: bool,
    /// Print what it costs to have the GPU read the page cache, with this file of 1 GiB or more.
    #[arg(long)]
    page_cache: Option<PathBuf>,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let cuda = match Cuda::load() {
        Ok(cuda) => cuda,
        Err(reason) => {
            eprintln!("cuda-checks: {reason}");
            return ExitCode::FAILURE;
        }
    };
    println!("CUDA {}", cuda.driver_version());
    for gpu in cuda.gpus() {
        let (address, memory, ordering) = (gpu.pci_address(), gpu.memory() >> 20, gpu.writes_ordering());
        println!(
            "GPU {gpu} at {address}, NUMA node {:?}, {memory} MiB, dma-buf {}, writes ordered for {ordering:?}",
            gpu.numa_node(),
            gpu.dma_buf_supported()
        );
    }
    let gpu = match cuda.gpu(arguments.gpu) {
        Ok(gpu) => gpu,
        Err(reason) => {
            eprintln!("cuda-checks: {reason}");
            return ExitCode::FAILURE;
        }
    };
    if arguments.crash {
        CRASH_CHECK.1(&Site::new(gpu));
        return ExitCode::SUCCESS;
    }
    if let Some(path) = &arguments.read_endlessly {
        read_endlessly(gpu, path);
        return ExitCode::SUCCESS;
    }
    if let Some(path) = &arguments.read_and_crash {
        read_and_crash(gpu, path);
        return ExitCode::SUCCESS;
    }
    let (mut passed, mut failed) = (0, 0);
    let mut run = |name: &str, check: &dyn Fn()| {
        if arguments.only.as_ref().is_some_and(|only| !name.contains(only)) {
            return;
        }
        let start = Instant::now();
        // What went wrong the panic says itself.
        let went_well = catch_unwind(AssertUnwindSafe(check)).is_ok();
        let seconds = start.elapsed().as_secs_f64();
        if went_well {
            passed += 1;
            println!("passed: {name} ({seconds:.1} s)");
        } else {
            failed += 1;
            println!("FAILED: {name} ({seconds:.1} s)");
        }
    };
    if arguments.kernels {
        for (name, check) in KERNEL_CHECKS.iter().chain(ARRAY_CHECKS).chain([&LAYER_CHECK]) {
            run(name, &|| check(gpu));
        }
    } else {
        for (name, check) in CHECKS.iter().chain(HARDWARE_CHECKS) {
            run(name, &|| check(gpu));
        }
    }
    if arguments.transfers {
        let site = Site::new(gpu);
        for (name, check) in TRANSFER_CHECKS.iter().chain(PAGE_CACHE_CHECKS) {
            run(name, &|| check(&site));
        }
        run(CRASH_CHECK.0, &|| {
            let mut alone = Command::new(std::env::current_exe().unwrap());
            assert!(alone.args(["--crash", "--gpu", &arguments.gpu.to_string()]).status().unwrap().success());
        });
    }
    if arguments.facts {
        facts(gpu);
    }
    if arguments.measure {
        measure(gpu);
    }
    if let Some(path) = &arguments.page_cache {
        measure_page_cache(gpu, path);
    }
    println!("{passed} passed, {failed} failed");
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
