//! The direct path of gpunvme: how an application's `ioctl` on an open file becomes device commands on memory that it registered.
//!
//! It knows files only as extents and memory only as file descriptors. [`abi`] is what both ends share. The rest is the daemon's end (feature `daemon`).
#![deny(unsafe_code)]

pub mod abi;
