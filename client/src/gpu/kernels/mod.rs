//! Rings that the kernels of a GPU use, by `include/gpunvme_device.h`.
//!
//! The kernels share queues and staging memory with the daemon, and what orders them among
//! themselves lies in the GPU's memory (`layout`). Two things a GPU cannot do, a thread does for
//! them (`proxy`): it wakes a daemon that sleeps, and tells kernels when the ring is over.

mod layout;
mod proxy;
#[allow(unsafe_code)]
mod ring;

pub use layout::KernelRing;
pub use ring::{GpuRing, GpuRingSettings};
