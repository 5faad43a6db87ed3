//! Making, looking at, listing and removing many files.

use std::error::Error;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::time::Instant;

use crate::Scale;
use crate::report::Row;
use crate::subject::{Subject, Subjects};

type Operation = fn(&Path, usize) -> io::Result<()>;

/// In this order: each finds what the one before left.
const OPERATIONS: [(&str, Operation); 5] = [
    ("create", |folder, count| (0..count).try_for_each(|n| File::create_new(file(folder, n)).map(drop))),
    ("stat", |folder, count| (0..count).try_for_each(|n| fs::symlink_metadata(file(folder, n)).map(drop))),
    ("readdir and stat, caches dropped", |folder, count| {
        let mut seen = 0;
        for entry in fs::read_dir(folder)? {
            entry?.metadata()?;
            seen += 1;
        }
        if seen == count { Ok(()) } else { Err(io::Error::other(format!("{seen} entries of {count} are listed"))) }
    }),
    ("rename", |folder, count| (0..count).try_for_each(|n| fs::rename(file(folder, n), moved(folder, n)))),
    ("unlink", |folder, count| (0..count).try_for_each(|n| fs::remove_file(moved(folder, n)))),
];

fn file(folder: &Path, number: usize) -> PathBuf {
    folder.join(format!("file.{number}"))
}

fn moved(folder: &Path, number: usize) -> PathBuf {
    folder.join(format!("moved.{number}"))
}

/// A row for each operation. Clients share the files out among themselves, and each has a folder of its own.
pub fn measure(subjects: &Subjects, clients: usize, scale: &Scale) -> Result<Vec<Row>, Box<dyn Error>> {
    let plural = if clients == 1 { "" } else { "s" };
    let mut rows: Vec<_> =
        OPERATIONS.iter().map(|(name, _)| Row::new(format!("{name}, {} files, {clients} client{plural}", scale.names))).collect();
    for _ in 0..scale.runs {
        for subject in Subject::MOUNTED {
            let folders: Vec<_> = (0..clients).map(|client| subjects.root(subject).join(format!("names {client}"))).collect();
            for folder in &folders {
                fs::create_dir(folder)?;
            }
            for (row, (name, operation)) in rows.iter_mut().zip(OPERATIONS) {
                if name.contains("dropped") {
                    rustix::fs::sync();
                    fs::write("/proc/sys/vm/drop_caches", "2")?;
                }
                let start = Instant::now();
                let count = scale.names / clients;
                std::thread::scope(|scope| {
                    let threads: Vec<_> = folders.iter().map(|folder| scope.spawn(move || operation(folder, count))).collect();
                    threads.into_iter().try_for_each(|thread| thread.join().expect("a thread that does not panic"))
                })
                .map_err(|error| format!("{name} on {}: {error}", subject.name()))?;
                row.add(subject, (count * clients) as f64 / 1e3 / start.elapsed().as_secs_f64());
            }
            for folder in &folders {
                fs::remove_dir(folder)?;
            }
        }
    }
    Ok(rows)
}
