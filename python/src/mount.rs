//! A mount, as Python sees it.

use crate::buffer::Buffer;
use crate::error::raised;
use crate::interpreter::{Held, release};
use crate::memory::{self, Ask};
use crate::session::Session;
use gpunvme::{Moved, OperationKind, Reason, Route};
use parking_lot::Mutex;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::Arc;

/// A mounted volume. While one of it, or a file of the mount, is there, what transfers need (staging
/// memory, threads) is kept ready.
///
/// Args:
///     path: the mount, or a file or directory on it.
///
/// Raises:
///     Error: the path lies on no mount of gpunvme (ENOTTY), or what open(2) says.
#[pyclass(frozen, weakref, module = "gpunvme")]
pub struct Mount {
    path: PathBuf,
    session: Mutex<Option<Arc<Session>>>,
}

impl Mount {
    /// What its files share.
    ///
    /// # Errors
    /// `ValueError` where it was closed.
    pub fn session(&self) -> PyResult<Held<Session>> {
        let session = self.session.lock().clone();
        session.map(Held::from).ok_or_else(|| PyValueError::new_err(format!("{}: the mount was closed", self.path.display())))
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        release(self.session.get_mut().take());
    }
}

fn moved<'py>(py: Python<'py>, moved: &Moved) -> PyResult<Bound<'py, PyDict>> {
    let routes = PyDict::new(py);
    let Moved { p2p, bounce, cache, host, hole, edge } = *moved;
    for (name, bytes) in [("p2p", p2p), ("bounce", bounce), ("cache", cache), ("host", host), ("hole", hole), ("edge", edge)] {
        routes.set_item(name, bytes)?;
    }
    Ok(routes)
}

#[pymethods]
impl Mount {
    #[new]
    fn new(py: Python<'_>, path: &Bound<'_, PyAny>) -> PyResult<Mount> {
        // As everywhere, a path may be bytes.
        let path: PathBuf = py.import("os")?.call_method1("fsdecode", (path,))?.extract()?;
        let session = py.detach(|| Session::of(&path, None)).map_err(|error| raised(py, &error))?;
        Ok(Mount { path, session: Mutex::new(Some(session)) })
    }

    /// The path that it was named by.
    #[getter]
    fn path(&self) -> OsString {
        self.path.clone().into()
    }

    /// What the mount is and can do, asked of its daemon now: a dictionary. Sizes are bytes.
    fn info<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let session = self.session()?;
        let info = py.detach(|| session.mount()?.info()).map_err(|error| raised(py, &error))?;
        let of = PyDict::new(py);
        of.set_item("device", info.device)?;
        of.set_item("label", info.label)?;
        let uuid: String = info.uuid.iter().map(|byte| format!("{byte:02x}")).collect();
        of.set_item("uuid", uuid)?;
        of.set_item("daemon", info.daemon)?;
        of.set_item("read_only", info.read_only)?;
        of.set_item("threads", info.threads)?;
        of.set_item("cache", info.cache)?;
        of.set_item("write_buffer", info.write_buffer)?;
        of.set_item("commit", info.commit.as_secs())?;
        of.set_item("discard", info.discard)?;
        of.set_item("capacity", info.capacity)?;
        of.set_item("free", info.free)?;
        of.set_item("block_size", info.block_size)?;
        of.set_item("logical_block", info.logical_block)?;
        of.set_item("memory_alignment", info.memory_alignment)?;
        of.set_item("devices", info.devices)?;
        of.set_item("sets", info.sets)?;
        of.set_item("stripe_unit", info.stripe_unit)?;
        of.set_item("route", info.route.name())?;
        of.set_item("reason", (info.reason != Reason::None).then(|| info.reason.name()))?;
        Ok(of)
    }

    /// What the mount did since it was mounted, for all processes: a dictionary. ``read`` and
    /// ``write`` are bytes by route, ``calls`` and ``reasons`` are counts by name. ``requests`` (of
    /// the kernel), ``transfers`` and ``device_requests`` have a dictionary for each kind of
    /// operation: ``count``, ``failed``, ``in_flight``, ``bytes``, ``seconds`` added up, and ``p50``
    /// and ``p99``, in seconds or ``None``: bounds, of which half and 99 of 100 took at most as long.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let session = self.session()?;
        let read = || session.mount().and_then(|mount| Ok((mount.stats()?, mount.metrics()?)));
        let (stats, metrics) = py.detach(read).map_err(|error| raised(py, &error))?;
        let of = PyDict::new(py);
        let calls = PyDict::new(py);
        for (name, count) in stats.calls {
            calls.set_item(name, count)?;
        }
        let reasons = PyDict::new(py);
        for (reason, count) in stats.reasons {
            reasons.set_item(reason.name(), count)?;
        }
        of.set_item("read", moved(py, &stats.read)?)?;
        of.set_item("write", moved(py, &stats.write)?)?;
        of.set_item("calls", calls)?;
        of.set_item("failed", stats.failed)?;
        of.set_item("reasons", reasons)?;
        of.set_item("buffers", stats.buffers)?;
        of.set_item("buffer_bytes", stats.buffer_bytes)?;
        of.set_item("processes", stats.processes)?;
        for (name, kind) in [
            ("requests", OperationKind::Request),
            ("transfers", OperationKind::Transfer),
            ("device_requests", OperationKind::Device),
        ] {
            let all = PyDict::new(py);
            for operations in metrics.operations.iter().filter(|operations| operations.kind == kind) {
                let one = PyDict::new(py);
                one.set_item("count", operations.ended())?;
                one.set_item("failed", operations.failed)?;
                one.set_item("in_flight", operations.in_flight)?;
                one.set_item("bytes", operations.bytes)?;
                one.set_item("seconds", operations.time.as_secs_f64())?;
                one.set_item("p50", operations.quantile(0.5).map(|time| time.as_secs_f64()))?;
                one.set_item("p99", operations.quantile(0.99).map(|time| time.as_secs_f64()))?;
                all.set_item(&operations.name, one)?;
            }
            of.set_item(name, all)?;
        }
        Ok(of)
    }

    /// Makes everything durable that any process did to the volume before, as ``os.sync()`` does
    /// for other filesystems.
    fn sync(&self, py: Python<'_>) -> PyResult<()> {
        let session = self.session()?;
        py.detach(|| session.mount()?.sync()).map_err(|error| raised(py, &error))
    }

    /// Host memory that is registered with the mount: ``nbytes`` zeros, page aligned.
    fn buffer(&self, py: Python<'_>, nbytes: usize) -> PyResult<Buffer> {
        let session = self.session()?;
        let memory = py.detach(|| session.register(nbytes)).map_err(|error| raised(py, &error))?;
        Ok(Buffer::new(memory))
    }

    /// The route that transfers between the mount and ``memory`` take, and the reason why it is not
    /// a faster one, or ``None``.
    fn route(&self, py: Python<'_>, memory: &Bound<'_, PyAny>) -> PyResult<(&'static str, Option<&'static str>)> {
        let session = self.session()?;
        let found = memory::of(memory, Ask { writable: false, stream: None })?;
        let (route, reason) = match found.on_gpu {
            false => (Route::Host, Reason::NotGpuMemory),
            true => {
                let asked = py.detach(|| session.transfers()?.route(found.address));
                asked.map_err(|error| raised(py, &error))?
            }
        };
        Ok((route.name(), (reason != Reason::None).then(|| reason.name())))
    }

    /// Gives up what is registered of a GPU's memory, which otherwise stays in existence, even if it
    /// is freed, until other memory needs the room. Only the route ``p2p`` registers any.
    fn forget(&self, py: Python<'_>, memory: &Bound<'_, PyAny>) -> PyResult<()> {
        let session = self.session()?;
        let found = memory::of(memory, Ask { writable: false, stream: None })?;
        py.detach(|| {
            if let Some(transfers) = session.transfers_so_far() {
                transfers.forget(found.address, found.len);
            }
        });
        Ok(())
    }

    /// Lets go of the mount: it can be unmounted when its files are closed too.
    fn close(&self) {
        // Not under the lock: a thread that has the interpreter may be waiting for it.
        let session = self.session.lock().take();
        release(session);
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    fn __exit__(&self, _class: &Bound<'_, PyAny>, _error: &Bound<'_, PyAny>, _trace: &Bound<'_, PyAny>) {
        self.close();
    }

    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> (Bound<'py, pyo3::types::PyType>, (PathBuf,)) {
        (slf.get_type(), (slf.get().path.clone(),))
    }

    fn __repr__(&self) -> String {
        format!("Mount({:?})", self.path.display().to_string())
    }
}
