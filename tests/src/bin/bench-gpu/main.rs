//! Measures how files get into and out of GPU memory: by gpunvme, and by what a user would pick
//! instead, all in one run and on the same backing.
//!
//! | subject | what it is |
//! | --- | --- |
//! | gpunvme | `gpu-mover`: our library, on a file of a mounted volume |
//! | device | io_uring with O_DIRECT at the same depth, into host memory: what nothing can be faster than |
//! | our cuFile, our batch | the program of the next two, with our libcufile before it, on a file of a mounted volume |
//! | cuFile, batch | cuFileRead and cuFileWrite; cuFile's batches at the same depth |
//! | pinned | pread and pwrite with O_DIRECT, pinned memory, cudaMemcpyAsync |
//! | pageable | the page cache, hot for reads, and copies from ordinary memory |
//! | hot | `gpu-mover` on a file in the page cache, which it prepared: the route `cache` |
//! | hot, first | the same, not prepared, read once from beginning to end |
//! | pinned, hot | pread through the page cache, which has the file, into pinned memory, cudaMemcpyAsync |
//!
//! The last three are measured when they are named.
//!
//! It judges nothing: times belong to the machine that they were taken on.

#![deny(unsafe_code)]

mod backing;
mod run;
mod table;

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Parser;
use gpunvme_tests::machine::{self, Machine};
use gpunvme_tests::results::{self, Run};

use backing::{Backing, Kind};
use run::{Session, Subject};
use table::{Row, Table};

/// Compares ways to move files into and out of GPU memory. Needs root, a GPU, and cuFile. Writes to
/// $TMPDIR, or /var/tmp, and to a tmpfs.
#[derive(Parser)]
#[command(name = "bench-gpu")]
pub struct Arguments {
    /// The program made from peers.c
    #[arg(long)]
    peers: PathBuf,
    /// Number of the GPU
    #[arg(long, default_value_t = 0)]
    gpu: usize,
    /// Length of the file in MiB
    #[arg(long, default_value_t = 4096)]
    file_mib: u64,
    /// Seconds of one measurement
    #[arg(long, default_value_t = 0.7)]
    seconds: f64,
    /// Runs of which the median is shown
    #[arg(long, default_value_t = 1)]
    runs: usize,
    /// Only this backing
    #[arg(long)]
    backing: Option<Kind>,
    /// Only work that has this in its name, as in "read, 4 KiB"; or one of several
    #[arg(long)]
    only: Vec<String>,
    /// Only these subjects, with commas between them; those of the page cache are measured only so
    #[arg(long, value_delimiter = ',')]
    subjects: Vec<Subject>,
    /// Write the results to this file as well; with -, to standard output in place of the tables
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// A piece of work, done by each subject.
#[derive(Clone, Copy)]
pub struct Work {
    write: bool,
    size: u64,
    random: bool,
    threads: usize,
    /// Operations that each thread has in flight, where the subject can.
    depth: usize,
}

impl Work {
    fn described(&self) -> results::Work {
        let order = if self.random { "random" } else { "sequential" };
        let direction = if self.write { "write" } else { "read" };
        results::Work {
            work: format!("{order} {direction}"),
            size: Some(self.size),
            threads: Some(self.threads),
            depth: Some(self.depth),
        }
    }

    fn name(&self) -> String {
        self.described().to_string()
    }
}

fn all_work() -> Vec<Work> {
    let mut work = Vec::new();
    for (write, threads) in [(false, [1, 8, 16].as_slice()), (true, &[1, 8])] {
        for (size, random, depth) in [(4 << 10, true, 128), (64 << 10, true, 32), (1 << 20, false, 8), (16 << 20, false, 4)] {
            // One operation at a time in each thread, as most applications are written. The longest
            // are cut into pieces in any case.
            if size < 16 << 20 {
                work.extend(threads.iter().map(|&threads| Work { write, size, random, threads, depth: 1 }));
            }
            // Many in flight; as many threads as the machine has cores need little depth of their
            // own.
            work.extend(threads.iter().map(|&threads| Work { write, size, random, threads, depth: (depth / threads).max(2) }));
        }
    }
    work
}

fn is_wanted(arguments: &Arguments, subject: Subject) -> bool {
    match arguments.subjects.as_slice() {
        [] => !Subject::NAMED.contains(&subject),
        named => named.contains(&subject),
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments = Arguments::parse();
    let time = Duration::from_secs_f64(arguments.seconds);
    let machine = machine::describe(&gpunvme_tests::scratch_root());
    let mut tables: Vec<Table> = Vec::new();
    for kind in [Kind::Memory, Kind::Disk] {
        if arguments.backing.is_some_and(|only| only != kind) {
            continue;
        }
        eprintln!("setting up: {}", kind.name());
        let subjects: Vec<_> = Subject::ALL.into_iter().filter(|subject| is_wanted(&arguments, *subject)).collect();
        let is_hot = subjects.iter().any(|subject| Subject::NAMED.contains(subject));
        let backing = Backing::set_up(kind, arguments.file_mib << 20, is_hot)?;
        let mut rows = Vec::new();
        let mut all = all_work();
        if subjects.iter().all(|subject| subject.is_one_at_a_time()) {
            // To them, work of one depth and of another is the same.
            let mut seen = HashSet::new();
            all.retain(|work| seen.insert((work.write, work.size, work.threads)));
        }
        for work in all {
            let name = work.name();
            if !arguments.only.is_empty() && !arguments.only.iter().any(|only| name.contains(only.as_str())) {
                continue;
            }
            let mut row = Row::new(work);
            let mut sessions = Vec::new();
            for subject in subjects.iter().copied().filter(|subject| subject.can(&work)) {
                match Session::begin(subject, &work, &backing, &arguments, time) {
                    Ok(session) => sessions.push((subject, session)),
                    Err(error) => row.failed(subject, error.to_string()),
                }
            }
            // They take turns, so that what changes on the machine changes for all; and the other
            // way round each time, so that no subject is always the one after another. What is
            // made at the first use is made before, in a turn that does not count.
            for run in 0..=arguments.runs.max(1) {
                for (subject, session) in &mut sessions {
                    match session.measure() {
                        Ok(_) if run == 0 => {}
                        Ok(rate) => row.add(*subject, rate),
                        Err(error) => row.failed(*subject, error.to_string()),
                    }
                }
                sessions.reverse();
            }
            for (subject, session) in sessions {
                if let Err(error) = session.end() {
                    row.failed(subject, error.to_string());
                }
            }
            eprintln!("{}", row.line(&subjects));
            rows.push(row);
        }
        tables.push(Table { backing: kind.name(), subjects, rows });
    }
    let machine = Machine { gpu: Some(machine::describe_gpu(arguments.gpu)), ..machine };
    let Arguments { file_mib, seconds, .. } = arguments;
    let method = format!("one file of {file_mib} MiB, {seconds} s a measurement, median of {}", arguments.runs.max(1));
    if arguments.json.as_deref() != Some(Path::new("-")) {
        println!("{machine}\n{method}");
        for table in &tables {
            print!("\n{table}");
        }
    }
    if let Some(path) = arguments.json {
        Run::new("bench-gpu", machine, method, tables.iter().flat_map(Table::results).collect()).write(&path)?;
    }
    Ok(())
}
