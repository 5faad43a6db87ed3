//! `publish --keep`: what goes is what was published, and nothing else.

use crate::store::Store;
use crate::{ends_well, gpunvme};
use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;
use tempfile::TempDir;

const MANIFEST: &str = "gpunvme-manifest.json";

/// `publish` of a set with two files.
fn publish(here: &TempDir, step: &str) -> Command {
    let folder = here.path().join("of").join(step);
    fs::create_dir_all(folder.join("dataset")).unwrap();
    fs::write(folder.join("data"), step).unwrap();
    fs::write(folder.join("dataset/shard"), step).unwrap();
    let mut command = gpunvme("publish");
    command.arg(folder);
    command
}

/// Publishes such sets in the folder `run`, one after the other.
fn published(here: &TempDir, steps: &[&str], keep: &[&str]) {
    for step in steps {
        ends_well(&publish(here, step).arg(here.path().join("run").join(step)).args(keep).output().unwrap());
    }
}

/// The files and links below a folder.
fn names(folder: &Path) -> Vec<String> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).unwrap().map(Result::unwrap) {
        let name = entry.file_name().into_string().unwrap();
        match entry.file_type().unwrap() {
            kind if kind.is_dir() => found.extend(names(&entry.path()).iter().map(|below| format!("{name}/{below}"))),
            _ => found.push(name),
        }
    }
    found.sort();
    found
}

fn of_sets(steps: &[&str]) -> Vec<String> {
    let names = ["data", "dataset/shard", MANIFEST];
    steps.iter().flat_map(|step| names.map(|name| format!("{step}/{name}"))).collect()
}

#[test]
fn a_link_to_a_set_is_none_and_the_set_stays() {
    let here = tempfile::tempdir().unwrap();
    let run = here.path().join("run");
    published(&here, &["step-1", "step-2"], &[]);
    symlink("step-2", run.join("latest")).unwrap();
    let and_link = |steps: &[&str]| [vec!["latest".to_owned()], of_sets(steps)].concat();
    published(&here, &["step-3"], &["--keep", "2"]);
    assert_eq!(names(&run), and_link(&["step-2", "step-3"]));
    published(&here, &["step-2"], &["--keep", "1"]);
    assert_eq!(names(&run), and_link(&["step-2"]), "the one that is published is the newest");
    published(&here, &["step-3"], &[]);
    fs::write(here.path().join("of/step-3/data"), "new").unwrap();
    fs::remove_file(run.join("latest")).unwrap();
    symlink("step-3", run.join("latest")).unwrap();
    let mut command = gpunvme("publish");
    let again = command.arg(here.path().join("of/step-3")).arg(run.join("latest")).args(["--keep", "1"]);
    ends_well(&again.output().unwrap());
    assert_eq!(names(&run), and_link(&["step-3"]));
}

#[test]
fn what_a_link_in_a_set_leads_to_stays() {
    let here = tempfile::tempdir().unwrap();
    let (run, shared) = (here.path().join("run"), here.path().join("shared"));
    published(&here, &["step-1"], &[]);
    // Another job gave the folder's files to all.
    fs::rename(run.join("step-1/dataset"), &shared).unwrap();
    fs::write(shared.join("other"), "of another job").unwrap();
    symlink("../../shared", run.join("step-1/dataset")).unwrap();
    published(&here, &["step-2"], &["--keep", "1"]);
    assert_eq!(names(&shared), ["other", "shard"]);
    assert_eq!(names(&run), [vec!["step-1/dataset".into()], of_sets(&["step-2"])].concat());
}

#[test]
fn what_an_old_set_does_not_list_stays_in_its_folder() {
    let here = tempfile::tempdir().unwrap();
    let run = here.path().join("run");
    published(&here, &["step-1", "step-1/eval"], &[]);
    fs::write(run.join("step-1/notes"), "by hand").unwrap();
    let mut rank = publish(&here, "step-2");
    ends_well(&rank.arg(run.join("step-2")).args(["--rank", "0/1", "--attempt", "1", "--keep", "1"]).output().unwrap());
    let left = [of_sets(&["step-1/eval"]), vec!["step-1/notes".into()]].concat();
    let part = vec!["step-2/.gpunvme-stage/part-0-of-1".into()];
    assert_eq!(names(&run), [left.clone(), part, of_sets(&["step-2"])].concat());
    published(&here, &["step-3"], &["--keep", "1"]);
    assert_eq!(names(&run), [left, of_sets(&["step-3"])].concat());
}

#[test]
fn what_an_old_set_does_not_list_stays_in_the_store() {
    let (here, store) = (tempfile::tempdir().unwrap(), Store::new());
    let published = |step: &str, more: &[&str]| {
        let mut command = publish(&here, step);
        store.found_by(command.arg(format!("s3://bucket/run/{step}")).args(more));
        ends_well(&command.output().unwrap());
    };
    published("step-1", &["--rank", "0/1", "--attempt", "1"]);
    published("step-1/eval", &[]);
    store.state().objects.insert("run/step-1/notes".into(), b"by hand".to_vec());
    published("step-2", &["--keep", "1"]);
    let left = [of_sets(&["step-1/eval"]), vec!["step-1/notes".into()], of_sets(&["step-2"])].concat();
    assert_eq!(store.state().objects.keys().map(|key| key["run/".len()..].to_owned()).collect::<Vec<_>>(), left);
}
