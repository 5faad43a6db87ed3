//! The data path: moves the content of files between callers, the write buffer and the device.
//!
//! A write goes into the write buffer and is answered; its place on the device is chosen when it is
//! written back, together with its neighbours ([`write_back`]). A read copies from the write buffer
//! what is there, fills holes with zeros, and has the device write the rest straight into the
//! caller's buffer ([`read`]). Direct transfers of registered buffers ([`direct`]) go past the
//! write buffer, which is written back for them first.
//!
//! [`Filesystem`] is the whole filesystem for a front end: the volume's operations on names, and
//! these on data. Operations are attempts ([`crate::volume`]); those that wait for the device call
//! back from its completion.

mod copy;
pub mod direct;
mod errors;
mod file;
mod filesystem;
mod in_place;
mod orphans;
mod page_map;
mod pages;
mod place;
mod quiesce;
mod read;
pub mod resize;
mod snapshot;
mod wait;
mod write;
mod write_back;

pub use errors::Asker;
pub use filesystem::{Filesystem, Inline, Options, Settling, Spawn, system_time};
pub use in_place::InPlaceWrite;
pub use read::Read;
pub use snapshot::Snapshot;
