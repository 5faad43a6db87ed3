//! Reads a file of a mount into GPU memory, or writes it from there, for some seconds, and prints
//! one line of JSON: what was reached, and by which route. `bench-gpu` runs it as the subject that
//! is ours, beside others on the same file.

use std::collections::BTreeMap;
use std::fs::OpenOptions;
use std::ops::Range;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Barrier;
use std::time::{Duration, Instant};

use clap::{Parser, ValueEnum};
use gpunvme::gpu::{Caching, Queue, Segment, Settings, Transfers};
use gpunvme::{File, Mount, Transfer, Wait};
use gpunvme_cuda::{Cuda, DeviceAllocation, Gpu, Stream, Which};
use gpunvme_tests::tree;

type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

#[derive(Parser)]
#[command(about = "Moves a file of a gpunvme mount into or out of GPU memory, and says how fast")]
struct Args {
    /// The file. Writing replaces what is in it.
    #[arg(long)]
    file: PathBuf,
    /// The GPU: its number, or GPU- and its UUID.
    #[arg(long, default_value = "0")]
    gpu: Which,
    /// Bytes of a request.
    #[arg(long, default_value_t = 1 << 20)]
    size: u64,
    /// Where in the file the requests go.
    #[arg(long, default_value = "sequential")]
    pattern: Pattern,
    /// Requests in flight of each thread; with 1 each is waited for by the call itself.
    #[arg(long, default_value_t = 1)]
    depth: u64,
    /// Threads, each with its own part of the file.
    #[arg(long, default_value_t = 1)]
    threads: u64,
    /// How long.
    #[arg(long, default_value_t = 5.0)]
    seconds: f64,
    /// Writes instead of reading.
    #[arg(long)]
    write: bool,
    /// Compares the bytes of every request, which makes the figures meaningless.
    #[arg(long)]
    verify: bool,
    /// MiB of the staging pool.
    #[arg(long)]
    staging: Option<usize>,
    /// What is read of the kernel's page cache.
    #[arg(long, default_value = "never")]
    caching: PageCache,
    /// Reads the whole file so often, in place of some seconds, with a line for each time.
    #[arg(long, conflicts_with_all = ["seconds", "write"])]
    passes: Option<u64>,
    /// Says `prepared`, and begins when its standard input ends: as others do at that moment.
    #[arg(long)]
    together: bool,
}

/// [`Caching`], and whether the file is prepared before anything is measured.
#[derive(Clone, Copy, PartialEq, ValueEnum)]
enum PageCache {
    Never,
    Resident,
    ReadAgain,
    Prepared,
}

/// When a thread has read or written enough.
#[derive(Clone, Copy)]
enum Until {
    Time(Instant),
    /// It began so many requests.
    Requests(u64),
}

impl Until {
    fn goes_on(self, begun: u64) -> bool {
        match self {
            Until::Time(time) => Instant::now() < time,
            Until::Requests(requests) => begun < requests,
        }
    }
}

#[derive(Clone, Copy, PartialEq, ValueEnum)]
enum Pattern {
    Random,
    Sequential,
}

/// What a thread reached.
#[derive(Default)]
struct Reached {
    requests: u64,
    done: Transfer,
    /// Of each request, in nanoseconds.
    latencies: Vec<u64>,
}

/// One thread's work.
struct Worker<'a> {
    args: &'a Args,
    file: &'a File,
    memory: DeviceAllocation,
    /// The part of the file that is its own.
    part: Range<u64>,
    next: u64,
    seed: u64,
    check: Option<Check>,
}

/// What bytes are compared with.
struct Check {
    stream: Stream,
    file: std::fs::File,
}

impl Worker<'_> {
    fn new<'a>(args: &'a Args, file: &'a File, gpu: &Gpu, size: u64, thread: u64) -> Result<Worker<'a>> {
        let len = size / args.threads / args.size * args.size;
        if len == 0 {
            return Err(format!("{} threads with requests of {} bytes need a larger file", args.threads, args.size).into());
        }
        let memory = gpu.alloc((args.depth * args.size) as usize)?;
        let part = thread * len..(thread + 1) * len;
        if args.write {
            let bytes = tree::pattern(thread + 1, memory.len());
            let stream = gpu.stream()?;
            copy(&stream, memory.address(), bytes.as_ptr() as u64, bytes.len())?;
        }
        let check = if args.verify { Some(Check { stream: gpu.stream()?, file: open_direct(&args.file)? }) } else { None };
        Ok(Worker { args, file, memory, next: part.start, part, seed: thread + 1, check })
    }

    /// The request of a slot, at the next place in the file.
    fn segment(&mut self, slot: u64) -> Segment {
        let size = self.args.size;
        let file_offset = match self.args.pattern {
            Pattern::Sequential => {
                let at = self.next;
                self.next = if at + size < self.part.end { at + size } else { self.part.start };
                at
            }
            Pattern::Random => {
                // xorshift64, which is random enough to miss every cache.
                self.seed ^= self.seed << 13;
                self.seed ^= self.seed >> 7;
                self.seed ^= self.seed << 17;
                // Each slot has its own places, so that no two requests in flight meet.
                let places = (self.part.end - self.part.start) / size;
                let turns = (places / self.args.depth).max(1);
                self.part.start + (self.seed % turns * self.args.depth + slot) % places * size
            }
        };
        Segment { file_offset, address: self.memory.address() + slot * size, len: size }
    }

    fn finished(&self, segment: &Segment, begun: Instant, done: &Transfer, reached: &mut Reached) -> Result<()> {
        reached.requests += 1;
        reached.done.add(done);
        reached.latencies.push(begun.elapsed().as_nanos() as u64);
        if done.bytes() != segment.len {
            return Err(format!("{} of {} bytes at {}", done.bytes(), segment.len, segment.file_offset).into());
        }
        let Some(check) = &self.check else { return Ok(()) };
        let mut on_gpu = vec![0u8; segment.len as usize];
        copy(&check.stream, on_gpu.as_mut_ptr() as u64, segment.address, on_gpu.len())?;
        if on_gpu != read_direct(&check.file, segment.file_offset, segment.len as usize)? {
            return Err(format!("the bytes at {} are wrong", segment.file_offset).into());
        }
        Ok(())
    }

    /// Makes a request, since the first of a GPU and a thread prepares things; and the queue, if
    /// the thread is to have one.
    fn prepare(&self, transfers: &Transfers) -> Result<Option<Queue>> {
        let first = [Segment { file_offset: self.part.start, address: self.memory.address(), len: self.args.size }];
        if self.args.depth == 1 {
            // SAFETY: the memory is this thread's, and waited for.
            unsafe { transfers.read(self.file, &first) }?;
            return Ok(None);
        }
        let mut queue = transfers.queue()?;
        // SAFETY: as above.
        unsafe { queue.read(self.file, &first, 0) }?;
        let mut done = Vec::new();
        queue.complete(Wait::Forever, &mut done)?;
        done.into_iter().try_for_each(|finished| finished.result.map(drop))?;
        Ok(Some(queue))
    }

    /// One request after the other.
    fn one_by_one(mut self, transfers: &Transfers, until: Until) -> Result<Reached> {
        let mut reached = Reached::default();
        while until.goes_on(reached.requests) {
            let segment = self.segment(0);
            let begun = Instant::now();
            // SAFETY: the memory is this thread's, and waited for.
            let done = unsafe {
                if self.args.write { transfers.write(self.file, &[segment]) } else { transfers.read(self.file, &[segment]) }
            }?;
            self.finished(&segment, begun, &done, &mut reached)?;
        }
        Ok(reached)
    }

    /// As many at once as there are slots.
    fn many_at_once(mut self, mut queue: Queue, until: Until) -> Result<Reached> {
        let mut reached = Reached::default();
        let mut slots = Vec::new();
        let mut begun_requests = 0;
        for slot in (0..self.args.depth).take_while(|slot| until.goes_on(*slot)) {
            slots.push((self.segment(slot), Instant::now()));
            self.begin(&mut queue, &slots[slot as usize].0, slot)?;
            begun_requests += 1;
        }
        let mut done = Vec::new();
        while queue.in_flight() > 0 {
            queue.complete(Wait::Forever, &mut done)?;
            for finished in done.drain(..) {
                let more = until.goes_on(begun_requests);
                let slot = finished.user_data;
                let (segment, begun) = slots[slot as usize];
                self.finished(&segment, begun, &finished.result?, &mut reached)?;
                if more {
                    begun_requests += 1;
                    slots[slot as usize] = (self.segment(slot), Instant::now());
                    self.begin(&mut queue, &slots[slot as usize].0, slot)?;
                }
            }
        }
        Ok(reached)
    }

    fn begin(&self, queue: &mut Queue, segment: &Segment, slot: u64) -> gpunvme::Result<()> {
        // SAFETY: the memory is this slot's, and used again only when it is done. Where an error
        // ends this thread the process ends too.
        unsafe {
            if self.args.write { queue.write(self.file, &[*segment], slot) } else { queue.read(self.file, &[*segment], slot) }
        }
    }
}

/// What is compared must not bring the file into the page cache, which writes would then have to
/// keep right.
fn open_direct(path: &Path) -> std::io::Result<std::fs::File> {
    OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(path)
}

fn read_direct(file: &std::fs::File, offset: u64, len: usize) -> std::io::Result<Vec<u8>> {
    const PAGE: usize = 4096;
    let skip = offset as usize % PAGE;
    let whole = (skip + len).next_multiple_of(PAGE);
    let mut memory = vec![0u8; whole + PAGE];
    let start = memory.as_ptr().align_offset(PAGE);
    let mut done = 0;
    while done < skip + len {
        // In the middle of a file each read is whole pages.
        match file.read_at(&mut memory[start + done..start + whole], offset - skip as u64 + done as u64)? {
            0 => return Err(std::io::ErrorKind::UnexpectedEof.into()),
            more => done += more,
        }
    }
    Ok(memory[start + skip..start + skip + len].to_vec())
}

fn copy(stream: &Stream, to: u64, from: u64, len: usize) -> Result<()> {
    // SAFETY: both ranges are the caller's, and waited for.
    unsafe { stream.copy(to, from, len) }?;
    Ok(stream.synchronize()?)
}

fn main() -> Result<()> {
    let args = Args::parse();
    let gpu = Cuda::load()?.gpu(args.gpu)?;
    let mut settings = Settings::default();
    settings.staging = args.staging.map(|mib| mib << 20);
    settings.caching = match args.caching {
        PageCache::Never | PageCache::Prepared => Caching::Never,
        PageCache::Resident => Caching::Resident,
        PageCache::ReadAgain => Caching::ReadAgain,
    };
    let transfers = Transfers::with(&Mount::open(&args.file)?, settings)?;
    let file = if args.write { File::create(&args.file)? } else { File::open(&args.file)? };
    let size = file.size()?;
    if args.caching == PageCache::Prepared {
        let begun = Instant::now();
        let prepared = transfers.prepare(&file, 0, size)?;
        let rate = prepared as f64 / begun.elapsed().as_secs_f64() / 1e9;
        eprintln!("gpu-mover: {prepared} of {size} bytes prepared, {rate:.2} GB/s");
    }
    let share = size / args.threads / args.size;
    match args.passes {
        None => println!("{}", run(&args, &gpu, &transfers, &file, None)?),
        Some(passes) => {
            for _ in 0..passes {
                println!("{}", run(&args, &gpu, &transfers, &file, Some(share))?);
            }
        }
    }
    Ok(())
}

/// One measurement, as a line of JSON: each thread makes so many requests, or as many as it can in
/// the time.
fn run(args: &Args, gpu: &Gpu, transfers: &Transfers, file: &File, requests: Option<u64>) -> Result<serde_json::Value> {
    let size = file.size()?;
    let workers = (0..args.threads).map(|thread| Worker::new(args, file, gpu, size, thread)).collect::<Result<Vec<Worker>>>()?;
    let before = processor_seconds(None);
    let prepared = Barrier::new(workers.len() + 1);
    let (begun, reached) = std::thread::scope(|scope| {
        let threads: Vec<_> = workers
            .into_iter()
            .map(|worker| {
                let prepared = &prepared;
                scope.spawn(move || {
                    let queue = worker.prepare(transfers);
                    prepared.wait();
                    let time = Duration::from_secs_f64(worker.args.seconds);
                    let until = requests.map_or_else(|| Until::Time(Instant::now() + time), Until::Requests);
                    match queue? {
                        Some(queue) => worker.many_at_once(queue, until),
                        None => worker.one_by_one(transfers, until),
                    }
                })
            })
            .collect();
        if args.together {
            println!("prepared");
            std::io::copy(&mut std::io::stdin(), &mut std::io::sink()).expect("standard input");
        }
        prepared.wait();
        let begun = Instant::now();
        let reached =
            threads.into_iter().map(|thread| thread.join().expect("a thread panicked")).collect::<Result<Vec<Reached>>>();
        (begun, reached)
    });
    let seconds = begun.elapsed().as_secs_f64();
    let processors = (processor_seconds(None) - before) / seconds;
    let mut sum = Reached::default();
    for reached in reached? {
        sum.requests += reached.requests;
        sum.done.add(&reached.done);
        sum.latencies.extend(reached.latencies);
    }
    sum.latencies.sort_unstable();
    let percentile = |part: usize| sum.latencies.get(sum.latencies.len() * part / 100).map(|&nanos| nanos as f64 / 1e3);
    let moved = sum.done.moved;
    Ok(serde_json::json!({
        "gb_per_s": moved.total() as f64 / seconds / 1e9,
        "iops": sum.requests as f64 / seconds,
        "seconds": seconds,
        "bytes": moved.total(),
        "moved": { "p2p": moved.p2p, "bounce": moved.bounce, "cache": moved.cache, "host": moved.host, "hole": moved.hole, "edge": moved.edge },
        "reason": sum.done.reason.map(|reason| reason.name()),
        "latency_us": { "p50": percentile(50), "p99": percentile(99) },
        "processors": processors,
        "processors_by_thread": threads_of_library(),
        "verified": args.verify,
    }))
}

/// Seconds of a processor that this process has used, or a thread of it.
fn processor_seconds(thread: Option<&Path>) -> f64 {
    let path = thread.map_or_else(|| "/proc/self/stat".into(), |thread| thread.join("stat"));
    let text = std::fs::read_to_string(path).unwrap_or_default();
    // Behind the name, in parentheses, utime is the 12th word and stime the 13th (proc(5)).
    let ticks = text.rsplit(')').next().unwrap_or_default().split_whitespace().skip(11).take(2);
    ticks.filter_map(|word| word.parse::<f64>().ok()).sum::<f64>() / 100.0
}

/// The seconds of a processor of each thread that is still there: those of the library and of CUDA.
fn threads_of_library() -> BTreeMap<String, f64> {
    let tasks = std::fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
    let named = |task: std::fs::DirEntry| {
        let name = std::fs::read_to_string(task.path().join("comm")).ok()?;
        Some((name.trim().to_owned(), processor_seconds(Some(&task.path()))))
    };
    tasks.filter_map(named).fold(BTreeMap::new(), |mut sums, (name, seconds)| {
        *sums.entry(name).or_default() += seconds;
        sums
    })
}
