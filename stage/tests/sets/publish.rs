//! Folders become sets of objects, which are valid when they are whole.

use crate::store::Store;
use crate::{ends_well, fails, files, gpunvme, set};
use gpunvme_tests::mounted::Mounted;
use gpunvme_tests::{needs_mount, tree};
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

const MANIFEST: &str = "gpunvme-manifest.json";

fn fill(folder: &Path, seed: u64) {
    for (name, bytes) in set(seed).into_iter().chain([(".metadata".to_owned(), b"what the files are".to_vec())]) {
        let path = folder.join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, bytes).unwrap();
    }
}

fn publish(store: &Store, folder: &Path, name: &str) -> Command {
    let mut command = gpunvme("publish");
    store.found_by(&mut command);
    command.arg(folder).arg(format!("s3://bucket/{name}"));
    command
}

#[test]
fn what_makes_a_set_valid_goes_last_and_an_old_manifest_first() {
    needs_mount!();
    let (volume, store) = (Mounted::new(), Store::new());
    fill(&volume.path("step"), 1);
    ends_well(&publish(&store, &volume.path("step"), "run/step").output().unwrap());
    let there = files(&volume.path("step"));
    for (name, bytes) in &there {
        assert!(store.state().objects[&format!("run/step/{name}")] == *bytes, "{name}");
    }
    let changes = std::mem::take(&mut store.state().changes);
    assert_eq!(changes[changes.len() - 2..], ["PUT run/step/.metadata".to_owned(), format!("PUT run/step/{MANIFEST}")]);

    // What is there is not sent again.
    let said = ends_well(&publish(&store, &volume.path("step"), "run/step").output().unwrap());
    assert!(said.contains("sent: 0, 0 bytes") && store.state().changes.is_empty(), "{said}");
    fs::write(volume.path("step/one"), "2").unwrap();
    ends_well(&publish(&store, &volume.path("step"), "run/step").output().unwrap());
    let changes = std::mem::take(&mut store.state().changes);
    let expected = [format!("DELETE run/step/{MANIFEST}"), "PUT run/step/one".to_owned(), format!("PUT run/step/{MANIFEST}")];
    assert_eq!(changes, expected);
}

#[test]
fn a_torn_upload_is_no_set_and_goes_on_where_it_ended() {
    needs_mount!();
    let (volume, store) = (Mounted::new(), Store::new());
    fill(&volume.path("step"), 2);
    for refused in 1..8 {
        store.state().refuse_change = Some(refused);
        fails(&publish(&store, &volume.path("step"), "run/step").output().unwrap());
        assert!(!store.state().objects.contains_key(&format!("run/step/{MANIFEST}")));
    }
    store.state().refuse_change = None;
    ends_well(&publish(&store, &volume.path("step"), "run/step").output().unwrap());
    let fresh = volume.path("fresh");
    ends_well(&store.found_by(gpunvme("hydrate").arg("s3://bucket/run/step").arg(&fresh)).output().unwrap());
    assert_eq!(files(&fresh), files(&volume.path("step")));
}

/// Publishes a folder whose file `large` has 8 parts, and kills that when the store has four.
fn killed_between_parts(store: &Store, folder: &Path) {
    store.state().part_takes = Duration::from_millis(30);
    let mut process = publish(store, folder, "run/step").stderr(Stdio::null()).spawn().unwrap();
    let before = store.state().parts;
    while store.state().parts < before + 4 {
        assert!(process.try_wait().unwrap().is_none(), "it ended before");
        std::thread::sleep(Duration::from_millis(1));
    }
    process.kill().unwrap();
    process.wait().unwrap();
    let mut state = store.state();
    state.part_takes = Duration::ZERO;
    assert_eq!((state.uploads.len(), state.objects.contains_key("run/step/large")), (1, false));
}

#[test]
fn an_upload_that_was_killed_goes_on_from_the_parts_that_the_store_has() {
    needs_mount!();
    let (volume, store) = (Mounted::new(), Store::new());
    let folder = volume.path("step");
    fs::create_dir(&folder).unwrap();
    let fill = |seed| fs::write(folder.join("large"), tree::pattern(seed, (40 << 20) - 5)).unwrap();
    let ends_whole = |most_parts| {
        let before = store.state().parts;
        ends_well(&publish(&store, &folder, "run/step").output().unwrap());
        let state = store.state();
        assert!(state.objects["run/step/large"] == fs::read(folder.join("large")).unwrap());
        assert!(state.uploads.is_empty(), "the store keeps no parts");
        let sent = state.parts - before;
        assert!(sent <= most_parts, "{sent} parts were sent");
    };
    fill(1);
    killed_between_parts(&store, &folder);
    // The answer to the last one or two may have come too late.
    ends_whole(6);

    let again = || {
        store.state().objects.clear();
        killed_between_parts(&store, &folder);
    };
    // The store gave the parts up.
    again();
    store.state().uploads.clear();
    ends_whole(8);
    // It lost one of them.
    again();
    store.state().uploads.values_mut().for_each(|(_, parts)| drop(parts.remove(&3)));
    ends_whole(6 + 8);
    // The file is another one.
    again();
    fill(2);
    ends_whole(8);
    // The folder is another set, which says what it leaves of the first.
    again();
    let output = publish(&store, &folder, "run/other").output().unwrap();
    ends_well(&output);
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.contains("1 files were sent to s3://bucket/run/step in part"), "{said}");
    store.state().uploads.clear();
    // It is gone.
    again();
    fs::remove_file(folder.join("large")).unwrap();
    fs::write(folder.join("small"), "1").unwrap();
    ends_well(&publish(&store, &folder, "run/step").output().unwrap());
    assert!(store.state().uploads.is_empty());
}

#[test]
fn parts_that_a_store_would_refuse_are_not_sent() {
    let (here, elsewhere, store) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap(), Store::new());
    fs::write(here.path().join("large"), tree::pattern(1, 6 << 20)).unwrap();
    let publish = |memory: &str, destination: &str| {
        let mut command = gpunvme_tests::programs::command("gpunvme");
        store.found_by(command.args(["publish", "--memory", memory]).arg(here.path()).arg(destination));
        command.output().unwrap()
    };
    let said = fails(&publish("4", "s3://bucket/set"));
    assert!(said.contains("large: stores like S3 take no parts below 5 MiB") && store.state().changes.is_empty(), "{said}");
    assert_eq!(store.state().parts, 0);
    ends_well(&publish("5", "s3://bucket/set"));
    assert_eq!(store.state().parts, 2);
    // A folder takes parts of any length, and a store objects of any.
    ends_well(&publish("1", elsewhere.path().to_str().unwrap()));
    fs::write(here.path().join("large"), "small").unwrap();
    ends_well(&publish("1", "s3://bucket/set"));
}

fn publish_rank(store: &Store, folder: &Path, rank: &str, attempt: &str) -> Command {
    let mut command = publish(store, folder, "run/step");
    command.args(["--rank", rank, "--attempt", attempt]);
    command
}

#[test]
fn ranks_publish_one_set_and_the_last_of_them_makes_it_valid() {
    needs_mount!();
    let (volume, store) = (Mounted::new(), Store::new());
    let (first, second) = (volume.path("node0"), volume.path("node1"));
    let manifest = format!("run/step/{MANIFEST}");
    let is_valid = || store.state().objects.contains_key(&manifest);
    fill(&first, 5);
    fs::create_dir(&second).unwrap();
    fs::write(second.join("__1_0.distcp"), tree::pattern(6, 2_000_000)).unwrap();
    let said = ends_well(&publish_rank(&store, &first, "0/2", "a").output().unwrap());
    assert!(said.contains("ranks done: 1 of 2") && !is_valid(), "{said}");
    assert!(!store.state().objects.contains_key("run/step/.metadata"), "readers begin with it");
    assert!(!store.state().changes.is_empty());
    store.state().changes.clear();
    let said = ends_well(&publish_rank(&store, &second, "1/2", "a").args(["--keep", "3"]).output().unwrap());
    assert!(said.contains("ranks done: 2 of 2") && is_valid(), "{said}");
    let changes = std::mem::take(&mut store.state().changes);
    assert_eq!(changes[changes.len() - 2..], ["PUT run/step/.metadata".to_owned(), format!("PUT {manifest}")]);
    // Another rank may close the set at the same moment, and has sent the manifest.
    assert!(!changes.contains(&"DELETE run/step/.metadata".into()), "{changes:?}");
    let hydrated = |name: &str| {
        let folder = volume.path(name);
        let mut command = gpunvme("hydrate");
        ends_well(&store.found_by(command.args(["--published", "s3://bucket/run/step"]).arg(&folder)).output().unwrap());
        files(&folder)
    };
    let both = || files(&first).into_iter().chain(files(&second)).collect::<std::collections::BTreeMap<_, _>>();
    assert!(hydrated("fresh") == both());

    // Nothing is to be done, and nothing is.
    for (folder, rank) in [(&first, "0/2"), (&second, "1/2")] {
        let said = ends_well(&publish_rank(&store, folder, rank, "a").output().unwrap());
        assert!(said.contains("sent: 0, 0 bytes; ranks done: 2 of 2") && store.state().changes.is_empty(), "{said}");
    }
    // Parts of an earlier attempt do not count beside those of a later one.
    fs::write(second.join("__1_0.distcp"), tree::pattern(7, 1_000_000)).unwrap();
    ends_well(&publish_rank(&store, &second, "1/2", "b").output().unwrap());
    assert!(!is_valid());
    let said = ends_well(&publish_rank(&store, &first, "0/2", "b").output().unwrap());
    assert!(said.contains("sent: 0, 0 bytes; ranks done: 2 of 2") && hydrated("again") == both(), "{said}");
    // Two have different files of one name.
    fs::write(second.join("one"), "of the second").unwrap();
    let said = fails(&publish_rank(&store, &second, "1/2", "b").output().unwrap());
    assert!(said.contains("one: two ranks have different files") && !is_valid(), "{said}");
    // A rank may have no files.
    fs::remove_file(second.join("one")).unwrap();
    fs::remove_file(second.join("__1_0.distcp")).unwrap();
    ends_well(&publish_rank(&store, &second, "1/2", "b").output().unwrap());
    assert!(is_valid());
    fails(&publish(&store, &second, "run/step").args(["--rank", "1/2"]).output().unwrap());
}

/// A rank withdraws its part and the manifest before its files change; the manifest may come then.
#[test]
fn a_rank_that_begins_again_while_another_closes_the_set_leaves_no_manifest_of_its_old_files() {
    needs_mount!();
    let (volume, store) = (Mounted::new(), Store::new());
    let (first, second) = (volume.path("node0"), volume.path("node1"));
    for folder in [&first, &second] {
        fill(folder, 5);
    }
    ends_well(&publish_rank(&store, &first, "0/2", "a").output().unwrap());
    // Once the other rank has read it.
    let part = "run/step/.gpunvme-stage/part-0-of-2".to_owned();
    let withdrawn = br#"{"attempt": "none", "objects": {}, "held": []}"#.to_vec();
    store.state().change = Some((part.clone(), 1, withdrawn));
    let said = ends_well(&publish_rank(&store, &second, "1/2", "a").output().unwrap());
    assert!(store.state().change.is_none() && said.contains("ranks done: 1 of 2"), "{said}");
    let changes = store.state().changes.split_off(0);
    let manifest = format!("run/step/{MANIFEST}");
    assert_eq!(changes[changes.len() - 2..], [format!("PUT {manifest}"), format!("DELETE {manifest}")]);
    ends_well(&publish_rank(&store, &first, "0/2", "a").output().unwrap());
    assert!(store.state().objects.contains_key(&manifest), "it closes the set itself then");
}

#[test]
fn what_readers_begin_with_is_replaced_and_never_away() {
    let (here, there) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let metadata = there.path().join("step/.metadata");
    fs::write(here.path().join(".metadata"), "what the files are").unwrap();
    let publish = |attempt: usize| {
        let mut command = gpunvme("publish");
        command.args(["--rank", "0/1", "--attempt", &attempt.to_string()]).arg(here.path());
        ends_well(&command.arg(there.path().join("step")).output().unwrap());
    };
    publish(0);
    std::thread::scope(|scope| {
        let publishing = scope.spawn(|| (1..20).for_each(publish));
        while !publishing.is_finished() {
            assert!(metadata.exists());
        }
    });
    assert_eq!(files(&there.path().join("step")).into_keys().collect::<Vec<_>>(), [".metadata", MANIFEST]);
}

#[test]
fn ranks_that_are_killed_and_go_on_at_once_make_one_whole_set() {
    needs_mount!();
    let (volume, store) = (Mounted::new(), Store::new());
    let ranks: Vec<_> = (0..4).map(|rank| (format!("{rank}/4"), volume.path(format!("node{rank}")))).collect();
    let mut all = std::collections::BTreeMap::new();
    for (rank, folder) in &ranks {
        let name = format!("__{}.distcp", rank.replace('/', "_"));
        fs::create_dir(folder).unwrap();
        fs::write(folder.join(&name), tree::pattern(name.len() as u64, 12_000_000)).unwrap();
        all.extend(files(folder));
    }
    for round in 0..4 {
        store.state().part_takes = Duration::from_millis(20);
        let running: Vec<_> = ranks
            .iter()
            .map(|(rank, folder)| publish_rank(&store, folder, rank, "a").stderr(Stdio::null()).spawn().unwrap())
            .collect();
        std::thread::sleep(Duration::from_millis(40 * (round + 1)));
        for mut process in running {
            process.kill().unwrap();
            process.wait().unwrap();
        }
    }
    store.state().part_takes = Duration::ZERO;
    let running: Vec<_> = ranks
        .iter()
        .map(|(rank, folder)| publish_rank(&store, folder, rank, "a").stdout(Stdio::piped()).spawn().unwrap())
        .collect();
    for process in running {
        ends_well(&process.wait_with_output().unwrap());
    }
    let fresh = volume.path("fresh");
    ends_well(&store.found_by(gpunvme("hydrate").args(["--published", "s3://bucket/run/step"]).arg(&fresh)).output().unwrap());
    assert!(files(&fresh) == all);
}

#[test]
fn the_newest_sets_are_kept() {
    needs_mount!();
    let (volume, store) = (Mounted::new(), Store::new());
    store.state().objects.insert("run/notes/about".into(), b"no set".to_vec());
    for step in 1..=4 {
        fs::create_dir(volume.path(format!("step{step}"))).unwrap();
        fs::write(volume.path(format!("step{step}/data")), [step]).unwrap();
        let folder = volume.path(format!("step{step}"));
        ends_well(&publish(&store, &folder, &format!("run/step{step}")).args(["--keep", "2"]).output().unwrap());
    }
    let state = store.state();
    let sets: Vec<_> = state.objects.keys().filter(|key| key.ends_with(MANIFEST)).collect();
    assert_eq!(sets.len(), 2, "{sets:?}");
    assert!(state.objects.contains_key("run/step4/data") && state.objects.contains_key("run/notes/about"));
}

#[test]
fn a_folder_of_another_filesystem_is_a_destination_too() {
    needs_mount!();
    let volume = Mounted::new();
    let elsewhere = tempfile::tempdir().unwrap();
    fill(&volume.path("step"), 3);
    ends_well(&gpunvme("publish").arg(volume.path("step")).arg(elsewhere.path().join("a/step")).output().unwrap());
    let ranks = elsewhere.path().join("a/ranks");
    for (rank, attempt) in [("0/2", "1"), ("1/2", "1"), ("0/2", "2"), ("1/2", "2")] {
        let mut command = gpunvme("publish");
        ends_well(&command.args(["--rank", rank, "--attempt", attempt]).arg(volume.path("step")).arg(&ranks).output().unwrap());
    }
    let mut published = files(&ranks);
    assert!(published.remove(MANIFEST).is_some(), "{:?}", published.keys());
    assert!(published == files(&volume.path("step")), "{:?}", published.keys());
    let mut there = files(&elsewhere.path().join("a/step"));
    assert!(there.remove(MANIFEST).is_some());
    assert!(there == files(&volume.path("step")));
}
