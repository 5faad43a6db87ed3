//! Measures gpunvme side by side with what limits it and with what a user would pick instead, all
//! in one run.
//!
//! | subject | what it is |
//! | --- | --- |
//! | gpunvme | a volume on an image file, mounted, through read(2) and write(2) |
//! | ioctl | the same volume, through the ioctl into registered memory |
//! | ring | the same volume, through a ring into registered memory |
//! | ext4 | ext4 on a loop device with direct I/O, on an image file beside the first |
//! | FUSE | memfs: a filesystem in memory, on the same FUSE settings |
//! | device | a third such image file, through io_uring with O_DIRECT |
//! | both | memfs with what files hold on a fourth: no metadata, no journal, nothing to look up |
//!
//! It prints medians and judges nothing: times belong to the machine that they were taken on.

#![forbid(unsafe_code)]

mod appends;
mod data;
mod mover;
mod names;
mod report;
mod subject;
mod trees;

use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Parser;

use gpunvme_tests::machine;

use data::Data;
use report::{Report, Row, Section};
use subject::Subjects;

/// Compares gpunvme with its ceilings and with ext4. Images go to $TMPDIR, or /var/tmp.
#[derive(Parser)]
#[command(name = "bench")]
struct Arguments {
    /// A few short measurements: whether it works, not how fast
    #[arg(long)]
    quick: bool,
    /// Write the results to this file as well; with -, to standard output in place of the tables
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Runs of which the median is shown
    #[arg(long)]
    runs: Option<usize>,
    /// Measure only what has this word in its name, as in "random" or "1 MiB"
    #[arg(long)]
    only: Vec<String>,
}

/// How much is measured.
pub struct Scale {
    runs: usize,
    /// Longest time of one measurement.
    time: Duration,
    /// Bytes of each file that data is read from and written to; one file a thread.
    file_len: u64,
    /// Room of an image beside them, in bytes: for metadata, the journal, and files of other
    /// sections.
    spare: u64,
    blocks: &'static [u64],
    threads: &'static [usize],
    /// Files that are made, listed and removed.
    names: usize,
    /// Files of the tree that is unpacked, copied and removed.
    tree: usize,
}

/// A size of which only what one thread reads and writes in order is of interest: the time goes to
/// the others.
const ONE_THREAD: u64 = 4 << 20;

/// Folders of a client where it has several.
const FOLDERS: usize = 8;

const FULL: Scale = Scale {
    runs: 3,
    time: Duration::from_millis(500),
    file_len: 128 << 20,
    spare: 1 << 30,
    blocks: &[4 << 10, 64 << 10, 1 << 20, 4 << 20, 16 << 20],
    threads: &[1, 2, 8],
    names: 100_000,
    tree: 20_000,
};

const QUICK: Scale = Scale {
    runs: 1,
    time: Duration::from_millis(100),
    file_len: 32 << 20,
    spare: 256 << 20,
    blocks: &[4 << 10, 1 << 20],
    threads: &[1, 2],
    names: 2_000,
    tree: 500,
};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments = Arguments::parse();
    let mut scale = if arguments.quick { QUICK } else { FULL };
    scale.runs = arguments.runs.unwrap_or(scale.runs).max(1);
    let chosen = |name: &str| arguments.only.iter().all(|word| name.contains(word.as_str()));

    let subjects = Subjects::set_up(&scale)?;
    let mut report = Report::new(machine::describe(subjects.scratch()), &scale);
    for section in sections(&scale) {
        let mut rows = Vec::new();
        for work in section.work.into_iter().filter(|work| chosen(&format!("{} {}", section.title, work.name()))) {
            eprint!("{}: {} ...\r\x1b[K", section.title, work.name());
            rows.extend(work.measure(&subjects, &scale)?);
        }
        report.sections.push(Section { title: section.title, unit: section.unit, rows });
    }
    if arguments.json.as_deref() != Some(Path::new("-")) {
        print!("{report}");
    }
    if let Some(path) = arguments.json {
        report.into_run().write(&path)?;
    }
    Ok(())
}

struct Plan {
    title: &'static str,
    unit: &'static str,
    work: Vec<Work>,
}

/// One thing to measure: a row of a table, or, for names, a row for each operation.
enum Work {
    Data(Data),
    Appends { threads: usize },
    Names { clients: usize, folders: usize },
    Trees,
}

impl Work {
    fn name(&self) -> String {
        match self {
            Work::Data(data) => data.to_string(),
            Work::Appends { threads } => format!("append and fsync, {threads} threads"),
            Work::Names { clients, folders } => format!("{clients} clients, {folders} folders"),
            Work::Trees => "a tree".to_owned(),
        }
    }

    fn measure(&self, subjects: &Subjects, scale: &Scale) -> Result<Vec<Row>, Box<dyn std::error::Error>> {
        match self {
            Work::Data(data) => Ok(vec![data.measure(subjects, scale)?]),
            Work::Appends { threads } => appends::measure(subjects, *threads, scale),
            Work::Names { clients, folders } => names::measure(subjects, *clients, *folders, scale),
            Work::Trees => trees::measure(subjects, scale),
        }
    }
}

fn sections(scale: &Scale) -> Vec<Plan> {
    let mut direct = Vec::new();
    for (random, write) in [(false, false), (false, true), (true, false), (true, true)] {
        for &block in scale.blocks {
            for &threads in scale.threads.iter().filter(|&&threads| block != ONE_THREAD || (threads == 1 && !random)) {
                direct.push(Work::Data(Data { random, write, block, threads, depth: 1, direct: true }));
            }
        }
    }
    for write in [false, true] {
        for depth in [32, 64] {
            direct.push(Work::Data(Data { random: true, write, block: 4096, threads: 1, depth, direct: true }));
        }
    }
    let mut buffered = Vec::new();
    for write in [false, true] {
        for &block in scale.blocks {
            for &threads in scale.threads.iter().filter(|&&threads| block != ONE_THREAD || threads == 1) {
                buffered.push(Work::Data(Data { random: false, write, block, threads, depth: 1, direct: false }));
            }
        }
    }
    let appends = scale.threads.iter().map(|&threads| Work::Appends { threads });
    let clients = scale.threads.iter().filter(|&&clients| clients <= 2);
    let names = clients.flat_map(|&clients| [1, FOLDERS].map(|folders| Work::Names { clients, folders }));
    vec![
        Plan { title: "O_DIRECT", unit: "MB/s", work: direct },
        Plan { title: "through the page cache, which is cold for reads; writes end with fsync", unit: "MB/s", work: buffered },
        Plan { title: "fsync", unit: "thousand/s", work: appends.collect() },
        Plan { title: "names", unit: "thousand/s", work: names.collect() },
        Plan { title: "trees of small files", unit: "times/minute", work: vec![Work::Trees] },
    ]
}
