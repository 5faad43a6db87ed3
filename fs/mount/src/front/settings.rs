//! Settings of a served mount.

use std::time::Duration;

/// Settings of a served filesystem.
#[derive(Debug, Clone)]
pub struct Settings {
    /// The device, as the user called it.
    pub device: String,
    /// Loops that take requests.
    pub loops: usize,
    /// Whether the kernel's requests are to come through io_uring.
    pub io_uring: bool,
    /// Time between two commits of the journal.
    pub commit: Duration,
}
