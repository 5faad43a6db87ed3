//! The adapter between the FUSE protocol and the operations of [`Front`]: what the kernel asks on
//! one side, what the mount does on the other, and what is negotiated when a mount begins.

use std::io;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use gpunvme_engine::BLOCK_SIZE;
use gpunvme_engine::NAME_MAX;
use gpunvme_fuse::{
    Connection, CopyRange, Forgets, Handler, InitFlags, Listing as Entries, New, Notifier, OpenFlags, Operation, Reply, Request,
    Served, SetAttr, Statfs, Times, Wishes,
};

use super::attr;
use super::caller::Caller;
use super::kernel::KernelCache;
use super::messages;
use super::operations::listing::Listing;
use super::resources::turns::Owner;
use super::settings::Settings;
use super::shared::Front;
use super::write_request::WriteRequest;
use gpunvme_engine::error::FsError;
use gpunvme_engine::volume::{Attributes, DirEntry, NewNode, RenameMode, SetAttributes};

/// How long the kernel may keep entries and attributes. Only this mount changes them.
const LIFETIME: Times = Times { entry: Duration::from_secs(3600), attributes: Duration::from_secs(3600) };
/// The largest request, in bytes; the kernel's own limit (`fs.fuse.max_pages_limit`) is the same.
const MAX_WRITE: u32 = 1 << 20;
/// Background requests that the kernel sends at once: read-ahead, and direct I/O.
const MAX_BACKGROUND: u16 = 256;
/// Number of background requests from which on the kernel calls the mount congested.
const CONGESTION: u16 = 192;
/// Inodes that statfs(2) promises for each free block: an inode, its entry and what a tree needs
/// around them take no more.
const INODES_PER_BLOCK: u64 = 8;

/// Capabilities that are requested from the kernel, as far as it has them. Not requested:
/// - `WRITEBACK_CACHE` hides dirty pages from the direct path, and slows large writes down;
/// - `ATOMIC_O_TRUNC` would have open(2) cut a file before the kernel has looked whether it is a
///   program that runs (ETXTBSY), and the program die;
/// - `CREATE_SUPP_GROUP`: only the set-group-id bit of a new file asks for the caller's groups.
///   Linux 6.0 drops that bit itself, and older ones do not say;
/// - `SECURITY_CTX`: labels of files are set like other extended attributes, after the create.
const CAPABILITIES: InitFlags = InitFlags::DO_READDIRPLUS
    .union(InitFlags::READDIRPLUS_AUTO)
    .union(InitFlags::PARALLEL_DIROPS)
    .union(InitFlags::ASYNC_DIO)
    .union(InitFlags::CACHE_SYMLINKS)
    .union(InitFlags::POSIX_ACL)
    .union(InitFlags::DONT_MASK)
    .union(InitFlags::EXPORT_SUPPORT)
    .union(InitFlags::HAS_IOCTL_DIR)
    // Content changes behind the kernel's back only in direct writes, which say so.
    .union(InitFlags::EXPLICIT_INVAL_DATA)
    // Without it the kernel asks for an extended attribute before each write. What it leaves to us
    // in return: see [`Front::set_attributes`].
    .union(InitFlags::HANDLE_KILLPRIV_V2)
    // The kernel says where a new ACL takes the set-group-id bit with it.
    .union(InitFlags::SETXATTR_EXT)
    // A file or directory needs no handle: the answer to open and opendir is ENOSYS, once.
    .union(InitFlags::NO_OPEN_SUPPORT)
    .union(InitFlags::NO_OPENDIR_SUPPORT);

/// Begins to serve the kernel at the other end of `connection`, an open `/dev/fuse`.
pub(super) fn serve(front: &Arc<Front>, connection: OwnedFd, settings: &Settings) -> io::Result<Served> {
    let wishes = Wishes {
        capabilities: CAPABILITIES,
        max_write: MAX_WRITE,
        max_background: MAX_BACKGROUND,
        congestion: CONGESTION,
        io_uring: settings.io_uring,
    };
    let connection = Connection::negotiate(connection, &wishes)?;
    let set = front.kernel.set(Box::new(Kernel(connection.notifier())));
    assert!(set.is_ok(), "a front end is mounted once");
    let requests = connection.requests();
    let served = connection.serve(&Arc::new(Adapter(front.clone())), settings.loops)?;
    front.direct.is_served(served.transport(), requests);
    Ok(served)
}

struct Kernel(Notifier);

impl KernelCache for Kernel {
    fn invalidate(&self, ino: u64, range: Range<u64>) -> bool {
        let offset = i64::try_from(range.start).unwrap_or(i64::MAX);
        let len = i64::try_from(range.end - range.start).unwrap_or(i64::MAX);
        told(ino, self.0.invalidate(ino, offset, len))
    }

    fn store(&self, ino: u64, offset: u64, data: &[u8]) {
        told(ino, self.0.store(ino, offset, data));
    }

    fn invalidate_attributes(&self, ino: u64) -> bool {
        // A negative offset stands for no content at all.
        told(ino, self.0.invalidate(ino, -1, 0))
    }
}

fn told(ino: u64, result: io::Result<()>) -> bool {
    if let Err(error) = &result {
        messages::not_told(ino, error);
    }
    result.is_ok()
}

/// Logs what is not the caller's doing, and tells the caller.
fn refuse(operation: &'static str, ino: u64, error: &FsError, reply: Reply) {
    messages::failed(operation, ino, error);
    reply.error(error.errno());
}

/// Answers with what `answer` makes of a result, or with its error.
fn answer<T>(operation: &'static str, ino: u64, result: Result<T, FsError>, reply: Reply, answer: impl FnOnce(T, Reply)) {
    match result {
        Ok(value) => answer(value, reply),
        Err(error) => refuse(operation, ino, &error, reply),
    }
}

fn entry(operation: &'static str, ino: u64, result: Result<Attributes, FsError>, reply: Reply) {
    answer(operation, ino, result, reply, |attributes, reply| reply.entry(&attr::to_fuse(&attributes), LIFETIME));
}

fn attributes(operation: &'static str, ino: u64, result: Result<Attributes, FsError>, reply: Reply) {
    answer(operation, ino, result, reply, |attributes, reply| reply.attributes(&attr::to_fuse(&attributes), LIFETIME));
}

fn empty(operation: &'static str, ino: u64, result: Result<(), FsError>, reply: Reply) {
    answer(operation, ino, result, reply, |(), reply| reply.ok());
}

/// The value of an extended attribute, or its length: `size` is what the caller has room for.
fn value(operation: &'static str, ino: u64, size: u32, result: Result<Vec<u8>, FsError>, reply: Reply) {
    answer(operation, ino, result, reply, |value, reply| reply.value(&value, size));
}

/// A node of this type to create.
fn new_node(new: &New<'_>, file_type: u32) -> NewNode<'static> {
    NewNode { mode: new.mode & !libc::S_IFMT | file_type, umask: new.umask, rdev: 0, target: &[] }
}

/// The answer to READDIR.
struct Names(Entries);

impl Listing for Names {
    const ATTRIBUTES: bool = false;

    fn add(&mut self, entry: &DirEntry, _: Option<&Attributes>) -> bool {
        self.0.add(entry.ino, attr::mode(entry.file_type), entry.cookie, &entry.name)
    }
}

/// The answer to READDIRPLUS.
struct NamesPlus(Entries);

impl Listing for NamesPlus {
    const ATTRIBUTES: bool = true;

    fn add(&mut self, entry: &DirEntry, attributes: Option<&Attributes>) -> bool {
        let attributes = attributes.map(attr::to_fuse);
        let node = (entry.ino, attr::mode(entry.file_type));
        self.0.add_plus(node, entry.cookie, &entry.name, attributes.as_ref(), LIFETIME)
    }
}

struct Adapter(Arc<Front>);

impl Handler for Adapter {
    fn request(&self, request: Request<'_>, reply: Reply) {
        let Request { ino, uid, gid, pid, operation } = request;
        let caller = Caller::now(uid, gid, pid);
        let front = &self.0;
        match operation {
            Operation::Lookup { name } => self.lookup(caller.owner(), ino, name, reply),
            Operation::GetAttr => front.attributes(caller.owner(), ino, move |found| attributes("getattr", ino, found, reply)),
            Operation::Statx => front.attributes(caller.owner(), ino, move |found| {
                answer("statx", ino, found, reply, |found, reply| {
                    reply.statx(&attr::to_fuse(&found), attr::born(&found), LIFETIME);
                });
            }),
            Operation::SetAttr(set) => self.set_attributes(caller, ino, &set, reply),
            Operation::ReadLink => front.attempt(
                caller.owner(),
                move |fs| fs.read_link(ino),
                move |_, target| answer("readlink", ino, target, reply, |target, reply| reply.data(&target)),
            ),
            Operation::Symlink { name, target } => {
                let new = NewNode { mode: libc::S_IFLNK | 0o777, umask: 0, rdev: 0, target };
                front.create(caller, ino, name, new, move |new| entry("symlink", ino, new, reply));
            }
            // open(2) with O_CREAT, too.
            Operation::MkNod { new, rdev } => {
                let node = NewNode { mode: new.mode, umask: new.umask, rdev, target: &[] };
                front.create(caller, ino, new.name, node, move |new| entry("mknod", ino, new, reply));
            }
            Operation::MkDir { new } => {
                let node = new_node(&new, libc::S_IFDIR);
                front.create(caller, ino, new.name, node, move |new| entry("mkdir", ino, new, reply));
            }
            Operation::Unlink { name } => {
                front.unlink(caller, ino, name, move |done| empty("unlink", ino, done, reply));
            }
            Operation::RmDir { name } => {
                front.rmdir(caller, ino, name, move |done| empty("rmdir", ino, done, reply));
            }
            Operation::Rename { name, new_parent, new_name, flags } => {
                let mode = match flags {
                    0 => RenameMode::Replace,
                    libc::RENAME_NOREPLACE => RenameMode::NoReplace,
                    libc::RENAME_EXCHANGE => RenameMode::Exchange,
                    _ => return reply.error(libc::EINVAL),
                };
                let done = move |done| empty("rename", ino, done, reply);
                front.rename(caller, (ino, name), (new_parent, new_name), mode, done);
            }
            Operation::Link { ino: linked, name } => {
                front.link(caller, linked, ino, name, move |done| entry("link", linked, done, reply));
            }
            Operation::TmpFile { new, .. } => {
                let mode = new.mode & !libc::S_IFMT | libc::S_IFREG;
                front.create_unnamed(caller, ino, (mode, new.umask), move |new| {
                    answer("tmpfile", ino, new, reply, |new, reply| {
                        reply.created(&attr::to_fuse(&new), LIFETIME, 0, OpenFlags::KEEP_CACHE);
                    });
                });
            }
            Operation::Read { offset, size, direct, .. } => {
                // The flags of the request say O_DIRECT for a page fault, too.
                front.read(caller.owner(), ino, (offset, size as usize), !direct, move |read| {
                    answer("read", ino, read, reply, |read, reply| reply.data(read.bytes()));
                });
            }
            Operation::Write { offset, data, flags, from_cache, direct, strip, .. } => {
                let len = data.len() as u32;
                let how = WriteRequest {
                    offset,
                    strip,
                    direct: flags & libc::O_DIRECT != 0,
                    // Pages written back from a mapping have an offset of their own. (So have
                    // writes with `RWF_NOAPPEND`, of which no flag tells; they are taken for
                    // appends only if they lie where direct writes have made the file longer.)
                    append: flags & libc::O_APPEND != 0 && !from_cache,
                    cached: !direct,
                    mapped: from_cache,
                };
                front.write(caller, ino, data, how, move |done| {
                    answer("write", ino, done, reply, |(), reply| reply.written(len));
                });
            }
            // Of a file that was made without a name: others are opened without a request.
            Operation::Release { .. } => reply.ok(),
            Operation::Fsync { .. } => {
                let work = front.direct.rings.begin_beside(uid);
                front.sync(caller.owner(), ino, move |done| {
                    drop(work);
                    empty("fsync", ino, done, reply);
                });
            }
            Operation::FsyncDir => front.sync_names(caller.owner(), move |done| empty("fsyncdir", ino, done, reply)),
            Operation::ReadDir { offset, size, plus: false } => {
                front.read_dir(caller.owner(), (ino, offset), Names(Entries::new(size)), move |Names(names), filled| {
                    answer("readdir", ino, filled, reply, |(), reply| reply.listing(&names));
                });
            }
            Operation::ReadDir { offset, size, plus: true } => {
                front.read_dir(caller.owner(), (ino, offset), NamesPlus(Entries::new(size)), move |NamesPlus(names), filled| {
                    answer("readdir", ino, filled, reply, |(), reply| reply.listing(&names));
                });
            }
            Operation::StatFs => self.statfs(reply),
            Operation::SetXattr { name, value, flags, drop_sgid } => {
                let done = move |done| empty("setxattr", ino, done, reply);
                front.set_xattr(caller, ino, (name, value), flags, drop_sgid, done);
            }
            Operation::GetXattr { name, size } => {
                front.get_xattr(caller, ino, name, move |found| value("getxattr", ino, size, found, reply));
            }
            Operation::ListXattr { size } => {
                front.list_xattrs(caller, ino, move |found| value("listxattr", ino, size, found, reply));
            }
            Operation::RemoveXattr { name } => {
                front.remove_xattr(caller, ino, name, move |done| empty("removexattr", ino, done, reply));
            }
            Operation::Fallocate { offset, len, mode, .. } => {
                let done = move |done| empty("fallocate", ino, done, reply);
                front.allocate(caller, ino, (offset, len), mode, done);
            }
            Operation::Lseek { offset, whence } => self.seek(caller.owner(), (ino, offset), whence, reply),
            Operation::CopyRange(range) => self.copy(caller, ino, &range, reply),
            Operation::Ioctl { command, argument, .. } => {
                front.ioctl(caller, ino, command, argument, move |answer| {
                    // The kernel takes an answer only at the length that it asked for; an error
                    // has none.
                    if answer.result < 0 && answer.data.is_empty() {
                        reply.error(-answer.result);
                    } else {
                        reply.ioctl(answer.result, &answer.data);
                    }
                });
            }
            // sync(2) and syncfs(2), of a mount of a block device (`fuseblk`, Linux 6.18).
            Operation::SyncFs => front.sync_all(move |done| empty("syncfs", ino, done, reply)),
            // The kernel does not ask again: it opens files and directories by itself, makes files
            // with MKNOD, and close(2) has nothing to report.
            Operation::Open { .. }
            | Operation::Create { .. }
            | Operation::Flush { .. }
            | Operation::OpenDir
            | Operation::ReleaseDir
            | Operation::Unknown { .. } => reply.error(libc::ENOSYS),
        }
    }

    fn forget(&self, forgets: Forgets<'_>) {
        self.0.forget(forgets.map(|forget| (forget.ino, forget.lookups)));
    }
}

impl Adapter {
    fn lookup(&self, owner: Owner, parent: u64, name: &[u8], reply: Reply) {
        self.0.lookup(owner, parent, name, move |found| match found {
            // With a lifetime, unlike an error: the kernel does not ask again.
            Ok(None) => reply.entry(&gpunvme_fuse::Attr::default(), LIFETIME),
            Ok(Some(found)) => entry("lookup", parent, Ok(found), reply),
            Err(error) => entry("lookup", parent, Err(error), reply),
        });
    }

    fn set_attributes(&self, caller: Caller, ino: u64, set: &SetAttr, reply: Reply) {
        let SetAttr { mode, uid, gid, size, atime, mtime, strip } = *set;
        let time = |time| attr::from_fuse(time, caller.context.now);
        let set = SetAttributes { mode, uid, gid, atime: atime.map(time), mtime: mtime.map(time), bits_gone: 0 };
        self.0.set_attributes(caller, ino, size, set, strip, move |done| attributes("setattr", ino, done, reply));
    }

    fn statfs(&self, reply: Reply) {
        let usage = self.0.fs.usage();
        let unused = usage.available.saturating_mul(INODES_PER_BLOCK);
        reply.statfs(&Statfs {
            blocks: usage.blocks,
            bfree: usage.free,
            bavail: usage.available,
            files: usage.inodes + unused,
            ffree: unused,
            bsize: BLOCK_SIZE as u32,
            namelen: NAME_MAX as u32,
            frsize: BLOCK_SIZE as u32,
            ..Statfs::default()
        });
    }

    fn seek(&self, owner: Owner, (ino, offset): (u64, i64), whence: i32, reply: Reply) {
        let (Ok(place), true) = (u64::try_from(offset), matches!(whence, libc::SEEK_DATA | libc::SEEK_HOLE)) else {
            // A place that no file has is beyond the end of this one.
            return reply.error(if offset < 0 { libc::ENXIO } else { libc::EINVAL });
        };
        self.0.seek(owner, (ino, place), whence == libc::SEEK_HOLE, move |found| {
            answer("lseek", ino, found, reply, |found, reply| reply.offset(found));
        });
    }

    fn copy(&self, caller: Caller, ino: u64, range: &CopyRange, reply: Reply) {
        let CopyRange { from_offset, to, to_offset, len, wide, .. } = *range;
        let (from, to) = ((ino, from_offset), (to, to_offset));
        self.0.copy(caller, from, to, len, move |copied| {
            answer("copy_file_range", to.0, copied, reply, |copied, reply| reply.copied(copied, wide));
        });
    }
}
