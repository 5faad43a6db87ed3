//! A process of the differential fuzzer: it makes the system calls that it reads on stdin, and
//! prints their results on stdout.

use std::path::PathBuf;

use clap::Parser;
use gpunvme_tests::differential::facts::Clock;
use gpunvme_tests::differential::process::{IDENTITIES, Side, serve};

#[derive(Parser)]
struct Arguments {
    /// The folder that becomes its root.
    root: PathBuf,
    /// `Ext4` or `Gpunvme`.
    side: String,
    /// Which of the identities it takes.
    identity: usize,
    /// When all began, in seconds since the epoch.
    start: i64,
}

fn main() -> std::io::Result<()> {
    let arguments = Arguments::parse();
    let side = if arguments.side == "Ext4" { Side::Ext4 } else { Side::Gpunvme };
    serve(&arguments.root, side, &IDENTITIES[arguments.identity], Clock(arguments.start))
}
