//! The FUSE protocol of Linux (`include/uapi/linux/fuse.h`), from version 7.31 on: requests
//! decoded, replies encoded, and the transport that carries them.
//!
//! - [`Connection`] negotiates with the kernel, and serves its requests to a [`Handler`].
//! - [`Request`] is a request with its [`Operation`]; [`Reply`] answers it, once, from any thread.
//! - [`Notifier`] tells the kernel what it has not asked for.
//! - [`may_wait`] tells whether a request may wait on the thread that serves it.
//!
//! Nothing in here knows what a filesystem is made of. Bytes from the kernel are checked as if they
//! were hostile: what makes no request is refused, and never panics.
#![deny(unsafe_code)]

mod connection;
mod destroy;
mod device;
mod handler;
mod idle_loops;
mod listing;
mod messages;
mod negotiation;
mod notifier;
mod pace;
mod reply;
mod request;
mod uring;
mod wait_permit;
pub mod wire;

pub use connection::{Connection, Fallback, LastRequest, Requests, Served, Transport};
pub use handler::Handler;
pub use listing::Listing;
pub use negotiation::{Negotiated, Wishes};
pub use notifier::Notifier;
pub use reply::{Reply, Times};
pub use request::{CopyRange, Decoder, Forget, Forgets, Malformed, Message, New, Operation, Request, SetAttr, SetTime, Time};
pub use wait_permit::{WaitPermit, may_wait};
pub use wire::{Attr, InitFlags, OpenFlags, Statfs};
