//! What the programs mount.gpunvme, mkfs.gpunvme and fsck.gpunvme share: taking a device for
//! oneself ([`claim`]), what is mounted where ([`mounts`]), and the terminal ([`terminal`]).
#![deny(unsafe_code)]

mod below;
pub mod claim;
pub mod mounts;
pub mod terminal;
