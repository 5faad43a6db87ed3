//! mount.gpunvme: mounts a gpunvme volume; see mount.gpunvme(8). Under the name
//! umount.fuse.gpunvme it unmounts one.
//!
//! Cargo allows no dot in the name of this file: scripts/build and scripts/install give the
//! program its own.

#![forbid(unsafe_code)]

fn main() -> std::process::ExitCode {
    gpunvme_fs::daemon::run(std::env::args_os()).into()
}
