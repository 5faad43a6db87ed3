//! The namespace: every kind of entry, every way to make, link, rename and remove one, and its
//! attributes.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt, symlink};
use std::path::Path;
use std::time::{Duration, Instant, SystemTime};

use gpunvme_tests::mounted::Mounted;
use gpunvme_tests::{needs_mount, tree};
use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, RenameFlags, Timespec, Timestamps, XattrFlags};
use rustix::io::Errno;
use rustix::process::Signal;

fn errno<T: std::fmt::Debug>(result: io::Result<T>) -> Option<i32> {
    result.expect_err("an error").raw_os_error()
}

#[test]
fn a_tree_copied_in_reads_back_the_same_after_a_remount() {
    needs_mount!();
    let volume = Mounted::new();
    let source = volume.image().path().with_file_name("source");
    tree::make(&source, 1, 400).expect("a source tree");
    let status = std::process::Command::new("cp").arg("-a").args([&source, &volume.path("copy")]).status().expect("cp runs");
    assert!(status.success());
    let expected = tree::read(&source).expect("the source");
    tree::assert_same(&expected, &tree::read(&volume.path("copy")).expect("the copy"));

    let volume = volume.remount();
    tree::assert_same(&expected, &tree::read(&volume.path("copy")).expect("the copy after a remount"));
}

#[test]
fn rename_replaces_moves_and_refuses_as_posix_says() {
    needs_mount!();
    let volume = Mounted::new();
    fs::write(volume.path("a"), "a").unwrap();
    fs::write(volume.path("b"), "b").unwrap();
    fs::create_dir_all(volume.path("d/sub")).unwrap();
    fs::create_dir(volume.path("empty")).unwrap();

    fs::rename(volume.path("a"), volume.path("b")).unwrap();
    assert_eq!(fs::read_to_string(volume.path("b")).unwrap(), "a");
    assert!(!volume.path("a").exists());

    fs::rename(volume.path("b"), volume.path("d/sub/c")).unwrap();
    assert_eq!(fs::read_to_string(volume.path("d/sub/c")).unwrap(), "a");

    // A folder replaces only an empty folder, and never moves below itself.
    assert_eq!(errno(fs::rename(volume.path("empty"), volume.path("d"))), Some(libc::ENOTEMPTY));
    assert_eq!(errno(fs::rename(volume.path("d"), volume.path("d/sub/e"))), Some(libc::EINVAL));
    fs::write(volume.path("f"), "").unwrap();
    assert_eq!(errno(fs::rename(volume.path("empty"), volume.path("f"))), Some(libc::ENOTDIR));
    assert_eq!(errno(fs::rename(volume.path("f"), volume.path("empty"))), Some(libc::EISDIR));
    fs::rename(volume.path("d"), volume.path("empty")).unwrap();
    assert_eq!(fs::read_to_string(volume.path("empty/sub/c")).unwrap(), "a");
    assert_eq!(fs::metadata(volume.root()).unwrap().nlink(), 3, "the root has one folder left");
}

#[test]
fn renameat2_exchanges_and_does_not_replace() {
    needs_mount!();
    let volume = Mounted::new();
    fs::write(volume.path("file"), "file").unwrap();
    fs::create_dir(volume.path("folder")).unwrap();
    fs::write(volume.path("folder/inner"), "inner").unwrap();

    let rename = |from: &str, to: &str, flags| rustix::fs::renameat_with(CWD, volume.path(from), CWD, volume.path(to), flags);
    assert_eq!(rename("file", "folder/inner", RenameFlags::NOREPLACE), Err(Errno::EXIST));
    assert_eq!(fs::read_to_string(volume.path("file")).unwrap(), "file");
    rename("file", "new", RenameFlags::NOREPLACE).unwrap();

    assert_eq!(rename("new", "missing", RenameFlags::EXCHANGE), Err(Errno::NOENT));
    rename("new", "folder", RenameFlags::EXCHANGE).unwrap();
    assert_eq!(fs::read_to_string(volume.path("folder")).unwrap(), "file");
    assert_eq!(fs::read_to_string(volume.path("new/inner")).unwrap(), "inner");
    rename("folder", "new/inner", RenameFlags::EXCHANGE).unwrap();
    assert_eq!(fs::read_to_string(volume.path("new/inner")).unwrap(), "file");
    assert_eq!(fs::read_to_string(volume.path("folder")).unwrap(), "inner");
}

#[test]
fn hard_links_share_one_inode_and_count() {
    needs_mount!();
    let volume = Mounted::new();
    fs::write(volume.path("one"), "x").unwrap();
    fs::hard_link(volume.path("one"), volume.path("two")).unwrap();
    let one = fs::metadata(volume.path("one")).unwrap();
    let two = fs::metadata(volume.path("two")).unwrap();
    assert_eq!((one.ino(), one.nlink()), (two.ino(), 2));
    fs::write(volume.path("two"), "written through two").unwrap();
    assert_eq!(fs::read_to_string(volume.path("one")).unwrap(), "written through two");
    fs::remove_file(volume.path("one")).unwrap();
    assert_eq!(fs::metadata(volume.path("two")).unwrap().nlink(), 1);

    fs::create_dir(volume.path("folder")).unwrap();
    assert_eq!(errno(fs::hard_link(volume.path("folder"), volume.path("again"))), Some(libc::EPERM));
}

#[test]
fn symlinks_keep_their_targets_to_the_last_byte() {
    needs_mount!();
    let volume = Mounted::new();
    for len in [1, 59, 60, 255, 1000, 4095] {
        let target = OsString::from_vec(vec![b'a' + (len % 26) as u8; len]);
        let link = volume.path(format!("link{len}"));
        symlink(&target, &link).unwrap();
        assert_eq!(fs::read_link(&link).unwrap(), Path::new(&target));
        assert_eq!(fs::symlink_metadata(&link).unwrap().len(), len as u64);
    }
    symlink("missing", volume.path("dangling")).unwrap();
    assert_eq!(errno(fs::read(volume.path("dangling"))), Some(libc::ENOENT));
    symlink("loop", volume.path("loop")).unwrap();
    assert_eq!(errno(fs::read(volume.path("loop"))), Some(libc::ELOOP));

    let volume = volume.remount();
    assert_eq!(fs::read_link(volume.path("link4095")).unwrap().as_os_str().len(), 4095);
}

#[test]
fn special_files_keep_type_and_number() {
    needs_mount!();
    let volume = Mounted::new();
    let device = rustix::fs::makedev(259, 70_000);
    let make = |name: &str, kind, device| {
        rustix::fs::mknodat(CWD, volume.path(name), kind, Mode::from_raw_mode(0o640), device).unwrap();
    };
    make("fifo", FileType::Fifo, 0);
    make("block", FileType::BlockDevice, device);
    make("char", FileType::CharacterDevice, device);
    make("plain", FileType::RegularFile, 0);
    drop(std::os::unix::net::UnixListener::bind(volume.path("socket")).unwrap());

    let volume = volume.remount();
    let metadata = |name: &str| fs::symlink_metadata(volume.path(name)).unwrap();
    assert!(metadata("fifo").file_type().is_fifo());
    assert!(metadata("socket").file_type().is_socket());
    assert!(metadata("plain").file_type().is_file());
    assert!(metadata("block").file_type().is_block_device());
    assert!(metadata("char").file_type().is_char_device());
    assert_eq!(metadata("block").rdev(), device);
    assert_eq!(metadata("char").rdev(), device);
    assert_eq!(metadata("fifo").mode() & 0o7777, 0o640);
}

#[test]
fn names_go_to_255_bytes_and_may_hold_any_byte_but_slash_and_nul() {
    needs_mount!();
    let volume = Mounted::new();
    let longest = volume.path(OsString::from_vec(vec![0xff; 255]));
    fs::write(&longest, "longest").unwrap();
    assert_eq!(errno(fs::write(volume.path("n".repeat(256)), "")), Some(libc::ENAMETOOLONG));
    let odd: Vec<u8> = (1..=255).filter(|&byte| byte != b'/').collect();
    let odd = OsString::from_vec(odd);
    fs::create_dir(volume.path(&odd)).unwrap();

    let volume = volume.remount();
    assert_eq!(fs::read_to_string(&longest).unwrap(), "longest");
    let mut names: Vec<_> = fs::read_dir(volume.root()).unwrap().map(|e| e.unwrap().file_name()).collect();
    names.sort();
    let mut expected = vec![odd, OsString::from_vec(vec![0xff; 255])];
    expected.sort();
    assert_eq!(names, expected);
}

#[test]
fn a_folder_of_many_entries_lists_each_once_while_it_changes() {
    needs_mount!();
    let volume = Mounted::new();
    let inodes = || {
        let usage = rustix::fs::statvfs(volume.root()).unwrap();
        usage.f_files - usage.f_ffree
    };
    let before = inodes();
    let folder = volume.path("many");
    fs::create_dir(&folder).unwrap();
    // Several times what a listing has room for.
    const ENTRIES: usize = 1500;
    for number in 0..ENTRIES {
        File::create(folder.join(format!("entry {number}"))).unwrap();
    }
    // Remove what was listed while listing goes on, as rm -r does: nothing may be skipped or
    // repeated.
    let mut seen = std::collections::HashSet::new();
    for entry in fs::read_dir(&folder).unwrap() {
        let name = entry.unwrap().file_name();
        fs::remove_file(folder.join(&name)).unwrap();
        assert!(seen.insert(name.clone()), "{name:?} was listed twice");
    }
    assert_eq!(seen.len(), ENTRIES);
    assert_eq!(fs::read_dir(&folder).unwrap().count(), 0);
    fs::remove_dir(&folder).unwrap();
    // An inode stays for as long as it was counted more often than the kernel was given it: what
    // has no room in a listing is not counted.
    let deadline = Instant::now() + Duration::from_secs(60);
    while inodes() != before {
        assert!(Instant::now() < deadline, "{} inodes of {before} are left", inodes());
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn removing_a_folder_needs_it_to_be_empty() {
    needs_mount!();
    let volume = Mounted::new();
    fs::create_dir_all(volume.path("a/b")).unwrap();
    assert_eq!(errno(fs::remove_dir(volume.path("a"))), Some(libc::ENOTEMPTY));
    assert_eq!(errno(fs::remove_file(volume.path("a"))), Some(libc::EISDIR));
    assert_eq!(fs::metadata(volume.path("a")).unwrap().nlink(), 3);
    fs::remove_dir(volume.path("a/b")).unwrap();
    assert_eq!(fs::metadata(volume.path("a")).unwrap().nlink(), 2);
    fs::remove_dir(volume.path("a")).unwrap();
    assert_eq!(errno(fs::remove_dir(volume.path("a"))), Some(libc::ENOENT));
}

#[test]
fn times_keep_nanoseconds_before_1970_and_after_2038() {
    needs_mount!();
    let volume = Mounted::new();
    let file = volume.path("file");
    let cases = [(-2_000_000_000, 1), (0, 999_999_999), (2_147_483_648, 5), (9_000_000_000, 123_456_789)];
    fs::write(&file, "").unwrap();
    for (seconds, nanoseconds) in cases {
        let time = Timespec { tv_sec: seconds, tv_nsec: nanoseconds };
        let times = Timestamps { last_access: time, last_modification: time };
        rustix::fs::utimensat(CWD, &file, &times, AtFlags::empty()).unwrap();
        let metadata = fs::metadata(&file).unwrap();
        assert_eq!((metadata.mtime(), metadata.mtime_nsec()), (seconds, nanoseconds));
        assert_eq!((metadata.atime(), metadata.atime_nsec()), (seconds, nanoseconds));
    }
    let volume = volume.remount();
    let metadata = fs::metadata(volume.path("file")).unwrap();
    assert_eq!((metadata.mtime(), metadata.mtime_nsec()), cases[3]);
}

#[test]
fn writing_and_linking_move_the_times_that_posix_says() {
    needs_mount!();
    let volume = Mounted::new();
    let file = volume.path("file");
    let pause = || std::thread::sleep(std::time::Duration::from_millis(20));
    fs::write(&file, "a").unwrap();
    let made = fs::metadata(&file).unwrap();
    pause();
    fs::write(&file, "b").unwrap();
    let written = fs::metadata(&file).unwrap();
    assert!(written.modified().unwrap() > made.modified().unwrap());
    pause();
    fs::set_permissions(&file, fs::Permissions::from_mode(0o600)).unwrap();
    let changed = fs::metadata(&file).unwrap();
    assert_eq!(changed.modified().unwrap(), written.modified().unwrap());
    assert!((changed.ctime(), changed.ctime_nsec()) > (written.ctime(), written.ctime_nsec()));

    let folder = fs::metadata(volume.root()).unwrap();
    pause();
    fs::hard_link(&file, volume.path("twin")).unwrap();
    assert!(fs::metadata(volume.root()).unwrap().modified().unwrap() > folder.modified().unwrap());
    let linked = fs::metadata(&file).unwrap();
    assert!((linked.ctime(), linked.ctime_nsec()) > (changed.ctime(), changed.ctime_nsec()));
}

#[test]
fn extended_attributes_of_many_names_and_sizes_survive() {
    needs_mount!();
    let volume = Mounted::new();
    let file = volume.path("file");
    fs::write(&file, "").unwrap();
    let value = |number: usize| tree::pattern(number as u64, number * 61);
    for number in 0..50 {
        rustix::fs::setxattr(&file, format!("user.name/{number}"), &value(number), XattrFlags::empty()).unwrap();
    }
    rustix::fs::setxattr(&file, "trusted.big", &tree::pattern(9, 60_000), XattrFlags::empty())
        .or_else(|error| if error == Errno::NOSPC || error == Errno::TOOBIG { Ok(()) } else { Err(error) })
        .unwrap();
    let create = rustix::fs::setxattr(&file, "user.name/1", b"", XattrFlags::CREATE);
    assert_eq!(create, Err(Errno::EXIST));
    let replace = rustix::fs::setxattr(&file, "user.none", b"", XattrFlags::REPLACE);
    assert_eq!(replace, Err(Errno::NODATA));
    rustix::fs::removexattr(&file, "user.name/7").unwrap();
    assert_eq!(rustix::fs::removexattr(&file, "user.name/7"), Err(Errno::NODATA));

    let volume = volume.remount();
    let file = volume.path("file");
    for number in (0..50).filter(|&number| number != 7) {
        let mut buffer = vec![0; 4096];
        let len = rustix::fs::getxattr(&file, format!("user.name/{number}"), &mut buffer).unwrap();
        assert_eq!(buffer[..len], value(number), "user.name/{number}");
    }
    let mut tiny = [0; 4];
    assert_eq!(rustix::fs::getxattr(&file, "user.name/30", &mut tiny), Err(Errno::RANGE));
    let mut list = vec![0; 65536];
    let len = rustix::fs::listxattr(&file, &mut list).unwrap();
    let names = list[..len].split(|&byte| byte == 0).filter(|name| name.starts_with(b"user."));
    assert_eq!(names.count(), 49);
}

#[test]
fn a_sticky_or_setgid_folder_means_what_it_means_elsewhere() {
    needs_mount!();
    let volume = Mounted::new();
    let folder = volume.path("shared");
    fs::create_dir(&folder).unwrap();
    std::os::unix::fs::chown(&folder, Some(0), Some(65534)).unwrap();
    fs::set_permissions(&folder, fs::Permissions::from_mode(0o2775)).unwrap();
    fs::write(folder.join("file"), "").unwrap();
    fs::create_dir(folder.join("sub")).unwrap();
    assert_eq!(fs::metadata(folder.join("file")).unwrap().gid(), 65534);
    let sub = fs::metadata(folder.join("sub")).unwrap();
    assert_eq!((sub.gid(), sub.mode() & 0o2000), (65534, 0o2000));
}

#[test]
fn a_file_without_a_name_can_get_one_and_goes_without() {
    needs_mount!();
    let volume = Mounted::new();
    fs::set_permissions(volume.root(), fs::Permissions::from_mode(0o2775)).unwrap();
    std::os::unix::fs::chown(volume.root(), Some(0), Some(65534)).unwrap();
    fs::set_permissions(volume.root(), fs::Permissions::from_mode(0o2775)).unwrap();
    let unnamed = |data: &[u8]| {
        let flags = OFlags::TMPFILE | OFlags::RDWR;
        let mut file = File::from(rustix::fs::open(volume.root(), flags, Mode::from_raw_mode(0o640)).expect("O_TMPFILE"));
        file.write_all(data).unwrap();
        file
    };
    let inodes = || rustix::fs::statvfs(volume.root()).map(|found| found.f_files - found.f_ffree).unwrap();
    let before = inodes();
    let (kept, dropped) = (unnamed(b"kept"), unnamed(&vec![7; 1 << 20]));
    let now = kept.metadata().unwrap();
    assert_eq!((now.nlink(), now.gid(), now.mode() & 0o7777, now.len()), (0, 65534, 0o640, 4));
    assert_eq!((fs::read_dir(volume.root()).unwrap().count(), inodes()), (0, before + 2));
    rustix::fs::linkat(&kept, "", CWD, volume.path("name"), AtFlags::EMPTY_PATH).unwrap();
    assert_eq!((fs::read(volume.path("name")).unwrap(), kept.metadata().unwrap().nlink()), (b"kept".to_vec(), 1));
    // One that refuses a name for good.
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::EXCL;
    let nameless = rustix::fs::open(volume.root(), flags, Mode::RUSR).unwrap();
    assert_eq!(rustix::fs::linkat(&nameless, "", CWD, volume.path("other"), AtFlags::EMPTY_PATH), Err(Errno::NOENT));
    drop((kept, dropped, nameless));
    let deadline = Instant::now() + Duration::from_secs(10);
    while inodes() != before + 1 {
        assert!(Instant::now() < deadline, "{} inodes, and {before} before", inodes());
        std::thread::sleep(Duration::from_millis(20));
    }
    let volume = volume.remount();
    assert_eq!(fs::read(volume.path("name")).unwrap(), b"kept");
}

#[test]
fn a_file_without_a_name_is_gone_after_the_daemon_was_killed() {
    needs_mount!();
    let volume = Mounted::new();
    let flags = OFlags::TMPFILE | OFlags::RDWR;
    let file = File::from(rustix::fs::open(volume.root(), flags, Mode::RUSR).unwrap());
    file.sync_all().unwrap();
    let (_, image) = volume.signal(Signal::KILL);
    drop(file);
    let volume = image.mount();
    let found = rustix::fs::statvfs(volume.root()).unwrap();
    let deadline = Instant::now() + Duration::from_secs(10);
    while rustix::fs::statvfs(volume.root()).map(|now| now.f_files - now.f_ffree).unwrap() > 1 {
        assert!(Instant::now() < deadline, "{} inodes", found.f_files - found.f_ffree);
        std::thread::sleep(Duration::from_millis(20));
    }
    volume.unmount();
}

#[test]
fn a_file_was_born_when_it_was_created_whatever_became_of_it() {
    needs_mount!();
    let volume = Mounted::new();
    let start = SystemTime::now() - Duration::from_secs(1);
    fs::write(volume.path("file"), "").unwrap();
    let born = fs::metadata(volume.path("file")).unwrap().created().expect("a birth time");
    assert!(born > start && born <= SystemTime::now(), "{born:?}");
    let early = SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000);
    let file = File::options().append(true).open(volume.path("file")).unwrap();
    file.set_modified(early).unwrap();
    (&file).write_all(b"more").unwrap();
    drop(file);
    fs::rename(volume.path("file"), volume.path("renamed")).unwrap();
    let volume = volume.remount();
    let found = fs::metadata(volume.path("renamed")).unwrap();
    assert_eq!((found.created().unwrap(), found.len()), (born, 4));
}

#[test]
fn other_users_get_what_the_permission_bits_give_them() {
    needs_mount!();
    let volume = Mounted::new();
    fs::set_permissions(volume.root().parent().unwrap(), fs::Permissions::from_mode(0o755)).unwrap();
    fs::write(volume.path("secret"), "s").unwrap();
    fs::set_permissions(volume.path("secret"), fs::Permissions::from_mode(0o600)).unwrap();
    fs::write(volume.path("open"), "o").unwrap();
    fs::set_permissions(volume.path("open"), fs::Permissions::from_mode(0o644)).unwrap();
    let as_nobody = |script: &str| {
        use std::os::unix::process::CommandExt;
        std::process::Command::new("sh")
            .args(["-c", script])
            .current_dir(volume.root())
            .uid(65534)
            .gid(65534)
            .stderr(std::process::Stdio::null())
            .status()
            .unwrap()
            .success()
    };
    assert!(as_nobody("cat open"));
    assert!(!as_nobody("cat secret"));
    assert!(!as_nobody("echo x > open"));
    assert!(!as_nobody("echo x > new"));
    assert!(!as_nobody("rm -f open"));
}

/// The kernel keeps listings, and the moved directory itself does not change.
#[test]
fn a_listing_of_a_directory_that_was_moved_has_its_new_parent() {
    needs_mount!();
    let volume = Mounted::new();
    let parent_of = |dir: &Path| {
        let entries = rustix::fs::Dir::read_from(File::open(dir).unwrap()).unwrap();
        // To the end: the kernel keeps whole listings.
        let all: Vec<_> = entries.map(Result::unwrap).collect();
        all.iter().find(|entry| entry.file_name().to_bytes() == b"..").unwrap().ino()
    };
    let [a, b, from, to] = ["a", "b", "a/c", "b/c"].map(|name| volume.path(name));
    [&a, &b, &from].iter().for_each(|dir| fs::create_dir(dir).unwrap());
    (0..3).for_each(|_| assert_eq!(parent_of(&from), fs::metadata(&a).unwrap().ino()));
    fs::rename(&from, &to).unwrap();
    let until = Instant::now() + Duration::from_secs(10);
    while parent_of(&to) != fs::metadata(&b).unwrap().ino() {
        assert!(Instant::now() < until, "it has the old one");
        std::thread::sleep(Duration::from_millis(20));
    }
}
