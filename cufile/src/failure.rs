//! Errors, and how cuFile tells them: as a number and a `CUresult`, or as a negative count of bytes
//! beside `errno`.

use crate::abi::Status;
use gpunvme::Error;
use gpunvme_cuda::CudaError;
use rustix::io::Errno;

/// The error of a call.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Failure {
    /// One of cuFile's own.
    #[error("{0:?}")]
    Cufile(Code),
    /// CUDA refused something.
    #[error("CUDA: {0}")]
    Cuda(i32),
    /// The filesystem did.
    #[error("{0}")]
    System(Errno),
    /// What NVIDIA's library said, in its form.
    #[error("NVIDIA's library: {0:?}")]
    Real(Status),
}

/// cuFile's error numbers (`CUfileOpError`), those of them that are used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub enum Code {
    DriverNotInitialized = 5001,
    UnsupportedLimit = 5003,
    NotSupported = 5008,
    PointerInvalid = 5012,
    PointerRange = 5014,
    InvalidFileType = 5018,
    InvalidOpenFlag = 5019,
    InvalidValue = 5022,
    AlreadyRegistered = 5023,
    NotRegistered = 5024,
    PermissionDenied = 5025,
    DriverAlreadyOpen = 5026,
    HandleNotRegistered = 5027,
    HandleAlreadyRegistered = 5028,
    DeviceNotFound = 5029,
    Internal = 5030,
    NoDescriptor = 5031,
    BatchFull = 5037,
    AsyncNotSupported = 5038,
    NoMemory = 5043,
}

const CUDA_DRIVER_ERROR: i32 = 5011;

impl Failure {
    /// As `CUfileError_t`.
    pub fn status(&self) -> Status {
        match *self {
            Failure::Cufile(code) => Status { code: code as i32, cuda: 0 },
            Failure::Cuda(cuda) => Status { code: CUDA_DRIVER_ERROR, cuda },
            Failure::Real(status) => status,
            Failure::System(errno) => {
                let code = match errno {
                    Errno::ACCESS | Errno::PERM => Code::PermissionDenied,
                    Errno::MFILE | Errno::NFILE => Code::NoDescriptor,
                    Errno::NOMEM => Code::NoMemory,
                    Errno::BADF => Code::InvalidValue,
                    _ => Code::Internal,
                };
                Status { code: code as i32, cuda: 0 }
            }
        }
    }

    /// As a count of bytes: what the filesystem said is -1, and the number to be stored in `errno`.
    pub fn count(&self) -> (isize, Option<Errno>) {
        match self {
            Failure::System(errno) => (-1, Some(*errno)),
            other => (-other.status().code as isize, None),
        }
    }

    /// As the result of a request of a batch: a negative number, of cuFile's or an `errno`.
    pub fn result(&self) -> isize {
        match self {
            Failure::System(errno) => -errno.raw_os_error() as isize,
            other => other.count().0,
        }
    }
}

impl From<Code> for Failure {
    fn from(code: Code) -> Failure {
        Failure::Cufile(code)
    }
}

impl From<Errno> for Failure {
    fn from(errno: Errno) -> Failure {
        Failure::System(errno)
    }
}

impl From<&CudaError> for Failure {
    fn from(error: &CudaError) -> Failure {
        Failure::Cuda(error.code as i32)
    }
}

impl From<CudaError> for Failure {
    fn from(error: CudaError) -> Failure {
        Failure::from(&error)
    }
}

impl From<&Error> for Failure {
    fn from(error: &Error) -> Failure {
        match error {
            Error::Cuda { error, .. } => error.into(),
            Error::Copy { error: Some(error), .. } => error.as_ref().into(),
            Error::Copy { error: None, .. } | Error::UnknownMemory { .. } => Code::PointerInvalid.into(),
            Error::NoCuda(_) => Code::DeviceNotFound.into(),
            Error::StreamCaptured { .. } => Code::AsyncNotSupported.into(),
            Error::NotReachable { errno: errno @ (Errno::MFILE | Errno::NFILE), .. } => (*errno).into(),
            Error::WrongKind { .. } => Code::InvalidFileType.into(),
            Error::OtherVersion { .. } | Error::NotReachable { .. } | Error::Refused { .. } => Code::NotSupported.into(),
            other => other.errno().into(),
        }
    }
}

pub type Result<T> = std::result::Result<T, Failure>;
