//! What memory knows newer of a file than its inode does.

use gpunvme_layout::Timestamp;

use crate::volume::inode::in_order;

/// What memory knows newer of a file than its inode does: size and time of change.
#[derive(Default)]
pub(crate) struct Newer {
    /// Size, when it is larger than the inode says.
    pub size: Option<u64>,
    /// Times that the file was made shorter.
    pub shrinks: u64,
    /// Time of the last change of content, if the inode does not know of it. It replaces what the
    /// inode has, whatever that is: who sets that time takes this one away.
    pub changed: Option<Timestamp>,
    /// Time of the last change of content since the file was taken into memory.
    last_changed: Option<Timestamp>,
}

impl Newer {
    /// The time of a change of content that is noted now.
    pub fn time_of_change(&self, now: Timestamp) -> Timestamp {
        self.last_changed.map_or(now, |before| in_order(before, now))
    }

    /// Notes the time of a change of content, for the inode to learn of.
    pub fn changes_at(&mut self, now: Timestamp) {
        self.last_changed = Some(self.time_of_change(now));
        self.changed = self.last_changed;
    }

    /// Notes that the inode knows of all changes of content, the last of which was at that time.
    pub fn changed_at(&mut self, at: Timestamp) {
        (self.last_changed, self.changed) = (Some(at), None);
    }

    /// Whether the inode knows all.
    pub fn is_empty(&self) -> bool {
        self.size.is_none() && self.changed.is_none()
    }
}
