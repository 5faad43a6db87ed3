//! What a process may do with a file: the access that it has the file open for. The kernel tells
//! nothing of it with an ioctl once opens ask nobody (`FUSE_NO_OPEN_SUPPORT`), and a process is not
//! believed; so it names a descriptor, and the daemon looks at that.
//!
//! It guards files against processes that have them open for less. What counts is that the process
//! has a descriptor of this very file, open for this access: it need not be the one that the ioctl
//! was called on. No question here is a request to this daemon itself. But the process may put
//! another descriptor in the place of the one that it named. The kernel's text about an epoll
//! descriptor waits for the thread that is in epoll_wait(2), and closing the last reference to a
//! file may wait for that file's server. So only threads of which each user has a quota look.

use crate::calling_thread::start_of;
use bitflags::bitflags;
use gpunvme_abi::Reason;
use rustix::fs::{AtFlags, Mode, OFlags, Statx, StatxFlags};
use rustix::io::Errno;
use std::os::fd::{AsFd, OwnedFd};

bitflags! {
    /// What a file is open for.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub struct Access: u64 {
        /// Reading.
        const READ = 1 << 0;
        /// Writing.
        const WRITE = 1 << 1;
        /// What is written is durable before the answer (`O_DSYNC`, `O_SYNC`).
        const SYNC = 1 << 2;
    }
}

/// A file among those of all filesystems.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FileId {
    /// Device number of its filesystem (`st_dev`).
    pub filesystem: u64,
    /// Inode number.
    pub ino: u64,
}

impl Access {
    /// That of a descriptor with these flags of open(2).
    fn of(flags: OFlags) -> Access {
        // A descriptor that only names a file allows nothing.
        if flags.contains(OFlags::PATH) {
            return Access::empty();
        }
        let access = match flags & OFlags::RWMODE {
            OFlags::RDONLY => Access::READ,
            OFlags::WRONLY => Access::WRITE,
            OFlags::RDWR => Access::READ | Access::WRITE,
            // Both bits: for ioctls, which may neither read nor write (open(2)).
            _ => Access::empty(),
        };
        // O_SYNC has the bit of O_DSYNC and one more (rustix gives both the bits of O_SYNC).
        if flags.bits() & libc::O_DSYNC as u32 != 0 { access | Access::SYNC } else { access }
    }
}

/// What a thread's descriptor of this number, which must be one of this file, is open for. `thread`
/// must name the thread that asks: nothing of its request has been answered. It may wait for the
/// thread's user.
///
/// # Errors
/// [`Reason::DescriptorHidden`] where the daemon may not look, [`Reason::WrongDescriptor`] where
/// there is no such descriptor of the file.
pub(crate) fn of_thread(thread: u32, number: i32, file: FileId) -> Result<Access, Reason> {
    let directory = format!("/proc/{thread}");
    // Held until the end, and with it the mount that the descriptor is of: its number is no other
    // mount's meanwhile.
    let path = rustix::fs::open(format!("{directory}/fd/{number}"), OFlags::PATH | OFlags::CLOEXEC, Mode::empty());
    let path = path.map_err(|errno| match errno {
        Errno::NOENT if thread != 0 && std::fs::exists(&directory).unwrap_or(false) => Reason::WrongDescriptor,
        _ => Reason::DescriptorHidden,
    })?;
    let seen = stat(&path)?;
    if id(&seen) != file {
        return Err(Reason::WrongDescriptor);
    }
    // The thread's process may have put another file in its place since. This is one text about one
    // open file, and it is of the same mount, so the number of its inode is one of this filesystem.
    let text = start_of(&format!("{directory}/fdinfo/{number}")).map_err(|_| Reason::WrongDescriptor)?;
    let info = Info::parse(&text).ok_or(Reason::DescriptorHidden)?;
    if (info.mount, info.ino) != (seen.stx_mnt_id, file.ino) {
        return Err(Reason::WrongDescriptor);
    }
    Ok(Access::of(info.flags))
}

/// The inode number of a descriptor that was received, and what it is open for.
///
/// # Errors
/// [`Reason::WrongDescriptor`] where it is of another filesystem.
pub(crate) fn of_received(fd: &OwnedFd, filesystem: u64) -> Result<(u64, Access), Reason> {
    let file = id(&stat(fd)?);
    let flags = rustix::fs::fcntl_getfl(fd).map_err(|_| Reason::WrongDescriptor)?;
    if file.filesystem == filesystem { Ok((file.ino, Access::of(flags))) } else { Err(Reason::WrongDescriptor) }
}

/// What the kernel knows of a file without asking its server.
fn stat(fd: impl AsFd) -> Result<Statx, Reason> {
    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
    let stat = rustix::fs::statx(fd, "", flags, StatxFlags::INO | StatxFlags::MNT_ID);
    stat.map_err(|_| Reason::WrongDescriptor)
}

fn id(stat: &Statx) -> FileId {
    FileId { filesystem: rustix::fs::makedev(stat.stx_dev_major, stat.stx_dev_minor), ino: stat.stx_ino }
}

/// What `/proc/PID/fdinfo/NUMBER` says (proc_pid_fdinfo(5)); the inode from Linux 5.14 on.
#[derive(Debug, PartialEq, Eq)]
struct Info {
    flags: OFlags,
    mount: u64,
    ino: u64,
}

impl Info {
    fn parse(text: &str) -> Option<Info> {
        let field = |name: &str| text.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
        let flags = u32::from_str_radix(field("flags:")?, 8).ok()?;
        let number = |name| field(name)?.parse().ok();
        Some(Info { flags: OFlags::from_bits_retain(flags), mount: number("mnt_id:")?, ino: number("ino:")? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::os::fd::AsRawFd;
    use std::os::unix::fs::{MetadataExt, OpenOptionsExt};

    fn file_of(file: &File) -> FileId {
        let stat = file.metadata().unwrap();
        FileId { filesystem: stat.dev(), ino: stat.ino() }
    }

    /// As a thread of another process, and as one that sent it.
    fn shown(file: &File, of: FileId) -> Result<Access, Reason> {
        let by_number = of_thread(std::process::id(), file.as_raw_fd(), of);
        if let Ok(access) = by_number {
            let sent = file.try_clone().unwrap().into();
            assert_eq!(of_received(&sent, of.filesystem), Ok((of.ino, access)));
        }
        by_number
    }

    #[test]
    fn a_descriptor_shows_what_it_is_open_for() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        File::create(&path).unwrap();
        let open = |access: i32, more: i32| {
            let mut options = File::options();
            options.read(access != libc::O_WRONLY).write(access != libc::O_RDONLY).custom_flags(more);
            options.open(&path).unwrap()
        };
        let both = Access::READ | Access::WRITE;
        for (access, more, expected) in [
            (libc::O_RDONLY, 0, Access::READ),
            (libc::O_WRONLY, 0, Access::WRITE),
            (libc::O_RDWR, libc::O_APPEND | libc::O_DIRECT, both),
            (libc::O_RDWR, libc::O_DSYNC, both | Access::SYNC),
            (libc::O_WRONLY, libc::O_SYNC, Access::WRITE | Access::SYNC),
            (libc::O_RDONLY, libc::O_PATH, Access::empty()),
        ] {
            let file = open(access, more);
            assert_eq!(shown(&file, file_of(&file)), Ok(expected), "{access} {more:#o}");
        }
        let for_ioctls: File = rustix::fs::open(&path, OFlags::from_bits_retain(3), Mode::empty()).unwrap().into();
        assert_eq!(shown(&for_ioctls, file_of(&for_ioctls)), Ok(Access::empty()));
    }

    #[test]
    fn another_file_s_descriptor_shows_nothing() {
        let directory = tempfile::tempdir().unwrap();
        let [file, other] = ["a", "b"].map(|name| File::create(directory.path().join(name)).unwrap());
        assert_eq!(shown(&other, file_of(&file)), Err(Reason::WrongDescriptor));
        // The number of the inode alone is not the file: any user can mount a filesystem that has
        // it.
        let elsewhere = FileId { filesystem: 0, ..file_of(&file) };
        assert_eq!(shown(&file, elsewhere), Err(Reason::WrongDescriptor));
        assert_eq!(of_received(&file.try_clone().unwrap().into(), 0), Err(Reason::WrongDescriptor));
        for number in [-1, i32::MAX, 1_000_000] {
            assert_eq!(of_thread(std::process::id(), number, file_of(&file)), Err(Reason::WrongDescriptor));
        }
        for hidden in [0, u32::MAX] {
            assert_eq!(of_thread(hidden, file.as_raw_fd(), file_of(&file)), Err(Reason::DescriptorHidden));
        }
    }

    /// A process that puts another file in the place of the one that it named gains nothing.
    #[test]
    fn a_descriptor_that_changes_meanwhile_never_shows_more_than_either_is_open_for() {
        let directory = tempfile::tempdir().unwrap();
        let [path, other] = ["a", "b"].map(|name| directory.path().join(name));
        for path in [&path, &other] {
            File::create(path).unwrap();
        }
        let (reader, writer) = (File::open(&path).unwrap(), File::options().write(true).open(&other).unwrap());
        let (file, mut target): (_, OwnedFd) = (file_of(&reader), reader.try_clone().unwrap().into());
        let raw = target.as_raw_fd();
        let over = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for _ in 0..50_000 {
                    rustix::io::dup2(&writer, &mut target).unwrap();
                    rustix::io::dup2(&reader, &mut target).unwrap();
                }
                over.store(true, std::sync::atomic::Ordering::Relaxed);
            });
            while !over.load(std::sync::atomic::Ordering::Relaxed) {
                match of_thread(std::process::id(), raw, file) {
                    Ok(access) => assert_eq!(access, Access::READ),
                    Err(reason) => assert_eq!(reason, Reason::WrongDescriptor),
                }
            }
        });
    }

    #[test]
    fn the_kernel_s_text_is_read_as_a_whole_or_not_at_all() {
        let text = "pos:\t0\nflags:\t0100002\nmnt_id:\t31\nino:\t12\nlock:\t1: x\n";
        let info = Info { flags: OFlags::from_bits_retain(0o100_002), mount: 31, ino: 12 };
        assert_eq!(Info::parse(text), Some(info));
        for line in ["flags:\t0100002\n", "mnt_id:\t31\n", "ino:\t12\n"] {
            assert_eq!(Info::parse(&text.replace(line, "")), None);
        }
        assert_eq!(Info::parse(""), None);
    }
}
