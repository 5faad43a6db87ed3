//! The facts of a file that can be compared: its attributes, without what each filesystem decides
//! for itself.

use std::fmt::Display;
use std::io;
use std::os::fd::AsFd;
use std::time::{SystemTime, UNIX_EPOCH};

use rustix::fs::{AtFlags, FileType, Statx, StatxFlags, StatxTimestamp, Timespec, Timestamps};
use rustix::path::Arg;
use serde::{Deserialize, Serialize};

use super::call::Time;

/// What `O_DIRECT` transfers are aligned to.
pub const SECTOR: u64 = 512;

/// The range of ext4's times, in seconds (`EXT4_TIMESTAMP_MIN` and `EXT4_EXTRA_TIMESTAMP_MAX` of
/// fs/ext4/ext4.h).
const EARLIEST: i64 = -(1 << 31);
const LATEST: i64 = (1 << 34) - (1 << 31) - 1;

/// Seconds around the start that count as *now*: a run takes less.
const NOW: std::ops::Range<i64> = -3600..36_000;

/// The moment at which all began, in seconds since the epoch.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Clock(pub i64);

impl Clock {
    /// Now.
    pub fn start() -> Self {
        let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH).expect("a clock past 1970");
        Self(since_1970.as_secs() as i64)
    }

    /// As utimensat(2) takes them.
    pub fn timestamps(self, accessed: Time, modified: Time) -> Timestamps {
        let time = |time| match time {
            Time::Now => Timespec { tv_sec: 0, tv_nsec: rustix::fs::UTIME_NOW },
            Time::Omit => Timespec { tv_sec: 0, tv_nsec: rustix::fs::UTIME_OMIT },
            Time::At(tv_sec, tv_nsec) => Timespec { tv_sec, tv_nsec },
            Time::FromStart(seconds) => Timespec { tv_sec: self.0 + seconds, tv_nsec: 5 },
        };
        Timestamps { last_access: time(accessed), last_modification: time(modified) }
    }

    /// A time in words that are the same on both sides: all that is about now is. Times that ext4
    /// cannot store are cut as it cuts them (`far-times`).
    fn say(self, time: &StatxTimestamp) -> String {
        if NOW.contains(&time.tv_sec.saturating_sub(self.0)) {
            return "now".to_owned();
        }
        let (seconds, nanoseconds) = cut(time);
        format!("{seconds}.{nanoseconds:09}")
    }
}

/// A time as ext4 stores it, in seconds and nanoseconds.
fn cut(time: &StatxTimestamp) -> (i64, u32) {
    let seconds = time.tv_sec.clamp(EARLIEST, LATEST);
    (seconds, if seconds == EARLIEST || seconds == LATEST { 0 } else { time.tv_nsec })
}

/// The attributes of a file, or the errno.
pub type Look = Result<Statx, i32>;

/// Looks at a file.
pub fn look(dir: impl AsFd, path: impl Arg, flags: AtFlags) -> Look {
    rustix::fs::statx(dir, path, flags, StatxFlags::BASIC_STATS).map_err(|error| error.raw_os_error())
}

/// Names in a list as listxattr(2) makes it, sorted.
pub fn names(list: &[u8]) -> Vec<String> {
    let mut names: Vec<_> = list.split(|&byte| byte == 0).map(|name| String::from_utf8_lossy(name).into_owned()).collect();
    names.retain(|name| !name.is_empty());
    names.sort();
    names
}

/// A digest of bytes: 64 bits of FNV-1a, and their number.
pub fn digest(bytes: &[u8]) -> String {
    let hash =
        bytes.iter().fold(0xcbf2_9ce4_8422_2325_u64, |hash, &byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3));
    format!("{}:{hash:016x}", bytes.len())
}

/// What is known of a call, by name.
#[derive(Debug, Default)]
pub struct Facts(pub Vec<(String, String)>);

impl Facts {
    /// One more.
    pub fn add(&mut self, name: impl Into<String>, value: impl Display) {
        self.0.push((name.into(), value.to_string()));
    }

    /// Bytes that were read: what there is, where anything differs from zero.
    pub fn bytes(&mut self, bytes: &[u8]) {
        let first = bytes.iter().position(|&byte| byte != 0).map_or("zeros".to_owned(), |at| format!("from {at}"));
        self.add("bytes", format_args!("{} {first}", digest(bytes)));
    }

    /// The attributes of a file.
    pub fn look(&mut self, look: &Look, clock: Clock) {
        let found = match look {
            Ok(found) => found,
            Err(errno) => return self.add("look", io::Error::from_raw_os_error(*errno)),
        };
        let kind = FileType::from_raw_mode(found.stx_mode.into());
        self.add("mode", format_args!("{:o}", found.stx_mode));
        self.add("links", found.stx_nlink);
        self.add("owner", format_args!("{}:{}", found.stx_uid, found.stx_gid));
        // The length of a directory says something of its filesystem (`directory-sizes`).
        if kind != FileType::Directory {
            self.add("size", found.stx_size);
        }
        if matches!(kind, FileType::CharacterDevice | FileType::BlockDevice) {
            self.add("device", format_args!("{}:{}", found.stx_rdev_major, found.stx_rdev_minor));
        }
        // Pipes are the kernel's own, and it does not tell the filesystem that they are used
        // (`fifo-times`).
        if kind == FileType::Fifo {
            return;
        }
        self.add("accessed", clock.say(&found.stx_atime));
        self.add("modified", clock.say(&found.stx_mtime));
    }

    /// The attributes of a file, and which of its times a call moved; not those of a call that
    /// failed (`times-of-failures`).
    pub fn compare(&mut self, before: &Look, after: &Look, clock: Clock, succeeded: bool) {
        self.look(after, clock);
        let (Ok(before), Ok(after)) = (before, after) else { return };
        if before.stx_ino != after.stx_ino {
            return self.add("inode", "another");
        }
        if !succeeded || FileType::from_raw_mode(after.stx_mode.into()) == FileType::Fifo {
            return;
        }
        let how = |before: &StatxTimestamp, after: &StatxTimestamp| match cut(after).cmp(&cut(before)) {
            std::cmp::Ordering::Less => "moved back",
            std::cmp::Ordering::Equal => "stays",
            std::cmp::Ordering::Greater => "moved on",
        };
        self.add("atime", how(&before.stx_atime, &after.stx_atime));
        self.add("mtime", how(&before.stx_mtime, &after.stx_mtime));
        self.add("ctime", how(&before.stx_ctime, &after.stx_ctime));
    }
}
