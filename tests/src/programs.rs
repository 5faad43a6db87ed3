//! Finds the project's programs, so that tests run what users run.
//!
//! `GPUNVME_BIN` names the folder that holds them; without it they are built, in the profile that
//! the test itself was built in, so that `cargo test` alone never runs a stale daemon.

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

/// The path of one of the library's examples (`client/examples`), built in the profile that the
/// test itself was built in.
///
/// # Panics
/// If it cannot be built.
pub fn example(name: &str) -> PathBuf {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    let folder = FOLDER.get_or_init(|| {
        let profile = profile();
        let mut build = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
        // Of all packages: alone, this one has other features, and what it uses is built again.
        build.args(["build", "--quiet", "--locked", "--workspace", "--examples"]);
        forget_this_package(&mut build);
        build.current_dir(env!("CARGO_MANIFEST_DIR"));
        build.arg("--target-dir").arg(profile.parent().expect("a target folder"));
        if profile.ends_with("release") {
            build.arg("--release");
        }
        assert!(build.status().expect("cargo runs").success(), "the examples do not build");
        profile.join("examples")
    });
    folder.join(name)
}

/// The folder TARGET/PROFILE that the test lies in, as TARGET/PROFILE/deps/NAME.
fn profile() -> PathBuf {
    let executable = std::env::current_exe().expect("the path of this test");
    executable.ancestors().nth(2).expect("a test in TARGET/PROFILE/deps").to_path_buf()
}

/// What cargo told this test of its own package is nothing to another cargo: build scripts that
/// look at it (ring's) would be run again, and all that depends on them built again.
fn forget_this_package(build: &mut Command) {
    for (name, _) in std::env::vars_os() {
        if name.to_str().is_some_and(|name| name.starts_with("CARGO_PKG_") || name.starts_with("CARGO_MANIFEST_")) {
            build.env_remove(name);
        }
    }
}

fn build() -> PathBuf {
    let folder = profile();
    let mut build = Command::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../scripts/build"));
    build.env("CARGO_TARGET_DIR", folder.parent().expect("a target folder")).stdout(Stdio::null());
    forget_this_package(&mut build);
    if folder.ends_with("debug") {
        build.arg("--debug");
    }
    assert!(build.status().expect("scripts/build runs").success(), "the programs do not build");
    folder
}
