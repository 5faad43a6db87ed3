//! The command `run`: a program with our libcufile before NVIDIA's.
//!
//! A program finds its libcufile by one of several ways, and some of them look into no folder of
//! the environment: so the library is loaded before the program (`LD_PRELOAD`), and answers to the
//! name from then on.

use crate::report::{Failure, Report};
use serde_json::json;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The folder of the library's names and its `cufile.json`, beside the programs as they are built,
/// and where they are installed.
const FOLDERS: [&str; 2] = ["gpunvme-cufile", "../lib/gpunvme-cufile"];
const LIBRARY: &str = "libcufile.so.0";
const SETTINGS: &str = "cufile.json";

#[derive(clap::Args)]
pub struct Run {
    /// Do not run it, but tell which libcufile it would load
    #[arg(long)]
    pub check: bool,
    /// The program and its arguments
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
    pub command: Vec<OsString>,
}

pub fn run(run: &Run) -> Result<Report, Failure> {
    let (program, arguments) = run.command.split_first().ok_or_else(|| Failure("no program".into()))?;
    let folder = folder()?;
    let path = find(program).ok_or_else(|| Failure(format!("{}: there is no such program", program.display())))?;
    let real = real(&path);
    let mut command = Command::new(&path);
    command.arg0(program).args(arguments);
    environment(&mut command, &folder, real.as_deref())?;
    if run.check {
        return check(&path, &folder, real.as_deref());
    }
    Err(Failure(format!("{}: {}", path.display(), command.exec()))) // it returns where it fails
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

/// A program, as a shell finds it.
fn find(program: &OsStr) -> Option<PathBuf> {
    if program.as_bytes().contains(&b'/') {
        return Path::new(program).exists().then(|| program.into());
    }
    let list = std::env::var_os("PATH")?;
    std::env::split_paths(&list).map(|folder| folder.join(program)).find(|path| path.is_file())
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

/// Which library the loader takes, as it says itself when it is asked to load a program and not to
/// run it.
fn check(program: &Path, folder: &Path, real: Option<&Path>) -> Result<Report, Failure> {
    let mut traced = Command::new(program);
    environment(&mut traced, folder, real)?;
    traced.env("LD_TRACE_LOADED_OBJECTS", "1").stdin(Stdio::null());
    let loaded = if is_dynamic(program) { traced.output()?.stdout } else { Vec::new() };
    let ours = folder.join(LIBRARY);
    let takes_ours = String::from_utf8_lossy(&loaded).lines().any(|line| line.contains(&*ours.to_string_lossy()));
    let elsewhere =
        real.map_or("what our library finds: NVIDIA's, or pread and pwrite".into(), |real| real.display().to_string());
    let mut report = Report::new(json!({
        "program": program,
        "gpunvme": takes_ours,
        "libcufile": takes_ours.then_some(&ours),
        "elsewhere": real,
    }));
    report.line("program", program.display());
    if takes_ours {
        report.line("libcufile", format!("{} (gpunvme)", ours.display()));
        report.line("elsewhere", elsewhere);
    } else {
        report.line("libcufile", "not ours: the program is static, set-user-id, or none that the loader knows");
        report.code = 1;
    }
    Ok(report)
}

/// Whether the loader has a part in it: only then asking it does not run the program. A script is
/// its interpreter's.
fn is_dynamic(program: &Path) -> bool {
    let Ok(start) = std::fs::read(program) else { return false };
    if let Some(line) = start.strip_prefix(b"#!") {
        let line = line.split(|&byte| byte == b'\n').next().unwrap_or_default().trim_ascii();
        let interpreter = line.split(|byte| byte.is_ascii_whitespace()).next().unwrap_or_default();
        return !interpreter.starts_with(b"#!") && is_elf_with_loader(Path::new(OsStr::from_bytes(interpreter)));
    }
    is_elf_with_loader(program)
}

/// Looks for a program header of type PT_INTERP (3), as elf(5) has it for 64 bits.
fn is_elf_with_loader(program: &Path) -> bool {
    let Ok(file) = std::fs::read(program) else { return false };
    let number = |at: usize, len: usize| -> Option<usize> {
        let bytes = file.get(at..at + len)?;
        Some(bytes.iter().rev().fold(0, |number, &byte| number << 8 | usize::from(byte)))
    };
    let headers = || Some((number(32, 8)?, number(54, 2)?, number(56, 2)?));
    let Some((first, size, count)) = headers().filter(|_| file.starts_with(b"\x7fELF\x02\x01")) else { return false };
    (0..count).any(|at| number(first + at * size, 4) == Some(3))
}
