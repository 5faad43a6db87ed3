//! What a run leaves of files that are not whole: the next one goes on with it, or removes it.

use crate::hydrate::{hydrate, stored};
use crate::store::Store;
use crate::{ends_well, fails, files, set};
use gpunvme_tests::mounted::Mounted;
use gpunvme_tests::needs_mount;
use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};

/// The partial files of a set, and how many of their parts its manifest has.
fn partials(folder: &Path) -> (usize, usize) {
    let own = folder.join(".gpunvme-stage");
    let manifest = fs::read_to_string(own.join("manifest")).unwrap();
    (fs::read_dir(own.join("partial")).unwrap().count(), manifest.lines().filter(|line| line.contains("part")).count())
}

/// A run that was to bring the object of several parts, and had only some of them.
fn torn(store: &Store, folder: &Path) {
    store.state().refuse_reads_after = Some(8);
    fails(&hydrate(store, folder).args(["--include", "large"]).output().unwrap());
    store.state().refuse_reads_after = None;
    let (files, parts) = partials(folder);
    assert!(files == 1 && parts > 0, "{files} files, {parts} parts");
}

#[test]
fn what_was_not_asked_for_this_time_goes_on_the_next_time() {
    needs_mount!();
    let (volume, store) = (Mounted::new(), stored(31));
    let folder = volume.path("set");
    torn(&store, &folder);
    let kept = partials(&folder);
    ends_well(&hydrate(&store, &folder).args(["--include", "one"]).output().unwrap());
    assert_eq!(partials(&folder), kept);
    let reads = |folder: &Path| {
        store.state().refuse_reads_after = Some(1000);
        ends_well(&hydrate(&store, folder).output().unwrap());
        1000 - store.state().refuse_reads_after.unwrap()
    };
    let rest = reads(&folder);
    assert_eq!((partials(&folder), files(&folder)), ((0, 0), set(31)));
    let other = volume.path("other");
    ends_well(&hydrate(&store, &other).args(["--include", "one"]).output().unwrap());
    assert_eq!(rest, reads(&other) - kept.1 as u32, "the parts that were there were not asked for");
}

#[test]
fn what_became_another_version_goes_whatever_is_asked_for() {
    needs_mount!();
    let (volume, store) = (Mounted::new(), stored(32));
    for asked in ["one", "large"] {
        let folder = volume.path(asked);
        torn(&store, &folder);
        store.state().objects.get_mut("set/large").unwrap()[0] ^= 1;
        ends_well(&hydrate(&store, &folder).args(["--include", asked]).output().unwrap());
        assert_eq!(partials(&folder), (0, 0));
    }
    let folder = volume.path("gone");
    torn(&store, &folder);
    store.state().objects.remove("set/large");
    ends_well(&hydrate(&store, &folder).args(["--include", "one"]).output().unwrap());
    assert_eq!(partials(&folder), (0, 0));
}

/// What is known of a partial file counts for that file alone, not for a new one of its name.
#[test]
fn parts_of_a_partial_file_that_is_gone_are_fetched_again() {
    needs_mount!();
    let (volume, store) = (Mounted::new(), stored(34));
    let folder = volume.path("set");
    torn(&store, &folder);
    let partial = fs::read_dir(folder.join(".gpunvme-stage/partial")).unwrap().next().unwrap().unwrap().path();
    fs::remove_file(&partial).unwrap();
    // Killed when it makes the new file as long as the object (SIGXFSZ).
    let mut short = Command::new("sh");
    short.args(["-c", "ulimit -f 1024; exec \"$@\"", "sh"]);
    let whole = hydrate(&store, &folder);
    short.arg(whole.get_program()).args(whole.get_args());
    store.found_by(&mut short);
    fails(&short.output().unwrap());
    assert_eq!(fs::metadata(&partial).unwrap().len(), 0, "it was killed where the test wants it");
    ends_well(&hydrate(&store, &folder).output().unwrap());
    assert!(files(&folder) == set(34), "other bytes than the store's");
}

/// A process that waits for another one may wait for long.
#[test]
fn what_the_store_got_while_another_process_worked_is_brought_too() {
    needs_mount!();
    let (volume, store) = (Mounted::new(), stored(33));
    let folder = volume.path("set");
    ends_well(&hydrate(&store, &folder).args(["--include", "one"]).output().unwrap());
    let lock = File::options().append(true).open(folder.join(".gpunvme-stage/lock")).unwrap();
    lock.lock().unwrap();
    let mut process = hydrate(&store, &folder).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut said = String::new();
    let mut stderr = BufReader::new(process.stderr.take().unwrap());
    while !said.contains("waiting") {
        assert!(stderr.read_line(&mut said).unwrap() > 0, "{said}");
    }
    store.state().objects.insert("set/new".into(), b"came later".to_vec());
    let manifest = File::options().append(true).open(folder.join(".gpunvme-stage/manifest")).unwrap();
    manifest.set_modified(std::time::SystemTime::now()).unwrap();
    lock.unlock().unwrap();
    assert!(ends_well(&process.wait_with_output().unwrap()).starts_with("7 objects"));
    assert_eq!(fs::read(folder.join("new")).unwrap(), b"came later");
}
