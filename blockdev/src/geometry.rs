//! The geometry of a device: sizes, alignments, limits and optional commands.

/// What a device can do, fixed while it is open.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Geometry {
    /// Bytes on the namespace, a multiple of `logical_block`.
    pub len: u64,
    /// Every offset and length on the namespace is a multiple of this. 512 to 4096, a power of
    /// two.
    pub logical_block: u32,
    /// The start and length of each span are multiples of this. At most 4096, a power of two.
    pub memory_alignment: u32,
    /// The most bytes that one command to the device carries. Requests may be larger: the backend
    /// splits them and keeps the parts in flight together.
    pub max_transfer: u32,
    /// Commands in flight in one queue. Requests beyond it wait inside the queue.
    pub queue_depth: u32,
    /// The most queues that can be open at once.
    pub max_queues: u32,
    /// Whether completed writes can be lost in a power cut until a flush.
    pub volatile_cache: bool,
    /// Whether [`crate::Request::discard`] works.
    pub discard: bool,
    /// Whether [`crate::Request::write_zeroes`] works.
    pub write_zeroes: bool,
    /// Whether everything but reads and flushes is refused.
    pub read_only: bool,
}
