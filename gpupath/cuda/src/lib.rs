//! CUDA, loaded when it is first asked for: the application's end of everything that only a GPU's driver can do.
//!
//! It guards the promise that one binary runs everywhere. No CUDA type leaves this crate, nothing links to libcuda, and a missing, too old or broken driver is a reason in
//! words ([`Unavailable`]) and never a crash. The daemon does not use it.
//!
//! [`Cuda::load`] finds the driver and its GPUs. A [`Gpu`] makes streams, events and memory; its primary context, which is the one that the CUDA runtime and PyTorch use,
//! comes into being with the first call that needs it, and is then kept for as long as the process runs.

mod context;
mod driver;
mod gpu;
mod memory;
mod scatter;
mod stream;

pub use context::Entered;
pub use driver::CudaError;
pub use gpu::{Gpu, NoGpuName, NoSuchGpu, Which, WritesOrdering};
pub use memory::{Allocation, DeviceAllocation, HostRegistration, Place};
pub use scatter::{Move, Scatter};
pub use stream::{Event, Stream, StreamId};

use cudarc::driver::sys::{CUstreamCaptureMode, CUstreamCaptureMode_enum};
use driver::Driver;
use gpu::Device;
use std::fmt;
use std::marker::PhantomData;
use std::sync::OnceLock;

/// The driver, with at least one GPU.
pub struct Cuda {
    driver: &'static Driver,
    version: Version,
    devices: Vec<Device>,
}

/// Why there is no CUDA here.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unavailable {
    /// There is no libcuda.
    #[error("libcuda.so is not there, or cannot be loaded: install the NVIDIA driver, or pass it into this container")]
    NotFound,
    /// What there is was made to link against.
    #[error("the libcuda.so that was found is the CUDA toolkit's stub: take its folder out of LD_LIBRARY_PATH")]
    Stub,
    /// It is older than what was built against.
    #[error("the NVIDIA driver offers CUDA {found}, and {needed} is needed: update the driver")]
    TooOld {
        /// The driver API's version.
        found: Version,
        /// The oldest that would do.
        needed: Version,
    },
    /// It lacks a function: it is something else, or damaged.
    #[error("libcuda.so has no {name}: reinstall the NVIDIA driver")]
    Symbol {
        /// The function.
        name: &'static str,
    },
    /// It does not start.
    #[error("CUDA does not start: {0}; `nvidia-smi` and the kernel's log may say more")]
    Init(CudaError),
    /// It sees no GPU.
    #[error("CUDA sees no GPU: look at `nvidia-smi`, and at CUDA_VISIBLE_DEVICES")]
    NoGpu,
}

/// A version of CUDA, as the driver counts it: 12040 is 12.4.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version(pub u32);

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.0 / 1000, self.0 % 1000 / 10)
    }
}

impl Cuda {
    /// Loads the driver when it is first called; afterwards the answer is what it was then.
    ///
    /// # Errors
    /// [`Unavailable`] says what is missing.
    pub fn load() -> Result<&'static Cuda, Unavailable> {
        static CUDA: OnceLock<Result<Cuda, Unavailable>> = OnceLock::new();
        CUDA.get_or_init(Cuda::start).as_ref().map_err(Clone::clone)
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

    /// What lies at an address, or `None` where CUDA knows nothing of it: memory that was never CUDA's, or is freed.
    ///
    /// # Errors
    /// What CUDA says; after a kernel of the application crashed that is the crash.
    pub fn memory_at(&'static self, address: u64) -> Result<Option<Allocation>, CudaError> {
        memory::at(self, address)
    }

    /// The number of the allocation at an address, which no other allocation of this process ever had or will have; `None` as for [`Cuda::memory_at`].
    /// It is the cheap way to ask whether what was there is still there.
    ///
    /// # Errors
    /// As [`Cuda::memory_at`].
    pub fn buffer_id(&self, address: u64) -> Result<Option<u64>, CudaError> {
        memory::buffer_id(self.driver, address)
    }

    /// A stream of the application (`cudaStream_t`, `CUstream`), to order work with its work. 0, 1 and 2 are the default streams
    /// of the calling thread's context, as they are everywhere in CUDA; 2, the thread's own, is that of whichever thread calls.
    /// For a thread without a context they are those of the first GPU's primary context, as for the CUDA runtime.
    ///
    /// # Safety
    /// It is a stream of this process, and is not destroyed before what is returned is dropped.
    ///
    /// # Errors
    /// What CUDA says.
    pub unsafe fn application_stream(&'static self, stream: usize) -> Result<Stream, CudaError> {
        // SAFETY: the caller vouches for it.
        unsafe { Stream::of_application(self, stream) }
    }

    /// The context that the CUDA runtime gives a thread that chose no GPU.
    fn default_context(&'static self) -> Result<context::Context, CudaError> {
        Gpu::new(&self.devices[0]).context()
    }

    /// The GPU that a stream is of, in whatever context.
    ///
    /// # Errors
    /// What CUDA says.
    pub fn gpu_of(&'static self, stream: &Stream) -> Result<Gpu, CudaError> {
        let device = stream.device()?;
        let found = self.devices.iter().find(|known| known.is(device));
        found.map(Gpu::new).ok_or_else(|| self.driver.error("cuCtxGetDevice", CudaError::INVALID_DEVICE))
    }

    /// Says that what the calling thread asks CUDA, until the guard is dropped, is the library's own business: it does not end a graph capture of the application's.
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
