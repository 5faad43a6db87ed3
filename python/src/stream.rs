//! CUDA streams of Python's libraries: the handle of one, and waiting until one is through.

use gpunvme::Error;
use gpunvme_cuda::{Cuda, CudaError, Event, Gpu, Place, Stream, Which};
use pyo3::exceptions::PyTypeError;
use pyo3::intern;
use pyo3::prelude::*;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The largest handle of a default stream: `cudaStreamPerThread`.
const DEFAULT_STREAMS: usize = 2;

/// The handle of a stream: a number, an object with `__cuda_stream__`, or a stream of PyTorch
/// (`cuda_stream`), CuPy (`ptr`) or Numba (`handle`).
///
/// # Errors
/// `TypeError` for anything else.
pub fn handle(stream: &Bound<'_, PyAny>) -> PyResult<usize> {
    let py = stream.py();
    if let Ok(handle) = stream.extract() {
        return Ok(handle);
    }
    if let Some(handle) = stream.getattr_opt(intern!(py, "cuda_stream"))? {
        return handle.extract();
    }
    if let Some(protocol) = stream.getattr_opt(intern!(py, "__cuda_stream__"))? {
        let (_, handle): (i64, usize) = protocol.call0()?.extract()?;
        return Ok(handle);
    }
    if let Some(handle) = stream.getattr_opt(intern!(py, "ptr"))? {
        return handle.extract();
    }
    if let Some(handle) = stream.getattr_opt(intern!(py, "handle"))? {
        return handle.getattr_opt(intern!(py, "value"))?.unwrap_or(handle).extract();
    }
    Err(PyTypeError::new_err("stream must be a CUDA stream: its handle as a number, or a stream of PyTorch, CuPy or Numba"))
}

/// A stream on which a library may still be working on memory.
#[derive(Clone, Copy)]
pub struct Busy {
    pub stream: usize,
    /// The GPU's number, where its library told.
    pub gpu: Option<i32>,
    /// An address of the memory: a default stream is one of each GPU.
    pub address: u64,
}

impl Busy {
    /// Whether one need not be waited for after the other.
    pub fn is_same(&self, other: &Busy) -> bool {
        let one = self.stream > DEFAULT_STREAMS || (self.gpu.is_some() && self.gpu == other.gpu);
        self.stream == other.stream && one
    }
}

/// Waits until streams have done what was put into them.
///
/// # Errors
/// What CUDA says.
pub fn wait_for(path: &Path, busy: &[Busy]) -> Result<(), Error> {
    busy.iter().try_for_each(|busy| with_stream(path, busy, |_, stream| stream.synchronize()))
}

/// Does something with a stream.
fn with_stream<R>(
    path: &Path,
    &Busy { stream, gpu, address }: &Busy,
    work: impl FnOnce(&'static Cuda, &Stream) -> Result<R, CudaError>,
) -> Result<R, Error> {
    let cuda = Cuda::load()?;
    let found = || {
        let gpu = if stream <= DEFAULT_STREAMS { gpu_of(cuda, gpu, address)? } else { None };
        let _entered = gpu.map(|gpu| gpu.enter()).transpose()?;
        // SAFETY: its library named it for memory that is kept during the call.
        let stream = unsafe { cuda.application_stream(stream) }?;
        work(cuda, &stream)
    };
    found().map_err(|error| failed(path, format!("stream {stream:#x}"), error))
}

fn failed(path: &Path, on: String, error: CudaError) -> Error {
    Error::Cuda { path: path.to_owned(), action: "wait for", on, error }
}

/// Points in streams, behind what was put into them before: any thread may wait for that, also of a
/// stream that is the calling thread's own.
pub struct Marks {
    path: PathBuf,
    events: Vec<Event>,
}

impl Marks {
    /// How long a wait sleeps before it looks again.
    const NAP: Duration = Duration::from_micros(200);

    /// # Errors
    /// What CUDA says.
    pub fn put(path: &Path, busy: &[Busy]) -> Result<Marks, Error> {
        let mark = |cuda: &'static Cuda, stream: &Stream| {
            let gpu = cuda.gpu_of(stream)?;
            if !stream.is_of(&gpu)? {
                // Of a context of the application's own, in which nothing is made here.
                return stream.synchronize().map(|()| None);
            }
            let event = gpu.event()?;
            stream.record(&event)?;
            Ok(Some(event))
        };
        let events = busy.iter().map(|busy| with_stream(path, busy, mark)).collect::<Result<Vec<_>, _>>()?;
        Ok(Marks { path: path.to_owned(), events: events.into_iter().flatten().collect() })
    }

    /// Whether all streams have reached them.
    ///
    /// # Errors
    /// What CUDA says, also of work in the streams.
    pub fn are_reached(&self) -> Result<bool, Error> {
        for event in &self.events {
            if !event.done().map_err(|error| failed(&self.path, "a stream".into(), error))? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Waits until they have.
    ///
    /// # Errors
    /// As [`Marks::are_reached`].
    pub fn wait(&self) -> Result<(), Error> {
        while !self.are_reached()? {
            std::thread::sleep(Marks::NAP);
        }
        Ok(())
    }
}

/// The GPU whose default stream is meant: by its number, or else by an address of its memory.
fn gpu_of(cuda: &'static Cuda, number: Option<i32>, address: u64) -> Result<Option<Gpu>, CudaError> {
    if let Some(number) = number.and_then(|number| u32::try_from(number).ok())
        && let Ok(gpu) = cuda.gpu(Which::Index(number))
    {
        return Ok(Some(gpu));
    }
    Ok(match cuda.memory_at(address)?.map(|found| found.place) {
        Some(Place::Device(gpu)) => Some(gpu),
        _ => None,
    })
}
