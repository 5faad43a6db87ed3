//! The kernel that makes many small moves at once: a copy each would cost a call each, and about a
//! microsecond of the copy engine.

use super::context::Context;
use super::error::CudaError;
use super::gpu::Gpu;
use cudarc::driver::sys::{CUfunction, CUmodule, CUstream};
use std::ffi::{CStr, c_void};
use std::fmt;
use std::ptr;
use zerocopy::{Immutable, IntoBytes};

/// `scatter.ptx` as a string in C.
const PTX: &str = concat!(include_str!("scatter.ptx"), "\0");
const NAME: &CStr = c"gpunvme_scatter";

/// Threads of a block, which makes one move after another: together 4 KiB at a time.
const THREADS: u32 = 256;
/// Blocks at once. Together they have 512 KiB on their way, several times what the way to host
/// memory holds, and leave most of the GPU to the application.
const BLOCKS: u32 = 128;

/// `len` bytes from one address to another, as the kernel finds it in memory. Either is any that
/// its GPU can reach. Where both are the same number of bytes past a multiple of 16, whole 16
/// bytes are moved at once, else single ones.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, IntoBytes, Immutable)]
pub struct Move {
    /// The device address that it goes to.
    pub to: u64,
    /// The device address that it comes from.
    pub from: u64,
    /// How many bytes.
    pub len: u64,
}

impl Gpu {
    /// The kernel that moves many small pieces at once, compiled for this GPU.
    ///
    /// # Errors
    /// What CUDA says.
    pub fn scatter(&self) -> Result<Scatter, CudaError> {
        Scatter::new(self.context()?)
    }
}

/// The kernel, compiled for one GPU.
pub struct Scatter {
    context: Context,
    module: CUmodule,
    function: CUfunction,
}

// SAFETY: modules and functions are names; CUDA allows every call on them from any thread.
unsafe impl Send for Scatter {}
// SAFETY: as above.
unsafe impl Sync for Scatter {}

impl Scatter {
    pub(super) fn new(context: Context) -> Result<Scatter, CudaError> {
        let _entered = context.enter()?;
        let mut scatter = Scatter { context, module: ptr::null_mut(), function: ptr::null_mut() };
        // SAFETY: the image is text with a zero at its end; each writes a handle.
        unsafe {
            context.driver.cuModuleLoadData(&mut scatter.module, PTX.as_ptr().cast())?;
            context.driver.cuModuleGetFunction(&mut scatter.function, scatter.module, NAME.as_ptr())?;
        }
        Ok(scatter)
    }

    /// # Safety
    /// As for `Stream::scatter`; the stream's context is current, and the one that this was made
    /// in.
    pub(super) unsafe fn launch(&self, stream: CUstream, table: u64, count: u32) -> Result<(), CudaError> {
        let (mut table, mut count) = (table, count);
        let mut parameters = [(&raw mut table).cast::<c_void>(), (&raw mut count).cast()];
        let blocks = count.clamp(1, BLOCKS);
        // SAFETY: the parameters are those that the kernel has, and are copied before the call
        // returns; the rest the caller vouches for.
        unsafe {
            self.context.driver.cuLaunchKernel(
                self.function,
                blocks,
                1,
                1,
                THREADS,
                1,
                1,
                0,
                stream,
                parameters.as_mut_ptr(),
                ptr::null_mut(),
            )
        }
    }
}

impl fmt::Debug for Scatter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Scatter({:p})", self.function)
    }
}

impl Drop for Scatter {
    fn drop(&mut self) {
        if self.module.is_null() {
            return; // it was not loaded
        }
        // SAFETY: it was loaded here. CUDA finishes kernels of it first.
        let unloaded = self.context.enter().and_then(|_entered| unsafe { self.context.driver.cuModuleUnload(self.module) });
        if let Err(error) = unloaded {
            tracing::debug!(%error, "a kernel stays loaded");
        }
    }
}
