//! The open file under a device; the device shares it with its queues.
use std::fs::File;
use std::sync::Arc;

use crate::Geometry;

/// What the device and its queues share.
pub(crate) struct Target {
    pub(crate) name: Arc<str>,
    pub(crate) geometry: Geometry,
    pub(crate) file: File,
    pub(crate) kind: Kind,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Block,
    File,
}
