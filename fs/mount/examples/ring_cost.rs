//! Measures what a ring's request of 4 KiB costs the daemon: the processor time of the threads that
//! serve rings, on a real mount, over a device that takes and gives nothing. What the device and
//! its driver cost is not in it.
//!
//! As root, with `/dev/fuse`:
//!
//! ```text
//! cargo run --release -p gpunvme-fs --example ring_cost -- [SECONDS PER ROW]
//! cargo run --release -p gpunvme-fs --example ring_cost -- run PROGRAM [ARGUMENT]...
//! ```
//!
//! The second runs a program in the mount's directory instead, where `file` is a file of 1 GiB
//! whose bytes come from nowhere: what a transfer costs without a device.

use std::error::Error;
use std::fs;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use gpunvme::{Buffer, File, Mount, Operation, Ring, Wait};
use gpunvme_blockdev::{BlockDevice, Completion, Geometry, Io, Op, Queue, Region, Request};
use gpunvme_blockdev_testing::MemoryDevice;
use gpunvme_engine::data::{self, Filesystem, system_time};
use gpunvme_engine::volume::VolumeOptions;
use gpunvme_engine::{FormatOptions, format};
use gpunvme_fs::front::{Devices, Log, Session, Settings, Workers};
use gpunvme_programs::members::GrowError;
use parking_lot::Mutex;
use rustix::fs::{Mode, OFlags};
use rustix::mount::{MountFlags, UnmountFlags};

const BLOCK: u64 = 4096;
/// Bytes of the file: its places are drawn from them.
const FILE: u64 = 1 << 30;
/// Bytes of a file's piece that is written by one request.
const PIECE: u64 = 4 << 20;

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    // What uses a ring is another process.
    if let [root, work @ ..] = &arguments[..]
        && root.starts_with('/')
    {
        return use_ring(Path::new(root), work);
    }
    let dir = tempfile::tempdir()?;
    let device: Arc<dyn BlockDevice> = Arc::new(Blank(MemoryDevice::new(16 << 30)));
    let options = FormatOptions { label: "cost".into(), uuid: [7; 16], hash_key: [9; 16], now: system_time(), owner: (0, 0) };
    format(&device, &options)?;
    let options =
        data::Options { volume: VolumeOptions { read_only: false, cache: 256 << 20, discard: false }, write_buffer: 64 << 20 };
    let fs = Filesystem::open(Io::threaded(device, 1)?, options, Workers::new("completion", 2)?)?;
    let session = mount(&fs, dir.path())?;
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let measured = match words[..] {
        ["run", program, ref rest @ ..] => run(dir.path(), program, rest),
        [seconds] => measure(dir.path(), seconds),
        _ => measure(dir.path(), "1"),
    };
    rustix::mount::unmount(dir.path(), UnmountFlags::empty())?;
    session.join().finish()?;
    session.end()?;
    fs.close()?;
    measured
}

fn mount(volume: &Arc<Filesystem>, dir: &Path) -> Result<Session, Box<dyn Error>> {
    let connection = rustix::fs::open("/dev/fuse", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
    let options =
        format!("fd={},rootmode=40755,user_id=0,group_id=0,subtype=gpunvme,default_permissions", connection.as_raw_fd());
    let options = std::ffi::CString::new(options)?;
    rustix::mount::mount("ring_cost", dir, "fuse", MountFlags::empty(), options.as_c_str())?;
    let loops = std::thread::available_parallelism()?.get();
    let settings = Settings {
        device: "memory".into(),
        devices: Arc::new(NoDevices),
        loops,
        io_uring: false,
        commit: Duration::from_secs(5),
        cache: 256 << 20,
        write_buffer: 64 << 20,
        discard: false,
        log: Arc::new(NoLog),
    };
    let session = Session::start(volume.clone(), connection, &settings)?;
    session.is_device(fs::metadata(dir)?.dev());
    Ok(session)
}

fn measure(root: &Path, seconds: &str) -> Result<(), Box<dyn Error>> {
    start(root, &["fill"])?.wait_with_output()?;
    println!("{:>6} {:>6} {:>6} {:>12} {:>14} {:>14}", "", "rings", "depth", "thousand/s", "daemon, ns", "client, ns");
    let most = std::thread::available_parallelism()?.get().div_ceil(2);
    for (what, rings, depth) in [("read", 1, 1), ("read", 1, 32), ("read", 1, 256), ("read", most, 256), ("write", 1, 256)] {
        let before = serving_time()?;
        let begun = Instant::now();
        let work = |number: usize| start(root, &[what, &depth.to_string(), seconds, &number.to_string()]);
        let clients = (0..rings).map(work).collect::<Result<Vec<_>, _>>()?;
        let (mut requests, mut theirs) = (0, 0);
        for client in clients {
            let said = String::from_utf8(client.wait_with_output()?.stdout)?;
            let (count, used) = said.trim().split_once(' ').ok_or("a client failed")?;
            requests += count.parse::<u64>()?;
            theirs += used.parse::<u64>()?;
        }
        let (elapsed, ours) = (begun.elapsed(), serving_time()? - before);
        println!(
            "{what:>6} {rings:>6} {depth:>6} {:>12.0} {:>14.0} {:>14.0}",
            requests as f64 / elapsed.as_secs_f64() * 1e-3,
            ours as f64 / requests as f64,
            theirs as f64 / requests as f64,
        );
    }
    Ok(())
}

/// Runs a program in the mount's directory, where the file has its place on the device.
fn run(root: &Path, program: &str, arguments: &[&str]) -> Result<(), Box<dyn Error>> {
    start(root, &["fill"])?.wait_with_output()?;
    let status = Command::new(program).args(arguments).current_dir(root).status()?;
    if status.success() { Ok(()) } else { Err(format!("{program}: {status}").into()) }
}

/// Starts this program as a process with a ring on the mount.
fn start(root: &Path, work: &[&str]) -> Result<Child, Box<dyn Error>> {
    Ok(Command::new(std::env::current_exe()?).arg(root).args(work).stdout(Stdio::piped()).spawn()?)
}

/// What a process with a ring does: it gives the file a place on the device, or keeps requests in
/// flight for a time, and prints how many were done and its own processor time in nanoseconds.
fn use_ring(root: &Path, work: &[String]) -> Result<(), Box<dyn Error>> {
    let work: Vec<&str> = work.iter().map(String::as_str).collect();
    match work[..] {
        ["fill"] => fill(root),
        [what, depth, seconds, number] => {
            let time = Duration::from_secs_f64(seconds.parse()?);
            let (count, used) = keep_in_flight(root, (what == "write", depth.parse()?), time, number.parse()?)?;
            println!("{count} {used}");
            Ok(())
        }
        _ => Err("it is started by this program itself".into()),
    }
}

/// Gives all of the file a place on the device.
fn fill(root: &Path) -> Result<(), Box<dyn Error>> {
    let mount = Mount::open(root)?;
    let buffer = mount.register(Buffer::memfd(PIECE as usize)?)?.share();
    let mut ring = Ring::new(&mount, 8)?;
    let file = ring.attach(&File::create(root.join("file"))?)?;
    let mut done = Vec::new();
    for at in (0..FILE).step_by(PIECE as usize) {
        ring.push(&Operation::write(&file, at, &buffer, 0, PIECE))?;
        ring.complete(Wait::Forever, &mut done)?;
        done.drain(..).try_for_each(|completed| completed.result.map(drop))?;
    }
    Ok(())
}

/// Keeps `depth` requests in flight. Returns how many were done, and its own processor time in
/// nanoseconds.
fn keep_in_flight(root: &Path, (write, depth): (bool, u32), time: Duration, number: u64) -> Result<(u64, u64), Box<dyn Error>> {
    let this = Path::new("/proc/thread-self");
    let path = root.join("file");
    let mount = Mount::open(root)?;
    let buffer = mount.register(Buffer::memfd(depth as usize * BLOCK as usize)?)?.share();
    let mut ring = Ring::new(&mount, depth.next_power_of_two().max(8))?;
    let file = ring.attach(&if write { File::create(path)? } else { File::open(path)? })?;
    let mut random = number * 7919 + 1;
    let mut place = || {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (random >> 33) % (FILE / BLOCK) * BLOCK
    };
    let operation = if write { Operation::write } else { Operation::read };
    let mut free: Vec<u64> = (0..u64::from(depth)).collect();
    let (mut done, mut count, mut is_over) = (Vec::new(), 0u64, false);
    let (before, end) = (thread_time(this)?, Instant::now() + time);
    while !is_over || ring.in_flight() > 0 {
        is_over = is_over || Instant::now() >= end;
        while !is_over && let Some(slot) = free.pop() {
            ring.push(&operation(&file, place(), &buffer, slot * BLOCK, BLOCK).written_back(true).tagged(slot))?;
        }
        ring.complete(Wait::Forever, &mut done)?;
        for completed in done.drain(..) {
            completed.result?;
            free.push(completed.user_data);
            count += 1;
        }
    }
    Ok((count, thread_time(this)? - before))
}

/// Processor time of a thread so far, in nanoseconds (proc(5), schedstat).
fn thread_time(task: &Path) -> Result<u64, Box<dyn Error>> {
    let stat = fs::read_to_string(task.join("schedstat"))?;
    Ok(stat.split(' ').next().expect("it has numbers").parse()?)
}

/// Processor time of the threads that serve rings, in nanoseconds.
fn serving_time() -> Result<u64, Box<dyn Error>> {
    let mut used = 0;
    for task in fs::read_dir("/proc/self/task")? {
        let task = task?.path();
        if fs::read_to_string(task.join("comm"))?.starts_with("rings-") {
            used += thread_time(&task)?;
        }
    }
    Ok(used)
}

#[derive(Debug)]
struct NoLog;

impl Log for NoLog {
    fn set(&self, _: Option<&str>) -> Option<String> {
        None
    }
}

#[derive(Debug)]
struct NoDevices;

impl Devices for NoDevices {
    fn look_again(&self, _: &dyn Fn(u64) -> Result<(), String>) -> Result<Option<String>, GrowError> {
        Ok(None)
    }

    fn may_add(&self, _: &[String]) -> Result<(), String> {
        Err("there are no others".into())
    }

    fn add(&self, names: &[String]) -> Result<(), GrowError> {
        Ok(self.may_add(names)?)
    }
}

/// A device in memory whose queues for rings do nothing: reads bring no bytes, writes keep none.
struct Blank(Arc<MemoryDevice>);

impl BlockDevice for Blank {
    fn name(&self) -> &str {
        self.0.name()
    }

    fn geometry(&self) -> &Geometry {
        self.0.geometry()
    }

    fn open_queue(&self) -> gpunvme_blockdev::Result<Box<dyn Queue>> {
        self.0.open_queue()
    }

    fn open_busy_queue(&self, _: Option<&dyn Queue>) -> gpunvme_blockdev::Result<Box<dyn Queue>> {
        Ok(Box::new(BlankQueue { inner: self.0.open_queue()?, done: Mutex::default() }))
    }

    fn map(&self, region: &Arc<Region>) -> gpunvme_blockdev::Result<()> {
        self.0.map(region)
    }

    fn unmap(&self, region: &Region) {
        self.0.unmap(region);
    }
}

struct BlankQueue {
    inner: Box<dyn Queue>,
    done: Mutex<Vec<u64>>,
}

impl Queue for BlankQueue {
    fn submit(&self, requests: &mut Vec<Request>) {
        debug_assert!(requests.iter().all(|request| matches!(request.op, Op::Read | Op::Write { .. })));
        self.done.lock().extend(requests.drain(..).map(|request| request.tag));
    }

    fn complete(&self, wait: gpunvme_blockdev::Wait, out: &mut Vec<Completion>) -> gpunvme_blockdev::Result<usize> {
        let mut done = self.done.lock();
        let count = done.len();
        if count == 0 {
            drop(done);
            return self.inner.complete(wait, out);
        }
        out.extend(done.drain(..).map(|tag| Completion { tag, result: Ok(()) }));
        Ok(count)
    }

    fn wake(&self) {
        self.inner.wake();
    }

    fn sleep_on(&self, since: Instant) -> gpunvme_blockdev::Result<Option<BorrowedFd<'_>>> {
        if self.done.lock().is_empty() { self.inner.sleep_on(since) } else { Ok(None) }
    }
}
