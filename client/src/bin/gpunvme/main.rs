//! The program `gpunvme`: commands for administrators and scripts that work with a mount, and with
//! the controller under it.

mod args;
mod bench;
mod describe;
mod device;
mod doctor;
mod found;
#[allow(unsafe_code)]
mod gpu;
mod grow;
mod log;
mod metadata_dump;
mod meter;
mod nvme;
mod output;
mod page_cache;
mod probe;
mod read;
mod report;
mod run;
mod scratch;
mod screen;
mod stage;
mod stats;
mod sync;
mod top;
mod trim;
mod tune;
mod write;

use args::{Args, Command};
use clap::Parser;
use gpunvme_programs::terminal::complain;
use report::{Failure, Report};
use std::io::Write;
use std::process::ExitCode;

fn main() -> ExitCode {
    let args = Args::parse();
    let result = match &args.command {
        Command::Bench(bench) => bench::run(bench),
        Command::Doctor(doctor) => doctor::run(doctor),
        Command::Grow(grow) => grow::run(grow),
        Command::Hydrate(_) | Command::Publish(_) | Command::Evict(_) | Command::Stage(_) => stage::run(),
        Command::Info { mount } => describe::info(mount),
        Command::Cool(cached) => page_cache::cool(&cached.paths),
        Command::Log { mount, filter } => log::run(mount, filter.as_deref()),
        Command::Map { file, resident: false } => describe::map(file),
        Command::Map { file, resident: true } => page_cache::map(file),
        Command::MetadataDump(dump) => metadata_dump::run(dump),
        Command::Stats(stats) => stats::run(stats, args.json),
        Command::Sync { mounts } => sync::run(mounts),
        Command::Nvme(nvme) => nvme::run(nvme),
        Command::Probe { device } => probe::run(device),
        Command::Read(read) => read::run(read),
        Command::Run(run) => run::run(run),
        Command::Top(top) => top::run(top, args.json),
        Command::Trim(trim) => trim::run(trim),
        Command::Tune(tune) => tune::run(tune),
        Command::Warm(cached) => page_cache::warm(&cached.paths),
        Command::Write(write) => write::run(write),
    };
    match result.and_then(|report| print(&report, args.json).map(|()| report.code)) {
        Ok(code) => code.into(),
        Err(Failure(message)) => {
            complain(format_args!("gpunvme: {message}"));
            ExitCode::FAILURE
        }
    }
}

/// On standard output, unless that is where the data went.
fn print(report: &Report, json: bool) -> Result<(), Failure> {
    if report.json.is_null() && report.text.is_empty() {
        return Ok(());
    }
    let text = if json { format!("{:#}\n", report.json) } else { report.text.clone() };
    let written = if report.to_stderr {
        std::io::stderr().write_all(text.as_bytes())
    } else {
        std::io::stdout().write_all(text.as_bytes())
    };
    match written {
        // A reader that closes the pipe early, as head does, has what it wanted: no error.
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
        written => written.map_err(|error| Failure(format!("the report could not be written: {error}"))),
    }
}
