//! Measures small appends, each made durable before the next: what a log or a database does.

use std::error::Error;
use std::fs::OpenOptions;
use std::io::{self, Write};
use std::path::Path;
use std::time::{Duration, Instant};

use gpunvme_tests::results::Work;

use crate::Scale;
use crate::report::Row;
use crate::subject::{Subject, Subjects};

/// Bytes of an append.
const LEN: usize = 512;

/// A row: thousands of appends a second that all threads together get synced. Each thread has a
/// file of its own.
pub fn measure(subjects: &Subjects, threads: usize, scale: &Scale) -> Result<Vec<Row>, Box<dyn Error>> {
    let work = Work { size: Some(LEN as u64), ..Work::named("append and fsync") };
    let mut row = Row::new(work.by(threads));
    for _ in 0..scale.runs {
        // In memory there is nothing to make durable.
        for subject in [Subject::Gpunvme, Subject::Ext4] {
            let root = subjects.root(subject);
            let start = Instant::now();
            let done: io::Result<Vec<u64>> = std::thread::scope(|scope| {
                let workers: Vec<_> = (0..threads)
                    .map(|thread| {
                        let path = root.join(format!("log {thread}"));
                        scope.spawn(move || append(&path, scale.time))
                    })
                    .collect();
                workers.into_iter().map(|worker| worker.join().expect("a thread that does not panic")).collect()
            });
            let done = done.map_err(|error| format!("fsync on {}: {error}", subject.name()))?;
            row.add(subject, done.iter().sum::<u64>() as f64 / 1e3 / start.elapsed().as_secs_f64());
        }
    }
    Ok(vec![row])
}

fn append(path: &Path, time: Duration) -> io::Result<u64> {
    let mut file = OpenOptions::new().append(true).create(true).open(path)?;
    let start = Instant::now();
    let mut done = 0;
    while start.elapsed() < time {
        file.write_all(&[7; LEN])?;
        file.sync_all()?;
        done += 1;
    }
    Ok(done)
}
