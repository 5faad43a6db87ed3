//! The laboratory's test of a device's memory, run in its guest: random transfers against a model,
//! and what must be refused.

use std::error::Error;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use clap::{Parser, Subcommand};
use gpunvme::{Buffer, DeviceMapping, DeviceMemory, File, Memory, Moved, Registered, Route, Segment};
use gpunvme_tests::direct::memfd;
use gpunvme_tests::random::Random;
use gpunvme_tests::{sys, tree};
use rustix::fs::FallocateFlags;

/// Bytes of memory that are used, and the longest that the file gets.
const LEN: usize = 2 << 20;

#[derive(Parser)]
struct Arguments {
    /// A file of a mount; made where there is none
    file: PathBuf,
    #[command(subcommand)]
    action: Action,
}

#[derive(Subcommand)]
enum Action {
    /// Moves random pieces of the file to and from the memory, and compares both with a model
    Storm {
        #[command(flatten)]
        memory: Name,
        #[arg(long, default_value = "1")]
        seed: u64,
        #[arg(long, default_value = "300")]
        rounds: u64,
    },
    /// Reads the file into the memory until it is killed
    Loop {
        #[command(flatten)]
        memory: Name,
    },
    /// Registers the memory, and prints what came of it
    Register {
        #[command(flatten)]
        memory: Name,
        /// As this user, after everything was opened as another
        #[arg(long)]
        user: Option<u32>,
    },
    /// Registers a dma-buf of host memory (udmabuf), and prints what came of it
    Udmabuf,
}

/// A PCI device's memory, or without an address host memory.
#[derive(clap::Args)]
struct Name {
    address: Option<String>,
    resource: Option<String>,
}

impl Name {
    fn device(&self) -> Option<gpunvme::Result<DeviceMemory>> {
        Some(DeviceMemory::pci_resource(self.address.as_ref()?, self.resource.as_deref().unwrap_or("2")))
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let arguments = Arguments::parse();
    let file = File::create(&arguments.file)?;
    match arguments.action {
        Action::Storm { memory, seed, rounds } => match memory.device() {
            None => storm(&arguments.file, file.mount()?.register(Buffer::memfd(LEN)?)?, seed, rounds),
            Some(device) => {
                let device = device?.first(LEN);
                let mapping = device.map()?;
                storm(&arguments.file, (file.mount()?.register(device)?, mapping), seed, rounds)
            }
        },
        Action::Loop { memory } => {
            let device = memory.device().ok_or("a device is needed")??;
            let len = file.size()?.min(device.len() as u64);
            let mut device = file.mount()?.register(device)?;
            loop {
                file.read(&mut device, &[Segment { file_offset: 0, buffer_offset: 0, len }])?;
            }
        }
        Action::Register { memory, user } => {
            let (mount, device) = (file.mount()?, memory.device().ok_or("a device is needed")??);
            if let Some(user) = user {
                let user = rustix::process::Uid::from_raw(user);
                rustix::thread::set_thread_res_uid(user, user, user)?;
            }
            say(mount.register(device))
        }
        Action::Udmabuf => say(file.mount()?.register(DeviceMemory::dma_buf(udmabuf(LEN)?, LEN))),
    }
}

/// Route or reason, by name.
fn say<M>(registered: gpunvme::Result<Registered<M>>) -> Result<(), Box<dyn Error>> {
    match registered {
        Ok(registered) => println!("{} {}", registered.route(), registered.reason()),
        Err(gpunvme::Error::Refused { reason, .. }) => println!("refused {reason}"),
        Err(error) => return Err(error.into()),
    }
    Ok(())
}

/// A dma-buf over a memfd (include/uapi/linux/udmabuf.h).
fn udmabuf(len: usize) -> Result<OwnedFd, Box<dyn Error>> {
    /// `_IOW('u', 0x42, struct udmabuf_create)`.
    const UDMABUF_CREATE: u32 = 0x4018_7542;
    let memory = memfd(len as u64);
    let mut argument = Vec::new();
    argument.extend_from_slice(&(memory.as_raw_fd() as u32).to_ne_bytes());
    argument.extend_from_slice(&0u32.to_ne_bytes());
    argument.extend_from_slice(&0u64.to_ne_bytes());
    argument.extend_from_slice(&(len as u64).to_ne_bytes());
    let device = std::fs::OpenOptions::new().read(true).write(true).open("/dev/udmabuf")?;
    let number = sys::ioctl(std::os::fd::AsFd::as_fd(&device), UDMABUF_CREATE, &mut argument)?;
    Ok(sys::owned(number))
}

/// Registered memory that the CPU can look at.
trait Target {
    type Kind: Memory;
    fn registered(&mut self) -> &mut Registered<Self::Kind>;
    fn look(&self, out: &mut [u8]) -> gpunvme::Result<()>;
    fn put(&mut self, offset: usize, data: &[u8]) -> gpunvme::Result<()>;
}

impl Target for Registered {
    type Kind = Buffer;

    fn registered(&mut self) -> &mut Registered {
        self
    }

    fn look(&self, out: &mut [u8]) -> gpunvme::Result<()> {
        out.copy_from_slice(self);
        Ok(())
    }

    fn put(&mut self, offset: usize, data: &[u8]) -> gpunvme::Result<()> {
        self[offset..offset + data.len()].copy_from_slice(data);
        Ok(())
    }
}

impl Target for (Registered<DeviceMemory>, DeviceMapping) {
    type Kind = DeviceMemory;

    fn registered(&mut self) -> &mut Registered<DeviceMemory> {
        &mut self.0
    }

    fn look(&self, out: &mut [u8]) -> gpunvme::Result<()> {
        self.1.read_at(0, out)
    }

    fn put(&mut self, offset: usize, data: &[u8]) -> gpunvme::Result<()> {
        self.1.write_at(offset, data)
    }
}

fn storm<T: Target>(path: &Path, mut target: T, seed: u64, rounds: u64) -> Result<(), Box<dyn Error>> {
    let file = File::create(path)?;
    let ordinary = std::fs::OpenOptions::new().read(true).write(true).open(path)?;
    file.set_size(0)?;
    let mut random = Random(seed);
    let mut content: Vec<u8> = Vec::new();
    let mut memory = tree::pattern(seed, LEN);
    target.put(0, &memory)?;
    let route = target.registered().route();
    let mut sum = Moved::default();
    for round in 0..rounds {
        let what = random.below(10);
        match what {
            0..4 => {
                let segments = segments(&mut random);
                let done = file.read(target.registered(), &segments)?;
                let mut expected = 0;
                for segment in &segments {
                    let len = segment.len.min((content.len() as u64).saturating_sub(segment.file_offset));
                    let (from, to) = (segment.file_offset as usize, segment.buffer_offset as usize);
                    if len > 0 {
                        memory[to..to + len as usize].copy_from_slice(&content[from..from + len as usize]);
                    }
                    expected += len;
                    if len < segment.len {
                        break;
                    }
                }
                check(round, "bytes read", done.bytes() == expected)?;
                add(&mut sum, &done.moved);
            }
            4..7 => {
                let segments = segments(&mut random);
                let done = file.write(target.registered(), &segments)?;
                for segment in segments.iter().filter(|segment| segment.len > 0) {
                    let (to, from) = (segment.file_offset as usize, segment.buffer_offset as usize);
                    content.resize(content.len().max(to + segment.len as usize), 0);
                    content[to..to + segment.len as usize].copy_from_slice(&memory[from..from + segment.len as usize]);
                }
                check(round, "bytes written", done.bytes() == segments.iter().map(|segment| segment.len).sum::<u64>())?;
                add(&mut sum, &done.moved);
            }
            7 => {
                let size = random.place(LEN as u64);
                file.set_size(size)?;
                content.resize(size as usize, 0);
            }
            8 => {
                let start = random.place(LEN as u64);
                let len = 1 + random.below(LEN as u64 / 4);
                rustix::fs::fallocate(&ordinary, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, start, len)?;
                let end = content.len().min((start + len) as usize);
                if (start as usize) < end {
                    content[start as usize..end].fill(0);
                }
            }
            _ => {
                let (at, data) = (random.place(LEN as u64 / 2), tree::pattern(seed + round, 1 + random.below(100_000) as usize));
                ordinary.write_all_at(&data, at)?;
                content.resize(content.len().max(at as usize + data.len()), 0);
                content[at as usize..at as usize + data.len()].copy_from_slice(&data);
                let at = random.below(LEN as u64 - data.len() as u64) as usize;
                target.put(at, &data)?;
                memory[at..at + data.len()].copy_from_slice(&data);
            }
        }
        let mut seen = vec![0; LEN];
        target.look(&mut seen)?;
        check(round, "the memory", seen == memory)?;
        let mut seen = vec![0; content.len()];
        ordinary.read_exact_at(&mut seen, 0)?;
        check(round, "the file", seen == content && file.size()? == content.len() as u64)?;
    }
    let only = match route {
        Route::P2p => sum.host == 0 && sum.bounce == 0 && sum.p2p > 0,
        _ => sum.p2p == 0 && sum.bounce == 0 && sum.host > 0,
    };
    check(rounds, "every byte went the route", only)?;
    println!("{rounds} rounds, {route}: {sum:?}");
    Ok(())
}

/// Some segments, that lie apart in memory.
fn segments(random: &mut Random) -> Vec<Segment> {
    let count = 1 + random.below(6);
    let room = LEN as u64 / count;
    (0..count)
        .map(|number| {
            let within = random.place(room);
            let len = random.place(room - within) + random.below(2) * random.below(8);
            let len = len.min(room - within);
            Segment { file_offset: random.place(LEN as u64 - len), buffer_offset: number * room + within, len }
        })
        .collect()
}

fn add(sum: &mut Moved, more: &Moved) {
    for (sum, more) in [
        (&mut sum.p2p, more.p2p),
        (&mut sum.bounce, more.bounce),
        (&mut sum.cache, more.cache),
        (&mut sum.host, more.host),
        (&mut sum.hole, more.hole),
        (&mut sum.edge, more.edge),
    ] {
        *sum += more;
    }
}

fn check(round: u64, what: &str, right: bool) -> Result<(), Box<dyn Error>> {
    if right { Ok(()) } else { Err(format!("round {round}: {what}").into()) }
}
