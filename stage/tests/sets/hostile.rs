//! Stores that lie, and other users who were in the folder before.

use crate::hydrate::{hydrate, stored};
use crate::store::Store;
use crate::{ends_well, fails, files, gpunvme, set};
use gpunvme_tests::mounted::Mounted;
use gpunvme_tests::{needs_mount, programs};
use std::fs;
use std::os::unix::fs::{FileTypeExt, PermissionsExt, symlink};
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

/// A command that does not wait for ever, which pipes in place of files would have it do.
fn ended(command: &mut Command) -> Output {
    let mut process = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let end = Instant::now() + Duration::from_secs(60);
    while process.try_wait().unwrap().is_none() {
        assert!(Instant::now() < end, "it waits");
        std::thread::sleep(Duration::from_millis(5));
    }
    process.wait_with_output().unwrap()
}

fn evict(folder: &Path) -> Command {
    let mut command = programs::command("gpunvme");
    command.args(["evict", "--quota", "0"]).arg(folder);
    command
}

/// Puts something in the place of one of the program's own files, all of which lead to `victim`.
type Plant = fn(&Path, &Path);

#[test]
fn what_others_planted_in_a_set_is_not_followed() {
    needs_mount!();
    let (volume, store) = (Mounted::new(), stored(20));
    let victim = volume.path("victim");
    let link: Plant = |place, victim| symlink(victim, place).unwrap();
    let name: Plant = |place, victim| fs::hard_link(victim, place).unwrap();
    let pipe: Plant = |place, _| assert!(Command::new("mkfifo").arg(place).status().unwrap().success());
    let publish = |folder: &Path| {
        let mut command = gpunvme("publish");
        store.found_by(command.arg(folder).arg("s3://bucket/published"));
        command
    };
    for (file, plants) in [("manifest", [link, name, pipe]), ("lock", [link, name, pipe]), ("published", [link, name, pipe])] {
        for (number, plant) in plants.into_iter().enumerate() {
            let folder = volume.path(format!("sets/{file}{number}"));
            ends_well(&hydrate(&store, &folder).output().unwrap());
            fs::write(&victim, "of another user, without an end of line").unwrap();
            let place = folder.join(".gpunvme-stage").join(file);
            let _ = fs::remove_file(&place);
            plant(&place, &victim);
            let mut commands = Vec::new();
            commands.extend((file != "manifest").then(|| publish(&folder)));
            commands.extend((file != "published").then(|| hydrate(&store, &folder)));
            for command in &mut commands {
                let said = fails(&ended(command));
                let names_it = said.contains(&*place.to_string_lossy()) && said.contains("none of this program's files");
                assert!(names_it, "{file} {number}: {said}");
            }
            ends_well(&ended(&mut evict(&volume.path("sets"))));
            assert_eq!(fs::read(&victim).unwrap(), b"of another user, without an end of line", "{file} {number}");
            let planted = place.symlink_metadata().unwrap().file_type();
            assert!(planted.is_symlink() || planted.is_fifo() || number == 1, "{file} {number}");
            fs::remove_dir_all(&folder).unwrap();
        }
    }
    // What a manifest is written to before it gets its name.
    let folder = volume.path("sets/new");
    ends_well(&hydrate(&store, &folder).output().unwrap());
    symlink(&victim, folder.join(".gpunvme-stage/manifest.new")).unwrap();
    ends_well(&ended(&mut evict(&volume.path("sets"))));
    assert_eq!((fs::read(&victim).unwrap().len(), files(&folder).len()), (39, 0));
    // The folder itself, or that of partial files.
    for place in [".gpunvme-stage", ".gpunvme-stage/partial"] {
        let (folder, elsewhere) = (volume.path("linked"), volume.path("elsewhere"));
        fs::create_dir_all(elsewhere.join("partial")).unwrap();
        fs::write(elsewhere.join("partial/mine"), "mine").unwrap();
        fs::write(elsewhere.join("mine"), "mine").unwrap();
        fs::create_dir_all(folder.join(place).parent().unwrap()).unwrap();
        symlink(&elsewhere, folder.join(place)).unwrap();
        fails(&ended(&mut hydrate(&store, &folder)));
        ends_well(&ended(&mut evict(&folder)));
        assert_eq!(files(&elsewhere).into_keys().collect::<Vec<_>>(), ["mine", "partial/mine"], "{place}");
        fs::remove_dir_all(&folder).unwrap();
    }
}

#[test]
fn eviction_follows_no_link_to_sets_elsewhere() {
    needs_mount!();
    let (volume, store) = (Mounted::new(), stored(21));
    ends_well(&hydrate(&store, &volume.path("elsewhere/set")).output().unwrap());
    fs::create_dir(volume.path("sets")).unwrap();
    symlink(volume.path("elsewhere"), volume.path("sets/link")).unwrap();
    symlink(volume.path("elsewhere/set"), volume.path("sets/set")).unwrap();
    ends_well(&ended(&mut evict(&volume.path("sets"))));
    assert_eq!(files(&volume.path("elsewhere/set")), set(21));
}

#[test]
fn what_is_not_whole_counts_and_goes_before_anything_pinned() {
    needs_mount!();
    let (volume, store) = (Mounted::new(), stored(22));
    ends_well(&hydrate(&store, &volume.path("sets/pinned")).arg("--pin").output().unwrap());
    let torn = volume.path("sets/torn");
    store.state().refuse_reads_after = Some(8);
    fails(&hydrate(&store, &torn).output().unwrap());
    store.state().refuse_reads_after = None;
    let status = || {
        let mut command = programs::command("gpunvme");
        let json = ends_well(&command.args(["--json", "stage", "status"]).arg(volume.path("sets")).output().unwrap());
        let sets: Vec<serde_json::Value> = serde_json::from_str(&json).unwrap();
        sets.into_iter().find(|set| set["folder"] == torn.to_str().unwrap()).unwrap()["partial"].as_u64().unwrap()
    };
    assert!(status() > 0, "a file of several parts is there in part");
    let said = fails(&ended(&mut evict(&volume.path("sets"))));
    assert!(said.contains("over the quota of 0"), "{said}");
    assert_eq!((status(), files(&volume.path("sets/pinned"))), (0, set(22)));
    ends_well(&hydrate(&store, &torn).output().unwrap());
    assert_eq!(files(&torn), set(22));
}

#[test]
fn names_that_differ_by_case_or_form_are_different_files_and_markers_are_folders() {
    needs_mount!();
    let (volume, store) = (Mounted::new(), Store::new());
    let long = "n".repeat(255);
    let names = ["Case", "case", "\u{e4}", "a\u{308}", "sub", "sub/deep", "sub/deep/file", "a&b <c>", "per%cent", "q?#", &long];
    let bytes = |name: &str| if name == "sub" || name == "sub/deep" { Vec::new() } else { name.as_bytes().to_vec() };
    let key = |name: &str| format!("set/{name}{}", if bytes(name).is_empty() { "/" } else { "" });
    store.state().objects = names.iter().map(|name| (key(name), bytes(name))).collect();
    ends_well(&hydrate(&store, &volume.path("set")).output().unwrap());
    let wanted = names.iter().filter(|name| !bytes(name).is_empty()).map(|name| (name.to_string(), bytes(name)));
    assert_eq!(files(&volume.path("set")), wanted.collect());
    for (wrong, why) in [
        (vec!["a", "a/b"], "also the folder of others"),
        (vec!["x".repeat(256).as_str()], "longer than 255 bytes"),
        (vec!["x/".repeat(1600).as_str()], "longer than 3000 bytes"),
    ] {
        store.state().objects = wrong.iter().map(|name| (format!("set/{name}x"), b"x".to_vec())).collect();
        if wrong.len() == 2 {
            store.state().objects = wrong.iter().map(|name| (format!("set/{name}"), b"x".to_vec())).collect();
        }
        let said = fails(&hydrate(&store, &volume.path("wrong")).output().unwrap());
        assert!(said.contains(why) && !volume.path("wrong").exists(), "{said}");
    }
}

#[test]
fn a_store_that_lies_about_sizes_or_sends_elsewhere_is_an_error() {
    needs_mount!();
    let (volume, store) = (Mounted::new(), stored(23));
    for lies in [vec![("one", u64::MAX), ("large", u64::MAX)], vec![("one", 1 << 62)]] {
        store.state().lies = lies.iter().map(|(name, size)| (format!("set/{name}"), *size)).collect();
        for dry in [&["--dry-run"][..], &[]] {
            let output = hydrate(&store, &volume.path("set")).args(dry).output().unwrap();
            let said = if dry.is_empty() { fails(&output) } else { ends_well(&output) };
            assert!(said.contains("are missing") || !dry.is_empty(), "{said}");
        }
    }
    // Shorter or longer than it is: what counts is what comes.
    for size in [0, 1, 2_999_999, 3_000_001] {
        store.state().lies = [("set/large".to_owned(), size)].into();
        let folder = volume.path(format!("lie{size}"));
        let output = hydrate(&store, &folder).output().unwrap();
        let there = files(&folder);
        assert!(there.get("large").is_none_or(|bytes| bytes.len() as u64 == size && size == 0 || *bytes == set(23)["large"]));
        assert!(!output.status.success() || there.len() == 6, "{size}");
    }
    store.state().lies.clear();
    // In a circle.
    let place = store.url("/bucket/set/one");
    store.state().redirect = Some(place);
    let said = fails(&hydrate(&store, &volume.path("circle")).args(["--include", "one"]).output().unwrap());
    assert!(said.contains("one: ") && !files(&volume.path("circle")).contains_key("one"), "{said}");
}

/// Error pages of stores are shown, and files have any names.
#[test]
fn no_message_commands_the_terminal() {
    needs_mount!();
    let (volume, store) = (Mounted::new(), stored(27));
    store.state().objects.insert("set/\u{1b}]0;title\u{7}".into(), b"1".to_vec());
    let said = fails(&hydrate(&store, &volume.path("set")).output().unwrap());
    assert!(said.contains("]0;title") && !said.trim_end().contains(char::is_control), "{said:?}");
}

/// A reader that has gone is no reason to stop in the middle.
#[test]
fn the_files_arrive_though_nothing_that_is_said_does() {
    needs_mount!();
    let store = stored(28);
    let elsewhere = tempfile::tempdir_in("/var/tmp").unwrap();
    let folder = elsewhere.path().join("set");
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    // It says that this is no mount of ours.
    let status = hydrate(&store, &folder).stderr(writer).status().unwrap();
    assert!(status.success(), "{status}");
    assert_eq!(files(&folder), set(28));
}

/// flock(2) takes a descriptor that only reads.
#[test]
fn a_user_who_may_only_read_holds_no_lock() {
    needs_mount!();
    let (volume, store) = (Mounted::new(), stored(29));
    let folder = volume.path("set");
    ends_well(&hydrate(&store, &folder).output().unwrap());
    let mode = fs::metadata(folder.join(".gpunvme-stage/lock")).unwrap().permissions().mode();
    assert_eq!(mode & 0o077, 0, "{mode:o}");
}

/// It would be a set in the set, with files and a pin that the store says.
#[test]
fn a_store_makes_no_sets_below_a_set() {
    needs_mount!();
    let (volume, store) = (Mounted::new(), stored(30));
    store.state().objects.insert("set/sub/.gpunvme-stage/manifest".into(), b"{}".to_vec());
    ends_well(&hydrate(&store, &volume.path("set")).output().unwrap());
    assert!(!volume.path("set/sub/.gpunvme-stage").exists());
}

#[test]
fn secrets_are_in_no_message_and_no_file() {
    needs_mount!();
    let (volume, store) = (Mounted::new(), stored(24));
    let folder = volume.path("set");
    ends_well(&hydrate(&store, &folder).output().unwrap());
    fs::remove_file(folder.join("one")).unwrap();
    for refuse in [None, Some(0)] {
        store.state().refuse_change = refuse;
        store.state().refuse_reads_after = refuse.map(|_| 0);
        let mut publish = gpunvme("publish");
        store.found_by(publish.arg(&folder).arg("s3://bucket/other"));
        for mut command in [publish, hydrate(&store, &folder)] {
            command.env("AWS_SESSION_TOKEN", "TOKENOFTHETEST").env("RUST_LOG", "trace");
            let output = ended(&mut command);
            assert_eq!(output.status.success(), refuse.is_none());
            let said = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
            assert!(!said.contains("OFTHETEST"), "{said}");
        }
        for file in ["manifest", "published"] {
            assert!(!fs::read_to_string(folder.join(".gpunvme-stage").join(file)).unwrap().contains("OFTHETEST"));
        }
        let _ = fs::remove_file(folder.join("one"));
    }
    for url in [
        "https://host/set?X-Amz-Signature=HUSH",
        "https://name:HUSH@host/set",
        "s3://bucket/set?sig=HUSH",
        "s3://bucket/set#HUSH",
        "https://host/set#HUSH",
    ] {
        let said = fails(&gpunvme("hydrate").arg(url).arg(&folder).output().unwrap());
        assert!(!said.contains("HUSH") && said.contains("a query or a fragment"), "{url}: {said}");
    }
}

#[test]
fn two_publishers_of_one_place_make_no_mixture() {
    needs_mount!();
    let (volume, store) = (Mounted::new(), Store::new());
    for (name, seed) in [("a", 30), ("b", 31)] {
        for (file, bytes) in set(seed) {
            let path = volume.path(name).join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, bytes).unwrap();
        }
    }
    for round in 0..4 {
        store.state().part_takes = Duration::from_millis(round * 7);
        let publish = |name: &str| {
            let mut command = gpunvme("publish");
            let _ = fs::remove_file(volume.path(name).join(".gpunvme-stage/published"));
            store.found_by(command.arg(volume.path(name)).arg("s3://bucket/set"));
            command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
        };
        let (mut one, mut other) = (publish("a"), publish("b"));
        let done = [one.wait().unwrap().success(), other.wait().unwrap().success()];
        let folder = volume.path(format!("set{round}"));
        let output = hydrate(&store, &folder).arg("--published").output().unwrap();
        if output.status.success() {
            assert!([set(30), set(31)].contains(&files(&folder)), "round {round}: {done:?}");
        }
        // Alone, either makes it whole again.
        assert!(publish("a").wait().unwrap().success());
        let folder = volume.path(format!("again{round}"));
        ends_well(&hydrate(&store, &folder).arg("--published").output().unwrap());
        assert_eq!(files(&folder), set(30));
    }
}
