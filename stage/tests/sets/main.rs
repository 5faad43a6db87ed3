//! `gpunvme hydrate` and `gpunvme publish` on real mounts, with folders and with a store of the
//! test's own, which has faults.

mod access;
mod evict;
mod hostile;
mod hydrate;
mod leftovers;
mod local;
mod publish;
mod quota;
mod retention;
mod spelling;
mod store;
mod web;

use gpunvme_tests::{programs, tree};
use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Command, Output};

/// The files of a folder by their names in it, but for what `gpunvme` keeps there.
fn files(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    fn collect(folder: &Path, prefix: &str, found: &mut BTreeMap<String, Vec<u8>>) {
        for entry in std::fs::read_dir(folder).unwrap().map(Result::unwrap) {
            let name = format!("{prefix}{}", entry.file_name().to_str().unwrap());
            if entry.file_name() == ".gpunvme-stage" {
                continue;
            }
            if entry.file_type().unwrap().is_dir() {
                collect(&entry.path(), &format!("{name}/"), found);
            } else {
                found.insert(name, std::fs::read(entry.path()).unwrap());
            }
        }
    }
    let mut found = BTreeMap::new();
    if folder.exists() {
        collect(folder, "", &mut found);
    }
    found
}

/// A set of objects of all sizes: nothing, less than a block, several parts.
fn set(seed: u64) -> BTreeMap<String, Vec<u8>> {
    let sizes =
        [("empty", 0), ("one", 1), ("sub/block", 4096), ("sub/deep/odd", 300_001), ("large", 3_000_000), ("b c/ü", 70_000)];
    sizes.iter().map(|&(name, size)| (name.to_owned(), tree::pattern(seed + size as u64, size))).collect()
}

/// A command of the program `gpunvme`, with the shortest parts: of 64 KiB, or as S3 takes them.
fn gpunvme(command: &str) -> Command {
    let mut program = programs::command("gpunvme");
    let memory = if command == "publish" { "5" } else { "1" };
    program.args([command, "--memory", memory, "--concurrency", "16"]);
    program
}

fn ends_well(output: &Output) -> String {
    assert!(output.status.success(), "{}", gpunvme_tests::mounted::text(output));
    String::from_utf8(output.stdout.clone()).unwrap()
}

fn fails(output: &Output) -> String {
    assert!(!output.status.success(), "{}", gpunvme_tests::mounted::text(output));
    String::from_utf8(output.stderr.clone()).unwrap()
}
