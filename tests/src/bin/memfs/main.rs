//! A filesystem that keeps everything in memory and forgets it when it is unmounted, on the FUSE
//! settings of the daemon.
//!
//! It is the ceiling that `scripts/bench` measures against: what FUSE allows when the filesystem
//! behind it costs nothing. It is honest about two things that a ceiling could cheat on: bytes
//! written are kept, and read back; and it keeps the counts, times and lookups that POSIX and the
//! FUSE protocol ask for.
//!
//! With a device, what files hold lies there, and it is the ceiling of a filesystem that has to get
//! its bytes from that device.

#![forbid(unsafe_code)]

mod disk;
mod front;
mod settings;
mod store;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;

/// Mounts an empty filesystem in memory, and serves it until it is unmounted.
#[derive(Parser)]
struct Arguments {
    /// Where to mount.
    mount_point: PathBuf,
    /// FUSE loops [default: as many as there are processors, from 2 to 4: with more, one client's
    /// requests find each loop asleep]
    #[arg(long)]
    threads: Option<usize>,
    /// Keep what files hold on this device or image, which is overwritten
    #[arg(long, requires = "file_len")]
    device: Option<String>,
    /// With a device: the most bytes that a file can have
    #[arg(long)]
    file_len: Option<u64>,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let threads = arguments.threads.unwrap_or_else(|| std::thread::available_parallelism().map_or(2, usize::from).clamp(2, 4));
    match serve(&arguments, threads) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("memfs: {}: {error}", arguments.mount_point.display());
            ExitCode::FAILURE
        }
    }
}

fn serve(arguments: &Arguments, threads: usize) -> Result<(), Box<dyn std::error::Error>> {
    let disk = match (&arguments.device, arguments.file_len) {
        (Some(device), Some(file_len)) => Some(disk::Disk::open(device, file_len, threads)?),
        _ => None,
    };
    Ok(fuser::mount(front::MemFs::new(disk), &arguments.mount_point, &settings::session(threads))?)
}
