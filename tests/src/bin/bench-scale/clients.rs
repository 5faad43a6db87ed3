//! Measures whether the throughput of independent work falls as clients are added: each client is a
//! thread with files of its own.

use std::error::Error;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::time::{Duration, Instant};

use gpunvme_tests::mounted::Image;
use gpunvme_tests::peers::MemFs;
use gpunvme_tests::random::Random;
use gpunvme_tests::results::Work;

use crate::sample::Aligned;
use crate::table::Table;
use crate::{Scale, progress};

const CLIENTS: [usize; 5] = [1, 2, 4, 8, 16];
/// Bytes of each client's file.
const DATA: u64 = 16 << 20;
const BLOCK: u64 = 4096;
/// Names that a client makes before it takes them away again.
const NAMES: u64 = 100;

/// Works in a folder until the time is over, and says how often.
type Operation = fn(&Path, Duration) -> io::Result<u64>;

const WORK: [(&str, Operation); 3] =
    [("create and unlink", names), ("read 4 KiB at random, O_DIRECT", read), ("write 4 KiB at random, O_DIRECT", write)];

/// A table of what all clients together get done.
pub fn measure(scale: &Scale) -> Result<Vec<Table>, Box<dyn Error>> {
    let mounted = Image::formatted_with(4 << 30).mount();
    let scratch = gpunvme_tests::scratch_dir();
    let memfs = MemFs::set_up(scratch.path())?;
    let subjects = [("gpunvme", mounted.root()), ("memfs", memfs.root.clone())];
    for (_, root) in &subjects {
        for client in 0..CLIENTS[CLIENTS.len() - 1] {
            let folder = root.join(client.to_string());
            fs::create_dir(&folder)?;
            let file = File::create(folder.join("data"))?;
            (0..DATA >> 20).try_for_each(|n| file.write_all_at(&[n as u8; 1 << 20], n << 20))?;
            file.sync_all()?;
        }
    }
    let columns = subjects.each_ref().map(|(subject, _)| subject);
    let mut table = Table::new("independent work of several clients", "thousand/s", &columns, None);
    for (name, work) in WORK {
        for clients in CLIENTS {
            progress(&format!("clients: {name}, {clients} of them"));
            let rates = subjects.iter().map(|(_, root)| rate(root, clients, work, scale.time).map(Some));
            table.row(Work::named(name).by(clients), rates.collect::<io::Result<_>>()?);
        }
    }
    Ok(vec![table])
}

/// Thousands a second.
fn rate(root: &Path, clients: usize, work: Operation, time: Duration) -> io::Result<f64> {
    let start = Instant::now();
    let done: io::Result<Vec<u64>> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..clients)
            .map(|client| {
                let folder = root.join(client.to_string());
                scope.spawn(move || work(&folder, time))
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().expect("a thread that does not panic")).collect()
    });
    Ok(done?.iter().sum::<u64>() as f64 / 1e3 / start.elapsed().as_secs_f64())
}

fn names(folder: &Path, time: Duration) -> io::Result<u64> {
    let path = |n| folder.join(format!("file {n}"));
    let start = Instant::now();
    let mut done = 0;
    while start.elapsed() < time {
        (0..NAMES).try_for_each(|n| File::create_new(path(n)).map(drop))?;
        (0..NAMES).try_for_each(|n| fs::remove_file(path(n)))?;
        done += 2 * NAMES;
    }
    Ok(done)
}

fn read(folder: &Path, time: Duration) -> io::Result<u64> {
    data(folder, time, |file, block, offset| file.read_exact_at(block, offset))
}

fn write(folder: &Path, time: Duration) -> io::Result<u64> {
    data(folder, time, |file, block, offset| file.write_all_at(block, offset))
}

fn data(folder: &Path, time: Duration, go: fn(&File, &mut [u8], u64) -> io::Result<()>) -> io::Result<u64> {
    let file = OpenOptions::new().read(true).write(true).custom_flags(libc::O_DIRECT).open(folder.join("data"))?;
    let mut block = Aligned::new(BLOCK as usize);
    let mut random = Random(file.metadata()?.len());
    let start = Instant::now();
    let mut done = 0;
    while start.elapsed() < time {
        go(&file, block.bytes(), random.below(DATA / BLOCK) * BLOCK)?;
        done += 1;
    }
    Ok(done)
}
