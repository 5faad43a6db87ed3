//! Makes CUDA contexts current on threads.
//!
//! It guards the application's threads: a context is current on them only while a call in here
//! runs, and what was current before is so again afterwards.

use super::driver::Driver;
use super::error::CudaError;
use cudarc::driver::sys::CUcontext;
use std::marker::PhantomData;
use std::ptr;

/// A context: a GPU's primary one, or that of a stream of the application.
#[derive(Clone, Copy)]
pub(super) struct Context {
    pub(super) driver: &'static Driver,
    raw: CUcontext,
}

// SAFETY: a context is a name; CUDA allows every call on it from any thread.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Context {
    pub(super) fn new(driver: &'static Driver, raw: CUcontext) -> Context {
        Context { driver, raw }
    }

    /// The calling thread's; null where it has none.
    pub(super) fn current(driver: &Driver) -> Result<CUcontext, CudaError> {
        let mut current = ptr::null_mut();
        // SAFETY: it writes a handle.
        unsafe { driver.cuCtxGetCurrent(&mut current) }?;
        Ok(current)
    }

    pub(super) fn is(&self, other: CUcontext) -> bool {
        self.raw == other
    }

    pub(super) fn raw(&self) -> CUcontext {
        self.raw
    }

    /// Makes it current on this thread until the guard is dropped. Where it is already, that costs
    /// no more than asking.
    pub(super) fn enter(&self) -> Result<Entered, CudaError> {
        let already = self.is(Context::current(self.driver)?);
        if !already {
            // SAFETY: the context was retained, or is that of a stream which the caller vouches
            // for.
            unsafe { self.driver.cuCtxPushCurrent_v2(self.raw) }?;
        }
        Ok(Entered { pushed: (!already).then_some(self.driver), _thread: PhantomData })
    }
}

/// While it lives, calls on this thread that need the same GPU need not make its context current
/// each for itself.
#[must_use]
pub struct Entered {
    pushed: Option<&'static Driver>,
    /// What is current is the thread's.
    _thread: PhantomData<*const ()>,
}

impl Drop for Entered {
    fn drop(&mut self) {
        if let Some(driver) = self.pushed {
            let mut popped = ptr::null_mut();
            // SAFETY: it takes back the push of this thread; guards end in the opposite order of
            // their beginning.
            if let Err(error) = unsafe { driver.cuCtxPopCurrent_v2(&mut popped) } {
                tracing::warn!(%error, "a thread keeps a CUDA context current");
            }
        }
    }
}
