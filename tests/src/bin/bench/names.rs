//! Measures making, looking at, opening, listing and removing many files and folders.

use std::error::Error;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::time::Instant;

use gpunvme_tests::results::Work;

use crate::Scale;
use crate::report::Row;
use crate::subject::{Subject, Subjects};

/// Does something to so many files, which are spread over the folders.
type Operation = fn(&[PathBuf], usize) -> io::Result<()>;

/// In this order: each finds what the one before left.
const OPERATIONS: [(&str, Operation); 9] = [
    ("create", |folders, count| (0..count).try_for_each(|n| File::create_new(file(folders, n)).map(drop))),
    ("stat", |folders, count| (0..count).try_for_each(|n| fs::symlink_metadata(file(folders, n)).map(drop))),
    ("open and close", |folders, count| (0..count).try_for_each(|n| File::open(file(folders, n)).map(drop))),
    ("readdir and stat", list),
    ("readdir and stat, again", list),
    ("readdir and stat, caches dropped", list),
    ("rename", |folders, count| (0..count).try_for_each(|n| fs::rename(file(folders, n), moved(folders, n)))),
    ("unlink", |folders, count| (0..count).try_for_each(|n| fs::remove_file(moved(folders, n)))),
    ("mkdir", |folders, count| (0..count).try_for_each(|n| fs::create_dir(file(folders, n)))),
];

fn list(folders: &[PathBuf], count: usize) -> io::Result<()> {
    let mut seen = 0;
    for folder in folders {
        for entry in fs::read_dir(folder)? {
            entry?.metadata()?;
            seen += 1;
        }
    }
    if seen == count { Ok(()) } else { Err(io::Error::other(format!("{seen} entries of {count} are listed"))) }
}

fn file(folders: &[PathBuf], number: usize) -> PathBuf {
    folders[number % folders.len()].join(format!("file.{number}"))
}

fn moved(folders: &[PathBuf], number: usize) -> PathBuf {
    folders[number % folders.len()].join(format!("moved.{number}"))
}

/// A row for each operation. Clients share the files out among themselves, and each has so many
/// folders of its own.
pub fn measure(subjects: &Subjects, clients: usize, folders: usize, scale: &Scale) -> Result<Vec<Row>, Box<dyn Error>> {
    let plural = if folders == 1 { "" } else { "s" };
    let how = format!("{} files, {folders} folder{plural}", scale.names);
    let work = |name| Work::named(format!("{name}, {how}")).by(clients);
    let mut rows: Vec<_> = OPERATIONS.iter().map(|(name, _)| Row::new(work(name))).collect();
    for _ in 0..scale.runs {
        for subject in Subject::MOUNTED {
            let root = subjects.root(subject);
            let own = |client| (0..folders).map(|folder| root.join(format!("names {client} {folder}"))).collect::<Vec<_>>();
            let places: Vec<Vec<PathBuf>> = (0..clients).map(own).collect();
            places.iter().flatten().try_for_each(fs::create_dir)?;
            for (row, (name, operation)) in rows.iter_mut().zip(OPERATIONS) {
                let seconds = time(&places, scale.names / clients, name, operation);
                let seconds = seconds.map_err(|error| format!("{name} on {}: {error}", subject.name()))?;
                row.add(subject, (scale.names / clients * clients) as f64 / 1e3 / seconds);
            }
            places.iter().flatten().try_for_each(fs::remove_dir_all)?;
        }
    }
    Ok(rows)
}

/// Seconds that all clients together take, each at its places.
fn time(places: &[Vec<PathBuf>], count: usize, name: &str, operation: Operation) -> io::Result<f64> {
    if name.contains("dropped") {
        drop_caches()?;
    }
    let start = Instant::now();
    std::thread::scope(|scope| {
        let threads: Vec<_> = places.iter().map(|folders| scope.spawn(move || operation(folders, count))).collect();
        threads.into_iter().try_for_each(|thread| thread.join().expect("a thread that does not panic"))
    })?;
    Ok(start.elapsed().as_secs_f64())
}

/// Has the kernel forget what it knows of names and inodes.
pub fn drop_caches() -> io::Result<()> {
    rustix::fs::sync();
    fs::write(Path::new("/proc/sys/vm/drop_caches"), "2")
}
