//! What a transfer moved, as Python sees it.

use gpunvme::{Moved, Reason};
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// What a transfer moved, and how.
#[pyclass(frozen, eq, module = "gpunvme")]
#[derive(PartialEq, Eq)]
pub struct Transfer(gpunvme::Transfer);

/// What pickle keeps of it: bytes by route, and the codes of the reasons.
type Parts = ([u64; 6], Option<u32>, Option<u32>);

impl From<gpunvme::Transfer> for Transfer {
    fn from(done: gpunvme::Transfer) -> Transfer {
        Transfer(done)
    }
}

impl Transfer {
    fn reason_code(&self) -> Option<Reason> {
        self.0.reason.filter(|reason| *reason != Reason::None)
    }
}

#[pymethods]
impl Transfer {
    /// How many bytes were moved. Fewer than were asked for means that the file ended.
    #[getter]
    fn bytes(&self) -> u64 {
        self.0.bytes()
    }

    /// Bytes by route: ``p2p``, ``bounce``, ``cache``, ``host``; ``hole`` are zeros that the file never stored,
    /// ``edge`` what the daemon copied because it is not aligned. Only those that are not zero.
    #[getter]
    fn routes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let Moved { p2p, bounce, cache, host, hole, edge } = self.0.moved;
        let routes = PyDict::new(py);
        for (name, bytes) in [("p2p", p2p), ("bounce", bounce), ("cache", cache), ("host", host), ("hole", hole), ("edge", edge)]
        {
            if bytes > 0 {
                routes.set_item(name, bytes)?;
            }
        }
        Ok(routes)
    }

    /// The code that says why not every byte went the fastest way, such as ``no-vfio``; ``None``
    /// where each did.
    #[getter]
    fn reason(&self) -> Option<&'static str> {
        self.reason_code().map(|reason| reason.name())
    }

    /// The code that says why not every byte of a read came from the kernel's page cache, such as
    /// ``not-resident``; ``None`` where each did, and of transfers that never take it: writes, and
    /// reads into memory that the device writes to itself.
    #[getter]
    fn cache_reason(&self) -> Option<&'static str> {
        self.0.cache_reason.filter(|reason| *reason != Reason::None).map(|reason| reason.name())
    }

    /// One sentence about the reason, and what would change it; empty where there is none.
    #[getter]
    fn explanation(&self) -> &'static str {
        self.reason_code().map_or("", |reason| reason.explain())
    }

    /// For pickle.
    #[staticmethod]
    fn _of(moved: [u64; 6], reason: Option<u32>, cache_reason: Option<u32>) -> Transfer {
        let [p2p, bounce, cache, host, hole, edge] = moved;
        let moved = Moved { p2p, bounce, cache, host, hole, edge };
        let code = |code: Option<u32>| code.and_then(Reason::from_code);
        let mut done = gpunvme::Transfer::default();
        (done.moved, done.reason, done.cache_reason) = (moved, code(reason), code(cache_reason));
        Transfer(done)
    }

    fn __reduce__<'py>(&self, py: Python<'py>) -> PyResult<(Bound<'py, PyAny>, Parts)> {
        let Moved { p2p, bounce, cache, host, hole, edge } = self.0.moved;
        let code = |reason: Option<Reason>| reason.map(Reason::code);
        let of = py.get_type::<Transfer>().getattr("_of")?;
        Ok((of, ([p2p, bounce, cache, host, hole, edge], code(self.0.reason), code(self.0.cache_reason))))
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let reason = self.reason().map_or(String::new(), |reason| format!(", reason={reason:?}"));
        Ok(format!("Transfer(bytes={}, routes={}{reason})", self.bytes(), self.routes(py)?.repr()?))
    }
}
