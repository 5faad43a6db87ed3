//! Measures how long a process waits when other processes keep the direct path busy, and how
//! unaligned writes of many threads to one file scale. Each party is a process of its own user:
//! limits and shares are by user and by process.

use std::error::Error;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use gpunvme::{Mount, Operation, Ring, Wait};
use gpunvme_abi::Register;
use gpunvme_tests::direct::{Buffer, call_plain, memfd};
use gpunvme_tests::mounted::Image;
use gpunvme_tests::results::Work;
use gpunvme_tests::rings::shared;

use crate::table::Table;
use crate::{Scale, progress};

/// Users without rights: the one who is measured, and the one who is busy.
const MEASURED: u32 = 65533;
const BUSY: u32 = 65534;

/// Bytes of the file that is read.
const FILE: u64 = 256 << 20;
const BLOCK: u64 = 4096;

/// What the busy process does while the other one is measured; nothing at first.
const LOADS: [(&str, Option<&str>); 4] =
    [("alone", None), ("120 READs of holes", Some("holes")), ("64 rings", Some("rings")), ("READs of 4 threads", Some("reads"))];

/// What is measured. The names are also the order of the times that a party prints.
const OPERATIONS: [&str; 4] =
    ["register and unregister 64 KiB", "READ of 4 KiB by ioctl", "read of 4 KiB by a ring", "write of 4 KiB and fsync"];

/// Tables of the times of one process beside a busy one, and of unaligned writes.
pub fn measure(scale: &Scale) -> Result<Vec<Table>, Box<dyn Error>> {
    let mounted = Image::formatted_with(4 << 30).mount();
    // Other users find their way to it.
    let folder = mounted.root().parent().ok_or("a mount point has a parent")?.to_owned();
    fs::set_permissions(folder, fs::Permissions::from_mode(0o755))?;
    fs::set_permissions(mounted.root(), fs::Permissions::from_mode(0o1777))?;
    let mut data = File::create(mounted.path("data"))?;
    (0..FILE >> 20).try_for_each(|_| data.write_all(&[7; 1 << 20]))?;
    data.sync_all()?;
    File::create(mounted.path("holes"))?.set_len(1 << 40)?;

    let columns = LOADS.map(|(name, _)| name);
    let mut tables = [
        Table::new("one process beside a busy one", "µs, median", &columns, Some(0)),
        Table::new("one process beside a busy one", "µs, longest", &columns, Some(0)),
    ];
    let mut times = Vec::new();
    for (name, load) in LOADS {
        progress(&format!("neighbours: {name}"));
        let busy = load.map(|load| Party::begin(load, BUSY, &mounted.root(), scale.time)).transpose()?;
        times.push(Party::begin("measured", MEASURED, &mounted.root(), scale.time)?.times()?);
        drop(busy);
    }
    for (row, name) in OPERATIONS.iter().enumerate() {
        for (which, table) in tables.iter_mut().enumerate() {
            table.row(Work::named(*name), times.iter().map(|times| Some(times[row][which])).collect());
        }
    }
    let mut writes = Table::new("unaligned direct writes of 100 bytes", "1/s", &["in all"], None);
    for (name, threads, files) in [("1 thread", 1, 1), ("16 threads, 16 files", 16, 16), ("16 threads, 1 file", 16, 1)] {
        progress(&format!("neighbours: {name}"));
        writes.row(Work::named(name), vec![Some(unaligned(&mounted.root(), threads, files, scale.time)?)]);
    }
    let [medians, longest] = tables;
    Ok(vec![medians, longest, writes])
}

/// Unaligned writes a second, of all threads together.
fn unaligned(root: &Path, threads: u64, files: u64, time: Duration) -> Result<f64, Box<dyn Error>> {
    let files = (0..files)
        .map(|number| {
            let file = File::create(root.join(format!("unaligned {number}")))?;
            rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, 1 << 20)?;
            Ok(file)
        })
        .collect::<std::io::Result<Vec<_>>>()?;
    let (count, end) = (AtomicU64::new(0), AtomicBool::new(false));
    let begun = Instant::now();
    std::thread::scope(|scope| {
        for thread in 0..threads {
            let file = &files[(thread % files.len() as u64) as usize];
            let (count, end) = (&count, &end);
            scope.spawn(move || {
                let buffer = Buffer::new(file, BLOCK);
                for number in 0.. {
                    if end.load(Ordering::Relaxed) {
                        break;
                    }
                    let offset = (thread + number * threads) * 100 % ((1 << 20) - 100);
                    buffer.write(file, offset, 100).expect("WRITE");
                    count.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        std::thread::sleep(time);
        end.store(true, Ordering::Relaxed);
    });
    Ok(count.into_inner() as f64 / begun.elapsed().as_secs_f64())
}

/// This program once more, as another user. It is ended when this is dropped.
struct Party {
    child: Child,
    output: BufReader<std::process::ChildStdout>,
}

impl Party {
    /// Starts `role` and waits until it is at work.
    fn begin(role: &str, user: u32, root: &Path, time: Duration) -> Result<Party, Box<dyn Error>> {
        // The user need not be allowed to reach this program by its path.
        let program = File::open(std::env::current_exe()?)?;
        rustix::io::fcntl_setfd(&program, rustix::io::FdFlags::empty())?;
        let mut command = Command::new(format!("/proc/self/fd/{}", program.as_raw_fd()));
        command.args(["--party", role]).arg("--at").arg(root).args(["--milliseconds", &time.as_millis().to_string()]);
        let mut child = command.uid(user).gid(user).stdout(Stdio::piped()).spawn()?;
        let output = BufReader::new(child.stdout.take().ok_or("a pipe")?);
        let mut party = Party { child, output };
        match party.line()?.as_str() {
            "ready" => Ok(party),
            other => Err(format!("{role}: {other:?} instead of ready").into()),
        }
    }

    fn line(&mut self) -> std::io::Result<String> {
        let mut line = String::new();
        self.output.read_line(&mut line)?;
        Ok(line.trim_end().to_owned())
    }

    /// Median and longest of each operation.
    fn times(mut self) -> Result<Vec<[f64; 2]>, Box<dyn Error>> {
        Ok(serde_json::from_str(&self.line()?)?)
    }
}

impl Drop for Party {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The role of a party.
#[derive(clap::Args)]
pub struct Role {
    /// What this process does as a party of the theme neighbours
    #[arg(long, hide = true)]
    party: Option<String>,
    #[arg(long, hide = true, requires = "party")]
    at: Option<PathBuf>,
    #[arg(long, hide = true, default_value_t = 0)]
    milliseconds: u64,
}

impl Role {
    /// Plays it; false if this process has none.
    pub fn play(&self) -> Result<bool, Box<dyn Error>> {
        let (Some(party), Some(root)) = (&self.party, &self.at) else { return Ok(false) };
        match party.as_str() {
            "measured" => measured(root, Duration::from_millis(self.milliseconds))?,
            "holes" => many_reads(root, 120, "holes", 128 << 20)?,
            "reads" => many_reads(root, 4, "data", 64 << 20)?,
            "rings" => many_rings(root)?,
            other => return Err(format!("no such party: {other}").into()),
        }
        Ok(true)
    }
}

fn ready() -> std::io::Result<()> {
    println!("ready");
    std::io::stdout().flush()
}

/// Times operations one after the other, each for `time`.
fn measured(root: &Path, time: Duration) -> Result<(), Box<dyn Error>> {
    let data = File::open(root.join("data"))?;
    let own = root.join(format!("own of {}", rustix::process::getpid().as_raw_nonzero()));
    let mut own = File::create(own)?;
    let buffer = Buffer::new(&data, BLOCK);
    let mount = Mount::open(root)?;
    let mut ring = Ring::new(&mount, 8)?;
    let (by_ring, file) = (shared(&mount, BLOCK), ring.attach(&gpunvme::File::open(root.join("data"))?)?);
    ready()?;
    let registered = memfd(64 << 10);
    let mut turn = 0;
    let mut offset = move || {
        turn += 1;
        turn * 7919 % (FILE / BLOCK) * BLOCK
    };
    let mut next = offset;
    let times = [
        quantiles(time, || {
            let mut register = Register { fd: registered.as_raw_fd(), len: 64 << 10, ..Register::default() };
            call_plain(&data, gpunvme_abi::Command::Register, &mut register)?;
            let memory = registered.try_clone()?;
            Buffer { memory, id: register.buffer }.unregister(&data).map(drop)
        })?,
        quantiles(time, || buffer.read(&data, offset(), BLOCK).map(drop))?,
        quantiles(time, || {
            let mut done = Vec::new();
            ring.push(&Operation::read(&file, next(), &by_ring, 0, BLOCK)).map_err(std::io::Error::other)?;
            while ring.complete(Wait::Forever, &mut done).map_err(std::io::Error::other)? == 0 {}
            Ok(())
        })?,
        quantiles(time, || own.write_all(&[1; BLOCK as usize]).and_then(|()| own.sync_all()))?,
    ];
    println!("{}", serde_json::to_string(&times)?);
    Ok(())
}

/// Median and longest time of an operation, in microseconds.
fn quantiles(time: Duration, mut operation: impl FnMut() -> std::io::Result<()>) -> std::io::Result<[f64; 2]> {
    let end = Instant::now() + time;
    let mut times = Vec::new();
    while times.is_empty() || Instant::now() < end {
        let start = Instant::now();
        operation()?;
        times.push(start.elapsed().as_secs_f64() * 1e6);
    }
    times.sort_by(f64::total_cmp);
    Ok([times[times.len() / 2], times[times.len() - 1]])
}

/// Threads that READ by ioctl, again and again, until this process is ended.
fn many_reads(root: &Path, threads: u64, name: &str, len: u64) -> Result<(), Box<dyn Error>> {
    let file = File::open(root.join(name))?;
    let buffer = Buffer::new(&file, len);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    buffer.read(&file, 0, len).expect("READ");
                }
            });
        }
        std::thread::sleep(Duration::from_millis(200));
        ready()
    })?;
    Ok(())
}

/// Rings that are kept full of reads of 64 KiB, until this process is ended.
fn many_rings(root: &Path) -> Result<(), Box<dyn Error>> {
    const LEN: u64 = 64 << 10;
    let mount = Mount::open(root)?;
    let buffer = shared(&mount, LEN);
    let mut rings = Vec::new();
    for _ in 0..64 {
        let ring = Ring::new(&mount, 64)?;
        let file = ring.attach(&gpunvme::File::open(root.join("data"))?)?;
        rings.push((ring, file));
    }
    let (mut done, mut is_ready, mut turn) = (Vec::new(), false, 0);
    loop {
        for (ring, file) in &mut rings {
            while ring.room() > 0 {
                turn += 1;
                ring.push(&Operation::read(file, turn * 127 % (FILE / LEN) * LEN, &buffer, 0, LEN))?;
            }
            ring.submit();
            ring.complete(Wait::No, &mut done)?;
            done.clear();
        }
        if !std::mem::replace(&mut is_ready, true) {
            std::thread::sleep(Duration::from_millis(200));
            ready()?;
        }
    }
}
