//! Rings that the kernels of a GPU use, by `include/gpunvme_device.h`, and arrays over files on
//! them, by `include/gpunvme_array.h`.
//!
//! The kernels share queues and staging memory with the daemon, and what orders them among
//! themselves lies in the GPU's memory (`layout`). Two things a GPU cannot do, a thread does for
//! them (`proxy`): it wakes a daemon that sleeps, and tells kernels when the ring is over.

#[allow(unsafe_code)]
mod array;
mod layout;
#[allow(unsafe_code)]
mod memory;
mod proxy;
#[allow(unsafe_code)]
mod ring;

pub use array::{GpuArray, GpuArraySettings, GpuArrayStats};
pub use layout::{KernelArray, KernelRing};
pub use ring::{GpuRing, GpuRingSettings};
