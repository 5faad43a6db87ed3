//! The errors of this library, in words that say what to do.

use crate::transfer::Transfer;
use gpunvme_abi::Reason;
use gpunvme_cuda::{CudaError, Gpu, NoSuchGpu, Unavailable};
use rustix::io::Errno;
use std::path::{Path, PathBuf};

/// What the functions of this library return.
pub type Result<T> = std::result::Result<T, Error>;

/// The error of an operation of this library.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The path does not lie on a gpunvme mount.
    #[error("{path}: not on a gpunvme mount (`findmnt -t fuse.gpunvme,fuseblk.gpunvme` lists those there are)")]
    NotGpunvme {
        /// The path.
        path: PathBuf,
    },
    /// The path is neither a regular file nor a directory, or is a directory where a file is
    /// needed.
    #[error("{path}: {needed}")]
    WrongKind {
        /// The path.
        path: PathBuf,
        /// What it should be.
        needed: &'static str,
    },
    /// The daemon speaks another version of the ioctls.
    #[error("{path}: the daemon of this mount speaks another version of the ioctls; use the gpunvme that it was installed with")]
    OtherVersion {
        /// The path.
        path: PathBuf,
    },
    /// The kernel, or the daemon, refused an operation on a path.
    #[error("{path}: cannot {action}: {}", message(*errno))]
    Path {
        /// The path.
        path: PathBuf,
        /// What was tried.
        action: &'static str,
        /// The error number.
        errno: Errno,
    },
    /// What was asked for was not done, and there is more to say of it than a number.
    #[error("{path}: cannot {action}: {why}")]
    NotDone {
        /// The path.
        path: PathBuf,
        /// What was tried.
        action: &'static str,
        /// The error number.
        errno: Errno,
        /// Why, with the name of what it is about.
        why: String,
    },
    /// Memory for a buffer could not be had.
    #[error("cannot get a buffer of {len} bytes: {}", message(*errno))]
    Memory {
        /// Its length in bytes.
        len: usize,
        /// The error number.
        errno: Errno,
    },
    /// The daemon did not take a buffer.
    #[error("the mount does not take the buffer: {} ({})", reason.explain(), message(*errno))]
    Refused {
        /// Why.
        reason: Reason,
        /// The error number.
        errno: Errno,
    },
    /// The daemon may not fetch the buffer from this process, and its socket is no way either.
    #[error("cannot register a buffer: the daemon may not take it from this process ({}), and its socket {socket:?} does not work ({}){}", message(*ioctl), message(*errno), for_containers(socket, *errno))]
    NotReachable {
        /// What the ioctl said.
        ioctl: Errno,
        /// The socket's path, as the daemon gives it; empty where it has none.
        socket: String,
        /// What connecting or sending said.
        errno: Errno,
    },
    /// A segment reaches past the end of the buffer.
    #[error("segment {segment} ends at {end}, and the buffer at {len}")]
    OutsideBuffer {
        /// Its index.
        segment: u32,
        /// Where it ends, in bytes; `u64::MAX` if past that.
        end: u64,
        /// The buffer's length in bytes.
        len: usize,
    },
    /// The daemon of a buffer's mount died while the buffer was read into.
    #[error(
        "the buffer of {len} bytes is no longer registered: the daemon of its mount ended while it was read into; register another"
    )]
    LostBuffer {
        /// Its length in bytes.
        len: usize,
    },
    /// A ring has no room for another operation.
    #[error("all {entries} entries of the ring are in flight; take completions first")]
    RingFull {
        /// Its entries.
        entries: usize,
    },
    /// A ring is over.
    #[error("{path}: the ring is closed; the volume was unmounted, or its daemon ended")]
    RingClosed {
        /// The mount that it was of.
        path: PathBuf,
    },
    /// A file was attached to another ring.
    #[error("{path}: was attached to another ring")]
    WrongRing {
        /// The file.
        path: PathBuf,
    },
    /// A transfer ended early.
    #[error("{path}: cannot {action}{}: {}{}{}", at(*segment, *offset), message(*errno), because(*errno, *reason), late(action, *errno))]
    Transfer {
        /// The file.
        path: PathBuf,
        /// `read` or `write`.
        action: &'static str,
        /// The error number.
        errno: Errno,
        /// More about it, where there is more to say.
        reason: Reason,
        /// The segment that it is about, by its index in the call.
        segment: Option<u32>,
        /// Where in the file, in bytes, if that is known.
        offset: Option<u64>,
        /// What had been moved before: from the first byte of the first segment on, but of GPU
        /// memory a sum, for its pieces are moved in any order.
        done: Transfer,
    },
    /// There is no CUDA in this process.
    #[error("no GPU can be used: {0}")]
    NoCuda(#[from] Unavailable),
    /// There is no such GPU.
    #[error(transparent)]
    NoSuchGpu(#[from] NoSuchGpu),
    /// CUDA refused what a transfer needs.
    #[error("{path}: cannot {action} {on}: {error}; {}", error.way_out())]
    Cuda {
        /// The file, or the mount before there is one.
        path: PathBuf,
        /// What was tried.
        action: &'static str,
        /// What with: a GPU, the memory at an address, or a stream.
        on: String,
        /// What CUDA said.
        error: CudaError,
    },
    /// A segment's memory is none that a GPU's copies can reach.
    #[error(
        "{path}: segment {segment}: CUDA knows no memory at {address:#x}; it must be device memory, or host memory that CUDA allocated or registered"
    )]
    UnknownMemory {
        /// The file, or the mount where there is none.
        path: PathBuf,
        /// Its index.
        segment: u32,
        /// The first address that is not known.
        address: u64,
    },
    /// A request cannot become part of a graph.
    #[error(
        "{path}: cannot {action} in stream {stream:#x}: it is being captured, and a graph cannot hold a transfer; end the capture first, or use another stream"
    )]
    StreamCaptured {
        /// The file.
        path: PathBuf,
        /// `read` or `write`.
        action: &'static str,
        /// The stream.
        stream: usize,
    },
    /// Bytes could not be copied between the staging pool and the application's memory.
    #[error("{path}: cannot {action}{}: {}", at(Some(*segment), Some(*offset)), copying(error.as_deref()))]
    Copy {
        /// The file.
        path: PathBuf,
        /// `read` or `write`.
        action: &'static str,
        /// The segment that it is about, by its index in the call.
        segment: u32,
        /// Where in the file, in bytes.
        offset: u64,
        /// What CUDA said; `None` where the memory was freed before the copy.
        error: Option<Box<CudaError>>,
        /// What was moved: a sum, for pieces are moved in any order.
        done: Transfer,
    },
}

impl Error {
    pub(crate) fn on_gpu(path: &Path, action: &'static str, gpu: &Gpu, error: CudaError) -> Error {
        Error::Cuda { path: path.to_owned(), action, on: format!("GPU {gpu}"), error }
    }

    pub(crate) fn in_stream(path: &Path, action: &'static str, stream: usize, error: CudaError) -> Error {
        Error::Cuda { path: path.to_owned(), action, on: format!("in stream {stream:#x}"), error }
    }

    /// The error number that fits it best, for callers that know nothing else.
    pub fn errno(&self) -> Errno {
        match self {
            Error::NotGpunvme { .. } => Errno::NOTTY,
            Error::WrongKind { .. } | Error::OutsideBuffer { .. } | Error::WrongRing { .. } => Errno::INVAL,
            Error::RingFull { .. } => Errno::AGAIN,
            Error::StreamCaptured { .. } => Errno::BUSY,
            Error::LostBuffer { .. } | Error::RingClosed { .. } | Error::NoCuda(_) | Error::NoSuchGpu(_) => Errno::NODEV,
            Error::UnknownMemory { .. } | Error::Copy { error: None, .. } => Errno::FAULT,
            Error::Cuda { .. } | Error::Copy { .. } => Errno::IO,
            Error::OtherVersion { .. } => Errno::PROTONOSUPPORT,
            Error::Path { errno, .. }
            | Error::NotDone { errno, .. }
            | Error::Memory { errno, .. }
            | Error::Refused { errno, .. }
            | Error::Transfer { errno, .. }
            | Error::NotReachable { ioctl: errno, .. } => *errno,
        }
    }
}

/// The kernel's words without Rust's "(os error N)".
fn message(errno: Errno) -> String {
    let text = std::io::Error::from(errno).to_string();
    text.split(" (os error").next().unwrap_or_default().to_lowercase()
}

/// What the command that starts a container lacks, where a buffer cannot get out of it.
fn for_containers(socket: &str, errno: Errno) -> &'static str {
    match errno {
        Errno::SRCH => "; a daemon in a container has to see the host's processes: `--pid host`",
        Errno::NOENT if !socket.is_empty() => "; a container needs the socket's folder: `-v /run/gpunvme:/run/gpunvme:ro`",
        _ => "",
    }
}

fn at(segment: Option<u32>, offset: Option<u64>) -> String {
    let segment = segment.map_or(String::new(), |segment| format!(" segment {segment}"));
    offset.map_or(segment.clone(), |offset| format!("{segment} at byte {offset}"))
}

fn copying(error: Option<&CudaError>) -> String {
    match error {
        Some(error) => format!("{error}; {}", error.way_out()),
        None => "the memory was freed before the transfer was over; keep it until then".into(),
    }
}

fn because(errno: Errno, reason: Reason) -> String {
    match reason {
        // Why nothing faster was tried is not why it failed.
        Reason::None => String::new(),
        Reason::NotGpuMemory | Reason::NoVfio if errno != Errno::OPNOTSUPP => String::new(),
        reason => format!(" ({})", reason.explain()),
    }
}

/// What outlives a daemon that died during a read.
fn late(action: &str, errno: Errno) -> &'static str {
    match errno {
        Errno::CONNABORTED | Errno::NOTCONN if action == "read" => {
            "; the daemon is gone, and the device may still write to memory that was registered by a descriptor"
        }
        _ => "",
    }
}
