//! `gpunvme sync`: what was done before by any process is there after the daemon was killed.

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Output;

use gpunvme_tests::mounted::{Mounted, text};
use gpunvme_tests::sys::Mapping;
use gpunvme_tests::{needs_mount, programs, tree};
use rustix::process::Signal;

/// Runs it as a user without rights.
fn sync(dir: &Path) -> Output {
    programs::command("gpunvme").args(["sync".as_ref(), dir.as_os_str()]).uid(65534).gid(65534).output().unwrap()
}

#[test]
fn a_sync_of_the_mount_is_one_of_all_files() {
    needs_mount!();
    let volume = Mounted::new();
    let (large, small) = (tree::pattern(1, 9 << 20), tree::pattern(2, 700));
    fs::create_dir_all(volume.path("a/b")).unwrap();
    fs::write(volume.path("a/large"), &large).unwrap();
    for number in 0..300 {
        fs::write(volume.path(format!("a/b/{number}")), &small).unwrap();
    }
    fs::rename(volume.path("a/b/299"), volume.path("renamed")).unwrap();
    fs::remove_file(volume.path("a/b/298")).unwrap();
    let mut open = File::create(volume.path("open")).unwrap();
    open.write_all(&small).unwrap();
    // Stored into a shared mapping and written back.
    let mapped = OpenOptions::new().read(true).write(true).create_new(true).open(volume.path("mapped")).unwrap();
    mapped.set_len(1 << 20).unwrap();
    let memory = Mapping::shared(&mapped, 1 << 20).unwrap();
    memory.write(4096, &large[..1 << 19]);
    memory.sync().unwrap();

    let synced = sync(&volume.path("a/b"));
    assert!(synced.status.success() && synced.stdout.is_empty() && synced.stderr.is_empty(), "{}", text(&synced));
    let (_, dead) = volume.signal(Signal::KILL);
    dead.check();
    let volume = dead.mount();
    assert!(fs::read(volume.path("a/large")).unwrap() == large);
    for number in 0..298 {
        assert!(fs::read(volume.path(format!("a/b/{number}"))).unwrap() == small, "{number}");
    }
    assert!(fs::read(volume.path("renamed")).unwrap() == small && fs::read(volume.path("open")).unwrap() == small);
    assert_eq!(fs::read_dir(volume.path("a/b")).unwrap().count(), 298);
    assert!(fs::read(volume.path("mapped")).unwrap()[4096..][..1 << 19] == large[..1 << 19]);
}

#[test]
fn a_sync_where_there_is_no_mount_says_so() {
    needs_mount!();
    let elsewhere = gpunvme_tests::scratch_dir();
    let refused = programs::command("gpunvme").arg("sync").arg(elsewhere.path()).output().unwrap();
    assert_eq!(refused.status.code(), Some(1));
    assert!(text(&refused).contains(&elsewhere.path().display().to_string()), "{}", text(&refused));
    let volume = Mounted::new();
    let told = programs::command("gpunvme").args(["--json", "sync"]).arg(volume.root()).output().unwrap();
    assert!(told.status.success(), "{}", text(&told));
    let told: serde_json::Value = serde_json::from_slice(&told.stdout).unwrap();
    assert_eq!(told["synced"][0], volume.root().to_str().unwrap());
    let volume = volume.unmount().mount_with("ro");
    assert!(sync(&volume.root()).status.success());
}
