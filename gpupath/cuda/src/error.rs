//! The errors of CUDA: why there is no driver or GPU, and what CUDA says when a call fails.

use cudarc::driver::sys::CUresult;
use cudarc::driver::sys::cudaError_enum::*;
use std::fmt;

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

/// Results that say that context or stream are not there any more.
const DESTROYED: &[CUresult] =
    &[CUDA_ERROR_INVALID_CONTEXT, CUDA_ERROR_CONTEXT_IS_DESTROYED, CUDA_ERROR_INVALID_HANDLE, CUDA_ERROR_DEINITIALIZED];

/// Results that every later call in the context has too, because a kernel crashed.
const CRASHES: &[CUresult] = &[
    CUDA_ERROR_ILLEGAL_ADDRESS,
    CUDA_ERROR_LAUNCH_TIMEOUT,
    CUDA_ERROR_ASSERT,
    CUDA_ERROR_HARDWARE_STACK_ERROR,
    CUDA_ERROR_ILLEGAL_INSTRUCTION,
    CUDA_ERROR_MISALIGNED_ADDRESS,
    CUDA_ERROR_INVALID_ADDRESS_SPACE,
    CUDA_ERROR_INVALID_PC,
    CUDA_ERROR_LAUNCH_FAILED,
];

/// The same, for reasons that lie elsewhere.
const BROKEN: &[CUresult] = &[
    CUDA_ERROR_ECC_UNCORRECTABLE,
    CUDA_ERROR_NVLINK_UNCORRECTABLE,
    CUDA_ERROR_MPS_CLIENT_TERMINATED,
    CUDA_ERROR_EXTERNAL_DEVICE,
    CUDA_ERROR_UNKNOWN,
];
/// `CUDA_ERROR_CONTAINED`, of drivers from CUDA 12.8 on: one of those too.
const CONTAINED: u32 = 226;

/// What CUDA said when a call failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{call} failed: {name} ({code})")]
pub struct CudaError {
    /// The function of the driver API.
    pub call: &'static str,
    /// Its result (`CUresult`).
    pub code: u32,
    /// The result's name, such as `CUDA_ERROR_INVALID_VALUE`.
    pub name: &'static str,
}

impl CudaError {
    /// `CUDA_ERROR_INVALID_VALUE`: also what calls say of an address that CUDA does not know (any
    /// more).
    pub const INVALID_VALUE: u32 = CUDA_ERROR_INVALID_VALUE as u32;
    /// `CUDA_ERROR_STREAM_CAPTURE_IMPLICIT`.
    pub const STREAM_CAPTURE_IMPLICIT: u32 = CUDA_ERROR_STREAM_CAPTURE_IMPLICIT as u32;
    /// `CUDA_ERROR_OUT_OF_MEMORY`.
    pub const OUT_OF_MEMORY: u32 = CUDA_ERROR_OUT_OF_MEMORY as u32;
    /// `CUDA_ERROR_INVALID_DEVICE`.
    pub(super) const INVALID_DEVICE: u32 = CUDA_ERROR_INVALID_DEVICE as u32;
    /// `CUDA_ERROR_NO_DEVICE`.
    pub(super) const NO_DEVICE: u32 = CUDA_ERROR_NO_DEVICE as u32;
    /// `CUDA_ERROR_STUB_LIBRARY`: what every function of the toolkit's stub says.
    pub(super) const STUB_LIBRARY: u32 = CUDA_ERROR_STUB_LIBRARY as u32;
    /// `CUDA_ERROR_NOT_READY`: no failure, but the answer that something is still going on.
    pub(super) const NOT_READY: u32 = CUDA_ERROR_NOT_READY as u32;
    /// `CUDA_ERROR_NOT_SUPPORTED`.
    pub const NOT_SUPPORTED: u32 = CUDA_ERROR_NOT_SUPPORTED as u32;

    /// Whether it says, of a call on something that was not destroyed, that its context does
    /// nothing more. Other errors are those of one call.
    pub fn ends_context(&self) -> bool {
        self.is(DESTROYED) || self.is(CRASHES) || self.is(BROKEN) || self.code == CONTAINED
    }

    fn is(&self, results: &[CUresult]) -> bool {
        // An integer, because a newer driver may know more results.
        results.iter().any(|result| *result as u32 == self.code)
    }

    /// What a person can do about it.
    pub fn way_out(&self) -> &'static str {
        if self.code == CudaError::OUT_OF_MEMORY {
            "free memory of this GPU, or let less be staged or registered"
        } else if self.is(DESTROYED) {
            "stream and context must be there until the transfer is over"
        } else if self.is(CRASHES) {
            "a kernel of this process crashed, and only a new process can use the GPU again"
        } else {
            "`nvidia-smi -q` and the kernel's log may say more"
        }
    }
}
