//! Who reads registered memory: the GPU, or CUDA's driver by the processor.
//!
//! The driver copies few bytes by the processor, out of the memory itself, before the call comes
//! back: up to 16 KiB on an H200 with driver 580.159. Of a file that has become shorter meanwhile
//! that is a SIGBUS. So few bytes of a cached range are always moved by a kernel, and only copies
//! of more than [`BY_KERNEL`] are left to the driver, once it has been seen that it does not touch
//! them.

use super::view::{PAGE, View};
use gpunvme_cuda::{CudaError, Gpu, HostRegistration};
use parking_lot::Mutex;
use rustix::fs::MemfdFlags;
use std::collections::HashMap;
use std::os::fd::AsFd;

/// The most bytes of a cached range that only a kernel may move.
pub const BY_KERNEL: u64 = 32 << 10;

/// Whether copies of more than [`BY_KERNEL`] bytes out of memory that is registered read-only leave
/// reading to the GPU, and kernels find it at the address that the process has for it. It is tried
/// once for each GPU.
pub fn reads_registered_memory(gpu: &Gpu) -> bool {
    static KNOWN: Mutex<Option<HashMap<u32, bool>>> = Mutex::new(None);
    let mut known = KNOWN.lock();
    *known.get_or_insert_default().entry(gpu.index()).or_insert_with(|| {
        let tried = try_copy(gpu);
        tracing::debug!(%gpu, ?tried, "whether a GPU reads registered memory itself");
        tried.unwrap_or(false)
    })
}

/// Copies out of pages that the process has not mapped any more: a processor that reads them maps
/// them again.
fn try_copy(gpu: &Gpu) -> Result<bool, TryError> {
    let len = BY_KERNEL as usize + PAGE;
    let file = rustix::fs::memfd_create("gpunvme-try", MemfdFlags::CLOEXEC)?;
    rustix::fs::ftruncate(&file, len as u64)?;
    let view = View::new(file.as_fd(), 0, len)?;
    view.populate()?;
    let (memory, stream) = (gpu.alloc(len)?, gpu.stream()?);
    // SAFETY: the mapping is dropped after the registration.
    let registration = unsafe { HostRegistration::read_only(gpu, view.base(), len) }?;
    let address = view.base().as_ptr() as u64;
    if registration.device_address(gpu)? != address {
        return Ok(false);
    }
    view.unmap_pages()?;
    // SAFETY: both ranges stay until the stream is done.
    unsafe { stream.copy_in(memory.address(), address, len) }?;
    stream.synchronize()?;
    Ok(!(0..len).step_by(PAGE).any(|at| view.has_all(at, PAGE)))
}

/// Why it could not be tried.
#[derive(Debug, thiserror::Error)]
enum TryError {
    #[error(transparent)]
    System(#[from] rustix::io::Errno),
    #[error(transparent)]
    Cuda(#[from] CudaError),
}
