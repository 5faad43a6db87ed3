//! The settings of the FUSE transport: those of the daemon, in `fs/mount/src/front/fuse.rs`, so
//! that the two differ in what answers the requests and in nothing else.

use std::time::{Duration, SystemTime};

use fuser::{Config, FileAttr, FileType, FopenFlags, INodeNo, InitFlags, KernelConfig, MountOption, SessionACL};

/// How long the kernel may keep entries and attributes: only requests of this kernel change them.
pub const LIFETIME: Duration = Duration::from_secs(3600);
/// The largest request.
const MAX_WRITE: u32 = 1 << 20;

/// What the kernel may do with an opened file. Closing one that was written is announced, so that
/// an error can be reported.
pub fn opened(flags: i32) -> FopenFlags {
    let always = FopenFlags::FOPEN_KEEP_CACHE | FopenFlags::FOPEN_PARALLEL_DIRECT_WRITES;
    if flags & libc::O_ACCMODE == libc::O_RDONLY { always | FopenFlags::FOPEN_NOFLUSH } else { always }
}

/// Attributes of inode 0, for the answer that there is nothing of a name.
pub const NOTHING: FileAttr = FileAttr {
    ino: INodeNo(0),
    size: 0,
    blocks: 0,
    atime: SystemTime::UNIX_EPOCH,
    mtime: SystemTime::UNIX_EPOCH,
    ctime: SystemTime::UNIX_EPOCH,
    crtime: SystemTime::UNIX_EPOCH,
    kind: FileType::RegularFile,
    perm: 0,
    nlink: 0,
    uid: 0,
    gid: 0,
    rdev: 0,
    blksize: 0,
    flags: 0,
};

/// The session: loops, and how it is mounted.
pub fn session(threads: usize) -> Config {
    let mut config = Config::default();
    config.mount_options = vec![
        MountOption::FSName("memfs".into()),
        MountOption::Subtype("memfs".into()),
        MountOption::DefaultPermissions,
        MountOption::Dev,
        MountOption::Suid,
    ];
    config.acl = SessionACL::All;
    config.n_threads = Some(threads);
    config.clone_fd = true;
    config
}

/// What is agreed with the kernel when the session starts.
pub fn negotiate(config: &mut KernelConfig) {
    let wanted = InitFlags::FUSE_DO_READDIRPLUS
        | InitFlags::FUSE_READDIRPLUS_AUTO
        | InitFlags::FUSE_PARALLEL_DIROPS
        | InitFlags::FUSE_ASYNC_DIO
        | InitFlags::FUSE_CACHE_SYMLINKS
        | InitFlags::FUSE_MAX_PAGES
        | InitFlags::FUSE_POSIX_ACL
        | InitFlags::FUSE_DONT_MASK
        | InitFlags::FUSE_EXPORT_SUPPORT
        | InitFlags::FUSE_HAS_IOCTL_DIR
        // No set-user-id program runs from here: only the requests that it saves count.
        | InitFlags::FUSE_HANDLE_KILLPRIV_V2
        | InitFlags::FUSE_EXPLICIT_INVAL_DATA
        | InitFlags::FUSE_NO_OPENDIR_SUPPORT;
    // What an older kernel lacks is left out.
    let _ = config.add_capabilities(wanted & config.capabilities());
    let _ = config.set_max_write(MAX_WRITE);
    let _ = config.set_max_background(256);
    let _ = config.set_congestion_threshold(192);
}
