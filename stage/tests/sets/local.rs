//! Folders as sources: no file is left out, and no link of another user is followed.

use crate::{ends_well, fails, files, gpunvme};
use std::fs;
use std::os::unix::fs::{lchown, symlink};
use std::process::Command;
use tempfile::TempDir;

fn hydrate(here: &TempDir, source: &str) -> Command {
    let mut command = gpunvme("hydrate");
    command.arg(here.path().join(source)).arg(here.path().join("set"));
    command
}

#[test]
fn a_name_that_no_listing_has_is_an_error() {
    let here = tempfile::tempdir().unwrap();
    fs::create_dir_all(here.path().join("source/part#1")).unwrap();
    let place = |name: &str| here.path().join("source/part#1").join(name);
    for name in ["a", "b#", "c#1x", "#d"] {
        fs::write(place(name), name).unwrap();
    }
    ends_well(&hydrate(&here, "source").output().unwrap());
    assert_eq!(files(&here.path().join("set")).len(), 4);
    for name in ["shard#12", "#0"] {
        fs::write(place(name), "1").unwrap();
        let said = fails(&hydrate(&here, "source").output().unwrap());
        assert!(said.contains(&format!("part#1/{name}: a name with # and a number at its end")), "{said}");
        fs::remove_file(place(name)).unwrap();
    }
}

#[test]
fn links_are_followed_that_belong_to_the_user_or_root() {
    let here = tempfile::tempdir().unwrap();
    // As Hugging Face's cache is.
    for folder in ["model/blobs", "model/snapshots/1"] {
        fs::create_dir_all(here.path().join(folder)).unwrap();
    }
    let (blob, link) = (here.path().join("model/blobs/abc"), here.path().join("model/snapshots/1/weights"));
    fs::write(&blob, "weights").unwrap();
    symlink("../../blobs/abc", &link).unwrap();
    symlink(here.path().join("model/snapshots/1"), here.path().join("latest")).unwrap();
    ends_well(&hydrate(&here, "latest").output().unwrap());
    let there = [("weights".to_owned(), b"weights".to_vec())].into();
    assert_eq!(files(&here.path().join("set")), there);

    fs::write(&blob, "only for root").unwrap();
    if lchown(&link, Some(12345), None).is_err() {
        return eprintln!("skipped: only root gives links to others");
    }
    let said = fails(&hydrate(&here, "latest").output().unwrap());
    assert!(said.contains("weights: a symbolic link of the user 12345 is on the way"), "{said}");
    assert_eq!(files(&here.path().join("set")), there);
    // Also where it is that of a folder, and another one leads to it.
    lchown(&link, Some(0), None).unwrap();
    ends_well(&hydrate(&here, "latest").output().unwrap());
    fs::write(&blob, "once more").unwrap();
    symlink("model", here.path().join("theirs")).unwrap();
    lchown(here.path().join("theirs"), Some(12345), None).unwrap();
    fs::remove_file(&link).unwrap();
    symlink("../../../theirs/blobs/abc", &link).unwrap();
    let said = fails(&hydrate(&here, "latest").output().unwrap());
    assert!(said.contains("is on the way"), "{said}");
}
