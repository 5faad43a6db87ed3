//! Writes that the kernel does not see, by ioctl and by rings: they change nothing that a write(2)
//! of the same process could not, and take what it takes.

use std::fs::{self, File, OpenOptions, Permissions};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use gpunvme::{Mount, Operation, Ring};
use gpunvme_tests::direct::Buffer;
use gpunvme_tests::mounted::{Mounted, text};
use gpunvme_tests::rings::{attach, shared, wait_for};
use gpunvme_tests::{needs_mount, programs, tree};
use rustix::fs::XattrFlags;
use rustix::io::Errno;
use rustix::mount::{MountFlags, mount_remount};
use rustix::process::{Gid, Signal, Uid};

const MIB: u64 = 1 << 20;
const CAPABILITY: &str = "security.capability";

/// `cap_setuid+ep` (linux/capability.h, `vfs_cap_data`).
fn capability() -> Vec<u8> {
    [0x0200_0001u32, 1 << 7, 0, 0, 0].iter().flat_map(|word| word.to_le_bytes()).collect()
}

/// Makes a file a program that gives its caller all privileges that a file can give.
fn privilege(path: &Path) {
    fs::set_permissions(path, Permissions::from_mode(0o6777)).unwrap();
    rustix::fs::setxattr(path, CAPABILITY, &capability(), XattrFlags::empty()).unwrap();
    assert_eq!(fs::metadata(path).unwrap().mode() & 0o7777, 0o6777);
}

fn has_capability(path: &Path) -> bool {
    match rustix::fs::getxattr(path, CAPABILITY, &mut [0u8; 64][..]) {
        Ok(_) => true,
        Err(errno) => {
            assert_eq!(errno, Errno::NODATA);
            false
        }
    }
}

fn mode(path: &Path) -> u32 {
    fs::metadata(path).unwrap().mode() & 0o7777
}

/// Does something as a user who has no privileges, and is in no group of another.
fn as_stranger<T: Send>(what: impl FnOnce() -> T + Send) -> T {
    let become_stranger = || {
        let (uid, gid) = (Uid::from_raw(4711), Gid::from_raw(4711));
        rustix::thread::set_thread_groups(&[]).unwrap();
        rustix::thread::set_thread_res_gid(gid, gid, gid).unwrap();
        rustix::thread::set_thread_res_uid(uid, uid, uid).unwrap();
        what()
    };
    thread::scope(|scope| scope.spawn(become_stranger).join().unwrap())
}

/// Also the writes of a ring that know where the file lies, of which the kernel keeps attributes.
#[test]
fn they_show_in_the_time_of_the_last_change() {
    needs_mount!();
    let volume = Mounted::new();
    let path = volume.path("file");
    fs::write(&path, tree::pattern(1, 65536)).unwrap();
    File::open(&path).unwrap().sync_all().unwrap();
    let mount = Mount::open(volume.root()).unwrap();
    let (memory, mut ring) = (shared(&mount, MIB), Ring::new(&mount, 8).unwrap());
    let attached = attach(&ring, &path);
    for round in 0..100 {
        let before = fs::metadata(&path).unwrap().modified().unwrap();
        thread::sleep(Duration::from_millis(1));
        ring.push(&Operation::write(&attached, 4096, &memory, 0, 4096)).unwrap();
        wait_for(&mut ring, 1).remove(0).result.unwrap();
        assert!(fs::metadata(&path).unwrap().modified().unwrap() > before, "round {round}");
    }
}

/// By ioctl root's write keeps the bits, as its write(2) does.
#[test]
fn they_take_capabilities() {
    needs_mount!();
    let volume = Mounted::new();
    let path = volume.path("program");
    fs::write(&path, tree::pattern(1, 8192)).unwrap();
    let file = OpenOptions::new().read(true).write(true).open(&path).unwrap();
    let buffer = Buffer::new(&file, MIB);
    // Whole blocks, a part of one, and beyond the end.
    for (offset, len) in [(0, 4096), (5, 100), (0, MIB)] {
        privilege(&path);
        buffer.write(&file, offset, len).unwrap();
        assert!(!has_capability(&path), "after an ioctl at {offset}");
        assert_eq!(mode(&path), 0o6777);
    }
    fs::set_permissions(&path, Permissions::from_mode(0o777)).unwrap();
    let mount = Mount::open(volume.root()).unwrap();
    let memory = shared(&mount, MIB);
    let mut ring = Ring::new(&mount, 8).unwrap();
    let attached = attach(&ring, &path);
    let mut write = |offset, len| {
        ring.push(&Operation::write(&attached, offset, &memory, 0, len)).unwrap();
        wait_for(&mut ring, 1).remove(0).result.unwrap();
    };
    for (offset, len) in [(0, 4096), (5, 100), (MIB, MIB)] {
        rustix::fs::setxattr(&path, CAPABILITY, &capability(), XattrFlags::empty()).unwrap();
        write(offset, len);
        assert!(!has_capability(&path), "after a ring's write at {offset}");
    }
    // Of a file that the ring has written so often that it knows where it lies.
    (0..100).for_each(|_| write(4096, 4096));
    rustix::fs::setxattr(&path, CAPABILITY, &capability(), XattrFlags::empty()).unwrap();
    write(4096, 4096);
    assert!(!has_capability(&path));
    assert_eq!(mode(&path), 0o777);
    // What is refused takes nothing.
    privilege(&path);
    let read_only = ring.attach(&gpunvme::File::open(&path).unwrap()).unwrap();
    ring.push(&Operation::write(&read_only, 0, &memory, 0, 4096)).unwrap();
    wait_for(&mut ring, 1).remove(0).result.unwrap_err();
    assert!(has_capability(&path));
    assert_eq!(mode(&path), 0o6777);
}

/// A program that is being started has the mode that its file had before, and what writes here need
/// not have the file open, which would keep it from being started (`ETXTBSY`). Which process writes
/// by a ring is not known, so a ring may write such a file for no user.
#[test]
fn they_are_refused_where_a_program_has_privileges_that_the_writer_may_not_keep() {
    needs_mount!();
    let volume = Mounted::new();
    let path = volume.path("program");
    let content = tree::pattern(1, 8192);
    fs::write(&path, &content).unwrap();
    let file = OpenOptions::new().read(true).write(true).open(&path).unwrap();
    let buffer = Buffer::new(&file, MIB);
    let mount = Mount::open(volume.root()).unwrap();
    let memory = shared(&mount, MIB);
    let mut ring = Ring::new(&mount, 8).unwrap();
    let attached = attach(&ring, &path);
    let mut by_ring = || {
        ring.push(&Operation::write(&attached, 4096, &memory, 0, 4096)).unwrap();
        wait_for(&mut ring, 1).remove(0).result.map(drop)
    };
    let by_ioctl = || as_stranger(|| buffer.write(&file, 0, 4096).map(drop));
    for (bits, is_refused) in [(0o4777, true), (0o2777, true), (0o6766, true), (0o2766, false), (0o777, false)] {
        // At last the ring knows where the file lies.
        for round in 0..100 {
            fs::set_permissions(&path, Permissions::from_mode(bits)).unwrap();
            let (ring, ioctl) = (by_ring(), by_ioctl());
            let refused = is_refused.then_some(libc::EPERM);
            assert_eq!(ring.err().map(|error| error.errno().raw_os_error()), refused, "{bits:o}, round {round}, by a ring");
            assert_eq!(ioctl.err().and_then(|error| error.raw_os_error()), refused, "{bits:o}, round {round}, by ioctl");
            assert_eq!(mode(&path), if is_refused { bits } else { bits & 0o777 }, "round {round}");
        }
        if is_refused {
            assert_eq!(fs::read(&path).unwrap(), content, "{bits:o}");
        }
    }
    // write(2) takes the bits, and then they are not refused any more.
    fs::set_permissions(&path, Permissions::from_mode(0o4777)).unwrap();
    as_stranger(|| file.write_all_at(b"x", 0)).unwrap();
    by_ring().unwrap();
    by_ioctl().unwrap();
}

#[test]
fn they_leave_an_empty_capability_as_write_2_does() {
    needs_mount!();
    let volume = Mounted::new();
    let path = volume.path("program");
    fs::write(&path, tree::pattern(1, 8192)).unwrap();
    rustix::fs::setxattr(&path, CAPABILITY, b"", XattrFlags::empty()).unwrap();
    // The kernel does not show its value.
    let lists_capability = || {
        let mut names = [0; 256];
        let len = rustix::fs::listxattr(&path, &mut names[..]).unwrap();
        names[..len].split(|byte| *byte == 0).any(|name| name == CAPABILITY.as_bytes())
    };
    let file = OpenOptions::new().read(true).write(true).open(&path).unwrap();
    file.write_all_at(&[1; 100], 0).unwrap();
    assert!(lists_capability(), "after write(2)");
    Buffer::new(&file, MIB).write(&file, 0, 4096).unwrap();
    assert!(lists_capability(), "after an ioctl");
}

fn remount_with_helper(volume: &Mounted, flag: &str) {
    let mut mount = programs::command("mount.gpunvme");
    let output = mount.arg(volume.image().path()).arg(volume.root()).args(["-o", &format!("remount,{flag}")]).output().unwrap();
    assert!(output.status.success(), "{}", text(&output));
}

#[test]
fn a_remount_to_read_only_writes_down_what_is_in_memory() {
    needs_mount!();
    let volume = Mounted::new();
    let data = tree::pattern(3, 1 << 20);
    fs::write(volume.path("file"), &data).unwrap();
    remount_with_helper(&volume, "ro");
    let (_, image) = volume.signal(Signal::KILL);
    assert!(fs::read(image.mount().path("file")).unwrap() == data);
}

/// A ring goes on with files that are closed, which do not keep the mount from becoming read-only.
#[test]
fn they_end_with_a_remount_to_read_only() {
    needs_mount!();
    let volume = Mounted::new();
    let path = volume.path("file");
    fs::write(&path, [0; 1 << 20]).unwrap();
    File::open(&path).unwrap().sync_all().unwrap();
    let mount = Mount::open(volume.root()).unwrap();
    let memory = shared(&mount, MIB);
    let mut ring = Ring::new(&mount, 8).unwrap();
    let attached = attach(&ring, &path);
    let by_hand = |flags| mount_remount(volume.root(), flags, "").unwrap();
    for round in 0..20u64 {
        let stop = AtomicBool::new(false);
        thread::scope(|scope| {
            let (ring, attached, memory, stop) = (&mut ring, &attached, &memory, &stop);
            let writer = scope.spawn(move || {
                let (mut refused, mut last) = (None, false);
                for number in round << 32.. {
                    memory.copy_in(0, &number.to_le_bytes());
                    ring.push(&Operation::write(attached, 0, memory, 0, 4096)).unwrap();
                    let result = wait_for(ring, 1).remove(0).result;
                    match (result, refused) {
                        (Ok(_), None) => {}
                        (Ok(_), Some(_)) => panic!("a write after one that was refused"),
                        (Err(error), _) => refused = Some(error.errno().raw_os_error()),
                    }
                    // One at least begins after the remount.
                    if stop.swap(false, Ordering::Relaxed) {
                        last = true;
                    } else if last {
                        return refused;
                    }
                }
                unreachable!("it writes until it is stopped")
            });
            thread::sleep(Duration::from_millis(5));
            // What mount(8) runs, and what an init system calls when it shuts down; there a write
            // may be in flight.
            if round % 2 == 0 {
                remount_with_helper(&volume, "ro");
            } else {
                by_hand(MountFlags::RDONLY);
                thread::sleep(Duration::from_millis(20));
            }
            let content = || {
                let mut number = [0; 8];
                File::open(&path).unwrap().read_exact_at(&mut number, 0).unwrap();
                u64::from_le_bytes(number)
            };
            let before = content();
            thread::sleep(Duration::from_millis(20));
            let after = content();
            stop.store(true, Ordering::Relaxed);
            let refused = writer.join().unwrap();
            assert_eq!(after, before, "round {round}: written after the mount had become read-only");
            assert_eq!(refused, Some(libc::EROFS));
        });
        if round % 2 == 0 {
            remount_with_helper(&volume, "rw");
        } else {
            by_hand(MountFlags::empty());
        }
        ring.push(&Operation::write(&attached, 0, &memory, 0, 4096)).unwrap();
        wait_for(&mut ring, 1).remove(0).result.expect("it is writable again");
    }
}

#[test]
fn they_keep_to_the_limit_of_file_sizes() {
    needs_mount!();
    let volume = Mounted::new();
    // In a process of its own: the limit is the process's.
    let output = Command::new(env!("CARGO_BIN_EXE_ring-client")).arg("limited").arg(volume.root()).output().unwrap();
    assert!(output.status.success(), "{}", text(&output));
}
