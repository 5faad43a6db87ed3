//! The ABI between applications and the daemon: ioctl commands, their structures, the memory of a ring, and the messages of the
//! registration socket.
//!
//! It guards what programs compiled today and daemons built years later must agree on, byte for byte. `docs/reference/ioctl.md` describes it for people
//! who write neither; `client/include/gpunvme_abi.h` is the same thing in C, and a test compares the two.
//!
//! Rules:
//! - Linux restricts ioctls on FUSE files (`fs/fuse/ioctl.c`): the kernel copies exactly `_IOC_SIZE(cmd)` bytes in and back out, follows no
//!   pointer and translates no fd. Everything is therefore inline, at most [`MAX_SIZE`] bytes.
//! - A command is `_IOWR('G', nr, size)`. For [`Resolve`] and [`Transfer`] the size is that of the header plus the entries that follow it, so
//!   that a call with one segment copies about a hundred bytes and not 16 KiB.
//! - Every structure is little-endian, has no implicit padding, and begins with a version and flags. Reserved fields must be zero and unknown flags
//!   are refused, so that both can get a meaning later. Fields marked *out* are ignored on the way in.
//! - When a command fails the ioctl returns the errno, and the out fields say more where there is more to say ([`Register::reason`],
//!   [`Transfer::reason`], [`Transfer::failed_segment`]).
#![deny(unsafe_code)]

pub use codes::{Reason, Route};
pub use decode::{DecodeError, Request, TransferRequest, decode};

use bitflags::bitflags;
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout};

#[cfg(target_endian = "big")]
compile_error!("the ABI is little-endian, and nothing here swaps bytes");

macro_rules! wire {
    ($(#[$doc:meta])* $name:ident = $size:literal { $($(#[$field_doc:meta])* $field:ident : $ty:ty,)* }) => {
        $(#[$doc])*
        #[derive(Clone, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
        #[repr(C)]
        pub struct $name { $($(#[$field_doc])* pub $field: $ty,)* }
        const _: () = assert!(size_of::<$name>() == $size && align_of::<$name>() <= 8);
    };
}

macro_rules! versioned {
    ($($name:ident),*) => { $(
        impl Default for $name {
            /// This version, and zero everywhere else.
            fn default() -> Self {
                let mut new = <$name as FromZeros>::new_zeroed();
                new.version = VERSION;
                new
            }
        }
    )* };
}

mod codes;
mod decode;
pub mod ring;

/// The version that every structure carries.
pub const VERSION: u32 = 1;
/// The ioctl magic, `_IOC_TYPE`.
pub const MAGIC: u8 = b'G';
/// What [`Info::magic`] holds, so that another filesystem's answer is not taken for ours.
pub const INFO_MAGIC: [u8; 8] = *b"gpunvme\0";
/// The most bytes one ioctl carries: 14 bits of size (`include/uapi/asm-generic/ioctl.h`).
pub const MAX_SIZE: usize = (1 << 14) - 1;
/// The most segments in one [`Transfer`].
pub const MAX_SEGMENTS: usize = (MAX_SIZE - size_of::<Transfer>()) / size_of::<Segment>();
/// The most extents in one [`Resolve`].
pub const MAX_EXTENTS: usize = (MAX_SIZE - size_of::<Resolve>()) / size_of::<Extent>();
/// The most bytes that the segments of one [`Transfer`] add up to. It bounds what one call makes the daemon hold.
pub const MAX_TRANSFER: u64 = 1 << 30;
/// File offsets end here, as `loff_t` does.
pub const MAX_OFFSET: u64 = i64::MAX as u64;
/// How many codes [`Stats::reasons`] has room for.
pub const REASON_SLOTS: usize = 64;

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
}

impl Command {
    /// All commands, in order of their number.
    pub const ALL: [Command; 10] = [
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
        }
    }

    /// Bytes of each entry that follows the header; 0 where none does.
    pub const fn entry_size(self) -> usize {
        match self {
            Command::Resolve => size_of::<Extent>(),
            Command::Read | Command::Write => size_of::<Segment>(),
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
const IOC_READ_WRITE: u32 = 3 << 30;

bitflags! {
    /// Flags of [`Register`].
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct RegisterFlags: u32 {
        /// The memory is the staging pool of the bounce route: its owner copies onwards to a GPU. Transfers to and from it count as `bounce`.
        const STAGING = 1 << 0;
    }

    /// Flags of [`Transfer`]. At most one route can be required.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct TransferFlags: u32 {
        /// Fail with `EOPNOTSUPP`, before anything moves, unless the route is `p2p`.
        const REQUIRE_P2P = 1 << 0;
        /// The same for `bounce`.
        const REQUIRE_BOUNCE = 1 << 1;
        /// The same for `host`.
        const REQUIRE_HOST = 1 << 2;
        /// Fail with `EOPNOTSUPP` and [`Reason::Unaligned`], before anything moves, if the CPU would have to copy a byte.
        const REQUIRE_DIRECT = 1 << 3;
    }

    /// Flags of [`Extent`].
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct ExtentFlags: u32 {
        /// Allocated and never written: reads as zeros.
        const UNWRITTEN = 1 << 0;
        /// The last extent of the file.
        const LAST = 1 << 1;
    }

    /// Flags of [`Info::features`].
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Features: u64 {
        /// The volume is mounted read-only.
        const READ_ONLY = 1 << 0;
    }
}

wire! {
    /// `INFO`. Texts are UTF-8, padded with zero bytes, always with at least one.
    Info = 640 {
        /// [`VERSION`].
        version: u32,
        /// None defined.
        flags: u32,
        /// Out: [`INFO_MAGIC`].
        magic: [u8; 8],
        /// Out: [`Features`].
        features: u64,
        /// Out: UUID of the volume.
        uuid: [u8; 16],
        /// Out: bytes that the volume can hold.
        capacity: u64,
        /// Out: bytes of it that are free.
        free: u64,
        /// Out: most bytes one `READ` or `WRITE` moves.
        max_transfer: u64,
        /// Out: most bytes of buffers a process may register.
        max_buffer_bytes: u64,
        /// Out: most buffers a process may register.
        max_buffers: u32,
        /// Out: most segments of one `READ` or `WRITE`.
        max_segments: u32,
        /// Out: block size of the filesystem, in bytes. Writes that cover whole blocks go direct.
        block_size: u32,
        /// Out: logical block of the device, in bytes. Reads that cover whole logical blocks go direct.
        logical_block: u32,
        /// Out: what the address and length of memory must be a multiple of to go direct, in bytes.
        memory_alignment: u32,
        /// Out: number of devices under the volume.
        devices: u32,
        /// Out: the fastest [`Route`] that GPU memory can take on this mount.
        route: u32,
        /// Out: the [`Reason`] why that is not `p2p`.
        reason: u32,
        /// Out: zero.
        reserved: [u64; 8],
        /// Out: label of the volume.
        label: [u8; 64],
        /// Out: path of the registration socket, in the daemon's mount namespace; empty where there is none.
        socket: [u8; 112],
        /// Out: the device, as it was named to `mount.gpunvme`.
        device: [u8; 256],
        /// Out: name and version of the daemon.
        daemon: [u8; 40],
    }
}

wire! {
    /// `REGISTER`.
    Register = 56 {
        /// [`VERSION`].
        version: u32,
        /// [`RegisterFlags`].
        flags: u32,
        /// Number of the buffer's fd in the calling process; over the socket -1, and the fd travels as `SCM_RIGHTS`.
        fd: i32,
        /// Zero.
        reserved: u32,
        /// Length of the buffer in bytes, from the beginning of what the fd stands for.
        len: u64,
        /// Out: the buffer's name in later calls. Never 0, never used again.
        buffer: u64,
        /// Out: the [`Route`] that transfers to and from this buffer take.
        route: u32,
        /// Out: the [`Reason`] why that is not `p2p`, or why the buffer was refused.
        reason: u32,
        /// Zero.
        reserved2: [u64; 2],
    }
}

wire! {
    /// `UNREGISTER`. Transfers in flight on the buffer end normally.
    Unregister = 16 {
        /// [`VERSION`].
        version: u32,
        /// None defined.
        flags: u32,
        /// The buffer.
        buffer: u64,
    }
}

wire! {
    /// `RESOLVE`, followed by `capacity` [`Extent`]s (out). What is not covered by an extent is a hole.
    Resolve = 48 {
        /// [`VERSION`].
        version: u32,
        /// None defined.
        flags: u32,
        /// Where in the file to begin, in bytes.
        offset: u64,
        /// How far to go, in bytes; `u64::MAX` for the rest of the file.
        len: u64,
        /// Out: where the next call should begin; at or past the end of the range or of the file when everything has been told.
        next: u64,
        /// Out: size of the file in bytes.
        file_size: u64,
        /// Extents that there is room for behind this structure; at least 1.
        capacity: u32,
        /// Out: extents that were filled in.
        count: u32,
    }
}

wire! {
    /// One extent of a file.
    #[derive(Copy)]
    Extent = 32 {
        /// Where it begins in the file, in bytes. It may begin before the range that was asked for.
        file_offset: u64,
        /// Where it begins on the device, in bytes.
        device_offset: u64,
        /// Its length in bytes. It may reach past the end of the file, to the end of a block.
        len: u64,
        /// Number of the device; 0 is the first.
        device: u32,
        /// [`ExtentFlags`].
        flags: u32,
    }
}

wire! {
    /// `READ` and `WRITE`, followed by `segments` [`Segment`]s.
    ///
    /// Segments count in order: `bytes` is what was moved from the first byte of the first segment on, without a gap. A `READ` stops at the end of the file.
    /// `bytes == p2p + bounce + host + hole + edge` always. If something failed after a part was done, the ioctl succeeds and `status` says what;
    /// if nothing was done the ioctl itself fails.
    Transfer = 88 {
        /// [`VERSION`].
        version: u32,
        /// [`TransferFlags`].
        flags: u32,
        /// The buffer, as `REGISTER` named it.
        buffer: u64,
        /// Number of segments behind this structure.
        segments: u32,
        /// Zero.
        reserved: u32,
        /// Out: bytes moved.
        bytes: u64,
        /// Out: bytes that the device moved to or from GPU memory.
        p2p: u64,
        /// Out: bytes that the device moved to or from a staging pool.
        bounce: u64,
        /// Out: bytes that the device moved to or from host memory.
        host: u64,
        /// Out: bytes that were filled with zeros, because the file has a hole or was never written there.
        hole: u64,
        /// Out: bytes that the CPU copied, because they or their memory are not aligned.
        edge: u64,
        /// Out: the [`Reason`] why not every byte went the fastest way, or why the transfer was refused.
        reason: u32,
        /// Out: errno of what ended the transfer early; 0 where nothing did.
        status: i32,
        /// Out: index of the segment that `status` or the ioctl's errno is about; `u32::MAX` where it is about none.
        failed_segment: u32,
        /// Out: zero.
        reserved2: u32,
    }
}

wire! {
    /// One piece of a transfer.
    #[derive(Copy)]
    Segment = 24 {
        /// Where in the file, in bytes.
        file_offset: u64,
        /// Where in the buffer, in bytes.
        buffer_offset: u64,
        /// How much, in bytes.
        len: u64,
    }
}

wire! {
    /// Bytes moved in one direction, by route.
    #[derive(Copy, Default)]
    Moved = 40 {
        /// Between device and GPU memory.
        p2p: u64,
        /// Between device and a staging pool.
        bounce: u64,
        /// Between device and host memory.
        host: u64,
        /// Filled with zeros.
        hole: u64,
        /// Copied by the CPU, for lack of alignment.
        edge: u64,
    }
}

wire! {
    /// `STATS`. Counters since mount, of all processes.
    Stats = 792 {
        /// [`VERSION`].
        version: u32,
        /// None defined.
        flags: u32,
        /// Out: calls, by command number.
        calls: [u64; 16],
        /// Out: calls that failed, of all commands.
        failed: u64,
        /// Out: what `READ` moved.
        read: Moved,
        /// Out: what `WRITE` moved.
        write: Moved,
        /// Out: buffers registered now.
        buffers: u64,
        /// Out: bytes in them.
        buffer_bytes: u64,
        /// Out: processes that own them.
        processes: u64,
        /// Out: transfers, by the [`Reason`] they reported.
        reasons: [u64; REASON_SLOTS],
        /// Out: zero.
        reserved: [u64; 4],
    }
}

wire! {
    /// What precedes a [`Register`] or [`Unregister`] in each datagram of the registration socket (`AF_UNIX`, `SOCK_SEQPACKET`), both ways.
    #[derive(Copy)]
    Message = 8 {
        /// The ioctl request number of the command.
        request: u32,
        /// In: zero. Out: 0, or the errno that the ioctl would have failed with.
        status: i32,
    }
}

versioned!(Info, Register, Unregister, Resolve, Transfer, Stats);

impl Extent {
    /// Its flags, as far as this version knows them.
    pub fn flags(&self) -> ExtentFlags {
        ExtentFlags::from_bits_truncate(self.flags)
    }
}

impl Moved {
    /// Bytes moved by any means.
    pub fn total(&self) -> u64 {
        self.p2p + self.bounce + self.host + self.hole + self.edge
    }
}

/// Copies `text` into a fixed field, cut at a character boundary so that a zero byte remains.
pub fn put_text<const N: usize>(field: &mut [u8; N], text: &str) {
    let end = (0..N.min(text.len() + 1)).rev().find(|&at| text.is_char_boundary(at)).unwrap_or(0);
    field.fill(0);
    field[..end].copy_from_slice(&text.as_bytes()[..end]);
}

/// The text in a fixed field; bytes that are not UTF-8 become U+FFFD.
pub fn get_text(field: &[u8]) -> String {
    let end = field.iter().position(|&byte| byte == 0).unwrap_or(field.len());
    String::from_utf8_lossy(&field[..end]).into_owned()
}
