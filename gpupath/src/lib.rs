//! The daemon's end of the direct path: how an application's `ioctl` on an open file becomes
//! device commands on memory that it registered.
//!
//! It knows files only as extents, and memory only as file descriptors. What it shares with
//! applications is in [`gpunvme_abi`]. The filesystem gives it requests, with [`server::Server`],
//! [`ring::Rings`] and [`socket::Listener`], and gets transfers from it through one trait,
//! [`admission::OpenFile`]; `fs/mount/src/front/direct` carries them out.
#![deny(unsafe_code)]

pub mod access;
pub mod admission;
pub mod calling_thread;
mod foreign;
mod grants;
mod intake;
pub mod outcome;
pub mod planner;
mod process;
pub mod quota;
pub mod rate_limit;
pub mod registry;
pub mod ring;
pub mod server;
pub mod socket;
#[allow(unsafe_code)]
mod socket_peer;
pub mod stats;
pub mod surplus;
pub mod transfer;
