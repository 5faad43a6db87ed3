//! Shared parts of the programs of gpunvme: claiming a device ([`claim`]), volumes of several
//! devices ([`members`]), label and UUID ([`names`]) and volumes by them ([`tag`]), what a device
//! carries ([`contents`]) and what clears it ([`wipe`]), dumps of metadata ([`dump`]), the mount
//! table ([`mounts`]), random bytes ([`random`]), questions that may get no answer ([`limited`]),
//! the terminal ([`terminal`]), what shells complete ([`completions`]), and the command line for
//! sets of files ([`sets`]).
#![deny(unsafe_code)]

mod below;
pub mod claim;
pub mod completions;
pub mod contents;
pub mod dump;
mod holders;
pub mod limited;
pub mod members;
pub mod mounts;
pub mod names;
pub mod random;
pub mod sets;
pub mod tag;
pub mod terminal;
pub mod wipe;
