//! The ring: queues in memory that the application shares with the daemon, for many transfers in
//! flight and no system call a transfer.
//!
//! The memory is a memfd of [`ring_bytes`] bytes. It begins with a page of [`Word`]s, each alone
//! in its cache line; then come the submissions, then the completions, as many of each as the ring
//! has entries. Numbers of entries and positions count on for ever and wrap at 2^32; an entry's
//! place is its position modulo the number of entries, a power of two.
//!
//! - The application writes submissions from [`Word::SubmissionTail`] on and then moves that word;
//!   the daemon takes them and moves [`Word::SubmissionHead`]. With completions it is the other
//!   way round.
//! - Submissions not yet completed, and completions not yet taken, are together never more than the
//!   entries. An application that breaks this rule loses the ring.
//! - A side that goes to sleep says so in its word, looks once more, and then waits for its
//!   eventfd. A side that has moved a tail looks at that word, with a full barrier between, and
//!   signals if the other sleeps.

use crate::structures::VERSION;
use crate::wire::{versioned, wire};
use bitflags::bitflags;
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout};

/// The fewest and the most entries of a ring.
pub const RING_ENTRIES: std::ops::RangeInclusive<u32> = 8..=4096;
/// The most bytes of one submission. What is longer is several: no process may hold the device for
/// longer than that.
pub const MAX_RING_TRANSFER: u64 = 16 << 20;
/// Bytes of the page of words.
const WORDS: usize = 4096;

/// Bytes of the memory of a ring.
pub const fn ring_bytes(entries: u32) -> usize {
    WORDS + entries as usize * (size_of::<Submission>() + size_of::<Completion>())
}

/// The 32-bit words that both sides look at. The value is the offset in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum Word {
    /// Position behind the last submission. The application's.
    SubmissionTail = 0,
    /// Position of the first submission not taken yet. The daemon's.
    SubmissionHead = 64,
    /// Position behind the last completion. The daemon's.
    CompletionTail = 128,
    /// Position of the first completion not taken yet. The application's.
    CompletionHead = 192,
    /// [`AWAKE`], [`ASLEEP`] or [`CLOSED`]. The daemon's.
    Daemon = 256,
    /// [`AWAKE`] or [`ASLEEP`]. The application's; the daemon makes it [`AWAKE`] as it signals.
    Application = 320,
    /// 0, or the errno with which kernels that use the ring give up. The application's, of which
    /// the daemon knows nothing.
    Over = 384,
}

/// The side is awake: it looks by itself.
pub const AWAKE: u32 = 0;
/// The side sleeps: it waits for its eventfd.
pub const ASLEEP: u32 = 1;
/// The ring is over: it was closed, its rules were broken, or the volume is being unmounted.
pub const CLOSED: u32 = 2;

impl Word {
    /// Where in the memory it lies, in bytes.
    pub const fn offset(self) -> usize {
        self as usize
    }
}

/// Where in the memory a submission lies, in bytes.
pub const fn submission_offset(entries: u32, position: u32) -> usize {
    WORDS + (position & (entries - 1)) as usize * size_of::<Submission>()
}

/// Where in the memory a completion lies, in bytes.
pub const fn completion_offset(entries: u32, position: u32) -> usize {
    WORDS + entries as usize * size_of::<Submission>() + (position & (entries - 1)) as usize * size_of::<Completion>()
}

wire! {
    /// `RING`: makes a ring. On any file or directory.
    Ring = 56 {
        /// [`VERSION`].
        version: u32,
        /// None defined.
        flags: u32,
        /// Number, in the calling process, of a memfd of [`ring_bytes`] bytes of zeros, sealed
        /// with `F_SEAL_SHRINK`.
        memory: i32,
        /// Number of the eventfd that the application signals.
        submitted: i32,
        /// Number of the eventfd that the daemon signals.
        completed: i32,
        /// Submissions, and completions, that there is room for: a power of two in
        /// [`RING_ENTRIES`].
        entries: u32,
        /// Out: the ring's name in `ATTACH` and `DETACH`.
        ring: u64,
        /// Zero.
        reserved: [u64; 3],
    }
}

wire! {
    /// `ATTACH`: gives an open regular file a name in a ring, with the access that it is open for.
    /// The file stays usable there until it is detached, also when it is closed or unlinked.
    Attach = 40 {
        /// [`VERSION`].
        version: u32,
        /// None defined.
        flags: u32,
        /// The ring.
        ring: u64,
        /// Out: the file's name in submissions. Never 0.
        file: u64,
        /// As [`crate::Transfer::grant`].
        grant: u64,
        /// As [`crate::Transfer::descriptor`]: the file can be used in the ring for what this
        /// descriptor is open for.
        descriptor: i32,
        /// Zero.
        reserved: u32,
    }
}

wire! {
    /// `DETACH`: takes a file out of a ring, or ends the ring. Transfers in flight end normally.
    /// On any file or directory.
    Detach = 40 {
        /// [`VERSION`].
        version: u32,
        /// None defined.
        flags: u32,
        /// The ring.
        ring: u64,
        /// The file; 0 for the ring itself.
        file: u64,
        /// Zero.
        reserved: [u64; 2],
    }
}

wire! {
    /// What the application asks for.
    #[derive(Copy)]
    Submission = 64 {
        /// [`crate::Command::Read`] or [`crate::Command::Write`], as a number.
        command: u32,
        /// [`crate::TransferFlags`].
        flags: u32,
        /// The file, as `ATTACH` named it.
        file: u64,
        /// The buffer, as `REGISTER` named it.
        buffer: u64,
        /// Where in the file, in bytes.
        file_offset: u64,
        /// Where in the buffer, in bytes.
        buffer_offset: u64,
        /// How much, in bytes; at most [`MAX_RING_TRANSFER`].
        len: u64,
        /// Comes back in the completion.
        user_data: u64,
        /// Zero.
        reserved: u64,
    }
}

wire! {
    /// How it ended. `bytes == p2p + bounce + host + hole + edge`, as in [`crate::Transfer`].
    #[derive(Copy, Default)]
    Completion = 64 {
        /// The submission's.
        user_data: u64,
        /// 0, or the errno of what ended it early.
        status: i32,
        /// The [`crate::Reason`] why not every byte went the fastest way, or why it was refused.
        reason: u32,
        /// Bytes that the device moved to or from GPU memory.
        p2p: u64,
        /// Bytes that the device moved to or from a staging pool.
        bounce: u64,
        /// Bytes that the device moved to or from host memory.
        host: u64,
        /// Bytes that were filled with zeros.
        hole: u64,
        /// Bytes that the CPU copied.
        edge: u64,
        /// [`CompletionFlags`].
        flags: u64,
    }
}

bitflags! {
    /// What else there is to tell of a transfer. An application leaves bits alone that it does not
    /// know.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct CompletionFlags: u64 {
        /// Another process has read the same bytes of the file by a ring since both have it
        /// attached, for reading alone: through the kernel's page cache they would come from the
        /// device once.
        const COMMON = 1 << 0;
        /// Every byte that was asked for was moved, without an error.
        const ALL = 1 << 1;
    }
}

versioned!(Ring, Attach, Detach);
