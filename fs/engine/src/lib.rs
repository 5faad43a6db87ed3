//! The gpunvme filesystem: the engine ([`volume`]), the data path ([`data`]), the FUSE front end ([`front`]), and the daemon
//! that puts them together ([`daemon`]). The engine and the data path can be driven without FUSE, on any device.
#![deny(unsafe_code)]

pub mod check;
pub mod daemon;
pub mod data;
pub mod error;
pub mod front;
mod sharded;
pub mod volume;

pub use data::Filesystem;
pub use error::FsError;
pub use volume::{FormatOptions, FormatReport, Volume, VolumeOptions, format, probe};
