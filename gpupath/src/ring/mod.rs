//! The ring (`abi::ring`): its memory, which both ends share, and the daemon's end.
//!
//! The memory belongs to the application. The daemon takes nothing in it for true: it keeps its own positions, copies a submission out before it looks at it,
//! and gives up a ring whose words cannot be right. What an application does to its ring costs it the ring, and nobody else anything.

#[cfg(feature = "daemon")]
mod leavings;
#[allow(unsafe_code)]
mod memory;
#[cfg(feature = "daemon")]
mod queue_pair;
#[cfg(feature = "daemon")]
mod rings;
#[cfg(feature = "daemon")]
mod service;
#[cfg(feature = "daemon")]
mod shares;
#[cfg(feature = "daemon")]
#[allow(unsafe_code)]
mod signal;
#[cfg(feature = "daemon")]
mod watch;

pub use memory::RingMemory;
#[cfg(feature = "daemon")]
pub use rings::Rings;
#[cfg(feature = "daemon")]
pub use service::{AttachedFile, Taken};
