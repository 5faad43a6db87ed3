//! Measures what kernels that ask for files themselves reach, beside what a program would use
//! instead, in one run; every word is compared, in the measured time or by the same reads after it.
//! Prints tables, and asserts nothing about time.
//!
//! Volumes are image files in `$TMPDIR`, and so are the files of the others. The project's programs
//! are found in the folder that GPUNVME_BIN names.

mod cold;
mod gather;
mod graph;
mod hits;
mod layers;
mod near;
mod reads;
mod row;
mod transfers;

use clap::Parser;
use gpunvme_cuda::{Cuda, Which};
use std::process::ExitCode;

#[derive(Parser)]
struct Arguments {
    /// The GPU, by its number or UUID.
    #[arg(long, default_value = "0")]
    gpu: Which,
    /// Reads, and what is in no memory (cold, near), are of so many loop devices: a volume of all
    /// of them, beside btrfs over as many, for which it needs mkfs.btrfs, or ext4 on one.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=8))]
    devices: u8,
    /// A look at whether it works, not at how fast.
    #[arg(long)]
    quick: bool,
    /// Leave out what runs kernels: for the software driver, which runs none.
    #[arg(long)]
    without_kernels: bool,
    /// Only these: reads, array, cold, near, graph, layers.
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let gpu = match Cuda::load().map_err(|reason| reason.to_string()) {
        Ok(cuda) => match cuda.gpu(arguments.gpu) {
            Ok(gpu) => gpu,
            Err(reason) => return failed(&reason.to_string()),
        },
        Err(reason) => return failed(&reason),
    };
    println!("{} ({}), kernels {}", gpu.name(), gpu.pci_address(), if arguments.without_kernels { "left out" } else { "run" });
    let wants = |name: &str| arguments.only.is_empty() || arguments.only.iter().any(|only| only == name);
    let (quick, kernels, devices) = (arguments.quick, !arguments.without_kernels, arguments.devices.into());
    if wants("reads") {
        reads::measure(gpu, quick, kernels, devices);
    }
    if wants("array") && kernels {
        hits::measure(gpu, quick);
    }
    if wants("cold") && kernels {
        cold::measure(gpu, quick, devices);
    }
    if wants("near") && kernels {
        near::measure(gpu, quick, devices);
    }
    if wants("graph") && kernels {
        graph::measure(gpu, quick);
    }
    if wants("layers") {
        layers::measure(gpu, quick, kernels);
    }
    println!("\nevery word was compared{}", if kernels { "" } else { ", but those of layers, which only kernels use" });
    ExitCode::SUCCESS
}

fn failed(reason: &str) -> ExitCode {
    eprintln!("kernels-bench: {reason}");
    ExitCode::FAILURE
}
