//! Which process this is, without asking the kernel in each call.

use pyo3::PyResult;
use pyo3::exceptions::PyOSError;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

/// How many forks this process is away from the one that loaded the package. What is of an
/// ancestor has a smaller number.
static FORKS: AtomicU32 = AtomicU32::new(0);

/// The number that tells this process from its ancestors.
pub fn id() -> u32 {
    FORKS.load(Relaxed)
}

/// Has forks counted from here on, by whatever they are made: `os.fork`, or fork(3) of a library.
///
/// # Errors
/// There is no memory.
pub fn count_forks() -> PyResult<()> {
    unsafe extern "C" fn forked() {
        FORKS.fetch_add(1, Relaxed);
    }
    // SAFETY: the function does what is allowed after a fork, and is never unloaded: Python keeps
    // its extensions.
    let code = unsafe { libc::pthread_atfork(None, None, Some(forked)) };
    if code == 0 { Ok(()) } else { Err(PyOSError::new_err((code, "pthread_atfork"))) }
}
