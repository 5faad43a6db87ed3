//! Measures reads and writes of file contents.

use std::error::Error;
use std::fmt;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::Path;
use std::sync::Barrier;
use std::time::{Duration, Instant};

use gpunvme_tests::results::Work;
use gpunvme_tests::tree;

use crate::Scale;
use crate::mover::{self, Mover};
use crate::report::Row;
use crate::subject::{Subject, Subjects};

/// One way to read or write: each thread works on a file of its own, or on a part of the bare
/// backing.
///
/// Sequential writes make a file anew and end at its full length; reads and random writes work on
/// files that are there. Writes include the fsync at the end.
#[derive(Clone, Copy)]
pub struct Data {
    pub random: bool,
    pub write: bool,
    /// Bytes of a block.
    pub block: u64,
    pub threads: usize,
    /// Blocks in flight a thread.
    pub depth: usize,
    pub direct: bool,
}

impl fmt::Display for Data {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        self.described().fmt(f)
    }
}

impl Data {
    fn described(&self) -> Work {
        let order = if self.random { "random" } else { "sequential" };
        let direction = if self.write { "write" } else { "read" };
        Work {
            work: format!("{order} {direction}"),
            size: Some(self.block),
            threads: Some(self.threads),
            depth: Some(self.depth),
        }
    }

    /// Measures it on every subject in turn, as often as the scale says.
    pub fn measure(&self, subjects: &Subjects, scale: &Scale) -> Result<Row, Box<dyn Error>> {
        let mut row = Row::new(self.described());
        for _ in 0..scale.runs {
            for subject in Subject::ALL {
                // Only read and write go through the page cache.
                if self.direct || subject.is_cached() {
                    row.add(subject, self.once(subjects, subject, scale)?);
                }
            }
        }
        Ok(row)
    }

    /// MB/s of one run on one subject.
    fn once(&self, subjects: &Subjects, subject: Subject, scale: &Scale) -> Result<f64, Box<dyn Error>> {
        let mut movers = Vec::new();
        for thread in 0..self.threads {
            let mover = if subject == Subject::DeviceCeiling {
                mover::of_device(subjects.device(), thread as u64 * scale.file_len, self)?
            } else {
                let path = subjects.root(subject).join(format!("data {thread}"));
                self.prepare(&path, scale.file_len)?;
                match subject {
                    Subject::Ioctl => mover::of_ioctl(&path, self)?,
                    Subject::Ring => mover::of_ring(&path, self)?,
                    _ => mover::of_file(&path, self)?,
                }
            };
            movers.push(mover);
        }
        let start = Barrier::new(self.threads);
        let results: Result<Vec<(u64, Duration)>, String> = std::thread::scope(|scope| {
            let threads: Vec<_> = movers
                .into_iter()
                .enumerate()
                .map(|(thread, mover)| {
                    let start = &start;
                    scope.spawn(move || self.work(mover, thread as u64, start, scale).map_err(|error| error.to_string()))
                })
                .collect();
            threads.into_iter().map(|thread| thread.join().expect("a thread that does not panic")).collect()
        });
        let results = results.map_err(|error| format!("{self} on {}: {error}", subject.name()))?;
        let bytes: u64 = results.iter().map(|result| result.0).sum();
        let time = results.iter().map(|result| result.1).max().expect("a thread");
        Ok(bytes as f64 / 1e6 / time.as_secs_f64())
    }

    /// Bytes moved by one thread, and its time.
    fn work(
        &self,
        mut mover: Box<dyn Mover>,
        seed: u64,
        start: &Barrier,
        scale: &Scale,
    ) -> Result<(u64, Duration), Box<dyn Error>> {
        let blocks = scale.file_len / self.block;
        let mut random = seed + 1;
        let mut next = 0;
        let mut offsets = vec![0; self.depth];
        let mut bytes = 0;
        // Going round would find a file that is there already, or cached.
        let once = !self.random && (self.write || !self.direct);
        start.wait();
        let begin = Instant::now();
        while begin.elapsed() < scale.time && !(once && next + self.depth as u64 > blocks) {
            for offset in &mut offsets {
                *offset = if self.random {
                    // xorshift64
                    random ^= random << 13;
                    random ^= random >> 7;
                    random ^= random << 17;
                    random % blocks * self.block
                } else {
                    next += 1;
                    (next - 1) % blocks * self.block
                };
            }
            mover.go(&offsets)?;
            bytes += self.depth as u64 * self.block;
        }
        if self.write {
            mover.sync()?;
        }
        Ok((bytes, begin.elapsed()))
    }

    /// A file in the state that the work begins with.
    fn prepare(&self, path: &Path, len: u64) -> Result<(), Box<dyn Error>> {
        if self.write && !self.random {
            File::create(path)?;
            return Ok(());
        }
        let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path)?;
        if file.metadata()?.len() < len {
            let data = tree::pattern(2, 1 << 20);
            for _ in 0..len >> 20 {
                (&file).write_all(&data)?;
            }
        }
        file.sync_all()?;
        if !self.direct {
            rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed)?;
        }
        Ok(())
    }
}
