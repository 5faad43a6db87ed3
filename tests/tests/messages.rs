//! What the programs say to those who name the wrong thing: `messages.txt` is a session of a shell,
//! whose commands are typed again here, with what they said and their exit codes. The commands
//! behind `nobody$` are those of a user without rights.
//!
//! `MESSAGES=new` writes the session anew; read what changed.

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, PermissionsExt, symlink};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};

use gpunvme_tests::{needs_mount, programs, scratch_dir};

const NOBODY: u32 = 65534;

/// What lies in the folder in which the commands are typed.
fn furnish(folder: &Path) {
    let path = |name: &str| folder.join(name);
    fs::create_dir(path("folder")).unwrap();
    rustix::fs::mknodat(rustix::fs::CWD, path("fifo"), rustix::fs::FileType::Fifo, 0o666.into(), 0).unwrap();
    symlink("itself", path("itself")).unwrap();
    fs::write(path("short"), [b'x'; 5000]).unwrap();
    let sparse = |name: &str, len: u64| {
        let file = File::create(path(name)).unwrap();
        file.set_len(len).unwrap();
        file
    };
    sparse("empty", 0);
    // The signature of a table of partitions, and of one by a GUID.
    let partition = [0, 0, 2, 0, 0x83, 0, 0, 0, 0, 8, 0, 0, 0, 16, 0, 0];
    let table = sparse("partitions", 64 << 20);
    table.write_all_at(&partition, 446).unwrap();
    table.write_all_at(b"\x55\xaa", 510).unwrap();
    let mkfs = |name: &str| {
        sparse(name, 64 << 20);
        let uuid = "6bf5c1f4-27b3-46a8-9d5a-1c5f5c8b7a10";
        let made = programs::command("mkfs.gpunvme").args(["--quiet", "-L", "data", "-U", uuid]).arg(path(name)).status();
        assert!(made.unwrap().success());
    };
    ["volume", "mounted", "secret", "truncated"].into_iter().for_each(mkfs);
    fs::set_permissions(path("secret"), fs::Permissions::from_mode(0o600)).unwrap();
    File::options().write(true).open(path("truncated")).unwrap().set_len(40 << 20).unwrap();
}

/// What a command says, and its exit code.
fn answer(line: &str, folder: &Path, rights: bool) -> String {
    let mut shell = Command::new("sh");
    // As a session of a terminal has it, in the order in which it was said.
    shell.args(["-c", &format!("exec 2>&1; {line}")]).current_dir(folder).stdin(Stdio::null());
    let path = format!("{}:/usr/sbin:/usr/bin:/sbin:/bin", programs::folder().display());
    shell.env_clear().env("PATH", path).env("LONG", "x".repeat(300));
    if !rights {
        shell.uid(NOBODY).gid(NOBODY);
    }
    let output = shell.output().unwrap();
    let said = String::from_utf8(output.stdout).unwrap();
    let code = output.status.code().map_or_else(|| "killed".to_owned(), |code| code.to_string());
    // mount(8) is given real paths, and says them.
    let said = said.replace(&format!("{}/", folder.canonicalize().unwrap().display()), "./");
    format!("{said}[{code}]\n")
}

#[test]
fn what_is_said_to_those_who_name_the_wrong_thing() {
    needs_mount!();
    let kept = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/messages.txt");
    let session = fs::read_to_string(&kept).unwrap();
    let folder = scratch_dir();
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
    furnish(folder.path());
    let mut typed = String::new();
    for line in session.lines() {
        let command = line.strip_prefix("$ ").map(|command| (command, true));
        let Some((command, rights)) = command.or_else(|| line.strip_prefix("nobody$ ").map(|command| (command, false))) else {
            if line.starts_with("# ") {
                typed += &format!("\n{line}\n");
            }
            continue;
        };
        typed += &format!("{line}\n{}", answer(command, folder.path(), rights));
    }
    let typed = typed.trim_start();
    // What is wrong in every other way is wrong in these, too.
    for noise in ["os error", "panicked", "Err(", "MsFlags"] {
        assert!(!typed.contains(noise), "{noise}: {typed}");
    }
    if std::env::var_os("MESSAGES").is_some_and(|value| value == "new") {
        fs::write(&kept, typed).unwrap();
    } else if typed != session {
        let differ = typed.lines().zip(session.lines()).find(|(now, then)| now != then);
        panic!("not as tests/tests/messages.txt has it: {differ:?}\n{typed}");
    }
}
