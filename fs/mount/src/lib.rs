//! Mounting a gpunvme volume: the FUSE front end of the engine ([`front`]), and the daemon that
//! puts device, engine and front end together ([`daemon`]).
#![deny(unsafe_code)]

pub mod daemon;
pub mod front;
mod run_folder;
