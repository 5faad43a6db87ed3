//! Mounts of this process's mount namespace, from `/proc/self/mountinfo` (proc_pid_mountinfo(5)).

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use gpunvme_blockdev::{path_of, without_options};
use rustix::fs::{AtFlags, CWD, Mode, OFlags, ResolveFlags, StatxFlags, lgetxattr, openat2, statx};
use rustix::io::Errno;
use rustix::path::Arg;

use crate::below::has_users;
use crate::limited::within;

/// The type under which the kernel lists our mounts, but for those of block devices.
pub const FS_TYPE: &str = "fuse.gpunvme";
/// The type of a mount whose superblock claims its block device (`fuseblk`).
pub const BLOCK_FS_TYPE: &str = "fuseblk.gpunvme";

/// How long a daemon that lives may take to answer. One that has gone answers at once: the kernel
/// does it.
const ANSWER_LIMIT: Duration = Duration::from_secs(1);
/// An attribute that no file has. Of attributes of this class (xattr(7)) the kernel asks the daemon
/// for every user. To root, where the mount is another user's, it would answer stat(2) and
/// statfs(2) by itself, as if there were a daemon.
const QUESTION: &str = "security.gpunvme.answer";

/// One mount of this process's mount namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mount {
    /// The number that the kernel has for it (`STATX_MNT_ID`), until it is unmounted.
    pub id: u64,
    /// The device number that files on it show in `st_dev`.
    pub dev: u64,
    /// The mount point.
    pub dir: PathBuf,
    /// The filesystem type, as in `ext4` or `fuse.gpunvme`.
    pub fs_type: String,
    /// Source of the mount: a device, or any other name.
    pub source: OsString,
    /// The user who made it, of a mount of FUSE.
    pub user: Option<u32>,
    /// The group of that user.
    pub group: Option<u32>,
}

impl Mount {
    /// All mounts.
    ///
    /// # Errors
    /// If `/proc` is not there to ask.
    pub fn all() -> io::Result<Vec<Self>> {
        let table = std::fs::read("/proc/self/mountinfo")?;
        Ok(table.split(|&byte| byte == b'\n').filter_map(Self::parse).collect())
    }

    /// The mount on `dir`, a real path; the uppermost if there are several. Asks the mount table
    /// and not the mount, which would wait for its daemon.
    ///
    /// # Errors
    /// If nothing is mounted there.
    pub fn on(dir: &Path) -> io::Result<Self> {
        let missing = || io::Error::new(io::ErrorKind::NotFound, "nothing is mounted there");
        Self::all()?.into_iter().rfind(|mount| mount.dir == dir).ok_or_else(missing)
    }

    /// Whether it is a mount of a gpunvme volume.
    pub fn is_ours(&self) -> bool {
        self.fs_type == FS_TYPE || self.claims_its_device()
    }

    /// Whether it is one of ours whose superblock claims the block device.
    pub fn claims_its_device(&self) -> bool {
        self.fs_type == BLOCK_FS_TYPE
    }

    /// Whether its daemon has gone without unmounting it. One that was stopped has not; while that
    /// one does not answer, umount(8) finds its mount in use, and this process cannot end.
    pub fn is_dead(&self) -> bool {
        let dir = self.dir.clone();
        within(ANSWER_LIMIT, move || is_dead(dir)).unwrap_or(false)
    }

    /// Whether it is one of ours that claims `device`, a path, and whose daemon has gone without
    /// unmounting it. A daemon that lives has a lock, or else answers.
    pub fn is_left_behind(&self, device: &Path) -> bool {
        self.claims_its_device() && !has_users(device) && self.is_dead()
    }

    /// The mounts of `device`: those of a filesystem in the kernel that has it open, and ours that
    /// name it as their source. Another file may have had that name when they were made. No mount
    /// and no source of one is asked for anything.
    ///
    /// # Errors
    /// If `/proc` is not there to ask.
    pub fn all_of(device: &str) -> io::Result<Vec<Self>> {
        let status = path_of(device).and_then(|path| std::fs::metadata(path).ok());
        let rdev = status.filter(|status| status.file_type().is_block_device()).map(|status| status.rdev());
        let uses = |mount: &Self| Some(mount.dev) == rdev || (mount.is_ours() && is_same(&mount.source, device));
        Ok(Self::all()?.into_iter().filter(uses).collect())
    }

    fn parse(line: &[u8]) -> Option<Self> {
        let mut fields = line.split(|&byte| byte == b' ');
        let id = std::str::from_utf8(fields.next()?).ok()?.parse().ok()?;
        let (major, minor) = std::str::from_utf8(fields.nth(1)?).ok()?.split_once(':')?;
        let dir = unescape(fields.nth(1)?);
        let mut fields = fields.skip_while(|field| *field != b"-").skip(1);
        let (fs_type, source) = (fields.next()?, fields.next()?);
        let options = fields.next().unwrap_or_default();
        let number = |name: &[u8]| {
            let number = options.split(|byte| *byte == b',').find_map(|option| option.strip_prefix(name))?;
            std::str::from_utf8(number).ok()?.parse().ok()
        };
        Some(Self {
            id,
            dev: rustix::fs::makedev(major.parse().ok()?, minor.parse().ok()?),
            dir: dir.into(),
            fs_type: String::from_utf8_lossy(fs_type).into_owned(),
            source: unescape(source),
            user: number(b"user_id="),
            group: number(b"group_id="),
        })
    }
}

/// As [`Mount::is_dead`], of the mount on a directory. It waits for the daemon for as long as that
/// takes, and the thread that does cannot be killed.
pub fn is_dead(dir: impl Arg) -> bool {
    matches!(lgetxattr(dir, QUESTION, &mut [0; 0]), Err(Errno::NOTCONN | Errno::CONNABORTED))
}

/// Whether a mount's source is this device: by its text but for options, by the device's real path,
/// which our mounts have as their source, or by another name of the same file.
fn is_same(source: &OsStr, device: &str) -> bool {
    let Some(source) = source.to_str() else { return source == device };
    if without_options(source) == without_options(device) {
        return true;
    }
    let (Some(source), Some(device)) = (path_of(source), path_of(device)) else { return false };
    device.canonicalize().is_ok_and(|real| real == source)
        || matches!((known(source), std::fs::metadata(device)), (Some(a), Ok(b)) if a == (b.dev(), b.ino()))
}

/// Device and inode of what a path names, as the kernel knows them without asking a filesystem. A
/// mount's source may lie on one that does not answer, and a user may have made that so. The source
/// of a daemon that lives is mostly known: the daemon has it open by that path.
fn known(path: &Path) -> Option<(u64, u64)> {
    let file = openat2(CWD, path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty(), ResolveFlags::CACHED).ok()?;
    let status = statx(file, "", AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC, StatxFlags::INO).ok()?;
    Some((rustix::fs::makedev(status.stx_dev_major, status.stx_dev_minor), status.stx_ino))
}

/// As libmount writes names into its table. The kernel has these four escaped in its own, and more.
pub fn escape(name: &OsStr) -> Vec<u8> {
    let escaped = |byte: &u8| match byte {
        b' ' | b'\t' | b'\n' | b'\\' => format!("\\{byte:03o}").into_bytes(),
        byte => vec![*byte],
    };
    name.as_bytes().iter().flat_map(escaped).collect()
}

/// The kernel writes space, tab, newline and backslash as `\` and three octal digits.
fn unescape(field: &[u8]) -> OsString {
    let mut bytes = Vec::with_capacity(field.len());
    let mut rest = field;
    while let [first, tail @ ..] = rest {
        let code = tail.get(..3).and_then(|digits| u8::from_str_radix(std::str::from_utf8(digits).ok()?, 8).ok());
        match code {
            Some(code) if *first == b'\\' => {
                bytes.push(code);
                rest = &tail[3..];
            }
            _ => {
                bytes.push(*first);
                rest = tail;
            }
        }
    }
    OsString::from_vec(bytes)
}

#[cfg(test)]
mod tests {
    use std::ffi::CString;
    use std::os::fd::AsRawFd;

    use rustix::fs::{Mode, OFlags};
    use rustix::mount::{MountFlags, UnmountFlags};

    use super::*;

    #[test]
    fn reads_a_line_with_optional_fields_and_escapes() {
        let line =
            br"36 35 98:5 /mnt1 /mnt/my\040data rw,noatime master:1 shared:2 - fuse.gpunvme /img/a\134b rw,user_id=0,group_id=7";
        let mount = Mount::parse(line).unwrap();
        assert_eq!((mount.id, mount.dev), (36, rustix::fs::makedev(98, 5)));
        assert_eq!(mount.dir, PathBuf::from("/mnt/my data"));
        assert_eq!(mount.fs_type, "fuse.gpunvme");
        assert!(mount.is_ours() && !mount.claims_its_device());
        assert_eq!(mount.source, OsString::from(r"/img/a\b"));
        assert_eq!((mount.user, mount.group), (Some(0), Some(7)));
        let plain = Mount::parse(b"22 1 0:20 / /sys nosuid,ro - sysfs sysfs rw").unwrap();
        assert_eq!((&plain.fs_type[..], plain.user), ("sysfs", None));
        assert!(!plain.is_ours());
        let of_a_device = br"37 35 7:0 / /mnt rw - fuseblk.gpunvme /dev/loop0 rw,blksize=4096";
        assert!(Mount::parse(of_a_device).is_some_and(|mount| mount.is_ours() && mount.claims_its_device()));
        assert_eq!(Mount::parse(b""), None);
        let name = OsStr::from_bytes(b"a b\tc\nd\\e#\xff");
        assert_eq!(escape(name), br"a\040b\011c\012d\134e#".iter().chain(b"\xff").copied().collect::<Vec<_>>());
        assert_eq!(unescape(&escape(name)), name);
    }

    /// A mount of another user's, whom root is not allowed to ask by statfs(2).
    #[test]
    fn a_mount_is_dead_when_its_connection_is_closed() {
        let connection = rustix::fs::open("/dev/fuse", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty());
        let dir = tempfile::tempdir().unwrap();
        let mounted = connection.and_then(|connection| {
            let fd = connection.as_raw_fd();
            let options = format!("fd={fd},rootmode=40000,user_id=4711,group_id=4711,subtype=gpunvme");
            let options = CString::new(options).unwrap();
            rustix::mount::mount("/image", dir.path(), "fuse", MountFlags::empty(), options.as_c_str()).map(|()| connection)
        });
        let Ok(connection) = mounted else { return eprintln!("SKIPPED: nothing can be mounted here") };
        let mount = Mount::on(&dir.path().canonicalize().unwrap());
        // No daemon answers.
        let stopped = mount.as_ref().map(Mount::is_dead);
        drop(connection);
        let closed = mount.as_ref().map(Mount::is_dead);
        rustix::mount::unmount(dir.path(), UnmountFlags::DETACH).unwrap();
        assert_eq!((stopped.unwrap(), closed.unwrap()), (false, true));
    }

    #[test]
    fn finds_proc_itself() {
        let mounts = Mount::all().unwrap();
        assert!(mounts.iter().any(|mount| mount.fs_type == "proc" && mount.dir == Path::new("/proc")));
    }

    #[test]
    fn names_and_hard_links_of_one_file_are_the_same_device() {
        let dir = tempfile::tempdir().unwrap();
        let (image, link, other) = (dir.path().join("image"), dir.path().join("link"), dir.path().join("other"));
        std::fs::write(&image, "").unwrap();
        std::fs::write(&other, "").unwrap();
        std::fs::hard_link(&image, &link).unwrap();
        assert!(is_same(image.as_os_str(), link.to_str().unwrap()));
        assert!(!is_same(image.as_os_str(), other.to_str().unwrap()));
        assert!(is_same(image.as_os_str(), &format!("sim:{},ns=2", link.display())));
        assert!(is_same("vfio:0000:01:00.0".as_ref(), "vfio:0000:01:00.0"));
        assert!(is_same("vfio:0000:01:00.0,ns=2".as_ref(), "vfio:0000:01:00.0,queues=4"));
        assert!(!is_same("vfio:0000:01:00.0".as_ref(), "vfio:0000:02:00.0"));
    }
}
