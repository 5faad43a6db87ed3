//! The engine of gpunvme: metadata and its journal ([`volume`]), the content of files ([`data`]), and checking and repairing
//! volumes ([`check`]). It runs on any device, knows nothing of FUSE, and has no threads of its own.
#![forbid(unsafe_code)]

pub mod check;
pub mod data;
pub mod error;
pub mod sharded;
pub mod volume;

pub use data::Filesystem;
pub use error::FsError;
pub use volume::{FormatOptions, FormatReport, Volume, VolumeOptions, format, probe};
