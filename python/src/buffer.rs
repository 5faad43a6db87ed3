//! Host memory that is registered with a mount, and so needs no staging.

use crate::interpreter::release;
use gpunvme::{Buffer as Memfd, Mount, Registered, Result};
use parking_lot::{Mutex, MutexGuard};
use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;
use std::ffi::c_int;
use std::sync::Arc;

/// Registered memory, and where it lies.
pub struct HostMemory {
    address: u64,
    len: usize,
    /// Locked for the time of a transfer.
    registered: Mutex<Registered<Memfd>>,
}

impl HostMemory {
    pub fn new(mount: &Mount, len: usize) -> Result<HostMemory> {
        let registered = mount.register(Memfd::memfd(len)?)?;
        Ok(HostMemory { address: registered.as_ptr() as u64, len, registered: Mutex::new(registered) })
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

    pub fn lock(&self) -> MutexGuard<'_, Registered<Memfd>> {
        self.registered.lock()
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
