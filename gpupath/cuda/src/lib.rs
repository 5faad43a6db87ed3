//! CUDA, loaded when it is first asked for: the application's end of everything that only a GPU's
//! driver can do.
//!
//! It guards the promise that one binary runs everywhere. No CUDA type leaves this crate, nothing
//! links to libcuda, and a missing, too old or broken driver is a reason in words
//! ([`Unavailable`]) and never a crash. The daemon does not use it.
//!
//! [`Cuda::load`] finds the driver and its GPUs. A [`Gpu`] makes streams, events and memory; its
//! primary context, which is the one that the CUDA runtime and PyTorch use, comes into being with
//! the first call that needs it, and is then kept for as long as the process runs.

mod context;
mod cuda;
mod descriptors;
mod driver;
mod error;
mod gpu;
mod memory;
mod scatter;
mod stream;

pub use context::Entered;
pub use cuda::{CapturesLeftAlone, Cuda};
pub use descriptors::is_short_of_descriptors;
pub use error::{CudaError, Unavailable, Version};
pub use gpu::{Gpu, NoGpuName, NoSuchGpu, Which, WritesOrdering};
pub use memory::{Allocation, DeviceAllocation, HostRegistration, Place};
pub use scatter::{Move, Scatter};
pub use stream::{Event, Stream, StreamId};
