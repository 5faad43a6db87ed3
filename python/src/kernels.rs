//! What kernels read and write files by, as Python sees it: rings, and arrays on them.

use crate::error::raised;
use crate::file::File;
use crate::interpreter::{Held, release};
use crate::mount::Mount;
use crate::session::Session;
use gpunvme::Result;
use gpunvme::gpu::{self, GpuArraySettings, GpuRingSettings, KernelArray, KernelRing};
use parking_lot::Mutex;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};
use std::sync::Arc;
use std::time::Duration;
use zerocopy::IntoBytes;

/// What belongs to the process that made it. A child leaves it as it is: the threads and the kernels
/// that end with it are its parent's.
struct Own<T> {
    value: Option<T>,
    session: Arc<Session>,
}

impl<T> Own<T> {
    /// # Errors
    /// [`gpunvme::Error::Path`] with `ECHILD` in a child process.
    fn get(&mut self) -> Result<&mut T> {
        self.session.mount()?;
        Ok(self.value.as_mut().expect("it is there until it is dropped"))
    }
}

impl<T> Drop for Own<T> {
    fn drop(&mut self) {
        if self.session.mount().is_err() {
            std::mem::forget(self.value.take());
        }
    }
}

/// What an object of Python's has until it is closed. The lock may be another thread's for as long
/// as its call takes, so that no thread asks for it with the interpreter.
struct Handle<T: Send> {
    class: &'static str,
    open: Mutex<Option<Own<T>>>,
}

impl<T: Send> Handle<T> {
    fn new(class: &'static str, session: Arc<Session>, value: T) -> Handle<T> {
        Handle { class, open: Mutex::new(Some(Own { value: Some(value), session })) }
    }

    fn with<R: Send>(&self, py: Python<'_>, work: impl FnOnce(&mut T) -> Result<R> + Send) -> PyResult<R> {
        let done = py.detach(|| self.open.lock().as_mut().map(|own| own.get().and_then(work)));
        let done = done.ok_or_else(|| PyValueError::new_err(format!("the {} is closed", self.class)))?;
        done.map_err(|error| raised(py, &error))
    }

    fn close(&self, py: Python<'_>) {
        py.detach(|| {
            let own = self.open.lock().take();
            // It waits for kernels, and others may ask meanwhile whether it is closed.
            drop(own);
        });
    }

    fn is_closed(&self, py: Python<'_>) -> bool {
        py.detach(|| self.open.lock().is_none())
    }
}

impl<T: Send> Drop for Handle<T> {
    fn drop(&mut self) {
        release(self.open.get_mut().take());
    }
}

/// A ring for kernels, which read and write attached files themselves by the calls of
/// ``gpunvme_device.h`` (see :func:`get_include`).
///
/// Made by :meth:`on_gpu`. Closing it ends the waits of kernels that still use it, with the status
/// ``closed``, and waits for those kernels. Its volume cannot be unmounted before.
#[pyclass(frozen, weakref, module = "gpunvme")]
pub struct GpuRing {
    session: Held<Session>,
    ring: Handle<gpu::GpuRing>,
}

impl GpuRing {
    fn new(
        mount: &Bound<'_, Mount>,
        gpu: Option<u32>,
        (entries, slot, patience): (Option<u32>, Option<usize>, Option<f64>),
    ) -> PyResult<GpuRing> {
        let (py, usual) = (mount.py(), GpuRingSettings::default());
        let patience = patience.map_or(Ok(usual.patience), Duration::try_from_secs_f64);
        let patience = patience.map_err(|error| PyValueError::new_err(format!("patience: {error}")))?;
        let settings = GpuRingSettings { entries: entries.unwrap_or(usual.entries), slot: slot.unwrap_or(usual.slot), patience };
        let session = mount.get().session()?;
        let made = py.detach(|| {
            let mount = session.mount()?;
            gpu.map_or_else(|| gpu::GpuRing::on_cpu(mount, settings), |gpu| gpu::GpuRing::on_gpu(mount, gpu, settings))
        });
        let ring = Handle::new("ring", session.share(), made.map_err(|error| raised(py, &error))?);
        Ok(GpuRing { session, ring })
    }
}

#[pymethods]
impl GpuRing {
    /// Makes a ring for the kernels of a GPU.
    ///
    /// Args:
    ///     mount: the mount whose files they use.
    ///     gpu: its number among those that the process may use.
    ///     entries: requests in flight at the most, a power of two from 32 to 4096; 1024 unless told.
    ///     slot: bytes that one request has room for at least, a multiple of 4096; 64 KiB unless told.
    ///         Each entry has as much pinned host memory, or a page more.
    ///     patience: how many seconds a kernel waits for one answer, or for a slot; 30 unless told.
    ///
    /// Raises:
    ///     Error: there is no CUDA, no such GPU (ENODEV), or not as much memory.
    #[staticmethod]
    #[pyo3(signature = (mount, gpu=0, *, entries=None, slot=None, patience=None))]
    fn on_gpu(
        mount: &Bound<'_, Mount>,
        gpu: u32,
        entries: Option<u32>,
        slot: Option<usize>,
        patience: Option<f64>,
    ) -> PyResult<GpuRing> {
        GpuRing::new(mount, Some(gpu), (entries, slot, patience))
    }

    /// Makes a ring for kernels that were compiled for the processor, and run as functions of threads
    /// of this process: to try them where there is no GPU. They must have ended before it is closed.
    ///
    /// Arguments and errors are those of :meth:`on_gpu`.
    #[staticmethod]
    #[pyo3(signature = (mount, *, entries=None, slot=None, patience=None))]
    fn on_cpu(mount: &Bound<'_, Mount>, entries: Option<u32>, slot: Option<usize>, patience: Option<f64>) -> PyResult<GpuRing> {
        GpuRing::new(mount, None, (entries, slot, patience))
    }

    /// Makes an open file known to the ring, with the access that it is open for. The file may be
    /// closed afterwards.
    ///
    /// Raises:
    ///     Error: it is a file of another mount, or the ring has too many.
    fn attach(&self, py: Python<'_>, file: &Bound<'_, File>) -> PyResult<Attached> {
        let file = file.get().library()?;
        let attached = self.ring.with(py, |ring| ring.attach(&file))?;
        Ok(Attached { name: attached.name(), attached: Handle::new("file", self.session.share(), attached) })
    }

    /// Makes an array over a file, for the calls of ``gpunvme_array.h``, with a cache in the GPU's
    /// memory. The file may be closed afterwards.
    ///
    /// Args:
    ///     file: the file; open for reading and writing, where the array is to be writable.
    ///     page: bytes of a page, a power of two from 512 to the ring's slot; 4096 unless told.
    ///     cache: bytes of the cache, as far as whole sets fit; 256 MiB unless told.
    ///     ways: frames of a set, a multiple of 4 up to 64; 8 unless told.
    ///     length: bytes of the array; those behind the file's end are zeros, and become part of it when
    ///         they are written. As long as the file is now unless told.
    ///     writable: whether kernels may change it.
    ///
    /// Raises:
    ///     Error: the settings are none (EINVAL), the file is not open for writing (EBADF), or there is
    ///         not as much memory.
    #[pyo3(signature = (file, *, page=None, cache=None, ways=None, length=None, writable=false))]
    #[allow(clippy::too_many_arguments)] // they have names
    fn array(
        slf: Bound<'_, Self>,
        file: &Bound<'_, File>,
        page: Option<usize>,
        cache: Option<usize>,
        ways: Option<u32>,
        length: Option<u64>,
        writable: bool,
    ) -> PyResult<GpuArray> {
        let (usual, file) = (GpuArraySettings::default(), file.get().library()?);
        let settings = GpuArraySettings {
            page: page.unwrap_or(usual.page),
            cache: cache.unwrap_or(usual.cache),
            ways: ways.unwrap_or(usual.ways),
            len: length,
            writable,
        };
        let made = slf.get().ring.with(slf.py(), |ring| ring.array(&file, settings))?;
        let session = slf.get().session.share();
        Ok(GpuArray {
            cache: made.cache(),
            for_kernels: made.for_kernels(),
            array: Handle::new("array", session, made),
            ring: slf.unbind(),
        })
    }

    /// The 64 bytes that a kernel gets as its ``gpunvme::ring``, by value; they are valid until the
    /// ring is closed. CuPy takes them as ``numpy.frombuffer(ring.for_kernels(), "V64")``.
    fn for_kernels<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        let parameter: KernelRing = self.ring.with(py, |ring| Ok(ring.for_kernels()))?;
        Ok(PyBytes::new(py, parameter.as_bytes()))
    }

    /// Ends it for its kernels, and waits for them.
    fn close(&self, py: Python<'_>) {
        self.ring.close(py);
    }

    /// Whether it is closed.
    #[getter]
    fn closed(&self, py: Python<'_>) -> bool {
        self.ring.is_closed(py)
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    fn __exit__(&self, py: Python<'_>, _class: &Bound<'_, PyAny>, _error: &Bound<'_, PyAny>, _trace: &Bound<'_, PyAny>) {
        self.close(py);
    }
}

/// A file that a ring knows, made by :meth:`GpuRing.attach`. Kernels reach it as long as this object
/// is there and not closed, and get ``EBADF`` afterwards.
#[pyclass(frozen, weakref, module = "gpunvme")]
pub struct Attached {
    name: u64,
    attached: Handle<gpunvme::Attached>,
}

#[pymethods]
impl Attached {
    /// What a kernel gets as its ``gpunvme::file``: a number of 64 bits without a sign.
    #[getter]
    fn name(&self) -> u64 {
        self.name
    }

    /// Has the ring forget it.
    fn close(&self, py: Python<'_>) {
        self.attached.close(py);
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    fn __exit__(&self, py: Python<'_>, _class: &Bound<'_, PyAny>, _error: &Bound<'_, PyAny>, _trace: &Bound<'_, PyAny>) {
        self.close(py);
    }
}

/// A file that kernels use as an array, made by :meth:`GpuRing.array`, with a cache in the GPU's
/// memory. What kernels changed is in the file when it was flushed, by them or by :meth:`flush`; what
/// was not is lost when it is closed. It keeps its ring.
#[pyclass(frozen, weakref, module = "gpunvme")]
pub struct GpuArray {
    cache: usize,
    for_kernels: KernelArray,
    array: Handle<gpu::GpuArray>,
    ring: Py<GpuRing>,
}

#[pymethods]
impl GpuArray {
    /// The 128 bytes that a kernel gets as its ``gpunvme::array``, by value; they are valid until the
    /// array or its ring is closed. CuPy takes them as ``numpy.frombuffer(array.for_kernels(), "V128")``.
    fn for_kernels<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        self.ring.get().ring.with(py, |_| Ok(()))?;
        self.array.with(py, |_| Ok(()))?;
        Ok(PyBytes::new(py, self.for_kernels.as_bytes()))
    }

    /// Bytes of the cache.
    #[getter]
    fn cache(&self) -> usize {
        self.cache
    }

    /// What kernels found since it was made, also while they run: ``hits``, accesses whose page was in
    /// the cache; ``misses``, pages read from the file; ``written``, pages written back by kernels.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let found = self.array.with(py, |array| array.stats())?;
        let of = PyDict::new(py);
        of.set_item("hits", found.hits)?;
        of.set_item("misses", found.misses)?;
        of.set_item("written", found.written)?;
        Ok(of)
    }

    /// Writes to the file what kernels changed, and returns how many bytes that were. No kernel uses
    /// the array meanwhile.
    ///
    /// Args:
    ///     file: the file that the array was made over, open for writing.
    ///
    /// Raises:
    ///     Error: it is another file (EINVAL), or what a write says. What could not be written is still
    ///         in the cache.
    fn flush(&self, py: Python<'_>, file: &Bound<'_, File>) -> PyResult<u64> {
        let file = file.get().library()?;
        self.array.with(py, |array| array.flush(&file))
    }

    /// Gives up its memory, and waits for kernels that use it.
    fn close(&self, py: Python<'_>) {
        self.array.close(py);
    }

    /// Whether it is closed.
    #[getter]
    fn closed(&self, py: Python<'_>) -> bool {
        self.array.is_closed(py)
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    fn __exit__(&self, py: Python<'_>, _class: &Bound<'_, PyAny>, _error: &Bound<'_, PyAny>, _trace: &Bound<'_, PyAny>) {
        self.close(py);
    }
}
