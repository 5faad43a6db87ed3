//! The laboratory's test of GPU memory that the SSD reaches itself, through the library, run in its
//! guest: the software CUDA driver's memory lies in the BARs of devices there.

use std::error::Error;
use std::fs;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Instant;

use clap::{Parser, Subcommand};
use gpunvme::gpu::{Segment, Settings, Transfers};
use gpunvme::{File, Mount, Moved, Route};
use gpunvme_cuda::{Cuda, DeviceAllocation, Gpu, Which};
use gpunvme_tests::cuda::Pinned;
use gpunvme_tests::random::Random;
use gpunvme_tests::tree;

type Outcome = Result<(), Box<dyn Error>>;

/// Bytes of an allocation.
const LEN: u64 = 3 << 20;

#[derive(Parser)]
struct Arguments {
    /// A file of a mount; made where there is none
    file: PathBuf,
    #[command(subcommand)]
    action: Action,
}

#[derive(Subcommand)]
enum Action {
    /// Moves random pieces of the file to and from two allocations, and compares all with a model
    Storm {
        #[arg(long, default_value = "1")]
        seed: u64,
        #[arg(long, default_value = "200")]
        rounds: u64,
    },
    /// Uses more memory than may be registered, frees some of it, and forgets some
    Churn,
    /// Reads all of the file into memory
    Read,
    /// Prints what the first use of memory costs, and what later ones do
    Measure {
        /// Length of the memory in bytes
        #[arg(long, default_value = "33554432")]
        len: u64,
    },
}

fn main() -> Outcome {
    let arguments = Arguments::parse();
    let gpu = Cuda::load()?.gpu(Which::Index(0))?;
    drop(File::create(&arguments.file)?);
    match arguments.action {
        Action::Storm { seed, rounds } => storm(gpu, &arguments.file, seed, rounds),
        Action::Churn => churn(gpu, &arguments.file),
        Action::Read => read(gpu, &arguments.file),
        Action::Measure { len } => measure(gpu, &arguments.file, len),
    }
}

/// Memory, and what should be in it.
struct Memory {
    gpu: Gpu,
    allocation: DeviceAllocation,
    pinned: Pinned,
    model: Vec<u8>,
}

impl Memory {
    fn new(gpu: Gpu, seed: u64) -> Result<Memory, Box<dyn Error>> {
        let mut memory = Memory {
            gpu,
            allocation: gpu.alloc(LEN as usize)?,
            pinned: Pinned::new(gpu, LEN as usize),
            model: tree::pattern(seed, LEN as usize),
        };
        memory.pinned.put(&gpu.stream()?, memory.allocation.address(), &memory.model);
        Ok(memory)
    }

    fn is_right(&mut self) -> Result<bool, Box<dyn Error>> {
        let found = self.pinned.get(&self.gpu.stream()?, self.allocation.address(), LEN as usize);
        Ok(found == self.model)
    }

    fn segment(&self, file_offset: u64, offset: u64, len: u64) -> Segment {
        Segment { file_offset, address: self.allocation.address() + offset, len }
    }
}

/// Every byte that the device moves goes straight to or from the memory, and to the place that it
/// was meant for.
fn storm(gpu: Gpu, path: &Path, seed: u64, rounds: u64) -> Outcome {
    let (file, ordinary) = (File::create(path)?, fs::OpenOptions::new().read(true).write(true).open(path)?);
    let transfers = Transfers::new(&Mount::open(path)?)?;
    let mut random = Random(seed);
    let mut content = tree::pattern(seed, LEN as usize);
    ordinary.write_all_at(&content, 0)?;
    let mut memories = [Memory::new(gpu, seed + 1)?, Memory::new(gpu, seed + 2)?];
    let mut sum = Moved::default();
    for round in 0..rounds {
        let writes = random.below(2) == 0;
        let count = 1 + random.below(8);
        let room = LEN / count;
        // Segments lie apart, in memory and in the file.
        let mut segments = Vec::new();
        for number in 0..count {
            let which = random.below(2) as usize;
            let (within, at) = (random.place(room), random.place(room));
            let len = random.place(room - within.max(at)).max(1);
            let (offset, file_offset) = (number * room + within, number * room + at);
            segments.push(memories[which].segment(file_offset, offset, len));
            let (from, to, len) = (offset as usize, file_offset as usize, len as usize);
            let memory = &mut memories[which].model[from..from + len];
            if writes {
                content[to..to + len].copy_from_slice(memory);
            } else {
                memory.copy_from_slice(&content[to..to + len]);
            }
        }
        // SAFETY: the memory is this program's, and segments do not overlap.
        let done = unsafe { if writes { transfers.write(&file, &segments) } else { transfers.read(&file, &segments) } }?;
        check(round, "bytes", done.bytes() == segments.iter().map(|segment| segment.len).sum::<u64>())?;
        let Moved { p2p, bounce, cache: _, host, hole, edge } = done.moved;
        check(round, "the route", bounce + host + hole == 0)?;
        (sum.p2p, sum.edge) = (sum.p2p + p2p, sum.edge + edge);
        for memory in &mut memories {
            check(round, "the memory", memory.is_right()?)?;
        }
        let mut found = vec![0; LEN as usize];
        ordinary.read_exact_at(&mut found, 0)?;
        check(round, "the file", found == content)?;
    }
    check(rounds, "bytes by p2p", sum.p2p > 0)?;
    println!("{rounds} rounds: {sum:?}");
    Ok(())
}

/// Two allocations take turns in a budget for one; then one is freed, and another lies at its
/// address.
fn churn(gpu: Gpu, path: &Path) -> Outcome {
    let bytes = tree::pattern(9, LEN as usize);
    fs::write(path, &bytes)?;
    let (file, mount) = (File::open(path)?, Mount::open(path)?);
    let mut settings = Settings::default();
    settings.registered = Some(LEN + LEN / 2);
    let transfers = Transfers::with(&mount, settings)?;
    // What is registered besides is the staging pool of a GPU that needs one.
    let registered = || -> Result<u64, Box<dyn Error>> { Ok(mount.stats()?.buffers) };
    let fill = |memory: &mut Memory| -> Outcome {
        // SAFETY: the memory is this program's.
        let done = unsafe { transfers.read(&file, &[memory.segment(0, 0, LEN)]) }?;
        memory.model.copy_from_slice(&bytes);
        check(0, "the route", done.moved.p2p == LEN && memory.is_right()?)
    };
    let before = registered()?;
    let (mut one, mut other) = (Memory::new(gpu, 1)?, Memory::new(gpu, 2)?);
    for _ in 0..5 {
        fill(&mut one)?;
        check(1, "one is registered", registered()? == before + 1)?;
        fill(&mut other)?;
        check(2, "the other is, and only it", registered()? == before + 1)?;
    }
    transfers.forget(other.allocation.address(), 1);
    check(3, "it is forgotten", registered()? == before)?;
    fill(&mut other)?;
    let (address, memory) = (other.allocation.address(), other);
    drop(memory);
    let mut again = Memory::new(gpu, 3)?;
    check(4, "the driver uses addresses again", again.allocation.address() == address)?;
    fill(&mut again)?;
    check(5, "what was freed is not registered any more", registered()? == before + 1)?;
    check(6, "no other memory was touched", one.is_right()?)?;
    drop(transfers);
    check(7, "all is given up at the end", registered()? == before)
}

fn read(gpu: Gpu, path: &Path) -> Outcome {
    let file = File::open(path)?;
    let transfers = Transfers::new(&Mount::open(path)?)?;
    let memory = gpu.alloc(file.size()?.max(1) as usize)?;
    let segment = Segment { file_offset: 0, address: memory.address(), len: file.size()? };
    // SAFETY: the memory is this program's.
    let done = unsafe { transfers.read(&file, &[segment]) }?;
    println!("{:?}", done.moved);
    Ok(())
}

fn measure(gpu: Gpu, path: &Path, len: u64) -> Outcome {
    const TIMES: u32 = 10_000;
    let transfers = Transfers::new(&Mount::open(path)?)?;
    let memory = gpu.alloc(len as usize)?;
    let start = Instant::now();
    let (route, reason) = transfers.route(memory.address())?;
    let first = start.elapsed();
    let start = Instant::now();
    for at in 0..u64::from(TIMES) {
        transfers.route(memory.address() + at)?;
    }
    let later = start.elapsed() / TIMES;
    let why = if route == Route::P2p { String::new() } else { format!(", because {reason}") };
    println!("{} MiB, {route}{why}: first use {first:?}, later uses {later:?} each", len >> 20);
    Ok(())
}

fn check(round: u64, what: &str, right: bool) -> Outcome {
    if right { Ok(()) } else { Err(format!("{round}: {what}").into()) }
}
