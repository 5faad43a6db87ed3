//! The command `run`: a program with our libcufile before NVIDIA's. `check` tells which one it
//! would load.
//!
//! A program finds its libcufile by one of several ways, and some of them look into no folder of
//! the environment: so the library is loaded before the program (`LD_PRELOAD`), and answers to the
//! name from then on.

mod check;

use crate::report::{Failure, Report};
use serde_json::json;
use std::ffi::{OsStr, OsString};
use std::io::ErrorKind;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The folder of the library's names and its `cufile.json`, beside the programs as they are built,
/// and where they are installed.
const FOLDERS: [&str; 2] = ["gpunvme-cufile", "../lib/gpunvme-cufile"];
const LIBRARY: &str = "libcufile.so.0";
const SETTINGS: &str = "cufile.json";

/// The exit status where there is no such program, and where there is one that cannot be run, as
/// env(1) has them: 1 may be the program's own.
const NO_PROGRAM: u8 = 127;
const CANNOT_RUN: u8 = 126;

#[derive(clap::Args)]
pub struct Run {
    /// Do not run it, but tell which libcufile it would load; a folder is a Python environment
    #[arg(long)]
    pub check: bool,
    /// The program and its arguments
    #[arg(required = true, trailing_var_arg = true)]
    pub command: Vec<OsString>,
}

pub fn run(run: &Run) -> Result<Report, Failure> {
    let (program, arguments) = run.command.split_first().ok_or_else(|| Failure("no program".into()))?;
    let folder = folder()?;
    let Some(path) = find(program, run.check) else {
        return Ok(not_run(&format!("{}: there is no such program", program.display()), NO_PROGRAM));
    };
    let real = real(&path);
    let mut command = Command::new(&path);
    environment(&mut command, &folder, real.as_deref())?;
    if run.check {
        return Ok(check::check(command, &path, &folder.join(LIBRARY), real.as_deref()));
    }
    let error = command.arg0(program).args(arguments).exec(); // it returns where it fails
    let code = if error.kind() == ErrorKind::NotFound { NO_PROGRAM } else { CANNOT_RUN };
    Ok(not_run(&format!("{}: {error}", path.display()), code))
}

fn not_run(message: &str, code: u8) -> Report {
    Report { text: format!("gpunvme: {message}\n"), json: json!({ "error": message }), to_stderr: true, code }
}

/// The folder with the library.
fn folder() -> Result<PathBuf, Failure> {
    let program = std::env::current_exe()?;
    let found = FOLDERS.map(|folder| program.with_file_name(folder)).into_iter().find(|folder| folder.join(LIBRARY).exists());
    let folder = found
        .ok_or_else(|| Failure(format!("no folder gpunvme-cufile with {LIBRARY}: run scripts/install, or scripts/build")))?;
    let folder = folder.canonicalize()?;
    if folder.as_os_str().as_bytes().iter().any(|byte| matches!(byte, b' ' | b':')) {
        return Err(Failure(format!(
            "{}: LD_PRELOAD takes no path with a space or a colon: install elsewhere",
            folder.display()
        )));
    }
    Ok(folder)
}

/// What the program's loader, cuFile's users and our library go by.
fn environment(command: &mut Command, folder: &Path, real: Option<&Path>) -> Result<(), Failure> {
    command.env("LD_PRELOAD", before("LD_PRELOAD", &folder.join(LIBRARY)));
    command.env("LD_LIBRARY_PATH", before("LD_LIBRARY_PATH", folder));
    if std::env::var_os("CUFILE_ENV_PATH_JSON").is_none() {
        command.env("CUFILE_ENV_PATH_JSON", folder.join(SETTINGS));
    }
    if let (Some(real), None) = (real, std::env::var_os("GPUNVME_CUFILE_REAL")) {
        command.env("GPUNVME_CUFILE_REAL", real);
    }
    Ok(())
}

/// A list of paths, with one more before them.
fn before(variable: &str, path: &Path) -> OsString {
    let mut list = path.as_os_str().to_owned();
    if let Some(there) = std::env::var_os(variable).filter(|there| !there.is_empty()) {
        list.push(":");
        list.push(there);
    }
    list
}

/// A program, as a shell finds it. Where it is not to be run, a folder stands for the Python in it.
fn find(program: &OsStr, is_check: bool) -> Option<PathBuf> {
    if program.as_bytes().contains(&b'/') || is_check && Path::new(program).is_dir() {
        let path = PathBuf::from(program);
        let path = if is_check && path.is_dir() { path.join("bin/python3") } else { path };
        return path.exists().then_some(path);
    }
    let list = std::env::var_os("PATH")?;
    std::env::split_paths(&list).map(|folder| folder.join(program)).find(|path| is_executable(path))
}

fn is_executable(path: &Path) -> bool {
    path.metadata().is_ok_and(|found| found.is_file() && found.permissions().mode() & 0o111 != 0)
}

/// NVIDIA's library in the Python environment that a program belongs to.
fn real(program: &Path) -> Option<PathBuf> {
    let active = std::env::var_os("VIRTUAL_ENV").map(PathBuf::from);
    let of_program = program.parent()?.parent().map(Path::to_owned);
    let lib = |environment: PathBuf| environment.join("lib");
    active.into_iter().chain(of_program).map(lib).find_map(|lib| {
        let pythons = folders(&lib).into_iter().filter(|folder| name(folder).starts_with("python3"));
        let packages = pythons.flat_map(|python| ["site-packages/nvidia", "dist-packages/nvidia"].map(|at| python.join(at)));
        packages.flat_map(|nvidia| folders(&nvidia)).map(|toolkit| toolkit.join("lib").join(LIBRARY)).find(|file| file.exists())
    })
}

fn folders(folder: &Path) -> Vec<PathBuf> {
    let mut found: Vec<_> = std::fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path()).collect();
    found.sort();
    found
}

fn name(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}
