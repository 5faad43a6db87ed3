//! The daemon's end of rings ([`gpunvme_abi::ring`]).
//!
//! The memory of a ring belongs to the application. The daemon takes nothing in it for true: it
//! keeps its own positions, copies a submission out before it looks at it, and gives up a ring
//! whose words cannot be right. What an application does to its ring costs it the ring, and no
//! other application anything.

mod count;
mod deferred_drop;
mod groups;
mod plain;
mod queue_pair;
mod readers;
mod rings;
mod service;
mod shares;
#[allow(unsafe_code)]
mod signal;
mod thread;
mod turns;
mod wakes;
mod watch;

pub use rings::Rings;
pub use shares::WorkBesideRings;
