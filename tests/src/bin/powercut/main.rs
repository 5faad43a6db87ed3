//! Tests power cuts of the lab's machine. In the guest, `write` makes, fsyncs, renames and removes
//! files without end; each sector says which file it belongs to. Outside, `judge` takes the log
//! that QEMU kept of what reached the emulated device, builds what power cuts at many places of it
//! leave on the medium, recovers each with the engine, and looks for what had been promised.

#![forbid(unsafe_code)]

mod judge;
mod log;
mod workload;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

#[derive(Parser)]
struct Arguments {
    #[command(subcommand)]
    action: Action,
}

#[derive(Subcommand)]
enum Action {
    /// Works in a directory until the machine goes; prints the number of each file once it and its
    /// name are durable
    Write { dir: PathBuf },
    /// Checks the states that power cuts would have left
    Judge {
        /// The log, in the format of dm-log-writes, from the moment on when the device was all
        /// zeroes
        log: PathBuf,
        /// Length of the device in bytes
        #[arg(long)]
        len: u64,
        /// How many cuts to try, spread over the log
        #[arg(long, default_value_t = 300)]
        cuts: usize,
    },
}

fn main() -> ExitCode {
    match Arguments::parse().action {
        Action::Write { dir } => workload::run(&dir),
        Action::Judge { log, len, cuts } => match log::read(&log, len).and_then(|log| judge::judge(&log, cuts)) {
            Ok(report) => println!("{report}"),
            Err(error) => {
                eprintln!("powercut: {error}");
                return ExitCode::FAILURE;
            }
        },
    }
    ExitCode::SUCCESS
}
