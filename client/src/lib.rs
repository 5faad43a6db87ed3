//! Files of a gpunvme mount, read and written straight into memory that the device reaches.
//!
//! ```no_run
//! use gpunvme::{Buffer, File, Segment};
//!
//! let file = File::open("/data/model.bin")?;
//! let mut buffer = file.mount()?.register(Buffer::memfd(64 << 20)?)?; // once
//! let done = file.read(&mut buffer, &[Segment { file_offset: 0, buffer_offset: 0, len: 64 << 20 }])?;
//! println!("{} bytes, {} of them by the device itself: {:?}", done.bytes(), done.moved.host, &buffer[..16]);
//! # Ok::<(), gpunvme::Error>(())
//! ```
//!
//! A [`Mount`] knows buffers, a [`File`] moves bytes between itself and them, and each
//! [`Transfer`] says how many bytes took which [`Route`], and why not a faster one ([`Reason`]).
//! Nothing falls back in silence: [`Require`] turns falling back into an error.
//!
//! The same in C is `include/gpunvme.h`; the ioctls under it are in `include/gpunvme_abi.h` and
//! `docs/reference/ioctl.md`.
#![deny(unsafe_code)]

mod activity;
mod buffer;
#[allow(unsafe_code)]
mod capi;
mod codes;
mod connection;
mod copier;
mod device_memory;
mod directory;
mod error;
mod file;
pub mod gpu;
mod host_memory;
#[cfg(test)]
#[allow(unsafe_code)]
mod interrupted;
mod metrics;
mod mount;
mod opening;
mod ring;
mod safetensors;
mod socket;
mod spin;
#[allow(unsafe_code)]
mod sys;
mod transfer;

pub use activity::{Activity, ActivityEntry};
pub use buffer::{Buffer, Memory, Registered, RegisteredBy, Shared};
pub use copier::Copier;
pub use device_memory::{DeviceMapping, DeviceMemory};
pub use error::{Error, Result};
pub use file::{Extents, File};
pub use gpunvme_abi::{Extent, ExtentFlags, Reason, Route, Segment};
pub use host_memory::HostMemory;
pub use metrics::{Metrics, OperationKind, Operations};
pub use mount::{Info, Mount, Stats, Transport};
pub use ring::{Attached, Completed, Operation, Ring, Wait};
pub use safetensors::Tensor;
pub use transfer::{Moved, Require, Transfer};
