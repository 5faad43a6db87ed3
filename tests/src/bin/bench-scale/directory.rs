//! Measures what operations cost in a directory of many entries, beside a small one on the same
//! volume; and whether it can be listed as a stream.

use std::error::Error;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::time::Instant;

use gpunvme_tests::mounted::Image;
use gpunvme_tests::random::Random;
use gpunvme_tests::results::Work;

use crate::sample::{self, Sample, drop_caches};
use crate::table::Table;
use crate::{Scale, progress};

/// Entries of the small directory.
const FEW: usize = 1000;
const OPERATIONS: [&str; 4] = ["create", "look up, forgotten by the kernel", "rename", "unlink"];

struct Directory {
    path: PathBuf,
    entries: usize,
    samples: [Sample; OPERATIONS.len()],
}

/// Tables of operations, and of listing.
pub fn measure(scale: &Scale) -> Result<Vec<Table>, Box<dyn Error>> {
    let mounted = Image::formatted_with(64 << 30).mount();
    let mut directories = [FEW, scale.entries].map(|entries| Directory {
        path: mounted.path(format!("{entries} entries")),
        entries,
        samples: Default::default(),
    });
    for directory in &directories {
        progress(&format!("directory: {} entries", directory.entries));
        fs::create_dir(&directory.path)?;
        (0..directory.entries).try_for_each(|n| File::create_new(directory.file(n)).map(drop))?;
    }
    for round in 0..scale.rounds {
        progress(&format!("directory: round {} of {}", round + 1, scale.rounds));
        directories.iter_mut().try_for_each(|directory| directory.round(round, scale.operations))?;
    }
    let columns = [FEW, scale.entries].map(|entries| format!("{entries} entries"));
    let mut operations = Table::new("operations in a directory", "µs, median", &columns, Some(0));
    for (i, name) in OPERATIONS.iter().enumerate() {
        operations.row(Work::named(*name), directories.iter_mut().map(|directory| directory.samples[i].median()).collect());
    }
    let mut listing = Table::new("listing a directory, forgotten by the kernel", "milliseconds", &columns, None);
    let times = directories.iter().map(|directory| list(&directory.path)).collect::<io::Result<Vec<_>>>()?;
    listing.row(Work::named("to the first entry"), times.iter().map(|(first, _)| Some(*first)).collect());
    listing.row(Work::named("to the last entry"), times.iter().map(|(_, last)| Some(*last)).collect());
    let mut memory = Table::new("most memory of the daemon: cache=256M and write_buffer=64M", "MiB", &["in all"], None);
    memory.row(Work::named("both directories"), vec![Some(sample::mebibytes(mounted.peak_memory()))]);
    Ok(vec![operations, listing, memory])
}

impl Directory {
    fn file(&self, number: usize) -> PathBuf {
        self.path.join(format!("file {number}"))
    }

    /// Some operations of each kind, that leave the directory as it was.
    fn round(&mut self, round: usize, count: usize) -> io::Result<()> {
        let new = |n| self.path.join(format!("new {n}"));
        let moved = |n| self.path.join(format!("moved {n}"));
        let mut random = Random(round as u64);
        let [mut create, mut look_up, mut rename, mut unlink] = std::mem::take(&mut self.samples);
        (0..count).try_for_each(|n| create.time(|| File::create_new(new(n))).map(drop))?;
        drop_caches()?;
        fs::symlink_metadata(&self.path)?;
        for _ in 0..count {
            let path = self.file(random.below(self.entries as u64) as usize);
            look_up.time(|| fs::symlink_metadata(path))?;
        }
        (0..count).try_for_each(|n| rename.time(|| fs::rename(new(n), moved(n))))?;
        (0..count).try_for_each(|n| unlink.time(|| fs::remove_file(moved(n))))?;
        self.samples = [create, look_up, rename, unlink];
        Ok(())
    }
}

/// Milliseconds to the first entry and to the last one.
fn list(path: &Path) -> io::Result<(f64, f64)> {
    drop_caches()?;
    let start = Instant::now();
    let mut entries = fs::read_dir(path)?;
    entries.next().transpose()?;
    let first = start.elapsed();
    entries.try_for_each(|entry| entry.map(drop))?;
    Ok((first.as_secs_f64() * 1e3, start.elapsed().as_secs_f64() * 1e3))
}
