//! A write as the kernel requests it.

/// A write request without its data.
#[derive(Debug, Clone, Copy)]
pub(crate) struct WriteRequest {
    /// Offset in the file, in bytes.
    pub offset: u64,
    /// Whether the set-user-id bits of the file are stripped.
    pub strip: bool,
    /// It is answered when the device has it, and reports what goes wrong there (`O_DIRECT`). With
    /// `O_SYNC` the kernel sends an fsync after each write.
    pub direct: bool,
    /// It goes behind the last byte of the file (`O_APPEND`), which is at `offset` as far as the
    /// kernel knows.
    pub append: bool,
    /// The bytes are in the kernel's page cache.
    pub cached: bool,
    /// They were stored there through a mapping, and are written back.
    pub mapped: bool,
}
