//! The data path: what is in files, between callers, the write buffer and the device.
//!
//! A write goes into the write buffer and is answered; its place on the device is chosen when it
//! is written out, together with what came before and after it ([`write_back`]). A read takes what
//! is in the write buffer from there, holes from nowhere, and the rest from the device, straight
//! into the caller's buffer ([`read`]). Direct transfers of registered buffers ([`direct`]) go
//! past the write buffer, which is written out for them first.
//!
//! [`Filesystem`] is the whole filesystem for a front end: the volume's operations on names, and
//! these on data. Operations are attempts ([`crate::volume`]); what waits for the device is
//! answered by a callback from its completion.

mod copy;
pub mod direct;
mod errors;
mod file;
mod filesystem;
mod page_map;
mod pages;
mod place;
mod quiesce;
mod read;
pub mod resize;
mod wait;
mod write;
mod write_back;

pub use errors::Open;
pub use filesystem::{Filesystem, Inline, Options, Preloaded, Settling, Spawn, system_time};
pub use read::Read;
