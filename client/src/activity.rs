//! Who does what with which file of a mount.

use gpunvme_abi as abi;
use std::time::Duration;

/// What threads and processes did since it was first asked for ([`crate::Mount::activity`]).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Activity {
    /// The sums of each thread or process and each of its files; those that took longest, if not
    /// all find room.
    pub entries: Vec<ActivityEntry>,
    /// How many found no room.
    pub left_out: u64,
    /// Operations that are in no entry, because there were too many threads and files at once.
    pub others: u64,
}

/// What a thread or process did with a file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ActivityEntry {
    /// The user.
    pub user: u32,
    /// The thread that made requests of the kernel, or the process that had transfers done, as the
    /// daemon numbers them; 0 where it does not see it.
    pub thread: u32,
    /// The number of the file's inode.
    pub ino: u64,
    /// Requests of the kernel that ended, ioctls among them.
    pub requests: u64,
    /// Transfers of the direct path that ended.
    pub transfers: u64,
    /// Bytes that both read.
    pub read: u64,
    /// Bytes that both wrote.
    pub written: u64,
    /// How long the requests took, added up; of a ring, its transfers.
    pub time: Duration,
}

impl Activity {
    pub(crate) fn of(header: &abi::TopList, entries: &[abi::Top]) -> Activity {
        let entries = entries.iter().map(|entry| ActivityEntry {
            user: entry.user,
            thread: entry.thread,
            ino: entry.ino,
            requests: entry.requests,
            transfers: entry.transfers,
            read: entry.read,
            written: entry.written,
            time: Duration::from_nanos(entry.nanoseconds),
        });
        Activity { entries: entries.collect(), left_out: header.left_out, others: header.others }
    }
}

impl ActivityEntry {
    /// What was done since an earlier look at the same thread and file.
    #[must_use]
    pub fn since(&self, before: &ActivityEntry) -> ActivityEntry {
        // It may have been counted anew meanwhile.
        if before.requests > self.requests || before.transfers > self.transfers {
            return *self;
        }
        ActivityEntry {
            requests: self.requests - before.requests,
            transfers: self.transfers - before.transfers,
            read: self.read.saturating_sub(before.read),
            written: self.written.saturating_sub(before.written),
            time: self.time.saturating_sub(before.time),
            ..*self
        }
    }
}
