//! The engine of gpunvme: metadata and its journal ([`volume`]), the content of files ([`data`]),
//! and checking and repairing volumes ([`check`]). It runs on any device, knows nothing of FUSE,
//! and has no threads of its own.
#![forbid(unsafe_code)]

pub mod check;
pub mod data;
pub mod error;
pub mod sharded;
pub mod volume;

pub use data::Filesystem;
pub use error::FsError;
pub use volume::{FormatOptions, FormatReport, Volume, VolumeOptions, format, is_clean, probe};

// What callers meet of the on-disk format: units and limits, and the values in attributes and
// errors.
pub use gpunvme_layout::block::BLOCK_SIZE;
pub use gpunvme_layout::item::{FILE_SIZE_MAX, NAME_MAX};
pub use gpunvme_layout::{Corrupt, FileType, Inode, Timestamp};
