//! The memory that transfers use: staging pools, how what goes through one is cut into pieces that
//! have slots in it, and what of a GPU's memory is registered with the mount, so that it need not
//! go through one.

mod cache;
pub mod pieces;
pub mod registrations;
pub mod slots;
#[allow(unsafe_code)]
pub mod staging;
