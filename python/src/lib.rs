//! The native part of the Python package `gpunvme`: files of a mount, read into and written from
//! whatever memory Python's libraries hold.
//!
//! `memory` finds the address behind an object, `file` makes requests of it, and `pending` holds
//! what is in flight. Memory of a GPU goes to [`gpunvme::gpu`]; host memory to `host`. A `session`
//! is what all files of a mount share in this process. `batch` opens and reads many files, in two
//! calls. `kernels` is for those that ask for files themselves.
//!
//! It guards three rules. A thread that waits has let go of the interpreter. No thread of the
//! library ever asks for the interpreter. And the objects behind memory that is in flight are
//! kept until the transfer is over, whatever becomes of the caller.
#![deny(unsafe_code)]

#[allow(unsafe_code)]
mod batch;
#[allow(unsafe_code)]
mod buffer;
mod completions;
#[allow(unsafe_code)]
mod dlpack;
mod error;
#[allow(unsafe_code)]
mod exchange;
#[allow(unsafe_code)]
mod file;
#[allow(unsafe_code)]
mod host;
mod interpreter;
mod kernels;
mod memory;
mod mount;
mod pending;
#[allow(unsafe_code)]
mod process;
mod request;
#[allow(unsafe_code)]
mod session;
mod staging;
#[allow(unsafe_code)]
mod stream;
mod transfer;
mod workers;

/// What the package's Python modules build on. It needs no lock of the interpreter's: a Python
/// without one (3.14t) stays without.
#[pyo3::pymodule(gil_used = false)]
mod _native {
    #[pymodule_export]
    use super::batch::{BatchReader, OpenFiles};
    #[pymodule_export]
    use super::buffer::{Buffer, LentMemory};
    #[pymodule_export]
    use super::completions::Completions;
    #[pymodule_export]
    use super::file::{Extent, File};
    #[pymodule_export]
    use super::kernels::{Attached, GpuArray, GpuRing};
    #[pymodule_export]
    use super::mount::Mount;
    #[pymodule_export]
    use super::pending::Pending;
    #[pymodule_export]
    use super::transfer::Transfer;

    #[pymodule_init]
    fn init(module: &pyo3::Bound<'_, pyo3::types::PyModule>) -> pyo3::PyResult<()> {
        pyo3::types::PyModuleMethods::add(module, "__version__", env!("CARGO_PKG_VERSION"))?;
        super::process::count_forks()
    }
}
