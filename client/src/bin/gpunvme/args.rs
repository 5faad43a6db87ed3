//! The command line.

use clap::{Parser, Subcommand};
use gpunvme::{Require, Route};
use gpunvme_cuda::NoGpuName;
pub use gpunvme_cuda::Which;
use gpunvme_programs::completions::{Completions, Printed};
use gpunvme_programs::sets;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

/// Files of a gpunvme mount, by way of the device itself
#[derive(Parser)]
#[command(name = "gpunvme", version, propagate_version = true, arg_required_else_help = true)]
pub struct Args {
    /// Print JSON
    #[arg(long, global = true)]
    pub json: bool,
    /// Print what a shell needs to complete this command line
    #[arg(long, value_name = "SHELL", value_parser = Completions)]
    pub completions: Option<Printed>,
    #[command(subcommand)]
    pub command: Command,
}

#[derive(clap::Args)]
pub struct Doctor {
    /// An SSD: /dev/nvme1n1, a PCI address, vfio:ADDRESS, sim:PATH or an image file, with the other
    /// members of its volume; otherwise all NVMe controllers. With --gpu a directory of a mount
    #[arg(value_parser = clap::builder::NonEmptyStringValueParser::new())]
    pub device: Option<String>,
    /// Use this GPU, by its number or UUID, and prove each route between it and a mount
    #[arg(long, value_name = "GPU", conflicts_with = "peer")]
    pub gpu: Option<Which>,
    /// The PCI address of a function whose BAR is to be reached instead of a GPU's
    #[arg(long, value_name = "ADDRESS")]
    pub peer: Option<String>,
    /// Add what was found of each SSD and each path to the table of all SSDs
    #[arg(short, long)]
    pub verbose: bool,
    /// Look at the copy of another machine's /sys, /proc and /dev in this folder
    #[arg(long, value_name = "DIR", conflicts_with = "gpu")]
    pub tree: Option<PathBuf>,
}

#[derive(clap::Args)]
pub struct Bench {
    /// A directory of a mount. A file without a name is written there, read and overwritten, and is
    /// gone afterwards, however the command ends
    pub dir: PathBuf,
    /// The memory to read into and to write from: `host`, or `gpu:NUMBER` or `gpu:UUID`
    #[arg(long, value_name = "MEMORY", default_value = "host", value_parser = memory_to_measure)]
    pub memory: Memory,
    /// The length of the file, in bytes (K, M, G and T count in powers of 1024)
    #[arg(long, value_name = "BYTES", value_parser = size, default_value = "1G")]
    pub length: u64,
    /// Bytes of a request
    #[arg(long, value_name = "BYTES,...", value_parser = size, value_delimiter = ',', default_value = "4K,64K,1M,16M")]
    pub sizes: Vec<u64>,
    /// Threads, each with one request in flight
    #[arg(long, value_name = "NUMBER,...", value_parser = clap::value_parser!(u16).range(1..=1024), value_delimiter = ',',
          default_value = "1,4,16")]
    pub threads: Vec<u16>,
    /// How long to measure each size with each number of threads, reading and writing
    #[arg(long, value_name = "SECONDS", value_parser = seconds, default_value = "1")]
    pub time: Duration,
    /// Keep the figures in this file, as JSON
    #[arg(long, value_name = "FILE")]
    pub save: Option<PathBuf>,
    /// Show what changed since a run whose figures were kept
    #[arg(long, value_name = "FILE")]
    pub compare: Option<PathBuf>,
    /// Plot bandwidth by size, as SVG
    #[arg(long, value_name = "FILE")]
    pub plot: Option<PathBuf>,
}

#[derive(Subcommand)]
pub enum Command {
    /// Measure reads and writes of a mount: bandwidth and latency, by size and number of threads
    Bench(Bench),
    /// Tell which route this machine can take between SSD and GPU, and what would make it faster
    Doctor(Doctor),
    /// Make a mounted volume as large as its devices have become, or give it further devices
    Grow(crate::grow::Grow),
    /// Bring a set of objects from a store, or a folder, into a folder of a mount
    Hydrate(sets::Hydrate),
    /// Tell what a mount is and can do
    Info {
        /// The mount, or anything in it
        mount: PathBuf,
    },
    /// Have the kernel drop files from its page cache
    Cool(Cached),
    /// Tell which events the daemon of a mount logs, or change it
    Log {
        /// The mount, or anything in it
        mount: PathBuf,
        /// What to log from now on, in the syntax of the mount option `log`, as `debug`
        filter: Option<String>,
    },
    /// Tell where a file lies on the device
    Map {
        /// The file
        file: PathBuf,
        /// Tell which parts of it the kernel has in its page cache instead
        #[arg(long)]
        resident: bool,
    },
    /// Make an image of a volume's metadata, without names and contents, for a report of a fault
    MetadataDump(crate::metadata_dump::MetadataDump),
    /// Look after an NVMe controller that no mount uses
    Nvme(crate::nvme::Nvme),
    /// Tell which volume a device carries, in the form that udev imports
    Probe {
        /// A block device or an image file
        device: PathBuf,
    },
    /// Bring a folder of a mount into a store, or a folder
    Publish(sets::Publish),
    /// Remove sets that were hydrated until the others keep a quota
    Evict(sets::Evict),
    /// What sets there are
    #[command(subcommand)]
    Stage(sets::Stage),
    /// Read a file into registered memory, and tell how it moved
    Read(Read),
    /// Run a program that speaks cuFile, with our libcufile before NVIDIA's
    Run(crate::run::Run),
    /// Write a file from registered memory, and tell how it moved
    Write(Write),
    /// Tell what a mount did since it was mounted
    Stats(crate::stats::Stats),
    /// Make everything durable that was done to a mount
    Sync {
        /// Mounts, or anything in them
        #[arg(required = true, value_name = "MOUNT")]
        mounts: Vec<PathBuf>,
    },
    /// Show which processes, or files, keep a mount busy
    Top(crate::top::Top),
    /// Tell the devices of a mount which of its blocks no file has, so that they stay fast
    Trim(Trim),
    /// Change the label or the UUID of a volume that is not mounted
    Tune(crate::tune::Tune),
    /// Have the kernel read files into its page cache
    Warm(Cached),
}

#[derive(clap::Args)]
pub struct Cached {
    /// Files, and folders with all that is in them
    #[arg(required = true, value_name = "PATH")]
    pub paths: Vec<PathBuf>,
}

#[derive(clap::Args)]
pub struct Trim {
    /// Where on the volume to begin, in bytes (K, M, G and T count in powers of 1024)
    #[arg(short, long, value_name = "BYTES", value_parser = size, default_value = "0")]
    pub offset: u64,
    /// How many bytes of the volume to look at; otherwise to its end
    #[arg(short, long, value_name = "BYTES", value_parser = size)]
    pub length: Option<u64>,
    /// Free bytes that lie side by side, at least, to be worth telling
    #[arg(short, long, value_name = "BYTES", value_parser = size, default_value = "0")]
    pub minimum: u64,
    /// The mount, or anything in it
    pub mount: PathBuf,
}

#[derive(clap::Args)]
pub struct Read {
    /// The file
    pub file: PathBuf,
    /// The memory to read into: `host`, `gpu:NUMBER` or `gpu:UUID`, or `pci:ADDRESS/BAR[:OFFSET]`,
    /// a PCI device's memory
    #[arg(long, value_name = "MEMORY", default_value = "host")]
    pub to: Memory,
    /// Where in the file to begin, in bytes (K, M, G and T count in powers of 1024)
    #[arg(long, value_name = "BYTES", value_parser = size, default_value = "0")]
    pub offset: u64,
    /// How much to read, in bytes; otherwise to the end of the file
    #[arg(long, value_name = "BYTES", value_parser = size)]
    pub length: Option<u64>,
    /// Fail rather than take another route, or rather than have the CPU copy what is not aligned
    #[arg(long, value_name = "ROUTE")]
    pub require: Vec<Demand>,
    /// Print the SHA-256 of what arrived in the buffer
    #[arg(long)]
    pub checksum: bool,
    /// Copy what arrived to a file, or to standard output (`-`)
    #[arg(long, value_name = "FILE")]
    pub output: Option<PathBuf>,
}

#[derive(clap::Args)]
pub struct Write {
    /// The file; created where there is none
    pub file: PathBuf,
    /// The memory to write from: `host`, `gpu:NUMBER` or `gpu:UUID`, or
    /// `pci:ADDRESS/BAR[:OFFSET]`, a PCI device's memory
    #[arg(long, value_name = "MEMORY", default_value = "host")]
    pub from: Memory,
    /// Where the data comes from, `-` being standard input; otherwise standard input, and of a PCI
    /// device what its memory holds
    #[arg(long, value_name = "FILE")]
    pub input: Option<PathBuf>,
    /// How much to write, in bytes; otherwise all of the input, or all of a device's memory from
    /// the offset on
    #[arg(long, value_name = "BYTES", value_parser = size)]
    pub length: Option<u64>,
    /// Where in the file to write, in bytes, and leave the rest of it; otherwise the file is
    /// replaced
    #[arg(long, value_name = "BYTES", value_parser = size)]
    pub offset: Option<u64>,
    /// Fail rather than take another route, or rather than have the CPU copy what is not aligned
    #[arg(long, value_name = "ROUTE")]
    pub require: Vec<Demand>,
    /// Print the SHA-256 of what was in the buffer
    #[arg(long)]
    pub checksum: bool,
}

/// What a transfer must not do otherwise.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Demand {
    /// Straight between the device and GPU memory
    P2p,
    /// Through a staging pool
    Bounce,
    /// Host memory
    Host,
    /// No byte copied by the CPU
    Direct,
}

/// What all demands come to. Of several routes the last counts.
pub fn require(demands: &[Demand]) -> Require {
    demands.iter().fold(Require::default(), |require, demand| match demand {
        Demand::P2p => Require { route: Some(Route::P2p), ..require },
        Demand::Bounce => Require { route: Some(Route::Bounce), ..require },
        Demand::Host => Require { route: Some(Route::Host), ..require },
        Demand::Direct => Require { direct: true, ..require },
    })
}

/// Where the buffer is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Memory {
    /// A memfd of this process.
    Host,
    /// A GPU's, allocated for the purpose.
    Gpu(Which),
    /// A PCI device's, which stands in for a GPU's where there is none.
    Pci(PciMemory),
}

/// What a BAR of a PCI device holds, from an offset on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PciMemory {
    pub address: String,
    /// The part of a resource file's name behind `resource`.
    pub resource: String,
    /// In bytes.
    pub offset: u64,
}

impl FromStr for Memory {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text.split_once(':') {
            None if text == "host" => Ok(Memory::Host),
            Some(("pci", memory)) => memory.parse().map(Memory::Pci),
            Some(("gpu", which)) => which.parse().map(Memory::Gpu).map_err(|error: NoGpuName| error.to_string()),
            _ => Err("the memory must be host, gpu:NUMBER, gpu:UUID or pci:ADDRESS/BAR[:OFFSET]".into()),
        }
    }
}

impl FromStr for PciMemory {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (address, bar) =
            text.split_once('/').ok_or("a PCI device's memory is pci:ADDRESS/BAR[:OFFSET], as in pci:0000:02:00.0/2:1M")?;
        let (resource, offset) = match bar.split_once(':') {
            Some((resource, offset)) => (resource, size(offset).map_err(|why| format!("the offset {why}"))?),
            None => (bar, 0),
        };
        // They become part of a path.
        let is_address =
            address.bytes().all(|byte| byte.is_ascii_hexdigit() || byte == b':' || byte == b'.') && address.contains(':');
        let is_bar = matches!(resource.strip_suffix("_wc").unwrap_or(resource), "0" | "1" | "2" | "3" | "4" | "5");
        match (is_address, is_bar) {
            (true, true) => Ok(PciMemory { address: address.to_owned(), resource: resource.to_owned(), offset }),
            (false, _) => Err(format!("{address:?} is no PCI address, as 0000:02:00.0 is one")),
            (_, false) => Err(format!("{resource:?} is no BAR: 0 to 5, or with _wc behind it")),
        }
    }
}

fn size(text: &str) -> Result<u64, String> {
    let (digits, shift) = match text.char_indices().last() {
        Some((at, 'k' | 'K')) => (&text[..at], 10),
        Some((at, 'm' | 'M')) => (&text[..at], 20),
        Some((at, 'g' | 'G')) => (&text[..at], 30),
        Some((at, 't' | 'T')) => (&text[..at], 40),
        _ => (text, 0),
    };
    let number: u64 = digits.parse().map_err(|_| "must be a number of bytes, such as 4096, 64K or 1G".to_owned())?;
    number
        .checked_mul(1 << shift)
        .filter(|&bytes| bytes <= i64::MAX as u64)
        .ok_or_else(|| "is more than a file can hold".to_owned())
}

fn memory_to_measure(text: &str) -> Result<Memory, String> {
    match text.parse()? {
        Memory::Pci(_) => Err("the memory must be host, gpu:NUMBER or gpu:UUID".into()),
        memory => Ok(memory),
    }
}

fn seconds(text: &str) -> Result<Duration, String> {
    let wrong = || "must be a number of seconds from 0.001 to 86400".to_owned();
    let seconds: f64 = text.parse().map_err(|_| wrong())?;
    if (0.001..=86400.0).contains(&seconds) { Ok(Duration::from_secs_f64(seconds)) } else { Err(wrong()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_suffixes() {
        assert_eq!([size("0"), size("4096"), size("64K"), size("2g")], [Ok(0), Ok(4096), Ok(65536), Ok(2 << 30)]);
        for wrong in ["", "K", "-1", "1.5M", "8388608T", "99999999999999999999", "1é"] {
            assert!(size(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn memories_have_names() {
        let pci = |address: &str, resource: &str, offset| {
            Ok(Memory::Pci(PciMemory { address: address.into(), resource: resource.into(), offset }))
        };
        assert_eq!("host".parse(), Ok(Memory::Host));
        assert_eq!("pci:0000:02:00.0/2".parse(), pci("0000:02:00.0", "2", 0));
        assert_eq!("pci:10000:02:1f.7/4_wc:1M".parse(), pci("10000:02:1f.7", "4_wc", 1 << 20));
        assert_eq!("gpu:1".parse(), Ok(Memory::Gpu(Which::Index(1))));
        assert!(matches!("gpu:GPU-6a4e3c7e-1f4d-4b1e-9c59-0d6f0a8f2b11".parse(), Ok(Memory::Gpu(Which::Uuid(_)))));
        assert!("gpu:first".parse::<Memory>().unwrap_err().contains("names no GPU"));
        let wrong =
            ["", "hos", "host:0", "pci", "pci:0000:02:00.0", "pci:../etc/2", "pci:0000:02:00.0/6", "pci:0000:02:00.0/2/../0"];
        for wrong in wrong.into_iter().chain(["pci:0000:02:00.0/2:", "pci:0000:02:00.0/2:1Q", "pci:./2", "pci:/2", "gpu"]) {
            assert!(wrong.parse::<Memory>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn times_are_bounded() {
        assert_eq!([seconds("1"), seconds("0.25")], [Ok(Duration::from_secs(1)), Ok(Duration::from_millis(250))]);
        for wrong in ["", "0", "-1", "NaN", "inf", "86401", "1s"] {
            assert!(seconds(wrong).is_err(), "{wrong}");
        }
        assert!(memory_to_measure("pci:0000:02:00.0/2").is_err());
    }

    #[test]
    fn demands_add_up() {
        assert_eq!(require(&[]), Require::default());
        assert_eq!(require(&[Demand::P2p, Demand::Direct]), Require { route: Some(Route::P2p), direct: true });
    }
}
