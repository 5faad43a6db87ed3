//! Settings of a served mount.

use std::sync::Arc;
use std::time::Duration;

use gpunvme_programs::members::GrowError;

/// Which events are logged.
pub trait Log: Send + Sync + std::fmt::Debug {
    /// Has a filter hold from now on, if one is given. Returns the one that held before; none where
    /// what is given is no filter.
    fn set(&self, filter: Option<&str>) -> Option<String>;
}

/// The devices under the volume.
pub trait Devices: Send + Sync + std::fmt::Debug {
    /// Looks how large they are now, and lets the volume have what they have become larger by.
    /// `may_have`: why it cannot become so long, in bytes, if it cannot. Returns why that is
    /// nothing, where it is and there is more to say than that.
    ///
    /// # Errors
    /// A device failed, or is too small.
    fn look_again(&self, may_have: &dyn Fn(u64) -> Result<(), String>) -> Result<Option<String>, GrowError>;

    /// Whether the volume can have these as well, which are claimed and let go of.
    ///
    /// # Errors
    /// A text with the name of the device that is in use, or cannot be the volume's.
    fn may_add(&self, names: &[String]) -> Result<(), String>;

    /// Claims these devices, which carry nothing, and lets the volume have them, too. With an error
    /// it goes on without them.
    ///
    /// # Errors
    /// A device failed, or cannot be the volume's.
    fn add(&self, names: &[String]) -> Result<(), GrowError>;
}

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
    /// Bytes of the metadata cache, as the filesystem was opened with.
    pub cache: u64,
    /// Bytes of small writes that wait in memory, likewise.
    pub write_buffer: u64,
    /// Whether the device is told of blocks that files gave up, likewise.
    pub discard: bool,
    /// The devices under the volume.
    pub devices: Arc<dyn Devices>,
    /// The daemon's log.
    pub log: Arc<dyn Log>,
}
