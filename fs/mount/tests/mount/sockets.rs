//! Registration sockets, and the folder in which they are.

use std::fs;
use std::io::Read;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};

use crate::Volume;

#[test]
fn the_socket_of_a_daemon_that_was_killed_is_removed() {
    let Some(volume) = Volume::new() else { return };
    let volume = volume.mounted(&[]);
    let socket = listening_socket(volume.daemon().unwrap());
    volume.signal(Signal::KILL);
    volume.wait_for_daemon();
    // A killed daemon removes nothing; any mount tidies up, one of another test too.
    let other = Volume::new().unwrap().mounted(&[]);
    assert!(!socket.exists(), "{}", socket.display());
    other.umount();
}

/// What a daemon in the foreground logs until its mount is live.
fn until_mounted(log: &mut impl Read) -> String {
    let mut said = String::new();
    while !said.contains(" mounted on ") {
        let mut part = [0; 256];
        let count = log.read(&mut part).unwrap();
        assert_ne!(count, 0, "{said}");
        said.push_str(&String::from_utf8_lossy(&part[..count]));
    }
    said
}

#[test]
fn mounts_of_copies_at_one_path_have_a_socket_each() {
    let Some(volume) = Volume::new() else { return };
    let copy = volume.dir.path().join("copy");
    fs::copy(volume.image(), &copy).unwrap();
    let volume = volume.mounted(&[]);
    let first = listening_socket(volume.daemon().unwrap());
    // In a mount namespace of its own the copy has the same path. The namespace goes with it.
    let script = "mount --bind \"$2\" \"$3\"; exec \"$1\" \"$3\" \"$4\" --foreground";
    let mut second = Command::new("unshare")
        .args(["--mount", "sh", "-e", "-c", script, "sh", env!("CARGO_BIN_EXE_mount-gpunvme")])
        .args([copy, volume.image(), volume.mnt()])
        .stdin(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let process = Pid::from_child(&second);
    let mut stderr = second.stderr.take().unwrap();
    let mut log = until_mounted(&mut stderr);
    let other = listening_socket(process);
    kill_process(process, Signal::TERM).unwrap();
    let _ = stderr.read_to_string(&mut log);
    assert!(second.wait().unwrap().success(), "{log}");
    assert_ne!(first, other);
    assert!(first.exists() && !other.exists());
    volume.umount();
}

#[test]
fn nothing_in_the_folder_of_sockets_holds_up_a_mount() {
    let Some(volume) = Volume::new() else { return };
    let (image, mnt) = (volume.image(), volume.mnt());
    let said = |preparation: &str| {
        let script = format!("{preparation} exec timeout -s KILL 60 \"$@\" --foreground");
        let mut mount = Command::new("unshare")
            .args(["--mount", "sh", "-e", "-c", &script, "sh", env!("CARGO_BIN_EXE_mount-gpunvme")])
            .args([&image, &mnt])
            .stdin(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut stderr = mount.stderr.take().unwrap();
        let mut log = until_mounted(&mut stderr);
        let namespace = format!("--mount=/proc/{}/ns/mnt", volume.daemon().unwrap().as_raw_nonzero());
        let mode = Command::new("nsenter").args([&namespace, "stat", "-c", "%a", "/run/gpunvme"]).output().unwrap();
        volume.signal(Signal::TERM);
        let _ = stderr.read_to_string(&mut log);
        assert!(mount.wait().unwrap().success(), "{log}");
        (log, String::from_utf8(mode.stdout).unwrap().trim().to_owned())
    };
    let hidden = "mount -t tmpfs -o mode=755 tmpfs /run;";
    let (log, mode) = said(&format!("{hidden} umask 0;"));
    assert_eq!((mode.as_str(), log.contains("registration socket")), ("755", false), "{log}");
    let (log, mode) = said(&format!("{hidden} umask 077;"));
    assert_eq!((mode.as_str(), log.contains("registration socket")), ("755", false), "{log}");
    let (log, _) = said(&format!("{hidden} mkdir /run/gpunvme; mkfifo /run/gpunvme/lock /run/gpunvme/x.sock;"));
    assert!(!log.contains("registration socket"), "{log}");
    let (log, _) = said(&format!("{hidden} mkdir -m 777 /run/gpunvme;"));
    assert!(log.contains("there is no registration socket: others than its owner may write to /run/gpunvme"), "{log}");
    let (log, _) = said(&format!("{hidden} mkdir /run/gpunvme; chown 1000 /run/gpunvme;"));
    assert!(log.contains("there is no registration socket: /run/gpunvme belongs to the user 1000"), "{log}");
    let (log, _) = said(&format!("{hidden} ln -s /var/tmp /run/gpunvme;"));
    assert!(log.contains("there is no registration socket: /run/gpunvme is a link or a file"), "{log}");
    let (log, _) = said(&format!("{hidden} mount -o remount,ro /run;"));
    assert!(log.contains("there is no registration socket: /run/gpunvme: Read-only file system"), "{log}");
}

/// The path of the one socket at which a process listens.
fn listening_socket(process: Pid) -> PathBuf {
    let descriptors = fs::read_dir(format!("/proc/{}/fd", process.as_raw_nonzero())).unwrap().flatten();
    let targets: Vec<_> = descriptors.filter_map(|entry| fs::read_link(entry.path()).ok()).collect();
    // Num RefCount Protocol Flags Type St Inode Path
    let table = fs::read_to_string("/proc/net/unix").unwrap();
    let mut paths = table.lines().filter_map(|line| {
        let mut fields = line.split_whitespace().skip(6);
        let inode = PathBuf::from(format!("socket:[{}]", fields.next()?));
        let path = fields.next()?;
        targets.contains(&inode).then(|| PathBuf::from(path))
    });
    // The kernel shows the name that it was bound to, until it listened.
    let path = paths.next().expect("the mount has a socket").with_extension("sock");
    assert!(path.exists(), "{}", path.display());
    path
}
