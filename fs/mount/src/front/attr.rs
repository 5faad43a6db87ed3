//! Attributes and times: converts between the engine's form and fuser's.

use std::time::{Duration, SystemTime};

use fuser::{FileAttr, INodeNo, TimeOrNow};
use gpunvme_engine::BLOCK_SIZE;
use gpunvme_engine::{FileType, Timestamp};

use gpunvme_engine::data::system_time;
use gpunvme_engine::volume::Attributes;

/// Preferred size of I/O in bytes (`st_blksize` of stat(2)). C libraries take it for their buffers,
/// and each buffer is a round trip.
const IO_SIZE: u32 = 64 << 10;
/// Bytes that a directory shows for each of its entries.
const ENTRY_SIZE: u64 = 32;

/// Attributes of inode 0: the answer that a name does not exist.
pub(super) const NOTHING: FileAttr = FileAttr {
    ino: INodeNo(0),
    size: 0,
    blocks: 0,
    atime: SystemTime::UNIX_EPOCH,
    mtime: SystemTime::UNIX_EPOCH,
    ctime: SystemTime::UNIX_EPOCH,
    crtime: SystemTime::UNIX_EPOCH,
    kind: fuser::FileType::RegularFile,
    perm: 0,
    nlink: 0,
    uid: 0,
    gid: 0,
    rdev: 0,
    blksize: 0,
    flags: 0,
};

/// Attributes as the kernel gets them.
pub(super) fn to_fuse(attributes: &Attributes) -> FileAttr {
    let Attributes { ino, inode } = attributes;
    FileAttr {
        ino: INodeNo(*ino),
        // The inode of a directory counts its entries.
        size: if inode.is_dir() { inode.size.saturating_mul(ENTRY_SIZE).max(BLOCK_SIZE as u64) } else { inode.size },
        blocks: inode.blocks.saturating_mul(BLOCK_SIZE as u64 / 512),
        atime: to_system(inode.atime),
        mtime: to_system(inode.mtime),
        ctime: to_system(inode.ctime),
        crtime: to_system(inode.btime),
        kind: kind(inode.file_type()),
        perm: (inode.mode & 0o7777) as u16,
        nlink: inode.nlink,
        uid: inode.uid,
        gid: inode.gid,
        rdev: inode.rdev,
        blksize: IO_SIZE,
        flags: 0,
    }
}

/// The type of an inode.
pub(super) fn kind(file_type: FileType) -> fuser::FileType {
    match file_type {
        FileType::Regular => fuser::FileType::RegularFile,
        FileType::Directory => fuser::FileType::Directory,
        FileType::Symlink => fuser::FileType::Symlink,
        FileType::Fifo => fuser::FileType::NamedPipe,
        FileType::CharDevice => fuser::FileType::CharDevice,
        FileType::BlockDevice => fuser::FileType::BlockDevice,
        FileType::Socket => fuser::FileType::Socket,
    }
}

/// A time as fuser takes it. One that no clock can show becomes the epoch.
fn to_system(time: Timestamp) -> SystemTime {
    let seconds = Duration::from_secs(time.seconds.unsigned_abs());
    let epoch = SystemTime::UNIX_EPOCH;
    let whole = if time.seconds < 0 { epoch.checked_sub(seconds) } else { epoch.checked_add(seconds) };
    whole.and_then(|whole| whole.checked_add(Duration::from_nanos(time.nanoseconds.into()))).unwrap_or(epoch)
}

/// The time that a request sets.
pub(super) fn from_fuse(time: TimeOrNow) -> Timestamp {
    match time {
        TimeOrNow::Now => system_time(),
        TimeOrNow::SpecificTime(time) => match time.duration_since(SystemTime::UNIX_EPOCH) {
            Ok(since) => Timestamp { seconds: since.as_secs() as i64, nanoseconds: since.subsec_nanos() },
            // fuser 0.18 takes the nanoseconds of a time before the epoch away from it where they
            // should be added (`system_time_from_time`); this takes them back.
            Err(before) => {
                let before = before.duration();
                Timestamp { seconds: (before.as_secs() as i64).wrapping_neg(), nanoseconds: before.subsec_nanos() }
            }
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_reach_the_kernel_whatever_their_century() {
        let at = |seconds, nanoseconds| to_system(Timestamp { seconds, nanoseconds });
        let epoch = SystemTime::UNIX_EPOCH;
        assert_eq!(at(1 << 33, 5), epoch + Duration::new(1 << 33, 5));
        assert_eq!(at(-2, 500_000_000), epoch - Duration::from_millis(1500));
        assert_eq!(at(i64::MIN, 0), epoch - Duration::from_secs(1 << 63));
    }

    #[test]
    fn times_before_the_epoch_arrive_as_they_were_sent() {
        // What fuser makes of {-2 s, 500,000,000 ns}.
        let time = SystemTime::UNIX_EPOCH - Duration::new(2, 500_000_000);
        assert_eq!(from_fuse(TimeOrNow::SpecificTime(time)), Timestamp { seconds: -2, nanoseconds: 500_000_000 });
        let time = SystemTime::UNIX_EPOCH + Duration::new(1 << 40, 7);
        assert_eq!(from_fuse(TimeOrNow::SpecificTime(time)), Timestamp { seconds: 1 << 40, nanoseconds: 7 });
    }
}
