//! Which libcufile a program would load, as the loader says itself when it is asked to load the
//! program and not to run it. A Python is run, without the program that it is for, and asked for
//! cuFile by both names that packages use.

use crate::report::Report;
use serde_json::json;
use std::ffi::OsStr;
use std::fs::File;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Prints the file behind each name, or an empty line.
const PYTHON: &str = r#"
import ctypes, re
for name in "libcufile.so.0", "libcufile.so":
    try:
        ctypes.CDLL(name)
        found = re.findall(r"/.*libcufile\.so.*|/.*libgpunvme_cufile\.so.*", open("/proc/self/maps").read())
        print(found[0])
    except OSError:
        print()
"#;

/// Asks `program`, which `command` would run with our library, `ours`, before others.
pub fn check(mut command: Command, program: &Path, ours: &Path, real: Option<&Path>) -> Report {
    command.stdin(Stdio::null());
    let takes_ours = if !has_loader(program) {
        false
    } else if is_python(program) {
        let file = ours.canonicalize().unwrap_or_else(|_| ours.to_owned());
        let said = output(command.args(["-I", "-c", PYTHON]));
        said.lines().count() == 2 && said.lines().all(|line| Path::new(line) == file || Path::new(line) == ours)
    } else {
        output(command.env("LD_TRACE_LOADED_OBJECTS", "1")).lines().any(|line| line.contains(&*ours.to_string_lossy()))
    };
    let mut report = Report::new(json!({
        "program": program,
        "gpunvme": takes_ours,
        "libcufile": takes_ours.then_some(ours),
        "elsewhere": real,
    }));
    report.line("program", program.display());
    if takes_ours {
        let elsewhere =
            real.map_or("what our library finds: NVIDIA's, or pread and pwrite".into(), |real| real.display().to_string());
        report.line("libcufile", format!("{} (gpunvme)", ours.display()));
        report.line("elsewhere", elsewhere);
    } else {
        report.line("libcufile", "not ours: the program is static, set-user-id, or none that the loader knows");
        report.code = 1;
    }
    report
}

fn output(command: &mut Command) -> String {
    command.output().map_or(String::new(), |output| String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Whether it is a Python itself, and not a script for one.
fn is_python(program: &Path) -> bool {
    let name = program.file_name().unwrap_or_default().as_bytes();
    name.starts_with(b"python") && !begins_with(program, b"#!")
}

/// Whether the loader has a part in it: only then asking it does not run the program. A script is
/// its interpreter's.
fn has_loader(program: &Path) -> bool {
    match interpreter(program) {
        Some(interpreter) => !begins_with(&interpreter, b"#!") && is_elf_with_loader(&interpreter),
        None => is_elf_with_loader(program),
    }
}

/// The interpreter that the first line of a script names.
fn interpreter(program: &Path) -> Option<PathBuf> {
    let mut start = [0; 256]; // what the kernel looks at
    let len = open(program)?.read_at(&mut start, 0).ok()?;
    let line = start[..len].strip_prefix(b"#!")?.split(|&byte| byte == b'\n').next()?.trim_ascii();
    Some(OsStr::from_bytes(line.split(|byte| byte.is_ascii_whitespace()).next()?).into())
}

fn begins_with(program: &Path, bytes: &[u8]) -> bool {
    let mut start = vec![0; bytes.len()];
    open(program).is_some_and(|file| file.read_exact_at(&mut start, 0).is_ok()) && start == bytes
}

/// A regular file: others may have no end, or wait for someone.
fn open(program: &Path) -> Option<File> {
    if program.metadata().ok()?.is_file() { File::open(program).ok() } else { None }
}

/// Looks for a program header of type PT_INTERP (3), as elf(5) has it for 64 bits.
fn is_elf_with_loader(program: &Path) -> bool {
    let Some(file) = open(program) else { return false };
    let number = |at: u64, len: usize| -> Option<u64> {
        let mut bytes = [0; 8];
        file.read_exact_at(&mut bytes[..len], at).ok()?;
        Some(u64::from_le_bytes(bytes))
    };
    if !begins_with(program, b"\x7fELF\x02\x01") {
        return false;
    }
    let (Some(first), Some(size), Some(count)) = (number(32, 8), number(54, 2), number(56, 2)) else { return false };
    (0..count).any(|at| first.checked_add(at * size).and_then(|at| number(at, 4)) == Some(3))
}
