//! The system calls that the two filesystems are asked, as data: they are generated, sent to
//! processes, shrunk and printed.

use std::fmt;

use rustix::fs::OFlags;
use serde::{Deserialize, Serialize};

/// Descriptors that a process has, by number.
pub const SLOTS: u8 = 6;

/// One call by one of the processes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Step {
    /// Which process, as an index of [`super::process::IDENTITIES`].
    pub process: usize,
    /// What it calls.
    pub call: Call,
    /// Whether what the call concerns is looked at before and after it. Looking refreshes what the
    /// kernel keeps of it, so that not looking finds other faults.
    pub look: bool,
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "process {}{}: {:?}", self.process, if self.look { ", looking" } else { "" }, self.call)
    }
}

/// What a call works on.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Target {
    /// An open file.
    Slot(u8),
    /// A name; symlinks are followed.
    Path(String),
    /// A name itself.
    Link(String),
}

/// Flags of open(2), printed by name.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct OpenFlags(pub u32);

impl fmt::Debug for OpenFlags {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        OFlags::from_bits_retain(self.0).fmt(f)
    }
}

/// A time for utimensat(2).
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub enum Time {
    /// `UTIME_NOW`.
    Now,
    /// `UTIME_OMIT`.
    Omit,
    /// Seconds since the epoch, and nanoseconds.
    At(i64, i64),
    /// Seconds from the moment of the start of all of it, which is the same on both sides.
    FromStart(i64),
}

/// The value of an extended attribute.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Value {
    /// So many bytes, from a seed.
    Pattern(u8, usize),
    /// An ACL: for each entry a tag, permissions and an id.
    Acl(Vec<(u16, u16, u32)>),
    /// A capability by its number, permitted and effective (`struct vfs_cap_data`, revision 2).
    Capability(u8),
}

/// One transfer of a [`Call::Batch`].
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Transfer {
    /// Or a read.
    pub write: bool,
    /// Place in the file.
    pub at: u64,
    /// Bytes.
    pub len: usize,
}

/// A way to have many transfers in flight.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub enum Engine {
    /// io_submit(2).
    Aio,
    /// io_uring_enter(2).
    Uring,
}

/// How a file is made durable.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub enum Sync {
    /// fdatasync(2).
    Data,
    /// fsync(2).
    All,
    /// syncfs(2).
    Filesystem,
}

/// What a process does with a mapping.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub enum Access {
    /// Reads.
    Read,
    /// Writes.
    Write,
    /// msync(2) with `MS_SYNC`.
    Sync,
    /// `MADV_DONTNEED`.
    Forget,
}

/// A limit of a process.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub enum Limit {
    /// `RLIMIT_FSIZE`.
    FileSize,
    /// `RLIMIT_NOFILE`.
    Descriptors,
}

/// A system call with its arguments. Names are of Latin-1: each character is a byte.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "they are the arguments of the system call of that name")]
pub enum Call {
    Open {
        slot: u8,
        path: String,
        flags: OpenFlags,
        mode: u32,
    },
    Close {
        slot: u8,
    },
    Duplicate {
        slot: u8,
        to: u8,
    },
    /// read(2), or preadv2(2) where there is a place or a flag.
    Read {
        slot: u8,
        at: Option<u64>,
        len: usize,
        flags: u32,
    },
    /// write(2), or pwritev2(2) where there is a place or a flag.
    Write {
        slot: u8,
        at: Option<u64>,
        len: usize,
        flags: u32,
        seed: u8,
    },
    Seek {
        slot: u8,
        whence: i32,
        offset: i64,
    },
    Truncate {
        target: Target,
        len: u64,
    },
    Allocate {
        slot: u8,
        mode: u32,
        offset: u64,
        len: u64,
    },
    CopyRange {
        from: u8,
        to: u8,
        from_at: Option<u64>,
        to_at: Option<u64>,
        len: usize,
    },
    SendFile {
        from: u8,
        to: u8,
        at: Option<u64>,
        len: usize,
    },
    Sync {
        slot: u8,
        how: Sync,
    },
    /// Maps a part of a file, in place of what was mapped before.
    Map {
        slot: u8,
        shared: bool,
        writable: bool,
        offset: u64,
        len: usize,
    },
    /// Uses what is mapped.
    Use {
        access: Access,
        offset: usize,
        len: usize,
        seed: u8,
    },
    Unmap,
    Rename {
        from: String,
        to: String,
        flags: u32,
    },
    Link {
        from: String,
        to: String,
        follow: bool,
    },
    Symlink {
        target: String,
        path: String,
    },
    ReadLink {
        path: String,
    },
    Unlink {
        path: String,
    },
    Rmdir {
        path: String,
    },
    Mkdir {
        path: String,
        mode: u32,
    },
    Mknod {
        path: String,
        mode: u32,
        device: u64,
    },
    List {
        path: String,
    },
    Chmod {
        target: Target,
        mode: u32,
    },
    Chown {
        target: Target,
        uid: Option<u32>,
        gid: Option<u32>,
    },
    SetTimes {
        target: Target,
        accessed: Time,
        modified: Time,
    },
    Stat {
        target: Target,
    },
    MayAccess {
        path: String,
        mode: u32,
        effective: bool,
    },
    SetAttribute {
        target: Target,
        name: String,
        value: Value,
        flags: u32,
    },
    GetAttribute {
        target: Target,
        name: String,
        room: usize,
    },
    ListAttributes {
        target: Target,
        room: usize,
    },
    RemoveAttribute {
        target: Target,
        name: String,
    },
    Limit {
        which: Limit,
        value: Option<u64>,
    },
    Umask {
        mask: u32,
    },
    SetFlags {
        slot: u8,
        flags: OpenFlags,
    },
    GetFlags {
        slot: u8,
    },
    /// flock(2), never waiting.
    Flock {
        slot: u8,
        how: i32,
    },
    /// fcntl(2) with `F_SETLK`, `F_GETLK`, and those for open file descriptions.
    Lock {
        slot: u8,
        open_file: bool,
        test: bool,
        kind: i16,
        start: i64,
        len: i64,
    },
    /// Transfers in flight together; with `fresh` in one long hole, which the file becomes first.
    Batch {
        slot: u8,
        engine: Engine,
        seed: u8,
        fresh: bool,
        transfers: Vec<Transfer>,
    },
    /// gpunvme's `WRITE`, or pwrite(2) where there is none.
    DirectWrite {
        slot: u8,
        seed: u8,
        segments: Vec<(u64, u64)>,
    },
    /// gpunvme's `READ`, or pread(2).
    DirectRead {
        slot: u8,
        segments: Vec<(u64, u64)>,
    },
    /// Takes another user's place, for ever.
    Become {
        uid: u32,
    },
}

impl Call {
    /// Its name, for counting.
    pub fn kind(&self) -> String {
        let text = format!("{self:?}");
        text.split([' ', '{']).next().unwrap_or_default().to_owned()
    }

    /// What it concerns.
    pub fn concerns(&self) -> Vec<Target> {
        let dir_of =
            |path: &str| Target::Path(path.trim_end_matches('/').rsplit_once('/').map_or(".", |(dir, _)| dir).to_owned());
        let name = |path: &str| vec![Target::Link(path.to_owned()), dir_of(path)];
        match self {
            Self::Open { path, .. } => [vec![Target::Path(path.clone())], name(path)].concat(),
            Self::Read { slot, .. }
            | Self::Write { slot, .. }
            | Self::Allocate { slot, .. }
            | Self::Sync { slot, .. }
            | Self::Batch { slot, .. }
            | Self::DirectWrite { slot, .. }
            | Self::Map { slot, .. }
            | Self::DirectRead { slot, .. } => vec![Target::Slot(*slot)],
            Self::CopyRange { from, to, .. } | Self::SendFile { from, to, .. } => vec![Target::Slot(*from), Target::Slot(*to)],
            Self::Truncate { target, .. }
            | Self::Chmod { target, .. }
            | Self::Chown { target, .. }
            | Self::SetTimes { target, .. }
            | Self::SetAttribute { target, .. }
            | Self::RemoveAttribute { target, .. } => vec![target.clone()],
            Self::Rename { from, to, .. } => [name(from), name(to)].concat(),
            Self::Link { from, to, .. } => [vec![Target::Link(from.clone())], name(to)].concat(),
            Self::Symlink { path, .. }
            | Self::Unlink { path }
            | Self::Rmdir { path }
            | Self::Mkdir { path, .. }
            | Self::Mknod { path, .. }
            | Self::List { path } => name(path),
            _ => Vec::new(),
        }
    }
}

/// The result of a call: what can be compared, and nothing else.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Outcome {
    /// What the call returned, or the negative errno.
    pub value: i64,
    /// What it brought, and what was seen before and after.
    pub facts: Vec<(String, String)>,
}

impl Outcome {
    /// The first thing that differs.
    pub fn difference(&self, other: &Self) -> Option<String> {
        if self.value != other.value {
            return Some("result".to_owned());
        }
        let longest = self.facts.len().max(other.facts.len());
        (0..longest).find_map(|i| {
            let (ours, theirs) = (self.facts.get(i), other.facts.get(i));
            if ours == theirs { None } else { ours.or(theirs).map(|fact| fact.0.clone()) }
        })
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.value {
            value if value < 0 => write!(f, "{}", std::io::Error::from_raw_os_error(value.unsigned_abs() as i32))?,
            value => write!(f, "{value}")?,
        }
        self.facts.iter().try_for_each(|(name, value)| write!(f, " {name}={value}"))
    }
}
