//! Files of a mount, read into and written from GPU memory.
//!
//! ```no_run
//! use gpunvme::gpu::{Segment, Transfers};
//! use gpunvme::{File, Mount};
//!
//! # let tensor = 0x7f00_0000_0000;
//! let transfers = Transfers::new(&Mount::open("/data")?)?; // once
//! let file = File::open("/data/model.bin")?;
//! // SAFETY: the tensor is 64 MiB long, and no other code uses it meanwhile.
//! let done = unsafe { transfers.read(&file, &[Segment { file_offset: 0, address: tensor, len: 64 << 20 }]) }?;
//! println!("{} bytes by way of {:?}", done.bytes(), done.moved);
//! # Ok::<(), gpunvme::Error>(())
//! ```
//!
//! Memory is anything that CUDA knows: of `cudaMalloc`, of pools, mapped piece by piece, managed,
//! on any GPU, and pinned host memory. Nothing needs to be registered. Bytes go from the device to
//! a staging pool and on to the GPU, both at once, in pieces.
//!
//! Calls may come from any number of threads. [`Transfers::read`] waits; [`Transfers::read_then`]
//! calls back; a [`Queue`] collects what is done, for one thread that keeps many requests in
//! flight; and [`Transfers::read_on_stream`] fits into the order of a CUDA stream.
//!
//! A [`LayerLoader`] loads the layers of a model while those before are computed, of more than
//! there is memory for. Kernels read and write files themselves by a [`GpuRing`], or use them as a
//! [`GpuArray`].
//!
//! Inside, `transfers` looks up what lies at the addresses. A `pipeline` cuts requests into
//! pieces, keeps them in flight between a ring of the mount and a pool, and copies between the
//! pool and each GPU: on the thread that waits for a short request, and for all others on a thread
//! of the library's. Requests in the order of a `stream` have a thread of their own, which makes
//! no call of CUDA and copies pinned host memory itself: all that the GPU has to do for them is in
//! the stream when the call returns. Both use the same `memory`. What the kernel has in its
//! `page_cache` need not come from the device.

mod answer;
mod attachments;
mod kernels;
#[allow(unsafe_code)]
mod layers;
mod memory;
#[allow(unsafe_code)]
mod on_stream;
mod outcome;
mod page_cache;
mod pipeline;
#[allow(unsafe_code)]
mod queue;
mod request;
mod settings;
mod stream;
#[allow(unsafe_code)]
mod transfers;

pub use answer::{Finished, Pending};
pub use kernels::{GpuArray, GpuArraySettings, GpuArrayStats, GpuRing, GpuRingSettings, KernelArray, KernelRing};
pub use layers::{Layer, LayerLoader, LayerSettings, Tier};
pub use queue::Queue;
pub use request::{Cancel, Segment};
pub use settings::{Caching, Settings};
pub use stream::observer::Observer;
pub use transfers::Transfers;
