//! Finds the project's programs, so that tests run what users run.
//!
//! `GPUNVME_BIN` names the folder that holds them; without it they are built, in the profile that the test itself was
//! built in, so that `cargo test` alone never runs a stale daemon.

use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::OnceLock;

/// The folder with `mkfs.gpunvme`, `fsck.gpunvme`, `mount.gpunvme`, `gpunvme` and `libgpunvme.so`.
///
/// # Panics
/// If they have to be built and cannot be.
pub fn folder() -> &'static PathBuf {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| match std::env::var_os("GPUNVME_BIN") {
        Some(folder) => PathBuf::from(folder),
        None => build(),
    })
}

/// The path of one of the project's programs, by its file name.
///
/// # Panics
/// If there is no such program.
pub fn path(name: &str) -> PathBuf {
    let path = folder().join(name);
    assert!(path.exists(), "{} is missing: run `cargo build` first", path.display());
    path
}

/// A command that runs one of the project's programs.
pub fn command(name: &str) -> Command {
    Command::new(path(name))
}

fn build() -> PathBuf {
    // A test executable lies at TARGET/PROFILE/deps/NAME.
    let executable = std::env::current_exe().expect("the path of this test");
    let folder = executable.ancestors().nth(2).expect("a test in TARGET/PROFILE/deps").to_path_buf();
    let mut build = Command::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../scripts/build"));
    build.env("CARGO_TARGET_DIR", folder.parent().expect("a target folder")).stdout(Stdio::null());
    if folder.ends_with("debug") {
        build.arg("--debug");
    }
    assert!(build.status().expect("scripts/build runs").success(), "the programs do not build");
    folder
}
