//! Requests of the kernel, decoded.
//!
//! A request is three pieces: its header, the structure that its operation begins with, and the
//! rest: names, which end in a zero byte, and data. `/dev/fuse` delivers them in one, io_uring
//! apart; both decode here.

use zerocopy::FromBytes;

use crate::wire::{self, InHeader, opcode};

/// A request, or the bytes of one, that the protocol does not have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Malformed;

/// A request of the kernel.
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    /// The inode that it is about: the directory, where there is a name.
    pub ino: u64,
    /// User who asks.
    pub uid: u32,
    /// Group of who asks.
    pub gid: u32,
    /// The thread that asks, as this process can see it; 0 if it cannot.
    pub pid: u32,
    /// What it asks for.
    pub operation: Operation<'a>,
}

/// What a request asks for. A *handle* is what the reply to OPEN or CREATE gave; `flags`, where
/// nothing else is said, are those of open(2).
#[allow(missing_docs, reason = "the fields are those of the system calls")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation<'a> {
    /// The inode of a name: [`Reply::entry`](crate::Reply::entry).
    Lookup { name: &'a [u8] },
    /// [`Reply::attributes`](crate::Reply::attributes).
    GetAttr,
    /// [`Reply::attributes`](crate::Reply::attributes).
    SetAttr(SetAttr),
    /// [`Reply::statx`](crate::Reply::statx).
    Statx,
    /// [`Reply::data`](crate::Reply::data).
    ReadLink,
    /// [`Reply::entry`](crate::Reply::entry).
    Symlink { name: &'a [u8], target: &'a [u8] },
    /// [`Reply::entry`](crate::Reply::entry).
    MkNod { new: New<'a>, rdev: u32 },
    /// [`Reply::entry`](crate::Reply::entry).
    MkDir { new: New<'a> },
    /// [`Reply::ok`](crate::Reply::ok).
    Unlink { name: &'a [u8] },
    /// [`Reply::ok`](crate::Reply::ok).
    RmDir { name: &'a [u8] },
    /// `flags` as in renameat2(2): [`Reply::ok`](crate::Reply::ok).
    Rename { name: &'a [u8], new_parent: u64, new_name: &'a [u8], flags: u32 },
    /// Another name for `ino`: [`Reply::entry`](crate::Reply::entry).
    Link { ino: u64, name: &'a [u8] },
    /// [`Reply::created`](crate::Reply::created).
    Create { new: New<'a>, flags: i32 },
    /// A file without a name: [`Reply::created`](crate::Reply::created).
    TmpFile { new: New<'a>, flags: i32 },
    /// [`Reply::opened`](crate::Reply::opened).
    Open { flags: i32 },
    /// `direct`: the bytes bypass the page cache. [`Reply::data`](crate::Reply::data).
    Read { handle: u64, offset: u64, size: u32, direct: bool },
    /// `from_cache`: pages written back; the handle is a guess. `direct`: the bytes bypass the
    /// page cache. `strip`: set-user-id bits go. [`Reply::written`](crate::Reply::written).
    Write { handle: u64, offset: u64, data: &'a [u8], flags: i32, from_cache: bool, direct: bool, strip: bool },
    /// close(2) of one descriptor: [`Reply::ok`](crate::Reply::ok).
    Flush { handle: u64 },
    /// The last descriptor is closed: [`Reply::ok`](crate::Reply::ok).
    Release { handle: u64 },
    /// [`Reply::ok`](crate::Reply::ok).
    Fsync { handle: u64 },
    /// [`Reply::ok`](crate::Reply::ok).
    FsyncDir,
    /// All of the filesystem is made durable: [`Reply::ok`](crate::Reply::ok).
    SyncFs,
    /// [`Reply::opened`](crate::Reply::opened).
    OpenDir,
    /// At most `size` bytes from `offset` on, the cookie of the last entry; `plus`: with
    /// attributes. [`Reply::listing`](crate::Reply::listing).
    ReadDir { offset: u64, size: u32, plus: bool },
    /// [`Reply::ok`](crate::Reply::ok).
    ReleaseDir,
    /// [`Reply::statfs`](crate::Reply::statfs).
    StatFs,
    /// `flags` as in setxattr(2). `drop_sgid`: the set-group-id bit goes with a new ACL; none
    /// where the kernel does not say. [`Reply::ok`](crate::Reply::ok).
    SetXattr { name: &'a [u8], value: &'a [u8], flags: i32, drop_sgid: Option<bool> },
    /// Room for `size` bytes; 0 asks for the length. [`Reply::value`](crate::Reply::value).
    GetXattr { name: &'a [u8], size: u32 },
    /// As [`Operation::GetXattr`].
    ListXattr { size: u32 },
    /// [`Reply::ok`](crate::Reply::ok).
    RemoveXattr { name: &'a [u8] },
    /// `mode` as in fallocate(2): [`Reply::ok`](crate::Reply::ok).
    Fallocate { handle: u64, offset: u64, len: u64, mode: i32 },
    /// `SEEK_DATA` or `SEEK_HOLE`: [`Reply::offset`](crate::Reply::offset).
    Lseek { offset: i64, whence: i32 },
    /// [`Reply::copied`](crate::Reply::copied).
    CopyRange(CopyRange),
    /// [`Reply::ioctl`](crate::Reply::ioctl).
    Ioctl { handle: u64, command: u32, argument: &'a [u8] },
    /// Whatever else: to be refused with ENOSYS, and not asked again.
    Unknown { opcode: u32 },
}

/// Attributes to set.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SetAttr {
    /// Permissions.
    pub mode: Option<u32>,
    /// Owner.
    pub uid: Option<u32>,
    /// Group.
    pub gid: Option<u32>,
    /// Size in bytes.
    pub size: Option<u64>,
    /// Time of access.
    pub atime: Option<SetTime>,
    /// Time of modification.
    pub mtime: Option<SetTime>,
    /// Whether set-user-id bits go with a new size or owner (`FATTR_KILL_SUIDGID`).
    pub strip: bool,
}

/// A time to set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SetTime {
    /// That of the request.
    Now,
    /// This one.
    At(Time),
}

/// Seconds since the epoch, and nanoseconds after them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Time {
    /// Seconds; negative before the epoch.
    pub seconds: i64,
    /// Nanoseconds, below 1,000,000,000 if the kernel sent them.
    pub nanoseconds: u32,
}

/// A node to create.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct New<'a> {
    /// Its name; of a file without a name, what it may be called in messages.
    pub name: &'a [u8],
    /// Type and permissions.
    pub mode: u32,
    /// The caller's umask, which is not applied yet.
    pub umask: u32,
    /// The parent's group, where the caller is in it besides its own (`CREATE_SUPP_GROUP`).
    pub group: Option<u32>,
}

/// A range to copy: from the request's inode into another.
#[allow(missing_docs, reason = "the fields are those of copy_file_range(2)")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopyRange {
    pub from_handle: u64,
    pub from_offset: u64,
    pub to: u64,
    pub to_handle: u64,
    pub to_offset: u64,
    pub len: u64,
    /// Whether the reply has room for a length of 64 bits.
    pub wide: bool,
}

/// What the kernel has forgotten: an inode, and how many of the replies that gave it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Forget {
    /// The inode.
    pub ino: u64,
    /// Replies that gave it.
    pub lookups: u64,
}

/// Inodes that the kernel has forgotten. They want no reply.
#[derive(Clone, Copy, Debug)]
pub struct Forgets<'a> {
    one: Option<Forget>,
    more: &'a [u8],
}

impl Iterator for Forgets<'_> {
    type Item = Forget;

    fn next(&mut self) -> Option<Forget> {
        if let Some(one) = self.one.take() {
            return Some(one);
        }
        let (next, rest) = wire::ForgetOne::read_from_prefix(self.more).ok()?;
        self.more = rest;
        Some(Forget { ino: next.nodeid, lookups: next.nlookup })
    }
}

/// A message of the kernel.
#[derive(Clone, Copy, Debug)]
pub enum Message<'a> {
    /// A request, which wants a reply.
    Request(Request<'a>),
    /// Inodes that the kernel has forgotten.
    Forgets(Forgets<'a>),
    /// A request is no longer waited for.
    Interrupt,
    /// The filesystem is unmounted.
    Destroy,
}

/// How messages are decoded on a connection.
#[derive(Clone, Copy, Debug)]
pub struct Decoder {
    /// Whether SETXATTR has the longer form (`SETXATTR_EXT`).
    pub setxattr_ext: bool,
}

impl Decoder {
    /// Decodes a message as `/dev/fuse` delivers it.
    ///
    /// # Errors
    /// It is none, or of an operation that does not look so.
    pub fn message(self, bytes: &[u8]) -> Result<Message<'_>, Malformed> {
        let (header, arguments) = Decoder::split(bytes)?;
        self.decode(&header, arguments)
    }

    /// Decodes a message as an entry of a queue delivers it: `in_out` and `op_in` of its header,
    /// and the payload (`struct fuse_uring_req_header`).
    ///
    /// # Errors
    /// It is of an operation that does not look so.
    pub fn entry<'a>(self, in_out: &[u8; 128], op_in: &[u8; 128], payload: &'a [u8]) -> Result<Message<'a>, Malformed> {
        let header = Decoder::entry_header(in_out);
        match header.opcode {
            opcode::DESTROY => Ok(Message::Destroy),
            _ => self.request(&header, Some(op_in), payload).map(Message::Request),
        }
    }

    /// The header of a message as an entry of a queue delivers it.
    pub(crate) fn entry_header(in_out: &[u8; 128]) -> InHeader {
        let Ok((header, _)) = InHeader::read_from_prefix(in_out) else { unreachable!("128 bytes hold a header") };
        header
    }

    /// Splits a message as `/dev/fuse` delivers it.
    pub(crate) fn split(bytes: &[u8]) -> Result<(InHeader, &[u8]), Malformed> {
        let (header, rest) = InHeader::read_from_prefix(bytes).map_err(|_| Malformed)?;
        if header.len as usize == bytes.len() { Ok((header, rest)) } else { Err(Malformed) }
    }

    /// Decodes what follows the header: the structure of the operation, if it has one, and the
    /// rest.
    pub(crate) fn decode<'a>(self, header: &InHeader, arguments: &'a [u8]) -> Result<Message<'a>, Malformed> {
        match header.opcode {
            opcode::FORGET => {
                let (lookups, more) = take(arguments)?;
                let one = Some(Forget { ino: header.nodeid, lookups });
                if more.is_empty() { Ok(Message::Forgets(Forgets { one, more })) } else { Err(Malformed) }
            }
            opcode::BATCH_FORGET => {
                let (batch, more): (wire::BatchForgetIn, _) = take(arguments)?;
                let len = (batch.count as usize).checked_mul(size_of::<wire::ForgetOne>()).ok_or(Malformed)?;
                let more = more.get(..len).ok_or(Malformed)?;
                Ok(Message::Forgets(Forgets { one: None, more }))
            }
            opcode::INTERRUPT => Ok(Message::Interrupt),
            opcode::DESTROY => Ok(Message::Destroy),
            _ => self.request(header, None, arguments).map(Message::Request),
        }
    }

    /// Decodes a request whose first structure may lie apart from the rest, in `head`.
    fn request<'a>(self, header: &InHeader, head: Option<&[u8]>, rest: &'a [u8]) -> Result<Request<'a>, Malformed> {
        let operation = self.operation(header, Arguments { head, rest, extensions: header.total_extlen })?;
        let InHeader { nodeid: ino, uid, gid, pid, .. } = *header;
        Ok(Request { ino, uid, gid, pid, operation })
    }

    fn operation<'a>(self, header: &InHeader, mut arguments: Arguments<'_, 'a>) -> Result<Operation<'a>, Malformed> {
        let group = arguments.take_group()?;
        let operation = match header.opcode {
            opcode::LOOKUP => Operation::Lookup { name: arguments.name()? },
            opcode::GETATTR => {
                arguments.take::<wire::GetattrIn>()?;
                Operation::GetAttr
            }
            opcode::SETATTR => Operation::SetAttr(set_attr(&arguments.take()?)),
            opcode::STATX => {
                arguments.take::<wire::StatxIn>()?;
                Operation::Statx
            }
            opcode::READLINK => Operation::ReadLink,
            opcode::SYMLINK => Operation::Symlink { name: arguments.name()?, target: arguments.string()? },
            opcode::MKNOD => {
                let wire::MknodIn { mode, rdev, umask, .. } = arguments.take()?;
                Operation::MkNod { new: New { name: arguments.name()?, mode, umask, group }, rdev }
            }
            opcode::MKDIR => {
                let wire::MkdirIn { mode, umask } = arguments.take()?;
                Operation::MkDir { new: New { name: arguments.name()?, mode, umask, group } }
            }
            opcode::UNLINK => Operation::Unlink { name: arguments.name()? },
            opcode::RMDIR => Operation::RmDir { name: arguments.name()? },
            opcode::RENAME => {
                let new_parent = arguments.take()?;
                Operation::Rename { new_parent, name: arguments.name()?, new_name: arguments.name()?, flags: 0 }
            }
            opcode::RENAME2 => {
                let wire::Rename2In { newdir, flags, .. } = arguments.take()?;
                Operation::Rename { new_parent: newdir, name: arguments.name()?, new_name: arguments.name()?, flags }
            }
            opcode::LINK => Operation::Link { ino: arguments.take()?, name: arguments.name()? },
            opcode::CREATE => {
                let wire::CreateIn { flags, mode, umask, .. } = arguments.take()?;
                Operation::Create { new: New { name: arguments.name()?, mode, umask, group }, flags: flags as i32 }
            }
            opcode::TMPFILE => {
                let wire::CreateIn { flags, mode, umask, .. } = arguments.take()?;
                Operation::TmpFile { new: New { name: arguments.string()?, mode, umask, group }, flags: flags as i32 }
            }
            opcode::OPEN => Operation::Open { flags: arguments.take::<wire::OpenIn>()?.flags as i32 },
            opcode::READ => {
                let wire::ReadIn { fh, offset, size, read_flags, .. } = arguments.take()?;
                Operation::Read { handle: fh, offset, size, direct: read_flags & wire::READ_LOCKOWNER != 0 }
            }
            opcode::WRITE => {
                let wire::WriteIn { fh, offset, size, write_flags, flags, .. } = arguments.take()?;
                Operation::Write {
                    handle: fh,
                    offset,
                    data: arguments.bytes(size)?,
                    flags: flags as i32,
                    from_cache: write_flags & wire::WRITE_CACHE != 0,
                    direct: write_flags & wire::WRITE_LOCKOWNER != 0,
                    strip: write_flags & wire::WRITE_KILL_SUIDGID != 0,
                }
            }
            opcode::FLUSH => Operation::Flush { handle: arguments.take::<wire::FlushIn>()?.fh },
            opcode::RELEASE => Operation::Release { handle: arguments.take::<wire::ReleaseIn>()?.fh },
            opcode::FSYNC => Operation::Fsync { handle: arguments.take::<wire::FsyncIn>()?.fh },
            opcode::FSYNCDIR => {
                arguments.take::<wire::FsyncIn>()?;
                Operation::FsyncDir
            }
            opcode::SYNCFS => {
                arguments.take::<u64>()?;
                Operation::SyncFs
            }
            opcode::OPENDIR => {
                arguments.take::<wire::OpenIn>()?;
                Operation::OpenDir
            }
            opcode::READDIR | opcode::READDIRPLUS => {
                let wire::ReadIn { offset, size, .. } = arguments.take()?;
                Operation::ReadDir { offset, size, plus: header.opcode == opcode::READDIRPLUS }
            }
            opcode::RELEASEDIR => {
                arguments.take::<wire::ReleaseIn>()?;
                Operation::ReleaseDir
            }
            opcode::STATFS => Operation::StatFs,
            opcode::SETXATTR => {
                let (size, flags, drop_sgid) = if self.setxattr_ext {
                    let wire::SetxattrIn { size, flags, setxattr_flags, .. } = arguments.take()?;
                    (size, flags, Some(setxattr_flags & wire::SETXATTR_ACL_KILL_SGID != 0))
                } else {
                    let wire::SetxattrCompatIn { size, flags } = arguments.take()?;
                    (size, flags, None)
                };
                Operation::SetXattr {
                    name: arguments.attribute()?,
                    value: arguments.bytes(size)?,
                    flags: flags as i32,
                    drop_sgid,
                }
            }
            opcode::GETXATTR => {
                let wire::GetxattrIn { size, .. } = arguments.take()?;
                Operation::GetXattr { name: arguments.attribute()?, size }
            }
            opcode::LISTXATTR => Operation::ListXattr { size: arguments.take::<wire::GetxattrIn>()?.size },
            opcode::REMOVEXATTR => Operation::RemoveXattr { name: arguments.attribute()? },
            opcode::FALLOCATE => {
                let wire::FallocateIn { fh, offset, length, mode, .. } = arguments.take()?;
                Operation::Fallocate { handle: fh, offset, len: length, mode: mode as i32 }
            }
            opcode::LSEEK => {
                let wire::LseekIn { offset, whence, .. } = arguments.take()?;
                Operation::Lseek { offset: offset as i64, whence: whence as i32 }
            }
            opcode::COPY_FILE_RANGE | opcode::COPY_FILE_RANGE_64 => {
                let range: wire::CopyFileRangeIn = arguments.take()?;
                Operation::CopyRange(CopyRange {
                    from_handle: range.fh_in,
                    from_offset: range.off_in,
                    to: range.nodeid_out,
                    to_handle: range.fh_out,
                    to_offset: range.off_out,
                    len: range.len,
                    wide: header.opcode == opcode::COPY_FILE_RANGE_64,
                })
            }
            opcode::IOCTL => {
                let wire::IoctlIn { fh, cmd, in_size, .. } = arguments.take()?;
                Operation::Ioctl { handle: fh, command: cmd, argument: arguments.bytes(in_size)? }
            }
            opcode => Operation::Unknown { opcode },
        };
        Ok(operation)
    }
}

fn set_attr(set: &wire::SetattrIn) -> SetAttr {
    let has = |bit| set.valid & bit != 0;
    let time = |bit, now, seconds, nanoseconds| {
        let time = if has(now) { SetTime::Now } else { SetTime::At(Time { seconds, nanoseconds }) };
        has(bit).then_some(time)
    };
    SetAttr {
        mode: has(wire::FATTR_MODE).then_some(set.mode),
        uid: has(wire::FATTR_UID).then_some(set.uid),
        gid: has(wire::FATTR_GID).then_some(set.gid),
        size: has(wire::FATTR_SIZE).then_some(set.size),
        atime: time(wire::FATTR_ATIME, wire::FATTR_ATIME_NOW, set.atime, set.atimensec),
        mtime: time(wire::FATTR_MTIME, wire::FATTR_MTIME_NOW, set.mtime, set.mtimensec),
        strip: has(wire::FATTR_KILL_SUIDGID),
    }
}

fn take<T: FromBytes>(bytes: &[u8]) -> Result<(T, &[u8]), Malformed> {
    T::read_from_prefix(bytes).map_err(|_| Malformed)
}

/// The arguments of a request that are not taken yet.
struct Arguments<'h, 'a> {
    /// What the first structure is taken from, where it lies apart.
    head: Option<&'h [u8]>,
    rest: &'a [u8],
    /// Length of the extensions at their end, in units of eight bytes.
    extensions: u16,
}

impl<'a> Arguments<'_, 'a> {
    fn take<T: FromBytes>(&mut self) -> Result<T, Malformed> {
        if let Some(head) = self.head.take() {
            return take(head).map(|(taken, _)| taken);
        }
        let (taken, rest) = take(self.rest)?;
        self.rest = rest;
        Ok(taken)
    }

    fn bytes(&mut self, len: u32) -> Result<&'a [u8], Malformed> {
        let (bytes, rest) = self.rest.split_at_checked(len as usize).ok_or(Malformed)?;
        self.rest = rest;
        Ok(bytes)
    }

    /// What ends in a zero byte, without it.
    fn string(&mut self) -> Result<&'a [u8], Malformed> {
        let len = self.rest.iter().position(|byte| *byte == 0).ok_or(Malformed)?;
        let string = &self.rest[..len];
        self.rest = &self.rest[len + 1..];
        Ok(string)
    }

    /// The name of an entry of a directory: not empty, and without a slash.
    fn name(&mut self) -> Result<&'a [u8], Malformed> {
        self.attribute().and_then(|name| if name.contains(&b'/') { Err(Malformed) } else { Ok(name) })
    }

    /// The name of an extended attribute: not empty.
    fn attribute(&mut self) -> Result<&'a [u8], Malformed> {
        self.string().and_then(|name| if name.is_empty() { Err(Malformed) } else { Ok(name) })
    }

    /// Takes the extensions off the end. Returns the group that they name, if they do.
    fn take_group(&mut self) -> Result<Option<u32>, Malformed> {
        let len = usize::from(self.extensions) * 8;
        let at = self.rest.len().checked_sub(len).ok_or(Malformed)?;
        let (rest, mut extensions) = self.rest.split_at(at);
        self.rest = rest;
        let mut group = None;
        while !extensions.is_empty() {
            let (header, _): (wire::ExtHeader, _) = take(extensions)?;
            let (extension, next) = extensions.split_at_checked(header.size as usize).ok_or(Malformed)?;
            let body = extension.get(size_of::<wire::ExtHeader>()..).ok_or(Malformed)?;
            if header.r#type == wire::EXT_GROUPS {
                let (count, groups): (u32, _) = take(body)?;
                group = if count > 0 { Some(take(groups)?.0) } else { None };
            }
            extensions = next;
        }
        Ok(group)
    }
}

#[cfg(test)]
mod tests;
