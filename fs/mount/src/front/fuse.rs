//! The adapter to fuser 0.18: turns its requests into operations of [`Front`] and their results
//! into its replies, and negotiates with the kernel when a mount begins.

use std::ffi::OsStr;
use std::io;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use fuser::{
    BackgroundSession, BsdFileFlags, Config, CopyFileRangeFlags, Errno, FileHandle, FopenFlags, Generation, INodeNo, InitFlags,
    IoctlFlags, KernelConfig, LockOwner, OpenFlags, RenameFlags, ReplyAttr, ReplyCreate, ReplyData, ReplyDirectory,
    ReplyDirectoryPlus, ReplyEmpty, ReplyEntry, ReplyIoctl, ReplyLseek, ReplyOpen, ReplyStatfs, ReplyWrite, ReplyXattr, Request,
    SessionACL, TimeOrNow, WriteFlags,
};
use gpunvme_engine::BLOCK_SIZE;
use gpunvme_engine::NAME_MAX;

use super::attr;
use super::caller::Caller;
use super::handles::Handle;
use super::kernel::KernelCache;
use super::messages;
use super::operations::names::Listing;
use super::resources::idle_loops::{BusyLoop, IdleLoops};
use super::settings::Settings;
use super::shared::Front;
use super::write_request::WriteRequest;
use gpunvme_engine::error::FsError;
use gpunvme_engine::volume::{Attributes, DirEntry, NewNode, RenameMode, SetAttributes};

/// How long the kernel may keep entries and attributes. Only this mount changes them.
const LIFETIME: Duration = Duration::from_secs(3600);
/// The largest request, in bytes; the kernel's own limit (`fs.fuse.max_pages_limit`) is the same.
const MAX_WRITE: u32 = 1 << 20;
/// Background requests that the kernel sends at once: read-ahead, and direct I/O.
const MAX_BACKGROUND: u16 = 256;
/// Number of background requests from which on the kernel calls the mount congested.
const CONGESTION: u16 = 192;
/// Inode numbers are never used again, so one generation is enough.
const GENERATION: Generation = Generation(0);
/// Inodes that statfs(2) promises for each free block: an inode, its entry and what a tree needs
/// around them take no more.
const INODES_PER_BLOCK: u64 = 8;

/// Capabilities that are requested from the kernel, as far as it has them. Not requested:
/// - `WRITEBACK_CACHE` hides dirty pages from the direct path, and slows large writes down;
/// - `ATOMIC_O_TRUNC` would have open(2) cut a file before the kernel has looked whether it is a
///   program that runs (ETXTBSY), and the program die;
/// - `SETXATTR_EXT`, `SECURITY_CTX`, `CREATE_SUPP_GROUP`, `OVER_IO_URING`: change requests in ways
///   that fuser does not know.
const CAPABILITIES: InitFlags = InitFlags::FUSE_DO_READDIRPLUS
    .union(InitFlags::FUSE_READDIRPLUS_AUTO)
    .union(InitFlags::FUSE_PARALLEL_DIROPS)
    .union(InitFlags::FUSE_ASYNC_DIO)
    .union(InitFlags::FUSE_CACHE_SYMLINKS)
    .union(InitFlags::FUSE_MAX_PAGES)
    .union(InitFlags::FUSE_POSIX_ACL)
    .union(InitFlags::FUSE_DONT_MASK)
    .union(InitFlags::FUSE_EXPORT_SUPPORT)
    .union(InitFlags::FUSE_HAS_IOCTL_DIR)
    // Content changes behind the kernel's back only in direct writes, which say so.
    .union(InitFlags::FUSE_EXPLICIT_INVAL_DATA)
    // Without it the kernel asks for an extended attribute before each write. What it leaves to us
    // in return: see [`Front::set_attributes`].
    .union(InitFlags::FUSE_HANDLE_KILLPRIV_V2)
    // A directory needs no handle: the answer to opendir is ENOSYS, once.
    .union(InitFlags::FUSE_NO_OPENDIR_SUPPORT);

/// Begins to serve the kernel at the other end of `connection`, an open `/dev/fuse`. fuser does
/// not know where that is mounted: it unmounts by path, and does so also when the mount was gone
/// before.
pub(super) fn serve(front: &Arc<Front>, connection: OwnedFd, settings: &Settings) -> io::Result<BackgroundSession> {
    let mut config = Config::default();
    config.n_threads = Some(settings.loops);
    config.clone_fd = true;
    let acl = if settings.allow_other { SessionACL::All } else { SessionACL::Owner };
    let adapter = Adapter { front: front.clone(), idle_loops: IdleLoops::new(settings.loops) };
    let session = fuser::Session::from_fd(adapter, connection, acl, config)?;
    let set = front.kernel.set(Box::new(Notifier(session.notifier())));
    assert!(set.is_ok(), "a front end is mounted once");
    session.spawn()
}

struct Notifier(fuser::Notifier);

impl KernelCache for Notifier {
    fn invalidate(&self, ino: u64, range: Range<u64>) -> bool {
        let offset = i64::try_from(range.start).unwrap_or(i64::MAX);
        let len = i64::try_from(range.end - range.start).unwrap_or(i64::MAX);
        told(ino, self.0.inval_inode(INodeNo(ino), offset, len))
    }

    fn store(&self, ino: u64, offset: u64, data: &[u8]) {
        told(ino, self.0.store(INodeNo(ino), offset, data));
    }

    fn invalidate_attributes(&self, ino: u64) -> bool {
        // A negative offset stands for no content at all (`fuse_reverse_inval_inode`).
        told(ino, self.0.inval_inode(INodeNo(ino), -1, 0))
    }
}

fn caller(request: &Request) -> Caller {
    Caller::now(request.uid(), request.gid(), request.pid())
}

fn told(ino: u64, result: io::Result<()>) -> bool {
    if let Err(error) = &result {
        messages::not_told(ino, error);
    }
    result.is_ok()
}

/// Logs what is not the caller's doing, and returns what the caller gets.
fn refuse(operation: &'static str, ino: u64, error: &FsError) -> Errno {
    messages::failed(operation, ino, error);
    Errno::from_i32(error.errno())
}

fn entry(operation: &'static str, ino: u64, result: Result<Attributes, FsError>, reply: ReplyEntry) {
    match result {
        Ok(attributes) => reply.entry(&LIFETIME, &attr::to_fuse(&attributes), GENERATION),
        Err(error) => reply.error(refuse(operation, ino, &error)),
    }
}

fn attributes(operation: &'static str, ino: u64, result: Result<Attributes, FsError>, reply: ReplyAttr) {
    match result {
        Ok(attributes) => reply.attr(&LIFETIME, &attr::to_fuse(&attributes)),
        Err(error) => reply.error(refuse(operation, ino, &error)),
    }
}

fn empty(operation: &'static str, ino: u64, result: Result<(), FsError>, reply: ReplyEmpty) {
    match result {
        Ok(()) => reply.ok(),
        Err(error) => reply.error(refuse(operation, ino, &error)),
    }
}

/// The value of an extended attribute, or its length: `size` is what the caller has room for.
fn value(operation: &'static str, ino: u64, size: u32, result: Result<Vec<u8>, FsError>, reply: ReplyXattr) {
    match result {
        Ok(value) if size == 0 => reply.size(value.len() as u32),
        Ok(value) if value.len() > size as usize => reply.error(Errno::ERANGE),
        Ok(value) => reply.data(&value),
        Err(error) => reply.error(refuse(operation, ino, &error)),
    }
}

/// Flags of the answer to open(2), for a file opened with these flags.
fn opened(flags: i32) -> FopenFlags {
    let always = FopenFlags::FOPEN_KEEP_CACHE | FopenFlags::FOPEN_PARALLEL_DIRECT_WRITES;
    // close(2) of a file that was written reports what went wrong in the background; there is
    // nothing to say of others.
    if flags & libc::O_ACCMODE == libc::O_RDONLY { always | FopenFlags::FOPEN_NOFLUSH } else { always }
}

impl Listing for ReplyDirectory {
    const ATTRIBUTES: bool = false;

    fn add(&mut self, entry: &DirEntry, _: Option<&Attributes>) -> bool {
        let name = OsStr::from_bytes(&entry.name);
        !ReplyDirectory::add(self, INodeNo(entry.ino), entry.cookie, attr::kind(entry.file_type), name)
    }
}

impl Listing for ReplyDirectoryPlus {
    const ATTRIBUTES: bool = true;

    fn add(&mut self, entry: &DirEntry, attributes: Option<&Attributes>) -> bool {
        let attributes = attributes.map_or(attr::NOTHING, attr::to_fuse);
        let name = OsStr::from_bytes(&entry.name);
        !ReplyDirectoryPlus::add(self, INodeNo(entry.ino), entry.cookie, name, &LIFETIME, &attributes, GENERATION)
    }
}

struct Adapter {
    front: Arc<Front>,
    /// None where there are too few loops for it to matter.
    idle_loops: Option<Arc<IdleLoops>>,
}

impl Adapter {
    /// For as long as a request is served by a loop.
    fn busy(&self) -> Option<BusyLoop<'_>> {
        self.idle_loops.as_ref().map(IdleLoops::busy)
    }
}

impl fuser::Filesystem for Adapter {
    fn init(&mut self, _: &Request, config: &mut KernelConfig) -> io::Result<()> {
        let unsupported = |_| io::Error::from(io::ErrorKind::Unsupported);
        config.add_capabilities(CAPABILITIES & config.capabilities()).map_err(unsupported)?;
        config.set_max_write(MAX_WRITE).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
        config.set_max_background(MAX_BACKGROUND).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
        config.set_congestion_threshold(CONGESTION).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
        Ok(())
    }

    fn lookup(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let _busy = self.busy();
        self.front.lookup(parent.0, name.as_bytes(), move |found| match found {
            // With a lifetime, unlike an error: the kernel does not ask again.
            Ok(None) => reply.entry(&LIFETIME, &attr::NOTHING, GENERATION),
            Ok(Some(found)) => entry("lookup", parent.0, Ok(found), reply),
            Err(error) => entry("lookup", parent.0, Err(error), reply),
        });
    }

    fn forget(&self, _: &Request, ino: INodeNo, lookups: u64) {
        // They come in lots that fuser takes apart. Amid these the loop must not stand aside, nor
        // be taken for one that waits.
        if let Some(idle_loops) = &self.idle_loops {
            idle_loops.leave();
        }
        self.front.forget(ino.0, lookups);
    }

    fn getattr(&self, _: &Request, ino: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        let _busy = self.busy();
        self.front.attributes(ino.0, move |found| attributes("getattr", ino.0, found, reply));
    }

    fn setattr(
        &self,
        request: &Request,
        ino: INodeNo,
        mode: Option<u32>,
        uid: Option<u32>,
        gid: Option<u32>,
        size: Option<u64>,
        atime: Option<TimeOrNow>,
        mtime: Option<TimeOrNow>,
        _ctime: Option<SystemTime>,
        _handle: Option<FileHandle>,
        _crtime: Option<SystemTime>,
        _chgtime: Option<SystemTime>,
        _bkuptime: Option<SystemTime>,
        _flags: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        let _busy = self.busy();
        let caller = caller(request);
        let set =
            SetAttributes { mode, uid, gid, atime: atime.map(attr::from_fuse), mtime: mtime.map(attr::from_fuse), bits_gone: 0 };
        self.front.set_attributes(caller, ino.0, size, set, move |done| attributes("setattr", ino.0, done, reply));
    }

    fn readlink(&self, _: &Request, ino: INodeNo, reply: ReplyData) {
        let _busy = self.busy();
        self.front.attempt(
            move |fs| fs.read_link(ino.0),
            move |_, target| match target {
                Ok(target) => reply.data(&target),
                Err(error) => reply.error(refuse("readlink", ino.0, &error)),
            },
        );
    }

    fn mknod(&self, request: &Request, parent: INodeNo, name: &OsStr, mode: u32, umask: u32, rdev: u32, reply: ReplyEntry) {
        let _busy = self.busy();
        let context = caller(request).context;
        let new = NewNode { mode, umask, rdev, target: &[] };
        self.front.create(context, parent.0, name.as_bytes(), new, move |new| entry("mknod", parent.0, new, reply));
    }

    fn mkdir(&self, request: &Request, parent: INodeNo, name: &OsStr, mode: u32, umask: u32, reply: ReplyEntry) {
        let _busy = self.busy();
        let context = caller(request).context;
        let mode = mode & !libc::S_IFMT | libc::S_IFDIR;
        let new = NewNode { mode, umask, rdev: 0, target: &[] };
        self.front.create(context, parent.0, name.as_bytes(), new, move |new| entry("mkdir", parent.0, new, reply));
    }

    fn symlink(&self, request: &Request, parent: INodeNo, name: &OsStr, target: &Path, reply: ReplyEntry) {
        let _busy = self.busy();
        let context = caller(request).context;
        let target = target.as_os_str().as_bytes();
        let new = NewNode { mode: libc::S_IFLNK | 0o777, umask: 0, rdev: 0, target };
        self.front.create(context, parent.0, name.as_bytes(), new, move |new| entry("symlink", parent.0, new, reply));
    }

    fn link(&self, request: &Request, ino: INodeNo, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let _busy = self.busy();
        let context = caller(request).context;
        self.front.link(context, ino.0, parent.0, name.as_bytes(), move |linked| entry("link", ino.0, linked, reply));
    }

    fn unlink(&self, request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let _busy = self.busy();
        let context = caller(request).context;
        self.front.unlink(context, parent.0, name.as_bytes(), move |done| empty("unlink", parent.0, done, reply));
    }

    fn rmdir(&self, request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let _busy = self.busy();
        let context = caller(request).context;
        self.front.rmdir(context, parent.0, name.as_bytes(), move |done| empty("rmdir", parent.0, done, reply));
    }

    fn rename(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        new_parent: INodeNo,
        new_name: &OsStr,
        flags: RenameFlags,
        reply: ReplyEmpty,
    ) {
        let _busy = self.busy();
        let mode = match flags {
            RenameFlags::RENAME_NOREPLACE => RenameMode::NoReplace,
            RenameFlags::RENAME_EXCHANGE => RenameMode::Exchange,
            flags if flags.is_empty() => RenameMode::Replace,
            _ => return reply.error(Errno::EINVAL),
        };
        let context = caller(request).context;
        let (from, to) = ((parent.0, name.as_bytes()), (new_parent.0, new_name.as_bytes()));
        self.front.rename(context, from, to, mode, move |done| empty("rename", parent.0, done, reply));
    }

    fn create(&self, request: &Request, parent: INodeNo, name: &OsStr, mode: u32, umask: u32, flags: i32, reply: ReplyCreate) {
        let _busy = self.busy();
        let caller = caller(request);
        let mode = mode & !libc::S_IFMT | libc::S_IFREG;
        let new = NewNode { mode, umask, rdev: 0, target: &[] };
        let front = self.front.clone();
        self.front.create(caller.context, parent.0, name.as_bytes(), new, move |new| match new {
            Ok(new) => {
                let handle = front.open(new.ino, flags);
                reply.created(&LIFETIME, &attr::to_fuse(&new), GENERATION, FileHandle(handle.0), opened(flags));
            }
            Err(error) => reply.error(refuse("create", parent.0, &error)),
        });
    }

    fn open(&self, _: &Request, ino: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        let _busy = self.busy();
        let handle = self.front.open(ino.0, flags.0);
        reply.opened(FileHandle(handle.0), opened(flags.0));
    }

    fn release(
        &self,
        _: &Request,
        ino: INodeNo,
        handle: FileHandle,
        _: OpenFlags,
        _: Option<LockOwner>,
        _: bool,
        reply: ReplyEmpty,
    ) {
        let _busy = self.busy();
        self.front.release(ino.0, Handle(handle.0));
        reply.ok();
    }

    fn read(
        &self,
        _: &Request,
        ino: INodeNo,
        handle: FileHandle,
        offset: u64,
        size: u32,
        _: OpenFlags,
        owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let _busy = self.busy();
        // Only direct I/O names an owner (`fuse_direct_io`); the flags say O_DIRECT for a page
        // fault, too.
        let cached = owner.is_none();
        self.front.read(ino.0, Handle(handle.0), (offset, size as usize), cached, move |read| match read {
            Ok(read) => reply.data(read.bytes()),
            Err(error) => reply.error(refuse("read", ino.0, &error)),
        });
    }

    fn write(
        &self,
        request: &Request,
        ino: INodeNo,
        handle: FileHandle,
        offset: u64,
        data: &[u8],
        write_flags: WriteFlags,
        flags: OpenFlags,
        owner: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let _busy = self.busy();
        let len = data.len() as u32;
        let caller = caller(request);
        let how = WriteRequest {
            handle: Handle(handle.0),
            offset,
            strip: write_flags.contains(WriteFlags::FUSE_WRITE_KILL_SUIDGID),
            direct: flags.0 & libc::O_DIRECT != 0,
            // Pages written back from a mapping have an offset of their own. (So have writes with
            // `RWF_NOAPPEND`, of which no flag tells; they are taken for appends only if they lie
            // where direct writes have made the file longer.)
            append: flags.0 & libc::O_APPEND != 0 && !write_flags.contains(WriteFlags::FUSE_WRITE_CACHE),
            cached: owner.is_none(),
        };
        self.front.write(caller, ino.0, data, how, move |done| match done {
            Ok(()) => reply.written(len),
            Err(error) => reply.error(refuse("write", ino.0, &error)),
        });
    }

    fn flush(&self, _: &Request, ino: INodeNo, handle: FileHandle, _: LockOwner, reply: ReplyEmpty) {
        let _busy = self.busy();
        empty("flush", ino.0, self.front.flush(ino.0, Handle(handle.0)), reply);
    }

    fn fsync(&self, request: &Request, ino: INodeNo, handle: FileHandle, _: bool, reply: ReplyEmpty) {
        let _busy = self.busy();
        let work = self.front.direct.rings.begin_beside(request.uid());
        self.front.sync(ino.0, Handle(handle.0), move |done| {
            drop(work);
            empty("fsync", ino.0, done, reply);
        });
    }

    fn fsyncdir(&self, _: &Request, ino: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        let _busy = self.busy();
        self.front.sync_names(move |done| empty("fsyncdir", ino.0, done, reply));
    }

    fn opendir(&self, _: &Request, _: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        reply.error(Errno::ENOSYS);
    }

    fn readdir(&self, _: &Request, ino: INodeNo, _: FileHandle, offset: u64, reply: ReplyDirectory) {
        let _busy = self.busy();
        self.front.read_dir(ino.0, offset, reply, move |reply, filled| match filled {
            Ok(()) => reply.ok(),
            Err(error) => reply.error(refuse("readdir", ino.0, &error)),
        });
    }

    fn readdirplus(&self, _: &Request, ino: INodeNo, _: FileHandle, offset: u64, reply: ReplyDirectoryPlus) {
        let _busy = self.busy();
        self.front.read_dir(ino.0, offset, reply, move |reply, filled| match filled {
            Ok(()) => reply.ok(),
            Err(error) => reply.error(refuse("readdir", ino.0, &error)),
        });
    }

    fn statfs(&self, _: &Request, _: INodeNo, reply: ReplyStatfs) {
        let _busy = self.busy();
        let usage = self.front.fs.usage();
        let unused = usage.available.saturating_mul(INODES_PER_BLOCK);
        let block = BLOCK_SIZE as u32;
        reply.statfs(usage.blocks, usage.free, usage.available, usage.inodes + unused, unused, block, NAME_MAX as u32, block);
    }

    fn setxattr(&self, request: &Request, ino: INodeNo, name: &OsStr, value: &[u8], flags: i32, _: u32, reply: ReplyEmpty) {
        let _busy = self.busy();
        let attribute = (name.as_bytes(), value);
        self.front.set_xattr(caller(request), ino.0, attribute, flags, move |done| empty("setxattr", ino.0, done, reply));
    }

    fn getxattr(&self, request: &Request, ino: INodeNo, name: &OsStr, size: u32, reply: ReplyXattr) {
        let _busy = self.busy();
        let done = move |found| value("getxattr", ino.0, size, found, reply);
        self.front.get_xattr(caller(request), ino.0, name.as_bytes(), done);
    }

    fn listxattr(&self, request: &Request, ino: INodeNo, size: u32, reply: ReplyXattr) {
        let _busy = self.busy();
        self.front.list_xattrs(caller(request), ino.0, move |found| value("listxattr", ino.0, size, found, reply));
    }

    fn removexattr(&self, request: &Request, ino: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let _busy = self.busy();
        let done = move |done| empty("removexattr", ino.0, done, reply);
        self.front.remove_xattr(caller(request), ino.0, name.as_bytes(), done);
    }

    fn fallocate(
        &self,
        request: &Request,
        ino: INodeNo,
        handle: FileHandle,
        offset: u64,
        len: u64,
        mode: i32,
        reply: ReplyEmpty,
    ) {
        let _busy = self.busy();
        let done = move |done| empty("fallocate", ino.0, done, reply);
        self.front.allocate(caller(request), ino.0, Handle(handle.0), (offset, len), mode, done);
    }

    fn lseek(&self, _: &Request, ino: INodeNo, _: FileHandle, offset: i64, whence: i32, reply: ReplyLseek) {
        let _busy = self.busy();
        let (Ok(place), true) = (u64::try_from(offset), matches!(whence, libc::SEEK_DATA | libc::SEEK_HOLE)) else {
            // A place that no file has is beyond the end of this one.
            return reply.error(if offset < 0 { Errno::ENXIO } else { Errno::EINVAL });
        };
        self.front.seek(ino.0, place, whence == libc::SEEK_HOLE, move |found| match found {
            Ok(found) => reply.offset(found as i64),
            Err(error) => reply.error(refuse("lseek", ino.0, &error)),
        });
    }

    fn copy_file_range(
        &self,
        request: &Request,
        from: INodeNo,
        from_handle: FileHandle,
        from_offset: u64,
        to: INodeNo,
        to_handle: FileHandle,
        to_offset: u64,
        len: u64,
        _: CopyFileRangeFlags,
        reply: ReplyWrite,
    ) {
        let _busy = self.busy();
        let from = (from.0, Handle(from_handle.0), from_offset);
        let to = (to.0, Handle(to_handle.0), to_offset);
        self.front.copy(caller(request), from, to, len, move |copied| match copied {
            Ok(copied) => reply.written(copied as u32),
            Err(error) => reply.error(refuse("copy_file_range", to.0, &error)),
        });
    }

    fn ioctl(
        &self,
        request: &Request,
        ino: INodeNo,
        handle: FileHandle,
        _: IoctlFlags,
        command: u32,
        argument: &[u8],
        _: u32,
        reply: ReplyIoctl,
    ) {
        let _busy = self.busy();
        let caller = caller(request);
        self.front.ioctl(caller, ino.0, Handle(handle.0), command, argument, move |answer| {
            // The kernel takes an answer only at the length that it asked for; an error has none.
            if answer.result < 0 && answer.data.is_empty() {
                reply.error(Errno::from_i32(-answer.result));
            } else {
                reply.ioctl(answer.result, &answer.data);
            }
        });
    }
}
