//! Measures how cost grows: with the inodes and the bytes of a volume, with the entries of a
//! directory, with age, with the size of trees, with the number of clients, and beside busy
//! neighbours. Beside ext4, XFS and the filesystem in memory where they can do the same.
//!
//! It prints tables and judges nothing: times belong to the machine that they were taken on.

#![forbid(unsafe_code)]

mod ageing;
mod clients;
mod directory;
mod growth;
mod neighbours;
mod sample;
mod table;
mod trees;

use std::error::Error;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Parser;

use table::{Report, Table};

/// Measures how cost grows. Images go to $TMPDIR, or /var/tmp, and are sparse; the full size needs
/// 40 GB there.
#[derive(Parser)]
#[command(name = "bench-scale")]
struct Arguments {
    /// Small sizes: whether it works, not how cost grows
    #[arg(long)]
    quick: bool,
    /// Write the results to this file as well; with -, to standard output in place of the tables
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Measure only these of growth, directory, ageing, trees, clients, neighbours
    #[arg(long)]
    only: Vec<String>,
    #[command(flatten)]
    role: neighbours::Role,
}

/// How much is measured.
pub struct Scale {
    /// Inodes of the populated volume.
    inodes: u64,
    /// Bytes of the large volume.
    large: u64,
    /// Entries of the large directory.
    entries: usize,
    /// Rounds in which subjects take turns, and operations of a kind in each.
    rounds: usize,
    operations: usize,
    /// Bytes of a volume that ages, and how often a part of its files is replaced.
    ageing: u64,
    churns: usize,
    /// Files of the tree.
    tree: usize,
    /// Files that are compiled.
    sources: usize,
    /// How long clients work.
    time: Duration,
}

/// A file on ext4 with blocks of 4 KiB ends one block below 16 TiB.
const LARGE: u64 = (16 << 40) - 4096;

const FULL: Scale = Scale {
    inodes: 10_000_000,
    large: LARGE,
    entries: 1_000_000,
    rounds: 20,
    operations: 200,
    ageing: 4 << 30,
    churns: 20,
    tree: 100_000,
    sources: 300,
    time: Duration::from_secs(2),
};

const QUICK: Scale = Scale {
    inodes: 20_000,
    large: LARGE,
    entries: 2_000,
    rounds: 2,
    operations: 20,
    ageing: 256 << 20,
    churns: 1,
    tree: 300,
    sources: 4,
    time: Duration::from_millis(50),
};

/// Measures one kind of growth.
type Theme = fn(&Scale) -> Result<Vec<Table>, Box<dyn Error>>;

const THEMES: [(&str, Theme); 6] = [
    ("growth", growth::measure),
    ("directory", directory::measure),
    ("ageing", ageing::measure),
    ("trees", trees::measure),
    ("clients", clients::measure),
    ("neighbours", neighbours::measure),
];

fn main() -> Result<(), Box<dyn Error>> {
    let arguments = Arguments::parse();
    if arguments.role.play()? {
        return Ok(());
    }
    if let Some(unknown) = arguments.only.iter().find(|only| !THEMES.iter().any(|(name, _)| name == only)) {
        let names = THEMES.map(|(name, _)| name).join(", ");
        return Err(format!("--only {unknown}: there are {names}").into());
    }
    let scale = if arguments.quick { QUICK } else { FULL };
    let mut report = Report::new();
    for (name, measure) in THEMES {
        if arguments.only.is_empty() || arguments.only.iter().any(|only| only == name) {
            report.tables.extend(measure(&scale).map_err(|error| format!("{name}: {error}"))?);
        }
    }
    eprint!("\r\x1b[K");
    if arguments.json.as_deref() != Some(Path::new("-")) {
        print!("{report}");
    }
    if let Some(path) = arguments.json {
        report.into_run(&scale).write(&path)?;
    }
    Ok(())
}

/// Says on stderr what is going on.
pub fn progress(what: &str) {
    eprint!("\r\x1b[K{what} ...\r");
}
