//! `gpunvme top`: what processes do with files, counted while it is watched.

use std::fs;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::sync::atomic::{AtomicBool, Ordering};

use gpunvme::{ActivityEntry, Buffer, File, Mount, Require, Route, Segment};
use gpunvme_tests::mounted::{Mounted, text};
use gpunvme_tests::{needs_mount, programs};
use serde_json::Value;

const MIB: usize = 1 << 20;

/// What is known of a file, over all threads.
fn of_file(mount: &Mount, ino: u64) -> ActivityEntry {
    let mut sum = ActivityEntry::default();
    for entry in mount.activity().unwrap().entries.iter().filter(|entry| entry.ino == ino) {
        sum.requests += entry.requests;
        sum.transfers += entry.transfers;
        sum.read += entry.read;
        sum.written += entry.written;
        sum.time += entry.time;
    }
    sum
}

#[test]
fn requests_and_transfers_are_counted_for_their_process_and_file() {
    needs_mount!();
    let volume = Mounted::new();
    let path = volume.path("file");
    fs::write(&path, vec![1; MIB]).unwrap();
    let ino = fs::metadata(&path).unwrap().ino();
    let mount = Mount::open(volume.root()).unwrap();
    assert_eq!(of_file(&mount, ino), ActivityEntry::default(), "nobody looked");
    fs::write(&path, vec![2; MIB]).unwrap();
    let written = of_file(&mount, ino);
    assert!(written.requests > 0 && written.transfers == 0 && !written.time.is_zero(), "{written:?}");
    assert_eq!((written.read, written.written), (0, MIB as u64));

    let file = File::open(&path).unwrap();
    let mut buffer = mount.register(Buffer::memfd(MIB).unwrap()).unwrap();
    let segment = Segment { file_offset: 0, buffer_offset: 0, len: MIB as u64 };
    let by_the_daemon = Require { route: Some(Route::Host), direct: false };
    file.read_requiring(&mut buffer, &[segment], by_the_daemon).unwrap();
    let both = of_file(&mount, ino);
    assert_eq!((both.transfers, both.read, both.written), (1, MIB as u64, MIB as u64));
    let entries = mount.activity().unwrap().entries;
    let own = entries.iter().filter(|entry| entry.ino == ino && entry.transfers > 0);
    assert_eq!(own.map(|entry| entry.thread).collect::<Vec<_>>(), [std::process::id()]);
}

#[test]
fn a_table_shows_processes_and_files_and_users_see_their_own() {
    needs_mount!();
    let volume = Mounted::new();
    let path = volume.path("busy");
    fs::set_permissions(volume.root(), fs::Permissions::from_mode(0o755)).unwrap();
    let over = AtomicBool::new(false);
    let file = fs::File::create(&path).unwrap();
    let write = || {
        while !over.load(Ordering::Relaxed) {
            file.write_all_at(&[7; 64 << 10], 0).unwrap();
        }
    };
    let top = |user: Option<u32>, arguments: &[&str]| {
        let mut top = programs::command("gpunvme");
        top.args(["--json", "top", "--count", "2"]).args(arguments).arg(volume.root());
        if let Some(user) = user {
            top.uid(user).gid(user);
        }
        let output = top.output().unwrap();
        assert!(output.status.success(), "{}", text(&output));
        let printed = String::from_utf8(output.stdout).unwrap();
        let last: Value = serde_json::from_str(printed.lines().last().unwrap()).unwrap();
        last["entries"].as_array().unwrap().clone()
    };
    let [processes, files, of_another] = std::thread::scope(|threads| {
        threads.spawn(write);
        let seen = [top(None, &[]), top(None, &["--by", "file"]), top(Some(12345), &[])];
        over.store(true, Ordering::Relaxed);
        seen
    });
    let own = processes.iter().find(|line| line["process"] == std::process::id());
    let own = own.unwrap_or_else(|| panic!("{processes:?}"));
    assert_eq!(own["user"], 0);
    assert!(own["written"].as_u64().unwrap() > 0 && own["requests"].as_u64().unwrap() > 0, "{own}");
    assert!(own["command"].as_str().unwrap().starts_with("mounted"), "{own}");
    assert!(files.iter().any(|line| line["path"] == path.to_str().unwrap()), "{files:?}");
    assert!(of_another.iter().all(|line| line["user"] == 12345), "{of_another:?}");
}
