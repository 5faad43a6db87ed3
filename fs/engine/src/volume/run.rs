//! Runs of blocks of the device.

/// Blocks of the device that follow one another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Run {
    /// First block.
    pub start: u64,
    /// Number of blocks.
    pub len: u64,
}

impl Run {
    /// First block beyond it.
    pub fn end(self) -> u64 {
        self.start + self.len
    }
}
