//! What a namespace is to gpunvme: one trait, and its backends. Nothing in here knows of files inside the volume.
//!
//! - [`open`] turns the DEVICE a user named into a [`BlockDevice`].
//! - [`Io`] runs batches of [`Request`]s on a device's queues, with reaper threads or inline.
//! - [`Region`] is memory that a device may read or write; [`BufferPool`] recycles regions for buffers of one owner.
//! - [`MemoryDevice`], [`Recorder`] and [`Faulty`] are devices for tests: RAM, a log from which every state a power cut
//!   could leave is built, and programmable failures.
//!
//! Offsets and lengths are bytes everywhere; logical blocks stay inside the backends.
#![deny(unsafe_code)]

mod buffer;
mod completions;
mod device;
mod device_name;
mod error;
mod faulty;
mod file;
mod geometry;
mod io;
mod mappings;
mod memory;
pub mod nvme;
mod op;
mod open;
mod recorder;
#[allow(unsafe_code)]
mod region;
mod request;
pub mod sim;
mod spec;
mod transport;
#[allow(unsafe_code)]
mod uaccess;
#[allow(unsafe_code)]
mod vfio;

pub use buffer::{Buffer, BufferPool};
pub use device::{BlockDevice, NoPeerToPeer, OpenMode, Queue, Wait};
pub use device_name::{path_of, without_options};
pub use error::{Error, Result};
pub use faulty::{Faulty, On, Rule};
pub use geometry::Geometry;
pub use io::{Io, OwnQueue, Waker};
pub use memory::{Image, MemoryDevice};
pub use op::Op;
pub use open::{open, open_controller};
pub use recorder::{Event, Log, PowerCuts, Recorder, SECTOR};
pub use region::{Region, Span};
pub use request::{Completion, Request, Spans};
