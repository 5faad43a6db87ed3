//! `hydrate --quota`: others go before anything is fetched, and the sets never hold more.

use crate::hydrate::{hydrate, stored};
use crate::store::{Fault, Store};
use crate::{ends_well, fails, files, set};
use gpunvme_tests::mounted::Mounted;
use gpunvme_tests::{needs_mount, tree};
use rustix::process::{Pid, Signal, kill_process};
use std::fs;
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

fn size() -> u64 {
    set(1).values().map(|bytes| bytes.len() as u64).sum()
}

/// A command that keeps a quota of the sets in the folder above.
fn keeping(store: &Store, folder: &Path, quota: u64) -> Command {
    let mut command = hydrate(store, folder);
    command.args(["--quota", &quota.to_string()]);
    command
}

/// Bytes of all files below a folder, whole or not, but for the program's notes. Those with names
/// count first, so that none counts twice that gets its name meanwhile.
fn held(folder: &Path) -> u64 {
    let (mut sum, mut partial) = (0, None);
    for entry in fs::read_dir(folder).into_iter().flatten().map(Result::unwrap) {
        let Ok(found) = entry.path().symlink_metadata() else { continue };
        match entry.file_name().to_str().unwrap() {
            ".gpunvme-stage" => partial = Some(entry.path().join("partial")),
            _ if found.is_dir() => sum += held(&entry.path()),
            _ => sum += found.len(),
        }
    }
    for entry in partial.and_then(|partial| fs::read_dir(partial).ok()).into_iter().flatten().map(Result::unwrap) {
        sum += entry.metadata().map_or(0, |found| found.len().min(found.blocks() * 512));
    }
    sum
}

#[test]
fn a_quota_makes_room_before_anything_is_fetched() {
    needs_mount!();
    let (volume, store) = (Mounted::new(), stored(30));
    let folder = |name: &str| volume.path(format!("sets/{name}"));
    for name in ["a", "b", "c"] {
        ends_well(&keeping(&store, &folder(name), 3 * size()).output().unwrap());
    }
    ends_well(&hydrate(&store, &folder("a")).output().unwrap());
    let said = ends_well(&keeping(&store, &folder("d"), 3 * size()).arg("--dry-run").output().unwrap());
    assert!(said.contains(&format!("to be evicted: 6 files of 1 sets, {} bytes", size())), "{said}");
    assert!(!folder("d").exists() && files(&folder("b")) == set(30), "a dry run removes nothing");
    let said = ends_well(&keeping(&store, &folder("d"), 3 * size()).output().unwrap());
    assert!(said.contains(&format!("evicted: 6 files of 1 sets, {} bytes", size())), "{said}");
    let there = ["a", "b", "c", "d"].map(|name| files(&folder(name)).len());
    assert_eq!(there, [6, 0, 6, 6], "the one that was not used for the longest time went");

    // What is there needs no more room, and only what is missing counts.
    ends_well(&keeping(&store, &folder("d"), 1001).output().unwrap());
    fs::remove_file(folder("d").join("one")).unwrap();
    assert!(!ends_well(&keeping(&store, &folder("d"), 3 * size()).output().unwrap()).contains("evicted"));

    // Elsewhere, the sets do not count unless they are said to.
    let deep = volume.path("sets/more/deep");
    assert!(!ends_well(&keeping(&store, &deep, size()).output().unwrap()).contains("evicted"));
    let said =
        ends_well(&keeping(&store, &volume.path("sets/e"), 4 * size()).arg("--sets").arg(volume.path("sets")).output().unwrap());
    assert!(said.contains("evicted: 6 files of 1 sets"), "{said}");
    let said = fails(&keeping(&store, &volume.path("f"), size()).arg("--sets").arg(volume.path("sets")).output().unwrap());
    assert!(said.contains("is not below") && said.contains("--sets"), "{said}");
}

#[test]
fn what_the_quota_cannot_hold_is_refused_and_nothing_goes_or_comes() {
    needs_mount!();
    let (volume, store) = (Mounted::new(), stored(31));
    let folder = |name: &str| volume.path(format!("sets/{name}"));
    let refused = |output: &Output| {
        let said = fails(output);
        assert!(said.contains("the quota is") && said.contains("raise --quota"), "{said}");
        said
    };
    ends_well(&hydrate(&store, &folder("pinned")).arg("--pin").output().unwrap());
    ends_well(&hydrate(&store, &folder("other")).output().unwrap());
    let reads = store.state().reads.clone();
    for arguments in [&[][..], &["--dry-run"]] {
        let said = refused(&keeping(&store, &folder("new"), 2 * size() - 1).args(arguments).output().unwrap());
        let (comes, most) = (size(), 2 * size() - 1);
        assert!(said.contains(&format!("comes to {comes} bytes, and the quota is {most}: {comes} bytes")), "{said}");
    }
    refused(&keeping(&store, &volume.path("empty/new"), size() - 1).arg("--dry-run").output().unwrap());
    assert_eq!((files(&folder("other")), files(&folder("new")).len()), (set(31), 0));
    assert_eq!(store.state().reads, reads, "nothing was fetched");

    // What is open does not go either, which is seen when it is to go.
    let open = fs::File::open(folder("other").join("large")).unwrap();
    let said = refused(&keeping(&store, &folder("new"), 2 * size()).output().unwrap());
    assert!(said.contains(&format!("({} bytes were evicted)", size() - 3_000_000)), "{said}");
    assert_eq!(store.state().reads, reads, "nothing was fetched");
    drop(open);
    ends_well(&keeping(&store, &folder("new"), 2 * size()).output().unwrap());
    assert_eq!((files(&folder("pinned")), files(&folder("new"))), (set(31), set(31)));

    // An object that grows while it is fetched has no room either.
    let large = tree::pattern(7, 3_500_000);
    store.state().change = Some(("set/large".into(), 3, large.clone()));
    refused(&keeping(&store, &folder("again"), 2 * size()).output().unwrap());
    assert!(held(&volume.path("sets")) <= 2 * size());
    ends_well(&keeping(&store, &folder("again"), 2 * size() + 500_000).output().unwrap());
    assert!(files(&folder("again"))["large"] == large);
}

#[test]
fn what_others_planted_leads_no_reservation_elsewhere() {
    needs_mount!();
    let (volume, store) = (Mounted::new(), stored(34));
    let (sets, victim) = (volume.path("sets"), volume.path("victim"));
    fs::write(&victim, "of another user").unwrap();
    for name in ["a", "b"] {
        ends_well(&hydrate(&store, &sets.join(name)).output().unwrap());
        symlink(&victim, sets.join(name).join(".gpunvme-stage/reserved")).unwrap();
    }
    fs::remove_file(sets.join("b/one")).unwrap();
    let said = fails(&keeping(&store, &sets.join("b"), 9 * size()).output().unwrap());
    assert!(said.contains("reserved is none of this program's files"), "{said}");
    // In another's set it does not stand in the quota's way.
    let said = keeping(&store, &sets.join("c"), 2 * size()).output().unwrap();
    assert!(ends_well(&said).contains("evicted: 6 files of 1 sets"), "{said:?}");
    fs::remove_file(sets.join(".gpunvme-stage/quota")).unwrap();
    symlink(&victim, sets.join(".gpunvme-stage/quota")).unwrap();
    let said = fails(&keeping(&store, &sets.join("d"), 9 * size()).output().unwrap());
    assert!(said.contains("quota is none of this program's files"), "{said}");
    assert_eq!(fs::read(&victim).unwrap(), b"of another user");
}

#[test]
fn sets_that_come_at_once_keep_the_quota_together() {
    needs_mount!();
    let (volume, store) = (Mounted::new(), stored(32));
    let (sets, quota) = (volume.path("sets"), 2 * size());
    store.state().faults = vec![Fault::Slow(30); 300];
    let mut all: Vec<_> = ["a", "b", "c"].iter().map(|name| begun(&mut keeping(&store, &sets.join(name), quota))).collect();
    while all.iter_mut().any(|process| process.try_wait().unwrap().is_none()) {
        let processes: Vec<_> = all.iter().map(Pid::from_child).collect();
        let running: Vec<_> = processes.into_iter().filter(|&pid| kill_process(pid, Signal::STOP).is_ok()).collect();
        let held = held(&sets);
        for pid in running {
            let _ = kill_process(pid, Signal::CONT);
        }
        assert!(held <= quota, "{held} bytes of {quota}");
        std::thread::sleep(Duration::from_millis(5));
    }
    // At the same time there is room for two of them; one that comes later may have another go.
    let whole = ["a", "b", "c"].iter().filter(|name| files(&sets.join(name)) == set(32)).count();
    let done =
        all.into_iter().filter_map(|process| Some(process.wait_with_output().unwrap()).filter(|done| done.status.success()));
    assert!(whole == 2 && done.count() >= 2);
}

fn begun(command: &mut Command) -> Child {
    command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
}

/// `scripts/campaign stage` has more of them (GPUNVME_STAGE_KILLS).
#[test]
fn the_quota_is_kept_whenever_the_program_is_killed() {
    needs_mount!();
    let kills: u64 = std::env::var("GPUNVME_STAGE_KILLS").map_or(16, |kills| kills.parse().unwrap());
    let (volume, store) = (Mounted::new(), stored(33));
    let (sets, quota) = (volume.path("sets"), 2 * size() + 100_000);
    for round in 0..kills {
        let folder = sets.join(format!("{}", round / 3 % 4));
        store.state().faults = vec![Fault::Slow(5); 20];
        let mut process = begun(&mut keeping(&store, &folder, quota));
        let end = Instant::now() + Duration::from_millis(10 + u64::from(tree::pattern(round, 1)[0]));
        while Instant::now() < end && process.try_wait().unwrap().is_none() {
            std::thread::sleep(Duration::from_millis(1));
        }
        process.kill().unwrap();
        process.wait().unwrap();
        let held = held(&sets);
        assert!(held <= quota, "{held} bytes of {quota} after {round} kills");
        if round % 4 == 3 {
            store.state().faults.clear();
            ends_well(&keeping(&store, &folder, quota).output().unwrap());
            assert!(files(&folder) == set(33) && self::held(&sets) <= quota);
        }
    }
}
