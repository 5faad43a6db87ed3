//! Turns the library's errors into exceptions.

use crate::transfer::Transfer;
use gpunvme::Error;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use std::path::{Path, PathBuf};

/// The exception of an error: a `gpunvme.Error`, which is an `OSError`.
pub fn raised(py: Python<'_>, error: &Error) -> PyErr {
    exception(py, error).map_or_else(|failed| failed, PyErr::from_value)
}

/// The exception itself, for a caller that hands it on.
///
/// # Errors
/// The package is not whole, or there is no memory.
pub fn exception<'py>(py: Python<'py>, error: &Error) -> PyResult<Bound<'py, PyAny>> {
    static MAKE: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    let make = MAKE.import(py, "gpunvme._error", "make")?;
    let (reason, segment, moved) = match error {
        Error::Transfer { reason, segment, done, .. } => (Some(*reason), *segment, Some(*done)),
        Error::Copy { segment, done, .. } => (None, Some(*segment), Some(*done)),
        Error::UnknownMemory { segment, .. } => (None, Some(*segment), None),
        Error::Refused { reason, .. } => (Some(*reason), None, None),
        _ => (None, None, None),
    };
    let reason = reason.filter(|reason| *reason != gpunvme::Reason::None);
    make.call1((
        error.errno().raw_os_error(),
        error.to_string(),
        path(error),
        reason.map(|reason| reason.name()),
        segment,
        moved.map(Transfer::from),
    ))
}

/// The path that an error is about.
fn path(error: &Error) -> Option<PathBuf> {
    let path: &Path = match error {
        Error::NotGpunvme { path }
        | Error::WrongKind { path, .. }
        | Error::OtherVersion { path }
        | Error::Path { path, .. }
        | Error::RingClosed { path }
        | Error::WrongRing { path }
        | Error::Transfer { path, .. }
        | Error::Cuda { path, .. }
        | Error::UnknownMemory { path, .. }
        | Error::StreamCaptured { path, .. }
        | Error::Copy { path, .. } => path,
        _ => return None,
    };
    Some(path.to_owned())
}
