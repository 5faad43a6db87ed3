//! Sets go when a quota asks for it, the least recently used first, and only what may go.

use crate::hydrate::{hydrate, stored};
use crate::{ends_well, fails, files, set};
use gpunvme_tests::mounted::Mounted;
use gpunvme_tests::{needs_mount, programs};
use std::fs;
use std::path::Path;
use std::process::{Command, Output};

fn size() -> usize {
    set(1).values().map(Vec::len).sum()
}

fn evict(folder: &Path, quota: usize) -> Output {
    gpunvme(&["evict", "--quota", &quota.to_string()], folder)
}

fn gpunvme(arguments: &[&str], folder: &Path) -> Output {
    let mut command: Command = programs::command("gpunvme");
    command.args(arguments).arg(folder).output().unwrap()
}

#[test]
fn the_least_recently_used_sets_go_and_their_names_stay() {
    needs_mount!();
    let (volume, store) = (Mounted::new(), stored(8));
    let folder = |name: &str| volume.path(format!("sets/{name}"));
    for name in ["a", "b", "c"] {
        ends_well(&hydrate(&store, &folder(name)).output().unwrap());
    }
    ends_well(&hydrate(&store, &folder("a")).output().unwrap());
    assert!(ends_well(&evict(&volume.path("sets"), 3 * size())).contains("evicted: 0 files"));
    let said = ends_well(&evict(&volume.path("sets"), 3 * size() - 1));
    assert!(said.contains(&format!("evicted: 6 files of 1 sets, {} bytes", size())), "{said}");
    assert_eq!((files(&folder("a")), files(&folder("b")).len(), files(&folder("c"))), (set(8), 0, set(8)));
    let said = ends_well(&gpunvme(&["stage", "status", "--evicted"], &volume.path("sets")));
    assert!(said.contains("3000000           evicted: large") && said.contains("s3://bucket/set"), "{said}");
    let json = ends_well(&gpunvme(&["--json", "stage", "status"], &volume.path("sets")));
    let sets: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!(sets[0]["folder"], folder("b").to_str().unwrap());
    assert_eq!((&sets[0]["files"], &sets[2]["bytes"]), (&0.into(), &size().into()));

    // A pinned set stays, however long ago it was used.
    ends_well(&hydrate(&store, &folder("c")).arg("--pin").output().unwrap());
    ends_well(&hydrate(&store, &folder("a")).output().unwrap());
    ends_well(&gpunvme(&["evict", "--dry-run", "--quota", &size().to_string()], &volume.path("sets")));
    assert_eq!(files(&folder("a")), set(8), "a dry run removes nothing");
    ends_well(&evict(&volume.path("sets"), size()));
    assert_eq!((files(&folder("a")).len(), files(&folder("c"))), (0, set(8)));
    let said = fails(&gpunvme(&["evict", "--quota", "0%"], &volume.path("sets")));
    assert!(said.contains("over the quota of 0"), "{said}");
    assert_eq!(files(&folder("c")), set(8));

    ends_well(&hydrate(&store, &folder("b")).output().unwrap());
    assert_eq!(files(&folder("b")), set(8), "what was evicted is fetched again");
}

#[test]
fn what_is_open_or_was_changed_here_is_not_evicted() {
    needs_mount!();
    let (volume, store) = (Mounted::new(), stored(9));
    let folder = volume.path("set");
    ends_well(&hydrate(&store, &folder).output().unwrap());
    fs::write(folder.join("one"), "2").unwrap();
    fs::write(folder.join("mine"), "not of the set").unwrap();
    let open = fs::File::open(folder.join("sub/block")).unwrap();
    let said = fails(&evict(&folder, 0));
    assert!(said.contains("hold 4096 bytes, over the quota of 0"), "{said}");
    assert_eq!(files(&folder).into_keys().collect::<Vec<_>>(), ["mine", "one", "sub/block"]);
    drop(open);
    ends_well(&evict(&folder, 0));
    assert_eq!(files(&folder).into_keys().collect::<Vec<_>>(), ["mine", "one"]);
}

/// To remove one of its names would free nothing.
#[test]
fn a_file_with_another_name_here_stays_and_counts() {
    needs_mount!();
    let (volume, store) = (Mounted::new(), stored(9));
    let (folder, kept) = (volume.path("sets/set"), volume.path("kept"));
    ends_well(&hydrate(&store, &folder).output().unwrap());
    fs::hard_link(folder.join("sub/block"), &kept).unwrap();
    let said = fails(&evict(&folder, 0));
    assert!(said.contains("hold 4096 bytes, over the quota of 0"), "{said}");
    assert_eq!(files(&folder).into_keys().collect::<Vec<_>>(), ["sub/block"]);
    // The same where a set that arrives has others go.
    let mut other = hydrate(&store, &volume.path("sets/other"));
    let said = fails(&other.args(["--quota", &size().to_string()]).output().unwrap());
    assert!(said.contains("4096 bytes of other sets stay"), "{said}");
    fs::remove_file(&kept).unwrap();
    ends_well(&evict(&folder, 0));
    assert_eq!(files(&folder).len(), 0);
}

#[test]
fn no_manifest_leads_eviction_out_of_its_folder() {
    needs_mount!();
    let (volume, store) = (Mounted::new(), stored(10));
    let folder = volume.path("set");
    ends_well(&hydrate(&store, &folder).output().unwrap());
    ends_well(&hydrate(&store, &volume.path("other")).output().unwrap());
    fs::rename(folder.join("one"), volume.path("one")).unwrap();
    let manifest = folder.join(".gpunvme-stage/manifest");
    fs::write(&manifest, fs::read_to_string(&manifest).unwrap().replace("\"one\"", "\"../one\"")).unwrap();
    let output = evict(&volume.path("."), 0);
    ends_well(&output);
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.contains("it would leave the folder") && volume.path("one").exists(), "{said}");
    assert_eq!(files(&volume.path("other")).len(), 0, "others' sets keep nobody from the quota");
}

/// Someone brought in a part of a set first, and pinned it.
#[test]
fn a_set_in_the_folder_of_another_is_its_own() {
    needs_mount!();
    let (volume, store) = (Mounted::new(), stored(25));
    let (outer, inner) = (volume.path("sets/m"), volume.path("sets/m/sub"));
    let mut part = crate::gpunvme("hydrate");
    ends_well(&store.found_by(part.arg("s3://bucket/set/sub").arg(&inner).arg("--pin")).output().unwrap());
    ends_well(&hydrate(&store, &outer).output().unwrap());
    assert_eq!(files(&outer).len(), 6);
    let json = ends_well(&gpunvme(&["--json", "stage", "status"], &volume.path("sets")));
    let sets: Vec<serde_json::Value> = serde_json::from_str(&json).unwrap();
    let bytes: u64 = sets.iter().map(|set| set["bytes"].as_u64().unwrap()).sum();
    assert_eq!((sets.len(), bytes), (2, size() as u64), "each file counts once");
    for name in ["one", "one/deep"] {
        let mut single = crate::gpunvme("hydrate");
        let said = fails(&store.found_by(single.arg("s3://bucket/set/one").arg(outer.join(name))).output().unwrap());
        assert!(said.contains("take another folder, or that set with --include"), "{said}");
    }
    let said = fails(&evict(&volume.path("sets"), 0));
    assert!(said.contains("over the quota of 0"), "{said}");
    assert!(files(&outer).into_keys().eq(["sub/block", "sub/deep/odd"]));
}

/// ext4 knows no year after 2446, others no nanoseconds.
#[test]
fn a_time_that_the_filesystem_does_not_know_makes_no_file_another_one() {
    needs_mount!();
    let store = stored(26);
    store.state().modified = Some("9999-12-31T23:59:59.000Z");
    let elsewhere = tempfile::tempdir_in("/var/tmp").unwrap();
    let folder = elsewhere.path().join("set");
    ends_well(&hydrate(&store, &folder).output().unwrap());
    assert!(ends_well(&hydrate(&store, &folder).output().unwrap()).contains("fetched: 0"), "it is there");
    assert!(ends_well(&evict(elsewhere.path(), 0)).contains("evicted: 6 files"));
}
