//! Sets of objects become files, whatever the store and the machine do meanwhile.

use crate::store::{Checksum, Fault, Store};
use crate::{ends_well, fails, files, gpunvme, set};
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use gpunvme_tests::mounted::{Mounted, peak_memory};
use gpunvme_tests::{needs_mount, programs, tree};
use rustix::process::Pid;
use sha2::Digest;
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

pub const URL: &str = "s3://bucket/set";

pub fn stored(seed: u64) -> Store {
    let store = Store::new();
    store.state().objects = set(seed).into_iter().map(|(name, bytes)| (format!("set/{name}"), bytes)).collect();
    store
}

pub fn hydrate(store: &Store, folder: &Path) -> Command {
    let mut command = gpunvme("hydrate");
    store.found_by(&mut command);
    command.arg(URL).arg(folder);
    command
}

#[test]
fn a_folder_arrives_by_the_direct_path_and_only_once() {
    needs_mount!();
    let volume = Mounted::new();
    let source = tempfile::tempdir().unwrap();
    for (name, bytes) in set(1) {
        let path = source.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, bytes).unwrap();
    }
    let folder = volume.path("data/set");
    let run = || gpunvme("hydrate").arg(source.path()).arg(&folder).output().unwrap();
    let before = gpunvme::Mount::open(volume.root()).unwrap().stats().unwrap().write.total();
    let total: usize = set(1).values().map(Vec::len).sum();
    assert!(ends_well(&run()).contains(&format!("fetched: 6, {total} bytes")));
    let after = gpunvme::Mount::open(volume.root()).unwrap().stats().unwrap().write.total();
    assert_eq!(after - before, total as u64, "all of it went by the direct path");
    assert_eq!(files(&folder), set(1));
    assert!(ends_well(&run()).contains("fetched: 0, 0 bytes"));

    fs::write(source.path().join("one"), "two").unwrap();
    fs::remove_file(folder.join("large")).unwrap();
    assert!(ends_well(&run()).contains("fetched: 2, 3000003 bytes"), "what changed, and what was lost");
    assert_eq!(fs::read(folder.join("one")).unwrap(), b"two");
}

#[test]
fn a_dry_run_a_share_and_patterns_choose() {
    needs_mount!();
    let (volume, store) = (Mounted::new(), stored(2));
    let folder = volume.path("set");
    assert!(ends_well(&hydrate(&store, &folder).arg("--dry-run").output().unwrap()).contains("to be fetched: 6"));
    assert!(!folder.exists());
    ends_well(&hydrate(&store, &folder).args(["--include", "sub/*", "--include", "on?"]).output().unwrap());
    assert_eq!(files(&folder).into_keys().collect::<Vec<_>>(), ["one", "sub/block", "sub/deep/odd"]);
    let shares = [volume.path("0"), volume.path("1")];
    for (rank, folder) in shares.iter().enumerate() {
        ends_well(&hydrate(&store, folder).args(["--rank", &format!("{rank}/2")]).output().unwrap());
        assert_eq!(files(folder).len(), 3);
    }
    let both: std::collections::BTreeMap<_, _> = shares.iter().flat_map(|folder| files(folder)).collect();
    assert_eq!(both, set(2));
}

#[test]
fn what_a_bad_network_sends_is_asked_for_again() {
    needs_mount!();
    let (volume, store) = (Mounted::new(), stored(3));
    let kinds = [Fault::Cut(1000), Fault::Closed, Fault::Slow(20), Fault::Cut(0), Fault::Busy, Fault::Cut(65_000), Fault::Twice];
    store.state().faults = kinds.into_iter().cycle().take(49).collect();
    ends_well(&hydrate(&store, &volume.path("set")).output().unwrap());
    assert_eq!(files(&volume.path("set")), set(3));
    assert!(store.state().faults.is_empty(), "all faults were met");
}

#[test]
fn an_object_that_is_listed_twice_is_one() {
    needs_mount!();
    let (volume, store) = (Mounted::new(), stored(3));
    store.state().lists_twice = true;
    ends_well(&hydrate(&store, &volume.path("set")).output().unwrap());
    assert_eq!(files(&volume.path("set")), set(3));
    assert!(store.state().reads.values().all(|reads| *reads == 1), "{:?}", store.state().reads);
}

/// Consoles make an object of no bytes for a folder, and put others below it later.
#[test]
fn a_file_that_became_a_folder_in_the_store_makes_way() {
    needs_mount!();
    let (volume, store) = (Mounted::new(), stored(5));
    store.state().objects.insert("set/logs".into(), Vec::new());
    let folder = volume.path("set");
    ends_well(&hydrate(&store, &folder).output().unwrap());
    assert!(folder.join("logs").is_file());
    store.state().objects.insert("set/logs/a".into(), b"a line".to_vec());
    ends_well(&hydrate(&store, &folder).output().unwrap());
    assert_eq!(fs::read(folder.join("logs/a")).unwrap(), b"a line");
    // What is no longer the store's stays, and is in the way.
    fs::remove_dir_all(folder.join("logs")).unwrap();
    fs::write(folder.join("logs"), "of my own").unwrap();
    let said = fails(&hydrate(&store, &folder).output().unwrap());
    assert!(said.contains("logs/a: cannot open its folder: Not a directory"), "{said}");
    assert_eq!(fs::read(folder.join("logs")).unwrap(), b"of my own");
}

#[test]
fn a_folder_that_became_a_file_in_the_store_makes_way() {
    needs_mount!();
    let (volume, store) = (Mounted::new(), Store::new());
    let folder = volume.path("set");
    let put = |objects: &[&str]| {
        let objects = objects.iter().map(|name| (format!("set/{name}"), tree::pattern(objects.len() as u64, 5000)));
        store.state().objects = objects.collect();
    };
    let there = || files(&folder).into_keys().collect::<Vec<_>>();
    put(&["a/b", "a/deep/er/c", "a/deep/d", "b/e", "c"]);
    ends_well(&hydrate(&store, &folder).output().unwrap());
    // Folders that eviction left are empty, and another may have been made here.
    ends_well(&programs::command("gpunvme").args(["evict", "--quota", "0"]).arg(&folder).output().unwrap());
    assert!(folder.join("a/deep/er").is_dir() && there().is_empty());
    fs::create_dir_all(folder.join("c/mine")).unwrap();
    put(&["a/deep", "b/e", "c"]);
    ends_well(&hydrate(&store, &folder).output().unwrap());
    assert_eq!(there(), ["a/deep", "b/e", "c"]);
    // Files go that are as they came.
    put(&["a", "b", "c"]);
    let status = || ends_well(&programs::command("gpunvme").args(["stage", "status"]).arg(&folder).output().unwrap());
    ends_well(&hydrate(&store, &folder).output().unwrap());
    assert!(there() == ["a", "b", "c"] && status().contains("15000         3"), "{}", status());

    // Others stay, and nothing is fetched, and nothing goes.
    for (in_the_way, is_dir) in [("a/deep/mine", false), ("a/b", false), ("a/deep/.gpunvme-stage", true)] {
        fs::remove_dir_all(&folder).unwrap();
        put(&["a/b", "a/deep/c", "c", "e/f"]);
        ends_well(&hydrate(&store, &folder).output().unwrap());
        let path = folder.join(in_the_way);
        if is_dir {
            fs::create_dir(&path).unwrap()
        } else {
            fs::write(&path, "of my own").unwrap()
        }
        let before = files(&folder);
        put(&["a", "c", "d", "e"]);
        let reads = store.state().reads.values().sum::<u32>();
        let said = fails(&hydrate(&store, &folder).output().unwrap());
        assert!(said.contains("set/a: a folder has that name, with files that are not of this set"), "{said}");
        assert!(files(&folder) == before && store.state().reads.values().sum::<u32>() == reads, "{in_the_way}");
    }
}

/// Here because of a symbolic link, which is not followed.
#[test]
fn a_name_that_cannot_be_given_keeps_no_other_from_its_file() {
    needs_mount!();
    let (volume, store) = (Mounted::new(), stored(5));
    let folder = volume.path("set");
    fs::create_dir_all(&folder).unwrap();
    std::os::unix::fs::symlink("elsewhere", folder.join("b c")).unwrap();
    let said = fails(&hydrate(&store, &folder).output().unwrap());
    assert!(said.contains("set/b c/ü: cannot open its folder"), "{said}");
    fs::remove_file(folder.join("b c")).unwrap();
    let missing = |name: &String| name == "b c/ü";
    assert!(files(&folder) == set(5).into_iter().filter(|(name, _)| !missing(name)).collect());
    assert!(ends_well(&hydrate(&store, &folder).output().unwrap()).contains("fetched: 1, 70000 bytes"));
    assert_eq!(files(&folder), set(5));
}

#[test]
fn a_listing_of_many_answers_is_taken_whole() {
    needs_mount!();
    let (volume, store) = (Mounted::new(), stored(4));
    store.state().page = Some(2);
    assert!(ends_well(&hydrate(&store, &volume.path("set")).output().unwrap()).starts_with("6 objects"));
    assert_eq!(files(&volume.path("set")), set(4));
}

#[test]
fn an_object_that_changes_between_its_parts_is_never_a_mixture() {
    needs_mount!();
    let (volume, store) = (Mounted::new(), stored(4));
    let new = tree::pattern(99, 2_500_000);
    store.state().change = Some(("set/large".into(), 7, new.clone()));
    ends_well(&hydrate(&store, &volume.path("set")).output().unwrap());
    assert!(files(&volume.path("set"))["large"] == new, "the object that the store has now");
}

#[test]
fn bytes_that_are_not_the_published_ones_never_appear() {
    needs_mount!();
    let (volume, store) = (Mounted::new(), Store::new());
    let here = tempfile::tempdir().unwrap();
    fs::write(here.path().join("good"), tree::pattern(1, 200_000)).unwrap();
    fs::write(here.path().join("bad"), tree::pattern(2, 200_000)).unwrap();
    ends_well(&store.found_by(gpunvme("publish").arg(here.path()).arg(URL)).output().unwrap());
    store.state().objects.get_mut("set/bad").unwrap()[150_000] ^= 1;
    let said = fails(&hydrate(&store, &volume.path("set")).output().unwrap());
    assert!(said.contains("bad: its CRC32C is"), "{said}");
    assert!(!volume.path("set/bad").exists());
    store.state().objects.get_mut("set/bad").unwrap()[150_000] ^= 1;
    ends_well(&hydrate(&store, &volume.path("set")).output().unwrap());
    assert_eq!(files(&volume.path("set")), files(here.path()));
    // A set that lacks an object is none.
    store.state().objects.remove("set/good");
    let said = fails(&hydrate(&store, &volume.path("other")).output().unwrap());
    assert!(said.contains("good: ") && !volume.path("other").exists(), "{said}");
}

const CHECKSUMS: [(&str, Option<Checksum>, Checksum); 5] = [
    ("CRC32C", Some(crc32c), |_| crc32c(b"other")),
    ("CRC64-NVME", Some(crc64nvme), |_| crc64nvme(b"other")),
    ("CRC32", Some(crc32), |_| crc32(b"other")),
    ("SHA-256", Some(sha256), |_| sha256(b"other")),
    ("MD5", None, |_| ("content-md5", BASE64_STANDARD.encode([7; 16]))),
];

fn crc32c(bytes: &[u8]) -> (&'static str, String) {
    ("x-amz-checksum-crc32c", BASE64_STANDARD.encode(crc32c::crc32c(bytes).to_be_bytes()))
}

fn crc32(bytes: &[u8]) -> (&'static str, String) {
    let sum = crc_fast::checksum(crc_fast::CrcAlgorithm::Crc32IsoHdlc, bytes) as u32;
    ("x-amz-checksum-crc32", BASE64_STANDARD.encode(sum.to_be_bytes()))
}

fn crc64nvme(bytes: &[u8]) -> (&'static str, String) {
    ("x-amz-checksum-crc64nvme", BASE64_STANDARD.encode(crc_fast::crc64_nvme(bytes).to_be_bytes()))
}

fn sha256(bytes: &[u8]) -> (&'static str, String) {
    ("x-amz-checksum-sha256", BASE64_STANDARD.encode(sha2::Sha256::digest(bytes)))
}

#[test]
fn bytes_that_are_not_what_the_store_has_are_fetched_again() {
    needs_mount!();
    let volume = Mounted::new();
    for (kind, right, wrong) in CHECKSUMS {
        let (store, folder) = (Store::new(), volume.path(kind));
        for (name, size) in [("set/large", 1_000_001), ("set/small", 50_000), ("set/empty", 0)] {
            store.state().objects.insert(name.into(), tree::pattern(size as u64, size));
        }
        store.state().checksum = Some(wrong);
        let said = fails(&hydrate(&store, &folder).output().unwrap());
        assert!(said.contains(&format!("its {kind} is ")) && said.contains(", and the store says "), "{said}");
        assert!(files(&folder).into_keys().all(|name| name == "empty"), "{kind}");
        assert!(store.state().reads.values().any(|&reads| reads == 2), "{kind}: once more, and then no more");
        // Where there is no header, the ETag is one.
        let folder = volume.path(format!("right-{kind}"));
        (store.state().checksum, store.state().tags) = (right, right.is_none());
        for name in ["large", "small"] {
            store.state().faults = vec![Fault::Damaged];
            ends_well(&hydrate(&store, &folder).args(["--include", name]).output().unwrap());
            assert!(store.state().faults.is_empty());
            assert!(files(&folder)[name] == store.state().objects[&format!("set/{name}")], "{kind} of {name}");
        }
        // Whoever does not ask takes what comes.
        store.state().faults = vec![Fault::Damaged];
        let careless = volume.path(format!("careless-{kind}"));
        ends_well(&hydrate(&store, &careless).args(["--include", "small", "--verify", "none"]).output().unwrap());
        assert!(files(&careless)["small"] != store.state().objects["set/small"], "{kind}");
    }
}

#[test]
fn no_name_of_a_store_leaves_the_folder() {
    needs_mount!();
    let (volume, store) = (Mounted::new(), Store::new());
    for name in ["set/../escaped", "set/a/../../escaped", "set//etc/escaped", "set/tab\tescaped", "set/.gpunvme-stage/lock"] {
        store.state().objects = [(name.to_owned(), b"x".to_vec()), ("set/good".to_owned(), b"y".to_vec())].into();
        let output = hydrate(&store, &volume.path("set")).output().unwrap();
        assert!(!volume.path("escaped").exists(), "{name}");
        let there = files(&volume.path("set"));
        assert!(there.keys().all(|name| name == "good"), "{name}: {there:?} {output:?}");
    }
    // A symbolic link in the folder leads out of it.
    store.state().objects = [("set/link/file".to_owned(), b"x".to_vec())].into();
    fs::create_dir_all(volume.path("elsewhere")).unwrap();
    fs::create_dir_all(volume.path("linked")).unwrap();
    std::os::unix::fs::symlink("../elsewhere", volume.path("linked/link")).unwrap();
    fails(&hydrate(&store, &volume.path("linked")).output().unwrap());
    assert_eq!(files(&volume.path("elsewhere")).len(), 0);
}

#[test]
fn what_is_there_is_known_by_its_time_also_after_a_remount() {
    needs_mount!();
    let (volume, store) = (Mounted::new(), stored(11));
    ends_well(&hydrate(&store, &volume.path("set")).output().unwrap());
    let volume = volume.remount();
    assert!(ends_well(&hydrate(&store, &volume.path("set")).output().unwrap()).contains("fetched: 0, 0 bytes"));
    fs::write(volume.path("set/one"), "x").unwrap();
    assert!(ends_well(&hydrate(&store, &volume.path("set")).output().unwrap()).contains("fetched: 1, 1 bytes"));
    assert_eq!(files(&volume.path("set")), set(11));
}

#[test]
fn a_set_that_must_be_published_has_a_manifest() {
    needs_mount!();
    let (volume, store) = (Mounted::new(), stored(12));
    let said = fails(&hydrate(&store, &volume.path("set")).arg("--published").output().unwrap());
    assert!(said.contains("it has no manifest") && !volume.path("set").exists(), "{said}");
    let here = tempfile::tempdir().unwrap();
    fs::write(here.path().join("one"), "1").unwrap();
    ends_well(&store.found_by(gpunvme("publish").arg(here.path()).arg(URL)).output().unwrap());
    ends_well(&hydrate(&store, &volume.path("set")).arg("--published").output().unwrap());
    assert_eq!(files(&volume.path("set")), files(here.path()));
}

#[test]
fn the_memory_is_what_was_set() {
    needs_mount!();
    const MIB: u64 = 1 << 20;
    let volume = Mounted::new();
    let source = tempfile::tempdir().unwrap();
    for name in ["a", "b", "c", "d"] {
        fs::write(source.path().join(name), tree::pattern(1, 48 << 20)).unwrap();
    }
    let peak = |memory: u64| {
        let mut command = programs::command("gpunvme");
        command.args(["hydrate", "--memory", &memory.to_string()]).arg(source.path());
        let mut process = command.arg(volume.path(format!("set{memory}"))).stdout(Stdio::null()).spawn().unwrap();
        let mut most = 0;
        while process.try_wait().unwrap().is_none() {
            most = peak_memory(Pid::from_child(&process)).unwrap_or(0).max(most);
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(files(&volume.path(format!("set{memory}"))).len(), 4);
        most
    };
    for (memory, most) in [(16, 64), (128, 176)] {
        let peak = peak(memory);
        assert!(peak < most * MIB, "{peak} bytes with {memory} MiB for parts");
    }
}

#[test]
fn credentials_are_kept_nowhere_and_another_set_is_refused() {
    needs_mount!();
    let (volume, store) = (Mounted::new(), stored(5));
    let folder = volume.path("set");
    let output = hydrate(&store, &folder).env("RUST_LOG", "trace").output().unwrap();
    ends_well(&output);
    let manifest = fs::read_to_string(folder.join(".gpunvme-stage/manifest")).unwrap();
    for text in [manifest, String::from_utf8_lossy(&output.stderr).into_owned()] {
        assert!(!text.contains("SECRETOFTHETEST"));
    }
    let said = fails(&gpunvme("hydrate").arg("s3://name:password@bucket/set").arg(&folder).output().unwrap());
    assert!(said.contains("credentials") && !said.contains("password@"), "{said}");
    let other = tempfile::tempdir().unwrap();
    fs::write(other.path().join("one"), "other").unwrap();
    for option in ["--dry-run", "--progress"] {
        let said = fails(&gpunvme("hydrate").arg(option).arg(other.path()).arg(&folder).output().unwrap());
        assert!(said.contains("take another folder"), "{option}: {said}");
    }
    assert_eq!(files(&folder), set(5));
}

#[test]
fn processes_that_bring_the_same_set_fetch_each_object_once() {
    needs_mount!();
    let (volume, store) = (Mounted::new(), stored(6));
    let folder = volume.path("set");
    let both: Vec<_> = (0..3).map(|_| hydrate(&store, &folder).stdout(Stdio::piped()).spawn().unwrap()).collect();
    for process in both {
        ends_well(&process.wait_with_output().unwrap());
        assert_eq!(files(&folder), set(6), "whole for each that returns");
    }
    assert!(store.state().reads.values().all(|&reads| reads == 1), "{:?}", store.state().reads);
}

#[test]
fn what_has_no_room_is_refused_before_anything_is_fetched() {
    needs_mount!();
    let volume = gpunvme_tests::mounted::Image::formatted_with(256 << 20).mount();
    let source = tempfile::tempdir().unwrap();
    fs::File::create(source.path().join("huge")).unwrap().set_len(1 << 30).unwrap();
    let said = fails(&gpunvme("hydrate").arg(source.path()).arg(volume.path("set")).output().unwrap());
    assert!(said.contains("1073741824 bytes are missing"), "{said}");
    assert_eq!(files(&volume.path("set")).len(), 0);
}

/// `scripts/campaign stage` has more of them (GPUNVME_STAGE_KILLS).
#[test]
fn a_name_is_a_whole_file_whenever_the_program_is_killed() {
    needs_mount!();
    let kills = std::env::var("GPUNVME_STAGE_KILLS").map_or(12, |kills| kills.parse().unwrap());
    let (volume, store) = (Mounted::new(), stored(7));
    let whole = set(7);
    let mut time = Duration::from_millis(5);
    for round in 0..kills {
        let folder = volume.path(format!("set{}", round / 6));
        store.state().checksum = Some(crc64nvme);
        store.state().faults = vec![Fault::Slow(5); 20];
        let mut process = hydrate(&store, &folder).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        let end = Instant::now() + time;
        while Instant::now() < end && process.try_wait().unwrap().is_none() {
            std::thread::sleep(Duration::from_millis(1));
        }
        process.kill().unwrap();
        process.wait().unwrap();
        for (name, bytes) in files(&folder) {
            assert!(bytes == whole[&name], "{name} is not whole after {time:?}");
        }
        time = Duration::from_millis(5 + u64::from(tree::pattern(round, 1)[0]));
        if round % 6 == 5 {
            store.state().faults.clear();
            ends_well(&hydrate(&store, &folder).output().unwrap());
            assert!(files(&folder) == whole);
            assert_eq!(fs::read_dir(folder.join(".gpunvme-stage/partial")).unwrap().count(), 0);
            fs::remove_dir_all(&folder).unwrap();
        }
    }
}
