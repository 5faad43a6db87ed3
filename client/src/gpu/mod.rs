//! Files of a mount, read into and written from GPU memory.
//!
//! ```no_run
//! use gpunvme::gpu::{Segment, Transfers};
//! use gpunvme::{File, Mount};
//!
//! # let tensor = 0x7f00_0000_0000;
//! let transfers = Transfers::new(&Mount::open("/data")?)?; // once
//! let file = File::open("/data/model.bin")?;
//! // SAFETY: the tensor is 64 MiB long, and nobody else uses it meanwhile.
//! let done = unsafe { transfers.read(&file, &[Segment { file_offset: 0, address: tensor, len: 64 << 20 }]) }?;
//! println!("{} bytes by way of {:?}", done.bytes(), done.moved);
//! # Ok::<(), gpunvme::Error>(())
//! ```
//!
//! Memory is anything that CUDA knows: of `cudaMalloc`, of pools, mapped piece by piece, managed, on any GPU, and pinned host memory. Nothing needs to be registered. Bytes go
//! from the device to a staging pool and on to the GPU, both at once, in pieces.
//!
//! Calls may come from any number of threads. [`Transfers::read`] waits; [`Transfers::read_then`] calls back; a [`Queue`] collects what is done, for one thread that keeps many
//! requests in flight; and [`Transfers::read_on_stream`] fits into the order of a CUDA stream.
//!
//! Inside, an `engine` cuts requests into pieces, keeps them in flight between a ring of the mount and a pool, and copies between the pool and each GPU (`lane`). Short requests that are
//! waited for are done by the thread that waits (`desks`), all others by a thread of the library's (`worker`). Requests in the order of a stream have a thread of their own (`ordered`), which makes no call of CUDA and copies pinned host memory itself:
//! all that the GPU has to do for them is in the stream when the call returns (`plan`, `window`).

mod desks;
mod engine;
mod health;
mod inbox;
#[allow(unsafe_code)]
mod lane;
mod memory;
mod ordered;
mod outcome;
mod plan;
#[allow(unsafe_code)]
mod queue;
mod registered;
mod request;
mod server;
#[allow(unsafe_code)]
mod staging;
#[allow(unsafe_code)]
mod transfers;
#[allow(unsafe_code)]
mod window;
mod worker;

pub use queue::{Finished, Queue};
pub use request::{Pending, Segment};
pub use transfers::{Settings, Transfers};
