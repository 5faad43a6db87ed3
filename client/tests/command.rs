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

/// What bash offers for the last of `words`, the words of a command line.
fn completed(words: &[&str]) -> Vec<String> {
    let script = String::from_utf8(gpunvme(&["--completions", "bash"]).stdout).unwrap();
    let ask =
        r#"COMP_WORDS=("$@") COMP_CWORD=$(($# - 1)); _gpunvme "$1" "${@: -1}" "${@: -2:1}"; printf '%s\n' "${COMPREPLY[@]}""#;
    let output = Command::new("bash").args(["-c", &format!("{script}{ask}"), "bash"]).args(words).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap().lines().map(str::to_owned).collect()
}

#[test]
fn bash_completes_commands_options_and_values() {
    assert_eq!(completed(&["gpunvme", "doc"]), ["doctor"]);
    assert_eq!(completed(&["gpunvme", "read", "file", "--req"]), ["--require"]);
    assert_eq!(completed(&["gpunvme", "read", "file", "--require", ""]), ["p2p", "bounce", "host", "direct"]);
    assert!(gpunvme(&["--completions", "zsh"]).stdout.starts_with(b"#compdef gpunvme"));
    assert!(fails(&["--completions", "csh"], 2).contains("bash"));
}

/// On any machine and for any user the exit status of `doctor` is the route.
#[test]
fn doctor_tells_the_route_of_this_machine() {
    let told = |arguments: &[&str]| {
        let output = gpunvme(arguments);
        let message = String::from_utf8_lossy(&output.stderr).into_owned();
        let json: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {message}"));
        let expected = match json["route"].as_str().unwrap() {
            "p2p" => 0,
            "bounce" => 3,
            _ => 4,
        };
        assert_eq!(output.status.code(), Some(expected), "{json}");
        json
    };
    let all = told(&["--json", "doctor"]);
    assert!(!all["ssds"].as_array().unwrap().is_empty() && all["machine"]["iommu"]["on"].is_boolean(), "{all}");
    // Without a GPU that is what is missing first.
    let simulated = told(&["--json", "doctor", "sim:/nowhere"]);
    let reason = if simulated["gpus"].as_array().unwrap().is_empty() { "not-gpu-memory" } else { "no-vfio" };
    assert_eq!(simulated["reason"], reason);
    assert_eq!(told(&["--json", "doctor", "Cargo.toml"])["ssds"][0]["model"], "an image file");
    let text = gpunvme(&["doctor", "Cargo.toml"]);
    assert!(String::from_utf8_lossy(&text.stdout).starts_with("route       "));
    assert!(fails(&["doctor", "/nonexistent"], 1).contains("/nonexistent: No such file"));
    assert!(fails(&["doctor", "vfio:nvme0n1"], 1).contains("must be vfio: and a PCI address"));
    assert!(fails(&["doctor", "--peer", "Cargo.toml"], 1).contains("a peer is a PCI function"));
}

#[test]
fn controllers_are_named_as_gpunvme_drives_them() {
    assert!(fails(&["nvme", "/dev/nvme0", "smart"], 1).contains("/dev/nvme0: is driven by the kernel"));
    assert!(fails(&["nvme", "vfio:zz", "identify"], 1).contains("no PCI address"));
    assert!(fails(&["nvme", "disk.img", "regs"], 1).contains("disk.img: is not driven by gpunvme"));
    assert!(fails(&["nvme", "vfio:ffff:ff:1f.7", "format", "--force", "--yes"], 1).contains("no such file or device"));
    assert!(fails(&["nvme", "vfio:ffff:ff:1f.7", "format", "--erase", "gently"], 2).contains("user-data"));
}

#[test]
fn usage_is_explained() {
    assert!(fails(&["read", "/x", "--to", "gpu:first"], 2).contains("names no GPU"));
    assert!(fails(&["read", "/x", "--offset", "12q"], 2).contains("must be a number of bytes"));
    assert!(fails(&["frobnicate"], 2).contains("frobnicate"));
    assert!(fails(&[], 2).contains("Usage: gpunvme"));
    let help = gpunvme(&["--help"]);
    assert_eq!(help.status.code(), Some(0));
    assert!(String::from_utf8(help.stdout).unwrap().contains("stats"));
}
