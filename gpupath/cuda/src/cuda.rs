//! The driver, loaded when it is first asked for, and its GPUs.

use super::context::Context;
use super::descriptors::is_short_of_descriptors;
use super::driver::Driver;
use super::error::{CudaError, Unavailable, Version};
use super::gpu::{Device, Gpu, NoSuchGpu, Which};
use cudarc::driver::sys::{CUstreamCaptureMode, CUstreamCaptureMode_enum};
use std::marker::PhantomData;
use std::sync::OnceLock;

/// The driver, with at least one GPU.
pub struct Cuda {
    pub(super) driver: &'static Driver,
    version: Version,
    pub(super) devices: Vec<Device>,
}

impl Cuda {
    /// Loads the driver when it is first called; afterwards the answer is what it was then. What
    /// was not found for want of descriptors is looked for again.
    ///
    /// # Errors
    /// [`Unavailable`] says what is missing.
    pub fn load() -> Result<&'static Cuda, Unavailable> {
        static CUDA: OnceLock<Result<Cuda, Unavailable>> = OnceLock::new();
        if let Some(known) = CUDA.get() {
            return known.as_ref().map_err(Clone::clone);
        }
        match Cuda::start() {
            Err(why) if is_short_of_descriptors() => Err(why),
            found => CUDA.get_or_init(|| found).as_ref().map_err(Clone::clone),
        }
    }

    fn start() -> Result<Cuda, Unavailable> {
        let driver = Driver::load()?;
        let version = driver.version().map_err(Unavailable::Init)?;
        let devices = Device::all(driver).map_err(Unavailable::Init)?;
        if devices.is_empty() {
            return Err(Unavailable::NoGpu);
        }
        Ok(Cuda { driver, version, devices })
    }

    /// The newest CUDA that the driver can serve.
    pub fn driver_version(&self) -> Version {
        self.version
    }

    /// The GPUs that this process may use (`CUDA_VISIBLE_DEVICES`), in CUDA's order.
    pub fn gpus(&'static self) -> impl Iterator<Item = Gpu> {
        self.devices.iter().map(Gpu::new)
    }

    /// One of them.
    ///
    /// # Errors
    /// [`NoSuchGpu`] lists those that there are.
    pub fn gpu(&'static self, which: Which) -> Result<Gpu, NoSuchGpu> {
        self.gpus().find(|gpu| which.is(gpu)).ok_or_else(|| NoSuchGpu { which, gpus: self.gpus().collect() })
    }

    /// The context that the CUDA runtime gives a thread that chose no GPU.
    pub(super) fn default_context(&'static self) -> Result<Context, CudaError> {
        Gpu::new(&self.devices[0]).context()
    }

    /// Says that what the calling thread asks CUDA, until the guard is dropped, is the library's
    /// own business: it does not end a graph capture of the application's.
    ///
    /// # Errors
    /// What CUDA says.
    pub fn leave_captures_alone(&self) -> Result<CapturesLeftAlone, CudaError> {
        let mut mode: CUstreamCaptureMode = CUstreamCaptureMode_enum::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: it writes the thread's mode before, one of those that there have always been.
        unsafe { self.driver.cuThreadExchangeStreamCaptureMode(&mut mode) }?;
        Ok(CapturesLeftAlone { driver: self.driver, before: mode, _thread: PhantomData })
    }
}

/// While it lives, calls on this thread do not end a graph capture of the application's.
#[must_use]
pub struct CapturesLeftAlone {
    driver: &'static Driver,
    before: CUstreamCaptureMode,
    /// The mode is the thread's.
    _thread: PhantomData<*const ()>,
}

impl Drop for CapturesLeftAlone {
    fn drop(&mut self) {
        // SAFETY: it takes the mode that this thread had before.
        if let Err(error) = unsafe { self.driver.cuThreadExchangeStreamCaptureMode(&mut self.before) } {
            tracing::warn!(%error, "a thread's calls do not end graph captures any more");
        }
    }
}
