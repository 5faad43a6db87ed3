//! How a mount is served.

use std::time::Duration;

/// How a filesystem is served.
#[derive(Debug, Clone)]
pub struct Settings {
    /// The device, as the user called it.
    pub device: String,
    /// Let users other than the one who mounts in.
    pub allow_other: bool,
    /// Loops that take requests.
    pub loops: usize,
    /// Time between two commits of the journal.
    pub commit: Duration,
}
