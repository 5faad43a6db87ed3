//! Attributes and times: converts between the engine's form and the protocol's.

use gpunvme_engine::BLOCK_SIZE;
use gpunvme_engine::{FileType, Timestamp};
use gpunvme_fuse::{Attr, SetTime, Time};

use gpunvme_engine::volume::Attributes;

/// Preferred size of I/O in bytes (`st_blksize` of stat(2)). C libraries take it for their buffers,
/// and each buffer is a round trip.
const IO_SIZE: u32 = 64 << 10;
/// Bytes that a directory shows for each of its entries.
const ENTRY_SIZE: u64 = 32;

/// Attributes as the kernel gets them.
pub(super) fn to_fuse(attributes: &Attributes) -> Attr {
    let Attributes { ino, inode } = attributes;
    Attr {
        ino: *ino,
        // The inode of a directory counts its entries.
        size: if inode.is_dir() { inode.size.saturating_mul(ENTRY_SIZE).max(BLOCK_SIZE as u64) } else { inode.size },
        blocks: inode.blocks.saturating_mul(BLOCK_SIZE as u64 / 512),
        atime: inode.atime.seconds,
        mtime: inode.mtime.seconds,
        ctime: inode.ctime.seconds,
        atimensec: inode.atime.nanoseconds,
        mtimensec: inode.mtime.nanoseconds,
        ctimensec: inode.ctime.nanoseconds,
        mode: mode(inode.file_type()) | inode.mode & 0o7777,
        nlink: inode.nlink,
        uid: inode.uid,
        gid: inode.gid,
        rdev: inode.rdev,
        blksize: IO_SIZE,
        flags: 0,
    }
}

/// When an inode was created.
pub(super) fn born(attributes: &Attributes) -> Time {
    let Timestamp { seconds, nanoseconds } = attributes.inode.btime;
    Time { seconds, nanoseconds }
}

/// The bits of `st_mode` that say the type of an inode.
pub(super) fn mode(file_type: FileType) -> u32 {
    match file_type {
        FileType::Regular => libc::S_IFREG,
        FileType::Directory => libc::S_IFDIR,
        FileType::Symlink => libc::S_IFLNK,
        FileType::Fifo => libc::S_IFIFO,
        FileType::CharDevice => libc::S_IFCHR,
        FileType::BlockDevice => libc::S_IFBLK,
        FileType::Socket => libc::S_IFSOCK,
    }
}

/// The time that a request sets, which came at `now`.
pub(super) fn from_fuse(time: SetTime, now: Timestamp) -> Timestamp {
    match time {
        SetTime::Now => now,
        SetTime::At(Time { seconds, nanoseconds }) => Timestamp { seconds, nanoseconds },
    }
}
