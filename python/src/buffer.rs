//! Host memory that is registered with a mount, and so needs no staging; and such memory that
//! another process lends.

use crate::error::raised;
use crate::interpreter::release;
use crate::memory::{self, Ask};
use crate::request::{Direction, Place, Request};
use crate::stream::wait_for;
use gpunvme::{Buffer as Memfd, Error, Mount, Registered, Result};
use gpunvme_cuda::{Cuda, CudaError, Gpu, HostRegistration, Place as At, Stream};
use parking_lot::{Mutex, RwLock};
use pyo3::exceptions::{PyBufferError, PyValueError};
use pyo3::ffi;
use pyo3::prelude::*;
use std::ffi::c_int;
use std::path::Path;
use std::ptr::{self, NonNull};
use std::sync::Arc;

/// Registered memory, and where it lies.
pub struct HostMemory {
    address: u64,
    len: usize,
    /// Locked for the time of a transfer: shared by those that only take bytes from it.
    registered: RwLock<Registered<Memfd>>,
}

impl HostMemory {
    pub fn new(mount: &Mount, len: usize) -> Result<HostMemory> {
        let registered = mount.register(Memfd::memfd(len)?)?;
        Ok(HostMemory { address: registered.as_ptr() as u64, len, registered: RwLock::new(registered) })
    }

    /// Whether all of a range lies in it.
    pub fn holds(&self, address: u64, len: u64) -> bool {
        let offset = address.checked_sub(self.address);
        offset.and_then(|offset| offset.checked_add(len)).is_some_and(|end| end <= self.len as u64)
    }

    /// Where an address lies in it, in bytes from its beginning.
    pub fn offset(&self, address: u64) -> u64 {
        address - self.address
    }

    pub fn registered(&self) -> &RwLock<Registered<Memfd>> {
        &self.registered
    }
}

/// Host memory that is registered with a mount: bytes move between it and files without a copy by
/// the CPU. It has the buffer protocol, so ``numpy.frombuffer(buffer, dtype)`` is an array in it,
/// and slices of that array are read into and written from as the buffer itself is.
///
/// Made by :meth:`Mount.buffer`. It is unregistered when nothing uses it any more.
#[pyclass(frozen, module = "gpunvme")]
pub struct Buffer {
    memory: Option<Arc<HostMemory>>,
}

impl Buffer {
    pub fn new(memory: Arc<HostMemory>) -> Buffer {
        Buffer { memory: Some(memory) }
    }

    fn memory(&self) -> &HostMemory {
        self.memory.as_deref().expect("it is there until it is dropped")
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        release(self.memory.take());
    }
}

#[pymethods]
impl Buffer {
    /// Its length in bytes.
    #[getter]
    fn nbytes(&self) -> usize {
        self.memory().len
    }

    fn __len__(&self) -> usize {
        self.memory().len
    }

    fn __repr__(&self) -> String {
        format!("Buffer({} bytes)", self.memory().len)
    }

    /// The buffer protocol.
    ///
    /// # Safety
    /// `view` is a structure to be filled, as Python promises.
    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        let memory = slf.get().memory();
        let len = isize::try_from(memory.len).map_err(|_| PyBufferError::new_err("the buffer is too long"))?;
        let address = std::ptr::with_exposed_provenance_mut(memory.address as usize);
        // SAFETY: the memory is `len` bytes long, and stays where it is as long as this object
        // lives, to which the view holds a reference. Bytes that a transfer changes meanwhile are
        // the caller's business, as with every buffer of Python's.
        let filled = unsafe { ffi::PyBuffer_FillInfo(view, slf.as_ptr(), address, len, 0, flags) };
        if filled == 0 { Ok(()) } else { Err(PyErr::fetch(slf.py())) }
    }
}

/// Host memory of another process that is mapped here, to be read: bytes are copied from there into
/// any memory.
///
/// Args:
///     mapping: an object with the buffer protocol, of whole pages.
#[pyclass(frozen, module = "gpunvme._native")]
pub struct LentMemory {
    address: u64,
    len: u64,
    /// How it reaches the GPU that it was copied to. Before the mapping, so that it ends first.
    on_gpu: Mutex<Option<OnGpu>>,
    /// What keeps it mapped.
    _mapping: Py<PyAny>,
}

struct OnGpu {
    gpu: Gpu,
    stream: Stream,
    /// None where CUDA refused it: it copies by memory of its own then.
    _registration: Option<HostRegistration>,
}

impl LentMemory {
    /// # Safety
    /// The memory of the request is the caller's to write until this returns, and its segments lie
    /// in this memory.
    unsafe fn copy(&self, request: &Request) -> Result<()> {
        let path = Path::new("lent memory");
        wait_for(path, &request.busy)?;
        if !request.on_gpu {
            for segment in &request.segments {
                let from: *const u8 = ptr::with_exposed_provenance((self.address + segment.file_offset) as usize);
                let to: *mut u8 = ptr::with_exposed_provenance_mut(segment.address as usize);
                // SAFETY: the caller vouches for both ranges, which may overlap.
                unsafe { ptr::copy(from, to, segment.len as usize) };
            }
            return Ok(());
        }
        let cuda = Cuda::load()?;
        let failed = |error| Error::Cuda { path: path.into(), action: "copy to", on: "a GPU".into(), error };
        // SAFETY: as above.
        unsafe { self.copy_to_gpu(cuda, request) }.map_err(failed)
    }

    /// # Safety
    /// As for [`LentMemory::copy`].
    unsafe fn copy_to_gpu(&self, cuda: &'static Cuda, request: &Request) -> std::result::Result<(), CudaError> {
        let Some(first) = request.segments.first() else { return Ok(()) };
        let found = cuda.memory_at(first.address)?.map(|found| found.place);
        let gpu = match found {
            Some(At::Device(gpu)) => gpu,
            _ => cuda.gpus().next().expect("CUDA is not loaded without a GPU"),
        };
        let mut on_gpu = self.on_gpu.lock();
        let OnGpu { stream, .. } = match &mut *on_gpu {
            Some(known) if known.gpu == gpu => known,
            other => other.insert(self.on_gpu(gpu)?),
        };
        let copied = request.segments.iter().try_for_each(|segment| {
            // SAFETY: the caller vouches for both ranges, and the stream is waited for below.
            unsafe { stream.copy_in(segment.address, self.address + segment.file_offset, segment.len as usize) }
        });
        stream.synchronize()?;
        copied
    }

    fn on_gpu(&self, gpu: Gpu) -> std::result::Result<OnGpu, CudaError> {
        let address = NonNull::new(ptr::with_exposed_provenance_mut(self.address as usize));
        // SAFETY: it stays mapped for as long as this object lives, which has the registration.
        let register = |address| unsafe { HostRegistration::read_only(&gpu, address, self.len as usize) }.ok();
        Ok(OnGpu { stream: gpu.stream()?, _registration: address.and_then(register), gpu })
    }
}

#[pymethods]
impl LentMemory {
    #[new]
    fn new(mapping: &Bound<'_, PyAny>) -> PyResult<LentMemory> {
        let found = memory::of(mapping, Ask { writable: false, stream: None })?;
        Ok(LentMemory { address: found.address, len: found.len, on_gpu: Mutex::default(), _mapping: found.keep })
    }

    /// Copies from there into memory of GPUs or of the host: pairs of memory and where its bytes
    /// begin in this one.
    fn copy_into(&self, py: Python<'_>, memory: &Bound<'_, PyAny>) -> PyResult<()> {
        let request = Request::new(memory, Place::At(0), Direction::Read, None)?;
        let lies_in = |offset: u64, len| offset.checked_add(len).is_some_and(|end| end <= self.len);
        if !request.segments.iter().all(|segment| lies_in(segment.file_offset, segment.len)) {
            return Err(PyValueError::new_err(format!("the memory that is lent has {} bytes", self.len)));
        }
        // SAFETY: the memory is kept by the request, and the caller's to write; the segments were
        // just looked at.
        py.detach(|| unsafe { self.copy(&request) }).map_err(|error| raised(py, &error))
    }
}
