//! Block devices: the traits that a namespace is used through, and their backends. Nothing in here
//! knows of files inside the volume.
//!
//! - [`open()`] turns the DEVICE that a user named into a [`BlockDevice`].
//! - [`Io`] runs batches of [`Request`]s on a device's queues, with reaper threads or inline.
//! - [`Region`] is memory that a device may read or write; [`BufferPool`] recycles regions for
//!   buffers of one owner.
//! - [`StripeDevice`] is several devices used as one.
//! - [`nvme`] is the NVMe driver; [`sim`] a software controller that it can run on.
//!
//! Offsets and lengths are bytes everywhere; logical blocks stay inside the backends.
#![deny(unsafe_code)]

mod buffer;
mod device;
mod device_name;
mod error;
mod file;
mod geometry;
mod io;
mod mappings;
pub mod nvme;
mod op;
mod open;
#[allow(unsafe_code)]
mod region;
mod request;
pub mod sim;
mod spec;
mod stripe;
mod transport;
#[allow(unsafe_code)]
mod uaccess;
#[allow(unsafe_code)]
mod vfio;

pub use buffer::{Buffer, BufferPool};
pub use device::{BlockDevice, NoPeerToPeer, OpenMode, Queue, Wait};
pub use device_name::{path_of, split_names, without_options};
pub use error::{Error, Result};
pub use geometry::{Geometry, Length};
pub use io::{Io, OwnQueue, Waker};
pub use op::Op;
pub use open::{open, open_claimed, open_controller};
pub use region::{Region, Span};
pub use request::{Completion, Request, Spans};
pub use stripe::{Place, StripeDevice, StripeMap, StripeSet};
