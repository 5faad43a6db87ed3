//! The FUSE front end: the kernel's requests become operations of a
//! [`Filesystem`](gpunvme_engine::Filesystem), and their ends become answers.
//!
//! - [`Session`] mounts, serves and ends; `housekeeping` does the work that no request asks for.
//! - `fuse` is the adapter to the FUSE protocol and, with `attr`, the only module that knows its
//!   requests and replies.
//! - `operations` has the operations that it calls; `direct` the ioctls and rings of the direct
//!   path. Both are operations of [`shared::Front`], which tries them.
//! - `kernel` is the kernel's knowledge of the filesystem, `resources` the threads and memory that
//!   operations share, `append_order` the order of appends.
//!
//! A loop of the transport never waits for a device. It tries an operation on what is in memory,
//! which is almost always enough; an operation that stalls goes to a thread that may wait and is
//! answered from there.

mod append_order;
mod attr;
mod caller;
mod direct;
mod fuse;
mod housekeeping;
mod kernel;
mod messages;
mod operations;
mod resources;
mod session;
mod settings;
mod shared;
mod write_request;

pub use resources::endpoint::serving_threads;
pub use resources::workers::Workers;
pub use session::Session;
pub use settings::{Devices, Log, Settings};
