//! The flags of the structures.

use bitflags::bitflags;

bitflags! {
    /// Flags of [`crate::Register`].
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct RegisterFlags: u32 {
        /// The memory is the staging pool of the bounce route: its owner copies onwards to a GPU.
        /// Transfers to and from it count as `bounce`.
        const STAGING = 1 << 0;
    }

    /// Flags of [`crate::Transfer`]. At most one route can be required.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct TransferFlags: u32 {
        /// Fail with `EOPNOTSUPP`, before anything moves, unless the route is `p2p`.
        const REQUIRE_P2P = 1 << 0;
        /// The same for `bounce`.
        const REQUIRE_BOUNCE = 1 << 1;
        /// The same for `host`.
        const REQUIRE_HOST = 1 << 2;
        /// Fail with `EOPNOTSUPP` and [`Reason::Unaligned`], before anything moves, if the CPU
        /// would have to copy a byte.
        const REQUIRE_DIRECT = 1 << 3;
        /// The caller had the kernel write back its dirty pages of the range, with
        /// `sync_file_range(2)`. Without it the daemon makes the kernel write back, and drop, what
        /// it may have cached of the range.
        const WRITTEN_BACK = 1 << 4;
    }

    /// Flags of [`crate::Resolve`].
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct ResolveFlags: u32 {
        /// As [`TransferFlags::WRITTEN_BACK`].
        const WRITTEN_BACK = 1 << 4;
    }

    /// Flags of [`Extent`].
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct ExtentFlags: u32 {
        /// Allocated and never written: reads as zeros.
        const UNWRITTEN = 1 << 0;
        /// The last extent of the file.
        const LAST = 1 << 1;
    }

    /// Flags of [`crate::Grow`].
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct GrowFlags: u32 {
        /// Nothing is done; the call fails where the volume could not have the devices, whatever
        /// they hold.
        const CHECK = 1 << 0;
    }

    /// Flags of [`crate::Info::features`].
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Features: u64 {
        /// The volume is mounted read-only.
        const READ_ONLY = 1 << 0;
        /// The kernel's requests come through io_uring, not `/dev/fuse`.
        const IO_URING = 1 << 1;
        /// They were to, and the system refuses io_uring to the daemon.
        const IO_URING_REFUSED = 1 << 2;
        /// They were to, and the kernel does not offer it.
        const IO_URING_NOT_OFFERED = 1 << 3;
        /// They were to, and the kernel refused a queue.
        const IO_URING_NOT_REGISTERED = 1 << 4;
        /// The device is told of blocks that files gave up.
        const DISCARD = 1 << 5;
    }
}
