//! Measures what operations on names cost in the engine, without FUSE, threads or a device behind
//! it: the processor time of each, which other load of the machine changes least. Pass a count of
//! files that exist beforehand to see how cost grows.
//!
//! ```text
//! cargo run --release -p gpunvme-engine --example names_cost -- [FILES PER ROW] [FILES BEFORE]
//! ```
use std::sync::Arc;
use std::time::Duration;

use gpunvme_blockdev::{BlockDevice, Io};
use gpunvme_blockdev_testing::MemoryDevice;
use gpunvme_engine::data::{Filesystem, Inline, Options, Settling};
use gpunvme_engine::volume::{Context, NewNode, RenameMode};
use gpunvme_engine::{FormatOptions, VolumeOptions, format};
use gpunvme_layout::Timestamp;

const ROOT: u64 = 1;
/// Operations between two commits: what some seconds of a busy client make.
const COMMIT: usize = 20_000;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1).map(|number| number.parse::<usize>());
    let count = arguments.next().unwrap_or(Ok(100_000))?;
    let before = arguments.next().unwrap_or(Ok(0))?;
    let fs = fresh()?;
    if before > 0 {
        measure("create (before)", &fs, before, |n| create(&fs, ROOT, &name("there", n), libc::S_IFREG).map(drop))?;
    }
    let dir = create(&fs, ROOT, b"directory", libc::S_IFDIR)?;
    let mut inodes = Vec::with_capacity(count);
    measure("create", &fs, count, |n| {
        inodes.push(create(&fs, dir, &name("file", n), libc::S_IFREG)?);
        Ok(())
    })?;
    measure("look up", &fs, count, |n| Ok(_ = fs.wait(|| fs.lookup(dir, &name("file", n)))?))?;
    measure("getattr", &fs, count, |n| Ok(_ = fs.wait(|| fs.attributes(inodes[n]))?))?;
    measure("read directory", &fs, 1, |_| {
        let mut cookie = 0;
        while let Some(last) = fs.wait(|| fs.read_dir(dir, cookie, 64))?.last() {
            cookie = last.cookie;
        }
        Ok(())
    })?;
    measure("list", &fs, 1, |_| {
        let mut cookie = 0;
        loop {
            let entries = fs.wait(|| fs.read_dir(dir, cookie, 64))?;
            let Some(last) = entries.last() else { return Ok(()) };
            cookie = last.cookie;
            let inos: Vec<u64> = entries.iter().map(|entry| entry.ino).collect();
            fs.all_attributes(&inos).into_iter().for_each(|found| assert!(found.is_ok()));
        }
    })?;
    measure("rename", &fs, count, |n| {
        let (from, to) = (name("file", n), name("moved", n));
        fs.wait(|| fs.rename(&now(), (dir, &from), (dir, &to), RenameMode::Replace, &mut Settling::default()))?;
        Ok(())
    })?;
    measure("unlink", &fs, count, |n| Ok(_ = fs.wait(|| fs.unlink(&now(), dir, &name("moved", n)))?))?;
    measure("forget", &fs, count, |n| {
        while fs.wait(|| fs.reap_step(inodes[n]))? {}
        Ok(())
    })?;
    Ok(fs.close()?)
}

fn fresh() -> Result<Arc<Filesystem>, Box<dyn std::error::Error>> {
    let device: Arc<dyn BlockDevice> = MemoryDevice::new(64 << 30);
    let now = Timestamp { seconds: 1, nanoseconds: 0 };
    format(&device, &FormatOptions { label: "cost".into(), uuid: [7; 16], hash_key: [9; 16], now, owner: (0, 0) })?;
    let options = Options { volume: VolumeOptions { read_only: false, cache: 1 << 30, discard: false }, write_buffer: 16 << 20 };
    Ok(Filesystem::open(Io::inline(device)?, options, Arc::new(Inline))?)
}

fn now() -> Context {
    Context { uid: 0, gid: 0, now: gpunvme_engine::data::system_time() }
}

fn name(prefix: &str, number: usize) -> Vec<u8> {
    format!("{prefix}.{number}").into_bytes()
}

fn create(fs: &Arc<Filesystem>, dir: u64, name: &[u8], file_type: u32) -> Result<u64, Box<dyn std::error::Error>> {
    let new = NewNode { mode: file_type | 0o755, umask: 0, rdev: 0, target: &[] };
    Ok(fs.wait(|| fs.create(&now(), dir, name, &new))?.ino)
}

/// Processor time of this thread so far.
fn used() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// Prints what an operation took on average, and what the commits between them added to that.
fn measure(
    what: &str,
    fs: &Arc<Filesystem>,
    count: usize,
    mut operation: impl FnMut(usize) -> Result<(), Box<dyn std::error::Error>>,
) -> Result<(), Box<dyn std::error::Error>> {
    let (mut operations, mut commits) = (Duration::ZERO, Duration::ZERO);
    for first in (0..count).step_by(COMMIT) {
        let start = used();
        (first..count.min(first + COMMIT)).try_for_each(&mut operation)?;
        operations += used() - start;
        let start = used();
        fs.commit()?;
        if fs.volume().wants_checkpoint() {
            fs.volume().checkpoint()?;
        }
        commits += used() - start;
    }
    let each = |time: Duration| time.as_secs_f64() * 1e6 / count as f64;
    println!("{what:>16} {:>10.2} us {:>10.2} us in commits", each(operations), each(commits));
    Ok(())
}
