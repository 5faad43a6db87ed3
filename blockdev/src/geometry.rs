//! The geometry of a device: sizes, alignments, limits and optional commands.
use std::sync::atomic::{AtomicU64, Ordering};

/// A length in bytes that grows where the device does ([`crate::BlockDevice::look_again`]). A copy
/// is one of its own.
#[derive(Default)]
pub struct Length(AtomicU64);

impl Length {
    /// So many bytes.
    pub const fn new(bytes: u64) -> Length {
        Length(AtomicU64::new(bytes))
    }

    /// The length now.
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Acquire)
    }

    /// Makes it so long, where it is shorter.
    pub fn grow(&self, bytes: u64) {
        self.0.fetch_max(bytes, Ordering::AcqRel);
    }
}

impl Clone for Length {
    fn clone(&self) -> Length {
        Length::new(self.get())
    }
}

impl PartialEq for Length {
    fn eq(&self, other: &Length) -> bool {
        self.get() == other.get()
    }
}

impl Eq for Length {}

impl std::fmt::Debug for Length {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.get().fmt(f)
    }
}

/// What a device can do, fixed while it is open but for its length.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Geometry {
    /// Bytes on the namespace, a multiple of `logical_block`.
    pub len: Length,
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
