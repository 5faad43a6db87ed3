//! The load of a measurement: threads that read or overwrite random places of the file, each with
//! one request in flight.

use super::figures::Figures;
use crate::args::{Bench, Memory};
use crate::gpu::{GpuPart, GpuParts};
use crate::report::Failure;
use gpunvme::{Buffer, Error, File, Mount, Registered, Segment, Transfer};
use hdrhistogram::Histogram;
use std::hash::{BuildHasher, RandomState};
use std::sync::Barrier;
use std::time::{Duration, Instant};

/// Bytes of a request of those that write the file first.
const STEP: u64 = 16 << 20;
/// The longest latency that is told from longer ones, in nanoseconds: 1000 s.
const LONGEST: u64 = 1_000_000_000_000;
/// Decimal digits of a latency.
const DIGITS: u8 = 3;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    Read,
    Write,
}

impl Operation {
    pub fn name(self) -> &'static str {
        match self {
            Operation::Read => "read",
            Operation::Write => "write",
        }
    }
}

pub struct Load<'a> {
    file: &'a File,
    length: u64,
    memory: Places,
    mount: &'a Mount,
    random: Random,
    written: u64,
}

/// Memory for all threads.
enum Places {
    /// A buffer for each thread, of the longest request.
    Host(Vec<Registered>),
    Gpu(GpuParts),
}

/// The memory of one thread.
enum Place<'a> {
    Host { buffer: &'a mut Registered, len: u64 },
    Gpu(GpuPart<'a>),
}

impl<'a> Load<'a> {
    /// Memory for the longest requests by the most threads.
    pub fn new(mount: &'a Mount, file: &'a File, args: &Bench) -> Result<Load<'a>, Failure> {
        let mut random = Random(RandomState::new().hash_one(()));
        let longest = args.sizes.iter().copied().max().unwrap_or(0) as usize;
        let threads = args.threads.iter().copied().max().unwrap_or(0).into();
        let memory = match args.memory {
            Memory::Gpu(which) => GpuParts::new(mount, which, longest * threads, |bytes| random.fill(bytes)).map(Places::Gpu)?,
            Memory::Host | Memory::Pci(_) => {
                let buffers = (0..threads).map(|_| buffer(mount, longest, &mut random));
                Places::Host(buffers.collect::<Result<_, _>>()?)
            }
        };
        Ok(Load { file, length: args.length, memory, mount, random, written: 0 })
    }

    /// The memory, for people.
    pub fn memory_name(&self) -> String {
        match &self.memory {
            Places::Host(_) => "host".to_owned(),
            Places::Gpu(parts) => parts.name(),
        }
    }

    /// Bytes that were written until now.
    pub fn written(&self) -> u64 {
        self.written
    }

    /// Writes the whole file, with bytes that no device can compress.
    pub fn fill(&mut self) -> Result<(), Failure> {
        let mut buffer = buffer(self.mount, self.length.min(STEP) as usize, &mut self.random)?;
        for offset in (0..self.length).step_by(STEP as usize) {
            self.random.fill(&mut buffer[..4096.min(self.length as usize)]);
            let segment = Segment { file_offset: offset, buffer_offset: 0, len: STEP.min(self.length - offset) };
            self.written += self.file.write(&buffer, &[segment])?.bytes();
        }
        Ok(())
    }

    /// Has threads make requests of `size` bytes until `time` is over, each at least one.
    pub fn measure(&mut self, operation: Operation, size: u64, threads: usize, time: Duration) -> Result<Figures, Failure> {
        let (file, slots) = (self.file, self.length / size);
        let mut places = self.memory.split(size, threads);
        // The first request has costs of its own: the daemon looks at the file's descriptor.
        let first = places.iter_mut().map(|place| place.transfer(operation, file, 0)).collect::<Result<Vec<_>, _>>()?;
        let start = Barrier::new(threads);
        let outcomes = std::thread::scope(|scope| {
            let threads: Vec<_> = places
                .into_iter()
                .map(|mut place| {
                    let (start, mut random) = (&start, Random(self.random.next()));
                    scope.spawn(move || -> Result<Outcome, Error> {
                        start.wait();
                        let began = Instant::now();
                        let mut outcome = Outcome::new(began);
                        while outcome.ended.duration_since(began) < time || outcome.latencies.is_empty() {
                            let asked = outcome.ended;
                            let done = place.transfer(operation, file, random.next() % slots * size)?;
                            outcome.add(asked, &done);
                        }
                        Ok(outcome)
                    })
                })
                .collect();
            let join = |thread: std::thread::ScopedJoinHandle<Result<Outcome, Error>>| {
                thread.join().map_err(|_| Failure("a measuring thread panicked".into()))?.map_err(Failure::from)
            };
            threads.into_iter().map(join).collect::<Result<Vec<Outcome>, Failure>>()
        })?;

        let mut sum = Outcome::new(Instant::now());
        let (mut began, mut ended) = (sum.began, outcomes[0].ended);
        for outcome in &outcomes {
            (began, ended) = (began.min(outcome.began), ended.max(outcome.ended));
            sum.done.add(&outcome.done);
            sum.latencies.add(&outcome.latencies).map_err(|error| Failure(format!("internal error: {error}")))?;
        }
        if operation == Operation::Write {
            self.written += sum.done.bytes() + first.iter().map(Transfer::bytes).sum::<u64>();
        }
        let quantile = |quantile| sum.latencies.value_at_quantile(quantile) as f64 / 1e9;
        Ok(Figures {
            requests: sum.latencies.len(),
            seconds: (ended - began).as_secs_f64(),
            moved: sum.done.moved,
            p50: quantile(0.5),
            p90: quantile(0.9),
            p99: quantile(0.99),
            p999: quantile(0.999),
            max: sum.latencies.max() as f64 / 1e9,
        })
    }
}

/// What one thread did.
struct Outcome {
    began: Instant,
    ended: Instant,
    done: Transfer,
    /// In nanoseconds.
    latencies: Histogram<u64>,
}

impl Outcome {
    fn new(began: Instant) -> Outcome {
        let latencies = Histogram::new_with_bounds(1, LONGEST, DIGITS).expect("the bounds of the histogram are in order");
        Outcome { began, ended: began, done: Transfer::default(), latencies }
    }

    /// A request ended that was made at `asked`.
    fn add(&mut self, asked: Instant, done: &Transfer) {
        self.ended = Instant::now();
        self.latencies.saturating_record(self.ended.duration_since(asked).as_nanos() as u64);
        self.done.add(done);
    }
}

impl Places {
    /// The memory of each thread, for requests of `len` bytes.
    fn split(&mut self, len: u64, threads: usize) -> Vec<Place<'_>> {
        match self {
            Places::Host(buffers) => buffers.iter_mut().take(threads).map(|buffer| Place::Host { buffer, len }).collect(),
            Places::Gpu(parts) => parts.split(len).take(threads).map(Place::Gpu).collect(),
        }
    }
}

impl Place<'_> {
    fn transfer(&mut self, operation: Operation, file: &File, file_offset: u64) -> Result<Transfer, Error> {
        match (self, operation) {
            (Place::Host { buffer, len }, Operation::Read) => {
                file.read(buffer, &[Segment { file_offset, buffer_offset: 0, len: *len }])
            }
            (Place::Host { buffer, len }, Operation::Write) => {
                file.write(buffer, &[Segment { file_offset, buffer_offset: 0, len: *len }])
            }
            (Place::Gpu(part), Operation::Read) => part.read(file, file_offset),
            (Place::Gpu(part), Operation::Write) => part.write(file, file_offset),
        }
    }
}

fn buffer(mount: &Mount, len: usize, random: &mut Random) -> Result<Registered, Error> {
    let mut buffer = mount.register(Buffer::memfd(len)?)?;
    random.fill(&mut buffer);
    Ok(buffer)
}

/// Numbers for offsets and bytes: SplitMix64, by Steele, Lea and Flood (OOPSLA 2014).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ mixed >> 31
    }

    fn fill(&mut self, bytes: &mut [u8]) {
        for word in bytes.chunks_mut(8) {
            word.copy_from_slice(&self.next().to_le_bytes()[..word.len()]);
        }
    }
}
