//! The parameters of an I/O queue: its namespace, and the limits of commands to it.
use std::sync::Arc;
use std::time::Duration;

use super::options::CompletionMode;
use super::scatter::Limits;
use crate::Geometry;

/// What a queue is made for.
pub(super) struct QueueSetup {
    pub(super) name: Arc<str>,
    pub(super) geometry: Geometry,
    pub(super) namespace: u32,
    pub(super) limits: Limits,
    /// The most bytes of a discard command, a multiple of the logical block.
    pub(super) max_discard: u64,
    pub(super) completion: CompletionMode,
    pub(super) timeout: Duration,
}
