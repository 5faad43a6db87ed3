//! Size and time of change of a file, where memory has newer values than the inode.

use gpunvme_layout::Timestamp;

use crate::volume::inode::in_order;

/// Size and time of change of a file, where memory has newer values than the inode.
#[derive(Default)]
pub(crate) struct Newer {
    /// Size in bytes, when it is larger than the inode's.
    pub size: Option<u64>,
    /// Times that the file was made shorter.
    pub shrinks: u64,
    /// Time of the last change of content, if the inode does not have it yet. It replaces the
    /// inode's time, whatever that is: an operation that sets the inode's time clears this one.
    pub changed: Option<Timestamp>,
    /// Time of the last change of content since the file was taken into memory.
    last_changed: Option<Timestamp>,
}

impl Newer {
    /// The time of a change of content that is noted now.
    pub fn time_of_change(&self, now: Timestamp) -> Timestamp {
        self.last_changed.map_or(now, |before| in_order(before, now))
    }

    /// Notes the time of a change of content that the inode does not have yet.
    pub fn changes_at(&mut self, now: Timestamp) {
        self.last_changed = Some(self.time_of_change(now));
        self.changed = self.last_changed;
    }

    /// Notes that the inode has all changes of content, the last of which was at that time.
    pub fn changed_at(&mut self, at: Timestamp) {
        (self.last_changed, self.changed) = (Some(at), None);
    }

    /// Whether the inode is up to date.
    pub fn is_empty(&self) -> bool {
        self.size.is_none() && self.changed.is_none()
    }
}
