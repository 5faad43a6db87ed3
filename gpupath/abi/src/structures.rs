//! The structures of the ioctls and of the registration socket, and their bounds. Their flags are
//! in `flags`.

use crate::flags::ExtentFlags;
use crate::wire::{versioned, wire};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout};

/// The version that every structure carries.
pub const VERSION: u32 = 2;
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
/// The most bytes that the segments of one [`Transfer`] add up to. It bounds what one call makes
/// the daemon hold.
pub const MAX_TRANSFER: u64 = 1 << 30;
/// File offsets end here, as `loff_t` does.
pub const MAX_OFFSET: u64 = i64::MAX as u64;
/// How many codes [`Stats::reasons`] has room for.
pub const REASON_SLOTS: usize = 64;
/// The most entries in one [`Metrics`].
pub const MAX_METRICS: usize = (MAX_SIZE - size_of::<Metrics>()) / size_of::<Metric>();
/// The most entries in one [`TopList`].
pub const MAX_TOP: usize = (MAX_SIZE - size_of::<TopList>()) / size_of::<Top>();
/// The most devices that one [`Grow`] names.
pub const MAX_NEW_DEVICES: usize = 15;
/// Buckets of a [`Metric`]. Bucket `n` counts operations that took at most 1024 << `n` nanoseconds
/// and more than the one before; the last counts all that took longer.
pub const METRIC_BUCKETS: usize = 24;

wire! {
    /// `INFO`. Texts are UTF-8, padded with zero bytes, always with at least one.
    Info = 640 {
        /// [`VERSION`].
        version: u32,
        /// None defined.
        flags: u32,
        /// Out: [`INFO_MAGIC`].
        magic: [u8; 8],
        /// Out: [`crate::Features`].
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
        /// Out: logical block of the device, in bytes. Reads that cover whole logical blocks go
        /// direct.
        logical_block: u32,
        /// Out: what the address and length of memory must be a multiple of to go direct, in
        /// bytes.
        memory_alignment: u32,
        /// Out: number of devices under the volume.
        devices: u32,
        /// Out: the fastest [`crate::Route`] that GPU memory can take on this mount.
        route: u32,
        /// Out: the [`crate::Reason`] why that is not `p2p`.
        reason: u32,
        /// Out: bytes that lie on one device before those of the next begin; 0 where there is one
        /// device.
        stripe_unit: u64,
        /// Out: sets of devices, one behind the other: the volume was given all but the first while
        /// it was in use.
        sets: u32,
        /// Out: seconds between two commits of the journal.
        commit: u32,
        /// Out: bytes of the metadata cache.
        cache: u64,
        /// Out: bytes of small writes that wait in memory.
        write_buffer: u64,
        /// Out: loops that take the kernel's requests.
        threads: u32,
        /// Out: zero.
        reserved2: u32,
        /// Out: zero.
        reserved: [u64; 3],
        /// Out: label of the volume.
        label: [u8; 64],
        /// Out: path of the registration socket, in the daemon's mount namespace; empty where
        /// there is none.
        socket: [u8; 112],
        /// Out: the device, as it was named to `mount.gpunvme`; of several all names, in the order
        /// of their numbers, with `+` between them.
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
        /// [`crate::RegisterFlags`].
        flags: u32,
        /// Number of the buffer's fd in the calling process; over the socket -1, and the fd
        /// travels as `SCM_RIGHTS`.
        fd: i32,
        /// Zero.
        reserved: u32,
        /// Length of the buffer in bytes, from the beginning of what the fd stands for.
        len: u64,
        /// Out: the buffer's name in later calls. Never 0, never used again.
        buffer: u64,
        /// Out: the [`crate::Route`] that transfers to and from this buffer take.
        route: u32,
        /// Out: the [`crate::Reason`] why that is not `p2p`, or why the buffer was refused.
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
    /// `RESOLVE`, followed by `capacity` [`Extent`]s (out). What is not covered by an extent is a
    /// hole.
    Resolve = 48 {
        /// [`VERSION`].
        version: u32,
        /// [`crate::ResolveFlags`].
        flags: u32,
        /// Where in the file to begin, in bytes.
        offset: u64,
        /// How far to go, in bytes; `u64::MAX` for the rest of the file.
        len: u64,
        /// Out: where the next call should begin; at or past the end of the range or of the file
        /// when everything has been told.
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
        /// Where it begins in the file, in bytes. It may begin before the range that was asked
        /// for.
        file_offset: u64,
        /// Where it begins on that device, in bytes.
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
    /// Segments count in order: `bytes` is what was moved from the first byte of the first segment
    /// on, without a gap. A `READ` stops at the end of the file. `bytes == p2p + bounce + host +
    /// hole + edge` always. If something failed after a part was done, the ioctl succeeds and
    /// `status` says what; if nothing was done the ioctl itself fails.
    Transfer = 96 {
        /// [`VERSION`].
        version: u32,
        /// [`crate::TransferFlags`].
        flags: u32,
        /// The buffer, as `REGISTER` named it.
        buffer: u64,
        /// Number of segments behind this structure.
        segments: u32,
        /// Number, in the calling process, of a descriptor of the file that is open for this
        /// direction: it shows that the process may do so. It is looked at where `grant` shows
        /// nothing.
        descriptor: i32,
        /// In: a grant for the file that this process was given before, or 0. Out: one for later
        /// calls ([`Grant`]).
        grant: u64,
        /// Out: bytes moved.
        bytes: u64,
        /// Out: bytes that the device moved to or from GPU memory.
        p2p: u64,
        /// Out: bytes that the device moved to or from a staging pool.
        bounce: u64,
        /// Out: bytes that the device moved to or from host memory.
        host: u64,
        /// Out: bytes that were filled with zeros, because the file has a hole or was never
        /// written there.
        hole: u64,
        /// Out: bytes that the CPU copied, because they or their memory are not aligned.
        edge: u64,
        /// Out: the [`crate::Reason`] why not every byte went the fastest way, or why the transfer
        /// was refused.
        reason: u32,
        /// Out: errno of what ended the transfer early; 0 where nothing did.
        status: i32,
        /// Out: index of the segment that `status` or the ioctl's errno is about; `u32::MAX` where
        /// it is about none.
        failed_segment: u32,
        /// Out: zero.
        reserved2: u32,
    }
}

wire! {
    /// `METRICS`, followed by `capacity` [`Metric`]s (out). Counters since mount, of all processes.
    Metrics = 128 {
        /// [`VERSION`].
        version: u32,
        /// None defined.
        flags: u32,
        /// Entries that there is room for behind this structure; at least 1.
        capacity: u32,
        /// Out: entries that were filled in. Kinds without an operation are left out.
        count: u32,
        /// Out: nanoseconds since the daemon began to serve.
        uptime: u64,
        /// Out: bytes that the volume can hold.
        volume_bytes: u64,
        /// Out: bytes of it that are free.
        free: u64,
        /// Out: bytes in the write buffer that the device has not got yet.
        dirty: u64,
        /// Out: blocks of metadata that were looked for in the cache.
        cache_lookups: u64,
        /// Out: those of them that were not there, and were read from the device.
        cache_misses: u64,
        /// Out: bytes of metadata in the cache.
        cache_bytes: u64,
        /// Out: rings that there are now.
        rings: u64,
        /// Out: zero.
        reserved: [u64; 6],
    }
}

wire! {
    /// Operations of one kind.
    #[derive(Copy)]
    Metric = 256 {
        /// [`MetricKind`].
        kind: u32,
        /// Zero.
        reserved: u32,
        /// Its name: UTF-8, padded with zero bytes, always with at least one.
        name: [u8; 24],
        /// Operations begun.
        begun: u64,
        /// Operations that ended with an error.
        failed: u64,
        /// Bytes that they moved.
        bytes: u64,
        /// How long those that ended took, added up, in nanoseconds.
        nanoseconds: u64,
        /// Operations that ended, by how long they took ([`METRIC_BUCKETS`]).
        buckets: [u64; METRIC_BUCKETS],
    }
}

wire! {
    /// `TOP`, followed by `capacity` [`Top`]s (out): who does what with which file. It is counted
    /// from the first call on, as long as there is one every 10 s. A caller sees what its own user
    /// does; administrators see all.
    TopList = 64 {
        /// [`VERSION`].
        version: u32,
        /// None defined.
        flags: u32,
        /// Entries that there is room for behind this structure; at least 1.
        capacity: u32,
        /// Out: entries that were filled in: those whose operations took longest.
        count: u32,
        /// Out: entries that found no room.
        left_out: u64,
        /// Out: operations of those that are in no entry, because there were too many at once.
        others: u64,
        /// Out: zero.
        reserved: [u64; 4],
    }
}

wire! {
    /// What a thread, or process, did with a file.
    #[derive(Copy)]
    Top = 64 {
        /// The user.
        user: u32,
        /// The thread that made requests of the kernel, or the process that had transfers done,
        /// as the daemon numbers them; 0 where it does not see it.
        thread: u32,
        /// The number of the file's inode.
        ino: u64,
        /// Requests of the kernel that ended, ioctls among them.
        requests: u64,
        /// Transfers that ended.
        transfers: u64,
        /// Bytes that both read.
        read: u64,
        /// Bytes that both wrote.
        written: u64,
        /// How long the requests took, added up, in nanoseconds; of a ring, its transfers.
        nanoseconds: u64,
        /// Zero.
        reserved: u64,
    }
}

/// What a [`Metric`] counts. Programs must expect kinds that they do not know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum MetricKind {
    /// Requests of the kernel, by operation of FUSE.
    Request = 0,
    /// Transfers of the direct path: `read` or `write`, a hyphen, the route.
    Transfer = 1,
    /// Requests to the device, by what they do.
    Device = 2,
}

wire! {
    /// `SYNC`: as sync(2), for one volume. What was written to any file by any process before the
    /// call, and every change of names and attributes, is durable when it returns.
    Sync = 16 {
        /// [`VERSION`].
        version: u32,
        /// None defined.
        flags: u32,
        /// Zero.
        reserved: u64,
    }
}

wire! {
    /// `TRIM`: tells the devices which blocks no file has, so that they need not keep what is in
    /// them, for a part of the volume: a call goes so far as it gets in a moment, and the next one
    /// goes on at `next`. It is for administrators: `EPERM` for all others. `EOPNOTSUPP` where a
    /// device has no discard, `EROFS` where the mount is read-only.
    Trim = 256 {
        /// [`VERSION`].
        version: u32,
        /// None defined.
        flags: u32,
        /// In: where on the volume to begin, in bytes.
        start: u64,
        /// In: how many bytes of the volume to look at.
        len: u64,
        /// In: free bytes that lie side by side, at least, to be told of.
        minimum: u64,
        /// Out: where on the volume to go on; the end of what was asked for when all of it is done,
        /// or `u64::MAX` when the volume ends.
        next: u64,
        /// Out: bytes that the devices were told of.
        trimmed: u64,
        /// Zero.
        reserved: [u64; 2],
        /// Out, where the call failed: why, with the name of the device. Text, padded with zero
        /// bytes.
        why: [u8; 192],
    }
}

wire! {
    /// `GROW`, followed by the [`NewDevice`]s (in), at most [`MAX_NEW_DEVICES`], that the volume is
    /// to have as well; without any, makes it as large as its devices have become. It is for
    /// administrators: `EPERM` for all others. `EINVAL` where the devices have no room for more,
    /// cannot be the volume's, or the volume cannot grow; `EROFS` where the mount is read-only.
    Grow = 256 {
        /// [`VERSION`].
        version: u32,
        /// [`crate::GrowFlags`].
        flags: u32,
        /// Out: bytes that the volume could hold before.
        before: u64,
        /// Out: bytes that it can hold now.
        capacity: u64,
        /// Zero.
        reserved: [u64; 5],
        /// Out, where the call failed: why, with the name of the device. Text, padded with zero
        /// bytes.
        why: [u8; 192],
    }
}

wire! {
    /// A device for a [`Grow`].
    NewDevice = 256 {
        /// Its name as `mount.gpunvme` takes it, a path from the root, in the daemon's mount
        /// namespace: UTF-8, padded with zero bytes, always with at least one. Its first and its
        /// last MiB are zero.
        name: [u8; 256],
    }
}

wire! {
    /// `LOG`: which events the daemon logs, until the mount ends or the next call. It is for
    /// administrators: `EPERM` for all others.
    Log = 272 {
        /// [`VERSION`].
        version: u32,
        /// None defined.
        flags: u32,
        /// In: a filter in the syntax of the mount option `log`; empty to leave it. Out: the one
        /// that held before. Text, padded with zero bytes, always with at least one.
        filter: [u8; 256],
        /// Zero.
        reserved: u64,
    }
}

wire! {
    /// `GRANT`, over the socket only, with a descriptor of a file of the mount: for a process whose
    /// descriptors the daemon may not look at.
    ///
    /// A grant is a number that shows how a process has opened a file. It is good for that process
    /// and that file alone, for as long as the process lives, also when the descriptor is closed.
    Grant = 32 {
        /// [`VERSION`].
        version: u32,
        /// None defined.
        flags: u32,
        /// Out: the grant, for [`Transfer::grant`] and [`crate::ring::Attach::grant`].
        grant: u64,
        /// Zero.
        reserved: [u64; 2],
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
        /// Out: calls, by command number, of those below 16.
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
        /// Out: transfers, by the [`crate::Reason`] they reported.
        reasons: [u64; REASON_SLOTS],
        /// Out: calls, by command number, of those from 16 on.
        more_calls: [u64; 4],
    }
}

wire! {
    /// What precedes a [`Register`], [`Unregister`] or [`Grant`] in each datagram of the
    /// registration socket (`AF_UNIX`, `SOCK_SEQPACKET`), both ways.
    #[derive(Copy)]
    Message = 8 {
        /// The ioctl request number of the command.
        request: u32,
        /// In: zero. Out: 0, or the errno that the ioctl would have failed with.
        status: i32,
    }
}

versioned!(Info, Register, Unregister, Resolve, Transfer, Stats, Grant, Sync, Metrics, Log, TopList, Trim, Grow);

impl Stats {
    /// Calls of a command.
    pub fn calls(&self, command: crate::Command) -> u64 {
        let number = command as usize;
        self.calls.get(number).unwrap_or_else(|| &self.more_calls[number - self.calls.len()]).to_owned()
    }
}

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
