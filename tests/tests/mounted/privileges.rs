//! What users may not do to each other's files through attributes: set-user-id bits, capabilities,
//! extended attributes. What is expected is what ext4 did on Linux 6.18 with the same calls, but
//! where it says otherwise.

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::{io, thread};

use gpunvme_tests::mounted::{Image, Mounted};
use gpunvme_tests::needs_mount;
use rustix::fs::{FallocateFlags, XattrFlags, copy_file_range, fallocate, getxattr, listxattr, removexattr, setxattr};
use rustix::io::Errno;
use rustix::process::{Gid, Uid};

/// Neither root nor a group of any user.
const OWNER: u32 = 4711;
const OTHER: u32 = 4712;
const ROOT: u32 = 0;

/// Does something as a user who is in no group but the one of the same number.
fn as_user<T: Send>(user: u32, what: impl FnOnce() -> T + Send) -> T {
    as_member(user, &[], what)
}

/// As [`as_user`], with these groups beside its own.
fn as_member<T: Send>(user: u32, groups: &[u32], what: impl FnOnce() -> T + Send) -> T {
    let become_user = || {
        if user != ROOT {
            // Of this thread only.
            let (uid, gid) = (Uid::from_raw(user), Gid::from_raw(user));
            let groups: Vec<Gid> = groups.iter().map(|group| Gid::from_raw(*group)).collect();
            rustix::thread::set_thread_groups(&groups).unwrap();
            rustix::thread::set_thread_res_gid(gid, gid, gid).unwrap();
            rustix::thread::set_thread_res_uid(uid, uid, uid).unwrap();
        }
        what()
    };
    thread::scope(|scope| scope.spawn(become_user).join().unwrap())
}

fn mounted() -> Mounted {
    let volume = Mounted::new();
    fs::set_permissions(volume.root(), fs::Permissions::from_mode(0o777)).unwrap();
    volume
}

/// Makes a file of the owner anew, if asked with a capability (`vfs_cap_data` of
/// linux/capability.h: CAP_SETUID, permitted).
fn make(path: &Path, mode: u32, capability: bool) {
    let _ = fs::remove_file(path);
    fs::write(path, [1; 5000]).unwrap();
    chown(path, Some(OWNER), Some(OWNER)).unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    if capability {
        let value = [0, 0, 0, 2, 0x80, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
        setxattr(path, "security.capability", &value, XattrFlags::empty()).unwrap();
    }
}

fn mode(path: &Path) -> u32 {
    fs::metadata(path).unwrap().mode() & 0o7777
}

fn changed(path: &Path) -> (i64, i64) {
    let now = fs::metadata(path).unwrap();
    (now.ctime(), now.ctime_nsec())
}

fn has_capability(path: &Path) -> bool {
    getxattr(path, "security.capability", &mut [0; 64]).is_ok()
}

#[test]
fn a_change_of_owner_that_changes_nothing_takes_bits_from_nobody_else() {
    needs_mount!();
    let volume = mounted();
    let path = volume.path("program");
    // (mode before, by whom, mode after, whether the file counts as changed). Where the caller is
    // neither the owner nor root ext4 says EPERM; and it takes the bits when root asks. The kernel
    // asks here with a request that it also sends ahead of writes.
    for (before, user, after, is_changed) in [
        (0o6777, OTHER, 0o6777, false),
        (0o4755, OTHER, 0o4755, false),
        (0o2766, OTHER, 0o2766, false),
        (0o777, OTHER, 0o777, true),
        (0o6777, OWNER, 0o777, true),
        (0o2766, OWNER, 0o2766, true),
        (0o777, OWNER, 0o777, true),
        (0o6777, ROOT, 0o6777, true),
        (0o777, ROOT, 0o777, true),
    ] {
        make(&path, before, false);
        let at = changed(&path);
        as_user(user, || chown(&path, None, None)).unwrap();
        let now = (mode(&path), changed(&path) != at);
        assert_eq!(now, (after, is_changed), "{before:o} by {user}: {:o}", now.0);
    }
    let dir = volume.path("dir");
    fs::create_dir(&dir).unwrap();
    for user in [OTHER, OWNER, ROOT] {
        fs::set_permissions(&dir, fs::Permissions::from_mode(0o6777)).unwrap();
        let at = changed(&dir);
        as_user(user, || chown(&dir, None, None)).unwrap();
        assert_eq!((mode(&dir), changed(&dir) != at), (0o6777, true), "a directory, by {user}");
    }
}

#[test]
fn whoever_changes_a_file_takes_its_capability_and_all_but_root_its_set_user_id_bits() {
    needs_mount!();
    let volume = mounted();
    let (path, source) = (volume.path("program"), volume.path("source"));
    fs::write(&source, [2; 1000]).unwrap();
    let open = || OpenOptions::new().write(true).open(&path).unwrap();
    let open_direct = || OpenOptions::new().write(true).custom_flags(libc::O_DIRECT).open(&path).unwrap();
    let changes: [(&str, &(dyn Fn() + Sync)); 7] = [
        ("write", &|| open().write_all(b"hello").unwrap()),
        ("append", &|| OpenOptions::new().append(true).open(&path).unwrap().write_all(b"hello").unwrap()),
        ("truncate", &|| open().set_len(3).unwrap()),
        ("O_TRUNC", &|| drop(File::create(&path).unwrap())),
        ("fallocate", &|| fallocate(open(), FallocateFlags::empty(), 0, 9000).unwrap()),
        ("copy_file_range", &|| {
            assert_eq!(copy_file_range(File::open(&source).unwrap(), None, open(), None, 100).unwrap(), 100);
        }),
        ("O_DIRECT", &|| {
            #[repr(align(4096))]
            struct Page([u8; 4096]);
            open_direct().write_all_at(&Page([3; 4096]).0, 0).unwrap();
        }),
    ];
    for (what, change) in changes {
        for (before, user, after) in [
            (0o6777, ROOT, 0o6777),
            (0o2766, ROOT, 0o2766),
            (0o6777, OWNER, 0o777),
            (0o2766, OWNER, 0o2766),
            (0o6777, OTHER, 0o777),
            (0o2766, OTHER, 0o766),
        ] {
            for capability in [false, true] {
                make(&path, before, capability);
                as_user(user, change);
                let now = mode(&path);
                assert_eq!(now, after, "{what} of {before:o} by {user}, capability: {capability}: {now:o}");
                assert!(!has_capability(&path), "{what} of {before:o} by {user}");
            }
        }
    }
}

#[test]
fn a_program_that_was_just_rewritten_runs_as_the_one_who_runs_it() {
    needs_mount!();
    let volume = mounted();
    // Nothing is asked of the file between the write and the start: what counts is the mode that
    // the kernel has in mind.
    for change in [
        "printf x >> ./id",
        "fallocate -l 1000000 ./id",
        "dd if=/dev/zero of=./id bs=1 seek=900000 count=1 conv=notrunc status=none",
    ] {
        fs::copy("/usr/bin/id", volume.path("id")).unwrap();
        fs::set_permissions(volume.path("id"), fs::Permissions::from_mode(0o4777)).unwrap();
        let run = |script: &str| {
            let mut shell = Command::new("sh");
            let output = shell.args(["-c", script]).current_dir(volume.root()).uid(OTHER).gid(OTHER).output().unwrap();
            String::from_utf8(output.stdout).unwrap().trim().to_owned()
        };
        assert_eq!(run("./id -u"), "0", "it is root's");
        assert_eq!(run(&format!("{change}; ./id -u")), OTHER.to_string(), "{change}");
        fs::remove_file(volume.path("id")).unwrap();
    }
}

#[test]
fn attributes_have_the_names_that_other_filesystems_take() {
    needs_mount!();
    let volume = mounted();
    let (file, dir) = (volume.path("file"), volume.path("dir"));
    File::create(&file).unwrap();
    fs::create_dir(&dir).unwrap();
    for path in [&file, &dir] {
        chown(path, Some(OWNER), Some(OWNER)).unwrap();
        fs::set_permissions(path, fs::Permissions::from_mode(0o700)).unwrap();
        let calls = |user: u32, name: &str| {
            as_user(user, || {
                let set = setxattr(path, name, b"v", XattrFlags::empty());
                let replaced = setxattr(path, name, b"v", XattrFlags::REPLACE);
                let got = getxattr(path, name, &mut [0; 64]).map(drop);
                [set, replaced, got, removexattr(path, name)]
            })
        };
        for name in
            ["system.", "system.foo", "system.posix_acl_accessx", "system.data", "bogus.x", "btrfs.y", "User.a", "plain", ".x"]
        {
            for user in [ROOT, OWNER] {
                assert_eq!(calls(user, name), [Err(Errno::OPNOTSUPP); 4], "{name} by {user}");
            }
        }
        // The kernel does not look at permissions where an attribute is the system's.
        assert_eq!(calls(OTHER, "system.foo"), [Err(Errno::OPNOTSUPP); 4]);
        assert_eq!(calls(OWNER, "user."), [Err(Errno::INVAL); 4]);
        for name in ["user.", "trusted.", "security."] {
            assert_eq!(calls(ROOT, name), [Err(Errno::INVAL); 4], "{name}");
        }
        for name in ["user.a", "trusted.a", "security.a"] {
            assert_eq!(calls(ROOT, name), [Ok(()); 4], "{name}");
        }
        // An ACL that is not there is removed without ado.
        for name in ["system.posix_acl_access", "system.posix_acl_default"] {
            assert_eq!(as_user(OWNER, || removexattr(path, name)), Ok(()), "{name}");
            // A file can have no default ACL, so there the kernel says so to all.
            if path.is_dir() || name.ends_with("access") {
                assert_eq!(as_user(OTHER, || removexattr(path, name)), Err(Errno::PERM), "{name}");
            }
        }
    }
}

#[test]
fn trusted_attributes_are_listed_to_those_who_may_read_them() {
    needs_mount!();
    let volume = mounted();
    let path = volume.path("file");
    make(&path, 0o644, false);
    for name in ["trusted.t", "user.u", "security.s"] {
        setxattr(&path, name, b"v", XattrFlags::empty()).unwrap();
    }
    let list = || {
        let mut names = [0_u8; 200];
        let len = listxattr(&path, &mut names).unwrap();
        let mut names: Vec<_> =
            names[..len].split(|byte| *byte == 0).map(|name| String::from_utf8(name.to_vec()).unwrap()).collect();
        names.retain(|name| !name.is_empty());
        names.sort();
        names
    };
    assert_eq!(list(), ["security.s", "trusted.t", "user.u"]);
    assert_eq!(as_user(OWNER, list), ["security.s", "user.u"]);
    let without_admin = || {
        let mut sets = rustix::thread::capabilities(None).unwrap();
        sets.effective -= rustix::thread::CapabilitySet::SYS_ADMIN;
        rustix::thread::set_capabilities(None, sets).unwrap();
        list()
    };
    assert_eq!(as_user(ROOT, without_admin), ["security.s", "user.u"], "root in a container");
    // So cp takes all that it finds.
    removexattr(&path, "security.s").unwrap();
    let copied =
        Command::new("cp").args(["--preserve=xattr", "file", "copy"]).current_dir(volume.root()).uid(OTHER).gid(OTHER).output();
    let copied = copied.unwrap();
    assert!(copied.status.success(), "{copied:?}");
}

#[test]
fn attributes_of_a_file_can_always_be_listed() {
    needs_mount!();
    let volume = Image::formatted().mount();
    let path = volume.path("file");
    make(&path, 0o644, false);
    let set = |i: u32| as_user(OWNER, || setxattr(&path, format!("user.{i:0>250}"), &[1; 3000], XattrFlags::empty()));
    // 256 bytes each: as many as fit what listxattr(2) returns.
    let mut attributes = 0..1000;
    let full = attributes.find_map(|i| set(i).err().map(|error| (i, error)));
    assert_eq!(full, Some((256, Errno::NOSPC)));
    let mut names = vec![0; 65536];
    assert_eq!(listxattr(&path, &mut names), Ok(65536));
    assert_eq!(set(255), Ok(()), "one that is there is replaced");
    assert_eq!(removexattr(&path, format!("user.{:0>250}", 7)), Ok(()));
    assert_eq!(set(300), Ok(()));
    let error = io::Error::from(set(301).unwrap_err());
    assert_eq!(error.raw_os_error(), Some(libc::ENOSPC));
}

/// The kernel sees to it since Linux 6.0, the daemon before that.
#[test]
fn a_file_made_in_a_shared_folder_has_its_groups_privileges_only_from_a_member() {
    needs_mount!();
    let volume = mounted();
    let folder = volume.path("shared");
    fs::create_dir(&folder).unwrap();
    chown(&folder, Some(ROOT), Some(OTHER)).unwrap();
    fs::set_permissions(&folder, fs::Permissions::from_mode(0o2777)).unwrap();
    let make = |name: &str, groups: &[u32]| {
        let path = folder.join(name);
        as_member(OWNER, groups, || OpenOptions::new().write(true).create_new(true).mode(0o2755).open(&path).unwrap());
        let made = fs::metadata(&path).unwrap();
        assert_eq!((made.uid(), made.gid()), (OWNER, OTHER));
        mode(&path)
    };
    assert_eq!(make("member", &[1, OTHER]), 0o2755);
    assert_eq!(make("stranger", &[1]), 0o755);
}
