//! Measures how operations on names in the engine scale with threads, each in a directory of its
//! own, without FUSE or a device behind them: what the metadata lock allows. Creates, renames and
//! unlinks bring with them what the kernel asks besides: the name, and the directory's attributes.
//!
//! ```text
//! cargo run --release -p gpunvme-engine --example names_threads -- [FILES OF EACH] [THREADS]...
//! ```
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use gpunvme_blockdev::{BlockDevice, Io};
use gpunvme_blockdev_testing::MemoryDevice;
use gpunvme_engine::data::{Filesystem, Inline, Options, Settling};
use gpunvme_engine::volume::{Context, NewNode, RenameMode};
use gpunvme_engine::{FormatOptions, VolumeOptions, format};
use gpunvme_layout::Timestamp;

const ROOT: u64 = 1;

/// A thread's directory, and the inodes in it.
struct Client {
    dir: u64,
    inodes: Vec<u64>,
}

fn main() {
    let mut arguments = std::env::args().skip(1).map(|number| number.parse::<usize>().expect("a number"));
    let count = arguments.next().unwrap_or(20_000);
    let mut threads: Vec<usize> = arguments.collect();
    if threads.is_empty() {
        threads = vec![1, 2, 4, 8, 16];
    }
    println!("thousand a second of all threads together; {count} files of each");
    println!("{:>8} {:>10} {:>10} {:>10} {:>10} {:>10}", "threads", "create", "look up", "getattr", "rename", "unlink");
    for threads in threads {
        println!("{threads:>8}{}", rates(threads, count).map(|rate| format!(" {rate:>10.0}")).concat());
    }
}

/// What so many threads reach, in thousand a second.
fn rates(threads: usize, count: usize) -> [f64; 5] {
    let fs = fresh();
    let mut clients: Vec<Client> = (0..threads)
        .map(|n| Client { dir: create(&fs, ROOT, &name("directory", n), libc::S_IFDIR), inodes: Vec::new() })
        .collect();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        // As the daemon's housekeeping does.
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                std::thread::sleep(Duration::from_millis(200));
                fs.commit().unwrap();
                if fs.volume().wants_checkpoint() {
                    fs.volume().checkpoint().unwrap();
                }
            }
        });
        let found = [
            in_turn(&mut clients, count, |client, n| {
                let name = name("file", n);
                assert!(fs.wait(|| fs.lookup(client.dir, &name)).is_err());
                fs.wait(|| fs.attributes(client.dir)).unwrap();
                client.inodes.push(create(&fs, client.dir, &name, libc::S_IFREG));
            }),
            in_turn(&mut clients, count, |client, n| {
                fs.wait(|| fs.lookup(client.dir, &name("file", n))).unwrap();
            }),
            in_turn(&mut clients, count, |client, n| {
                fs.wait(|| fs.attributes(client.inodes[n])).unwrap();
            }),
            in_turn(&mut clients, count, |client, n| {
                let (from, to) = (name("file", n), name("moved", n));
                assert!(fs.wait(|| fs.lookup(client.dir, &to)).is_err());
                fs.wait(|| fs.attributes(client.dir)).unwrap();
                let (from, to) = ((client.dir, &from[..]), (client.dir, &to[..]));
                fs.wait(|| fs.rename(&now(), from, to, RenameMode::Replace, &mut Settling::default())).unwrap();
            }),
            in_turn(&mut clients, count, |client, n| {
                fs.wait(|| fs.attributes(client.dir)).unwrap();
                fs.wait(|| fs.unlink(&now(), client.dir, &name("moved", n))).unwrap();
                while fs.wait(|| fs.reap_step(client.inodes[n])).unwrap() {}
            }),
        ];
        stop.store(true, Ordering::Relaxed);
        found
    })
}

/// Has each client do `operation` so many times, all at once.
fn in_turn(clients: &mut [Client], count: usize, operation: impl Fn(&mut Client, usize) + Sync) -> f64 {
    let all = clients.len() * count;
    let begin = Instant::now();
    std::thread::scope(|scope| {
        for client in clients {
            scope.spawn(|| (0..count).for_each(|n| operation(client, n)));
        }
    });
    all as f64 / begin.elapsed().as_secs_f64() / 1e3
}

fn fresh() -> Arc<Filesystem> {
    let device: Arc<dyn BlockDevice> = MemoryDevice::new(64 << 30);
    let now = Timestamp { seconds: 1, nanoseconds: 0 };
    let options = FormatOptions { label: "threads".into(), uuid: [7; 16], hash_key: [9; 16], now, owner: (0, 0) };
    format(&device, &options).unwrap();
    let options = Options { volume: VolumeOptions { read_only: false, cache: 1 << 30, discard: false }, write_buffer: 16 << 20 };
    Filesystem::open(Io::inline(device).unwrap(), options, Arc::new(Inline)).unwrap()
}

fn now() -> Context {
    Context { uid: 0, gid: 0, now: gpunvme_engine::data::system_time() }
}

fn name(prefix: &str, number: usize) -> Vec<u8> {
    format!("{prefix}.{number}").into_bytes()
}

fn create(fs: &Arc<Filesystem>, dir: u64, name: &[u8], file_type: u32) -> u64 {
    let new = NewNode { mode: file_type | 0o755, umask: 0, rdev: 0, target: &[] };
    fs.wait(|| fs.create(&now(), dir, name, &new)).unwrap().ino
}
