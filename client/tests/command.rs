//! The command `gpunvme` where there is no mount: what it says, and its exit codes.

use std::path::Path;
use std::process::{Command, Output};

fn gpunvme(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_gpunvme")).args(arguments).output().unwrap()
}

fn fails(arguments: &[&str], code: i32) -> String {
    let output = gpunvme(arguments);
    let message = String::from_utf8(output.stderr).unwrap();
    assert_eq!((output.status.code(), output.stdout.len()), (Some(code), 0), "{arguments:?}: {message}");
    message
}

#[test]
fn files_elsewhere_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    let (directory, file) = (directory.path().to_str().unwrap(), directory.path().join("file"));
    std::fs::write(&file, "x").unwrap();
    let file = file.to_str().unwrap();
    for arguments in [["info", directory], ["stats", file], ["map", file], ["read", file]] {
        let message = fails(&arguments, 1);
        assert!(message.starts_with(&format!("gpunvme: {}: not on a gpunvme mount", arguments[1])), "{message}");
    }
    assert!(fails(&["read", directory], 1).contains("must be a regular file"));
    assert!(fails(&["info", "/dev/null"], 1).contains("must be a regular file or a directory"));
    assert!(fails(&["map", "/nonexistent"], 1).contains("no such file or directory"));
    let fifo = Path::new(directory).join("fifo");
    assert!(Command::new("mkfifo").arg(&fifo).status().unwrap().success());
    assert!(fails(&["info", fifo.to_str().unwrap()], 1).contains("must be a regular file"));
}

/// What turns out to lie elsewhere is neither emptied nor created.
#[test]
fn files_elsewhere_are_not_written() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("precious");
    std::fs::write(&file, "content").unwrap();
    fails(&["write", file.to_str().unwrap(), "--input", "/etc/hostname"], 1);
    assert_eq!(std::fs::read(&file).unwrap(), b"content");
    let new = directory.path().join("new");
    let message = fails(&["write", new.to_str().unwrap(), "--input", "/etc/hostname"], 1);
    assert!(message.contains("new: not on a gpunvme mount") && !new.exists(), "{message}");
}

#[test]
fn usage_is_explained() {
    assert!(fails(&["read", "/x", "--to", "gpu:0"], 2).contains("this build cannot move data to or from GPU memory"));
    assert!(fails(&["read", "/x", "--offset", "12q"], 2).contains("must be a number of bytes"));
    assert!(fails(&["frobnicate"], 2).contains("frobnicate"));
    assert!(fails(&[], 2).contains("Usage: gpunvme"));
    let help = gpunvme(&["--help"]);
    assert_eq!(help.status.code(), Some(0));
    assert!(String::from_utf8(help.stdout).unwrap().contains("stats"));
}
