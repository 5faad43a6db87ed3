//! The structures and numbers of `linux/fuse.h`, bit for bit. Those that only this crate uses keep
//! the names of their fields there.

use bitflags::bitflags;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Version of the protocol (`FUSE_KERNEL_VERSION`).
pub const MAJOR: u32 = 7;
/// The newest minor version that this crate knows; with an older kernel, its version is spoken.
pub const MINOR: u32 = 45;
/// The oldest minor version that is spoken (Linux 5.4).
pub const OLDEST_MINOR: u32 = 31;

bitflags! {
    /// Capabilities that are negotiated at INIT. The upper half travels in `flags2`.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct InitFlags: u64 {
        /// Reads ahead are sent without waiting for each other.
        const ASYNC_READ = 1 << 0;
        /// open(2) with `O_TRUNC` is one request.
        const ATOMIC_O_TRUNC = 1 << 3;
        /// Lookups of `.` and `..` are handled, so that the filesystem can be exported.
        const EXPORT_SUPPORT = 1 << 4;
        /// Writes may be larger than a page.
        const BIG_WRITES = 1 << 5;
        /// The umask is applied by the filesystem.
        const DONT_MASK = 1 << 6;
        /// Ioctls on directories.
        const HAS_IOCTL_DIR = 1 << 11;
        /// READDIRPLUS: entries with their attributes.
        const DO_READDIRPLUS = 1 << 13;
        /// READDIRPLUS only where the attributes are likely to be used.
        const READDIRPLUS_AUTO = 1 << 14;
        /// Direct I/O is sent without waiting for each part.
        const ASYNC_DIO = 1 << 15;
        /// The kernel keeps dirty pages and times.
        const WRITEBACK_CACHE = 1 << 16;
        /// OPEN answered with ENOSYS is not sent again.
        const NO_OPEN_SUPPORT = 1 << 17;
        /// Lookups and readdirs of one directory at once.
        const PARALLEL_DIROPS = 1 << 18;
        /// POSIX ACLs.
        const POSIX_ACL = 1 << 20;
        /// Reading the device of an aborted connection fails with ECONNABORTED.
        const ABORT_ERROR = 1 << 21;
        /// `max_pages` of the reply counts.
        const MAX_PAGES = 1 << 22;
        /// Targets of symbolic links are cached.
        const CACHE_SYMLINKS = 1 << 23;
        /// OPENDIR answered with ENOSYS is not sent again.
        const NO_OPENDIR_SUPPORT = 1 << 24;
        /// Pages are invalidated only when the filesystem says so.
        const EXPLICIT_INVAL_DATA = 1 << 25;
        /// The filesystem strips set-user-id bits, where flags of requests say so.
        const HANDLE_KILLPRIV_V2 = 1 << 28;
        /// SETXATTR carries flags.
        const SETXATTR_EXT = 1 << 29;
        /// `flags2` counts.
        const INIT_EXT = 1 << 30;
        /// Requests that create carry security contexts.
        const SECURITY_CTX = 1 << 32;
        /// Requests that create carry the caller's group that is the parent directory's.
        const CREATE_SUPP_GROUP = 1 << 34;
        /// Entries can be made to expire.
        const HAS_EXPIRE_ONLY = 1 << 35;
        /// Shared mappings of files open for direct I/O.
        const DIRECT_IO_ALLOW_MMAP = 1 << 36;
        /// Files that are read and written past the filesystem.
        const PASSTHROUGH = 1 << 37;
        /// File handles are not supported.
        const NO_EXPORT_SUPPORT = 1 << 38;
        /// Requests may be sent again.
        const HAS_RESEND = 1 << 39;
        /// Mounts may be idmapped.
        const ALLOW_IDMAP = 1 << 40;
        /// Requests may travel through io_uring.
        const OVER_IO_URING = 1 << 41;
        /// Requests may time out.
        const REQUEST_TIMEOUT = 1 << 42;
    }
}

bitflags! {
    /// How a file is open (`FOPEN_*`), in the reply to OPEN and CREATE.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct OpenFlags: u32 {
        /// Its pages stay in the kernel's cache.
        const KEEP_CACHE = 1 << 1;
        /// close(2) sends no FLUSH.
        const NO_FLUSH = 1 << 5;
        /// Direct writes to it run side by side.
        const PARALLEL_DIRECT_WRITES = 1 << 6;
    }
}

pub(crate) mod opcode {
    //! `enum fuse_opcode`.

    macro_rules! opcodes {
        ($($name:ident = $value:literal, $text:literal;)*) => {
            $(pub const $name: u32 = $value;)*

            /// The name of an operation, as the kernel's source has it, in small letters.
            pub fn name(opcode: u32) -> &'static str {
                match opcode {
                    $($value => $text,)*
                    _ => "unknown",
                }
            }
        };
    }

    /// How many numbers are counted apart; the largest of them is less.
    pub const KINDS: usize = 64;

    opcodes! {
        LOOKUP = 1, "lookup";
        FORGET = 2, "forget";
        GETATTR = 3, "getattr";
        SETATTR = 4, "setattr";
        READLINK = 5, "readlink";
        SYMLINK = 6, "symlink";
        MKNOD = 8, "mknod";
        MKDIR = 9, "mkdir";
        UNLINK = 10, "unlink";
        RMDIR = 11, "rmdir";
        RENAME = 12, "rename";
        LINK = 13, "link";
        OPEN = 14, "open";
        READ = 15, "read";
        WRITE = 16, "write";
        STATFS = 17, "statfs";
        RELEASE = 18, "release";
        FSYNC = 20, "fsync";
        SETXATTR = 21, "setxattr";
        GETXATTR = 22, "getxattr";
        LISTXATTR = 23, "listxattr";
        REMOVEXATTR = 24, "removexattr";
        FLUSH = 25, "flush";
        INIT = 26, "init";
        OPENDIR = 27, "opendir";
        READDIR = 28, "readdir";
        RELEASEDIR = 29, "releasedir";
        FSYNCDIR = 30, "fsyncdir";
        CREATE = 35, "create";
        INTERRUPT = 36, "interrupt";
        DESTROY = 38, "destroy";
        IOCTL = 39, "ioctl";
        BATCH_FORGET = 42, "batch_forget";
        FALLOCATE = 43, "fallocate";
        READDIRPLUS = 44, "readdirplus";
        RENAME2 = 45, "rename2";
        LSEEK = 46, "lseek";
        COPY_FILE_RANGE = 47, "copy_file_range";
        SYNCFS = 50, "syncfs";
        TMPFILE = 51, "tmpfile";
        STATX = 52, "statx";
        COPY_FILE_RANGE_64 = 53, "copy_file_range_64";
    }
}

/// `enum fuse_uring_cmd`.
pub(crate) const REGISTER: u32 = 1;
pub(crate) const COMMIT_AND_FETCH: u32 = 2;

/// `enum fuse_notify_code`.
pub(crate) const NOTIFY_INVAL_INODE: i32 = 2;
pub(crate) const NOTIFY_STORE: i32 = 4;

pub(crate) const FATTR_MODE: u32 = 1 << 0;
pub(crate) const FATTR_UID: u32 = 1 << 1;
pub(crate) const FATTR_GID: u32 = 1 << 2;
pub(crate) const FATTR_SIZE: u32 = 1 << 3;
pub(crate) const FATTR_ATIME: u32 = 1 << 4;
pub(crate) const FATTR_MTIME: u32 = 1 << 5;
pub(crate) const FATTR_ATIME_NOW: u32 = 1 << 7;
pub(crate) const FATTR_MTIME_NOW: u32 = 1 << 8;
pub(crate) const FATTR_KILL_SUIDGID: u32 = 1 << 11;

pub(crate) const READ_LOCKOWNER: u32 = 1 << 1;
pub(crate) const WRITE_CACHE: u32 = 1 << 0;
pub(crate) const WRITE_LOCKOWNER: u32 = 1 << 1;
pub(crate) const WRITE_KILL_SUIDGID: u32 = 1 << 2;
pub(crate) const SETXATTR_ACL_KILL_SGID: u32 = 1 << 0;
/// Type of the extension that names groups (`FUSE_EXT_GROUPS`).
pub(crate) const EXT_GROUPS: u32 = 32;

/// Defines structures that are copied from and to the kernel's bytes.
macro_rules! structures {
    ($($(#[$doc:meta])* $vis:vis struct $name:ident { $($(#[$field_doc:meta])* $field_vis:vis $field:ident: $type:ty,)* })*) => { $(
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
        #[repr(C)]
        $vis struct $name {
            $($(#[$field_doc])* $field_vis $field: $type,)*
        }
    )* };
}

structures! {
    /// Attributes of an inode (`struct fuse_attr`). The default has all of them zero: with it, a
    /// lookup answers that a name does not exist.
    #[derive(Default)]
    pub struct Attr {
        /// Number of the inode.
        pub ino: u64,
        /// Size in bytes.
        pub size: u64,
        /// Space taken, in units of 512 bytes.
        pub blocks: u64,
        /// Seconds of the time of access; signed.
        pub atime: i64,
        /// Seconds of the time of modification; signed.
        pub mtime: i64,
        /// Seconds of the time of change; signed.
        pub ctime: i64,
        /// Nanoseconds of the time of access.
        pub atimensec: u32,
        /// Nanoseconds of the time of modification.
        pub mtimensec: u32,
        /// Nanoseconds of the time of change.
        pub ctimensec: u32,
        /// Type and permissions.
        pub mode: u32,
        /// Number of links.
        pub nlink: u32,
        /// Owner.
        pub uid: u32,
        /// Group.
        pub gid: u32,
        /// Number of the device, of a device.
        pub rdev: u32,
        /// Preferred size of I/O in bytes.
        pub blksize: u32,
        /// `FUSE_ATTR_*`.
        pub flags: u32,
    }

    /// The answer to statfs(2) (`struct fuse_kstatfs`). Unused fields are zero.
    #[derive(Default)]
    pub struct Statfs {
        /// Blocks of the filesystem.
        pub blocks: u64,
        /// Free blocks.
        pub bfree: u64,
        /// Free blocks that users other than root may have.
        pub bavail: u64,
        /// Inodes.
        pub files: u64,
        /// Free inodes.
        pub ffree: u64,
        /// Preferred size of I/O in bytes.
        pub bsize: u32,
        /// The longest name, in bytes.
        pub namelen: u32,
        /// Bytes of a block.
        pub frsize: u32,
        /// Zero.
        pub padding: u32,
        /// Zero.
        pub spare: [u32; 6],
    }

    pub(crate) struct InHeader {
        pub len: u32,
        pub opcode: u32,
        pub unique: u64,
        pub nodeid: u64,
        pub uid: u32,
        pub gid: u32,
        pub pid: u32,
        pub total_extlen: u16,
        pub padding: u16,
    }

    pub(crate) struct OutHeader {
        pub len: u32,
        pub error: i32,
        pub unique: u64,
    }

    pub(crate) struct InitIn {
        pub major: u32,
        pub minor: u32,
        pub max_readahead: u32,
        pub flags: u32,
        pub flags2: u32,
        pub unused: [u32; 11],
    }

    pub(crate) struct InitOut {
        pub major: u32,
        pub minor: u32,
        pub max_readahead: u32,
        pub flags: u32,
        pub max_background: u16,
        pub congestion_threshold: u16,
        pub max_write: u32,
        pub time_gran: u32,
        pub max_pages: u16,
        pub map_alignment: u16,
        pub flags2: u32,
        pub max_stack_depth: u32,
        pub request_timeout: u16,
        pub unused: [u16; 11],
    }

    pub(crate) struct EntryOut {
        pub nodeid: u64,
        pub generation: u64,
        pub entry_valid: u64,
        pub attr_valid: u64,
        pub entry_valid_nsec: u32,
        pub attr_valid_nsec: u32,
        pub attr: Attr,
    }

    pub(crate) struct AttrOut {
        pub attr_valid: u64,
        pub attr_valid_nsec: u32,
        pub dummy: u32,
        pub attr: Attr,
    }

    pub(crate) struct OpenOut {
        pub fh: u64,
        pub open_flags: u32,
        pub backing_id: i32,
    }

    /// What CREATE is answered with: two structures.
    pub(crate) struct CreateOut {
        pub entry: EntryOut,
        pub open: OpenOut,
    }

    pub(crate) struct SxTime {
        pub tv_sec: i64,
        pub tv_nsec: u32,
        pub reserved: i32,
    }

    pub(crate) struct Statx {
        pub mask: u32,
        pub blksize: u32,
        pub attributes: u64,
        pub nlink: u32,
        pub uid: u32,
        pub gid: u32,
        pub mode: u16,
        pub spare0: u16,
        pub ino: u64,
        pub size: u64,
        pub blocks: u64,
        pub attributes_mask: u64,
        pub atime: SxTime,
        pub btime: SxTime,
        pub ctime: SxTime,
        pub mtime: SxTime,
        pub rdev_major: u32,
        pub rdev_minor: u32,
        pub dev_major: u32,
        pub dev_minor: u32,
        pub spare2: [u64; 14],
    }

    pub(crate) struct StatxOut {
        pub attr_valid: u64,
        pub attr_valid_nsec: u32,
        pub flags: u32,
        pub spare: [u64; 2],
        pub stat: Statx,
    }

    pub(crate) struct SizeOut {
        pub size: u32,
        pub padding: u32,
    }

    pub(crate) struct IoctlOut {
        pub result: i32,
        pub flags: u32,
        pub in_iovs: u32,
        pub out_iovs: u32,
    }

    pub(crate) struct ForgetOne {
        pub nodeid: u64,
        pub nlookup: u64,
    }

    pub(crate) struct BatchForgetIn {
        pub count: u32,
        pub dummy: u32,
    }

    pub(crate) struct GetattrIn {
        pub getattr_flags: u32,
        pub dummy: u32,
        pub fh: u64,
    }

    pub(crate) struct SetattrIn {
        pub valid: u32,
        pub padding: u32,
        pub fh: u64,
        pub size: u64,
        pub lock_owner: u64,
        pub atime: i64,
        pub mtime: i64,
        pub ctime: i64,
        pub atimensec: u32,
        pub mtimensec: u32,
        pub ctimensec: u32,
        pub mode: u32,
        pub unused4: u32,
        pub uid: u32,
        pub gid: u32,
        pub unused5: u32,
    }

    pub(crate) struct MknodIn {
        pub mode: u32,
        pub rdev: u32,
        pub umask: u32,
        pub padding: u32,
    }

    pub(crate) struct MkdirIn {
        pub mode: u32,
        pub umask: u32,
    }

    pub(crate) struct Rename2In {
        pub newdir: u64,
        pub flags: u32,
        pub padding: u32,
    }

    pub(crate) struct OpenIn {
        pub flags: u32,
        pub open_flags: u32,
    }

    pub(crate) struct CreateIn {
        pub flags: u32,
        pub mode: u32,
        pub umask: u32,
        pub open_flags: u32,
    }

    pub(crate) struct ReleaseIn {
        pub fh: u64,
        pub flags: u32,
        pub release_flags: u32,
        pub lock_owner: u64,
    }

    pub(crate) struct FlushIn {
        pub fh: u64,
        pub unused: u32,
        pub padding: u32,
        pub lock_owner: u64,
    }

    /// READ, READDIR and READDIRPLUS.
    pub(crate) struct ReadIn {
        pub fh: u64,
        pub offset: u64,
        pub size: u32,
        pub read_flags: u32,
        pub lock_owner: u64,
        pub flags: u32,
        pub padding: u32,
    }

    pub(crate) struct WriteIn {
        pub fh: u64,
        pub offset: u64,
        pub size: u32,
        pub write_flags: u32,
        pub lock_owner: u64,
        pub flags: u32,
        pub padding: u32,
    }

    pub(crate) struct FsyncIn {
        pub fh: u64,
        pub fsync_flags: u32,
        pub padding: u32,
    }

    /// With the capability SETXATTR_EXT; without it, the first half.
    pub(crate) struct SetxattrIn {
        pub size: u32,
        pub flags: u32,
        pub setxattr_flags: u32,
        pub padding: u32,
    }

    pub(crate) struct SetxattrCompatIn {
        pub size: u32,
        pub flags: u32,
    }

    pub(crate) struct GetxattrIn {
        pub size: u32,
        pub padding: u32,
    }

    pub(crate) struct IoctlIn {
        pub fh: u64,
        pub flags: u32,
        pub cmd: u32,
        pub arg: u64,
        pub in_size: u32,
        pub out_size: u32,
    }

    pub(crate) struct FallocateIn {
        pub fh: u64,
        pub offset: u64,
        pub length: u64,
        pub mode: u32,
        pub padding: u32,
    }

    pub(crate) struct LseekIn {
        pub fh: u64,
        pub offset: u64,
        pub whence: u32,
        pub padding: u32,
    }

    pub(crate) struct CopyFileRangeIn {
        pub fh_in: u64,
        pub off_in: u64,
        pub nodeid_out: u64,
        pub fh_out: u64,
        pub off_out: u64,
        pub len: u64,
        pub flags: u64,
    }

    pub(crate) struct StatxIn {
        pub getattr_flags: u32,
        pub reserved: u32,
        pub fh: u64,
        pub sx_flags: u32,
        pub sx_mask: u32,
    }

    /// Before a name (`struct fuse_dirent`).
    pub(crate) struct Dirent {
        pub ino: u64,
        pub off: u64,
        pub namelen: u32,
        pub r#type: u32,
    }

    /// Before an extension of a request.
    pub(crate) struct ExtHeader {
        pub size: u32,
        pub r#type: u32,
    }

    /// What the kernel and an entry of a queue exchange besides the payload
    /// (`struct fuse_uring_req_header`).
    pub(crate) struct RingHeader {
        /// The header of the request; then of the reply.
        pub in_out: [u8; 128],
        /// The structure that the operation begins with.
        pub op_in: [u8; 128],
        pub flags: u64,
        pub commit_id: u64,
        pub payload_sz: u32,
        pub padding: u32,
        pub reserved: u64,
    }

    /// The command area of a submission (`struct fuse_uring_cmd_req`).
    pub(crate) struct RingCommand {
        pub flags: u64,
        pub commit_id: u64,
        pub qid: u16,
        pub padding: [u8; 6],
    }

    pub(crate) struct NotifyInvalInodeOut {
        pub ino: u64,
        pub off: i64,
        pub len: i64,
    }

    pub(crate) struct NotifyStoreOut {
        pub nodeid: u64,
        pub offset: u64,
        pub size: u32,
        pub padding: u32,
    }
}

#[cfg(test)]
mod tests;
