//! The commands, and the numbers of their ioctls.

use crate::ring;
use crate::structures::{
    Extent, Grant, Grow, Info, Log, Metric, Metrics, NewDevice, Register, Resolve, Segment, Stats, Sync, Top, TopList, Transfer,
    Trim, Unregister,
};
use crate::structures::{MAGIC, MAX_SIZE};

/// Which way bytes move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From the file to memory.
    Read,
    /// From memory to the file.
    Write,
}

/// What a command does. The value is its `_IOC_NR`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Command {
    /// What this mount is and can do ([`Info`]). On any file or directory.
    Info = 0,
    /// Makes a buffer known ([`Register`]). On any file or directory, and over the socket.
    Register = 1,
    /// Forgets a buffer ([`Unregister`]). On any file or directory, and over the socket.
    Unregister = 2,
    /// Where a file's bytes lie on the device ([`Resolve`]). On a regular file.
    Resolve = 3,
    /// File to buffer ([`Transfer`]). On a regular file open for reading.
    Read = 4,
    /// Buffer to file ([`Transfer`]). On a regular file open for writing.
    Write = 5,
    /// Counters since mount ([`Stats`]). On any file or directory.
    Stats = 6,
    /// Makes a ring ([`ring::Ring`]). On any file or directory.
    Ring = 7,
    /// Gives an open file a name in a ring ([`ring::Attach`]). On a regular file.
    Attach = 8,
    /// Takes a file out of a ring, or ends the ring ([`ring::Detach`]). On any file or directory.
    Detach = 9,
    /// Shows how a file is open ([`Grant`]). Over the socket only.
    Grant = 10,
    /// Makes everything durable that was done before ([`Sync`]). On any file or directory.
    Sync = 11,
    /// How many operations there were, of each kind, and how long they took ([`Metrics`]). On any
    /// file or directory.
    Metrics = 12,
    /// Which events the daemon logs ([`Log`]). On any file or directory, for administrators.
    Log = 13,
    /// Who does what with which file ([`TopList`]). On any file or directory.
    Top = 14,
    /// Tells the devices which blocks no file has ([`Trim`]). On any file or directory, for
    /// administrators.
    Trim = 15,
    /// Makes the volume as large as its devices have become, or gives it further ones ([`Grow`]).
    /// On any file or directory, for administrators.
    Grow = 16,
}

impl Command {
    /// All commands, in order of their number.
    pub const ALL: [Command; 17] = [
        Command::Info,
        Command::Register,
        Command::Unregister,
        Command::Resolve,
        Command::Read,
        Command::Write,
        Command::Stats,
        Command::Ring,
        Command::Attach,
        Command::Detach,
        Command::Grant,
        Command::Sync,
        Command::Metrics,
        Command::Log,
        Command::Top,
        Command::Trim,
        Command::Grow,
    ];

    /// Bytes of the structure that begins the argument.
    pub const fn header_size(self) -> usize {
        match self {
            Command::Info => size_of::<Info>(),
            Command::Register => size_of::<Register>(),
            Command::Unregister => size_of::<Unregister>(),
            Command::Resolve => size_of::<Resolve>(),
            Command::Read | Command::Write => size_of::<Transfer>(),
            Command::Stats => size_of::<Stats>(),
            Command::Ring => size_of::<ring::Ring>(),
            Command::Attach => size_of::<ring::Attach>(),
            Command::Detach => size_of::<ring::Detach>(),
            Command::Grant => size_of::<Grant>(),
            Command::Sync => size_of::<Sync>(),
            Command::Metrics => size_of::<Metrics>(),
            Command::Log => size_of::<Log>(),
            Command::Top => size_of::<TopList>(),
            Command::Trim => size_of::<Trim>(),
            Command::Grow => size_of::<Grow>(),
        }
    }

    /// Bytes of each entry that follows the header; 0 where none does.
    pub const fn entry_size(self) -> usize {
        match self {
            Command::Resolve => size_of::<Extent>(),
            Command::Read | Command::Write => size_of::<Segment>(),
            Command::Metrics => size_of::<Metric>(),
            Command::Top => size_of::<Top>(),
            Command::Grow => size_of::<NewDevice>(),
            _ => 0,
        }
    }

    /// The ioctl request number for `entries` entries after the header.
    ///
    /// # Panics
    /// When the argument would exceed [`MAX_SIZE`].
    pub const fn request(self, entries: usize) -> u32 {
        let size = self.header_size() + entries * self.entry_size();
        assert!(size <= MAX_SIZE, "more entries than one ioctl carries");
        IOC_READ_WRITE | (size as u32) << 16 | (MAGIC as u32) << 8 | self as u32
    }
}

/// `_IOC_READ | _IOC_WRITE` in place.
pub(crate) const IOC_READ_WRITE: u32 = 3 << 30;
