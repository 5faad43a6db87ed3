//! Shared parts of the programs mount.gpunvme, mkfs.gpunvme and fsck.gpunvme: claiming a device
//! ([`claim`]), volumes of several devices ([`members`]), the mount table ([`mounts`]), and the
//! terminal ([`terminal`]).
#![deny(unsafe_code)]

mod below;
pub mod claim;
pub mod members;
pub mod mounts;
pub mod terminal;
