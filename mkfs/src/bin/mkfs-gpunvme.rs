//! mkfs.gpunvme: formats a device as a gpunvme volume; see mkfs.gpunvme(8).
//!
//! Cargo allows no dot in the name of this file: scripts/build and scripts/install give the
//! program its own.

#![forbid(unsafe_code)]

fn main() -> std::process::ExitCode {
    gpunvme_mkfs::run(std::env::args_os()).into()
}
