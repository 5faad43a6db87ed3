//! Measures what programs do through the mount, beside ext4 and beside other builds and settings of
//! gpunvme, all in one run.
//!
//! | subject | what it is |
//! | --- | --- |
//! | ext4 | on a loop device with direct I/O |
//! | gpunvme | a volume on such a device, mounted |
//! | those of `--also` | the same, by the programs of another build or with other mount options |
//!
//! Clients are processes, as the workers of a data loader are. It prints medians and judges
//! nothing: times belong to the machine that they were taken on.

#![forbid(unsafe_code)]

mod clients;
mod database;
mod report;
mod subject;
mod work;

use std::error::Error;
use std::path::PathBuf;
use std::time::Duration;

use clap::Parser;

use clients::Task;
use report::Report;
use subject::{Other, Subjects};

/// Measures what programs do through the mount. Images go to $TMPDIR, or /var/tmp.
#[derive(Parser)]
#[command(name = "bench-mount")]
struct Arguments {
    /// Small sizes: whether it works, not how fast
    #[arg(long)]
    quick: bool,
    /// Write the results to this file as well, after each row
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Runs of which the median is shown
    #[arg(long)]
    runs: Option<usize>,
    /// Measure only these of dataset, names, fsync, streaming, trees, database
    #[arg(long)]
    only: Vec<String>,
    /// One more gpunvme: the build in this folder, or this build, with these mount options
    #[arg(long, value_name = "NAME[=FOLDER][:OPTIONS]")]
    also: Vec<Other>,
    /// Files of the data set, of 110 KiB each
    #[arg(long)]
    files: Option<usize>,
    /// Files of the tree that is unpacked, copied, read and removed
    #[arg(long)]
    tree: Option<usize>,
    /// Work as a client of the bench, and end
    #[arg(long, hide = true, value_name = "TASK")]
    client: Option<Task>,
}

/// How much is measured.
pub struct Scale {
    runs: usize,
    /// Files of the data set.
    files: usize,
    /// Names that are made, looked at, changed and removed.
    names: usize,
    /// Bytes of the file that is streamed.
    stream: u64,
    /// Files of the tree.
    tree: usize,
    /// How long appends are made.
    time: Duration,
    /// How long transactions are made, in seconds.
    transactions: u64,
}

const FULL: Scale = Scale {
    runs: 3,
    files: 16_000,
    names: 20_000,
    stream: 2 << 30,
    tree: 100_000,
    time: Duration::from_secs(1),
    transactions: 10,
};

const QUICK: Scale =
    Scale { runs: 1, files: 160, names: 400, stream: 32 << 20, tree: 100, time: Duration::from_millis(100), transactions: 1 };

/// Measures rows of one kind.
type Theme = fn(&Subjects, &Scale, &mut Report) -> Result<(), Box<dyn Error>>;

const THEMES: [(&str, Theme); 6] = [
    ("dataset", work::data_set),
    ("names", work::names),
    ("fsync", work::appends),
    ("streaming", work::streaming),
    ("trees", work::trees),
    ("database", database::measure),
];

fn main() -> Result<(), Box<dyn Error>> {
    let arguments = Arguments::parse();
    if let Some(task) = arguments.client {
        return Ok(task.serve()?);
    }
    if let Some(unknown) = arguments.only.iter().find(|only| !THEMES.iter().any(|(name, _)| name == only)) {
        let names = THEMES.map(|(name, _)| name).join(", ");
        return Err(format!("--only {unknown}: there are {names}").into());
    }
    let mut scale = if arguments.quick { QUICK } else { FULL };
    scale.runs = arguments.runs.unwrap_or(scale.runs).max(1);
    scale.files = arguments.files.unwrap_or(scale.files);
    scale.tree = arguments.tree.unwrap_or(scale.tree);
    let subjects = Subjects::set_up(arguments.also, scale.room())?;
    let mut report = Report::new(&scale, &subjects, arguments.json)?;
    for (name, measure) in THEMES {
        if arguments.only.is_empty() || arguments.only.iter().any(|only| only == name) {
            measure(&subjects, &scale, &mut report).map_err(|error| format!("{name}: {error}"))?;
        }
    }
    Ok(())
}

impl Scale {
    /// Bytes of a volume that holds what one theme makes, twice, with something to spare.
    fn room(&self) -> u64 {
        let data_set = self.files as u64 * work::FILE as u64;
        let tree = self.tree as u64 * (16 << 10);
        2 * data_set.max(self.stream).max(tree) + (1 << 30)
    }
}
