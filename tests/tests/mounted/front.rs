//! Tests of the duties that the kernel leaves to the front end of a FUSE filesystem, where it would
//! not notice a mistake.

use std::fs::{self, File, OpenOptions};
use std::io::{IoSlice, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::time::{Duration, Instant};

use gpunvme_tests::direct::Buffer;
use gpunvme_tests::mounted::{Mounted, is_mounted};
use gpunvme_tests::{needs_mount, programs, sys, tree};
use rustix::fs::SeekFrom;
use rustix::io::{Errno, ReadWriteFlags, pwritev2};

/// Neither root nor a group of any user.
const USER: u32 = 4711;
/// linux/fs.h.
const FS_IOC_GETFLAGS: u32 = 0x8008_6601;

#[test]
fn set_user_id_bits_go_when_somebody_else_could_have_changed_the_file() {
    needs_mount!();
    let volume = Mounted::new();
    fs::set_permissions(volume.root(), fs::Permissions::from_mode(0o777)).unwrap();
    let path = volume.path("program");
    let after = |mode: u32, user: u32, script: &str| {
        let _ = fs::remove_file(&path);
        fs::write(&path, "content").unwrap();
        chown(&path, Some(USER), Some(USER)).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
        let mut shell = Command::new("sh");
        let done = shell.args(["-c", script]).current_dir(volume.root()).uid(user).gid(user).status().unwrap();
        assert!(done.success(), "{script}");
        fs::metadata(&path).unwrap().mode() & 0o7777
    };
    for script in [
        "echo more >> program",
        ": > program",
        "truncate -s 3 program",
        "truncate -s 9000 program",
        "fallocate -l 9000 program",
        "dd if=/dev/zero of=program bs=4096 count=1 conv=notrunc oflag=direct status=none",
    ] {
        assert_eq!(after(0o6755, USER, script), 0o755, "{script}, by its owner");
        assert_eq!(after(0o6755, 0, script), 0o6755, "{script}, by root");
        assert_eq!(after(0o2644, USER, script), 0o2644, "{script}: a set-group-id bit that is none");
    }
    assert_eq!(after(0o6755, USER, "chown 4711 program"), 0o755);
    // A change by a user who is not in the group of a file clears its set-group-id bit, even where
    // the group may not execute it.
    let by = |uid: u32, gid: u32, groups: &str, mode: u32, script: &str| {
        fs::write(&path, "content").unwrap();
        chown(&path, Some(USER), Some(USER)).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
        let mut command = Command::new("setpriv");
        command.args([format!("--reuid={uid}"), format!("--regid={gid}"), groups.to_owned()]).args(["sh", "-c", script]);
        assert!(command.current_dir(volume.root()).status().unwrap().success(), "{script}");
        fs::metadata(&path).unwrap().mode() & 0o7777
    };
    let member = format!("--groups=1,{USER},99");
    for script in ["echo more >> program", ": > program", "fallocate -l 9000 program"] {
        assert_eq!(by(USER, 12, "--clear-groups", 0o2666, script), 0o666, "{script}, by a stranger to the group");
        assert_eq!(by(USER, 12, &member, 0o2666, script), 0o2666, "{script}, by a member");
    }
    let acl = "setfacl -m u::rwx,g::rwx,o::rwx program";
    assert_eq!(by(USER, 12, "--clear-groups", 0o2755, acl), 0o777, "{acl}, by a stranger to the group");
    assert_eq!(by(USER, 12, &member, 0o2755, acl), 0o2777, "{acl}, by a member");
    assert_eq!(by(0, 0, "--clear-groups", 0o2755, acl), 0o2777, "{acl}, by root");
    assert_eq!(after(0o6755, 0, "chown 0:0 program"), 0o755, "a new owner, set by any user");
    assert_eq!(after(0o6755, USER, "touch program"), 0o6755, "content and owner stay");
}

#[test]
fn appending_begins_where_a_direct_write_ended() {
    needs_mount!();
    let volume = Mounted::new();
    let file = File::create_new(volume.path("file")).unwrap();
    let mut appender = OpenOptions::new().append(true).open(volume.path("file")).unwrap();
    let buffer = Buffer::new(&file, 1 << 20);
    buffer.put(0, &tree::pattern(61, 1 << 20));
    let mut expected: Vec<u8> = Vec::new();
    for len in [4096, 1, 5000, 65536, 4095] {
        buffer.write(&file, expected.len() as u64, len).unwrap();
        expected.extend(&tree::pattern(61, 1 << 20)[..len as usize]);
        appender.write_all(b"tail").unwrap();
        expected.extend(b"tail");
    }
    drop((file, appender));
    assert!(fs::read(volume.path("file")).unwrap() == expected);
    assert!(fs::read(volume.remount().path("file")).unwrap() == expected);
}

#[test]
fn nobody_else_is_kept_waiting_by_parts_of_a_direct_append_that_others_do_not_go_before() {
    needs_mount!();
    waits_for_no_fragments(&Mounted::new());
}

/// One process appends directly, far behind the end, and another syncs meanwhile.
pub fn waits_for_no_fragments(volume: &Mounted) {
    let direct = || OpenOptions::new().append(true).create(true).custom_flags(libc::O_DIRECT).open(volume.path("file")).unwrap();
    let mut other = File::create_new(volume.path("other")).unwrap();
    // Far behind the end, on a file that is open for appending: the daemon cannot know that nothing
    // comes before.
    const FAR: u64 = 256 << 20;
    let bytes = tree::pattern(62, 96 << 20);
    std::thread::scope(|scope| {
        let far = scope.spawn(|| {
            let flags = ReadWriteFlags::from_bits_retain(libc::RWF_NOAPPEND as u32);
            pwritev2(direct(), &[IoSlice::new(&bytes)], FAR, flags)
        });
        std::thread::sleep(Duration::from_millis(100));
        let begun = Instant::now();
        for _ in 0..3 {
            other.write_all(b"a few bytes").unwrap();
            other.sync_all().unwrap();
        }
        let took = begun.elapsed();
        match far.join().unwrap() {
            Err(Errno::OPNOTSUPP) => eprintln!("not run: the kernel has no RWF_NOAPPEND"),
            written => {
                assert_eq!(written.unwrap(), bytes.len());
                assert!(took < Duration::from_millis(1500), "it took {took:?}");
                let found = fs::read(volume.path("file")).unwrap();
                assert!(found[..FAR as usize].iter().all(|byte| *byte == 0) && found[FAR as usize..] == bytes);
                direct().write_all(&bytes[..5 << 20]).unwrap();
                assert!(fs::read(volume.path("file")).unwrap()[FAR as usize + bytes.len()..] == bytes[..5 << 20]);
            }
        }
    });
}

#[test]
fn the_earliest_time_there_is_does_no_harm() {
    needs_mount!();
    let volume = Mounted::new();
    let path = volume.path("file");
    File::create(&path).unwrap();
    for _ in 0..3 {
        let status = Command::new("touch").arg("-d").arg(format!("@{}", i64::MIN)).arg(&path).status().unwrap();
        assert!(status.success());
        assert_eq!(fs::metadata(&path).unwrap().mtime(), i64::MIN);
    }
}

#[test]
fn what_nobody_has_any_more_gives_its_space_back() {
    needs_mount!();
    let volume = Mounted::new();
    let free = || rustix::fs::statvfs(volume.root()).unwrap().f_bfree;
    let empty = free();
    let mut open = Vec::new();
    for i in 0..20 {
        let path = volume.path(format!("file {i}"));
        fs::write(&path, vec![7; 1 << 20]).unwrap();
        // Known by one name, by two, by none while it is open, and by none at all.
        if i % 2 == 0 {
            open.push(File::open(&path).unwrap());
            fs::hard_link(&path, volume.path("second name")).unwrap();
            fs::remove_file(volume.path("second name")).unwrap();
        }
        fs::remove_file(&path).unwrap();
    }
    for file in &open {
        assert_eq!((file.metadata().unwrap().nlink(), file.metadata().unwrap().len()), (0, 1 << 20));
    }
    drop(open);
    // Space comes back with the transaction that frees it.
    let deadline = Instant::now() + Duration::from_secs(10);
    while free() < empty {
        assert!(Instant::now() < deadline, "{} blocks of {empty} are free", free());
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn what_there_is_not_is_refused_with_the_errno_that_programs_know() {
    needs_mount!();
    let volume = Mounted::new();
    let file = File::create(volume.path("file")).unwrap();
    // lsattr(1), cp(1) and others take ENOTTY for "no such thing here", and EIO for a broken disk.
    let mut flags = [0; 8];
    let error = sys::ioctl(file.as_fd(), FS_IOC_GETFLAGS, &mut flags).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::ENOTTY));
    let error = sys::ioctl(File::open(volume.root()).unwrap().as_fd(), FS_IOC_GETFLAGS, &mut flags).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::ENOTTY));
    for whence in [SeekFrom::Data, SeekFrom::Hole] {
        assert_eq!(rustix::fs::seek(&file, whence(u64::MAX)), Err(rustix::io::Errno::NXIO));
    }
}

/// A daemon in the foreground, which ends with the test.
struct Foreground(std::process::Child, std::path::PathBuf);

impl Drop for Foreground {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.1).status();
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn calls_that_fail_in_any_number_write_few_lines_of_log() {
    needs_mount!();
    const FILES: usize = 2000;
    let volume = Mounted::new();
    for i in 0..FILES {
        File::create(volume.path(format!("{i:0>200}"))).unwrap();
    }
    let image = volume.unmount();
    let (path, dir) = (image.path(), image.mount_point());
    let log = path.with_file_name("log");
    let mut mount = programs::command("mount.gpunvme");
    mount.arg(&path).arg(&dir).args(["-o", "foreground"]).stderr(File::create(&log).unwrap());
    let _daemon = Foreground(mount.spawn().unwrap(), dir.clone());
    let began = Instant::now();
    while !is_mounted(&dir) {
        assert!(began.elapsed() < Duration::from_secs(60), "no mount");
        std::thread::yield_now();
    }
    // Nothing of the directory is in memory, and the device ends before it.
    OpenOptions::new().write(true).open(&path).unwrap().set_len(64 << 10).unwrap();
    let failed = (0..FILES).filter(|i| fs::symlink_metadata(dir.join(format!("{i:0>200}"))).is_err()).count();
    let lines = fs::read_to_string(&log).unwrap();
    assert!(failed > FILES / 2, "{failed} of {FILES}");
    assert!(lines.contains("ERROR") && lines.contains("lookup"), "the first is logged: {lines}");
    assert!(lines.lines().count() < 20, "{} lines", lines.lines().count());
}
